"""What holds in every place of this machine."""

from __future__ import annotations

import threading
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from oppo.errors import ModelLost
from oppo.graph import Step
from oppo.observe import Span
from oppo.placement import Inline, Place, Process, Ranks, Thread
from oppo.testing import run_virtual
from tests.placement.instances import Crew, Total, fail_to_set_up


@pytest.mark.parametrize("kind", [Inline, Thread])
async def test_work_is_done_in_one_thread_in_order_and_reported(kind: type[Inline | Thread]) -> None:
    spans, heard = list[Span](), list[str]()
    with kind("scorers", listener=spans.append) as place:
        total, plain = place.host(partial(Total, 1), track="critic"), place.host(lambda: None)
        assert await total.call("add", Total.add, 2, times=3) == 7
        await total.load(Total.add, 1, lambda: heard.append(place.at_work))
        assert await total.call("look", lambda here: (here.sum, place.at_work)) == (8, "critic: look")
        here = await plain.call("look", lambda _: threading.get_ident()) == threading.get_ident()
        assert here == (kind is Inline)
        assert place.at_work == ""
    tracks = [(span.track, span.label) for span in spans]
    assert tracks == [*(("critic", label) for label in ("add", "load", "look")), ("scorers", "look")]
    assert heard == ["critic: load"], "before any other call"


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (Inline("reward"), "the place 'reward'"),
        (Thread("reward"), "the thread of 'reward'"),
        (partial(Process, "reward"), "the process of 'reward'"),
        (partial(Ranks, "reward", 2), "the group of ranks of 'reward'"),
    ],
    ids=["inline", "thread", "process", "ranks"],
)
async def test_a_closed_place_says_what_it_cannot_do(place: Place | partial[Process], named: str) -> None:
    opened = place if isinstance(place, Place) else place()
    crew = opened.host(Crew)
    opened.close()
    opened.close()
    with pytest.raises(ModelLost, match=f"{named} is closed, so it cannot do 'extend'"):
        await crew.call("extend", Crew.add, 1)


@pytest.mark.parametrize("kind", [partial(Process, "reward"), partial(Ranks, "reward", 2)])
def test_a_setup_that_fails_is_the_error_of_the_first_call(kind: partial[Process]) -> None:
    with kind(setup=fail_to_set_up) as place:
        place.host(Total)
        with pytest.raises(OSError, match="no such core"):
            place.wait_until_ready()


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
