"""The HTTP server that agents ask: OpenAI's chat completions, at one address while a run is open."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio
from anyio.abc import TaskGroup

from oppo.agents.conversation import MODEL, Refusal, Session, as_events
from oppo.errors import ConfigError, one_line

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response as HttpResponse

PATH: Final = "/v1/chat/completions"

BACKLOG: Final = 2048
"""Connections that may wait to be accepted."""


class AgentServer:
    """Serves the requests of agents.

    Args:
        host: where it listens.
        port: likewise; 0: any that is free.
        sessions: those of the agents, by their keys.
        asked: called once a session was asked for something.
        noted: called after each request: with whether its row is one of an evaluation, and what metrics are told.

    Attributes:
        url: of the API.
    """

    def __init__(
        self,
        host: str,
        port: int,
        sessions: Callable[[], Mapping[str, Session]],
        asked: Callable[[], None],
        noted: Callable[[bool, Mapping[str, float]], None],
    ) -> None:
        self.url = "http://agents/v1"  # on a loop of virtual time, where an agent asks the application itself
        self._address = (host, port)
        self._sessions = sessions
        self._asked = asked
        self._noted = noted
        self._server: Any = None

    def serve(self, listening: socket.socket, tasks: TaskGroup) -> None:
        """Serve what connects here in a task of its own, until :meth:`stop`."""
        import uvicorn  # noqa: PLC0415 - an extra

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # they are the run's

        self._server = Server(uvicorn.Config(self.app, ws="none", lifespan="off", log_config=None, access_log=False))
        tasks.start_soon(self._listen, self._server, listening, name="serve agents")

    def stop(self) -> None:
        """End the task that serves, if there is one."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            self._server = None

    def listening(self) -> socket.socket:
        """Return the socket that agents connect to.

        Raises:
            ConfigError: the address cannot be had.
        """
        host, port = self._address
        found = socket.socket()
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(self._address)
            found.listen(BACKLOG)
        except OSError as error:
            found.close()
            raise ConfigError(f"agents cannot be served at {host}:{port}: {error}; name another port, or 0") from error
        self.url = f"http://{host}:{found.getsockname()[1]}/v1"
        return found

    async def _listen(self, server: Any, listening: socket.socket) -> None:
        with anyio.CancelScope(shield=True), listening:  # it ends when it is told to
            await server.serve([listening])

    @property
    def app(self) -> Starlette:
        """The server, as an ASGI application."""
        from starlette.applications import Starlette  # noqa: PLC0415 - an extra
        from starlette.routing import Route  # noqa: PLC0415

        return Starlette(
            routes=[
                Route(PATH, self._complete, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/{path:path}", self._elsewhere, methods=["GET", "POST"]),
            ]
        )

    async def _elsewhere(self, http: HttpRequest) -> HttpResponse:
        from starlette.responses import JSONResponse  # noqa: PLC0415 - an extra

        refusal = Refusal(f"nothing is served at {http.url.path}: ask for chat completions, at {PATH}", status=404)
        return JSONResponse(refusal.json(), refusal.status)

    async def _complete(self, http: HttpRequest) -> HttpResponse:
        from starlette.responses import JSONResponse, Response  # noqa: PLC0415 - an extra

        refused, repeated, evaluated = False, False, False
        try:
            session = self._session(http)
            evaluated = session.evaluated
            try:
                body = await http.json()
            except ValueError as error:
                raise Refusal(f"the request is no JSON: {one_line(error)}") from error
            again = http.headers.get("x-stainless-retry-count", "0") != "0"
            request, repeated = session.ask(body, again=again, key=http.headers.get("idempotency-key", ""))
            self._asked()
            completion = await request.result()
            if not body.get("stream"):
                return JSONResponse(completion)
            options = body.get("stream_options")
            usage = isinstance(options, dict) and bool(options.get("include_usage"))
            return Response(as_events(completion, with_usage=usage), media_type="text/event-stream")
        except Refusal as refusal:
            refused = True
            return JSONResponse(refusal.json(), refusal.status)
        finally:
            self._noted(evaluated, {"agents/refused": float(refused), "agents/repeated": float(repeated)})

    async def _models(self, http: HttpRequest) -> HttpResponse:
        from starlette.responses import JSONResponse  # noqa: PLC0415 - an extra

        try:
            self._session(http)
        except Refusal as refusal:
            return JSONResponse(refusal.json(), refusal.status)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "oppo"}
        return JSONResponse({"object": "list", "data": [model]})

    def _session(self, http: HttpRequest) -> Session:
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        found = self._sessions().get(key.strip())
        if kind.lower() != "bearer" or found is None:
            raise Refusal(
                "expected the key that the agent was given, as a bearer token, while its rollout lasts",
                code="invalid_api_key",
                status=401,
            )
        return found
