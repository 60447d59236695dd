"""The head of a language model: its logits apart from the trunk, in float32, in chunks, and on all sides the same."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from oppo.errors import ConfigError, ModelRefused
from oppo.events import Finish, FloatArray, Prompt, Response
from oppo.hf.head import UPDATE_BYTES, UPDATE_SHARE, OwnHead, require_own_head, widen_head
from oppo.hf.loading import load_causal, load_scalar, outline
from oppo.hf.lora import add_lora
from oppo.hf.memory import Load, longest_batch
from oppo.hf.meta_device import planned_on
from oppo.hf.model_files import SCALAR, reward_kind
from oppo.hf.model_parts import backbone, has_experts, passes_at
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import (
    ProcessRewardWorker,
    ReferenceLogprobs,
    RewardModel,
    RewardWorker,
    ScorerInput,
    ValueModel,
    ValueWorker,
)
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.packing import pack
from oppo.hf.train.trainer import HfTrainerCore
from oppo.hf.weights import SharedModel, weights_digest
from oppo.losses import ClippedLoss, Input, PPOLoss
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.placement.child import pack_with_blocks, unpack
from oppo.placement.trainer import TrainerCounts
from oppo.simulate.profile import GPUS, MODELS, Reached
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.child import ONE
from tests.hf.stories import response_values
from tests.hf.train.test_actor_critic import Twisted
from tests.hf.train.test_expert_routing import batch_of
from tests.kit.responses import responses, stream
from tests.kit.workplace import furnish, oppo, resume, tokenizer

SAMPLING = Sampling(max_new_tokens=120, seed=1)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.hf.head.WIDE", {"cpu"})
    monkeypatch.setattr("oppo.hf.head._product", lambda rows, weight: rows.float() @ weight.float().t())


def half(name: str = "llama") -> PreTrainedModel:
    """Return a model in 16 bits whose logits are as large as those of a trained one."""
    model = tiny.causal(name, seed=1, dtype=torch.bfloat16)
    model.train(mode=False)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.get_parameter("weight").mul_(8 / OwnHead(model)(states(model)).std())
    return model


def states(model: PreTrainedModel) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 64, tiny.HIDDEN, generator=generator).to(model.dtype)


def test_gradients_of_short_weights_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    head = OwnHead(tiny.causal(seed=1, dtype=torch.bfloat16))
    hidden = torch.randn(64, tiny.HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr("oppo.hf.head.LOGITS_BYTES", 4 * tiny.VOCABULARY)
    (weight,) = (weight for weight in head._shell.parameters() if weight.shape == (tiny.VOCABULARY, tiny.HIDDEN))

    def measure(logits: Tensor, at: slice, again: bool) -> dict[Input, Tensor]:
        del at, again
        return {"logprobs": logits.float().logsumexp(-1)}

    head.measured(hidden, measure)["logprobs"].sum().backward()
    each = []
    for one in hidden:
        (found,) = torch.autograd.grad(head(one[None, None])[0].float().logsumexp(-1).sum(), weight)
        each.append(found.float())
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.stack(each).sum(0).bfloat16())


class Flops(TorchDispatchMode):
    """Counts what is computed, in the backward pass of a function of its own too."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        self.total += count(*args, **(kwargs or {}), out_val=out) if count else 0
        return out


