"""Digits are shown one by one, and a turn that repeats the digit that it was shown is rewarded."""

from __future__ import annotations

from oppo.environments import TextAnswer, TextTurn


def play(turn: TextTurn) -> TextAnswer:
    """Reward a turn, and show the next digit; after the last one there is none, which ends the response."""
    shown = str(turn.columns["shown"])
    return TextAnswer(shown[turn.number + 1 : turn.number + 2], reward=float(turn.text == shown[turn.number]))
