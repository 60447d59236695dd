"""``oppo train`` with ``[eval]``: held-out scores that change nothing, are recorded everywhere, and choose the best."""

from __future__ import annotations

import json
import runpy
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from oppo import evaluate, train
from oppo.cli import DONE, FAILED, main
from oppo.errors import ConfigError
from oppo.report.metrics import metric
from oppo.run.checkpoint import CHECKPOINTS, verified
from tests.docs.test_readme import ROOT, fenced
from tests.kit.workplace import furnish, oppo, records, start
from tests.report.tracked import board
from tests.run.test_resume import stable

EXACT = ("run.deterministic=true", "run.panel=off", "run.trace=0", "run.steps=4", "run.checkpoint_every=2")
EVAL = ("eval.prompts=held_out.jsonl", "eval.every=2")

JUDGES = """
import os

def rule(prompts, completions, goal):
    assert len(goal) == len(prompts)
    return [float(len(c.split()) % 2) for c in completions]

def best(prompts, completions, goal):
    return [100.0 - len(c.split()) for c in completions]

def absent(prompts, completions):
    raise OSError("401 for https://me:hunter2secret@judge.example/")

parts = {"even": (1.0, rule), "long": (0.5, lambda prompts, completions, **rest: [len(c) / 100 for c in completions])}

def tool(turn):
    return None if turn.number == 1 else "w80 w81"
"""

