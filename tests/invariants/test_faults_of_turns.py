"""Turns under random schedules in which tools and policies are slow, fail, hang, flap or say something impossible.

A run ends with the error of its script and says where, or trains every rollout once, with all of its turns; whatever
it had observed by then is a valid run, and nothing of it is left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import event, example, given, settings as hypothesis_settings, strategies as st

from oppo.errors import DeadlockError, ModelError, ModelLost, ProtocolError
from oppo.stages import Generate
from oppo.testing import (
    Fault,
    FaultyEnvironment,
    FaultyPolicy,
    Flap,
    Hang,
    Raise,
    Recorder,
    Script,
    Slow,
    run_virtual,
)
from oppo.testing.faulty import FaultKind
from oppo.turns import Answered
from tests.kit.dialogues import turns_answered
from tests.kit.faulty import Garbage, Remembering
from tests.kit.pipelines import Pipeline, Setting, settings
from tests.stages.test_conversations import Tool, some_turns

pytestmark = pytest.mark.schedules

SCHEDULES = max(1, int(os.environ["OPPO_SCHEDULES"]) // 4)
ERRORS = st.sampled_from([ModelError, ModelLost, RuntimeError, TimeoutError, MemoryError])
SLOW = st.builds(Slow, st.sampled_from([1 / 1024, 1 / 64, 1.0, 64.0]))


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Anything that can go wrong with a turn, in the policy or in the tool."""
    model, method = draw(st.sampled_from([("actor", "turn"), ("tool", "answer")]))
    does: list[st.SearchStrategy[FaultKind]] = [st.builds(Raise, ERRORS), st.just(Hang()), SLOW, SLOW]
    does.append(st.builds(Flap, st.integers(1, 2), st.integers(0, 2)))
    if method == "answer":
        does.append(st.builds(Garbage, st.sampled_from(["empty", "token"])))
    return Fault(model, method, draw(st.one_of(does)), draw(st.integers(0, 9)))  # type: ignore[arg-type] # one of them


@dataclass
class Talking(Pipeline):
    """A pipeline of fakes with a tool, both of which keep to a script."""

    script: Script = ()
    recorder: Recorder = field(default_factory=Recorder)
    error: BaseException | None = None
    tasks_left: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy = self.remembering = Remembering(self.setting.length, 0.01, self.setting.pace, turns=some_turns)
        self.actor = FaultyPolicy("actor", self.policy, self.script)
        self.tool = FaultyEnvironment("tool", Tool(lambda turn: 0.02 * (turn.prompt.rollout % 3)), self.script)
        s = self.setting
        admission = self.generate.admission
        self.generate = Generate(self.actor, admission, s.chunks, s.samples, environment=self.tool)

    async def run(self) -> None:
        source = self.prompts()
        try:
            async with self.graph().open(source, observers=[self.recorder], lookahead=self.setting.lookahead) as run:
                async for report in run.steps(self.setting.steps):
                    self.reports.append(report)
        except Exception as error:  # noqa: BLE001 - what ends the run is what is looked at
            self.error = error
        self.tasks_left = len(asyncio.all_tasks()) - 1

    def play(self) -> None:
        try:
            run_virtual(self.run)
        except DeadlockError as error:
            self.error = error

    @property
    def struck(self) -> Sequence[Fault]:
        return [*self.actor.struck, *self.tool.struck]


def explains(fault: Fault, error: BaseException) -> bool:
    """Return whether the error of a run is the one that this fault must come to."""
    told = "\n".join([str(error), *getattr(error, "__notes__", [])])
    note = "while waiting for a turn of rollout " if fault.method == "turn" else "while answering turn "
    match fault.does:
        case Raise(kind):
            return type(error) is kind and f"{fault.place} fails, as its script says" in told and note in told
        case Flap():
            return type(error) is ConnectionError and f"of {fault.method}() of '{fault.model}'" in told and note in told
        case Hang():
            return type(error) is DeadlockError and f"{fault.place} hangs, as its script says" in told
        case Garbage("empty"):
            return type(error) is ProtocolError and "int32 [1 or more]" in told and note in told
        case Garbage("token"):
            return type(error) is ProtocolError and "a chunk that holds the token id" in told
    return False


def ends(fault: Fault) -> bool:
    """Return whether a run cannot go on once this has happened.

    Who waits in vain for a turn of a response without one is closed with it, and only an answer can be garbage.
    """
    return not isinstance(fault.does, Garbage) and (fault.method, fault.does) != ("turn", Hang())


@hypothesis_settings(max_examples=SCHEDULES)
@given(settings(prompts=(7, 1_000)), st.lists(faults(), min_size=1, max_size=3).map(tuple))
@example(Setting(extra=2, steps=3), (Fault("tool", "answer", Hang(), 1),))
@example(Setting(extra=2, steps=3), (Fault("tool", "answer", Slow(64.0), 0), Fault("actor", "turn", Raise(), 6)))
def test_whatever_goes_wrong_with_a_turn_is_said_and_nothing_is_lost(setting: Setting, script: Script) -> None:
    run = Talking(setting, script=script)
    run.play()
    run.recorder.validate()
    harmful = [fault for fault in run.struck if not isinstance(fault.does, Slow)]
    if run.error is None:
        event("came to its end")
        assert not [fault for fault in harmful if ends(fault)], "what happened was hidden"
        check_whole(run)
    else:
        event(type(run.error).__name__)
        assert any(explains(fault, run.error) for fault in harmful), run.error
    if not isinstance(run.error, DeadlockError):
        assert run.tasks_left == 0
        assert all(decode.closed for decode in run.remembering.opened)


def check_whole(run: Talking) -> None:
    """Every rollout is trained once, with all of its turns, each of which was answered once."""
    rollouts = [rollout for batch in run.batches for rollout in batch.rollouts]
    assert sorted(rollouts) == list(range(len(rollouts)))
    turns = 0
    for response in (each for batch in run.batches for each in batch.responses):
        ends = [end for end in some_turns(response.prompt) if end < run.setting.length(response.prompt)]
        assert turns_answered(response) == len(ends)
        turns += len(ends)
    answered = [sent.item for sent in run.recorder.items if isinstance(sent.item, Answered)]
    assert len({(each.rollout, each.turn) for each in answered}) == len(answered) == turns
