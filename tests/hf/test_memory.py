"""Estimates beside the same work with data: the bytes of live tensors, and of whole processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from docs.make_models import PAGE, tiny_config
from oppo.errors import ConfigError, ModelRefused
from oppo.events import Chunk, IntArray, Prompt
from oppo.hf.head import CPU_LOGITS_BYTES, LOGITS_BYTES
from oppo.hf.kv.reader import Incremental
from oppo.hf.lora import add_lora
from oppo.hf.memory import (
    Bytes,
    Load,
    ServedPolicy,
    ServedScorer,
    Trained,
    longest_batch,
    served_critic,
    served_reference,
)
from oppo.hf.meta_device import LiveBytes, planned_on, without_data
from oppo.hf.model_files import CAUSAL, SCALAR
from oppo.hf.serve.scorers import ReferenceWorker, RewardWorker, ScorerInput, ScorerWorker, ValueWorker
from oppo.hf.train.actor_critic import ActorCritic, value_model_on
from oppo.hf.train.trainer import HfTrainerCore
from oppo.losses import ClippedLoss, PPOLoss
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.simulate.profile import Hardware
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.kit.known import deep

LOAD = Load(rollouts=6, prompt=20, response=40, chunk=16)
SHORT = Load(rollouts=6, prompt=2, response=3, chunk=3)
SAMPLING = Sampling(max_new_tokens=40)


def weights_of(*models: torch.nn.Module) -> int:
    return sum(each.nbytes for each in {each for model in models for each in [*model.parameters(), *model.buffers()]})


def test_bytes_are_counted_while_they_are_alive() -> None:
    for counted in (LiveBytes(), without_data()):
        with counted as live:
            one = torch.zeros(100, 10)
            view = one.view(1000)[10:]
            other = one + 1
            assert live.now == 8000
            del one, other
            assert live.now == 4000, "the view keeps the memory alive"
            del view
            assert (live.now, live.peak) == (0, 8000)


@pytest.mark.parametrize(
    "name", ["qwen2-sliding", "qwen3-moe", "falcon-h1", *deep("llama", "gpt2", "gemma3", "olmo2", "qwen3-next")]
)
def test_a_served_model_is_estimated_without_its_weights(name: str) -> None:
    def made() -> PreTrainedModel:
        return tiny.of({**tiny.CONFIGS, **tiny.STATEFUL}[name]())

    policy = ServedPolicy(made).under(LOAD, SAMPLING, prefill_tokens=64)
    reference = served_reference(made).under(LOAD)
    real = made()
    assert policy.weights == reference.weights
    assert policy.weights == pytest.approx(weights_of(real), rel=0.01)
    for each in (policy, reference):
        assert each.keys_values >= LOAD.rollouts * (LOAD.sequence - 1) * 4
        assert each.activations > 0
        assert each.total == each.weights + each.keys_values + each.activations


@pytest.mark.parametrize("rollouts", [24, 40])
@torch.inference_mode()
def test_slots_to_spare_for_rollouts_that_join_one_by_one_are_counted(rollouts: int) -> None:
    load, reader = (
        Load(rollouts, prompt=20, response=3 * rollouts + 20, chunk=16, one_by_one=True),
        Incremental(tiny.causal()),
    )
    longest = torch.ones(load.sequence - 1, dtype=torch.int64)
    for row in range(rollouts):  # the last joins others that are at their longest
        reader.expect([row])
        reader.extend([row], [longest if row < rollouts - 1 else longest[:20]])
        if row > rollouts - 3:
            reader.step([*range(row + 1)], longest[: row + 1])
    counted, without = (
        ServedPolicy(tiny.causal).under(each, SAMPLING, prefill_tokens=64).keys_values
        for each in (load, replace(load, one_by_one=False))
    )
    assert without < sum(reader.layer_bytes().values()) <= counted


@pytest.mark.parametrize("name", ["jamba", "minimax"])
def test_a_model_that_reads_whole_responses_is_estimated_without_a_cache(name: str) -> None:
    make = partial(tiny.of, tiny.ONLY_WHOLE[name]())
    found, longer = (
        served_reference(make).under(LOAD),
        served_reference(make).under(replace(LOAD, response=2 * LOAD.response)),
    )
    assert found.keys_values == 0
    assert 1.2 * found.activations < longer.activations


@pytest.mark.parametrize("name", ["jamba", "minimax"])
def test_a_policy_that_reads_whole_sequences_is_refused_as_in_a_run(name: str) -> None:
    with pytest.raises(ModelRefused, match=r"served row by row.*models\.engine = 'vllm'"):
        ServedPolicy(partial(tiny.of, tiny.ONLY_WHOLE[name]())).under(LOAD, SAMPLING, prefill_tokens=64)


def test_more_rollouts_longer_ones_and_more_logits_need_more() -> None:
    def total(load: Load, sampling: Sampling = SAMPLING) -> int:
        return ServedPolicy(tiny.causal).under(load, sampling, prefill_tokens=64).total

    usual = total(LOAD)
    assert total(replace(LOAD, rollouts=12)) > usual
    assert total(replace(LOAD, response=80)) > usual
    assert total(LOAD, replace(SAMPLING, temperature=0.0)) < usual
    assert served_critic(tiny.scalar).under(LOAD).total < served_reference(tiny.causal).under(LOAD).total


@pytest.mark.parametrize(
    ("critic", "checkpointing", "longest"),
    [
        (True, 0, SHORT),
        (False, 1, LOAD),
        *deep(
            (True, 0, LOAD), (True, 1, LOAD), (True, 1, SHORT), (False, 0, LOAD), (False, 0, SHORT), (False, 1, SHORT)
        ),
    ],
)
def test_training_without_data_is_counted_like_training_with_data(
    critic: bool, checkpointing: int, longest: Load
) -> None:
    """Most of the memory is activations, or is gradients, in which those of later micro-batches are added up."""
    tokens = 2 * (longest.sequence - 1)
    settings = TrainerSettings(gradient_checkpointing=checkpointing, micro_batch_tokens=tokens)
    loss = PPOLoss() if critic else ClippedLoss()

    def made() -> ActorCritic:
        return ActorCritic(tiny.causal(), tiny.scalar() if critic else None)

    expected = Trained(made).under(longest, SAMPLING, settings, loss)

    def updated(load: Load) -> tuple[int, int]:
        batch = longest_batch(3 * (tokens // (load.sequence - 1)), load, critic=critic)
        with LiveBytes() as live:
            core = HfTrainerCore(made(), SAMPLING, replace(settings, epochs=1), loss, TrainerCounts.new())
            core.update(batch)  # this allocates the optimizer's state
            at_rest = live.peak = live.now
            core.update(batch)
        return at_rest, live.peak

    measured = map(tiny.apart(updated), (longest, replace(longest, prompt=1)))
    at_rest, peak = max(measured, key=lambda each: each[1] - each[0])
    models = made()
    assert expected.weights == pytest.approx(weights_of(models), rel=0.01)
    assert expected.optimizer == 2 * expected.gradients
    assert at_rest == pytest.approx(expected.weights + expected.optimizer, rel=0.1)
    # Without data transformers cannot see that no token is masked, and makes a mask.
    assert expected.activations == pytest.approx(peak - at_rest - expected.gradients, rel=0.2)


@pytest.mark.parametrize(
    ("name", "kind", "checkpointing", "vocabulary"),
    [
        ("llama", "PPO", 0, 50_000),
        ("qwen2-sliding", "PPO", 1, 100),
        ("llama", "trunk", 0, 100),
        pytest.param("llama", "adapters", 1, 50_000, marks=pytest.mark.adapters),
        *deep(("gemma3", "PPO", 2, 100), ("llama", "PPO", 3, 100), ("olmo2", "GRPO", 2, 50_000)),
    ],
)
def test_a_deep_model_is_counted_by_few_of_its_layers(
    name: str, kind: str, checkpointing: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.CONFIGS[name]()
    config.update({"num_hidden_layers": 12, "vocab_size": vocabulary, "tie_word_embeddings": False})
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[number % 2] for number in range(12)]
    made_of = list[int]()

    def made() -> ActorCritic:
        actor = tiny.of(config)
        if kind == "adapters":
            add_lora(actor, 4, 8)
        critic = value_model_on(actor if kind == "trunk" else tiny.of(config)) if kind in {"PPO", "trunk"} else None
        return ActorCritic(actor, critic)

    class Counting(HfTrainerCore):
        def __init__(self, models: ActorCritic, *rest: Any) -> None:
            made_of.append(sum(isinstance(each, GradientCheckpointingLayer) for each in models.actor.modules()))
            super().__init__(models, *rest)

    monkeypatch.setattr("oppo.hf.memory.HfTrainerCore", Counting)
    settings = TrainerSettings(gradient_checkpointing=checkpointing)
    loss = PPOLoss() if kind in {"PPO", "trunk"} else ClippedLoss()
    quick = Trained(made).under(LOAD, SAMPLING, settings, loss)
    assert max(made_of) < 12
    monkeypatch.setattr("oppo.hf.memory._stacks", lambda whole: ())
    whole = Trained(made).under(LOAD, SAMPLING, settings, loss)
    assert max(made_of) == 12
    assert quick == whole


@pytest.mark.parametrize("kind", ["PPO", "GRPO", "trunk"])
def test_no_tensor_of_an_update_has_a_number_for_each_token_and_id(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.CONFIGS["llama"]()
    config.update({"vocab_size": 152_000, "max_position_embeddings": 1024})
    sampling, loss = Sampling(max_new_tokens=1024, temperature=0.7), ClippedLoss() if kind == "GRPO" else PPOLoss()

    def made() -> ActorCritic:
        actor = tiny.of(config)
        if kind == "GRPO":
            return ActorCritic(actor)
        return ActorCritic(actor, tiny.scalar() if kind == "PPO" else value_model_on(actor))

    sizes, chunk = list[int](), CPU_LOGITS_BYTES // (4 * 152_000)

    def counted(self: LiveBytes, tensor: torch.Tensor) -> None:
        count(self, tensor)
        sizes.append(tensor.untyped_storage().nbytes())

    count = LiveBytes.count
    monkeypatch.setattr(LiveBytes, "count", counted)
    settings = TrainerSettings(epochs=1, micro_batch_tokens=4096)
    found = Trained(made).under(Load(4, 20, 1000, 16), sampling, settings, loss)
    assert max(sizes) == 4 * 152_000 * chunk
    assert found.total < 6 * weights_of(made()) + 8 * CPU_LOGITS_BYTES < 4 * 152_000 * 4000
    few, many = (Trained(made).under(Load(rows, 20, 1000, 16), sampling, settings, loss).activations for rows in (1, 4))
    assert many < few + 3000 * 20_000, "what a token needs does not depend on the vocabulary"


@pytest.mark.parametrize(
    ("worker_of", "of", "make"),
    [
        (lambda model: ReferenceWorker(model, False, Sampling()), served_reference, partial(tiny.causal, "llama")),
        (lambda model: RewardWorker(model, False), served_critic, partial(tiny.scalar, "llama")),
        (lambda model: ValueWorker(model, False), served_critic, partial(tiny.scalar, "llama")),
    ],
)
def test_a_scorer_without_data_is_counted_like_one_with_data(
    worker_of: Callable[[PreTrainedModel], ScorerWorker[Any]],
    of: Callable[[Callable[[], PreTrainedModel]], ServedScorer[Any]],
    make: Callable[[], PreTrainedModel],
) -> None:
    """Also where all logits at once would be the most: a reference has a chunk of them at a time."""
    load, drawn = Load(rollouts=24, prompt=40, response=400, chunk=64), np.random.default_rng(0)
    config = make().config
    config.update({"vocab_size": 50_000, "hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": False})

    def made() -> PreTrainedModel:
        return type(make())(config)

    def tokens(count: int) -> IntArray:
        return drawn.integers(1, 900, count).astype(np.int32)

    with LiveBytes() as live, torch.inference_mode():
        worker, rows = worker_of(made().eval()), range(load.rollouts)
        worker.extend(ScorerInput([Prompt(row, row, tokens(load.prompt)) for row in rows]))
        live.peak = live.now
        for start in range(0, load.response, load.chunk):
            each = tokens(min(load.chunk, load.response - start))
            nothing = np.zeros(len(each), np.float32)
            worker.extend(ScorerInput([Chunk(row, start, each, nothing, each) for row in rows]))
        worker.finish(dict.fromkeys(rows, load.response))
    assert of(made).under(load).total == pytest.approx(live.peak, rel=0.05)


def test_an_update_of_an_h100_is_predicted_within_a_twentieth(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the page of the results says so."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    chosen = TrainerSettings(epochs=1, micro_batch_tokens=16_384)

    def made() -> ActorCritic:
        return ActorCritic(Qwen2ForCausalLM(config).bfloat16())

    monkeypatch.setattr("oppo.hf.head.UPDATE_BYTES", LOGITS_BYTES)  # as it was then
    with planned_on(torch.device("cuda")):
        found = Trained(made).under(Load(32, 256, 768, 128), Sampling(max_new_tokens=768), chosen, ClippedLoss())
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    measured = json.loads((results / "nvidia-h100" / "gpu-day-2.json").read_text())["parts"]["update"]["peak bytes"]
    assert found.total == pytest.approx(measured, rel=0.05)
    row = f"| memory of that update | {measured / 1e9:.2f} GB | {found.total / 1e9:.2f} GB |"
    assert row in (results / "gpu.md").read_text(), row


@given(
    sides=st.lists(st.integers(1, 3), min_size=2, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    numbers=st.permutations([1, 1.0, True, 2]),
    turned=st.booleans(),
)
def test_an_operation_that_was_seen_before_makes_what_torch_makes(
    sides: list[int], dtype: torch.dtype, numbers: list[float], turned: bool
) -> None:
    one = torch.empty(sides, dtype=dtype, device="meta")
    one = one.transpose(0, 1) if turned else one
    makes: list[Callable[[], Any]] = [partial(torch.add, one, number) for number in numbers]
    makes += [partial(torch.mul, one, one[:1]), partial(torch.sort, one), partial(torch.cat, [one, one], 1)]
    makes += [partial(torch.sum, one, side, keepdim=turned) for side in range(len(sides))]
    for make in makes:
        expected = make()
        with without_data():
            for each in (make(), make()):
                for found, real in zip(
                    *([given] if isinstance(given, torch.Tensor) else given for given in (each, expected)), strict=True
                ):
                    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.adapters
def test_adapters_need_little_but_activations_and_short_weights_need_copies() -> None:
    def adapted() -> ActorCritic:
        actor = tiny.causal()
        add_lora(actor, 4, 8)
        return ActorCritic(actor)

    def short() -> ActorCritic:
        return ActorCritic(tiny.causal(dtype=torch.bfloat16))

    def of(make: Callable[[], ActorCritic]) -> Bytes:
        return Trained(make).under(LOAD, SAMPLING, TrainerSettings(), ClippedLoss())

    whole, lora, bfloat16 = of(lambda: ActorCritic(tiny.causal())), of(adapted), of(short)
    assert lora.optimizer < 0.5 * whole.optimizer
    assert lora.weights > whole.weights
    assert bfloat16.weights == pytest.approx(0.5 * whole.weights, rel=0.01)
    assert bfloat16.optimizer == pytest.approx(1.5 * whole.optimizer, rel=0.01), "moments and copies are float32"


def test_nothing_is_allocated() -> None:
    """A model of 70 billion numbers is estimated like any other."""
    config = tiny.CONFIGS["llama"]()
    config.update({"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2, "vocab_size": 128_256})
    config.update({"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128})
    estimated = served_reference(lambda: tiny.of(config)).under(LOAD)
    assert estimated.weights > 12e9
    assert np.isfinite(estimated.total)


def test_what_cannot_be_trained_is_refused_as_in_a_run() -> None:
    def half() -> ActorCritic:
        return ActorCritic(tiny.causal(dtype=torch.float16))

    with pytest.raises(ModelRefused, match="float16"):
        Trained(half).under(LOAD, SAMPLING, TrainerSettings(), ClippedLoss())


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "role",
    [
        "policy",
        "reference",
        "reward",
        "trainer",
        "checkpointing",
        pytest.param("adapters", marks=pytest.mark.adapters),
        "grpo",
    ],
)
def test_estimates_are_within_a_fifth_of_a_process_s_peak(role: str) -> None:
    """Measured by the system: what a process of that model alone has in memory at most, above what it had before."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.hf.measured", role],
        check=True,
        capture_output=True,
        text=True,
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "PATH": ""},
    )
    measured, expected = map(float, found.stdout.split())
    assert 0.8 < expected / measured < 1.2, (expected, measured)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("8xH100-80GB", "8 x H100 with 80 GB"),
        ("2x8xH100", "2 machines of 8 x H100 with 80 GB"),
        ("1xmi300x", "1 x mi300x with 192 GB"),
        ("4xA100-40GB", "4 x A100 with 40 GB"),
        ("1x24GB", "1 x GPU with 24 GB"),
        ("2x8x24GB", "2 machines of 8 x GPU with 24 GB"),
        ("3x4xL4-24GB", "3 machines of 4 x L4 with 24 GB"),
    ],
)
def test_hardware_is_named_with_its_memory_or_is_known(text: str, shown: str) -> None:
    assert str(Hardware.assumed(text)) == shown


