"""Fakes of what scoring uses: the calls of vLLM's ``AsyncLLM``, with a prefix cache of a few blocks; and servers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import numpy as np
from numpy.typing import NDArray

from oppo.simulate.models import noise
from tests.responses import VOCABULARY

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


@dataclass
class FlatLogprobs:
    """vLLM's: one list for all places."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    num_cached_tokens: int
    outputs: Pooling | None = None
    prompt_logprobs: FlatLogprobs | None = None


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
    cached: dict[tuple[str | int, ...], None] = field(default_factory=dict)

    async def add_request(self, request_id: str, prompt: Mapping[str, object], params: object) -> Collector:
        if self.errored:
            raise EngineDeadError("EngineCore encountered an issue")
        assert request_id not in self.names
        assert prompt["type"] == "token"
        tokens = prompt["prompt_token_ids"]
        assert isinstance(tokens, list)
        assert tokens
        self.names.add(request_id)
        self.sequences.append(tuple(tokens))
        self.open.add(request_id)
        return Collector(request_id, self.answer(prompt, params), self)

    def answer(self, prompt: Mapping[str, Any], params: object) -> Answer:
        assert params == PoolingParams(task="classify", use_activation=False)
        assert prompt.keys() == {"type", "prompt_token_ids"}
        sequence = tuple(prompt["prompt_token_ids"])
        return Answer(self.hit(sequence), outputs=Pooling(Data([score(sequence)])))

    async def collective_rpc(self, method: str, *, args: tuple[object, ...]) -> object:
        raise NotImplementedError((method, args))

    async def abort(self, request_id: Sequence[str]) -> None:
        assert not self.errored
        self.open -= set(request_id)

    def hit(self, sequence: tuple[int, ...], salt: str = "") -> int:
        """Return how many tokens were cached, never all of them; cache the whole blocks."""
        hit = 0
        for end in range(BLOCK, len(sequence), BLOCK):
            if (salt, *sequence[:end]) not in self.cached:
                break
            hit = end
        for end in range(BLOCK, len(sequence) + 1, BLOCK):
            self.cached.pop((salt, *sequence[:end]), None)
            self.cached[salt, *sequence[:end]] = None
        while len(self.cached) > self.room:
            del self.cached[next(iter(self.cached))]
        return hit


@dataclass(frozen=True)
class StartedEngine:
    """In the place of a ``VllmEngine``."""

    llm: FakePooling
    config: Any
    name: str = "tiny"
    advice: str = "go on from the newest checkpoint"
    closed: bool = False

    def require_usable(self) -> None:
        return

    def abort(self) -> None:
        return

    def close(self) -> None:
        return


@dataclass(frozen=True)
class SamplingParams:
    """vLLM's, as far as scoring sets it."""

    max_tokens: int
    temperature: float
    prompt_logprobs: int
    skip_reading_prefix_cache: bool
    flat_logprobs: bool
    detokenize: bool


@dataclass(eq=False)
class FakePrompts(FakePooling):
    """Gives the log-probs of prompts by a hash of what precedes each token, those alone that it computes.

    Attributes:
        vocabulary: of its model.
        uninitialised: places of tokens that were cached are there, with numbers without meaning.
        tempers: what its workers were told.
    """

    vocabulary: int = 100
    uninitialised: bool = True
    tempers: list[tuple[object, ...]] = field(default_factory=list)

    def answer(self, prompt: Mapping[str, Any], params: object) -> Answer:
        assert isinstance(params, SamplingParams)
        assert (params.max_tokens, params.skip_reading_prefix_cache, params.flat_logprobs) == (1, False, True)
        sequence = tuple(prompt["prompt_token_ids"])
        cached, flat = self.hit(sequence, prompt["cache_salt"]), FlatLogprobs()
        temperature, known = self.tempers[-1] if self.tempers else (1.0, self.vocabulary)
        for at in range(1, len(sequence)):
            ids, logprobs = [-1] * (1 + params.prompt_logprobs), [float("nan")] * (1 + params.prompt_logprobs)
            if at > cached:
                found = logprobs_after(sequence[:at], int(str(known)), float(str(temperature)))
                likeliest = np.argsort(-found, kind="stable")[: params.prompt_logprobs].tolist()
                ids = [sequence[at], *likeliest]
                logprobs = found[ids].tolist()
            if at > cached or self.uninitialised:
                flat.token_ids += ids
                flat.logprobs += logprobs
        return Answer(cached, prompt_logprobs=flat)

    async def collective_rpc(self, method: str, *, args: tuple[object, ...]) -> object:
        assert method == "oppo_temper"
        self.tempers.append(args)
        return None


def logprobs_after(prefix: Sequence[int], vocabulary: int, temperature: float = 1.0) -> NDArray[np.float32]:
    """Return the log-probs of the next token, float32 [vocabulary]."""
    seed = int(noise(*prefix) * 2**31)
    logits = np.random.default_rng(seed).normal(scale=2.0, size=VOCABULARY)[:vocabulary] / temperature
    shifted = logits - logits.max()
    logprobs: NDArray[np.float32] = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    return logprobs


@dataclass
class FakeScoringServer(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A server that scores as :class:`FakePooling` does, as a transport of httpx.

    Attributes:
        likely: ids, of :data:`VOCABULARY`, that have all of the probability.
        instead: answers of routes in the place of its own.
        failing: so many requests to score are answered with 503 first.
        bodies: of the requests to score.
    """

    key: str = ""
    longest: int = 160
    likely: int = VOCABULARY
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
            case "/v1/completions":
                self.bodies.append(body)
                return self._read(body["prompt"], body["prompt_logprobs"], body.get("allowed_token_ids"))
        return httpx.Response(404, json={"detail": "Not Found"})

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)

    def _scored(self, sequences: list[list[int]]) -> httpx.Response:
        if self.failing and sequences != [[0]]:
            self.failing -= 1
            return httpx.Response(503, text="busy")
        scored = [{"index": at, "object": "pooling", "data": [score(each)]} for at, each in enumerate(sequences)]
        return httpx.Response(200, json={"object": "list", "model": "served", "data": scored})

    def _read(self, sequence: list[int], k: int, allowed: list[int] | None) -> httpx.Response:
        if self.failing and sequence != [0, 0]:
            self.failing -= 1
            return httpx.Response(503, text="busy")
        places: list[dict[str, Any] | None] = [None]
        for at in range(1, len(sequence)):
            found = self._logprobs_after(sequence[:at])
            order = np.argsort(-found, kind="stable").tolist()
            listed = {sequence[at]: order.index(sequence[at]) + 1} | {each: n + 1 for n, each in enumerate(order[:k])}
            places.append({str(each): {"logprob": float(found[each]), "rank": n} for each, n in listed.items()})
        choice: dict[str, Any] = {"index": 0, "text": "", "prompt_logprobs": places}
        if allowed is not None:
            choice["logprobs"] = {"token_logprobs": [float(self._logprobs_after(sequence)[allowed].max())]}
        return httpx.Response(200, json={"choices": [choice]})

    def _logprobs_after(self, prefix: list[int]) -> NDArray[np.float32]:
        found = np.full(VOCABULARY, -9999.0, np.float32)
        found[: self.likely] = logprobs_after(prefix, self.likely)
        return found


def score(sequence: Sequence[int]) -> float:
    return noise(*sequence)
