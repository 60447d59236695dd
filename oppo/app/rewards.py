"""The reward and the environment of a run, as the settings name them: functions, scorers and models, one or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from oppo.app.sections import DataSection, ModelsSection, RewardPart, file_of
from oppo.environments import FunctionEnvironment
from oppo.events import Drop
from oppo.hf.text import Text
from oppo.models import Scorer
from oppo.placement import Hosting
from oppo.rewards import Rewards, load_reward

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class UserCode:
    """What of a run is a user's own code, loaded and checked before any model is.

    Attributes:
        environment: ``None`` where responses have no turns.
        rewards: the rewards that come from files, by the keys of their sources.
    """

    models: ModelsSection
    text: Text
    tell: Callable[[str], None]
    environment: FunctionEnvironment | None = None
    rewards: Mapping[str, Scorer[float | Drop]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, models: ModelsSection, data: DataSection, text: Text, tell: Callable[[str], None], place: Hosting
    ) -> UserCode:
        """Return the code that the settings name; scorers that a file makes work in ``place``.

        Raises:
            OppoError: a file has no such function, or one that is of no use here.
        """
        leave_retries_to_notices()
        rewards = {
            key: load_reward(
                part.source,
                text.decode,
                place=place,
                tell=tell,
                on_drop=models.reward_drop,
                prompt_column=data.column,
                **_options(models, part),
            )
            for key, part in models.rewards.items()
            if file_of(part.source) is not None
        }
        return cls(models, text, tell, _environment(models, data, text, tell), rewards)

    def reward(
        self, serve: Callable[[str, str], tuple[M, Scorer[float | Drop]]]
    ) -> tuple[Scorer[float | Drop], Sequence[M]]:
        """Return the reward, and the models that are part of it.

        Args:
            serve: ``f(key, source)``: loads the model of ``models.KEY``, a directory or hub name, and returns it with
                the scorer that serves it.
        """
        loaded, scorers = list[M](), dict(self.rewards)
        for key, part in self.models.rewards.items():
            if key not in scorers:
                model, scorers[key] = serve(key, part.source)
                loaded.append(model)
        if isinstance(self.models.reward, str):
            return scorers["reward"], loaded
        parts = {name: (part.weight, scorers[f"reward.{name}"]) for name, part in self.models.reward.items()}
        return Rewards(parts, on_drop=self.models.reward_drop, tell=self.tell), loaded


def leave_retries_to_notices() -> None:
    """Have the retries of HTTP rewards told by the run's notices alone, not by stamina's log as well, process-wide."""
    with suppress(ImportError):  # an extra
        from stamina.instrumentation import set_on_retry_hooks  # noqa: PLC0415 - an extra

        set_on_retry_hooks(())


def _options(models: ModelsSection, part: RewardPart) -> dict[str, Any]:
    """Return the options of a reward function: the part's own, or else those of all."""
    several = not isinstance(models.reward, str)

    def chosen(key: str) -> Any:
        own = getattr(part, key)
        return getattr(models, f"reward_{key}") if own is None else own

    return {
        "on_failure": chosen("failure"),
        "process": "sync" if several and part.process is None and models.reward_process else chosen("process"),
        "concurrency": chosen("concurrency"),
        "timeout": chosen("timeout"),
        "each": chosen("each"),
        "optional": several,
    }


def _environment(
    models: ModelsSection, data: DataSection, text: Text, tell: Callable[[str], None]
) -> FunctionEnvironment | None:
    if not models.environment:
        return None
    return FunctionEnvironment(
        models.environment,
        text.decode,
        text.encode_exactly,
        on_failure=models.environment_failure,
        timeout=models.environment_timeout,
        concurrency=models.environment_concurrency,
        process=models.environment_process,
        prompt_column=data.column,
        tell=tell,
    )
