"""Many agents at once, whose tools fail, hang and talk, on engines that die: nothing is lost, doubled or left open."""

from __future__ import annotations

import copy
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeAlias

import anyio
import httpx2
import numpy as np
import pytest

from oppo import Overcommit
from oppo.agents import Agents
from oppo.agents.requests import ChatRequests
from oppo.events import Batch, Chunk, Prompt, StepReport
from oppo.hf.serve.policy import HfPolicy
from oppo.models import Capabilities, Policy, Sampling
from oppo.placement import PolicyPool, Process
from oppo.testing import FakePolicy, FakeTrainer
from tests.agents.conftest import Numbers, graph_of
from tests.agents.test_agents import tokenizer
from tests.agents.test_server import connected, received, request
from tests.hf import tiny
from tests.hf.child import ONE
from tests.kit.pools import Fate, Mortal
from tests.kit.virtual import virtually

Post: TypeAlias = Callable[[object], Any]
Does: TypeAlias = Literal["fails", "hangs", "answers at length", "works"]

LONG = pytest.mark.timeout(1200)
STEPS = 3
CAP = 60


class Small(Numbers):
    """Of a vocabulary of 96."""

    def answer(self, turn: Any, messages: Any) -> list[int]:
        return [4, *(5 + at % 90 for at in range(int(messages[0]["content"])))]

    def encode_chat(self, messages: Any) -> list[int]:
        return [1, *(5 + int(digit) for digit in str(messages[0]["content"])), 4]


@dataclass
class Crowd:
    """Agents with tools, some of whose calls go wrong.

    Attributes:
        timeout: of one that hangs, in seconds.
        wrong: the share of calls that go wrong.
        turns: of an agent, by the number of its row.
        begun, ended: agents, by the numbers of their rows.
        waiting: agents whose requests are unanswered; ``most``: at once.
    """

    timeout: float = 5
    wrong: float = 0.05
    turns: Callable[[int], int] = lambda number: 1 + number % 3
    begun: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    calls: Counter[Does] = field(default_factory=Counter)
    waiting: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self.agents = Agents(self.run, tokenizer(), on_failure="drop", timeout=self.timeout)

    async def run(self, row: dict[str, Any], url: str, key: str) -> float:
        number = row["number"]
        self.begun[number] += 1
        try:
            async with self.client(url, key) as post:
                return await self.talk(number, post)
        finally:
            self.ended[number] += 1

    async def talk(self, number: int, post: Post) -> float:
        random, messages, said = Random(number), [{"role": "user", "content": str(number)}], 0
        for _ in range(self.turns(number)):
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            status, reply = await post({"messages": messages})
            self.waiting -= 1
            if status == 400:
                assert reply["error"]["code"] == "context_length_exceeded"
                break
            message = reply["choices"][0]["message"]
            said += int(message["content"].partition(":")[0])
            messages += [message, {"role": "user", "content": str(await self.call(random))}]
        return float(said)

    async def call(self, random: Random) -> int:
        """Return the length of a tool's answer."""
        does: Does = random.choice(["fails", "hangs", "answers at length"]) if random.random() < self.wrong else "works"
        self.calls[does] += 1
        await anyio.sleep(random.random() / 10)
        if does == "fails":
            raise OSError
        if does == "hangs":
            await anyio.sleep_forever()
        return 5_000 if does == "answers at length" else random.randint(1, 3)

    @asynccontextmanager
    async def client(self, url: str, key: str) -> AsyncIterator[Post]:
        if url == "http://agents/v1":
            transport = httpx2.ASGITransport(self.agents.app)
            async with httpx2.AsyncClient(transport=transport, headers={"Authorization": f"Bearer {key}"}) as to:

                async def post(body: object) -> tuple[int, Any]:
                    reply = await to.post(f"{url}/chat/completions", json=body)
                    return reply.status_code, reply.json()

                yield post
            return
        async with connected(int(url.split(":")[2].split("/", maxsplit=1)[0]), b"") as stream:

            async def send(body: object) -> tuple[int, Any]:
                await stream.send(request(body, key=key))
                return await received(stream)

            yield send


