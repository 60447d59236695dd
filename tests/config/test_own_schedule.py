"""An admission and a loss of one's own in ``oppo train``, by their files, with the settings of their tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oppo import resume, train
from oppo.algorithms.group import RLOO
from oppo.cli import DONE, UNUSABLE, main
from oppo.config.load import load, resolve
from oppo.run.train import FINAL
from tests.kit.workplace import furnish, oppo, records

OWN = '''
"""An admission and losses of a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oppo.admission import Overcommit
from oppo.declared import Fraction, setting
from oppo.losses import ClippedLoss, LossValue, Input, Inputs, Unit, masked_mean, means


@dataclass
class Tails:
    """Carries more and more, up to a share of the batch."""

    batch: int
    max_deferrals: int
    share: Fraction = setting(0.5, "of the batch, carried at most")
    extra: int = field(default=0, init=False)

    def admit(self, view):
        return max(0, self.batch + self.extra - view.deferred)

    def cut(self, view):
        return view.placed >= self.batch and not view.overdue

    def observe(self, seen):
        self.extra = min(self.extra + 1, int(self.share * self.batch))

    def metrics(self):
        return {"deferral/overcommit": float(self.extra)}

    def state_dict(self):
        return {"extra": self.extra}

    def load_state_dict(self, state):
        self.extra = int(state["extra"])


def twice(batch: int, times: int = 2):
    return Overcommit(batch, batch // times)


def none(batch: int):
    return None


def picky(batch: int, limit: int = 3):
    if batch > limit:
        raise ValueError(f"a batch of {batch} is too large")
    return Overcommit(batch)


@dataclass(frozen=True)
class Reinforce:
    """REINFORCE, times a factor."""

    factor: float = 1.0
    unit: Unit = "token"
    reads: frozenset[Input] = frozenset({"logprobs", "advantages"})
    measures: frozenset[Input] = frozenset()

    def __call__(self, inputs: Inputs) -> LossValue:
        each = -self.factor * inputs["advantages"] * inputs["logprobs"]
        loss = masked_mean(each, inputs.mask, total=inputs.whole.rows)
        return LossValue(loss, {"loss/policy_avg": loss, "loss/mine": loss / self.factor})

    def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return means(minibatches)


def clipped(clip: float = 0.3):
    return ClippedLoss(clip=clip)


class Nothing:
    """No loss."""
'''

CHOSEN = ("run.deterministic=true", "run.panel=off", "rewards.0.source=reward.py:short")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    (furnish(tmp_path) / "mine.py").write_text(OWN)
    return tmp_path


def test_an_admission_of_a_file_decides_and_its_state_is_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = (*CHOSEN, "step.admission=mine.py:Tails", "admission.share=0.75", "run.steps=3", "run.checkpoint_every=1")
    assert oppo(folder, "", *chosen) == DONE
    run = str(folder / "runs" / "first")
    assert main(["resume", run, "--set", "run.steps=5"]) == DONE
    extras = [line["deferral/overcommit"] for line in records(folder, "first", "metrics.jsonl")]
    assert extras == [0, 1, 2, 3, 3]
    resolved = (folder / "runs" / "first" / "config.toml").read_text()
    assert f'admission = "{folder / "mine.py"}:Tails"' in resolved
    assert "[admission]\nshare = 0.75\n" in resolved
    assert main(["resume", run, "--set", "run.steps=6", "--set", "admission.share=0.5"]) == UNUSABLE
    assert "admission.share cannot change when a run is resumed" in capsys.readouterr().err
    (folder / "mine.py").write_text(OWN + "# edited\n")
    assert main(["resume", run, "--set", "run.steps=6"]) == UNUSABLE
    assert "mine.py is not what it was when the run began" in capsys.readouterr().err


def test_a_function_makes_an_admission(folder: Path) -> None:
    assert oppo(folder, "", *CHOSEN, "step.admission=mine.py:twice", "admission.times=4") == DONE
    assert [line["trained"] for line in records(folder, "first", "metrics.jsonl")] == [4, 4]
    assert records(folder, "first", "metrics.jsonl")[0]["deferred"] == 1


def test_a_loss_of_a_file_is_what_is_trained(folder: Path) -> None:
    chosen = (*CHOSEN, "step.algorithm=grpo", "step.loss=mine.py:Reinforce")
    assert oppo(folder, "", *chosen, "step.algorithm=ppo") == UNUSABLE  # which trains a critic; the loss ignores it
    assert oppo(folder, "", *chosen, "loss.factor=3.0", "algorithm.samples=2") == DONE
    for line in records(folder, "first", "metrics.jsonl"):
        assert line["loss/policy_avg"] == pytest.approx(3 * float(str(line["loss/mine"])), rel=1e-5)
    assert "[loss]\nfactor = 3.0" in (folder / "runs" / "first" / "config.toml").read_text()


def test_a_function_makes_a_loss(folder: Path) -> None:
    assert oppo(folder, "", *CHOSEN, "step.algorithm=rloo", "step.loss=mine.py:clipped", "loss.clip=0.1") == DONE
    assert "policy/clipfrac_avg" in records(folder, "first", "metrics.jsonl")[0]


def test_a_program_trains_from_a_mapping_or_from_settings_as_from_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    document = {
        "run": {"name": "mapped", "steps": 1, "panel": "off", "deterministic": True},
        "models": {"policy": "actor"},
        "rewards": [{"source": "reward.py:short"}],
        "data": {"prompts": "prompts.jsonl"},
        "sampling": {"max_new_tokens": 12},
        "step": {"batch": 4, "algorithm": "rloo"},
    }
    directory = train(document | {"step": {"batch": 4, "algorithm": RLOO()}}, ["run.steps=2"])
    assert directory.path == folder / "runs" / "mapped"
    settings = resolve(document, folder)
    assert train(settings, ["run.name=checked", "run.steps=2"]).path == folder / "runs" / "checked"
    train(settings.changed({"run": {"name": "kept", "steps": 2}}))
    assert load(folder / "runs" / "kept" / "config.toml").run.steps == 2
    made = {
        (folder / "runs" / name / FINAL / "actor" / "model.safetensors").read_bytes() for name in ("mapped", "kept")
    }
    assert made == {(folder / "runs" / "checked" / FINAL / "actor" / "model.safetensors").read_bytes()}
    assert resume(str(directory.path), ["run.steps=3"]).path == directory.path
    assert len(records(folder, "mapped", "metrics.jsonl")) == 3
