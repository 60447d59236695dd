"""Every algorithm in ``oppo train`` on real models, with and without a teacher: what it trains, saves and refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms import ALGORITHMS
from oppo.algorithms.base import Roles
from oppo.algorithms.group import DAPO
from oppo.cli import DONE, UNUSABLE
from oppo.config.load import load_settings
from oppo.run.deployment import Deployment
from oppo.run.memory import Expected, expected
from oppo.run.train import FINAL
from oppo.stages.advantage import OF_THE_REFERENCE
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar
from tests.config.test_refusals import entries
from tests.hf import tiny
from tests.kit.workplace import CONFIG, furnish, oppo, records, tokenizer, weights

OWN: Final[Mapping[str, Sequence[str]]] = {
    "dapo": ["algorithm.samples=3", "algorithm.max_rounds=50"],
    "gspo": ["algorithm.samples=3"],
    "grpo": ["algorithm.samples=3"],
    "rloo": ["algorithm.samples=3"],
    "dr_grpo": ["algorithm.samples=3"],
    "distill": ["models.teacher=teacher"],
}
"""The settings of an algorithm that are not at their defaults here."""

REFERRING: Final = {"ppo", "grpo", "rloo", "reinforce_pp", "online_dpo"}
"""The algorithms with a KL to the reference by default."""

SEVERAL: Final = "rewards=[{source='reward.py:short', name='short'}, {source='reward.py:odd', name='odd', weight=0.5}]"

NARROW: Final = ("algorithm.distill_beta=0", "sampling.top_k=7")

COMMON = ("run.panel=off", "rewards.0.source=reward.py:short", "step.batch=3", "run.scorers=thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = furnish(tmp_path_factory.mktemp("algorithms"))
    tiny.causal("llama", seed=5).save_pretrained(folder / "teacher")
    tokenizer().save_pretrained(folder / "teacher")
    return folder


def trained(folder: Path, name: str, algorithm: str, *further: str) -> Sequence[Mapping[str, Any]]:
    """Run an algorithm; return the metrics of its steps."""
    chosen = (*COMMON, f"step.algorithm={algorithm}", *OWN.get(algorithm, ()), f"run.name={name}", *further)
    assert oppo(folder, "", *chosen) == DONE
    return records(folder, name, "metrics.jsonl")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains_its_models_and_leaves_truncated_responses_out_of_its_loss(
    folder: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, begun = f"{algorithm}-masked", load_file(folder / "actor/model.safetensors")
    chosen = ("algorithm.mask_truncated=true", "run.steps=2", "step.batch=6", "trainer.learning_rate=1e-5")
    steps = trained(folder, name, algorithm, *chosen)
    learned, critic = weights(folder, name), ALGORITHMS[algorithm].has_critic
    changed = any(tensor.tobytes() != learned[f"actor/{key}"] for key, tensor in begun.items())
    assert changed or algorithm == "online_dpo", "a pair with a truncated response teaches nothing"
    assert ("loading the critic" in capsys.readouterr().err) is critic
    saved = sorted(path.name for path in (folder / "runs" / name / FINAL).iterdir())
    assert saved == (["actor", "critic"] if critic else ["actor"])
    episodes = np.diff([0, *(step["episode"] for step in steps)])
    for step, of_the_batch in zip(steps, episodes, strict=True):
        if step["trained"]:
            assert ("policy/kl_avg" in step) == (algorithm in REFERRING - {"online_dpo"})
            assert {"loss/policy_avg", *({"loss/value_avg"} if critic else ())} <= step.keys()
        assert critic or not {"loss/value_avg", "train/critic_grad_norm", "val/clipfrac_avg"} & step.keys()
        left_out = of_the_batch - step["trained"]
        assert left_out == step["dropped"] - step["deferral/dropped"]
        assert left_out == round(step["response_length/capped"] * of_the_batch)
    assert any("left out of the loss" in str(line) for line in records(folder, name, "journal.jsonl"))


@pytest.mark.parametrize(
    ("algorithm", "chosen"),
    [
        ("distill", ("algorithm.distill_top_k=5", "algorithm.distill_beta=0.5")),
        ("grpo", ("algorithm.distill=2.0", "models.teacher=teacher", "algorithm.distill_top_k=3", *NARROW)),
        (
            "ppo",
            ("algorithm.lam_alpha=0.2", "algorithm.lam_value=1.0", "algorithm.nll=0.1", "algorithm.nll_above=-1.1"),
        ),
        ("ppo", ("algorithm.samples=2", "trainer.minibatches=4", "step.batch=4")),
        ("grpo", ("algorithm.scale_scores=each_reward", "algorithm.samples=4", "algorithm.clip=0.3", SEVERAL)),
    ],
)
def test_options_that_the_matrix_does_not_have_train_alike_streamed_and_whole(
    folder: Path, algorithm: str, chosen: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    exact, name = ("run.deterministic=true", "step.overcommit=0", "run.steps=2", *chosen), request.node.callspec.id
    streamed = trained(folder, f"{name}-streamed", algorithm, *exact, "step.chunk=3")
    whole = trained(folder, f"{name}-whole", algorithm, *exact, "step.chunk=whole")
    assert weights(folder, f"{name}-streamed") == weights(folder, f"{name}-whole")
    assert [step["objective/scores"] for step in streamed] == [step["objective/scores"] for step in whole]


def test_a_reference_is_loaded_where_something_refers_to_it_or_where_it_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = ("run.steps=1", "algorithm.dynamic_sampling=false")
    (plain,) = trained(folder, "without", "dapo", *once)
    assert "loading the reference" not in capsys.readouterr().err
    assert not (OF_THE_REFERENCE | {"selection/rounds"}) & plain.keys()
    (named,) = trained(folder, "measured", "dapo", *once, "models.reference=actor")
    assert "loading the reference" in capsys.readouterr().err
    assert named.keys() >= OF_THE_REFERENCE
    assert named["objective/kl"] == pytest.approx(0, abs=1e-3)
    assert weights(folder, "without") == weights(folder, "measured"), "what is measured teaches nothing"


@pytest.mark.parametrize(("buffer", "begin"), [(None, 80), (30, 70), (0, 100)])
def test_the_penalty_of_dapo_grows_over_the_last_fifth_of_a_response(buffer: int | None, begin: int) -> None:
    roles = Roles(
        policy=FakePolicy(),
        reference=None,
        reward=FakeScorer(fake_scalar),
        critic=None,
        proximal=None,
        trainer=FakeTrainer(),
        admission=Overcommit(4),
        chunks=Fixed(8),
        max_new_tokens=100,
    )
    shaping = DAPO(long_buffer=buffer).shaping_of(roles)
    assert (shaping.long_from, shaping.long_to, shaping.long_penalty) == (begin, 100, 1.0)


@pytest.mark.deep
@pytest.mark.parametrize("algorithm", ALGORITHMS.keys() - {"distill"})
def test_it_learns_to_be_short_with_responses_deferred(folder: Path, algorithm: str) -> None:
    rate = "trainer.learning_rate=3e-3"
    steps = trained(folder, f"{algorithm}-learns", algorithm, "step.batch=8", "step.overcommit=2", "run.steps=25", rate)
    scores = [step["objective/scores"] for step in steps]
    assert mean(scores[-5:]) > mean(scores[:5]) + 0.1, scores
    assert any(step["deferral/deferred"] for step in steps)


def test_dapo_replaces_groups_and_punishes_long_responses(folder: Path) -> None:
    steps = trained(folder, "dapo", "dapo", "run.steps=3", "algorithm.long_buffer=12", "algorithm.long_penalty=5")
    assert all(step["selection/rounds"] >= 1 for step in steps)
    assert all(step["objective/frac_zero_std"] == 0 for step in steps), "groups without a difference are replaced"
    assert all(step["objective/shaped_scores"] < step["objective/scores"] for step in steps)


def test_a_truncated_response_may_learn_from_the_value_of_its_last_state(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrapped = trained(folder, "bootstrapped", "ppo", "algorithm.bootstrap_truncated=true", "run.steps=2")
    plain = trained(folder, "not-bootstrapped", "ppo", "run.steps=2")
    assert bootstrapped[0]["response_length/capped"] > 0
    assert bootstrapped[0]["loss/value_avg"] == pytest.approx(plain[0]["loss/value_avg"], rel=1e-5), (
        "the head of values begins at 0"
    )
    assert bootstrapped[1]["loss/value_avg"] != plain[1]["loss/value_avg"]
    for algorithm, further in (("grpo", ()), ("ppo", ("algorithm.mask_truncated=true",))):
        chosen = (f"step.algorithm={algorithm}", "algorithm.bootstrap_truncated=true", *further)
        assert oppo(folder, "", *COMMON, "run.name=refused", *chosen) == UNUSABLE
        assert "bootstrap_truncated" in capsys.readouterr().err


PLAIN: Final = CONFIG.replace('[[rewards]]\nsource = "reward"\n', "")
"""Settings without a reward."""

ALONE: Final = ("run.panel=off", "run.scorers=thread", "step.algorithm=distill", "models.teacher=teacher")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = furnish(tmp_path_factory.mktemp("distill"))
    for name, shifted in (("teacher", False), ("foreign", True)):
        tiny.causal("llama", seed=5).save_pretrained(folder / name)
        tokenizer(shifted=shifted).save_pretrained(folder / name)
    (folder / "config.toml").write_text(PLAIN)
    own = "from oppo.losses import ClippedLoss\ndef plain(): return ClippedLoss()\ndef reply(turn): return None\n"
    (folder / "own.py").write_text(own)
    return folder


FORWARD: Final = ("algorithm.distill_top_k=8", "algorithm.distill_beta=0")


@pytest.mark.parametrize("chosen", [(), FORWARD], ids=["advantage", "loss"])
def test_the_kl_to_the_teacher_falls_without_any_reward_and_with_responses_deferred(
    taught: Path, chosen: tuple[str, ...]
) -> None:
    learning = ("run.steps=30", "step.batch=16", "trainer.learning_rate=1e-2", "trainer.epochs=4")
    name = f"learns-{len(chosen)}"
    assert oppo(taught, "", *ALONE, *learning, *chosen, f"run.name={name}") == DONE
    steps = records(taught, name, "metrics.jsonl")
    assert all(("loss/distill_avg" in step) == bool(chosen) for step in steps)
    kl = [step["objective/teacher_kl"] for step in steps]
    assert mean(kl[-5:]) < 0.7 * mean(kl[:5]), kl
    assert any(step["deferral/deferred"] for step in steps)
    assert all(step["objective/scores"] == 0 for step in steps)


def test_each_prompt_has_the_teacher_that_its_column_names(taught: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (taught / "prompts.jsonl").read_text().splitlines()]
    for name, domains in (("domains", ("own", "other")), ("wrong", ("own", "third"))):
        told = [{**row, "domain": domains[number % 2]} for number, row in enumerate(rows)]
        (taught / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    several = (
        *ALONE[:3],
        "models.teacher={own = 'actor', other = 'teacher'}",
        "models.teacher_column=domain",
        "data.prompts=domains.jsonl",
        "run.steps=2",
    )
    assert oppo(taught, "", *several, "run.name=several") == DONE
    kl = [step["objective/teacher_kl"] for step in records(taught, "several", "metrics.jsonl")]
    assert oppo(taught, "", *ALONE, "data.prompts=domains.jsonl", "run.steps=2", "run.name=one") == DONE
    alone = [step["objective/teacher_kl"] for step in records(taught, "one", "metrics.jsonl")]
    assert 0 < kl[0] < alone[0], "those whose teacher is the policy itself add nothing"
    found = {each.model: each for each in _needs(taught, *several)}
    assert found["teacher.own"].bytes == found["teacher.other"].bytes
    faults = {
        "data.prompts=prompts.jsonl": "models.teacher_column = 'domain' is no column of data.prompts; the columns",
        "data.prompts=wrong.jsonl": "expected one of own, other in the column 'domain' of its prompt, got 'third'",
        "models.teacher_column=": "teacher_column names the column by which each prompt has one of several teachers",
    }
    for number, (fault, message) in enumerate(faults.items()):
        assert oppo(taught, "", *several, fault, f"run.name=fault-{number}") != DONE
        assert message in capsys.readouterr().err


def test_a_group_of_equal_scores_still_learns_from_a_teacher(taught: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (taught / "even.py").write_text("def reward(prompts, completions):\n    return [1.0 for _ in completions]\n")
    tied = (
        *ALONE[:2],
        "rewards=[{source='even.py:reward'}]",
        "step.algorithm=dapo",
        "algorithm.samples=2",
        "run.steps=1",
    )
    assert oppo(taught, "", *tied, "run.name=untaught") != DONE
    assert "raise algorithm.max_rounds, or train such groups all the same: algorithm.dynamic_sampling = false" in (
        " ".join(capsys.readouterr().err.split())
    )
    assert oppo(taught, "", *tied, "models.teacher=teacher", "algorithm.distill=1", "run.name=taught") == DONE
    (step,) = records(taught, "taught", "metrics.jsonl")
    assert step["objective/frac_zero_std"] == 1
    assert step["train/grad_norm"] > 0


LISTED: Final = {"whole": (), "top-k": ("algorithm.distill_top_k=16",), "all": ("algorithm.distill_top_k=96",)}


@pytest.mark.parametrize("chosen", LISTED)
def test_ids_that_only_a_teacher_and_a_reference_have_make_no_difference(taught: Path, chosen: str) -> None:
    found = {}
    for name in ("teacher", "longer"):
        if name == "longer":
            longer = tiny.lengthened(tiny.causal("llama", seed=5))
            longer.save_pretrained(taught / name)
            tokenizer().save_pretrained(taught / name)
        given = (f"models.teacher={name}", f"models.reference={name}", f"run.name={name}-{chosen}", "run.steps=1")
        assert oppo(taught, "", *ALONE[:3], *LISTED[chosen], *given) == DONE
        (found[name],) = records(taught, f"{name}-{chosen}", "metrics.jsonl")
    measured = {"objective/teacher_kl", "objective/kl", "train/grad_norm"} | (
        {"loss/distill_avg"} if LISTED[chosen] else set()
    )
    for metric in measured:
        assert found["longer"][metric] == pytest.approx(found["teacher"][metric], rel=1e-4), metric


def test_a_teacher_with_another_tokenizer_is_learnt_from(taught: Path) -> None:
    learning = ("run.steps=20", "step.batch=16", "trainer.learning_rate=1e-2", "trainer.epochs=4")
    foreign = ("models.teacher=foreign", "run.name=foreign")
    assert oppo(taught, "", *ALONE, *learning, *foreign) == DONE
    kl = [step["objective/teacher_kl"] for step in records(taught, "foreign", "metrics.jsonl")]
    assert mean(kl[-5:]) < 0.8 * mean(kl[:5]), kl


def _needs(folder: Path, *chosen: str) -> list[Expected]:
    settings = load_settings(folder / "config.toml", chosen)
    return expected(Deployment.of(settings), None)


def test_the_teacher_is_counted_and_placed_like_the_reference(taught: Path) -> None:
    settings = load_settings(taught / "config.toml", [*ALONE, "models.reference=actor", "placement.teacher=cpu"])
    assert Deployment.of(settings).scored == ["reference", "reward", "teacher"]
    deployment = Deployment.of(settings)
    needs = {each.model: each for each in expected(deployment, deployment.load(6))}
    assert needs["teacher"].bytes == needs["reference"].bytes
    assert needs["teacher"].bytes.total > 0
    assert "teacher" in settings.can_be_remote
    alone = load_settings(taught / "config.toml", ALONE)
    assert alone.toml() == alone.changed({}).toml()


REFUSED: Final = entries("""
DISTILL algorithm.kl=0.1 | unknown key 'algorithm.kl' (it is a key of [algorithm] for 'ppo'
DISTILL algorithm.distill=0 | algorithm.distill: expected more than 0, got 0
DISTILL algorithm.distill_beta=0.5 | give distill_top_k, or leave distill_beta out
DISTILL algorithm.distill_top_k=8 algorithm.distill_beta=0 algorithm.clip=0.1 |
    so there is no policy loss that reads clip: leave that out
DISTILL algorithm.distill_top_k=999 | expected 1 to 96, the ids that may be sampled, got 999
algorithm.distill_top_k=4 | distill_top_k = 4 is of a teacher, whose weight, distill, is 0: give distill
DISTILL algorithm.distill_top_k=4 step.loss=own.py:plain | reads neither top_logprobs nor
DISTILL models.teacher=foreign algorithm.distill_top_k=4 |
    likeliest ids, and models.teacher has ids of its own: leave distill_top_k out
DISTILL models.teacher=foreign environment.source=own.py:reply |
    models.teacher has another tokenizer and reads a response as one text
""")


@pytest.mark.parametrize(("chosen", "words"), [(chosen, words) for chosen, *words in REFUSED])
def test_a_teacher_that_is_idle_or_of_another_tokenizer_is_refused(
    taught: Path, capsys: pytest.CaptureFixture[str], chosen: str, words: list[str]
) -> None:
    settings = chosen.replace("DISTILL", " ".join(ALONE[2:])).split(" ")
    assert oppo(taught, "", "run.panel=off", "rewards.0.source=reward.py:short", *settings, "run.name=no") == UNUSABLE
    said = capsys.readouterr().err
    assert [each for each in words if each not in said] == []


def test_a_dry_run_without_a_reward_tries_the_rest(taught: Path) -> None:
    assert oppo(taught, "--dry-run", *ALONE, "run.name=dry") == DONE