def fake(kind: type[FakePolicy] = FakePolicy, **options: Any) -> FakePolicy:
    can = Capabilities(turns=True, adds_while_decoding=True, reports_progress=True)
    return kind(cap=CAP, capabilities=can, **options)


def mortal(fate: Fate) -> FakePolicy:
    return fake(
        Mortal,
        length=lambda prompt: 9 + 20 * (prompt.admission % 4 == 0) + 3 * prompt.sample,
        turns=lambda prompt: [3, 7][: prompt.admission % 3],
        seconds=0.01,
        fate=fate,
    )


async def crowded(crowd: Crowd, policy: Policy, count: int, each: Callable[[StepReport], object]) -> None:
    """Train steps with so many agents at once, and check what became of each."""
    trainer, reports = FakeTrainer(), list[StepReport]()
    graph = graph_of(crowd.agents, policy, trainer, Overcommit(count // 4, count // 4))
    rows = [Prompt(at, at, np.array([0], np.int32), group=at, columns={"number": at}) for at in range(2 * count)]
    async with graph.open(crowd.agents.prompts(rows)) as run:
        async for report in run.steps(STEPS):
            reports.append(report)
            each(report)
    dropped = [drop.rollout for report in reports for drop in report.dropped]
    trained = [rollout for batch in trainer.batches for rollout in checked(batch)]
    assert len({*dropped, *trained}) == len(dropped) + len(trained) == STEPS * count // 4 * 2
    assert crowd.most >= count // 2
    assert sum(report.metrics["deferral/deferred"] for report in reports) > 0
    assert crowd.begun == crowd.ended
    assert (crowd.agents._sessions, crowd.agents._keys) == ({}, {})


def checked(batch: Batch) -> Iterator[int]:
    """Yield the rollouts of a batch, whose agents have earned as many tokens as they were told in turns."""
    for score, response in zip(batch.scores, batch.responses, strict=True):
        turns = [piece for piece in response.pieces() if isinstance(piece, Chunk)]
        assert score == sum(len(turn.tokens) for turn in turns)
        yield response.prompt.rollout


def sizes(small: int, large: int = 2_000) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("count", [small, pytest.param(large, marks=[pytest.mark.deep, LONG])])


@sizes(60)
@pytest.mark.usefixtures("numbers")
@virtually
async def test_nothing_of_many_agents_is_lost_doubled_or_left_open_when_engines_die(count: int) -> None:
    crowd = Crowd()

    async def start(index: int) -> Policy:
        await anyio.sleep(0.5)
        return mortal(Fate())

    pool = PolicyPool([mortal(Fate(at=at)) for at in (0.3, 0.6)], start=start)
    await crowded(crowd, pool, count, lambda report: None)
    assert count < 1000 or min(crowd.calls[does] for does in ("fails", "hangs", "answers at length")) > 10


@sizes(60)
@pytest.mark.usefixtures("numbers")
async def test_many_agents_wait_over_http_each_on_a_connection_of_its_own(count: int) -> None:
    crowd = Crowd(timeout=60, wrong=0, turns=lambda number: 2)
    long = fake(length=lambda prompt: 11 + 8 * (prompt.admission % 2), turns=lambda prompt: [3], seconds=count / 1500)
    await crowded(crowd, long, count, lambda report: None)
    assert crowd.most >= count


@sizes(24, 2_600)
async def test_many_agents_of_a_model_go_on_when_the_members_of_its_pool_are_killed(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatRequests, "format", lambda self, tools: (Small(), Small()))
    actor, places = tiny.causal(), list[Process]()
    with ExitStack() as stack:

        def member(index: int) -> Policy:
            places.append(stack.enter_context(Process(f"member {index}", setup=ONE)))
            sampling = Sampling(max_new_tokens=CAP, stop=(2, 3), seed=3)
            return HfPolicy(copy.deepcopy(actor), sampling=sampling, place=places[-1])

        async def start(index: int) -> Policy:
            return member(index)

        def kill(report: StepReport) -> None:
            if report.index < 2:
                os.kill(places[report.index].pid, signal.SIGKILL)

        await crowded(Crowd(timeout=1 + count / 100), PolicyPool([member(0), member(1)], start=start), count, kill)
