"""When a response ends: at a stop token, at a stop text, or because it is long enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from oppo.events import FinishReason
    from oppo.models import Sampling

Detokenize: TypeAlias = Callable[[Sequence[int]], str]
"""The text of token ids; called from the thread of the model."""

SLACK = 8
"""Tokens read before those that a stop text can span: the first of them may decode differently than in its place."""


class StopCriteria:
    """Says of a response, after each token, whether that token ends it.

    A stop text ends a response with the token that completes it, which stays part of the response. As many of the last
    tokens are decoded as the longest of the texts has bytes, and a few more: a token is at least a byte.

    Args:
        sampling: what ends a response.
        decode: gives the text of tokens.

    Raises:
        ValueError: there are stop texts, but no ``decode``.
    """

    def __init__(self, sampling: Sampling, decode: Detokenize | None = None) -> None:
        if sampling.stop_strings and decode is None:
            raise ValueError("stop_strings are matched on decoded text: give the policy decode=..., tokens to text")
        self._sampling = sampling
        self._decode: Detokenize = decode or (lambda tokens: "")
        self._window = SLACK + max((len(text.encode()) for text in sampling.stop_strings), default=0)

    def reason(self, tokens: Sequence[int], limit: int) -> FinishReason | None:
        """Return why the response ends with the last of ``tokens``; ``None`` while it goes on.

        Args:
            tokens: the response so far.
            limit: the length at which it ends in any case.
        """
        stop = self._sampling.stop
        if tokens[-1] in stop:
            return "eos" if tokens[-1] == stop[0] else "stop"
        if self._sampling.stop_strings and len(tokens) > self._sampling.min_new_tokens and self._completed(tokens):
            return "stop"
        return "length" if len(tokens) >= limit else None

    def _completed(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes a stop text.

        Texts are compared, and not their lengths: while a character lacks some of its tokens, others stand for it.
        """
        tail = tokens[-self._window :]
        text = self._decode(tail)
        found = [(stop, text.rfind(stop)) for stop in self._sampling.stop_strings if stop in text]
        if not found:
            return False
        earlier = [self._decode(tail[:n]) for n in range(1, len(tail))]
        return any(not any(before.startswith(stop, at) for before in earlier) for stop, at in found)
