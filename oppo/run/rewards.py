"""The rewards and the environment of a run, as the settings name them: functions, scorers and reward models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from oppo.agents import Agents
from oppo.config.environment import AgentsSection, EnvironmentSection
from oppo.config.extensions import naming
from oppo.config.rewards import (
    EnvironmentRewardSection,
    FunctionRewardSection,
    JudgeRewardSection,
    ModelRewardSection,
    RewardSection,
)
from oppo.config.sections import OPENENV, VERIFIERS, DataSection, RunSection, SamplingSection
from oppo.data.prompts import Begin
from oppo.environments import (
    EnvironmentClass,
    EnvironmentFailure,
    Environments,
    FunctionEnvironment,
    TaskAgent,
    Tools,
    openenv,
    tools_of,
)
from oppo.environments.classes import kind_of as made_by
from oppo.errors import ConfigError
from oppo.events import Drop, Finish
from oppo.hf.as_text.rendering import Form
from oppo.hf.as_text.streamed import Bridge, BridgedReward
from oppo.hf.as_text.whole import ClassifierReward, SimilarityReward
from oppo.hf.chat import ChatFormat, ChatMessage, chatting
from oppo.hf.devices import available_cores
from oppo.hf.loading import Loadable, ModelRecipe
from oppo.hf.model_files import RewardKind
from oppo.hf.serve.scorers import ProcessRewardModel, RewardModel
from oppo.hf.tokenizer import HfTokenizer
from oppo.libraries import require
from oppo.log import logger
from oppo.models import Scorer
from oppo.placement import Hosting
from oppo.rewards import FunctionReward, RewardInputs, Rewards, load_reward
from oppo.rewards.judge import columns_of, judge, key_of
from oppo.rewards.tasks import CHECKERS
from oppo.run.deployment import Role
from oppo.run.loading import RoleLoader
from oppo.scorers import Unscored
from oppo.user_code import load_function

JUDGED: Final = (
    "model",
    "template",
    "system",
    "score",
    "temperature",
    "max_tokens",
    "concurrency",
    "timeout",
    "attempts",
)
"""The settings of a judge that are arguments of :func:`oppo.rewards.judge.judge`."""

OPTIONS: Final = ("on_failure", "process", "concurrency", "timeout", "each")
"""The settings of a reward that are arguments of its function."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """The user's own code in a run, loaded and checked before any model is; rewards by their key, ``rewards.0``."""

    settings: Mapping[str, RewardSection]
    environment: AnyEnvironment | None
    rewards: Mapping[str, Scorer[float | Drop]]

    @classmethod
    def of(
        cls,
        tables: Mapping[str, RewardSection],
        tokenizer: HfTokenizer,
        place: Hosting,
        environment: AnyEnvironment | None,
        *,
        run: RunSection,
        data: DataSection,
    ) -> UserCode:
        """Return the rewards that ``tables`` name beside the environment; scorers of a file work in ``place``."""
        _leave_retries_to_our_log()
        classes = environment if isinstance(environment, EnvironmentClass | Environments) else None

        def loaded(key: str, reward: FunctionRewardSection) -> Scorer[float | Drop]:
            decode = tokenizer.decode_whole if reward.keep_special_tokens else tokenizer.decode
            options: dict[str, Any] = {
                "optional": reward.name is not None,
                "inputs": RewardInputs(
                    prompt_column=data.column,
                    conversation=_conversation(environment),
                    environments=None if classes is None else classes.instance,
                    max_steps=run.steps,
                ),
            }
            options |= {name: getattr(reward, name) for name in OPTIONS}
            if reward.source in CHECKERS:
                return _checking(key, reward, decode, options, cores=run.cores or available_cores())
            return load_reward(reward.source, decode, place=place, on_drop=reward.on_drop, **options)

        rewards = dict[str, Scorer[float | Drop]]()
        for key, reward in tables.items():
            if isinstance(reward, FunctionRewardSection):
                rewards[key] = loaded(key, reward)
            elif isinstance(reward, JudgeRewardSection):
                rewards[key] = _judge(key, reward, tokenizer.decode, data.column)
            elif isinstance(reward, EnvironmentRewardSection) and isinstance(
                environment, EnvironmentClass | Environments | FunctionEnvironment
            ):
                try:
                    rewards[key] = environment.reward
                except ConfigError as error:
                    raise ConfigError(f"{key}: {error}; give it one, or [[rewards]] another source") from error
        return cls(tables, environment, rewards)

    def check_columns(self, names: Collection[str]) -> None:
        for scorer in self.rewards.values():
            for function in scorer.functions if isinstance(scorer, Rewards) else [scorer]:
                if isinstance(function, FunctionReward):
                    function.arguments_of(names)
        for key, reward in self.settings.items():
            asked = columns_of(reward.template) if isinstance(reward, JudgeRewardSection) else frozenset()
            if isinstance(reward, ModelRewardSection) and reward.column:
                asked = frozenset({reward.column})
            if missing := sorted(asked.difference(names)):
                does = "compares responses with" if isinstance(reward, ModelRewardSection) else "asks a judge about"
                raise ConfigError(
                    f"{key} {does} {missing[0]!r}, which is no column of the data; the columns there are "
                    f"{', '.join(sorted(names))}"
                )

    def reward(self, models: Mapping[str, Scorer[float | Drop]]) -> Scorer[float | Drop]:
        if isinstance(self.environment, Agents):
            return self.environment.reward
        if not self.settings:
            return Unscored()
        scorers = {**self.rewards, **models}
        named = {part.name: (part, scorers[key]) for key, part in self.settings.items() if part.name is not None}
        if not named:
            return next(iter(scorers.values()))
        parts = {name: (part.weight, scorer) for name, (part, scorer) in named.items()}
        return Rewards(parts, on_drop={name: part.on_drop for name, (part, _) in named.items()})


