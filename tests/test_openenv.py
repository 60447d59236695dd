"""Environments of OpenEnv: a server's tools, episodes and faults; of the library itself by ``make test-gym``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request, Response as HttpResponse
from websockets.sync.server import ServerConnection, serve

from oppo.cli import DONE, UNUSABLE
from oppo.environments import EnvironmentClass, EnvironmentFailure, openenv, tools_of
from oppo.errors import ConfigError
from oppo.events import Drop, Prompt
from oppo.hf.chat import ChatFormat, ParsedTurn
from oppo.hf.tool_calls import ToolCall, tool_schema
from oppo.turns import Answer
from oppo.vllm.sync import free_port
from tests.kit.turns import Said, byte_chat, call, talker
from tests.kit.workplace import oppo, records

Json = Mapping[str, Any]
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
LISTED = [{"name": "guess", "description": "Guess the number.", "input_schema": NUMBER}]


def error(code: str, message: str, **more: Any) -> Json:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


def observed(reward: float | None = None, *, done: bool = False, **observation: Any) -> Json:
    data = {"observation": {**observation, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


class Server:
    """A server of guesses, with the messages of OpenEnv's.

    Attributes:
        open: the sessions that are open.
        faults: what is answered to a guess instead; called with the session.
    """

    def __init__(self, *, mcp: bool = True, page: bytes = b"") -> None:
        self.mcp = mcp
        self.page = page
        self.open: list[ServerConnection] = []
        self.opened = 0
        self.most = 100
        self.faults: dict[int, Callable[[ServerConnection], Json | None]] = {}

    def schema(self, connection: ServerConnection, request: Request) -> HttpResponse | None:
        del connection
        if request.path != "/schema":
            return None
        action = (
            {"title": "Action", "properties": {}} if self.mcp else {"title": "Guess", "description": "Guess.", **NUMBER}
        )
        body = self.page or json.dumps({"action": action}).encode()
        return HttpResponse(HTTPStatus.OK, "OK", Headers({"Content-Length": str(len(body))}), body)

    def session(self, connection: ServerConnection) -> None:
        self.open.append(connection)
        self.opened += 1
        try:
            if len(self.open) > self.most:
                connection.send(json.dumps(error("CAPACITY_REACHED", f"at capacity: {self.most}")))
                return
            secret = 0
            for message in connection:
                asked = json.loads(message)
                if asked["type"] == "reset":
                    secret = asked["data"]["secret"] if asked["data"] else 0
                    reply: Json | None = observed(text=f" It is below {secret + 10}.") if asked["data"] else observed()
                elif asked["data"].get("type") == "list_tools":
                    reply = observed(tools=LISTED)
                else:
                    reply = self.guessed(connection, secret, asked["data"])
                if reply is not None:
                    connection.send(json.dumps(reply))
        finally:
            self.open.remove(connection)

    def guessed(self, connection: ServerConnection, secret: int, action: Json) -> Json | None:
        number = action["arguments"]["number"] if self.mcp else action["number"]
        if number in self.faults:
            return self.faults[number](connection)
        right = number == secret
        words = {"tool_name": "guess", "result": {"data": right}, "error": None} if self.mcp else {"right": right}
        return observed(1.0 if right else -0.25, done=right, **words)


@contextmanager
def serving(server: Server) -> Iterator[str]:
    with serve(server.session, "127.0.0.1", 0, process_request=server.schema) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.socket.getsockname()[1]}"
        listening.shutdown()
        thread.join()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with serving(server) as found:
        yield found


def made(url: str, **options: Any) -> EnvironmentClass:
    kind = openenv(url)
    return EnvironmentClass(kind, byte_chat(tools_of(kind)), **options)


class Game(Said):
    """A response to a row of the environment."""

    def __init__(self, environment: EnvironmentClass, rollout: int = 0, **row: Any) -> None:
        columns = environment.begun({"prompt": "?", **row})
        prompt = Prompt(rollout, rollout, np.array([65], np.int32), columns=columns)
        super().__init__(environment, prompt, environment.chat.tokenizer)

    async def guess(self, name: str = "guess", **arguments: Any) -> str | Drop | None:
        answer = await self.say(call(name, **arguments) * bool(arguments))
        return self.tokenizer.decode_whole(answer.tokens.tolist()) if isinstance(answer, Answer) else answer


async def closed(server: Server) -> None:
    with anyio.fail_after(5):
        while server.open:  # noqa: ASYNC110 - threads of the server empty it
            await anyio.sleep(0.01)


async def test_a_response_has_a_session_which_is_closed_at_its_end(server: Server, url: str) -> None:
    async with made(url) as environment:
        await closed(server)
        games = [Game(environment, rollout, secret=7) for rollout in range(2)]
        await closed(server)  # those that rows were read with
        assert games[0].prompt.columns["prompt"] == "? It is below 17."
        for game in games:
            assert "false" in str(await game.guess(number=3))
        assert len(server.open) == 2
        assert "true" in str(await games[0].guess(number=7))
        assert "the episode is over" in str(await games[0].guess(number=7))
        assert await games[0].guess() is None
        assert await games[0].reward() == 0.75
        assert await games[1].reward() == -0.25  # cut
        await closed(server)
        lost = Game(environment, 2, secret=7)
        assert "false" in str(await lost.guess(number=3))
        assert len(server.open) == 1
    await closed(server)


async def test_a_session_that_is_gone_is_made_again_of_its_calls(server: Server, url: str) -> None:
    async with made(url) as environment:
        game = Game(environment, secret=7)
        await game.guess(number=3)
    async with made(url) as environment:
        game.environment = environment
        assert "true" in str(await game.guess(number=7))
        assert await game.reward() == 0.75


async def test_a_server_without_tools_has_a_step(server: Server, url: str) -> None:
    server.mcp = False
    (step,) = tools_of(openenv(url))
    assert tool_schema(step)["function"] == {
        "name": "step",
        "description": "Guess.",
        "parameters": {"title": "Guess", "description": "Guess.", **NUMBER},
    }
    async with made(url) as environment:
        game = Game(environment, secret=7)
        assert '{"right": true}' in str(await game.guess("step", number=7))
        assert await game.reward() == 1.0


@pytest.mark.parametrize("mcp", [True, False])
async def test_an_action_that_is_refused_is_told_to_the_policy(server: Server, url: str, *, mcp: bool) -> None:
    server.mcp = mcp
    fault = {"loc": ["number"], "msg": "Input should be less than 100"}
    server.faults[101] = lambda session: error("VALIDATION_ERROR", "Invalid message", errors=[fault])
    server.faults[102] = lambda session: observed(error={"error_type": "execution_error", "message": "a bad number"})
    name = "guess" if mcp else "step"
    async with made(url) as environment:
        game = Game(environment, secret=7)
        assert "Error: ValueError: Invalid message; number: Input should be less than 100" in str(
            await game.guess(name, number=101)
        )
        if mcp:
            assert "Error: ValueError: a bad number" in str(await game.guess(name, number=102))
        assert "true" in str(await game.guess(name, number=7))
        assert await game.reward() == 1.0


async def test_a_session_that_dies_drops_its_rollout_or_has_no_reward(server: Server, url: str) -> None:
    server.faults[13] = lambda session: session.close()
    async with made(url, on_failure="drop") as environment:
        dropped = await Game(environment, secret=7).guess(number=13)
        assert isinstance(dropped, Drop)
        assert f"the session of the OpenEnv server {url} was lost" in dropped.reason
    async with made(url) as environment:
        game = Game(environment, secret=7)
        assert "Error: ConnectionError: the session of" in str(await game.guess(number=13))
        with pytest.raises(
            EnvironmentFailure, match=r"get_reward\(\) of the environment raised ConnectionError: the session"
        ):
            await game.reward()
    await closed(server)


async def test_a_call_without_an_answer_ends_its_session(server: Server, url: str) -> None:
    server.faults[13] = lambda session: None
    async with made(url, timeout=1) as environment:
        game = Game(environment, secret=7)
        assert "Error" in str(await game.guess(number=13))
        assert "an earlier call has not been answered" in str(await game.guess(number=7))
        with pytest.raises(EnvironmentFailure, match="an earlier call has not been answered"):
            await game.reward()
    await closed(server)


async def test_a_server_without_room_says_what_to_raise(server: Server, url: str) -> None:
    async with made(url) as environment:
        await closed(server)
        server.most = 0
        with pytest.raises(EnvironmentFailure, match=r"at capacity: 0: raise its max_concurrent_envs"):
            Game(environment, secret=7)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (
            b"<html>Welcome</html>",
            "is of no OpenEnv server: expected JSON with the schema of actions, got '<html>Welcome",
        ),
        (b'{"detail": "no"}', "is of no OpenEnv server"),
    ],
)
def test_another_page_is_no_server(page: bytes, words: str) -> None:
    with serving(Server(page=page)) as url, pytest.raises(ConfigError, match=words):
        openenv(url)


def test_a_server_that_is_away_is_named(server: Server) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"no OpenEnv server answers at {away}/schema: .*; start it"):
        openenv(away)
    with pytest.raises(ConfigError, match="expected the URL of an OpenEnv server"):
        openenv("localhost:8000")
    with serving(server) as url:
        kind = openenv(url)
    with pytest.raises(ConnectionError, match="no OpenEnv server opens a session at ws://127"):
        kind().reset()


@pytest.mark.parametrize(
    ("listed", "words"), [([], "has no tools"), ([{**LISTED[0], "name": "get_reward"}], "rename it")]
)
def test_tools_that_cannot_be_called_are_refused(
    url: str, listed: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_openenv.LISTED", listed)
    with pytest.raises(ConfigError, match=words):
        openenv(url)


SETTINGS = """
[run]
steps = 2
panel = "off"
[models]
policy = "actor"
[data]
prompts = "prompts.jsonl"
chat_template = "qwen3.jinja"
max_prompt_tokens = 1500
[environment]
factory = "openenv:{url}"
max_turns = 2
[sampling]
max_new_tokens = 300
stop = ["<|im_end|>", 10, 30, 50, 70, 90, 110, 130, 150, 170, 190]
[step]
algorithm = "grpo"
batch = 2
overcommit = 1
[algorithm]
samples = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"prompt": [{"role": "user", "content": "Guess."}], "secret": number % 3} for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def calls(chat: ChatFormat, tokens: list[int]) -> ParsedTurn:  # a random policy calls nothing
        (name,) = chat.tools
        return ParsedTurn("", tool_calls=tuple(ToolCall(name, {"number": each % 3}) for each in tokens[:1]))

    monkeypatch.setattr(ChatFormat, "parse", calls)
    return talker(tmp_path)


