"""Dynamic sampling: a step trains the groups that are accepted by their scores (DAPO, arXiv 2503.14476, section 3.2).

A step decodes in rounds. When it is cut, the groups with a place in the batch are scored, and each is accepted or
rejected. A rejected group loses its place: a complete group that has none takes it, else a new prompt is admitted, and
the step decodes on. Nothing of this depends on timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeAlias

import anyio
import numpy as np

from oppo.errors import ConfigError
from oppo.events import Drop, FloatArray, Scored
from oppo.graph import Receiver, Sender, Step
from oppo.numeric import require_whole

Accept: TypeAlias = Callable[[FloatArray], bool]
"""Whether a group is trained, by the scores of its responses, float32 [n]; a pure function."""

REJECTED = "rejected"
"""Reason of a drop for a response whose group is not trained."""


def differ(scores: FloatArray) -> bool:
    """Return whether the scores of a group, float32 [n], differ: otherwise every advantage in it is 0.

    Example:
        >>> differ(np.array([0, 1, 0], np.float32)), differ(np.array([1, 1, 1], np.float32))
        (True, False)
    """
    return bool(np.ptp(scores) > 0)


@dataclass(eq=False)
class Selection:
    """Selects the groups that a step trains: a stage that reads the scores, and the judge whom ``Generate`` asks.

    It passes scores on when the step has been decoded; a response of a rejected group is a ``Drop`` instead. Responses
    that are dropped already, or whose score is not finite, do not count; a group without any other is rejected. It
    stands between a reward and the advantage stage, and ``Generate`` is given the same object, as by
    ``grpo(select=...)``.

    Attributes:
        accept: whether a group is trained.
        max_rounds: rounds of a step after which a rejected group is an error.

    Raises:
        ConfigError: there is no round.
    """

    accept: Accept = differ
    max_rounds: int = 10
    _steps: dict[int, _Verdicts] = field(default_factory=dict, init=False, repr=False)
    _entered: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        require_whole("max_rounds", self.max_rounds, 1, error=ConfigError)

    async def __aenter__(self) -> Self:
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Forget the steps that did not end."""
        self._entered = False
        self._steps.clear()

    async def run(
        self, score: Receiver[Scored[float] | Drop], /, *, out: Sender[Scored[float] | Drop], step: Step
    ) -> None:
        """Note one step's scores; send them when all groups are judged.

        Raises:
            ConfigError: ``Generate`` does not ask.
        """
        scores: list[Scored[float] | Drop] = []
        async for item in score:
            scores.append(item)
            self._of(step.index).hear(item)
        rejected = self._of(step.index).rejected if scores else set[int]()
        self._steps.pop(step.index, None)
        for item in scores:
            selected = isinstance(item, Drop) or item.rollout not in rejected
            await out.send(item if selected else Drop(item.rollout, REJECTED))

    def begin(self, step: int) -> None:
        """Judge the groups of a step that begins.

        Raises:
            ConfigError: this is no stage of the graph.
        """
        if not self._entered:
            raise ConfigError(
                "Generate has a Selection that reads no scores: add it to the graph after the reward, "
                'g.add("select", selection, score), and give its output to the advantage stage'
            )
        self._steps[step] = _Verdicts()

    async def rejects(self, step: int, rollouts: Sequence[int]) -> bool:
        """Return whether the group of these rollouts is rejected, once all of them are scored."""
        verdicts = self._of(step)
        scores = await verdicts.scores_of(rollouts)
        rejected = not len(scores) or not self.accept(scores)
        if rejected:
            verdicts.rejected.update(rollouts)
        return rejected

    def _of(self, step: int) -> _Verdicts:
        if step not in self._steps:
            raise ConfigError(
                "a Selection selects for a Generate that is given the same one, Generate(..., select=selection), and "
                "that of this graph has none"
            )
        return self._steps[step]


@dataclass(slots=True, eq=False)
class _Verdicts:
    """The scores of a step, NaN where there is none, and the rollouts that are rejected."""

    scores: dict[int, float] = field(default_factory=dict)
    rejected: set[int] = field(default_factory=set)
    change: anyio.Event = field(default_factory=anyio.Event)

    def hear(self, item: Scored[float] | Drop) -> None:
        self.scores[item.rollout] = math.nan if isinstance(item, Drop) else float(item.value)
        self.change.set()

    async def scores_of(self, rollouts: Sequence[int]) -> FloatArray:
        """Return the finite scores of these rollouts once they are known, float32 [n]."""
        while any(rollout not in self.scores for rollout in rollouts):
            self.change = anyio.Event()
            await self.change.wait()
        scores = np.array([self.scores[rollout] for rollout in rollouts], np.float32)
        finite: FloatArray = scores[np.isfinite(scores)]
        return finite
