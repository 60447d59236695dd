"""The memory that the models of a run will need, before any of them is loaded, and the memory of devices.

The code that serves and trains the models runs on tensors without data (PyTorch's fake tensors), which have shapes,
dtypes and devices, and the bytes of those that are alive are counted. So an estimate knows the architecture, the
attention, gradient checkpointing, adapters and 16-bit weights as the run will. It leaves out what an allocator rounds
up or keeps, and the work space of kernels.
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from oppo.errors import ConfigError, ModelRefused
from oppo.events import Batch, Chunk, IntArray, Prompt, Response
from oppo.hf.devices import CPU
from oppo.hf.head import planned_device
from oppo.hf.kv.attention import attend, kinds_of
from oppo.hf.kv.prefill import TOKENS_PER_PASS
from oppo.hf.kv.reader import Incremental
from oppo.hf.kv.states import RowCache
from oppo.hf.model_parts import FAILURES, backbone, longest, require_pieces, set_only_whole
from oppo.hf.servable import known_reason
from oppo.hf.serve.decoder import ChunkedPrefill, DecodeRow, Signals
from oppo.hf.serve.sampling import Noise, draw
from oppo.hf.serve.scorers import (
    ProcessRewardWorker,
    ReferenceWorker,
    RewardWorker,
    ScorerInput,
    ScorerWorker,
    ValueWorker,
)
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.packing import CPU_TOKENS, pack, units
from oppo.hf.train.trainer import HfTrainerCore
from oppo.losses import Loss, Whole
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.simulate.costs import GPUS
from oppo.training import TrainerSettings

_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The memory limit of a container, where there is one."""

_ASSUMED: Final = re.compile(
    r"(?:(?P<machines>[1-9]\d{0,3})x)?(?P<gpus>[1-9]\d{0,2})x(?P<name>.+?)(?:-(?P<size>\d+)GB)?"
)


def free(device: torch.device) -> int:
    """Return the bytes of a device that are free now; of a CPU, those that a process can get without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available: int = psutil.virtual_memory().available
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # "max": no limit
            available = min(available, int(limit.read_text()))
    return available


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs (``bytes``: memory of each; ``gpus``: in each machine) that a run is planned for."""

    name: str
    bytes: int
    gpus: int
    machines: int = 1

    @classmethod
    def assumed(cls, text: str) -> Self:
        """Return the hardware of a text such as ``8xH100-80GB`` or, with several machines, ``2x8xH100-80GB``."""
        found = _ASSUMED.fullmatch(text)
        gpu = GPUS.get(found["name"].lower()) if found else None
        if found is None or (found["size"] is None and gpu is None):
            raise ConfigError(
                f"--assume takes [MACHINESx]GPUSxNAME-MEMORYGB, such as 8xH100-80GB or 2x8xH100-80GB, got {text!r}; of "
                f"{', '.join(name for name in GPUS if not name.endswith('gb'))} the memory may be left out"
            )
        size = int(found["size"]) * 10**9 if found["size"] or gpu is None else int(gpu.memory)
        return cls(found["name"], size, int(found["gpus"]), int(found["machines"] or 1))

    def __str__(self) -> str:
        each = f"{self.gpus} x {self.name} with {self.bytes // 10**9} GB"
        return each if self.machines == 1 else f"{self.machines} machines of {each}"


def memory_of(device: torch.device, assumed: Hardware | None = None) -> tuple[int, int] | None:
    """Return the free and all bytes of a device; ``None`` for the CPU of a machine that is assumed."""
    if assumed is not None:
        return None if device.type == "cpu" else (assumed.bytes, assumed.bytes)
    there = free(device)
    return there, torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else there


_INTERVAL: Final = 0.02  # seconds between two readings of the system's figures


