"""The HTTP server of agents: what it holds, what it reads no further, and what it answers; on the loopback alone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from oppo.agents import server
from oppo.agents.conversation import Session
from oppo.agents.requests import BODY, Api, Said, Wanted
from oppo.agents.server import AgentServer

KEY = "oppo-test"
PATH = "/v1/chat/completions"


class Asked:
    """A session that answers each request with its messages, once it is let."""

    evaluation = None
    id, prompt = "1", 0

    def __init__(self) -> None:
        self.let = anyio.Event()
        self.left = anyio.Event()
        self.begun = anyio.Event()

    async def ask(self, api: Api, body: Any, size: int, *, again: bool, key: str) -> tuple[Asked, bool]:
        del size, again, key
        self.wanted, self.said = Wanted(api.path, [], []), len(body["messages"])
        return self, False

    async def result(self) -> Any:
        try:
            self.begun.set()
            await self.let.wait()
        except BaseException:
            self.left.set()
            raise
        return Said(str(self.said))


async def served(then: Callable[[Asked, int], Any]) -> None:
    """Call this with a session, and the port at which it is served."""
    asked: Any = Asked()
    sessions: dict[str, Session] = {KEY: asked}
    http = AgentServer(
        "127.0.0.1", 0, "", sessions=lambda: sessions, asked=lambda: None, noted=lambda evaluation, metrics: None
    )
    listening = http.listening()
    async with anyio.create_task_group() as tasks:
        http.serve(listening, tasks)
        try:
            with anyio.fail_after(60):
                await then(asked, listening.getsockname()[1])
        finally:
            http.stop()


def request(
    body: object = b'{"messages": [1]}', head: str = f"POST {PATH}", length: int | None = None, key: str = KEY
) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(text) if length is None else length
    headers = f"Host: agents\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
    return f"{head} HTTP/1.1\r\n{headers}".encode() + text


@asynccontextmanager
async def connected(port: int, sent: bytes) -> AsyncIterator[anyio.abc.SocketStream]:
    async with await anyio.connect_tcp("127.0.0.1", port) as to:
        await to.send(sent)
        yield to


async def received(to: anyio.abc.SocketStream) -> tuple[int, Any]:
    """Return the status and the JSON of an answer."""
    text = b""
    while (ends := text.find(b"\r\n\r\n")) < 0:
        text += await to.receive()
    head = text[:ends].decode().lower()
    (length,) = [int(line.partition(":")[2]) for line in head.splitlines() if line.startswith("content-length:")]
    while len(text) < ends + 4 + length:
        text += await to.receive()
    assert "content-type: application/json" in head
    return int(head.split()[1]), json.loads(text[ends + 4 :])


async def test_an_idle_connection_is_its_client_s_to_close() -> None:
    async def idle(asked: Asked, port: int) -> None:
        asked.let.set()
        async with connected(port, request()) as to:
            for _ in range(3):
                status, reply = await received(to)
                assert (status, reply["choices"][0]["message"]["content"]) == (200, "1")
                await anyio.sleep(0.2)
                await to.send(request())

    await served(idle)
    # What closes it otherwise is a timer of uvicorn's, of five seconds.
    assert server.FOREVER > 10**6


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (request(length=300 * 2**20), 413, f"more than {BODY} bytes"),
        (request(head="DELETE /v1/models"), 404, "nothing is served at /v1/models: ask by POST to /v1/chat"),
        (request(head=f"GET {PATH}"), 404, "ask by POST to /v1/chat/completions, /v1/responses"),
        (request(b"{"), 400, "the request cannot be read: Expecting property name"),
        (request(b'"\xff"'), 400, "the request cannot be read: 'utf"),
        (request(b"[" * 99_999), 400, "the request is nested too deep"),
    ],
    ids=["long body", "method", "GET", "JSON", "UTF", "depth"],
)
async def test_what_is_refused_is_an_error_as_openai_s_servers_send(sent: bytes, status: int, words: str) -> None:
    async def refused(asked: Asked, port: int) -> None:
        async with connected(port, sent) as to:
            found, reply = await received(to)
        assert found == status
        assert reply["error"].keys() == {"message", "type", "param", "code"}
        assert words in reply["error"]["message"]

    await served(refused)


@pytest.mark.parametrize("sent", [request(length=99), request()], ids=["in its body", "while it waits"])
async def test_a_client_that_leaves_is_waited_for_no_more_and_leaves_no_traceback(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def leaving(asked: Asked, port: int) -> None:
        async with connected(port, sent):
            await anyio.sleep(0.05)
        with anyio.fail_after(20):
            await (asked.left.wait() if sent == request() else anyio.lowlevel.checkpoint())

    with caplog.at_level(logging.INFO):
        await served(leaving)
    assert [each for each in caplog.records if each.exc_info] == []


async def test_requests_that_wait_when_a_run_is_interrupted_leave_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def interrupted(asked: Asked, port: int) -> None:
        async with connected(port, request()) as to:
            await asked.begun.wait()
            (waiting,) = [task for task in asyncio.all_tasks() if "run_asgi" in repr(task)]
            waiting.cancel()
            status, reply = await received(to)
        assert (status, reply["error"]["code"]) == (400, "rollout_ended")

    with caplog.at_level(logging.INFO):
        await served(interrupted)
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_connections_beyond_the_limit_of_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_connections", lambda: 3)

    async def crowded(asked: Asked, port: int) -> None:
        async with AsyncExitStack() as stack:
            held = [await stack.enter_async_context(connected(port, request())) for _ in range(2)]
            await anyio.sleep(0.05)
            async with connected(port, request()) as to:
                assert b" 503 " in await to.receive()
            asked.let.set()
            assert [(await received(each))[0] for each in held] == [200] * 2

    await served(crowded)


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"), [(1024, 524_288, 65_536), (1024, 4096, 4096), (1024, 1024, 1024), (9, 9, 9)]
)
def test_as_many_files_may_be_open_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, messages: list[str], soft: int, hard: int, wanted: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr("resource.getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda kind, pair: limits.append(pair))
    assert server._connections() == max(wanted // 2 - 64, 16)
    assert limits[-1] == (wanted, hard)
    assert [*messages] == [f"agents: up to {wanted} files may be open instead of 1024, for their connections"] * (
        wanted > soft
    )
