"""Stages, their parts and admissions that cannot work: refused when they are made, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest

from oppo import grpo, wrap
from oppo.admission import Continuous, Overcommit, SlopeAdaptive, Synchronous, TailAdaptive, TailBatched
from oppo.admission.chunking import Tuned
from oppo.algorithms.distill import Distill
from oppo.errors import AdmissionError, ConfigError, ProtocolError
from oppo.models import Capabilities
from oppo.returns import AdaptiveKL, ScoreShaping
from oppo.stages import GAE, Distillation, DynamicSampling, Generate, GroupRelative, InParts, Score, Update
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar

ANYTHING: Any = object()
REWARD = FakeScorer(fake_scalar)
wrong: Any = partial  # also of arguments that no type checker lets through
NO_CONTROLLER = "kl must be a number, or a controller such as oppo.returns.AdaptiveKL, not '0.1'"
NO_ESTIMATOR = "kl_estimator must be 'k1', 'k2' or 'k3', not 'k9'"
NO_KL = "cannot have a KL in the reward, got kl = 0.1: where the scores"
WRAPPED = "which has no version, extend, finish, forget; a reward function goes into FunctionReward(function, decode)"


def length(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


class Both(Continuous):
    """Refills, and restarts."""

    restarts = True


Rows: TypeAlias = list[tuple[Callable[[], object], str]]

SETTINGS: Rows = [
    (wrong(GAE, gamma=2.0), "gamma must be at most 1, not 2.0"),
    (wrong(GAE, lam=-1.0), "lam must be at least 0, not -1.0"),
    (wrong(GAE, lam=float("nan")), "lam of GAE must be a finite number, not nan"),
    *((wrong(kind, kl_estimator="k9"), NO_ESTIMATOR) for kind in (GAE, GroupRelative)),
    *((wrong(kind, kl="0.1"), NO_CONTROLLER) for kind in (GAE, GroupRelative)),
    (wrong(GroupRelative, "median"), "advantage must be 'leave_one_out', 'standardised', 'centred', 'batch"),
    (wrong(GroupRelative, kl=0.1), f"advantage = 'standardised' {NO_KL}"),
    (wrong(GroupRelative, "max_rl", kl=0.1), f"advantage = 'max_rl' {NO_KL}"),
    (wrong(GroupRelative, kl=AdaptiveKL(0.01)), 'put it into the loss, with algorithm.kl_in="loss"'),
    (wrong(GroupRelative, gamma=0.9), "gamma = 0.9 discounts rewards of later turns, and credit = 'response' sums"),
    (wrong(GroupRelative, "each_reward", credit="turns"), "'each_reward' compares whole responses, reward by reward"),
    (wrong(GroupRelative, distill=-1.0), "distill"),
    (wrong(Distillation, -1.0), "distill"),
    (wrong(Distill, distill=float("nan")), "distill"),
    (wrong(InParts, ANYTHING, 2), "estimates advantages from the whole batch"),
    (wrong(InParts, GAE(), 2), "GAE estimates advantages from the whole batch"),
    (wrong(InParts, GroupRelative(shaping=ScoreShaping(norm=True)), 2), "scores normalised by the moments of all"),
    (
        wrong(InParts, GroupRelative("centred", AdaptiveKL(0.1, target=1.0, horizon=10)), 2),
        "a KL coefficient that adapts",
    ),
    (wrong(InParts, GroupRelative(), 1), "samples must be at least 2, not 1"),
    (wrong(DynamicSampling, max_rounds=0), "max_rounds"),
    (
        lambda: Generate(FakePolicy(), TailBatched(4), samples=2, select=DynamicSampling()),
        "TailBatched restarts what is late",
    ),
    (
        lambda: Generate(FakePolicy(), Continuous(batch=4, overcommit=2)),
        "Continuous lets rollouts join while others are decoded, and FakePolicy cannot, by its capabilities",
    ),
    (
        lambda: Generate(FakePolicy(capabilities=Capabilities(adds_while_decoding=True)), Both(batch=4, overcommit=2)),
        "an admission either refills or restarts",
    ),
    (
        lambda: Generate(FakePolicy(capabilities=Capabilities()), Synchronous(batch=1), environment=ANYTHING),
        "an environment answers turns, and FakePolicy cannot go on after one",
    ),
]
NUMBERS: Rows = [
    *((wrong(kind, kl=-0.1), "coefficient must be at least 0, not -0.1") for kind in (GAE, GroupRelative)),
    (wrong(Tuned, cap=0), "cap must be more than 0, not 0"),
    (wrong(Tuned, cap=9, parts=()), "parts must be some numbers above 0 and up to 1, not ()"),
    (
        wrong(Tuned, cap=90, every=8),
        "a probe takes 3 steps for each of 3 candidates, so every must be at least 9, not 8",
    ),
]
ADMISSIONS: Rows = [
    (wrong(Overcommit, batch=0), "batch must be more than 0, not 0"),
    (wrong(Overcommit, batch=4, overcommit=5), "overcommit must lie in 0 .. batch = 4, not 5"),
    (wrong(Overcommit, batch=4, overcommit=-1), "not -1"),
    (wrong(Overcommit, batch=4, overcommit=1, max_deferrals=0), "max_deferrals must be more than 0, not 0"),
    (wrong(Continuous, batch=4, overcommit=0), "overcommit units are decoded at a time: expected at least 1, not 0"),
    (wrong(SlopeAdaptive, 4, least=3, most=2), "0 <= least <= initial <= most must hold, not 0, 3, 2, 2"),
    *(
        (wrong(kind, 4, most=5), "overcommit must lie in 0 .. batch = 4, not 5")
        for kind in (SlopeAdaptive, TailAdaptive)
    ),
    *((wrong(kind, 4, most=2, window=0), "window must be more") for kind in (SlopeAdaptive, TailAdaptive)),
    (wrong(TailAdaptive, 4, price=-1.0), "price must be at least 0, not -1.0"),
    (wrong(TailBatched, 0, 1.25), "batch must be more than 0, not 0"),
    (wrong(TailBatched, 4, 2.5), "launch must be at most 2, not 2.5"),
]
PROTOCOLS: Rows = [
    (wrong(Generate, ANYTHING, Overcommit(2)), "Policy, an object with version, capabilities, load, open, decoding"),
    (lambda: Generate(FakePolicy(), ANYTHING), "Admission, an object with batch, max_deferrals, admit, cut"),
    (lambda: Generate(FakePolicy(), Overcommit(2), ANYTHING), "ChunkSize, an object with size, observe"),
    (lambda: grpo(policy=FakePolicy(), reward=REWARD, trainer=FakeTrainer(), admission=ANYTHING), "Admission, an"),
    (lambda: wrap(length, ANYTHING, policy=FakePolicy(), reward=REWARD, admission=Overcommit(2)), "with state_dict"),  # type: ignore[arg-type] # wrong on purpose
    (lambda: wrap(ANYTHING, ANYTHING, policy=FakePolicy(), reward=REWARD, admission=ANYTHING), "with __call__"),
    (wrong(Update, ANYTHING), "Trainer, an object with version, update, sync"),
    (wrong(Update, FakeTrainer(), [ANYTHING]), "SyncedModel, an object with version, load; got object, which"),
    (wrong(Score, length), f"an object with version, extend, finish, forget; got function 'length', {WRAPPED}"),
]
REFUSED: dict[type[Exception], Rows] = {
    ConfigError: SETTINGS,
    ValueError: NUMBERS,
    AdmissionError: ADMISSIONS,
    ProtocolError: PROTOCOLS,
}


@pytest.mark.parametrize(("kind", "make", "message"), [(kind, *row) for kind, rows in REFUSED.items() for row in rows])
def test_what_cannot_work_is_refused_when_it_is_made(
    kind: type[Exception], make: Callable[[], object], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        make()
