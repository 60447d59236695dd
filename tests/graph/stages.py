"""Small stages and graphs for the tests of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import anyio

from oppo.graph import Graph, GraphBuilder, Receiver, Sender, Step


@dataclass(eq=False)
class Take:
    """Passes on ``count`` items of the source in each step."""

    count: int = 3

    async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
        for _ in range(self.count):
            async for item in items:
                await out.send(item)
                break


@dataclass(eq=False)
class Relay:
    """Passes everything on, each item after ``delay`` seconds."""

    delay: float = 0.0

    async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
        async for item in items:
            await anyio.sleep(self.delay)
            await out.send(item)


@dataclass(eq=False)
class Collect:
    """Results in everything of the step, if there was anything."""

    async def run(self, items: Receiver[int], *, out: Sender[tuple[int, ...]]) -> None:
        got = [item async for item in items]
        if got:
            await out.send(tuple(got))


class Boom(Exception):  # noqa: N818 - it is what happens
    """Raised by stages that are meant to fail."""


@dataclass(eq=False)
class Fail:
    """Raises at the first item, after ``delay`` seconds."""

    delay: float = 0.0
    text: str = "bad item"

    async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
        async for item in items:
            await anyio.sleep(self.delay)
            raise Boom(f"{self.text} {item}")


@dataclass(eq=False)
class Stuck:
    """Never returns."""

    async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
        await anyio.Event().wait()


class Diary:
    """A relay with every hook, which writes down when it is called."""

    def __init__(self) -> None:
        self.relay = Relay()
        self.lines: list[str] = []

    async def __aenter__(self) -> Self:
        self.lines.append("enter")
        return self

    async def __aexit__(self, *error: object) -> None:
        await anyio.sleep(1)
        self.lines.append("exit")

    async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:
        self.lines.append(f"run {step.index} as {step.stage}, {step.remaining} to go, at {step.started}")
        await self.relay.run(items, out=out)

    def observe(self, result: tuple[int, ...], step: Step, /) -> None:
        self.lines.append(f"observe {result}")


def line(capacity: int = 16) -> Graph[tuple[int, ...]]:
    g = GraphBuilder[int]("line", capacity=capacity)
    taken = g.add("take", Take(), g.prompts)
    relayed = g.add("relay", Relay(), taken)
    return g.build(g.add("collect", Collect(), relayed))
