"""The losses against TRL's own lines, values and gradients, and the rule that parts add up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from oppo.algorithms.base import ClippedAlgorithm
from oppo.algorithms.group import GSPO
from oppo.errors import ConfigError
from oppo.events import Support
from oppo.losses import (
    ClippedLoss,
    Input,
    Inputs,
    SequenceLoss,
    SupportIndex,
    Whole,
    entropies,
    kl_losses,
    masked_mean,
    policy_losses,
    surrogate_losses,
    token_logprobs,
    value_loss,
)
from oppo.losses.terms import PolicyTerm
from oppo.returns import ImportanceCorrection, KLEstimator, kl_estimate
from oppo.training import Surrogate
from tests.test_returns import EVERY

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ppo.json").read_text(encoding="utf-8"))["loss"]
CLIP = 0.2
BAND = Surrogate(clip=CLIP)


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN[name])


def policy_loss(*tokens: Tensor, weights: Tensor | None = None, total: float | None = None) -> PolicyTerm:
    """Return the mean of the losses of tokens: log-probs, old ones, advantages and the mask of those that count."""
    logprobs, old, advantages, mask = tokens
    each = policy_losses(logprobs, old, advantages, mask, BAND, weights=weights)
    return each.term(masked_mean(each.loss, mask, total), mask, total or float(mask.sum()))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


MASK = golden("mask")
COUNT, SLOTS = int(MASK.sum()), MASK.numel()


def test_the_policy_loss_and_its_gradient_equal_trl() -> None:
    logprobs = golden("logprobs").requires_grad_()
    ours = policy_loss(logprobs, golden("old_logprobs"), golden("advantages"), MASK)
    ours.loss.backward()
    assert logprobs.grad is not None
    close(ours.loss, golden("pg_loss"))
    close(ours.clipfrac, golden("pg_clipfrac"))
    close(logprobs.grad, golden("logprobs_grad"))


def test_approxkl_and_ratio_equal_trl_once_its_padding_is_taken_out() -> None:
    ours = policy_loss(golden("logprobs"), golden("old_logprobs"), golden("advantages"), MASK)
    close(ours.approxkl, golden("approxkl") * SLOTS / COUNT)
    close(ours.ratio, (golden("ratio_mean") * SLOTS - (SLOTS - COUNT)) / COUNT)


def test_the_value_loss_and_its_gradient_equal_trl() -> None:
    values = golden("values").requires_grad_()
    ours = value_loss(values, golden("old_values"), golden("returns"), MASK, CLIP)
    (0.1 * ours.loss).backward()
    assert values.grad is not None
    close(ours.loss, golden("vf_loss"))
    close(ours.clipfrac, golden("vf_clipfrac"))
    close(values.grad, golden("values_grad"))


def test_token_logprobs_and_entropy_equal_trl() -> None:
    logits = golden("logits")
    close(token_logprobs(logits, golden("tokens")), golden("token_logprobs"))
    close(entropies(logits).mean(), golden("token_entropy").mean())


def test_the_temperature_divides_the_logits_and_zero_counts_as_one() -> None:
    logits, tokens = golden("logits"), golden("tokens")
    close(token_logprobs(logits, tokens, 0.5), token_logprobs(2 * logits, tokens))
    close(token_logprobs(logits, tokens, 0.0), token_logprobs(logits, tokens))
    close(entropies(logits, 0.5), entropies(2 * logits))


@pytest.mark.parametrize("counts", [[3, 0, -2, 1, 4], [3, 1, 2], [-1, 0, -3], [0, 2]])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_over_a_support_log_probs_entropy_and_gradients_are_those_of_masked_logits(
    counts: list[int], temperature: float
) -> None:
    dice = np.random.default_rng(len(counts))
    ids = [dice.permutation(12)[: abs(count)].astype(np.int32) for count in counts]
    support = SupportIndex.of(Support(np.concatenate(ids), np.array(counts, np.int32)), torch.device("cpu"))
    outside = torch.zeros(len(counts), 12, dtype=torch.bool)
    for row, count, own in zip(outside, counts, ids, strict=True):
        row[:] = count > 0
        row[torch.from_numpy(own).long()] = count < 0
    tokens = (~outside).float().argmax(-1)
    values = torch.randn(len(counts), 12, generator=torch.Generator().manual_seed(0)) * 5
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    masked = (theirs / temperature).masked_fill(outside, -torch.inf).log_softmax(-1)
    expected = masked.gather(1, tokens[:, None])[:, 0]
    spread = -(masked.exp() * masked.masked_fill(outside, 0)).sum(-1).mean()
    logprobs = token_logprobs(ours, tokens, temperature, support)
    close(logprobs, expected)
    mean = entropies(ours, temperature, support).mean()
    close(mean, spread)
    (logprobs.sum() + mean).backward()
    (expected.sum() + spread).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    close(ours.grad, theirs.grad)


def test_a_support_of_everything_is_none() -> None:
    assert SupportIndex.of(Support(), torch.device("cpu")) is None
    assert SupportIndex.of(Support(counts=np.zeros(3, np.int32)), torch.device("cpu")) is None


def test_bfloat16_logits_are_read_in_float32() -> None:
    logits = golden("logits").bfloat16()
    ours = token_logprobs(logits, golden("tokens"))
    assert ours.dtype == torch.float32
    close(ours, token_logprobs(logits.float(), golden("tokens")))


def test_parts_of_a_minibatch_add_up_to_the_whole() -> None:
    new, old, advantages = golden("logprobs"), golden("old_logprobs"), golden("advantages")
    whole = policy_loss(new, old, advantages, MASK)
    parts = [
        policy_loss(new[rows], old[rows], advantages[rows], MASK[rows], total=COUNT)
        for rows in (slice(0, 3), slice(3, 6))
    ]
    for name in whole._fields:
        close(torch.stack([getattr(part, name) for part in parts]).sum(), getattr(whole, name))


def test_masked_out_nans_reach_neither_loss_nor_gradient() -> None:
    mask = torch.tensor([True, False])
    logprobs = torch.tensor([-1.0, float("nan")], requires_grad=True)
    values = torch.tensor([0.5, float("inf")], requires_grad=True)
    zeros = torch.zeros(2)
    policy = policy_loss(logprobs, torch.tensor([-1.0, float("nan")]), torch.ones(2), mask).loss
    value = value_loss(values, zeros, zeros, mask, CLIP).loss
    (policy + value).backward()
    assert policy.item() == -1.0
    assert logprobs.grad is not None
    assert values.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert values.grad.tolist() == [0.5, 0.0]


def test_a_mean_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a mean over no token is undefined"):
        masked_mean(torch.ones(2), torch.zeros(2, dtype=torch.bool))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_in_the_loss_is_the_one_in_the_reward(estimator: KLEstimator) -> None:
    logprobs, reference = golden("logprobs")[MASK], golden("old_logprobs")[MASK]
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    theirs = kl_estimate(logprobs.numpy(), reference.numpy(), estimator).mean()
    close(kl_losses(logprobs, reference, mask, estimator).mean(), torch.tensor(theirs))


def test_only_k2_has_the_gradient_of_the_kl_on_tokens_of_the_policy() -> None:
    logits = torch.tensor([0.3, -0.7, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.3, 0.0], dtype=torch.float64).log_softmax(-1)
    chosen = logits.log_softmax(-1)
    mask = torch.ones(4, dtype=torch.bool)

    def gradient(loss: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        return found

    def expected(estimator: KLEstimator) -> Tensor:
        each = [
            kl_losses(chosen[at : at + 1], reference[at : at + 1], mask[:1], estimator).mean()
            * chosen[at].exp().detach()
            for at in range(4)
        ]
        return gradient(torch.stack(each).sum())

    true = gradient((chosen.exp() * (chosen - reference)).sum())
    torch.testing.assert_close(expected("k2"), true)
    torch.testing.assert_close(expected("k1"), torch.zeros_like(true), rtol=0, atol=1e-12)
    assert not torch.allclose(expected("k3"), true, rtol=1e-2)


def test_values_without_a_clip_have_the_plain_squared_error() -> None:
    values = golden("values").requires_grad_()
    loss = value_loss(values, golden("old_values"), golden("returns"), MASK, float("inf"))
    plain = 0.5 * masked_mean((values - golden("returns")).square(), MASK)
    close(loss.loss, plain)
    assert loss.clipfrac == 0
    close(torch.autograd.grad(loss.loss, values)[0], torch.autograd.grad(plain, values)[0])


def test_a_token_of_weight_zero_leaves_the_others_gradients_as_they_are() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    old = torch.tensor([-1.1, -900.0])  # its ratio is infinite
    weights = torch.tensor([1.0, 0.0])
    policy = policy_loss(logprobs, old, torch.ones(2), torch.ones(2, dtype=torch.bool), weights=weights)
    policy.loss.backward()
    assert logprobs.grad is not None
    close(logprobs.grad, torch.tensor([-0.5 * math.exp(0.1), 0.0]))
    assert policy.ratio.isfinite()


def test_clipped_tokens_are_those_of_the_clipped_fraction() -> None:
    new, old, advantages = golden("logprobs"), golden("old_logprobs"), golden("advantages")
    beyond = policy_losses(new, old, advantages, MASK, BAND).clipped
    close(beyond[MASK].float().mean(), policy_loss(new, old, advantages, MASK).clipfrac)
    assert not beyond[~MASK].any()


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("logits", "temperature"),
    [
        ([0.0, 1.0, -torch.inf], 1.0),
        ([0.0, 1.0, LOWEST], 0.7),
        ([0.0, 1.0, LOWEST], 1.0),
        ([-torch.inf, 0.5, -torch.inf], 2.0),
        ([0.0, 300.0, -torch.inf], 1.0),
    ],
)
@pytest.mark.parametrize("counts", [[0], [3], [-1]])
def test_a_token_of_probability_0_adds_nothing_to_the_entropy_nor_to_its_gradient(
    logits: list[float], temperature: float, counts: list[int]
) -> None:
    """With a weight above 1, as of an entropy coefficient, by which 0 times the lowest float32 would overflow too."""
    ids = np.arange(3)[: abs(counts[0])].astype(np.int32) if counts[0] > 0 else np.full(-counts[0], 0, np.int32)
    support = SupportIndex.of(Support(ids, np.array(counts, np.int32)), torch.device("cpu"))
    kept = [each for token, each in enumerate(logits) if each > LOWEST and not (counts[0] < 0 and token == 0)]
    ours, theirs = torch.tensor([logits], requires_grad=True), torch.tensor([kept], requires_grad=True)
    expected = torch.distributions.Categorical(logits=theirs / temperature).entropy()
    close(entropies(ours, temperature, support), expected)
    (3 * entropies(ours, temperature, support)).sum().backward()
    (3 * expected).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    reached = [token for token, each in enumerate(logits) if each > LOWEST and not (counts[0] < 0 and token == 0)]
    close(ours.grad[:, reached], theirs.grad)
    assert not ours.grad[:, [token for token in range(3) if token not in reached]].any()


def test_what_a_critic_says_of_a_tool_s_tokens_reaches_no_loss() -> None:
    values, old = golden("values").requires_grad_(), golden("old_values").masked_fill(~MASK, torch.nan)
    term = value_loss(values, old, golden("returns").masked_fill(~MASK, torch.inf), MASK, CLIP)
    term.loss.backward()
    close(term.loss, golden("vf_loss"))
    assert values.grad is not None
    assert (values.grad[~MASK] == 0).all()
    assert values.grad.isfinite().all()


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
    plain: Plain, correction: ImportanceCorrection, tokens: Sequence[Sequence[float]], *, whole: bool
) -> tuple[float, list[float]]:
    """Return the loss of one response and its derivatives, by the formulas of :class:`ImportanceCorrection`.

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
    kind: Any, correction: ImportanceCorrection
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
