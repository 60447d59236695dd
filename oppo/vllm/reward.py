"""A scalar reward model on vLLM: `classify` on growing prefixes, with the prefix cache, is incremental prefill.

::

    Prompt | Chunk | ToolTokens  ->  whole blocks of the cache  ->  a request that fills the cache
    Finish                       ->  up to the scored token     ->  a request that reads on from there, with the answer

Only what pools the last token can be read so. Log-probs of a prompt and a value at every token skip the prefix cache in
vLLM, since the hidden states of cached tokens are gone: reference and critic stay on transformers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias
from urllib.parse import urlsplit
from uuid import uuid4

from oppo.errors import ModelLost, ModelRefused, RewardError, shortened
from oppo.events import Chunk, Finish, Prompt, ToolTokens
from oppo.libraries import require
from oppo.observe import Reporter
from oppo.scorers import RolloutSession, RolloutSessions
from oppo.vllm.server import Inspection, address_of, config_of
from oppo.vllm.surface import StartedEngine, answered

if TYPE_CHECKING:
    from vllm.config import VllmConfig


SCALAR: Final[Mapping[str, object]] = MappingProxyType({"runner": "pooling", "convert": "classify"})
"""Arguments of the engine of a scalar reward model."""

QUESTION: Final = {"task": "classify", "use_activation": False}
"""What is asked about a sequence: the logit."""

SERVED_BLOCK: Final = 16
"""Tokens of a block of a server's prefix cache, which it does not say: vLLM's on a GPU."""


class Pooled(Protocol):
    """The answer to a pooling request: vLLM's ``PoolingRequestOutput``."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the request that were not computed, since the cache had them."""

    @property
    def outputs(self) -> PooledData:
        """The pooled logits."""


class PooledData(Protocol):
    """vLLM's ``PoolingOutput``."""

    @property
    def data(self) -> Scores:
        """One number for each label, float32 [labels]."""


class Scores(Protocol):
    """A tensor on the CPU."""

    def tolist(self) -> list[float]:
        """Return the numbers."""


class PoolingCollector(Protocol):
    """Holds the answer to one request until it is taken: vLLM's ``RequestOutputCollector``."""

    def get_nowait(self) -> Pooled | None:
        """Return the answer, if it is there."""

    async def get(self) -> Pooled:
        """Wait for the answer; safe to cancel."""


class PoolingEngine(Protocol):
    """The calls of vLLM's ``AsyncLLM`` that scoring needs."""

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""

    async def add_request(self, request_id: str, prompt: Mapping[str, object], params: object) -> PoolingCollector:
        """Submit a request."""

    async def abort(self, request_id: Sequence[str]) -> None:
        """Discard requests; those that are over are ignored."""


