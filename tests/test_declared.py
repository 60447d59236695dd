"""Every number that a public constructor takes is a number, or is refused there with a message that names it."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given, strategies as st

import oppo
from oppo.admission import SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.chunking import Fixed, Tuned
from oppo.data import PromptStream
from oppo.declared import require_declared, require_real, require_whole, split_url
from oppo.errors import ConfigError
from oppo.liveness import StallLimits
from oppo.losses import PPOLoss
from oppo.report import RunDirectory
from oppo.returns import AdaptiveKL, Correction, FixedKL, ScoreShaping
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_scalar, prompts

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
    "Correction": Correction,
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
    ("make", "expected"),
    [
        (lambda: oppo.Sampling(temperature=math.inf), "temperature of Sampling must be a finite number, not inf"),
        (lambda: oppo.Sampling(seed=-1), "seed must be at least 0, not -1"),
        (lambda: oppo.Sampling(stop=(1, 2.5)), "stop of Sampling must be a whole number, not 2.5"),  # type: ignore[arg-type]
        (lambda: Tuned(64, parts=(0.5, math.nan)), "parts of Tuned must be a finite number, not nan"),
        (lambda: Tuned(64, parts=0.5), "parts of Tuned must be a tuple, not 0.5"),  # type: ignore[arg-type]
        (lambda: oppo.TrainerSettings(betas=(0.9, math.nan)), "betas of TrainerSettings must be a finite number, not"),
        (lambda: grpo(samples=math.nan), "samples must be a whole number, not nan"),
        (lambda: oppo.Synchronous(math.nan), "batch of Overcommit must be a whole number, not nan"),  # type: ignore[arg-type]
        (lambda: oppo.GAE(kl=math.nan), "coefficient of FixedKL must be a finite number, not nan"),
    ],
)
def test_an_error_names_the_number_and_what_was_expected(make: Callable[[], object], expected: str) -> None:
    with pytest.raises((ValueError, oppo.OppoError)) as caught:
        make()
    assert expected in str(caught.value)


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
