"""Parts of one's own: what ``file.py:name`` names where a setting has names of ours, and its table of the file.

A part is a class or a function that returns one. It is called with what it has parameters for: what a run has, by its
name (``batch``), and settings, which are all others of a type that a file can hold. The part's own table, such as
``[admission]``, holds those.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from types import NoneType, SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, get_args, get_origin

from oppo import user_code
from oppo.declared import require_declared
from oppo.errors import ConfigError, OppoError, contained, place_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@contextmanager
def naming(key: str, spec: str) -> Iterator[None]:
    """Raise a ``ConfigError`` that names the setting, the code and its line instead of an error of the body.

    An error of this library stays itself, with the code and the line as a note.

    Args:
        key: the setting that names the code.
        spec: the code, ``file.py:name``.
    """
    try:
        with contained(lambda words: ConfigError(f"{key}: {spec} raised {words}")):
            yield
    except ConfigError as error:
        if isinstance(own := error.__cause__, OppoError):
            own.add_note(f"{key}: raised by {spec}{place_of(own)}")
            raise own from None
        raise


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """The table of a part without settings."""


@dataclass(frozen=True, slots=True)
class OwnRequirements:
    """Requirements of a part of one's own.

    Attributes:
        protocol: its name.
        members: of it.
        has: the keys of ``[step]`` that it may have as parameters.
    """

    protocol: str
    members: tuple[str, ...]
    has: frozenset[str] = frozenset()

    def require(self, made: object, otherwise: str) -> None:
        """Raise ``ConfigError``, whose sentence begins with ``otherwise``, if what was made lacks a member."""
        if lacking := [member for member in self.members if not hasattr(made, member)]:
            raise ConfigError(
                f"{otherwise}, since {type(made).__name__} lacks {', '.join(lacking)}: write what {self.protocol} lists"
            )


LOSS: Final = OwnRequirements("oppo.losses.Loss", ("unit", "reads", "measures", "metrics", "__call__"))


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """A class or a function of a file.

    Attributes:
        key: the setting that names it.
        spec: ``file.py:name``.
        make: the class or the function.
        given: its parameters that the run gives.
        whole: its parameter that is given everything that the run has, as one object; ``None`` without one.
        settings: the class of its table.
    """

    key: str
    spec: str
    make: Callable[..., object]
    given: tuple[str, ...]
    whole: str | None
    settings: type[DataclassInstance]

    def __call__(self, settings: object, has: Mapping[str, object], whole: object = None) -> object:
        """Return what it makes.

        Args:
            settings: the values of its table.
            has: what the run has, by name.
            whole: the same as one object, if the part may ask for it.

        Raises:
            ConfigError: it raised; an error of this library stays itself.
        """
        arguments = {name: has[name] for name in self.given}
        arguments |= {each.name: getattr(settings, each.name) for each in fields(self.settings)}
        first = () if self.whole is None else (whole,)
        with naming(self.key, self.spec):
            return self.make(*first, **arguments)


@cache
def part(key: str, spec: str, has: frozenset[str], *, takes_whole: bool = False) -> OwnPart:
    """Return what ``file.py:name`` names; a file is run once in a process.

    Args:
        key: the setting that names it, ``step.admission``.
        has: the names of what the run gives.
        takes_whole: whether its first parameter may be for everything that the run has.

    Raises:
        ConfigError: there is no such class or function, or it has a parameter that nothing is given for.
    """

    def refuse(words: str) -> ConfigError:
        return ConfigError(f"{key}: {words}")

    return part_of(user_code.load_function(spec, refuse), key, spec, has, takes_whole=takes_whole)


def part_of(
    make: Callable[..., object], key: str, spec: str, has: Collection[str], *, takes_whole: bool = False
) -> OwnPart:
    """Return a class or a function as a part; see :func:`part`."""
    given: list[str] = []
    settings: list[tuple[str, Any, Any]] = []
    whole: str | None = None
    for at, parameter in enumerate(_parameters(make, key, spec)):
        required, kind = parameter.default is parameter.empty, None
        if parameter.name in has:
            given.append(parameter.name)
            continue
        kind = _kind(make, parameter, key, spec)
        if _is_value(kind):
            settings.append((parameter.name, kind, _declaration(make, parameter)))
        elif takes_whole and at == 0 and required:
            whole = parameter.name
        elif required:
            raise ConfigError(
                f"{key}: nothing is given for the parameter {parameter.name!r} of {spec}: a run has "
                f"{', '.join(sorted(has))}, and a setting has a type that a file can hold, such as int, float or str"
            )
    return OwnPart(key, spec, make, tuple(given), whole, _table(spec, settings))


def _parameters(make: Callable[..., object], key: str, spec: str) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: the parameters of {spec} are not known: {error}") from error
    several = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return [parameter for parameter in parameters if parameter.kind not in several]


def _kind(make: Callable[..., object], parameter: inspect.Parameter, key: str, spec: str) -> Any:
    """Return the type of a parameter: that of its default, if it has no annotation."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return None if parameter.default in (None, parameter.empty) else type(parameter.default)
    owner = next((base for base in getattr(make, "__mro__", ()) if parameter.name in _annotations(base)), make)
    names = vars(inspect.getmodule(owner) or SimpleNamespace())
    try:
        shim = SimpleNamespace(__annotations__={parameter.name: annotation})
        return typing.get_type_hints(shim, names, include_extras=True)[parameter.name]
    except (NameError, TypeError, SyntaxError) as error:
        if parameter.default is parameter.empty:
            return None
        raise ConfigError(
            f"{key}: the type of the parameter {parameter.name!r} of {spec} is not known ({error}): import it while "
            "the module runs, not under TYPE_CHECKING"
        ) from error


def _annotations(owner: type) -> Mapping[str, object]:
    annotations: Mapping[str, object] = vars(owner).get("__annotations__", {})
    return annotations


def _is_value(kind: Any) -> bool:
    """Return whether a file can hold a value of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_value(arguments[0])
    if origin in (Union, UnionType):
        return all(_is_value(each) for each in arguments)
    if origin is tuple:
        return all(each is Ellipsis or _is_value(each) for each in arguments)
    return origin is Literal or kind in (bool, int, float, str, NoneType)


def _declaration(make: Callable[..., object], parameter: inspect.Parameter) -> Any:
    """Return the field of a setting: that of a dataclass, or one with the parameter's default."""
    if is_dataclass(make):
        own = {each.name: each for each in fields(make)}[parameter.name]
        return field(default=own.default, default_factory=own.default_factory, metadata=own.metadata)
    return field(default=MISSING if parameter.default is parameter.empty else parameter.default)


def _table(spec: str, settings: list[tuple[str, Any, Any]]) -> type[DataclassInstance]:
    def checked(table: DataclassInstance) -> None:
        require_declared(table, error=ConfigError)

    name = spec.rpartition(":")[2]
    return make_dataclass(name, settings, frozen=True, kw_only=True, namespace={"__post_init__": checked})
