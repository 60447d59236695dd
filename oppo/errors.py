"""Every error that oppo raises on purpose.

::

    OppoError
    ├── GraphError        a graph is wired wrong: raised while it is built, never while it runs
    ├── DeadlockError     every task waits and nothing can wake one: carries the channel table
    ├── HangError         nothing has moved for too long in real time: says who waits for whom
    ├── ProtocolError     a model or a stage broke the contract of its seam
    ├── AdmissionError    an admission policy asks for the impossible
    ├── ConfigError       a setting is unknown, missing or out of range
    ├── DataError         a prompt file or a prompt cannot be used
    ├── RewardError       a reward function failed or returned something that is no score
    ├── CheckpointError   a checkpoint cannot be written, is damaged, or does not fit the run
    └── ModelError
        ├── ModelRefused  a model cannot be served exactly: raised at load, names the reason
        ├── ModelDiverged updates went on being not finite: names the rollouts and where the batch lies
        └── ModelLost     a model's thread or process is gone
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class OppoError(Exception):
    """The root of every error that oppo raises on purpose."""


class GraphError(OppoError):
    """A graph is wired wrong; the message says which stage, what was expected and what came."""


class DeadlockError(OppoError):
    """Every task waits and nothing can wake one; the message holds the channel table."""


class HangError(OppoError):
    """Nothing in a run has moved for longer than allowed; the message says who waits for whom."""


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


class ModelError(OppoError):
    """A model cannot do what it was asked to."""


class ModelRefused(ModelError):  # noqa: N818 - it says what happened
    """A model cannot be served exactly; raised at load, before anything is trained."""


class ModelDiverged(ModelError):  # noqa: N818 - it says what happened
    """Loss, gradient or values were not finite for too many updates in a row; raised before the weights go anywhere."""


class ModelLost(ModelError):  # noqa: N818 - it says what happened
    """The thread or process that hosts a model is gone."""


@contextmanager
def as_itself() -> Iterator[None]:
    """Let the first error of a task group surface as itself; the others become notes of it."""
    try:
        yield
    except BaseExceptionGroup as group:
        first, *others = leaves(group)
        for other in others:
            first.add_note(f"and then {type(other).__name__}: {other}")
        raise first from first.__cause__


@contextmanager
def noted(sentence: str) -> Iterator[None]:
    """Add ``sentence`` to an error of the body, as a note."""
    try:
        yield
    except Exception as error:
        error.add_note(sentence)
        raise


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors of a group, however deep, in order; an error that is no group is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for member in error.exceptions for leaf in leaves(member)]
    return [error]
