"""Two real vLLM servers as a pool: one is killed, while it decodes, takes weights or waits, and comes back.

``OPPO_KILLS=10`` kills ten times at each of these moments, one server and the other in turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest
from transformers import LlamaForCausalLM

from oppo.events import Chunk, Prompt
from oppo.models import Policy, Sampling, Weights
from oppo.placement import PolicyPool
from oppo.placement.pool_members import PooledDecode
from oppo.vllm import VllmPolicy
from oppo.vllm.sync import free_port
from tests.vllm.real.conftest import tiny_actor
from tests.vllm.real.rollouts import assert_of, read, some, tokens_of, until
from tests.vllm.real.test_server import Served

KILLS = int(os.environ.get("OPPO_KILLS", "1"))

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600 + 300 * KILLS)]


@pytest.fixture(scope="module")
def servers(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    folder = tmp_path_factory.mktemp("servers")
    made = [Served(directory, folder / f"{k}.log", f"http://127.0.0.1:{free_port()}") for k in range(2)]
    with ExitStack() as stack:
        for server in made:
            stack.callback(server.kill)
        with ThreadPoolExecutor() as threads:
            list(threads.map(Served.start, made))
        yield made


@dataclass
class Killing:
    """A pool whose servers are killed while rollouts are carried over a weight sync."""

    pool: PolicyPool
    servers: list[Served]
    actors: list[LlamaForCausalLM]
    prompts: list[Prompt]
    pieces: list[list[Chunk]] = field(default_factory=list)
    seconds_of_load: float = 0.0

    async def load(self) -> None:
        version = self.pool.version + 1
        await self.pool.load(Weights(version, self.actors[version % len(self.actors)].state_dict()))

    async def decode(self, decodes: Sequence[PooledDecode], *, to_the_end: bool, victim: Served | None = None) -> None:
        killed = victim is None

        def cut(finished: Sequence[int]) -> bool:
            return killed and not to_the_end

        async with self.pool.decoding(decodes, cut), anyio.create_task_group() as readers:
            for decode in decodes:
                readers.start_soon(read, decode, self.pieces[decode.prompt.rollout])
            if victim is not None:
                with anyio.fail_after(120):
                    await until(lambda: all(len(tokens_of(each)) > len(decodes) for each in self.pieces))
                victim.kill()
                killed = True

    async def cycle(self, moment: str, victim: Served, share: float) -> None:
        """Decode rollouts that are carried over a weight sync, and kill a server at a moment of it.

        Args:
            share: of the seconds that a sync takes, after which the server is killed in it.
        """
        decodes = await self.pool.open(self.prompts)
        self.pieces = [[] for _ in decodes]
        await self.decode(decodes, to_the_end=False, victim=victim if moment == "decode" else None)
        async with anyio.create_task_group() as tasks:
            began = anyio.current_time()
            tasks.start_soon(self.load)
            if moment == "sync":
                await anyio.sleep(share * self.seconds_of_load)
                victim.kill()
        if moment != "sync":
            self.seconds_of_load = anyio.current_time() - began
        if moment == "idle":
            victim.kill()
        await self.decode([decode for decode in decodes if not decode.ended], to_the_end=True)

    async def check(self) -> None:
        """Assert that each token's log-prob is of the weights whose version it names, and none is missing."""
        models = [self.actors[version % len(self.actors)] for version in range(self.pool.version + 1)]
        for prompt, each in zip(self.prompts, self.pieces, strict=True):
            versions = np.concatenate([piece.versions for piece in each])
            assert len(tokens_of(each)) == length(prompt)
            assert versions.tolist() == sorted(versions.tolist())
        await assert_of(models, self.prompts, self.pieces)


def length(prompt: Prompt) -> int:
    return 60 + 20 * prompt.rollout


async def test_nothing_is_lost_with_a_server_that_is_killed_and_it_comes_back(
    servers: list[Served], messages: list[str]
) -> None:
    def connect(server: Served) -> VllmPolicy:
        return VllmPolicy(server.connected(), sampling=Sampling(max_new_tokens=200, seed=5), limit=length)

    async def start(index: int) -> Policy:
        await anyio.to_thread.run_sync(servers[index].start)
        return await anyio.to_thread.run_sync(connect, servers[index])

    members, lost = [connect(server) for server in servers], 0
    async with PolicyPool(members, start=start, timeout=120.0) as pool:
        killing = Killing(pool, servers, [tiny_actor(seed) for seed in range(3)], some(6))
        await killing.load()
        for moment in ("decode", "idle", "sync"):
            for number in range(KILLS):
                await killing.cycle(moment, servers[number % 2], number / KILLS)
                await killing.check()
                lost += 1
                assert len([each for each in messages if "of the pool is lost: ModelLost" in each]) == lost
                with anyio.fail_after(180):
                    await until(lambda: len(pool.living) == 2)
        await killing.load()
        killing.pieces = [[] for _ in killing.prompts]
        await killing.decode(await pool.open(killing.prompts), to_the_end=True)
        await killing.check()
        assert all(policy.progress >= 200 for policy in pool.living if isinstance(policy, VllmPolicy))
    assert len([each for each in messages if "of the pool has been started again" in each]) == lost