@pytest.mark.parametrize("checkpointing", [0, 1])
@pytest.mark.parametrize("chunks", [1, 4])
def test_passes_of_the_head_in_an_update_are_those_that_the_simulator_counts(
    monkeypatch: pytest.MonkeyPatch, chunks: int, checkpointing: int
) -> None:
    widths, found, tokens = (100, 300), list[int](), 4 * 16
    for width in widths:
        model = tiny.causal()
        model.resize_token_embeddings(width)
        chosen = TrainerSettings(epochs=1, gradient_checkpointing=checkpointing)
        core = HfTrainerCore(ActorCritic(model, None), SAMPLING, chosen, ClippedLoss(), TrainerCounts.new())
        monkeypatch.setattr("oppo.hf.head.CPU_LOGITS_BYTES", 4 * width * tokens // chunks)
        with Flops() as flops:  # type: ignore[no-untyped-call]  # torch's
            core.update(longest_batch(4, Load(4, 8, 16, 8), critic=False))
        found.append(flops.total)
    passes = round((found[1] - found[0]) / (2 * tiny.HIDDEN * (widths[1] - widths[0]) * tokens))
    assert passes == (3 if chunks == 1 else 4)
    free, size = Reached(activations=0.0, logits=0.0), MODELS["qwen2.5-0.5b"]
    with_it, without = (free.update(GPUS["h100"], size, head=each).token for each in (True, False))
    simulated = (with_it - without) * GPUS["h100"].flops * free.training / (2 * size.head)
    assert chunks == 1 or simulated == pytest.approx(passes), "which has chunks, as updates of any size do"


@pytest.mark.parametrize("read_by", ["reward", "steps", "critic", "trained"])
def test_scores_of_16_bits_are_in_float32_whoever_reads_them(read_by: str) -> None:
    model = (tiny.steps(labels=3) if read_by == "steps" else tiny.scalar()).bfloat16()
    seen = list[tuple[Tensor, Tensor]]()
    score = model.get_submodule("score")
    score.register_forward_hook(lambda module, given, output: seen.append((given[0].detach().clone(), output)))
    if read_by == "trained":
        with torch.no_grad():
            model.get_input_embeddings().get_parameter("weight")[0] = 1.0
        core = HfTrainerCore(
            ActorCritic(tiny.causal(), model), SAMPLING, TrainerSettings(epochs=1), PPOLoss(), TrainerCounts.new()
        )
        core.update(longest_batch(4, Load(4, 8, 16, 8), critic=True))
        before = tiny.scalar().bfloat16().get_submodule("score").get_parameter("weight")
    else:
        workers: dict[str, Any] = {"reward": RewardWorker, "critic": ValueWorker, "steps": ProcessRewardWorker}
        worker = workers[read_by](model, False, *([(5,), 0, 0.0] if read_by == "steps" else []))
        worker.extend(ScorerInput([Prompt(0, 0, np.arange(60, dtype=np.int32))]))
        before = score.get_parameter("weight")
    (hidden, output), *_ = seen
    with torch.inference_mode():
        expected = hidden.double() @ before.double().t()
        narrow = torch.nn.functional.linear(hidden, before)
    assert output.dtype == torch.float32
    assert (output - expected).abs().max() < 1e-3 * (narrow - expected).abs().max()


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_16_bits_have_logits_in_float32_and_copies_read_their_own_weights(name: str) -> None:
    model = half(name)
    head, hidden = model.get_output_embeddings(), states(model)
    weight, bias = head.get_parameter("weight"), getattr(head, "bias", None)
    expected = hidden.double() @ weight.double().t() + (0 if bias is None else bias.double())
    narrow = torch.nn.functional.linear(hidden, weight, bias)
    for each in (head, copy.deepcopy(model).get_output_embeddings(), pickle.loads(pickle.dumps(head))):
        logits = each(hidden)
        assert logits.dtype == torch.float32
        assert (logits - expected).abs().max() < 1e-3 * (narrow - expected).abs().max()
    copied = copy.deepcopy(model).get_output_embeddings()
    with torch.no_grad():
        copied.get_parameter("weight").zero_()
    assert copied(hidden).std() < head(hidden).std()


@pytest.mark.usefixtures("wide")
def test_their_gradients_are_those_of_a_product_in_16_bits() -> None:
    model = half()
    head, hidden = model.get_output_embeddings(), states(model).requires_grad_()
    weight = head.get_parameter("weight")
    into = torch.randn(1, 64, tiny.VOCABULARY, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(head(hidden), (hidden, weight), into)
    expected = torch.autograd.grad(torch.nn.functional.linear(hidden, weight), (hidden, weight), into.bfloat16())
    assert [each.dtype for each in found] == [torch.bfloat16] * 2
    torch.testing.assert_close(found, expected)


def test_a_head_of_32_bits_stays_as_it_is() -> None:
    model = tiny.causal(seed=1)
    widen_head(model)
    assert "forward" not in vars(model.get_output_embeddings())


async def logprobs_of(model: PreTrainedModel) -> Mapping[str, FloatArray]:
    """Return the log-probs of the same tokens by the decoder, by a reference and by the trainer."""
    prompts = [Prompt(n, n, np.arange(5 + 7 * n, 8 + 9 * n, dtype=np.int32)) for n in range(6)]
    with Thread("models", setup=ONE) as thread:
        policy = HfPolicy(model, sampling=SAMPLING, place=thread)
        reference = ReferenceLogprobs(model, sampling=SAMPLING, place=thread)
        responses = {prompt.rollout: Response.empty(prompt) for prompt in prompts}
        decodes = await policy.open(prompts)
        async with policy.decoding(decodes, lambda _: False):
            for decode in decodes:
                rollout = decode.prompt.rollout
                responses[rollout] = responses[rollout].then(await decode.read(100))
        batch = batch_of(list(responses.values()))
        await reference.extend([event for each in batch.responses for event in (each.prompt, each.chunk())])
        finished = [Finish(each.prompt.rollout, each, "length") for each in batch.responses]
        read = np.concatenate(await reference.finish(finished))

    def trained() -> FloatArray:
        settings = TrainerSettings()
        core = HfTrainerCore(ActorCritic(model), SAMPLING, settings, ClippedLoss(), TrainerCounts.new())
        found: FloatArray = core.outputs(pack(batch, range(len(batch)), model.device))["logprobs"].detach().numpy()
        return found

    return {"decoder": batch.logprobs, "reference": read, "trainer": await anyio.to_thread.run_sync(trained)}


@pytest.mark.usefixtures("wide")
async def test_decoder_reference_and_trainer_agree_better_than_logits_of_16_bits_let_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apart(found: Mapping[str, FloatArray], other: str) -> float:
        difference = found["decoder"].astype(np.float64) - found[other]
        return float((np.exp(difference) - 1 - difference).mean())  # k3, nats

    at_once = await logprobs_of(tiny.apart(half)())
    monkeypatch.setattr("oppo.hf.head.LOGITS_BYTES", 4 * tiny.VOCABULARY * 5)
    in_chunks = await logprobs_of(tiny.apart(half)())
    monkeypatch.setattr("oppo.hf.head.WIDE", set())
    narrow = await logprobs_of(tiny.apart(half)())
    for one in ("reference", "trainer"):
        np.testing.assert_allclose(in_chunks[one], at_once[one], atol=1e-5)
        assert apart(at_once, one) < 0.8 * apart(narrow, one)


@given(vocabulary=st.integers(2, 300_000), tokens=st.integers(1, 1 << 17))
def test_chunks_of_logits_grow_with_an_update_on_a_gpu_alone(vocabulary: int, tokens: int) -> None:
    head = OwnHead(tiny.causal())
    head._shell.config.vocab_size = vocabulary
    assert head.chunk(tokens) == head.chunk()
    with planned_on(torch.device("cuda")):
        least, most = head.chunk(), head.chunk(1 << 30)
        assert head.chunk(tokens) == min(max(least, -(-tokens // UPDATE_SHARE)), most)
        assert head.chunk(tokens) < max(tokens, least + 1), "logits that take more are computed again"
        assert 4 * vocabulary * most <= UPDATE_BYTES


def test_a_head_that_cannot_be_told_from_its_trunk_is_refused() -> None:
    twisted = Twisted(tiny.causal("cohere", seed=1).train(mode=False))
    with pytest.raises(ModelRefused, match=r"the head of Twisted.*set models\.shared_trunk = false"):
        require_own_head(twisted)


CAUSAL = {**tiny.CONFIGS, **tiny.STATEFUL, **tiny.ONLY_WHOLE}
NAMES = ("cohere", "lfm2", "mamba", "qwen3-vl")
FURTHER = ("granite", "falcon-h1", "nemotron-h", "rwkv", "gemma3", "llava")


def made(name: str) -> PreTrainedModel:
    return (
        tiny.of(CAUSAL[name](), seed=1) if name in CAUSAL and name != "gemma3" else tiny.of(tiny.VISION[name](), seed=1)
    )


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.deep) for name in FURTHER)])
def test_a_value_head_on_any_trunk_is_new_once_and_then_saved_with_it(
    name: str, tmp_path: Path, thread: Thread
) -> None:
    made(name).save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"has no score\.weight: .* a reward from an untrained head would be noise"):
        load_scalar(tmp_path / "policy")
    critic = load_scalar(tmp_path / "policy", new_head=True)
    assert not critic.get_parameter("score.weight").any()
    assert weights_digest(backbone(critic)) == weights_digest(backbone(load_causal(tmp_path / "policy")))
    assert outline(SCALAR, tmp_path / "policy").num_parameters() == critic.num_parameters()
    torch.nn.init.normal_(critic.get_parameter("score.weight"))
    critic.save_pretrained(tmp_path / "critic")
    assert reward_kind(tmp_path / "critic") == "scalar"
    again = load_scalar(tmp_path / "critic")
    crossed = cast("SharedModel[PreTrainedModel]", unpack(pack_with_blocks(SharedModel(again)))).load()
    for other in (again, copy.deepcopy(critic), crossed):
        assert type(other) is type(critic)
        assert weights_digest(other) == weights_digest(critic)
    texts = responses(3)
    values = anyio.run(stream, ValueModel(crossed, place=thread), texts, 3)
    scores = anyio.run(stream, RewardModel(again, place=thread), texts, 4)
    for response in texts:
        wanted = response_values(critic, response)
        np.testing.assert_allclose(np.asarray(values[response.prompt.rollout]), wanted, rtol=1e-4, atol=1e-4)
        if response.tokens[-1]:  # else padding, behind the last score
            assert scores[response.prompt.rollout] == pytest.approx(wanted[-1], rel=1e-4, abs=1e-4)


