"""Tiny random models that read images, and pixels for them without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from oppo.events import IntArray, Prompt, Response
from oppo.hf.model_parts import takes
from oppo.hf.processor import Processor
from oppo.hf.vision import let_see, pixels_of
from oppo.images import ImageRef
from tests.kit.responses import chunk

PAD = 90
TOLERANCE = {"qwen3_5": 1e-3}
_MIXED = ("sliding_attention", "full_attention", "sliding_attention")
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_HEADS = {"num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 2}
_IDS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 512}
TEXT = {**_WIDTHS, **_HEADS, **_IDS, "initializer_range": 0.2}
_LINEAR = {
    f"linear_{name}": size for name, size in (("key_head_dim", 8), ("value_head_dim", 8), ("num_value_heads", 4))
}
_LAYERS = ["linear_attention", "full_attention", "linear_attention"]
_SMALL = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 8}
_TOWER = {**_SMALL, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
_GRID = {**_SMALL, "depth": 2, "num_heads": 2, "out_hidden_size": 32}
_OWN = {"image_token_id": PAD, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
_LEVELS = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
_GLM = {"image_start_token_id": 92, "image_end_token_id": 93}
_PIXTRAL = {**_TOWER, "model_type": "pixtral", "image_size": 64, "head_dim": 8}
_LLAMA, _SQUARES = {"model_type": "llama"}, {"image_size": [32, 32], "patch_size": [8, 8]}
_LOCAL = {"sliding_window": 20, "layer_types": [*_MIXED]}
_TURNED, _LINEARS = {"rope_parameters": _ROPE}, {**_LINEAR, "linear_num_key_heads": 2, "layer_types": _LAYERS}

FAMILIES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], str]] = {
    "qwen2_5_vl": (_TURNED, {**_GRID, "window_size": 32, "fullatt_block_indexes": [1]}, _OWN, "grid"),
    "qwen3_vl": (_TURNED, {**_GRID, **_LEVELS}, _OWN, "grid"),
    "qwen3_5": (_LINEARS, {**_GRID, "num_position_embeddings": 64}, _OWN, "grid"),
    "glm4v": (_TURNED, {**_GRID, "image_size": 32}, {**_OWN, **_GLM}, "grid"),
    "gemma3": (_LOCAL, _TOWER, {"mm_tokens_per_image": 16, "image_token_index": PAD}, "square"),
    "mistral3": (
        *({"model_type": "mistral", "sliding_window": None}, _PIXTRAL),
        *({"image_token_index": PAD, "spatial_merge_size": 2}, "sizes"),
    ),
    "llava": (_LLAMA, {**_TOWER, "model_type": "clip_vision_model"}, {"image_token_index": PAD}, "square"),
    "internvl": ({"model_type": "qwen2"}, {**_TOWER, **_SQUARES}, {"image_token_id": PAD}, "shuffled"),
    "smolvlm": (_LLAMA, _TOWER, {"image_token_id": PAD}, "nested"),
    "idefics3": (_LLAMA, _TOWER, {"image_token_id": PAD}, "nested"),
}
"""Settings of the text and of the tower, the model's own, and what the tower takes."""

GRIDS, SIZES = ((1, 4, 6), (1, 8, 4), (1, 6, 4)), ((32, 48), (48, 16), (16, 32))


