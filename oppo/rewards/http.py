"""A reward function that asks a service over HTTP, and asks again after failures that may pass.

It needs the extra ``http``: ``pip install 'oppo[http]'``.
"""

from __future__ import annotations

import codecs
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import anyio
import httpx
import stamina

from oppo.declared import NonNegative, PositiveInteger, split_url, validated
from oppo.errors import ConfigError, RewardError, one_line, shortened
from oppo.log import logger
from oppo.models import Shared
from oppo.rewards.function import ARGUMENTS
from oppo.user_code import CONCURRENCY

__all__ = ["JSON", "PASSING", "HttpReward", "ServiceFailure", "as_table", "from_table"]


class ServiceFailure(RewardError):  # noqa: N818 - it says what happened
    """A service did not answer, or answered something that is no score."""


JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | float | bool | None"

PASSING: Final = frozenset({408, 429, *range(500, 600)})
"""Status codes of failures that may pass: asking again may help."""


def as_table(
    prompts: Sequence[object], completions: Sequence[object], columns: Mapping[str, Sequence[object]]
) -> object:
    """Return the body of a request: ``{"prompts": [...], "completions": [...], "columns": {...}}``."""
    return {"prompts": prompts, "completions": completions, "columns": columns}


def from_table(answer: JSON) -> object:
    """Return the scores of an answer: ``{"scores": [...]}``, or the list alone."""
    return answer["scores"] if isinstance(answer, Mapping) else answer


class _Passing(ServiceFailure):
    # `pause`: the seconds that the service asks for, if it does.
    def __init__(self, message: str, pause: float | None = None) -> None:
        super().__init__(message)
        self.pause = pause


@dataclass(frozen=True, slots=True)
class _Session:
    client: httpx.AsyncClient
    room: anyio.CapacityLimiter