def _leave_retries_to_our_log() -> None:
    with suppress(ImportError):  # an extra
        from stamina.instrumentation import set_on_retry_hooks  # noqa: PLC0415 - an extra

        set_on_retry_hooks(())


def _judge(
    key: str, section: JudgeRewardSection, decode: Callable[[Sequence[int]], str], prompt_column: str
) -> FunctionReward:
    require("http", f"{key}: a judge", module="httpx")
    try:
        asked = judge(
            section.source,
            api_key=key_of(section.api_key_env),
            **{name: getattr(section, name) for name in JUDGED},
        )
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return FunctionReward(
        asked,
        decode,
        name=asked.__name__,
        inputs=RewardInputs(prompt_column=prompt_column),
        on_failure=section.on_failure,
        concurrency=section.concurrency,
        each=True,
        optional=section.name is not None,
    )


def _checking(
    key: str,
    reward: FunctionRewardSection,
    decode: Callable[[Sequence[int]], str],
    options: Mapping[str, Any],
    *,
    cores: int,
) -> Scorer[float | Drop]:
    checker = CHECKERS[reward.source]
    if checker.extra:
        require(checker.extra, f"{key}: {reward.source}", module=checker.module)
    chosen = {
        **options,
        "process": bool(options["process"]) or checker.process,
        "each": options["each"] or checker.each,
        "concurrency": options["concurrency"] or (cores if checker.each else None),
        "timeout": options["timeout"] or checker.timeout,
    }
    if "" not in checker.functions:
        del chosen["optional"]
        return Rewards(checker.functions, decode, on_drop=reward.on_drop, **chosen)
    return FunctionReward(checker.functions[""][1], decode, name=reward.source, **chosen)


AnyEnvironment: TypeAlias = FunctionEnvironment | Tools | Environments | Agents


