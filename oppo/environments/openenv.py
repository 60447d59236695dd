"""Environments on OpenEnv's servers, as classes by TRL's contract: a WebSocket session for each response."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from oppo.declared import split_url
from oppo.errors import ConfigError, one_line, shortened
from oppo.libraries import require

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

OPEN_SECONDS: Final = 30.0  # in which a server must accept a session
_GENERIC: Final = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Titles of the schemas of actions that call the tools that a server lists."""

_GOES_ON: Final = frozenset({"EXECUTION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR"})
"""Codes of errors after which a session goes on."""


class OpenEnvSession:
    """A session with a server; :func:`openenv` adds its tools. Leaving it closes the session; the reward stays."""

    url: ClassVar[str]

    def __init__(self) -> None:
        self._connection: ClientConnection | None = None
        self._waiting = False
        self._ended = self._lost = ""
        self._earned = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end("the session was closed")

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        if (connection := self._connection) is not None:
            self._connection = None
            Thread(target=connection.close, daemon=True).start()  # which awaits the server's consent

    def reset(self, **row: object) -> str | None:
        from websockets.exceptions import WebSocketException  # noqa: PLC0415 - an extra
        from websockets.sync.client import connect  # noqa: PLC0415 - an extra

        address = f"{self.url.replace('http', 'ws', 1)}/ws"
        proxy: Literal[True] | None = None if is_here(self.url) else True
        try:
            opened = connect(address, open_timeout=OPEN_SECONDS, max_size=None, proxy=proxy)
            self._connection = opened.__enter__()  # which another method leaves
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"no OpenEnv server opens a session at {address}: {one_line(error)}") from error
        return _words(self._asked("reset", row)["observation"]) or None

    def get_reward(self) -> float:
        if self._waiting:
            raise ConnectionError(self._lost or _UNANSWERED)
        return self.get_turn_reward()

    def get_turn_reward(self) -> float:
        earned, self._earned = self._earned, 0.0
        return earned

    def _asked(self, kind: str, data: Mapping[str, object]) -> dict[str, Any]:
        from websockets.exceptions import WebSocketException  # noqa: PLC0415 - an extra

        connection = self._connection
        if connection is None or self._waiting:  # this request would read the late answer to another
            raise ConnectionError(self._ended or _UNANSWERED)
        message = json.dumps({"type": kind, "data": data})
        self._waiting = True
        try:
            with suppress(WebSocketException):  # it is closed, and may have said why: that is read
                connection.send(message)
            reply = json.loads(connection.recv())
            said = dict(reply["data"])
            refused = reply["type"] == "error"
            if not refused:
                said = {"reward": None, "done": False, **said, "observation": dict(said["observation"])}
        except Exception as error:  # any kind: the library has its own
            lost = f"the session of the OpenEnv server {self.url} was lost: {one_line(error)}"
            if self._connection is connection:  # and was not closed here, while a call was given up
                self._lost = lost
                self._end(lost)
            raise ConnectionError(lost) from error
        if refused:
            raise self._refusal(said)
        self._waiting = False
        return said

    def _refusal(self, said: Mapping[str, Any]) -> Exception:
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in said.get("errors", ())]
        words = "; ".join([str(said.get("message")), *faults])
        if said.get("code") in _GOES_ON:
            self._waiting = False
            return ValueError(words)
        more = ": raise its max_concurrent_envs to the responses in flight" * (said.get("code") == "CAPACITY_REACHED")
        self._lost = f"the OpenEnv server {self.url} has ended the session: {words}{more}"
        self._end(self._lost)
        return ConnectionError(self._lost)

    def _step(self, action: Mapping[str, object]) -> dict[str, Any]:
        if self._ended == _OVER:
            return {"result": _OVER}
        said = self._asked("step", action)
        self._earned += float(said["reward"] or 0.0)
        if said["done"]:
            self._end(_OVER)
        observation: dict[str, Any] = said["observation"]
        return observation


_OVER: Final = "the episode is over"
_UNANSWERED: Final = "an earlier call has not been answered"


