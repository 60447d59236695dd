"""A scalar reward model on vLLM: `classify` on growing prefixes, with the prefix cache, is incremental prefill.

::

    Prompt | Chunk | ToolTokens  ->  whole blocks of the cache  ->  a request that fills the cache
    Finish                       ->  up to the scored token     ->  a request that reads on from there, with the answer

Only what pools the last token can be read so. Log-probs of a prompt and a value at every token skip the prefix cache in
vLLM, since the hidden states of cached tokens are gone: reference and critic stay on transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, Self
from uuid import uuid4

from oppo.errors import ModelRefused
from oppo.events import Chunk, Finish, Prompt, ToolTokens
from oppo.scorers import RolloutSession, RolloutSessions
from oppo.vllm.surface import StartedEngine, answered

if TYPE_CHECKING:
    from vllm.config import VllmConfig


SCALAR: Final[Mapping[str, object]] = MappingProxyType({"runner": "pooling", "convert": "classify"})
"""Arguments of the engine of a scalar reward model."""


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
        labels = model.hf_config.num_labels
        if labels != 1:
            raise ModelRefused(f"{name} has {labels} labels, but a score is one number: choose a model with one label")
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


@dataclass(slots=True)
class ReadTokens:
    """Tokens that were read.

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
        engine: serves ``AutoModelForSequenceClassification`` with ``num_labels == 1``; started with :data:`SCALAR`.

    Attributes:
        tokens: that were read so far.

    Raises:
        ModelRefused: the engine's model cannot score growing prefixes.

    Example:
        >>> with VllmEngine.start("models/reward", arguments=SCALAR) as engine:  # doctest: +SKIP
        ...     reward = VllmReward(engine)
    """

    def __init__(self, engine: PoolingServer) -> None:
        from vllm import PoolingParams  # noqa: PLC0415 - an extra that takes seconds to import

        self.tokens = ReadTokens()
        self._params = PoolingParams(task="classify", use_activation=False)
        self._engine = engine
        self._model = ScalarModel.of(engine.name, engine.config)
        self._sessions = RolloutSessions(
            self._model.name,
            lambda prompt: _Session(prompt.rollout, len(prompt.tokens)),
            vocabulary=self._model.vocabulary,
            longest=self._model.longest,
            remedy="shorten the prompts, lower max_new_tokens, or raise the engine's max_model_len",
        )
        self._names = (f"score-{uuid4().hex[:8]}-{number}" for number in count())

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
        await self._read([(session, len(session.tokens) // block * block) for session in grown.values()])

    async def finish(self, finished: Sequence[Finish]) -> list[float]:
        """Return each rollout's score, and forget it.

        Raises:
            ModelLost: the engine is dead.
            ProtocolError: the tokens received are not the whole response.
        """
        sessions = [self._sessions.whole(event.rollout, len(event.response)) for event in finished]
        await self._read([(session, self._scored_end(session.tokens)) for session in sessions])
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

    async def _read(self, ends: Sequence[tuple[_Session, int]]) -> None:
        unread = [(session, end) for session, end in ends if end and end != session.read]
        answers = await self._classify([session.tokens[:end] for session, end in unread])
        for (session, end), answer in zip(unread, answers, strict=True):
            cached = answer.num_cached_tokens
            self.tokens.computed += end - cached
            self.tokens.again += max(0, min(session.read, end) - cached)
            session.read, (session.score,) = end, answer.outputs.data.tolist()

    async def _classify(self, sequences: Sequence[list[int]]) -> list[Pooled]:
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
                return [collector.get_nowait() or await collector.get() for collector in collectors]
        except BaseException:
            if not self._engine.closed and not llm.errored:
                async with answered(self._engine, shield=True):
                    await llm.abort(names)
            raise
