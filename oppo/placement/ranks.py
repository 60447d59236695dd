"""Calls that several child processes make together, each on its own copy of the instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from oppo import observe
from oppo.declared import require_whole
from oppo.placement.child_process import ChildProcess
from oppo.placement.place import Hosted, Journal
from oppo.placement.rank_group import FileMeeting, RankGroup
from oppo.placement.ranked_place import RankedPlace, RanksInstance
from oppo.placement.recipe import Recipe, made
from oppo.scheduling import DEFAULT_TIME_SLICE, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Ranks(RankedPlace):
    """Several child processes, the ranks, for an instance that shares its work out among its copies.

    Each rank unpickles the instance at its first call, and the copies meet (:class:`~oppo.placement.Member`). All ranks
    make every call, with the same arguments; its result, its error and its span are those of rank 0. The ranks are
    children like that of a :class:`~oppo.placement.Process`: they ignore Ctrl-C and die with their parent.

    A rank that dies ends the others, which would wait for it forever: the call in progress and every later one raise
    :class:`~oppo.errors.ModelLost`. So does a rank that fails alone. An error of all ranks leaves the place as it is.

    Args:
        name, listener, time_slice: see :class:`Place`.
        count: of ranks, at least 1.
        setup: called once in each rank before anything else; importable by name.

    Raises:
        ModelError: ``setup`` cannot go to another process.

    Example:
        >>> with Ranks("trainer", 2) as ranks:  # doctest: +SKIP
        ...     trainer = hf.HfTrainer(actor, critic, sampling=sampling, thread=ranks)
    """

    what = "group of ranks"

    def __init__(
        self,
        name: str,
        count: int,
        *,
        listener: observe.SpanListener = observe.silent,
        setup: Callable[[], object] | None = None,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        require_whole("ranks", count, 1)
        group = RankGroup(name, [ChildProcess] * count, setup, FileMeeting())
        super().__init__(name, group, listener=listener, time_slice=time_slice)

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Host a copy of ``instance`` in every rank; nothing is restarted, so ``journal`` records nothing.

        Raises:
            ModelError: it is no :class:`~oppo.placement.Member`, or cannot go to another process.
        """
        del journal
        here = made(instance)
        return RanksInstance(here, track or self.name, place=self, number=self._children.host(here))
