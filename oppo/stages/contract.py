"""Checks of what enters the stages: prompts, models, and what models return.

They catch what would corrupt a batch, lose a rollout or make a run hang; :mod:`oppo.testing` checks whole models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from inspect import isroutine
from typing import SupportsFloat

import numpy as np

from oppo.errors import ConfigError, DataError, ProtocolError, shortened
from oppo.events import Batch, Finish, Prompt
from oppo.follower_protocols import name_of
from oppo.models import Capabilities, Follower, Piece, Policy, Trained, Trainer
from oppo.token_rewards import TokenRewards
from oppo.turns import MultiTurnPolicy

_HOW = "oppo.read_prompts makes prompts of a file, and oppo.PromptStream numbers them"


def require_prompt(item: object) -> Prompt:
    """Return ``item``, a prompt to generate for.

    Raises:
        DataError: it is something else, or its tokens are not int32 [P] with P of 1 or more.
    """
    if not isinstance(item, Prompt):
        raise DataError(f"a graph reads prompts as oppo.Prompt, token ids with a number; got {item!r:.60}. {_HOW}")
    tokens: object = item.tokens
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1 or not len(tokens):
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else f"{tokens!r:.60}"
        raise DataError(f"the tokens of prompt {item.admission} must be a NumPy array, int32 [1 or more], not {got}")
    return item


def require_new(prompts: Iterable[Prompt], in_flight: Iterable[int]) -> None:
    """Raise ``DataError`` if a rollout to be opened is in flight, or is opened twice."""
    seen = set(in_flight)
    for prompt in prompts:
        if prompt.rollout in seen:
            raise DataError(
                f"prompt {prompt.admission} came again while a rollout of that number is in flight: the number keys "
                "its tokens and its place in the batch, so no two prompts of a run may share one, nor an epoch repeat "
                f"those of another. {_HOW}, anew in each epoch"
            )
        seen.add(prompt.rollout)


def require_model(model: object, kind: str, members: Sequence[str]) -> None:
    """Raise ``ProtocolError`` if ``model`` lacks one of the members of the protocol ``kind`` that the stages use."""
    lacking = [name for name in members if not hasattr(model, name)]
    if not lacking:
        return
    name = getattr(model, "__name__", None)
    got = type(model).__name__ + (f" {name!r}" if isinstance(name, str) else "")
    wrap = "; a reward function goes into FunctionReward(function, decode)" if isroutine(model) else ""
    raise ProtocolError(
        f"expected the protocol {kind}, an object with {', '.join(members)}; got {got}, which has no "
        f"{', '.join(lacking)}{wrap}"
    )


def require_turns(policy: Policy) -> None:
    """Raise ``ConfigError`` unless a policy can go on with a response after a turn."""
    if not (policy.capabilities.turns and isinstance(policy, MultiTurnPolicy)):
        raise ConfigError(
            f"an environment answers turns, and {type(policy).__name__} cannot go on after one: expected a policy with "
            "open_turns() and capabilities.turns, such as oppo.hf.HfPolicy"
        )


def require_supports(followers: Sequence[Follower]) -> None:
    """Raise ``ConfigError`` if one is a policy whose tokens cannot be trained on."""
    for policy in followers:
        capabilities = getattr(policy, "capabilities", None)
        if isinstance(capabilities, Capabilities) and not capabilities.supports:
            raise ConfigError(
                f"{name_of(policy)} does not report from which ids it draws each token (capabilities.supports), "
                "and a trainer's log-probs are over these: let it draw from all ids (top_p = 1), or bound them in a "
                "way that it reports (top_k)"
            )


def require_count(results: object, rollouts: int, what: str) -> None:
    """Raise ``ProtocolError`` unless ``results`` has one item for each of so many rollouts."""
    if not (isinstance(results, Sized) and isinstance(results, Iterable)):
        raise ProtocolError(
            f"{what} must return a list, one item for each of {rollouts} rollouts; got {described(results)}"
        )
    if len(results) != rollouts:
        raise ProtocolError(f"{what} was asked for {rollouts} rollouts and answered for {len(results)}")


def require_piece(piece: Piece, rollout: int, oldest: int, newest: int, *, turns: bool = False) -> None:
    """Raise ``ProtocolError`` unless a piece can be the next of its rollout.

    Args:
        piece: as read from the policy.
        rollout: named in the error.
        oldest: version that made the token before it.
        newest: version of the policy's weights.
        turns: whether the end may come after the last token.
    """
    if not isinstance(piece, Piece):
        raise ProtocolError(f"rollout {rollout}: read() must return a Piece; got {described(piece)}")
    n, versions = len(piece.tokens), piece.versions
    if not n:
        if piece.state != "cut" and (piece.state == "live" or not turns):
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
    """Raise ``ProtocolError`` unless ``score`` is one number, or one for each response token, finite or not."""
    if isinstance(score, TokenRewards):
        require_per_token(score.rewards, finish, "token reward")
        return
    if not isinstance(score, SupportsFloat) or len(getattr(score, "shape", ())):
        raise ProtocolError(f"rollout {finish.rollout}: expected a number as its score, got {described(score)}")


def require_per_token(values: object, finish: Finish, what: str, *, last: bool = False) -> None:
    """Raise ``ProtocolError`` unless ``values`` are numbers, finite or not, one for each response token.

    Args:
        last: whether there may be one more, for the state after the last token.
    """
    n = len(finish.response)
    shapes = {(n,), (n + last,)}
    if not isinstance(values, np.ndarray) or values.shape not in shapes or values.dtype.kind not in "fiu":
        raise ProtocolError(
            f"rollout {finish.rollout}: expected {n} numbers as its {what}s, one for each response token, "
            f"got {described(values)}"
        )


def described(value: object) -> str:
    """Describe a value on a line of bounded length: arrays by shape and type."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}"
    return f"{type(value).__name__} {shortened(repr(value))}"


def require_trained(trained: Trained, trainer: Trainer, before: int, batch: Batch) -> None:
    """Raise ``ProtocolError`` unless an update made the next version and names only rollouts of its batch."""
    if not isinstance(trained, Trained):
        raise ProtocolError(f"update() of the trainer must return oppo.Trained(metrics, ...); got {described(trained)}")
    if trainer.version != before + 1:
        raise ProtocolError(f"after an update of version {before} the trainer's is {trainer.version}, not {before + 1}")
    strangers = sorted({*trained.nonfinite, *trained.skipped} - set(batch.rollouts))
    if strangers:
        raise ProtocolError(f"the update names rollouts {strangers} as not finite, which are not in its batch")


def require_published(trainer: Trainer, followers: Sequence[Follower]) -> None:
    """Raise ``ProtocolError`` unless every follower has the trainer's version."""
    if any(follower.version != trainer.version for follower in followers):
        versions = ", ".join(f"{name_of(follower)} has version {follower.version}" for follower in followers)
        raise ProtocolError(f"version {trainer.version} was published, but {versions}: the followers disagree")