@dataclass(eq=False)
@validated(ConfigError)
class HttpReward(Shared):
    """An async reward function that posts JSON to a service and reads the scores from its answer.

    Give it to :class:`oppo.FunctionReward`, or name it in a file, as the source of a reward: ``source =
    "rewards.py:judge"``. Transport errors, timeouts and the status codes 408, 429 and 5xx are retried after a growing
    pause, or after the header ``Retry-After``; any other failure is final.

    As an async context manager, which a run enters, it keeps its connections. Outside of a run each call has its own.

    Attributes:
        url: of the service.
        headers: of each request, for example an authorisation that the program reads from its environment.
        timeout: seconds for a request, from connecting to the end of the answer.
        attempts: for a call, the first included.
        pause: seconds before the second attempt; doubled before each further one, and up to a quarter longer.
        longest_pause: seconds, also for ``Retry-After``.
        concurrency: requests at a time, in a run.
        most_bytes: of an answer; a longer one is a failure.
        request: makes the JSON of a request of prompts, completions and columns.
        scores: takes the scores out of the JSON of an answer.
        transport: of httpx, for tests.

    Raises:
        ConfigError: the URL is none, or a number is out of range.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: NonNegative = 30.0
    attempts: PositiveInteger = 4
    pause: NonNegative = 1.0
    longest_pause: NonNegative = 60.0
    concurrency: PositiveInteger = CONCURRENCY
    most_bytes: PositiveInteger = 10_000_000
    request: Callable[[Sequence[object], Sequence[object], Mapping[str, Sequence[object]]], object] = as_table
    scores: Callable[[JSON], object] = from_table
    transport: httpx.AsyncBaseTransport | None = None
    _session: _Session | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        split_url(self.url, "a service")

    @property
    def __name__(self) -> str:
        """The URL without parts that may be secret."""
        parts = urlsplit(self.url)
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"

    async def _open(self, stack: AsyncExitStack) -> None:
        self._session = self._connected()
        stack.push_async_callback(self._close)

    async def _close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.client.aclose()

    async def __call__(
        self, prompts: Sequence[object], completions: Sequence[object], **columns: Sequence[object]
    ) -> object:
        body = self.request(prompts, completions, {name: columns[name] for name in columns if name not in ARGUMENTS})
        async with self._opened() as session, session.room:
            answer = await self._answered(session.client, body)
        try:
            return self.scores(answer)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServiceFailure(f"{self.__name__} answered something without scores ({one_line(error)})") from error

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[_Session]:
        if self._session is not None:
            yield self._session
            return
        session = self._connected()
        async with session.client:
            yield session

    def _connected(self) -> _Session:
        client = httpx.AsyncClient(
            headers={**self.headers, "Accept-Encoding": "identity"},
            timeout=None,  # noqa: S113 - a request is bounded as a whole
            limits=httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
            transport=self.transport,
            verify=self._tls,
        )
        return _Session(client, anyio.CapacityLimiter(self.concurrency))

    @cached_property
    def _tls(self) -> ssl.SSLContext | bool:
        # Reading the certificates takes a while, so it is done once.
        return ssl.create_default_context() if self.url.startswith("https") else False

    async def _answered(self, client: httpx.AsyncClient, body: object) -> JSON:
        made = 0

        def after(failure: Exception) -> bool | float:
            if not isinstance(failure, _Passing):
                return False
            if made < self.attempts:
                asked = failure.pause
                pause = f"about {wait:g} s" if asked is None else f"{asked:g} s"
                logger.warning(f"{failure}; attempt {made + 1} of {self.attempts} follows in {pause}")
            return True if failure.pause is None else failure.pause

        retrying = stamina.retry_context(
            on=after,
            attempts=self.attempts,
            timeout=None,
            wait_initial=self.pause,
            wait_max=self.longest_pause,
            wait_jitter=self.pause / 4,
        )
        async for attempt in retrying:
            made, wait = attempt.num, attempt.next_wait
            with attempt:
                return await self._asked(client, body)
        raise ServiceFailure(f"{self.__name__} was not asked")  # a context that retries returns or raises

    async def _asked(self, client: httpx.AsyncClient, body: object) -> JSON:
        try:
            with anyio.move_on_after(self.timeout):
                async with client.stream("POST", self.url, json=body) as answer:
                    content = await self._content(answer)
                return self._parsed(answer, content)
        except httpx.HTTPError as error:
            passes = isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)
            kind = _Passing if passes else ServiceFailure
            raise kind(f"{self.__name__} cannot be asked: {one_line(error)}") from error
        raise _Passing(f"{self.__name__} did not answer within {self.timeout:g} s")

    async def _content(self, answer: httpx.Response) -> str:
        # A compressed answer is refused: a few bytes of it may become many.
        coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if coding != "identity" and answer.is_success:
            raise ServiceFailure(f"{self.__name__} compressed its answer ({shortened(coding, 40)}): send it plain")
        if coding != "identity":
            return ""  # the status says what failed
        content = bytearray()
        async for part in answer.aiter_bytes():
            content += part
            if len(content) > self.most_bytes:
                raise ServiceFailure(f"{self.__name__} answered more than {self.most_bytes} bytes")
        try:
            return _decoded(content, answer.encoding or "utf-8")
        except (LookupError, ValueError) as error:
            raise ServiceFailure(
                f"{self.__name__} answered in a charset that is none of text ({one_line(error)}): expected UTF-8"
            ) from error

    def _parsed(self, answer: httpx.Response, content: str) -> JSON:
        if not answer.is_success:
            words = f"{answer.status_code} {answer.reason_phrase}: {shortened(' '.join(content.split()), 200)}"
            message = f"{self.__name__} answered {words}"
            if answer.status_code not in PASSING:
                raise ServiceFailure(message)
            asked = answer.headers.get("Retry-After", "")
            raise _Passing(message, min(float(asked), self.longest_pause) if asked.isdecimal() else None)
        try:
            parsed: JSON = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServiceFailure(
                f"{self.__name__} answered something that is no JSON: {shortened(content, 200)!r}"
            ) from error
        return parsed


def _decoded(content: bytearray, encoding: str) -> str:
    if codecs.lookup(encoding).name == "punycode":  # it takes the square of the length
        raise LookupError("'punycode' is an encoding of host names")
    return content.decode(encoding, "replace")