def environment_of(
    section: EnvironmentSection,
    agents: AgentsSection,
    data: DataSection,
    sampling: SamplingSection,
    tokenizer: HfTokenizer,
) -> AnyEnvironment | None:
    # the policy's tokenizer shows the tools of one class or function; several classes have views of it
    if agents.program:
        served = {name: getattr(agents, name) for name in ("on_failure", "timeout", "host", "port", "public_url")}
        run = TaskAgent() if agents.program == VERIFIERS else agents.program
        return Agents(run, tokenizer, sampling, **served)
    options: dict[str, Any] = {"timeout": section.timeout, "concurrency": section.concurrency}
    calling = {**options, "on_failure": section.on_failure or "answer", "max_turns": section.max_turns}
    if section.tools:
        return Tools(section.tools, ChatFormat(tokenizer, ("tool",)), process=section.process, **calling)
    if isinstance(section.factory, dict):
        return Environments(
            {
                name.removeprefix("environment.factory."): _class_of(
                    name,
                    spec,
                    chatting(tokenizer, tools=class_tools(name, spec), variables=data.chat_template_kwargs),
                    calling,
                )
                for name, spec in section.factories.items()
            }
        )
    if section.factory:
        return _class_of("environment.factory", section.factory, tokenizer, calling)
    if not section.source:
        return None
    if hasattr(load_function(section.source, EnvironmentFailure), "reset"):
        raise ConfigError(
            f"environment.source = {section.source!r} is a class of environments: name it as environment.factory; "
            "environment.source is a function that answers turns"
        )
    keeps = section.keep_special_tokens
    return FunctionEnvironment(
        section.source,
        tokenizer.decode_whole if keeps else tokenizer.decode,
        tokenizer.encode_whole if keeps else tokenizer.encode_exactly,
        on_failure="drop" if section.on_failure == "drop" else "fail",
        process=section.process,
        prompt_column=data.column,
        **options,
    )


def class_tools(key: str, spec: str) -> list[Callable[..., object]]:
    with naming(key, spec):
        return tools_of(made_by(_factory(spec)))


def _factory(spec: str) -> Callable[..., object]:
    if spec.startswith(OPENENV):
        return openenv(spec.removeprefix(OPENENV))
    return load_function(spec, EnvironmentFailure)


def _class_of(key: str, spec: str, tokenizer: HfTokenizer, options: Mapping[str, Any]) -> EnvironmentClass:
    with naming(key, spec):
        return EnvironmentClass(_factory(spec), ChatFormat(tokenizer, ("tool",)), **options)


def _conversation(environment: AnyEnvironment | None) -> Callable[[Finish], Sequence[ChatMessage]] | None:
    if isinstance(environment, Environments):
        return lambda finish: environment.of(finish.response.prompt.columns).chat.conversation(finish)
    return environment.chat.conversation if isinstance(environment, Tools) else None


def begin_of(environment: AnyEnvironment | None) -> Begin | None:
    if not isinstance(environment, EnvironmentClass | Environments):
        return None
    narrowed = environment

    def begin(row: Mapping[str, object], column: str) -> tuple[Mapping[str, object], HfTokenizer]:
        one = narrowed.of(row) if isinstance(narrowed, Environments) else narrowed
        return one.begun(row, column), one.chat.tokenizer

    return begin


FORMS: dict[Form, str] = {
    "chat": "prompt and response by its own chat template",
    "joined": "the prompt and then the response",
    "pair": "prompt and response as two segments",
    "response": "the response alone",
}


def track_of(reward: RewardSection) -> str:
    return "reward model" if reward.name is None else f"reward model {reward.name!r}"


def kind_of(key: str, reward: ModelRewardSection, kind: RewardKind) -> RewardKind:
    # its settings may change what its architecture says
    if kind == "scalar" and (reward.reading == "whole" or reward.label):
        kind = "classifier"
    if kind != "similarity" and reward.column:
        raise ConfigError(
            f"{reward.source} is no sentence encoder, which would compare a response with the column that {key}.column "
            f"= {reward.column!r} names: leave it out"
        )
    return kind


