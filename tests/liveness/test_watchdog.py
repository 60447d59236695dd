"""The watchdog notices what does not move, says who waits for whom, and ends it; the heartbeat, who kept the loop."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.to_thread
import numpy as np
import pytest

import oppo
from oppo.admission import Overcommit
from oppo.agents import Agents
from oppo.algorithms.ppo import ppo
from oppo.environments import EnvironmentClass, FunctionEnvironment
from oppo.errors import HangError
from oppo.events import Finish, Prompt, StepReport
from oppo.graph import Graph, Run, Snapshot, Wait
from oppo.hf.chat import ChatFormat
from oppo.liveness import Heartbeat, Stall, StallLimits, Vitals, Watchdog, watched
from oppo.liveness.watchdog import GAP, Parts, _threads
from oppo.log import routed
from oppo.observe import Span
from oppo.rewards import FunctionReward
from oppo.scorers import capabilities_of
from oppo.stages import Score
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)
from oppo.user_code import UNBLOCK, load_object
from tests.agents.test_agents import tokenizer as agents_tokenizer
from tests.kit.turns import Guesses
from tests.report.synthetic import play

HELD = 0.02

STUCK = Snapshot(3, ("reward", "advantage"), (Wait("advantage", "reward", "an item"),), {}, "")


STUCK_RUN = cast("Run[Any]", SimpleNamespace(snapshots=lambda: [STUCK]))
"""A run in whose step nothing moves."""


@dataclass
class Scene:
    """A watchdog that is asked by hand, and what it was asked about."""

    path: Path
    time: float = 0.0
    work: int = 0
    calls: tuple[str, ...] = ()
    limit: float = 500

    def __post_init__(self) -> None:
        self.dog = Watchdog(
            StallLimits(100, notice=10, call_timeout=self.limit),
            report=self.path,
            vitals=Vitals(progress=lambda: self.work, calls=lambda: self.calls),
            clock=lambda: self.time,
        )

    def at(self, seconds: float) -> tuple[float, bool] | None:
        self.time = seconds
        stall = self.dog.look()
        return None if stall is None else (stall.seconds, stall.final)


async def test_a_stall_is_told_of_ever_more_seldom_and_at_last_is_final(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "hang-report.json")
    async with scene.dog.guarding(STUCK_RUN):
        assert [scene.at(second) for second in (0, 9, 10, 11, 19, 20, 39, 40, 41, 80)] == [
            None, None, (10, False), None, None, (20, False), None, (40, False), None, (80, False),
        ]  # fmt: skip
        assert scene.at(100) == (100, True)


async def test_everything_that_moves_starts_the_wait_anew(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "hang-report.json")
    async with scene.dog.guarding(STUCK_RUN):
        scene.at(0)
        scene.at(95)
        play(scene.dog)
        assert scene.at(101) is None
        scene.dog.on_span(Span("actor", "decode", 0, 1))
        assert scene.at(150) is None
        scene.work += 1
        assert scene.at(205) is None
        assert scene.at(304) == (99, False)
        assert scene.at(305) == (100, True)


@pytest.mark.parametrize(("limit", "end"), [(500, 500), (50, 100), (0, None)])
async def test_a_call_that_is_at_work_has_a_limit_of_its_own(tmp_path: Path, limit: float, end: int | None) -> None:
    scene = Scene(tmp_path / "hang-report.json", calls=("trainer: checkpoint",), limit=limit)
    async with scene.dog.guarding(STUCK_RUN):
        told = {second: scene.at(second) for second in range(0, 601, 10)}
    finals = [second for second, stall in told.items() if stall is not None and stall[1]]
    assert finals[:1] == ([] if end is None else [end])
    assert told[20] == (20, False), "it is told of all the same"
    scene = Scene(tmp_path / "hang-report.json", calls=("policy: decode",))
    async with scene.dog.guarding(STUCK_RUN):
        assert [scene.at(0), scene.at(150)] == [None, (150, False)]
        scene.calls = ()
        assert scene.at(151) == (151, True)


async def test_time_outside_of_a_run_does_not_count(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "hang-report.json")
    assert scene.at(1000) is None
    async with scene.dog.guarding(STUCK_RUN):
        assert scene.at(1005) is None
        assert scene.at(1099) == (99, False)
    assert scene.at(5000) is None


def test_a_stall_says_who_waits_for_whom() -> None:
    assert Stall(61.4, [STUCK]).message() == (
        "nothing has moved for 61 s: in step 3 advantage waits for reward; reward is at work"
    )
    assert Stall(61.4, calls=("trainer: checkpoint",)).message() == (
        "nothing has moved for 61 s: between two steps; in a call: trainer: checkpoint"
    )
    decoding, waiting = Snapshot(4, ("generate",), (), {}, ""), Snapshot(5, (), (), {}, "")
    assert Stall(61.4, [STUCK, decoding, waiting]).message() == (
        "nothing has moved for 61 s: in step 3 advantage waits for reward; reward is at work; "
        "in step 4 generate is at work; in step 5 no stage is at work"
    )


@dataclass
class Trap:
    """What a run falls into: whoever enters it does not come out before it is opened."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    at: float = 0.0
    errors: list[HangError] = field(default_factory=list)

    def fall(self) -> None:
        self.entered.set()
        self.opened.wait(120)

    def end(self, error: HangError) -> None:
        self.errors.append(error)
        self.opened.set()

    def clock(self) -> float:
        """Seconds that pass, a few at each look, once somebody is in the trap: however slow the machine is."""
        self.at += 0.005 if self.entered.is_set() else 0.0
        return self.at


