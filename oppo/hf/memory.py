"""The memory that the models of a run will need, before any of them is loaded, and the memory of devices.

The code that serves and trains the models runs on tensors without data (PyTorch's fake tensors), which have shapes,
dtypes and devices, and the bytes of those that are alive are counted. So an estimate knows the architecture, the
attention, gradient checkpointing, adapters and 16-bit weights as the run will. It leaves out what an allocator rounds
up or keeps, and the work space of kernels.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, groupby, zip_longest
from operator import itemgetter
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oppo.errors import ConfigError, ModelRefused
from oppo.events import Batch, Chunk, Finish, FloatArray, IntArray, Prompt, Response
from oppo.hf.kv.attention import attend, kinds_of
from oppo.hf.kv.prefill import TOKENS_PER_PASS
from oppo.hf.kv.reader import Incremental, WholeRows
from oppo.hf.kv.states import RowCache
from oppo.hf.meta_device import LiveBytes, without_data
from oppo.hf.model_parts import FAILURES, backbone, longest, require_pieces, set_only_whole
from oppo.hf.servable import known_reason
from oppo.hf.serve.decoder import ChunkedPrefill, DecodeRow, Signals
from oppo.hf.serve.sampling import Drawing
from oppo.hf.serve.scorers import (
    ProcessRewardWorker,
    ReferenceWorker,
    ScorerInput,
    ScorerWorker,
    ValueWorker,
)
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.optim import matrices
from oppo.hf.train.packing import CPU_TOKENS, pack, units
from oppo.hf.train.trainer import HfTrainerCore
from oppo.losses import Loss, Whole
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.stages.batch import ScoredRollout, ScoredRollouts
from oppo.training import TrainerSettings

T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_META: Final = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory of one model.

    ``optimizer``: its moments, and float32 copies of 16-bit weights. ``keys_values``: of all rollouts in flight at
    their longest, states included. ``activations``: everything else that is alive at the worst moment.
    """

    weights: int
    optimizer: int = 0
    gradients: int = 0
    keys_values: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.keys_values + self.activations


@dataclass(frozen=True, slots=True)
class Load:
    """The most that a run asks of its models: rollouts in flight, and the longest of each in tokens.

    ``one_by_one``: they join as agents ask, so that a cache that grows for one keeps slots to spare for more.
    """

    rollouts: int
    prompt: int
    response: int
    chunk: int
    one_by_one: bool = False

    @property
    def sequence(self) -> int:
        return self.prompt + self.response

    def within(self, positions: int) -> Self:
        """Return the same load with prompts that leave room for the response within that many positions."""
        response = min(self.response, positions - 1)
        return replace(self, prompt=min(self.prompt, positions - response), response=response)


Adapt: TypeAlias = Callable[[ModuleT], ModuleT]
"""Changes a copy of a model with fewer layers, such as by adding adapters, and returns it."""


def same(model: ModuleT) -> ModuleT:
    return model


def at_rest(
    make: Callable[[], ModuleT], adapt: Callable[[ModuleT], nn.Module] = same, optimizer: str = "adamw"
) -> Bytes:
    whole = _bare(make)
    if adapt is same:
        return _resting(whole, (), optimizer)
    few, stacks = _shortened(whole, [stack.standing() for stack in _stacks(whole)])
    return _resting(adapt(few), stacks, optimizer)


