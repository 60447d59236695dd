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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Union, cast, get_args, get_origin

from oppo import user_code
from oppo.algorithms import ALGORITHMS
from oppo.algorithms.base import Algorithm, Roles
from oppo.config.sections import StepSection
from oppo.declared import require_declared
from oppo.errors import ConfigError, OppoError, contained, place_of, shown
from oppo.events import StepReport
from oppo.graph import Graph
from oppo.user_code import SPEC

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from oppo.losses import Loss


@contextmanager
def naming(key: str, spec: str) -> Iterator[None]:
    """Raise a ``ConfigError`` that names the setting ``key`` and the code instead of an error of the body.

    An error of this library stays itself, with the code and the line as a note.
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
    """The table of a user extension without settings."""


@dataclass(frozen=True, slots=True)
class OwnRequirements:
    """The members of a user extension; ``has``: the keys of ``[step]`` that it may take."""

    protocol: str
    members: tuple[str, ...]
    has: frozenset[str] = frozenset()

    def require(self, made: object, otherwise: str) -> None:
        if lacking := [member for member in self.members if not hasattr(made, member)]:
            raise ConfigError(
                f"{otherwise}, since {type(made).__name__} lacks {', '.join(lacking)}: write what {self.protocol} lists"
            )


LOSS: Final = OwnRequirements("oppo.losses.Loss", ("unit", "reads", "measures", "metrics", "__call__"))


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """A user extension: a class or a function of ``file.py:name``.

    Attributes:
        given: its parameters for objects of the run, by name.
        whole: its parameter for all of these as one object.
        settings: the class of its table.
    """

    key: str
    spec: str
    make: Callable[..., object]
    given: tuple[str, ...]
    whole: str | None
    settings: type[DataclassInstance]

    def __call__(self, settings: object, has: Mapping[str, object], whole: object = None) -> object:
        arguments = {name: has[name] for name in self.given}
        arguments |= {each.name: getattr(settings, each.name) for each in fields(self.settings)}
        first = () if self.whole is None else (whole,)
        with naming(self.key, self.spec):
            return self.make(*first, **arguments)


@cache
def part(key: str, spec: str, has: frozenset[str], *, takes_whole: bool = False) -> OwnPart:
    def refuse(words: str) -> ConfigError:
        return ConfigError(f"{key}: {words}")

    return part_of(user_code.load_function(spec, refuse), key, spec, has, takes_whole=takes_whole)


def part_of(
    make: Callable[..., object], key: str, spec: str, has: Collection[str], *, takes_whole: bool = False
) -> OwnPart:
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
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is_value(arguments[0])
    if origin in (Union, UnionType):
        return all(_is_value(each) for each in arguments)
    if origin is tuple:
        return all(each is Ellipsis or _is_value(each) for each in arguments)
    return origin is Literal or kind in (bool, int, float, str, NoneType)


def _declaration(make: Callable[..., object], parameter: inspect.Parameter) -> Any:
    if is_dataclass(make):
        own = {each.name: each for each in fields(make)}[parameter.name]
        return field(default=own.default, default_factory=own.default_factory, metadata=own.metadata)
    return field(default=MISSING if parameter.default is parameter.empty else parameter.default)


def _table(spec: str, settings: list[tuple[str, Any, Any]]) -> type[DataclassInstance]:
    def checked(table: DataclassInstance) -> None:
        require_declared(table, error=ConfigError)

    name = spec.rpartition(":")[2]
    return make_dataclass(name, settings, frozen=True, kw_only=True, namespace={"__post_init__": checked})


KEY: Final = "step.algorithm"

MEMBERS: Final = ("has_critic", "responses", "refers", "corrects", "graph", "loss")
"""What a class of a file must have: the members of :class:`Algorithm`."""

ROLES: Final = frozenset(each.name for each in fields(Roles))
"""The parameters of a function that are models, or the schedule, of a run."""


def find(name: object) -> type[Algorithm] | None:
    if not isinstance(name, str):
        return None
    return _loaded(name) if user_code.SPEC.match(name) else ALGORITHMS.get(name)


def with_name(document: Mapping[str, object]) -> Mapping[str, object]:
    """Return a document with the name of its algorithm; the fields of an object become the table ``[algorithm]``."""
    step = document.get("step")
    given = step.get("algorithm") if isinstance(step, Mapping) else None
    if not isinstance(step, Mapping) or given is None or isinstance(given, str):
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
        return of_function(spec, part_of(found, KEY, spec, ROLES, takes_whole=True))
    if not (inspect.isclass(found) and is_dataclass(found)):
        raise _refuse(
            f"{spec} must be a dataclass, whose fields are the settings of [algorithm], derived from GroupAlgorithm or "
            f"ClippedAlgorithm for example, or a function that returns a graph; got {shown(found)}"
        )
    if lacking := [each for each in MEMBERS if not hasattr(found, each)]:
        raise _refuse(
            f"{spec} is no algorithm, since it lacks {', '.join(lacking)}: derive it from GroupAlgorithm or "
            "ClippedAlgorithm, or write what oppo.algorithms.base.Algorithm lists"
        )
    return cast("type[Algorithm]", found)


@dataclass(frozen=True, kw_only=True)
class FunctionAlgorithm:
    """A function that returns the graph of a step, as an algorithm; derived classes have its settings as fields.

    Its parameters say which models there are: ``critic``, ``reference``, ``teacher``, and ``proximal`` to correct stale
    tokens. Its setting ``samples``, if any, is the number of responses to a prompt.
    """

    has_critic: ClassVar[bool]
    part: ClassVar[OwnPart]

    @property
    def responses(self) -> int:
        return int(getattr(self, "samples", 1))

    @property
    def refers(self) -> bool:
        return "reference" in self.part.given or self.part.whole is not None

    @property
    def corrects(self) -> bool:
        return "proximal" in self.part.given

    @property
    def distills(self) -> bool | None:
        # None: with all roles as one object, if a teacher is named
        return True if "teacher" in self.part.given else None if self.part.whole is not None else False

    def graph(self, roles: Roles) -> Graph[StepReport]:
        has = {name: getattr(roles, name) for name in ROLES}
        return _graph(self.part(self, has, roles), self.part.spec)

    def loss(self) -> Loss:
        from oppo.losses import default_loss  # noqa: PLC0415 - torch takes seconds to import

        return default_loss(critic=self.has_critic)


def of_function(spec: str, part: OwnPart) -> type[Algorithm]:
    members = {"has_critic": "critic" in part.given, "part": part, "__doc__": part.make.__doc__}
    kind = make_dataclass(
        spec.rpartition(":")[2], [], bases=(part.settings, FunctionAlgorithm), namespace=members, frozen=True
    )
    return cast("type[Algorithm]", kind)


def checked(algorithm: Algorithm) -> Algorithm:
    spec = user_code.spec_of(type(algorithm))
    if spec and is_dataclass(algorithm):
        try:
            require_declared(algorithm, error=ConfigError)
        except ConfigError as error:
            raise _refuse(f"{spec}: {error}") from None
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
    LOSS.require(loss, f"{KEY}: {spec}.loss returned no loss")
    return loss


def _graph(made: object, spec: str) -> Graph[StepReport]:
    if not isinstance(made, Graph):
        raise _refuse(f"{spec} must return the graph of a step; got {shown(made)}")
    return made


def _refuse(words: str) -> ConfigError:
    return ConfigError(f"{KEY}: {words}")


OWN: Final[Mapping[str, OwnRequirements]] = {
    "admission": OwnRequirements(
        "oppo.Admission",
        ("batch", "max_deferrals", "admit", "cut", "observe"),
        frozenset({"batch", "max_deferrals", "overcommit", "staleness_price"}),
    ),
    "loss": LOSS,
}
"""The parts of one's own besides the algorithm, each by its key in ``[step]`` and its table."""

