"""A terminal, a pipe or a file that goes away ends nothing, and hides nothing but what is shown there."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from rich.console import Console

from oppo.observe import Expendable, Span
from oppo.report import Panel
from oppo.report.panel import Display, displays
from tests.report.synthetic import play


def broken_pipe() -> io.TextIOWrapper:
    """Return the writing end of a pipe from which nothing is read any more."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full() -> io.TextIOWrapper:
    return Path("/dev/full").open("w")


def vanished() -> io.TextIOWrapper:
    """Return a terminal whose other end is gone."""
    master, slave = os.openpty()
    os.close(master)
    return os.fdopen(slave, "w")


@pytest.fixture(params=[broken_pipe, full, vanished])
def gone(request: pytest.FixtureRequest) -> Iterator[io.TextIOWrapper]:
    with request.param() as stream:
        yield stream


def test_what_is_shown_on_a_display_that_is_gone_goes_nowhere(gone: io.TextIOWrapper) -> None:
    display = Display(gone)
    for _ in range(2):
        assert display.write("a line\n") == 7
        display.flush()
    assert Path(f"/proc/self/fd/{gone.fileno()}").readlink() == Path(os.devnull)
    gone.write("and so does what is written past it\n")
    gone.flush()


def test_a_panel_on_a_display_that_is_gone_goes_on(gone: io.TextIOWrapper) -> None:
    with Panel(Console(file=Display(gone)), 2, live=True) as panel:  # type: ignore[arg-type]  # it is one, as far as rich asks
        play(panel)
    assert panel._done == 2


def test_words_that_a_display_cannot_spell_are_shown_all_the_same() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", write_through=True)
    Display(stream).write("caf\N{LATIN SMALL LETTER E WITH ACUTE}\n")
    assert raw.getvalue() == b"caf\\xe9\n"


def test_standard_streams_are_displays_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout, sys.stderr
    with displays():
        assert isinstance(sys.stdout, Display)
        sys.stdout.write("out")
        sys.stderr.write("err")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("out", "err")


def test_an_observer_that_a_run_can_do_without_is_left_out_after_its_first_error(messages: list[str]) -> None:
    seen: list[int] = []

    class Fragile:
        def on_item(self, step: int, stage: str, item: object, at: float) -> None:
            seen.append(step)
            raise ZeroDivisionError("no room")

        def on_span(self, span: Span) -> None:
            raise AssertionError

        def on_step(self, step: int, result: object, channels: object) -> None:
            raise AssertionError

    play(Expendable(Fragile()))
    assert seen == [0]
    assert messages == ["Fragile has failed and is left out: ZeroDivisionError: no room"]


def test_what_user_code_logs_commands_nothing_and_says_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    err = io.StringIO()
    with redirect_stderr(err), displays():
        logging.getLogger("grader").warning("said %s of https://me:pw@host", "\x1b]0;owned\x07")
    assert err.getvalue() == "said \\x1b]0;owned\\x07 of https://***@host\n"
