"""A Python function as an environment: it is given the text of a turn and returns the text of the answer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import anyio
import numpy as np

from oppo.errors import ConfigError, OppoError, running_loop
from oppo.events import Drop
from oppo.numeric import require_real, require_whole
from oppo.placement.detached import run_detached
from oppo.turns import Answer, State, Turn
from oppo.user_code import contained, shown

CONCURRENCY = 64
"""Calls that overlap, unless another number is given."""


class EnvironmentFailure(OppoError):  # noqa: N818 - it says what happened
    """The function of an environment raised, took too long, or returned something that is no answer."""


@dataclass(frozen=True, slots=True)
class TextTurn:
    """A finished turn, as text.

    Attributes:
        prompt: the data's ``prompt`` column if there is one, else the prompt's text.
        text: of this turn, without special tokens.
        number: how many turns of the response were answered before.
        state: what the answer before returned as its state; ``None`` at the first turn.
        columns: the data's other columns.
    """

    prompt: object
    text: str
    number: int
    state: State
    columns: Mapping[str, object]


EnvironmentFunction: TypeAlias = Callable[[TextTurn], object]
"""``f(turn)``, sync or async: returns the answer as text, ``(text, state)``, or ``None`` to end the response."""


class FunctionEnvironment:
    """A function that answers turns, as an :class:`oppo.turns.Environment`.

    Args:
        function: ``f(turn)``, sync or async, with a :class:`TextTurn`: returns the answer as text, or a pair of text and
            state, or ``None`` to end the response. A sync function runs in a thread, or inline on a loop of virtual
            time.
        decode: token ids to text, without special tokens.
        encode: text to token ids, without special tokens that the text does not contain.
        on_failure: ``fail`` raises; ``drop`` drops the rollout.
        timeout: seconds after which a call has failed; ``None``: never. A thread is then left to itself.
        concurrency: how many calls may overlap.
        prompt_column: the column that is given as ``prompt``.

    Attributes:
        at_work: names the function while a call is unanswered; empty otherwise.

    Raises:
        ConfigError: ``timeout`` or ``concurrency`` is out of range.

    Example:
        >>> async def main() -> list[int]:
        ...     shout = FunctionEnvironment(lambda turn: turn.text.upper(), bytes_to_text, text_to_bytes)
        ...     answer = await shout.answer(Turn(Prompt(0, 0, np.array([1], np.int32)), 0, np.array([97], np.int32)))
        ...     return answer.tokens.tolist()
        >>> from oppo import Prompt
        >>> bytes_to_text, text_to_bytes = (lambda tokens: bytes(tokens).decode()), (lambda text: list(text.encode()))
        >>> anyio.run(main)
        [65]
    """

    def __init__(
        self,
        function: EnvironmentFunction,
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], Sequence[int]],
        *,
        on_failure: Literal["fail", "drop"] = "fail",
        timeout: float | None = None,
        concurrency: int = CONCURRENCY,
        prompt_column: str = "prompt",
    ) -> None:
        if timeout is not None:
            require_real("timeout", timeout, 0, error=ConfigError)
        require_whole("concurrency", concurrency, 1, error=ConfigError)
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self._function = function
        call = getattr(function, "__call__", None)  # noqa: B004 - the method that a call runs
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        self._decode = decode
        self._encode = encode
        self._drops = on_failure == "drop"
        self._timeout = math.inf if timeout is None else timeout
        self._concurrency = concurrency
        self._limiter: anyio.CapacityLimiter | None = None
        self._prompt_column = prompt_column
        self._calls = 0

    @property
    def at_work(self) -> str:
        """Name of the function during a call, for a watchdog; empty otherwise."""
        return f"environment {self.name!r}" if self._calls else ""

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        """Return the function's answer as tokens, ``None`` where it ends the response, or a ``Drop``.

        Raises:
            EnvironmentFailure: the function raised, took too long or returned something else, and failures are not
                dropped.
        """
        self._limiter = self._limiter or anyio.CapacityLimiter(self._concurrency)
        async with self._limiter:
            self._calls += 1
            try:
                return await self._answer(turn)
            except EnvironmentFailure as failure:
                if self._drops:
                    return Drop(turn.prompt.rollout, str(failure))
                raise
            finally:
                self._calls -= 1

    async def _answer(self, turn: Turn) -> Answer | None:
        with anyio.move_on_after(self._timeout):
            with contained(lambda words: self._failure(f"raised {words}", turn)):
                result = await self._called(self._as_text(turn))
            return self._tokens(result, turn)
        raise self._failure(f"took longer than {self._timeout:g} s", turn)

    async def _called(self, turn: TextTurn) -> object:
        if self._is_async or getattr(running_loop(), "virtual", False):
            result = self._function(turn)
            return await result if isinstance(result, Awaitable) else result
        return await run_detached(f"oppo-{self.name}", partial(self._function, turn))

    def _as_text(self, turn: Turn) -> TextTurn:
        prompt = turn.prompt
        columns = {name: value for name, value in prompt.columns.items() if name != self._prompt_column}
        asked = prompt.columns.get(self._prompt_column) or self._decode(prompt.tokens.tolist())
        return TextTurn(asked, self._decode(turn.tokens.tolist()), turn.number, turn.state, columns)

    def _tokens(self, result: object, turn: Turn) -> Answer | None:
        if result is None:
            return None
        pair = result if isinstance(result, tuple) and len(result) == 2 else (result, None)  # noqa: PLR2004 - a pair
        text, state = pair
        if not isinstance(text, str) or not text:
            raise self._failure(f"must return a text, a pair of text and state, or None; got {shown(result)}", turn)
        tokens = np.array(self._encode(text), np.int32)
        if not len(tokens):
            raise self._failure(f"returned {text!r}, which is no token", turn)
        return Answer(tokens, state)

    def _failure(self, what: str, turn: Turn) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"environment {self.name!r} {what} (turn {turn.number} of rollout {turn.prompt.rollout})"
        )
