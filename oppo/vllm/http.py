"""The calls of vLLM's engine over HTTP, to a server in development mode: what the policy asks of an engine.

A request of the policy is a stream of tokens. The server ends it at each pause, and what follows is a new request that
reads the tokens so far: a server names the weights that made a token only when a request ends, and a stream that went
on over a weight sync could not tell, token by token, which weights it comes from.

It needs the extra ``http``.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import anyio
import httpx
from anyio.abc import TaskGroup

from oppo.errors import as_itself, one_line, shortened

GENERATE: Final = "/inference/v1/generate"

NO_LOGPROB: Final = -9999.0
"""What a server says in the place of minus infinity, or of a log-prob that is no number."""

HEALTH: Final = 5.0
"""Seconds between two looks at whether a server is there that streams tokens."""

DRAIN: Final = 5.0
"""Seconds that streams have to end when a server is paused; then they are given up, and their last tokens with them."""

DEADLINE: Final = 600.0
"""Seconds for a call that moves weights."""


class ServerFault(Exception):  # noqa: N818 - it says what happened
    """A server is gone, or answered what it should not; to users it comes as :class:`~oppo.errors.ModelLost`."""


class Logprob(NamedTuple):
    """vLLM's ``Logprob``."""

    logprob: float


class Span(NamedTuple):
    """vLLM's ``WeightVersionSpan``."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Completion:
    """vLLM's ``CompletionOutput``."""

    token_ids: list[int]
    logprobs: list[Mapping[int, Logprob]]
    finish_reason: str | None = None
    weight_versions: Sequence[Span] | None = None


@dataclass(slots=True)
class Output:
    """vLLM's ``RequestOutput``."""

    outputs: Sequence[Completion]


