"""User extensions: algorithms, admissions and losses, loaded from ``file.py:name``.

An extension is a class, or a function that returns an object. A run offers it keys of ``[step]``, an algorithm the
models, for parameters of these names; its other parameters are settings, in a table such as ``[admission]``.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, cast

from oppo import user_code
from oppo.algorithms import ALGORITHMS
from oppo.algorithms.base import Algorithm, Roles
from oppo.config.sections import StepSection
from oppo.declared import leaves, table_in
from oppo.errors import ConfigError, OppoError, contained, place_of, shown
from oppo.events import StepReport
from oppo.graph import Graph
from oppo.user_code import SPEC

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from oppo.losses import Loss


@contextmanager
def naming(key: str, spec: str) -> Iterator[None]:
    """Raise a ``ConfigError`` that names the setting ``key`` and the code; an error of this library stays itself."""
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
    """The table of a user extension without settings."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What user extensions of a kind must have, and the keys of ``[step]`` that they are offered as arguments."""

    protocol: str
    members: tuple[str, ...]
    offered: frozenset[str] = frozenset()

    def check(self, made: object, otherwise: str) -> None:
        if lacking := [member for member in self.members if not hasattr(made, member)]:
            raise ConfigError(
                f"{otherwise}, since {type(made).__name__} lacks {', '.join(lacking)}: write what {self.protocol} lists"
            )


LOSS: Final = Contract("oppo.losses.Loss", ("unit", "reads", "measures", "metrics", "__call__"))


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """A user extension: a class or a function of ``file.py:name``."""

    key: str
    spec: str
    make: Callable[..., object]
    takes: frozenset[str]  # its parameters among the objects that a run offers
    takes_all: bool  # whether its first parameter is for all of these as one object
    settings: type[DataclassInstance]  # the class of its table, which has its other parameters

    @classmethod
    def of(
        cls, make: Callable[..., object], key: str, spec: str, offered: Collection[str], *, or_all: bool = False
    ) -> Self:
        takes, takes_all = set[str](), False
        settings: list[tuple[str, Any, Any]] = []
        for at, parameter in enumerate(_parameters(make, key, spec)):
            required = parameter.default is parameter.empty
            if parameter.name in offered:
                takes.add(parameter.name)
            elif set(leaves(kind := _kind(make, parameter, key, spec))) <= VALUES:
                settings.append((parameter.name, kind, _declaration(make, parameter)))
            elif or_all and at == 0 and required:
                takes_all = True
            elif required:
                raise ConfigError(
                    f"{key}: nothing is given for the parameter {parameter.name!r} of {spec}: a run has "
                    f"{', '.join(sorted(offered)) or 'nothing for it'}, and a setting has a type that a file can hold, "
                    "such as int, float or str"
                )
        return cls(key, spec, make, frozenset(takes), takes_all, _table(spec, settings))

    def __call__(self, settings: object, offered: Mapping[str, object], everything: object = None) -> object:
        arguments = {name: offered[name] for name in self.takes}
        arguments |= {each.name: getattr(settings, each.name) for each in fields(self.settings)}
        with naming(self.key, self.spec):
            return self.make(*((everything,) if self.takes_all else ()), **arguments)


VALUES: Final = frozenset({Literal, bool, int, float, str, NoneType})  # the types of which a file can hold values


@cache
def _extension(key: str, spec: str, offered: frozenset[str]) -> Extension:
    make = user_code.load_function(spec, lambda words: ConfigError(f"{key}: {words}"))
    return Extension.of(make, key, spec, offered)


def _parameters(make: Callable[..., object], key: str, spec: str) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: the parameters of {spec} are not known: {error}") from error
    several = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return [parameter for parameter in parameters if parameter.kind not in several]


def _kind(make: Callable[..., object], parameter: inspect.Parameter, key: str, spec: str) -> Any:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return None if parameter.default in (None, parameter.empty) else type(parameter.default)
    bases, name = getattr(make, "__mro__", ()), parameter.name
    owner = next((base for base in bases if name in vars(base).get("__annotations__", {})), make)
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


def _declaration(make: Callable[..., object], parameter: inspect.Parameter) -> Any:
    if is_dataclass(make):
        own = {each.name: each for each in fields(make)}[parameter.name]
        return field(default=own.default, default_factory=own.default_factory, metadata=own.metadata)
    return field(default=MISSING if parameter.default is parameter.empty else parameter.default)


def _table(spec: str, settings: list[tuple[str, Any, Any]]) -> type[DataclassInstance]:
    return make_dataclass(spec.rpartition(":")[2], settings, frozen=True, kw_only=True)


KEY: Final = "step.algorithm"

ROLES: Final = frozenset(each.name for each in fields(Roles))
"""The parameters of a function that are models, or the schedule, of a run."""


def find(name: object) -> type[Algorithm] | None:
    if not isinstance(name, str):
        return None
    return _loaded(name) if user_code.SPEC.match(name) else ALGORITHMS.get(name)


def with_name(document: Mapping[str, object]) -> Mapping[str, object]:
    """Return a document with the name of its algorithm; the fields of an object become the table ``[algorithm]``."""
    step = table_in(document, "step")
    if (given := step.get("algorithm")) is None or isinstance(given, str):
        return document
    kind = given if isinstance(given, type) else type(given)
    name = next((name for name, each in ALGORITHMS.items() if each is kind), "") or user_code.spec_of(kind)
    if not (name and is_dataclass(kind)):
        raise _refuse(
            f"expected the name of an algorithm, an object of one of oppo's, or file.py:name of your own, which a "
            f"resumed run loads again; got {shown(given)}"
        )
    found = {} if isinstance(given, type) else {each.name: getattr(given, each.name) for each in fields(kind)}
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    if settings and document.get("algorithm"):
        raise _refuse(f"it is a {kind.__name__} with its settings, so leave the section [algorithm] out")
    table = {key: value for key, value in settings.items() if value is not None}
    return {**document, "step": {**step, "algorithm": name}, **({"algorithm": table} if table else {})}


