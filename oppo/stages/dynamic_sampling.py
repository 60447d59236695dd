"""Dynamic sampling: a step trains the groups that are accepted by their scores (DAPO, arXiv 2503.14476, section 3.2).

A step decodes in rounds. When it is cut, the groups with a place in the batch are scored, and each is accepted or
rejected. A rejected group loses its place: a complete group that has none takes it, else a new prompt is admitted, and
the step decodes on. Nothing of this depends on timing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeAlias

import anyio
import numpy as np

from oppo.declared import PositiveInteger, validated
from oppo.errors import ConfigError, blaming
from oppo.events import Drop, FloatArray, Prompt, Scored, StepReport
from oppo.graph import Receiver, Sender, Step

Accept: TypeAlias = Callable[[FloatArray], bool]
"""Whether a group is trained, by the scores of its responses, float32 [n]; a pure function."""

REJECTED = "rejected"  # reason of a drop for a response whose group is not trained


def differ(scores: FloatArray) -> bool:
    """Return whether the scores of a group, float32 [n], differ: otherwise every advantage in it is 0.

    Example:
        >>> differ(np.array([0, 1, 0], np.float32)), differ(np.array([1, 1, 1], np.float32))
        (True, False)
    """
    return bool(np.ptp(scores) > 0)


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a step, recorded by the stage that generates; prompts are identified by their admission numbers."""

    placed: tuple[int, ...]  # in the batch, in the order in which they took it; each is accepted or rejected
    rejected: tuple[int, ...]  # those that lost their place
    filled: tuple[int, ...]  # complete ones that took a place that had become free
    admitted: tuple[int, ...]  # new ones, for the places that were left


class Rounds(tuple[Round, ...]):
    __slots__ = ()


@dataclass(eq=False)
@validated(ConfigError)
class DynamicSampling:
    """Selects the groups that a step trains: a stage that reads the scores, and that ``Generate`` asks.

    It passes scores on when the step has been decoded; a response of a rejected group is a ``Drop`` instead. Responses
    that are dropped already, or whose score is not finite, do not count; a group without any other is rejected. It
    stands between a reward and the advantage stage, and ``Generate`` is given the same object, as by
    ``grpo(select=...)``: a graph in which they differ cannot be built.

    Attributes:
        accept: whether a group is trained.
        max_rounds: rounds of a step after which a rejected group is an error.

    Raises:
        ConfigError: there is no round.
    """

    accept: Accept = differ
    max_rounds: PositiveInteger = 10
    _steps: dict[int, _Verdicts] = field(default_factory=dict, init=False, repr=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._steps.clear()

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Report that no stage asks which groups are selected."""
        del named
        fault = (
            "is a DynamicSampling that no stage asks: give the Generate of this graph the same one, Generate(..., "
            "select=selection)"
        )
        return [] if any(getattr(each, "select", None) is self for each in stages) else [fault]

    def observe(self, report: StepReport, step: Step, /) -> Rounds | None:
        """Return the rounds of a step for the journal."""
        del report
        return Rounds(each for _, each in step.recorded(Round)) or None

    async def run(
        self, score: Receiver[Scored[float] | Drop], /, *, out: Sender[Scored[float] | Drop], step: Step
    ) -> None:
        """Note one step's scores; send them when all groups are accepted or rejected."""
        scores: list[Scored[float] | Drop] = []
        async for item in score:
            scores.append(item)
            self._steps[step.index].hear(item)
        verdicts = self._steps.pop(step.index, _Verdicts())
        for item in scores:
            selected = isinstance(item, Drop) or item.rollout not in verdicts.rejected
            await out.send(item if selected else Drop(item.rollout, REJECTED))

    def begin(self, step: int) -> None:
        """Judge the groups of a step that begins."""
        self._steps[step] = _Verdicts()

    async def rejects(self, step: int, prompts: Sequence[Prompt]) -> bool:
        """Return whether the group of these prompts is rejected, once all are scored: an agent has one score a role.

        One is accepted if the scores of any role are.
        """
        verdicts = self._steps[step]
        scores = await verdicts.scores_of(prompts)
        with blaming(f"accept of {type(self).__name__}"):
            rejected = not any(len(each) and self.accept(each) for each in scores)
        if rejected:
            verdicts.rejected.update(each.rollout for each in prompts)
        return rejected


@dataclass(slots=True, eq=False)
class _Verdicts:
    """The scores of a step, NaN where there is none, and the rollouts that are rejected."""

    scores: dict[int, float] = field(default_factory=dict)
    rejected: set[int] = field(default_factory=set)
    change: anyio.Event = field(default_factory=anyio.Event)

    def hear(self, item: Scored[float] | Drop) -> None:
        self.scores[item.rollout] = math.nan if isinstance(item, Drop) else float(item.value)
        self.change.set()

    async def scores_of(self, prompts: Sequence[Prompt]) -> list[FloatArray]:
        while any(each.rollout not in self.scores for each in prompts):
            self.change = anyio.Event()
            await self.change.wait()
        by_role = defaultdict[str, dict[tuple[int, str], float]](dict)
        for each in prompts:  # branches last
            by_role[each.role].setdefault(each.trajectory, self.scores[each.rollout])
        scores = [np.array([*each.values()], np.float32) for each in by_role.values()]
        return [each[np.isfinite(each)] for each in scores]