def test_a_class_of_ours_is_called_as_transformers_would_and_stands_in_for_none_of_its_own(tmp_path: Path) -> None:
    SCALAR.made(tiny.STATEFUL["lfm2"]()).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Lfm2ForSequenceClassification"]
    assert type(SCALAR.made(tiny.CONFIGS["llama"]())) is LlamaForSequenceClassification


def test_a_trunk_inside_of_another_part_is_refused_by_name() -> None:
    with torch.device("meta"), pytest.raises(ModelRefused, match="Llama4ForConditionalGeneration holds its trunk ins"):
        SCALAR.made(AutoConfig.for_model("llama4"))


_DBRX = {
    "d_model": 32,
    "n_heads": 2,
    "n_layers": 1,
    "vocab_size": 96,
    "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
}


def test_a_model_with_more_than_one_expert_is_a_mixture() -> None:
    assert all(has_experts(tiny.mixture(name)) for name in tiny.MIXTURES)
    assert not any(has_experts(tiny.causal(name)) for name in ("llama", "gpt2"))


def test_the_experts_of_dbrx_are_in_a_section_of_its_config() -> None:
    for experts in (4, 1):
        sizes = {"ffn_hidden_size": 32, "hidden_size": 32, "moe_num_experts": experts, "moe_top_k": 1}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("dbrx", **_DBRX, ffn_config=sizes))
        assert has_experts(model) == (experts > 1)


