"""Models that see: a sequence read in pieces is one pass of transformers from pixels, whatever the family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from oppo.errors import ModelError
from oppo.events import Prompt
from oppo.hf.kv.reader import Incremental
from tests.hf.seeing import FAMILIES, PAD, from_pixels, of_words, prompts_of, seeing, showing

TOLERANCE = {"qwen3_5": 1e-3}


def _rows(name: str) -> dict[int, tuple[Prompt, Tensor]]:
    after = [of_words(14 + 3 * row, number=row) for row in range(4)]
    pairs = zip(prompts_of(name), after, strict=True)
    return {row: (prompt, torch.tensor([*prompt.tokens, *words]).long()) for row, (prompt, words) in enumerate(pairs)}


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("piece", [0, 1, 5])
def test_pieces_are_one_pass_from_pixels(name: str, piece: int) -> None:
    model = seeing(name, dtype=torch.float64)
    rows, reader = _rows(name), Incremental(model)
    for row, (prompt, _) in rows.items():
        if prompt.images:
            reader.show(row, prompt.tokens, prompt.images)
    found = {row: list[Tensor]() for row in rows}
    while left := [row for row, (_, ids) in rows.items() if reader.length(row) < len(ids)]:
        sizes = [_size(reader, row, rows[row][0], piece) for row in left]
        pieces = [rows[row][1][reader.length(row) :][:size] for row, size in zip(left, sizes, strict=True)]
        if max(map(len, pieces)) == 1 and piece == 1:
            outputs = [*reader.step(left, torch.cat(pieces))[:, None]]
        else:
            outputs = reader.extend(left, pieces)
        for row, output in zip(left, outputs, strict=True):
            found[row].append(output)
    for row, (prompt, ids) in rows.items():
        assert _apart(torch.cat(found[row]), from_pixels(model, prompt, ids)) < TOLERANCE.get(name, 1e-12)
    assert reader.eyes is not None
    assert reader.eyes.looks == 2  # a group is one look


def _size(reader: Incremental, row: int, prompt: Prompt, piece: int) -> int:
    at = reader.length(row)
    if piece == 5:
        return reader.cut(row, at, 5)
    return len(prompt.tokens) if at == 0 else piece or 3


@pytest.mark.parametrize("name", FAMILIES)
def test_another_image_gives_other_outputs(name: str) -> None:
    model = seeing(name)
    shown, other = showing(name, ["a"]), showing(name, ["d"])
    ids = torch.from_numpy(shown.tokens.astype(np.int64))
    outputs = []
    for prompt in (shown, other):
        reader = Incremental(model)
        reader.show(0, prompt.tokens, prompt.images)
        outputs.append(reader.extend([0], [ids])[0][-1])
    assert _apart(*outputs) > 1e-3


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_an_image_token_without_an_image_is_an_error(name: str) -> None:
    reader = Incremental(seeing(name))
    prompt = showing(name, ["a"])
    reader.show(0, prompt.tokens, prompt.images)
    reader.extend([0], [torch.from_numpy(prompt.tokens.astype(np.int64))])
    with pytest.raises(ModelError, match="row 0 has 1 image tokens"):
        reader.extend([0], [torch.tensor([4, PAD])])
    with pytest.raises(ModelError, match="row 1 has 1 image tokens"):
        reader.extend([1], [torch.tensor([4, PAD])])


@pytest.mark.parametrize("name", FAMILIES)
def test_text_beside_images_keeps_its_bits(name: str) -> None:
    model, found = seeing(name), []
    ids, prompt = torch.from_numpy(of_words(40).astype(np.int64)), showing(name, ["a"])
    for images in (False, True):
        reader = Incremental(model)
        if images:
            reader.show(7, prompt.tokens, prompt.images)
            reader.extend([7], [torch.from_numpy(prompt.tokens.astype(np.int64))])
        found.append(torch.cat([reader.extend([3], [piece])[0] for piece in ids.split(7)]))
    assert torch.equal(*found)


def test_a_row_that_is_forgotten_is_shown_again_from_what_is_kept() -> None:
    reader, prompt = Incremental(seeing("llava")), showing("llava", ["a"])
    ids, outputs = torch.from_numpy(prompt.tokens.astype(np.int64)), []
    for _ in range(2):
        reader.show(0, prompt.tokens, prompt.images)
        outputs.append(reader.extend([0], [ids])[0])
        reader.forget([0])
    assert torch.equal(*outputs)
    assert reader.eyes is not None
    assert reader.eyes.looks == 1
