"""Every error that oppo raises on purpose, and what becomes of the errors of user code."""

from __future__ import annotations

import asyncio
import ctypes
import difflib
import inspect
import math
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from os import _exit
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

import anyio

T = TypeVar("T")

_IN_USER_CODE: Final = ContextVar("oppo.errors.user_code", default=False)

_OURS: Final = str(Path(__file__).parent)
_LIBRARIES: Final = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_CATCHES: Final = 100
"""Cancellations that a call may catch and go on after, before it is dropped: each await of its clean-up may be one."""


class OppoError(Exception):
    """The root of every error that oppo raises on purpose."""


class GraphError(OppoError):
    """A graph is wired wrong; the message names the stage, what was expected and what came."""


class DeadlockError(OppoError):
    """Every task waits and nothing can wake one; the message holds the channel table."""


class HangError(OppoError):
    """Nothing in a run moved for longer than allowed; the message lists what waits for what."""


class ProtocolError(OppoError):
    """A model or a stage broke the contract of its seam."""


class AdmissionError(OppoError):
    """An admission policy was built with, or asked for, something impossible."""


class ConfigError(OppoError):
    """A setting is unknown, missing or out of range."""


class DataError(OppoError):
    """A prompt file, or one prompt in it, cannot be used."""


class RewardError(OppoError):
    """A reward function failed, or returned something that is no score."""


class CheckpointError(OppoError):
    """A checkpoint cannot be written, is damaged, or is of another run."""


class RunComplete(OppoError):  # noqa: N818 - it says what happened
    """A run that is resumed has made all its steps: nothing is left to do."""


class NothingTrained(OppoError):  # noqa: N818 - it says what happened
    """Step after step, or a whole run, trained no rollout; the message counts the drops by reason."""


class ModelError(OppoError):
    """A model cannot do what was requested."""


class ModelRefused(ModelError):  # noqa: N818 - it says what happened
    """A model cannot be served exactly; raised at load, before anything is trained."""


class ModelDiverged(ModelError):  # noqa: N818 - it says what happened
    """Loss, gradient or values were not finite for too many updates in a row; raised before the weights go anywhere."""


class ModelLost(ModelError):  # noqa: N818 - it says what happened
    """The thread or process that hosts a model is gone."""


class SessionsLost(ModelError):  # noqa: N818 - it says what happened
    """A scorer has lost its sessions, and works again; the stage sends it their rollouts again.

    A place raises it once for each instance that it had to make anew, instead of making the call. A scorer that keeps
    its sessions on a server may raise it too.
    """


@contextmanager
def as_itself() -> Iterator[None]:
    """Raise the first error of a task group as itself; the others become notes of it."""
    try:
        yield
    except BaseExceptionGroup as group:
        first, *others = leaves(group)
        note_others(first, others)
        raise first from first.__cause__


