"""Fake models with models of cost, in virtual time, and a batch: no torch, exact results.

A fake's answer depends on every token it read and on the version of the weights: code that mixes up rollouts,
positions or versions gets other numbers. A fake sleeps for its cost, which is a number of seconds or a function of the
work. The actor is in :mod:`oppo.testing.fake_policy`.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import anyio
import numpy as np

from oppo.declared import NonNegative, require_whole, validated
from oppo.errors import ConfigError, ProtocolError
from oppo.events import Batch, Chunk, Finish, FloatArray, Prompt, Response, ToolTokens
from oppo.models import SyncedModel, Trained, TrainerCapabilities, Weights, sync
from oppo.scorers import RolloutSession, RolloutSessions
from oppo.stages.advantage import GAE
from oppo.stages.batch import ScoredRollout

T = TypeVar("T")

# `f(start, stop)`: seconds to read positions `start .. stop` of a rollout; the prompt's positions are below 0
ReadSeconds: TypeAlias = Callable[[int, int], float]


@dataclass(slots=True, eq=False)
class Session(RolloutSession):
    tokens: array[int] = field(default_factory=lambda: array("i"))  # read so far, the prompt's included


@dataclass(eq=False)
@validated()
class FakeScorer(Generic[T]):
    """A scorer whose value of a rollout depends on all that it read of it, and on the versions that read it.

    Attributes:
        value: of a finished rollout, given the tokens read (prompt and response) and the oldest version of the weights
            that read any of them: a stale session gives the numbers of old weights.
        per_token: seconds for each token read, or a function of the positions read.
        per_call: seconds of each call.
        answering: seconds of a ``finish`` call, instead of ``per_call``.
    """

    value: Callable[[Finish, tuple[int, ...], int], T]
    per_token: NonNegative | ReadSeconds = 0.0
    per_call: float = 0.0
    answering: Callable[[Sequence[Finish]], float] | None = None
    version: int = 0
    calls: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.sessions = RolloutSessions(
            type(self).__name__, lambda prompt: Session(prompt.rollout, len(prompt.tokens), self.version)
        )

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        """Read more of some rollouts."""
        count = sum(len(event.tokens) for event in events)
        self.calls, self.tokens = self.calls + 1, self.tokens + count
        if callable(self.per_token):
            reading = sum(self.per_token(*_span(event)) for event in events)
        else:
            reading = self.per_token * count
        await self._work(self.per_call + reading)
        for event in events:
            session = self.sessions.receive(event)
            session.tokens.frombytes(event.tokens.astype(np.int32, copy=False).tobytes())

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T]:
        """Return the value of each rollout and forget its session."""
        await self._work(self.answering(finished) if self.answering else self.per_call)
        read = [(event, self.sessions.whole(event.rollout, len(event.response))) for event in finished]
        self.sessions.forget([event.rollout for event in finished])
        for event, session in read:
            whole = np.concatenate((event.response.prompt.tokens, event.response.tokens))
            if not np.array_equal(session.tokens, whole):
                raise ProtocolError(f"rollout {event.rollout}: the tokens read are not those of the response")
        return [self.value(event, tuple(session.tokens), session.version) for event, session in read]

    async def forget(self, rollouts: Sequence[int]) -> None:
        self.sessions.forget(rollouts)

    async def _work(self, seconds: float) -> None:
        await anyio.sleep(seconds)


def _span(event: Prompt | Chunk | ToolTokens) -> tuple[int, int]:
    start = -len(event.tokens) if isinstance(event, Prompt) else event.start
    return start, start + len(event.tokens)


def fake_scalar(_event: Finish, tokens: tuple[int, ...], version: int) -> float:
    """Return a score that depends on every token read."""
    return float(np.float32(noise(*tokens, version)))


def fake_per_token(event: Finish, tokens: tuple[int, ...], version: int) -> FloatArray:
    """Return one number for each response token, float32 [T], from the tokens up to it."""
    start = len(event.response.prompt.tokens)
    crc = zlib.crc32(struct.pack(f"<{start + 1}q", version, *tokens[:start]))
    values = np.empty(len(event.response), np.float32)
    for k, token in enumerate(tokens[start:]):
        crc = zlib.crc32(struct.pack("<q", token), crc)
        values[k] = -crc / 2**32
    return values


class FakeCritic(FakeScorer[FloatArray]):
    """A fake scorer of values that follows the trainer."""

    def __init__(self, *, per_token: float = 0.0, per_call: float = 0.0) -> None:
        super().__init__(fake_per_token, per_token, per_call)

    async def load(self, weights: Weights) -> None:
        self.version = weights.version

    async def copied(self, weights: Weights) -> Weights:
        return weights


@dataclass(eq=False)
@validated()
class FakeTrainer:
    """A trainer that records its batches.

    Attributes:
        seconds: of one update, or a function of its batch.
        nonfinite: whether a rollout's minibatch fails.
        syncing: seconds until the synced models get the weights.
        accumulating: seconds of one part of a batch, or a function of it.
        committing: seconds of the update of a batch whose rows were all accumulated; of each that was not, its share of
            ``seconds`` is added.
        parts: the parts of the coming batch.
    """

    seconds: NonNegative | Callable[[Batch], float] = 0.0
    nonfinite: Callable[[int], bool] = lambda rollout: False
    version: int = 0
    batches: list[Batch] = field(default_factory=list)
    syncing: float = 0.0
    accumulating: NonNegative | Callable[[Batch], float] = 0.0
    committing: float = 0.0
    parts: list[Batch] = field(default_factory=list)

    async def update(self, batch: Batch) -> Trained:
        self.parts.clear()
        await self._work(_cost(self.seconds, batch))
        return self._trained(batch)

    @property
    def capabilities(self) -> TrainerCapabilities:
        return TrainerCapabilities(accumulates=True)

    async def accumulate(self, part: Batch) -> None:
        await self._work(_cost(self.accumulating, part))
        self.parts.append(part)

    async def commit(self, batch: Batch) -> Trained:
        known = {rollout for part in self.parts for rollout in part.rollouts} & set(batch.rollouts)
        rest = 1 - len(known) / len(batch) if len(batch) else 0.0
        self.parts.clear()
        await self._work(self.committing + rest * _cost(self.seconds, batch))
        return self._trained(batch)

    async def _work(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    def _trained(self, batch: Batch) -> Trained:
        self.batches.append(batch)
        self.version += 1
        return Trained(
            {"loss/fake": float(np.mean(batch.advantages)) if batch.advantages is not None and len(batch) else 0.0},
            tuple(rollout for rollout in batch.rollouts if self.nonfinite(rollout)),
        )

    async def sync_weights(self, *synced: SyncedModel) -> None:
        """Give the version to each model, one after the other; a failure is final."""
        if self.syncing:
            await anyio.sleep(self.syncing)
        await sync(Weights(self.version), synced)


def _cost(seconds: float | Callable[[Batch], float], batch: Batch) -> float:
    return seconds(batch) if callable(seconds) else seconds


def prompts(count: int, *, length: int = 3) -> list[Prompt]:
    """Return ``count`` prompts of ``length`` tokens, admission numbers from 0."""
    return [Prompt(n, n, np.arange(n, n + length, dtype=np.int32), group=n) for n in range(count)]


def noise(*key: int) -> float:
    """Return a pseudorandom number in [0, 1): a hash of the key, the same on every machine."""
    return zlib.crc32(struct.pack(f"<{len(key)}q", *key)) / 2**32


def noises(key: Sequence[int], *columns: Sequence[int]) -> list[float]:
    prefix, form = zlib.crc32(struct.pack(f"<{len(key)}q", *key)), f"<{len(columns)}q"
    return [zlib.crc32(struct.pack(form, *each), prefix) / 2**32 for each in zip(*columns, strict=True)]


def fake_batch(
    lengths: Sequence[int] = (5, 9, 3, 12),
    *,
    prompt_length: int = 4,
    vocabulary: int = 96,
    version: int = 0,
    reference: bool = True,
    critic: bool = True,
    seed: int = 0,
) -> Batch:
    """Return a batch with the advantages of GAE, for :func:`check_trainer` and tests of trainers.

    Args:
        lengths: tokens of each response; a rollout each, and each a prompt of its own.
        prompt_length: tokens of each prompt.
        vocabulary: token ids are below it.
        version: of the weights that made the tokens.
        reference: whether it holds log-probs of a reference.
        critic: whether it holds values and returns.
        seed: of tokens and numbers.

    Example:
        >>> batch = fake_batch([2, 3], critic=False)
        >>> batch.offsets.tolist(), batch.values
        ([0, 2, 5], None)
    """
    for name, number in (("prompt_length", prompt_length), ("vocabulary", vocabulary)):
        require_whole(name, number, 1, error=ConfigError)
    for length in lengths:
        require_whole("a length", length, 1, error=ConfigError)
    rows: list[ScoredRollout] = []
    for rollout, length in enumerate(lengths):
        positions = range(prompt_length + length)
        ids, log, ref, value = np.array([noises((seed, rollout, what), positions) for what in range(4)])
        tokens = (ids * vocabulary).astype(np.int32)
        prompt = Prompt(rollout, rollout, tokens[:prompt_length], group=rollout)
        logprobs = (-4 * log[:length]).astype(np.float32)
        chunk = Chunk(rollout, 0, tokens[prompt_length:], logprobs, np.full(length, version, np.int32))
        rows.append(
            ScoredRollout(
                Finish(rollout, Response.empty(prompt).then(chunk), "eos"),
                (-4 * ref[:length]).astype(np.float32) if reference else None,
                float(ref[-1]),
                value[:length].astype(np.float32) if critic else None,
            )
        )
    return GAE(kl=0.05 if reference else 0.0).batch(rows)
