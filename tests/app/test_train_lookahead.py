"""``oppo train`` with steps in flight: exact at any place of its models, resumed where nothing was alive, and ended."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from oppo.app.resume import CHECKPOINTS
from oppo.app.train import FINAL
from oppo.cli import DONE, FAILED, main
from tests.workplace import furnish, oppo, records, start

EXACT = ("run.exact=true", "run.panel=off", "step.batch=4", "step.extra=2")
AHEAD = ("step.lookahead=1", "run.checkpoint_every=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("ahead"))


def weights(folder: Path, name: str) -> dict[str, bytes]:
    """Return every tensor of both models, as bytes."""
    return {
        f"{model}/{key}": tensor.tobytes()
        for model in ("actor", "critic")
        for key, tensor in load_file(folder / "runs" / name / FINAL / model / "model.safetensors").items()
    }


def train(folder: Path, name: str, *overrides: str) -> dict[str, bytes]:
    assert oppo(folder, "", *EXACT, f"run.name={name}", *overrides) == DONE
    return weights(folder, name)


def test_an_exact_run_is_the_same_wherever_its_models_are(folder: Path) -> None:
    here = train(folder, "here", *AHEAD, "run.steps=6", "run.scorers=thread")
    there = train(folder, "there", *AHEAD, "run.steps=6", "run.scorers=process", "step.chunk=3")
    assert here == there
    lines = records(folder, "here", "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(6))
    lags = [float(str(line["staleness/lag_max"])) for line in lines]
    assert max(lags) <= 2 + 1
    assert lags[1] >= 1, "step 1 is decoded with the first weights, while step 0 is trained"
    assert lags[0] == 0
    assert here != train(folder, "alone", "run.steps=6", "run.scorers=thread", "run.checkpoint_every=3")


def test_more_steps_in_flight_with_a_trainer_of_its_own_process(folder: Path) -> None:
    one = train(folder, "two-here", "step.lookahead=2", "run.checkpoint_every=0", "run.steps=5", "run.scorers=thread")
    other = train(
        folder, "two-there", "step.lookahead=2", "run.checkpoint_every=0", "run.steps=5", "run.trainer=process"
    )
    assert one == other


@pytest.mark.parametrize("scorers", ["thread", "process"])
def test_a_critic_on_the_policys_trunk_is_exact_with_steps_in_flight(folder: Path, scorers: str) -> None:
    chosen = ("models.shared_trunk=true", "step.lookahead=2", "run.checkpoint_every=0", "run.steps=4")
    one = train(folder, f"trunk-{scorers}", *chosen, f"run.scorers={scorers}")
    assert one == train(folder, f"trunk-{scorers}-again", *chosen, "run.scorers=thread", "step.chunk=3")


@pytest.mark.parametrize(("policy", "on_publish"), [("thread", "keep"), ("process", "recompute")])
def test_weights_that_are_published_in_flight_are_adopted_within_a_step(
    folder: Path, policy: str, on_publish: str
) -> None:
    name = f"flight-{policy}-{on_publish}"
    overrides = (
        *("run.panel=off", "step.batch=4", "step.extra=2", "step.lookahead=1", "step.publish=in-flight"),
        *("algorithm.is_correction=truncated", "sampling.max_new_tokens=60", "run.steps=6", "run.checkpoint_every=3"),
    )
    assert (
        oppo(folder, "", *overrides, f"run.name={name}", f"run.policy={policy}", f"step.on_publish={on_publish}")
        == DONE
    )
    lines = records(folder, name, "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(6))
    assert max(float(str(line["staleness/lag_max"])) for line in lines) <= 2 + 1
    assert main(["resume", str(folder / "runs" / name), "--set", "step.publish=cut"]) != DONE


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("step.lookahead=0",), "with step.lookahead = 0 nothing is decoded then"),
        (("run.exact=true",), "run.exact makes every bit independent of timing, and step.publish = 'in-flight'"),
        (("models.shared_trunk=true",), "models.shared_trunk = true makes them one model"),
    ],
)
def test_what_cannot_be_published_in_flight_is_refused_before_anything_is_loaded(
    folder: Path, overrides: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flight = ("run.name=refused", "step.lookahead=1", "step.publish=in-flight")
    assert oppo(folder, "", *flight, *overrides, "models.policy=nowhere") not in {DONE, FAILED}
    assert said in capsys.readouterr().err


def test_a_killed_run_that_is_resumed_is_the_one_that_was_not_killed(folder: Path) -> None:
    whole = train(folder, "whole", *AHEAD, "run.steps=9")
    with start(folder, *EXACT, *AHEAD, "run.name=parts", "run.steps=9") as process:
        checkpoints = folder / "runs" / "parts" / CHECKPOINTS
        while not list(checkpoints.glob("step-*3/COMPLETE")):
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
        process.communicate(timeout=60)
    assert len(records(folder, "parts", "metrics.jsonl")) < 9
    assert main(["resume", str(folder / "runs" / "parts")]) == DONE
    assert weights(folder, "parts") == whole


def test_how_often_a_checkpoint_is_written_is_part_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, "fixed", *AHEAD, "run.steps=3", "trainer.schedule=constant")
    again = ["resume", str(folder / "runs" / "fixed"), "--set", "run.steps=6", "--set", "run.checkpoint_every=2"]
    assert main(again) != DONE
    assert "run.checkpoint_every cannot change when a run is resumed" in capsys.readouterr().err


def test_ctrl_c_ends_the_steps_in_flight_and_then_writes_a_checkpoint(folder: Path) -> None:
    overrides = ("run.name=stopped", "run.steps=100000", "run.checkpoint_every=0", "step.lookahead=1")
    with start(folder, *overrides, "run.scorers=thread") as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, said
    made = len(records(folder, "stopped", "metrics.jsonl"))
    (checkpoint,) = (folder / "runs" / "stopped" / CHECKPOINTS).glob("step-*")
    assert checkpoint.name.endswith(str(made)), "no step was in flight"
    journal = [json.loads(line) for line in (folder / "runs" / "stopped" / "journal.jsonl").read_text().splitlines()]
    assert max(int(line["step"]) for line in journal) == made - 1
    assert main(["resume", str(folder / "runs" / "stopped"), "--set", f"run.steps={made + 2}"]) == DONE


def test_weights_that_are_served_cannot_be_trained_meanwhile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oppo(folder, "", "run.name=shared", "step.lookahead=1", "models.share_weights=true") not in {DONE, FAILED}
    assert "leave share_weights out" in capsys.readouterr().err
