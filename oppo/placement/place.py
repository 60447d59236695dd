"""The contract of every place, and the handle to an instance of this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from oppo import observe
from oppo.errors import ModelLost
from oppo.placement.recipe import Recipe, made
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
W = TypeVar("W")


class Hosted(Protocol[T_co]):
    """The handle to an instance on the event loop: ``await hosted.call("extend", Reader.extend, events)``."""

    @property
    def time_slice(self) -> TimeSlice:
        """How long a call in this place should last that nothing waits for."""

    def at(self, priority: Priority) -> Hosted[T_co]:
        """Return a handle whose calls have this priority; those of other handles are made in order of arrival.

        A place without a queue, such as :class:`~oppo.placement.Inline`, makes every call at once.
        """

    async def call(
        self, label: str, work: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return ``work(instance, *args, **kwargs)``, run where the instance lives.

        A call that has begun is waited for even when its caller is cancelled: no state is left half-changed.

        Args:
            label: of the call in traces and errors.
            work: a method of the instance's class, or another function of it.
            args: further arguments; a :class:`~oppo.placement.Callback` stays with the caller.
            kwargs: the same, by name.

        Raises:
            ModelLost: the place is closed, or its process died.
            Preempted: the priority is that of a preemptible call, which was not made.
            Exception: whatever ``work`` raised.
        """

    async def load(
        self, work: Callable[[T_co, W], object], weights: W, loaded: Callable[[], object] | None = None
    ) -> None:
        """Give the instance weights, by ``work(instance, weights)``; the place makes no other call meanwhile.

        Where its memory is this process's too, ``work`` runs here, on the instance that :meth:`Hosting.host` received,
        and nothing crosses. Otherwise the weights are sent, and a replacement gets the last ones before it replays
        anything.

        Args:
            work: a method of the instance's class.
            weights: tensors by name, for example; a :class:`~oppo.placement.Bulk` where they are to be sent.
            loaded: called when it is done, and before the next call is made.

        Raises:
            ModelLost: the place is closed, or its process died.
            Exception: whatever ``work`` raised.
        """


class Journal(Protocol):
    """What the answered calls of an instance amount to: calls that bring a replacement to the same state."""

    def note(self, work: Callable[..., object], args: tuple[object, ...]) -> None:
        """Record an answered call; called in the order of the calls, from one thread at a time."""

    def replay(self) -> Iterable[tuple[Callable[..., object], tuple[object, ...]]]:
        """Return the calls that bring an instance from its state when it was hosted to that of the lost one."""


class Hosting(Protocol):
    """Something that hosts instances."""

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Move ``instance`` in for good; from now on all use goes through the handle that is returned.

        Args:
            instance: synchronous; it need not be thread-safe, as its calls are made one at a time. By its recipe, it is
                made where it will live.
            track: of its spans; the name of the place when empty.
            journal: replayed by places that restart what is lost; others record nothing.

        Raises:
            ModelError: it cannot live there.
        """


class Place(Hosting):
    """A home for instances with an owner: it has a name, reports its calls, and is closed in the end.

    Args:
        name: shown in traces and errors, and in the list of threads or processes.
        listener: called with the span of each call, from the thread that made it or waited for its answer.
        time_slice: how long a call in this place should last that nothing waits for.

    Attributes:
        at_work: the call in progress, as ``track: label``; empty when there is none.
    """

    def __init__(
        self,
        name: str,
        *,
        listener: observe.SpanListener = observe.silent,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        self.name = name
        self.listener = listener
        self.time_slice = time_slice
        self.at_work = ""
        self._open = True

    @abstractmethod
    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run ``work`` in this process when it is the turn of a call with this priority; its span is on ``track``.

        Raises:
            ModelLost: the place is closed.
            Preempted: the call is preemptible and was not made.
        """

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Return a handle to ``instance``, which is lost only with this process, so ``journal`` records nothing."""
        del journal
        return LocalInstance(self, made(instance), track or self.name)

    def close(self) -> None:
        """End the place after the call in progress and refuse further calls; idempotent."""
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _require_open(self, what: str, label: str) -> None:
        if not self._open:
            raise ModelLost(f"the {what} {self.name!r} is closed, so it cannot do {label!r}")

    @contextmanager
    def _reported(self, track: str, label: str, context: observe.WorkContext) -> Iterator[None]:
        """Report the body as the call in progress, and afterwards its span to the listener."""
        start = observe.now()
        self.at_work = f"{track}: {label}"
        try:
            yield
        finally:
            self.at_work = ""
            self.listener(context.span(track, label, start, observe.now()))


@dataclass(frozen=True, slots=True, eq=False)
class LocalInstance(Generic[T]):
    """An instance that is called in this process; implements :class:`Hosted`."""

    place: Place
    instance: T
    track: str
    priority: Priority = IN_ORDER

    @property
    def time_slice(self) -> TimeSlice:
        """That of the place."""
        return self.place.time_slice

    def at(self, priority: Priority) -> Self:
        """Return a handle whose calls have this priority."""
        return replace(self, priority=priority)

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return ``work(instance, *args, **kwargs)``."""
        return await self.place.call_at(self.priority, self.track, label, work, self.instance, *args, **kwargs)

    async def load(
        self, work: Callable[[T, W], object], weights: W, loaded: Callable[[], object] | None = None
    ) -> None:
        """Run ``work`` here, whose memory the instance's process shares."""

        def load() -> None:
            work(self.instance, weights)
            if loaded is not None:
                loaded()

        await self.place.call_at(self.priority, self.track, "load", load)
