"""Where a response ends, and turns: a response goes on after a token that would end it, with an environment's answer.

A tool's result, a user's reply and a game's next state are answers. Their tokens are read by every model, count against
the length limit, and are never trained (:class:`oppo.events.ToolTokens`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from oppo.errors import ProtocolError
from oppo.events import AnsweredTurn, Chunk, Drop, Finish, FinishReason, IntArray, Prompt, Response
from oppo.limits import UNLIMITED, TurnLimit
from oppo.models import Decode, Detokenize, Policy, Sampling

EnvironmentState: TypeAlias = object
"""An environment's state of a conversation: JSON values, since checkpoints hold it."""


async def _unread() -> Sequence[Chunk]:
    raise ProtocolError("turns are read in a run only: give the Turn what it has said")


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A finished turn of a response.

    Attributes:
        prompt: of the rollout.
        number: how many turns of the rollout were answered before.
        tokens: int32 [n], of this turn, the one that ended it included, and those with which it was interrupted.
        state: what the answer to the turn before returned; ``None`` at the first.
        said: returns all turns of the response so far, this one included, with their log-probs. It waits until they are
            read, for as long as the scorers let their reader wait.
        length: tokens of the response so far, of this turn and of answers too.
    """

    prompt: Prompt
    number: int
    tokens: IntArray
    state: EnvironmentState = None
    said: Callable[[], Awaitable[Sequence[Chunk]]] = _unread
    length: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The tool tokens that the policy reads after a turn before it goes on, and what the turn earned.

    Attributes:
        tokens: int32 [n]; none: the response ends with the turn, which then has a reward, a key or a segment.
        state: given back with the next turn; it is in checkpoints, so it holds JSON values.
        calls: of tools that the turn made.
        failures: how many of them failed.
        seconds: that each call took, by the name of its tool.
        said: the messages that the tokens render, as chat templates read them: what a reward sees of them.
        reward: of the turn, a finite number; ``None``: the environment gives none.
        key: names the state in which the policy took the turn, for ``credit = "state"``; empty: it has no name.
        limit: of the next turn.
        within: the turn, which its limit has interrupted, goes on with these tokens: nothing was answered yet.
        segment: int32 [P], the prompt of the next segment of the rollout, behind a response that ends with the turn.
    """

    tokens: IntArray
    state: EnvironmentState = None
    calls: int = 0
    failures: int = 0
    seconds: Sequence[tuple[str, float]] = ()
    said: Sequence[Mapping[str, object]] = ()
    reward: float | None = None
    key: str = ""
    limit: TurnLimit = UNLIMITED
    within: bool = False
    segment: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of a turn, for the observers of a run.

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
    """Answers turns; one that is an async context manager is open as long as the run.

    One that has ``forget(prompt, state)`` is called with the prompt of each rollout whose response has ended, or begins
    anew, and with the state of its last answer, ``None`` without one. One that has ``release(prompt)`` is called when
    nothing more is asked of the rollout: it was trained, dropped or evaluated, begins anew, or the run ends. One that
    has ``follow(prompt, number, turn)`` is called when tokens of a rollout were read, with how many turns were answered
    before and a function that returns the tokens of the present one so far.

    One that has ``max_segments``, above 1, may have a rollout go on in further responses (``Answer.segment``), each a
    branch with the number of the segment. They end alike: with the reason, or the drop, of the last one.
    """

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        """Return what the policy reads next, ``None`` to end the response, or a ``Drop`` with the reason.

        Calls of several rollouts overlap, and a call goes on when a step is cut. One that is unanswered when a run is
        killed is made again, and so are the calls of the steps that a resumed run repeats.
        """


class Branching(ABC):
    """What an :class:`Environment` inherits that begins further conversations: of subagents, or after a summary.

    Each is a response of its own, a branch, trained in the unit of the first, which goes on as long as it may branch.

    Attributes:
        single: why there are no branches; empty where there may be. The stage that generates sets it.
    """

    single: str

    @abstractmethod
    async def branch(self, holds: Callable[[int], bool]) -> Prompt:
        """Return the prompt of the next branch, once there is one, with its number; cancel-safe.

        Args:
            holds: whether the unit of an admission is decoded now.
        """

    @abstractmethod
    def refuse(self, branch: Prompt) -> None:
        """Take back a branch whose unit was complete when it came."""

    @abstractmethod
    def expect(self, prompt: Prompt) -> None:
        """Note that a rollout is opened; a branch of a resumed run is the one that begins likewise, and comes once."""

    @abstractmethod
    def goes_on(self, prompt: Prompt) -> bool:
        """Return whether the agent of this rollout may begin more branches, though it ends; from any thread."""

    @abstractmethod
    async def settled(self, prompt: Prompt) -> None:
        """Wait until the agent of this rollout begins no more branches; cancel-safe."""

    @abstractmethod
    def ended(self, finish: Finish) -> None:
        """Note that a response has ended, perhaps within a turn, while others of its unit may go on."""


