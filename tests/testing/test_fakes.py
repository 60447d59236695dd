"""What the fakes cost: whole pipelines of many rollouts are tested with them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import anyio
import pytest

from oppo.admission import Overcommit
from oppo.algorithms.ppo import ppo
from oppo.events import Prompt
from oppo.models import Decode
from oppo.simulate.engine import VirtualTimeLoop
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)


@pytest.mark.parametrize("pace", [None, lambda prompt: 1.0], ids=["together", "apart"])
def test_a_decode_step_takes_as_many_passes_of_the_loop_for_many_rollouts_as_for_few(
    pace: Callable[[Prompt], float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(count: int) -> int:
        made = 0

        class Counting(VirtualTimeLoop):
            def _run_once(self) -> None:
                nonlocal made
                made += 1
                super()._run_once()  # type: ignore[misc]  # asyncio's own, in no stub

        monkeypatch.setattr("oppo.simulate.engine.VirtualTimeLoop", Counting)
        run_virtual(_decode, FakePolicy(lambda prompt: 20, pace=pace), count)
        return made

    assert passes(200) <= passes(20) + 5


async def _decode(policy: FakePolicy, count: int) -> None:
    async def read(decode: Decode) -> None:
        while (await decode.read(3)).state == "live":
            pass

    decodes = await policy.open(prompts(count))
    async with policy.decoding(decodes, lambda ended: False), anyio.create_task_group() as readers:
        for decode in decodes:
            readers.start_soon(read, decode)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_ten_thousand_rollouts_are_alive_for_three_steps() -> None:
    trainer = FakeTrainer()
    graph = ppo(
        policy=FakePolicy(lambda prompt: 20 + prompt.admission % 41),
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar),
        critic=FakeCritic(),
        trainer=trainer,
        admission=Overcommit(batch=9_000, extra=1_000),
    )

    async def train() -> None:
        async with graph.open(prompts(40_000)) as run:
            async for _ in run.steps(3):
                pass

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_virtual(train)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert [len(batch) for batch in trainer.batches] == [9_000] * 3
    assert grown * (1 if sys.platform == "darwin" else 1024) < 1.5e9
