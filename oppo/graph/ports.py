"""The inputs and the output of a stage, read from the signature of its ``run``."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from oppo.errors import GraphError
from oppo.graph.channel import Receiver, Sender

KEYWORDS: Final = ("out", "step")
"""Parameters of ``run`` that the executor passes, not the graph."""

_UNIONS: Final = (typing.Union, types.UnionType)
_BY_NAME: Final = inspect.Parameter.KEYWORD_ONLY
_BY_POSITION: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)

Classes: TypeAlias = frozenset[type] | None
"""The nominal classes an item may have; ``None`` for an annotation that names none."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The inputs and the output of a stage's ``run``.

    Attributes:
        names: parameter names of the positional inputs.
        reads: the classes each of them may carry.
        variadic: whether ``run`` takes any number of inputs (``*inputs``), all like the last of ``reads``.
        named: the classes each input by keyword may carry.
        required: the keywords without a default.
        stepped: whether ``run`` takes ``step``.
        sends: the classes the output may carry.
    """

    names: tuple[str, ...]
    reads: tuple[Classes, ...]
    variadic: bool
    named: Mapping[str, Classes]
    required: frozenset[str]
    stepped: bool
    sends: Classes

    @classmethod
    def of(cls, stage: object) -> Ports:
        """Return the ports of ``stage``; a ``GraphError`` continues a sentence that begins with its name."""
        if isinstance(stage, type):
            raise GraphError(f"is the class {stage.__name__}, not an object of it: write {stage.__name__}(...)")
        run = getattr(stage, "run", None)
        kind = type(stage).__name__
        if not callable(run):
            raise GraphError(f"is no stage: {kind} has no method `async def run(self, ..., *, out)`")
        if not inspect.iscoroutinefunction(run):
            raise GraphError(f"is no stage: {kind}.run must be `async def` and send its items to `out`")
        parameters = inspect.signature(run).parameters
        if "out" not in parameters or parameters["out"].kind is inspect.Parameter.POSITIONAL_ONLY:
            raise GraphError(f"is no stage: {kind}.run takes no keyword `out: Sender[...]` to send its items to")
        inputs = [each for each in parameters.values() if each.name not in KEYWORDS and each.kind in _BY_POSITION]
        named = [each for each in parameters.values() if each.name not in KEYWORDS and each.kind is _BY_NAME]
        return cls(
            names=tuple(parameter.name for parameter in inputs),
            reads=tuple(_carried(run, parameter.annotation, Receiver) for parameter in inputs),
            variadic=any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in inputs),
            named={parameter.name: _carried(run, parameter.annotation, Receiver) for parameter in named},
            required=frozenset(each.name for each in named if each.default is inspect.Parameter.empty),
            stepped="step" in parameters,
            sends=_carried(run, parameters["out"].annotation, Sender),
        )

    def carried(self, position: int) -> Classes:
        """Return the classes that input ``position`` may carry."""
        return self.reads[min(position, len(self.reads) - 1)]

    def accepts(self, count: int) -> bool:
        """Whether ``run`` can be called with ``count`` inputs."""
        return count >= len(self.names) - 1 if self.variadic else count == len(self.names)


def _carried(run: Callable[..., object], annotation: object, port: type) -> Classes:
    """Return the classes of the items in ``port[item]``, as far as the annotation can be resolved."""
    holder = types.SimpleNamespace(__annotations__={"port": annotation})
    # An annotation may name an import for type checkers only, or a type parameter of the class: it stays unknown.
    try:
        resolved = typing.get_type_hints(holder, getattr(run, "__globals__", {}))["port"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return None
    options = typing.get_args(resolved) if typing.get_origin(resolved) in _UNIONS else (resolved,)
    found = [option for option in options if typing.get_origin(option) is port]
    return _classes(typing.get_args(found[0])[0]) if found else None


def _classes(annotation: object) -> Classes:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _classes(typing.get_args(annotation)[0])
    if origin in _UNIONS:
        members = [_classes(member) for member in typing.get_args(annotation)]
        known = [member for member in members if member is not None]
        return frozenset().union(*known) if len(known) == len(members) else None
    found = annotation if origin is None else origin
    if found is None:
        return frozenset((type(None),))
    nominal = isinstance(found, type) and found not in (object, Any) and not getattr(found, "_is_protocol", False)
    return frozenset((typing.cast("type", found),)) if nominal else None


def fits(sent: Classes, read: Classes) -> bool:
    """Whether every class sent can be read; true if one side is unknown."""
    if sent is None or read is None:
        return True
    return all(issubclass(one, tuple(read)) for one in sent)


def in_words(classes: Classes) -> str:
    """Return the names of ``classes`` for an error."""
    return " | ".join(sorted(one.__name__ for one in classes or ())) or "anything"