class TurnDecode(Decode, Protocol):
    """A decode whose response has turns: a token of ``stop``, a stop string, or a limit ends a turn.

    A response that ends with its turn, whose tokens may have been read by then, ends with a chunk of no tokens. It ends
    at its length limit as ever.
    """

    async def turn(self) -> IntArray | None:
        """Return the tokens of the turn, int32 [n], once it has ended; ``None`` if decoding stops before.

        Cancel-safe: a cancelled call has changed nothing.
        """

    def bound(self, limit: TurnLimit, start: int) -> None:
        """Limit the turn that begins at the token ``start`` of the response.

        It is called once the decode is open, before it is decoded, and before :meth:`proceed`, whose turn it limits.
        """

    def proceed(self, given: IntArray) -> bool:
        """Go on after a turn: read ``given``, int32 [n], then decode.

        A response without room for these and one token more ends with its turn instead, with reason ``length``.

        Returns:
            False once decoding has stopped: nothing has happened then.
        """

    def finish(self) -> bool:
        """End the response with its turn; return as :meth:`proceed` does."""


class MultiTurnPolicy(Policy, Protocol):
    """A policy with the capability ``turns``: it goes on after a turn with the KV cache that it has."""

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> Sequence[TurnDecode]:
        """Make a decode with turns for each, as ``open`` makes decodes without.

        While a rollout waits for an answer the others are decoded; it counts as live, and the cut defers it. In
        deterministic mode decoding waits with it, so that the answer comes in at a decode step that does not depend on
        timing.
        """


def turn_so_far(response: Response) -> list[int]:
    """Return the tokens of the present turn: those after the last answer."""
    given = np.flatnonzero(~response.sampled)
    start = int(given[-1]) + 1 if len(given) else 0
    return [int(token) for token in response.tokens[start:]]


def turns_of(response: Response, answered: Sequence[AnsweredTurn]) -> list[Chunk]:
    """Return the turns of a response, answered and last, each with the tokens that interrupted it, as not sampled."""
    found, start = list[Chunk](), 0
    for end in (*(turn.end for turn in answered), len(response)):
        start += int(np.argmax(response.sampled[start:])) if start < len(response) else 0  # behind the answer
        if start < end and response.sampled[start]:
            found.append(response.chunk(start, end))
            start = end
    return found


SLACK = 8
"""Tokens decoded before those that a stop string can span: without its context, the first may decode differently."""


class StopCriteria:
    """Decides after each token of a response whether it is the last.

    A stop string ends a response with the token that completes it; the response keeps that token. As many of the last
    tokens are decoded as the longest stop string has bytes, and a few more: a token is at least a byte.

    Args:
        sampling: its stop tokens, stop strings and least length.
        decode: returns the text of tokens.

    Raises:
        ValueError: there are stop strings, but no ``decode``.
    """

    def __init__(self, sampling: Sampling, decode: Detokenize | None = None) -> None:
        if sampling.stop_strings and decode is None:
            raise ValueError("stop_strings are matched on decoded text: give the policy decode=..., tokens to text")
        self._sampling = sampling
        self._decode: Detokenize = decode or (lambda tokens: "")
        self._window = SLACK + max((len(text.encode()) for text in sampling.stop_strings), default=0)

    def reason(self, tokens: Sequence[int], limit: int) -> FinishReason | None:
        """Return why a response ends with the last of ``tokens``, at ``limit`` tokens in any case; ``None`` if not."""
        stop = self._sampling.stop
        if tokens[-1] in stop:
            return "eos" if tokens[-1] == stop[0] else "stop"
        if self._sampling.stop_strings and len(tokens) > self._sampling.min_new_tokens and self._completed(tokens):
            return "stop"
        return "length" if len(tokens) >= limit else None

    def _completed(self, tokens: Sequence[int]) -> bool:
        # Texts are compared rather than their lengths: an incomplete character decodes to replacement characters.
        tail = tokens[-self._window :]
        text = self._decode(tail)
        found = [(stop, text.rfind(stop)) for stop in self._sampling.stop_strings if stop in text]
        if not found:
            return False
        earlier = [self._decode(tail[:n]) for n in range(1, len(tail))]
        return any(not any(before.startswith(stop, at) for before in earlier) for stop, at in found)


class GrowingText:
    """Decodes tokens that grow from call to call, of which it reads the newest and those of the call before.

    A decoder looks at most at the token before, or goes on with an incomplete character. Where later tokens change what
    earlier ones are, as bytes that are no character together, all are decoded anew.
    """

    def __init__(self, decode: Detokenize) -> None:
        self._decode = decode
        self._start = self._end = 0  # of the tokens that are read again, and whose text is known
        self._text = self._again = ""

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, which begin with those of the call before."""
        read = self._decode(tokens[self._start :])
        grown = len(tokens) >= self._end and read.startswith(self._again)
        text = self._text + read[len(self._again) :] if grown else self._decode(tokens)
        if not text.endswith("\ufffd"):
            self._start, self._end, self._text = min(self._end, len(tokens)), len(tokens), text
            self._again = self._decode(tokens[self._start :])
        return text


def turn_ended(response: Response, stopping: StopCriteria, limit: int) -> FinishReason | None:
    """Return why a turn has ended with the last token of a response that may have turns; ``None`` if none has."""
    if not len(response) or not response.sampled[-1]:
        return None
    reason = stopping.reason(response.tokens.tolist(), limit)
    return None if reason == "length" else reason
