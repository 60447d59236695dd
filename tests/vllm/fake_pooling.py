"""A fake of the calls of vLLM's ``AsyncLLM`` that scoring uses, with a prefix cache of a few blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from oppo.simulate.models import noise

BLOCK = 8


@dataclass(frozen=True)
class PoolingParams:
    """vLLM's, as far as scoring sets it."""

    task: str
    use_activation: bool


@dataclass(frozen=True)
class Data:
    numbers: list[float]

    def tolist(self) -> list[float]:
        return self.numbers


@dataclass(frozen=True)
class Pooling:
    data: Data


@dataclass(frozen=True)
class Answer:
    outputs: Pooling
    num_cached_tokens: int


@dataclass(eq=False)
class Collector:
    """Has the answer ``seconds`` after somebody began to wait."""

    name: str
    answer: Answer
    engine: FakePooling

    def get_nowait(self) -> Answer | None:
        return None if self.engine.seconds else self._taken()

    async def get(self) -> Answer:
        await anyio.sleep(self.engine.seconds)
        return self._taken()

    def _taken(self) -> Answer:
        self.engine.open.remove(self.name)
        return self.answer


class EngineDeadError(Exception):
    """vLLM's."""


@dataclass(eq=False)
class FakePooling:
    """Scores a sequence by a hash of its tokens.

    Attributes:
        room: blocks of the prefix cache; the oldest makes room for a new one.
        seconds: until a request is answered.
        sequences: of all requests, in order.
        open: names of the requests that were not answered.
    """

    room: int = 1000
    seconds: float = 0.0
    errored: bool = False
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    cached: dict[tuple[int, ...], None] = field(default_factory=dict)

    async def add_request(self, request_id: str, prompt: Mapping[str, object], params: object) -> Collector:
        if self.errored:
            raise EngineDeadError("EngineCore encountered an issue")
        assert request_id not in self.names
        assert params == PoolingParams(task="classify", use_activation=False)
        assert prompt.keys() == {"type", "prompt_token_ids"}
        assert prompt["type"] == "token"
        tokens = prompt["prompt_token_ids"]
        assert isinstance(tokens, list)
        assert tokens
        sequence = tuple(tokens)
        self.names.add(request_id)
        self.sequences.append(sequence)
        self.open.add(request_id)
        return Collector(request_id, Answer(Pooling(Data([score(sequence)])), self._hit(sequence)), self)

    async def abort(self, request_id: Sequence[str]) -> None:
        assert not self.errored
        self.open -= set(request_id)

    def _hit(self, sequence: tuple[int, ...]) -> int:
        """Return how many tokens were cached, never all of them; cache the whole blocks."""
        hit = 0
        for end in range(BLOCK, len(sequence), BLOCK):
            if sequence[:end] not in self.cached:
                break
            hit = end
        for end in range(BLOCK, len(sequence) + 1, BLOCK):
            self.cached.pop(sequence[:end], None)
            self.cached[sequence[:end]] = None
        while len(self.cached) > self.room:
            del self.cached[next(iter(self.cached))]
        return hit


def score(sequence: Sequence[int]) -> float:
    return noise(*sequence)
