"""The tokenizer of a reward model, with the length that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from oppo.hf.tokenizer import HfTokenizer, Rendered

OverLong: TypeAlias = Literal["error", "drop", "truncate"]
"""A rollout that is longer than the model reads ends the run, is dropped, or is cut as the tokenizer cuts."""


EMPTY: Final = "the reward model has nothing to read: the text has no token"
"""Reason of a drop for a rollout without text."""


class TooLong(Exception):  # noqa: N818 - it says what happened
    """A text has more tokens than the model reads."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The first tokens of a text that goes on.

    Attributes:
        ids: token ids.
        ends: where each ends in the text, in characters.
    """

    ids: Sequence[int]
    ends: Sequence[int]


class Reader:
    """Turns text into the tokens of one model.

    Args:
        tokenizer: the model's.
        limit: tokens that the model reads at most.
        over_long: with ``truncate``, longer texts are cut as the tokenizer cuts them: the longer segment of a pair, at
            its ``truncation_side``. Otherwise they are refused.
    """

    def __init__(self, tokenizer: HfTokenizer, limit: int, over_long: OverLong = "error") -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.over_long: OverLong = over_long

    @property
    def knows_offsets(self) -> bool:
        """Whether it says where in the text each token ends."""
        return bool(self.tokenizer.inner.is_fast)

    def features(self, rendered: Rendered) -> Mapping[str, list[int]]:
        """Return the model's inputs for a whole text, each one row.

        Raises:
            TooLong: it has more tokens than the model reads, and is not to be cut.
        """
        cut = self.over_long == "truncate"
        segments = self.tokenizer.segments(rendered)
        if len(segments) > 1:
            features = self._of_segments(rendered)
        else:
            found = self.tokenizer.inner(
                rendered.text,
                rendered.pair,
                add_special_tokens=rendered.special,
                split_special_tokens=segments[0][1],
                truncation=cut,
                max_length=self.limit if cut else None,
                verbose=False,
            )
            features = {name: list(row) for name, row in found.items()}
        if (length := len(features["input_ids"])) > self.limit:
            raise TooLong(f"has {length} tokens as text, more than the {self.limit} that the reward model reads")
        return features

    def _of_segments(self, rendered: Rendered) -> dict[str, list[int]]:
        """Do the same with one text in which data spells special tokens."""
        inner = self.tokenizer.inner
        before, after = self.tokenizer.around if rendered.special else ([], [])
        ids = self.tokenizer.encode_rendered(rendered)
        if self.over_long == "truncate":
            room = max(0, self.limit - len(before) - len(after))
            ids = ids[max(0, len(ids) - room) :] if inner.truncation_side == "left" else ids[:room]
        row = [*before, *ids, *after]
        filled = {"attention_mask": 1, "token_type_ids": 0}
        return {"input_ids": row} | {
            name: [value] * len(row) for name, value in filled.items() if name in inner.model_input_names
        }

    def pieces(self, rendered: Rendered) -> Pieces:
        """Return the tokens of a text, the beginning of one or a part, without special tokens after it."""
        ids: list[int] = []
        ends: list[int] = []
        length = 0
        for number, (text, data) in enumerate(self.tokenizer.segments(rendered)):
            found = self.tokenizer.inner(
                text,
                add_special_tokens=rendered.special and not number,
                split_special_tokens=data,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                verbose=False,
            )
            added, count = found["special_tokens_mask"], len(found["input_ids"])
            while count and added[count - 1]:
                count -= 1
            ids += found["input_ids"][:count]
            ends += [length + end for _, end in found["offset_mapping"][:count]]
            length += len(text)
        return Pieces(ids, ends)
