"""A language in which the prompt announces the length of the response.

::

    prompt    f7 f21 f3 5          a few fillers, then a number
    response  4 3 2 1 <eos>        counts down from it: as many tokens as the number

The length depends on the prompt alone, so every schedule, seed and program decodes, scores and trains the same tokens.
The next token depends only on the one before it, which a small model learns in a minute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.ladder.workloads import BenchWorkload, Lengths

PAD: Final = 0
EOS: Final = 1
FILLERS: Final = 32
BEYOND: Final = 32
"""Numbers above the cap that a prompt can announce."""


@dataclass(frozen=True, slots=True)
class Countdown:
    """The language of the numbers 1 to ``numbers``.

    Example:
        >>> language = Countdown(9)
        >>> words = language.words()
        >>> [words[token] for token in language.response(5)]
        ['4', '3', '2', '1', '<eos>']
    """

    numbers: int

    @property
    def vocabulary(self) -> int:
        """How many tokens there are: padding, end, fillers, numbers."""
        return 2 + FILLERS + self.numbers

    def words(self) -> list[str]:
        """Return every token as text, by id."""
        fillers = [f"f{each}" for each in range(FILLERS)]
        return ["<pad>", "<eos>", *fillers, *(str(number) for number in range(1, self.numbers + 1))]

    def number(self, value: int) -> int:
        """Return the id of a number, 1 or more."""
        return 1 + FILLERS + value

    def response(self, announced: int) -> list[int]:
        """Return the response to a prompt that ends in ``announced``: as many tokens."""
        return [*(self.number(value) for value in range(announced - 1, 0, -1)), EOS]

    def tokenizer(self, longest: int) -> PreTrainedTokenizerFast:
        """Return a tokenizer of words between blanks, for models that read ``longest`` tokens."""
        words = self.words()
        tokens = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, words[PAD]))
        tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokens,
            pad_token=words[PAD],
            eos_token=words[EOS],
            padding_side="left",
            model_max_length=longest,
            clean_up_tokenization_spaces=False,
        )


def language_of(workload: BenchWorkload) -> Countdown:
    """Return the language of a workload, whose numbers exceed the cap a little."""
    return Countdown(workload.lengths.cap + BEYOND)


def announced(lengths: Lengths, count: int, seed: int) -> list[int]:
    """Return the announced length of each of ``count`` prompts; above the cap the response is cut off."""
    rng = np.random.default_rng((seed, 1))
    drawn = np.exp(rng.normal(np.log(lengths.median), lengths.sigma, count))
    above = lengths.cap + BEYOND // 2  # the largest numbers are rare in lessons: they follow no other number
    longest = lengths.cap - 1 if lengths.over else above
    wanted = np.clip(np.rint(drawn), lengths.shortest, longest).astype(int)
    if lengths.over:
        for first in range(0, count, lengths.over):
            place = first + int(rng.integers(lengths.over))
            if place < count:
                wanted[place] = above
    return [int(length) for length in wanted]


def write_prompts(path: Path, workload: BenchWorkload) -> None:
    """Write the workload's prompts as JSON lines: token ids, and the length of the response."""
    language, lengths = language_of(workload), workload.lengths
    rng = np.random.default_rng((workload.seed, 2))
    low, high = workload.prompt_tokens
    lines = []
    for number in announced(lengths, workload.prompts, workload.seed):
        fillers = rng.integers(2, 2 + FILLERS, int(rng.integers(low, high + 1)) - 1).tolist()
        tokens = [*fillers, language.number(number)]
        lines.append(json.dumps({"tokens": tokens, "length": min(number, lengths.cap)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def lessons(language: Countdown, longest: int, rng: np.random.Generator) -> Iterator[Sequence[int]]:
    """Yield prompts with their responses, endlessly; all numbers are equally likely."""
    while True:
        fillers = rng.integers(2, 2 + FILLERS, int(rng.integers(1, 8))).tolist()
        number = int(rng.integers(1, language.numbers + 1))
        yield [*fillers, language.number(number), *language.response(number)][:longest]
