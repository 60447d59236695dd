"""Where the messages of library code go."""

from __future__ import annotations

import subprocess
import sys
import threading

import anyio
import pytest
import structlog

from oppo.log import logger, routed, with_route
from oppo.placement import Thread


def test_messages_of_two_runs_do_not_mix() -> None:
    one, other = list[str](), list[str]()

    async def run(name: str, sink: list[str], turn: anyio.Event, then: anyio.Event) -> None:
        with routed(sink.append):
            logger.info(f"{name} begins")
            then.set()
            await turn.wait()
            await anyio.to_thread.run_sync(logger.info, f"{name} goes on")

    async def main() -> None:
        first, second = anyio.Event(), anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "one", one, first, second)
            tasks.start_soon(run, "other", other, second, first)

    anyio.run(main)
    assert one == ["one begins", "one goes on"]
    assert other == ["other begins", "other goes on"]


def test_an_inner_route_takes_messages_or_passes_them_on() -> None:
    outer, inner = list[str](), list[str]()
    with routed(outer.append):
        with routed(inner.append):
            logger.info("kept")
        with routed(inner.append, onward=True):
            logger.warning("passed on")
        with routed():
            logger.warning("heard by nobody")
        logger.info("after")
    assert inner == ["kept", "passed on"]
    assert outer == ["passed on", "after"]


def test_what_is_said_once_is_said_once_on_each_route(messages: list[str]) -> None:
    other = list[str]()
    for _ in range(2):
        logger.once("asking a hub")
    with routed(other.append):
        logger.once("asking a hub")
    assert messages == other == ["asking a hub"]


async def test_the_thread_of_a_place_says_what_it_does_where_its_caller_does() -> None:
    said = list[str]()
    with Thread("reward") as place:
        await place.call("begin", int)
        with routed(said.append):
            await place.call("score", logger.info, "scoring")
    assert said == ["scoring"]


def test_work_is_carried_to_a_thread(messages: list[str]) -> None:
    thread = threading.Thread(target=with_route(logger.info), args=("in a thread",))
    thread.start()
    thread.join()
    assert messages == ["in a thread"]


def test_a_thread_that_outlives_a_route_speaks_where_messages_went_before(messages: list[str]) -> None:
    inner = list[str]()
    with routed(inner.append):
        late = with_route(logger.warning)
    late("the function has returned")
    assert (inner, messages) == ([], ["the function has returned"])


def test_without_a_route_messages_are_harmless_on_standard_error() -> None:
    program = "from oppo.log import logger; logger.warning('the service is left alone\x1b[2J https://u:secretpw@host')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "the service is left alone\\x1b[2J https://***@host" in done.stderr
    assert "warning" in done.stderr


def test_without_a_route_structlog_decides_if_it_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        with structlog.testing.capture_logs() as captured:
            logger.warning("the service is left alone")
    finally:
        structlog.reset_defaults()
    assert captured == [{"event": "the service is left alone", "log_level": "warning"}]
    assert capsys.readouterr() == ("", "")