TOKENS = 48


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "neox", "olmo2"])
def test_flops_are_those_that_torch_counts(name: str) -> None:
    model = tiny.causal(name)
    model.set_attn_implementation("eager")
    passes, ids = passes_at(1.0, model), torch.arange(TOKENS)[None] % tiny.VOCABULARY
    with FlopCounterMode(display=False) as forward:
        loss = model(ids, use_cache=False).logits.float().logsumexp(-1).sum()
    # Eager attention computes with the tokens behind, too.
    assert forward.get_total_flops() == pytest.approx(passes.token * TOKENS + passes.pair * TOKENS**2, rel=0.02)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    both = passes_at(1.0, model, epochs=1)
    counted = forward.get_total_flops() + backward.get_total_flops()
    assert counted == pytest.approx(both.token * TOKENS + both.pair * TOKENS**2, rel=0.02)
    assert astuple(passes_at(1.0, model, epochs=3)) == pytest.approx(tuple(3 * each for each in astuple(both)))


def test_a_matrix_that_is_not_trained_has_no_gradient_of_its_own() -> None:
    model = tiny.causal("llama")
    alone = passes_at(1.0, model).token
    add_lora(model, 4, 8)
    adapters = passes_at(1.0, model).token - alone
    assert 0 < adapters < alone / 2
    assert passes_at(1.0, model, epochs=1).token == 2 * alone + 3 * adapters


