"""Algorithms, admissions and losses of files in ``oppo train``, with their settings; and a program's own graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from oppo.algorithms.base import Roles
from oppo.algorithms.group import GRPO, RLOO
from oppo.algorithms.ppo import ppo
from oppo.cli import DONE, UNUSABLE, main
from oppo.config.extensions import with_name
from oppo.config.load import load_settings, resolve
from oppo.config.settings import Settings
from oppo.errors import ConfigError, GraphError
from oppo.events import StepReport
from oppo.graph import Graph
from oppo.run.train import FINAL, resume, train
from oppo.stages import GAE
from tests.kit.workplace import furnish, oppo, records

OWN = '''
"""Algorithms of a user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oppo.algorithms.group import GroupAlgorithm
from oppo.declared import Positive, setting
from oppo.returns import GroupAdvantage
from oppo.events import StepReport
from oppo.algorithms.base import Roles
from oppo.graph import Graph
from oppo.losses import ClippedLoss


@dataclass(frozen=True)
class DoubledLoss(ClippedLoss):
    """A loss of one's own."""


@dataclass(frozen=True, kw_only=True)
class Doubled(GroupAlgorithm):
    """Doubled: scores count twice."""

    compared: ClassVar[GroupAdvantage] = "centred"

    twice: Positive = setting(2.0, "what the scores are multiplied by")

    @property
    def shaping(self):
        from dataclasses import replace

        return replace(super().shaping, scale=self.twice)

    def loss(self):
        return DoubledLoss(**vars(super().loss()))


def recipe(*, policy, reference, reward, trainer, admission, chunks, samples: int = 2, scale: Positive = 2.0, tag=None):
    """A function: GRPO whose scores count more."""
    from oppo.algorithms.group import grpo
    from oppo.returns import GroupAdvantage
    from oppo.returns import ScoreShaping
    from oppo.stages import GroupRelative

    assert tag is None
    return grpo(
        policy=policy, reference=reference, reward=reward, trainer=trainer, admission=admission, chunks=chunks,
        samples=samples, advantage=GroupRelative(shaping=ScoreShaping(scale=scale)),
    )


def whole(roles, critic, lam: float = 1.0):
    """A function of all that a run has."""
    from oppo.algorithms.ppo import ppo
    from oppo.stages import GAE

    assert roles.critic is critic
    return ppo(
        policy=roles.policy, reference=roles.reference, reward=roles.reward, critic=critic, trainer=roles.trainer,
        admission=roles.admission, chunks=roles.chunks, advantage=GAE(lam=lam, kl=0.125),
    )


def broken(roles):
    raise ValueError("no such stage")


def nothing(roles):
    return None


class Blunder(Doubled):
    """Raises where a run asks for its graph."""

    def graph(self, roles):
        return roles.polcy


class Empty(Doubled):
    def graph(self, roles):
        super().graph(roles)


class Lossless(Doubled):
    def loss(self):
        return {}["loss"]


class Forgetful(Doubled):
    def loss(self):
        super().loss()


@dataclass(frozen=True, kw_only=True)
class Astray(Doubled):
    twice: Positive = setting(-2.0, "what the scores are multiplied by")

    def __post_init__(self):
        pass


class Unsure(Doubled):
    @property
    def refers(self):
        return self.reference.refers


class Miswired(Doubled):
    def graph(self, roles):
        from oppo.stages import GroupRelative

        return super().graph(roles).replace(advantages=GroupRelative())


def asks(policy, weather: object):
    """Asks for something that no run has."""


class Bare:
    """No dataclass."""


@dataclass(frozen=True)
class Lacking:
    """No algorithm."""

    responses: int = 1


number = 7
'''

MINE = '''
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

CHOSEN = (
    "step.algorithm=own.py:Doubled", "algorithm.samples=2", "algorithm.kl=0.0", "rewards.0.source=reward.py:short",
    "run.deterministic=true", "run.panel=off",
)  # fmt: skip


QUIET = ("run.deterministic=true", "run.panel=off", "rewards.0.source=reward.py:short")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    (furnish(tmp_path) / "own.py").write_text(OWN)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def test_a_class_of_a_file_trains_with_its_settings_and_its_run_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "", *CHOSEN, "algorithm.twice=3.0", "run.checkpoint_every=1") == DONE
    steps = records(folder, "first", "metrics.jsonl")
    assert [step["trained"] for step in steps] == [8, 8]
    for step in steps:
        assert step["objective/shaped_scores"] == pytest.approx(3 * step["objective/scores"], rel=1e-6)
    resolved = (folder / "runs" / "first" / "config.toml").read_text()
    assert f'algorithm = "{folder / "own.py"}:Doubled"' in resolved
    assert "twice = 3.0" in resolved
    run = str(folder / "runs" / "first")
    assert main(["resume", run, "--set", "run.steps=3"]) == DONE
    assert len(records(folder, "first", "metrics.jsonl")) == 3
    (folder / "own.py").write_text(OWN + "# edited\n")
    assert main(["resume", run, "--set", "run.steps=4"]) == UNUSABLE
    said = " ".join(capsys.readouterr().err.split())
    assert "own.py is not what it was when the run began" in said
    assert main(["resume", run, "--set", "run.steps=4", "--accept-changed-code"]) == DONE


