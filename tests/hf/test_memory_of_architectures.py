"""The memory of models of every architecture: it is counted, and as the same work with data needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from docs.make_models import PAGE, tiny_config
from oppo.hf.memory import Bytes, Load, ServedPolicy, Trained, longest_batch, served_critic, served_reference
from oppo.hf.model_files import CAUSAL, SCALAR
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.trainer import HfTrainerCore
from oppo.hf.without_data import LiveBytes, planned_on
from oppo.losses import ClippedLoss
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.kit.known import deep

LOAD = Load(rollouts=4, prompt=10, response=12, chunk=8)
LONG = Load(rollouts=2, prompt=100, response=100, chunk=50)
SAMPLING = Sampling(max_new_tokens=12)
SETTINGS = TrainerSettings(epochs=1)

ROWS: Mapping[str, Mapping[str, str]] = {
    cells[0].strip("`"): dict(zip(("policy", "reference", "critic", "trainer"), cells[1:], strict=False))
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `") and len(cells := [each.strip() for each in line.strip("|").split("|")]) == 8
}
"""What the page of models says of each type: the roles that it can have."""

UNCOUNTED = {("llama4", "trainer"), ("llama4", "reference"), ("mllama", "trainer")}
"""Their text models apart are counted: only these, with a tower for images, fail without data."""

UNUSUAL = ["deepseek_v3", "doge", "diffllama", "jetmoe", "longcat_flash", "dbrx", "inkling_text", "idefics2"]
"""Values of another width than queries, trained masks, and operations that ask for data, each in a way of its own."""


def count(role: str, model_type: str) -> Bytes:
    def causal() -> PreTrainedModel:
        return CAUSAL.made(tiny_config(model_type))

    def scalar() -> PreTrainedModel:
        config = tiny_config(model_type)
        config.num_labels = 1
        return SCALAR.made(config)

    works: Mapping[str, Callable[[], Bytes]] = {
        "policy": lambda: ServedPolicy(causal).under(LOAD, SAMPLING, prefill_tokens=16),
        "reference": lambda: served_reference(causal).under(LOAD),
        "critic": lambda: served_critic(scalar).under(LOAD),
        "trainer": lambda: Trained(lambda: ActorCritic(causal())).under(LOAD, SAMPLING, SETTINGS, ClippedLoss()),
    }
    return works[role]()


def test_the_page_has_roles_of_every_type() -> None:
    assert len(ROWS) > 150
    assert sum(row["trainer"] == "yes" for row in ROWS.values()) > 100
    assert ROWS.keys() >= {*UNUSUAL, "llama", "qwen3"}


@pytest.mark.parametrize("model_type", ["llama", *UNUSUAL, *deep(*(set(ROWS) - {"llama", *UNUSUAL}))])
def test_every_role_that_the_page_gives_a_type_is_counted(model_type: str) -> None:
    for role in (role for role, has in ROWS[model_type].items() if has == "yes"):
        if (model_type, role) in UNCOUNTED:
            with pytest.raises((AttributeError, RuntimeError)):
                count(role, model_type)
        else:
            assert count(role, model_type).activations > 0, role


@pytest.mark.parametrize("name", ["deepseek-v3", *deep("diffllama", "jetmoe", "kimi-linear", "minicpm3")])
def test_an_unusual_attention_is_counted_like_the_one_with_data(name: str) -> None:
    configs = {**tiny.WHOLE, **tiny.STATEFUL}

    def made() -> ActorCritic:
        return ActorCritic(tiny.of(configs[name]()))

    def updated() -> tuple[int, int]:
        with LiveBytes() as live:
            core = HfTrainerCore(made(), SAMPLING, SETTINGS, ClippedLoss(), TrainerCounts.new())
            for _ in range(2):  # the first allocates the optimizer's state
                at_rest = live.peak = live.now
                core.update(longest_batch(LONG.rollouts, LONG, critic=False))
        return at_rest, live.peak

    at_rest, peak = tiny.apart(updated)()
    expected = Trained(made).under(LONG, SAMPLING, SETTINGS, ClippedLoss())
    measured = peak - at_rest - expected.gradients
    # Rows without data are not packed, and a mask is made for them: the estimate is rather too large.
    assert 0.95 * measured < expected.activations < 1.25 * measured


def test_a_gpu_keeps_no_matrix_of_weights_that_a_cpu_keeps() -> None:
    def activations(device: str) -> int:
        make = partial(tiny.of, tiny.WHOLE["deepseek-v3"]())
        with planned_on(torch.device(device)):
            return Trained(lambda: ActorCritic(make())).under(LONG, SAMPLING, SETTINGS, ClippedLoss()).activations

    matrices = 2 * LONG.rollouts * 4 * (LONG.sequence - 1) ** 2 * 4  # of two layers, four heads, float32
    assert activations("cpu") - activations("cuda") > 0.9 * matrices
