"""Rewards at places of a response, which a function may return beside a number: by token, position or character."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Final, SupportsFloat, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np

from oppo.errors import shown
from oppo.events import Response
from oppo.token_rewards import TokenRewards

K = TypeVar("K")

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are no character."""


@dataclass(frozen=True, slots=True)
class ByCharacter:
    """Rewards by the position of a character in the completion: the token that completes it is rewarded.

    A negative position counts from the end.

    Example:
        >>> def steps(prompts, completions):
        ...     return [ByCharacter({at: 0.1 for at, c in enumerate(text) if c == ";"}) for text in completions]
        >>> steps(["2+2"], ["4;"])
        [ByCharacter(rewards={1: 0.1})]
    """

    rewards: Mapping[int, float]


Placed: TypeAlias = TokenRewards | ByCharacter | Mapping[int, float]
"""Rewards of tokens, by the position of a character, or by that of a token."""


def is_placed(item: object) -> bool:
    """Return whether a function's answer for one completion has the form of rewards at places, not of a number."""
    one_row = isinstance(item, np.ndarray) and item.ndim == 1
    return one_row or isinstance(item, TokenRewards | ByCharacter | Mapping | list | tuple)


def placed(item: object) -> Placed:
    """Return such an answer as plain numbers, whatever the objects in it.

    Raises:
        ValueError: a reward is no finite number, or a position no whole one.
    """
    if isinstance(item, ByCharacter):
        return ByCharacter(_by_position(item.rewards))
    if isinstance(item, Mapping):
        return _by_position(item)
    rewards = item.rewards if isinstance(item, TokenRewards) else cast("Sequence[object]", item)
    return TokenRewards([_number(reward) for reward in rewards])


def token_rewards(rewards: Placed, response: Response, decode: Callable[[Sequence[int]], str]) -> TokenRewards:
    """Return the rewards of the tokens of a response.

    Args:
        rewards: as from :func:`placed`.
        response: of n tokens.
        decode: token ids to text, as the function was given it.

    Raises:
        ValueError: there is not one for each token, or one is for a position that is not there.
    """
    if isinstance(rewards, ByCharacter):
        rewards = _by_token(rewards.rewards, response.tokens.tolist(), decode)
    if isinstance(rewards, Mapping):
        return TokenRewards.at(len(response), rewards)
    if len(rewards.rewards) != len(response):
        raise ValueError(f"these are {len(rewards.rewards)} rewards for a completion of {len(response)} tokens")
    return rewards


def _by_token(
    rewards: Mapping[int, float], tokens: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> dict[int, float]:
    # The token of a character is the one from which on the decoded text has all up to it. Texts are compared, not their
    # lengths: the first tokens of a character decode to replacement characters, in some vocabularies to one each.
    text = decode(tokens)
    partial = set[int]() if text.isascii() else {token for token in set(tokens) if REPLACEMENT in decode([token])}
    ends = [count for count, token in enumerate(tokens, 1) if token in partial]
    by_token: dict[int, float] = {}
    for position, reward in rewards.items():
        at = position + len(text) if position < 0 else position
        if not 0 <= at < len(text):
            raise ValueError(f"there is no character {position} in a completion of {len(text)} characters")
        token = _completing(text, at, tokens, ends, decode)
        by_token[token] = by_token.get(token, 0.0) + reward
    return by_token


def _completing(
    text: str, at: int, tokens: Sequence[int], ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> int:
    def has(count: int) -> bool:
        return decode(tokens[:count]).startswith(text[: at + 1])

    count = 1 + bisect_left(range(1, len(tokens)), True, key=has)
    # A decoder of bytes may take a character back while the one behind it is incomplete: all bytes of a run are read
    # as one. Where an incomplete character leaves this one alone, it is in no such run.
    for end in ends[bisect_right(ends, count) :]:
        if not has(end):
            count = end + 1
        elif not text.startswith(decode(tokens[:end])):
            break
    return count - 1


def _by_position(rewards: Mapping[K, object]) -> dict[int, float]:
    if not all(isinstance(position, SupportsIndex) for position in rewards):
        raise ValueError("a position must be a whole number")
    return {index(cast("SupportsIndex", position)): _number(reward) for position, reward in rewards.items()}


def _number(item: object) -> float:
    number = float(item) if isinstance(item, SupportsFloat) and not isinstance(item, complex) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{shown(item)} is no finite number")
    return number
