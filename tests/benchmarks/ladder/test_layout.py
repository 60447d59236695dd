"""Who works where."""

from __future__ import annotations

import threading

import torch

from benchmarks.ladder.layout import Seat, seats
from benchmarks.ladder.workloads import Layout
from benchmarks.machine import cores_here

LAYOUTS: tuple[Layout, ...] = ("split", "shared")


def test_split_gives_each_side_its_own_core_in_every_mode() -> None:
    for held in (False, True):
        split = seats("split", (4, 5, 6, 7), held=held)
        assert (split.actor, split.scorers, split.trainer) == (Seat((4,), 1), Seat((5,), 1), Seat((4,), 1))


def test_an_update_beside_decoding_is_on_the_scorers_core_or_has_what_decoding_leaves() -> None:
    split, shared = (seats(layout, (4, 5), held=False, apart=True) for layout in LAYOUTS)
    assert (split.actor, split.scorers, split.trainer) == (Seat((4,), 1), Seat((5,), 1), Seat((5,), 1))
    assert [seat.threads for seat in (shared.actor, shared.scorers, shared.trainer)] == [1, 1, 1]


def test_shared_gives_scoring_what_decoding_leaves_and_the_update_all_cores() -> None:
    held, overlapped = seats("shared", (0, 1), held=True), seats("shared", (0, 1), held=False)
    assert [seat.threads for seat in (held.actor, held.scorers, held.trainer)] == [1, 2, 2]
    assert [seat.threads for seat in (overlapped.actor, overlapped.scorers, overlapped.trainer)] == [1, 1, 2]
    assert {seat.cores for seat in (held.actor, overlapped.scorers, overlapped.trainer)} == {(0, 1)}


def test_of_three_cores_nobody_gets_more_than_there_are() -> None:
    overlapped = seats("shared", (0, 1, 2), held=False)
    assert (overlapped.actor.threads, overlapped.scorers.threads) == (1, 2)


def test_with_one_core_everybody_shares_it() -> None:
    for layout in ("split", "shared"):
        alone = seats("split" if layout == "split" else "shared", (3,), held=False)
        assert {seat.cores for seat in (alone.actor, alone.scorers, alone.trainer)} == {(3,)}
        assert {seat.threads for seat in (alone.actor, alone.scorers, alone.trainer)} == {1}


def test_a_seat_binds_the_thread_that_takes_it_and_no_other() -> None:
    before, found = cores_here(), list[tuple[tuple[int, ...], int]]()

    def work() -> None:
        Seat(before[:1], 1).take()
        found.append((cores_here(), torch.get_num_threads()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(before[:1], 1)]
    assert cores_here() == before
