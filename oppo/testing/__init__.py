"""Tools for tests of pipelines and backends: virtual time, fake models, scripted faults, a recorder, checks.

Public, and torch-free. As a pytest plugin (``pytest_oppo``) they need no imports.
"""

from oppo.testing.conformance import check_admission, check_policy, check_scorer, check_trainer
from oppo.testing.device import Device, time_shared
from oppo.testing.fake_batch import fake_batch
from oppo.testing.fake_policy import FakePolicy
from oppo.testing.fakes import FakeCritic, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, noise, prompts
from oppo.testing.faulty import (
    FaultyCritic,
    FaultyEnvironment,
    FaultyPolicy,
    FaultyScorer,
    FaultyTrainer,
    faulty_reward,
)
from oppo.testing.loop import VirtualTimeLoop, run_virtual
from oppo.testing.recorder import Happening, Recorder
from oppo.testing.script import Fault, Flap, Garbage, HalfPublished, Hang, LoseSessions, Raise, Script, Slow
from oppo.testing.serial import respond_serially, score_serially

__all__ = [
    "Device",
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
    "Garbage",
    "HalfPublished",
    "Hang",
    "Happening",
    "LoseSessions",
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
    "time_shared",
]
