"""The tables of a file whose keys depend on what ``[step]`` names: the algorithm's, and those of parts of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from oppo.algorithms.base import Algorithm
from oppo.algorithms.ppo import PPO
from oppo.app.own import LOSS, NoSettings, OwnPart, OwnRequirements, part
from oppo.app.own_algorithm import find
from oppo.app.sections import StepSection
from oppo.user_code import SPEC

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


OWN: Final[Mapping[str, OwnRequirements]] = {
    "admission": OwnRequirements(
        "oppo.Admission",
        ("batch", "max_deferrals", "admit", "cut", "observe"),
        frozenset({"batch", "extra", "max_deferrals", "lag_price"}),
    ),
    "loss": LOSS,
}
"""The parts of one's own besides the algorithm, each by its key in ``[step]`` and its table."""

NAMED: Final = ("algorithm", *OWN)
"""The keys of ``[step]`` that may name a file of code, whose settings are a table of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The classes of these tables.

    Attributes:
        algorithm: ``None`` for an unknown name.
        own: the parts of one's own that are named, by their keys.
    """

    algorithm: type[Algorithm] | None = PPO
    own: Mapping[str, OwnPart] = field(default_factory=dict)

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Self:
        """Return those that a document names.

        Raises:
            ConfigError: one is in a file, and cannot be loaded.
        """
        step = document.get("step")
        named: Mapping[str, object] = step if isinstance(step, Mapping) else {}
        specs = {name: spec for name in OWN if isinstance(spec := named.get(name), str) and SPEC.match(spec)}
        return cls(
            algorithm=find(named.get("algorithm", StepSection().algorithm)),
            own={name: part(f"step.{name}", spec, OWN[name].has) for name, spec in specs.items()},
        )

    def table(self, name: str) -> type[DataclassInstance]:
        """Return the class of a part's table."""
        return self.own[name].settings if name in self.own else NoSettings

    def make(self, name: str, settings: object, step: StepSection) -> object:
        """Return the part of one's own that ``step.<name>`` names, made of the settings in its table, or ``None``.

        Raises:
            ConfigError: it cannot be made, or lacks a member.
        """
        if name not in self.own:
            return None
        own, what = self.own[name], OWN[name]
        made = own(settings, {key: getattr(step, key) for key in what.has})
        what.require(made, f"step.{name}: {own.spec} makes no {name}")
        return made