@pytest.mark.parametrize("text", ["8xA100", "8xH100-80", "H100", "0xH100", "8xH101", "2x8x8xH100"])
def test_hardware_of_no_known_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"of b200, h100, h200, .* the memory may be left out"):
        Hardware.assumed(text)


@given(rollouts=st.integers(1, 40), prompt=st.integers(1, 60), response=st.integers(1, 60), tokens=st.integers(20, 900))
@hypothesis_settings(max_examples=5, deadline=None)
def test_one_micro_batch_is_counted_where_it_needs_the_most(
    rollouts: int, prompt: int, response: int, tokens: int
) -> None:
    models = Trained(lambda: ActorCritic(tiny.causal()))
    load, settings = Load(rollouts, prompt, response, 8), TrainerSettings(micro_batch_tokens=tokens)
    found = models.under(load, SAMPLING, settings, ClippedLoss())
    shapes = [replace(load, prompt=1), load]
    with patch.object(Trained, "_expensive", lambda *_: shapes):
        assert models.under(load, SAMPLING, settings, ClippedLoss()) == found


FEW = Load(rollouts=4, prompt=10, response=12, chunk=8)
LONG = Load(rollouts=2, prompt=100, response=100, chunk=50)
TWELVE = Sampling(max_new_tokens=12)
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


