"""An engine that sleeps while the policy is trained, on the fake: tokens, versions and weight syncs are as awake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.group import grpo
from oppo.config.load import load
from oppo.errors import ConfigError, ModelLost
from oppo.events import Batch
from oppo.hf.memory import Hardware
from oppo.models import Sampling, SyncedModel, Trained, Weights
from oppo.run.deployment import Deployment
from oppo.run.engines import require_engines
from oppo.run.memory import Expected, at_worst, crowded, expected
from oppo.testing import FakeScorer, FakeTrainer, fake_scalar, run_virtual
from oppo.vllm import VllmPolicy
from oppo.vllm.arguments import engine_arguments
from oppo.weight_sync import sync
from tests.vllm.bench import SAMPLING, WEIGHTS, Bench, varied
from tests.vllm.fake_engine import FakeAsyncLLM, engine_of, running
from tests.workplace import furnish

STEPS = 6


class Alone(FakeTrainer):
    """Trains while the engine has given its memory back, and syncs a tensor."""

    llm: FakeAsyncLLM
    sleeps: bool

    async def update(self, batch: Batch) -> Trained:
        assert bool(self.llm.asleep) is self.sleeps
        found = await super().update(batch)
        assert bool(self.llm.asleep) is self.sleeps
        return found

    async def sync_weights(self, *synced: SyncedModel) -> None:
        await sync(Weights(self.version, {"weight": torch.zeros(1)}), synced)
        assert self.llm.asleep == (["kv_cache"] if self.sleeps else []), "the KV cache comes with the next decoding"


def played(*, sleeps: bool, overcommit: int) -> tuple[list[list[tuple[int, list[int], list[int]]]], FakeAsyncLLM]:
    llm = FakeAsyncLLM(length=lambda prompt: 6 + 9 * (prompt[0] % 4))
    engine = engine_of(llm)
    engine.sleeps = sleeps
    trainer = Alone(0.08)
    trainer.llm, trainer.sleeps = llm, sleeps
    graph = grpo(
        policy=VllmPolicy(engine, sampling=Sampling(max_new_tokens=60, stop=(2, 3))),
        reward=FakeScorer(fake_scalar),
        trainer=trainer,
        admission=Overcommit(4, overcommit),
        samples=2,
        chunks=Fixed(3),
    )

    async def main() -> None:
        async with running(llm), graph.open(varied(60)) as run:
            async for _ in run.steps(STEPS):
                pass

    run_virtual(main)
    return [
        [
            (each.prompt.rollout, each.tokens.tolist(), each.versions.tolist())
            for each in sorted(batch.responses, key=lambda each: each.prompt.rollout)
        ]
        for batch in trainer.batches
    ], llm


@pytest.mark.parametrize("overcommit", [0, 2])
def test_a_run_whose_engine_sleeps_is_the_run_of_one_that_does_not(overcommit: int) -> None:
    asleep, llm = played(sleeps=True, overcommit=overcommit)
    awake, other = played(sleeps=False, overcommit=overcommit)
    assert asleep == awake
    assert (llm.slept, other.slept) == (STEPS, 0)
    assert len(llm.updates) == STEPS


def test_deferred_rollouts_go_on_after_sleep_with_and_without_new_weights() -> None:
    bench, awake = Bench(), Bench()
    bench.engine.sleeps = True

    async def main(bench: Bench) -> None:
        decodes = await bench.policy.open(varied(4))
        await bench.step(decodes, cut_at=1)
        await bench.step([each for each in decodes if not each.ended], cut_at=1)
        await bench.policy.load(Weights(1))
        await bench.policy.load(Weights(2, WEIGHTS))
        await bench.policy.load(Weights(3, WEIGHTS))
        await bench.step([])
        assert bool(bench.llm.asleep) is bench.engine.sleeps, "though nothing was decoded"
        await bench.step([each for each in decodes if not each.ended])
        await bench.policy.open(varied(1))
        await decodes[0].aclose()

    bench.run(lambda: main(bench))
    awake.run(lambda: main(awake))
    assert [bench.tokens(n) for n in range(4)] == [awake.tokens(n) for n in range(4)]
    assert [bench.versions(n)[-1] for n in range(4)] == [awake.versions(n)[-1] for n in range(4)]
    assert bench.llm.slept == 3, "not again in a step that began with what had ended in the overrun of the one before"


def test_an_engine_that_dies_asleep_is_lost() -> None:
    bench = Bench()
    bench.engine.sleeps = True

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)))
        bench.llm.die()
        with pytest.raises(ModelLost):
            await bench.policy.load(Weights(1, WEIGHTS))

    bench.run(main)


def test_what_a_sleeping_engine_cannot_do_is_refused(tmp_path: Path) -> None:
    engine = engine_of(FakeAsyncLLM())
    engine.sleeps = True
    with pytest.raises(ConfigError, match=r"no KV cache that could be kept .* kv_on_sync = 'recompute'"):
        VllmPolicy(engine, sampling=SAMPLING, kv_on_sync="keep")
    with pytest.raises(ConfigError, match=r"vLLM does not sleep on a CPU.*leave placement\.share = 'sleep' out"):
        engine_arguments("model", {}, on_cpu=True, backend="oppo-file", sleeps=True)
    folder = furnish(tmp_path)
    for overrides, name in (
        ((), "models.engine = 'transformers'"),
        (("models.engine=vllm", "step.lookahead=1"), "step.lookahead = 1"),
        (("models.engine=vllm", "step.kv_on_sync=keep"), "step.kv_on_sync = 'keep'"),
        (("models.engine=vllm", 'vllm.urls=["http://one:8000"]'), "vllm.urls"),
    ):
        with pytest.raises(ConfigError, match=r"placement\.share = 'sleep' lets") as refused:
            load(folder / "config.toml", ["placement.share=sleep", *overrides])
        assert name in str(refused.value)
    assumed = Hardware.assumed("2xH100-80GB")
    sleeping = ["models.engine=vllm", "placement.share=sleep"]
    require_engines(Deployment.of(load(folder / "config.toml", sleeping), assumed))
    with pytest.raises(ConfigError, match=r"frees the GPUs of vLLM, 0, for the trainer, and that is on cuda:1"):
        require_engines(Deployment.of(load(folder / "config.toml", [*sleeping, "placement.trainer=cuda:1"]), assumed))
    with pytest.raises(ConfigError, match="vLLM does not sleep on a CPU"):
        require_engines(Deployment.of(load(folder / "config.toml", [*sleeping, "placement.policy=cpu"]), assumed))


def test_memory_that_engine_and_update_need_by_turns_is_counted_once(tmp_path: Path) -> None:
    folder, assumed = furnish(tmp_path), Hardware.assumed("1xH100-80GB")

    def counted(share: str) -> dict[str, Expected]:
        settings = load(folder / "config.toml", ["models.engine=vllm", f"placement.share={share}"])
        return {each.model: each for each in expected(Deployment.of(settings, assumed), None)}

    beside, sleeping = counted("beside"), counted("sleep")
    there = [each for each in sleeping.values() if each.device.type == "cuda"]
    trainer, policy = sleeping["trainer"], sleeping["policy"]
    assert sleeping["policy, asleep"].bytes.weights == policy.bytes.weights
    assert policy.share is not None
    assert policy.share >= (beside["policy"].share or 0)
    assert at_worst(there) == sum(each.bytes.total for each in there) - trainer.bytes.gradients
    assert not crowded([*sleeping.values()], assumed)
