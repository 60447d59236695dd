"""DAPO: GRPO with a wider clip above, groups that are replaced, and long responses punished (arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oppo.algorithms.algorithm import Roles
from oppo.algorithms.grpo import GRPO
from oppo.declared import Count, NonNegative, Positive, PositiveCount, setting
from oppo.errors import ConfigError
from oppo.shaping import ScoreShaping
from oppo.stages import Selection
from oppo.training import Aggregation

LONG_PART = 5
"""The penalty on long responses grows over one part in so many of the longest one, unless settings say otherwise."""


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """DAPO: as `grpo`, but clipped later above; groups of equal scores are replaced, long responses punished.

    Yu et al. 2025, section 3: clip-higher, dynamic sampling, the loss as a mean over tokens, soft over-long punishment
    (over 4,096 of 20,480 tokens, section 4.1); no KL penalty.
    """

    kl: NonNegative = 0.0
    clip_high: Positive | None = 0.28
    aggregation: Aggregation = "tokens"
    dynamic_sampling: bool = setting(
        default=True, description="replace a group whose scores are all equal by another within the step"
    )
    max_rounds: PositiveCount = setting(
        10, "rounds of a step in which groups are replaced, after which the run ends with an error"
    )
    long_buffer: Count | None = setting(
        None,
        "the last tokens before `sampling.max_new_tokens`, over which a penalty on the number of sampled tokens grows; "
        "a fifth of `max_new_tokens` when absent; 0: no penalty",
    )
    long_penalty: NonNegative = setting(
        1.0, "subtracted from the reward of a response with `sampling.max_new_tokens` sampled tokens"
    )

    def selection(self) -> Selection | None:
        """Return a new stage that rejects groups whose scores are all equal (section 3.2)."""
        return Selection(max_rounds=self.max_rounds) if self.dynamic_sampling else None

    def shaping_of(self, roles: Roles) -> ScoreShaping:
        """Return the shaping of scores with the penalty on long responses (section 3.4).

        Raises:
            ConfigError: the penalty would begin before the response does.
        """
        buffer = roles.max_new_tokens // LONG_PART if self.long_buffer is None else self.long_buffer
        begin = roles.max_new_tokens - buffer
        if begin < 0:
            raise ConfigError(
                f"algorithm.long_buffer = {buffer} is more than sampling.max_new_tokens = "
                f"{roles.max_new_tokens}: the penalty grows over the last tokens before that cap"
            )
        return replace(self.shaping, long_from=begin, long_to=roles.max_new_tokens, long_penalty=self.long_penalty)
