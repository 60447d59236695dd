"""Fakes of what scoring uses: the calls of vLLM's ``AsyncLLM``, with a prefix cache of a few blocks; and a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

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


@dataclass
class FakeScoringServer(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A server that scores as :class:`FakePooling` does, as a transport of httpx.

    Attributes:
        instead: answers of routes in the place of its own.
        failing: so many requests to score are answered with 503 first.
        bodies: of the requests to score.
    """

    key: str = ""
    longest: int = 160
    instead: dict[str, httpx.Response] = field(default_factory=dict)
    failing: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        if path in self.instead:
            return self.instead[path]
        if self.key and path != "/version" and request.headers.get("Authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        match path:
            case "/version":
                return httpx.Response(200, json={"version": "0.32.0"})
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "served", "max_model_len": self.longest}]})
            case "/pooling":
                self.bodies.append(body)
                return self._scored(body["input"])
        return httpx.Response(404, json={"detail": "Not Found"})

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)

    def _scored(self, sequences: list[list[int]]) -> httpx.Response:
        if self.failing and sequences != [[0]]:
            self.failing -= 1
            return httpx.Response(503, text="busy")
        scored = [{"index": at, "object": "pooling", "data": [score(each)]} for at, each in enumerate(sequences)]
        return httpx.Response(200, json={"object": "list", "model": "served", "data": scored})


def score(sequence: Sequence[int]) -> float:
    return noise(*sequence)
