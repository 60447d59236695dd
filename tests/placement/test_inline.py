"""The place that is no other place: work on the caller, for virtual time."""

from __future__ import annotations

import threading
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from oppo.errors import ModelLost
from oppo.graph import Step
from oppo.observe import Span
from oppo.placement import Inline, Process, Thread
from oppo.testing import run_virtual
from tests.placement.instances import Total


@pytest.mark.parametrize("place", [Inline("scorers"), Thread("scorers")])
async def test_a_place_says_what_it_is_at_work_on(place: Inline | Thread) -> None:
    hosted = place.host(lambda: place, track="critic")
    assert await hosted.call("read", lambda here: here.at_work) == "critic: read"
    assert place.at_work == ""
    place.close()


async def test_work_is_done_on_the_caller_in_order_and_reported() -> None:
    spans, heard = list[Span](), list[str]()
    with Inline("total", listener=spans.append) as place:
        total = place.host(partial(Total, 1), track="sum")
        assert await total.call("add", Total.add, 2, times=3) == 7
        await total.load(Total.add, 1, lambda: heard.append(place.at_work))
        assert await total.call("look", lambda here: here.sum) == 8
        thread = place.host(lambda: None)
        assert await thread.call("look", lambda _: threading.get_ident()) == threading.get_ident()
    assert [(span.track, span.label) for span in spans] == [
        *(("sum", label) for label in ("add", "load", "look")),
        ("total", "look"),
    ]
    assert heard == ["sum: load"], "in the same turn"


@pytest.mark.parametrize("kind", [Inline, Thread, Process])
async def test_a_span_says_for_which_step_the_call_was_made_and_in_which_role(
    kind: type[Inline | Thread | Process],
) -> None:
    spans: list[Span] = []
    with kind("total", listener=spans.append) as place:
        total = place.host(partial(Total, 1))

        async def work(step: Step) -> None:
            with step.working("score"):
                await anyio.lowlevel.checkpoint()
                await total.call("add", Total.add, 1)
                await total.load(Total.add, 1)

        async with anyio.create_task_group() as tasks:
            for number in (3, 4):
                tasks.start_soon(work, Step(number, 1, 0.0))
        await total.call("add", Total.add, 1)
    assert sorted((span.step, span.role) for span in spans[:-1]) == [
        (3, "score"),
        (3, "score"),
        (4, "score"),
        (4, "score"),
    ]
    assert (spans[-1].step, spans[-1].role) == (None, None), "of no step"


def test_virtual_time_goes_on_around_it() -> None:
    async def main() -> tuple[int, float]:
        total = Inline("total").host(Total)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 5)
            for number in range(4):
                tasks.start_soon(total.call, "add", Total.add, number)
        return await total.call("add", Total.add, 0), anyio.current_time()

    assert run_virtual(main) == (6, 5.0)


async def test_a_closed_place_says_what_it_cannot_do() -> None:
    place = Inline("reward")
    total = place.host(Total)
    place.close()
    place.close()
    with pytest.raises(ModelLost, match="the place 'reward' is closed, so it cannot do 'extend'"):
        await total.call("extend", Total.add, 1)
