"""What the fakes cost and do, and that a place in virtual time keeps the order that a thread keeps."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from oppo.events import Prompt
from oppo.models import Decode
from oppo.scheduling import IN_ORDER, Preempted, Preemptible, Priority, Urgent
from oppo.testing import (
    FakePolicy,
    FakeScorer,
    fake_scalar,
    prompts,
    run_virtual,
)
from oppo.testing.virtual_time import VirtualTimeLoop
from tests.kit.places import FakePlace, PlacedScorer


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