class PoolingServer(StartedEngine, Protocol):
    """A started engine: :class:`oppo.vllm.VllmEngine`."""

    @property
    def closed(self) -> bool:
        """Whether it was ended."""

    @property
    def llm(self) -> PoolingEngine:
        """Its ``AsyncLLM``."""

    @property
    def name(self) -> str:
        """The name of its model."""

    @property
    def config(self) -> VllmConfig:
        """Its configuration."""

    def abort(self) -> None:
        """Kill it."""

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True, slots=True)
class ScalarModel:
    """The engine's model, as a scorer needs to know it.

    Attributes:
        name: for errors.
        vocabulary: upper bound of token ids; vLLM itself dies of a larger one.
        longest: tokens of a sequence that it reads.
        block: tokens of a block of the prefix cache.
        padding: the id that is never scored, unless nothing else was read.
    """

    name: str
    vocabulary: int
    longest: int
    block: int
    padding: int | None

    @classmethod
    def of(cls, name: str, config: VllmConfig) -> Self:
        """Return the facts of an engine with this configuration.

        Raises:
            ModelRefused: it cannot score growing prefixes.
        """
        model, cache, pooler = config.model_config, config.cache_config, config.model_config.pooler_config
        if pooler is None:
            raise ModelRefused(f'{name} generates: start its engine with runner="pooling" and convert="classify"')
        _check_labels(name, model.hf_config)
        if pooler.seq_pooling_type != "LAST" or not cache.enable_prefix_caching:
            raise ModelRefused(
                f"{name} pools {pooler.seq_pooling_type} {'with' if cache.enable_prefix_caching else 'without'} a "
                "prefix cache, so it cannot be read as rollouts grow: choose a causal model that is scored at its last "
                "token, or serve it as a whole-rollout scorer"
            )
        if pooler.logit_mean is not None or pooler.logit_sigma is not None:
            raise ModelRefused(
                f"{name} scales its score (logit_mean {pooler.logit_mean}, logit_sigma {pooler.logit_sigma}), which no "
                "other backend does: take these out of its pooling configuration"
            )
        return cls(
            name,
            vocabulary=model.get_vocab_size(),
            longest=model.max_model_len,
            block=cache.block_size,
            padding=model.hf_text_config.pad_token_id,
        )

    @classmethod
    def served(cls, name: str, config: Any, longest: int) -> Self:
        """Return the facts of a model of transformers' ``config`` that a server reads, up to so many tokens.

        Raises:
            ModelRefused: it has several labels.
        """
        _check_labels(name, config)
        text = config.get_text_config()
        return cls(name, int(text.vocab_size), longest, SERVED_BLOCK, text.pad_token_id)


def _check_labels(name: str, config: Any) -> None:
    if (labels := config.num_labels) != 1:
        raise ModelRefused(f"{name} has {labels} labels, but a score is one number: choose a model with one label")


Scored: TypeAlias = tuple[float, int | None]
"""The score of a sequence, and how many of its tokens were not computed, if that is known."""


