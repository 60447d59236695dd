"""``oppo simulate`` on the command line: a real run, a profile, and what cannot be simulated."""

from __future__ import annotations

import json
import signal
import tomllib
from pathlib import Path

import pytest
import torch

from oppo.cli import main
from tests.kit.workplace import furnish, oppo, records

SCHEDULES = (
    "serial", "rollout", "chunk", "fixed", "adaptive", "lookahead 1", "lookahead 1, fixed", "in flight", "continuous",
)  # fmt: skip

PROFILE = """
[workload]
batch = 12
prompt = 100
[lengths]
median = 200
cap = 900
[models]
actor = "qwen2.5-3b"
critic = "qwen2.5-3b"
reward = "qwen2.5-7b"
[layout]
gpu = "h200"
decode = 1
train = 2
score = 1
forward = "train"
[schedule]
overcommit = 2
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("workplace"))
    torch.set_num_threads(1)
    few = ("run.steps=8", "run.panel=off", "run.checkpoint_every=0", "data.epochs=4")
    assert oppo(folder, "", "run.name=finished", *few) == 0
    summary = folder / "runs" / "unfinished" / "summary.json"
    assert oppo(folder, "", "run.name=unfinished", "run.steps=1", "run.panel=off") == 0
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "complete": False}))
    (folder / "profile.toml").write_text(PROFILE)
    return folder


def test_a_finished_run_is_simulated_in_every_schedule(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, figures = workplace / "runs" / "finished", workplace / "figures.json"
    assert main(["simulate", "--from", str(run), "--steps", "6", "--json", str(figures)]) == 0
    printed = capsys.readouterr()
    assert "as it ran, a step of as many tokens took" in printed.out
    assert "simulating 11 schedules: 6 steps, 1 of at most 32 seeds" in printed.err
    assert "leave it as it is:" in printed.out or "choose '" in printed.out
    assert "not simulated: streamed updates" in printed.out
    found = json.loads(figures.read_text())
    assert found["baseline"] == "as it ran"
    assert {"as it ran", *SCHEDULES} <= found["schedules"].keys()
    own = found["schedules"]["as it ran"]
    assert own["about"] == "overcommit, 2 deferred, chunk 4"
    assert own["speed"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    measured = [float(str(each["seconds"])) for each in records(workplace, "finished", "metrics.jsonl")[2:]]
    assert min(measured) / 2 < own["seconds"] < 2 * max(measured)


def test_a_run_says_how_long_each_model_worked(workplace: Path) -> None:
    work = records(workplace, "finished", "work.jsonl")
    assert [each["step"] for each in work] == list(range(1, 9))
    models = work[3]["models"]
    assert isinstance(models, dict)
    assert {"policy", "reference", "reward model", "critic", "trainer"} <= models.keys()
    calls, seconds = models["reward model"]["extend"]
    assert calls >= 1
    assert seconds > 0


def test_a_profile_is_simulated_and_what_is_advised_can_be_pasted(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = workplace / "advised.json"
    small = ["--set", "workload.batch=6", "--steps", "12", "--staleness", "9"]
    assert main(["simulate", str(workplace / "profile.toml"), *small, "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert all(any(line.startswith(name) for line in printed.splitlines()) for name in SCHEDULES)
    assert "serial *" in printed
    assert "GB in flight" in printed
    found = json.loads(figures.read_text())
    assert f"choose {found['recommended']!r}" in printed
    pasted = tomllib.loads(printed[printed.index("\n[step]\n") :])
    assert pasted == {"step": found["schedules"][found["recommended"]]["step"]}
    assert found["left_out"].keys() < found["schedules"].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "runs/nowhere"], "there is no run in runs/nowhere: expected the file runs/nowhere/metrics.jsonl"),
        (["--from", "runs/unfinished"], "the run in runs/unfinished has not finished"),
        (["gone.toml"], "cannot read the configuration gone.toml: No such file or directory"),
        ([], "oppo simulate needs either a profile, `oppo simulate profile.toml`, or `--from` and a run"),
        (["profile.toml", "--from", "runs/finished"], "oppo simulate needs either a profile"),
        (
            ["--from", "runs/finished", "--set", "a.b=1"],
            "--set changes a profile; a run is simulated as it was measured",
        ),
        (["profile.toml", "--set", "lengths.median=-1"], "lengths.median: expected more than 0, got -1"),
        (["profile.toml", "--steps", "5"], "--steps must be at least 6"),
        (["profile.toml", "--seeds", "0"], "--seeds must be at least 1"),
        (["profile.toml", "--layout", "split"], "--layout says what shared the devices of a run (--from)"),
        (
            ["profile.toml", "--set", "schedule.overcommit=99"],
            "schedule.overcommit: expected at most workload.batch = 12, got 99",
        ),
        (["profile.toml", "--seeds", "3", "--precise"], "--precise says how many seeds there are"),
        (["profile.toml", "--staleness", "-1"], "--staleness must be at least 0"),
        (["profile.toml", "--json", "gone/figures"], "--json names a file to write in a directory that is there, and "),
        (["profile.toml", "--json", "runs"], "--json names a file to write in a directory that is there, and "),
    ],
)
def test_what_cannot_be_simulated_is_said(
    arguments: list[str],
    message: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(workplace)
    assert main(["simulate", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed.replace("\n", " ")
    assert "Traceback" not in printed


def test_a_run_whose_turns_an_environment_answered_is_refused(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    config = workplace / "runs" / "finished" / "config.toml"
    text = config.read_text()
    (workplace / "tool.py").write_text("def answer(turn):\n    return None\n")
    try:
        before, section, after = text.partition('[environment]\nsource = ""')
        assert section
        config.write_text(f'{before}[environment]\nsource = "{workplace / "tool.py"}:answer"{after}')
        assert main(["simulate", "--from", "runs/finished"]) == 2
    finally:
        config.write_text(text)
    assert (
        "whose answers a simulation does not know yet: give a run without environment.source" in capsys.readouterr().err
    )


def test_a_signal_ends_it_with_a_message(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oppo.run.simulation.study", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert main(["simulate", str(workplace / "profile.toml")]) == 128 + signal.SIGTERM
    printed = capsys.readouterr()
    assert printed.err == "interrupted by SIGTERM\n"
    assert printed.out == ""


OTHERS = (
    ("summary.json", '{"complete": true, "steps": "many"}', "has not finished"),
    ("metrics.jsonl", '{"step": 8, "trained": "x", "timing_s/update": 1, "timing_s/weight_sync": 1}', "cannot be used"),
    ("journal.jsonl", '{"step": 0, "event": "finished"}', "the records in runs/finished cannot be used"),
    ("journal.jsonl", '{"step": 0, "event": "admitted", "rollout": [], "group": 0}', "cannot be used"),
    ("work.jsonl", '{"step": 8, "models": {"reference": 3}}', "cannot be used"),
)


@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_records_that_hold_something_else_are_an_error(
    other: tuple[str, str, str], workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    file, line, message = other
    record = workplace / "runs" / "finished" / file
    text = record.read_text()
    try:
        record.write_text(line if file == "summary.json" else text + line + "\n")
        assert main(["simulate", "--from", "runs/finished", "--steps", "6", "--seeds", "1"]) == 2
    finally:
        record.write_text(text)
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
