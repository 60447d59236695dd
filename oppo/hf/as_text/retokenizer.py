"""One rollout on its way from the policy's tokens to those of another tokenizer, as it grows.

A token is sent on when what follows can hardly change it: the last word is held back, and of a word without end its
last tokens. That is a guess. In the end the model has read the tokens of the whole text, in one call of its
tokenizer: where they differ from those that were sent, it goes back to the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from oppo.hf.as_text.growing_text import GrowingText
from oppo.hf.as_text.reader import Pieces, Reader
from oppo.hf.as_text.rendering import PromptText, Rendering
from oppo.hf.tokenizer import Rendered

TAIL: Final = 16
"""Tokens of a word that are held back at most: merges reach back less far."""

CONTEXT: Final = 200
"""Characters before new text that are tokenized again with it, at most."""

MAX_REWINDS: Final = 3
"""Rewinds after which the rest of a rollout waits for its end: this text cannot be cut where words end."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of the tokens that were sent: the first ``keep`` of them stay, and ``ids`` follow."""

    keep: int
    ids: Sequence[int]


class Retokenizer:
    """The state of one rollout.

    Args:
        rendering: of prompt and response.
        reader: the other tokenizer.
        decode: the policy's tokens to text.
        prompt: as the data has it.

    Attributes:
        sent: the tokens of the other tokenizer that were sent on.
        reread: tokens that had been sent, and were taken back.
    """

    def __init__(
        self, rendering: Rendering, reader: Reader, decode: Callable[[Sequence[int]], str], prompt: PromptText
    ) -> None:
        self.sent: list[int] = []
        self.reread = 0
        self._rendering = rendering
        self._reader = reader
        self._decode = decode
        self._prompt = prompt
        opening = rendering.opening(prompt) if reader.knows_offsets else None
        self._streams = opening is not None
        self._opening = opening or Rendered("")
        self._text = self._opening.text
        self._end = 0  # of the text that was sent, in characters
        self._rewinds = 0
        self._growing = GrowingText(decode)

    @property
    def length(self) -> int:
        """Tokens of the response that came."""
        return len(self._growing.tokens)

    def grow(self, tokens: Sequence[int]) -> Edit:
        """Return what becomes certain with more of the response; none at first: the prompt alone."""
        self._text += self._growing.push(tokens)
        if not (self._streams and self._growing.settled) or len(self.sent) >= self._reader.limit:
            return Edit(len(self.sent), ())
        return self._continued() or self._restarted()

    def finish(self) -> Edit:
        """Return what makes of the tokens that were sent those of the whole text.

        Raises:
            TooLong: the text has more tokens than the model reads.
        """
        response = self._decode(self._growing.tokens)
        rendered = self._rendering.whole(self._prompt, response)
        return self._corrected(self._reader.features(rendered)["input_ids"])

    def _continued(self) -> Edit | None:
        """Return the tokens of new text, tokenized behind the last words that were sent; ``None`` if these change."""
        start = max(last_word(self._text[: self._end]), self._end - CONTEXT) if self._end else 0
        if not start:
            return self._restarted()
        pieces = self._reader.pieces(replace(self._so_far().after(start), special=False))
        ends = [start + end for end in pieces.ends]
        known = sum(1 for _ in takewhile(lambda end: end <= self._end, ends))
        if not known or ends[known - 1] != self._end or pieces.ids[known - 1] != self.sent[-1]:
            return None
        stop = self._stable(Pieces(pieces.ids, ends))
        return self._sent(Edit(len(self.sent), pieces.ids[known:stop]), ends[max(stop, known) - 1])

    def _restarted(self) -> Edit:
        """Return the difference to the tokens of all text so far."""
        pieces = self._reader.pieces(self._so_far())
        stop = self._stable(pieces)
        return self._corrected(pieces.ids[:stop], pieces.ends[stop - 1] if stop else 0)

    def _so_far(self) -> Rendered:
        response = (len(self._opening.text), len(self._text))
        return replace(self._opening, text=self._text, data=[*self._opening.data, response])

    def _corrected(self, ids: Sequence[int], end: int = 0) -> Edit:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.sent, ids, strict=False)))
        if taken_back := len(self.sent) - same:
            self.reread += taken_back
            self._rewinds += 1
            self._streams = self._rewinds < MAX_REWINDS
        return self._sent(Edit(same, ids[same:]), end)

    def _sent(self, edit: Edit, end: int) -> Edit:
        room = self._reader.limit - edit.keep
        self.sent[edit.keep :] = edit.ids[:room]
        self._end = end
        return Edit(edit.keep, edit.ids[:room])

    def _stable(self, pieces: Pieces) -> int:
        """Return how many of the tokens may be sent on."""
        border, ends = last_word(self._text), pieces.ends
        whole_words = sum(1 for _ in takewhile(lambda end: end <= border, ends))
        stop = max(whole_words, len(ends) - TAIL)
        while 0 < stop < len(ends) and ends[stop - 1] == ends[stop]:  # inside of a character
            stop -= 1
        return stop


def last_word(text: str) -> int:
    """Return where the last word of a text begins, with the space before it.

    Example:
        >>> last_word("one two"), last_word("one two "), last_word("one")
        (3, 3, 0)
    """
    head, *word = text.rsplit(maxsplit=1) or [""]
    return len(head) if word else 0
