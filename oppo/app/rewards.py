"""The reward and the environment of a run, as the settings name them: functions, scorers and models, one or several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from oppo.config.sections import DataSection, ModelsSection, RewardPart
from oppo.environments import FunctionEnvironment
from oppo.errors import ConfigError
from oppo.events import Drop
from oppo.hf.tokenizer import HfTokenizer
from oppo.libraries import require
from oppo.models import Scorer
from oppo.placement import Hosting
from oppo.rewards import FunctionReward, Rewards, load_reward
from oppo.rewards.gym import LIBRARY, verify


@dataclass(frozen=True, slots=True)
class UserCode:
    """The user's own code in a run, loaded and checked before any model is.

    Attributes:
        environment: ``None`` where responses have no turns.
        rewards: the rewards that come from files, by the keys of their sources.
    """

    models: ModelsSection
    tokenizer: HfTokenizer
    environment: FunctionEnvironment | None = None
    rewards: Mapping[str, Scorer[float | Drop]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        models: ModelsSection,
        data: DataSection,
        tokenizer: HfTokenizer,
        place: Hosting,
    ) -> UserCode:
        """Return the code that the settings name; scorers that a file makes work in ``place``.

        Raises:
            OppoError: a file has no such function, or one that is of no use here.
        """
        leave_retries_to_notices()

        def loaded(key: str, part: RewardPart) -> Scorer[float | Drop]:
            keeps = models.of_reward(part, "keep_special_tokens")
            decode = tokenizer.decode_whole if keeps else tokenizer.decode
            options = {"prompt_column": data.column, **_options(models, part)}
            if part.source == LIBRARY:
                return _of_tasks(key, decode, options)
            return load_reward(part.source, decode, place=place, on_drop=models.reward_drop, **options)

        rewards = {key: loaded(key, part) for key, part in models.rewards.items() if part.is_function}
        return cls(models, tokenizer, _environment(models, data, tokenizer), rewards)

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
        for key, part in self.models.rewards.items():
            column = "" if part.is_function else self.models.of_reward(part, "column")
            if column and column not in names:
                raise ConfigError(
                    f"models.{key} compares responses with {column!r}, which is no column of the data; the columns "
                    f"there are {', '.join(sorted(names))}"
                )

    def reward(self, judges: Mapping[str, Scorer[float | Drop]]) -> Scorer[float | Drop]:
        """Return the reward.

        Args:
            judges: the reward models, by the keys of their sources.
        """
        scorers = {**self.rewards, **judges}
        if isinstance(self.models.reward, str):
            return scorers["reward"]
        parts = {name: (part.weight, scorers[f"reward.{name}"]) for name, part in self.models.reward.items()}
        return Rewards(parts, on_drop=self.models.reward_drop)


def leave_retries_to_notices() -> None:
    """Silence stamina's log in this process: the run's notices report the retries of HTTP rewards."""
    with suppress(ImportError):  # an extra
        from stamina.instrumentation import set_on_retry_hooks  # noqa: PLC0415 - an extra

        set_on_retry_hooks(())


def _options(models: ModelsSection, part: RewardPart) -> dict[str, Any]:
    """Return the options of a reward function: the part's own, or else those of all."""
    several = not isinstance(models.reward, str)
    apart = models.of_reward(part, "process")
    return {
        "on_failure": models.of_reward(part, "failure"),
        "process": "sync" if several and part.process is None and apart else apart,
        "concurrency": models.of_reward(part, "concurrency"),
        "timeout": models.of_reward(part, "timeout"),
        "each": models.of_reward(part, "each"),
        "optional": several,
    }


def _of_tasks(key: str, decode: Callable[[Sequence[int]], str], options: Mapping[str, Any]) -> FunctionReward:
    """Return the verifier of the tasks of reasoning-gym.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    require(LIBRARY, f"models.{key}: {LIBRARY}", module="reasoning_gym")
    return FunctionReward(verify, decode, name=LIBRARY, **{**options, "process": bool(options["process"])})


def _environment(models: ModelsSection, data: DataSection, tokenizer: HfTokenizer) -> FunctionEnvironment | None:
    if not models.environment:
        return None
    keeps = models.environment_keep_special_tokens
    return FunctionEnvironment(
        models.environment,
        tokenizer.decode_whole if keeps else tokenizer.decode,
        tokenizer.encode_whole if keeps else tokenizer.encode_exactly,
        on_failure=models.environment_failure,
        timeout=models.environment_timeout,
        concurrency=models.environment_concurrency,
        process=models.environment_process,
        prompt_column=data.column,
    )
