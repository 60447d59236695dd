"""Pools of vLLM's engines, over fakes of them, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from oppo.errors import ConfigError
from oppo.models import Weights
from oppo.placement import PolicyPool
from oppo.testing import check_policy, run_virtual
from oppo.vllm import VllmPolicy
from tests.vllm.bench import SAMPLING, WEIGHTS, varied
from tests.vllm.fake_engine import FakeAsyncLLM, engine_of, running


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[FakeAsyncLLM]]:
    made = [FakeAsyncLLM() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for llm in made:
            await stack.enter_async_context(running(llm))
        yield made


def test_a_pool_of_engines_keeps_the_contract_of_a_policy() -> None:
    async def main() -> None:
        async with engines(2) as llms:
            started = [engine_of(llm) for llm in llms]

            async def make() -> PolicyPool:
                return PolicyPool([VllmPolicy(engine, sampling=SAMPLING) for engine in started])

            await check_policy(make, varied(5))

    run_virtual(main)


def test_rollouts_of_an_engine_that_dies_go_on_in_another_one(messages: list[str]) -> None:
    async def main() -> None:
        async with engines(3) as llms:

            async def start(index: int) -> VllmPolicy:
                return VllmPolicy(engine_of(llms[2]), sampling=SAMPLING)

            members = [VllmPolicy(engine_of(llm), sampling=SAMPLING) for llm in llms[:2]]
            async with PolicyPool(members, start=start) as pool:
                asked, ended, pieces = varied(4), list[int](), list[int]()
                decodes = await pool.open(asked)

                def cut(finished: Sequence[int]) -> bool:
                    ended.extend(finished)
                    return False

                async def read(k: int) -> None:
                    state, length, newest = "live", 0, 0
                    while state == "live":
                        piece = await decodes[k].read(2)
                        assert (piece.versions >= newest).all()
                        state, length, newest = piece.state, length + len(piece.tokens), pool.version
                    pieces.append(length)

                async with pool.decoding(decodes, cut), anyio.create_task_group() as readers:
                    for k in range(len(decodes)):
                        readers.start_soon(read, k)
                    await anyio.sleep(0.02)
                    llms[0].die()
                    await pool.load(Weights(1, WEIGHTS))
                assert sorted(ended) == [0, 1, 2, 3]
                assert len(pieces) == 4
                assert (pool.version, len(pool.living)) == (1, 2)

    run_virtual(main)
    assert messages[0].startswith("member 0 (VllmPolicy) of the pool is lost: ModelLost")


def test_engines_of_different_models_are_no_pool() -> None:
    async def main() -> None:
        async with engines(2) as llms:
            started = [engine_of(llm) for llm in llms]
            started[1].name = "another"
            with pytest.raises(ConfigError, match=r"models differ: member 0 has .*, member 1 has 'another'"):
                PolicyPool([VllmPolicy(engine, sampling=SAMPLING) for engine in started])

    run_virtual(main)
