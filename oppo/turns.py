"""Turns: a response that goes on after a token that would end it, with what an environment answers.

A tool's result, a user's reply and a game's next state are answers. Their tokens are read by every model, count against
the length limit, and are never trained (:class:`oppo.events.Given`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from oppo.events import Drop, IntArray, Prompt, Response
from oppo.models import Decode, Policy

EnvironmentState: TypeAlias = object
"""What an environment remembers of a conversation: JSON values, since checkpoints hold it."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A finished turn of a response.

    Attributes:
        prompt: of the rollout.
        number: how many turns of the rollout were answered before.
        tokens: int32 [n], of this turn, the one that ended it included.
        state: what the answer to the turn before returned; ``None`` at the first.
    """

    prompt: Prompt
    number: int
    tokens: IntArray
    state: EnvironmentState = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What the policy reads after a turn before it goes on.

    Attributes:
        tokens: int32 [n], at least one.
        state: given back with the next turn; it is in checkpoints, so it holds JSON values.
    """

    tokens: IntArray
    state: EnvironmentState = None


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a turn, for the observers of a run.

    Attributes:
        rollout: whose turn it was.
        turn: how many turns of it were answered before.
        tokens: of the answer; 0 where the response ended with the turn.
        seconds: that the environment took.
        error: why there was no answer; empty if there was one, or none by choice.
    """

    rollout: int
    turn: int
    tokens: int
    seconds: float
    error: str = ""


class Environment(Protocol):
    """Answers turns; one that is an async context manager is open as long as the run."""

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        """Return what the policy reads next, ``None`` to end the response, or a ``Drop`` with the reason.

        Calls of several rollouts overlap, and a call goes on when a step is cut. One that is unanswered when a run is
        killed is made again, and so are those of the steps that a resumed run repeats.
        """


class TurnDecode(Decode, Protocol):
    """A decode whose response has turns: a token of ``stop``, or a stop string, ends a turn.

    A response that ends with its turn, whose tokens may have been read by then, ends with a piece of no tokens. It ends
    at its length limit as ever.
    """

    async def turn(self) -> IntArray | None:
        """Return the tokens of the turn, int32 [n], once it has ended; ``None`` if decoding stops before.

        Cancel-safe: a cancelled call has changed nothing.
        """

    def proceed(self, given: IntArray) -> bool:
        """Go on after a turn: read ``given``, int32 [n], then decode.

        A response without room for these and one token more ends with its turn instead, with reason ``length``.

        Returns:
            False once decoding has stopped: nothing has happened then.
        """

    def finish(self) -> bool:
        """End the response with its turn; return as :meth:`proceed` does."""


@runtime_checkable
class MultiTurnPolicy(Policy, Protocol):
    """A policy that goes on after a turn with the keys and values that it has."""

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> Sequence[TurnDecode]:
        """Make a decode with turns for each, as ``open`` makes decodes without.

        While a rollout waits for an answer the others are decoded; it counts as live, and the cut parks it. In exact
        mode decoding waits with it, so that the answer comes in at a decode step that does not depend on timing.
        """


def turn_so_far(response: Response) -> list[int]:
    """Return the tokens of the present turn: those after the last answer."""
    given = np.flatnonzero(~response.sampled)
    start = int(given[-1]) + 1 if len(given) else 0
    return [int(token) for token in response.tokens[start:]]


def turns_answered(response: Response) -> int:
    """Return how many turns of a response were answered.

    Example:
        >>> prompt = Prompt(0, 0, np.array([1], np.int32))
        >>> turns_answered(Response.empty(prompt))
        0
    """
    return int((~response.sampled & np.concatenate(([True], response.sampled[:-1]))).sum())
