"""Instances that are made where they live: what crosses says how, and holds neither code nor weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast, runtime_checkable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Recipe(Generic[T]):
    """An instance as the call that makes it; unpickled, it is that instance.

    Attributes:
        kind: the class of the instance.
        make: returns it; importable by name.
        args: of ``make``; they can be pickled.
    """

    kind: type[T]
    make: Callable[..., T]
    args: tuple[object, ...] = ()

    def __reduce__(self) -> tuple[Callable[..., T], tuple[object, ...]]:
        return self.make, self.args


@runtime_checkable
class HasRecipe(Protocol):
    """An instance of which a copy can be made on another machine."""

    def recipe(self) -> Recipe[object]:
        """Return how it is made there.

        Raises:
            ModelError: it does not know.
        """


def made(instance: T | Recipe[T]) -> T:
    """Return an instance, made now if it is a recipe."""
    return cast("T", instance.make(*instance.args)) if isinstance(instance, Recipe) else instance


def kind_of(instance: T | Recipe[T]) -> type[T]:
    """Return the class of an instance, or of what a recipe makes."""
    return instance.kind if isinstance(instance, Recipe) else type(instance)
