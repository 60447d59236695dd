"""The reward models of a run, each served as its architecture and its settings say."""

from __future__ import annotations

from dataclasses import dataclass

from oppo.app.roles import RoleLoader
from oppo.config.sections import OF_MODELS, As, ModelsSection, OverLong, When
from oppo.errors import ConfigError
from oppo.events import Drop
from oppo.hf.as_text.rendering import Form
from oppo.hf.as_text.streamed import Bridge, BridgedReward
from oppo.hf.as_text.whole import ClassifierReward, SimilarityReward
from oppo.hf.model_files import RewardKind
from oppo.hf.recipe import ModelRecipe, positions_of
from oppo.hf.serve.scorers import ProcessRewardModel, RewardModel
from oppo.hf.tokenizer import HfTokenizer
from oppo.log import logger
from oppo.models import Scorer
from oppo.placement import Hosting

FORMS: dict[Form, str] = {
    "chat": "prompt and response by its own chat template",
    "joined": "the prompt and then the response",
    "pair": "prompt and response as two segments",
    "response": "the response alone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReading:
    """How one reward model is to read: its own settings, or else those of all rewards.

    Attributes:
        key: of its source in ``[models]``: ``reward``, or ``reward.NAME``.
        asked: which of the settings are for this model, and not for all of several rewards.
    """

    key: str
    source: str
    reading: When
    form: As
    over_long: OverLong
    label: str
    column: str
    separators: tuple[str, ...]
    asked: frozenset[str]

    @classmethod
    def of(cls, models: ModelsSection, key: str) -> ModelReading:
        """Return how the reward model of ``models.<key>`` is to read."""
        part = models.rewards[key]
        asked = (name for name in OF_MODELS if key == "reward" or getattr(part, name) is not None)
        given = {name: models.of_reward(part, name) for name in OF_MODELS}
        return cls(key=key, source=part.source, asked=frozenset(asked), **given)

    def kind(self, found: RewardKind) -> RewardKind:
        """Return the kind that the model is served as, of what its architecture says.

        Raises:
            ConfigError: the settings are those of a model of another kind.
        """
        if found == "scalar" and (self.reading == "whole" or (self.label and "label" in self.asked)):
            found = "classifier"
        if found != "similarity" and self.column and "column" in self.asked:
            raise ConfigError(
                f"{self.source} is no sentence encoder, which would compare a response with the column that "
                f"{self.setting('column')} = {self.column!r} names: leave it out"
            )
        return found

    def setting(self, name: str) -> str:
        """Return the key of one of its settings, for people."""
        return f"models.reward_{name}" if self.key == "reward" else f"models.{self.key}.{name}"


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """A reward model that is served.

    Attributes:
        source: its directory or hub name.
        positions: the longest sequence of the policy's tokens that it reads; ``None`` if it reads text.
        may_be_critic: whether the critic can start from it.
    """

    source: str
    scorer: Scorer[float | Drop]
    positions: int | None = None
    may_be_critic: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class JudgeFactory:
    """Makes judges of reward models.

    Attributes:
        tokenizer: the policy's.
        prompt_column: the column of the data with the prompt.
    """

    tokenizer: HfTokenizer
    load: RoleLoader
    prompt_column: str
    exact: bool

    def judge(self, reading: ModelReading, place: Hosting) -> Judge:
        """Return a reward model, loaded and served in ``place``.

        Raises:
            ConfigError: it cannot be loaded, or read in the form that the settings name.
            ModelRefused: it cannot be served.
        """
        with self.load.attributed(reading.key):
            match reading.kind(self.load.reward_kind(reading.source)):
                case "scalar":
                    return self._scalar(reading, place)
                case "process":
                    return self._process(reading, place)
                case "classifier":
                    return self._classifier(reading, place)
                case "similarity":
                    return self._similarity(reading, place)

    def _scalar(self, reading: ModelReading, place: Hosting) -> Judge:
        source, given = reading.source, reading.form
        model, difference = self.load.scalar_reward(reading.key, source)
        if given in {"auto", "tokens"} and difference is None:
            scorer = RewardModel(model, thread=place, exact=self.exact)
            return Judge(source, scorer, positions_of(model), may_be_critic=True)
        reader = self.load.tokenizer(source)
        form: Form = "chat" if reader.has_chat_template else "joined"
        refused = f"{reading.setting('form')} cannot be {given!r}"
        if given == "tokens":
            raise ConfigError(f"{source} {difference}, so {refused}: leave that out")
        if given == "pair":
            remedy = f"set {reading.setting('reading')} = 'whole'"
            raise ConfigError(f"{source} reads one text as it grows, and no pair, so {refused}: {remedy}")
        if given != "auto":
            form = given
        if isinstance(model, ModelRecipe):
            raise self.load.not_here(reading.key, source)
        bridge = Bridge(self.tokenizer, reader, form, self.prompt_column, reading.over_long)
        why = difference or "is to read text"
        self._say(reading, f"{why}: it reads rollouts as text while they grow, {FORMS[form]}")
        return Judge(source, BridgedReward(model, bridge, thread=place, exact=self.exact))

    def _process(self, reading: ModelReading, place: Hosting) -> Judge:
        try:
            ends = self.tokenizer.ending_with(reading.separators)
        except ConfigError as error:
            raise ConfigError(f"{reading.setting('separators')}: {error}") from error
        model = self.load.process_reward(reading.key, reading.source)
        words = f"rewards steps: it scores the last token of a response, and the {len(ends)} tokens that end one"
        self._say(reading, words)
        scorer = ProcessRewardModel(model, thread=place, separators=ends, exact=self.exact)
        return Judge(reading.source, scorer, positions_of(model))

    def _classifier(self, reading: ModelReading, place: Hosting) -> Judge:
        if reading.form == "tokens":
            raise ConfigError(
                f"{reading.source} reads whole responses as text, so {reading.setting('form')} cannot be 'tokens'"
            )
        encoder = self.load.encoder(reading.key, reading.source)
        form: Form = "chat" if encoder.tokenizer.has_chat_template else "pair"
        if reading.form != "auto":
            form = reading.form
        try:
            scorer = ClassifierReward(
                encoder,
                self.tokenizer,
                thread=place,
                form=form,
                label=reading.label or None,
                over_long=reading.over_long,
                prompt_column=self.prompt_column,
                exact=self.exact,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}; see {reading.setting('label')} and {reading.setting('form')}") from error
        self._say(reading, f"({type(encoder.model).__name__}) scores whole responses as text, {FORMS[form]}")
        return Judge(reading.source, scorer)

    def _similarity(self, reading: ModelReading, place: Hosting) -> Judge:
        if not reading.column:
            raise ConfigError(
                f"{reading.source} is a sentence encoder, whose reward is the similarity of a response to a text of "
                f"its row: set {reading.setting('column')} to the column of that text"
            )
        encoder = self.load.encoder(reading.key, reading.source)
        words = f"scores responses by their similarity to column {reading.column!r}"
        self._say(reading, f"({type(encoder.model).__name__}) {words}")
        scorer = SimilarityReward(
            encoder,
            self.tokenizer,
            column=reading.column,
            thread=place,
            over_long=reading.over_long,
            exact=self.exact,
        )
        return Judge(reading.source, scorer)

    def _say(self, reading: ModelReading, words: str) -> None:
        logger.info(f"models.{reading.key}: {reading.source} {words}")
