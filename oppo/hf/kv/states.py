"""Recurrent and convolution states beside the KV cache: a slot for each sequence, whatever padding stands before it.

A state holds a sequence of any length in a fixed number of bytes: the window of a convolution, its last inputs, and
what a linear recurrence has accumulated. :class:`StateLayer` is a cache layer of either, and of a KV cache where the
layer attends too.

Chunks are padded on the left, and two things keep padding out of a state:

- the window of a row moves next to its first real token before the convolution reads it;
- the projections that feed the gates of a recurrence give :data:`NEUTRAL` there (:class:`Gates`): a token of padding
  neither decays the state nor adds to it.

The state after the last column is then that after the last token of every row. Layers whose gates are not recognised
read rows of equal length together, which need no padding.

A state cannot be taken back: a row that loses tokens is read again from its start.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from oppo.errors import ModelRefused
from oppo.hf.kv.cache import BLOCK_BYTES, SLACK, KVView, SlabLayer, Slots, as_slice, sent

NEUTRAL: Final = -1e4
"""The input of gates at padding: its softplus and sigmoid are exactly 0 in every dtype; infinity times 0 is NaN."""

GATES: Final = ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj", "f_b_proj", "f_proj")
"""Projections all of whose outputs feed gates, by their names in transformers' gated delta nets."""


CONTINUED: Final = "conv_kernel_size" in inspect.signature(LinearAttentionLayer.update_conv_state).parameters
"""Whether this transformers reads a chunk after another into a state; before 5.19 it read single tokens only."""


class StateKey(NamedTuple):
    layer: int
    kind: Literal["window", "recurrent"]
    number: int