class Drawn(Processor):
    """Pixels of images that are drawn at random, by their names."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(kind)
        self.kind, self.dtype = kind, dtype

    def tokens(self, name: str) -> int:
        shape, pair = GRIDS[len(name) % 3], SIZES[len(name) % 3]
        whole = {"grid": shape[1] * shape[2] // 4, "sizes": pair[0] * pair[1] // 256, "square": 16}
        return whole.get(self.kind, 4)

    def pixels(self, images: Sequence[ImageRef]) -> dict[str, Tensor]:
        names = [image.sha256 for image in images]
        if self.kind == "grid":
            grids = torch.tensor([GRIDS[len(name) % 3] for name in names])
            patches = [self._drawn(name, int(grid.prod()), 384) for name, grid in zip(names, grids, strict=True)]
            return {"pixel_values": torch.cat(patches), "image_grid_thw": grids}
        side = 48 if self.kind == "sizes" else 32
        values = torch.stack([self._drawn(name, 3, side, side) for name in names])
        sizes = {"image_sizes": torch.tensor([SIZES[len(name) % 3] for name in names])} if self.kind == "sizes" else {}
        return {"pixel_values": values[None] if self.kind == "nested" else values, **sizes}

    def _drawn(self, name: str, *shape: int) -> Tensor:
        seeded = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * len(name))
        return torch.randn(*shape, generator=seeded, dtype=self.dtype)


def made(
    name: str, *, dtype: torch.dtype = torch.float32, ids: Mapping[str, int], wide: bool = False, **sizes: int
) -> PreTrainedModel:
    """Return a tiny model of a family; ``ids`` and ``sizes`` are in place of its own; ``wide``: heads as vLLM's are."""
    text, vision, own, _ = FAMILIES[name]
    if wide:
        turned = {"rope_parameters": {**_ROPE, "mrope_section": [16, 8, 8]}} if "rope_parameters" in text else {}
        text = {**text, "hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, **turned}
        vision = {**vision, **({"out_hidden_size": 128} if "out_hidden_size" in vision else {})}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        given: dict[str, Any] = {"text_config": {**TEXT, **text, **sizes}, "vision_config": dict(vision), **own, **ids}
        config = AutoConfig.for_model(name, **given)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
        for weight in model.parameters():  # some begin at zero
            weight.data += 0.1 * torch.randn_like(weight)
    return model


def seeing(name: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a tiny model of a family, whose images are drawn."""
    model = made(name, dtype=dtype, ids={})
    let_see(model, Drawn(FAMILIES[name][3], dtype))
    return model


def showing(family: str, names: Sequence[str], *, number: int = 0) -> Prompt:
    """Return a prompt of words and the images of these names."""
    drawn, random = Drawn(FAMILIES[family][3]), np.random.default_rng(number)
    tokens, images = [*random.integers(3, 80, 5)], list[ImageRef]()
    for name in names:
        images.append(ImageRef(name, f"/{name}.png", 32, 32, start=len(tokens), tokens=drawn.tokens(name)))
        tokens += [*[PAD] * drawn.tokens(name), *random.integers(3, 80, 4)]
    return Prompt(number, number, np.array(tokens, np.int32), group=number, images=tuple(images))


def of_words(length: int) -> IntArray:
    return np.random.default_rng((7, length)).integers(3, 80, length).astype(np.int32)


def responses_of(family: str) -> list[Response]:
    """Return two responses to a prompt with one image, one to a prompt with two, and one to text."""
    one, two, text = (showing(family, names, number=number) for number, names in enumerate((["a"], ["bb", "c"], []), 1))
    prompts = [Prompt(row, row, each.tokens, images=each.images) for row, each in enumerate((one, one, two, text))]
    return [Response.empty(each).then(chunk(row, 0, of_words(5 + 3 * row))) for row, each in enumerate(prompts)]


def ids_of(response: Response) -> Tensor:
    return torch.tensor([*response.prompt.tokens, *response.tokens]).long()


def from_pixels(model: PreTrainedModel, prompt: Prompt, ids: Tensor) -> Tensor:
    """Return the logits [n, V] of transformers' own pass over a sequence, from the pixels of its images."""
    kinds = (ids == PAD).int()[None]
    given: dict[str, Any] = {**pixels_of(model).pixels(prompt.images)} if prompt.images else {}
    given |= {each: kinds for each in ("mm_token_type_ids", "token_type_ids") if given and takes(model, each)}
    logits: Tensor = model(input_ids=ids[None], use_cache=False, **given).logits[0]
    return logits
