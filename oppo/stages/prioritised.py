"""Scorers that take a priority and scorers that take none, called in the same way."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Final, Generic, TypeVar, cast

from oppo.errors import ProtocolError
from oppo.events import Finish
from oppo.models import PrioritisedScorer, Scorer
from oppo.scheduling import IN_ORDER, Priority
from oppo.stages.backlog import Growth

T = TypeVar("T")

METHODS: Final = ("extend", "finish", "forget")


def prioritised(scorer: Scorer[T]) -> PrioritisedScorer[T]:
    """Return ``scorer``, or one that calls it without the priority if its methods do not take that keyword.

    Raises:
        ProtocolError: some of its methods take the keyword, and others do not.
    """
    lacking = [name for name in METHODS if "priority" not in inspect.signature(getattr(scorer, name)).parameters]
    if not lacking:
        return cast("PrioritisedScorer[T]", scorer)
    if len(lacking) < len(METHODS):
        raise ProtocolError(
            f"expected the keyword `priority` in all of {', '.join(METHODS)} or in none: a call without it would wait "
            f"for urgent calls of the same scorer; got {type(scorer).__name__}, which lacks it in "
            f"{', '.join(lacking)}: declare it there too, and hand it to the place"
        )
    return _InOrder(scorer)


class _InOrder(Generic[T]):
    """Calls a scorer in the order of arrival."""

    def __init__(self, scorer: Scorer[T]) -> None:
        self._scorer = scorer

    @property
    def version(self) -> int:
        return self._scorer.version

    async def extend(self, events: Sequence[Growth], *, priority: Priority = IN_ORDER) -> None:
        del priority
        await self._scorer.extend(events)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T]:
        del priority
        return await self._scorer.finish(finished)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        del priority
        await self._scorer.forget(rollouts)
