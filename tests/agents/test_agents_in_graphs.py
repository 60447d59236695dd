"""Agents in whole graphs: deferred, cut, restarted and streamed rollouts are those of serial steps, exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import httpx2
import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo import Overcommit
from oppo.admission import TailBatched
from oppo.agents import Agents
from oppo.evaluation import Evaluated, Evaluation
from oppo.events import Batch, Chunk, Prompt, Response
from oppo.testing import FakePolicy, FakeTrainer, run_virtual
from tests.agents.conftest import graph_of, stepped
from tests.agents.test_agents import tokenizer
from tests.agents.test_branches import resumed

pytestmark = pytest.mark.usefixtures("numbers")


@dataclass
class Players:
    """Agents that take their time, and ask for as many turns as their row says.

    Attributes:
        seconds: before each request, by row and turn.
        faults: rows whose agent raises after its first turn.
        seen: log-probs of turns, by their tokens.
    """

    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    faults: Sequence[int] = ()
    begun: Counter[int] = field(default_factory=Counter)
    seen: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agents = Agents(self.run, tokenizer(), on_failure="drop")

    async def run(self, row: dict[str, Any], base_url: str, key: str) -> float:
        number, said = row["number"], 0
        self.begun[number] += 1
        messages: list[dict[str, str]] = [{"role": "user", "content": str(number)}]
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self.agents.app), base_url=base_url) as to:
            for turn in range(row["turns"]):
                await anyio.sleep(self.seconds.get((number, turn), 0.01))
                asked = {"messages": messages, "logprobs": turn > 0, "return_token_ids": True}
                reply = await to.post("/chat/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
                if reply.status_code == 400:  # the response has no room
                    return -1.0
                choice = reply.json()["choices"][0]
                content = choice["message"]["content"]
                if turn > 0:
                    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
                    assert self.seen.setdefault((number, *choice["token_ids"]), logprobs) == logprobs
                said += int(content.partition(":")[0])
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": str(1 + turn % 3)}]
                if number in self.faults:
                    raise OSError
        return float(said)


def rows(count: int) -> list[Prompt]:
    columns = [{"number": at, "turns": 1 + at % 3} for at in range(count)]
    return [Prompt(at, at, np.array([0], np.int32), group=at, columns=each) for at, each in enumerate(columns)]


def policy(**options: Any) -> FakePolicy:
    def length(prompt: Prompt) -> int:
        return 9 + 20 * (int(str(prompt.columns["number"])) % 4 == 0) + 3 * prompt.sample

    def turns(prompt: Prompt) -> Sequence[int]:
        return [3, 7][: int(str(prompt.columns["number"])) % 3]

    return FakePolicy(length=length, turns=turns, **options)


def trained(
    players: Players, admission: Any, steps: int = 4, *, samples: int = 2, **options: Any
) -> tuple[list[tuple[float, Response]], list[dict[str, float]], list[str]]:
    """Return the scored responses, the metrics and the reasons of drops."""
    agents, trainer = players.agents, FakeTrainer()
    graph = graph_of(agents, policy(**options), trainer, admission, samples=samples)
    metrics, reasons = stepped(graph, agents.prompts(rows(60)), steps)
    pairs = [
        (float(score), each)
        for batch in trainer.batches
        for score, each in zip(batch.scores, batch.responses, strict=True)
    ]
    return pairs, metrics, reasons


def described(pairs: Sequence[tuple[float, Response]]) -> dict[int, tuple[float, list[int], list[bool]]]:
    return {
        each.prompt.rollout: (score, [*each.prompt.tokens.tolist(), *each.tokens.tolist()], each.sampled.tolist())
        for score, each in pairs
    }


def check(score: float, response: Response) -> None:
    """Check a response against what its agent must have said and counted."""
    pieces, number = response.pieces(), int(str(response.prompt.columns["number"]))
    assert response.prompt.tokens.tolist() == [1, number, 2]
    turns = [each for each in pieces if isinstance(each, Chunk)]
    answers = [each.tokens.tolist() for each in pieces if not isinstance(each, Chunk)]
    assert len(turns) == 1 + number % 3
    assert answers == [[90_000 + len(turn.tokens), *range(1 + at % 3)] for at, turn in enumerate(turns[:-1])]
    assert score == sum(len(turn.tokens) for turn in turns)


def test_deferred_rollouts_are_trained_with_the_tokens_and_rewards_of_serial_steps() -> None:
    players = Players({(at, 1): 0.5 for at in range(0, 60, 3)})
    pairs, metrics, reasons = trained(players, Overcommit(batch=4, overcommit=3))
    assert reasons == []
    assert len(pairs) == 4 * 4 * 2
    for score, response in pairs:
        check(score, response)
        for each in [piece for piece in response.pieces() if isinstance(piece, Chunk)][1:]:
            assert players.seen[(response.prompt.admission, *each.tokens.tolist())] == each.logprobs.tolist()
    assert sum(each["deferral/deferred"] for each in metrics) > 0
    assert all(each["agents/refused"] == 0 for each in metrics)
    assert set(players.begun.values()) <= {1, 2}
    serial = described(trained(Players(), Overcommit(batch=4))[0])
    streamed = described(pairs)
    assert len(serial.keys() & streamed.keys()) > 20
    assert all(serial[rollout] == streamed[rollout] for rollout in serial.keys() & streamed.keys())


def test_rollouts_that_begin_anew_have_a_new_agent() -> None:
    players = Players({(at, 1): 9.0 for at in range(1, 60, 3)})
    pairs, metrics, _ = trained(players, TailBatched(batch=4), steps=6)
    for score, response in pairs:
        check(score, response)
    assert sum(each.get("deferral/discarded_tokens", 0) for each in metrics) > 0
    assert max(players.begun.values()) > 2  # one for each of two samples


def test_held_out_rows_have_agents_and_one_that_asks_nothing_leaves_its_row_out() -> None:
    async def silent(row: dict[str, Any], url: str, key: str) -> float:
        return await players.run(row, url, key) if row["number"] != 2 else 0.0

    players = Players()
    players.agents = agents = Agents(silent, tokenizer(), on_failure="drop")
    evaluation = Evaluation(
        prompts=rows(7), reward=agents.reward, greedy=policy(), batch=3, environment=agents, asking=agents.prompts
    )

    async def main() -> Evaluated:
        async with agents:
            return await evaluation.measure(0)

    answers = run_virtual(main).answers
    assert [each.finish.response.prompt.columns["number"] for each in answers] == [0, 1, 3, 4, 5, 6]
    assert [each.score for each in answers] == [float(each.finish.response.sampled.sum()) for each in answers]
    assert agents._sessions == {}


def test_requests_of_held_out_rows_are_counted_apart_from_those_of_rows_that_are_trained_meanwhile() -> None:
    async def curious(row: dict[str, Any], url: str, key: str) -> float:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(players.agents.app), base_url=url) as to:
            asked = {"messages": [{"role": "user", "content": "1"}], "temperature": 0.3}
            for _ in range(row.get("refused", 0)):
                await to.post("/chat/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
        return await players.run(row, url, key)

    players = Players({(at, 1): 0.3 for at in range(60)})
    players.agents = agents = Agents(curious, tokenizer())
    held_out = [replace(each, columns={**each.columns, "refused": each.columns["turns"]}) for each in rows(6)]
    graph = graph_of(agents, policy(), FakeTrainer(), Overcommit(batch=4, overcommit=3))
    evaluation = Evaluation(
        prompts=held_out, reward=agents.reward, greedy=policy(), batch=2, environment=agents, asking=agents.prompts
    )
    evaluated, trained_meanwhile = list[float](), list[float]()

    async def evaluate() -> None:
        evaluated.append((await evaluation.measure(0)).metrics["eval/agents/refused"])

    async def main() -> None:
        async with graph.open(agents.prompts(rows(60))) as run, anyio.create_task_group() as tasks:
            tasks.start_soon(evaluate)
            trained_meanwhile.extend([report.metrics["agents/refused"] async for report in run.steps(4)])

    run_virtual(main)
    assert evaluated == [0.5]
    assert trained_meanwhile == [0.0] * 4


def test_a_response_at_its_cap_has_the_reward_that_the_agent_gives_it() -> None:
    pairs, _, reasons = trained(Players(), Overcommit(batch=6), cap=8)
    assert reasons == []
    scores = {int(str(each.prompt.columns["turns"])): score for score, each in pairs}
    assert scores == {1: 8.0, 2: 3.0 + 8 - 3 - 2, 3: -1.0}


def test_an_agent_that_goes_on_after_the_end_of_its_response_loses_it() -> None:
    async def eager(row: dict[str, Any], url: str, key: str) -> float:
        return await players.run({**row, "turns": row["turns"] + (row["number"] == 0)}, url, key)

    players = Players()
    players.agents = Agents(eager, tokenizer())
    pairs, _, reasons = trained(players, Overcommit(batch=4))
    assert len(pairs) + len(reasons) == 4 * 4 * 2
    assert [reason.partition(": ")[0] for reason in reasons] == [
        f"the agent of rollout {rollout} goes on, and its response has ended" for rollout in (0, 1)
    ]


@pytest.mark.schedules
@given(
    seconds=st.dictionaries(
        st.tuples(st.integers(0, 30), st.integers(0, 2)), st.floats(0, 2).map(lambda each: round(each, 3)), max_size=30
    ),
    faults=st.lists(st.integers(0, 20), max_size=4),
    overcommit=st.integers(0, 3),
    samples=st.integers(2, 3),
)
def test_every_schedule_trains_each_rollout_once_and_as_it_was_said(
    seconds: Mapping[tuple[int, int], float], faults: Sequence[int], overcommit: int, samples: int
) -> None:
    players = Players(seconds, faults)
    pairs, _, reasons = trained(players, Overcommit(batch=3, overcommit=overcommit), samples=samples)
    rollouts = [each.prompt.rollout for _, each in pairs]
    assert len(rollouts) == len(set(rollouts))
    assert len(rollouts) + len(reasons) == 4 * 3 * samples
    for score, response in pairs:
        check(score, response)
    assert players.agents._sessions == {}


@dataclass
class Limited(Players):
    """Agents that limit each turn; ``said``: the reasons of their turns' ends, by row."""

    fields: Mapping[str, int] = field(default_factory=dict)
    turns: int = 9
    said: dict[int, list[str]] = field(default_factory=dict)

    async def run(self, row: dict[str, Any], base_url: str, key: str) -> float:
        messages, said = [{"role": "user", "content": str(row["number"])}], list[str]()
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self.agents.app), base_url=base_url) as to:
            for turn in range(self.turns):
                await anyio.sleep(self.seconds.get((row["number"], turn), 0.01))
                asked = {"messages": messages, **self.fields}
                reply = await to.post("/chat/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
                if reply.status_code == 400:
                    break
                (choice,) = reply.json()["choices"]
                said.append(choice["finish_reason"])
                messages += [choice["message"], {"role": "user", "content": "2"}]
        if said:  # it was not begun in vain
            assert self.said.setdefault(row["number"], said) == said
        return float(len(said))


TIMES = st.dictionaries(st.tuples(st.integers(0, 20), st.integers(0, 2)), st.floats(0, 0.2), max_size=20)


@given(TIMES)
def test_the_next_turn_is_limited_by_the_request_and_by_what_the_response_has_left(
    seconds: Mapping[tuple[int, int], float],
) -> None:
    # A limit of 4, room for 10: 4 tokens, an answer of 3, and then 3.
    players = Limited(seconds, fields={"max_tokens": 4})
    decoding = FakePolicy(length=lambda prompt: 99, cap=10)
    batches = batches_of(players, decoding, Overcommit(batch=4, overcommit=2))
    for response in (each for batch in batches for each in batch.responses):
        assert response.sampled.tolist() == [True] * 4 + [False] * 3 + [True] * 3
    assert {tuple(each) for each in players.said.values()} == {("length", "length")}


@given(TIMES, st.integers(1, 2))
def test_the_tokens_that_end_thinking_are_not_trained_and_the_turn_is_one_after_a_resume_too(
    seconds: Mapping[tuple[int, int], float], killed: int
) -> None:
    # Rollouts decode at different speeds, so that some are deferred within their turns.
    paced: dict[str, Any] = {
        "length": lambda _: 8,
        "turns": lambda _: (),
        "pace": lambda prompt: 1 + prompt.admission % 3,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.agents.conftest.Numbers.thinking", (-1, 99_999, [98, 99_999]))
        players = [Limited(seconds, fields={"thinking_token_budget": 5}, turns=1) for _ in range(2)]
        batches = resumed(players, Overcommit(batch=4, overcommit=3), killed, 3, helpers=1, **paced)
    assert len(described([(0.0, each) for batch in batches for each in batch.responses])) == 3 * 4 * 2
    for response in (each for batch in batches for each in batch.responses):
        assert response.sampled.tolist() == [True] * 5 + [False] * 2 + [True] * 3
        assert response.tokens[5:7].tolist() == [98, 99_999]
    assert {tuple(each) for one in players for each in one.said.values()} == {("stop",)}


def batches_of(players: Players, decoding: FakePolicy, admission: Any) -> list[Batch]:
    trainer = FakeTrainer()
    graph = graph_of(players.agents, decoding, trainer, admission)
    _, reasons = stepped(graph, players.agents.prompts(rows(40)), 3)
    assert reasons == []
    assert len(trainer.batches) == 3
    return trainer.batches
