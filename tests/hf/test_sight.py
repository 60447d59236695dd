"""Models that see: a sequence read in pieces is one pass of transformers from pixels, whatever the family."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oppo.errors import ModelError
from oppo.events import Response
from oppo.hf.kv.reader import Incremental
from tests.hf.seeing import FAMILIES, PAD, TOLERANCE, from_pixels, ids_of, of_words, responses_of, seeing, showing


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("piece", [0, 1, 5])
def test_pieces_are_one_pass_from_pixels(name: str, piece: int) -> None:
    model, rows = seeing(name, dtype=torch.float64), responses_of(name)
    reader, ids, found = Incremental(model), [*map(ids_of, rows)], [list[Tensor]() for _ in rows]
    for row, response in enumerate(rows[:3]):
        reader.show(row, response.prompt.tokens, response.prompt.images)
    while left := [row for row, each in enumerate(ids) if reader.length(row) < len(each)]:
        pieces = [ids[row][reader.length(row) :][: _size(reader, row, rows[row], piece)] for row in left]
        if max(map(len, pieces)) == 1 and piece == 1:
            outputs = [*reader.step(left, torch.cat(pieces))[:, None]]
        else:
            outputs = reader.extend(left, pieces)
        for row, output in zip(left, outputs, strict=True):
            found[row].append(output)
    for response, outputs, each in zip(rows, found, ids, strict=True):
        assert _apart(torch.cat(outputs), from_pixels(model, response.prompt, each)) < TOLERANCE.get(name, 1e-12)
    assert _apart(torch.cat(found[0]), from_pixels(model, showing(name, ["d"], number=1), ids[0])) > 1e-3
    assert reader.eyes is not None
    assert reader.eyes.looks == 2  # a group is one look


def _size(reader: Incremental, row: int, response: Response, piece: int) -> int:
    at = reader.length(row)
    if piece == 5:
        return reader.cut(row, at, 5)
    return len(response.prompt.tokens) if at == 0 else piece or 3


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_beside_one_with_images_keep_their_bits_and_have_no_image_token(name: str) -> None:
    reader, shown = Incremental(seeing(name)), responses_of(name)[0]
    texts, images = list[Tensor](), list[Tensor]()
    for row in (3, 4):
        pieces = torch.from_numpy(of_words(40)).long().split(7)
        texts.append(torch.cat([reader.extend([row], [piece])[0] for piece in pieces]))
        reader.forget([7])
        reader.show(7, shown.prompt.tokens, shown.prompt.images)
        images += reader.extend([7], [ids_of(shown)])
    assert torch.equal(*texts)
    assert torch.equal(*images)
    assert reader.eyes is not None
    assert reader.eyes.looks == 1  # what is kept is shown again
    for row in (4, 7):
        with pytest.raises(ModelError, match=f"row {row} has 1 image token among"):
            reader.extend([row], [torch.tensor([4, PAD])])
