"""Ranks as a place: all of them make every call, and none is left waiting for one that is gone."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from oppo.errors import ModelError, ModelLost, ProtocolError
from oppo.observe import Span
from oppo.placement import Callback, Ranks, ranks as ranks_module
from oppo.placement.ranks import listen, listener
from tests.placement.instances import Caller, Crew, gone


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks("shared", 3) as ranks:
        yield ranks


async def test_every_rank_has_a_copy_and_rank_0_answers(ranks: Ranks) -> None:
    spans: list[Span] = []
    ranks.listener = spans.append
    one, two = ranks.host(partial(Crew, 1), track="one"), ranks.host(partial(Crew, 10))
    (first, place, pid), (other, elsewhere, _) = [await each.call("add", Crew.add, 1) for each in (one, two)]
    assert (first, other) == (2, 11)
    assert place[:2] == elsewhere[:2] == (0, 3)
    assert place[2] != elsewhere[2], "each instance has a meeting of its own"
    assert pid == ranks.pids[0] != os.getpid()
    assert (await one.call("add", Crew.add, 1))[0] == 3
    await one.load(Crew.add, 5)
    assert (await one.call("add", Crew.add, 1))[0] == 9
    assert [span.track for span in spans] == ["one", "shared", "one", "one", "one"]


async def test_an_error_of_all_ranks_leaves_them_as_they_are(ranks: Ranks) -> None:
    crew = ranks.host(Crew)
    with pytest.raises(ZeroDivisionError, match="in rank 0") as raised:
        await crew.call("fail", Crew.fail)
    assert "in the process of 'shared'" in raised.value.__notes__[0]
    assert (await crew.call("add", Crew.add, 4))[0] == 4


async def test_what_is_no_member_is_refused(ranks: Ranks) -> None:
    with pytest.raises(
        ModelError, match=r"Caller cannot work in the ranks of 'shared': expected an instance with .* join"
    ):
        await ranks.host(Caller).call("look", repr)


async def test_a_call_with_callbacks_is_refused(ranks: Ranks) -> None:
    crew = ranks.host(Crew)
    with pytest.raises(ProtocolError, match="ranks of 'shared' cannot call back"):
        await crew.call("add", Crew.add, Callback(int))  # type: ignore[arg-type]  # what is refused


@pytest.mark.parametrize(
    ("rank", "how", "others", "grace"),
    [
        (0, "dies", "wait", 0.1),
        (2, "dies", "wait", 0.1),
        (1, "dies", "fail", 2.0),  # the death is reported, not what the others make of it
        (1, "fails", "wait", 0.1),
        (1, "fails", "answer", 0.1),
    ],
)
async def test_a_rank_that_dies_or_fails_alone_ends_the_others(
    rank: int, how: str, others: str, grace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "_GRACE", grace)
    with Ranks("crew", 3) as ranks, anyio.fail_after(60):
        crew = ranks.host(Crew)
        ranks.wait_until_ready()
        pids = ranks.pids
        died = rf"rank {rank} of 'crew' \(pid {pids[rank]}\) was killed by SIGKILL"
        alone = f"rank {rank} of 'crew' failed alone"
        with pytest.raises(ModelLost if how == "dies" else ZeroDivisionError) as raised:
            await crew.call("work", Crew.fare, rank, how, others)
        if how == "dies":
            assert re.match(rf"{died}.* while it did 'work'", str(raised.value))
        else:
            assert str(raised.value) == f"in rank {rank}"
            assert f"{alone}; the other ranks were ended" in raised.value.__notes__
        assert gone(pids)
        with pytest.raises(ModelLost, match=rf"({died}|{alone}).* while it did 'add' for 'crew'"):
            await crew.call("add", Crew.add, 1)


async def test_an_instance_whose_copies_do_not_meet_says_why_and_hinders_no_other() -> None:
    with Ranks("crew", 2) as ranks, anyio.fail_after(60):
        crew, other = ranks.host(partial(Crew, unmeetable=True)), ranks.host(Crew)
        with pytest.raises(ProtocolError, match="rank 0 met nobody"):
            await crew.call("add", Crew.add, 1)
        assert (await other.call("add", Crew.add, 1))[0] == 1


async def test_closed_ranks_leave_no_process_and_no_file() -> None:
    with Ranks("crew", 2) as ranks:
        crew = ranks.host(Crew)
        meeting = (await crew.call("add", Crew.add, 1))[1][2]
        folder = Path(meeting.removeprefix("file://")).parent
        assert folder.exists()
    assert gone(ranks.pids)
    assert not folder.exists()


def test_there_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="ranks must be"):
        Ranks("crew", 0)


def test_ranks_of_a_port_meet_at_one_that_is_held_from_the_start() -> None:
    meeting = listen("127.0.0.1")
    port = int(meeting.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"), socket.socket() as another:
        another.bind(("127.0.0.1", port))
    server = listener(meeting)
    assert server is not None
    with server:
        assert server.getsockname() == ("127.0.0.1", port)
    assert listener(meeting) is None
