"""What scores: ``[[rewards]]``, told apart by source and engine, ``[teacher]``, ``[scorers.NAME]`` for other models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo

from oppo.config.sections import ModelsSection, PlacementSection, StepSection
from oppo.data.prompts import template_fields
from oppo.declared import (
    Filled,
    FromList,
    Name,
    NonNegative,
    Positive,
    PositiveCount,
    Table,
    changed,
    required,
    setting,
)
from oppo.errors import in_toml
from oppo.rewards import OnDrop, OnFailure
from oppo.rewards.judge import reading_of
from oppo.rewards.tasks import CHECKERS
from oppo.scorers import SIBLING
from oppo.user_code import SPEC

ScoringEngine: TypeAlias = Literal["transformers", "vllm"]  # what serves a model that scores


@dataclass(frozen=True, kw_only=True)
class OnVllm:
    """The keys of a model that vLLM serves; without slots, so that a table with slots may inherit them."""

    vllm: dict[str, object] = field(
        default_factory=dict,
        metadata={
            "description": "arguments of its engine, by vLLM's names, as `{tensor_parallel_size = 2}`; those that the "
            "run sets itself are refused",
            "resume": "rounding",
        },
    )
    url: str = setting(
        "",
        "a server that serves the model (`vllm serve MODEL`; a reward model with `--runner pooling`); empty: the run "
        "starts an engine",
        resume="free",
    )
    api_key_env: str = setting(
        "", "the environment variable that holds the server's key; empty: it asks for none", resume="free"
    )
    timeout: Positive = setting(60.0, "seconds for a request to the server", resume="free")
    attempts: PositiveCount = setting(
        4, "for a request that failed in a way that may pass, the first included", resume="free"
    )

    def __post_init__(self) -> None:
        of_server = changed(self, {"api_key_env", "timeout", "attempts"})
        if self.url and self.vllm:
            raise ValueError(
                f"vllm.{next(iter(self.vllm))} is for an engine that the run starts, and url names a server: give it "
                "to the server's command, or leave one of the two out"
            )
        if of_server and not self.url:
            raise ValueError(
                f"{', '.join(of_server)} is for a server, and none is named: give its url, or leave it out"
            )


When: TypeAlias = Literal["auto", "whole"]  # when a reward model reads

As: TypeAlias = Literal["auto", "tokens", "chat", "joined", "pair", "response"]
"""The form in which a reward model reads a rollout."""

OverLong: TypeAlias = Literal["error", "drop", "truncate"]

Separators: TypeAlias = Annotated[tuple[Filled, ...], FromList()]

SOURCE: Final = (
    "directory or hub name of a reward model, or `file.py:name` of a function, of a scorer, of a function that makes "
    "one in a `place`, or of several rewards `{name: (weight, function or scorer)}`; a checker by its name: `math`, "
    "`gsm8k`, `code`, `reasoning-gym`; `environment`: `get_reward()` of `environment.factory`, and the "
    "turns' rewards of that or of `environment.source`; `http://host:8000/v1`: a judge behind a chat API"
)


ENVIRONMENT: Final = "environment"  # the source of a reward that is the environment's


def is_name(source: str) -> bool:
    return source == ENVIRONMENT or source in CHECKERS


def file_of(spec: str) -> Path | None:
    named = SPEC.match(spec)
    return None if named is None else Path(named["file"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    """``[[rewards]]``: one reward."""

    source: Filled = required(SOURCE)
    name: Name | None = setting(
        None, "its name in the weighted sum and in metrics; absent: it is the only reward, and the score"
    )
    weight: float = setting(1.0, "its factor in the sum")
    on_drop: OnDrop = setting(
        "drop", "if it drops a rollout: drop the rollout, or leave it to the other rewards (`skip`)"
    )

    def __post_init__(self) -> None:
        if self.name is None and self.weight != 1:
            raise ValueError(f"weight = {self.weight!r} is the factor of a term, which has a name: give it one")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRewardSection(RewardSection):
    """``[[rewards]]`` whose source is code: a function, or what else a file names."""

    on_failure: OnFailure = setting(
        "fail", "if the function fails: stop the run, drop the rollout, or call it again and then stop"
    )
    process: bool | Literal["sync"] = setting(
        default=False,
        description="call a sync function in its own processes, where it may hold the interpreter lock for long; a "
        "crash is then a failure like others; `sync`: only if it is a sync function",
        resume="free",
    )
    concurrency: PositiveCount | None = setting(
        None, "calls of the function that may overlap; absent: 64 of an async function, 1 of a sync one", resume="free"
    )
    timeout: Positive | None = setting(
        None,
        "seconds after which a call of the function has failed, not counting the start of its process; an async "
        "function is then cancelled, a process interrupted, or killed if it goes on",
        resume="free",
    )
    each: bool = setting(default=False, description="call the function for each rollout alone")
    keep_special_tokens: bool = setting(
        default=False,
        description="keep special tokens, the end of sequence included, in the text for what the file names",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRewardSection(RewardSection):
    """``[[rewards]]`` whose source is a reward model."""

    engine: ScoringEngine = setting(
        "transformers",
        "what serves the model; `vllm`: an engine of its own, or a server (`url`), for a causal model with one label "
        "and the policy's tokenizer",
        resume="rounding",
    )
    reading: When = setting(
        "auto",
        "when the model reads: `auto`: while responses are written, if its architecture allows that, else when "
        "they have ended; `whole`: when they have ended",
    )
    form: As = setting(
        "auto",
        "what the model reads: `tokens`: those of the policy, whose tokenizer it must share; or text, by its own "
        "tokenizer: `chat`: prompt and response by its chat template; `joined`: one after the other; `pair`: as two "
        "segments; `response`: that alone; auto: tokens where the tokenizer is the same, else chat where it has a "
        "template, else pair for an encoder, else joined",
    )
    over_long: OverLong = setting(
        "error",
        "what happens to a rollout whose text is longer than the model reads: stop the run, drop the rollout, or cut "
        "it as the model's tokenizer does",
    )
    label: str = setting("", "the label whose logit is the score, if a classifier has several")
    column: str = setting(
        "",
        "the column of the data with the text, or the list of texts, that a sentence encoder compares a response with",
    )
    separators: Separators = setting(
        ("\n",), "texts that end a step, for a process reward model: a token that ends with one of them ends the step"
    )

    def __post_init__(self) -> None:
        RewardSection.__post_init__(self)
        if self.source.endswith(".py"):
            raise ValueError(f"source = {self.source!r} is a file of code: name what scores in it, as file.py:name")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRewardSection(OnVllm, RewardSection):
    """``[[rewards]]`` whose source is a reward model that vLLM serves."""

    engine: ScoringEngine = setting("vllm", "", resume="rounding")

    def __post_init__(self) -> None:
        RewardSection.__post_init__(self)
        OnVllm.__post_init__(self)


def _readable(text: str) -> str:
    reading_of(text)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRewardSection(RewardSection):
    """``[[rewards]]`` whose source is the URL of a chat API: a generative judge."""

    model: Filled = required("the judge's name at its service")
    template: Filled = required(
        "what it is asked, with `{prompt}`, `{response}` and columns of the data as `{column}`; `{{` is a brace"
    )
    system: str = setting("", "the system message before it; empty: none")
    score: Annotated[str, AfterValidator(_readable)] = setting(
        "number",
        "what of the answer is the score: `number`: the last number; `regex:PATTERN`: the last match, of its group if "
        "it has one; `json:FIELD`: a field of the JSON in it; `rating:1-10`: the mean of the ratings that its first "
        "token could be, by their probabilities",
    )
    temperature: NonNegative = setting(0.0, "of the judge's sampling")
    max_tokens: PositiveCount = setting(512, "of its answer; `rating` takes 1")
    api_key_env: str = setting(
        "", "the environment variable that holds the service's key; empty: it asks for none", resume="free"
    )
    on_failure: OnFailure = setting(
        "fail",
        "if it does not answer, or without a score: stop the run, drop the rollout, or ask again and then stop",
    )
    concurrency: PositiveCount = setting(64, "requests that may overlap", resume="free")
    timeout: Positive = setting(60.0, "seconds for a request", resume="free")
    attempts: PositiveCount = setting(
        4, "for a request that failed in a way that may pass, the first included", resume="free"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRewardSection(RewardSection):
    """``[[rewards]]`` whose source is the environment."""


REWARD_KINDS: Final[Mapping[str, type[RewardSection]]] = {
    "function": FunctionRewardSection,
    "model": ModelRewardSection,
    "model on vLLM": VllmRewardSection,
    "judge": JudgeRewardSection,
    ENVIRONMENT: EnvironmentRewardSection,
}


def reward_kind_of(table: object) -> str:
    source = table.get("source") if isinstance(table, Mapping) else getattr(table, "source", None)
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return "judge"
    if source == ENVIRONMENT:
        return ENVIRONMENT
    engine = table.get("engine") if isinstance(table, Mapping) else getattr(table, "engine", None)
    model = "model on vLLM" if engine == "vllm" else "model"
    is_code = isinstance(source, str) and (source in CHECKERS or file_of(source) is not None)
    return "function" if is_code else model


def _summed(rewards: tuple[RewardSection, ...], info: ValidationInfo) -> tuple[RewardSection, ...]:
    if not rewards and not (info.context or {}).get("scoreless"):
        raise ValueError("expected at least one table, got none")
    names = [each.name for each in rewards]
    if len(names) > 1 and None in names:
        raise ValueError(
            f"several rewards are terms of a weighted sum, each with a name, and rewards.{names.index(None)} has none"
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"expected another name for each, got {twice[0]!r} twice")
    return rewards


Reward: TypeAlias = Annotated[
    Annotated[FunctionRewardSection, Table(), Tag("function")]
    | Annotated[ModelRewardSection, Table(), Tag("model")]
    | Annotated[VllmRewardSection, Table(), Tag("model on vLLM")]
    | Annotated[JudgeRewardSection, Table(), Tag("judge")]
    | Annotated[EnvironmentRewardSection, Table(), Tag(ENVIRONMENT)],
    Discriminator(reward_kind_of),
]
"""A reward, told apart by its source and its engine."""

RewardList: TypeAlias = Annotated[tuple[Reward, ...], FromList(), AfterValidator(_summed)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSection(OnVllm):
    """``[scorers.NAME]``: what serves the reference, the teacher or one of several."""

    engine: ScoringEngine = setting(
        "transformers",
        "what serves the model; `vllm`: an engine of its own, or a server (`url`), for a model with the policy's "
        "tokenizer",
    )

    def __post_init__(self) -> None:
        OnVllm.__post_init__(self)
        if self.engine != "vllm" and (given := changed(self, {"vllm", "url"})):
            raise ValueError(f"{next(iter(given))} is for vLLM: set engine = 'vllm', or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    """``[teacher]``: the weights of the teacher, and the prompt behind which it reads a response."""

    weights: Literal["model", "frozen", "live", "average"] = setting(
        "model",
        "whose log-probs the policy learns: `model`: those of `models.teacher`; or its own, behind another prompt: "
        "`frozen`: with the weights that it begins with; `live`: with its current ones; `average`: with an exponential "
        "moving average of them, adapters merged",
    )
    rate: Annotated[float, Field(gt=0, le=1)] = setting(
        0.05, "of `average`: after each update it is (1 - rate) times itself plus rate times the policy"
    )
    column: str = setting(
        "", "the column of the data with the prompt that the teacher reads, text or chat messages; empty: the policy's"
    )
    template: str = setting(
        "",
        "text that the teacher reads in place of the last message of the user, or of a prompt that is text; in it "
        "`{prompt}` is what it replaces, `{name}` a column of the data, and `{sibling}` the first other response of "
        "the group whose score is at least `threshold`; a response without one is not taught",
    )
    threshold: float | None = setting(None, "the least score of a `{sibling}`; absent: 1")

    def __post_init__(self) -> None:
        try:
            template_fields(self.template)
        except ValueError as error:
            raise ValueError(f"template: {error}") from error
        if self.column and self.template:
            raise ValueError("column holds the teacher's prompt, and template makes one: leave one of the two out")
        if self.threshold is not None and not self.of_siblings:
            raise ValueError(
                f"threshold = {self.threshold} chooses a sibling, and no {{{SIBLING}}} is in template: leave it out"
            )
        if self.weights != "average" and changed(self, {"rate"}):
            raise ValueError(f"rate = {self.rate} is of weights = 'average', not {self.weights!r}: leave it out")
        if self.weights == "live" and not self.privileged:
            raise ValueError(
                "weights = 'live' is the policy, which learns nothing of itself behind its own prompt: give column or "
                "template, or other weights"
            )

    @property
    def own(self) -> bool:
        return self.weights != "model"

    @property
    def privileged(self) -> bool:
        return bool(self.column or self.template)

    @property
    def of_siblings(self) -> bool:
        return SIBLING in template_fields(self.template)

    @property
    def note(self) -> str:
        if not self.of_siblings:
            return ""
        return (
            f"the teacher is shown a response that passed ({{{SIBLING}}} in teacher.template), so it reads a group "
            "when all of it is scored: its reading is not hidden behind decoding"
        )


def teacher_fault(
    teacher: TeacherSection,
    models: ModelsSection,
    placement: PlacementSection,
    step: StepSection,
    algorithm: Any,
    *,
    program: str,
    scored: bool,
) -> str:
    named, distills, weight = models.teacher, getattr(algorithm, "distills", None), getattr(algorithm, "distill", None)
    given = changed(teacher, {each.name for each in fields(teacher)})
    idle = ", ".join(f"{key} = {in_toml(value)}" for key, value in given.items())
    remedy = "choose step.algorithm = 'distill', or another" if weight is None else "set algorithm.distill above 0"
    has, chosen = bool(named or teacher.own), f"step.algorithm = {step.algorithm!r}"
    words: Mapping[str, object] = {
        f"{chosen} with algorithm.distill = {1.0 if weight is None else weight} learns the log-probs of a teacher, and "
        "models.teacher names none: give a causal language model with the policy's tokenizer, or make the policy its "
        "own teacher by teacher.weights": distills and not has,
        f"models.teacher = {named!r} is a teacher, and teacher.weights = {teacher.weights!r} makes the policy its own: "
        "leave one of the two out": named and teacher.own,
        f"models.teacher = {named!r} is a teacher, and {chosen} learns nothing of it: {remedy}, or leave "
        "models.teacher out": named and distills is False,
        f"[teacher] has {idle}, and {chosen} learns nothing of a teacher: {remedy}, or leave that out": (
            given and (distills is False or not has)
        ),
        f"placement.teacher = {placement.teacher!r} places a teacher, and models.teacher names none: leave that out": (
            placement.teacher and not has
        ),
        f"[teacher] gives the teacher another prompt, and the conversations of agents.program = {program!r} have "
        "prompts of their own: leave column and template out": teacher.privileged and program,
        f"{{{SIBLING}}} in teacher.template is another response to the prompt, and there is one alone: set "
        "algorithm.samples to 2 or more, or choose an algorithm with groups": (
            teacher.of_siblings and algorithm.responses < 2
        ),
        f"{{{SIBLING}}} in teacher.template is a response whose score passed, and there are no scores without "
        "[[rewards]]: give a reward, or another template": teacher.of_siblings and not (scored or program),
        "step.weight_sync = 'in-flight' changes the policy while the teacher reads, and teacher.weights = 'live' makes "
        "them one model: leave one of the two out": teacher.weights == "live" and step.weight_sync == "in-flight",
    }
    return next((text for text, holds in words.items() if holds), "")
