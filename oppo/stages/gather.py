"""Gathering what was said of a step's rollouts, by whoever said it, until all of it can be made a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from oppo.events import Defer, Drop, Finish, FloatArray, RolloutEvent, Scored
from oppo.graph import Receiver, join, where
from oppo.stages.contract import require_per_token, require_score
from oppo.stages.rows import Row


@dataclass(slots=True, eq=False)
class ScoredRollouts:
    """What a step's rollouts came to, in the order in which that was known; false while that is nothing."""

    rows: list[Row] = field(default_factory=list)
    dropped: list[Drop] = field(default_factory=list)
    deferred: list[Defer] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.dropped or self.deferred)

    @classmethod
    async def of(
        cls,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        **per_token: Receiver[Scored[FloatArray] | Drop] | None,
    ) -> ScoredRollouts:
        """Return what the scorers said of every rollout of a step, once they all have.

        Args:
            rollout: says which rollouts there are.
            score: of each.
            per_token: ``reference``, ``values`` and ``proximal``, where these inputs are connected.

        Raises:
            ProtocolError: what was said is not one number, or not one for each response token.
        """
        gathered = cls()
        asked = {name: receiver for name, receiver in per_token.items() if receiver is not None}
        ends = where(rollout, Finish, Drop, Defer)
        # Any: no type says how many inputs there are; what they carry is checked when it is taken.
        lanes: AsyncIterator[tuple[Any, ...]] = join(
            ends, score, *asked.values(), key=finished_rollout, aside=gathered.put_aside
        )
        async for end, scored, *said in lanes:
            gathered.take(end, scored, **dict(zip(asked, said, strict=True)))
        return gathered

    def put_aside(self, event: Finish | Drop | Defer) -> None:
        """Take note of a rollout that is carried into the next step."""
        if isinstance(event, Defer):
            self.deferred.append(event)

    def take(
        self,
        finish: Finish | Drop | Defer,
        score: Scored[float] | Drop,
        reference: Scored[FloatArray] | Drop | None = None,
        values: Scored[FloatArray] | Drop | None = None,
        proximal: Scored[FloatArray] | Drop | None = None,
    ) -> None:
        """Take what was said of one rollout: a row, or a drop where somebody dropped it or it cannot be trained.

        Nobody may have been asked for anything but the score: ``None``.

        Raises:
            ProtocolError: the score is not one number, or something else not one number for each response token.
        """
        said = (finish, reference, score, values, proximal)  # of several drops, the first counts
        lost = next((one for one in said if isinstance(one, Drop)), None)
        if lost is not None:
            self.dropped.append(lost)
        elif isinstance(finish, Finish) and isinstance(score, Scored):
            require_score(score.value, finish)
            row = Row(
                finish,
                _per_token(reference, finish, "reference log-prob"),
                score.value,
                _per_token(values, finish, "value"),
                _per_token(proximal, finish, "proximal log-prob"),
            )
            fault = row.fault()
            if fault is None:
                self.rows.append(row)
            else:
                self.dropped.append(fault)

    def in_order(self) -> tuple[Sequence[Row], Sequence[Drop], Sequence[Defer]]:
        """Return rows and drops in admission order, for they came in the order of the scores: one of time."""
        self.rows.sort(key=lambda row: row.finish.rollout)
        self.dropped.sort(key=lambda drop: drop.rollout)
        return self.rows, self.dropped, self.deferred


def finished_rollout(item: object) -> int | None:
    """Return the rollout that an item ends or describes; ``None`` for anything that has no counterpart to wait for."""
    return item.rollout if isinstance(item, Finish | Drop | Scored) else None


def _per_token(said: Scored[FloatArray] | Drop | None, finish: Finish, what: str) -> FloatArray | None:
    """Return what was said of each token; ``None`` where nobody was asked, which is not the answer ``None``."""
    if not isinstance(said, Scored):
        return None
    require_per_token(said.value, finish, what)
    return said.value
