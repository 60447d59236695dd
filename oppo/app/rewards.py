"""The reward and the environment of a run, as the settings name them: functions, scorers and models, one or several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from oppo.config.sections import (
    DataSection,
    EnvironmentSection,
    FunctionRewardSection,
    ModelRewardSection,
    RewardSection,
)
from oppo.config.settings import Settings
from oppo.environments import FunctionEnvironment
from oppo.errors import ConfigError
from oppo.events import Drop
from oppo.hf.tokenizer import HfTokenizer
from oppo.libraries import require
from oppo.models import Scorer
from oppo.placement import Hosting
from oppo.rewards import FunctionReward, Rewards, load_reward
from oppo.rewards.gym import LIBRARY, verify

OPTIONS: Final = ("on_failure", "process", "concurrency", "timeout", "each")
"""The settings of a reward that are arguments of its function."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """The user's own code in a run, loaded and checked before any model is.

    Attributes:
        settings: of all rewards, by their place in the file: ``rewards.0``, ``rewards.1``, ...
        environment: ``None`` where responses have no turns.
        rewards: those that are code.
    """

    settings: Mapping[str, RewardSection]
    environment: FunctionEnvironment | None
    rewards: Mapping[str, Scorer[float | Drop]]

    @classmethod
    def of(
        cls,
        settings: Settings,
        tokenizer: HfTokenizer,
        place: Hosting,
    ) -> UserCode:
        """Return the code that the settings name; scorers that a file makes work in ``place``.

        Raises:
            OppoError: a file has no such function, or one that is of no use here.
        """
        leave_retries_to_notices()

        def loaded(key: str, reward: FunctionRewardSection) -> Scorer[float | Drop]:
            decode = tokenizer.decode_whole if reward.keep_special_tokens else tokenizer.decode
            options: dict[str, Any] = {
                "prompt_column": settings.data.column,
                "optional": reward.name is not None,
            }
            options |= {name: getattr(reward, name) for name in OPTIONS}
            if reward.source == LIBRARY:
                return _of_tasks(key, decode, options)
            return load_reward(reward.source, decode, place=place, on_drop=reward.on_drop, **options)

        tables = settings.reward_tables
        rewards = {key: loaded(key, each) for key, each in tables.items() if isinstance(each, FunctionRewardSection)}
        return cls(tables, _environment(settings.environment, settings.data, tokenizer), rewards)

    def check_columns(self, names: Collection[str]) -> None:
        """Check that the data has the columns that the rewards need.

        Raises:
            RewardError: one is not there, or bears the name of an argument of a reward function.
            ConfigError: a sentence encoder would compare with a column that is not there.
        """
        for scorer in self.rewards.values():
            for function in scorer.functions if isinstance(scorer, Rewards) else [scorer]:
                if isinstance(function, FunctionReward):
                    function.arguments_of(names)
        for key, reward in self.settings.items():
            if isinstance(reward, ModelRewardSection) and reward.column and reward.column not in names:
                raise ConfigError(
                    f"{key} compares responses with {reward.column!r}, which is no column of the data; the columns "
                    f"there are {', '.join(sorted(names))}"
                )

    def reward(self, models: Mapping[str, Scorer[float | Drop]]) -> Scorer[float | Drop]:
        """Return the reward.

        Args:
            models: the reward models, by their place in the file.
        """
        scorers = {**self.rewards, **models}
        named = {each.name: (each, scorers[key]) for key, each in self.settings.items() if each.name is not None}
        if not named:
            return next(iter(scorers.values()))
        parts = {name: (each.weight, scorer) for name, (each, scorer) in named.items()}
        return Rewards(parts, on_drop={name: each.on_drop for name, (each, _) in named.items()})


def leave_retries_to_notices() -> None:
    """Silence stamina's log in this process: the run's notices report the retries of HTTP rewards."""
    with suppress(ImportError):  # an extra
        from stamina.instrumentation import set_on_retry_hooks  # noqa: PLC0415 - an extra

        set_on_retry_hooks(())


def _of_tasks(key: str, decode: Callable[[Sequence[int]], str], options: Mapping[str, Any]) -> FunctionReward:
    """Return the verifier of the tasks of reasoning-gym.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    require(LIBRARY, f"{key}: {LIBRARY}", module="reasoning_gym")
    return FunctionReward(verify, decode, name=LIBRARY, **{**options, "process": bool(options["process"])})


def _environment(section: EnvironmentSection, data: DataSection, tokenizer: HfTokenizer) -> FunctionEnvironment | None:
    if not section.source:
        return None
    keeps = section.keep_special_tokens
    return FunctionEnvironment(
        section.source,
        tokenizer.decode_whole if keeps else tokenizer.decode,
        tokenizer.encode_whole if keeps else tokenizer.encode_exactly,
        on_failure=section.on_failure,
        timeout=section.timeout,
        concurrency=section.concurrency,
        process=section.process,
        prompt_column=data.column,
    )
