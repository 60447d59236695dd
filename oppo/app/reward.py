"""The reward of a run: a function, or a model of the kind that its architecture says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from oppo.app.roles import RoleLoader
from oppo.app.sections import DataSection, ModelsSection
from oppo.app.settings import Settings
from oppo.errors import ConfigError
from oppo.events import Drop
from oppo.gym import LIBRARY, verify
from oppo.hf.as_text.bridge import Bridge, BridgedReward
from oppo.hf.as_text.rendering import Form
from oppo.hf.as_text.whole import ClassifierReward, SimilarityReward
from oppo.hf.introspection import longest
from oppo.hf.serve.process_reward import ProcessRewardModel
from oppo.hf.serve.scorers import RewardModel
from oppo.hf.text import Text
from oppo.models import Scorer
from oppo.placement import Hosting
from oppo.rewards import FunctionReward, load_reward


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """The reward of a run.

    Attributes:
        positions: the longest sequence of the policy's tokens that it reads; ``None`` if it reads text.
        may_be_critic: whether the critic can start from its model.
    """

    scorer: Scorer[float | Drop]
    positions: int | None = None
    may_be_critic: bool = False


def reward_function(models: ModelsSection, data: DataSection, text: Text, tell: Callable[[str], None]) -> Judge | None:
    """Return the reward that is a function; ``None`` for a model.

    Raises:
        RewardError: it cannot be loaded.
    """
    if not models.reward_is_function:
        return None
    options: dict[str, Any] = {
        "prompt_column": data.column,
        "on_failure": models.reward_failure,
        "process": models.reward_process,
        "concurrency": models.reward_concurrency,
        "timeout": models.reward_timeout,
        "each": models.reward_each,
        "tell": tell,
    }
    if models.reward == LIBRARY:
        return Judge(FunctionReward(verify, text.decode, name=LIBRARY, **options))
    return Judge(load_reward(models.reward, text.decode, **options))


def reward_model(
    settings: Settings, text: Text, load: RoleLoader, place: Hosting, tell: Callable[[str], None]
) -> Judge:
    """Return the reward model, loaded and served in ``place``; ``tell`` is told how it reads.

    Raises:
        ConfigError: it cannot be loaded, or read in the form that the settings name.
        ModelRefused: it cannot be served.
    """
    say = partial(_said, settings.models.reward, tell)
    match load.reward_kind():
        case "scalar":
            return _scalar(settings, text, load, place, say)
        case "process":
            return _process(settings, text, load, place, say)
        case "classifier":
            return _classifier(settings, text, load, place, say)
        case "similarity":
            return _similarity(settings, text, load, place, say)


def _said(path: str, tell: Callable[[str], None], words: str) -> None:
    tell(f"models.reward: {path} {words}")


def _scalar(settings: Settings, text: Text, load: RoleLoader, place: Hosting, say: Callable[[str], None]) -> Judge:
    """Return a causal model with one label: it reads the policy's tokens, or else the rollout as text."""
    models, exact = settings.models, settings.run.exact
    model, difference = load.scalar_reward()
    if models.reward_form in {"auto", "tokens"} and difference is None:
        return Judge(RewardModel(model, thread=place, exact=exact), longest(model), may_be_critic=True)
    if models.reward_form in {"tokens", "pair"}:
        remedy = "set models.reward_reading = 'whole'" if models.reward_form == "pair" else "leave that out"
        why = "reads one text as it grows, and no pair" if models.reward_form == "pair" else difference
        raise ConfigError(
            f"models.reward: {models.reward} {why}, so models.reward_form cannot be {models.reward_form!r}: {remedy}"
        )
    reader = load.reward_tokenizer()
    form: Form = "chat" if reader.has_chat_template else "joined"
    if models.reward_form in {"chat", "joined", "response"}:
        form = models.reward_form
    bridge = Bridge(text, reader, form, settings.data.column, models.reward_over_long)
    say(f"{difference or 'is to read text'}: it reads rollouts as text while they grow, {FORMS[form]}")
    return Judge(BridgedReward(model, bridge, thread=place, exact=exact))


def _process(settings: Settings, text: Text, load: RoleLoader, place: Hosting, say: Callable[[str], None]) -> Judge:
    try:
        ends = text.ending_with(settings.models.reward_separators)
    except ConfigError as error:
        raise ConfigError(f"models.reward_separators: {error}") from error
    model = load.process_reward()
    say(f"rewards steps: it scores the last token of a response, and the {len(ends)} tokens that end one")
    scorer = ProcessRewardModel(model, thread=place, separators=ends, exact=settings.run.exact)
    return Judge(scorer, longest(model))


def _classifier(settings: Settings, text: Text, load: RoleLoader, place: Hosting, say: Callable[[str], None]) -> Judge:
    models, encoder = settings.models, load.encoder()
    form: Form = "chat" if encoder.text.has_chat_template else "pair"
    if models.reward_form == "tokens":
        raise ConfigError(
            f"models.reward: {models.reward} reads whole responses as text, so models.reward_form cannot be 'tokens'"
        )
    if models.reward_form != "auto":
        form = models.reward_form
    say(f"({type(encoder.model).__name__}) scores whole responses as text, {FORMS[form]}")
    return Judge(
        ClassifierReward(
            encoder,
            text,
            thread=place,
            form=form,
            label=models.reward_label or None,
            over_long=models.reward_over_long,
            prompt_column=settings.data.column,
            exact=settings.run.exact,
        )
    )


def _similarity(settings: Settings, text: Text, load: RoleLoader, place: Hosting, say: Callable[[str], None]) -> Judge:
    models, encoder = settings.models, load.encoder()
    say(f"({type(encoder.model).__name__}) scores responses by their similarity to column {models.reward_column!r}")
    scorer = SimilarityReward(
        encoder,
        text,
        column=models.reward_column,
        thread=place,
        over_long=models.reward_over_long,
        exact=settings.run.exact,
    )
    return Judge(scorer)


FORMS: dict[Form, str] = {
    "chat": "prompt and response by its own chat template",
    "joined": "the prompt and then the response",
    "pair": "prompt and response as two segments",
    "response": "the response alone",
}
