"""``step.algorithm = "distill"``, and a teacher beside a task: what is learned, resumed, counted and refused."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Final

import pytest
import torch

from oppo.cli import DONE, UNUSABLE
from oppo.config.load import load
from oppo.run.deployment import Deployment
from oppo.run.memory import Expected, expected, load_of
from tests.hf import tiny
from tests.kit.workplace import CONFIG, furnish, oppo, records, tokenizer

PLAIN: Final = CONFIG.replace('[[rewards]]\nsource = "reward"\n', "")
"""Settings without a reward."""

ALONE: Final = ("run.panel=off", "run.scorers=thread", "step.algorithm=distill", "models.teacher=teacher")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = furnish(tmp_path_factory.mktemp("distill"))
    for name, shifted in (("teacher", False), ("foreign", True)):
        tiny.causal("llama", seed=5).save_pretrained(folder / name)
        tokenizer(shifted=shifted).save_pretrained(folder / name)
    (folder / "config.toml").write_text(PLAIN)
    (folder / "scored.toml").write_text(CONFIG)
    (folder / "own.py").write_text("from oppo.losses import ClippedLoss\ndef plain(): return ClippedLoss()\n")
    return folder


FORWARD: Final = ("algorithm.distill_top_k=8", "algorithm.distill_beta=0")


@pytest.mark.parametrize("chosen", [(), FORWARD], ids=["advantage", "loss"])
def test_the_kl_to_the_teacher_falls_without_any_reward_and_with_responses_deferred(
    folder: Path, chosen: tuple[str, ...]
) -> None:
    learning = ("run.steps=30", "step.batch=16", "trainer.learning_rate=1e-2", "trainer.epochs=4")
    name = f"learns-{len(chosen)}"
    assert oppo(folder, "", *ALONE, *learning, *chosen, f"run.name={name}") == DONE
    steps = records(folder, name, "metrics.jsonl")
    assert all(("loss/distill_avg" in step) == bool(chosen) for step in steps)
    kl = [step["objective/teacher_kl"] for step in steps]
    assert mean(kl[-5:]) < 0.7 * mean(kl[:5]), kl
    assert any(step["deferral/deferred"] for step in steps)
    assert all(step["objective/scores"] == 0 for step in steps)


def test_each_prompt_has_the_teacher_that_its_column_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for name, domains in (("domains", ("own", "other")), ("wrong", ("own", "third"))):
        told = [{**row, "domain": domains[number % 2]} for number, row in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    several = (
        *ALONE[:3],
        "models.teacher={own = 'actor', other = 'teacher'}",
        "models.teacher_column=domain",
        "data.prompts=domains.jsonl",
        "run.steps=2",
    )
    assert oppo(folder, "", *several, "run.name=several") == DONE
    kl = [step["objective/teacher_kl"] for step in records(folder, "several", "metrics.jsonl")]
    assert oppo(folder, "", *ALONE, "data.prompts=domains.jsonl", "run.steps=2", "run.name=one") == DONE
    alone = [step["objective/teacher_kl"] for step in records(folder, "one", "metrics.jsonl")]
    assert 0 < kl[0] < alone[0], "those whose teacher is the policy itself add nothing"
    found = {each.model: each for each in _needs(folder, *several)}
    assert found["teacher.own"].bytes == found["teacher.other"].bytes
    faults = {
        "data.prompts=prompts.jsonl": "models.teacher_column = 'domain' is no column of data.prompts; the columns",
        "data.prompts=wrong.jsonl": "expected one of own, other in the column 'domain' of its prompt, got 'third'",
        "models.teacher_column=": "teacher_column names the column by which each prompt has one of several teachers",
    }
    for number, (fault, message) in enumerate(faults.items()):
        assert oppo(folder, "", *several, fault, f"run.name=fault-{number}") != DONE
        assert message in capsys.readouterr().err


def test_a_group_of_equal_scores_still_learns_from_a_teacher(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "even.py").write_text("def reward(prompts, completions):\n    return [1.0 for _ in completions]\n")
    tied = (
        *ALONE[:2],
        "rewards=[{source='even.py:reward'}]",
        "step.algorithm=dapo",
        "algorithm.samples=2",
        "run.steps=1",
    )
    assert oppo(folder, "", *tied, "run.name=untaught") != DONE
    assert "raise algorithm.max_rounds, or train such groups all the same: algorithm.dynamic_sampling = false" in (
        " ".join(capsys.readouterr().err.split())
    )
    assert oppo(folder, "", *tied, "models.teacher=teacher", "algorithm.distill=1", "run.name=taught") == DONE
    (step,) = records(folder, "taught", "metrics.jsonl")
    assert step["objective/frac_zero_std"] == 1
    assert step["train/grad_norm"] > 0


LISTED: Final = {"whole": (), "top-k": ("algorithm.distill_top_k=16",), "all": ("algorithm.distill_top_k=96",)}


@pytest.mark.parametrize("chosen", LISTED)
def test_ids_that_only_a_teacher_and_a_reference_have_make_no_difference(folder: Path, chosen: str) -> None:
    found = {}
    for name in ("teacher", "longer"):
        if name == "longer":
            longer = tiny.lengthened(tiny.causal("llama", seed=5))
            longer.save_pretrained(folder / name)
            tokenizer().save_pretrained(folder / name)
        given = (f"models.teacher={name}", f"models.reference={name}", f"run.name={name}-{chosen}", "run.steps=1")
        assert oppo(folder, "", *ALONE[:3], *LISTED[chosen], *given) == DONE
        (found[name],) = records(folder, f"{name}-{chosen}", "metrics.jsonl")
    measured = {"objective/teacher_kl", "objective/kl", "train/grad_norm"} | (
        {"loss/distill_avg"} if LISTED[chosen] else set()
    )
    for metric in measured:
        assert found["longer"][metric] == pytest.approx(found["teacher"][metric], rel=1e-4), metric


def test_a_teacher_with_another_tokenizer_is_learnt_from(folder: Path) -> None:
    learning = ("run.steps=20", "step.batch=16", "trainer.learning_rate=1e-2", "trainer.epochs=4")
    foreign = ("models.teacher=foreign", "run.name=foreign")
    assert oppo(folder, "", *ALONE, *learning, *foreign) == DONE
    kl = [step["objective/teacher_kl"] for step in records(folder, "foreign", "metrics.jsonl")]
    assert mean(kl[-5:]) < 0.8 * mean(kl[:5]), kl


def _needs(folder: Path, *chosen: str) -> list[Expected]:
    settings = load(folder / "config.toml", chosen)
    return expected(Deployment.of(settings), None)


def test_the_teacher_is_counted_and_placed_like_the_reference(folder: Path) -> None:
    settings = load(folder / "config.toml", [*ALONE, "models.reference=actor", "placement.teacher=cpu"])
    assert Deployment.of(settings).scored == ["reference", "reward", "teacher"]
    needs = {each.model: each for each in expected(Deployment.of(settings), load_of(settings, 6))}
    assert needs["teacher"].bytes == needs["reference"].bytes
    assert "teacher" in settings.can_be_remote
    assert load(folder / "config.toml", ALONE).toml() == load(folder / "config.toml", ALONE).changed({}).toml()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            ("step.algorithm=distill",),
            "models.teacher names none: give a causal language model with the policy's token",
        ),
        (("algorithm.distill=0.5",), "'ppo' with algorithm.distill = 0.5 learns the log-probs of a teacher"),
        (("models.teacher=teacher",), "learns nothing of it: set algorithm.distill above 0, or leave models.teacher"),
        (("models.teacher=teacher", "step.algorithm=online_dpo"), "choose step.algorithm = 'distill', or another"),
        ((*ALONE[2:], "algorithm.kl=0.1"), "unknown key 'algorithm.kl' (it is a key of [algorithm] for 'ppo'"),
        ((*ALONE[2:], "algorithm.distill=0"), "algorithm.distill: expected more than 0, got 0"),
        ((*ALONE[2:], "algorithm.distill_beta=0.5"), "give distill_top_k, or leave distill_beta out"),
        ((*ALONE[2:], *FORWARD, "algorithm.clip=0.1"), "so there is no policy loss that reads clip: leave that out"),
        ((*ALONE[2:], "algorithm.distill_top_k=999"), "expected 1 to 96, the ids that may be sampled, got 999"),
        (
            ("algorithm.distill_top_k=4",),
            "distill_top_k = 4 is of a teacher, whose weight, distill, is 0: give distill",
        ),
        ((*ALONE[2:], "algorithm.distill_top_k=4", "step.loss=own.py:plain"), "reads neither top_logprobs nor"),
        (("placement.teacher=cpu",), "placement.teacher = 'cpu' places a teacher, and models.teacher names none"),
        (
            ("step.algorithm=distill", "models.teacher=foreign", "algorithm.distill_top_k=4"),
            "likeliest ids, and models.teacher has ids of its own: leave distill_top_k out",
        ),
        (
            ("step.algorithm=distill", "models.teacher=foreign", "environment.source=reward.py:short"),
            "models.teacher has another tokenizer and reads a response as one text",
        ),
    ],
)
def test_a_teacher_that_is_missing_idle_or_of_another_tokenizer_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], chosen: tuple[str, ...], message: str
) -> None:
    assert oppo(folder, "", "run.panel=off", "rewards.0.source=reward.py:short", *chosen, "run.name=no") == UNUSABLE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("eval.prompts=prompts.jsonl",), "eval.prompts is about scores, and there are none without [[rewards]]"),
        (("run.keep_best=true",), "run.keep_best = true is about scores"),
        (("step.algorithm=ppo", "models.teacher="), "[rewards] is missing: tables [[rewards]]"),
    ],
)
def test_what_needs_scores_is_refused_without_a_reward(
    folder: Path, capsys: pytest.CaptureFixture[str], chosen: tuple[str, ...], message: str
) -> None:
    assert oppo(folder, "", *ALONE, *chosen, "run.name=no") == UNUSABLE
    assert message in capsys.readouterr().err


def test_a_dry_run_without_a_reward_tries_the_rest(folder: Path) -> None:
    assert oppo(folder, "--dry-run", *ALONE, "run.name=dry") == DONE