class Inbox:
    """vLLM's ``RequestOutputCollector``: what is new of a request, until it is taken."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._new: Completion | None = None
        self._error: Exception | None = None
        self._ready = anyio.Event()

    def put(self, new: Completion) -> None:
        if self._new is None:
            self._new = new
        else:
            self._new.token_ids += new.token_ids
            self._new.logprobs += new.logprobs
            self._new.finish_reason, self._new.weight_versions = new.finish_reason, new.weight_versions
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    def get_nowait(self) -> Output | None:
        if self._new is not None:
            new, self._new = self._new, None
            if self._error is None:
                self._ready = anyio.Event()
            return Output([new])
        if self._error is not None:
            raise self._error
        return None

    async def get(self) -> Output:
        while (output := self.get_nowait()) is None:
            await self._ready.wait()
        return output


@dataclass(eq=False, slots=True)
class Stream:
    """A request of the policy, in as many parts as there were pauses.

    Attributes:
        made: tokens so far.
        weight_version_starts: the versions behind them, each with the index of its first token.
        parts: requests that the server has had for it.
        part: the one that is open, if any; cancelling it gives it up.
        over: set when there is none.
    """

    name: str
    prompt: Sequence[int]
    params: Mapping[str, Any]
    inbox: Inbox
    made: list[int] = field(default_factory=list)
    weight_version_starts: list[tuple[str, int]] = field(default_factory=list)
    parts: int = 0
    part: anyio.CancelScope | None = None
    over: anyio.Event = field(default_factory=anyio.Event)

    @property
    def part_name(self) -> str:
        return f"{self.name}-{self.parts}"

    def body(self, model: str, version: str) -> dict[str, object]:
        """Return the next request: its prompt is all that there is; no noise is used twice."""
        made, params = len(self.made), dict(self.params)
        params["max_tokens"] -= made
        params["min_tokens"] = max(0, params["min_tokens"] - made)
        if made:
            digest = blake2b(f"{params['seed']} {made}".encode(), digest_size=8).digest()
            params["seed"] = int.from_bytes(digest, "big") >> 1
        return {
            "model": model,
            "request_id": self.part_name,
            "token_ids": [*self.prompt, *self.made],
            "sampling_params": params,
            "cache_salt": version,
            "stream": True,
        }

    def name_weights(self, version: str, start: int) -> None:
        """Have tokens from an index on be of a version."""
        starts = [each for each in self.weight_version_starts if each[1] < start]
        self.weight_version_starts = starts if starts and starts[-1][0] == version else [*starts, (version, start)]

    def spans(self) -> list[Span]:
        ends = [start for _, start in self.weight_version_starts[1:]] + [len(self.made)]
        return [Span(label, start, end) for (label, start), end in zip(self.weight_version_starts, ends, strict=True)]


class HttpEngine:
    """A server as :class:`oppo.vllm.surface.AsyncEngine`; :meth:`streaming` must be open for tokens to come.

    Args:
        url: of the server.
        model: as it is served.
        headers: of each request.
        timeout: seconds for a call that moves no weights.
        synced: whether its weights are those that a run begins with: nobody has synced others since it was started.
        transport: of httpx, for tests.

    Attributes:
        error: why the server counts as lost; ``None`` while it does not.
        output_processor: as that of ``AsyncLLM``.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        headers: Mapping[str, str],
        timeout: float,
        synced: bool,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.error: ServerFault | None = None
        self.output_processor = SimpleNamespace(request_states={})
        self._url = url
        self._model = model
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=timeout,
            # No connection outlives its request, so that the client has nothing to close.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            verify=ssl.create_default_context() if url.startswith("https") else False,
            transport=transport,
        )
        self._open: dict[str, Stream] = {}
        self._tasks: TaskGroup | None = None
        self._synced = synced
        self._version = self._adapter = ""
        self._paused = self._pausing = False

    @property
    def errored(self) -> bool:
        return self.error is not None

    def die(self, reason: str) -> ServerFault:
        self.error = self.error or ServerFault(f"{self._url} is lost: {reason}")
        for stream in self._open.values():
            stream.inbox.fail(self.error)
        return self.error

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        with as_itself():
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._watch, name="watch the vLLM server")
                try:
                    yield
                finally:
                    self._tasks = None
                    tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        while not self.errored:
            await anyio.sleep(HEALTH)
            try:
                await self._call("GET", "/health")
            except ServerFault as error:
                self.die(one_line(error))

    async def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any = None) -> Inbox:
        """Open a stream, with the adapter that was loaded last; a server that is paused gets it when it is resumed."""
        del lora_request
        stream = Stream(request_id, prompt["prompt_token_ids"], params, Inbox(request_id))
        self._open[request_id] = self.output_processor.request_states[request_id] = stream
        if not self._paused:
            self._begin(stream)
        return stream.inbox

    async def abort(self, request_id: Sequence[str]) -> None:
        found = [stream for each in request_id if (stream := self._closed(each)) is not None]
        for stream in found:
            stream.inbox.put(Completion([], [], "abort"))
        await self._give_up([stream for stream in found if stream.part is not None])

    async def _give_up(self, streams: Sequence[Stream]) -> None:
        # A server notices a connection that is closed, but maybe not behind a proxy. Without ids it would abort all.
        for stream in streams:
            if stream.part is not None:
                stream.part.cancel()
        if streams:
            names = [f"generate-tokens-{stream.part_name}" for stream in streams]
            await self._call("POST", "/abort_requests", body={"request_ids": names})

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Stop the server; requests stay as they are here, while their streams end."""
        del mode
        self._pausing = True
        try:
            await self._call("POST", "/pause", {"mode": "abort", "clear_cache": clear_cache})
            running = [stream for stream in self._open.values() if stream.part is not None]
            with anyio.move_on_after(DRAIN):
                for stream in running:
                    await stream.over.wait()
            await self._give_up([stream for stream in running if not stream.over.is_set()])
            for stream in running:
                await stream.over.wait()
        finally:
            self._pausing = False
        self._paused = True

    async def resume_generation(self) -> None:
        """Have the server go on, if it still serves the weights that were synced last."""
        await self._check_version()
        if not self._synced:
            raise ServerFault(
                f"{self._url} has the weights of an earlier run: load those that are trained before the first step, as "
                "oppo train does (policy.load)"
            )
        await self._call("POST", "/resume")
        self._paused = False
        for stream in self._open.values():
            self._begin(stream)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        parameters = {"reset_running_requests": reset_running_requests}
        return bool((await self._call("POST", "/reset_prefix_cache", parameters)).get("success"))

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._call(
            "POST", "/init_weight_transfer_engine", body={"init_info": request.init_info}, seconds=DEADLINE
        )

    async def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter for all streams that begin from now on, and unload the one before."""
        name = str(lora_request["lora_name"])
        await self._call("POST", "/v1/load_lora_adapter", body=lora_request, seconds=DEADLINE, reads=False)
        if self._adapter:
            await self._call("POST", "/v1/unload_lora_adapter", body={"lora_name": self._adapter}, reads=False)
        self._model = self._adapter = name
        self._synced = True
        return True

    async def start_weight_update(self) -> None:
        try:
            await self._call("POST", "/start_weight_update", seconds=DEADLINE)
        except ServerFault as fault:
            if "already active" not in str(fault):
                raise
            # A run that ended in the midst of an update has left it open.
            await self._call("POST", "/finish_weight_update", body={}, seconds=DEADLINE)
            await self._call("POST", "/start_weight_update", seconds=DEADLINE)

    async def update_weights(self, request: Any) -> None:
        await self._call("POST", "/update_weights", body={"update_info": request.update_info}, seconds=DEADLINE)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {} if weight_version is None else {"weight_version": weight_version}
        await self._call("POST", "/finish_weight_update", body=body, seconds=DEADLINE)
        self._synced = True
        if weight_version is not None:
            self._version = weight_version
            await self._check_version()

    async def update_weight_version(self, new_version: str) -> None:
        await self._call("POST", "/update_weight_version", body={"new_version": new_version})
        self._version = new_version
        await self._check_version()

    async def _check_version(self) -> None:
        served = (await self._call("GET", "/weight_info")).get("weight_version")
        if served != self._version:
            raise ServerFault(
                f"{self._url} serves weights {served!r}, and {self._version!r} were synced to it: it has not taken "
                "them, was started again, or another run uses it too"
            )

    async def _call(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str | bool] | None = None,
        *,
        body: object = None,
        seconds: float | None = None,
        reads: bool = True,
    ) -> dict[str, Any]:
        timeout = self._client.timeout if seconds is None else httpx.Timeout(seconds)
        try:
            answer = await self._client.request(method, path, params=parameters, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise self.die(f"{path}: {one_line(error)}") from error
        if not answer.is_success:
            raise ServerFault(f"{self._url}{path} answered {said(answer)}")
        if not reads:
            return {}
        try:
            found = answer.json() if answer.content else {}
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ServerFault(f"{self._url}{path} answered no JSON object: {shortened(answer.text, 200)!r}")
        return found

    def _begin(self, stream: Stream) -> None:
        if self._tasks is None:
            raise ServerFault(f"{self._url} streams tokens while a policy decodes, and none does")
        stream.part, stream.over = anyio.CancelScope(), anyio.Event()
        self._tasks.start_soon(self._read, stream, stream.part, name=f"stream of request {stream.name}")

    async def _read(self, stream: Stream, part: anyio.CancelScope) -> None:
        try:
            with part:
                await self._follow(stream)
        except httpx.HTTPError as error:
            self.die(one_line(error))
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the tokens
            stream.inbox.fail(error)
        finally:
            stream.part = None
            stream.over.set()

    async def _follow(self, stream: Stream) -> None:
        stream.parts += 1
        stream.name_weights(self._version, start := len(stream.made))
        body, timeout = stream.body(self._model, self._version), httpx.Timeout(self._client.timeout.connect, read=None)
        async with self._client.stream("POST", GENERATE, json=body, timeout=timeout) as answer:
            if not answer.is_success:
                await answer.aread()
                raise ServerFault(f"{self._url}{GENERATE} answered {said(answer)}")
            ended = False
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    ended = self._take(stream, start, json.loads(line.removeprefix("data: "))) or ended
        if not ended:
            raise ServerFault(f"{self._url} ended a stream of tokens without saying why")

    def _take(self, stream: Stream, start: int, chunk: Mapping[str, Any]) -> bool:
        """Take what is new; return whether the server has ended the request."""
        if failure := chunk.get("error"):
            raise ServerFault(f"{self._url} could not go on: {shortened(str(failure), 200)}")
        try:
            (choice,) = chunk["choices"]
            logprobs: list[Mapping[int, Logprob]] = [
                {each["token_id"]: Logprob(_finite(each["logprob"])) for each in (one, *one["top_logprobs"])}
                for one in (choice["logprobs"] or {"content": []})["content"]
            ]
            tokens, reason = list(choice["token_ids"]), choice["finish_reason"]
            spans = [Span(each["version"], each["start"], each["end"]) for each in choice["weight_versions"] or ()]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault(
                f"{self._url} streamed something else than tokens ({one_line(error)}): "
                f"{shortened(json.dumps(chunk), 200)}"
            ) from error
        stream.made += tokens
        for span in spans:
            stream.name_weights(span.version, start + span.start)
        if reason == "abort" and self._pausing:
            stream.inbox.put(Completion(tokens, logprobs))
            return True
        if reason is not None:
            self._closed(stream.name)
        stream.inbox.put(Completion(tokens, logprobs, reason, None if reason is None else stream.spans()))
        return reason is not None

    def _closed(self, name: str) -> Stream | None:
        self.output_processor.request_states.pop(name, None)
        return self._open.pop(name, None)


def _finite(logprob: float) -> float:
    return float("-inf") if logprob <= NO_LOGPROB else logprob


def said(answer: httpx.Response) -> str:
    return f"{answer.status_code} {answer.reason_phrase}: {shortened(' '.join(answer.text.split()), 300)}"
