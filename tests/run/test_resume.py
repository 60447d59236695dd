"""A real run that is killed and resumed ends with the weights of one that was never killed, bit for bit."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from oppo.cli import DONE, FAILED, UNUSABLE, main
from oppo.config.load import load_settings
from oppo.errors import CheckpointError, ConfigError, ModelError, RunComplete
from oppo.report import observations
from oppo.report.records import JOURNAL, OBSERVED, SUMMARY, ended, is_locked, rewind
from oppo.run.checkpoint import COMPLETE, _seal as seal, fingerprints, settings_of, verified
from oppo.run.train import FINAL, prepare
from tests.hf import tiny
from tests.kit.forked import Program
from tests.kit.workplace import furnish, oppo, records, resume, start, tokenizer, weights

STEPS = 6
EXACT = (f"run.steps={STEPS}", "run.deterministic=true", "run.checkpoint_every=2", "step.chunk=3", "run.trace=0")
EXTRA = "deferral/overcommit"
PREDICTED = "deferral/predicted_seconds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("resume"))
    assert oppo(folder, "", *EXACT, "run.name=whole") == DONE
    return folder


def killed(folder: Path, name: str, when: float, *overrides: str) -> None:
    """Begin a run and kill it when ``when`` steps have been made, a fraction of a step meaning a moment within it."""
    run = folder / "runs" / name
    a_step = median([each["seconds"] for each in records(folder, "whole", "metrics.jsonl")])
    alike = "from tests.hf.child import set_up; set_up()"
    with start(folder, *EXACT, *overrides, f"run.name={name}", before=alike) as process:
        while process.poll() is None and steps_of(run) < math.floor(when):
            wait(process, 0.005)
        wait(process, when % 1 * a_step)
        process.kill()
        process.communicate()


def steps_of(run: Path) -> int:
    """Return how many steps a run has made; -1: it has not begun."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else -1


