"""What every place promises, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from oppo import observe
from oppo.scheduling import Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Hosted(Protocol[T_co]):
    """A instance, as seen from the event loop: ``await hosted.call("extend", Reader.extend, events)``."""

    @property
    def time_slice(self) -> TimeSlice:
        """How long a call in this place should last that nobody waits for."""

    def at(self, priority: Priority) -> Hosted[T_co]:
        """Return the same instance, whose calls have this priority; without this they are made in order of arrival.

        A place without a queue, as :class:`~oppo.placement.Inline`, makes every call at once.
        """

    async def call(
        self, label: str, work: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return ``work(instance, *args, **kwargs)``, done where the instance lives.

        A call that has begun is always waited for, even when the caller is cancelled: the instance's state is never
        left half-changed behind the caller's back.

        Args:
            label: what is done, in traces and errors.
            work: a method of the instance's class, or another function of it.
            args: what it is given besides; a :class:`~oppo.placement.Callback` stays with the caller.
            kwargs: the same, by name.

        Raises:
            ModelLost: the place is closed, or gone.
            Preempted: the priority is that of a preemptible call, which was not made.
            Exception: whatever ``work`` raised.
        """

    async def call_local(
        self, label: str, work: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return the same, done in this process to the instance that :meth:`Hosting.host` was given.

        It queues as calls do, and no call is made in the place meanwhile. Where the instance lives in another process,
        the arguments stay in this one: a change to memory that both processes share is seen by both.
        """


class Journal(Protocol):
    """Remembers, of the calls that a instance has answered, what one that takes its place must be told."""

    def note(self, work: Callable[..., object], args: tuple[object, ...]) -> None:
        """A call has been answered; called in the order of the calls, from one thread at a time."""

    def replay(self) -> Iterable[tuple[Callable[..., object], tuple[object, ...]]]:
        """Return the calls that bring a instance as it was when it was hosted to where the lost one was."""


class Hosting(Protocol):
    """Something in which instances can live."""

    def host(self, instance: T, *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Give ``instance`` a home for good; from now on it is used through what is returned, and only so.

        Args:
            instance: synchronous; it need not be safe for threads, as it does one thing at a time.
            track: of its spans; the name of the place when empty.
            journal: for places that can be lost and begin again.

        Raises:
            ModelError: it cannot live there.
        """


class Place(Hosting, Protocol):
    """A home that somebody owns: it has a name, tells what is done in it, and is closed in the end.

    Attributes:
        at_work: the call in progress, as ``track: label``; empty when there is none.
    """

    name: str
    listener: observe.SpanListener
    at_work: str

    def close(self) -> None:
        """End the place after the call in progress; idempotent."""


@contextmanager
def reported(place: Place, track: str, label: str) -> Iterator[None]:
    """Tell the listener of ``place`` how long the body took, on ``track`` or, when empty, on its own."""
    start = observe.now()
    place.at_work = f"{track or place.name}: {label}"
    try:
        yield
    finally:
        place.at_work = ""
        place.listener(observe.Span(track or place.name, label, start, observe.now()))
