"""Scorers on vLLM: a request reads on from what the prefix cache keeps of its rollout, which is incremental prefill.

::

    Prompt | Chunk | ToolTokens  ->  whole blocks of the cache  ->  a request that fills the cache
    Finish                       ->  to the end                 ->  a request that reads on from there, with the answer
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from oppo.errors import ModelLost, RewardError
from oppo.events import Chunk, Finish, Prompt, ToolTokens
from oppo.libraries import require
from oppo.observe import Reporter
from oppo.scorers import RolloutSession, RolloutSessions
from oppo.vllm.async_llm import VllmEngine
from oppo.vllm.server import Inspection, address_of, config_of

T = TypeVar("T")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """The model of an engine or a server.

    Attributes:
        vocabulary: upper bound of token ids; vLLM itself dies of a larger one.
        longest: tokens of a sequence that it reads.
        block: tokens of a block of the prefix cache; 0: each rollout is read when it has ended.
        padding: the id that is never scored, unless nothing else was read.
    """

    name: str
    vocabulary: int
    longest: int
    block: int = 0
    padding: int | None = None


@dataclass(slots=True)
class ReadTokens:
    """Tokens that an engine ``computed``, and among them those that it had computed before and lost from its cache."""

    computed: int = 0
    again: int = 0


@dataclass(slots=True, eq=False)
class ReadRollout(RolloutSession, Generic[A]):
    """One rollout while it grows; ``salt`` names it among all sessions, ``read`` counts its read tokens."""

    tokens: list[int] = field(default_factory=list)
    salt: str = field(default_factory=lambda: uuid4().hex)
    read: int = 0
    answers: list[A] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request about the beginning of a rollout; requests before have ``read`` tokens, or at least the prompt."""

    salt: str
    tokens: list[int]
    read: int

    @property
    def unread(self) -> list[int]:
        return self.tokens[self.read :]


class Asks(Protocol[A]):
    def __call__(self, asked: Sequence[Asked]) -> Awaitable[list[tuple[A, int | None]]]:
        """Return each answer, and how many tokens of its request were not computed, if that is known."""


class VllmScorer(ABC, Generic[T, A]):
    """Reads each rollout while it grows, and returns its value at the end.

    It computes whole blocks of vLLM's prefix cache while a rollout grows, and the rest when it is finished. Nothing is
    computed twice while the cache has room for the open rollouts; ``tokens`` counts what was. No other scorer uses its
    engine.
    """

    def __init__(
        self, engine: VllmEngine | ScoringServer, model: ScoringModel, ask: Asks[A], *, key: str, track: str
    ) -> None:
        self.engine, self.tokens, self.reporter = engine, ReadTokens(), Reporter(track)
        self._key, self._model, self._ask = key, model, ask
        self._sessions = RolloutSessions(
            model.name,
            lambda prompt: ReadRollout[A](prompt.rollout, len(prompt.tokens)),
            vocabulary=model.vocabulary,
            longest=model.longest,
            remedy="shorten the prompts, lower max_new_tokens, or raise the engine's max_model_len",
        )

    @property
    def longest(self) -> int:
        return self._model.longest

    @property
    def block(self) -> int:
        """Tokens of a block of the prefix cache: while a rollout grows, whole ones are read."""
        return self._model.block

    @property
    def version(self) -> int:
        return 0

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        grown = {event.rollout: self._received(event) for event in events}
        if self.block:
            await self._read("extend", [(session, self._cached_end(session)) for session in grown.values()])

    async def finish(self, finished: Sequence[Finish]) -> list[T]:
        sessions = [self._sessions.whole(event.rollout, len(event.response)) for event in finished]
        await self._read("finish", [(session, self._last_end(session)) for session in sessions])
        await self.forget([session.rollout for session in sessions])
        return [self._value(session) for session in sessions]

    async def forget(self, rollouts: Sequence[int]) -> None:
        self._sessions.forget(rollouts)

    @abstractmethod
    def _cached_end(self, session: ReadRollout[A]) -> int:
        """Return how far to read a rollout that goes on, so that the cache keeps whole blocks."""

    @abstractmethod
    def _last_end(self, session: ReadRollout[A]) -> int:
        """Return how far to read a rollout that has ended."""

    @abstractmethod
    def _value(self, session: ReadRollout[A]) -> T:
        """Return the value of a rollout that was read."""

    def _received(self, event: Prompt | Chunk | ToolTokens) -> ReadRollout[A]:
        session = self._sessions.receive(event)
        session.tokens += event.tokens.tolist()
        return session

    async def _read(self, label: str, ends: Sequence[tuple[ReadRollout[A], int]]) -> None:
        unread = [(session, end) for session, end in ends if end > 0 and end != session.read]
        if not unread:
            return
        asked = [
            Asked(session.salt, session.tokens[:end], max(session.read, session.prompt)) for session, end in unread
        ]
        try:
            with self.reporter.reported(label):
                answers = await self._ask(asked)
        except (ModelLost, RewardError) as error:
            raise type(error)(f"{self._key}: {error}" if self._key else str(error)) from error
        for (session, end), (answer, cached) in zip(unread, answers, strict=True):
            if cached is not None:
                self.tokens.computed += end - cached
                self.tokens.again += max(0, min(session.read, end) - cached)
            session.read = end
            session.answers.append(answer)

    async def __aenter__(self) -> Self:
        if isinstance(self.engine, ScoringServer):
            await self.engine.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if isinstance(self.engine, ScoringServer):
            await self.engine.__aexit__(kind, error, tb)


