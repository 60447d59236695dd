"""The bytes that one model of a run needs, by what they are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oppo.events import Batch, Chunk, IntArray, Prompt, Response
from oppo.hf.introspection import backbone
from oppo.hf.kv.attention import attend, kinds_of
from oppo.hf.kv.incremental import Incremental
from oppo.hf.memory.live_bytes import LiveBytes, ModuleT, strip, without_data
from oppo.hf.serve.chunked_prefill import ChunkedPrefill
from oppo.hf.serve.noise import Noise
from oppo.hf.serve.sampling import draw
from oppo.hf.serve.scorers import (
    ProcessRewardWorker,
    ReferenceWorker,
    RewardWorker,
    ScorerInput,
    ScorerWorker,
    ValueWorker,
)
from oppo.hf.serve.signals import Signals
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.core import HfTrainerCore
from oppo.hf.train.packing import pack, units
from oppo.hosted_trainer import TrainerCounts
from oppo.losses import Loss, Whole
from oppo.models import Sampling
from oppo.training import TrainerSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory of one model.

    Attributes:
        weights: parameters and buffers.
        optimizer: AdamW's two moments, and the float32 copies of 16-bit weights.
        gradients: of the trained parameters.
        keys_values: of all rollouts in flight at their longest.
        activations: everything else that is alive at the worst moment.
    """

    weights: int
    optimizer: int = 0
    gradients: int = 0
    keys_values: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of them at once."""
        return self.weights + self.optimizer + self.gradients + self.keys_values + self.activations


@dataclass(frozen=True, slots=True)
class Load:
    """The most that a run asks of its models.

    Attributes:
        rollouts: in flight at once.
        prompt: tokens of the longest prompt.
        response: tokens of the longest response.
        chunk: tokens that reach the scorers at a time.
    """

    rollouts: int
    prompt: int
    response: int
    chunk: int

    @property
    def sequence(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.prompt + self.response


def at_rest(make: Callable[[], nn.Module]) -> Bytes:
    """Return what a model needs that does nothing: its weights, and what their training keeps if some are trained."""
    tensors = {id(each): each for model in [_bare(make)] for each in (*model.parameters(), *model.buffers())}.values()
    trained = [each for each in tensors if each.requires_grad]
    steps_on = sum(each.numel() * max(4, each.element_size()) for each in trained)
    copies = sum(each.numel() * 4 for each in trained if each.element_size() < 4)
    return Bytes(sum(each.nbytes for each in tensors), copies + 2 * steps_on, steps_on)


def of_policy(make: Callable[[], PreTrainedModel], load: Load, sampling: Sampling, *, prefill_tokens: int) -> Bytes:
    """Return what a served policy needs when all rollouts are at their longest and have just been read again.

    Args:
        make: returns the model, made of its config.
        load: what is asked of it.
        sampling: how tokens are drawn.
        prefill_tokens: see :class:`oppo.hf.HfPolicy`.
    """
    model, whole = _bare(make), at_rest(make).weights
    layers = _keep_one_layer(model)
    with without_data() as live, torch.inference_mode():
        model = _attending(strip(model))
        weights, reader = live.now, Incremental(model)
        rows = [_Row(key, load.sequence - 1) for key in range(load.rollouts)]
        prefill = ChunkedPrefill(reader, rows, budget=prefill_tokens, exact=False)
        signals = Signals.of(len(rows))
        while prefill:
            prefill.read(signals)
        logits = reader.step([row.key for row in rows], torch.zeros(len(rows), dtype=torch.int64))
        noise = None
        if sampling.temperature > 0:
            places, at = [(row.key, 0) for row in rows], [load.response] * len(rows)
            noise = Noise(sampling.seed)(places, at, logits.shape[-1], logits.device)
        draw(logits, noise, sampling)
        return _serving(live, weights, reader.memory(), whole, layers)


def of_reference(make: Callable[[], PreTrainedModel], load: Load) -> Bytes:
    """Return what a served reference needs, a causal language model."""
    return _of_scorer(make, lambda model: ReferenceWorker(_attending(model), False, Sampling()), load)


def of_reward(make: Callable[[], PreTrainedModel], load: Load) -> Bytes:
    """Return what a served reward model needs."""
    return _of_scorer(make, lambda model: RewardWorker(_scoring(model), False), load)


def of_process(make: Callable[[], PreTrainedModel], load: Load) -> Bytes:
    """Return what a served process reward model needs."""
    return _of_scorer(make, lambda model: ProcessRewardWorker(_scoring(model), False, (), 0, 0.0), load)


def of_critic(make: Callable[[], PreTrainedModel], load: Load) -> Bytes:
    """Return what a served critic needs, whose weights are its own."""
    return _of_scorer(make, lambda model: ValueWorker(_scoring(model), False), load)


def _of_scorer(
    make: Callable[[], PreTrainedModel], worker_of: Callable[[PreTrainedModel], ScorerWorker[T]], load: Load
) -> Bytes:
    model, whole = _bare(make), at_rest(make).weights
    layers = _keep_one_layer(model)
    with without_data() as live, torch.inference_mode():
        worker = worker_of(strip(model))
        weights = live.now
        rollouts = range(load.rollouts)
        worker.extend(ScorerInput([Prompt(each, each, np.zeros(load.prompt, np.int32)) for each in rollouts]))
        for start in range(0, load.response, load.chunk):
            tokens = np.zeros(min(load.chunk, load.response - start), np.int32)
            worker.extend(ScorerInput([_chunk(each, start, tokens) for each in rollouts]))
        return _serving(live, weights, worker.memory(), whole, layers)


def of_trainer(
    make: Callable[[], ActorCritic], load: Load, sampling: Sampling, settings: TrainerSettings, loss: Loss
) -> Bytes:
    """Return what a trainer needs for the dearest micro-batch: of longest rows, or of rows that are all response."""
    shapes = (load, replace(load, prompt=1))
    return max((_training(make, shape, sampling, settings, loss) for shape in shapes), key=lambda each: each.total)


def _training(
    make: Callable[[], ActorCritic], load: Load, sampling: Sampling, settings: TrainerSettings, loss: Loss
) -> Bytes:
    rows = min(load.rollouts, max(1, settings.micro_batch_tokens // (load.sequence - 1)))
    models = _bare(make)
    with without_data() as live:
        core = HfTrainerCore(strip(models), sampling, settings, loss, TrainerCounts.new())
        batch = longest_batch(rows, load, critic=core.critic is not None)
        weights, trained = live.now, core.optimisation.named_weights().values()
        copies = live.now - weights
        for weight in trained:
            weight.grad = torch.zeros_like(weight)  # of the micro-batches before
        live.peak = live.now
        minibatch = list(chain.from_iterable(units(batch, loss.unit)))
        part = pack(batch, minibatch, core.actor.device, loss.reads | loss.measures)
        core.backward(part, core.outputs(part), Whole.of(batch, minibatch, sampling.max_new_tokens))
        gradients = sum(weight.nbytes for weight in trained)
        states = 2 * gradients
        return Bytes(weights, copies + states, gradients, activations=live.peak - weights - copies - gradients)


def longest_batch(rows: int, load: Load, *, critic: bool) -> Batch:
    """Return a batch of ``rows`` of the longest responses, whose numbers are all 0."""
    tokens = rows * load.response
    zeros = np.zeros(tokens, np.float32)
    responses = tuple(
        Response(
            Prompt(row, row, np.zeros(load.prompt, np.int32), group=row // 2),
            np.zeros(load.response, np.int32),
            np.zeros(load.response, np.float32),
            np.zeros(load.response, np.int32),
            np.ones(load.response, np.bool_),
        )
        for row in range(rows)
    )
    return Batch(
        responses=responses,
        reasons=tuple("length" for _ in responses),
        scores=np.zeros(rows, np.float32),
        offsets=np.array([0, *accumulate([load.response] * rows)]),
        tokens=np.zeros(tokens, np.int32),
        versions=np.zeros(tokens, np.int32),
        sampled=np.ones(tokens, np.bool_),
        logprobs=zeros,
        proximal=zeros,
        reference=zeros,
        values=zeros if critic else None,
        rewards=zeros,
        advantages=zeros,
        returns=zeros if critic else None,
    )


def _bare(make: Callable[[], ModuleT]) -> ModuleT:
    with torch.device("meta"):
        return make()


@dataclass(frozen=True, slots=True)
class _Row:
    """A rollout that the policy reads again."""

    key: int
    length: int
    given_up: bool = False

    def sequence(self) -> Tensor:
        return torch.zeros(self.length, dtype=torch.int64)


def _chunk(rollout: int, start: int, tokens: IntArray) -> Chunk:
    return Chunk(rollout, start, tokens, np.zeros(len(tokens), np.float32), tokens)


def _attending(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model attend as the fastest kind of attention does, which most models pass."""
    attend(model, kinds_of(model)[0])
    return model


def _scoring(model: PreTrainedModel) -> PreTrainedModel:
    _attending(backbone(model))
    return model


def _keep_one_layer(model: PreTrainedModel) -> int:
    """Leave out all layers but the first where all are alike: return how many it stands for, so that counting is quick.

    A layer's activations are gone when the next one begins, so only the cache of one is multiplied.
    """
    config = model.config.get_text_config()
    count, kinds = int(config.num_hidden_layers), set(getattr(config, "layer_types", None) or ())
    for part in model.modules():
        for name, layers in part.named_children():
            if isinstance(layers, nn.ModuleList) and len(layers) == count and len(kinds) <= 1:
                shapes = {tuple((key, each.shape) for key, each in layer.named_parameters()) for layer in layers}
                if len(shapes) == 1:
                    setattr(part, name, layers[:1])
                    return count
    return 1


def _serving(live: LiveBytes, weights: int, memory: tuple[int, int], whole: int, layers: int) -> Bytes:
    keys_values, _ = memory
    return Bytes(whole, keys_values=keys_values * layers, activations=live.peak - weights - keys_values)
