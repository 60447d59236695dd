"""Every algorithm in ``oppo train`` on real models: what is overlapped changes no bit, and each of them learns."""

from __future__ import annotations

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
from oppo.run.train import FINAL
from oppo.stages.advantage import OF_THE_REFERENCE
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo, records, tokenizer, weights

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


@pytest.mark.parametrize(
    ("algorithm", "chosen"),
    [
        *((each, ()) for each in ALGORITHMS),
        ("grpo", ("algorithm.surrogate=sapo", "algorithm.scale_scores=batch")),
        ("ppo", ("algorithm.surrogate=cispo", "algorithm.aggregation=response_sums")),
        ("grpo", ("algorithm.distill=0.5", "models.teacher=teacher", "algorithm.surrogate=clip")),
        ("ppo", ("algorithm.distill=0.5", "models.teacher=teacher", "algorithm.lam=0.9")),
        ("distill", ("algorithm.distill_top_k=5", "algorithm.distill_beta=0.5")),
        (
            "grpo",
            ("algorithm.distill=2.0", "models.teacher=teacher", "algorithm.distill_top_k=3", *NARROW),
        ),
        (
            "ppo",
            ("algorithm.lam_alpha=0.2", "algorithm.lam_value=1.0", "algorithm.nll=0.1", "algorithm.nll_above=-1.1"),
        ),
        ("grpo", ("algorithm.scale_scores=each_reward", "algorithm.samples=4", "algorithm.clip=0.3", SEVERAL)),
    ],
)
def test_every_algorithm_trains_and_streaming_changes_no_bit(
    folder: Path, algorithm: str, chosen: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    exact, name = ("run.deterministic=true", "step.overcommit=0", "run.steps=3", *chosen), request.node.callspec.id
    streamed = trained(folder, f"{name}-streamed", algorithm, *exact, "step.chunk=3")
    learned, begun = weights(folder, f"{name}-streamed"), load_file(folder / "actor/model.safetensors")
    if chosen:  # the matrix of settings has the others
        whole = trained(folder, f"{name}-whole", algorithm, *exact, "step.chunk=whole")
        assert learned == weights(folder, f"{name}-whole")
        assert [step["objective/scores"] for step in streamed] == [step["objective/scores"] for step in whole]
    assert any(tensor.tobytes() != learned[f"actor/{key}"] for key, tensor in begun.items())
    assert all("loss/policy_avg" in step for step in streamed)
    assert all(("policy/kl_avg" in step) == (algorithm in REFERRING - {"online_dpo"}) for step in streamed)


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


def test_a_penalty_on_more_than_a_whole_response_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("step.algorithm=dapo", "algorithm.long_buffer=13", "run.name=too-long")
    assert oppo(folder, "", *COMMON, *chosen) == UNUSABLE
    assert "algorithm.long_buffer = 13 is more than sampling.max_new_tokens = 12" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_truncated_responses_are_left_out_of_the_loss_of_every_algorithm(folder: Path, algorithm: str) -> None:
    chosen = ("algorithm.mask_truncated=true", "run.steps=2", "step.batch=6", "trainer.learning_rate=1e-5")
    steps = trained(folder, f"{algorithm}-masked", algorithm, *chosen)
    episodes = np.diff([0, *(step["episode"] for step in steps)])
    for step, of_the_batch in zip(steps, episodes, strict=True):
        left_out = of_the_batch - step["trained"]
        assert left_out == step["dropped"] - step["deferral/dropped"]
        assert left_out == round(step["response_length/capped"] * of_the_batch)
    assert any("left out of the loss" in str(line) for line in records(folder, f"{algorithm}-masked", "journal.jsonl"))


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


GROUPS = (
    "algorithm.samples=3", "step.batch=3", "step.overcommit=2", "run.steps=4", "run.deterministic=true",
    "run.panel=off", "rewards.0.source=reward.py:short",
)  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "further"),
    [("grpo", ("algorithm.ratio_base=proximal",)), ("rloo", ())],
)
def test_groups_are_trained_whole_and_no_critic_is_loaded_or_saved(
    folder: Path, algorithm: str, further: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"plain-{algorithm}"
    code = oppo(folder, "", *GROUPS, f"step.algorithm={algorithm}", *further, f"run.name={name}")
    said = capsys.readouterr().err
    assert code == DONE, said
    assert "loading the critic" not in said
    lines = records(folder, name, "metrics.jsonl")
    assert [line["trained"] for line in lines] == [9] * 4
    assert any(line["deferral/deferred"] for line in lines)
    for line in lines:
        assert not {"loss/value_avg", "train/critic_grad_norm", "val/clipfrac_avg"} & line.keys()
        assert {"objective/kl", "objective/group_std", "policy/kl_avg"} <= line.keys()
        assert line["objective/kl_coef"] == (0.05 if algorithm == "rloo" else 0), "GRPO has its KL in the loss"
    final = folder / "runs" / name / FINAL
    assert sorted(path.name for path in final.iterdir()) == ["actor"]
    assert (final / "actor" / "tokenizer.json").is_file()
