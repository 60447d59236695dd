"""The log of a run says how it began, what it met and how it ended."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from oppo.admission.bottleneck import SCHEDULES
from oppo.events import Drop, StepReport
from oppo.graph import Snapshot, Wait
from oppo.liveness import Stall
from oppo.report import RunLog


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(score: float) -> StepReport:
    return StepReport(3, 4, (1, 2), (Drop(5, "nonfinite"),), (), score, 1.5, {})


BOUND = dict.fromkeys(("decode", "tail", "cap", "score", "train", "scoring", "capped", "finished"), 0.125)
BOUND |= {"decode": 0.5, "limit": 1.23456, **{f"limit_{schedule}": 1.0 for schedule in SCHEDULES}}
BOUND = {f"bottleneck/{name}": value for name, value in BOUND.items()}


def test_a_log_begins_with_versions_and_tells_steps_and_drops(tmp_path: Path) -> None:
    with RunLog(tmp_path / "log.jsonl", "trial") as log:
        log.on_step(3, replace(report(0.25), metrics=BOUND), {})
        log.on_step(4, report(float("nan")), {})
    begin, dropped, step, _, unscored, end = lines(tmp_path / "log.jsonl")
    assert begin["event"] == "begin"
    assert "numpy" in str(begin["libraries"])
    assert (dropped["level"], dropped["rollout"], dropped["reason"]) == ("warning", 5, "nonfinite")
    assert (step["score"], step["trained"], step["run"]) == (0.25, 2, "trial")
    assert (step["bottleneck"], step["limit"]) == ("decode", 1.235)
    assert unscored["score"] is None
    assert end["event"] == "end"


def fail(path: Path, secret: str, message: str = "no score") -> None:
    with RunLog(path, "trial"):
        error = ValueError(message)
        error.add_note("in stage 'reward'")
        assert secret is not None
        raise error


def test_a_failure_is_logged_with_its_notes_and_without_the_values_of_variables(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no score"):
        fail(tmp_path / "log.jsonl", "canary")
    text = (tmp_path / "log.jsonl").read_text(encoding="utf-8")
    assert "canary" not in text.replace("fail(tmp_path", "")
    last = lines(tmp_path / "log.jsonl")[-1]
    assert (last["event"], last["notes"]) == ("failed", ["in stage 'reward'"])


class OwnError(BaseException):
    """Of user code that derived it from BaseException."""


def test_a_run_that_an_error_of_any_kind_ends_has_failed(tmp_path: Path) -> None:
    for kind, event in ((OwnError, "failed"), (GeneratorExit, "failed"), (KeyboardInterrupt, "interrupted")):
        with pytest.raises(kind), RunLog(tmp_path / "log.jsonl", "trial"):
            raise kind
        assert lines(tmp_path / "log.jsonl")[-1]["event"] == event


class Unprintable(Exception):  # noqa: N818 - as user code may call it
    def __str__(self) -> str:
        raise SystemExit(3)


def raised(kind: type[Exception]) -> Exception:
    with pytest.raises(kind) as caught:
        raise kind
    return caught.value


@pytest.mark.parametrize("behind", [False, True])
def test_an_error_that_cannot_be_printed_is_logged(tmp_path: Path, behind: bool) -> None:
    def fall() -> None:
        if not behind:
            raise Unprintable
        raise RuntimeError("no score") from raised(Unprintable)

    with pytest.raises((Unprintable, RuntimeError)), RunLog(tmp_path / "log.jsonl", "demo"):
        fall()
    last = lines(tmp_path / "log.jsonl")[-1]
    (shown,) = cast("list[dict[str, Any]]", last["exception"])
    assert last["event"] == "failed"
    assert shown["exc_type"] == ("RuntimeError" if behind else "Unprintable")
    assert ("no score" if behind else "SystemExit in its __str__") in shown["exc_value"]
    assert shown["frames"][-1]["name"] == "fall"


def test_a_stall_is_logged_with_what_each_stage_does(tmp_path: Path) -> None:
    stuck = Snapshot(1, ("reward", "advantage"), (Wait("advantage", "reward", "an item"),), {}, "")
    with RunLog(tmp_path / "log.jsonl", "trial") as log:
        log.on_stall(Stall(61.234, [stuck, replace(stuck, step=2, running=("generate",))]))
        log.on_stall(Stall(3.0, final=True, calls=("agent 'solve'",), blocked=" at agent.py:7 in solve"))
    _, first, second, _ = lines(tmp_path / "log.jsonl")
    assert (first["event"], first["level"], first["seconds"]) == ("stalled", "warning", 61.2)
    assert first["steps"] == {"1": {"reward": "at work", "advantage": "waits for reward"}, "2": {"generate": "at work"}}
    assert (second["steps"], second["final"]) == ({}, True)
    assert (second["calls"], second["blocked"]) == (["agent 'solve'"], "at agent.py:7 in solve")


def test_an_interrupt_is_logged_with_the_steps_that_end_first(tmp_path: Path) -> None:
    with RunLog(tmp_path / "log.jsonl", "trial") as log:
        log.on_interrupt(signal.SIGTERM, [3, 4])
    line = lines(tmp_path / "log.jsonl")[1]
    assert (line["event"], line["by"], line["steps"]) == ("interrupted", "SIGTERM", [4, 5])


def test_secrets_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "canary-canary")
    with RunLog(tmp_path / "log.jsonl", "trial") as log:
        log.note("asked", url="https://me:canary@host/", token="canary-canary")
    assert lines(tmp_path / "log.jsonl")[1]["url"] == "https://***@host/"
    assert "canary" not in (tmp_path / "log.jsonl").read_text()


def test_a_message_of_megabytes_is_cut_before_anything_is_done_with_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with suppress(ValueError):
        fail(path, "", "x" * 5_000_000)
    with RunLog(path, "trial") as log:
        log.on_step(3, replace(report(0.25), dropped=(Drop(5, "x" * 5_000_000),)), {})
        log.notice("\ud800" + "x" * 5_000_000)
    assert path.stat().st_size < 200_000
    assert "(5000000 characters)" in path.read_text()
