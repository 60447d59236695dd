"""Prompts in a seeded order, from one source or several, by admission number; or of rows that come one by one.

Several sources are interleaved by their weights as seats are given to states by the quota method (Balinski and Young
1975, "The quota method of apportionment"). Of the first ``n`` prompts, a source of weight ``w`` of a sum of ``W`` has
less than one prompt more or fewer than ``n w / W``. With whole-number weights every ``W`` prompts, counted from the
first, hold exactly ``w`` of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Final, Self

import numpy as np

from oppo.data.prompts import TEXT_ONLY, Begin, Encoding, OverLongPrompt, ReadImages, Tokenizer
from oppo.data.rows import is_dataset, located
from oppo.declared import require_real, require_whole
from oppo.errors import DataError, counted, running_loop
from oppo.events import IntArray, Prompt
from oppo.images import ImageRef
from oppo.log import logger
from oppo.placement.place import run_detached

LONGEST_CYCLE: Final = 10_000  # the largest sum of weights as whole numbers without a common divisor


class PromptStream(Iterator[Prompt]):
    """The prompts in a seeded order, reshuffled every epoch, each with its ordinal as admission number.

    The order of an epoch depends on the seed and the epoch only, so :attr:`position` is all the state there is.

    Args:
        prompts: at least one.
        seed: of the order; streams with the same seed and prompts yield the same order.
        epochs: passes over the prompts, after which the stream ends; 0 never ends.
        multiple: of each epoch, as many prompts as a multiple of this; the others wait for the next epoch's order.

    Raises:
        DataError: there is no prompt, or fewer than ``multiple``.

    Example:
        >>> prompts = [Prompt(i, i, np.array([i], np.int32)) for i in range(3)]
        >>> [(p.admission, p.tokens.tolist()) for p in PromptStream(prompts, seed=3, epochs=1)]
        [(0, [2]), (1, [1]), (2, [0])]
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, epochs: int = 0, multiple: int = 1) -> None:
        for name, number in (("seed", seed), ("epochs", epochs), ("multiple", multiple)):
            require_whole(name, number, 1 if name == "multiple" else 0)
        self._sources = [_Shuffled(prompts, seed, 0, multiple)]
        self._cycle = Cycle([1])
        self._seed = seed
        self._epochs = epochs
        self.position = 0

    @classmethod
    def mixed(cls, sources: Sequence[tuple[float, Sequence[Prompt]]], *, seed: int = 0, epochs: int = 0) -> Self:
        """Return a stream of several sources, each with its weight.

        Every source is shuffled by itself, and passed over again when it has ended: each of its prompts comes once in
        every pass. The stream ends before any source would begin pass ``epochs + 1``, so that no prompt comes more than
        ``epochs`` times, and the shares hold to the end.

        Raises:
            DataError: there is no source, one holds no prompt, or the weights are not in a ratio of whole numbers
                whose sum is at most 10,000.

        Example:
            >>> def numbered(*ids):
            ...     return [Prompt(i, i, np.array([i], np.int32)) for i in ids]
            >>> stream = PromptStream.mixed([(2, numbered(1, 2, 3, 4)), (1, numbered(7, 8, 9))], epochs=1)
            >>> [int(prompt.tokens[0]) > 4 for prompt in stream]
            [False, False, True, False, False, True]
        """
        if not sources:
            raise DataError("a mixture needs at least one source of prompts")
        (_, first), *others = sources
        stream = cls(first, seed=seed, epochs=epochs)
        stream._sources += [_Shuffled(prompts, seed, number) for number, (_, prompts) in enumerate(others, 1)]
        stream._cycle = Cycle(whole_numbers([weight for weight, _ in sources]))
        return stream

    @property
    def size(self) -> int:
        """The number of prompts, each counted once."""
        return sum(len(source.prompts) for source in self._sources)

    @property
    def longest(self) -> int:
        return max(len(prompt.tokens) for prompt in self.prompts)

    @property
    def prompts(self) -> Iterator[Prompt]:
        return (prompt for source in self._sources for prompt in source.prompts)

    def __len__(self) -> int:
        """Return how many prompts the whole stream holds; an endless one raises a ``TypeError``."""
        if not self._epochs:
            raise TypeError("an endless prompt stream has no length")
        return min(self._cycle.number(source, self._epochs * each.served) for source, each in enumerate(self._sources))

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Prompt:
        if self._epochs and self.position >= len(self):
            raise StopIteration
        self.position += 1
        return self.at(self.position - 1)

    def at(self, number: int) -> Prompt:
        """Return the prompt with this admission number, whatever the position."""
        source, ordinal = self._cycle.place(number)
        return replace(self._sources[source].at(ordinal), rollout=number, admission=number, group=number)

    def columns(self, number: int) -> Mapping[str, object]:
        return self.at(number).columns

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_whole("position", state["position"], 0)
        self.position = state["position"]