def hanging(trap: Trap) -> Graph[StepReport]:
    def stuck(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        trap.fall()
        return [0.0 for _ in completions]

    return ppo(
        policy=FakePolicy(lambda prompt: 3 + 40 * (prompt.rollout == 1), 0.0),
        reference=FakeScorer(fake_per_token),
        reward=FunctionReward(stuck, str),
        critic=FakeCritic(),
        trainer=FakeTrainer(),
        admission=Overcommit(batch=2, overcommit=1),
    )


async def play_on(graph: Graph[StepReport], watchdog: Watchdog, lookahead: int = 0) -> None:
    opened = graph.open(prompts(10), observers=[watchdog], lookahead=lookahead)
    async with opened as run, watchdog.guarding(run):
        async for _ in run.steps(3):
            pass


async def hang(graph: Graph[StepReport], watchdog: Watchdog, trap: Trap, lookahead: int = 0) -> HangError:
    """Return the error with which a watchdog ends a graph that hangs."""
    try:
        with watchdog, pytest.raises(HangError) as caught:
            await play_on(graph, watchdog, lookahead)
    finally:
        trap.opened.set()
    return caught.value


async def test_a_run_that_hangs_is_ended_and_the_report_names_who_hangs(tmp_path: Path) -> None:
    trap, told = Trap(), list[Stall]()
    report = tmp_path / "hang-report.json"
    watchdog = Watchdog(StallLimits(0.2, notice=0.05), report=report, listeners=[told.append], clock=trap.clock)
    error = await hang(hanging(trap), watchdog, trap)
    assert "advantage waits for reward; " in str(error)
    assert "; reward is at work (see " in str(error)
    assert str(report) in str(error)
    assert "run.watchdog_seconds = 0.2" in str(error)
    assert [stall.final for stall in told][-2:] == [False, True]
    written = json.loads(report.read_text())
    (step,) = written["steps"]
    assert step["step"] == 1
    assert step["at_work"] == ["reward"]
    assert {"stage": "advantage", "awaited": "reward", "want": "an item"} in step["waits"]
    assert step["channels"]["reward->advantage"]["waiting_receivers"] == 1
    assert written["rollouts"] == {"in flight": [], "deferred": [1], "finished": [0, 2]}
    tasks = {task["name"]: task["stack"] for task in written["tasks"]}
    assert any("rewards/function.py" in line for line in tasks["ppo.reward"])
    assert any("in stuck" in line for thread in written["threads"] for line in thread["stack"])


async def test_the_report_of_a_run_with_steps_in_flight_names_the_step_that_hangs(tmp_path: Path) -> None:
    trap, told = Trap(), list[Stall]()
    report = tmp_path / "hang-report.json"
    watchdog = Watchdog(StallLimits(0.2, notice=0.05), report=report, listeners=[told.append], clock=trap.clock)
    error = await hang(hanging(trap), watchdog, trap, lookahead=1)
    assert [snapshot.step for snapshot in told[-1].snapshots] == [1, 2]
    assert re.search(r"in step 1 .*; reward is at work; in step 2 .*no stage is at work|in step 2 ", str(error))
    oldest, later = json.loads(report.read_text())["steps"]
    assert (oldest["step"], oldest["at_work"]) == (1, ["reward"])
    assert later["step"] == 2
    assert "reward" not in later["at_work"], "it waits for that of step 1"


class Unbearable(FakeScorer[float]):
    """A scorer that nothing can end: it shields itself, as a model's thread does."""

    def __init__(self, trap: Trap) -> None:
        super().__init__(lambda finish, tokens, version: 0.0)
        self._trap = trap

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._trap.fall)
        return [0.0 for _ in finished]


