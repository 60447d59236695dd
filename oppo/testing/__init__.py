"""Tools for tests of pipelines and backends: virtual time, fake models, scripted faults, a recorder, checks.

Public, and torch-free. As a pytest plugin (``pytest_oppo``) they need no imports.
"""

from oppo.evaluation import respond_serially, score_serially
from oppo.testing.conformance import check_admission, check_policy, check_scorer, check_trainer
from oppo.testing.fake_policy import FakePolicy
from oppo.testing.fakes import (
    FakeCritic,
    FakeScorer,
    FakeTrainer,
    fake_batch,
    fake_per_token,
    fake_scalar,
    noise,
    prompts,
)
from oppo.testing.faulty import (
    Fault,
    FaultyCritic,
    FaultyEnvironment,
    FaultyPolicy,
    FaultyScorer,
    FaultyTrainer,
    Flap,
    Hang,
    Raise,
    Script,
    Slow,
    faulty_reward,
)
from oppo.testing.recorder import Happening, Recorder
from oppo.testing.virtual_time import VirtualTimeLoop, run_virtual

__all__ = [
    "FakeCritic",
    "FakePolicy",
    "FakeScorer",
    "FakeTrainer",
    "Fault",
    "FaultyCritic",
    "FaultyEnvironment",
    "FaultyPolicy",
    "FaultyScorer",
    "FaultyTrainer",
    "Flap",
    "Hang",
    "Happening",
    "Raise",
    "Recorder",
    "Script",
    "Slow",
    "VirtualTimeLoop",
    "check_admission",
    "check_policy",
    "check_scorer",
    "check_trainer",
    "fake_batch",
    "fake_per_token",
    "fake_scalar",
    "faulty_reward",
    "noise",
    "prompts",
    "respond_serially",
    "run_virtual",
    "score_serially",
]
