"""The reward of ``reviews``, for oppo's environment and the peer's: the utility of a review of the demo's language."""

from __future__ import annotations

from collections.abc import Sequence

from oppo.demo.language import Review, utility

END = "<|end|>"  # of a response, as in oppo.demo.assets, which the peer's environment lacks


def judged(prompts: Sequence[str], completions: Sequence[str], topic: Sequence[str]) -> list[float]:
    """Return the utility of reviews; one without :data:`END` was cut off."""
    del prompts
    parted = [text.partition(END) for text in completions]
    return [utility(each, Review(words, bool(end))) for each, (words, end, _) in zip(topic, parted, strict=True)]
