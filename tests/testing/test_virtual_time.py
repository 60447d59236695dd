"""Virtual time, and rows that are decoded together in jumps."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import pytest
from hypothesis import given, strategies as st

from oppo.errors import DeadlockError, ProtocolError
from oppo.events import Prompt
from oppo.models import Capabilities, Weights
from oppo.testing import FakePolicy, prompts
from oppo.testing.fake_policy import FakeDecode, Job
from oppo.testing.virtual_time import VirtualTimeLoop, run_virtual


def cost(rows: int, tokens: int) -> float:
    return 0.5 + 0.125 * rows + 2**-10 * tokens  # sums of these are exact


@dataclass
class Rollout:
    """What happens to a rollout: it joins, and may be paused."""

    length: int
    joins: float = 0.0
    paused: float = 1e6
    made: int = 0
    ended: float = -1.0


@dataclass
class StepByStep:
    """Decodes without jumps: the oracle."""

    rollouts: list[Rollout]
    loads: list[float]
    now: float = 0.0
    versions: dict[int, list[int]] = field(default_factory=dict)

    def run(self) -> None:
        while True:
            live = [each for each in self.rollouts if self.live(each)]
            if not live:
                later = [each.joins for each in self.rollouts if each.joins > self.now and each.ended < 0]
                if not later:
                    return
                self.now = min(later)
                continue
            version = sum(load <= self.now for load in self.loads)
            end = self.now + cost(len(live), sum(each.made for each in live))
            left = max(each.paused for each in live)
            if left <= end and not any(self.now < each.joins <= left for each in self.rollouts):
                self.now = left  # a step without rows is not made to its end
                continue
            self.now = end
            for each in live:
                if each.paused > self.now:
                    each.made += 1
                    self.versions.setdefault(id(each), []).append(version)
                    if each.made == each.length:
                        each.ended = self.now

    def live(self, each: Rollout) -> bool:
        return each.joins <= self.now < each.paused and each.made < each.length


times = st.integers(1, 400).filter(lambda n: n % 7).map(lambda n: n / 7)  # never a time at which a decode step ends


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    made = [Rollout(draw(st.integers(1, 40))) for _ in range(draw(st.integers(1, 4)))]
    made += [Rollout(draw(st.integers(1, 40)), joins=draw(times)) for _ in range(draw(st.integers(0, 3)))]
    for each in made:
        if draw(st.booleans()):
            sevenths = round(7 * each.joins)
            each.paused = draw(st.integers(1, 400).map(sevenths.__add__).filter(lambda n: n % 7)) / 7
    return made


@pytest.mark.schedules
@given(rollouts(), st.lists(times, max_size=3, unique=True).map(sorted), st.integers(1, 9))
def test_jumps_change_no_time_no_token_and_no_version(given: list[Rollout], loads: list[float], limit: int) -> None:
    oracle = StepByStep([Rollout(each.length, each.joins, each.paused) for each in given], loads)
    oracle.run()
    ends: dict[int, float] = {}

    async def main() -> list[FakeDecode]:
        capabilities = Capabilities(adds_while_decoding=True, loads_while_decoding="between decode steps")
        policy = FakePolicy(lambda prompt: given[prompt.rollout].length, cost, capabilities=capabilities)
        decodes = list(await policy.open(prompts(len(given))))

        def cut(finished: object) -> bool:
            ends.update({rollout: anyio.current_time() for rollout in finished})  # type: ignore[attr-defined]
            return False

        async def life(k: int) -> None:
            await anyio.sleep_until(given[k].joins)
            if given[k].joins:
                await decoding.add([decodes[k]])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, k)
                await anyio.sleep_until(given[k].paused)
                policy.defer([decodes[k]])

        async def read(k: int) -> None:
            while (await decodes[k].read(limit)).state == "live":
                pass

        async def load(version: int, at: float) -> None:
            await anyio.sleep_until(at)
            await policy.load(Weights(version))

        first = [decodes[k] for k, each in enumerate(given) if not each.joins]
        async with policy.decoding(first, cut) as decoding, anyio.create_task_group() as tasks:
            for version, at in enumerate(loads, 1):
                tasks.start_soon(load, version, at)
            for k in range(len(given)):
                tasks.start_soon(life, k)
        assert policy.tokens == sum(each.made for each in oracle.rollouts)
        return decodes

    decodes = run_virtual(main)
    for k, each in enumerate(oracle.rollouts):
        assert decodes[k].made == each.made
        assert decodes[k].versions(0, each.made).tolist() == oracle.versions.get(id(each), [])
        assert ends.get(k, -1.0) == pytest.approx(each.ended, abs=1e-9)


def test_a_response_of_a_million_tokens_takes_as_many_events_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    reach = Job.reach

    async def counted(job: Job, position: float) -> bool:
        waits.append(position)
        return await reach(job, position)

    async def decode(length: int) -> float:
        policy = FakePolicy(lambda prompt: length, 1.0)
        (decode,) = await policy.open(prompts(1))
        async with policy.decoding([decode], lambda finished: True):
            while (await decode.read(length // 5)).state == "live":
                pass
        return anyio.current_time()

    def events(length: int) -> int:
        waits.clear()
        assert run_virtual(decode, length) == length
        return len(waits)

    monkeypatch.setattr(Job, "reach", counted)
    assert events(1_000_000) == events(50)


async def decoded(policy: FakePolicy, lengths: list[int], limit: int = 1_000) -> list[float]:
    ends = [0.0] * len(lengths)

    async def read(k: int, decode: FakeDecode) -> None:
        while (await decode.read(limit)).state == "live":
            pass
        ends[k] = anyio.current_time()

    decodes = await policy.open(prompts(len(lengths)))
    async with policy.decoding(decodes, lambda finished: False), anyio.create_task_group() as readers:
        for k, decode in enumerate(decodes):
            readers.start_soon(read, k, decode)
    return ends


def length_in(lengths: list[int]) -> FakePolicy:
    return FakePolicy(lambda prompt: lengths[prompt.rollout], lambda rows, tokens: float(rows))


def test_replicas_decode_side_by_side_each_at_its_own_pace() -> None:
    lengths = [4, 2, 1, 9]
    one, two = length_in(lengths), length_in(lengths)
    two.replicas = 2
    two.__post_init__()
    assert run_virtual(decoded, one, lengths) == [4 + 3 + 2 + 2, 4 + 3, 4, 4 + 3 + 2 + 2 + 5]
    assert run_virtual(decoded, two, lengths) == [2 + 3, 2 + 2, 2, 2 + 2 + 7]


@pytest.mark.parametrize("pace", [None, lambda prompt: 1.0], ids=["together", "apart"])
def test_a_decode_step_takes_as_many_passes_of_the_loop_for_many_rollouts_as_for_few(
    pace: Callable[[Prompt], float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(count: int) -> int:
        made = 0

        class Counting(VirtualTimeLoop):
            def _run_once(self) -> None:
                nonlocal made
                made += 1
                super()._run_once()  # type: ignore[misc]  # asyncio's own, in no stub

        monkeypatch.setattr("oppo.testing.virtual_time.VirtualTimeLoop", Counting)
        run_virtual(decoded, FakePolicy(lambda prompt: 20, pace=pace), [20] * count, 3)
        return made

    assert passes(200) <= passes(20) + 5


async def slept(seconds: float) -> float:
    await anyio.sleep(seconds)
    return anyio.current_time()


async def cancelled_timers() -> float:
    for seconds in (5.0, 7.0):
        with anyio.fail_after(seconds):
            await anyio.sleep(0.1)
    return await slept(20.0)


async def passed_deadline() -> float:
    with anyio.move_on_after(2.5):
        await anyio.sleep_forever()
    return anyio.current_time()


async def absolute_deadline() -> float:
    await anyio.sleep(0.7)
    with anyio.CancelScope(deadline=3.82):  # 0.7 + (3.82 - 0.7) is not 3.82
        await anyio.sleep_forever()
    return anyio.current_time()


async def shielded_sleep() -> float:
    with anyio.move_on_after(1), anyio.CancelScope(shield=True):
        await anyio.sleep(3)
    return anyio.current_time()


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (partial(slept, 0), 0.0),
        (partial(slept, 86_400 * 30.5), 86_400 * 30.5),
        (cancelled_timers, 0.1 + 0.1 + 20.0),
        (passed_deadline, 2.5),
        (absolute_deadline, 3.82),
        (shielded_sleep, 3.0),
    ],
)
def test_the_clock_starts_at_zero_and_jumps_to_the_next_timer(
    wait: Callable[[], Awaitable[float]], expected: float
) -> None:
    assert run_virtual(wait) == expected


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=20))
def test_time_adds_up_as_floats_do(pauses: list[float]) -> None:
    async def main() -> list[float]:
        return [await slept(pause) for pause in pauses]

    assert run_virtual(main) == list(itertools.accumulate(pauses))


def test_tasks_wake_in_the_order_of_their_timers() -> None:
    async def main() -> list[tuple[float, int]]:
        woken: list[tuple[float, int]] = []

        async def wait(number: int, seconds: float) -> None:
            await anyio.sleep(seconds)
            woken.append((anyio.current_time(), number))

        async with anyio.create_task_group() as tasks:
            for number, seconds in enumerate((0.3, 0.1, 0.2, 0.1)):
                tasks.start_soon(wait, number, seconds)
        return woken

    assert run_virtual(main) == [(0.1, 1), (0.1, 3), (0.2, 2), (0.3, 0)]


def test_a_call_in_place_of_the_function_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"give it main, not main\(\)"):
        run_virtual(anyio.sleep(1))  # type: ignore[arg-type] # wrong on purpose


def test_a_wait_that_cannot_end_is_a_deadlock() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.Event().wait, name="the one that waits")
            await anyio.sleep_forever()

    for _ in range(2):
        with pytest.raises(DeadlockError, match=r"every task waits and nothing can wake one: .*the one that waits"):
            run_virtual(main)
    assert run_virtual(slept, 1.0) == 1.0, "later loops are not harmed"


def test_a_deadlock_shows_what_was_registered_and_not_withdrawn() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        withdraw = loop.on_deadlock(lambda: "no longer true")
        loop.on_deadlock(lambda: "a->b 1/1")
        withdraw()
        await anyio.sleep_forever()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    assert str(caught.value).splitlines()[1:] == ["a->b 1/1"]


def test_a_loop_goes_on_after_a_deadlock() -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        with pytest.raises(DeadlockError):
            runner.run(anyio.sleep_forever())
        assert runner.run(slept(1.0)) == 1.0


def test_what_a_task_cleans_up_after_a_deadlock_takes_virtual_time() -> None:
    ends: list[float] = []

    async def main() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                ends.append(await slept(2.0))

    with pytest.raises(DeadlockError):
        run_virtual(main)
    assert ends == [2.0]


def test_time_that_runs_away_is_an_error() -> None:
    with pytest.raises(OverflowError, match="virtual time has run past"):
        run_virtual(slept, 1e9)


@pytest.mark.parametrize("run", [asyncio.to_thread, anyio.to_thread.run_sync])
def test_threads_are_refused(run: Callable[[Callable[[], int]], Awaitable[int]]) -> None:
    async def main() -> None:
        await run(threading.get_ident)

    with pytest.raises(ProtocolError, match="virtual time knows no threads"):
        run_virtual(main)


def test_a_slow_worker_thread_is_refused_before_time_passes() -> None:
    done = threading.Event()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, done.wait, 5)
            try:
                await anyio.sleep(100)
            finally:
                done.set()

    with pytest.raises(ProtocolError, match="'AnyIO worker thread' is one"):
        run_virtual(main)
    assert done.is_set()


def test_a_foreign_thread_that_calls_in_is_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(int,), name="intruder")
        thread.start()
        thread.join()
        await anyio.sleep(1)

    with pytest.raises(ProtocolError, match="virtual time knows no threads, but 'intruder' is one"):
        run_virtual(main)


def test_debug_mode_works() -> None:
    async def main() -> float:
        return await slept(1.0)

    with asyncio.Runner(debug=True, loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == 1.0
