"""The digest of a model's weights."""

from __future__ import annotations

import copy

import torch

from oppo.hf.weights import weights_digest


def test_a_digest_sees_one_bit_in_any_type() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(2, 2).to(dtype)
        before = weights_digest(model)
        assert weights_digest(copy.deepcopy(model)) == before
        with torch.no_grad():
            model.bias[0] = torch.nextafter(model.bias[0].float(), torch.tensor(9.0)) if dtype == torch.float32 else 9.0
        assert weights_digest(model) != before
