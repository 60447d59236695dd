"""A signal ends the start of an engine, whatever swallows a ``KeyboardInterrupt`` meanwhile."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from oppo.signals import SIGNALS, Stopped, stoppable
from oppo.vllm.async_llm import heeded


@pytest.fixture(autouse=True)
def handled_by_default() -> Iterator[None]:
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_handler_is_called_when_the_body_has_ended(number: signal.Signals) -> None:
    steps: list[str] = []

    def start() -> None:
        with stoppable(), heeded():
            with suppress(KeyboardInterrupt):
                signal.raise_signal(number)
            steps.append("went on")

    with pytest.raises(Stopped) as caught:
        start()
    assert caught.value.by is number
    assert not steps
    assert signal.getsignal(number) is signal.default_int_handler


def test_a_handler_that_raises_nothing_ends_the_body_too() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    with pytest.raises(KeyboardInterrupt), heeded():
        signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGINT]


def test_an_error_of_the_body_and_what_is_ignored_stay_as_they_are() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with heeded():
        signal.raise_signal(signal.SIGHUP)
    with pytest.raises(ValueError, match="its own"), heeded():
        raise ValueError("its own")
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_no_handler_is_touched() -> None:
    seen: list[object] = []

    def work() -> None:
        with heeded():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
