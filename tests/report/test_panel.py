"""The panel, and a terminal, a pipe or a file that goes away: nothing ends, and nothing else is hidden."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from oppo.errors import counted
from oppo.evaluation import Evaluated
from oppo.evaluation.evaluate import BEFORE
from oppo.events import Defer, StepReport
from oppo.graph import Snapshot, Wait
from oppo.liveness import Stall
from oppo.observe import Expendable, Span
from oppo.report import Panel
from oppo.report.panel import Display, displays, line
from tests.report.synthetic import batch, chunk, decode, finish, play, prompt, report


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, color_system=None), out


def shown(panel: Panel) -> str:
    where, out = console(terminal=True)
    where.print(panel.render())
    return out.getvalue()


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    where, out = console(terminal=False)
    with Panel(where, 2, live=False, decode=decode) as panel:
        play(panel)
    assert out.getvalue().splitlines() == [
        "step 1/2  score 0.500  kl 0.000  length 2  2 tokens/s  deferred 1 response  2.00 s",
        "step 2/2  score -  kl 0.250  length 2  2 tokens/s  deferred 0 responses  dropped 1 response  2.00 s",
    ]


def test_a_distillation_shows_the_distance_to_its_teacher_in_place_of_a_score_that_it_does_not_have() -> None:
    metrics = {"objective/teacher_kl": 3.21, "response_length/tokens": 2468.0}
    alone, rewarded = (replace(report(0, (0,), score), metrics=metrics) for score in (0.0, 0.5))
    assert line(alone, 1, 9) == "step 1/9  teacher kl 3.210  1,234 tokens/s  deferred 0 responses  2.00 s"
    assert "teacher kl 3.210  score 0.500" in line(rewarded, 1, 9)


@pytest.mark.parametrize(("count", "said"), [(0, "0 responses"), (1, "1 response"), (1_024, "1,024 responses")])
def test_a_count_is_written_as_a_person_writes_it(count: int, said: str) -> None:
    assert counted(count, "response") == said
    step = StepReport(0, 1, (), (), tuple(Defer(number, 1) for number in range(count)), 0.5, 1.0, {})
    assert f"deferred {said}  " in line(step, 1, 1)
    panel = Panel(Console(), 1, live=True)
    panel.on_evaluation(0, count)
    assert (f"held-out prompts: 0 of {said}" in shown(panel)) == (count > 0)


def evaluated(step: int, score: float) -> Evaluated:
    return Evaluated(step, step + 1, {"eval/score": score, "eval/score_ci95": 0.05})


def test_the_panel_shows_how_far_an_evaluation_is_and_what_the_last_one_found() -> None:
    panel = Panel(Console(), 2, live=True, decode=decode)
    panel.on_evaluation(3, 12)
    assert "held-out prompts: 3 of 12 responses" in shown(panel)
    for step, score in ((BEFORE, 0.25), (1, 0.5)):
        panel.on_item(max(step, 0), "evaluate", evaluated(step, score), 0.0)
    last = shown(panel)
    assert "held-out 0.500 +- 0.050, 0.250 at first" in last
    assert "of 12 responses" not in last


def test_without_a_terminal_the_first_evaluation_has_a_line_and_the_others_are_in_those_of_their_steps() -> None:
    where, out = console(terminal=False)
    with Panel(where, 2, live=False, decode=decode) as panel:
        panel.on_item(0, "evaluate", evaluated(BEFORE, 0.25), 0.0)
        panel.on_item(0, "evaluate", evaluated(0, 0.5), 0.0)
        panel.on_step(0, replace(report(0, (0,), 0.5), metrics={"eval/score": 0.5}), {})
    first, second = out.getvalue().splitlines()
    assert first == "before the first step  held-out 0.250 +- 0.050"
    assert "  held-out 0.500  " in second


def test_the_panel_shows_how_the_devices_are_used() -> None:
    panel = Panel(Console(), 2, live=True, decode=decode)
    metrics = {
        "perf/mfu/decode": 0.021,
        "perf/mfu/update": 0.4,
        "perf/mfu/score": 1.1,
        "memory/allocated": 61.25,
        "memory/reserved": 70.0,
    }
    panel.on_step(0, replace(report(0, (0,), 0.5), metrics=metrics), {})
    assert "decode MFU 2.1%  update MFU 40.0%  61.2 GiB allocated  70.0 GiB reserved" in shown(panel)


def test_what_models_say_cannot_steer_the_terminal_or_the_markup() -> None:
    panel = Panel(Console(), 2, live=True, decode=lambda tokens: "[red]a\x1b[31mb[/nonsense]\u202e\n")
    panel.on_item(0, "advantage", batch([finish(0, 1)], [1.0]), 0.0)
    assert "[red]a\\x1b[31mb[/nonsense]\\u202e / " in shown(panel)
    assert "\x1b[31m" not in shown(panel)


def test_a_live_panel_leaves_the_terminal_as_it_was() -> None:
    where, out = console(terminal=True)
    with Panel(where, 2, live=True, decode=decode) as panel:
        play(panel)
    assert out.getvalue().endswith("\x1b[?25h")
    assert "step 2/2" in out.getvalue()


BOUND = {f"bottleneck/{part}": 0.0 for part in ("decode", "cap", "score", "scoring", "capped", "finished")}
BOUND |= {"bottleneck/tail": 0.25, "bottleneck/train": 0.75, "bottleneck/limit": 1.25}
BOUND |= {"bottleneck/limit_stream": 1.0, "bottleneck/limit_defer": 1.25, "bottleneck/limit_lookahead": 1.0}


def test_a_step_and_the_last_of_them_say_what_they_are_bound_by() -> None:
    step = replace(report(0, (0,), 0.5), metrics=BOUND)
    bare = StepReport(0, 1, (), (), (Defer(1, 1),), float("nan"), 0.5, {})
    assert line(bare, 1, 9) == "step 1/9  score -  deferred 1 response  0.50 s"
    assert line(step, 1, 9) == "step 1/9  score 0.500  deferred 0 responses  train-bound  2.00 s"
    panel = Panel(Console(), 2, live=True)
    panel.on_step(0, step, {})
    assert "the update takes 75% of the step" in shown(panel)
    assert "defer more stragglers: at most 1.2 times as fast" in shown(panel)


STUCK = Snapshot(0, ("reward", "advantage"), (Wait("advantage", "reward", "an item"),), {}, "")


def rows(panel: Panel) -> dict[str, str]:
    words = [row.strip("│ \n").split(maxsplit=1) for row in shown(panel).splitlines() if " sent" in row]
    return {stage: " ".join(said.split()) for stage, said in words}


def test_the_panel_keeps_steps_in_flight_apart() -> None:
    at = 0.0
    panel = Panel(Console(), 9, live=True, clock=lambda: at)
    panel.watch(lambda: [STUCK, Snapshot(1, ("generate",), (Wait("generate", "prompts", "an item"),), {}, "")])
    for item in (prompt(0), chunk(0, 0, 1, 3, 4)):
        panel.on_item(0, "generate", item, 0.0)
    for rollout in (0, 1):
        panel.on_item(0, "reward", finish(rollout, 1), 0.0)
    panel.on_span(Span("reward", "finish", 0.0, 0.5, 0, "score"))
    panel.on_span(Span("generate", "run", 0.0, 3.0, 0, kind="execution"))
    assert rows(panel) == {"generate": "step 1/9 done in 3.00 s, 2 sent", "reward": "step 1/9 working, 2 sent"}
    panel.on_item(0, "advantage", batch([finish(0, 1)], [1.0]), 3.0)
    at = 3.0
    panel.on_item(1, "generate", prompt(2), 3.0)
    at = 4.0
    panel.on_item(1, "generate", chunk(2, 0, 1, 2), 4.0)
    panel.on_step(0, report(0, (0,), 0.5), {})
    panel.on_item(0, "generate", Defer(9, 1), 4.0)  # as a stage returns something from observe()
    assert rows(panel) == {
        "generate": "step 2/9 waits for prompts, 2 sent",
        "reward": "step 1/9 working, 2 sent",
        "advantage": "step 1/9 waits for reward, 1 sent",
    }
    assert "step 2/9: 2 tokens, 2 tokens/s" in shown(panel)


def test_the_latest_notices_are_shown_without_secrets_and_control_characters() -> None:
    panel = Panel(Console(), 2, live=True)
    for message in ("first", "second", "the judge failed at https://me:canary@host\x1b[31m", "[bold]last\nline"):
        panel.on_notice(message)
    said = [line.strip("│ ") for line in shown(panel).splitlines()]
    assert said[-5:-2] == ["second", "the judge failed at https://***@host\\x1b[31m", "[bold]last / line"]
    assert "first" not in shown(panel).replace("waiting for the first step", "")
    assert "canary" not in shown(panel)


def test_a_stall_is_shown_until_something_moves() -> None:
    panel = Panel(Console(), 2, live=True)
    panel.on_stall(Stall(60, [STUCK]))
    assert "nothing has moved for 60 s: in step 0 advantage waits for reward; reward is at work" in shown(panel)
    panel.on_item(0, "reward", prompt(0), 0.0)
    assert "nothing has moved" not in shown(panel)
    where, out = console(terminal=False)
    Panel(where, 2, live=False).on_stall(Stall(60, [STUCK]))
    assert out.getvalue() == "nothing has moved for 60 s: in step 0 advantage waits for reward; reward is at work\n"


def broken_pipe() -> io.TextIOWrapper:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full() -> io.TextIOWrapper:
    return Path("/dev/full").open("w")


def vanished() -> io.TextIOWrapper:
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
    with Panel(Console(file=display), 2, live=True) as panel:  # type: ignore[arg-type]  # it is one, as far as rich asks
        play(panel)
    assert panel._done == 2
    gone.write("and so does what is written past it\n")
    gone.flush()


def test_words_that_a_display_cannot_spell_are_shown_all_the_same() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", write_through=True)
    Display(stream).write("caf\N{LATIN SMALL LETTER E WITH ACUTE}\n")
    assert raw.getvalue() == b"caf\\xe9\n"


def test_standard_streams_are_displays_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
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