class Peak:
    """Measures memory from its beginning to its end; a context manager.

    On a CPU the system says how much this process and its children have, shared memory counted once; on a GPU, PyTorch
    what this process has allocated.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="oppo-memory", daemon=True)
        self._most = 0

    def __enter__(self) -> Self:
        for number in _gpus():
            torch.cuda.reset_peak_memory_stats(number)
        self._most = self._used()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        del kind, error, tb
        self._over.set()
        self._thread.join()

    def by_device(self) -> dict[torch.device, int]:
        on_gpus = {torch.device("cuda", each): torch.cuda.max_memory_allocated(each) for each in _gpus()}
        return {CPU: max(self._most, self._used()), **{device: most for device, most in on_gpus.items() if most}}

    def _watch(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._most = max(self._most, self._used())

    def _used(self) -> int:
        used = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended
                used += getattr(process.memory_full_info(), "pss", process.memory_info().rss)
        return used


def _gpus() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 0)


ModuleT = TypeVar("ModuleT", bound=nn.Module)

_aten = torch.ops.aten
_GROUPED = _aten._grouped_mm.default  # noqa: SLF001 - an operator's name
_NUMBER = frozenset({_aten._local_scalar_dense.default, _aten.item.default})  # noqa: SLF001 - an operator's name


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations create in this context, while they are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.now = self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._counted or not size:
            return
        self._counted.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


class WithoutData(LiveBytes):
    """The same for tensors without data: where an operation asks for data, masks are true and numbers are 1.

    So rows have no padding, which holds for rows of one length, and a search for few ids falls back to all of them.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func in _NUMBER:
            return True if args[0].dtype == torch.bool else 1
        if func is _aten.nonzero.default:
            return args[0].new_zeros((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is _aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1]):
            return args[0].reshape(-1, *args[0].shape[args[1][0].dim() :]).clone()
        if func is _GROUPED and args[0].dtype != torch.bfloat16:  # without data it knows no other
            left, right, *others = args
            result: Tensor = func(left.bfloat16(), right.bfloat16(), *others, **(kwargs or {})).to(left.dtype)
            self._count(result)
            return result
        return super().__torch_dispatch__(func, types, args, kwargs)


