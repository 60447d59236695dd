"""Pools of vLLM's engines, over fakes of them, in virtual time."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from safetensors.torch import load_file

from oppo.errors import ConfigError
from oppo.hf.weights import SentWeights
from oppo.models import Weights
from oppo.placement import PolicyPool, Process
from oppo.testing import check_policy, run_virtual
from oppo.vllm import VllmPolicy, VllmServer
from oppo.vllm.processes import ServerProcess
from oppo.vllm.sync import HostedFiles
from tests.kit.responses import read_chunk
from tests.vllm.bench import SAMPLING, WEIGHTS, varied
from tests.vllm.fakes import URL, FakeAsyncLLM, FakeServer, engine_of, running
from tests.vllm.test_sync import adapted


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
                        piece = await read_chunk(decodes[k], 2)
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


class Unstarted(ServerProcess):
    """What is written for a server, and no server."""

    def __init__(self) -> None:
        self.url, self._lifeline, self._process, self._adapts, self._written = URL, None, None, True, None
        self._kept = ExitStack()


def test_adapters_are_written_where_each_server_is_and_one_that_is_started_again_gets_the_newest() -> None:
    fakes = list[FakeServer]()

    async def main() -> None:
        async with engines(3) as llms, AsyncExitStack() as stack:

            async def member(index: int) -> VllmPolicy:
                place = stack.enter_context(Process(f"policy {index}"))
                hosted = place.host(Unstarted)
                stack.push_async_callback(hosted.call, "end", ServerProcess.end)

                async def load(weights: SentWeights, version: str) -> None:
                    await hosted.load(partial(ServerProcess.write, version=version), weights)

                _, path = await hosted.call("start", ServerProcess.whereabouts, writes=True)
                assert path is not None
                fakes.append(fake := FakeServer(llms[len(fakes)], loads=True))
                fake.config["lora_config"] = {"max_lora_rank": 8}
                server = VllmServer(URL, transport=fake, adapters=4, files=HostedFiles(path, load))
                assert fake.init["path"] == str(path), "its workers say whether they can read there"
                return VllmPolicy(server, sampling=SAMPLING)

            async with PolicyPool([await member(0), await member(1)], start=member) as pool:
                await pool.load(adapted(1))
                fakes[0].llm.die()
                await pool.load(adapted(2))
                with anyio.fail_after(30):
                    while len(pool.living) < 2:  # noqa: ASYNC110 - nothing announces it
                        await anyio.sleep(0.05)
                decodes, versions = await pool.open(varied(4)), set[int]()
                async with pool.decoding(decodes, lambda ended: False):
                    for decode in decodes:
                        while (piece := await read_chunk(decode, 4)).state == "live":
                            versions |= {*piece.versions.tolist()}
            assert versions == {2}
            files = [Path(fake.init["adapter"]) for fake in fakes]
            found = [max(float(each.max()) for each in load_file(file).values()) for file in files]
            assert found == [2.0, 3.0, 3.0]
            holders = {int(file.readlink().parts[2]) for file in files}
            assert len(holders - {os.getpid()}) == 3, "each in the process that holds its server"
            for fake, file in zip(fakes, files, strict=True):
                assert {body["model"] for body in fake.bodies} <= {file.parent.name}, "requests name what is loaded"
            left = [file.parents[1] for file in files]
        assert not any(each.exists() for each in left)

    anyio.run(main)
