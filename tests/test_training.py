"""Training settings: their ranges, and learning rates over a run."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from transformers import get_scheduler

from oppo.errors import ConfigError
from oppo.losses import PPOLoss
from oppo.stages import GAE
from oppo.training import LearningRateSchedule, TrainerSettings


@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_the_schedules_are_those_of_transformers(schedule: LearningRateSchedule) -> None:
    warmup = 0 if schedule == "constant" else 3
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=11)
    ours = TrainerSettings(schedule=schedule, warmup_steps=warmup, total_steps=11)
    for update in range(12):
        assert ours.learning_rate_factor(update) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be more than 0, not 0"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0"),
        (
            {"critic_learning_rate": math.nan},
            "critic_learning_rate of TrainerSettings must be a finite number, not nan",
        ),
        ({"critic_warmup": -1}, "critic_warmup must be at least 0"),
        ({"gradient_checkpointing": -1}, "gradient_checkpointing must be at least 0"),
        ({"betas": (0.9, 1.0)}, "betas must be less than 1, not 1.0"),
        ({"schedule": "bananas"}, "schedule must be 'constant', 'constant_with_warmup', 'linear' or 'cosine'"),
        ({"schedule": "linear"}, "total_steps must be given"),
        ({"warmup_steps": 3}, "use 'constant_with_warmup'"),
        (
            {"schedule": "cosine", "warmup_steps": 3, "total_steps": 3},
            r"warmup_steps must be fewer than the steps of the run \(3\), not 3",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainerSettings(**settings)  # type: ignore[arg-type] # the point of the test


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0.0}, "clip must be more than 0, not 0.0"),
        ({"clip": math.inf}, "clip of PPOLoss must be a finite number, not inf"),
        ({"entropy_coefficient": -0.1}, "entropy_coefficient must be at least 0, not -0.1"),
        ({"kl": math.nan}, "kl of PPOLoss must be a finite number, not nan"),
        ({"kl_estimator": "k4"}, "kl_estimator must be 'k1', 'k2' or 'k3', not 'k4'"),
        ({"value_clip": 0.0}, "value_clip must be more than 0, not 0.0"),
        ({"value_coefficient": -1.0}, "value_coefficient must be at least 0, not -1.0"),
    ],
)
def test_an_impossible_loss_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOLoss(**settings)  # type: ignore[arg-type] # the point of the test


def test_the_defaults_are_those_of_trl_but_for_the_exceptions_that_are_named() -> None:
    """The numbers are those of ``trl.experimental.ppo.PPOConfig`` in TRL 1.12.0, with the arguments it inherits."""
    ours = vars(PPOLoss()) | asdict(TrainerSettings())
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
    step = GAE()
    assert (step.gamma, step.lam, step.kl, step.kl_estimator) == (1.0, 0.95, 0.05, "k1")
    assert not step.whiten_rewards
