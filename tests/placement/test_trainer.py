"""A trainer of one's own, hosted on the caller, in virtual time: what the handle makes of a synchronous core."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from oppo.admission import Overcommit
from oppo.algorithms.ppo import ppo
from oppo.errors import ModelError, ModelLost
from oppo.events import Batch
from oppo.models import ResumableTrainer, SyncedModel, Trained, Trainer, Weights
from oppo.observe import Span
from oppo.placement import Inline
from oppo.placement.trainer import HostedTrainer, TrainerCounts
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    check_trainer,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)


@dataclass(eq=False)
class FakeCore:
    """Counts its updates, and refuses one if asked to."""

    counts: TrainerCounts = field(default_factory=TrainerCounts.new)
    batches: list[Batch] = field(default_factory=list)
    refused: int = -1

    def weights(self) -> Weights:
        return Weights(self.counts.version)

    def update(self, batch: Batch) -> Trained:
        if self.counts.version == self.refused:
            raise ModelError("out of memory")
        self.batches.append(batch)
        self.counts.micro_batches += len(batch)
        self.counts.version += 1
        return Trained({"loss/fake": 0.5})

    def write(self, directory: Path) -> None:
        (directory / "version").write_text(str(self.counts.version))
        self.save(directory)

    def save(self, directory: Path) -> None:
        (directory / "model").write_text("learned")

    def restore(self, directory: Path) -> None:
        self.counts.version = self.counts.restored = int((directory / "version").read_text())


async def steps(trainer: ResumableTrainer, policy: FakePolicy, critic: FakeCritic) -> list[float]:
    graph = ppo(
        policy=policy,
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar),
        critic=critic,
        trainer=trainer,
        admission=Overcommit(batch=4, overcommit=2),
    )
    async with graph.open(prompts(30)) as run:
        return [anyio.current_time() async for _ in run.steps(3)]


def test_a_fake_core_trains_in_virtual_time() -> None:
    spans: list[Span] = []
    core = FakeCore()
    place = Inline("trainer")
    place.listener = spans.append
    trainer = HostedTrainer(lambda: core, place)
    policy, critic = FakePolicy(lambda prompt: 20 + prompt.admission % 7, seconds=0.5), FakeCritic()
    assert not trainer.has_learned
    ends = run_virtual(steps, trainer, policy, critic)
    assert ends == sorted(ends)
    assert ends[0] >= 10
    assert trainer.version == policy.version == critic.version == 3
    assert trainer.has_learned
    assert trainer.progress == 12 == sum(map(len, core.batches))
    assert [(span.track, span.label) for span in spans] == [("trainer", "update")] * 3


def test_a_hosted_trainer_keeps_the_contract() -> None:
    core = FakeCore()
    run_virtual(steps, HostedTrainer(lambda: core, Inline("first")), FakePolicy(lambda prompt: 5), FakeCritic())

    async def make() -> Trainer:
        return HostedTrainer(FakeCore, Inline("second"))

    synced: list[SyncedModel] = [FakePolicy(lambda prompt: 5), FakeCritic()]
    run_virtual(check_trainer, make, core.batches[0], synced)


def test_it_goes_on_where_another_was(tmp_path: Path) -> None:
    first, second = (HostedTrainer(FakeCore, Inline("trainer")) for _ in range(2))
    run_virtual(steps, first, FakePolicy(lambda prompt: 5), FakeCritic())
    run_virtual(first.write, tmp_path)
    run_virtual(second.restore, tmp_path)
    assert (second.version, second.has_learned) == (3, False)
    assert (tmp_path / "model").read_text() == "learned"


def test_what_the_core_raises_ends_the_run_and_the_version_stays() -> None:
    trainer = HostedTrainer(lambda: FakeCore(refused=1), Inline("trainer"))
    with pytest.raises(ModelError, match="out of memory"):
        run_virtual(steps, trainer, FakePolicy(lambda prompt: 5), FakeCritic())
    assert trainer.version == 1


def test_a_place_that_is_gone_says_where_to_go_on(tmp_path: Path) -> None:
    place = Inline("trainer")
    trainer = HostedTrainer(FakeCore, place)
    place.close()
    for call in (trainer.write, trainer.save, trainer.restore):
        with pytest.raises(ModelLost, match="'trainer' is closed") as lost:
            run_virtual(call, tmp_path)
        assert lost.value.__notes__[-1].endswith("go on from there (oppo resume)")
