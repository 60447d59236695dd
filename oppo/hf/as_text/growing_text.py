"""The text of tokens as they come, without an end that later tokens may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands in decoded text for an incomplete character."""


class GrowingText:
    """Decodes the tokens of one response a few at a time.

    Tokens are decoded behind those before them, since the text of a token depends on whether it is the first. So the
    cost of a token does not grow with the length of the response.

    Args:
        decode: token ids to text.

    Attributes:
        tokens: all that came.
        settled: whether the text of earlier tokens has never changed; if it has, no more text comes.

    Example:
        >>> text = GrowingText(lambda tokens: bytes(tokens).decode(errors="replace"))
        >>> [text.push(part) for part in ([99, 97], [102, 0xC3], [0xA9])]
        ['ca', '', 'fé']
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.tokens: list[int] = []
        self.settled = True
        self._decode = decode
        self._context = 0  # first token of those behind which new ones are decoded
        self._known = 0  # tokens whose text was returned

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain now: all, unless it ends in an incomplete character."""
        self.tokens += tokens
        if not self.settled:
            return ""
        before = self._decode(self.tokens[self._context : self._known])
        after = self._decode(self.tokens[self._context :])
        if not after.startswith(before):
            self.settled = False
            return ""
        if after.endswith(REPLACEMENT):
            return ""
        if len(after) > len(before):
            self._context = self._known
        self._known = len(self.tokens)
        return after[len(before) :]
