"""What models may answer, checked where they answer: a breach is named there, and nothing of it is trained.

Looked at is what would corrupt a batch, lose a rollout or make a run hang; :mod:`oppo.testing` checks all of the seam.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from inspect import isroutine
from typing import SupportsFloat

import numpy as np

from oppo.errors import ProtocolError, shortened
from oppo.events import Batch, Finish
from oppo.models import Follower, Piece, Trained, Trainer


def require_model(given: object, kind: str, members: Sequence[str]) -> None:
    """Raise unless an object has what the stages use of a model of this kind.

    Args:
        given: where a model was expected.
        kind: name of the protocol, of :mod:`oppo.models` or :mod:`oppo.admission`.
        members: of the protocol.

    Raises:
        ProtocolError: it lacks a member.
    """
    lacking = [name for name in members if not hasattr(given, name)]
    if not lacking:
        return
    name = getattr(given, "__name__", None)
    came = type(given).__name__ + (f" {name!r}" if isinstance(name, str) else "")
    wrap = "; a reward function goes into FunctionReward(function, decode)" if isroutine(given) else ""
    raise ProtocolError(
        f"expected the protocol {kind}, an object with {', '.join(members)}; got {came}, which has no "
        f"{', '.join(lacking)}{wrap}"
    )


def require_count(answers: object, asked: int, what: str) -> None:
    """Raise unless a model answered as often as it was asked.

    Raises:
        ProtocolError: it did not.
    """
    if not (isinstance(answers, Sized) and isinstance(answers, Iterable)):
        raise ProtocolError(
            f"{what} must return a list, one item for each of {asked} rollouts; got {described(answers)}"
        )
    if len(answers) != asked:
        raise ProtocolError(f"{what} was asked for {asked} rollouts and answered for {len(answers)}")


def require_piece(piece: Piece, rollout: int, oldest: int, newest: int) -> None:
    """Raise unless a piece can be the next of its rollout.

    Args:
        piece: as the policy answered it.
        rollout: for the sentence.
        oldest: version that made the token before it.
        newest: version of the policy's weights.

    Raises:
        ProtocolError: it cannot.
    """
    if not isinstance(piece, Piece):
        raise ProtocolError(f"rollout {rollout}: read() must return a Piece; got {described(piece)}")
    n, versions = len(piece.tokens), piece.versions
    if not n:
        if piece.state != "cut":
            raise ProtocolError(f"rollout {rollout}: a piece with no token says {piece.state!r}; only 'cut' may")
        return
    if piece.tokens.min() < 0:
        raise ProtocolError(f"rollout {rollout}: a piece holds the token id {piece.tokens.min()}; expected 0 or more")
    if piece.given:
        return
    lengths = (len(piece.logprobs), len(versions))
    if lengths != (n, n) or not piece.support.describes(n):
        raise ProtocolError(
            f"rollout {rollout}: a piece of {n} tokens has {lengths[0]} log-probs, {lengths[1]} versions and a support "
            f"of {len(piece.support.counts)} tokens; expected one of each for each token"
        )
    if not oldest <= versions[0] <= versions[-1] <= newest or (versions[1:] < versions[:-1]).any():
        raise ProtocolError(
            f"rollout {rollout}: the tokens of a piece were made by versions {np.unique(versions).tolist()}, lastly "
            f"{versions[-1]}, after {oldest}; versions never decrease, and the policy's is {newest}"
        )


def require_score(score: object, finish: Finish) -> None:
    """Raise unless ``score`` is one number, finite or not.

    Raises:
        ProtocolError: it is something else.
    """
    if not isinstance(score, SupportsFloat) or len(getattr(score, "shape", ())):
        raise ProtocolError(f"rollout {finish.rollout}: expected a number as its score, got {described(score)}")


def require_per_token(values: object, finish: Finish, what: str) -> None:
    """Raise unless ``values`` are numbers, finite or not, one for each response token.

    Raises:
        ProtocolError: they are not.
    """
    n = len(finish.response)
    if not isinstance(values, np.ndarray) or values.shape != (n,) or values.dtype.kind not in "fiu":
        raise ProtocolError(
            f"rollout {finish.rollout}: expected {n} numbers as its {what}s, one for each response token, "
            f"got {described(values)}"
        )


def described(value: object) -> str:
    """Return what a value is, on a line of bounded length: arrays by their shape."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}"
    return f"{type(value).__name__} {shortened(repr(value))}"


def require_trained(trained: Trained, trainer: Trainer, before: int, batch: Batch) -> None:
    """Raise unless an update made the next version, and speaks of rollouts of its batch only.

    Raises:
        ProtocolError: it did not.
    """
    if not isinstance(trained, Trained):
        raise ProtocolError(f"update() of the trainer must return oppo.Trained(metrics, ...); got {described(trained)}")
    if trainer.version != before + 1:
        raise ProtocolError(f"after an update of version {before} the trainer's is {trainer.version}, not {before + 1}")
    strangers = sorted({*trained.nonfinite, *trained.skipped} - set(batch.rollouts))
    if strangers:
        raise ProtocolError(f"the update names rollouts {strangers} as not finite, which are not in its batch")


def require_published(trainer: Trainer, followers: Sequence[Follower]) -> None:
    """Raise unless every follower has the trainer's version.

    Raises:
        ProtocolError: one has not.
    """
    if any(follower.version != trainer.version for follower in followers):
        raise ProtocolError(
            f"version {trainer.version} was published, but {versions_of(followers)}: the followers disagree"
        )


def versions_of(followers: Sequence[Follower]) -> str:
    """Return who has which version."""
    return ", ".join(f"{type(follower).__name__} has version {follower.version}" for follower in followers)
