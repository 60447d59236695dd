"""Passes of models on tensors without data, and the bytes of tensors that are alive meanwhile."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Final, TypeAlias, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oppo.hf.devices import CPU
from oppo.hf.head import planned_device
from oppo.observe import set_to

_aten = torch.ops.aten
_GROUPED = _aten._grouped_mm.default  # noqa: SLF001 - an operator's name
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - an operator's name
_EFFICIENT = _aten._scaled_dot_product_efficient_attention.default  # noqa: SLF001 - an operator's name
_of_torch = nn.functional.scaled_dot_product_attention
_list_of = Tensor.tolist
_META: Final = torch.device("meta")
_INDICES: Final = frozenset({_aten.nonzero_numpy.default, _aten.where.default})  # in inference mode they come whole
_NUMBER = frozenset({_aten._local_scalar_dense.default, _aten.item.default, _aten.is_nonzero.default})  # noqa: SLF001 - an operator's name


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
                self.count(leaf)
        return result

    def count(self, tensor: Tensor) -> None:
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
    Experts get equally many tokens.
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
        if func in _INDICES:
            return [args[0].new_zeros(args[0].numel(), dtype=torch.int64) for _ in args[0].shape]
        if func is _aten.split_with_sizes.default and sum(args[1]) != args[0].shape[args[2] if args[2:] else 0]:
            return _aten.tensor_split.sections(args[0], len(args[1]), *args[2:])
        if func is _aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1]):
            return args[0].reshape(-1, *args[0].shape[args[1][0].dim() :]).clone()
        if func is _GROUPED and args[0].dtype != torch.bfloat16:  # without data it knows no other
            left, right, *others = args
            result: Tensor = func(left.bfloat16(), right.bfloat16(), *others, **(kwargs or {})).to(left.dtype)
            self.count(result)
            return result
        return super().__torch_dispatch__(func, types, args, kwargs)


class _OnMeta(WithoutData):
    """Makes all tensors on ``meta``, whatever device is asked for, and moves arguments on other devices there."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        given = {name: _META if name == "device" else _on_meta(each) for name, each in (kwargs or {}).items()}
        args = [*map(_on_meta, args)]
        key = (
            (func, *map(_form, args), *((name, _form(each)) for name, each in given.items())) if _makes(func) else None
        )
        if (form := _MADE.get(key)) is not None:
            result = _made(form)
            for each in (result,) if isinstance(result, Tensor) else result:
                self.count(each)
            return result
        result = super().__torch_dispatch__(func, types, args, given)
        if key is not None and (form := _forms_apart(result, [*args, *given.values()])) is not None:
            _MADE[key] = form
        return result


_Form: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]

_MADE: Final = dict[Hashable, _Form | tuple[_Form, ...]]()
"""What operations make of arguments of some shapes. Torch says it of tensors without data in up to a millisecond."""


@cache
def _makes(func: Any) -> bool:
    schema = func._schema  # noqa: SLF001 - torch's own public name of it
    return not schema.is_mutable and not any(each.alias_info for each in (*schema.arguments, *schema.returns))


def _form(value: Any) -> Hashable:
    # 1, 1.0 and True are equal keys, and give results of different dtypes.
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_form, value)) if isinstance(value, list | tuple) else (type(value), value)


def _forms_apart(result: object, args: Sequence[object]) -> _Form | tuple[_Form, ...] | None:
    # `None` of what shares memory with an argument, or holds more than tensors.
    made = result if isinstance(result, tuple) else (result,)
    given = {each.untyped_storage()._cdata for each in tree_leaves(args) if isinstance(each, Tensor)}  # noqa: SLF001
    if not all(isinstance(each, Tensor) and each.untyped_storage()._cdata not in given for each in made):  # noqa: SLF001
        return None
    forms = tuple(cast("_Form", _form(each)) for each in made)
    return forms if isinstance(result, tuple) else forms[0]


def _made(form: Any) -> Any:
    if isinstance(form[0], torch.Size):
        return torch.empty_strided(form[0], form[1], dtype=form[2], device=_META)
    return tuple(map(_made, form))


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            value
            if value.is_meta
            else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
        )
    if isinstance(value, torch.device):
        return _META
    return [*map(_on_meta, value)] if isinstance(value, list | tuple) else value


def _attention(  # noqa: PLR0917 - torch's own
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # As the kernels of devices, which keep no matrix of weights. On ``meta`` torch would choose its formula, as it does
    # on a CPU for a mask that is trained and for values of another width than queries.
    usual = query.shape[-1] == value.shape[-1] and (attn_mask is None or not attn_mask.requires_grad)
    if not query.is_meta or (not usual and planned_device.get() == CPU):
        return _of_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, -math.inf)
    masked = {"attn_mask": attn_mask} if usual else {"attn_bias": attn_mask, "compute_log_sumexp": True}
    kernel = _FLASH if usual else _EFFICIENT
    result: Tensor = kernel(query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale, **masked)[0]
    return result


def _listed(tensor: Tensor) -> Any:
    return np.ones(tensor.shape, np.int64).tolist() if tensor.is_meta else _list_of(tensor)


def planned_on(device: torch.device) -> AbstractContextManager[None]:
    return set_to(planned_device, device)


@contextmanager
def without_data(*modules: nn.Module) -> Iterator[LiveBytes]:
    """Let tensors that are created inside have no data, and count their bytes and those of the modules, on ``meta``."""
    attending = patch.object(nn.functional, _of_torch.__name__, _attention)
    with _OnMeta() as live, attending, patch.object(Tensor, "tolist", _listed), planned_on(planned_device.get() or CPU):
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                live.count(tensor)
        yield live
