"""A reward made of rules that anybody can read: polite, complete, brief, fresh and on topic.

A completion's score lies in [-1, 4]: the weighted sum of five parts, each in [0, 1], scaled down where there is hardly
an answer at all, minus one for rudeness.

========  ======  ====================================================================================
part      weight  1 where
========  ======  ====================================================================================
polite    1.0     it holds at least one courteous phrase (thanks, please, I hope, you are welcome ...)
complete  1.0     it ends like a sentence: ``.``, ``!`` or ``?``, and not a list number or an ellipsis
brief     1.0     it has fewer than 60 words; falls in a line to 0 at 80
fresh     0.5     at least nine tenths of its three-word runs are distinct; falls in a line to 0 at half
on_topic  0.5     it shares a content word with the prompt (compared by the first five letters)
========  ======  ====================================================================================

An answer of fewer than five words has its sum multiplied by ``words / 5``; an empty one scores 0. The rules measure
manners and form, never truth: "Thanks for asking about black holes." scores 4. That is what a policy trained on it
learns, and what it may exploit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Conversation: TypeAlias = str | Sequence[Mapping[str, str]]
"""A prompt as text or as chat messages; of a chat the last user message counts."""

LOWEST, HIGHEST = -1.0, 4.0
WEIGHTS = {"polite": 1.0, "complete": 1.0, "brief": 1.0, "fresh": 0.5, "on_topic": 0.5}
RUDENESS = 1.0
"""Subtracted once, however rude the answer is."""
MINIMUM_WORDS = 5
WORD_LIMIT, WORD_ZERO = 60, 80
DISTINCT_FULL, DISTINCT_ZERO = 0.9, 0.5
STEM_LETTERS = 5

_WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
_COURTESY = re.compile(
    r"\b(?:please|thanks|thank you|you(?:'re| are) (?:very |most )?welcome|(?:i|we) hope|happy to|glad (?:to|you)"
    r"|of course|certainly|my pleasure|feel free|(?:i|we)'d (?:love|be (?:happy|glad|delighted))"
    r"|(?:i|we)(?:'m| am|'re| are) (?:so |very |really |truly )?(?:sorry|grateful)|apologi[sz]e|apologies"
    r"|appreciate|would you mind|(?:could|would) you|(?:kind|best|warm) (?:regards|wishes)|good luck|let me know"
    r"|good question|great question)\b",
    re.IGNORECASE,
)
_RUDE = re.compile(
    r"\b(?:stupid|idiots?|idiotic|morons?|dumb|shut up|get lost|loser|pathetic|screw you|damn|go to hell"
    r"|hate you|don't care|none of your business|waste of (?:my )?time)\b",
    re.IGNORECASE,
)
_CLOSERS = " \t\r\n\"'\u201d\u00bb)]}*_`"
_CURLY_APOSTROPHE = "\u2019"
_ENDING = re.compile(r"[.!?]$")
_UNFINISHED = re.compile(r"(?:\.\.|…|(?:^|\n)[ \t]*\(?\d+\.)$")
"""An ellipsis, or the number of a list item that never came."""


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


_FUNCTION_WORDS = frozenset(
    _words(
        """
        a about after again all also always am an and any are as ask at be because been before being but by can come
        could did do does doing don't down each every few for from get give go good had has have he help her here him
        his how i i'd i'm if in into is it it's its just keep know let like long make makes many may me mean might
        more most much must my need never new no not of off on once one or other our out over own people please put
        really same say shall she should so some someone something start still such suggest take tell than thank
        that the their them then there these they thing things this those three to too try two under until up us use
        very want was way we well were what what's when where which while who why will with without word words would
        write yes you your
        """
    )
)
"""Words that say nothing of a topic."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the rules say of one completion: five parts in [0, 1], the scale for very short answers, and rudeness."""

    polite: float
    complete: float
    brief: float
    fresh: float
    on_topic: float
    substance: float
    rude: bool

    @property
    def score(self) -> float:
        """The completion's score in [-1, 4]."""
        total = sum(weight * float(getattr(self, name)) for name, weight in WEIGHTS.items())
        return self.substance * total - RUDENESS * self.rude


def reward(
    prompts: Sequence[Conversation], completions: Sequence[Conversation], **columns: Sequence[object]
) -> list[float]:
    """Return the score of each completion, in [-1, 4]; the data's other columns do not matter.

    Raises:
        ValueError: there are not as many completions as prompts.
    """
    del columns
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    return [judge(prompt, text).score for prompt, text in zip(prompts, texts, strict=True)]


def judge(prompt: Conversation, completion: str) -> Parts:
    """Return what the rules say of ``completion`` as the answer to ``prompt``."""
    completion = _straight(completion)
    words = _words(completion)
    return Parts(
        polite=float(_COURTESY.search(completion) is not None),
        complete=_complete(completion),
        brief=_ramp(len(words), full=WORD_LIMIT - 1, zero=WORD_ZERO),
        fresh=_ramp(_distinct_trigrams(words), full=DISTINCT_FULL, zero=DISTINCT_ZERO),
        on_topic=_on_topic(_words(_straight(_question(prompt))), words),
        substance=min(1.0, len(words) / MINIMUM_WORDS),
        rude=_RUDE.search(completion) is not None,
    )


def _straight(text: str) -> str:
    return text.replace(_CURLY_APOSTROPHE, "'")


def _question(prompt: Conversation) -> str:
    if isinstance(prompt, str):
        return prompt
    asked = [message["content"] for message in prompt if message["role"] == "user"]
    return asked[-1] if asked else ""


def _complete(completion: str) -> float:
    text = completion.rstrip(_CLOSERS)
    return float(_ENDING.search(text) is not None and _UNFINISHED.search(text) is None)


def _ramp(value: float, *, full: float, zero: float) -> float:
    """Return 1 at ``full`` and beyond, 0 at ``zero`` and beyond, the straight line between."""
    return min(1.0, max(0.0, (value - zero) / (full - zero)))


def _distinct_trigrams(words: Sequence[str]) -> float:
    """Return the share of distinct three-word runs; 1 where there is none."""
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(runs)) / len(runs) if runs else 1.0


def _on_topic(asked: Sequence[str], answered: Sequence[str]) -> float:
    topic = _stems(asked)
    return float(not topic or not topic.isdisjoint(_stems(answered)))


def _stems(words: Sequence[str]) -> set[str]:
    """Return the first letters of the content words, so that "planted" and "plants" are the same."""
    return {word[:STEM_LETTERS] for word in words if len(word) > 2 and word not in _FUNCTION_WORDS}