def strip(module: ModuleT) -> ModuleT:
    """Return a module made on ``meta`` with tensors as on a CPU, but without data, counted by :func:`without_data`."""
    stripped = dict[int, Tensor]()

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in stripped:
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            stripped[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
        return stripped[id(tensor)]

    for part in module.modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            setattr(part, name, like(tensor))
    return module


@contextmanager
def without_data() -> Iterator[LiveBytes]:
    """Let tensors that are created inside have no data, and count their bytes."""
    with FakeTensorMode(allow_non_fake_inputs=True), WithoutData() as live:
        yield live


@contextmanager
def planned_on(device: torch.device) -> Iterator[None]:
    """Count passes inside the body as on a device: with its chunks of logits."""
    token = planned_device.set(device)
    try:
        yield
    finally:
        planned_device.reset(token)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory of one model.

    ``optimizer``: AdamW's moments, and float32 copies of 16-bit weights. ``keys_values``: of all rollouts in flight at
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
    """The most that a run asks of its models: rollouts in flight, and the longest of each in tokens."""

    rollouts: int
    prompt: int
    response: int
    chunk: int

    @property
    def sequence(self) -> int:
        return self.prompt + self.response

    def within(self, positions: int) -> Self:
        """Return the same load with prompts that leave room for the response within that many positions."""
        return replace(self, prompt=max(1, min(self.prompt, positions - self.response)))


def at_rest(make: Callable[[], nn.Module]) -> Bytes:
    """Return the memory of an idle model: weights and, if some are trained, gradients and optimizer states."""
    tensors = {id(each): each for model in [_bare(make)] for each in (*model.parameters(), *model.buffers())}.values()
    trained = [each for each in tensors if each.requires_grad]
    steps_on = sum(each.numel() * max(4, each.element_size()) for each in trained)
    copies = sum(each.numel() * 4 for each in trained if each.element_size() < 4)
    return Bytes(sum(each.nbytes for each in tensors), copies + 2 * steps_on, steps_on)


def of_policy(make: Callable[[], PreTrainedModel], load: Load, sampling: Sampling, *, prefill_tokens: int) -> Bytes:
    """Return the memory of a served policy when all rollouts are at their longest and have just been read again."""
    model, whole = _bare(make), at_rest(make).weights
    load = load.within(longest(model))
    set_only_whole(model, known_reason(model))
    layers = _keep_one_layer(model)
    with _reading_in_pieces(model), without_data() as live, torch.inference_mode():
        model = _attending(strip(model))
        weights, reader = live.now, Incremental(model)
        tokens = np.zeros(load.sequence - 1, np.int32)
        rows = [DecodeRow(key, Prompt(key, key, tokens), load.sequence) for key in range(load.rollouts)]
        signals, few = Signals.of(len(rows)), 2 * -(-prefill_tokens // load.sequence)
        for part, budget in ((rows[few:], load.rollouts * load.sequence), (rows[:few], prefill_tokens)):
            live.peak = live.now  # only the last passes are counted: they find the most
            prefill = ChunkedPrefill(reader, part, budget=budget, deterministic=False)
            while prefill:
                prefill.read(signals)
        logits = reader.step([row.key for row in rows], torch.zeros(len(rows), dtype=torch.int64))
        noise = None
        if sampling.temperature > 0:
            places, at = [(row.key, 0) for row in rows], [load.response] * len(rows)
            noise = Noise(sampling.seed)(places, at, logits.shape[-1], logits.device)
        draw(logits, noise, sampling)
        return _serving(live, weights, reader.memory(), whole, layers)


def of_shortest(make: Callable[[], PreTrainedModel], rollouts: int) -> Bytes:
    """Return the least memory of a served policy: its weights, and the states of its rollouts, however short."""
    model = _bare(make)
    weights = at_rest(lambda: model).weights
    with _reading_in_pieces(model):
        if RowCache(model.config).states is None:
            return Bytes(weights)
    shortest = of_policy(make, Load(rollouts, 1, 1, 1), Sampling(), prefill_tokens=rollouts)
    return Bytes(weights, keys_values=shortest.keys_values)


@contextmanager
def _reading_in_pieces(model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:  # as in the probe, for which there are no weights here
        set_only_whole(model, f"{type(model).__name__} cannot be served row by row: it failed when tried ({error!r})")
        require_pieces(model)


def of_reference(make: Callable[[], PreTrainedModel], load: Load) -> Bytes:
    return _of_scorer(make, lambda model: ReferenceWorker(_attending(model), False, Sampling()), load)


def of_reward(make: Callable[[], PreTrainedModel], load: Load) -> Bytes:
    return _of_scorer(make, lambda model: RewardWorker(_scoring(model), False), load)


def of_process(make: Callable[[], PreTrainedModel], load: Load) -> Bytes:
    return _of_scorer(make, lambda model: ProcessRewardWorker(_scoring(model), False, (), 0, 0.0), load)


def of_critic(make: Callable[[], PreTrainedModel], load: Load) -> Bytes:
    return _of_scorer(make, lambda model: ValueWorker(_scoring(model), False), load)


def _of_scorer(
    make: Callable[[], PreTrainedModel], worker_of: Callable[[PreTrainedModel], ScorerWorker[T]], load: Load
) -> Bytes:
    try:
        return _scoring_bytes(make, worker_of, load)
    except (ModelRefused, *FAILURES) as error:  # as in the probe, for which there are no weights here
        return _scoring_bytes(make, worker_of, load, only_whole=str(error))


def _scoring_bytes(
    make: Callable[[], PreTrainedModel],
    worker_of: Callable[[PreTrainedModel], ScorerWorker[T]],
    load: Load,
    only_whole: str | None = None,
) -> Bytes:
    model, whole = _bare(make), at_rest(make).weights
    load = load.within(longest(model))
    set_only_whole(model, only_whole or known_reason(model))
    layers = _keep_one_layer(model)
    with without_data() as live, torch.inference_mode():
        worker = worker_of(strip(model))
        weights, rollouts = live.now, range(load.rollouts)
        chunk = min(load.chunk, load.response)
        last = [_chunk(each, 0, np.zeros(chunk, np.int32)) for each in rollouts]
        few = 2 * -(-TOKENS_PER_PASS // chunk)
        worker.reader.tokens_per_pass = math.inf
        before = np.zeros(load.sequence - chunk, np.int32)  # as a prompt, for which no outputs are kept
        worker.extend(ScorerInput([*(Prompt(each, each, before) for each in rollouts), *last[few:]]))
        worker.reader.tokens_per_pass, live.peak = TOKENS_PER_PASS, live.now  # the last passes find the most
        worker.extend(ScorerInput(last[:few]))
        cache = worker.memory()
        worker.reader.finish(dict.fromkeys(rollouts, chunk))  # where it is read now
        return _serving(live, weights, cache, whole, layers)


def of_trainer(
    make: Callable[[], ActorCritic],
    load: Load,
    sampling: Sampling,
    settings: TrainerSettings,
    loss: Loss,
) -> Bytes:
    """Return the memory of the most expensive micro-batch: of longest rows, or of rows that are all response."""
    shapes = (load, replace(load, prompt=1))
    return max((_training(make, shape, sampling, settings, loss) for shape in shapes), key=lambda each: each.total)


def _training(
    make: Callable[[], ActorCritic],
    load: Load,
    sampling: Sampling,
    settings: TrainerSettings,
    loss: Loss,
) -> Bytes:
    # Each of these is a straight line over the number of layers, where all of them are alike.
    few, periods = _micro_batch(make, load, sampling, settings, loss, periods=2)
    if periods > 2:
        more, _ = _micro_batch(make, load, sampling, settings, loss, periods=3)
        few = {name: size + (periods - 2) * (more[name] - size) for name, size in few.items()}
    weights, copies, gradients = (few.pop(name) for name in ("weights", "copies", "gradients"))
    activations = max(few.values()) - weights - copies - gradients
    return Bytes(weights, copies + 2 * gradients, gradients, activations=activations)


def _micro_batch(
    make: Callable[[], ActorCritic],
    load: Load,
    sampling: Sampling,
    settings: TrainerSettings,
    loss: Loss,
    *,
    periods: int,
) -> tuple[dict[str, int], int]:
    # The peak of live memory, by part of the passes, in models cut to ``periods`` periods of layers, and their number.
    models = _bare(make)
    load = load.within(longest(models.actor))
    budget = settings.micro_batch_tokens or CPU_TOKENS
    rows = min(load.rollouts, max(1, budget // (load.sequence - 1)))
    stacks = _shorten(filter(None, (models.actor, models.critic)), periods, max(1, settings.gradient_checkpointing))
    models.prepare()  # here, where there is nothing to compare
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
        peaks = _Peaks(live)
        for number, stack in enumerate(stacks):
            peaks.divide(stack, f"model {number}")
        core.backward(part, core.outputs(part), Whole.of(batch, minibatch, sampling.max_new_tokens))
        peaks.enter("after")
    gradients = sum(weight.nbytes for weight in trained)
    sizes = {"weights": weights, "copies": copies, "gradients": gradients, **peaks.of}
    return sizes, stacks[0].periods if stacks else periods


class _Peaks:
    """The most that is alive in each part of a forward and a backward pass, which begin where layers do.

    A part at the bottom of a stack, or at its top, keeps something of every layer below or above it, so its peak
    grows by as much with each one. No part between them has a peak above both.
    """

    def __init__(self, live: LiveBytes) -> None:
        self.of: dict[str, int] = {}
        self._live = live
        self._part = "before"
        self._backwards = False

    def enter(self, part: str) -> None:
        self.of[self._part] = max(self.of.get(self._part, 0), self._live.peak)
        self._part, self._live.peak = part, self._live.now

    def divide(self, stack: _Stack, model: str) -> None:
        for number, layer in enumerate(stack.layers):
            below, above = number < stack.period, len(stack.layers) - number <= stack.period
            where = f"{model}, {'bottom' if below else 'top' if above else 'between'} {number % stack.period}"
            layer.register_forward_pre_hook(partial(self._forward, where))
            layer.register_forward_hook(partial(self._forwarded, where))

    def _forward(self, where: str, *_: object) -> None:
        self.enter(f"{'again' if self._backwards else 'forward'}, {where}")

    def _forwarded(self, where: str, _layer: nn.Module, _inputs: object, output: Tensor | Sequence[Tensor]) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(partial(self._backward, f"{'again ' if self._backwards else ''}backward, {where}"))

    def _backward(self, part: str, _: Tensor) -> None:
        self._backwards = True
        self.enter(part)


def longest_batch(rows: int, load: Load, *, critic: bool) -> Batch:
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
    """The first layers of a model, ``periods`` periods of ``period`` layers, which stand for all layers."""

    layers: Sequence[nn.Module]
    period: int
    periods: int


def _shorten(models: Iterable[PreTrainedModel], periods: int, every: int = 1) -> list[_Stack]:
    """Leave a few periods of layers in each model, so that counting is quick; all if the models' periods differ.

    A period is a multiple of ``every`` layers, after which the same kinds and shapes come again.
    """
    found = {id(layers): (part, name, layers) for model in models for part, name, layers in _stacks(model)}.values()
    sizes = {(len(layers), _period(layers, every, most=len(layers) // (periods + 1))) for _, _, layers in found}
    if len(sizes) != 1 or (period := sizes.pop()[1]) == 0:
        return []
    shortened = []
    for part, name, layers in found:
        kept = layers[: periods * period]
        setattr(part, name, kept)
        shortened.append(_Stack([*kept], period, len(layers) // period))
    return shortened


def _stacks(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    config = model.config.get_text_config()
    count, kinds = int(config.num_hidden_layers), getattr(config, "layer_types", None)
    for part in model.modules():
        for name, layers in part.named_children():
            if isinstance(layers, nn.ModuleList) and len(layers) == count:
                for layer, kind in zip(layers, kinds or [""] * count, strict=False):
                    layer.kind = kind
                yield part, name, layers


def _period(layers: nn.ModuleList, every: int, most: int) -> int:
    # 0 if there is none of at most that many layers.
    forms = [(layer.kind, *((key, each.shape) for key, each in layer.named_parameters())) for layer in layers]
    fit = (size for size in range(every, most + 1, every) if len(forms) % size == 0)
    return next((size for size in fit if forms == forms[:size] * (len(forms) // size)), 0)


def _keep_one_layer(model: PreTrainedModel) -> int:
    # A layer's activations are gone when the next one begins, so only the cache of one is multiplied.
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    stacks = _shorten([model], 1) if len(kinds) <= 1 else []
    return stacks[0].periods if stacks else 1


def _serving(live: LiveBytes, weights: int, memory: tuple[int, int], whole: int, layers: int) -> Bytes:
    keys_values, _ = memory
    return Bytes(whole, keys_values=keys_values * layers, activations=live.peak - weights - keys_values)