TURNS = (
    "environment.source=judges.py:tool",
    'sampling.stop=["w5", "w9", "w13", "w21", "w33", "w40", "w44", "w52", "w60", "w77"]',
    "sampling.max_new_tokens=24",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = furnish(tmp_path_factory.mktemp("eval"))
    (folder / "judges.py").write_text(JUDGES)
    rows = [{"prompt": f"w{20 + i} w{40 + 2 * i}", "goal": i} for i in range(6)]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(run: Path) -> dict[str, bytes]:
    """Return what is trained and the optimizer's state, after the last step."""
    found = load_file(run / CHECKPOINTS / "step-000004" / "trainer.safetensors")
    return {key: tensor.tobytes() for key, tensor in found.items()}


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(
            ("rewards.0.source=judges.py:rule", "eval.samples=3", "step.algorithm=grpo", "algorithm.samples=2"),
            id="groups",
        ),
        pytest.param(
            ("rewards.0.source=judges.py:parts", "step.lookahead=1", "run.scorers=thread", "eval.samples=2", *TURNS),
            id="turns ahead",
        ),
        pytest.param(
            ("models.lora_rank=2", "run.scorers=thread", "run.keep_best=true"),
            id="adapters",
            marks=pytest.mark.adapters,
        ),
        pytest.param(
            ("step.lookahead=2", "run.policy=process", "run.scorers=process", "run.keep_best=true"),
            id="processes",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_an_exact_run_with_evaluations_has_the_weights_of_one_without_and_shows_their_scores(
    folder: Path, chosen: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "-".join(["same", *(each.replace("/", "") for each in chosen[:1])]).replace("=", ".").replace(":", ".")
    assert oppo(folder, "", *EXACT, *(each for each in chosen if "eval" not in each), f"run.name={name}") == DONE
    capsys.readouterr()
    assert oppo(folder, "", *EXACT, *EVAL, *chosen, "run.panel=lines", f"run.name={name}-evaluated") == DONE
    before, *steps = capsys.readouterr().out.splitlines()
    assert before.startswith("before the first step  held-out ")
    assert " +- " in before
    assert ["  held-out " in line for line in steps[:4]] == [False, True, False, True]
    runs = [folder / "runs" / name, folder / "runs" / f"{name}-evaluated"]
    one, other = (trained(run) for run in runs)
    assert one == other
    plain, evaluated = (records(folder, run.name, "metrics.jsonl") for run in runs)
    for line in (*plain, *evaluated):
        for key in [key for key in line if key.startswith(("eval/", "turns/answer_seconds"))]:
            del line[key]
    assert stable(evaluated) == stable(plain)
    found = records(folder, f"{name}-evaluated", "eval.jsonl")
    assert [(each["step"], each["version"]) for each in found] == [(0, 0), (2, 2), (4, 4)]
    assert all(metric(key) for each in found for key in each if key != "samples")
    for runs_directory in runs:
        shutil.rmtree(runs_directory)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run that is evaluated before it begins, after every second step and after the last of five."""
    chosen = (*EVAL, "eval.samples=4", "rewards.0.source=judges.py:rule", "run.steps=5", "run.name=whole")
    assert oppo(folder, "", *EXACT, *chosen, "run.panel=lines", 'run.track=["tensorboard"]') == DONE
    return folder / "runs" / "whole"


def test_held_out_scores_are_recorded_everywhere(folder: Path, whole: Path) -> None:
    found = records(folder, "whole", "eval.jsonl")
    assert [each["step"] for each in found] == [0, 2, 4, 5]
    for each in found:
        assert 0 <= float(str(each["eval/pass_at_1"])) <= float(str(each["eval/pass_at_4"])) <= 1
        assert each["eval/passed"] == each["eval/score"], "the rule gives 0 or 1"
        assert each["eval/sampled_score"] == pytest.approx(each["eval/pass_at_1"])
        samples = each["samples"]
        assert isinstance(samples, list)
        assert [sample["prompt"] for sample in samples] == ["w20 w40", "w21 w42", "w22 w44", "w23 w46"]
    lines = {line["step"]: line for line in records(folder, "whole", "metrics.jsonl")}
    for step, line in lines.items():
        evaluated = next((each for each in found if each["step"] == step), {})
        assert {key: value for key, value in line.items() if key.startswith("eval/")} == {
            key: value for key, value in evaluated.items() if key.startswith("eval/")
        }
    summary = json.loads((whole / "summary.json").read_text())
    scores = [float(str(each["eval/score"])) for each in found]
    assert (summary["eval/score"]["first"], summary["eval/score"]["last"]) == (scores[0], scores[-1])
    assert summary["eval/score"]["best"] == max(scores)
    page = (whole / "report.html").read_text()
    assert "Held-out score" in page
    assert "Held-out prompts passed" in page
    logged = [each for each in records(folder, "whole", "log.jsonl") if each["event"] == "evaluated"]
    assert [each["step"] for each in logged] == [0, 2, 4, 5]
    shown = board(whole / "tensorboard")["eval/score"]
    assert shown == pytest.approx(dict(zip((0, 2, 4, 5), scores, strict=True))), "the first is at step 0"


def test_each_evaluation_draws_the_same_noise_and_its_seed_another(folder: Path, whole: Path) -> None:
    del whole
    first = records(folder, "whole", "eval.jsonl")[0]
    again = (*EXACT, "eval.prompts=held_out.jsonl", "eval.samples=4", "rewards.0.source=judges.py:rule", "run.steps=1")
    drawn = {}
    for name, seed in (("same-seed", 0), ("other-seed", 5)):
        assert oppo(folder, "", *again, f"run.name={name}", f"eval.seed={seed}", "eval.every=1") == DONE
        drawn[name] = records(folder, name, "eval.jsonl")[0]
    measured = {key for key in first if key.startswith("eval/") and key != "eval/seconds"}
    assert {key: drawn["same-seed"][key] for key in measured} == {key: first[key] for key in measured}
    assert drawn["other-seed"]["eval/score"] == first["eval/score"], "the most likely response has no noise"
    assert drawn["other-seed"]["eval/sampled_score"] != first["eval/sampled_score"]


def test_a_run_killed_before_its_first_checkpoint_is_not_evaluated_twice_before_it_begins(folder: Path) -> None:
    chosen = (*EXACT, *EVAL, "run.name=young", "run.checkpoint_every=100", "run.steps=3")
    with start(folder, *chosen) as process:
        file = folder / "runs" / "young" / "metrics.jsonl"
        while not file.exists() or not file.read_text():
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
        process.communicate()
    assert main(["resume", str(folder / "runs" / "young")]) == DONE
    assert [each["step"] for each in records(folder, "young", "eval.jsonl")] == [0, 2, 3]


def test_the_best_checkpoint_is_that_of_the_best_held_out_score(folder: Path) -> None:
    """The held-out score falls or rises as it likes; it is taken at every checkpoint, due or not."""
    chosen = (
        *EXACT,
        "rewards.0.source=judges.py:best",
        "run.keep_best=true",
        "run.keep_last=1",
        "run.checkpoint_every=1",
    )
    settings = ("eval.prompts=held_out.jsonl", "eval.every=100", "run.steps=6", "run.name=best")
    assert oppo(folder, "", *chosen, *settings, "trainer.learning_rate=0.03") == DONE
    scores = {int(str(each["step"])): each["eval/score"] for each in records(folder, "best", "eval.jsonl")}
    assert list(scores) == [0, 1, 2, 3, 4, 5, 6]
    best = max((step for step in scores if step), key=lambda step: (scores[step], -step))
    directory = folder / "runs" / "best" / CHECKPOINTS
    kept = sorted(path.name for path in directory.glob("step-*"))
    assert kept == sorted({f"step-{best:06d}", "step-000006"})
    assert verified(directory / f"step-{best:06d}").score == scores[best]
    changed = ["--set", "run.steps=7", "--set", "eval.count=2"]
    assert main(["resume", str(folder / "runs" / "best"), *changed]) == DONE
    kept = sorted(path.name for path in directory.glob("step-*"))
    assert kept == ["step-000007"], "scores of other prompts are not compared"


def test_held_out_prompts_may_change_when_a_run_goes_on_and_come_from_a_program(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = folder / "own.jsonl"
    shutil.copy(folder / "held_out.jsonl", own)
    assert oppo(folder, "", *EXACT, "eval.prompts=own.jsonl", "run.name=moving") == DONE
    own.write_text(own.read_text().splitlines()[0] + "\n")
    assert main(["resume", str(folder / "runs" / "moving"), "--set", "run.steps=5"]) == DONE
    assert "own.jsonl is not what it was when the run began: held-out scores from now on" in capsys.readouterr().err
    last = records(folder, "moving", "eval.jsonl")[-1]
    assert "eval/score_ci95" not in last, "one prompt is left"
    rows = [{"prompt": "w5 w6", "goal": 1}, {"prompt": "w7", "goal": 2}]
    run = train(folder / "config.toml", [*EXACT, "run.name=rows", "eval.every=4"], eval_prompts=rows)
    found = [json.loads(line) for line in (run.path / "eval.jsonl").read_text().splitlines()]
    assert [each["step"] for each in found] == [0, 4]


def test_a_policy_is_evaluated_as_in_its_run_by_settings_by_rows_and_by_the_directory_of_the_run(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    chosen = [*EXACT, "run.name=apart", "eval.samples=2", "step.overcommit=0"]
    run = train(folder / "config.toml", chosen, eval_prompts=rows, prompts=rows).path
    first, *_, last = records(folder, "apart", "eval.jsonl")
    trained = evaluate(run, eval_prompts=rows)
    file = evaluate(folder / "config.toml", [*chosen, *EVAL])
    for found, line in ((trained, last), (file, first)):
        expected = {name: value for name, value in line.items() if name in found.metrics and name != "eval/seconds"}
        assert found.metrics == expected | {"eval/seconds": found.metrics["eval/seconds"]}
        assert found.score == np.mean([each.score for each in found.answers])
    assert evaluate(run, ["eval.prompts=../../held_out.jsonl"]).metrics["eval/score"] == trained.score
    with pytest.raises(ConfigError, match="nothing is evaluated without held-out prompts"):
        evaluate(folder / "config.toml")
    with pytest.raises(ConfigError, match="nothing is evaluated without held-out prompts"):
        evaluate(run)  # whose own are rows of the program
    with pytest.raises(ConfigError, match=r"is a directory, and settings are a file, such as"):
        train(run)
    with pytest.raises(ConfigError, match="has no trained policy"):
        evaluate(folder, eval_prompts=rows)


@pytest.mark.adapters
def test_trained_adapters_are_evaluated_on_their_base(folder: Path) -> None:
    run = train(folder / "config.toml", [*EXACT, *EVAL, "run.name=lora", "models.lora_rank=2"]).path
    assert evaluate(run).score == records(folder, "lora", "eval.jsonl")[-1]["eval/score"]


def test_the_program_of_the_page_trains_goes_on_and_evaluates(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = [block for block in fenced(ROOT / "docs" / "runs.md", "python") if "oppo.evaluate" in block]
    (folder / "program.py").write_text(program.replace("run.steps=20", "run.steps=2").replace("=40", "=3"))
    monkeypatch.chdir(folder)
    runpy.run_path("program.py", run_name="__main__")
    scores = [records(folder, "first", "eval.jsonl")[at]["eval/score"] for at in (0, -1)]
    assert capsys.readouterr().out.endswith(f"{scores[0]} {scores[1]}\n")


def test_a_reward_that_fails_on_held_out_prompts_fails_as_in_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "", *EXACT, *EVAL, "rewards.0.source=judges.py:absent", "run.name=absent") == FAILED
    said = capsys.readouterr().err
    assert "reward function 'absent' raised OSError: 401 for https://***@judge.example/ at" in said
    assert "hunter2secret" not in said
    assert "in the evaluation before the first step" in said
