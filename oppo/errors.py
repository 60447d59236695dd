"""Every error that oppo raises on purpose.

::

    OppoError
    ├── GraphError        a graph is wired wrong: raised while it is built, never while it runs
    ├── DeadlockError     every task waits and nothing can wake one: carries the channel table
    ├── HangError         nothing moved for too long in real time: lists what waits for what
    ├── ProtocolError     a model or a stage broke the contract of its seam
    ├── AdmissionError    an admission policy asks for the impossible
    ├── ConfigError       a setting is unknown, missing or out of range
    ├── DataError         a prompt file or a prompt cannot be used
    ├── RewardError       a reward function failed or returned something that is no score
    ├── CheckpointError   a checkpoint cannot be written, is damaged, or does not fit the run
    ├── NothingTrained    step after step, or a whole run, trained no rollout: counts the drops by reason
    └── ModelError
        ├── ModelRefused  a model cannot be served exactly: raised at load, names the reason
        ├── ModelDiverged update after update was not finite: names the rollouts and the saved batch
        └── ModelLost     a model's thread or process is gone
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import anyio


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


@contextmanager
def as_itself() -> Iterator[None]:
    """Raise the first error of a task group as itself; the others become notes of it."""
    try:
        yield
    except BaseExceptionGroup as group:
        first, *others = leaves(group)
        note_others(first, others)
        raise first from first.__cause__


@contextmanager
def noted(sentence: str) -> Iterator[None]:
    """Add ``sentence`` as a note to an error of the body, or to the error that a cancellation from within becomes.

    Raises:
        ProtocolError: the body was cancelled, though neither its scopes nor its task were.
    """
    try:
        with not_cancelled_from_within():
            yield
    except Exception as error:
        error.add_note(sentence)
        raise


@contextmanager
def not_cancelled_from_within() -> Iterator[None]:
    """Turn a ``CancelledError`` that the body raises on its own into an error, as it would look like an orderly end.

    A ``KeyboardInterrupt`` during a cancellation counts as that cancellation.

    Raises:
        ProtocolError: the body was cancelled, though neither its scopes nor its task were.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise ProtocolError(
            "a CancelledError was raised, and nothing had cancelled this call: an error was expected, or a result; "
            "catch the cancellation of tasks where they are awaited"
        ) from error
    except KeyboardInterrupt as error:
        if is_cancelled():
            raise asyncio.CancelledError from error
        raise


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
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return anyio.current_effective_deadline() == -math.inf or bool(task and task.cancelling())


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
