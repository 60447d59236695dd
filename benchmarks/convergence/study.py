"""What a study is: its arms, its files, and its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from benchmarks.convergence.arms import Arm
from benchmarks.convergence.results import Results

Axis: TypeAlias = Literal["steps", "seconds", "updates", "update seconds"]
"""What scores are drawn against.

``updates``: those that the policy had seen that wrote the rollouts; ``update seconds``: when these had been made.
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of the figure: the scores of some arms, by name.

    Attributes:
        label: of the x axis.
    """

    axis: Axis
    label: str
    arms: Sequence[str]


@dataclass(frozen=True, slots=True)
class Study:
    """A question to training, whose arms are its possible answers.

    Attributes:
        arms: by name, in the order of the table.
        file: name of the file of results.
        picture: name of the figure, beside the page and beside the results.
        panels: of the figure.
        section: returns the section of ``docs/learning.md``, with its heading.
        findings: returns what was found, a line each.
        table: returns the results as a table.
    """

    name: str
    arms: Mapping[str, Arm]
    file: str
    picture: str
    panels: Sequence[Panel]
    table: Callable[[Results], str]
    findings: Callable[[Results], str]
    section: Callable[[Results], str]

    @property
    def begin(self) -> str:
        """The line of the page after which the section is."""
        return f"<!-- python -m benchmarks.convergence --study {self.name} --page -->\n"
