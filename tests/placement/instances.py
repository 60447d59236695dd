"""Instances for tests of places: importable by name, so that they can live in another process."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from oppo.errors import ProtocolError
from oppo.placement.child import Bulk
from oppo.placement.shared_memory import Block, Gauge, Notice


class Lent(Bulk):
    """A number as a handle, which can be opened once.

    Attributes:
        pickles: how often it was pickled.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.pickles = 0

    @property
    def lasts(self) -> bool:
        return False

    def __reduce__(self) -> tuple[type[Lent], tuple[int]]:
        self.pickles += 1
        return Lent, (self.number,)


class Total:
    """Adds numbers up."""

    def __init__(self, start: int = 0) -> None:
        self.sum = start

    def take(self, lent: Lent) -> None:
        self.sum = lent.number

    def add(self, number: int, *, times: int = 1) -> int:
        self.sum += number * times
        return self.sum

    def add_or_die(self, number: int, mark: Path) -> int:
        """Add half of the number, then kill this process, unless that has been done before."""
        self.add(number // 2)
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.add(number - number // 2)

    def add_when_told(self, number: int, begun: Path, go_on: Path) -> int:
        """Say on one named pipe that this has begun, and wait for the other to be written before going on."""
        begun.write_text("begun")
        go_on.read_text()
        return self.add(number)

    def join(self, rank: int, size: int, meeting: str) -> None:
        """Work in ranks too, though it exchanges nothing."""

    def hang(self) -> None:
        print("begun", flush=True)  # noqa: T201 - to the test
        time.sleep(600)

    def hold_the_lock(self) -> None:
        print("begun", flush=True)  # noqa: T201 - to the test
        ctypes.PyDLL(None).sleep(600)

    def end_by(self, signum: int) -> None:
        os.kill(os.getpid(), signum)
        time.sleep(60)

    def say(self, words: str) -> None:
        print(words)  # noqa: T201 - as user code does
        print(words, file=sys.stderr)  # noqa: T201
        logging.getLogger("grader").warning(words)

    def leave(self, code: int) -> NoReturn:
        raise SystemExit(code)

    def fail(self) -> NoReturn:
        _divide()

    def refuse(self) -> NoReturn:
        raise ProtocolError("not like this")

    def fail_oddly(self) -> NoReturn:
        raise OddError(1, 2)

    def answer_oddly(self) -> Callable[[], None]:
        return lambda: None

    def pid(self) -> int:
        return os.getpid()


class OddError(Exception):
    """Cannot be unpickled: it takes two arguments and tells of one."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Slate:
    """Something written in shared memory."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def write(self, text: bytes) -> None:
        self.block[: len(text)] = text

    def read(self) -> bytes:
        return self.block[:].rstrip(b"\0")


class Unmakeable:
    """Cannot be made."""

    def __init__(self) -> None:
        _divide()


def _divide() -> NoReturn:
    raise ZeroDivisionError("no result")


def fail_to_set_up() -> NoReturn:
    raise OSError("no such core")


class Caller:
    """Calls back."""

    def collect(self, ask: Callable[[int], int], tell: Callable[[int], None], count: int) -> list[int]:
        """Tell each number before asking for what it comes to."""
        came = []
        for number in range(count):
            tell(number)
            came.append(ask(number))
        return came

    def tell(self, tell: Callable[[int], None], numbers: int) -> int:
        for number in range(numbers):
            tell(number)
        return numbers

    def keep_telling(self, tell: Callable[[int], None]) -> NoReturn:
        while True:
            tell(1)

    def ask_again(self, ask: Callable[[int], int]) -> int:
        with suppress(Exception):
            ask(1)
        return ask(2)

    def ask_and_die(self, ask: Callable[[int], int]) -> NoReturn:
        ask(1)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    def watch(self, block: Block, tell: Callable[[str], None]) -> str:
        """Say that this has begun, then wait for the block to be written."""
        tell("begun")
        while not block[0]:
            pass
        return "seen"

    def tell_at_last(self, block: Block, tell: Callable[[int], None]) -> str:
        """Wait until the block is written, tell a number, and return at once."""
        while not block[0]:
            time.sleep(0.001)
        tell(1)
        return "told"


class Meter:
    """Counts on a gauge."""

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge

    def count(self, ask: Callable[[int], int], numbers: int) -> None:
        for number in range(1, numbers + 1):
            self.gauge[0] = number
            ask(number)

    def count_until(self, notice: Notice, tell: Callable[[int], None]) -> None:
        """Count once, and tell nobody, until the notice is written."""
        del tell
        self.gauge[1] = 1
        while not notice[0]:
            pass

    def note(self, number: int) -> None:
        self.gauge[2] = number


class Crew:
    """A member of ranks that knows where it is, and can end in every way but well."""

    def __init__(self, start: int = 0, *, unmeetable: bool = False) -> None:
        self.sum = start
        self.place = (0, 0, "")
        self.unmeetable = unmeetable

    def join(self, rank: int, size: int, meeting: str) -> None:
        if self.unmeetable:
            raise ProtocolError(f"rank {rank} met nobody")
        self.place = (rank, size, meeting)

    def add(self, number: int) -> tuple[int, tuple[int, int, str], int]:
        self.sum += number
        return self.sum, self.place, os.getpid()

    def fare(self, rank: int, how: str, others: str) -> None:
        """Die or fail in one rank; the others wait for it, fail as those that lose a connection, or answer."""
        if self.place[0] == rank and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.place[0] == rank:
            raise ZeroDivisionError(f"in rank {rank}")
        if others == "fail":
            raise ConnectionError("reset by peer")
        time.sleep(600 if others == "wait" else 0)

    def fail(self) -> NoReturn:
        raise ZeroDivisionError(f"in rank {self.place[0]}")


def gone(pids: Iterable[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)
