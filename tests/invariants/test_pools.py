"""Whole PPO graphs on pools of engines that die, hang and are slow, under random schedules: nothing is lost by it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import event, example, given, settings as hypothesis_settings, strategies as st

from oppo.admission.chunking import WholeRollout
from oppo.errors import ModelLost
from oppo.events import Chunk, Defer, Prompt
from oppo.log import routed
from oppo.stages.conversations import TurnOutcome
from oppo.testing import Fault, Flap, Hang, Raise, Script, Slow
from oppo.testing.fake_policy import FakeDecode
from oppo.testing.faulty import FaultKind, Method
from oppo.turns import Answer, Answered, Turn
from tests.kit.dialogues import turns_answered
from tests.kit.faulty import Garbage, LoseSessions, Spoilt
from tests.kit.pipelines import Setting, motions, settings
from tests.kit.pools import TIMEOUT, Fate, PooledPipeline
from tests.stages.test_conversations import Tool, some_turns

pytestmark = pytest.mark.schedules

SCHEDULES = max(2, int(os.environ["OPPO_SCHEDULES"]) // 2)
"""Of the first property, half of those that are asked for; the others share the rest."""

ERRORS = st.sampled_from([ModelLost, RuntimeError, TimeoutError, OSError])

KEPT = Setting((5, 9, 3, 30, 12, 7, 22, 4, 40, 6, 18), batch=6, extra=3, steps=6)


DEATHS = (math.inf, *(step / 100 for step in range(60)))
"""Times at which members die, mostly with the end of a decode step."""


@st.composite
def fates(draw: st.DrawFn) -> Fate:
    return Fate(
        at=draw(st.sampled_from(DEATHS)),
        how=draw(st.sampled_from(["raises", "falls silent", "hangs"])),
        keeps=draw(st.booleans()),
        loads=tuple(draw(st.lists(st.sampled_from([0.0, 0.0, 0.07, 1.0, 20.0, -1.0]), max_size=4))),
        returns=draw(st.sampled_from([0.0, 0.1, 2.0])),
        after=draw(st.sampled_from([1, 2, 3, 1_000, 1_000])),
    )


@dataclass(frozen=True)
class Case:
    setting: Setting
    members: tuple[Fate, ...]
    later: tuple[Fate, ...] = ()
    script: Script = ()
    kills: tuple[tuple[float, int], ...] = ()
    timeout: float = TIMEOUT
    evaluated: bool = False

    def play(self, kind: type[PooledPipeline] = PooledPipeline, tool: Tool | None = None) -> PooledPipeline:
        run = kind(
            self.setting,
            fates=self.members,
            later=self.later,
            kills=self.kills,
            timeout=self.timeout,
            evaluated=self.evaluated,
            script=self.script,
            environment=tool,
        )
        with routed():
            return run.play()


@st.composite
def cases(draw: st.DrawFn, setting: st.SearchStrategy[Setting]) -> Case:
    members = draw(st.lists(fates(), min_size=1, max_size=4))
    return Case(draw(setting), tuple(members), tuple(draw(st.lists(fates(), max_size=3))))


class Talking(PooledPipeline):
    """Some of its responses have turns, which a tool answers."""

    def turns(self, prompt: Prompt) -> Sequence[int]:
        return some_turns(prompt)


@hypothesis_settings(max_examples=SCHEDULES)
@given(cases(motions()))
@example(Case(KEPT, (Fate(0.13), Fate())))
@example(Case(replace(KEPT, refill=True), (Fate(0.13, "falls silent", keeps=False), Fate(0.2, "hangs"))))
@example(
    Case(replace(KEPT, lookahead=1, in_flight=True, update=0.5), (Fate(loads=(1.0, 20.0)), Fate(loads=(0.0, 1.0))))
)
def test_members_that_die_cost_time_and_nothing_else(case: Case) -> None:
    check(case.play())


def check(run: PooledPipeline) -> None:
    """Whatever happened, each prompt was trained once, with the tokens that any engine would make."""
    check_ending(run)
    check_accounts(run)
    check_numbers(run)


@st.composite
def killed(draw: st.DrawFn) -> Case:
    """Any number of a pool's members is killed at any moment, more than once; loads may take long or fail."""
    loads = st.lists(st.sampled_from([0.0, 0.0, 0.07, 1.0, -1.0]), max_size=4).map(tuple)
    how = st.sampled_from(["raises", "falls silent"])
    fate = st.builds(Fate, how=how, keeps=st.booleans(), loads=loads, returns=st.sampled_from([0.0, 0.1, 2.0]))
    moment = st.integers(0, 200).map(lambda step: step / 100)
    setting = draw(motions(lookaheads=(0, 1, 1, 2)))
    return Case(
        replace(setting, prompts=1_000, steps=4, update=draw(st.sampled_from([0.1, 0.3, 0.3, 2_000.0]))),
        tuple(draw(st.lists(fate, min_size=1, max_size=3))),
        tuple(draw(st.lists(fate, max_size=3))),
        kills=tuple(draw(st.lists(st.tuples(moment, st.sampled_from([1, 3])), min_size=1, max_size=3))),
        timeout=1_000.0,
        evaluated=draw(st.booleans()),
    )


