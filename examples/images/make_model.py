"""A tiny model that sees, and pictures of one colour each: ``python examples/images/make_model.py``.

Its weights are random. The tower stays so; the language model learns which of its features are which colour.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200)}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDE = 32


def right(completions: list[str], colour: list[str]) -> list[float]:
    """Return 1 for each completion that is the name of the colour."""
    return [float(said.split() == [name]) for said, name in zip(completions, colour, strict=True)]


def make(folder: Path, count: int = 60) -> None:
    """Write the model with its tokenizer and image processor, the pictures, and the file of prompts."""
    folder.mkdir(exist_ok=True)
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<image>", *COLOURS])}
    pad, end, image, *_ = words
    inner = Tokenizer(models.WordLevel(words, unk_token=pad))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad, eos_token=end)
    tokenizer.add_special_tokens({"additional_special_tokens": [image]})
    text = {**SIZES, "vocab_size": len(words), "max_position_embeddings": 64, "eos_token_id": 1, "pad_token_id": 0}
    tower = {**SIZES, "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": 8}
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_index=words[image])
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder / "model")
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    LlavaProcessor(pixels, tokenizer, 8, "default", num_additional_image_tokens=1).save_pretrained(folder / "model")
    dice, lines = np.random.default_rng(0), list[str]()
    for number, name in enumerate(dice.choice([*COLOURS], count).tolist()):
        noisy = dice.normal(COLOURS[name], 20, (SIDE, SIDE, 3)).clip(0, 255)
        Image.fromarray(noisy.astype(np.uint8)).save(folder / f"{number}.png")
        lines.append(json.dumps({"prompt": "<image>", "image": f"{number}.png", "colour": name}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    make(Path(__file__).parent / "data")
