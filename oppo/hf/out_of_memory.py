"""Out-of-memory errors that name the model, the work and the setting that needs less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch

from oppo.errors import ModelError
from oppo.placement import Hosted, Hosting, Journal, Recipe
from oppo.scheduling import Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


def ran_out(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is an allocator's; allocators have no error type in common."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError | OSError) and any(sign in str(error).lower() for sign in _SIGNS):
            return True
        error = error.__cause__
    return False


@contextmanager
def attributed(model: str, doing: str, remedy: str) -> Iterator[None]:
    """Attribute out-of-memory errors to a model.

    Raises:
        ModelError: memory ran out inside; it names ``model``, what it was ``doing`` and the ``remedy``.
    """
    try:
        yield
    except Exception as error:  # any kind: the cause decides
        if not ran_out(error):
            raise
        first_line = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(f"the {model} ran out of memory while {doing}: {remedy} ({first_line})") from error


class ModelPlace:
    """A place that hosts one model by name, in spans and out-of-memory errors; several may share one.

    Args:
        place: hosts the model.
        model: its name in errors, and its track in traces.
        remedy: advice against running out of memory, with settings by name.
    """

    def __init__(self, place: Hosting, model: str, remedy: str) -> None:
        self._place = place
        self._model = model
        self._remedy = remedy

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Host ``instance`` in the place.

        Raises:
            ModelError: the place cannot host it, or memory ran out.
        """
        with attributed(self._model, "it was given a home", self._remedy):
            hosted = self._place.host(instance, track=track or self._model, journal=journal)
        return _Attributed(hosted, self._model, self._remedy)


class _Attributed(Generic[T]):
    def __init__(self, hosted: Hosted[T], model: str, remedy: str) -> None:
        self._hosted = hosted
        self._model = model
        self._remedy = remedy

    @property
    def time_slice(self) -> TimeSlice:
        return self._hosted.time_slice

    def at(self, priority: Priority) -> Hosted[T]:
        return _Attributed(self._hosted.at(priority), self._model, self._remedy)

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        with attributed(self._model, f"it did {label!r}", self._remedy):
            return await self._hosted.call(label, work, *args, **kwargs)

    async def load(
        self, work: Callable[[T, W], object], weights: W, loaded: Callable[[], object] | None = None
    ) -> None:
        with attributed(self._model, "it did 'load'", self._remedy):
            await self._hosted.load(work, weights, loaded)