def unbearable(trap: Trap) -> Graph[StepReport]:
    return hanging(trap).replace(reward=Score(Unbearable(trap)))


async def test_what_cannot_be_cancelled_is_left_to_the_last_resort(tmp_path: Path) -> None:
    trap = Trap()
    limits = StallLimits(0.1, grace=0.05)
    watchdog = Watchdog(limits, report=tmp_path / "r.json", last_resort=trap.end, clock=trap.clock)
    assert trap.errors == [await hang(unbearable(trap), watchdog, trap)]


@pytest.mark.parametrize(("limit", "periods"), [(0.0, 21), (0.25, 6)])
async def test_a_cancelled_run_is_waited_for_while_it_saves_up_to_the_limit_of_a_call(
    tmp_path: Path, limit: float, periods: int
) -> None:
    trap, looks = Trap(), list[int]()

    def saving() -> bool:
        trap.at += 0.05
        looks.append(1)
        return len(looks) < 20

    watchdog = Watchdog(
        StallLimits(0.1, call_timeout=limit, grace=0.01),
        report=tmp_path / "r.json",
        vitals=Vitals(saving=saving),
        last_resort=trap.end,
        clock=trap.clock,
    )
    assert trap.errors == [await hang(unbearable(trap), watchdog, trap)]
    assert len(looks) == periods, "one of them to end what can be ended without the process"


async def test_a_cancelled_run_is_waited_for_while_it_moves(tmp_path: Path) -> None:
    trap, left = Trap(), list(range(10))

    def progress() -> int:
        if watchdog._hang is not None and left:
            left.pop()
        return len(left)

    watchdog = Watchdog(
        StallLimits(0.1, grace=0.01),
        report=tmp_path / "r.json",
        vitals=Vitals(progress=progress),
        last_resort=trap.end,
        clock=trap.clock,
    )
    assert trap.errors == [await hang(unbearable(trap), watchdog, trap)]
    assert not left


