"""An agent counts once: what it says has the same scores, advantages and weight in one conversation or in several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from oppo.events import Batch, Finish, FinishReason, Prompt, Response
from oppo.hf.train.packing import pack
from oppo.losses import ClippedLoss, Inputs, SequenceLoss, Whole
from oppo.returns import AdaptiveKL, ScoreShaping
from oppo.stages import GAE, GroupRelative, ScoredRollout
from oppo.stages.advantage import AdaptiveObjective
from tests.known import known

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
            found = loss(Inputs(part.mask, part.row, part.groups, size, given, part.shares))
            total = total + found.loss
            measured += [float(each.detach()) for each in found.measured.values()]
        total.backward()
        assert logprobs.grad is not None
        return by_token(batch, logprobs.grad), [float(total.detach()), *measured]

    for split, whole in zip(gradient(split=True), gradient(split=False), strict=True):
        assert split == pytest.approx(whole, rel=1e-4, abs=1e-6)
