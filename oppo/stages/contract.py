"""Checks of what enters the stages: prompts, models, and what models return.

They catch what would corrupt a batch, lose a rollout or make a run hang; :mod:`oppo.testing` checks whole models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field
from inspect import isroutine
from typing import Final, cast, get_args

import numpy as np

from oppo.errors import ConfigError, DataError, ProtocolError
from oppo.events import Batch, Defer, Drop, Finish, Prompt, RolloutEvent, Support, described
from oppo.graph import Sender
from oppo.models import Follower, Piece, PieceState, Policy, Trainer
from oppo.turns import MultiTurnPolicy
from oppo.weight_sync import name_of

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


def require_turns(policy: Policy) -> MultiTurnPolicy:
    """Return a policy that can go on with a response after a turn; raise ``ConfigError`` for another one."""
    if not policy.capabilities.turns:
        raise ConfigError(
            f"an environment answers turns, and {type(policy).__name__} cannot go on after one: expected a policy with "
            "capabilities.turns, such as oppo.hf.HfPolicy"
        )
    require_model(policy, "MultiTurnPolicy", ("open_turns",))
    return cast("MultiTurnPolicy", policy)


def require_count(results: object, rollouts: int, what: str) -> None:
    """Raise ``ProtocolError`` unless ``results`` is a sequence with one item for each rollout."""
    listed = isinstance(results, np.ndarray | Sequence) and not isinstance(results, str | bytes)
    if not isinstance(results, Sized) or not listed:
        raise ProtocolError(
            f"{what} must return a list, one item for each of {rollouts} rollouts; got {described(results)}"
        )
    if len(results) != rollouts:
        raise ProtocolError(f"{what} was asked for {rollouts} rollouts and answered for {len(results)}")


def require_piece(piece: Piece, policy: Policy, rollout: int, limit: int, oldest: int, *, turns: bool = False) -> None:
    """Raise ``ProtocolError`` unless a piece can be the next of its rollout.

    Args:
        piece: as read.
        policy: of which it was read.
        rollout: named in the error.
        limit: tokens that were asked for.
        oldest: version that made the token before it.
        turns: whether the end may come after the last token.
    """
    if fault := _fault_of(piece, limit, oldest, policy.version, turns):
        raise ProtocolError(f"rollout {rollout}: read({limit}) of {type(policy).__name__} returned {fault}")


_ROUNDING: Final = 1e-3
"""By which a log-prob may exceed 0."""


def _fault_of(piece: object, limit: int, oldest: int, newest: int, turns: bool) -> str:
    if not isinstance(piece, Piece):
        return f"{described(piece)}; expected a Piece"
    if piece.state not in get_args(PieceState):
        return f"a piece whose state is {piece.state!r}; expected one of {', '.join(get_args(PieceState))}"
    columns = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
    for name, kind in columns.items():
        column: object = getattr(piece, name)
        if not isinstance(column, np.ndarray) or column.dtype != kind or column.ndim != 1:
            return f"a piece whose {name} are {described(column)}; expected {kind.__name__} [n]"
    n, versions = len(piece.tokens), piece.versions
    if n > limit:
        return f"a piece of {n} tokens; expected at most {limit}"
    if not n:
        ends = piece.state == "cut" or (turns and piece.state != "live")
        return "" if ends else f"a piece with no token that says {piece.state!r}; only 'cut' may"
    if piece.tokens.min() < 0:
        return f"a piece that holds the token id {piece.tokens.min()}; expected 0 or more"
    if piece.given:
        return ""
    lengths = (len(piece.logprobs), len(versions))
    support: object = piece.support
    if not isinstance(support, Support):
        return f"a piece whose support is {described(support)}; expected a Support"
    if lengths != (n, n) or not support.describes(n):
        return (
            f"a piece of {n} tokens with {lengths[0]} log-probs, {lengths[1]} versions and a support of "
            f"{len(support.counts)} tokens; expected one of each for each token"
        )
    if (piece.logprobs > _ROUNDING).any():
        return f"a piece with a log-prob of {piece.logprobs.max()}; expected at most 0, the log of a probability"
    if not oldest <= versions[0] <= versions[-1] <= newest or (versions[1:] < versions[:-1]).any():
        return (
            f"a piece whose tokens were made by versions {np.unique(versions).tolist()}, lastly {versions[-1]}, after "
            f"{oldest}; versions never decrease, and the policy's is {newest}"
        )
    return ""


@dataclass(slots=True, eq=False)
class Ended:
    """The rollouts that ended in a step, or were deferred; recorded by the stage that generates.

    Attributes:
        out: gets the events that it notes.
    """

    out: Sender[RolloutEvent]
    ended: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)

    async def send(self, event: RolloutEvent, /) -> None:
        """Note an event and send it."""
        if isinstance(event, Finish | Drop):
            self.ended.append(event.rollout)
        elif isinstance(event, Defer):
            self.deferred.append(event.rollout)
        await self.out.send(event)

    def fault_of(self, batch: Batch | None) -> str:
        """Return the fault of a step's batch that does not have each of these rollouts once, or among its drops."""
        trained, drops, deferred = ((), (), ()) if batch is None else (batch.rollouts, batch.dropped, batch.deferred)
        for what, have, came in (
            ("ended", (*trained, *(drop.rollout for drop in drops)), self.ended),
            ("were deferred", tuple(event.rollout for event in deferred), self.deferred),
        ):
            held, wanted = Counter(have), Counter(came)
            faults = {
                "leaves out": sorted(wanted - held),
                "repeats": sorted(rollout for rollout, count in held.items() if count > 1),
                "holds, of another step,": sorted(held.keys() - wanted.keys()),
            }
            if words := [f"{fault} rollouts {rollouts}" for fault, rollouts in faults.items() if rollouts]:
                return (
                    f"{', and '.join(words)}: expected each of the {len(came)} rollouts that {what} in this step, "
                    "once; a response that is not to be trained is a Drop in batch.dropped"
                )
        return ""


def require_synced(trainer: Trainer, followers: Sequence[Follower]) -> None:
    """Raise ``ProtocolError`` unless every follower has the trainer's version."""
    if any(follower.version != trainer.version for follower in followers):
        versions = ", ".join(f"{name_of(follower)} has version {follower.version}" for follower in followers)
        raise ProtocolError(f"version {trainer.version} was published, but {versions}: the followers disagree")