def wait(process: Program, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def same_as_whole(folder: Path, name: str) -> None:
    assert weights(folder, name) == weights(folder, "whole")
    for file in ("metrics.jsonl", "journal.jsonl"):
        ours, theirs = (sorted(stable(records(folder, run, file)), key=json.dumps) for run in (name, "whole"))
        assert ours == theirs, file
    assert sorted(observations(folder / "runs" / name / JOURNAL)) == list(range(STEPS))


def stable(told: list[dict[str, object]]) -> list[dict[str, object]]:
    timed = (
        "timing_s/",
        "throughput/",
        "overlap/",
        "queue/",
        "loop/",
        "perf/",
        "bottleneck/",
        "deferral/predicted_seconds",
    )
    return [
        {k: v for k, v in record.items() if k not in {"at", "seconds"} and not k.startswith(timed)}
        for record in told
        if record.get("event") != OBSERVED
    ]


def test_an_adaptive_run_that_is_killed_decides_again_as_it_had(folder: Path) -> None:
    """It predicts seconds from measured seconds, of which none would come out twice."""
    name, run = "adaptive", folder / "runs" / "adaptive"
    killed(
        folder,
        name,
        8.2,
        "run.deterministic=false",
        "step.admission=adaptive",
        "run.steps=14",
        "run.checkpoint_every=6",
    )
    before, seen = records(folder, name, "metrics.jsonl"), observations(run / JOURNAL, 6)
    assert set(seen) >= {6}
    assert resume(folder, name) == DONE
    after = records(folder, name, "metrics.jsonl")
    assert [each["step"] for each in after] == list(range(1, 15))
    for was, now in zip(before, after, strict=False):
        assert [was.get(figure) for figure in (EXTRA, PREDICTED)] == [now.get(figure) for figure in (EXTRA, PREDICTED)]
    assert PREDICTED in after[7]
    assert before[6]["seconds"] != after[6]["seconds"]
    again = observations(run / JOURNAL)
    assert sorted(again) == list(range(14))
    assert {step: again[step] for step in seen} == seen


def test_a_signal_ends_after_a_step_with_a_checkpoint_from_which_the_run_goes_on(folder: Path) -> None:
    """As a scheduler does that wants its machine back; a terminal's Ctrl-C takes the same way."""
    with start(folder, *EXACT, "run.checkpoint_every=0", "run.name=stopped") as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        out, said = process.communicate(timeout=120)
    run = folder / "runs" / "stopped"
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "SIGTERM: ending after this step, then saving; once more ends the run at once\n" in out
    assert f"interrupted by SIGTERM; what was learned is in {run / FINAL}; go on with `oppo resume {run}`" in said
    logged = [each for each in records(folder, "stopped", "log.jsonl") if each["event"] == "interrupted"]
    assert [each["by"] for each in logged] == ["SIGTERM", "SIGTERM"]
    assert resume(folder, "stopped") == DONE
    same_as_whole(folder, "stopped")


HELD = """
import time
from pathlib import Path

scored = []

def held(prompts, completions):
    scored.extend(completions)
    while len(scored) > 4 and not Path(__file__).with_name("go").exists():  # from the second step on
        time.sleep(0.01)
    return [0.0 for _ in completions]
"""

NOTING = """
from functools import wraps
from pathlib import Path
from oppo.stages import Generate

run, begun = Generate.run, []

@wraps(run)
async def noted(*inputs, **given):
    begun.append(given)
    if len(begun) == 3:
        Path({there!r}).touch()
    await run(*inputs, **given)

Generate.run = noted
"""


def test_a_signal_lets_the_steps_in_flight_end_and_the_run_goes_on_behind_them(folder: Path) -> None:
    """The second step is being scored and the third decoded; files say when the process has come so far."""
    (folder / "held.py").write_text(HELD)
    (folder / "go").unlink(missing_ok=True)
    chosen = ("step.lookahead=1", "rewards.0.source=held.py:held", "run.checkpoint_every=0", "run.steps=5")
    there = folder / "begun"
    with start(folder, *chosen, "run.name=flying", before=NOTING.format(there=str(there))) as process:
        while not there.exists() and process.poll() is None:
            wait(process, 0.01)
        process.send_signal(signal.SIGTERM)
        while not (line := process.stdout.readline()).startswith("SIGTERM"):
            assert line, process.communicate(timeout=120)
        (folder / "go").touch()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, said
    first, _ = (each for each in records(folder, "flying", "log.jsonl") if each["event"] == "interrupted")
    assert first["steps"][-2:] == [2, 3]
    assert [each["step"] for each in records(folder, "flying", "metrics.jsonl")] == [1, 2, 3]
    assert resume(folder, "flying") == DONE
    assert [each["step"] for each in records(folder, "flying", "metrics.jsonl")] == [1, 2, 3, 4, 5]


def copied(folder: Path, name: str) -> Path:
    """Copy the whole run under another name, and return its directory."""
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    run = shutil.copytree(folder / "runs" / "whole", folder / "runs" / name)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('name = "whole"', f'name = "{name}"'))
    own = fingerprints(load_settings(run / "config.toml"))
    for checkpoint in (run / "checkpoints").glob("step-*"):
        state = json.loads((checkpoint / "state.json").read_text())
        state["provenance"]["settings"]["run.name"] = own["run.name"]
        reseal(checkpoint, state)
    return run


def reseal(checkpoint: Path, state: object) -> None:
    """Write another state into a checkpoint, which is whole afterwards."""
    sealed = verified(checkpoint)
    (checkpoint / "state.json").write_text(json.dumps(state))
    (checkpoint / COMPLETE).unlink()
    seal(checkpoint, sealed.step, sealed.score)


def is_truncated(checkpoint: Path) -> None:
    os.truncate(checkpoint / "trainer.safetensors", 100)


