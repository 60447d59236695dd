"""The settings of rewards: those of one of several, and how a reward model is to read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from oppo.declared import Filled, FromList, Positive, PositiveCount, required, setting
from oppo.gym import LIBRARY
from oppo.rewards import OnFailure
from oppo.user_code import SPEC

When: TypeAlias = Literal["auto", "whole"]
"""When a reward model reads."""

As: TypeAlias = Literal["auto", "tokens", "chat", "joined", "pair", "response"]
"""The form in which a reward model reads a rollout."""

OverLong: TypeAlias = Literal["error", "drop", "truncate"]
Separators: TypeAlias = Annotated[tuple[Filled, ...], FromList()]

SOURCE: Final = (
    "directory or hub name of a reward model, or `file.py:name` of a function, of a scorer, of a function that makes "
    "one in a `place`, or of several rewards `{name: (weight, function or scorer)}`; `reasoning-gym`: the verifier of "
    "its tasks"
)

OF_MODELS: Final = ("reading", "form", "over_long", "label", "column", "separators")
"""The settings of a reward that say how a model reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    """``[models.reward.NAME]``: one of several rewards, whose weighted sum is the score."""

    source: Filled = required(SOURCE)
    weight: float = setting(1.0, "its factor in the sum")
    reading: When | None = setting(None, "in place of `models.reward_reading`")
    form: As | None = setting(None, "in place of `models.reward_form`")
    over_long: OverLong | None = setting(None, "in place of `models.reward_over_long`")
    label: str | None = setting(None, "in place of `models.reward_label`")
    column: str | None = setting(None, "in place of `models.reward_column`")
    separators: Separators | None = setting(None, "in place of `models.reward_separators`")
    failure: OnFailure | None = setting(None, "in place of `models.reward_failure`")
    process: bool | None = setting(None, "in place of `models.reward_process`")
    concurrency: PositiveCount | None = setting(None, "in place of `models.reward_concurrency`")
    timeout: Positive | None = setting(None, "in place of `models.reward_timeout`")
    each: bool | None = setting(None, "in place of `models.reward_each`")
    keep_special_tokens: bool | None = setting(None, "in place of `models.reward_keep_special_tokens`")

    @property
    def is_function(self) -> bool:
        """Whether it is Python code, and no reward model."""
        return self.source == LIBRARY or file_of(self.source) is not None


def file_of(spec: str) -> Path | None:
    """Return the file of ``file.py:name``; ``None`` for another text."""
    named = SPEC.match(spec)
    return None if named is None else Path(named["file"])
