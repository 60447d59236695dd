"""Checkpoints of tiny models that read images, with a tokenizer of bytes and an image processor; and pictures."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from tests.hf.seeing import FAMILIES, made
from tests.hf.spot_tokenizers import byte_tokenizer

TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A short chat template with parts; ``IMAGE`` stands for what the family writes of an image."""

NAMED: Final = {
    "image_token": "<|pad|>",
    "video_token": "<|video|>",
    "boi_token": "<|begin|>",
    "eoi_token": "<|end_of_image|>",
    "start_image_token": "<|begin|>",
    "end_image_token": "<|end_of_image|>",
    "context_image_token": "<|pad|>",
}
WRITTEN: Final = ("<image>", "<fake_token_around_image>", "<end_of_utterance>")
"""Tokens that the processor of Idefics 3 has by itself."""
SPECIAL: Final = ("<|im_start|>", "<|im_end|>", *dict.fromkeys(NAMED.values()))
VOCABULARY: Final = 260 + len(SPECIAL)

_GRID: Final = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 2304}
_SIDES: Final = {"height": 32, "width": 32}
_CROP: Final = {"size": {"shortest_edge": 32}, "crop_size": _SIDES}
_CLIP: Final = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_TILES: Final = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
PROCESSORS: Final[Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any], str]]] = {
    "qwen2_5_vl": ("Qwen2VLImageProcessor", _GRID, {}, "<|begin|><|pad|><|end_of_image|>"),
    "qwen3_vl": ("Qwen2VLImageProcessor", _GRID, {}, "<|begin|><|pad|><|end_of_image|>"),
    "gemma3": ("Gemma3ImageProcessor", {"size": _SIDES}, {"image_seq_length": 16}, "<|begin|>"),
    "llava": ("CLIPImageProcessor", _CROP, _CLIP, "<|pad|>"),
    "idefics3": ("Idefics3ImageProcessor", _TILES, {"image_seq_len": 4}, "<image>"),
}
"""The image processor of a family: its class, its settings, those of the whole, and what a template writes."""


def checkpoint(folder: Path, name: str, *, wide: bool = False) -> Path:
    """Write a tiny model of a family with all that belongs to it, and return its directory; ``wide`` as for vLLM."""
    path = folder / name
    image, more = PROCESSORS[name][3], WRITTEN if name == "idefics3" else ()
    tokenizer = byte_tokenizer(TEMPLATE.replace("IMAGE", image), special=(*SPECIAL, *more))
    number: Callable[[str], Any] = tokenizer.inner.convert_tokens_to_ids
    names = {90: more[0] if more else "<|pad|>", 91: "<|video|>", 92: "<|begin|>", 93: "<|end_of_image|>"}
    ids = {key: number(names[value]) for key, value in FAMILIES[name][2].items() if value in names}
    size = VOCABULARY + len(more)
    made(name, ids=ids, wide=wide, vocab_size=size, max_position_embeddings=1024).save_pretrained(path)
    tokenizer.save(path)
    return equipped(path, name)


def equipped(path: Path, name: str) -> Path:
    """Write the image processor of a family beside a model and its tokenizer, and return their directory."""
    kind, settings, whole, _ = PROCESSORS[name]
    written = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**written, "extra_special_tokens": NAMED}))
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **settings}))
    (path / "processor_config.json").write_text(json.dumps(whole))
    return path


def picture(number: int, width: int = 48, height: int = 32) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8))


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, format="PNG")
    return buffer.getvalue()


def uri(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(number)).decode()}"
