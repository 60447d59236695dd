"""What the type checker knows without being told: from the stage to the stream to the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, assert_type

from oppo.graph import Channel, Graph, GraphBuilder, Receiver, Sender, Stream, join

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Chunk:
    key: int


@dataclass(frozen=True)
class Finish:
    key: int


@dataclass(frozen=True)
class Scored(Generic[T_co]):
    key: int
    value: T_co


Event = Chunk | Finish


class Model(Protocol[T_co]):
    def finish(self, keys: Sequence[int]) -> Sequence[T_co]: ...


class RewardModel:
    def finish(self, keys: Sequence[int]) -> list[float]:
        return [0.0 for _ in keys]


class ReferenceModel:
    def finish(self, keys: Sequence[int]) -> list[bytes]:
        return [b"" for _ in keys]


class Generate:
    async def run(self, prompts: Receiver[str], out: Sender[Event]) -> None: ...


@dataclass
class Score(Generic[T]):
    model: Model[T]

    async def run(self, rollouts: Receiver[Event], *, out: Sender[Scored[T]]) -> None: ...


class Advantage:
    async def run(
        self,
        rollouts: Receiver[Event],
        reference: Receiver[Scored[bytes]],
        score: Receiver[Scored[float]],
        *,
        out: Sender[int],
    ) -> None:
        notes: list[Event] = []
        rows = join(rollouts, reference, score, key=lambda item: item.key, aside=notes.append)
        assert_type(await anext(rows), tuple[Event, Scored[bytes], Scored[float]])


class OnlyFinish:
    async def run(self, rollouts: Receiver[Finish], *, out: Sender[Finish]) -> None: ...


g = GraphBuilder[str]("ppo")
rollout = g.add("generate", Generate(), g.prompts)
reference = g.add("ref_logp", Score(ReferenceModel()), rollout)
score = g.add("reward", Score(RewardModel()), rollout)
assert_type(rollout, Stream[Event])
assert_type(score, Stream[Scored[float]])
graph = g.build(g.add("advantage", Advantage(), rollout, reference, score))
assert_type(graph, Graph[int])
assert_type(graph.rebuild(without=["reward"], more=(OnlyFinish(), "generate", "ref_logp")), Graph[int])


async def main() -> None:
    async with graph.open(["a", "b"]) as run:
        async for result in run.steps(3):
            assert_type(result, int)
        assert_type(await run.step(), int | None)


def a_channel_is_both_ends(channel: Channel[Chunk]) -> tuple[Receiver[Event], Sender[Chunk]]:
    return channel, channel