def trains(folder: Path, url: str) -> None:
    (folder / "config.toml").write_text(SETTINGS.format(url=url))
    assert oppo(folder, "") == DONE
    lines = records(folder, "run", "metrics.jsonl")
    assert [line["trained"] for line in lines] == [4, 4]
    assert sum(line["tools/call_frequency"] for line in lines) > 0
    samples = records(folder, "run", "samples.jsonl")
    assert all("It is below" in sample["prompt"] for sample in samples)
    assert {sample["score"] for sample in samples} <= {-0.5, -0.25, 0.0, 0.75, 1.0}
    assert len({sample["score"] for sample in samples}) > 1


def test_a_run_trains_with_the_environment_of_a_server(
    server: Server, url: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trains(folder, url)
    anyio.run(closed, server)
    assert oppo(folder, "", "environment.factory=openenv:localhost:8000") == UNUSABLE
    assert "environment.factory: expected file.py:name, or openenv:URL" in capfd.readouterr().err
    assert oppo(folder, "", f"environment.factory=openenv:http://127.0.0.1:{free_port()}", "run.name=away") == UNUSABLE
    assert "no OpenEnv server answers at" in capfd.readouterr().err


REAL = """
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Said(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, secret=0, **row):
        self.secret, self.steps = secret, 0
        return Said(text=f" It is below {secret + 10}.")

    def step(self, action, timeout_s=None, **more):
        self.steps += 1
        right = action.number == self.secret
        return Said(text=str(right), reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return State(step_count=self.steps)


class Listing(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        served = FastMCP("guessing")

        @served.tool
        def guess(number: int) -> str:
            \"\"\"Guess the number.\"\"\"
            return str(number == self.secret)

        super().__init__(served)

    def reset(self, seed=None, episode_id=None, secret=0, **row):
        self.secret, self.steps = secret, 0
        return Said(text=f" It is below {secret + 10}.")

    async def step_async(self, action, timeout_s=None, **more):
        said = await super().step_async(action, timeout_s, **more)
        if isinstance(action, CallToolAction) and said.error is None:
            right = said.result.data == "True"
            said.reward, said.done = 1.0 if right else -0.25, right
        return said

    def _step_impl(self, action, timeout_s=None, **more):
        raise NotImplementedError

    @property
    def state(self):
        return State(step_count=self.steps)


kinds = {"action": (Guessing, Guess, Said), "tools": (Listing, Action, Observation)}
app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""


@pytest.fixture(params=["action", "tools"])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server of OpenEnv's own classes, whose packages exclude those of verifiers."""
    (tmp_path / "real.py").write_text(REAL)
    port = free_port()
    python = Path(sys.prefix) / "openenv" / "bin" / "python"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen([python, tmp_path / "real.py", request.param, str(port)], env=environment) as process:
        for _ in range(3000):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.mark.gym
async def test_a_server_of_openenv_answers_calls_and_rewards_them(real: str) -> None:
    async with made(real) as environment:
        (name,) = environment.names
        game, other = (Game(environment, rollout, secret=7) for rollout in range(2))
        assert game.prompt.columns["prompt"] == "? It is below 17."
        assert "Error" in str(await game.guess(name, number="seven"))
        assert "False" in str(await game.guess(name, number=3))
        assert "False" in str(await other.guess(name, number=4))
        assert "True" in str(await game.guess(name, number=7))
        assert await game.reward() == 0.75
        assert await other.reward() == -0.25


@pytest.mark.gym
def test_a_run_trains_with_a_server_of_openenv(real: str, folder: Path) -> None:
    trains(folder, real)