def test_a_function_of_a_file_is_given_what_it_names_and_its_other_keywords_are_settings(folder: Path) -> None:
    assert (
        oppo(folder, "", *QUIET, "step.algorithm=own.py:recipe", "algorithm.samples=3", "algorithm.scale=4.0") == DONE
    )
    steps = records(folder, "first", "metrics.jsonl")
    assert [step["trained"] for step in steps] == [12, 12], "four prompts, three responses to each"
    for step in steps:
        assert step["objective/shaped_scores"] == pytest.approx(4 * float(str(step["objective/scores"])), rel=1e-6)
        assert "loss/value_avg" not in step
    resolved = (folder / "runs" / "first" / "config.toml").read_text()
    assert "[algorithm]\nsamples = 3\nscale = 4.0\n" in resolved
    assert main(["resume", str(folder / "runs" / "first"), "--set", "run.steps=3"]) == DONE


def test_a_function_that_names_the_critic_has_one(folder: Path) -> None:
    chosen = ("step.algorithm=own.py:whole", "algorithm.lam=0.5", "run.panel=off")
    assert oppo(folder, "", *chosen) == DONE
    steps = records(folder, "first", "metrics.jsonl")
    assert all("loss/value_avg" in step and step["objective/kl_coef"] == 0.125 for step in steps)
    assert (folder / "runs" / "first" / FINAL / "critic").is_dir()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "own.py:broken raised ValueError: no such stage at"),
        ("nothing", "own.py:nothing must return the graph of a step; got None (NoneType)"),
        (
            "Blunder",
            "own.py:Blunder.graph raised AttributeError: 'Roles' object has no attribute 'polcy' at {file}:{line}",
        ),
        ("Empty", "own.py:Empty.graph must return the graph of a step; got None (NoneType)"),
        ("Lossless", "own.py:Lossless.loss raised KeyError: 'loss' at {file}:{line} in loss"),
        (
            "Forgetful",
            "own.py:Forgetful.loss returned no loss, since NoneType lacks unit, reads, measures, metrics, __call__: ",
        ),
        ("Unsure", "own.py:Unsure.refers raised AttributeError: 'Unsure' object has no attribute 'reference' at"),
    ],
)
def test_a_function_or_a_class_that_fails_is_named_with_the_line(
    folder: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "", f"step.algorithm=own.py:{name}", "rewards.0.source=reward.py:short") == UNUSABLE
    said = " ".join(capsys.readouterr().err.split())
    lines = {"Blunder": "return roles.polcy", "Lossless": 'return {}["loss"]'}
    line = 1 + next((at for at, text in enumerate(OWN.splitlines()) if text.strip() == lines.get(name)), -1)
    assert message.format(file=folder / "own.py", line=line) in said
    assert "error: step.algorithm: " in said
    assert not (folder / "runs").exists()


def test_a_graph_that_is_wired_wrongly_is_refused_in_the_words_of_the_graph(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "", "step.algorithm=own.py:Miswired", "rewards.0.source=reward.py:short") == UNUSABLE
    said = capsys.readouterr().err
    assert "'advantages'" in said
    assert "Traceback" not in said
    assert f"raised by {folder / 'own.py'}:Miswired.graph at {folder / 'own.py'}:" in " ".join(said.split())


def test_a_program_trains_with_a_graph_of_its_own(folder: Path, messages: list[str]) -> None:
    made = list[Graph[StepReport]]()

    def undiscounted(roles: Roles) -> Graph[StepReport]:
        assert roles.critic is not None
        made.append(
            ppo(
                policy=roles.policy,
                reference=roles.reference,
                reward=roles.reward,
                critic=roles.critic,
                trainer=roles.trainer,
                admission=roles.admission,
                chunks=roles.chunks,
                advantage=GAE(lam=1.0, kl=0.25),
            )
        )
        return made[-1]

    directory = train(folder / "config.toml", ["run.panel=off"], graph=undiscounted)
    assert directory.path == folder / "runs" / "first"
    assert [step["objective/kl_coef"] for step in records(folder, "first", "metrics.jsonl")] == [0.25, 0.25]
    assert (directory.path / FINAL / "actor").is_dir()
    assert any("loading the policy" in message for message in messages)
    resume(directory.path, ["run.steps=3"], graph=undiscounted)
    assert len(records(folder, "first", "metrics.jsonl")) == 3
    assert len(made) == 2


