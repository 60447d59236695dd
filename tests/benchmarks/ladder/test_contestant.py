"""The pipes between the ruler and a contestant, with contestants of a few lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.ladder.contestant import Contestant
from benchmarks.ladder.rounds import Entry, start
from oppo.errors import ModelLost, ProtocolError

HONEST = """
import json, sys
print(json.dumps({"ready": {"threads": 1}}), flush=True)
for line in sys.stdin:
    n = json.loads(line)["run"]
    step = {"seconds": 0.5, "tokens": 10, "samples": 2, "mean_length": 5}
    print(json.dumps({"steps": [step] * n, "peak_rss_mb": 12.5}), flush=True)
"""


def started(program: str, folder: Path, patience: float = 60.0) -> Contestant:
    return Contestant("peer", [sys.executable, "-c", program], log=folder / "peer.log", patience=patience)


def test_a_contestant_runs_steps_when_asked_and_ends_with_its_input(tmp_path: Path) -> None:
    with started(HONEST, tmp_path) as contestant:
        assert contestant.ready() == {"threads": 1}
        assert [step.seconds for step in contestant.run(2)] == [0.5, 0.5]
        assert [step.tokens for step in contestant.run(1)] == [10]
        assert contestant.peak_rss_mb == 12.5


def test_a_contestant_that_dies_is_an_error_with_what_it_said_last(tmp_path: Path) -> None:
    program = 'print(\'{"ready": {}}\', flush=True); input(); raise SystemExit("no such kernel")'
    with started(program, tmp_path) as dying:
        dying.ready()
        with pytest.raises(
            ModelLost, match=r"'peer' was to run 1 steps and ended with exit code 1.*\n.*no such kernel"
        ):
            dying.run(1)


def test_a_contestant_that_says_it_failed_is_believed(tmp_path: Path) -> None:
    with (
        started('print(\'{"error": "too many tokens"}\', flush=True); input()', tmp_path) as failing,
        pytest.raises(ModelLost, match="could not get ready: too many tokens"),
    ):
        failing.ready()


@pytest.mark.parametrize("said", ["loading...", "[1]", '{"steps": []}'])
def test_anything_else_on_its_output_breaks_the_protocol(tmp_path: Path, said: str) -> None:
    with started(f"print({said!r}, flush=True); input()", tmp_path) as chatty, pytest.raises(ProtocolError):
        chatty.ready()


def test_fewer_steps_than_asked_for_break_the_protocol(tmp_path: Path) -> None:
    lazy = HONEST.replace("[step] * n", "[step]")
    with started(lazy, tmp_path) as contestant:
        contestant.ready()
        with pytest.raises(ProtocolError, match="asked for 2 steps"):
            contestant.run(2)


def test_a_contestant_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    with (
        started("import sys; sys.stdin.read()", tmp_path, patience=0.05) as silent,
        pytest.raises(ModelLost, match="has not answered"),
    ):
        silent.ready()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLost, match="/nowhere/python"):
        Contestant("peer", ["/nowhere/python"], log=tmp_path / "log")


def test_a_contestant_is_of_this_checkout_wherever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = "import benchmarks, json; print(json.dumps({'ready': {'root': str(benchmarks.CHECKOUT)}}), flush=True)"
    with start(Entry("worker", (sys.executable, "-c", program)), tmp_path) as contestant:
        assert contestant.ready() == {"root": str(CHECKOUT)}
