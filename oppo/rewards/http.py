"""A reward function that asks a service over HTTP: retries with back-off, and a circuit breaker.

It needs the extra ``http``: ``pip install 'oppo[http]'``.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import anyio
import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from oppo.errors import ConfigError, RewardError, one_line, shortened
from oppo.numeric import require_real, require_whole
from oppo.observe import silent

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | float | bool | None"

PASSING: Final = frozenset({408, 429, *range(500, 600)})
"""Status codes of failures that may pass: asking again may help."""


def as_table(prompts: Sequence[object], completions: Sequence[str], columns: Mapping[str, Sequence[object]]) -> object:
    """Return the body of a request: ``{"prompts": [...], "completions": [...], "columns": {...}}``."""
    return {"prompts": prompts, "completions": completions, "columns": columns}


def from_table(answer: JSON) -> object:
    """Return the scores of an answer: ``{"scores": [...]}``, or the list alone."""
    return answer["scores"] if isinstance(answer, Mapping) else answer


class ServiceFailure(RewardError):  # noqa: N818 - it says what happened
    """A service did not answer, or answered something that is no score."""


@dataclass(eq=False)
class HttpReward:
    """An async reward function that posts JSON to a service and reads the scores from its answer.

    Give it to :class:`oppo.FunctionReward` as any other function, or name it in a file: ``models.reward =
    "rewards.py:judge"``. A transport error and the status codes 408, 429 and 5xx are asked again after a growing pause,
    or after what the header ``Retry-After`` says; any other failure is final. After some failed calls in a row the
    service is not asked at all for a while (a circuit breaker), so that it can recover; calls fail at once meanwhile.

    Attributes:
        url: of the service.
        headers: of each request, for example an authorisation that the program reads from its environment.
        timeout: seconds for connecting, and for each pause within an answer.
        attempts: for a call, the first included.
        pause: seconds before the second attempt; doubled before each further one.
        longest_pause: seconds, also for what ``Retry-After`` asks for.
        open_after: failed calls in a row after which the service is left alone; 0: never.
        rest: seconds for which it is.
        request: makes the JSON of a request of prompts, completions and columns.
        scores: takes the scores out of the JSON of an answer.
        tell: receives a sentence when a request is repeated, and when the service is left alone.
        transport: of httpx, for tests.

    Raises:
        ConfigError: the URL is none, or a number is out of range.

    Example:
        >>> judge = HttpReward("http://localhost:8000/score")
        >>> judge.__name__
        'http://localhost:8000/score'
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 30.0
    attempts: int = 4
    pause: float = 1.0
    longest_pause: float = 60.0
    open_after: int = 5
    rest: float = 30.0
    request: Callable[[Sequence[object], Sequence[str], Mapping[str, Sequence[object]]], object] = as_table
    scores: Callable[[JSON], object] = from_table
    tell: Callable[[str], None] = silent
    transport: httpx.AsyncBaseTransport | None = None
    _failed: int = field(default=0, init=False, repr=False)
    _closed_at: float = field(default=0.0, init=False, repr=False)
    """Loop time, in seconds, at which a service that was left alone is asked again."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"expected the URL of a service, such as http://localhost:8000/score; got {self.url!r}")
        require_whole("attempts", self.attempts, 1, error=ConfigError)
        require_whole("open_after", self.open_after, 0, error=ConfigError)
        for name in ("timeout", "pause", "longest_pause", "rest"):
            require_real(name, getattr(self, name), 0, error=ConfigError)

    @property
    def __name__(self) -> str:
        """The URL, without what may be secret in it."""
        parts = urlsplit(self.url)
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"

    async def __call__(
        self, prompts: Sequence[object], completions: Sequence[str], **columns: Sequence[object]
    ) -> object:
        """Return the service's scores.

        Raises:
            ServiceFailure: it did not answer in time, or refused, or answered something else; or it is left alone.
        """
        left = self._closed_at - anyio.current_time()
        if left > 0:
            raise ServiceFailure(
                f"{self.__name__} failed {self._failed} times in a row, and is not asked for another {left:.0f} s"
            )
        body = self.request(prompts, completions, columns)
        try:
            found = self.scores(await self._asked(body))
        except ServiceFailure:
            self._note_failure()
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            self._note_failure()
            raise ServiceFailure(f"{self.__name__} answered something without scores ({one_line(error)})") from error
        self._failed = 0
        return found

    async def _asked(self, body: object) -> JSON:
        """Return the answer to a request, made again where that may help."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(self.attempts),
            wait=self._wait,
            before_sleep=self._announce,
            reraise=True,
        )
        try:
            async with httpx.AsyncClient(
                headers=dict(self.headers), timeout=self.timeout, transport=self.transport, verify=self._tls
            ) as client:
                async for attempt in retrying:
                    with attempt:
                        answer = await client.post(self.url, json=body)
                        answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise ServiceFailure(
                f"{self.__name__} answered {error.response.status_code} {error.response.reason_phrase}: "
                f"{shortened(' '.join(error.response.text.split()), 200)}"
            ) from error
        except httpx.TimeoutException as error:
            raise ServiceFailure(f"{self.__name__} did not answer within {self.timeout:g} s") from error
        except httpx.HTTPError as error:
            raise ServiceFailure(f"{self.__name__} cannot be asked: {one_line(error)}") from error
        try:
            parsed: JSON = answer.json()
        except ValueError as error:
            raise ServiceFailure(
                f"{self.__name__} answered something that is no JSON: {shortened(answer.text, 200)!r}"
            ) from error
        return parsed

    @cached_property
    def _tls(self) -> ssl.SSLContext | bool:
        """What https needs; reading the certificates takes a while, so it is done once."""
        return ssl.create_default_context() if self.url.startswith("https") else False

    def _wait(self, state: RetryCallState) -> float:
        """Return the seconds before the next attempt."""
        error = None if state.outcome is None else state.outcome.exception()
        if isinstance(error, httpx.HTTPStatusError):
            asked = error.response.headers.get("Retry-After", "")
            if asked.isdecimal():
                return min(float(asked), self.longest_pause)
        growing = wait_exponential(multiplier=self.pause, max=self.longest_pause) + wait_random(0, self.pause / 4)
        return float(growing(state))

    def _announce(self, state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        what = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else type(error).__name__
        self.tell(
            f"{self.__name__}: {what}; attempt {state.attempt_number + 1} of {self.attempts} follows in "
            f"{state.upcoming_sleep:.1f} s"
        )

    def _note_failure(self) -> None:
        self._failed += 1
        if self.open_after and self._failed >= self.open_after:
            self._closed_at = anyio.current_time() + self.rest
            self.tell(f"{self.__name__} failed {self._failed} times in a row, and is left alone for {self.rest:g} s")


def _may_pass(error: BaseException) -> bool:
    """Return whether asking again may help."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in PASSING
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)
