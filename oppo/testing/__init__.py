"""For tests of pipelines and backends: virtual time, fake models, conformance checks. Public, and torch-free."""

from oppo.testing.conformance import check_policy, check_scorer, check_trainer
from oppo.testing.fakes import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    fake_per_token,
    fake_scalar,
    noise,
    prompts,
)
from oppo.testing.loop import VirtualTimeLoop, run_virtual

__all__ = [
    "FakeCritic",
    "FakePolicy",
    "FakeScorer",
    "FakeTrainer",
    "VirtualTimeLoop",
    "check_policy",
    "check_scorer",
    "check_trainer",
    "fake_per_token",
    "fake_scalar",
    "noise",
    "prompts",
    "run_virtual",
]
