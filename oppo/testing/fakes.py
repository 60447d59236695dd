"""Fake models with cost models, for tests in virtual time: no torch, no randomness beyond a seed, exact results.

A fake's answer depends on every token it has read and on the version of the weights: code that mixes up rollouts,
positions or versions gets other numbers. The actor is in :mod:`oppo.testing.fake_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
import numpy as np

from oppo.declared import require_declared
from oppo.errors import ProtocolError
from oppo.events import Batch, Chunk, Finish, FloatArray, Given, Prompt
from oppo.models import (
    Follower,
    Trained,
    Weights,
)
from oppo.testing.dice import noise

T = TypeVar("T")


@dataclass(eq=False)
class FakeScorer(Generic[T]):
    """A scorer whose value of a rollout is computed from everything it has read of it, and when.

    Attributes:
        value: what to say of a finished rollout, given the tokens read (prompt and response) and the oldest version of
            the weights that read any of them: who believes a stale session gets the numbers of old weights.
        per_token, per_call: seconds.
    """

    value: Callable[[Finish, tuple[int, ...], int], T]
    per_token: float = 0.0
    per_call: float = 0.0
    version: int = 0
    calls: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        require_declared(self)
        self.sessions: dict[int, list[int]] = {}
        self._prompt: dict[int, int] = {}
        self._oldest: dict[int, int] = {}

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Read more of some rollouts.

        Raises:
            ProtocolError: an event does not continue its rollout.
        """
        count = sum(len(event.tokens) for event in events)
        self.calls, self.tokens = self.calls + 1, self.tokens + count
        await anyio.sleep(self.per_call + self.per_token * count)
        for event in events:
            self._read(event)

    def _read(self, event: Prompt | Chunk | Given) -> None:
        if isinstance(event, Prompt):
            self.sessions[event.rollout], self._prompt[event.rollout] = [], len(event.tokens)
            self._oldest[event.rollout] = self.version
        else:
            read = self._session(event.rollout) - self._prompt[event.rollout]
            if event.start != read:
                raise ProtocolError(
                    f"rollout {event.rollout} continues at {event.start}, but {read} tokens have been read"
                )
        self.sessions[event.rollout].extend(event.tokens.tolist())

    def _session(self, rollout: int) -> int:
        """Return how many tokens have been read of a rollout, with its prompt."""
        if rollout not in self.sessions:
            raise ProtocolError(f"rollout {rollout} is unknown: its Prompt must come first")
        return len(self.sessions[rollout])

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T]:
        """Return the value of each rollout and forget its session.

        Raises:
            ProtocolError: what was read of a rollout is not its response.
        """
        await anyio.sleep(self.per_call)
        for event in finished:
            self._session(event.rollout)
        read = [(event, tuple(self.sessions.pop(event.rollout))) for event in finished]
        for event, tokens in read:
            whole = [*event.response.prompt.tokens.tolist(), *event.response.tokens.tolist()]
            if list(tokens) != whole:
                raise ProtocolError(
                    f"rollout {event.rollout}: read {len(tokens)} tokens, the response says {len(whole)}"
                )
        return [self.value(event, tokens, self._oldest[event.rollout]) for event, tokens in read]

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Drop sessions."""
        for rollout in rollouts:
            self.sessions.pop(rollout, None)


def fake_scalar(_event: Finish, tokens: tuple[int, ...], version: int) -> float:
    """Return a score that depends on every token read."""
    return float(np.float32(noise(*tokens, version)))


def fake_per_token(event: Finish, tokens: tuple[int, ...], version: int) -> FloatArray:
    """Return one number for each response token, from the tokens up to it."""
    start = len(event.response.prompt.tokens)
    return np.array([-noise(version, *tokens[: start + k + 1]) for k in range(len(event.response))], np.float32)


class FakeCritic(FakeScorer[FloatArray]):
    """A fake scorer of values that follows the trainer."""

    def __init__(self, *, per_token: float = 0.0, per_call: float = 0.0) -> None:
        super().__init__(fake_per_token, per_token, per_call)

    async def load(self, weights: Weights) -> None:
        """Follow the trainer."""
        self.version = weights.version


@dataclass(eq=False)
class FakeTrainer:
    """A trainer that remembers its batches.

    Attributes:
        seconds: of one update.
        nonfinite: the rollouts whose minibatch is to fail.
    """

    seconds: float = 0.0
    nonfinite: Callable[[int], bool] = lambda rollout: False
    version: int = 0
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_declared(self)

    async def update(self, batch: Batch) -> Trained:
        """Take the batch; the version is one more afterwards."""
        await anyio.sleep(self.seconds)
        self.batches.append(batch)
        self.version += 1
        return Trained(
            {"loss/fake": float(np.mean(batch.advantages)) if len(batch) else 0.0},
            tuple(rollout for rollout in batch.rollouts if self.nonfinite(rollout)),
        )

    async def publish(self, *followers: Follower) -> None:
        """Give the version to each follower, one after the other; there is no way back from a failure."""
        for follower in followers:
            try:
                await follower.load(Weights(self.version))
            except Exception as error:
                held = ", ".join(f"{type(one).__name__} has version {one.version}" for one in followers)
                error.add_note(f"while publishing version {self.version}: {held}; do not go on from here")
                raise


def prompts(count: int, *, length: int = 3) -> list[Prompt]:
    """Return ``count`` prompts of ``length`` tokens, admission numbers from 0."""
    return [Prompt(n, n, np.arange(n, n + length, dtype=np.int32), group=n) for n in range(count)]
