"""Two real vLLM servers as a pool, one of which is killed while it decodes and comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from oppo.models import Piece, Policy, Sampling, Weights
from oppo.placement import PolicyPool
from oppo.vllm import VllmPolicy
from oppo.vllm.sync import free_port
from tests.vllm.real import reference
from tests.vllm.real.conftest import tiny_actor
from tests.vllm.real.test_policy import logprobs_of, read, some, tokens_of, until
from tests.vllm.real.test_server import Served

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

TOLERANCE = 1e-4


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


async def test_rollouts_of_a_killed_server_go_on_at_the_other_and_it_comes_back(
    servers: list[Served], messages: list[str]
) -> None:
    models = [tiny_actor(seed) for seed in range(3)]
    sampling = Sampling(max_new_tokens=200, seed=5)

    def connect(server: Served) -> VllmPolicy:
        return VllmPolicy(server.connected(), sampling=sampling)

    async def start(index: int) -> Policy:
        await anyio.to_thread.run_sync(servers[index].start)
        return await anyio.to_thread.run_sync(connect, servers[index])

    members = [connect(server) for server in servers]
    async with PolicyPool(members, start=start, timeout=120.0) as pool:
        await pool.load(Weights(0, models[0].state_dict()))
        prompts, told = some(6), list[int]()
        decodes = await pool.open(prompts)
        pieces: list[list[Piece]] = [[] for _ in prompts]

        def cut(finished: Sequence[int]) -> bool:
            told.extend(finished)
            return False

        async with pool.decoding(decodes, cut), anyio.create_task_group() as readers:
            for decode, each in zip(decodes, pieces, strict=True):
                readers.start_soon(read, decode, each)
            await until(lambda: min(member.tokens for member in members) >= 90)
            servers[0].kill()
            await until(lambda: len(pool.living) == 1)
            await pool.load(Weights(1, models[1].state_dict()))
        assert sorted(told) == [prompt.rollout for prompt in prompts]
        for prompt, each in zip(prompts, pieces, strict=True):
            versions = np.concatenate([piece.versions for piece in each])
            assert len(tokens_of(each)) == 200
            assert versions.tolist() == sorted(versions.tolist())
            wanted = await reference.logprobs(models, prompt, each)
            np.testing.assert_allclose(logprobs_of(each), wanted, rtol=0, atol=TOLERANCE)
        with anyio.fail_after(120):
            await until(lambda: len(pool.living) == 2)
        await pool.load(Weights(2, models[2].state_dict()))
        prompts = some(4)
        decodes = await pool.open(prompts)
        pieces = [[] for _ in prompts]
        async with pool.decoding(decodes, cut), anyio.create_task_group() as readers:
            for decode, each in zip(decodes, pieces, strict=True):
                readers.start_soon(read, decode, each)
        for prompt, each in zip(prompts, pieces, strict=True):
            assert {version for piece in each for version in piece.versions.tolist()} == {2}
            wanted = await reference.logprobs(models, prompt, each)
            np.testing.assert_allclose(logprobs_of(each), wanted, rtol=0, atol=TOLERANCE)
        assert all(policy.progress >= 400 for policy in pool.living if isinstance(policy, VllmPolicy))
    lost, back = (
        "member 0 (VllmPolicy) of the pool is lost: ModelLost",
        "member 0 (VllmPolicy) of the pool has been started",
    )
    assert [any(message.startswith(words) for message in messages) for words in (lost, back)] == [True, True]
