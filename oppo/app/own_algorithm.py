"""The algorithm that ``step.algorithm`` names: one of :mod:`oppo.algorithms`, or a class or a function of a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Final, cast

from oppo import user_code
from oppo.algorithms import ALGORITHMS
from oppo.algorithms.base import Algorithm, Roles
from oppo.app.own import LOSS, OwnPart, naming, part_of
from oppo.declared import require_declared
from oppo.errors import ConfigError, shown
from oppo.events import StepReport
from oppo.graph import Graph

if TYPE_CHECKING:
    from oppo.losses import Loss

KEY: Final = "step.algorithm"

MEMBERS: Final = ("has_critic", "responses", "refers", "corrects", "graph", "loss")
"""What a class of a file must have: the members of :class:`Algorithm`."""

ROLES: Final = frozenset(each.name for each in fields(Roles))
"""The parameters of a function that are models, or the schedule, of a run."""


def find(name: object) -> type[Algorithm] | None:
    """Return the algorithm of a name; ``None`` for an unknown one.

    Raises:
        ConfigError: the name is ``file.py:name``, and what it names cannot be loaded or is no algorithm.
    """
    if not isinstance(name, str):
        return None
    return _loaded(name) if user_code.SPEC.match(name) else ALGORITHMS.get(name)


def with_name(document: Mapping[str, object]) -> Mapping[str, object]:
    """Return a document whose ``step.algorithm`` is a name: an algorithm's object also gives the table ``[algorithm]``.

    Raises:
        ConfigError: it is another object, or there is such a table too.
    """
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
    """Return the algorithm that ``file.py:name`` names; a file is run once in a process."""
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

    It trains a critic if it has a parameter ``critic``, and corrects for stale tokens if it has one ``proximal``. A
    reference is loaded if it has one ``reference``, or one for all roles. Its loss is that of PPO, with or without a
    critic. Its setting ``samples``, if there is one, is the number of responses to each prompt.
    """

    has_critic: ClassVar[bool]
    part: ClassVar[OwnPart]

    @property
    def responses(self) -> int:
        """Responses to each prompt."""
        return int(getattr(self, "samples", 1))

    @property
    def refers(self) -> bool:
        """Whether log-probs of a reference may be needed: it is named, or all roles are given as one object."""
        return "reference" in self.part.given or self.part.whole is not None

    @property
    def corrects(self) -> bool:
        """Whether stale tokens are corrected for."""
        return "proximal" in self.part.given

    def graph(self, roles: Roles) -> Graph[StepReport]:
        """Return the graph of a step.

        Raises:
            ConfigError: the function raised, or returned something else.
        """
        has = {name: getattr(roles, name) for name in ROLES}
        return _graph(self.part(self, has, roles), self.part.spec)

    def loss(self) -> Loss:
        """Return PPO's loss."""
        from oppo.losses import default_loss  # noqa: PLC0415 - torch takes seconds to import

        return default_loss(critic=self.has_critic)


def of_function(spec: str, part: OwnPart) -> type[Algorithm]:
    """Return the algorithm of a function."""
    members = {"has_critic": "critic" in part.given, "part": part, "__doc__": part.make.__doc__}
    kind = make_dataclass(
        spec.rpartition(":")[2], [], bases=(part.settings, FunctionAlgorithm), namespace=members, frozen=True
    )
    return cast("type[Algorithm]", kind)


def checked(algorithm: Algorithm) -> Algorithm:
    """Return an algorithm whose settings are within their bounds, defaults too, and whose properties can be read.

    Raises:
        ConfigError: a setting is not, or a class of a file raised while a property was read.
    """
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
    """Return the graph of a step.

    Raises:
        ConfigError: a class or a function of a file raised, or returned something else.
        GraphError: the graph is wired wrongly.
    """
    spec = user_code.spec_of(type(algorithm))
    if not spec:
        return algorithm.graph(roles)
    with naming(KEY, f"{spec}.graph"):
        graph: object = algorithm.graph(roles)
    return _graph(graph, f"{spec}.graph")


def loss_of(algorithm: Algorithm) -> Loss:
    """Return the loss of an algorithm; this loads torch.

    Raises:
        ConfigError: a class of a file raised, or returned something else.
    """
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