def _words(observation: Mapping[str, Any]) -> str:
    # The observation as text: its one text field, or all of it as JSON.
    kept = {
        name: value for name, value in observation.items() if name != "metadata" and value not in (None, "", [], {})
    }
    (only, *others) = [*kept.values()] or [""]
    return only if isinstance(only, str) and not others else json.dumps(kept, ensure_ascii=False)


def _result(observation: Mapping[str, Any]) -> object:
    if (error := observation.get("error")) is not None:
        raise ValueError(error["message"])
    result = observation.get("result")
    return result["data"] if isinstance(result, dict) and "data" in result else result


def _tool(
    name: str, description: str, parameters: Mapping[str, Any], act: Callable[..., object]
) -> Callable[..., object]:
    def tool(self: OpenEnvSession, **arguments: object) -> object:
        return act(self, arguments)

    tool.__name__ = tool.__qualname__ = name
    schema = {"name": name, "description": description, "parameters": dict(parameters)}
    vars(tool)["schema"] = {"type": "function", "function": schema}
    return tool


def _called(name: str, description: str, parameters: Mapping[str, Any]) -> Callable[..., object]:
    def act(session: OpenEnvSession, arguments: Mapping[str, object]) -> object:
        return _result(session._step({"type": "call_tool", "tool_name": name, "arguments": arguments}))  # noqa: SLF001

    return _tool(name, description, parameters, act)


def openenv(url: str) -> type[OpenEnvSession]:
    """Return a class for :class:`oppo.environments.EnvironmentClass` whose instances are sessions with a server.

    Its tools are those that the server lists. A server without such has one, ``step``, whose arguments are the fields
    of its actions. The reward of a turn is the sum of the rewards of its
    steps. ``reset()`` is sent the columns of a row.

    Args:
        url: of the server, such as ``http://localhost:8000``.

    Raises:
        ConfigError: the extra ``openenv`` is not installed, or no such server answers there.
    """
    require("openenv", "an environment of OpenEnv", module="websockets")
    url = url.rstrip("/")
    split_url(url, "an OpenEnv server")
    action = _schema(url)
    base = type("OpenEnv", (OpenEnvSession,), {"url": url})
    if action.get("title") not in _GENERIC:
        parameters = {**action, "properties": {**action.get("properties", {})}}
        parameters["properties"].pop("metadata", None)
        description = str(action.get("description") or "Take a step in the environment.")
        tools = [_tool("step", description, parameters, lambda self, arguments: _words(self._step(arguments)))]
    else:
        tools = [_called(*each) for each in _listed(base)]
    if unfit := [tool.__name__ for tool in tools if hasattr(base, tool.__name__) or tool.__name__.startswith("_")]:
        raise ConfigError(f"the OpenEnv server {url} has a tool {unfit[0]!r}, a name that no tool can have: rename it")
    return type("OpenEnv", (base,), {tool.__name__: tool for tool in tools})


def is_here(url: str) -> bool:
    # No proxy leads to this machine.
    return urlsplit(url).hostname in {"localhost", "127.0.0.1", "::1"}


def _schema(url: str) -> dict[str, Any]:
    address = f"{url}/schema"
    opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * is_here(url))
    try:
        with opener.open(address, timeout=OPEN_SECONDS) as reply:
            read = reply.read()
    except (OSError, ValueError) as error:  # an HTTPError is one
        raise ConfigError(
            f"no OpenEnv server answers at {address}: {one_line(error)}; start it, or correct the URL"
        ) from error
    try:
        found: dict[str, Any] = dict(json.loads(read)["action"])
    except (LookupError, TypeError, ValueError) as error:
        text = shortened(repr(read.decode(errors="replace")), 80)
        raise ConfigError(
            f"{address} is of no OpenEnv server: expected JSON with the schema of actions, got {text}"
        ) from error
    return found


def _listed(kind: type[OpenEnvSession]) -> list[tuple[str, str, Mapping[str, Any]]]:
    try:
        with kind() as session:
            session.reset()
            listed = session._step({"type": "list_tools"})["tools"]  # noqa: SLF001
            found = [(each["name"], each["description"], each["input_schema"]) for each in listed]
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"the OpenEnv server {kind.url} does not say what tools it has: {one_line(error)}") from error
    if not found:
        raise ConfigError(
            f"the OpenEnv server {kind.url} has no tools, and its actions no fields: nothing can be called"
        )
    return found
