"""Each surrogate against its formula in plain float64, value and gradient, and a peer's; and what it does not read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor

from oppo.algorithms.base import ClippedAlgorithm
from oppo.algorithms.group import GSPO
from oppo.errors import ConfigError
from oppo.losses import ClippedLoss, Input, Inputs, SequenceLoss, Whole, policy_losses, surrogate_losses
from oppo.returns import Correction
from oppo.training import Surrogate
from tests.test_correction import EVERY

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


ROWS: Final = ((1, 0.02), (2, 0.4), (5, 0.05), (9, 0.3), (4, 1.5), (3, 0.1))
"""Tokens of some responses, and how far their proximal log-probs lie from the behaviour's."""


def stale() -> tuple[Tensor, dict[Input, Tensor], Tensor]:
    """Return the row of each token, the inputs of a loss, float64, and the mask, which leaves some tokens out."""
    random, lengths = torch.Generator().manual_seed(3), torch.tensor([length for length, _ in ROWS])
    rows, count = torch.arange(len(ROWS)).repeat_interleave(lengths), int(lengths.sum())
    behaviour, moved, far, advantages = torch.randn(4, count, generator=random, dtype=torch.float64)
    proximal = behaviour - 3 + far * torch.tensor([spread for _, spread in ROWS])[rows]
    given = {"behaviour": behaviour - 3, "proximal": proximal, "logprobs": proximal + 0.3 * moved}
    mask = torch.arange(count) % 7 != 6
    return rows, {**given, "advantages": advantages, "entropies": advantages}, mask  # type: ignore[dict-item]


def corrected(
    plain: Plain, correction: Correction, tokens: Sequence[Sequence[float]], *, whole: bool
) -> tuple[float, list[float]]:
    """Return the loss of one response and its derivatives, by the formulas of :class:`Correction`.

    Of each token there are behaviour, proximal and current log-prob and the advantage; ``whole``: the ratio is GSPO's.
    """
    count, logs = len(tokens), [proximal - behaviour for behaviour, proximal, _, _ in tokens]
    mean = math.exp(sum(logs) / count)
    k3 = sum(math.exp(log) - 1 - log for log in logs) / count
    low, high = correction.band
    terms = []
    for (behaviour, proximal, current, advantage), log in zip(tokens, logs, strict=True):
        m = {"token": math.exp(log), "sequence": mean, "product": math.exp(sum(logs))}[correction.level]
        within = low <= m <= high
        held = mean if whole or correction.level == "sequence" else math.exp(log)
        weight = {"none": held, "truncated": min(m, correction.cap), "mask": m if within else 0.0}[correction.weight]
        if correction.ratio_base == "behaviour":
            weight /= held
        elif correction.weight == "none":
            weight = 1.0
        if correction.k3 is not None and k3 > correction.k3:
            weight = 0.0
        base = behaviour if correction.ratio_base == "behaviour" else proximal
        terms.append((weight, current, base, advantage))
    if whole:
        ratio = sum(current - base for _, current, base, _ in terms) / count
        loss, derivative, _ = plain(ratio, 0.0, sum(advantage for *_, advantage in terms) / count)
        return terms[0][0] * loss, [terms[0][0] * derivative / count] * count
    found = [(weight, *plain(*values)) for weight, *values in terms]
    return sum(weight * loss for weight, loss, *_ in found), [weight * slope for weight, _, slope, _ in found]


REFUSED: Final = [("gspo", each) for each in EVERY if each.level == "token" and each.weight != "none"]


@pytest.mark.parametrize(
    ("kind", "correction"), [each for each in product([*KINDS, "gspo"], EVERY) if each not in REFUSED], ids=str
)
def test_a_loss_of_stale_tokens_is_that_of_the_formulas_whatever_corrects_them(
    kind: Any, correction: Correction
) -> None:
    plain, options = KINDS.get(kind, KINDS["clip"])
    loss = (
        SequenceLoss(**options, correction=correction)
        if kind == "gspo"
        else ClippedLoss(surrogate=kind, **options, correction=correction, aggregation="response_sums")
    )
    rows, given, mask = stale()
    given["logprobs"].requires_grad_()
    size = len(ROWS)
    found = loss(Inputs(mask, rows, torch.arange(size), Whole(float(mask.sum()), size, size, 9), given))
    found.loss.backward()
    total, slopes = 0.0, torch.zeros(len(rows), dtype=torch.float64)
    columns = torch.stack([given[name].detach() for name in ("behaviour", "proximal", "logprobs", "advantages")])
    for row in range(size):
        at = mask & (rows == row)
        value, slope = corrected(plain, correction, columns[:, at].T.tolist(), whole=kind == "gspo")
        total, slopes[at] = total + value / size, torch.tensor(slope, dtype=torch.float64) / size
    assert given["logprobs"].grad is not None
    torch.testing.assert_close(found.loss.detach(), torch.tensor(total, dtype=torch.float64), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(given["logprobs"].grad, slopes, rtol=1e-6, atol=1e-7)
    assert slopes.any()


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
