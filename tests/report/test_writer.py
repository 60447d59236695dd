from __future__ import annotations

import threading

import pytest

from oppo.report.records import Writer


@pytest.mark.parametrize("threaded", [True, False])
def test_jobs_are_done_in_order_and_all_before_close_returns(threaded: bool) -> None:
    done: list[int] = []
    writer = Writer(threaded=threaded, capacity=2)
    for number in range(50):
        writer.submit(lambda number=number: done.append(number))  # type: ignore[misc]  # binds the loop variable
    writer.close()
    writer.close()
    assert done == list(range(50))


@pytest.mark.parametrize("threaded", [True, False])
def test_what_was_submitted_before_it_settles_is_done_then(threaded: bool) -> None:
    done: list[int] = []
    writer = Writer(threaded=threaded)
    for number in range(50):
        writer.submit(lambda number=number: done.append(number))  # type: ignore[misc]  # binds the loop variable
    writer.flush()
    assert done == list(range(50))
    writer.close()


def test_a_writer_that_has_failed_settles_with_the_failure() -> None:
    def fail() -> None:
        raise OSError("disk full")

    writer = Writer()
    writer.submit(fail)
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            writer.flush()
    with pytest.raises(OSError, match="disk full"):
        writer.close()


def test_a_failure_is_raised_and_nothing_is_written_after_it() -> None:
    done: list[int] = []

    def fail() -> None:
        go_on.wait()
        raise OSError("disk full")

    go_on = threading.Event()
    writer = Writer()
    writer.submit(fail)
    writer.submit(lambda: done.append(1))
    go_on.set()
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    with pytest.raises(OSError, match="disk full"):
        writer.submit(lambda: done.append(2))
    assert done == []
