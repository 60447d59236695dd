"""The losses of algorithms that compare responses, against TRL's GRPO, RLOO and online DPO: values and gradients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from oppo.events import Batch, Finish, FinishReason, Prompt, Response
from oppo.hf.train.packing import pack
from oppo.losses import ClippedLoss, Inputs, Loss, LossValue, PairwiseLoss, SequenceLoss, Whole
from oppo.returns import AdaptiveKL, GroupAdvantage, ScoreShaping, group_advantages, kl_estimate
from oppo.stages import GAE, GroupRelative, ScoredRollout
from oppo.stages.advantage import AdaptiveObjective
from oppo.training import Aggregation
from tests.kit.known import known

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "groups.json").read_text(encoding="utf-8"))
SAMPLES: int = GOLDEN["samples"]
LENGTHS = torch.tensor(GOLDEN["lengths"])
ROWS = len(LENGTHS)
MASK = torch.arange(len(GOLDEN["logprobs"][0])) < LENGTHS[:, None]
LOSS_TYPES: dict[str, Aggregation] = {
    "grpo": "responses",
    "dr_grpo": "constant",
    "dapo": "tokens",
    "luspo": "constant",
}
"""TRL's names of the aggregations; LUSPO's sums are not divided by the length cap."""


def flat(name: str) -> Tensor:
    """Return a column of the golden responses without its padding: float32 [T]."""
    return torch.tensor(GOLDEN[name])[MASK]


def close(ours: Tensor | float, theirs: Tensor | float) -> None:
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-5, atol=1e-6)


def evaluated(loss: Loss, *, rows: list[int], groups: list[int], **columns: Tensor) -> tuple[LossValue, Tensor]:
    """Return the loss of the golden responses, in the order of ``rows``, and its gradient, padded as theirs."""
    order = torch.cat([torch.arange(ROWS).repeat_interleave(LENGTHS).eq(row).nonzero()[:, 0] for row in rows])
    logprobs = flat("logprobs").requires_grad_()
    tokens = {"logprobs": logprobs, "entropies": torch.zeros_like(logprobs), "reference": flat("reference"), **columns}
    given: Any = {name: column if name == "scores" else column[order] for name, column in tokens.items()}
    asked = loss.reads | loss.measures
    inputs = Inputs(
        mask=torch.ones(len(order), dtype=torch.bool),
        rows=torch.arange(ROWS).repeat_interleave(LENGTHS[rows]),
        groups=torch.tensor(groups),
        whole=Whole(float(len(order)), float(ROWS), float(len(set(groups))), GOLDEN["cap"]),
        given={name: column for name, column in given.items() if name in asked},
    )
    result = loss(inputs)
    result.loss.backward()
    gradient = torch.zeros(MASK.shape)
    assert logprobs.grad is not None
    gradient[MASK] = logprobs.grad
    return result, gradient


def by_group(loss: Loss, advantages: str, old: Tensor) -> tuple[LossValue, Tensor]:
    """Return the loss of the golden groups, and its gradient."""
    each = torch.tensor(GOLDEN["advantages"][advantages]).repeat_interleave(LENGTHS)
    groups = [row // SAMPLES for row in range(ROWS)]
    return evaluated(loss, rows=list(range(ROWS)), groups=groups, behaviour=old, advantages=each)


@pytest.mark.parametrize(
    "case", GOLDEN["grpo"], ids=lambda case: f"{case['loss_type']}-of-a-{case['level']}-kl-{case['beta']}"
)
def test_value_gradient_and_metrics_equal_those_of_grpo(case: dict[str, Any]) -> None:
    low, high = GOLDEN["clip"][case["level"]]
    kind = SequenceLoss if case["level"] == "sequence" else ClippedLoss
    loss = kind(clip=low, clip_high=high, kl=case["beta"], kl_estimator="k3", aggregation=LOSS_TYPES[case["loss_type"]])
    ours, gradient = by_group(loss, "group", flat("old_logprobs"))
    factor = GOLDEN["cap"] if case["loss_type"] == "luspo" else 1
    close(factor * ours.loss, case["loss"])
    close(factor * gradient, torch.tensor(case["gradient"]))
    close(ours.measured["policy/clipfrac_avg"], case["clipped"])
    if case["beta"]:
        close(ours.measured["policy/kl_avg"], case["kl"])


def test_the_defaults_of_the_losses_are_those_of_their_papers() -> None:
    assert (ClippedLoss().aggregation, SequenceLoss().aggregation) == ("tokens", "responses")


def test_the_gradient_of_rloo_on_responses_of_the_current_weights_is_that_of_trl_but_for_the_length_cap() -> None:
    """TRL takes a response as one action, whose log-prob is the sum of its tokens'."""
    current, _ = GOLDEN["rloo"]
    assert current["written_by"] == "current"
    _, gradient = by_group(ClippedLoss(aggregation="constant"), "leave_one_out", flat("logprobs").detach())
    close(gradient * GOLDEN["cap"], torch.tensor(current["gradient"]))
    assert gradient.abs().max() > 1e-3


