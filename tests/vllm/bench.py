"""A policy over the fake of the engine, in this process or behind a server, and what was read of its rollouts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import torch

from oppo.errors import as_itself
from oppo.events import Chunk, Prompt, Response
from oppo.models import Sampling, Weights
from oppo.testing import run_virtual
from oppo.vllm import VllmDecode, VllmPolicy
from oppo.vllm.engine import Engine, WeightSender
from oppo.vllm.images import Pictures
from tests.kit.responses import read_chunk
from tests.vllm.fakes import FakeAsyncLLM, FakeSender, FakeServer, engine_of, running, server_of

SAMPLING = Sampling(max_new_tokens=20, stop=(2, 3), seed=5)
WEIGHTS = {"weight": torch.zeros(1)}


def varied(count: int) -> list[Prompt]:
    return [Prompt(n, n, np.array([10 + n, 4], np.int32)) for n in range(count)]


@dataclass
class Bench:
    """A policy over a fake, and what was read of each rollout."""

    llm: FakeAsyncLLM = field(default_factory=FakeAsyncLLM)
    sampling: Sampling = SAMPLING
    sender: WeightSender = field(default_factory=FakeSender)
    keywords: dict[str, Any] = field(default_factory=dict)
    adapts: bool = False
    on: str = "engine"
    pictures: Pictures | None = None

    def __post_init__(self) -> None:
        self.engine: Engine
        if self.on == "server":
            self.fake = FakeServer(self.llm)
            self.engine = server_of(self.fake)
        else:
            self.engine = engine_of(self.llm, self.sender, adapts=self.adapts, pictures=self.pictures)
        self.policy = VllmPolicy(self.engine, sampling=self.sampling, **self.keywords)
        self.pieces: dict[int, list[Chunk]] = {}
        self.reported: list[list[int]] = []

    def run(self, main: Callable[[], Awaitable[None]], *, threads: bool = False) -> None:
        """Run in virtual time, or in real time where something needs a thread."""

        async def beside() -> None:
            async with running(self.llm):
                await main()

        (anyio.run if threads else run_virtual)(beside)

    def play(
        self,
        prompts: int | Sequence[Prompt | Response] = 1,
        *,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
        threads: bool = False,
        **step: Any,
    ) -> None:
        """Open rollouts and decode them in a step, beside something else."""

        async def main() -> None:
            decodes = await self.policy.open(varied(prompts) if isinstance(prompts, int) else prompts)
            async with anyio.create_task_group() as tasks:
                if beside is not None:
                    tasks.start_soon(beside)
                with as_itself():
                    await self.step(decodes, **step)

        self.run(main, threads=threads)

    async def step(
        self, decodes: Sequence[VllmDecode], cut_at: int = 1_000, limit: int = 3, *, load: float | None = None
    ) -> None:
        """Decode until ``cut_at`` rollouts were reported, reading everything."""
        ended = 0

        def cut(finished: Sequence[int]) -> bool:
            nonlocal ended
            self.reported.append(list(finished))
            ended += len(finished)
            return ended >= cut_at

        async def read(decode: VllmDecode) -> None:
            while True:
                piece = await read_chunk(decode, limit)
                self.pieces.setdefault(decode.prompt.rollout, []).append(piece)
                if piece.state != "live":
                    return

        async def sync_weights(seconds: float) -> None:
            await anyio.sleep(seconds)
            await self.policy.load(Weights(self.policy.version + 1, WEIGHTS))

        with as_itself():
            async with anyio.create_task_group() as tasks, self.policy.decoding(decodes, cut):
                if load is not None:
                    tasks.start_soon(sync_weights, load)
                async with anyio.create_task_group() as readers:
                    for decode in decodes:
                        if not decode.ended:
                            readers.start_soon(read, decode)

    def tokens(self, rollout: int) -> list[int]:
        return [int(token) for piece in self.pieces.get(rollout, []) for token in piece.tokens]

    def versions(self, rollout: int) -> list[int]:
        return [int(version) for piece in self.pieces.get(rollout, []) for version in piece.versions]
