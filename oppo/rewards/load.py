"""The reward that ``file.py:name`` names: a function, several rewards, or a scorer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from oppo import user_code
from oppo.errors import RewardError
from oppo.events import Drop
from oppo.models import Scorer
from oppo.observe import Telling, silent
from oppo.rewards.combined import Rewards, is_scorer
from oppo.rewards.function import FunctionReward


def load_reward(spec: str, decode: Callable[[Sequence[int]], str], **options: Any) -> Scorer[float | Drop]:
    """Return the reward that ``file.py:name`` names, as a scorer.

    The name is that of a function, of a dictionary ``{name: (weight, function or scorer)}``, or of a scorer.

    Args:
        spec: file and name.
        decode: token ids to text, without special tokens.
        options: of each :class:`FunctionReward`.

    Raises:
        ConfigError: a weight is no number.
        RewardError: there is no such file or name, or it names nothing that is a reward.
    """
    found = user_code.load_object(spec, RewardError)
    if isinstance(found, Mapping):
        if options.get("process"):
            raise RewardError(
                f"{spec} holds several rewards, which are called in this process: leave models.reward_process out, or "
                "name one function"
            )
        return Rewards(found, decode, **options)
    if is_scorer(found):
        if isinstance(found, Telling):
            found.tell = options.get("tell", silent)
        return cast("Scorer[float | Drop]", found)
    return FunctionReward(spec, decode, **options)
