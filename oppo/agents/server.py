"""The HTTP server that agents ask by OpenAI's or Anthropic's API, at one address while a run is open."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
from anyio.abc import TaskGroup

from oppo.agents.chat_completions import ChatCompletions
from oppo.agents.conversation import ENDED, Session
from oppo.agents.messages import Messages
from oppo.agents.requests import BODY, Api, Refusal, Request, Stream, apart
from oppo.agents.responses import Responses
from oppo.errors import ConfigError, as_itself, shortened
from oppo.log import logger
from oppo.observe import WorkContext

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response as HttpResponse
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

APIS: Final[Mapping[str, Api]] = {each.path: each for each in (ChatCompletions(), Responses(), Messages())}

PATHS: Final = ", ".join(each.removeprefix("/v1") for each in APIS)

BACKLOG: Final = 2048  # connections that may wait to be accepted
FOREVER: Final = 10**9
"""Seconds for which an idle connection is kept: its client may be about to send, and closes idle ones itself."""

FILES: Final = 65_536  # the most open files that are asked of the system
RESERVED: Final = 64  # open files that are left for other things, at least


@dataclass(eq=False)
class AgentServer:
    host: str
    port: int
    public_url: str
    sessions: Callable[[], Mapping[str, Session]]
    asked: Callable[[], None]
    noted: Callable[[WorkContext | None, Mapping[str, float]], None]
    url: str = "http://agents/v1"  # on a loop of virtual time, where an agent asks the application itself
    _server: Any = None

    def serve(self, listening: socket.socket, tasks: TaskGroup) -> None:
        import uvicorn  # noqa: PLC0415 - an extra

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # they are the run's

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await self.app(scope, receive, send)
            except asyncio.CancelledError:  # the run is interrupted: its task ends here, and its server logs nothing
                with suppress(RuntimeError):  # it has answered
                    await _error_of(APIS.get(scope["path"], ChatCompletions()), ENDED)(scope, receive, send)

        config = uvicorn.Config(
            app,
            http="h11",  # which bounds the headers that it reads
            limit_concurrency=_connections(),
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=FOREVER,
        )
        self._server = Server(config)
        tasks.start_soon(self._listen, self._server, listening, name="serve agents")

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            self._server = None

    def listening(self) -> socket.socket:
        host, port = self.host, self.port
        try:
            (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            both = host == "::" and socket.has_dualstack_ipv6()
            found = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            at = f"{_bracketed(host)}:{port}"
            raise ConfigError(f"agents cannot be served at {at}: {error}; name another host or port, or 0") from error
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # machines that vanish do not say so
        reached = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - all addresses
        self.url = self.public_url or f"http://{_bracketed(reached)}:{found.getsockname()[1]}/v1"
        return found

    async def _listen(self, server: Any, listening: socket.socket) -> None:
        with anyio.CancelScope(shield=True), listening:  # it ends on request
            await server.serve([listening])

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Refusals have the form of the API's errors.
        from starlette.requests import ClientDisconnect, Request as HttpRequest  # noqa: PLC0415 - an extra

        http = HttpRequest(scope, receive)
        _error = partial(_error_of, APIS.get(http.url.path, ChatCompletions()))
        try:
            answer = await self._answer(http)
        except Refusal as refusal:
            answer = _error(refusal)
        except RecursionError:
            answer = _error(Refusal("the request is nested too deep: leave levels of lists and objects out"))
        except ClientDisconnect:
            return
        except Exception:
            failed = Refusal("the endpoint failed: its log says why", code="internal_error", status=500)
            await _error(failed)(scope, receive, send)
            raise
        await answer(scope, receive, send)

    async def _answer(self, http: HttpRequest) -> HttpResponse:
        match http.method, http.url.path:
            case "POST", path if path in APIS:
                return await self._complete(http, APIS[path])
            case "GET", "/v1/models":
                return self._models(http)
            case _, path:
                raise Refusal(
                    f"nothing is served at {shortened(path, 200)}: ask by POST to {', '.join(APIS)}",
                    status=404,
                )

    async def _complete(self, http: HttpRequest, api: Api) -> HttpResponse:
        from starlette.responses import JSONResponse, StreamingResponse  # noqa: PLC0415 - an extra

        refused, repeated, evaluation = False, False, None
        try:
            session = self._session(http)
            evaluation = session.evaluation
            body, size = await _read(http)
            again = http.headers.get("x-stainless-retry-count", "0") != "0"
            key = http.headers.get("idempotency-key", "")
            request, repeated = await session.ask(api, body, size, again=again, key=key)
            self.asked()
            if (said := await _while_connected(http, request.result)) is not None:
                return JSONResponse(api.whole(request, said))
            return StreamingResponse(_events(http, request, api.stream(request)), media_type="text/event-stream")
        except Refusal:
            refused = True
            raise
        finally:
            self.noted(evaluation, {"agents/refused": float(refused), "agents/repeated": float(repeated)})

    def _models(self, http: HttpRequest) -> HttpResponse:
        from starlette.responses import JSONResponse  # noqa: PLC0415 - an extra

        served = self._session(http).requests.models
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "oppo"} for name in served]
        return JSONResponse({"object": "list", "data": models})

    def _session(self, http: HttpRequest) -> Session:
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        bearer = key.strip() if kind.lower() == "bearer" else ""
        found = self.sessions().get(http.headers.get("x-api-key", "") or bearer)
        if found is None:
            raise Refusal(
                "expected the key that the agent was given, as a bearer token or X-Api-Key, while its rollout lasts",
                code="invalid_api_key",
                status=401,
            )
        return found


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _error_of(api: Api, refusal: Refusal) -> HttpResponse:
    from starlette.responses import JSONResponse  # noqa: PLC0415 - an extra

    return JSONResponse(api.error(refusal), refusal.status)


async def _events(http: HttpRequest, request: Request, stream: Stream) -> AsyncIterator[str]:
    # Of an answer while it is written; one that its client asks for again begins anew.
    at, request.waiting = 0, request.waiting + 1
    try:
        for event in stream.begin():
            yield event
        while True:
            news, at, new = request.news, len(request.deltas), request.deltas[at:]
            for event in (event for kind, text in new for event in stream.more(kind, text)):
                yield event
            if at == len(request.deltas) and (reply := request.reply) is not None:
                break
            if at == len(request.deltas):
                await news.wait()
        for event in stream.failed(reply) if isinstance(reply, Refusal) else stream.end(reply):
            yield event
        request.heard = not await http.is_disconnected()
    finally:
        request.waiting -= 1


async def _while_connected(http: HttpRequest, wait: Callable[[], Awaitable[T]]) -> T:
    # The awaited result, unless the client disconnects.
    from starlette.requests import ClientDisconnect  # noqa: PLC0415 - an extra

    found = list[T]()

    async def leave(scope: anyio.CancelScope) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    with as_itself():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave, tasks.cancel_scope, name="a client that may leave")
            found.append(await wait())
            tasks.cancel_scope.cancel()
    if not found:
        raise ClientDisconnect
    return found[0]


async def _read(http: HttpRequest) -> tuple[Any, int]:
    # The body, and its bytes. Of one that is too long only the first part is held: the server forgets the rest.
    refusal = Refusal(f"the request has more than {BODY} bytes: shorten its messages", status=413)
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > BODY:
        raise refusal
    parts, length = list[bytes](), 0
    async for part in http.stream():
        parts.append(part)
        length += len(part)
        if length > BODY:
            raise refusal
    try:
        return await apart(length, partial(json.loads, b"".join(parts))), length
    except ValueError as error:
        raise Refusal(f"the request cannot be read: {error}") from error


def _connections() -> int:
    # How many there may be at once, beyond which uvicorn answers 503: half of the files that may be open, as agents of
    # this process have the other ends.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has another limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            logger.info(f"agents: up to {wanted} files may be open instead of {soft}, for their connections")
            soft = wanted
    return max(16, (FILES if soft == resource.RLIM_INFINITY else soft) // 2 - RESERVED)
