"""When a response ends: at a stop token, at a stop string, or at its length limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from oppo.events import FinishReason, Response
from oppo.models import Sampling

Detokenize: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the text of token ids; called from the thread of the model."""

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
        """Return whether the last token completes a stop string.

        It compares texts rather than their lengths: an incomplete character decodes to replacement characters.
        """
        tail = tokens[-self._window :]
        text = self._decode(tail)
        found = [(stop, text.rfind(stop)) for stop in self._sampling.stop_strings if stop in text]
        if not found:
            return False
        earlier = [self._decode(tail[:n]) for n in range(1, len(tail))]
        return any(not any(before.startswith(stop, at) for before in earlier) for stop, at in found)


def turn_ended(response: Response, stopping: StopCriteria, limit: int) -> FinishReason | None:
    """Return why a turn has ended with the last token of a response that may have turns; ``None`` if none has."""
    if not len(response) or not response.sampled[-1]:
        return None
    reason = stopping.reason(response.tokens.tolist(), limit)
    return None if reason == "length" else reason