NAMED: Final = ("algorithm", *OWN)
"""The keys of ``[step]`` that may name a file of code, whose settings are a table of the same name."""


def step_of(document: Mapping[str, object]) -> Mapping[str, object]:
    step = document.get("step")
    return step if isinstance(step, Mapping) else {}


def algorithm_of(document: Mapping[str, object]) -> type[Algorithm] | None:
    return find(step_of(document).get("algorithm", StepSection().algorithm))


def is_scoreless(document: Mapping[str, object]) -> bool:
    """Whether no reward need be named: the algorithm reads none, or agents return it."""
    agents = document.get("agents")
    of_agents = isinstance(agents, Mapping) and agents.get("program")
    return bool(of_agents or getattr(algorithm_of(document), "scoreless", False))


def extension(name: str, spec: object) -> OwnPart | None:
    """Return the user extension of ``step.admission`` or ``step.loss``; ``None`` for a name of ours."""
    return part(f"step.{name}", spec, OWN[name].has) if isinstance(spec, str) and SPEC.match(spec) else None


def table_of(name: str, spec: object) -> type[DataclassInstance]:
    own = extension(name, spec)
    return NoSettings if own is None else own.settings


def made(name: str, settings: object, step: StepSection) -> object:
    own, what = extension(name, getattr(step, name)), OWN[name]
    if own is None:
        return None
    found = own(settings, {key: getattr(step, key) for key in what.has})
    what.require(found, f"step.{name}: {own.spec} makes no {name}")
    return found
