"""A function in a child process that nothing waits for in vain: a call that is given up dies, and the child with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

import anyio

from oppo.errors import ModelLost
from oppo.placement.child import Child, Gone
from oppo.placement.detached import run_detached
from oppo.placement.wire import Answer, Call, Create, Failure, Packet, pack, pack_with_blocks

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Apart(Generic[T]):
    """An object in a child process of its own, for code that may hold the interpreter lock, crash or never return.

    Its calls come one after the other. The child is started for the first of them, and again after it has died.

    Args:
        name: shown in errors and the list of processes.
        instance: can be pickled, importable by name.

    Raises:
        ModelError: it cannot go to another process.
    """

    def __init__(self, name: str, instance: T) -> None:
        self._name = name
        self._create = pack_with_blocks(Create(0, instance))
        self._child: Child | None = None
        self._turn = anyio.Lock()

    async def call(self, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return ``work(instance, *args, **kwargs)``; the child is killed if the caller is cancelled meanwhile.

        Raises:
            ModelLost: the child died.
            Exception: whatever ``work`` raised.
        """
        packet = pack(Call(0, work, args, kwargs))
        async with self._turn:
            try:
                return cast("R", await run_detached(f"oppo-{self._name}", partial(self._ask, packet)))
            except anyio.get_cancelled_exc_class():
                self.close()
                raise

    def _ask(self, packet: Packet) -> object:
        try:
            if self._child is None:
                self._child = Child(self._name, None)
                self._told(self._child.ask(self._create))
            return self._told(self._child.ask(packet))
        except Gone as gone:
            self.close()
            raise ModelLost(f"the process of {self._name!r} {gone}") from None

    def _told(self, answer: Answer | Failure) -> object:
        if isinstance(answer, Failure):
            raise answer.told_of(self._name)
        return answer.value

    def close(self) -> None:
        """Kill the child, whatever it is doing; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
