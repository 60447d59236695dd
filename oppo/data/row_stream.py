"""Prompts of rows that come one by one: an iterable or async iterable of a program, of any length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Self

from oppo.data.prompts import Begin, Encoding, OverLongPrompt, Tokenizer
from oppo.data.rows import is_dataset, located
from oppo.declared import require_whole
from oppo.errors import DataError, running_loop
from oppo.events import IntArray, Prompt
from oppo.log import logger
from oppo.placement.place import run_detached

_END: Final = object()


class RowStream(AsyncIterator[Prompt]):
    """Each row is read when its prompt is asked for, in the order of the rows; the stream ends with them.

    A resumed run reads the rows that it had taken again, and leaves them out: the iterable begins with the same ones.
    This is checked by a digest of their prompts. A sync iterable is asked in a thread.

    Args:
        rows: a mapping of columns each.
        tokenizer, column, max_prompt_tokens, over_long, begin: as of :func:`oppo.read_prompts`; ``over_long`` of
            ``error`` raises at the first.

    Attributes:
        ended: whether the end of the rows was found.
    """

    columns = None
    """A row cannot be had again: checkpoints hold the columns of deferred rollouts, which are then plain values."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]],
        tokenizer: Tokenizer,
        *,
        column: str = "prompt",
        max_prompt_tokens: int = 512,
        over_long: OverLongPrompt = "filter",
        begin: Begin | None = None,
    ) -> None:
        self._rows: Iterator[object] | AsyncIterator[object] = (
            aiter(rows) if isinstance(rows, AsyncIterable) else iter(rows)
        )
        self._encoding = Encoding(
            tokenizer=tokenizer, column=column, max_prompt_tokens=max_prompt_tokens, over_long=over_long, begin=begin
        )
        self._of_columns = is_dataset(rows)
        self._noted = False
        self._taken = 0  # rows
        self._served = 0  # prompts
        self._digest = ""
        self._resumed: tuple[int, str] | None = None
        self.ended = False

    @property
    def longest(self) -> int:
        """The most tokens that a prompt may have."""
        return self._encoding.max_prompt_tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Prompt:
        if self._resumed is not None:
            await self._skip(*self._resumed)
            self._resumed = None
        while True:
            place, row, tokens = await self._next()
            fitted = self._encoding.fitted(tokens)
            if len(tokens) > self._encoding.max_prompt_tokens:
                self._note(place, len(tokens))
            if fitted is not None:
                number, self._served = self._served, self._served + 1
                return Prompt(rollout=number, admission=number, tokens=fitted, group=number, columns=dict(row))

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows and prompts were taken, and the digest of the rows."""
        if self._resumed is not None:
            return {"rows": self._resumed[0], "prompts": self._served, "digest": self._resumed[1]}
        return {"rows": self._taken, "prompts": self._served, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream over the same rows was."""
        for name in ("prompts", "rows"):
            require_whole(name, state[name], 0)
        self._served = state["prompts"]
        self._resumed = (state["rows"], str(state["digest"]))

    async def _skip(self, rows: int, digest: str) -> None:
        try:
            for _ in range(rows):
                await self._next()
        except StopAsyncIteration:
            raise DataError(
                f"the run had taken {rows} rows of the program, and now there are {self._taken}: resume it with the "
                "same rows"
            ) from None
        if self._digest != digest:
            raise DataError(
                f"the first {rows} rows of the program are not those that the run had taken: resume it with the same "
                "rows, in the same order"
            )

    async def _next(self) -> tuple[str, Mapping[str, object], IntArray]:
        found = await self._ask()
        if found is _END:
            self.ended = True
            raise StopAsyncIteration
        self._taken += 1
        place, row = located(found, self._taken, of_columns=self._of_columns)
        if self._encoding.begin is None or getattr(running_loop(), "virtual", False):
            row, tokens = self._encoding.read(place, row)
        else:
            row, tokens = await run_detached("oppo-row", partial(self._encoding.read, place, row))
        self._digest = hashlib.sha256(f"{self._digest} {json.dumps(tokens.tolist())}".encode()).hexdigest()
        return place, row, tokens

    async def _ask(self) -> object:
        rows = self._rows
        if isinstance(rows, AsyncIterator):
            return await anext(rows, _END)
        if getattr(running_loop(), "virtual", False):
            return next(rows, _END)
        return await run_detached("oppo-rows", partial(next, rows, _END))

    def _note(self, place: str, length: int) -> None:
        message = f"{place}: a prompt of {length} tokens, longer than {self._encoding.max_prompt_tokens}"
        if self._encoding.over_long == "error":
            raise DataError(f"{message}; filter or truncate such prompts, or raise max_prompt_tokens")
        if not self._noted:
            self._noted = True
            done = "is left out" if self._encoding.over_long == "filter" else "loses its beginning"
            logger.info(f"{message}, {done}, as are all others" if done == "is left out" else f"{message}, {done}")
