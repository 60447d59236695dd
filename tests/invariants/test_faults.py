"""The invariants of overlap under random schedules in which things go wrong: scripts of faults over whole PPO graphs.

Whatever happens, a run ends with the error that was in its script and says where; what it had trained by then is what a
healthy run trains; and it can be gone on with, from its last whole step, without a prompt lost or doubled.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import event, example, given, settings, strategies as st

from oppo.admission.chunking import Fixed, WholeRollout
from oppo.errors import DeadlockError, ModelError, ModelLost, OppoError, ProtocolError, RewardError
from oppo.events import Chunk, Defer, Finish, Prompt, RolloutEvent
from oppo.rewards import OnFailure
from oppo.stages import Generate
from oppo.testing import (
    FakeScorer,
    Fault,
    FaultyEnvironment,
    FaultyPolicy,
    Flap,
    Hang,
    Raise,
    Recorder,
    Script,
    Slow,
    fake_per_token,
    fake_scalar,
    run_virtual,
)
from oppo.testing.fake_policy import FakeDecode
from oppo.testing.faulty import FaultKind, Method
from oppo.turns import Answered
from tests.kit.dialogues import turns_answered
from tests.kit.faulty import (
    SPOILT,
    Case,
    FaultyPipeline,
    Garbage,
    HalfSynced,
    Kind,
    LoseSessions,
    Remembering,
    stage_of,
)
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, paces, same_batches, settings as every_setting
from tests.stages.test_conversations import Tool, some_turns

pytestmark = pytest.mark.schedules

SCHEDULES = int(os.environ["OPPO_SCHEDULES"])
"""As many as are asked for, not a share of them, of all lookaheads together: six parts with anything in the script,
three slow, one of a reward server that flaps."""

each_lookahead = pytest.mark.parametrize("lookahead", [0, 1, 2])
"""Every test is made without and with steps in flight, each with a third of its schedules."""


def share(tenths: int) -> int:
    """Return how many schedules of each lookahead so many parts of ten are."""
    return max(1, SCHEDULES * tenths // 30)


METHODS: Mapping[str, tuple[Method, ...]] = {
    "actor": ("open", "decoding", "read", "aclose", "load"),
    "reference": ("extend", "finish", "forget"),
    "reward": ("extend", "finish", "forget"),
    "critic": ("extend", "finish", "forget", "load"),
    "trainer": ("update", "sync_weights"),
}
NAMES: Mapping[Method, str] = {
    "open": "while opening rollouts [",
    "read": "while decoding rollout ",
    "aclose": "while closing rollout ",
    "extend": "while scoring rollouts [",
    "finish": "while scoring rollouts [",
    "forget": "while forgetting rollouts [",
    "load": "while syncing version ",
}
"""How the note begins that says of which rollouts a call was that raised, or of which weights."""
SECONDS = st.sampled_from([0.0, 1 / 1024, 1 / 256, 1 / 32])
ERRORS = st.sampled_from([ModelError, ModelLost, RuntimeError, TimeoutError, MemoryError])
SLOW = st.builds(Slow, st.sampled_from([1 / 1024, 1 / 64, 1.0, 64.0]))


@st.composite
def slow_faults(draw: st.DrawFn) -> Fault:
    model = draw(st.sampled_from(sorted(METHODS)))
    method = draw(st.sampled_from(METHODS[model]))
    return Fault(model, method, draw(SLOW), draw(st.integers(0, 80 if method == "read" else 9)))


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    model = draw(st.sampled_from(sorted(METHODS)))
    method = draw(st.sampled_from(METHODS[model]))
    does: list[st.SearchStrategy[FaultKind]] = [st.builds(Raise, ERRORS), st.just(Hang()), SLOW]
    does.append(st.builds(Flap, st.integers(1, 2), st.integers(0, 2)))
    if method in SPOILT:
        does.append(st.builds(Garbage, st.sampled_from(SPOILT[method])))
    if method in {"decoding", "extend", "finish"} and (model == "actor") == (method == "decoding"):
        does.append(st.just(LoseSessions()))
    if method == "sync_weights":
        does.append(st.builds(HalfSynced, st.booleans()))
    return Fault(model, method, draw(st.one_of(does)), draw(st.integers(0, 40 if method == "read" else 6)))


@st.composite
def cases(draw: st.DrawFn, fault: st.SearchStrategy[Fault]) -> Case:
    batch = draw(st.integers(1, 4))
    chunk = draw(st.integers(0, 6))
    setting = Setting(
        lengths=tuple(draw(st.lists(st.integers(1, 14), min_size=3, max_size=9))),
        batch=batch,
        extra=draw(st.integers(0, batch)),
        max_deferrals=draw(st.integers(1, 3)),
        chunks=Fixed(chunk) if chunk else WholeRollout(),
        steps=draw(st.integers(2, 5)),
        prompts=draw(st.sampled_from((3, 11, 1_000, 1_000))),
        samples=draw(st.sampled_from([1, 1, 1, 2])),
        capacity=draw(st.sampled_from([1, 2, 5])),
        paces=draw(paces(0.5, 1.0, 4.0)),
        reference=draw(SECONDS),
        reward=draw(SECONDS),
        critic=draw(SECONDS),
        per_call=draw(SECONDS),
        update=draw(st.sampled_from([0.0, 0.5])),
        kept=draw(st.sampled_from([0, 2])),
        checkpoint_every=draw(st.integers(1, 3)),
    )
    kinds: list[Kind] = ["overcommit", "adaptive", "batched"]
    script = tuple(draw(st.lists(fault, min_size=1, max_size=3)))
    return Case(setting, script, draw(st.sampled_from(kinds)))


def in_flight(case: Case, lookahead: int) -> Case:
    """Return the same run with as many steps in flight."""
    return replace(case, setting=replace(case.setting, lookahead=lookahead))


def results_are_fixed(run: Case) -> bool:
    """Return whether a run's results follow from its setting alone, and from no time that anything takes.

    They do unless the controller looks at times, or rollouts are decoded each at a pace of its own and the first to
    finish are taken.
    """
    return run.kind != "adaptive" and (not run.setting.paces or not run.setting.extra)


HARMLESS = (Slow, LoseSessions)
"""Of these a run need not end: sessions that are lost may be none."""


def ends(fault: Fault) -> bool:
    """Return whether a run cannot go on once this has happened, whatever it was doing."""
    if isinstance(fault.does, HARMLESS) or fault.does == Garbage("nan"):
        return False
    return not (isinstance(fault.does, Garbage) and fault.method in {"read", "open"})  # an empty one is not spoilt


def explains(fault: Fault, error: BaseException) -> bool:
    """Return whether the error of a run is the one that this fault must come to, in the place where it must."""
    told = "\n".join([str(error), *getattr(error, "__notes__", [])])
    stage = stage_of(fault)
    if isinstance(fault.does, Garbage) and fault.method == "finish" and fault.does.what != "count":
        stage = "advantage"
    closing = f"while closing stage {stage!r} of graph 'ppo'" in told
    match fault.does:
        case Raise(kind):
            right = type(error) is kind and str(error) == f"{fault.place} fails, as its script says"
            right = right and NAMES.get(fault.method, "") in told
        case Flap():
            where = rf"call \d+ of {fault.method}\(\) of '{fault.model}': connection refused, as its script says"
            right = type(error) is ConnectionError and re.fullmatch(where, str(error)) is not None
            right = right and NAMES.get(fault.method, "") in told
        case Hang():
            closing = fault.method in {"aclose", "forget"} and "graph 'ppo', step" not in told
            right = type(error) is DeadlockError and f"{fault.place} hangs, as its script says" in told
            return right and (closing or f"{stage} is at work" in told)
        case HalfSynced(silent):
            right = type(error) is (ProtocolError if silent else ModelError) and "FaultyCritic has version" in told
        case Garbage() | LoseSessions():
            right = type(error) is ProtocolError
        case _:
            right = False
    return right and (f"in stage {stage!r} of graph 'ppo', step " in told or closing)


@each_lookahead
@settings(max_examples=share(6))
@given(case=cases(faults()))
@example(case=Case(Setting(extra=4), (Fault("critic", "load", Raise()),), "batched"))
@example(case=Case(Setting(extra=2), (Fault("reward", "finish", Garbage("nan"), 2),)))
@example(case=Case(Setting(extra=2, paces=(1.0,)), (Fault("actor", "read", Hang(), 9),), "adaptive"))
def test_whatever_goes_wrong_nothing_is_lost_doubled_or_hidden(lookahead: int, case: Case) -> None:
    case = in_flight(case, lookahead)
    run = case.play()
    check_ending(run)
    check_accounts(run)
    check_stories(run)
    check_bounds(run)
    check_numbers(run)
    check_nothing_is_left(run)
    check_going_on(case, run)


def check_ending(run: FaultyPipeline) -> None:
    """The run ended with the error that its script had in store for it, or with none."""
    struck = run.struck
    if run.error is None:
        assert not [fault for fault in struck if ends(fault)], "what happened was hidden"
        event("came to its end")
        return
    event(type(run.error).__name__)
    assert isinstance(run.error, OppoError | RuntimeError | TimeoutError | MemoryError | ConnectionError)
    assert any(explains(fault, run.error) for fault in struck), run.error


def check_accounts(run: FaultyPipeline) -> None:
    """Every rollout taken by the end of the last whole step is trained, dropped or carried, once."""
    trained = [rollout for report in run.saved_reports for rollout in report.trained]
    dropped = [drop.rollout for report in run.saved_reports for drop in report.dropped]
    assert trained == [rollout for batch in run.complete for rollout in batch.rollouts]
    assert sorted([*trained, *dropped, *run.carried()]) == list(range(run.taken()))
    if run.error is None:
        assert not run.carried()
    assert len(run.trainer.batches) <= len(run.reports) + 1


def check_stories(run: FaultyPipeline) -> None:
    """The events of each rollout follow the grammar, as far as they go."""
    stories = run.tap.story()
    for story in stories.values():
        over = follow(story)
        assert over or run.error is not None
    finished = {r for batch in run.complete for r in batch.rollouts} | {
        d.rollout for b in run.complete for d in b.dropped
    }
    assert finished <= {rollout for rollout, story in stories.items() if isinstance(story[-1], Finish)}


def follow(story: list[RolloutEvent]) -> bool:
    """Follow the events of a rollout through the grammar; return whether it has ended."""
    opened, length, version, age = False, 0, 0, 0
    tokens: list[int] = []
    for place, it in enumerate(story):
        match it:
            case Prompt():
                assert not opened
                opened, length, tokens = True, 0, []
            case Chunk():
                assert opened
                assert it.start == length
                assert version <= it.versions[0]
                assert bool(np.all(np.diff(it.versions) >= 0))
                length, version = length + len(it.tokens), int(it.versions[-1])
                tokens += it.tokens.tolist()
            case Defer():
                assert opened or it.restart
                age += 1
                assert it.age == age
                opened = opened and not it.restart
            case Finish():
                assert opened
                assert it.response.tokens.tolist() == tokens
                assert place == len(story) - 1
                return True
            case _:
                raise AssertionError(it)
    return False


def check_bounds(run: FaultyPipeline) -> None:
    """Batches are full and as fresh as promised, and no channel ever held more than it may."""
    s = run.setting
    total = min(s.prompts, s.steps * s.batch)
    for step, (batch, report) in enumerate(zip(run.complete, run.saved_reports, strict=True)):
        units = min(s.batch, total - step * s.batch)
        assert len(batch) + len(batch.dropped) == units * s.samples
        most = (0 if run.kind == "batched" else s.max_deferrals) + s.lookahead
        assert report.metrics.get("staleness/max", 0) <= most
        assert run.kind == "batched" or len(report.deferred) <= s.extra * s.samples
    for channels in run.tap.channels:
        for counters in channels.values():
            assert counters["peak"] <= counters["capacity"] == s.capacity or s.lookahead
            assert counters["sent"] == counters["received"] + counters["merged"]
            assert not counters["queued"]


def check_numbers(run: FaultyPipeline) -> None:
    """Whatever was trained, at the version of its step or in the one that failed, is what the models say of it."""
    s = run.setting
    for step, batch in enumerate(run.trainer.batches):
        version = max(step - s.lookahead, step - step % s.checkpoint_every)
        for response, score, row in zip(batch.responses, batch.scores, batch.rows(), strict=True):
            prompt = response.prompt
            made = FakeDecode(run.policy, prompt, run.setting.length(prompt), versions=batch.versions[row].tolist())
            assert batch.tokens[row].tolist() == made.tokens(0, made.length).tolist()
            assert batch.logprobs[row].tolist() == made.logprobs(0, made.length).tolist()
            tokens = (*prompt.tokens.tolist(), *response.tokens.tolist())
            finish = Finish(prompt.rollout, response, "eos")
            assert score == np.float32(fake_scalar(finish, tokens, 0))
            assert np.array_equal(known(batch.reference)[row], fake_per_token(finish, tokens, 0))
            assert np.array_equal(known(batch.values)[row], fake_per_token(finish, tokens, version))
        assert bool(np.isfinite(known(batch.advantages)).all() and np.isfinite(known(batch.returns)).all())


def check_nothing_is_left(run: FaultyPipeline) -> None:
    """No task outlives the run; what was open has been closed, unless closing it is what failed."""
    assert run.tasks_left == 0
    if any(fault.method in {"aclose", "forget"} for fault in run.struck) or isinstance(run.error, DeadlockError):
        return
    lost = {fault.call for fault in run.struck if fault.does == Garbage("count") and fault.method == "open"}
    assert lost or all(decode.closed for decode in run.remembering.opened)
    assert isinstance(run.reward, FakeScorer)
    assert not run.reward.sessions
    assert not run.reference.sessions
    assert not run.critic.sessions


def check_going_on(case: Case, run: FaultyPipeline) -> None:
    """With its rest it is one whole run: where results depend on no time, the one in which nothing happened."""
    batches = run.complete
    if run.error is not None:
        rest = run.resumed()
        assert rest.error is None
        batches = [*batches, *rest.batches]
    dropped = [drop.rollout for report in run.saved_reports for drop in report.dropped]
    trained = [rollout for batch in batches for rollout in batch.rollouts]
    s = case.setting
    assert sorted([*trained, *dropped]) == list(range(min(s.prompts, s.steps * s.batch) * s.samples))
    if not run.struck or not results_are_fixed(case):
        return
    clean = case.without_faults().batches
    if dropped:
        kept = [tuple(rollout for rollout in batch.rollouts if rollout not in dropped) for batch in clean]
        assert [batch.rollouts for batch in batches] == kept
    else:
        assert same_batches(batches, clean)


@each_lookahead
@settings(max_examples=share(3))
@given(case=cases(slow_faults()))
def test_slowness_takes_time_and_changes_nothing(lookahead: int, case: Case) -> None:
    case = in_flight(case, lookahead)
    if not results_are_fixed(case):
        case = replace(case, setting=replace(case.setting, extra=0), kind="overcommit")
    slow, plain = case.play(), case.without_faults()
    assert slow.error is plain.error is None
    assert same_batches(slow.batches, plain.batches)
    assert [report.deferred for report in slow.reports] == [report.deferred for report in plain.reports]


@st.composite
def flaps(draw: st.DrawFn) -> Fault:
    return Fault("judge", "call", Flap(draw(st.integers(1, 3)), draw(st.integers(0, 2))), draw(st.integers(0, 6)))


@each_lookahead
@settings(max_examples=share(1))
@given(case=cases(flaps()), judge=st.sampled_from(["fail", "drop", "retry"]))
def test_a_reward_server_that_flaps_costs_what_was_asked_for_and_no_more(
    lookahead: int, case: Case, judge: OnFailure
) -> None:
    case = replace(in_flight(case, lookahead), script=case.script[:1], judge=judge)
    run = case.play()
    check_accounts(run)
    check_stories(run)
    check_bounds(run)
    check_going_on(case, run)
    dropped = [drop.reason for report in run.reports for drop in report.dropped]
    if judge == "retry":
        assert run.error is None
        assert not dropped
        if results_are_fixed(case):
            assert same_batches(run.batches, case.without_faults().batches)
    elif judge == "drop":
        assert run.error is None
        assert all("connection refused, as its script says" in reason for reason in dropped)
    elif run.error is not None:
        assert isinstance(run.error, RewardError)
        assert "connection refused, as its script says" in str(run.error)
        assert any("in stage 'reward' of graph 'ppo', step" in note for note in run.error.__notes__)


@st.composite
def faults_of_turns(draw: st.DrawFn) -> Fault:
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


def explains_of_turns(fault: Fault, error: BaseException) -> bool:
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


def ends_with_its_turn(fault: Fault) -> bool:
    """Return whether a run cannot go on once this has happened.

    Who waits in vain for a turn of a response without one is closed with it, and only an answer can be garbage.
    """
    return not isinstance(fault.does, Garbage) and (fault.method, fault.does) != ("turn", Hang())


@settings(max_examples=max(1, SCHEDULES // 4))
@given(every_setting(prompts=(7, 1_000)), st.lists(faults_of_turns(), min_size=1, max_size=3).map(tuple))
@example(Setting(extra=2, steps=3), (Fault("tool", "answer", Hang(), 1),))
@example(Setting(extra=2, steps=3), (Fault("tool", "answer", Slow(64.0), 0), Fault("actor", "turn", Raise(), 6)))
def test_whatever_goes_wrong_with_a_turn_is_said_and_nothing_is_lost(setting: Setting, script: Script) -> None:
    run = Talking(setting, script=script)
    run.play()
    run.recorder.validate()
    harmful = [fault for fault in run.struck if not isinstance(fault.does, Slow)]
    if run.error is None:
        event("came to its end")
        assert not [fault for fault in harmful if ends_with_its_turn(fault)], "what happened was hidden"
        check_whole(run)
    else:
        event(type(run.error).__name__)
        assert any(explains_of_turns(fault, run.error) for fault in harmful), run.error
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
