"""``oppo train`` with steps in flight: exact at any place of its models, resumed where nothing was alive, and ended."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from oppo.cli import DONE, FAILED, main
from oppo.config.load import load
from oppo.config.settings import Settings
from oppo.events import Chunk, Scored
from oppo.run.checkpoint import CHECKPOINTS
from oppo.run.deployment import Deployment
from oppo.run.train import prepare, run
from oppo.testing import Recorder
from tests.kit.workplace import oppo, records, require_bounded_staleness, resume, start, weights
from tests.report.synthetic import all_nested

EXACT = ("run.deterministic=true", "run.panel=off", "step.batch=4", "step.overcommit=2")
AHEAD = ("step.lookahead=1", "run.checkpoint_every=3")


def train(folder: Path, name: str, *overrides: str) -> dict[str, bytes]:
    assert oppo(folder, "", *EXACT, f"run.name={name}", *overrides) == DONE
    return weights(folder, name)


@pytest.fixture(scope="module")
def here(folder: Path) -> dict[str, bytes]:
    return train(folder, "here", *AHEAD, "run.steps=6", "run.scorers=thread")


@pytest.fixture(scope="module")
def there(folder: Path) -> dict[str, bytes]:
    return train(folder, "there", *AHEAD, "run.steps=6", "run.scorers=process", "step.chunk=3")


def test_an_exact_run_is_the_same_wherever_its_models_are(
    folder: Path, here: dict[str, bytes], there: dict[str, bytes]
) -> None:
    assert here == there
    lines = records(folder, "here", "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 7))
    staleness = [line["staleness/max"] for line in lines]
    assert staleness[1] >= 1, "step 1 is decoded with the first weights, while step 0 is trained"
    assert staleness[0] == 0
    assert here != train(folder, "alone", "run.steps=6", "run.scorers=thread", "run.checkpoint_every=3")


def test_an_exact_run_is_the_same_where_a_process_loads_the_models_that_score(
    folder: Path, here: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose memory is not shared: the critic's weights are sent, before the first step too."""

    def apart(settings: Settings) -> Deployment:
        here = of(settings)
        return replace(here, devices=replace(here.devices, apart=frozenset({"reference", "reward", "critic"})))

    of = Deployment.of
    monkeypatch.setattr(Deployment, "of", apart)
    assert here == train(folder, "apart", *AHEAD, "run.steps=6", "run.scorers=process")