SERVED_BLOCK: Final = 16
"""Tokens of a block of a server's prefix cache, which it does not say: vLLM's on a GPU."""


class ScoringServer(ABC):
    """A vLLM server that scores by one of its routes; others start and end it.

    A request that fails in a way that may pass is made again, as :class:`~oppo.rewards.http.HttpReward` does.

    Args:
        source: the model that it serves, a directory or hub name; its configuration is read here.
        api_key: what the server was started with, as ``--api-key``.
        timeout: seconds for a request.
        attempts: for a request, the first included.
        transport: of httpx, for tests; it is used for blocking calls too.
    """

    ROUTE: ClassVar[str]
    flags = ""

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
            port = f" --port {urlsplit(self.url).port}" if urlsplit(self.url).port else ""
            command = f"vllm serve {shlex.quote(str(source))}{self.flags}{port}"
            found = Inspection(self.url, client, source, bool(api_key), command=command)
            found.check_version()
            served = (found.asked("GET", "/v1/models").get("data") or [{}])[0]
            self.served = str(served.get("id", ""))
            longest = served.get("max_model_len", 0)
            found.expect("max_model_len in /v1/models", "a number of tokens", longest, ok=longest > 0)
            self.model = self._described(name, config, longest)
            self._try(found)
            found.settle()
        self.service = HttpReward(
            f"{self.url}{self.ROUTE}",
            headers=headers,
            timeout=timeout,
            attempts=attempts,
            request=lambda _, sequences, __: self._asked(sequences),
            scores=self._scores,
            most_bytes=self._most_bytes(longest),
            transport=transport,
        )

    @abstractmethod
    def _try(self, found: Inspection) -> None:
        """Score something, and note faults."""

    @abstractmethod
    def _described(self, name: str, config: Any, longest: int) -> ScoringModel:
        """Return the facts of a model of transformers' ``config`` that is read up to ``longest`` tokens."""

    @abstractmethod
    def _asked(self, sequences: Any) -> dict[str, object]:
        """Return the body of a request."""

    @abstractmethod
    def _scores(self, answer: Any) -> object:
        """Return what an answer says of each sequence; raises ``LookupError``, ``TypeError`` or ``ValueError``."""

    def _most_bytes(self, longest: int) -> int:
        del longest
        return 10_000_000

    def abort(self) -> None:  # noqa: B027 - a request ends by its timeout
        """Do nothing."""

    def close(self) -> None:  # noqa: B027 - others end the server
        """Do nothing."""

    async def __aenter__(self) -> Self:
        await self.service.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.service.__aexit__(kind, error, tb)