async def test_a_loop_that_is_blocked_is_reported_from_outside(tmp_path: Path) -> None:
    trap = Trap()

    async def blocking(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        await anyio.wait_all_tasks_blocked()
        trap.fall()
        return [0.0 for _ in completions]

    limits, told = StallLimits(0.1, grace=0.05), list[Stall]()
    report = tmp_path / "r.json"
    watchdog = Watchdog(limits, report=report, listeners=[told.append], last_resort=trap.end, clock=trap.clock)
    await hang(hanging(trap).replace(reward=Score(FunctionReward(blocking, str))), watchdog, trap)
    assert "reward is at work" in str(trap.errors[0])
    assert f"the event loop is blocked at {__file__}:" in told[-1].message()
    assert "in fall: let what blocks it await what takes long" in str(trap.errors[0])
    written = json.loads((tmp_path / "r.json").read_text())
    threads = {each["name"]: "".join(each["stack"]) for each in written["threads"]}
    assert "in blocking" in threads["MainThread"]


async def test_a_report_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    trap = Trap()
    watchdog = Watchdog(StallLimits(0.1), report=tmp_path / "nowhere" / "r.json", clock=trap.clock)
    error = await hang(hanging(trap), watchdog, trap)
    assert "could not be written: No such file or directory" in str(error)


def fails() -> Any:
    raise SystemExit("of somebody else")


def hangs() -> None:
    threading.Event().wait(120)


@pytest.mark.parametrize(("how", "message"), [(fails, "of somebody else"), (hangs, "has not returned within")])
async def test_whatever_part_of_the_watchdog_fails_is_named_and_the_run_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[], Any], message: str
) -> None:
    """No part works, up to the last resort: then the process ends."""
    trap, exits = Trap(), list[int]()

    def leave(code: int) -> None:
        exits.append(code)
        trap.opened.set()

    silent = cast("Run[Any]", SimpleNamespace(snapshots=how))

    def any_part(*given: object) -> Any:
        how()

    monkeypatch.setattr("oppo.liveness.watchdog.os._exit", leave)
    monkeypatch.setattr("oppo.liveness.watchdog.PART_SECONDS", 0.3)
    monkeypatch.setattr("oppo.liveness.watchdog._tasks", any_part)
    watchdog = Watchdog(
        StallLimits(0.1, grace=0.05),
        report=tmp_path / "r.json",
        vitals=Vitals(progress=how, calls=how, saving=how, free=how),
        listeners=[any_part],
        last_resort=any_part,
        clock=trap.clock,
    )
    graph = unbearable(trap)

    async def run() -> None:
        async with graph.open(prompts(10), observers=[watchdog]) as opened, watchdog.guarding(silent):
            async for _ in opened.steps(3):
                pass

    with watchdog, pytest.raises(HangError) as caught:
        await run()
    assert exits == [1]
    written = json.loads((tmp_path / "r.json").read_text())
    parts = ["the calls in progress", "the progress of models", "the report's tasks", "the steps"]
    parts.append(f"the listener {any_part.__qualname__}")
    assert all(message in written["failed"][part] for part in parts)
    assert written["threads"]
    assert all(any(part in note for note in caught.value.__notes__) for part in parts)


def test_a_part_that_hung_is_asked_again_once_it_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.liveness.watchdog.PART_SECONDS", 0.05)
    parts, go_on, returned, calls = Parts(), threading.Event(), threading.Event(), list[int]()

    def part() -> int:
        calls.append(len(calls))
        if len(calls) == 1:
            go_on.wait()
            returned.set()
        return 7

    assert [parts.call("the part", part, 0) for _ in range(3)] == [0, 0, 0]
    assert "has not returned" in parts.faults["the part"]
    go_on.set()
    returned.wait()
    assert calls == [0], "one that hangs is left alone"
    monkeypatch.undo()
    for thread in threading.enumerate():
        if "the part" in thread.name:
            thread.join()
    assert parts.call("the part", part, 0) == 7


def test_threads_of_one_name_are_reported() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, name="twin") for _ in range(3)]
    for each in threads:
        each.start()
    found = _threads()
    over.set()
    assert [each["name"] for each in found].count("twin") == 3


USER = """
import asyncio, time
from pathlib import Path

ENTERED, OPENED = (Path(__file__).with_suffix(suffix) for suffix in (".entered", ".opened"))

def in_a_thread(*given, **named):
    ENTERED.touch()
    while not OPENED.exists():
        time.sleep(0.01)

async def blocking(*given, **named):
    in_a_thread()

async def waiting(*given, **named):
    ENTERED.touch()
    await asyncio.sleep(3600)

in_a_process = in_a_thread

class Environment:
    def reset(self, **row):
        return None

    def guess(self, number):
        "Say nothing."
        return ""

    def get_reward(self):
        return 0.0

def with_hang(method, place):
    hang = globals()[place]
    hang.__name__ = method
    return type("Environment", (Environment,), {method: hang})
"""


def user_hang(what: str, place: str, user: str) -> tuple[dict[str, Any], Callable[[Sequence[Prompt]], Any]]:
    """Return the environment and the reward of a run in which this function hangs, and what makes its prompts."""
    spec, process = f"{user}:{place}", place == "in_a_process"
    same = list[Prompt]
    if what == "agent":
        agents = Agents(spec, agents_tokenizer())
        return {"environment": agents, "reward": agents.reward}, agents.prompts
    if what == "reward":
        return {"reward": FunctionReward(spec, str, process=process, each=not process, concurrency=4)}, same
    if what == "function":
        made = FunctionEnvironment(spec, str, lambda text: [1], process=process)
        return {"environment": made, "reward": FakeScorer(fake_scalar)}, same
    kind = cast("Callable[[str, str], type]", load_object(f"{user}:with_hang", ValueError))(what, place)
    environment = EnvironmentClass(kind, cast("ChatFormat", Guesses()), max_turns=2)
    return {"environment": environment, "reward": environment.reward}, same