def test_a_token_has_some_of_the_experts_and_attention_in_a_window_does_not_count() -> None:
    few, many = (tiny.mixture("qwen3-moe", num_experts_per_tok=count) for count in (1, 2))
    assert 0 < passes_at(1.0, many).token - passes_at(1.0, few).token < passes_at(1.0, few).token
    assert passes_at(1.0, tiny.causal("mistral")).pair == 0 < passes_at(1.0, tiny.causal("llama")).pair


WITHOUT = [name for name in tiny.VISION if name != "qwen3.5"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = furnish(tmp_path_factory.mktemp("workplace"))
    for name in tiny.VISION:
        tiny.of(tiny.VISION[name](), seed=1).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
        (folder / name / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    return folder


def of_images(name: str) -> bool:
    parts = {*name.split(".")}
    if parts & {"git", "output"}:  # of GIT, whose language model is no part of its own
        return "image_encoder" in parts
    return not parts & {"language_model", "lm_head", "embed_tokens", "score"}


@pytest.mark.parametrize("name", tiny.VISION)
def test_it_loads_whole_and_only_its_language_model_is_trained(name: str, workplace: Path) -> None:
    model = load_causal(workplace / name)
    frozen = {each for each, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen
    assert frozen == {each for each, _ in model.named_parameters() if of_images(each)}


def test_a_critic_of_one_is_trained_in_its_language_model_and_its_head(tmp_path: Path) -> None:
    config = tiny.VISION["gemma3"]()
    config.num_labels = 1
    tiny.scalar_of(config).save_pretrained(tmp_path)
    critic = load_scalar(tmp_path)
    trained = {each for each, weight in critic.named_parameters() if weight.requires_grad}
    assert "score.weight" in trained
    assert trained == {each for each, _ in critic.named_parameters() if not of_images(each)}


@pytest.mark.adapters
@pytest.mark.parametrize("name", WITHOUT)
def test_adapters_are_those_of_the_language_model(name: str, workplace: Path) -> None:
    model = load_causal(workplace / name)
    add_lora(model, 2, 4)
    trained = [each for each, weight in model.named_parameters() if weight.requires_grad]
    assert trained
    assert all(".lora_" in each and not of_images(each) for each in trained)


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_a_run_trains_and_resumes_it_and_saves_the_whole_checkpoint(name: str, workplace: Path) -> None:
    chosen = (f"models.policy={name}", "rewards.0.source=reward.py:short", "step.algorithm=grpo", "algorithm.samples=2")
    options = (*chosen, "run.panel=off", "run.deterministic=true", "trainer.learning_rate=1e-2", "step.overcommit=0")
    assert oppo(workplace, "", f"run.name={name}", *options) == 0
    assert oppo(workplace, "", f"run.name={name}-1", "run.steps=1", *options) == 0
    assert resume(workplace, f"{name}-1", "run.steps=2") == 0
    before = load_file(workplace / name / "model.safetensors")
    after, resumed = (saved(workplace / "runs" / run) for run in (name, f"{name}-1"))
    assert before.keys() == after.keys() == resumed.keys()
    changed = {each for each, tensor in before.items() if not torch.equal(tensor, after[each])}
    assert changed
    assert not {each for each in changed if of_images(each)}
    assert all(torch.equal(tensor, resumed[each]) for each, tensor in after.items())
    final = workplace / "runs" / name / "checkpoints" / "final" / "actor"
    assert (final / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'
    assert type(AutoModelForImageTextToText.from_pretrained(final)).__name__.endswith("ForConditionalGeneration")


def saved(run: Path) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / "final" / "actor" / "model.safetensors")
