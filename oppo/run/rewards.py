"""The user's own code in a run: rewards, environment, tools, agents, chat template; and a first look at it all."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

from oppo.agents import Agents
from oppo.atomic_files import read_text
from oppo.config.environment import INITIAL, POLICY, AgentsSection, EnvironmentSection
from oppo.config.extensions import naming
from oppo.config.scorers import (
    EnvironmentRewardSection,
    FunctionRewardSection,
    JudgeRewardSection,
    ModelRewardSection,
    RewardSection,
)
from oppo.config.sections import OPENENV, VERIFIERS, DataSection, PromptSource, RunSection, SamplingSection, sources
from oppo.config.settings import Settings
from oppo.data.prompts import Begin, Encoding, ReadImages, rows_of
from oppo.data.rows import ask_hub, check_file, is_hub_name
from oppo.environments import (
    Compaction,
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
from oppo.errors import ConfigError, one_line, shown
from oppo.events import Drop, Finish, Prompt
from oppo.hf.chat import ChatFormat, ChatMessage, chatting
from oppo.hf.tokenizer import HfTokenizer, copy_without_hub, quick_tokenizer
from oppo.hf.tool_calls import ToolSchema
from oppo.libraries import require
from oppo.models import Scorer
from oppo.placement import Hosting
from oppo.redact import key_of
from oppo.rewards import FunctionReward, RewardInputs, Rewards, load_reward
from oppo.rewards.combined import names_function
from oppo.rewards.judge import columns_of, judge
from oppo.rewards.tasks import CHECKERS
from oppo.run.prompts import encoding_of
from oppo.scorers import OfLastSegment, Unscored
from oppo.user_code import UserFunction, load_function

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
        place: Hosting | None,
        environment: AnyEnvironment | None,
        *,
        run: RunSection,
        data: DataSection,
    ) -> UserCode:
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
                from oppo.hf.devices import available_cores  # noqa: PLC0415 - torch takes seconds to import

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
        scorer = self._scorer({**self.rewards, **models})
        compacts = isinstance(self.environment, Tools) and self.environment.max_segments > 1
        return OfLastSegment(scorer) if compacts else scorer

    def _scorer(self, scorers: Mapping[str, Scorer[float | Drop]]) -> Scorer[float | Drop]:
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
        return Agents(
            run,
            tokenizer,
            sampling,
            roles={role: POLICY if role in agents.trained else None for role in agents.roles},
            **served,
        )
    options: dict[str, Any] = {"timeout": section.timeout, "concurrency": section.concurrency}
    calling = {**options, "on_failure": section.on_failure or "answer", "max_turns": section.max_turns}
    if section.tools:
        compaction = _compaction(section, data, sampling)
        chat = ChatFormat(tokenizer, ("tool",) if compaction is None else ("tool", "user"))
        calling |= {"process": section.process, "column": section.tools_column, "compaction": compaction}
        return Tools(section.tools, chat, **calling)
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


def _compaction(section: EnvironmentSection, data: DataSection, sampling: SamplingSection) -> Compaction | None:
    if section.compact is None:
        return None
    return Compaction(
        after=section.compact,
        room=sampling.max_new_tokens,
        longest=data.max_prompt_tokens + section.longer,
        summary=section.summary_tokens,
        segments=section.max_segments,
        request=section.summary_request,
        prompt_column=data.column,
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
    if not isinstance(environment, Tools | Environments):
        return None
    return lambda finish: environment.of(finish.response.prompt.columns).chat.conversation(finish)


def begin_of(environment: AnyEnvironment | None) -> Begin | None:
    if not isinstance(environment, Tools | Environments) or (type(environment) is Tools and not environment.column):
        return None

    def begin(row: Mapping[str, object], column: str) -> tuple[Mapping[str, object], HfTokenizer]:
        one = environment.of(row)
        return one.begun(row, column) if isinstance(one, EnvironmentClass) else row, one.chat.tokenizer

    return begin


def track_of(reward: RewardSection) -> str:
    return "reward model" if reward.name is None else f"reward model {reward.name!r}"


LOOKED: Final = 100  # rows of a file that are looked at before the libraries of models are imported


@dataclass(frozen=True, slots=True, eq=False)
class FirstLook:
    """What a run reads first: enough to find most faults of its template, data and code, without torch."""

    tokenizer: HfTokenizer
    environment: AnyEnvironment | None
    prompts: Sequence[Prompt]


def first_look(settings: Settings) -> FirstLook | None:
    data, chosen = settings.data, [*sources(settings.data.prompts), *sources(settings.eval.prompts)]
    for source in chosen:
        if source.file is not None:
            check_file(source.file, or_directory=True)
        elif source.taskset:
            require(VERIFIERS, "a taskset of verifiers")
        elif is_hub_name(source.path):
            ask_hub(source.path)
    models = settings.models
    named = {"models.policy": models.policy, "models.adapter": models.adapter}
    scored = {key: each.source for key, each in settings.reward_tables.items() if isinstance(each, ModelRewardSection)}
    scored |= {f"agents.roles.{role}": each for role, each in settings.agents.frozen.items() if each != INITIAL}
    derived = {"models.reference": models.reference, "models.critic": models.critic}  # from the others by default
    taught = {f"models.{name}": path for name, path in settings.teachers.items()}
    loaded = named | scored | derived | taught
    for key, path in sorted(loaded.items(), key=lambda each: not Path(each[1]).is_absolute()):  # hubs are asked last
        if path and not Path(path).expanduser().is_dir():
            try:
                copy_without_hub(path)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from error
    own = None if settings.models.trust_remote_code else quick_tokenizer(settings.models.policy)
    if own is None:
        return None
    tokenizer = chatting_as(own, data, settings.environment)
    environment = environment_of(settings.environment, settings.agents, data, settings.sampling, tokenizer)
    functions = {
        key: reward
        for key, reward in settings.reward_tables.items()
        if isinstance(reward, FunctionRewardSection) and reward.source not in CHECKERS and names_function(reward.source)
    }
    code = UserCode.of(functions, tokenizer, None, environment, run=settings.run, data=data)
    given = encoding_of(data, read_by=settings.agents.program) | {"over_long": "truncate"}
    unseen: ReadImages = lambda row, column, place, begin: (row, [], ())  # noqa: E731 - begun later, with files
    encoding = Encoding(tokenizer=tokenizer, begin=begin_of(environment), images=unseen, **given)
    prompts, whole = list[Prompt](), True
    for source in chosen:
        found, ended_there = _looked_at(source, encoding)
        prompts, whole = [*prompts, *found], whole and ended_there
    if whole:  # other rows may have other columns
        code.check_columns({name for prompt in prompts for name in prompt.columns})
    sees_later = settings.agents.program and data.images
    begun = [prompt for prompt in prompts if len(prompt.tokens)]
    return FirstLook(tokenizer, None if sees_later else environment, begun)


def _looked_at(source: PromptSource, encoding: Encoding) -> tuple[list[Prompt], bool]:
    if source.file is None or source.file.is_dir():
        return [], False
    if source.column is not None:
        encoding = replace(encoding, column=source.column)
    rows, prompts = iter(rows_of(source.file)[1]), list[Prompt]()
    for place, row in islice(rows, LOOKED if encoding.begin is None else 1):  # an environment may ask a server for each
        begun, tokens, images = encoding.read(place, row)
        prompts.append(Prompt(len(prompts), len(prompts), tokens, columns=dict(begun), images=images))
    return prompts, next(rows, None) is None


def chatting_as(own: HfTokenizer, data: DataSection, environment: EnvironmentSection) -> HfTokenizer:
    template = data.chat_template
    if "data.chat_template" in data.files:
        template = _read("data.chat_template", template)
    called = [UserFunction.of(spec, None, EnvironmentFailure).function for spec in environment.tools]
    if isinstance(factory := environment.factory, str) and factory:
        called = class_tools("environment.factory", factory)
    return chatting(own, template=template, tools=called or _schemas(data.tools), variables=data.chat_template_kwargs)


def _read(key: str, path: str) -> str:
    try:
        return read_text(Path(path), linked=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {one_line(error)}") from error


def _schemas(path: str) -> Sequence[ToolSchema]:
    if not path:
        return ()
    try:
        schemas: Any = json.loads(_read("data.tools", path))
    except ValueError as error:
        raise ConfigError(f"data.tools: {path} is no JSON: {error}") from error
    tools: list[Any] = schemas if isinstance(schemas, list) else [schemas]
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"data.tools: {path} holds {shown(tool)}: expected a list of "
                '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
            )
    return tools