class RewardServer:
    """A vLLM server that scores growing prefixes by its route ``/pooling``; others start and end it.

    A request that fails in a way that may pass is made again, as those of :class:`~oppo.rewards.http.HttpReward` are.

    Args:
        url: of the server.
        source: the model that it serves, a directory or hub name; its configuration is read here.
        api_key: what the server was started with, as ``--api-key``.
        timeout: seconds for a request.
        attempts: for a request, the first included.
        trust_remote_code: the configuration may come with code.
        transport: of httpx, for tests; it is used for blocking calls too.

    Attributes:
        model: what a scorer needs to know.
        served: what it calls its model.
        service: makes the requests to score.

    Raises:
        ConfigError: there is no such server, or it does not score: what was expected, what came, what to do.
        ModelRefused: the model has several labels.

    Example:
        >>> reward = VllmReward(RewardServer("http://localhost:8000", "models/reward"))  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str,
        source: str | Path,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        attempts: int = 4,
        trust_remote_code: bool = False,
        transport: Any = None,
    ) -> None:
        require("http", "a vLLM server", module="httpx")
        import httpx  # noqa: PLC0415 - an extra

        from oppo.rewards.http import HttpReward  # noqa: PLC0415

        self.url, name = address_of(url), Path(str(source)).name
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        config = config_of(source, trust_remote_code=trust_remote_code)
        with httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport) as client:
            command = f"vllm serve {shlex.quote(str(source))} --runner pooling --convert classify"
            port = f" --port {urlsplit(self.url).port}" if urlsplit(self.url).port else ""
            found = Inspection(self.url, client, source, bool(api_key), command=f"{command}{port}")
            found.check_version()
            served = (found.asked("GET", "/v1/models").get("data") or [{}])[0]
            self.served = str(served.get("id", ""))
            longest = served.get("max_model_len", 0)
            found.expect("max_model_len in /v1/models", "a number of tokens", longest, ok=longest > 0)
            if scored := found.asked("POST", "/pooling", self._asked([[0]])):
                found.expect("the score of a token by /pooling", "a number", scored.get("data"), ok=_is_a_score(scored))
            found.settle()
        self.model = ScalarModel.served(name, config, longest)
        self.service = HttpReward(
            f"{self.url}/pooling",
            headers=headers,
            timeout=timeout,
            attempts=attempts,
            request=lambda _, sequences, __: self._asked(sequences),
            scores=_numbers,
            transport=transport,
        )

    def abort(self) -> None:
        """Nothing: a request ends by its timeout."""

    def close(self) -> None:
        """Nothing: others end the server."""

    async def classify(self, sequences: Sequence[list[int]]) -> list[Scored]:
        """Return the score of each sequence.

        Raises:
            RewardError: the server did not answer, or without a finite number for each.
        """
        if not sequences:
            return []
        service: Any = self.service
        found: list[list[float]] = await service([], sequences)
        if [len(each) for each in found] != [1] * len(sequences) or not all(map(math.isfinite, chain(*found))):
            raise RewardError(
                f"{self.url} was asked for {len(sequences)} scores, and answered {shortened(str(found), 200)}"
            )
        return [(score, None) for (score,) in found]

    def _asked(self, sequences: object) -> dict[str, object]:
        return {"model": self.served, **QUESTION, "input": sequences}

    async def __aenter__(self) -> Self:
        await self.service.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.service.__aexit__(kind, error, tb)


def _is_a_score(answer: Any) -> bool:
    try:
        return [len(each) for each in _numbers(answer)] == [1]
    except (KeyError, TypeError, ValueError):
        return False


def _numbers(answer: Any) -> list[list[float]]:
    # Of each sequence; in the order that was asked.
    found = sorted(answer["data"], key=lambda each: each["index"])
    return [[float(number) for number in each["data"]] for each in found]


@dataclass(slots=True)
class ReadTokens:
    """Tokens that were read; those of a server are not known.

    Attributes:
        computed: tokens that the engine computed; the others were in its cache.
        again: those among them that it had computed for the same rollout before, and had lost from its cache.
    """

    computed: int = 0
    again: int = 0


@dataclass(slots=True, eq=False)
class _Session(RolloutSession):
    """One rollout while it grows.

    Attributes:
        tokens: received, prompt and response.
        read: tokens that the engine has read.
        score: of the sequence that ends there.
    """

    tokens: list[int] = field(default_factory=list)
    read: int = 0
    score: float = 0.0


class VllmReward:
    """Scores each rollout with one number: a sequence-classification model's, at the end of prompt + response.

    The number is the model's logit, without activation, at the last token *that is not padding*: the same that
    :class:`oppo.hf.serve.scorers.RewardModel` returns, up to rounding.

    It computes whole blocks of vLLM's prefix cache while a rollout grows, and the rest when it is finished. Nothing is
    computed twice while the cache has room for the open rollouts; ``tokens`` counts what was.
    The engine belongs to this scorer alone, so its calls take no priority: nothing shares their place.

    Args:
        engine: serves ``AutoModelForSequenceClassification`` with ``num_labels == 1``; started with :data:`SCALAR`. Or
            a server that does.
        key: what names it in errors, ``rewards.0``.

    Attributes:
        engine: as given.
        tokens: that were read so far.
        reporter: reports its work.

    Raises:
        ModelRefused: the engine's model cannot score growing prefixes.

    Example:
        >>> with VllmEngine.start("models/reward", arguments=SCALAR) as engine:  # doctest: +SKIP
        ...     reward = VllmReward(engine)
    """

    def __init__(self, engine: PoolingServer | RewardServer, *, key: str = "") -> None:
        self.tokens = ReadTokens()
        self.engine = engine
        self.reporter = Reporter("reward model")
        self._key = key
        reader = engine if isinstance(engine, RewardServer) else _OnEngine(engine)
        self._model, self._classify = reader.model, reader.classify
        self._sessions = RolloutSessions(
            self._model.name,
            lambda prompt: _Session(prompt.rollout, len(prompt.tokens)),
            vocabulary=self._model.vocabulary,
            longest=self._model.longest,
            remedy="shorten the prompts, lower max_new_tokens, or raise the engine's max_model_len",
        )

    @property
    def longest(self) -> int:
        """Tokens of a sequence that it reads."""
        return self._model.longest

    @property
    def block(self) -> int:
        """Tokens of a block of the prefix cache: while a rollout grows, whole ones are read."""
        return self._model.block

    @property
    def version(self) -> int:
        """Always 0: the model is frozen."""
        return 0

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        """Read more of some rollouts, as far as blocks of the cache are whole.

        Raises:
            ModelError: a token is outside the vocabulary, or a sequence is longer than the model reads.
            ModelLost: the engine is dead.
            ProtocolError: a rollout is opened twice, was never opened, or has a gap.
        """
        grown = {event.rollout: self._received(event) for event in events}
        block = self._model.block
        await self._read("extend", [(session, len(session.tokens) // block * block) for session in grown.values()])

    async def finish(self, finished: Sequence[Finish]) -> list[float]:
        """Return each rollout's score, and forget it.

        Raises:
            ModelLost: the engine is dead.
            ProtocolError: the tokens received are not the whole response.
        """
        sessions = [self._sessions.whole(event.rollout, len(event.response)) for event in finished]
        await self._read("finish", [(session, self._scored_end(session.tokens)) for session in sessions])
        await self.forget([session.rollout for session in sessions])
        return [session.score for session in sessions]

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Drop sessions; unknown rollouts are fine. The engine keeps their cached blocks until it needs the room."""
        self._sessions.forget(rollouts)

    def _scored_end(self, tokens: Sequence[int]) -> int:
        # The last token that is not padding is scored, as transformers has it.
        real = (end for end in range(len(tokens), 0, -1) if tokens[end - 1] != self._model.padding)
        return next(real, 1)

    def _received(self, event: Prompt | Chunk | ToolTokens) -> _Session:
        session = self._sessions.receive(event)
        session.tokens += event.tokens.tolist()
        return session

    async def _read(self, label: str, ends: Sequence[tuple[_Session, int]]) -> None:
        unread = [(session, end) for session, end in ends if end and end != session.read]
        if not unread:
            return
        try:
            with self.reporter.reported(label):
                answers = await self._classify([session.tokens[:end] for session, end in unread])
        except (ModelLost, RewardError) as error:
            raise type(error)(f"{self._key}: {error}" if self._key else str(error)) from error
        for (session, end), (score, cached) in zip(unread, answers, strict=True):
            if cached is not None:
                self.tokens.computed += end - cached
                self.tokens.again += max(0, min(session.read, end) - cached)
            session.read, session.score = end, score

    async def __aenter__(self) -> Self:
        if isinstance(self.engine, RewardServer):
            await self.engine.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if isinstance(self.engine, RewardServer):
            await self.engine.__aexit__(kind, error, tb)


class _OnEngine:
    def __init__(self, engine: PoolingServer) -> None:
        from vllm import PoolingParams  # noqa: PLC0415 - an extra that takes seconds to import

        self.model = ScalarModel.of(engine.name, engine.config)
        self._engine = engine
        self._params = PoolingParams(**QUESTION)
        self._names = (f"score-{uuid4().hex[:8]}-{number}" for number in count())

    async def classify(self, sequences: Sequence[list[int]]) -> list[Scored]:
        # The engine batches them.
        llm, names = self._engine.llm, list(islice(self._names, len(sequences)))
        try:
            async with answered(self._engine):
                collectors = [
                    await self._engine.llm.add_request(
                        name, {"type": "token", "prompt_token_ids": tokens}, self._params
                    )
                    for name, tokens in zip(names, sequences, strict=True)
                ]
                answers = [collector.get_nowait() or await collector.get() for collector in collectors]
        except BaseException:
            if not self._engine.closed and not llm.errored:
                async with answered(self._engine, shield=True):
                    await llm.abort(names)
            raise
        return [(each.outputs.data.tolist()[0], each.num_cached_tokens) for each in answers]
