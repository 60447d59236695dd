"""Every architecture that is served: a whole streamed PPO step, and the traps that some of them hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config, PreTrainedModel

from oppo.admission import Overcommit
from oppo.chunking import Fixed
from oppo.errors import ModelError
from oppo.events import Batch, FloatArray, IntArray, Prompt
from oppo.hf.anatomy import backbone, longest, routed, score_head
from oppo.hf.digest import weights_digest
from oppo.hf.incremental import Incremental
from oppo.hf.policy import HfPolicy
from oppo.hf.probe import probe
from oppo.hf.scorers import ReferenceLogprobs, RewardModel, ValueModel
from oppo.hf.trainer import HfTrainer
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.recipes import ppo
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.pipelines import Tap

torch.set_num_threads(1)

SAMPLING = Sampling(max_new_tokens=40, temperature=0.7, stop=(2, 3, 4), seed=3)
PROMPTS = (3, 45, 11, 58, 30)
"""Lengths: with their responses some outgrow the window, some the shortest length class."""

EAGER = ("gemma2", "gptj")
"""Of those tested here, the ones that attend eagerly unless told otherwise."""

MIXTURES = ("qwen2-moe", "qwen3-moe")


class Models:
    """The four models of PPO, of one architecture as far as transformers has it."""

    def __init__(self, name: str, actor: PreTrainedModel | None = None) -> None:
        scalar = "llama" if name in tiny.WITHOUT_SCALAR or name not in tiny.CONFIGS else name
        self.actor = tiny.causal(name, seed=0) if actor is None else actor
        self.reference = tiny.causal(name, seed=1) if actor is None else copy.deepcopy(actor)
        self.reward = tiny.scalar(scalar, seed=2)
        self.critic = tiny.scalar(scalar, seed=3)

    async def step(self, exact: bool = False) -> tuple[Batch, Mapping[str, float]]:
        """Make one streamed step of PPO, with one rollout deferred; return its batch and metrics."""

        def one_core() -> None:
            torch.set_num_threads(1)

        with Thread("decode", setup=one_core) as decoding, Thread("score", setup=one_core) as scoring:
            policy = HfPolicy(self.actor, sampling=SAMPLING, thread=decoding, exact=exact)
            critic = ValueModel(self.critic, thread=scoring, exact=exact)
            graph = ppo(
                policy=policy,
                reference=ReferenceLogprobs(self.reference, sampling=SAMPLING, thread=scoring, exact=exact),
                reward=RewardModel(self.reward, thread=scoring, exact=exact),
                critic=critic,
                trainer=HfTrainer(
                    self.actor,
                    self.critic,
                    sampling=SAMPLING,
                    thread=decoding,
                    settings=TrainerSettings(learning_rate=1e-3, epochs=1, minibatches=1, micro_batch_tokens=200),
                ),
                admission=Overcommit(batch=4, extra=1),
                chunks=Fixed(7),
            )
            tap = Tap()
            async with graph.open(prompts(), observers=[tap]) as run:
                [report] = [report async for report in run.steps(1)]
            assert policy.version == critic.version == 1
        [batch] = [item for _, _, item in tap.items if isinstance(item, Batch)]
        return batch, report.metrics


def prompts() -> list[Prompt]:
    dice = np.random.default_rng(7)
    made: list[IntArray] = [dice.integers(5, tiny.VOCABULARY, length).astype(np.int32) for length in PROMPTS]
    return [Prompt(n, n, tokens, group=n) for n, tokens in enumerate(made)]


def sequences(count: int, length: int) -> Tensor:
    return torch.randint(3, tiny.VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))


def assert_close(got: FloatArray | Tensor, want: FloatArray | Tensor) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def assert_is_what_plain_forwards_say(batch: Batch, models: Models) -> None:
    """Check every number that a model streamed into the batch against its own pass over the whole sequence."""
    for response, row, score in zip(batch.responses, batch.rows(), batch.scores, strict=True):
        ids = torch.from_numpy(np.concatenate((response.prompt.tokens, response.tokens))).long()[None]
        window = slice(len(response.prompt.tokens) - 1, -1)
        for model, got in ((models.actor, batch.logprobs[row]), (models.reference, batch.reference[row])):
            scaled = (model(ids).logits[0, window] / SAMPLING.temperature).log_softmax(-1)
            assert_close(got, scaled.gather(1, ids[0, len(response.prompt.tokens) :, None])[:, 0])
        hidden = backbone(models.critic)(ids).last_hidden_state
        assert_close(batch.values[row], score_head(models.critic)(hidden)[0, window, 0])
        assert_close(score, models.reward(ids).logits[0, 0])


@pytest.mark.parametrize("name", tiny.CONFIGS)
async def test_a_streamed_ppo_step_agrees_with_plain_forward_passes(name: str) -> None:
    models = Models(name)
    before = copy.deepcopy(models)
    for model in (before.actor, before.reference, before.critic, before.reward):
        model.train(mode=False)  # GPT-2, GPT-J and OPT would drop out otherwise
    batch, metrics = await models.step()
    assert len(batch) == 4
    assert max(len(response.prompt.tokens) + len(response) for response in batch.responses) > 64
    assert_is_what_plain_forwards_say(batch, before)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clipfrac_avg"] == 0
    for trained, old in ((models.actor, before.actor), (models.critic, before.critic)):
        assert weights_digest(trained) != weights_digest(old)
        assert all(parameter.isfinite().all() for parameter in trained.parameters())


def test_the_architectures_that_attend_eagerly_are_known() -> None:
    names = [name for name in tiny.CONFIGS if tiny.causal(name).config._attn_implementation == "eager"]
    assert tuple(names) == EAGER


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_model_told_to_attend_eagerly_passes_the_probe(name: str) -> None:
    model = tiny.causal(name)
    model.set_attn_implementation("eager")
    probe(model)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "gemma3"])
def test_a_sequence_may_fill_the_position_table_and_no_more(name: str) -> None:
    model = tiny.causal(name)
    reader, tokens = Incremental(model), sequences(2, tiny.LONGEST)
    with torch.no_grad():
        want = model(tokens).logits
    reader.extend([0, 1], [tokens[0, :-1], tokens[1, :9]])
    assert_close(reader.step([1, 0], tokens[[1, 0], [9, -1]]), torch.stack([want[1, 9], want[0, -1]]))
    with pytest.raises(ModelError, match=f"row 0 would hold {tiny.LONGEST + 1} tokens"):
        reader.step([1, 0], torch.tensor([5, 5]))


# Mixtures of experts.


def routes(model: PreTrainedModel) -> list[Tensor]:
    """Return a list to which each router adds the experts [tokens, k] that it picks, sorted."""
    picked: list[Tensor] = []

    def note(module: torch.nn.Module, inputs: object, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        picked.append(outputs[2].sort(-1).values)

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(note)
    return picked


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_of_a_token_do_not_depend_on_its_batch_mates(name: str) -> None:
    model = tiny.causal(name)
    assert routed(model)
    model.train(mode=False)
    picked, tokens = routes(model), sequences(6, 30)
    with torch.no_grad():
        model(tokens[:1])
    alone = [layer.clone() for layer in picked]
    assert len(alone) == 2
    assert len({int(expert) for expert in alone[0].flatten()}) > 3, "routes must differ for this to say anything"
    reader = Incremental(model)
    reader.extend([1, 2, 3], [tokens[1, :20], tokens[2, :3], tokens[3, :11]])
    for start in range(0, 30, 10):
        picked.clear()
        reader.extend([2, 0, 4 + start], [tokens[2, 3:22], tokens[0, start : start + 10], tokens[4, :17]])
        # Chunks are padded on the left to the longest, 19, and rows stand in the order of their slots.
        at = sorted((0, 2, 4 + start), key=reader._homes[0].slot).index(0)
        for layer, want in zip(picked, alone, strict=True):
            assert torch.equal(layer.view(3, 19, -1)[at, -10:], want[start : start + 10])
        reader.forget([2])
        reader.extend([2], [tokens[2, :3]])


@pytest.mark.parametrize("name", MIXTURES)
async def test_in_exact_mode_a_mixture_gives_the_same_bits_twice(name: str) -> None:
    first, second = [await Models(name).step(exact=True) for _ in range(2)]
    for column in ("tokens", "logprobs", "reference", "values", "scores"):
        assert np.array_equal(getattr(first[0], column), getattr(second[0], column)), column


# Rotary frequencies that depend on the longest sequence of a forward pass.


def longrope() -> PreTrainedModel:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    config = tiny.build(Phi3Config, tiny.GROUPED, original_max_position_embeddings=100, rope_parameters=rope)
    return tiny.of(config)


def dynamic() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    return tiny.of(tiny.build(LlamaConfig, tiny.GROUPED, max_position_embeddings=100, rope_parameters=rope))


@pytest.mark.parametrize("make", [longrope, dynamic])
async def test_length_dependent_frequencies_are_served_up_to_where_they_change(make: type[PreTrainedModel]) -> None:
    model = make()
    assert longest(model) == 100
    probe(model)
    reader, tokens = Incremental(model), sequences(2, 101)
    with torch.no_grad():
        want = model(tokens[:, :100]).logits
    reader.extend([0, 1], [tokens[0, :99], tokens[1, :30]])
    assert_close(reader.extend([1, 0], [tokens[1, 30:70], tokens[0, 99:100]])[0], want[1, 30:70])
    with pytest.raises(ModelError, match="at most 100"):
        reader.extend([0], [tokens[0, 100:]])


@pytest.mark.parametrize("make", [longrope, dynamic])
async def test_a_module_with_length_dependent_frequencies_is_served_and_trained(make: type[PreTrainedModel]) -> None:
    model = make()
    with torch.inference_mode():  # longer than it is ever served: its buffers are made anew, as inference tensors
        model(sequences(1, 130))
    models = Models("", model)
    before = copy.deepcopy(models)
    batch, metrics = await models.step()
    assert_is_what_plain_forwards_say(batch, before)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/grad_norm"] > 0