class _Shuffled:
    def __init__(self, prompts: Sequence[Prompt], seed: int, number: int, multiple: int = 1) -> None:
        if not prompts:
            raise DataError("a prompt stream needs at least one prompt")
        self.prompts = tuple(prompts)
        self.served = len(prompts) - len(prompts) % multiple  # in an epoch
        if not self.served:
            filled = f"no batch of {multiple} is filled by {counted(len(prompts), 'prompt')}"
            raise DataError(f"{filled}: add prompts, or lower the batch")
        self._key = (seed,) if number == 0 else (seed, number)
        self._epoch = -1
        self._order: Sequence[int] = ()

    def at(self, ordinal: int) -> Prompt:
        epoch, index = divmod(ordinal, self.served)
        if epoch != self._epoch:
            seed, *source = self._key
            self._epoch = epoch
            self._order = np.random.default_rng((seed, epoch, *source)).permutation(len(self.prompts)).tolist()
        return self.prompts[self._order[index]]


class Cycle:
    """The sources of a mixture in the order in which their prompts come, which repeats."""

    def __init__(self, weights: Sequence[int]) -> None:
        taken, total = [0] * len(weights), sum(weights)
        self._weights = weights
        self._places: list[tuple[int, int]] = []
        for number in range(1, total + 1):
            within_quota = (source for source, weight in enumerate(weights) if taken[source] * total < number * weight)
            source = min(within_quota, key=lambda source: Fraction(taken[source] + 1, weights[source]))
            self._places.append((source, taken[source]))
            taken[source] += 1
        self._numbers = {place: number for number, place in enumerate(self._places)}

    def place(self, number: int) -> tuple[int, int]:
        # its source, and how many of that source come before it
        cycles, at = divmod(number, len(self._places))
        source, turn = self._places[at]
        return source, cycles * self._weights[source] + turn

    def number(self, source: int, ordinal: int) -> int:
        cycles, turn = divmod(ordinal, self._weights[source])
        return cycles * len(self._places) + self._numbers[source, turn]


def whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return weights in the same ratio that are whole numbers without a common divisor."""
    for weight in weights:
        require_real("the weight of a source", weight, error=DataError)
        if weight <= 0:
            raise DataError(f"the weight of a source must be more than 0, not {weight}")
    exact = [Fraction(str(weight)) for weight in weights]
    whole = [int(weight * math.lcm(*(one.denominator for one in exact))) for weight in exact]
    divisor = math.gcd(*whole)
    ratio = [weight // divisor for weight in whole]
    if sum(ratio) > LONGEST_CYCLE:
        raise DataError(
            f"the weights {', '.join(f'{weight:g}' for weight in weights)} are as {' to '.join(map(str, ratio))}: give "
            f"rounder ones, in a ratio of whole numbers whose sum is at most {LONGEST_CYCLE:,}"
        )
    return ratio


_END: Final = object()


class RowStream(AsyncIterator[Prompt]):
    """Each row is read when its prompt is asked for, in the order of the rows; the stream ends with them.

    A resumed run reads the rows that it had taken again, and leaves them out: the iterable begins with the same ones.
    This is checked by a digest of their prompts. A sync iterable is asked in a thread.

    Args:
        rows: a mapping of columns each.
        tokenizer, column, max_prompt_tokens, over_long, begin, images: as of :func:`oppo.read_prompts`; ``over_long``
            of ``error`` raises at the first.

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
        images: ReadImages | str = TEXT_ONLY,
    ) -> None:
        self._rows: Iterator[object] | AsyncIterator[object] = (
            aiter(rows) if isinstance(rows, AsyncIterable) else iter(rows)
        )
        self._encoding = Encoding(
            tokenizer=tokenizer,
            column=column,
            max_prompt_tokens=max_prompt_tokens,
            over_long=over_long,
            begin=begin,
            images=images,
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
        return self._encoding.max_prompt_tokens

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Prompt:
        if self._resumed is not None:
            await self._skip(*self._resumed)
            self._resumed = None
        while True:
            place, row, tokens, images = await self._next()
            fitted = self._encoding.fitted(tokens, place, images)
            if len(tokens) > self._encoding.max_prompt_tokens:
                self._note(place, len(tokens))
            if fitted is not None:
                number, self._served = self._served, self._served + 1
                return Prompt(number, number, fitted, group=number, columns=dict(row), images=images)

    def state_dict(self) -> dict[str, Any]:
        if self._resumed is not None:
            return {"rows": self._resumed[0], "prompts": self._served, "digest": self._resumed[1]}
        return {"rows": self._taken, "prompts": self._served, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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

    async def _next(self) -> tuple[str, Mapping[str, object], IntArray, tuple[ImageRef, ...]]:
        found = await self._ask()
        if found is _END:
            self.ended = True
            raise StopAsyncIteration
        self._taken += 1
        place, row = located(found, self._taken, of_columns=self._of_columns)
        if self._encoding.begin is None or getattr(running_loop(), "virtual", False):
            row, tokens, images = self._encoding.read(place, row)
        else:
            row, tokens, images = await run_detached("oppo-row", partial(self._encoding.read, place, row))
        read = " ".join([self._digest, json.dumps(tokens.tolist()), *(image.sha256 for image in images)])
        self._digest = hashlib.sha256(read.encode()).hexdigest()
        return place, row, tokens, images

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
