"""A real run that is killed and resumed ends with the weights of one that was never killed, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from oppo.cli import DONE, INTERRUPTED, UNUSABLE, main
from oppo.train import FINAL
from tests.workplace import furnish, oppo, records, start

STEPS = 6
EXACT = (f"run.steps={STEPS}", "run.exact=true", "run.checkpoint_every=2", "step.chunk=3", "run.trace=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("resume"))
    assert oppo(folder, "", *EXACT, "run.name=whole") == DONE
    return folder


def weights(folder: Path, name: str) -> dict[str, bytes]:
    """Return every tensor of both models, as bytes."""
    final = folder / "runs" / name / FINAL
    return {
        f"{model}/{key}": tensor.tobytes()
        for model in ("actor", "critic")
        for key, tensor in load_file(final / model / "model.safetensors").items()
    }


def resume(folder: Path, name: str, *overrides: str) -> int:
    return main(["resume", str(folder / "runs" / name), *(each for o in overrides for each in ("--set", o))])


def killed(folder: Path, name: str, when: float) -> None:
    """Begin a run and kill it ``when`` steps have been made, a fraction of a step meaning a moment within it."""
    journal = folder / "runs" / name / "journal.jsonl"
    with start(folder, *EXACT, f"run.name={name}") as process:
        lines = 0
        wanted = when * len(records(folder, "whole", "journal.jsonl")) / STEPS
        while lines < wanted and process.poll() is None:
            lines = journal.read_text().count("\n") if journal.exists() else 0
        process.kill()
        process.communicate()


def same_as_whole(folder: Path, name: str, whole: str = "whole") -> None:
    assert weights(folder, name) == weights(folder, whole)
    for file in ("metrics.jsonl", "journal.jsonl"):
        ours, theirs = records(folder, name, file), records(folder, whole, file)
        assert [stable(each) for each in ours] == [stable(each) for each in theirs], file


def stable(record: dict[str, object]) -> dict[str, object]:
    """Return a record without what depends on time."""
    timed = ("timing_s/", "throughput/", "overlap/", "queue/", "loop/")
    return {k: v for k, v in record.items() if k not in {"at", "seconds"} and not k.startswith(timed)}


@pytest.mark.parametrize("when", [random.Random(k).uniform(2.2, STEPS) for k in range(3)])
def test_a_run_killed_at_a_random_moment_and_resumed_ends_with_the_same_weights(folder: Path, when: float) -> None:
    name = f"killed-{when:.3f}"
    killed(folder, name, when)
    assert resume(folder, name) == DONE
    same_as_whole(folder, name)


def test_ctrl_c_ends_after_a_step_with_a_checkpoint_from_which_the_run_goes_on(folder: Path) -> None:
    with start(folder, *EXACT, "run.checkpoint_every=0", "run.name=stopped") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    run = folder / "runs" / "stopped"
    assert process.returncode == INTERRUPTED, said
    assert f"go on with `oppo resume {run}`" in said
    assert resume(folder, "stopped") == DONE
    same_as_whole(folder, "stopped")


def damaged(folder: Path, whole: str, name: str) -> None:
    """Copy a run and damage the last checkpoint of the copy."""
    run = shutil.copytree(folder / "runs" / whole, folder / "runs" / name)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace(f'name = "{whole}"', f'name = "{name}"'))
    with (run / "checkpoints" / "step-000006" / "trainer.safetensors").open("r+b") as file:
        file.truncate(100)


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged(folder, "whole", "damaged")
    assert resume(folder, "damaged") == DONE
    assert "step-000006 is damaged: trainer.safetensors" in capsys.readouterr().err
    same_as_whole(folder, "damaged")


def test_a_run_that_corrects_for_stale_tokens_goes_on_as_if_never_interrupted(folder: Path) -> None:
    corrected = ("step.denominator=proximal", "step.weight=truncated", "step.weight_cap=1.0")
    assert oppo(folder, "", *EXACT, *corrected, "run.name=corrected") == DONE
    assert weights(folder, "corrected") != weights(folder, "whole")
    assert any(line["mismatch/weight"] != 1 for line in records(folder, "corrected", "metrics.jsonl"))
    damaged(folder, "corrected", "corrected-again")
    assert resume(folder, "corrected-again") == DONE
    same_as_whole(folder, "corrected-again", "corrected")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("step.batch=5", "step.batch cannot change when a run is resumed"),
        ("run.steps=6", "the run has made all of its 6 steps: raise run.steps"),
        ("run.nonsense=6", "nonsense"),
    ],
)
def test_what_cannot_be_resumed_is_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert resume(folder, "whole", override) == UNUSABLE
    assert said in capsys.readouterr().err


def test_a_finished_run_goes_on_when_it_is_given_more_steps(folder: Path) -> None:
    run = shutil.copytree(folder / "runs" / "whole", folder / "runs" / "longer")
    (run / "config.toml").write_text((run / "config.toml").read_text().replace('name = "whole"', 'name = "longer"'))
    assert resume(folder, "longer", "run.steps=7") == DONE
    assert [each["step"] for each in records(folder, "longer", "metrics.jsonl")] == list(range(7))


def test_other_prompts_are_not_taken_for_the_run_s_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = folder / "prompts.jsonl"
    before = prompts.read_text()
    prompts.write_text(before + before.splitlines()[0] + "\n")
    try:
        assert resume(folder, "whole", "run.steps=7") == UNUSABLE
    finally:
        prompts.write_text(before)
    assert "prompts.jsonl is not what it was when the run began" in capsys.readouterr().err


def test_a_directory_without_a_run_or_a_checkpoint_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(tmp_path)]) == UNUSABLE
    assert "there is no run to resume in" in capsys.readouterr().err
    assert oppo(folder, "", "run.name=none", "run.steps=1") == DONE
    assert resume(folder, "none") == UNUSABLE
    assert "writes them if run.checkpoint_every is set" in capsys.readouterr().err
