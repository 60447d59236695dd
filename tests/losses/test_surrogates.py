"""Each surrogate against its formula in plain float64, value and gradient, and a peer's; and what it does not read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor

from oppo.algorithms.base import ClippedAlgorithm
from oppo.algorithms.group import GSPO
from oppo.errors import ConfigError
from oppo.losses import ClippedLoss, Input, Inputs, SequenceLoss, Whole, policy_losses, surrogate_losses
from oppo.training import Surrogate

LOW, HIGH, DUAL, GATES = 0.2, 0.3, 2.5, (1.0, 1.05)

Plain: TypeAlias = Callable[[float, float, float], tuple[float, float, bool]]
"""From new and old log-prob and advantage: loss, its derivative by the new log-prob, and whether it is clipped."""


def clip(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    ratio = math.exp(new - old)
    beyond = ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW
    if not beyond:
        return -advantage * ratio, -advantage * ratio, False
    return -advantage * (1 + HIGH if advantage > 0 else 1 - LOW), 0.0, True


def dual_clip(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    if advantage < 0 and math.exp(new - old) > DUAL:
        return -advantage * DUAL, 0.0, True
    return clip(new, old, advantage)


def cispo(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    ratio = math.exp(new - old)
    weight = min(max(ratio, 1 - LOW), 1 + HIGH)
    return -advantage * weight * new, -advantage * weight, weight != ratio


def sapo(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    ratio, tau = math.exp(new - old), GATES[advantage <= 0]
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio, False


def dppo_tv(new: float, old: float, advantage: float) -> tuple[float, float, bool]:
    moved, ratio = math.exp(new) - math.exp(old), math.exp(new - old)
    if (advantage > 0 and moved > HIGH) or (advantage < 0 and moved < -LOW):
        return 0.0, 0.0, True
    return -advantage * ratio, -advantage * ratio, False


KINDS: Final[dict[Any, tuple[Plain, dict[str, Any]]]] = {
    "clip": (clip, {"clip": LOW, "clip_high": HIGH}),
    "dual_clip": (dual_clip, {"clip": LOW, "clip_high": HIGH, "dual_clip": DUAL}),
    "cispo": (cispo, {"clip": LOW, "clip_high": HIGH}),
    "sapo": (sapo, {"gates": GATES}),
    "dppo_tv": (dppo_tv, {"clip": LOW, "clip_high": HIGH}),
}


def tokens(count: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    probabilities = torch.rand(2, count, generator=random, dtype=torch.float64).clamp(0.01, 0.99)
    new, old = probabilities.log()
    return new, old, torch.randn(count, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_surrogate_and_its_gradient_are_those_of_its_formula(kind: Any) -> None:
    plain, options = KINDS[kind]
    new, old, advantages = tokens()
    new.requires_grad_()
    each = policy_losses(new, old, advantages, torch.ones(len(new), dtype=torch.bool), Surrogate(kind=kind, **options))
    each.loss.sum().backward()
    expected = [plain(*values) for values in zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)]
    for got, wanted in zip((each.loss, new.grad), zip(*expected, strict=True), strict=False):
        assert got is not None
        torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert each.clipped.tolist() == [clipped for _, _, clipped in expected]
    assert each.clipped.any() == (kind != "sapo")


OF_VERL: Final[dict[Any, tuple[float, float]]] = {
    "clip": (357.9982048289373, 10041.138768070992),
    "dual_clip": (39.275233334924636, 270.9164342673358),
    "cispo": (17.41018089118241, 463.4288131895854),
    "sapo": (23.490091299911526, 357.53606468849364),
    "dppo_tv": (329.33041981236784, 10162.354915555508),
}
"""Sum and sum of squares of the gradients that verl 0.9.1's functions of ``core_algos`` have for these tokens.

``compute_policy_loss_vanilla`` is both the first, without a bound on ratios, and the second.
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_that_of_the_peer_s_function(kind: Any) -> None:
    new, old, advantages = tokens()
    new.requires_grad_()
    surrogate = Surrogate(kind=kind, **KINDS[kind][1])
    policy_losses(new, old, advantages, torch.ones(len(new), dtype=torch.bool), surrogate).loss.sum().backward()
    assert new.grad is not None
    assert (float(new.grad.sum()), float(new.grad.square().sum())) == pytest.approx(OF_VERL[kind], rel=1e-12)


def test_defaults_are_those_of_the_papers() -> None:
    new, old, advantages = tokens()
    for kind, options in (("sapo", {"gates": GATES}), ("dual_clip", {"clip": 0.2, "dual_clip": 3.0})):
        bare, given = Surrogate(kind=kind), Surrogate(kind=kind, **options)  # type: ignore[arg-type]
        for one, other in zip(
            *(surrogate_losses(each, new - old, old, advantages) for each in (bare, given)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_minibatch_add_up_whatever_the_surrogate(kind: Any) -> None:
    loss, (new, old, advantages) = ClippedLoss(surrogate=kind, aggregation="response_sums"), tokens(60)
    rows = torch.arange(60) // 10
    whole = Whole(tokens=60, rows=6, groups=6, cap=50)

    def value(part: slice) -> Tensor:
        groups = rows[part].unique()
        given: dict[Input, Tensor] = {"logprobs": new[part], "behaviour": old[part], "entropies": old[part]}
        given["advantages"] = advantages[part]
        mask = torch.ones(len(groups) * 10, dtype=torch.bool)
        return loss(Inputs(mask, rows[part] - int(groups[0]), groups, whole, given)).loss

    torch.testing.assert_close(value(slice(0, 20)) + value(slice(20, 60)), value(slice(0, 60)))
    each = policy_losses(new, old, advantages, torch.ones(60, dtype=torch.bool), Surrogate.of(loss)).loss
    torch.testing.assert_close(value(slice(0, 60)), each.sum() / 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 3.0}, r"surrogate = 'clip' does not read dual_clip: leave it out"),
        ({"surrogate": "sapo", "clip": 0.3}, r"surrogate = 'sapo' does not read clip: leave it out"),
        ({"surrogate": "cispo", "gates": (1.0, 2.0)}, r"surrogate = 'cispo' does not read gates"),
        ({"surrogate": "dual_clip", "dual_clip": 0.5}, r"dual_clip bounds ratios above 1: .* got 0\.5"),
        ({"surrogate": "sapo", "gates": (1.0, 0.0)}, r"gates"),
        ({"surrogate": "clipped"}, r"surrogate.*'clipped'"),
    ],
)
def test_what_a_surrogate_does_not_read_is_refused(options: dict[str, Any], message: str) -> None:
    for kind in (ClippedLoss, ClippedAlgorithm):
        with pytest.raises(ConfigError, match=message):
            kind(**options)


def test_a_ratio_of_responses_has_the_clip_only() -> None:
    for kind in (SequenceLoss, GSPO):
        with pytest.raises(ConfigError, match=r"surrogate.*'clip'.*'sapo'"):
            kind(surrogate="sapo")  # type: ignore[arg-type]