@dataclass(frozen=True, slots=True, eq=False)
class ServedRewardModel:
    """A reward model that is served; ``model`` is ``None`` if it reads text."""

    source: str
    scorer: Scorer[float | Drop]
    model: Loadable | None = None
    may_be_critic: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RewardModels:
    """Loads and serves the reward models of a run.

    Attributes:
        tokenizer: the policy's.
        prompt_column: the column of the data with the prompt.
    """

    tokenizer: HfTokenizer
    load: RoleLoader
    prompt_column: str
    deterministic: bool

    def serve(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        with self.load.attributed(role):
            match kind_of(role.key, reward, self.load.reward_kind(role.source)):
                case "scalar":
                    return self._scalar(role, reward, place)
                case "process":
                    return self._process(role, reward, place)
                case "classifier":
                    return self._classifier(role, reward, place)
                case "similarity":
                    return self._similarity(role, reward, place)

    def _scalar(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        key, source, given = role.key, role.source, reward.form
        model, difference = self.load.scalar_reward(role)
        if given in {"auto", "tokens"} and difference is None:
            scorer = RewardModel(model, place=place, deterministic=self.deterministic)
            return ServedRewardModel(source, scorer, model, may_be_critic=True)
        reader = self.load.tokenizer(source)
        form: Form = "chat" if reader.has_chat_template else "joined"
        refused = f"{key}.form cannot be {given!r}"
        if given == "tokens":
            raise ConfigError(f"{source} {difference}, so {refused}: leave that out")
        if given == "pair":
            remedy = f"set {key}.reading = 'whole'"
            raise ConfigError(f"{source} reads one text as it grows, and no pair, so {refused}: {remedy}")
        if given != "auto":
            form = given
        if isinstance(model, ModelRecipe):
            raise self.load.not_here(role)
        bridge = Bridge(self.tokenizer, reader, form, self.prompt_column, reward.over_long)
        why = difference or "is to read text"
        self._say(role, f"{why}: it reads rollouts as text while they grow, {FORMS[form]}")
        return ServedRewardModel(source, BridgedReward(model, bridge, place=place, deterministic=self.deterministic))

    def _process(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        try:
            ends = self.tokenizer.ending_with(reward.separators)
        except ConfigError as error:
            raise ConfigError(f"{role.key}.separators: {error}") from error
        model = self.load.process_reward(role)
        words = f"rewards steps: it scores the last token of a response, and the {len(ends)} tokens that end one"
        self._say(role, words)
        scorer = ProcessRewardModel(model, place=place, separators=ends, deterministic=self.deterministic)
        return ServedRewardModel(role.source, scorer, model)

    def _classifier(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        key = role.key
        if reward.form == "tokens":
            raise ConfigError(f"{role.source} reads whole responses as text, so {key}.form cannot be 'tokens'")
        encoder = self.load.encoder(role)
        form: Form = "chat" if encoder.tokenizer.has_chat_template else "pair"
        if reward.form != "auto":
            form = reward.form
        try:
            scorer = ClassifierReward(
                encoder,
                self.tokenizer,
                place=place,
                form=form,
                label=reward.label or None,
                over_long=reward.over_long,
                prompt_column=self.prompt_column,
                deterministic=self.deterministic,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}; see {key}.label and {key}.form") from error
        self._say(role, f"({type(encoder.model).__name__}) scores whole responses as text, {FORMS[form]}")
        return ServedRewardModel(role.source, scorer)

    def _similarity(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        if not reward.column:
            raise ConfigError(
                f"{role.source} is a sentence encoder, whose reward is the similarity of a response to a text of its "
                f"row: set {role.key}.column to the column of that text"
            )
        encoder = self.load.encoder(role)
        words = f"scores responses by their similarity to column {reward.column!r}"
        self._say(role, f"({type(encoder.model).__name__}) {words}")
        scorer = SimilarityReward(
            encoder,
            self.tokenizer,
            column=reward.column,
            place=place,
            over_long=reward.over_long,
            deterministic=self.deterministic,
        )
        return ServedRewardModel(role.source, scorer)

    def _say(self, role: Role, words: str) -> None:
        logger.info(f"{role.key}: {role.source} {words}")