@pytest.mark.usefixtures("here", "there")
@pytest.mark.parametrize("name", ["here", "there"])
def test_the_work_of_models_is_traced_for_the_step_that_it_was_done_for(folder: Path, name: str) -> None:
    events = json.loads((folder / "runs" / name / "trace.json").read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert all_nested(slices)
    steps: dict[tuple[str, str], set[int]] = {}
    for event in slices:
        steps.setdefault((tracks[event["tid"]], event["name"]), set()).add(event.get("args", {}).get("step"))
    for work in (("policy", "decode"), ("reward model", "finish"), ("critic", "finish"), ("trainer", "update")):
        assert steps[work] == set(range(1, 7)), work
    decoded, trained = (
        {event["args"]["step"]: event["ts"] for event in slices if (tracks[event["tid"]], event["name"]) == work}
        for work in (("policy", "decode"), ("trainer", "update"))
    )
    assert all(decoded[step] < trained[step] for step in range(1, 7))
    page = (folder / "runs" / name / "report.html").read_text()
    assert "faint: work for other steps" in page
    assert re.search(r"trainer: \d\.\d+ s for step 6, from", page)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_step_of_an_exact_run_uses_the_versions_that_follow_from_its_index(folder: Path, lookahead: int) -> None:
    corrected = ("algorithm.ratio_base=proximal", "algorithm.is_correction=truncated")
    ahead = (f"run.name=versions-{lookahead}", f"step.lookahead={lookahead}", "run.steps=5", "run.checkpoint_every=0")
    recorder = Recorder()
    with prepare(load(folder / "config.toml", [*EXACT, *corrected, *ahead])) as session:
        anyio.run(run, session, Console(quiet=True), [recorder])
    used: dict[str, set[tuple[int, int]]] = {"generate": set(), "value": set(), "proximal": set()}
    for sent in recorder.items:
        if isinstance(sent.item, Chunk):
            used[sent.stage].update((sent.step, int(version)) for version in sent.item.versions)
        elif isinstance(sent.item, Scored) and sent.stage in used:
            used[sent.stage].add((sent.step, sent.item.version))
    behind = {(step, max(0, step - lookahead)) for step in range(5)}
    assert used == {"generate": behind, "value": behind, "proximal": {(step, step) for step in range(5)}}
    require_bounded_staleness(folder / "runs" / f"versions-{lookahead}")


@pytest.mark.parametrize(("policy", "kv_on_sync"), [("thread", "keep"), ("process", "recompute")])
def test_weights_that_are_synced_in_flight_are_adopted_within_a_step(
    folder: Path, policy: str, kv_on_sync: str
) -> None:
    name = f"flight-{policy}-{kv_on_sync}"
    overrides = (
        *("run.panel=off", "step.batch=4", "step.overcommit=2", "step.lookahead=1", "step.weight_sync=in-flight"),
        *("algorithm.is_correction=truncated", "sampling.max_new_tokens=60", "run.steps=6", "run.checkpoint_every=3"),
    )
    assert (
        oppo(folder, "", *overrides, f"run.name={name}", f"run.policy={policy}", f"step.kv_on_sync={kv_on_sync}")
        == DONE
    )
    lines = records(folder, name, "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert max(float(str(line["staleness/max"])) for line in lines) <= 2 + 1
    assert main(["resume", str(folder / "runs" / name), "--set", "step.weight_sync=cut"]) != DONE


@pytest.mark.parametrize("policy", ["thread", "process"])
def test_rollouts_join_while_others_are_decoded(folder: Path, policy: str) -> None:
    name = f"continuous-{policy}"
    overrides = (
        *("run.panel=off", "step.batch=4", "step.admission=continuous", "step.overcommit=3", "step.lookahead=1"),
        *("step.weight_sync=in-flight", "algorithm.is_correction=truncated", "run.steps=6", "run.checkpoint_every=3"),
    )
    assert oppo(folder, "", *overrides, f"run.name={name}", f"run.policy={policy}") == DONE
    lines = records(folder, name, "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert max(float(str(line["staleness/max"])) for line in lines) <= 2 + 1
    assert max(float(str(line["deferral/deferred"])) for line in lines) <= 3
    story = records(folder, name, "journal.jsonl")
    ended = [str(line["rollout"]) for line in story if line.get("event") == "finished"]
    assert len(ended) == len(set(ended)) == 6 * 4


def test_an_exact_run_lets_nothing_join(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oppo(folder, "", "run.deterministic=true", "step.admission=continuous", "run.name=joined") not in {
        DONE,
        FAILED,
    }
    assert "with step.admission = 'continuous' rollouts join others when a place is free" in capsys.readouterr().err
    assert oppo(folder, "", "step.overcommit=0", "step.admission=continuous", "run.name=joined") not in {DONE, FAILED}
    assert "overcommit must be at least 1; as many as the batch when absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("step.lookahead=0",), "with step.lookahead = 0 nothing is decoded then"),
        (
            ("run.deterministic=true",),
            "does not go with step.weight_sync = 'in-flight', which syncs weights when they are ready",
        ),
        (("models.shared_trunk=true",), "models.shared_trunk = true makes them one model"),
    ],
)
def test_what_cannot_be_synced_in_flight_is_refused_before_anything_is_loaded(
    folder: Path, overrides: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flight = ("run.name=refused", "step.lookahead=1", "step.weight_sync=in-flight")
    assert oppo(folder, "", *flight, *overrides, "models.policy=nowhere") not in {DONE, FAILED}
    assert said in capsys.readouterr().err


def test_a_run_that_a_signal_has_ended_is_the_same_from_any_of_its_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps in flight end first, and the journal keeps that: who goes further back drains there too."""
    late = (*EXACT, *AHEAD, "run.steps=8", "rewards.0.source=reward.py:late")
    whole, run = train(folder, "undisturbed", *late), folder / "runs" / "stopped"
    monkeypatch.setenv("ENDED_AT", "14")  # while step 3 is scored, and step 4 in flight
    assert oppo(folder, "", *late, "run.name=stopped", "run.panel=lines") == 128 + signal.SIGTERM
    monkeypatch.delenv("ENDED_AT")
    assert "SIGTERM: ending after the 2 steps in flight, then saving" in capsys.readouterr().out
    drained = [line["step"] for line in records(folder, "stopped", "journal.jsonl") if line["event"] == "drained"]
    assert drained == [5]
    shutil.copytree(run, folder / "backup")
    assert resume(folder, "stopped") == DONE
    once = weights(folder, "stopped")
    assert once != whole
    shutil.rmtree(run)
    shutil.move(folder / "backup", run)
    (run / CHECKPOINTS / "step-000005" / "trainer.safetensors").write_bytes(b"")
    assert resume(folder, "stopped") == DONE
    assert "step-000005 is damaged" in capsys.readouterr().err
    assert weights(folder, "stopped") == once


def test_how_often_a_checkpoint_is_written_is_part_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, "fixed", *AHEAD, "run.steps=3", "trainer.schedule=constant")
    again = ["resume", str(folder / "runs" / "fixed"), "--set", "run.steps=6", "--set", "run.checkpoint_every=2"]
    assert main(again) != DONE
    assert "run.checkpoint_every cannot change when a run is resumed" in capsys.readouterr().err


def test_sigterm_ends_the_steps_in_flight_and_then_writes_a_checkpoint(folder: Path) -> None:
    overrides = ("run.name=terminated", "run.steps=100000", "run.checkpoint_every=0", "step.lookahead=1")
    with start(folder, *overrides, "run.scorers=thread") as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    made = len(records(folder, "terminated", "metrics.jsonl"))
    (checkpoint,) = (folder / "runs" / "terminated" / CHECKPOINTS).glob("step-*")
    assert checkpoint.name.endswith(str(made)), "no step was in flight"
    journal = [json.loads(line) for line in (folder / "runs" / "terminated" / "journal.jsonl").read_text().splitlines()]
    assert max(int(line["step"]) for line in journal) == made
    assert resume(folder, "terminated", f"run.steps={made + 2}") == DONE


def test_weights_that_are_served_cannot_be_trained_meanwhile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oppo(folder, "", "run.name=shared", "step.lookahead=1", "models.share_weights=true") not in {DONE, FAILED}
    assert "leave share_weights out" in capsys.readouterr().err