AHEAD = replace(KEPT, lookahead=1, update=0.3)


@hypothesis_settings(max_examples=max(1, SCHEDULES // 4))
@given(killed())
@example(Case(AHEAD, (Fate(), Fate()), kills=((0.75, 2),)))
@example(Case(replace(AHEAD, update=20.0), (Fate(), Fate()), kills=((0.75, 2),)))
@example(Case(replace(AHEAD, in_flight=True), (Fate(), Fate()), kills=((0.6, 2),), evaluated=True))
def test_a_run_goes_on_after_the_loss_of_any_number_of_members_at_any_moment(case: Case) -> None:
    run = case.play()
    event(f"lookahead {case.setting.lookahead}, {run.started} started again")
    if run.error is not None:
        raise run.error
    check(run)


@hypothesis_settings(max_examples=SCHEDULES // 2)
@given(cases(settings(prompts=(7, 1_000))))
@example(Case(KEPT, (Fate(0.13), Fate())))
@example(Case(KEPT, (Fate(0.13, "falls silent", keeps=False), Fate(0.2))))
def test_turns_go_on_elsewhere_and_each_is_answered_once(case: Case) -> None:
    check_talk(case.play(Talking, tool()))


@st.composite
def faults(draw: st.DrawFn, members: int) -> Fault:
    """What a member may do wrong and its pool can see: not tokens that are garbage, nor reads that never return."""
    methods: Sequence[Method] = ("open", "decoding", "read", "turn", "aclose", "load")
    method = draw(st.sampled_from(methods))
    does: list[st.SearchStrategy[FaultKind]] = [st.builds(Raise, ERRORS), st.builds(Slow, st.sampled_from([0.01, 1.0]))]
    does.append(st.builds(Flap, st.integers(1, 2), st.integers(0, 2)))
    if method in {"open", "decoding", "aclose", "load"}:
        does.append(st.just(Hang()))
    if method == "decoding":
        does.append(st.just(LoseSessions()))
    garbage: dict[Method, Sequence[Spoilt]] = {"open": ["count"], "load": ["version"], "read": ["empty", "version"]}
    if method in garbage:
        does.append(st.builds(Garbage, st.sampled_from(garbage[method])))
    call = draw(st.integers(0, 40 if method in {"read", "turn"} else 6))
    return Fault(f"member {draw(st.integers(0, members - 1))}", method, draw(st.one_of(does)), call)


@st.composite
def scripted(draw: st.DrawFn) -> Case:
    case = draw(cases(settings(prompts=(7, 1_000))))
    return replace(case, script=tuple(draw(st.lists(faults(len(case.members)), min_size=1, max_size=4))))


SLOW_READER = replace(KEPT, lengths=(4, 3, 3), batch=5, extra=0, chunks=WholeRollout(), steps=1, samples=2, capacity=1)
"""The turns of a response are as long as one another, and answered before its reader has read the first."""


@hypothesis_settings(max_examples=SCHEDULES // 2)
@given(scripted())
@example(Case(SLOW_READER, (Fate(after=1),), script=(Fault("member 0", "read", Slow(1.0), 12),)))
@example(Case(SLOW_READER, (Fate(keeps=False, after=1),), script=(Fault("member 0", "read", Slow(1.0), 12),)))
@example(Case(SLOW_READER, (Fate(),), script=(Fault("member 0", "read", Garbage("version"), 0),)))
@example(Case(KEPT, (Fate(), Fate()), script=(Fault("member 0", "read", Garbage("version"), 9),)))
@example(Case(SLOW_READER, (Fate(),), script=(Fault("member 0", "read", Garbage("empty"), 0),)))
@example(
    Case(
        replace(KEPT, lengths=(1, 1, 1), batch=1, extra=0, chunks=WholeRollout(), steps=1, samples=1, capacity=1),
        (Fate(after=2),),
        script=(Fault("member 0", "open", Slow(0.01), 0), Fault("member 0", "read", Garbage("empty"), 0)),
    )
)
def test_whatever_a_member_does_wrong_costs_it_its_place_and_nothing_else(case: Case) -> None:
    check_talk(case.play(Talking, tool()))
    check(case.play(tool=tool()))


def check_talk(run: PooledPipeline) -> None:
    """Every response has all of its turns, each of which was answered once."""
    check_ending(run)
    check_accounts(run)
    answered = [item for _, stage, item in run.tap.items if stage == "generate" and isinstance(item, Answered)]
    assert len({(each.rollout, each.turn) for each in answered}) == len(answered)
    for response in (each for batch in run.batches for each in batch.responses):
        ends = [end for end in some_turns(response.prompt) if end < run.setting.length(response.prompt)]
        assert turns_answered(response) == len(ends[:1] if finishes(response.prompt) else ends)


def tool() -> Tool:
    """Answers turns after some time; of every second rollout it ends the second turn."""

    def outcome(turn: Turn) -> TurnOutcome:
        if finishes(turn.prompt) and turn.number == 1:
            return None
        return Answer(np.full(2, 90_000 + turn.number, np.int32), {"answered": turn.number + 1})

    return Tool(lambda turn: 0.04 * (turn.prompt.rollout % 4), outcome=outcome)


def finishes(prompt: Prompt) -> bool:
    return prompt.rollout % 2 == 0


def check_ending(run: PooledPipeline) -> None:
    """A run ends well, since whoever dies is started again, unless members die faster than they come back."""
    event("members died" if run.started else "nobody died")
    if run.error is not None:
        assert isinstance(run.error, ModelLost), run.error
        event("no member was left")
    assert run.tasks_left == 0


def check_accounts(run: PooledPipeline) -> None:
    """Every prompt is trained exactly once, in full batches that are fresh enough."""
    s, story = run.setting, run.tap.story()
    trained = [rollout for batch in run.batches for rollout in batch.rollouts]
    assert len(set(trained)) == len(trained)
    if run.error is None:
        assert sorted(trained) == sorted(story) == list(range(len(trained)))
        assert len(trained) == min(s.prompts, s.steps * s.batch) * s.samples
        run.recorder.validate()
    assert all(len(batch) == s.batch * s.samples for batch in run.batches[:-1])
    for step, (batch, report) in enumerate(zip(run.batches, run.reports, strict=False)):
        assert len(report.deferred) <= s.most_carried
        assert (step - batch.versions[batch.sampled]).max(initial=0) <= s.max_deferrals + s.lookahead
    for events in story.values():
        assert sum(isinstance(each, Defer) for each in events) <= s.max_deferrals
        versions = [each.versions for each in events if isinstance(each, Chunk)]
        assert bool(np.all(np.diff(np.concatenate([np.zeros(1, np.int32), *versions])) >= 0))


def check_numbers(run: PooledPipeline) -> None:
    """Each token is the one that any engine would make there, and its log-prob that of the version it names."""
    for batch in run.batches:
        for response, row in zip(batch.responses, batch.rows(), strict=True):
            versions = batch.versions[row].tolist()
            made = FakeDecode(run.policy, response.prompt, run.setting.length(response.prompt), versions=versions)
            assert batch.tokens[row].tolist() == made.tokens(0, made.length).tolist()
            assert batch.logprobs[row].tolist() == made.logprobs(0, made.length).tolist()
