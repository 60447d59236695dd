"""The weights of a scorer that follows the trainer, as its stage takes them.

::

    lookahead = 1      update   | k         | k + 1     |        gives the weights of its step, and goes on
                       value      | k + 1     | k + 2     |      takes those of step k between these two steps

With lookahead n a step is scored with the weights of the update n + 1 steps before it, at any speed. An update does not
wait until its weights are taken. They wait in the trainer's own memory with a lookahead of 1, where the next update
needs this stage's values anyway, and in a copy with more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import anyio

from oppo.errors import ProtocolError, noted
from oppo.follower_protocols import CopiesWeights, ServesByReference, StandsFor, name_of, share_tensors
from oppo.graph import Step
from oppo.models import Follower, Weights


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Weights of a step's update that are not served yet; ``borrowed``: in the trainer's own memory."""

    step: int
    weights: Weights
    borrowed: bool


class Following:
    """A scorer that follows the trainer: its weights change only while its stage neither reads nor scores.

    Args:
        scorer: the model behind a :class:`~oppo.stages.Score`.
        newest: serve new weights at once, for a stage that waits for each update; otherwise from the step on for which
            they are due.

    Attributes:
        together: whether another follower of the trainer serves tensors of the scorer: they change together.
    """

    def __init__(self, scorer: Follower, *, newest: bool = False) -> None:
        self.scorer = scorer
        self._newest = newest
        self.together = False
        self._reading = anyio.Lock(fast_acquire=True)
        self._waiting: deque[_Waiting] = deque()
        self._served = anyio.Event()
        self._stage = ""
        self._returned = -1

    @property
    def stands_for(self) -> Follower:
        """The scorer."""
        return self.scorer

    @property
    def version(self) -> int:
        """Version of the weights that it was given last; the scorer's own is that of the weights in use."""
        return self._waiting[-1].weights.version if self._waiting else self.scorer.version

    def reading(self) -> AbstractAsyncContextManager[object]:
        """Return a context in which the weights stay as they are: from what is accepted until it is read or scored."""
        return self._reading

    def serves(self, weights: Weights) -> bool:
        """Return whether a tensor of ``weights`` is one that the scorer serves."""
        return isinstance(self.scorer, ServesByReference) and self.scorer.serves(weights)

    # For the stage that trains.

    def pair(self, followers: Iterable[Follower]) -> None:
        """Note the other followers of the trainer: with one that serves the same tensors, weights change together."""
        others = (each.stands_for if isinstance(each, StandsFor) else each for each in followers if each is not self)
        self.together = any(share_tensors(self.scorer, each) for each in others)

    def awaited(self, step: Step) -> str:
        """Return the stage that must have returned in later steps before weights may be given; mostly none.

        It is its own if the weights can neither wait nor be copied.
        """
        can_wait = step.lookahead == 1 or isinstance(self.scorer, CopiesWeights)
        return "" if self._newest or not step.lookahead or (can_wait and not self.together) else self._stage

    def given_in(self, step: Step) -> Follower:
        """Return what the weights of a step's update are published to."""
        return _GivenIn(self, step)

    async def settled(self) -> None:
        """Wait until nothing waits in the trainer's own memory, which may then change."""
        while any(each.borrowed for each in self._waiting):
            self._served = anyio.Event()
            await self._served.wait()

    async def load(self, weights: Weights) -> None:
        """Serve these weights, once nothing is being read."""
        async with self._reading:
            await self.scorer.load(weights)

    async def give(self, weights: Weights, step: Step) -> None:
        """Take the weights of a step's update; they are served when they are due."""
        due = step.index <= self._returned - step.lookahead
        if due or self._newest or not (step.lookahead and self._stage) or self.awaited(step):
            await self.load(weights)
        elif step.lookahead > 1 and isinstance(self.scorer, CopiesWeights):
            self._waiting.append(_Waiting(step.index, await self.scorer.copied(weights), borrowed=False))
        else:
            self._waiting.append(_Waiting(step.index, weights, borrowed=True))

    # For the stage that reads.

    async def begin(self, step: Step) -> None:
        """Serve what the steps before gave whose results were known when this one began."""
        self._stage = step.stage
        await self._serve(step.observed - 1)

    async def end(self, step: Step) -> None:
        """Serve what is due from the next step on, whenever that begins."""
        self._returned = step.index
        await self._serve(step.index - step.lookahead)

    async def close(self, *, failed: bool) -> None:
        """Serve what still waits, unless the run has failed, and forget the run."""
        if self._waiting and not failed:
            await self._serve(self._waiting[-1].step)
        self._waiting.clear()
        self._stage, self._returned = "", -1

    async def _serve(self, last: int) -> None:
        due = [each for each in self._waiting if each.step <= last]
        if not due:
            return
        weights = due[-1].weights
        with noted(f"while publishing version {weights.version} to {name_of(self)}"):
            await self.load(weights)
            if self.scorer.version != weights.version:
                raise ProtocolError(
                    f"{name_of(self)} was given version {weights.version}, but has {self.scorer.version}"
                )
        for _ in due:
            self._waiting.popleft()
        self._served.set()


@dataclass(frozen=True, slots=True, eq=False)
class _GivenIn:
    """A follower in one step."""

    following: Following
    step: Step

    @property
    def stands_for(self) -> Follower:
        return self.following.scorer

    @property
    def version(self) -> int:
        return self.following.version

    async def load(self, weights: Weights) -> None:
        await self.following.give(weights, self.step)
