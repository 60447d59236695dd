"""``step.stream_updates``: groups are trained while others are written, and the run learns what it did before."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo.cli import DONE, FAILED, main
from tests.workplace import furnish, oppo, records

GROUPS = (
    *("run.panel=off", "step.algorithm=rloo", "algorithm.samples=2", "step.batch=4", "run.steps=3"),
    *("trainer.epochs=1", "rewards.0.source=reward.py:short", "run.checkpoint_every=2"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("streamed"))


@pytest.mark.parametrize("trainer", ["thread", "process"])
def test_what_is_streamed_is_the_same_update(folder: Path, trainer: str) -> None:
    chosen = (*GROUPS, f"run.trainer={trainer}")
    streamed, whole = f"streamed-{trainer}", f"whole-{trainer}"
    assert oppo(folder, "", *chosen, "step.stream_updates=true", f"run.name={streamed}") == DONE
    assert oppo(folder, "", *chosen, "models.share_weights=false", f"run.name={whole}") == DONE
    ours, theirs = (records(folder, name, "metrics.jsonl") for name in (streamed, whole))
    for one, other in zip(ours[:1], theirs[:1], strict=True):
        for name in ("objective/scores", "loss/policy_avg", "train/grad_norm", "train/tokens", "train/minibatches"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert [line["version"] for line in ours] == [1, 2, 3]
    assert main(["resume", str(folder / "runs" / streamed), "--set", "run.steps=4"]) == DONE


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.epochs=2", "trainer.epochs = 2"),
        ("trainer.minibatches=2", "trainer.minibatches = 2"),
        ("trainer.router_aux_loss=0.1", "trainer.router_aux_loss = 0.1"),
        ("step.algorithm=ppo", "step.algorithm = 'ppo', whose advantages are not those of a group alone"),
        ("algorithm.score_norm=true", "algorithm.score_norm = true"),
        ("step.algorithm=grpo algorithm.scale_scores=batch", "algorithm.scale_scores = 'batch'"),
        ("algorithm.entropy_coefficient=0.1", "a loss, ClippedLoss, that divides by sizes of several kinds"),
        ("models.share_weights=true", "models.share_weights = true"),
        ("run.deterministic=true", "run.deterministic = true"),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_anything_is_loaded(
    folder: Path, override: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [each for each in GROUPS if "samples" not in each or "ppo" not in override]
    chosen = (*given, "step.stream_updates=true", "models.policy=nowhere", "run.name=refused", *override.split())
    assert oppo(folder, "", *chosen) not in {DONE, FAILED}
    assert said in capsys.readouterr().err
