"""The pipes between the ruler and a contestant, with contestants of a few lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.ladder.contestant import Contestant, Entry, StepRecord, start
from oppo.errors import ModelLost, ProtocolError

HONEST = """
import json, sys
print(json.dumps({"ready": {"threads": 1}}), flush=True)
for line in sys.stdin:
    n = json.loads(line)["run"]
    step = {"seconds": 0.5, "tokens": 10, "samples": 2, "mean_length": 5}
    print(json.dumps({"steps": [step] * n, "peak_rss_mb": 12.5}), flush=True)
"""
DYING = 'print(\'{"ready": {}}\', flush=True); input(); raise SystemExit("no such kernel")'
FAILING = 'print(\'{"error": "too many tokens"}\', flush=True); input()'


def started(program: str, folder: Path, patience: float = 60.0) -> Contestant:
    return Contestant("peer", [sys.executable, "-c", program], log=folder / "peer.log", patience=patience)


def asked(program: str, folder: Path, patience: float = 60.0) -> None:
    """Ask for two steps, once it is ready."""
    with started(program, folder, patience) as contestant:
        contestant.ready()
        contestant.run(2)


def test_a_contestant_runs_steps_when_asked_and_ends_with_its_input(tmp_path: Path) -> None:
    with started(HONEST, tmp_path) as contestant:
        assert contestant.ready() == {"threads": 1}
        assert [step.seconds for step in contestant.run(2)] == [0.5, 0.5]
        assert [step.tokens for step in contestant.run(1)] == [10]
        assert contestant.peak_rss_mb == 12.5


@pytest.mark.parametrize(
    ("program", "patience", "named"),
    [(DYING, 60.0, "no such kernel"), (FAILING, 60.0, "too many tokens"), ("input()", 0.05, "answered")],
    ids=["dead", "failed", "silent"],
)
def test_a_contestant_that_gives_no_answer_is_lost(tmp_path: Path, program: str, patience: float, named: str) -> None:
    with pytest.raises(ModelLost, match=f"(?s)'peer'.*{named}"):
        asked(program, tmp_path, patience)


@pytest.mark.parametrize(
    "program",
    [*(f"print({said!r}, flush=True); input()" for said in ("loading...", "[1]", '{"steps": []}')),
     HONEST.replace("[step] * n", "[step]"), HONEST.replace('"tokens": 10', '"tokens": 0')],
    ids=["text", "list", "not ready", "too few steps", "nothing trained"],
)  # fmt: skip
def test_any_other_answer_breaks_the_protocol(tmp_path: Path, program: str) -> None:
    with pytest.raises(ProtocolError):
        asked(program, tmp_path)


def test_a_contestant_is_of_this_checkout_wherever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = "import benchmarks, json; print(json.dumps({'ready': {'root': str(benchmarks.CHECKOUT)}}), flush=True)"
    with start(Entry("worker", (sys.executable, "-c", program)), tmp_path) as contestant:
        assert contestant.ready() == {"root": str(CHECKOUT)}


def test_a_record_survives_the_pipe() -> None:
    record = StepRecord(4.0, 100, 10, capped=1, busy={"actor": 2.0}, bottleneck={"bottleneck/train": 0.5})
    assert StepRecord.of({**record.as_json(), "mean_length": 10}) == record