@pytest.mark.parametrize(
    ("what", "place"),
    [
        *(
            (what, place)
            for what in ("reward", "function")
            for place in ("waiting", "blocking", "in_a_thread", "in_a_process")
        ),
        *(("agent", place) for place in ("waiting", "blocking", "in_a_thread")),
        *((what, place) for what in ("guess", "get_reward") for place in ("waiting", "in_a_thread")),
    ],
)
async def test_a_function_of_the_user_that_hangs_anywhere_ends_the_run_and_is_named(
    tmp_path: Path, what: str, place: str
) -> None:
    user = tmp_path / "user.py"
    user.write_text(USER)
    models, prompts_of = user_hang(what, place, str(user))
    at = 0.0

    def clock() -> float:
        nonlocal at
        at += 0.005 if user.with_suffix(".entered").exists() else 1e-5
        return at

    policy = FakePolicy(length=lambda prompt: 9, turns=lambda prompt: [3, 5])
    graph = oppo.grpo(policy=policy, trainer=FakeTrainer(), admission=Overcommit(batch=4), samples=2, **models)
    calls: list[Callable[[], str]] = [partial(getattr, each, "at_work", "") for each in models.values()]
    calls.append(capabilities_of(models["reward"]).at_work)
    watchdog = Watchdog(
        StallLimits(0.1, call_timeout=0.1, grace=0.01),
        report=tmp_path / "r.json",
        vitals=Vitals(calls=lambda: tuple(filter(None, (call() for call in calls)))),
        last_resort=lambda error: user.with_suffix(".opened").touch(),
        clock=clock,
    )

    async def run() -> None:
        opened = graph.open(prompts_of(rows(8)), observers=[watchdog])
        async with opened as running, watchdog.guarding(running):
            async for _ in running.steps(2):
                pass

    try:
        with watchdog, pytest.raises(HangError) as caught:
            await run()
    finally:
        user.with_suffix(".opened").touch()
    report = (tmp_path / "r.json").read_text()
    assert json.loads(report)["failed"] == {}
    assert user.with_suffix(".entered").exists()
    if place == "in_a_process":
        assert place in str(caught.value)
    else:
        assert f"in {place}" in report


def rows(count: int) -> list[Prompt]:
    return [Prompt(at, at, np.array([1, 2], np.int32), group=at, columns={"row": at}) for at in range(count)]


LOCKED = """
import re, sys
from pathlib import Path
from oppo.liveness import StallLimits, Watchdog, watchdog

watchdog.CPU_SECONDS = 0.1

def hold_the_lock():
    re.match(r"(a+)+$", "a" * 60 + "b")

with Watchdog(StallLimits(0.5), report=Path(sys.argv[1]), last_resort=print):
    hold_the_lock()
"""


