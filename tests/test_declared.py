"""Settings of public constructors: numbers are numbers, or are refused by name; defaults are TRL's."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import get_scheduler

import oppo
from oppo.admission import SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.chunking import Fixed, Tuned
from oppo.data import PromptStream
from oppo.declared import require_declared, require_real, require_whole, split_url
from oppo.errors import ConfigError
from oppo.liveness import StallLimits
from oppo.losses import PPOLoss
from oppo.report import RunDirectory
from oppo.returns import AdaptiveKL, FixedKL, ImportanceCorrection, ScoreShaping
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_scalar, prompts
from oppo.training import LearningRateSchedule

BAD: dict[str, tuple[object, ...]] = {
    "int": (math.nan, 1e30, 1.5, True, "four", 2**70, np.float32(1)),
    "float": (math.nan, "four", True, -math.inf),
}


def grpo(**numbers: object) -> object:
    policy, trainer = FakePolicy(lambda _: 2), FakeTrainer()
    reward = FakeScorer(fake_scalar)
    return oppo.grpo(policy=policy, reward=reward, trainer=trainer, admission=oppo.Synchronous(2), **numbers)  # type: ignore[arg-type]  # what a user may pass


KINDS = {
    "Count": "int", "PositiveCount": "int", "Seed": "int",
    "Fraction": "float", "NonNegative": "float", "Positive": "float", "AtLeastOne": "float", "Limit": "float",
}  # fmt: skip
"""What the types of :mod:`oppo.declared` are without their bounds."""

DECLARED = re.compile(rf"\b({'|'.join(KINDS)})\b")

MADE: dict[str, Callable[..., object]] = {
    "Sampling": oppo.Sampling,
    "Fixed": Fixed,
    "Tuned": partial(Tuned, cap=64),
    "FixedKL": partial(FixedKL, coefficient=0.1),
    "AdaptiveKL": partial(AdaptiveKL, initial=0.1),
    "Overcommit": partial(oppo.Overcommit, batch=4),
    "SlopeAdaptive": partial(SlopeAdaptive, batch=16),
    "TailAdaptive": partial(TailAdaptive, batch=16),
    "TailBatched": partial(TailBatched, batch=16),
    "ImportanceCorrection": ImportanceCorrection,
    "ScoreShaping": ScoreShaping,
    "TrainerSettings": oppo.TrainerSettings,
    "PPOLoss": PPOLoss,
    "GAE": oppo.GAE,
    "Update": partial(oppo.Update, FakeTrainer()),
    "Generate": partial(oppo.Generate, FakePolicy(lambda _: 2), oppo.Synchronous(2)),
    "StallLimits": partial(StallLimits, seconds=1.0),
    "PromptStream": partial(PromptStream, prompts(2)),
    "Process": partial(oppo.Process, "scorers"),
    "RunDirectory": partial(RunDirectory, Path("/proc/none")),
    "FakePolicy": partial(FakePolicy, lambda _: 2),
    "FakeScorer": partial(FakeScorer, fake_scalar),
    "FakeCritic": FakeCritic,
    "FakeTrainer": FakeTrainer,
}


def numbers() -> list[tuple[str, str, str]]:
    """Return constructor, argument and kind of every number."""
    found = []
    for name, make in MADE.items():
        for parameter in inspect.signature(make).parameters.values():
            kind = DECLARED.sub(lambda alias: KINDS[alias[0]], str(parameter.annotation)).removesuffix(" | None")
            if kind in BAD:
                found.append((name, parameter.name, kind))
    return found


def test_the_constructors_have_numbers() -> None:
    assert {name for name, _, _ in numbers()} == set(MADE)
    assert len(numbers()) > 50


@pytest.mark.parametrize(("name", "argument", "kind"), numbers())
def test_what_is_no_number_is_refused_by_name_where_it_comes_in(name: str, argument: str, kind: str) -> None:
    for value in BAD[kind]:
        with pytest.raises((ValueError, oppo.OppoError), match=argument) as caught:
            MADE[name](**{argument: value})
        assert repr(value) in str(caught.value) or str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (oppo.Sampling, {"temperature": math.inf}, "temperature of Sampling must be a finite number, not inf"),
        (oppo.Sampling, {"seed": -1}, "seed must be at least 0, not -1"),
        (oppo.Sampling, {"stop": (1, 2.5)}, "stop of Sampling must be a whole number, not 2.5"),
        (Tuned, {"cap": 64, "parts": (0.5, math.nan)}, "parts of Tuned must be a finite number, not nan"),
        (Tuned, {"cap": 64, "parts": 0.5}, "parts of Tuned must be a tuple, not 0.5"),
        (grpo, {"samples": math.nan}, "samples must be a whole number, not nan"),
        (oppo.Synchronous, {"batch": math.nan}, "batch of Overcommit must be a whole number, not nan"),
        (oppo.GAE, {"kl": math.nan}, "coefficient of FixedKL must be a finite number, not nan"),
        (FixedKL, {"coefficient": -1.0}, "coefficient must be at least 0, not -1.0"),
        (AdaptiveKL, {"initial": 0.0}, "initial must be more than 0, not 0.0"),
        (AdaptiveKL, {"initial": 0.1, "target": 0.0}, "target must be more than 0, not 0.0"),
        (AdaptiveKL, {"initial": 0.1, "horizon": 0.0}, "horizon must be more than 0, not 0.0"),
        (ScoreShaping, {"clip": 0.0}, "clip must be more than 0, not 0.0"),
        (ScoreShaping, {"missing_eos_penalty": -1.0}, "missing_eos_penalty must be at least 0, not -1.0"),
        (ScoreShaping, {"long_from": 5, "long_to": 4}, "grows between two lengths, long_from = 5 and long_to = 4"),
        (oppo.TrainerSettings, {"epochs": 0}, "epochs must be more than 0, not 0"),
        (oppo.TrainerSettings, {"learning_rate": -1.0}, "learning_rate must be at least 0"),
        (oppo.TrainerSettings, {"critic_warmup": -1}, "critic_warmup must be at least 0"),
        (oppo.TrainerSettings, {"gradient_checkpointing": -1}, "gradient_checkpointing must be at least 0"),
        (oppo.TrainerSettings, {"betas": (0.9, 1.0)}, "betas must be less than 1, not 1.0"),
        (oppo.TrainerSettings, {"betas": (0.9, math.nan)}, "betas of TrainerSettings must be a finite number, not"),
        (oppo.TrainerSettings, {"schedule": "bananas"}, "'constant', 'constant_with_warmup', 'linear' or 'cosine'"),
        (oppo.TrainerSettings, {"schedule": "linear"}, "total_steps must be given"),
        (oppo.TrainerSettings, {"warmup_steps": 3}, "use 'constant_with_warmup'"),
        (
            oppo.TrainerSettings,
            {"schedule": "cosine", "warmup_steps": 3, "total_steps": 3},
            "warmup_steps must be fewer than the steps of the run (3), not 3",
        ),
        (PPOLoss, {"clip": 0.0}, "clip must be more than 0, not 0.0"),
        (PPOLoss, {"clip": math.inf}, "clip of PPOLoss must be a finite number, not inf"),
        (PPOLoss, {"entropy_coefficient": -0.1}, "entropy_coefficient must be at least 0, not -0.1"),
        (PPOLoss, {"kl_estimator": "k4"}, "kl_estimator must be 'k1', 'k2' or 'k3', not 'k4'"),
        (PPOLoss, {"value_clip": 0.0}, "value_clip must be more than 0, not 0.0"),
        (PPOLoss, {"value_coefficient": -1.0}, "value_coefficient must be at least 0, not -1.0"),
        (ImportanceCorrection, {"cap": 0.9}, "cap must be at least 1, not 0.9"),
        (ImportanceCorrection, {"cap": math.inf}, "cap of ImportanceCorrection must be a finite number, not inf"),
        (ImportanceCorrection, {"low": 1.1}, "low must be at most 1, not 1.1"),
        (ImportanceCorrection, {"high": 0.9}, "high must be at least 1, not 0.9"),
        (ImportanceCorrection, {"k3": 0.0}, "k3"),
        (ImportanceCorrection, {"weight": "some"}, "weight must be 'none', 'truncated' or 'mask', not 'some'"),
    ],
)
def test_an_error_names_the_argument_and_what_was_expected(
    make: Callable[..., object], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises((ValueError, oppo.OppoError), match=re.escape(message)):
        make(**arguments)


@dataclass(frozen=True)
class OfAUser(PPOLoss):
    pool: NowhereAtRunTime | None = None  # type: ignore[name-defined] # noqa: F821 - as if imported for types alone
    value_clip: NowhereAtRunTime = None  # type: ignore[name-defined] # noqa: F821


def test_a_subclass_whose_annotations_are_for_the_type_checker_is_checked_otherwise() -> None:
    assert OfAUser(clip=0.1, value_clip="soft").value_clip == "soft"
    with pytest.raises((ValueError, oppo.OppoError), match="clip must be more than 0"):
        OfAUser(clip=0.0)


@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_the_schedules_are_those_of_transformers(schedule: LearningRateSchedule) -> None:
    warmup = 0 if schedule == "constant" else 3
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=11)
    ours = oppo.TrainerSettings(schedule=schedule, warmup_steps=warmup, total_steps=11)
    for update in range(12):
        assert ours.learning_rate_factor(update) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_the_defaults_are_those_of_trl_but_for_the_exceptions_that_are_named() -> None:
    """The numbers are those of ``trl.experimental.ppo.PPOConfig`` in TRL 1.12.0, with the arguments it inherits."""
    ours = vars(PPOLoss()) | asdict(oppo.TrainerSettings())
    same = {
        "learning_rate": 3e-6,
        "epochs": 4,  # num_ppo_epochs
        "minibatches": 1,  # num_mini_batches
        "clip": 0.2,  # cliprange
        "value_clip": 0.2,  # cliprange_value
        "value_coefficient": 0.1,  # vf_coef
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "betas": (0.9, 0.999),  # adam_beta1, adam_beta2
        "warmup_steps": 0,
    }
    theirs = {"eps": 1e-8, "schedule": "linear", "gradient_checkpointing": 1, "seed": 42}
    assert {name: ours[name] for name in same} == same
    assert {name for name in theirs if ours[name] != theirs[name]} == theirs.keys()
    step = oppo.GAE()
    assert (step.gamma, step.lam, step.kl, step.kl_estimator) == (1.0, 0.95, 0.05, "k1")
    assert not step.whiten_rewards


GOOD = ("http://localhost", "https://a.example:8000/v1", "http://[::1]:8000", "http://127.0.0.1:1")


@given(
    text=st.sampled_from(GOOD),
    at=st.integers(0, 30),
    put=st.sampled_from([*"\n\t \0[]:@/#%", ":99999", ":0", "\u2028"]),
)
def test_an_address_is_one_that_a_client_takes_or_is_refused_as_none(text: str, at: int, put: str) -> None:
    changed = text[:at] + put + text[at:]
    assert split_url(text, "a server").geturl() == text
    with suppress(ConfigError):
        assert split_url(changed, "a server").hostname == httpx.URL(changed).host.lower()


@pytest.mark.parametrize(
    "url", ["http://localhost:99999", "http://[::1", "http://local\nhost", "http://", "ftp://a", "a:1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected the URL of a server"):
        split_url(url, "a server")


def test_what_stands_for_a_number_is_one() -> None:
    require_whole("n", np.int64(3), 3)
    require_real("x", np.float32(0.5))
    require_real("x", 1)
    require_real("x", math.inf, infinite=True)
    assert oppo.TrainerSettings(max_grad_norm=math.inf, critic_learning_rate=None).max_grad_norm == math.inf
    assert PPOLoss(value_clip=math.inf).value_clip == math.inf
    require_declared(oppo.Sampling(max_new_tokens=np.int32(4)))  # type: ignore[arg-type]  # as it comes from an array