@cache
def _loaded(spec: str) -> type[Algorithm]:
    # a file is run once in a process
    found: object = user_code.load_function(spec, _refuse)
    if inspect.isroutine(found):
        part = Extension.of(found, KEY, spec, ROLES, or_all=True)
        members: dict[str, Any] = {"has_critic": "critic" in part.takes, "part": part, "__doc__": part.make.__doc__}
        bases = part.settings, FunctionAlgorithm
        kind = make_dataclass(spec.rpartition(":")[2], [], bases=bases, namespace=members, frozen=True)
        return cast("type[Algorithm]", kind)
    if not (inspect.isclass(found) and is_dataclass(found)):
        raise _refuse(
            f"{spec} must be a dataclass, whose fields are the settings of [algorithm], derived from GroupAlgorithm or "
            f"ClippedAlgorithm for example, or a function that returns a graph; got {shown(found)}"
        )
    needed = ("has_critic", "responses", "refers", "corrects", "graph", "loss")
    if lacking := [each for each in needed if not hasattr(found, each)]:
        raise _refuse(
            f"{spec} is no algorithm, since it lacks {', '.join(lacking)}: derive it from GroupAlgorithm or "
            "ClippedAlgorithm, or write what oppo.algorithms.base.Algorithm lists"
        )
    return cast("type[Algorithm]", found)


@dataclass(frozen=True, kw_only=True)
class FunctionAlgorithm:
    """A function that returns the graph of a step, as an algorithm: its parameters say which models there are."""

    # its setting `samples`, if any, is the number of responses to a prompt

    has_critic: ClassVar[bool]
    part: ClassVar[Extension]

    @property
    def responses(self) -> int:
        return int(getattr(self, "samples", 1))

    @property
    def refers(self) -> bool:
        return "reference" in self.part.takes or self.part.takes_all

    @property
    def corrects(self) -> bool:
        return "proximal" in self.part.takes

    @property
    def distills(self) -> bool | None:
        # None: with all roles as one object, if a teacher is named
        return True if "teacher" in self.part.takes else None if self.part.takes_all else False

    def graph(self, roles: Roles) -> Graph[StepReport]:
        offered = {name: getattr(roles, name) for name in ROLES}
        return _graph(self.part(self, offered, roles), self.part.spec)

    def loss(self) -> Loss:
        from oppo.losses import default_loss  # noqa: PLC0415 - torch takes seconds to import

        return default_loss(critic=self.has_critic)


def checked(algorithm: Algorithm) -> Algorithm:
    spec = user_code.spec_of(type(algorithm))
    for name in ("responses", "refers", "corrects") if spec else ():
        with naming(KEY, f"{spec}.{name}"):
            getattr(algorithm, name)
    return algorithm


def graph_of(algorithm: Algorithm, roles: Roles) -> Graph[StepReport]:
    spec = user_code.spec_of(type(algorithm))
    if not spec:
        return algorithm.graph(roles)
    with naming(KEY, f"{spec}.graph"):
        graph: object = algorithm.graph(roles)
    return _graph(graph, f"{spec}.graph")


def loss_of(algorithm: Algorithm) -> Loss:
    spec = user_code.spec_of(type(algorithm))
    if not spec:
        return algorithm.loss()
    with naming(KEY, f"{spec}.loss"):
        loss = algorithm.loss()
    LOSS.check(loss, f"{KEY}: {spec}.loss returned no loss")
    return loss


def _graph(made: object, spec: str) -> Graph[StepReport]:
    if not isinstance(made, Graph):
        raise _refuse(f"{spec} must return the graph of a step; got {shown(made)}")
    return made


def _refuse(words: str) -> ConfigError:
    return ConfigError(f"{KEY}: {words}")


OWN: Final[Mapping[str, Contract]] = {
    "admission": Contract(
        "oppo.Admission",
        ("batch", "max_deferrals", "admit", "cut", "observe"),
        frozenset({"batch", "max_deferrals", "overcommit", "staleness_price"}),
    ),
    "loss": LOSS,
}
"""User extensions besides the algorithm, by their keys in ``[step]`` and their tables."""

NAMED: Final = ("algorithm", *OWN)
"""The keys of ``[step]`` that may name a file of code, whose settings are a table of the same name."""


def algorithm_of(step: Mapping[str, object]) -> type[Algorithm] | None:
    return find(step.get("algorithm", StepSection().algorithm))


def extension(name: str, spec: object) -> Extension | None:
    return _extension(f"step.{name}", spec, OWN[name].offered) if isinstance(spec, str) and SPEC.match(spec) else None


def table_of(name: str, spec: object) -> type[DataclassInstance]:
    own = extension(name, spec)
    return NoSettings if own is None else own.settings


def made(name: str, settings: object, step: StepSection) -> object:
    own, what = extension(name, getattr(step, name)), OWN[name]
    if own is None:
        return None
    found = own(settings, {key: getattr(step, key) for key in what.offered})
    what.check(found, f"step.{name}: {own.spec} makes no {name}")
    return found
