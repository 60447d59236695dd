"""A utility of reviews, and noisy preference pairs for a reward model.

The utility is a formula over the clauses that :func:`oppo.demo.language.read` finds, so it also judges what a policy
writes after PPO: a reward that rises while the utility falls has been hacked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from oppo.demo import language

WARMTH: Final = 3.0
"""Weight of the mean sentiment of the clauses."""
TOPICALITY: Final = 1.5
"""Weight of the fraction of things that belong to the topic."""
FLUENCY: Final = 3.0
"""Weight of the fraction of clauses outside of the language."""
REPETITION: Final = 2.0
"""Weight of the fraction of repeated clauses."""
LENGTH: Final = 0.6
"""Cost of a hundred words."""
ENOUGH: Final = 24
"""Words, without repetitions, below which brevity costs; half as many cost log 2."""
UNFINISHED: Final = 1.0
"""Cost of a text that stops without ending."""


@dataclass(frozen=True, slots=True)
class Review:
    """One response to a prompt; ``ended``: it was not cut off."""

    words: str
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Preferences:
    """Responses to one prompt, and the noisy preferences between every two of them.

    Attributes:
        pairs: ``(better, worse)``, indices into ``texts``.
    """

    ask: language.Ask
    texts: tuple[Review, ...]
    pairs: tuple[tuple[int, int], ...]


def utility(topic: str, review: Review) -> float:
    r"""Return the utility of ``review`` as one of a place of ``topic``; 0 is indifferent.

    Sentiment and topicality are shrunk means over the distinct clauses, :math:`(p - n) / (c + 1)` and
    :math:`(a - b) / (a + b + 1)`: one clause counts less than three that agree, and a repeated one adds nothing. That
    and the cost of brevity balance the cost of length.
    """
    clauses = language.clauses(review.words)
    distinct = dict.fromkeys(clauses)
    known = [meaning for clause in distinct if (meaning := language.read(clause)) is not None]
    own = language.things(topic)
    about = [meaning.thing in own for meaning in known if meaning.thing]
    words = sum(len(clause.split()) for clause in distinct)
    strangeness = 1 - len(known) / len(distinct) if distinct else 1.0
    repetition = 1 - len(distinct) / len(clauses) if clauses else 0.0
    return (
        WARMTH * sum(meaning.sentiment for meaning in known) / (len(distinct) + 1)
        + TOPICALITY * (2 * sum(about) - len(about)) / (len(about) + 1)
        - FLUENCY * strangeness
        - REPETITION * repetition
        - LENGTH * len(review.words.split()) / 100
        - max(0.0, math.log(ENOUGH / max(1, words)))
        - UNFINISHED * (not review.ended)
    )


def fluency(texts: Sequence[Review]) -> float:
    """Return the fraction of clauses that belong to the language, over the texts that ended."""
    clauses = [clause for text in texts if text.ended for clause in language.clauses(text.words)]
    return sum(language.read(clause) is not None for clause in clauses) / max(1, len(clauses))


def sample_preferences(
    asks: Sequence[language.Ask], rng: random.Random, *, texts: int = 4, noise: float = 0.2
) -> list[Preferences]:
    r"""Return ``texts`` responses to each prompt, with preferences after Bradley and Terry (1952).

    Of two texts with utilities :math:`u, v` the first is preferred with probability
    :math:`1 / (1 + \exp((v - u) / \mathit{noise}))`. Four texts give six pairs (as in Ouyang et al. 2022), three times
    as many for each text as pairs of their own would.
    """
    return [_preferences(ask, rng, texts, noise) for ask in asks]


def _preferences(ask: language.Ask, rng: random.Random, count: int, noise: float) -> Preferences:
    texts = tuple(_review(ask, rng) for _ in range(count))
    utilities = [utility(ask.topic, text) for text in texts]
    pairs = []
    for one, two in combinations(range(count), 2):
        margin = max(-30.0, min(30.0, (utilities[one] - utilities[two]) / noise))
        pairs.append((one, two) if rng.random() < 1 / (1 + math.exp(-margin)) else (two, one))
    return Preferences(ask, texts, tuple(pairs))


def _review(ask: language.Ask, rng: random.Random) -> Review:
    """Return a review, one in six spoiled: the reward model must know the faults of bad policies."""
    review = Review(language.review(ask.topic, rng))
    return rng.choice(_SPOILERS)(review, rng) if rng.random() < 1 / 6 else review


def _shuffled(review: Review, rng: random.Random) -> Review:
    words = review.words.split()
    rng.shuffle(words)
    return Review(" " + " ".join(words))


def _repeated(review: Review, rng: random.Random) -> Review:
    sentences = review.words.split(". ")
    again = rng.choice(sentences).strip().rstrip(".")
    return Review(review.words + f" {again}." * rng.randint(1, 4))


def _broken_off(review: Review, rng: random.Random) -> Review:
    words = review.words.split(" ")
    return Review(" ".join(words[: rng.randint(2, max(2, len(words) - 1))]), ended=False)


def _elsewhere(review: Review, rng: random.Random) -> Review:
    del review
    return Review(language.review(rng.choice(language.TOPICS).name, rng))


_SPOILERS: Final[tuple[Callable[[Review, random.Random], Review], ...]] = (
    _shuffled,
    _repeated,
    _broken_off,
    _elsewhere,
)