def _resting(model: nn.Module, stacks: Sequence[_Stack], optimizer: str) -> Bytes:
    # A layer that stands for others counts as many times.
    times = {
        id(each): stack.stands.count(number // stack.every)
        for stack in stacks
        for layers in stack.layers
        for number, layer in enumerate(layers)
        for each in (*layer.parameters(), *layer.buffers())
    }
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}.values()
    counted = [(each, times.get(id(each), 1)) for each in tensors]
    trained = [(each, count) for each, count in counted if each.requires_grad]
    steps_on = sum(count * each.numel() * max(4, each.element_size()) for each, count in trained)
    copies = sum(count * each.numel() * 4 for each, count in trained if each.element_size() < 4)
    once = {*map(id, matrices(cast("ActorCritic", model).pretrained))} if optimizer == "muon" else set[int]()
    states = sum(  # Muon keeps one number of each weight, AdamW two
        count * each.numel() * max(4, each.element_size()) * (1 if id(each) in once else 2) for each, count in trained
    )
    # A backward pass leaves gradients of 16 bits, which are added up in float32 after it.
    weights = sum(count * each.nbytes for each, count in counted)
    return Bytes(weights, copies + states, steps_on, activations=copies // 2)


class ServedPolicy:
    """The memory of a policy that decodes; the few layers that stand for all are made once for all loads."""

    def __init__(self, make: Callable[[], PreTrainedModel], adapt: Adapt[PreTrainedModel] = same) -> None:
        self._whole, self._adapt = _bare(make), adapt
        self.at_rest = Bytes(at_rest(lambda: self._whole, adapt).weights)

    def shortest(self, rollouts: int) -> Bytes:
        """Return the least that it needs: its weights, and the states of its rollouts, however short."""
        if RowCache(self._whole.config).states is None:
            return self.at_rest
        least = self.under(Load(rollouts, 1, 1, 1), Sampling(), prefill_tokens=rollouts)
        return replace(self.at_rest, keys_values=least.keys_values)

    def under(self, load: Load, sampling: Sampling, *, prefill_tokens: int) -> Bytes:
        """Return what it needs when all rollouts are at their longest and have just been read again."""
        if load.response >= (positions := longest(self._whole)):
            raise ConfigError(
                f"sampling.max_new_tokens = {load.response} leaves no room for a prompt in the {positions} positions "
                "of the policy: lower it"
            )
        load = load.within(positions)
        model, layers = self._few
        every, length = [*range(load.rollouts)], load.sequence - 1
        part, unread = max(1, prefill_tokens // length), min(length, prefill_tokens)
        with _reading_in_pieces(model), without_data(model) as live, torch.inference_mode():
            weights, reader = live.now, self._reader
            reader.expect(range(len(every) * (2 if load.one_by_one else 1)))
            reader.hold(dict.fromkeys(every[part:], length))
            if length > unread:
                reader.hold(dict.fromkeys(every[:part], length - unread))
            prompt = np.zeros(length, np.int32)
            rows = [DecodeRow(key, Prompt(key, key, prompt), load.sequence) for key in every[:part]]
            live.peak = live.now  # the last portion, and the decode step after it, find the most
            prefill = ChunkedPrefill(reader, rows, budget=prefill_tokens, deterministic=False)
            while prefill:
                prefill.read(Signals.of(len(rows)))
            logits = reader.step(every, torch.zeros(load.rollouts, dtype=torch.int64))
            Drawing(sampling, logits.device)(logits, [(key, 0) for key in every], [load.response] * len(every))
            found = _serving(live, weights, reader.layer_bytes(), self.at_rest.weights, layers)
            reader.clear()
            return found

    @cached_property
    def _few(self) -> tuple[PreTrainedModel, list[int]]:
        model, layers = _few(self._whole)
        set_only_whole(model, known_reason(model))
        return _attending(self._adapt(model)), layers

    @cached_property
    def _reader(self) -> Incremental:
        reader = Incremental(self._few[0])
        reader.extend([0], [torch.zeros(1, dtype=torch.int64)])  # it knows the caches of its layers from now on
        reader.clear()
        return reader


@contextmanager
def _reading_in_pieces(model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:  # as in the probe, for which there are no weights here: if it reads whole rows at least
        with without_data(model):
            WholeRows(model).extend([0], [torch.zeros(2, dtype=torch.int64)])
        set_only_whole(model, f"{type(model).__name__} cannot be served row by row: it failed when tried ({error!r})")
        require_pieces(model)


class ServedScorer(Generic[T]):
    """The memory of a model that reads rollouts while they grow, or each once if that fails."""

    def __init__(
        self,
        make: Callable[[], PreTrainedModel],
        worker_of: Callable[[PreTrainedModel], ScorerWorker[T]],
        adapt: Adapt[PreTrainedModel] = same,
    ) -> None:
        self._whole, self._worker_of, self._adapt = _bare(make), worker_of, adapt
        self.at_rest = Bytes(at_rest(lambda: self._whole, adapt).weights)
        self._only_whole = known_reason(self._whole)

    def under(self, load: Load) -> Bytes:
        try:
            return self._under(load)
        except (ModelRefused, *FAILURES) as error:  # as in the probe, for which there are no weights here
            if self._only_whole:
                raise
            self._only_whole = str(error)
            self.__dict__.pop("_few", None)
            self.__dict__.pop("_worker", None)
            return self._under(load)

    def _under(self, load: Load) -> Bytes:
        load = load.within(longest(self._whole))
        model, layers = self._few
        with without_data(model) as live, torch.inference_mode():
            worker, tail = self._worker
            weights, chunk = live.now, min(load.chunk, load.response, TOKENS_PER_PASS)
            rollouts = range(load.rollouts)
            last = [_chunk(each, 0, np.zeros(chunk, np.int32)) for each in rollouts]
            before = load.sequence - chunk
            if self._only_whole:  # where it is read now; it keeps nothing, so a few passes find the most
                few = rollouts[: 2 * -(-TOKENS_PER_PASS // load.sequence)]
                prompts = [Prompt(each, each, np.zeros(before, np.int32)) for each in few]
                worker.extend(ScorerInput([*prompts, *last[: len(few)]]))
                worker.reader.finish(dict.fromkeys(few, chunk))
            else:
                few = rollouts[: TOKENS_PER_PASS // chunk]
                worker.reader.hold({each: before if each in few else load.sequence for each in rollouts}, tail)
                live.peak = live.now  # the last pass finds the most
                worker.extend(ScorerInput(last[: len(few)]))
            found = _serving(live, weights, worker.reader.layer_bytes(), self.at_rest.weights, layers)
            worker.forget(rollouts)
            return found

    @cached_property
    def _few(self) -> tuple[PreTrainedModel, list[int]]:
        model, layers = _few(self._whole)
        set_only_whole(model, self._only_whole)
        return self._adapt(model), layers

    @cached_property
    def _worker(self) -> tuple[ScorerWorker[T], Tensor | None]:
        worker = self._worker_of(self._few[0])
        if self._only_whole:
            return worker, None
        worker.extend(ScorerInput([Prompt(0, 0, np.zeros(2, np.int32))]))  # it knows the caches of its layers now
        tail = worker.reader.tail(0)
        worker.forget([0])
        return worker, tail


def served_reference(
    make: Callable[[], PreTrainedModel], adapt: Adapt[PreTrainedModel] = same
) -> ServedScorer[FloatArray]:
    return ServedScorer(make, lambda model: ReferenceWorker(_attending(model), False, Sampling()), adapt)


def served_process_reward(make: Callable[[], PreTrainedModel]) -> ServedScorer[Any]:
    return ServedScorer(make, lambda model: ProcessRewardWorker(_scoring(model), False, (), 0, 0.0))


def served_critic(make: Callable[[], PreTrainedModel]) -> ServedScorer[FloatArray]:
    return ServedScorer(make, lambda model: ValueWorker(_scoring(model), False))


class Trained(Generic[ModuleT]):
    """The memory of models that are trained; ``make`` without the changes of ``adapt``, which are made to copies."""

    def __init__(self, make: Callable[[], ModuleT], adapt: Callable[[ModuleT], nn.Module] = same) -> None:
        self._whole, self._adapt = _bare(make), adapt
        self._stacks = [*_stacks(self._whole)]
        self._at_rest = dict[str, Bytes]()

    def at_rest(self, optimizer: str) -> Bytes:
        if optimizer not in self._at_rest:
            self._at_rest[optimizer] = at_rest(lambda: self._whole, self._adapt, optimizer)
        return self._at_rest[optimizer]

    def under(self, load: Load, sampling: Sampling, settings: TrainerSettings, loss: Loss) -> Bytes:
        """Return what they need during the most expensive micro-batch."""
        stacks = [stack.standing(max(1, settings.gradient_checkpointing)) for stack in self._stacks]

        def most(shape: Load, stacks: Sequence[_Stack]) -> int | None:
            few, copies = _shortened(self._whole, stacks)
            models = cast("ActorCritic", self._adapt(few))
            return _micro_batch(models, copies, shape, sampling=sampling, settings=settings, loss=loss).at_most(copies)

        activations = max(
            most(shape, ()) or 0 if (found := most(shape, stacks)) is None else found
            for shape in self._expensive(load, settings.micro_batch_tokens or CPU_TOKENS)
        )
        return replace(self.at_rest(settings.optimizer), activations=activations)

    def _expensive(self, load: Load, budget: int) -> list[Load]:
        # Of longest rows, or of rows that are all response; of both, if neither surely needs more than the other.
        load = load.within(longest(next(each for each in self._whole.modules() if isinstance(each, PreTrainedModel))))
        shapes = load, replace(load, prompt=1)
        rows = [rows_of(shape, budget) for shape in shapes]
        tokens = [count * (shape.sequence - 1) for count, shape in zip(rows, shapes, strict=True)]
        if tokens[0] >= tokens[1] and rows[0] >= rows[1]:
            return [shapes[0]]
        masks = [count * (shape.sequence - 1) for count, shape in zip(tokens, shapes, strict=True)]
        widths = [each.embedding_dim for each in self._whole.modules() if isinstance(each, nn.Embedding)]
        # A layer keeps far more of a token than eight times its hidden state, and less of a mask than two numbers.
        is_more = 4 * min(widths, default=0) * (tokens[1] - tokens[0]) > masks[0] - masks[1]
        return [shapes[1]] if is_more else [*shapes]


def rows_of(load: Load, budget: int) -> int:
    return min(load.rollouts, max(1, budget // (load.sequence - 1)))


def _micro_batch(
    models: ActorCritic,
    stacks: Sequence[_Stack],
    load: Load,
    *,
    sampling: Sampling,
    settings: TrainerSettings,
    loss: Loss,
) -> _Visits:
    load = load.within(longest(models.actor))
    rows = rows_of(load, settings.micro_batch_tokens or CPU_TOKENS)
    models.prepare()  # here, where there is nothing to compare
    with without_data(models) as live:
        core = HfTrainerCore(models, sampling, settings, loss, TrainerCounts.new())
        batch = longest_batch(rows, load, critic=core.critic is not None)
        for weight in core.optimisation.named_weights().values():
            weight.grad = torch.zeros_like(weight)  # of the micro-batches before
        minibatch = list(chain.from_iterable(units(batch, loss.unit)))
        visits = _Visits(live, stacks)
        part = pack(batch, minibatch, core.actor.device, loss.reads | loss.measures)
        core.backward(part, core.outputs(part), Whole.of(batch, minibatch, sampling.max_new_tokens))
        visits.enter(None, 1)
    return visits


class _Visits:
    """The visits of a forward and a backward pass to the layers of models, each until the next one begins.

    A visit leaves as many bytes, and has as many at most above those before it, in every layer of a kind.
    """

    def __init__(self, live: LiveBytes, stacks: Sequence[_Stack]) -> None:
        self._live = live
        self._backwards = False
        self._at: tuple[bool, int | None, int] = (False, None, 0)
        self._made = list[tuple[tuple[bool, int | None], int, int, int]]()  # pass and stack, block, at most, left
        for number, stack in enumerate(stacks):
            for layers in stack.layers:
                for at, layer in enumerate(layers):
                    layer.register_forward_pre_hook(partial(self._forward, number, at // stack.every))
                    layer.register_forward_hook(partial(self._forwarded, number, at // stack.every))
        live.peak = self._start = live.now

    def enter(self, stack: int | None, block: int) -> None:
        if (at := (self._backwards, stack, block)) != self._at:
            self._made.append((self._at[:2], self._at[2], self._live.peak - self._start, self._live.now - self._start))
            self._at, self._live.peak, self._start = at, self._live.now, self._live.now

    def at_most(self, stacks: Sequence[_Stack]) -> int | None:
        """Return the most bytes at once with all layers; ``None``: passes do not run through them one by one."""
        now = most = 0
        for (_, number), each in groupby(self._made, key=itemgetter(0)):
            visits = {block: figures for _, block, *figures in each}
            order: Sequence[int] = [*visits]
            if number is not None:
                stands = stacks[number].stands
                if sorted(visits) != sorted(set(stands)):
                    return None
                order = stands if order[0] < order[-1] else stands[::-1]
            for block in order:
                above, left = visits[block]
                most, now = max(most, now + above), now + left
        return most

    def _forward(self, stack: int, block: int, *_: object) -> None:
        self.enter(stack, block)

    def _forwarded(
        self, stack: int, block: int, _layer: nn.Module, _inputs: object, output: Tensor | Sequence[Tensor]
    ) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(partial(self._backward, stack, block))

    def _backward(self, stack: int, block: int, _: Tensor) -> None:
        self._backwards = True
        self.enter(stack, block)


def longest_batch(rows: int, load: Load, *, critic: bool) -> Batch:
    ids, zeros = np.zeros(load.response, np.int32), np.zeros(load.response, np.float32)
    values, rollouts = zeros if critic else None, list[ScoredRollout]()
    for row in range(rows):
        prompt = Prompt(row, row, np.zeros(load.prompt, np.int32), group=row // 2)
        response = Response.of(prompt, [Chunk(row, 0, ids, zeros, ids)])
        rollouts.append(ScoredRollout(Finish(row, response, "length"), zeros, 0.0, values, zeros))
    batch, each = ScoredRollouts(rollouts).batch(), np.zeros(rows * load.response, np.float32)
    return replace(batch, rewards=each, advantages=each, returns=each if critic else None)


def _bare(make: Callable[[], ModuleT]) -> ModuleT:
    with torch.device("meta"):
        model = make()
    for weight in model.parameters():
        if not weight.is_meta:  # torch.normal makes them elsewhere
            torch.utils.swap_tensors(weight, nn.Parameter(weight.data.to(_META), weight.requires_grad))
    return model


def _chunk(rollout: int, start: int, tokens: IntArray) -> Chunk:
    return Chunk(rollout, start, tokens, np.zeros(len(tokens), np.float32), tokens)


def _attending(model: PreTrainedModel) -> PreTrainedModel:
    attend(model, kinds_of(model)[0])
    return model


def _scoring(model: PreTrainedModel) -> PreTrainedModel:
    _attending(backbone(model))
    return model


@dataclass(frozen=True, slots=True)
class _Stack:
    """The layers of a model, in blocks of ``every`` layers: ``kept`` of a copy are those that stand for all."""

    owner: nn.Module
    names: Sequence[str]  # of the owner's lists, one beside another
    layers: Sequence[nn.ModuleList]  # those lists
    forms: Sequence[Hashable]  # the kind and the shapes of each layer
    kept: Sequence[int]
    every: int = 1
    stands: Sequence[int] = ()  # for each block, which of those that are kept stands for it

    def standing(self, every: int = 1) -> _Stack:
        """Keep the first block, which has no layer below, the last, and one of each kind between them."""
        blocks = [tuple(self.forms[at : at + every]) for at in range(0, len(self.forms), every)]
        inner = blocks[1:-1]
        first = [0, *(1 + inner.index(block) for block in inner), len(blocks) - 1][: len(blocks)]
        chosen = sorted(set(first))
        kept = [number for number in range(len(self.forms)) if number // every in chosen]
        return replace(self, kept=kept, every=every, stands=[chosen.index(block) for block in first])


def _shortened(whole: ModuleT, stacks: Sequence[_Stack]) -> tuple[ModuleT, Sequence[_Stack]]:
    copies, kept = dict[int, Any](), list[list[nn.ModuleList]]()
    for stack in stacks:
        kept.append([nn.ModuleList(layers[number] for number in stack.kept) for layers in stack.layers])
        for name, layers in zip(stack.names, kept[-1], strict=True):
            setattr(stack.owner, name, layers)
    try:
        few = copy.deepcopy(whole, copies)
    finally:
        for stack in stacks:
            for name, layers in zip(stack.names, stack.layers, strict=True):
                setattr(stack.owner, name, layers)
    for stack in stacks:
        if stack.stands and (config := getattr(copies[id(stack.owner)], "config", None)) is not None:
            config.num_hidden_layers = len(stack.kept)  # of a head's own trunk too, which is made of it
            if types := getattr(cast("PreTrainedModel", stack.owner).config, "layer_types", None):
                with suppress(AttributeError):  # one that is computed
                    config.layer_types = [types[number] for number in stack.kept]
    return few, [
        replace(stack, layers=[copies[id(layers)] for layers in each]) for stack, each in zip(stacks, kept, strict=True)
    ]


def _stacks(module: nn.Module) -> Iterator[_Stack]:
    configs = [each.config.get_text_config() for each in module.modules() if isinstance(each, PreTrainedModel)]
    layered = [each for each in configs if hasattr(each, "num_hidden_layers")]
    kinds = {int(each.num_hidden_layers): getattr(each, "layer_types", None) or () for each in layered}
    seen = set[int]()
    for owner in module.modules():
        lists = {name: each for name, each in owner.named_children() if isinstance(each, nn.ModuleList)}
        for count, types in kinds.items():
            named = {name: each for name, each in lists.items() if len(each) == count and id(each) not in seen}
            if named:
                seen.update(map(id, named.values()))
                blocks = [nn.ModuleList(layers) for layers in zip(*named.values(), strict=True)]
                forms = _forms(blocks, types)
                yield _Stack(owner, [*named], [*named.values()], forms, range(count))


def _forms(layers: Sequence[nn.Module], types: Sequence[str]) -> list[Hashable]:
    # A layer that shares a parameter with another stands for itself alone.
    uses = Counter(id(each) for layer in layers for each in layer.parameters())
    return [
        (kind, *((key, each.shape) for key, each in layer.named_parameters()), number)
        if any(uses[id(each)] > 1 for each in layer.parameters())
        else (kind, *((key, each.shape) for key, each in layer.named_parameters()))
        for number, (layer, kind) in enumerate(zip_longest(layers, types))
    ]


def _few(whole: PreTrainedModel) -> tuple[PreTrainedModel, list[int]]:
    # A layer's activations are gone when the next one begins, so the first of each form is kept. With the layers of the
    # copy that stand for those of the model. Caches number the layers, so those before are kept too.
    stacks = [*_stacks(whole)]
    forms = [*zip(*(stack.forms for stack in stacks), strict=False)]
    first = [forms.index(form) for form in forms]
    model, _ = _shortened(whole, [replace(stack, kept=range(max(first) + 1)) for stack in stacks])
    return model, first


def _serving(live: LiveBytes, weights: int, by_layer: Mapping[int, int], whole: int, first: Sequence[int]) -> Bytes:
    counted = sum(by_layer.values())
    cache = sum(by_layer.get(layer, 0) for layer in first) if first else counted
    return Bytes(whole, keys_values=cache, activations=live.peak - weights - counted)
