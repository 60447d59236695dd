"""Shared gradients: the same as those of the whole, whatever the number of threads."""

from __future__ import annotations

import pytest
import torch

from oppo.demo.parallel import Shares


def _loss(rows: torch.Tensor, model: torch.nn.Linear) -> torch.Tensor:
    return torch.as_tensor(model(rows)).square().sum()


def _gradient(shares: int, threads: int) -> tuple[float, torch.Tensor]:
    torch.manual_seed(0)
    model, rows = torch.nn.Linear(8, 4), torch.randn(12, 8)
    with Shares(model, shares=shares, threads=threads) as shared:
        parts = [lambda m, part=part: _loss(part, m) for part in rows.chunk(shares)]
        value = shared.backward(parts)
        assert model.weight.grad is not None
        return value, model.weight.grad.clone()


def test_the_shares_add_up_to_the_gradient_of_the_whole() -> None:
    whole, gradient = _gradient(shares=1, threads=1)
    value, shared = _gradient(shares=3, threads=2)
    assert value == pytest.approx(whole)
    torch.testing.assert_close(shared, gradient)


def test_threads_do_not_change_a_bit() -> None:
    one, two = _gradient(shares=3, threads=1), _gradient(shares=3, threads=2)
    assert one[0] == two[0]
    assert torch.equal(one[1], two[1])


def test_replicas_follow_the_optimizer() -> None:
    model, rows = torch.nn.Linear(2, 1), torch.ones(1, 2)
    with Shares(model, shares=2, threads=2) as shared:
        before = shared.backward([lambda m: _loss(rows, m)] * 2)
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        after = shared.backward([lambda m: _loss(rows, m)] * 2)
    assert after < before
    assert after == pytest.approx(2 * _loss(rows, model).item())


def test_a_share_without_a_loss_is_refused() -> None:
    with (
        Shares(torch.nn.Linear(2, 1), shares=2, threads=1) as shared,
        pytest.raises(ValueError, match="2 shares need as many losses, not 1"),
    ):
        shared.backward([lambda m: _loss(torch.ones(1, 2), m)])
