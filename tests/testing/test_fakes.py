"""What the fakes cost and do, and that a place in virtual time keeps the order that a thread keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import anyio
import pytest

from oppo.events import Prompt, Response
from oppo.models import Capabilities, Decode, Weights
from oppo.scheduling import IN_ORDER, Preempted, Preemptible, Priority, Urgent
from oppo.testing import (
    FakePolicy,
    FakeScorer,
    fake_scalar,
    prompts,
    run_virtual,
)
from oppo.testing.fake_policy import FakeDecode
from oppo.testing.virtual_time import VirtualTimeLoop
from tests.kit.places import FakePlace, PlacedScorer
from tests.kit.responses import read_chunk


def ends(*calls: tuple[str, float, Priority], cancel: str = "") -> dict[str, float]:
    """Return when each call of a second ended; begun at its time."""
    found: dict[str, float] = {}

    async def main() -> None:
        place = FakePlace()

        async def call(name: str, begin: float, priority: Priority) -> None:
            await anyio.sleep_until(begin)
            with anyio.move_on_after(0.5 if name == cancel else 1e3):
                if isinstance(priority, Urgent):
                    with priority:
                        await one(name, priority)
                else:
                    await one(name, priority)

        async def one(name: str, priority: Priority) -> None:
            async with place.reserved(priority):
                await anyio.sleep(1)
            found[name] = anyio.current_time()

        async with anyio.create_task_group() as tasks:
            for each in calls:
                tasks.start_soon(call, *each)

    run_virtual(main)
    return found


def test_calls_are_made_one_at_a_time_in_the_order_of_arrival() -> None:
    assert ends(("a", 0, IN_ORDER), ("b", 0.1, IN_ORDER), ("c", 0.2, IN_ORDER)) == {"a": 1, "b": 2, "c": 3}


def test_urgent_calls_come_first_and_interrupt_nothing() -> None:
    assert ends(("a", 0, IN_ORDER), ("b", 0.1, IN_ORDER), ("c", 0.2, Urgent())) == {"a": 1, "c": 2, "b": 3}


@pytest.mark.parametrize("cancel", ["a", "b"], ids=["at work", "waiting"])
def test_a_cancelled_call_makes_room_for_the_next(cancel: str) -> None:
    found = ends(("a", 0, IN_ORDER), ("b", 0.1, IN_ORDER), ("c", 0.2, IN_ORDER), cancel=cancel)
    assert found == ({"b": 1.5, "c": 2.5} if cancel == "a" else {"a": 1, "c": 2})


def test_while_one_holds_the_place_only_urgent_calls_are_made() -> None:
    order: list[str] = []

    async def main() -> None:
        place, urgent = FakePlace(), Urgent()

        async def other() -> None:
            async with place.reserved():
                order.append("other")

        async with anyio.create_task_group() as tasks:
            with urgent:
                async with place.reserved(urgent):
                    order.append("first")
                    tasks.start_soon(other)
                    await anyio.sleep(1)
                await anyio.sleep(1)
                async with place.reserved(urgent):
                    order.append("second")

    run_virtual(main)
    assert order == ["first", "second", "other"]


@pytest.mark.parametrize(("better", "made"), [(lambda: True, False), (lambda: False, True)])
def test_a_call_with_something_better_to_do_is_given_up_while_it_queues(better: Callable[[], bool], made: bool) -> None:
    async def main() -> bool:
        place = FakePlace()
        try:
            async with place.reserved(Preemptible(better)):
                return True
        except Preempted:
            return False

    assert run_virtual(main) is made


def test_scorers_of_a_place_take_turns() -> None:
    async def main() -> float:
        place = FakePlace()
        scorers = [PlacedScorer(FakeScorer(fake_scalar, per_call=1.0), place) for _ in range(3)]
        async with anyio.create_task_group() as tasks:
            for each in scorers:
                tasks.start_soon(each.extend, prompts(1))
        await scorers[0].forget([0])
        assert scorers[0].version == 0
        return anyio.current_time()

    assert run_virtual(main) == 3


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
        run_virtual(_decode, FakePolicy(lambda prompt: 20, pace=pace), count)
        return made

    assert passes(200) <= passes(20) + 5


async def _decode(policy: FakePolicy, count: int) -> None:
    async def read(decode: Decode) -> None:
        while (await decode.read(3)).state == "live":
            pass

    decodes = await policy.open(prompts(count))
    async with policy.decoding(decodes, lambda ended: False), anyio.create_task_group() as readers:
        for decode in decodes:
            readers.start_soon(read, decode)


def reading_policy(kv_on_sync: Literal["recompute", "keep"] = "recompute") -> FakePolicy:
    loads = Capabilities(adds_while_decoding=True, loads_while_decoding="between decode steps")
    return FakePolicy(lambda prompt: 8, 1.0, reading=0.25, kv_on_sync=kv_on_sync, capabilities=loads)


async def timed(policy: FakePolicy, decodes: Sequence[FakeDecode], count: int) -> float:
    """Return the seconds in which the first rollout gains so many tokens, in a decoding that is then left."""
    start = anyio.current_time()
    async with policy.decoding(decodes, lambda ended: True):
        await decodes[0].read(count)
    return anyio.current_time() - start


def test_prompts_are_read_when_their_rollouts_join() -> None:
    async def main() -> None:
        policy = reading_policy()
        first, second = await policy.open(prompts(2, length=8))
        async with policy.decoding([first], lambda ended: True) as decoding:
            await first.read(1)
            assert anyio.current_time() == 8 * 0.25 + 1
            await first.read(1)
            assert anyio.current_time() == 8 * 0.25 + 2, "they are read once"
            await decoding.add([second])
            await second.read(1)
            assert anyio.current_time() == 2 * 8 * 0.25 + 4, "the step in progress ends first, without it"
        assert policy.prefilled == 16

    run_virtual(main)


@pytest.mark.parametrize(("kv_on_sync", "again"), [("recompute", 4 + 4 - 1), ("keep", 0)])
def test_deferred_rollouts_are_read_again_under_other_weights(
    kv_on_sync: Literal["recompute", "keep"], again: int
) -> None:
    async def main() -> None:
        policy = reading_policy(kv_on_sync)
        decodes = await policy.open(prompts(1, length=4))
        assert await timed(policy, decodes, 3) == 4 * 0.25 + 3
        assert await timed(policy, decodes, 1) == 1.0, "of the same weights there are keys and values"
        await policy.load(Weights(1))
        assert await timed(policy, decodes, 1) == again * 0.25 + 1

    run_virtual(main)


def test_live_rollouts_are_read_again_after_the_step_in_which_weights_come() -> None:
    async def main() -> None:
        policy = reading_policy()
        decodes = await policy.open(prompts(2, length=4))
        async with policy.decoding(decodes, lambda ended: True):
            await decodes[0].read(2)
            start = anyio.current_time()
            await anyio.sleep(0.5)
            await policy.load(Weights(1))
            assert anyio.current_time() == start + 1, "between two decode steps"
            piece = await read_chunk(decodes[0], 2)
            assert piece.versions.tolist() == [0, 1]
            assert anyio.current_time() == start + 1 + 2 * (4 + 3 - 1) * 0.25 + 1

    run_virtual(main)


def test_what_was_written_by_others_is_read_whole() -> None:
    async def main() -> None:
        (prompt,) = prompts(1, length=4)
        policy = reading_policy()
        whole = await policy.open([prompt])
        async with policy.decoding(whole, lambda ended: True):
            piece = await whole[0].read(5)
        spans: list[tuple[int, int]] = []

        def reading(start: int, stop: int) -> float:
            spans.append((start, stop))
            return 2.0

        other = FakePolicy(lambda prompt: 8, 1.0, reading=reading)
        half = await other.open([Response.empty(prompt).then(piece)])
        assert await timed(other, half, 1) == 3.0
        assert spans == [(-4, 4)], "all but the last token, which the decode step reads"

    run_virtual(main)


def test_decode_steps_wait_for_each_rollout_that_ends() -> None:
    async def main() -> None:
        policy = FakePolicy(lambda prompt: 2 if prompt.rollout == 0 else 4, 1.0, ending=3.0)
        decodes = await policy.open(prompts(2))
        async with policy.decoding(decodes, lambda ended: False):
            await decodes[0].read(2)
            assert anyio.current_time() == 2
            await decodes[1].read(3)
            assert anyio.current_time() == 2 + 3 + 1

    run_virtual(main)