def holds(state: object) -> Callable[[Path], None]:
    """Return what writes another state into a checkpoint; a mapping has such an entry ``run.steps``."""

    def write(checkpoint: Path) -> None:
        before = json.loads((checkpoint / "state.json").read_text())
        reseal(checkpoint, {**before, "run": {**before["run"], **state}} if isinstance(state, dict) else state)

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (is_truncated, "step-000006 is damaged: trainer.safetensors"),
        (holds([]), "should be a JSON object, but is list; the one before it is tried"),
        (holds({"steps": "6"}), "holds the state after '6' steps: it was edited; the one before it is tried"),
    ],
)
def test_a_last_checkpoint_that_cannot_be_used_is_named_and_written_again_from_the_one_before_it(
    folder: Path, damage: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(folder, "damaged")
    (run / SUMMARY).unlink()
    damage(run / "checkpoints" / "step-000006")
    assert resume(folder, "damaged") == DONE
    assert message in capsys.readouterr().err
    same_as_whole(folder, "damaged")
    assert verified(run / "checkpoints" / "step-000006").state()


def is_random(file: Path) -> None:
    file.write_bytes(random.Random(str(file)).randbytes(300))


def is_cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def is_a_link(file: Path) -> None:
    """Let a file be a link to what it was, which lies elsewhere."""
    elsewhere = next(each for each in file.parents if each.name == "runs").parent / "elsewhere"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


def is_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def is_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: Final = (is_random, is_cut, is_a_link, is_a_pipe, is_a_directory, Path.unlink)


def resumed_with(folder: Path, damage: Callable[[Path], object], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a run of which one file is damaged goes on as if it were not, or ends with one error."""
    run = copied(folder, "faulty")
    (run / SUMMARY).unlink()
    shutil.rmtree(run / FINAL)
    damage(run / name)
    code = main(["resume", str(run)])
    said = capsys.readouterr().err
    case = f"{name}, {damage.__name__}: {code}\n{said}"
    assert "Traceback" not in said, case
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == (code != DONE), case
    if code == DONE:
        assert weights(folder, "faulty") == weights(folder, "whole"), case
        assert ended(run) == STEPS, case


def files_of(run: Path) -> list[str]:
    gone = {SUMMARY, "running.lock"}
    names = [file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file()]
    return sorted(each for each in names if each not in gone and not each.startswith(str(FINAL)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 6))])
def test_a_run_of_which_any_file_is_damaged_goes_on_right_or_ends_with_one_error(
    folder: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    names = files_of(folder / "runs" / "whole")
    cases = [(name, damage) for name in names for damage in DAMAGES]
    for name, damage in random.Random(seed).sample(cases, 6):
        resumed_with(folder, damage, name, capsys)


def test_a_run_killed_after_its_last_step_is_brought_to_its_end(folder: Path) -> None:
    run = copied(folder, "late")
    shutil.rmtree(run / FINAL)
    for name in ("summary.json", "report.html"):
        (run / name).unlink()
    assert resume(folder, "late") == DONE
    assert (run / "summary.json").exists()
    same_as_whole(folder, "late")


def test_a_run_whose_end_could_not_be_saved_is_brought_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise ModelError("the disk is full")

    run = folder / "runs" / "unsaved"
    with monkeypatch.context() as patch:
        patch.setattr("oppo.run.models.Saving.save", full)
        assert oppo(folder, "", *EXACT, "run.name=unsaved", "run.checkpoint_every=4") == FAILED
    assert not (run / FINAL).exists()
    assert len(records(folder, "unsaved", "metrics.jsonl")) == STEPS
    assert not json.loads((run / SUMMARY).read_text())["complete"]
    assert resume(folder, "unsaved") == DONE
    assert json.loads((run / SUMMARY).read_text())["complete"]
    same_as_whole(folder, "unsaved")


def test_a_run_that_has_ended_is_left_as_it_is_wherever_its_last_checkpoint_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(folder, "ended")
    shutil.rmtree(run / "checkpoints" / "step-000006")
    assert resume(folder, "ended") == DONE, "a supervisor that repeats it until it is done ends"
    assert (
        "the run has made all of its 6 steps: with a constant learning rate, raise run.steps" in capsys.readouterr().err
    )
    assert (run / SUMMARY).read_bytes() == (folder / "runs" / "whole" / SUMMARY).read_bytes()
    same_as_whole(folder, "ended")


def test_who_goes_on_with_a_run_has_it_from_before_the_checkpoint_is_chosen(folder: Path) -> None:
    run = copied(folder, "two")
    settings = settings_of(run, ["run.steps=7"])
    with prepare(settings, resume=True) as first:
        assert first.done == STEPS
        with pytest.raises(ConfigError, match="is being written by another run"):
            prepare(settings, resume=True)
    assert not is_locked(run)
    with pytest.raises(RunComplete, match="the run has made all of its 6 steps"):
        prepare(settings_of(run), resume=True)
    assert not is_locked(run)


def test_a_run_killed_before_its_first_checkpoint_begins_anew(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied(folder, "early")
    (run / SUMMARY).unlink()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / ".final.partial").mkdir(parents=True)
    assert resume(folder, "early") == UNUSABLE, "it has made more steps than that, so somebody has taken them away"
    said = capsys.readouterr().err
    assert "no checkpoint in" in said
    assert "those that this run wrote, after every 2 steps, are damaged or gone" in said
    rewind(run / "metrics.jsonl", 2)
    assert resume(folder, "early") == DONE
    assert "ended before its first checkpoint, so it begins anew" in capsys.readouterr().err
    same_as_whole(folder, "early")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("step.batch=5", "step.batch cannot change when a run is resumed"),
        ("run.cores=2", "run.cores cannot change when a run is resumed that is deterministic"),
        ("trainer.micro_batch_tokens=64", "sums would be rounded in another order"),
        ("run.nonsense=6", "nonsense"),
    ],
)
def test_what_cannot_be_resumed_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert resume(folder, "whole", override) == UNUSABLE
    assert said in capsys.readouterr().err


def test_a_used_directory_with_a_checkpoint_says_how_to_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oppo(folder, "", *EXACT, "run.name=whole") == UNUSABLE
    assert f"go on with `oppo resume {folder / 'runs' / 'whole'}`, choose another run.name" in capsys.readouterr().err


def test_a_run_has_a_checkpoint_of_its_last_step_and_goes_on_as_an_error_about_memory_advises(folder: Path) -> None:
    assert oppo(folder, "", "run.name=tight", "run.steps=3", "run.checkpoint_every=2") == DONE
    there = sorted(path.name for path in (folder / "runs" / "tight" / "checkpoints").iterdir())
    assert there == ["final", "step-000002", "step-000003"]
    smaller = ("trainer.micro_batch_tokens=64", "trainer.gradient_checkpointing=1", "run.scorers=thread")
    assert resume(folder, "tight", *smaller, "run.steps=4") == DONE
    assert [each["step"] for each in records(folder, "tight", "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_run_that_could_not_be_taken_up_leaves_what_it_had_learned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(folder, "kept")

    def unreadable(*_: object) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr("oppo.hf.train.trainer.read_training", unreadable)
    assert resume(folder, "kept", "run.steps=7") == FAILED
    assert "the disk is gone" in capsys.readouterr().err
    assert weights(folder, "kept") == weights(folder, "whole")


def test_other_prompts_are_not_taken_for_the_run_s_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = folder / "prompts.jsonl"
    before = prompts.read_text()
    prompts.write_text(before + before.splitlines()[0] + "\n")
    try:
        assert resume(folder, "whole", "run.steps=7") == UNUSABLE
    finally:
        prompts.write_text(before)
    assert "prompts.jsonl is not what it was when the run began" in capsys.readouterr().err


def test_another_reward_function_is_gone_on_with_only_where_that_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward, text = folder / "length.py", "def score(prompts, completions):\n    return [1.0 for _ in completions]\n"
    reward.write_text(text)
    ones = ("run.steps=1", "run.checkpoint_every=1", "run.name=ones", "rewards.0.source=length.py:score")
    assert oppo(folder, "", *ones) == DONE
    reward.write_text(text.replace("1.0", "2.0"))
    assert resume(folder, "ones", "run.steps=2") == UNUSABLE
    said = capsys.readouterr().err
    assert f"{reward} is not what it was when the run began" in said
    assert "or go on with it as it is now (--accept-changed-code)" in said
    reward.write_text(text)
    assert resume(folder, "ones", "run.steps=2") == DONE
    reward.write_text(text.replace("1.0", "2.0"))
    command = ["resume", str(folder / "runs" / "ones"), "--set", "run.steps=3", "--accept-changed-code"]
    assert main(command) == DONE
    assert f"{reward} is not what it was when the run began; the run goes on with it as" in capsys.readouterr().err
    assert [each["score"] for each in records(folder, "ones", "metrics.jsonl")] == [1.0, 1.0, 2.0]


def test_a_checkpoint_of_another_run_is_not_taken_for_the_run_s_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ("run.name=other", "run.steps=1", "run.checkpoint_every=1", "algorithm.kl=0.5")
    assert oppo(folder, "", *other) == DONE
    run = copied(folder, "taken")
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(folder / "runs" / "other" / "checkpoints", run / "checkpoints")
    assert resume(folder, "taken", "run.steps=7") == UNUSABLE
    said = capsys.readouterr().err
    assert (
        "algorithm.kl, run.deterministic, run.name, step.chunk cannot change when a run is resumed, and its checkpoint "
        "was" in said
    )


_DEFERRED = ("admission", "sample", "group", "branch", "prompt", "tokens", "logprobs", "versions", "sampled", "rollout")
EARLIER: dict[str, object] = {
    "run": {
        "steps": 4,
        "stages": {
            "advantage": {"kl": 0.05, "moments": {}},
            "generate": {"units": [{"age": 1, "rollouts": [dict.fromkeys(_DEFERRED, 1)]}]},
            "update": {},
        },
    }
}
"""A state with a deferred rollout, as it was before turns had limits and tokens further columns."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"provenance": 3}, "does not say what its run was made of (TypeError: "),
        ({"run": {}}, "does not fit this run (KeyError: 'stages')"),
        ({"prompts": []}, "does not fit this run (TypeError: "),
        (EARLIER, "does not fit this run (KeyError: 'limit'): it is of another version of oppo, or was edited; start"),
        ({"optimizer": "of others"}, "trainer.safetensors"),
    ],
)
def test_a_state_that_does_not_fit_is_an_error_and_the_records_of_later_steps_stay(
    folder: Path, change: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(folder, "forged")
    shutil.rmtree(run / "checkpoints" / "step-000006")
    checkpoint = run / "checkpoints" / "step-000004"
    if "optimizer" in change:
        (checkpoint / COMPLETE).unlink()
        save_file({"other": np.zeros(1)}, checkpoint / "trainer.safetensors")
        seal(checkpoint, 4, 0.0)
    reseal(checkpoint, json.loads((checkpoint / "state.json").read_text()) | change)
    before = files(run)
    assert resume(folder, "forged", "run.steps=7", "run.track=['tensorboard']") != DONE
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert files(run) == before
    assert not is_locked(run)


def files(run: Path) -> dict[str, bytes]:
    """Return what a run directory holds, but for the log, which tells of every attempt."""
    return {str(file): file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "log.jsonl"}


def test_other_libraries_and_damaged_records_are_told_and_the_run_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(folder, "aged")
    checkpoint = run / "checkpoints" / "step-000006"
    state = json.loads((checkpoint / "state.json").read_text())
    state["provenance"]["libraries"]["torch"] = "2.0.0"
    reseal(checkpoint, state)
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().replace(b'"step"', b'"st\xffp"', 1))
    assert resume(folder, "aged", "run.steps=7") == DONE
    assert "the run was made with torch 2.0.0 so far, and goes on with torch " in capsys.readouterr().err
    assert [each["step"] for each in records(folder, "aged", "metrics.jsonl")] == [2, 3, 4, 5, 6, 7]
    notices = [str(each["text"]) for each in records(folder, "aged", "log.jsonl") if each["event"] == "notice"]
    assert f"{metrics}: left out as damaged: line 1; see metrics.jsonl.damaged" in notices
    assert f"{metrics}: no record of step 1, nor of what was trained then" in notices


def test_a_directory_without_a_run_or_a_checkpoint_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(tmp_path)]) == UNUSABLE
    assert "there is no run to resume in" in capsys.readouterr().err
    assert oppo(folder, "", "run.name=none", "run.steps=1", "run.checkpoint_every=0") == DONE
    assert resume(folder, "none") == UNUSABLE
    assert "writes them if run.checkpoint_every is set" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["deepseek-v3", *(pytest.param(each, marks=pytest.mark.deep) for each in ("qwen3.5", "falcon-h1"))]
)
def test_a_policy_with_states_or_latents_is_trained_alike_streamed_whole_and_killed(folder: Path, name: str) -> None:
    policy, run = folder / name, f"{name}-run"
    tiny.of({**tiny.STATEFUL, **tiny.WHOLE}[name]()).save_pretrained(policy)
    tokenizer().save_pretrained(policy)
    settings = (f"models.policy={policy}", "rewards.0.source=reward.py:short", "models.critic=reward")
    assert oppo(folder, "", *EXACT, *settings, f"run.name={run}") == DONE
    assert oppo(folder, "", *EXACT, *settings, "step.chunk=whole", f"run.name={run}-whole") == DONE
    killed(folder, f"{run}-killed", 3.5, *settings)
    assert resume(folder, f"{run}-killed") == DONE
    trained = weights(folder, run)
    assert trained == weights(folder, f"{run}-whole") == weights(folder, f"{run}-killed")
    before = load_file(policy / "model.safetensors")
    assert any(trained[f"actor/{key}"] != each.tobytes() for key, each in before.items())
