"""Agents that hold several conversations: each is trained once, in the unit of the first, however steps are cut."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import anyio
import httpx2
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo import Overcommit
from oppo.admission import Admission, Continuous, TailBatched
from oppo.agents import Agents
from oppo.agents.conversation import ENDED
from oppo.agents.rollouts import _FULL
from oppo.evaluation import Evaluated, Evaluation
from oppo.events import Batch, Chunk, FloatArray, Prompt, Response, StepReport
from oppo.models import Capabilities
from oppo.stages import DynamicSampling, GroupRelative, InParts
from oppo.stages.batch import BatchPart
from oppo.testing import FakePolicy, FakeTrainer, run_virtual
from oppo.testing.fake_policy import FakeDecode
from tests.agents.conftest import graph_of, stepped
from tests.agents.test_agents import tokenizer
from tests.kit.pipelines import Tap

pytestmark = pytest.mark.usefixtures("numbers")


@dataclass
class Chief:
    """An agent with helpers, each a conversation of its own, between its first turn and its second.

    Attributes:
        seconds: before each request, by row, conversation and turn; the first one's third turn is the agent's end.
        together: helpers are asked at once; else one after the other.
        faults: rows whose agent raises when its helpers are done, or after so much ``patience`` with them.
        leaving: rows whose agent does not go on with its first conversation then, as after a summary.
        summing: once its first conversation has no room, it goes on in another.
    """

    seconds: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    together: bool = False
    faults: Sequence[int] = ()
    patience: float = math.inf
    leaving: Sequence[int] = ()
    summing: bool = False
    answered: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.agents = Agents(self.run, tokenizer(), on_failure="drop")

    async def run(self, row: dict[str, Any], base_url: str, key: str) -> float:
        said: list[int] = []
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self.agents.app), base_url=base_url) as to:

            async def turn(messages: list[dict[str, str]], conversation: int, number: int) -> bool:
                await anyio.sleep(self.seconds.get((row["number"], conversation, number), 0.01))
                authorization = {"Authorization": f"Bearer {key}"}
                reply = await to.post("/chat/completions", json={"messages": messages}, headers=authorization)
                self.answered[reply.json()["error"]["code"] if reply.status_code == 400 else ""] += 1
                if reply.status_code == 400:
                    return False
                content = reply.json()["choices"][0]["message"]["content"]
                said.append(int(content.partition(":")[0]))
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": str(1 + number)}]
                return True

            async def help_(number: int) -> None:
                messages = [{"role": "user", "content": str(1000 + 10 * row["number"] + number)}]
                for at in range(number):
                    await turn(messages, number, at)

            main = [{"role": "user", "content": str(row["number"])}]
            await turn(main, 0, 0)
            with anyio.move_on_after(self.patience if row["number"] in self.faults else math.inf):
                if self.together:
                    async with anyio.create_task_group() as helpers:
                        for number in range(1, 1 + row["helpers"]):
                            helpers.start_soon(help_, number)
                else:
                    for number in range(1, 1 + row["helpers"]):
                        await help_(number)
            if row["number"] in self.faults:
                raise OSError
            if row["number"] not in self.leaving and not await turn(main, 0, 1) and self.summing:
                assert await turn([{"role": "user", "content": str(2000 + row["number"])}], 9, 0)
            await anyio.sleep(self.seconds.get((row["number"], 0, 2), 0))
        return float(sum(said))


class Rows(Iterator[Prompt]):
    """Rows from ``at`` on, which a resumed run reads on, each with fewer helpers than so many."""

    def __init__(self, at: int = 0, helpers: int = 3) -> None:
        self.at, self.helpers = at, helpers

    def __next__(self) -> Prompt:
        at, self.at = self.at, self.at + 1
        return Prompt(at, at, np.array([0], np.int32), group=at, columns={"number": at, "helpers": at % self.helpers})

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}


def helper(prompt: Prompt) -> int:
    return int(prompt.tokens[1]) % 10 if prompt.branch else 0


def length(prompt: Prompt) -> int:
    return 9 + 20 * (prompt.admission % 4 == 0 and helper(prompt) == 1)


def turns(prompt: Prompt) -> list[int]:
    return [3] if helper(prompt) != 1 else []


def policy(*, adds: bool = True, **options: Any) -> FakePolicy:
    can = Capabilities(turns=True, adds_while_decoding=adds)
    return FakePolicy(**{"length": length, "turns": turns, **options}, capabilities=can)


def trained(
    chief: Chief,
    admission: Admission,
    steps: int = 4,
    *,
    helpers: int = 3,
    samples: int = 2,
    decoding: FakePolicy | None = None,
    **options: Any,
) -> tuple[list[Batch], list[dict[str, float]], list[str]]:
    trainer = FakeTrainer()
    graph = graph_of(chief.agents, decoding or policy(**options), trainer, admission, samples=samples)
    return trainer.batches, *stepped(graph, chief.agents.prompts(Rows(helpers=helpers)), steps)


Row = tuple[float, float, list[int], list[bool]]


def described(batches: Sequence[Batch]) -> dict[int, Row]:
    """Return each response by its rollout: its score, its advantage, its tokens, and which are sampled."""
    found: dict[int, Row] = {}
    for batch in batches:
        assert batch.advantages is not None
        for row, span in enumerate(batch.rows()):
            response = batch.responses[row]
            (advantage,) = {*batch.advantages[span][response.sampled].tolist()}
            tokens = [*response.prompt.tokens.tolist(), *response.tokens.tolist()]
            assert response.prompt.rollout not in found
            found[response.prompt.rollout] = float(batch.scores[row]), advantage, tokens, response.sampled.tolist()
    return found


def check(batches: Sequence[Batch], samples: int = 2, leaving: Sequence[int] = ()) -> None:
    """Check each unit against what its agents must have said and counted."""
    rows_of = described(batches)
    responses = [each for batch in batches for each in batch.responses]
    families: dict[tuple[int, int], dict[int, Response]] = {}
    for each in responses:
        families.setdefault((each.prompt.admission, each.prompt.sample), {})[each.prompt.branch] = each
    for (admission, sample), family in families.items():
        begun = sorted(int(family[at].prompt.tokens[1]) for at in family if at)
        assert begun == [1000 + 10 * admission + at for at in range(1, 1 + admission % 3)]
        turns = {at: [len(each.tokens) for each in family[at].pieces() if isinstance(each, Chunk)] for at in family}
        assert len(turns[0]) == 2 - (admission in leaving)
        found = [rows_of[each.prompt.rollout] for each in family.values()]
        assert {score for score, *_ in found} == {float(sum(map(sum, turns.values())))}
        assert len({advantage for _, advantage, *_ in found}) == 1
        assert family[0].prompt.rollout == admission * samples + sample
        assert {each.prompt.first for each in family.values()} == {family[0].prompt.rollout}


def test_a_helper_s_conversation_is_trained_in_the_unit_of_its_agent() -> None:
    chief = Chief()
    batches, metrics, reasons = trained(chief, Overcommit(batch=4))
    assert reasons == []
    check(batches)
    helpers = [each for batch in batches for each in batch.responses if each.prompt.branch]
    assert len(helpers) == 2 * sum(at % 3 for at in range(16))
    assert chief.answered.keys() <= {"", "rollout_ended"}  # of rows that were begun ahead
    scores = [
        [float(score) for each, score in zip(one.responses, one.scores, strict=True) if not each.prompt.branch]
        for one in batches
    ]
    assert [each["objective/scores"] for each in metrics] == pytest.approx([np.mean(each) for each in scores])
    assert all(each["agents/refused"] == 0 for each in metrics)


def test_a_group_comes_early_if_none_of_its_agents_has_a_further_conversation() -> None:
    chief, tap, trainer = Chief(), Tap(), FakeTrainer(accumulating=lambda _: 0.0)
    graph = graph_of(chief.agents, policy(), trainer, Overcommit(batch=4))
    graph = graph.replace(advantage=InParts(GroupRelative(), 2))

    async def main() -> list[float]:
        async with graph.open(chief.agents.prompts(Rows()), observers=[tap]) as run:
            return [report.score async for report in run.steps(3)]

    scores = run_virtual(main)
    sent = [item.batch for _, stage, item in tap.items if stage == "advantage" and isinstance(item, BatchPart)]
    assert {each.prompt.admission for part in sent for each in part.responses} == {0, 3, 6, 9}
    batches = [item for _, stage, item in tap.items if stage == "advantage" and isinstance(item, Batch)]
    check(batches)
    assert scores == [float(np.mean(batch.scores[batch.firsts])) for batch in batches]


def test_a_group_is_selected_by_one_score_of_each_agent() -> None:
    chief, seen = Chief(), list[int]()

    def accept(scores: FloatArray) -> bool:
        seen.append(len(scores))
        return True

    graph = graph_of(chief.agents, policy(), FakeTrainer(), Overcommit(batch=4), select=DynamicSampling(accept))

    async def main() -> list[StepReport]:
        async with graph.open(chief.agents.prompts(Rows())) as run:
            return [report async for report in run.steps(2)]

    reports = run_virtual(main)
    assert seen == [2] * 8
    assert sum(len(report.trained) for report in reports) == 2 * sum(1 + at % 3 for at in range(8))


def test_what_an_agent_of_an_engine_that_adds_nothing_begins_is_refused() -> None:
    for admission, adds in ((Overcommit(batch=4), False), (TailBatched(batch=4), True)):
        chief = Chief()
        trained(chief, admission, steps=2, adds=adds)
        assert chief.answered["history_changed"] > 0


def test_an_agent_that_goes_on_from_a_summary_earns_for_what_it_left() -> None:
    leaving = range(1, 60, 3)
    batches, _, reasons = trained(Chief(leaving=leaving), Overcommit(batch=4))
    assert reasons == []
    check(batches, leaving=leaving)


@pytest.mark.parametrize(("cap", "refused"), [(2, True), (5, True), (8, False)])
def test_a_conversation_without_room_ends_and_the_others_go_on(cap: int, refused: bool) -> None:
    chief = Chief()
    batches, _, reasons = trained(chief, Overcommit(batch=6), cap=cap)
    assert reasons == []
    assert (chief.answered["context_length_exceeded"] > 0) == refused
    for batch in batches:
        families = Counter((each.prompt.admission, each.prompt.sample) for each in batch.responses)
        assert all(count == 1 + admission % 3 for (admission, _), count in families.items())


def check_summaries(batches: Sequence[Batch], samples: int = 2) -> None:
    """Check that each agent whose first conversation had no room has gone on in another."""
    found = Counter(
        each.prompt.admission for batch in batches for each in batch.responses if each.prompt.tokens[1] > 1999
    )
    assert found == {each.prompt.admission: samples for batch in batches for each in batch.responses}


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_conversation_without_room_goes_on_as_another_after_a_summary(adaptive: bool) -> None:
    slow = {(at, 9, 0): 3.0 for at in range(0, 60, 2)}
    batches, metrics, reasons = trained(
        Chief(slow, summing=True), Overcommit(batch=4, overcommit=3 * adaptive), steps=6, cap=5
    )
    assert reasons == []
    check_summaries(batches)
    assert (sum(each["deferral/deferred"] for each in metrics) > 0) == adaptive


@pytest.mark.parametrize("overcommit", [1, 2, 4])
def test_units_join_where_others_are_complete_since_their_agents_have_ended(overcommit: int) -> None:
    batches, _, reasons = trained(Chief(), Continuous(batch=4, overcommit=overcommit), helpers=1, cap=2)
    assert reasons == []
    assert [len(batch.responses) for batch in batches] == [4 * 2] * 4


class Opening(FakePolicy):
    """Its rollouts take a while to be opened, in which agents of deferred ones end."""

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        await anyio.sleep(0.5)
        return await super().open_turns(rollouts)


def test_a_deferred_unit_whose_agents_end_while_rollouts_are_opened_fills_the_batch_and_no_other_is_deferred() -> None:
    chief = Chief({(2, 0, 2): 0.3, (3, 0, 2): 0.01, (5, 0, 2): 0.01}, leaving=range(60))
    decoding = Opening(
        length=lambda prompt: 100 if prompt.admission < 2 else 5, turns=lambda _: [], capabilities=policy().capabilities
    )
    admission = Overcommit(batch=2, overcommit=1, max_deferrals=1)
    batches, _, _ = trained(chief, admission, steps=5, helpers=1, decoding=decoding)
    assert [len(batch.responses) for batch in batches] == [2 * 2] * 5


def test_a_step_waits_for_no_tool_once_the_end_of_an_agent_has_filled_its_batch() -> None:
    slow = range(2, 60, 3)
    chief = Chief(
        {(at, 0, 1): 100.0 for at in slow} | {(at, 0, 2): 0.001 for at in range(60)},
        leaving=[at for at in range(60) if at not in slow],
    )
    options: dict[str, Any] = {
        "length": lambda _: 20,
        "turns": lambda prompt: [4] * (prompt.admission in slow),
        "cap": 10,
    }
    graph = graph_of(chief.agents, policy(**options), FakeTrainer(), Overcommit(batch=4, overcommit=2))

    async def main() -> tuple[StepReport, float]:
        async with graph.open(chief.agents.prompts(Rows(helpers=1))) as run:
            return await anext(run.steps(3)), anyio.current_time()

    report, seconds = run_virtual(main)
    assert report.trained == (0, 1, 2, 3, 6, 7, 8, 9)
    assert seconds < 1


@pytest.mark.parametrize("full", [0, 1])
def test_a_conversation_without_room_of_whatever_sample_goes_on_as_another(full: int) -> None:
    def fills(prompt: Prompt) -> bool:
        return prompt.sample == full and not prompt.branch

    options: dict[str, Any] = {
        "length": lambda prompt: 100 if fills(prompt) else 5,
        "turns": lambda prompt: [] if fills(prompt) else [3],
        "cap": 100,
    }
    batches, _, reasons = trained(Chief(summing=True), Overcommit(batch=2), helpers=1, **options)
    assert reasons == []
    check_summaries(batches, 1)


def test_refusals_that_are_given_again_hold_no_frames() -> None:
    chief = Chief()
    trained(chief, Overcommit(batch=4), cap=2)
    assert chief.answered["context_length_exceeded"] > 0
    assert [each.__traceback__ for each in (_FULL, ENDED)] == [None, None]


def test_an_agent_that_raises_loses_all_its_conversations() -> None:
    batches, _, reasons = trained(Chief(faults=(1, 5)), Overcommit(batch=4))
    left = {each.prompt.admission for batch in batches for each in batch.responses}
    assert left >= {0, 2, 3, 4}
    assert not left & {1, 5}
    assert len(reasons) == 2 * (2 + 3)
    assert all("raised OSError" in reason for reason in reasons)


def test_rows_that_are_held_out_have_helpers_too_and_leave_deferred_agents_alone() -> None:
    chief, trainer = Chief({(at, 1, 0): 0.5 for at in range(1, 60)}), FakeTrainer()
    agents, held_out = chief.agents, list(islice(Rows(), 5))
    graph = graph_of(agents, policy(), trainer, Overcommit(batch=4, overcommit=3))
    evaluation = Evaluation(
        prompts=held_out, reward=agents.reward, greedy=policy(), batch=3, environment=agents, asking=agents.prompts
    )

    async def main() -> list[Evaluated]:
        found = []
        async with graph.open(agents.prompts(Rows())) as run:
            async for report in run.steps(4):
                assert not report.dropped
                found.append(await evaluation.measure(report.index))
        return found

    for evaluated in run_virtual(main):
        assert [each.finish.response.prompt.columns["number"] for each in evaluated.answers] == [0, 1, 2, 3, 4]
    check(trainer.batches)


def test_a_held_out_row_whose_agent_raises_is_dropped_as_one_response_to_it() -> None:
    agents, shown = Chief(faults=(1, 2)).agents, list[tuple[int, int]]()
    evaluation = Evaluation(
        prompts=list(islice(Rows(), 5)),
        reward=agents.reward,
        greedy=policy(),
        sampled=policy(),
        samples=2,
        batch=4,
        environment=agents,
        asking=agents.prompts,
    )

    async def main() -> Mapping[str, float]:
        async with agents:
            return (await evaluation.measure(0, lambda *counts: shown.append(counts))).metrics

    assert run_virtual(main)["eval/dropped"] == 2 * (1 + 2)
    assert sorted({*shown}) == [(done, 5 * (1 + 2)) for done in range(1 + 5 * (1 + 2))]


def resumed(
    chiefs: Sequence[Any],
    admission: Admission,
    killed: int,
    steps: int,
    *,
    left: int = 0,
    helpers: int = 3,
    **options: Any,
) -> list[Batch]:
    """Return the batches of a run that is killed after so many steps and resumed with the other agents.

    Units are deferred then; likewise at the end if steps are ``left``.
    """
    trainers, state, at = [FakeTrainer(), FakeTrainer()], None, 0

    async def part(number: int, count: int, left: int) -> tuple[Any, int]:
        prompts, trainer, decoding = (
            chiefs[number].agents.prompts(Rows(at, helpers)),
            trainers[number],
            policy(**options),
        )
        async with graph_of(chiefs[number].agents, decoding, trainer, admission).open(prompts) as run:
            if state is not None:
                run.load_state_dict(state)
                trainer.version = killed
                await trainer.sync_weights(decoding)
            reports = run.steps(count + left, drain_after=lambda step: step + 1 == (number and killed) + count)
            for _ in range(count):
                await anext(reports)
            return copy.deepcopy(run.state_dict()), prompts.state_dict()["at"]

    state, at = run_virtual(part, 0, killed, steps - killed + left)
    run_virtual(part, 1, steps - killed, left)
    return [*trainers[0].batches, *trainers[1].batches]


def test_a_resumed_run_drops_what_an_agent_had_begun_that_raised_before() -> None:
    chiefs = [Chief(faults=(2,), patience=0.015) for _ in range(2)]
    batches = resumed(chiefs, Overcommit(batch=2, overcommit=2, max_deferrals=5), 1, 5)
    found = [each.prompt.admission for batch in batches for each in batch.responses]
    assert {*found} >= {0, 1, 3}
    assert 2 not in found


def test_a_run_is_left_while_an_agent_that_is_run_anew_has_yet_to_ask() -> None:
    chiefs = [Chief({(2, 0, 2): 1000.0}, leaving=range(60)), Chief({(2, 0, 0): 1000.0}, leaving=range(60))]
    admission = Overcommit(batch=2, overcommit=2, max_deferrals=5)
    options: dict[str, Any] = {"length": lambda prompt: 2 if prompt.admission == 2 else 5, "turns": lambda _: []}
    batches = resumed(chiefs, admission, 1, 2, left=3, helpers=1, **options)
    assert len(described(batches)) == 2 * 2 * 2


TIMES = st.dictionaries(
    st.tuples(st.integers(0, 20), st.integers(0, 2), st.integers(0, 1)),
    st.floats(0, 2).map(lambda each: round(each, 3)),
    max_size=30,
)


@cache
def serial_rows() -> dict[int, Row]:
    return described(trained(Chief(), Overcommit(batch=3), steps=6)[0])


ROOM = 1000
CAPS = st.sampled_from([2, 5, 8, ROOM, ROOM, ROOM])


@pytest.mark.schedules
@given(
    seconds=TIMES,
    kind=st.tuples(*[st.booleans()] * 2),
    killed=st.integers(1, 2),
    cap=CAPS,
    admission=st.sampled_from([Overcommit(batch=3, overcommit=3), Continuous(batch=3, overcommit=3)]),
)
@example({}, (False, False), 2, 2, Continuous(batch=3, overcommit=2))
@example({(2, 0, 1): 0.5}, (False, True), 1, 5, Overcommit(batch=3, overcommit=3))
def test_a_resumed_run_tells_an_agent_that_is_run_anew_the_turns_of_all_its_conversations(
    seconds: Mapping[tuple[int, int, int], float],
    kind: tuple[bool, bool],
    killed: int,
    cap: int,
    admission: Admission,
) -> None:
    together, summing = kind
    batches = resumed([Chief(seconds, together, summing=summing) for _ in range(2)], admission, killed, 3, cap=cap)
    one = described(batches)
    assert len({rollout for rollout in one if rollout < 2**32}) == 3 * 3 * 2
    if summing and cap < 8:
        check_summaries(batches)
    if cap == ROOM:
        check(batches)
        other = serial_rows()
        assert all(one[rollout] == other[rollout] for rollout in one.keys() & other.keys())


@pytest.mark.schedules
@given(TIMES, st.lists(st.integers(0, 20), max_size=4), st.tuples(*[st.booleans()] * 2), st.integers(2, 3), CAPS)
@example({(8, 2, 0): 0.0}, [], (False, False), 2, 5)  # a branch begins in the moment in which decoding ends
def test_every_schedule_trains_each_conversation_once_and_as_it_was_said(
    seconds: Mapping[tuple[int, int, int], float],
    faults: Sequence[int],
    kind: tuple[bool, bool],
    samples: int,
    cap: int,
) -> None:
    together, summing = kind
    chief = Chief(seconds, together, faults, summing=summing)
    batches, _, reasons = trained(chief, Overcommit(batch=3, overcommit=2), samples=samples, cap=cap)
    described(batches)
    if cap == ROOM:
        check(batches, samples)
    if summing and cap < 8:
        check_summaries(batches, samples)
    first = {each.prompt.admission for batch in batches for each in batch.responses}
    assert len(first) * samples + sum(samples for at in range(30) if at in faults) >= 4 * 3 * samples
    assert all("raised OSError" in reason for reason in reasons)
    assert chief.agents._sessions == {}