def test_a_graph_without_the_stages_of_a_run_is_refused(folder: Path) -> None:
    def renamed(roles: Roles) -> Graph[StepReport]:
        from oppo.events import Prompt, merge_chunks, rollout_of
        from oppo.graph import GraphBuilder
        from oppo.stages import Generate, GroupRelative, Score, Update

        g: GraphBuilder[Prompt] = GraphBuilder("mine", merge=merge_chunks, key=rollout_of)
        rollout = g.add("decode", Generate(roles.policy, roles.admission, roles.chunks, 2), g.prompts)
        batch = g.add("advantage", GroupRelative(), rollout, g.add("reward", Score(roles.reward), rollout))
        return g.build(g.add("update", Update(roles.trainer, [roles.policy]), batch))

    with pytest.raises(GraphError, match="generate"):
        train(folder / "config.toml", graph=renamed)


def test_an_algorithms_object_stands_for_its_name_and_its_settings() -> None:
    document: dict[str, object] = {"run": {"steps": 3}, "step": {"algorithm": GRPO(samples=7), "batch": 2}}
    named = with_name(document)
    assert named["step"] == {"algorithm": "grpo", "batch": 2}
    assert Settings.of(
        {"models": {"policy": "p"}, "rewards": [{"source": "r"}], "data": {"prompts": "d"}, **named}
    ).algorithm == GRPO(samples=7)
    assert with_name({"step": {"algorithm": GRPO}}) == {"step": {"algorithm": "grpo"}}
    for plain in ({"step": {"algorithm": "ppo"}}, {"step": 7}, {}):
        assert with_name(plain) is plain


@dataclass(frozen=True)
class Elsewhere:
    """An algorithm of no file that oppo has run."""


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"step": {"algorithm": Elsewhere()}}, "step.algorithm: expected the name of an algorithm, .* Elsewhere"),
        ({"step": {"algorithm": 7}}, r"step.algorithm: expected the name of an algorithm, .* got 7 \(int\)"),
        (
            {"step": {"algorithm": GRPO(samples=7)}, "algorithm": {"samples": 8}},
            r"it is a GRPO with its settings, so leave the section \[algorithm\] out",
        ),
    ],
)
def test_another_object_is_refused_by_name(document: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_name(document)


def test_an_admission_of_a_file_decides_and_its_state_is_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = (*QUIET, "step.admission=mine.py:Tails", "admission.share=0.75", "run.steps=3", "run.checkpoint_every=1")
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
    (folder / "mine.py").write_text(MINE + "# edited\n")
    assert main(["resume", run, "--set", "run.steps=6"]) == UNUSABLE
    assert "mine.py is not what it was when the run began" in capsys.readouterr().err


def test_functions_make_an_admission_and_a_loss(folder: Path) -> None:
    chosen = ("step.admission=mine.py:twice", "admission.times=4", "step.loss=mine.py:clipped", "loss.clip=0.1")
    assert oppo(folder, "", *QUIET, *chosen, "step.algorithm=rloo", "algorithm.samples=2") == DONE
    lines = records(folder, "first", "metrics.jsonl")
    assert [line["trained"] for line in lines] == [8, 8]
    assert lines[0]["deferred"] == 2
    assert "policy/clipfrac_avg" in lines[0]


def test_a_loss_of_a_file_is_what_is_trained(folder: Path) -> None:
    chosen = (*QUIET, "step.algorithm=grpo", "step.loss=mine.py:Reinforce")
    assert oppo(folder, "", *chosen, "step.algorithm=ppo") == UNUSABLE  # which trains a critic; the loss ignores it
    assert oppo(folder, "", *chosen, "loss.factor=3.0", "algorithm.samples=2") == DONE
    for line in records(folder, "first", "metrics.jsonl"):
        assert line["loss/policy_avg"] == pytest.approx(3 * float(str(line["loss/mine"])), rel=1e-5)
    assert "[loss]\nfactor = 3.0" in (folder / "runs" / "first" / "config.toml").read_text()


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
    assert load_settings(folder / "runs" / "kept" / "config.toml").run.steps == 2
    made = {
        (folder / "runs" / name / FINAL / "actor" / "model.safetensors").read_bytes() for name in ("mapped", "kept")
    }
    assert made == {(folder / "runs" / "checked" / FINAL / "actor" / "model.safetensors").read_bytes()}
    assert resume(str(directory.path), ["run.steps=3"]).path == directory.path
    assert len(records(folder, "mapped", "metrics.jsonl")) == 3