class StateSlots(Slots):
    """The states of all sequences; zero before a sequence's first token."""

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[StateKey, Tensor] = {}
        self._read: slice | Tensor = slice(0, 0)
        self._lent: dict[StateKey, Tensor] = {}
        self.pads: Tensor | None = None
        """Columns of padding before each row of the pass in progress, int64 [n]; ``None`` when it has none."""

    @property
    def recurrent_layers(self) -> int:
        return len({key.layer for key in self._states if key.kind == "recurrent"})

    def admit(self, rows: Iterable[int]) -> None:
        new = [row for row in rows if row not in self._slots]
        if (needed := len(self.rows) + len(new)) > self._capacity:
            self._resize(needed + (needed // SLACK if self.rows else 0))
        self.add(new)

    def dismiss(self, rows: Iterable[int]) -> None:
        self.remove([row for row in rows if row in self._slots])
        if self._capacity > self._spare() * len(self.rows) + SLACK:
            self._resize(len(self.rows))

    @contextmanager
    def reading(self, rows: Sequence[int], pads: Tensor | None) -> Iterator[None]:
        """Let the cache layers read and write the states of ``rows``, in this order, in the body."""
        slots = [self.slot(row) for row in rows]
        adjacent, self.pads = as_slice(slots), pads
        self._read = adjacent or sent(self._device(), slots)[0]
        try:
            yield
            if adjacent is None:  # a copy: a decode step has changed it in place
                for key, lent in self._lent.items():
                    self._states[key][self._read] = lent
        finally:
            self._lent, self.pads = {}, None

    def has(self, key: StateKey) -> bool:
        # not before the first pass
        return key in self._states

    def lend(self, key: StateKey) -> Tensor | None:
        """Return the states [n, ...] of the rows being read, which may change in place; ``None`` if none was kept."""
        if key not in self._states:
            return None
        if key not in self._lent:
            self._lent[key] = self._states[key][self._read]
        return self._lent[key]

    def keep(self, key: StateKey, states: Tensor) -> None:
        if key not in self._states:
            self._states[key] = states.new_zeros(self._capacity, *states.shape[1:])
        self._states[key][self._read] = states
        self._lent.pop(key, None)

    def bytes_per_row(self) -> int:
        return sum(math.prod(store.shape[1:]) * store.element_size() for store in self._states.values())

    def layer_bytes(self) -> Counter[int]:
        found = Counter[int]()
        for key, store in self._states.items():
            found[key.layer] += store.nbytes
        return found

    def _device(self) -> torch.device:
        return next((store.device for store in self._states.values()), torch.device("cpu"))

    def _resize(self, capacity: int) -> None:
        # States of one shape are views of a block, as many as it may hold, which is in memory twice: many layers then
        # have the launches of one.
        self._capacity, live = capacity, len(self.rows)
        alike = dict[tuple[torch.Size, torch.dtype], list[StateKey]]()
        for key, store in self._states.items():
            alike.setdefault((store.shape[1:], store.dtype), []).append(key)
        for (shape, dtype), keys in alike.items():
            most = max(1, BLOCK_BYTES // max(1, capacity * math.prod(shape) * dtype.itemsize))
            for at in range(0, len(keys), most):
                some = keys[at : at + most]
                old = [self._states[key] for key in some]
                new = old[0].new_zeros(len(old), capacity, *shape).unbind()
                torch._foreach_copy_([store[:live] for store in new], [store[:live] for store in old])
                self._states.update(zip(some, new, strict=True))

    def _tensors(self) -> Iterable[Tensor]:
        return self._states.values()


class _Lent(dict[int, Tensor | None]):
    def __init__(self, lend: Callable[[int], Tensor | None]) -> None:
        super().__init__()
        self._lend = lend

    def __missing__(self, number: int) -> Tensor | None:
        return self._lend(number)


class StateLayer(LinearAttentionCacheLayerMixin, SlabLayer):
    is_croppable = False

    def __init__(self, number: int, slots: StateSlots, states: int) -> None:
        SlabLayer.__init__(self, number)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=states)
        self._slots = slots
        self.conv_states = _Lent(partial(self._lent, "window"))
        self.recurrent_states = _Lent(partial(self._lent, "recurrent"))

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: slots are allocated at the first write."""

    def begin(self) -> None:
        for number in range(self.number_of_states):
            keys = (self._key("window", number), self._key("recurrent", number))
            self.has_previous_state[number] = any(map(self._slots.has, keys))

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        """Return the inputs [n, channels, window + q] of a convolution, those before the chunk first; keep the last."""
        del kwargs
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        window = self.conv_states[state_idx]
        if window is None:
            window = conv_states.new_zeros(*conv_states.shape[:-1], size)
        inputs = torch.cat([window, conv_states], -1)
        if self._slots.pads is not None:  # window, padding, tokens -> zeros, window, tokens
            column, pads = torch.arange(inputs.shape[-1], device=inputs.device), self._slots.pads[:, None]
            source = torch.where(column < size + pads, column - pads, column)[:, None].expand_as(inputs)
            inputs = inputs.gather(-1, source.clamp(min=0)).masked_fill(source < 0, 0)
        self._slots.keep(self._key("window", state_idx), inputs[..., -size:])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        del kwargs
        self._slots.keep(self._key("recurrent", state_idx), recurrent_states)
        return recurrent_states

    def _lent(self, kind: Literal["window", "recurrent"], number: int) -> Tensor | None:
        return self._slots.lend(self._key(kind, number))

    def _key(self, kind: Literal["window", "recurrent"], number: int) -> StateKey:
        return StateKey(self._number, kind, number)


class RowCache(Cache):
    """A transformers cache that works on other rows in each forward pass: slabs of KV cache, and slots of states."""

    def __init__(self, config: PreTrainedConfig) -> None:
        text = config.get_text_config(decoder=True)
        kinds = DynamicCache(config=text).layers
        stateful = {at: each for at, each in enumerate(kinds) if isinstance(each, LinearAttentionCacheLayerMixin)}
        if stateful and not CONTINUED:
            raise ModelRefused(
                f"{text.model_type!r} has recurrent or convolution layers, which are read in chunks from transformers "
                f"5.19 on; installed is {transformers.__version__}"
            )
        self.states = StateSlots() if stateful else None
        self._slab_layers = [
            SlabLayer(number)
            if self.states is None or number not in stateful
            else StateLayer(number, self.states, stateful[number].number_of_states)
            for number in range(max(len(kinds), int(text.num_hidden_layers)))
        ]
        super().__init__(layers=[*self._slab_layers])

    @contextmanager
    def reading(self, views: Sequence[KVView], rows: Sequence[int], pads: Tensor | None) -> Iterator[None]:
        for layer in self._slab_layers:
            layer.views = views
        if self.states is None:
            yield
            return
        with self.states.reading(rows, pads):
            for layer in self._slab_layers:
                if isinstance(layer, StateLayer):
                    layer.begin()
            yield


class Gates:
    """The gates of a model's recurrent ``layers``, as far as they are recognised, which are neutral at padding."""

    # transformers clamps the time step of some layers in a chunk and not in a single step. Here it is always clamped,
    # and before padding is made neutral, which a clamp would undo. Hooks stay on the model, which several readers may
    # share, and act on the passes of their readers only, each in a thread.

    def __init__(self, model: PreTrainedModel) -> None:
        gated: list[Any] = [
            module for module in model.modules() if hasattr(module, "A_log") and hasattr(module, "dt_bias")
        ]
        parents: dict[nn.Module, nn.Module] = {
            child: module for module in model.modules() for child in module.children()
        }
        self.layers = 0
        for module in gated:
            # the gates of Kimi's layers are projected partly in the module around
            around = parents.get(module)
            owners = [module] if around is None or not hasattr(around, "b_proj") else [module, around]
            found = [(owner, name) for owner in owners for name in GATES if hasattr(owner, name)]
            for owner, name in found:
                _hook(owner, name, _neutralised)
            if hasattr(module, "time_step_limit"):
                least, most = module.time_step_limit
                module.time_step_limit = _Limits((least, most))
                _hook(module, "in_proj", partial(_clamped, module, least, most))
            self.layers += bool(found) or hasattr(module, "time_step_limit")

    @contextmanager
    def neutral(self, real: Tensor | None) -> Iterator[None]:
        """Make gates neutral where ``real``, bool [n, q], is false, in the passes of this thread; ``None``: nowhere."""
        _PASS.reads, _PASS.real = True, real
        try:
            yield
        finally:
            _PASS.reads, _PASS.real = False, None


class _Pass(threading.local):
    reads = False
    real: Tensor | None = None


_PASS: Final = _Pass()


class _Limits(tuple[float, float]):
    """The bounds of a time step; open below in the pass of a reader, where the projection is clamped."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return 0.0 if index == 0 and _PASS.reads else super().__getitem__(index)


class _Hook:
    # Of a class: a model crosses to other processes with its hooks.
    def __init__(self, owner: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
        self._owner = owner
        self._name = name
        self._change = change

    def __call__(self, module: nn.Module, arguments: object, output: Tensor) -> Tensor | None:
        del arguments
        # an adapter may wrap the projection by now: its output counts
        return self._change(output) if _PASS.reads and getattr(self._owner, self._name) is module else None


def _hook(owner: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    projection = getattr(owner, name)
    known = projection._forward_hooks.values()  # noqa: SLF001 - torch has no public name for them
    if not any(isinstance(each, _Hook) for each in known):
        projection.register_forward_hook(_Hook(owner, name, change))


def _neutralised(output: Tensor) -> Tensor:
    return output if _PASS.real is None else output.masked_fill(~_PASS.real[..., None], NEUTRAL)


def _clamped(module: Any, least: float, most: float, output: Tensor) -> Tensor:
    # The last columns of a projection: the time steps of a layer's heads before bias and softplus.
    if _PASS.real is None and least <= 0 and most == math.inf:
        return output
    bias = module.dt_bias.detach()
    others, steps = output.split([output.shape[-1] - len(bias), len(bias)], -1)
    floor, ceiling = ((_before_softplus(bound) - bias).to(steps.dtype) for bound in (least, most))
    return torch.cat([others, _neutralised(steps.maximum(floor).minimum(ceiling))], -1)


def _before_softplus(value: float) -> float:
    return -math.inf if value <= 0 else value if value == math.inf else math.log(math.expm1(value))