def bytes_of(role: str, model_type: str) -> Bytes:
    def causal() -> PreTrainedModel:
        return CAUSAL.made(tiny_config(model_type))

    def scalar() -> PreTrainedModel:
        config = tiny_config(model_type)
        config.num_labels = 1
        return SCALAR.made(config)

    works: Mapping[str, Callable[[], Bytes]] = {
        "policy": lambda: ServedPolicy(causal).under(FEW, TWELVE, prefill_tokens=16),
        "reference": lambda: served_reference(causal).under(FEW),
        "critic": lambda: served_critic(scalar).under(FEW),
        "trainer": lambda: Trained(lambda: ActorCritic(causal())).under(FEW, TWELVE, SETTINGS, ClippedLoss()),
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
                bytes_of(role, model_type)
        else:
            assert bytes_of(role, model_type).activations > 0, role


@pytest.mark.parametrize("name", ["deepseek-v3", *deep("diffllama", "jetmoe", "kimi-linear", "minicpm3")])
def test_an_unusual_attention_is_counted_like_the_one_with_data(name: str) -> None:
    configs = {**tiny.WHOLE, **tiny.STATEFUL}

    def made() -> ActorCritic:
        return ActorCritic(tiny.of(configs[name]()))

    def updated() -> tuple[int, int]:
        with LiveBytes() as live:
            core = HfTrainerCore(made(), TWELVE, SETTINGS, ClippedLoss(), TrainerCounts.new())
            for _ in range(2):  # the first allocates the optimizer's state
                at_rest = live.peak = live.now
                core.update(longest_batch(LONG.rollouts, LONG, critic=False))
        return at_rest, live.peak

    at_rest, peak = tiny.apart(updated)()
    expected = Trained(made).under(LONG, TWELVE, SETTINGS, ClippedLoss())
    measured = peak - at_rest - expected.gradients
    # Rows without data are not packed, and a mask is made for them: the estimate is rather too large.
    assert 0.95 * measured < expected.activations < 1.25 * measured


def test_a_gpu_keeps_no_matrix_of_weights_that_a_cpu_keeps() -> None:
    def activations(device: str) -> int:
        make = partial(tiny.of, tiny.WHOLE["deepseek-v3"]())
        with planned_on(torch.device(device)):
            return Trained(lambda: ActorCritic(make())).under(LONG, TWELVE, SETTINGS, ClippedLoss()).activations

    matrices = 2 * LONG.rollouts * 4 * (LONG.sequence - 1) ** 2 * 4  # of two layers, four heads, float32
    assert activations("cpu") - activations("cuda") > 0.9 * matrices