def test_the_last_word_comes_from_outside_of_the_interpreter_lock(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(tmp_path / "r.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == -signal.SIGPROF, done.stderr
    assert "in hold_the_lock" in done.stderr


async def test_a_run_of_a_program_is_watched_in_one_line(tmp_path: Path, messages: list[str]) -> None:
    trap = Trap()
    reward = FunctionReward(lambda prompts, completions: trap.fall(), str, name="stuck")
    graph = hanging(trap).replace(reward=Score(reward))
    limits = {"seconds": 0.2, "call_timeout": 0.3, "notice": 0.1, "report": tmp_path / "r.json"}

    async def run() -> None:
        async with graph.open(prompts(10)) as run, watched(run, reward, **limits):  # type: ignore[arg-type]  # as they are named
            async for _ in run.steps(3):
                pass

    try:
        with pytest.raises(HangError, match=r"in a call: reward function 'stuck' .*; call_timeout = 0.3 is the limit"):
            await run()
    finally:
        trap.opened.set()
    assert messages[0].startswith("nothing has moved for 0 s: ")
    (step,) = json.loads((tmp_path / "r.json").read_text())["steps"]
    assert step["at_work"] == ["reward"]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.at = 0.0
        self.late = [0.0, 0.25, 0.125]

    def __call__(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        """Oversleep by what is planned for this beat; once nothing is, do not wake."""
        if not self.late:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        self.at += seconds + self.late.pop(0)


async def test_the_worst_delay_is_kept_until_it_is_taken() -> None:
    clock = Clock()
    heartbeat = Heartbeat(0.5, clock=clock, sleep=clock.sleep)
    async with heartbeat.beating():
        while clock.late:
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert heartbeat.take() == 0.25
        assert heartbeat.take() == 0.0
        clock.at += 3.0  # the loop does something else for so long
        assert heartbeat.take() == 2.5, "a beat that is overdue counts already"


async def test_the_code_that_blocks_the_loop_for_long_is_logged() -> None:
    clock = Clock()
    heartbeat, told = Heartbeat(0.5, clock=clock, sleep=clock.sleep), list[str]()

    def sleeps(seconds: float, *, seen: bool) -> float:
        clock.at += seconds
        with ThreadPoolExecutor(1) as watchdog:
            if seen:
                watchdog.submit(heartbeat.look).result()
        return heartbeat.take()

    with routed(told.append):
        async with heartbeat.beating():
            while clock.late:
                await anyio.lowlevel.checkpoint()
            assert heartbeat.take() < 1
            assert sleeps(1.25, seen=True) == 0.75
            assert sleeps(4.0, seen=True) == 3.5
            assert heartbeat.take() == 0.0
            assert sleeps(9.0, seen=False) == 8.5
    first, second = told
    assert first.startswith(f"the event loop was blocked for 3.5 s at {__file__}:")
    assert first.endswith(f" in sleeps: {UNBLOCK}")
    assert second.startswith("the event loop was blocked for 8.5 s by code that no thread could look at")


async def test_an_error_inside_surfaces_as_itself() -> None:
    with pytest.raises(ValueError, match="inside"):
        async with Heartbeat().beating():
            raise ValueError("inside")


def graph() -> oppo.Graph[oppo.StepReport]:
    models = {"policy": FakePolicy(seconds=0.001), "reward": FakeScorer(fake_scalar), "trainer": FakeTrainer()}
    return oppo.grpo(**models, admission=oppo.Overcommit(2))  # type: ignore[arg-type]  # each of the type of its name


async def gaps(tmp_path: Path) -> list[float | None]:
    async with graph().open(prompts(20)) as run, watched(run, report=tmp_path / "hang.json"):
        return [report.metrics.get(GAP) async for report in run.steps(2)]


def test_the_reports_of_a_watched_run_say_how_long_its_loop_was_blocked(tmp_path: Path) -> None:
    found = anyio.run(gaps, tmp_path)
    assert all(gap is not None and gap >= 0 for gap in found)


def test_a_stage_that_blocks_the_loop_of_a_watched_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that sleeps synchronously; it wakes once the watchdog's thread has looked."""
    looked, told, look = threading.Event(), list[str](), Heartbeat.look

    def looking(heartbeat: Heartbeat) -> None:
        look(heartbeat)
        if heartbeat._seen and heartbeat._late() > HELD:
            looked.set()

    async def blocking(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        looked.wait(60)
        return [0.0 for _ in completions]

    async def main() -> list[float | None]:
        blocked = graph().replace(reward=Score(FunctionReward(blocking, str)))
        async with blocked.open(prompts(20)) as run, watched(run, report=tmp_path / "hang.json"):
            return [report.metrics.get(GAP) async for report in run.steps(2)]

    monkeypatch.setattr("oppo.liveness.watchdog.HELD", HELD)
    monkeypatch.setattr(Heartbeat, "look", looking)
    with routed(told.append):
        first, _ = anyio.run(main)
    assert first is not None
    assert any(f" at {__file__}:" in each and each.endswith(f" in blocking: {UNBLOCK}") for each in told)


def test_in_virtual_time_nothing_beats(tmp_path: Path) -> None:
    assert run_virtual(gaps, tmp_path) == [None, None]