def test_the_clip_of_rloo_is_that_of_a_token_here_and_that_of_a_response_in_trl() -> None:
    low, high = GOLDEN["clip"]["token"]
    _, old = GOLDEN["rloo"]
    ours, gradient = by_group(
        ClippedLoss(clip=low, clip_high=high, aggregation="constant"), "leave_one_out", flat("old_logprobs")
    )
    assert ours.measured["policy/clipfrac_avg"] < old["clipped"], "a product of ratios leaves the band sooner"
    assert not torch.allclose(gradient * GOLDEN["cap"], torch.tensor(old["gradient"]), rtol=1e-2)


def test_the_loss_of_pairs_and_its_gradient_equal_online_dpo() -> None:
    """Its first half holds a response to each prompt, its second half another to each."""
    rows = [row for pair in range(ROWS // 2) for row in (pair, pair + ROWS // 2)]
    groups = [pair for pair in range(ROWS // 2) for _ in range(2)]
    scores = torch.tensor(GOLDEN["scores"])[rows]
    ours, gradient = evaluated(PairwiseLoss(beta=GOLDEN["beta"]), rows=rows, groups=groups, scores=scores)
    close(ours.loss, GOLDEN["dpo"]["loss"])
    close(gradient, torch.tensor(GOLDEN["dpo"]["gradient"]))
    close(ours.measured["policy/margin_avg"], float(np.mean(GOLDEN["dpo"]["margins"])))


@pytest.mark.parametrize(
    ("estimator", "theirs", "kl"),
    [
        ("standardised", "group", 0.0),
        ("centred", "none", 0.0),
        ("leave_one_out", "leave_one_out", 0.0),
        ("leave_one_out", "leave_one_out_kl", GOLDEN["beta"]),
    ],
)
def test_the_advantages_in_a_group_equal_those_of_grpo_and_rloo(
    estimator: GroupAdvantage, theirs: str, kl: float
) -> None:
    lengths = np.split(np.arange(int(LENGTHS.sum())), np.cumsum(GOLDEN["lengths"])[:-1])
    each = kl_estimate(flat("old_logprobs").numpy(), flat("reference").numpy(), "k1")
    divergence = np.array([each[row].sum() for row in lengths], np.float32)
    worth = np.array(GOLDEN["scores"], np.float32) - np.float32(kl) * divergence
    ours = [group_advantages(group, estimator) for group in worth.reshape(-1, SAMPLES)]
    close(torch.tensor(np.concatenate(ours)), torch.tensor(GOLDEN["advantages"][theirs]))


SHAPING = ScoreShaping(norm=True, missing_eos_penalty=0.5)
TURNS = 4


@dataclass(frozen=True)
class Agent:
    """What an agent said: the tokens of each turn, and which of its conversations each turn is a part of."""

    score: float
    turns: tuple[int, ...]
    talks: tuple[int, ...]
    capped: bool

    def conversations(self, *, split: bool) -> Mapping[int, list[int]]:
        """Return the turns of each conversation, by its branch; the first has the first turn."""
        found = dict[int, list[int]]()
        for turn in range(len(self.turns)):
            found.setdefault(self.talks[turn] if split and turn else 0, []).append(turn)
        return found


AGENTS = st.builds(
    Agent,
    st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
    st.lists(st.integers(1, 4), min_size=1, max_size=TURNS).map(tuple),
    st.tuples(*[st.integers(0, 3)] * TURNS),
    st.booleans(),
)
GROUPS = st.integers(2, 3).flatmap(
    lambda samples: st.lists(st.lists(AGENTS, min_size=samples, max_size=samples), min_size=1, max_size=3)
)


def number(admission: int, sample: int, turn: int, at: int) -> int:
    return ((admission * 10 + sample) * 10 + turn) * 10 + at


def of_token(token: int, what: int) -> float:
    return float(np.random.default_rng((token, what)).normal())


def scored(groups: Sequence[Sequence[Agent]], *, split: bool) -> list[ScoredRollout]:
    """Return the conversations of all agents; before each turn but the first stands a token that was not sampled."""
    found = []
    for admission, group in enumerate(groups):
        for sample, agent in enumerate(group):
            for branch, turns in agent.conversations(split=split).items():
                prompt = Prompt(0, admission, np.zeros(2, np.int32), sample, branch=branch).numbered(len(group))
                ids = [number(admission, sample, turn, at) for turn in turns for at in range(-1, agent.turns[turn])][1:]
                sampled = np.array([at >= 0 for turn in turns for at in range(-1, agent.turns[turn])][1:])
                tokens = np.where(sampled, ids, 0).astype(np.int32)
                logprobs, reference = (
                    np.where(sampled, [0.1 * of_token(each, what) - 1 for each in ids], 0).astype(np.float32)
                    for what in range(2)
                )
                response = Response(prompt, tokens, logprobs, np.zeros_like(tokens), sampled)
                ended: FinishReason = "length" if agent.capped and len(agent.turns) - 1 in turns else "eos"
                found.append(ScoredRollout(Finish(prompt.rollout, response, ended), reference, agent.score))
    return sorted(found, key=lambda each: each.rollout)


def by_token(batch: Batch, column: Any) -> list[float]:
    """Return the items of a column for the sampled tokens, by their ids, which no two of them share."""
    return [float(column[at]) for at in sorted(np.flatnonzero(batch.sampled), key=lambda at: int(batch.tokens[at]))]


def stages() -> list[AdaptiveObjective]:
    control = AdaptiveKL(0.1, target=1.0, horizon=20)
    return [
        GroupRelative("leave_one_out", kl=control, shaping=SHAPING),
        GroupRelative("batch_standardised", shaping=SHAPING),
        GAE(kl=control, shaping=SHAPING),
        GAE(kl=0.0, shaping=SHAPING),
    ]


@pytest.mark.parametrize("at", range(4))
@given(GROUPS)
def test_turns_in_several_conversations_have_the_statistics_and_the_advantages_of_one(
    at: int, groups: list[list[Agent]]
) -> None:
    one, several = stages()[at], stages()[at]
    whole, split = one.batch(scored(groups, split=False)), several.batch(scored(groups, split=True))
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-5)
    assert several.control.coefficient == one.control.coefficient
    assert several.shaping.moments == one.shaping.moments
    if isinstance(one, GroupRelative) or not one.control.coefficient:  # else a token earns the KL of its conversation
        expected = by_token(whole, known(whole.advantages))
        assert by_token(split, known(split.advantages)) == pytest.approx(expected, rel=1e-4, abs=1e-5)


LOSSES = {
    **{each: ClippedLoss(aggregation=each) for each in ("tokens", "responses", "constant", "response_sums")},
    "gspo": SequenceLoss(),
}


@pytest.mark.parametrize("name", LOSSES)
@given(GROUPS)
def test_turns_in_several_conversations_have_the_weight_of_one_in_every_micro_batching(
    name: str, groups: list[list[Agent]]
) -> None:
    loss = LOSSES[name]

    def gradient(*, split: bool) -> tuple[list[float], list[float]]:
        batch = GroupRelative("centred").batch(scored(groups, split=split))
        logprobs, total = torch.tensor(batch.logprobs, requires_grad=True), torch.zeros(())
        size, spans = Whole.of(batch, range(len(batch)), cap=20), batch.rows()
        measured = np.zeros(5)
        for row in range(len(batch)):
            part = pack(batch, [row], torch.device("cpu"), loss.reads)
            own = logprobs[spans[row]]
            given = {**part.given, "logprobs": own, "entropies": own.detach()}
            found = loss(Inputs(part.mask, part.rows, part.groups, size, given, part.shares))
            total = total + found.loss
            measured += [float(each.detach()) for each in found.measured.values()]
        total.backward()
        assert logprobs.grad is not None
        return by_token(batch, logprobs.grad), [float(total.detach()), *measured]

    for split, whole in zip(gradient(split=True), gradient(split=False), strict=True):
        assert split == pytest.approx(whole, rel=1e-4, abs=1e-6)