class _Boundary:
    # A class, not a generator: the reader of each live rollout is in one, and the collector visits all that it holds.
    __slots__ = ("_outside", "_task")

    passing: type[Exception] | tuple[()] = Exception

    def __enter__(self) -> None:
        self._task = _current_task()
        self._outside = _IN_USER_CODE.get()
        _IN_USER_CODE.set(True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if error is None:
                return
            if not isinstance(error, self.passing) and not self._is_from_outside(error):
                refusal = self.refusal(worded(error))
                self.note(refusal)
                raise refusal from error
            if isinstance(error, Exception):
                self.note(error)
        finally:
            _IN_USER_CODE.set(self._outside)

    def _is_from_outside(self, error: BaseException) -> bool:
        if _is_of_a_signal(error):
            if is_cancelled():
                raise asyncio.CancelledError from error
            return True
        if isinstance(error, asyncio.CancelledError):
            return is_cancelled()
        return isinstance(error, GeneratorExit) and self._task is not _current_task()

    def refusal(self, words: str) -> Exception:
        raise NotImplementedError

    def note(self, error: Exception) -> None:
        pass


class contained(_Boundary):  # noqa: N801 - it is used as a function
    """Raise ``refuse(words)`` instead of anything that the body raises: the boundary to user code.

    ``sys.exit()``, in :func:`exits_told` ``os._exit()``, an ``exit`` of a test framework and cancellations of its own
    are included. Interruptions from outside pass: a cancellation, Ctrl-C, which becomes the cancellation if there is
    one, and the end of a coroutine that is closed.

    Args:
        refuse: returns the error; the words are those of :func:`worded`.
        passing: errors that pass too.
    """

    __slots__ = ("_refuse", "passing")

    def __init__(self, refuse: Callable[[str], Exception], *, passing: type[Exception] | tuple[()] = ()) -> None:
        self._refuse = refuse
        self.passing = passing

    def refusal(self, words: str) -> Exception:
        return self._refuse(words)


class errors_only(_Boundary):  # noqa: N801 - likewise
    """Raise a ``ProtocolError`` in place of an error of the body that is no ``Exception``; see :class:`contained`.

    Args:
        whose: how its message begins.
    """

    __slots__ = ("_whose",)

    def __init__(self, whose: str = "") -> None:
        self._whose = whose

    def refusal(self, words: str) -> ProtocolError:
        return ProtocolError(
            f"{self._whose}a result or an Exception was expected; got {words}, and nothing had cancelled this call: "
            "catch the cancellation of tasks where they are awaited, and derive errors from Exception"
        )


class noted(errors_only):  # noqa: N801 - likewise
    """Add ``message`` as a note to an error of the body, after :class:`errors_only`."""

    __slots__ = ("_message",)

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def note(self, error: Exception) -> None:
        error.add_note(self._message)


_BLAME: Final = "raised by "


class blaming(errors_only):  # noqa: N801 - likewise
    """Do as :class:`noted` around user code; the note says that ``what`` raised the error, and at which line.

    An error of this package that did not pass through user code has no such note, and none has two.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: ")
        self._what = what

    def note(self, error: Exception) -> None:
        place = place_of(error)
        blamed = any(note.startswith(_BLAME) for note in getattr(error, "__notes__", ()))
        if not blamed and (place or not isinstance(error, OppoError)):
            error.add_note(f"{_BLAME}{self._what}{place}")


@contextmanager
def exits_told() -> Iterator[None]:
    """Let no ``os._exit`` of this process end the body without a word, or with success.

    In user code, see :func:`contained`, it raises ``SystemExit``. Elsewhere it writes to standard error where it was
    called, and never exits with code 0. In a process that was forked it does what it always does.
    """
    with _TELLING:
        _TOLD.append(os.getpid())
        os._exit = _tell
    try:
        yield
    finally:
        with _TELLING:  # bodies in several threads need not end in order
            _TOLD.pop()
            if not _TOLD:
                os._exit = _exit


_TELLING: Final = threading.Lock()
_TOLD: Final[list[int]] = []  # the process of each body


def _tell(status: int) -> NoReturn:
    if os.getpid() not in _TOLD or sys._getframe(1).f_code.co_filename.startswith(_OURS):  # noqa: SLF001
        _exit(status)
    if _IN_USER_CODE.get():
        raise SystemExit(f"os._exit({status})")
    try:
        where = place_among(traceback.extract_stack()[:-1], foreign=True)
        sys.stderr.write(f"error: the program was left by an os._exit({status}) that nothing asked for{where}\n")
        sys.stderr.flush()
    finally:  # there may be no standard error any more
        _exit(status or 1)


def _is_of_a_signal(error: BaseException) -> bool:
    # Python's own handler leaves no trace of itself; one of anybody else, of any of these signals, is in it.
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False  # other threads get no signal
    # where SIGINT is ignored, as in the background of a shell, another one comes
    handlers: list[Any] = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    if handlers[0] is signal.default_int_handler:
        return True
    own = {getattr(getattr(each, "func", each), "__code__", None) for each in handlers}  # asyncio's is a partial
    return any(frame.f_code in own for frame, _ in traceback.walk_tb(error.__traceback__))


def promised(call: Awaitable[T], what: str) -> Awaitable[T]:
    """Return what a method of a model or stage of the user's returned, if it can be awaited.

    Raises:
        ProtocolError: it cannot.
    """
    given: object = call
    if not inspect.isawaitable(given):
        raise ProtocolError(f"{what} must be `async def`, or return what can be awaited; it returned {shown(given)}")
    return call


@types.coroutine
def awaited(call: Awaitable[T]) -> Generator[Any, Any, T]:
    """Await a call of user code, which can neither cancel this task nor go on for ever after it was cancelled.

    It is dropped, unfinished and for good, when it has caught a cancellation from outside many times.

    Raises:
        CancelledError: of the call's own: :func:`contained` tells it from one that comes from outside.
    """
    task, steps = asyncio.current_task(), call.__await__()
    thrown: BaseException | None = None
    caught = 0
    while True:
        before = task.cancelling() if task else 0
        waits, ended, returned = None, None, False
        try:
            waits = next(steps) if thrown is None else steps.throw(thrown)
        except StopIteration as end:  # kept, it would be a cycle with this frame, which holds what the call was given
            result: T
            returned, result = True, end.value
        except BaseException as error:  # noqa: BLE001 - raised again below
            ended = error
        own = task.cancelling() - before if task else 0
        if task and own > 0:
            for _ in range(own):
                task.uncancel()
            if returned or ended is not None:
                with suppress(asyncio.CancelledError):  # before Python 3.13 it comes, in spite of that
                    yield
                raise asyncio.CancelledError from ended
        if returned:
            return result
        if ended is not None:
            raise ended
        # Where a timeout of its own has ended, the call waits outside of that by now.
        still = isinstance(thrown, asyncio.CancelledError) and anyio.current_effective_deadline() == -math.inf
        caught = caught + 1 if still else 0
        if thrown is not None and caught > _CATCHES:
            # It would catch the end of its life too: where the collector finds it, in any thread, it might loop.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(steps))
            raise thrown
        try:
            yield waits
            thrown = None
        except BaseException as error:  # noqa: BLE001 - thrown into the call
            thrown = error


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop, which must be asyncio's or a compatible one such as uvloop's.

    Raises:
        OppoError: another one runs, trio's for example.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise OppoError(
            "oppo runs on asyncio, uvloop included, and no event loop of asyncio is running here: run the program with "
            "anyio.run(main) or asyncio.run(main), not under trio"
        ) from None


def is_cancelled() -> bool:
    """Return whether a cancel scope around the current task, or the task itself, has been cancelled."""
    task = _current_task()
    return task is not None and (anyio.current_effective_deadline() == -math.inf or bool(task.cancelling()))


@contextmanager
def behind(error: BaseException | None, doing: str) -> Iterator[None]:
    """Turn an error of the body into a note of ``error``, which came before and must not be hidden.

    Args:
        error: the one in flight; if ``None``, an error of the body is raised.
        doing: what the body does, for example ``closing the log``.
    """
    try:
        yield
    except Exception as later:
        if error is None:
            raise
        error.add_note(f"and then, while {doing}, {type(later).__name__}: {later}")


def note_others(first: BaseException, others: Iterable[BaseException]) -> None:
    """Add a note to ``first`` for each kind of error in ``others``: the first of the kind, and how many more.

    Errors whose messages differ in numbers only, such as those of rollouts, are of one kind. The last note of an error,
    which says where it arose, is quoted.
    """
    kinds: dict[str, list[BaseException]] = {}
    for other in others:
        kinds.setdefault(_kind(other), []).append(other)
    if alike := kinds.pop(_kind(first), []):
        first.add_note(f"and {len(alike)} more like it")
    for one, *more in kinds.values():
        places = "".join(f" ({note})" for note in getattr(one, "__notes__", [])[-1:])
        count = f", and {len(more)} more like it" if more else ""
        first.add_note(f"and then {type(one).__name__}: {one}{places}{count}")


def _kind(error: BaseException) -> str:
    return re.sub(r"\d+", "", f"{type(error).__name__}: {error}")


def one_line(error: BaseException, limit: int = 240) -> str:
    """Return the type and message of an error as one line of about ``limit`` characters."""
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":"), limit)


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group, nested ones included, in order; any other error is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in leaves(member)]
    return [error]


def shortened(text: str, limit: int = 2000) -> str:
    """Return at most ``limit`` characters of ``text``, escaped for UTF-8, and the full length if that is more."""
    kept = text[:limit].encode("utf-8", "backslashreplace").decode("utf-8")
    return kept if len(text) <= limit else f"{kept}... ({len(text)} characters)"


def worded(error: BaseException) -> str:
    """Return an error and its place in the user's code, as in ``KeyError: 'gold' at /home/me/r.py:3 in f``.

    An exception group is described by its first error, and an error of a private class by the public one that it is.
    The length is bounded, whatever the message.
    """
    first, *others = leaves(error)
    text = _printed(first, str)
    message = f": {shortened(text)}" if text else ""
    more = f", and {len(others)} more" if others else ""
    name = next(kind.__name__ for kind in type(first).__mro__ if not kind.__name__.startswith("_"))
    return f"{name}{message}{more}{place_of(first)}"


def counted(count: int, noun: str, several: str = "") -> str:
    """Return a count as a person writes it: ``1 response``, ``1,024 responses``."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def enumerated(numbers: Sequence[int]) -> str:
    """Return the first eight numbers, and how many more there are."""
    first, more = ", ".join(map(str, numbers[:8])), len(numbers) - 8
    return f"{first} and {more:,} more" if more > 0 else first


def shown(value: object) -> str:
    """Return a value's ``repr`` and type, in bounded length, even if its ``__repr__`` fails."""
    return f"{shortened(_printed(value, repr), 200)} ({type(value).__name__})"


def in_toml(value: object) -> str:
    """Return a setting's value as a file has it: ``true`` for True; else its ``repr``."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


_UNTELLING: Final = re.compile(r"\boppo_user_\w+?_[0-9a-f]{16}\.| at 0x[0-9a-f]+\b")  # of a default `repr`


def _printed(value: object, how: Callable[[object], str]) -> str:
    try:
        return how(value) if how is str or isinstance(value, str | bytes) else _UNTELLING.sub("", how(value))
    except BaseException as failure:  # the boundary to the user's code: its value cannot even be printed
        if _is_of_a_signal(failure):
            raise
        return f"({type(failure).__name__} in its __{how.__name__}__)"


def place_of(error: BaseException) -> str:
    """Return the last traceback entry in the user's code, or in a library without one, as `` at file:line in f``.

    It is empty for an error that this package raised without the user's code, and for a file that cannot be parsed: the
    words of a ``SyntaxError`` have the place.
    """
    if isinstance(error, SyntaxError):
        return ""
    return place_among(traceback.extract_tb(error.__traceback__), foreign=not isinstance(error, OppoError))


def place_among(frames: Sequence[traceback.FrameSummary], *, foreign: bool = False) -> str:
    """Return the last frame in the user's code as :func:`place_of`, or if ``foreign`` the last one in a library."""
    made = ("<string>", "__init__")  # of a dataclass
    others = [each for each in frames if not each.filename.startswith(_OURS) and (each.filename, each.name) != made]
    theirs = [frame for frame in others if not frame.filename.startswith((*_LIBRARIES, "<frozen"))]
    last = next(reversed(theirs or others * foreign), None)
    return "" if last is None else f" at {last.filename}:{last.lineno} in {last.name}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` with the known name that is most like ``name``; empty if none is.

    Example:
        >>> did_you_mean("gpro", ["ppo", "gspo", "grpo"])
        " (did you mean 'grpo'?)"
    """
    near = difflib.get_close_matches(name.lower(), known, n=5, cutoff=0.5)
    return f" (did you mean {min(near, key=partial(_edits, name.lower()))!r}?)" if near else ""


def _edits(one: str, other: str) -> int:
    # letters added, left out or changed, and pairs of neighbours swapped
    before, last, row = list[int](), list[int](), list(range(len(other) + 1))
    for at, letter in enumerate(one):
        before, last, row = last, row, [at + 1]
        for to, wanted in enumerate(other):
            row.append(min(last[to] + (letter != wanted), last[to + 1] + 1, row[to] + 1))
            if at and to and letter == other[to - 1] and wanted == one[at - 1]:
                row[-1] = min(row[-1], before[to - 1] + 1)
    return row[-1]


def did_you_mean_path(path: Path) -> str:
    """Return the same with what lies beside a path that is not there; nothing where its folder is not there either."""
    with suppress(OSError):
        names = [each.name for each in path.parent.iterdir()]
        return "" if path.name in names else did_you_mean(path.name, names)
    return ""
