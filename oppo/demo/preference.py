"""What the imagined readers of reviews prefer, and the noisy comparisons a reward model learns it from.

The preference is a formula over what :func:`oppo.demo.language.read` finds in a text, so that it can also judge what a
policy writes after PPO: a reward that rises while this one falls has been hacked.
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
"""Weight of the share of things that belong to the topic."""
FLUENCY: Final = 3.0
"""Weight of the share of clauses that are no clauses of the language."""
REPETITION: Final = 2.0
"""Weight of the share of clauses that have been said before."""
LENGTH: Final = 0.6
"""Cost of a hundred words."""
ENOUGH: Final = 24
"""Words, repetitions not counted, that make a review of use; half as many cost log 2, so brevity does not pay."""
UNFINISHED: Final = 1.0
"""Cost of a text that stops without ending."""


@dataclass(frozen=True, slots=True)
class Text:
    """One response to a prompt; ``ended`` says whether its writer chose to stop there."""

    words: str
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Comparison:
    """Some responses to one prompt, every two of which a noisy judge has compared.

    Attributes:
        verdicts: ``(better, worse)``, indices into ``texts``, for each two of them.
    """

    ask: language.Ask
    texts: tuple[Text, ...]
    verdicts: tuple[tuple[int, int], ...]


def utility(topic: str, text: Text) -> float:
    r"""Return how much readers like ``text`` as a review of a place of ``topic``; 0 is indifferent.

    Sentiment and topicality are shrunk means over the distinct clauses, :math:`(p - n) / (c + 1)` and
    :math:`(a - b) / (a + b + 1)`: one clause says less than three that agree, and saying it again adds nothing. That
    and the cost of brevity balance the cost of length.
    """
    said = language.clauses(text.words)
    distinct = dict.fromkeys(said)
    known = [meaning for clause in distinct if (meaning := language.read(clause)) is not None]
    own = language.things(topic)
    about = [meaning.thing in own for meaning in known if meaning.thing]
    told = sum(len(clause.split()) for clause in distinct)
    strangeness = 1 - len(known) / len(distinct) if distinct else 1.0
    repetition = 1 - len(distinct) / len(said) if said else 0.0
    return (
        WARMTH * sum(meaning.sentiment for meaning in known) / (len(distinct) + 1)
        + TOPICALITY * (2 * sum(about) - len(about)) / (len(about) + 1)
        - FLUENCY * strangeness
        - REPETITION * repetition
        - LENGTH * len(text.words.split()) / 100
        - max(0.0, math.log(ENOUGH / max(1, told)))
        - UNFINISHED * (not text.ended)
    )


def fluency(texts: Sequence[Text]) -> float:
    """Return the share of clauses that are clauses of the language, over the texts that ended."""
    said = [clause for text in texts if text.ended for clause in language.clauses(text.words)]
    return sum(language.read(clause) is not None for clause in said) / max(1, len(said))


def compare(
    asks: Sequence[language.Ask], rng: random.Random, *, texts: int = 4, noise: float = 0.2
) -> list[Comparison]:
    r"""Return a comparison of ``texts`` responses to each prompt, judged after Bradley and Terry (1952).

    Of two texts with utilities :math:`u, v` the first is found better with probability
    :math:`1 / (1 + \exp((v - u) / \mathit{noise}))`. Four texts give six verdicts (as in Ouyang et al. 2022), three
    times as many a text as pairs would.
    """
    return [_comparison(ask, rng, texts, noise) for ask in asks]


def _comparison(ask: language.Ask, rng: random.Random, count: int, noise: float) -> Comparison:
    texts = tuple(_text(ask, rng) for _ in range(count))
    liked = [utility(ask.topic, text) for text in texts]
    verdicts = []
    for one, two in combinations(range(count), 2):
        margin = max(-30.0, min(30.0, (liked[one] - liked[two]) / noise))
        verdicts.append((one, two) if rng.random() < 1 / (1 + math.exp(-margin)) else (two, one))
    return Comparison(ask, texts, tuple(verdicts))


def _text(ask: language.Ask, rng: random.Random) -> Text:
    """Return a review, in one of six cases spoiled, so that a reward model has seen what bad policies write."""
    text = Text(language.review(ask.topic, rng))
    return rng.choice(_SPOILERS)(text, rng) if rng.random() < 1 / 6 else text


def _shuffled(text: Text, rng: random.Random) -> Text:
    words = text.words.split()
    rng.shuffle(words)
    return Text(" " + " ".join(words))


def _repeated(text: Text, rng: random.Random) -> Text:
    sentences = text.words.split(". ")
    again = rng.choice(sentences).strip().rstrip(".")
    return Text(text.words + f" {again}." * rng.randint(1, 4))


def _broken_off(text: Text, rng: random.Random) -> Text:
    words = text.words.split(" ")
    return Text(" ".join(words[: rng.randint(2, max(2, len(words) - 1))]), ended=False)


def _elsewhere(text: Text, rng: random.Random) -> Text:
    del text
    return Text(language.review(rng.choice(language.TOPICS).name, rng))


_SPOILERS: Final[tuple[Callable[[Text, random.Random], Text], ...]] = (_shuffled, _repeated, _broken_off, _elsewhere)
