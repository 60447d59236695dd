"""The sections of a settings file: a dataclass for each table that is no other module's own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError

from oppo.algorithms import ALGORITHMS
from oppo.data.rows import is_hub_name
from oppo.data.stream import whole_numbers
from oppo.declared import (
    Count,
    Filled,
    FromList,
    Name,
    NonNegative,
    OneOf,
    Positive,
    PositiveCount,
    Rollouts,
    Seconds,
    Seed,
    adapter,
    changed,
    declared,
    expectation,
    required,
    setting,
)
from oppo.errors import ConfigError, DataError, did_you_mean, shortened
from oppo.models import SamplingSettings
from oppo.user_code import SPEC


def resolved(text: str, folder: Path) -> str:
    try:
        return str((folder / Path(text).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an unknown ~user, a NUL
        raise ConfigError(f"{text!r} is no path that can be followed: {error}") from error


def placed(spec: str, folder: Path) -> str:
    file, _, name = spec.rpartition(":")
    return f"{resolved(file, folder)}:{name}" if SPEC.match(spec) else spec


OPENENV: Final = "openenv:"  # what stands before the URL of an OpenEnv server, as what makes environments

VERIFIERS: Final = "verifiers"
"""The agent that runs tasks of verifiers; before the name of a taskset and a colon, a source of prompts."""


ROWS: Final = "<rows of a program>"  # the source of a run whose prompts a program gives


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    path: Filled = required("a file, a directory that datasets wrote, a dataset's name at a hub, or a taskset")
    weight: Positive | None = setting(None, "share of the prompts, relative to those of the others")
    column: Filled | None = setting(None, "the column that holds the prompt, where it is another than `data.column`")
    split: Filled = setting("train", "of a dataset with several")
    subset: str = setting("", "of a dataset at a hub: the name of a configuration")
    config: dict[str, object] | None = setting(None, "of a taskset: fields of its config")

    @property
    def taskset(self) -> str:
        kind, _, taskset = self.path.partition(":")
        return taskset if kind == VERIFIERS else ""

    @property
    def file(self) -> Path | None:
        return None if self.path == ROWS or self.taskset or is_hub_name(self.path) else Path(self.path)

    def within(self, folder: Path) -> PromptSource:
        if self.taskset:
            return replace(self, path=f"{VERIFIERS}:{placed(self.taskset, folder)}")
        is_name = is_hub_name(self.path) and not (folder / self.path).exists()
        return self if is_name or self.path == ROWS else replace(self, path=resolved(self.path, folder))

    def table(self) -> dict[str, object]:
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


def _sources(value: object) -> str | tuple[PromptSource, ...]:
    if isinstance(value, str) and value:
        return value
    if not (isinstance(value, list | tuple) and value):
        raise ValueError(
            "expected a file, a directory or a dataset's name, or a list of such with their weights, got "
            f"{shortened(repr(value), 200)}"
        )
    found = tuple(_source(each, number) for number, each in enumerate(value, 1))
    weights = [each.weight for each in found if each.weight is not None]
    if weights and len(weights) < len(found):
        lacking = next(number for number, each in enumerate(found, 1) if each.weight is None)
        raise ValueError(f"source {lacking} has no weight, and others have one: give each a weight, or none")
    if weights:
        try:
            whole_numbers(weights)
        except DataError as error:
            raise ValueError(str(error)) from error
    return found


def _source(value: object, number: int) -> PromptSource:
    if isinstance(value, PromptSource):
        return value
    if isinstance(value, str):
        value = {"path": value}
    names, table = [each.name for each in fields(PromptSource)], value if isinstance(value, Mapping) else {}
    if not table:
        raise ValueError(f"source {number}: expected text or a table, got {shortened(repr(value), 200)}")
    if unknown := [key for key in table if key not in names]:
        guess = did_you_mean(str(unknown[0]), names)
        raise ValueError(f"source {number}: unknown key {unknown[0]!r}{guess}; the keys are {', '.join(names)}")
    if "path" not in table:
        raise ValueError(f"source {number}: path is missing: {declared(PromptSource)['path'].description}")
    try:
        found: PromptSource = adapter(PromptSource).validate_python(table)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key, got = detail["loc"][0], shortened(repr(detail["input"]), 200)
        raise ValueError(f"source {number}: {key}: expected {expectation(detail)}, got {got}") from error
    return found


def _held_out(value: object) -> str | tuple[PromptSource, ...]:
    if value == "":
        return ""
    found = _sources(value)
    if any(each.weight is not None for each in sources(found)):
        raise ValueError("held-out prompts are answered once each, so that no source has a weight: leave it out")
    return found


Prompts: TypeAlias = Annotated[str | tuple[PromptSource, ...], PlainValidator(_sources)]


HeldOut: TypeAlias = Annotated[str | tuple[PromptSource, ...], PlainValidator(_held_out)]


def sources(prompts: str | tuple[PromptSource, ...]) -> tuple[PromptSource, ...]:
    return tuple(named("", prompts).values())


def named(key: str, prompts: str | tuple[PromptSource, ...]) -> dict[str, PromptSource]:
    """Return the sources of a setting by name: ``data.prompts``, or ``data.prompts[0]`` of several."""
    if isinstance(prompts, str):
        return {key: PromptSource(path=prompts)} if prompts else {}
    return {f"{key}[{number}]": each for number, each in enumerate(prompts)}


def within(prompts: str | tuple[PromptSource, ...], folder: Path) -> str | tuple[PromptSource, ...]:
    if isinstance(prompts, str):
        return PromptSource(path=prompts).within(folder).path if prompts else ""
    return tuple(each.within(folder) for each in prompts)


_DEVICES: Final = "'auto', 'cpu', 'cuda' or one of several as 'cuda:1'"

SCORERS: Final = ("reference", "reward", "critic", "teacher")

Remote: TypeAlias = Literal["policy", "reference", "reward", "critic", "teacher", "trainer"]
"""A model that can be in a Ray actor of a cluster; of the trainer, every rank but the first."""


def _listed(devices: object) -> object:
    return [devices] if isinstance(devices, str) and devices else devices or []


DeviceName: TypeAlias = Annotated[str, OneOf((), _DEVICES, re.compile(r"(auto|cpu|cuda(:\d+)?)\Z"))]

Another: TypeAlias = Annotated[str, OneOf((), _DEVICES, re.compile(r"(|auto|cpu|cuda(:\d+)?)\Z"))]
"""A device; empty for the default, which another setting names."""

Several: TypeAlias = Annotated[tuple[DeviceName, ...], FromList(), BeforeValidator(_listed)]

Engine: TypeAlias = Literal["auto", "transformers", "vllm"]
Tracker: TypeAlias = Literal["tensorboard", "wandb", "trackio", "mlflow"]

ADMISSIONS: Final = ("overcommit", "continuous", "adaptive", "slope", "slope-algorithm1", "tail-batched")


def about(kind: type) -> str:
    # algorithms say what they are behind the colon of their first line
    return (kind.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """``[run]``: what is run, for how long, and what is written about it."""

    name: Name = setting("run", "the run's folder inside `directory`")
    directory: Filled = setting("runs", "the folder that holds runs")
    steps: PositiveCount = setting(
        100, "how many updates to make; absent with `data.epochs`: as many as the data lasts for", resume="free"
    )
    seed: Seed = setting(
        0,
        "seeds the data order, sampling and training; `--set run.seed=N` also sets the seeds of other sections that "
        "were equal to it",
    )
    deterministic: bool = setting(default=False, description="make all bits independent of timing (slow; float32, CPU)")
    cores: Annotated[int, Field(ge=0, le=1024)] = setting(
        0, "cores to work with; 0: all that the process may use", resume="rounding"
    )
    policy: Literal["thread", "process"] = setting(
        "thread",
        "where the actor decodes: in a thread, or, on a CPU, in a process, whose death ends the run",
        resume="rounding",
    )
    scorers: Literal["auto", "thread", "process"] = setting(
        "auto",
        "where the models that score work: in a thread beside the actor's, or in a process, which is restarted "
        "if it dies; auto: a process on a CPU with several cores, else a thread",
        resume="rounding",
    )
    trainer: Literal["thread", "process"] = setting("thread", "where updates are made", resume="free")
    panel: Literal["auto", "live", "lines", "off"] = setting(
        "auto", "form of the progress display; auto: live on a terminal, else lines", resume="free"
    )
    track: Annotated[tuple[Tracker, ...], FromList()] = setting(
        (),
        "where metrics and a few samples go besides the run directory: `tensorboard`, event files in it; `wandb`, "
        "Weights & Biases; `trackio`; `mlflow`, all three with the settings; each needs the extra of its name",
        resume="free",
    )
    metric_names: Literal["trl", "verl"] = setting(
        "trl",
        "names of a step's [metrics](metrics.md) in metrics.jsonl, in trackers and for observers: `trl`, TRL's of PPO, "
        "or of GRPO for algorithms with groups; `verl`, verl's; what has none there keeps its own",
        resume="free",
    )
    logged_samples: Count = setting(4, "rollouts a step written to samples.jsonl with their text", resume="free")
    trace: Count | Literal["all"] = setting(
        20,
        "how many of the first steps, and how many of the last, trace.json shows in chrome://tracing or Perfetto; "
        "`all`: every step, 0: none",
        resume="free",
    )
    watchdog_seconds: Seconds = setting(
        600.0, "seconds without progress after which a run is ended, with hang-report.json; 0: never", resume="free"
    )
    call_timeout: Seconds = setting(
        3600.0,
        "replaces `watchdog_seconds` during one call of a model or a reward function, if longer; 0: no limit",
        resume="free",
    )
    scorer_restarts: Count = setting(3, "restarts per hour of a process of the scorers that dies", resume="free")
    max_empty: Count = setting(
        5, "end a run after this many consecutive steps without a trained rollout; 0: never", resume="free"
    )
    max_nonfinite: Count = setting(
        3,
        "end a run after this many consecutive updates that are not finite, and dump the batch; 0: never",
        resume="free",
    )
    checkpoint_every: Count = setting(
        25,
        "steps between checkpoints, from which `oppo resume` goes on; the last step writes one too; 0: none",
        resume="free",
    )
    keep_last: PositiveCount = setting(2, "how many of the newest checkpoints are kept", resume="free")
    keep_best: bool = setting(
        default=False,
        description="keep the checkpoint of the best score too: the held-out score with `eval.prompts`, else the mean "
        "score of the step",
        resume="free",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsSection:
    """``[models]``: the models that are trained or served, by directory or hub name, and how they are loaded."""

    policy: Filled = required("directory or hub name of the causal language model to train")
    reference: str = setting(
        "",
        "directory or hub name of a model that is always loaded, and the KL to it measured; empty: the policy as it "
        "is at the start if the algorithm needs a reference (a KL penalty, online DPO), else none",
    )
    critic: str = setting(
        "",
        "directory or hub name; empty: the first reward model that can be one, else the policy; only PPO has a critic",
    )
    teacher: str | dict[str, Filled] = setting(
        "",
        "directory or hub name of a causal language model with the policy's tokenizer, whose log-probs the policy "
        "learns (`step.algorithm` is `distill`, or `algorithm.distill` above 0); or a table of several, as `{math = "
        "'large'}`, by the value of `teacher_column`; empty: none",
    )
    teacher_column: str = setting("", "column of the data that names the teacher of each prompt, if there are several")
    shared_trunk: bool = setting(
        default=False,
        description="make the critic a value head on the policy's own trunk, read and trained once for both",
    )
    share_weights: bool | None = setting(
        None,
        "train the served weights themselves, or a copy, from which the served ones are synced after each update; "
        "absent: `true`, but `false` with `step.lookahead`",
        resume="free",
    )
    engine: Engine = setting(
        "transformers",
        "what decodes the policy's responses; `vllm`: vLLM, in processes of its own, with the arguments of `[vllm]`; "
        "weights are synced to it; auto: vLLM on a GPU where it is installed and the settings allow it",
    )
    dtype: Literal["by-device", "float32", "bfloat16", "float16", "auto"] = setting(
        "by-device",
        "type of the weights, by-device: bfloat16 on a GPU that has it, else float32; in 16 bits, float32 copies train",
    )
    device: DeviceName = setting(
        "auto",
        "device of the models that `[placement]` does not place: `auto`, `cpu`, `cuda`, or one of several as "
        "`cuda:1`; auto: `cuda` where there is one and `run.deterministic` is off, else `cpu`",
        resume="rounding",
    )
    attention: Literal["auto", "segmented", "padded", "eager"] = setting(
        "auto",
        "how served models attend: `segmented`: SDPA, rows of similar length as one segment; `padded`: SDPA, all rows "
        "of a batch as long as the longest; `eager`: transformers' formulas, padded; auto: SDPA where transformers has "
        "it, segmented where a model then agrees with its one-shot forward pass",
    )
    lora_rank: Count = setting(0, "train adapters of this rank, of a mixture in its attention; 0: all weights")
    lora_alpha: PositiveCount = setting(32, "adapters are scaled by lora_alpha / lora_rank")
    lora_experts: bool = setting(default=False, description="add adapters to the experts of a mixture too")
    lora: dict[str, object] = field(
        default_factory=dict,
        metadata={
            "description": 'further arguments of PEFT\'s `LoraConfig`, as `{target_modules = ["q_proj"], use_rslora = '
            "true}`"
        },
    )
    adapter: str = setting(
        "",
        "directory or hub name of a LoRA adapter for the policy, which is trained on, with the rank that it has; "
        "empty: none, or a new one of `lora_rank`",
    )
    quantization: Literal["none", "nf4", "fp4"] = setting(
        "none",
        "4-bit type of the weights that adapters are added to (QLoRA), in the extra `quantization`; the reference over "
        "the same base has them too",
    )
    lora_sync: Literal["auto", "adapter", "merged"] = setting(
        "auto",
        "what vLLM gets of adapters: `adapter`: the adapters alone, which it computes with beside the base in its own "
        "dtype; `merged`: all weights with the adapters' products added, in float32; auto: `adapter` over 16-bit "
        "weights where that can be, else `merged`",
    )
    trust_remote_code: bool = setting(default=False, description="run code that comes with a model")
    allow_pickle: bool = setting(
        default=False,
        description="read weights that come as pickles only, not of `adapter`: nothing but tensors (`weights_only`)",
    )
    ignore_unused_weights: bool = setting(
        default=False,
        description="leave out weights that a model does not use, and log which, instead of refusing the model",
    )

    def __post_init__(self) -> None:
        if bool(self.teacher_column) != isinstance(self.teacher, dict):
            raise ValueError(
                "teacher_column names the column by which each prompt has one of several teachers: give it with a "
                f"table of teachers, and with no other value; got teacher = {self.teacher!r}, teacher_column = "
                f"{self.teacher_column!r}"
            )
        if self.shared_trunk and self.critic:
            raise ValueError(
                "shared_trunk = true makes the critic a head on the policy's trunk: leave critic out; got "
                f"{self.critic!r}"
            )
        if self.adapter and (given := changed(self, {"lora_rank", "lora_alpha", "lora_experts", "lora"})):
            raise ValueError(
                f"adapter = {self.adapter!r} has a rank, a scale and layers of its own: leave {', '.join(given)} out, "
                "or adapter, for a new one"
            )
        if self.quantization != "none" and not self.adapts:
            raise ValueError(
                f"quantization = {self.quantization!r} freezes the weights of the policy's layers, and no adapters are "
                "trained beside them: set lora_rank or adapter, or leave quantization out"
            )
        if self.lora_sync == "adapter" and self.unfit_alone:
            raise ValueError(
                "lora_sync = 'adapter' gives vLLM the adapters of linear layers alone, which does not go with "
                f"{'; '.join(self.unfit_alone)}: change that, or leave lora_sync out"
            )

    @property
    def teachers(self) -> Mapping[str, str]:
        if isinstance(self.teacher, dict):
            return {f"teacher.{name}": path for name, path in self.teacher.items()}
        return {"teacher": self.teacher} if self.teacher else {}

    @property
    def adapts(self) -> bool:
        return bool(self.lora_rank or self.adapter)

    @property
    def unfit_alone(self) -> Sequence[str]:
        faults = {
            f"engine = {self.engine!r}, which is not given adapters apart": self.engine != "vllm",
            "all weights being trained: set lora_rank or adapter": not self.adapts,
            "lora_experts = true, adapters that vLLM does not load": self.lora_experts,
            f"quantization = {self.quantization!r}, a base that vLLM has whole": self.quantization != "none",
        }
        return [fault for fault, holds in faults.items() if holds]

    @property
    def begins_off_base(self) -> bool:
        """Whether the policy begins as another model than the one in its files, or is sent apart from that."""
        return bool(self.adapter) or self.quantization != "none" or self.lora_sync == "adapter"

    @property
    def is_reference_on_base(self) -> bool:
        return self.adapts and self.reference in {self.policy, self.adapter}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    """``[placement]``: the device of each model, where they are not all on ``models.device``."""

    policy: Another = setting("", "device of the policy that decodes; empty: `models.device`", resume="rounding")
    trainer: Several = setting(
        (),
        'device of the trainer; or a list of devices for as many training ranks, each a process, such as `["cuda:1", '
        '"cuda:2"]` or `["cpu", "cpu"]`; empty: `models.device`',
        resume="rounding",
    )
    scorers: Another = setting(
        "", "device of reference, reward, critic and teacher; empty: `models.device`", resume="rounding"
    )
    reference: Another = setting("", "device of the reference; empty: `placement.scorers`", resume="rounding")
    reward: Another = setting("", "device of reward models; empty: `placement.scorers`", resume="rounding")
    critic: Another = setting("", "device of the critic that is served; empty: `placement.scorers`", resume="rounding")
    teacher: Another = setting("", "device of the teacher; empty: `placement.scorers`", resume="rounding")
    shard: bool = setting(
        default=True,
        description="give each training rank a shard of weights, gradients and optimizer states (FSDP2), in place of "
        "all of them; one rank has all",
        resume="rounding",
    )
    cluster: str = setting(
        "",
        "Ray cluster for the models of `placement.remote`: `auto`, that of `RAY_ADDRESS` or of `ray start` on this "
        "machine, or the `host:port` of its head; empty: none",
        resume="rounding",
    )
    remote: Annotated[tuple[Remote, ...], FromList()] = setting(
        (),
        "with a cluster, the models that are remote, one Ray actor each; of the trainer, every rank but the first; "
        "empty: every model that can be remote, but the policy",
        resume="rounding",
    )
    actor_cpus: PositiveCount = setting(
        1,
        "with a cluster, the cores that each Ray actor reserves on its machine and computes with; rank 0 computes with "
        "as many",
        resume="rounding",
    )
    spread: bool = setting(
        default=False, description="with a cluster, put each rank of the trainer on a machine of its own", resume="free"
    )
    policy_replicas: Annotated[int, Field(ge=1, le=1024)] = setting(
        1,
        "engines that decode as one pool, which outlives the death of any: processes of this machine, each with a GPU, "
        "from that of `placement.policy` on, or its share of the cores; with the policy in `placement.remote`, Ray "
        "actors",
        resume="rounding",
    )
    share: Literal["beside", "sleep"] = setting(
        "beside",
        "how vLLM has a GPU together with the trainer: `beside`: each has its own part of the memory; `sleep`: the "
        "engine sleeps while the policy is trained, its weights in the CPU's memory and its KV cache dropped, so that "
        "the KV cache of deferred rollouts is recomputed",
        resume="rounding",
    )

    def names(self, device: str) -> Mapping[str, tuple[str, ...]]:
        scorers = self.scorers or device
        return {
            "policy": (self.policy or device,),
            "trainer": self.trainer or (device,),
            **{name: (getattr(self, name) or scorers,) for name in SCORERS},
        }

    def key_of(self, model: str) -> str:
        own = [model, "scorers"] if model in SCORERS else [model]
        return next((f"placement.{key}" for key in own if getattr(self, key)), "models.device")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """``[data]``: the prompts and how they are served."""

    prompts: Prompts = required(
        "a .jsonl, .csv or .parquet file, a directory that `datasets` wrote (`save_to_disk`), or a dataset's name at a "
        "hub; or `verifiers:NAME`, the tasks of a taskset, or `verifiers:file.py:class`; or a list of such, mixed: "
        "each a text, or a table with `path`, `weight`, `column`, `split`, `subset`, and of a taskset `config`"
    )
    column: Filled = setting("prompt", "the column that holds the prompt: text, or chat messages")
    chat_template: str = setting(
        "",
        "the chat template of the policy, as a file or as text; it is saved with the policy; empty: that of its "
        "tokenizer",
    )
    chat_template_kwargs: dict[str, object] = field(
        default_factory=dict,
        metadata={"description": "variables that the chat template reads, such as `enable_thinking = false`"},
    )
    tools: str = setting(
        "",
        "a `.json` file with the list of the schemas of tools that the chat template shows to the policy; empty: none",
    )
    max_prompt_tokens: PositiveCount = setting(512, "a prompt with more tokens is over-long")
    over_long: Literal["filter", "truncate", "error"] = setting("filter", "what to do with over-long prompts")
    epochs: Count = setting(
        0,
        "passes over the prompts; with weights the data ends where a source would begin another pass; 0: as many as "
        "the steps need",
    )
    images: bool = setting(
        default=False,
        description="rows of a program that come one by one, and requests of agents, may show images; other prompts "
        "show what they have",
    )
    drop_last: bool = setting(
        default=False, description="leave out, in each epoch, the prompts that fill no whole `step.batch`"
    )
    seed: Seed = setting(0, "keys the order of the prompts")

    @property
    def files(self) -> dict[str, Path]:
        named = {
            "data.chat_template": "" if "{" in self.chat_template else self.chat_template,
            "data.tools": self.tools,
        }
        return {name: Path(path) for name, path in named.items() if path}

    def within(self, folder: Path) -> DataSection:
        paths: dict[str, Any] = {
            name.partition(".")[2]: resolved(str(path), folder) for name, path in self.files.items()
        }
        return replace(self, prompts=within(self.prompts, folder), **paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSection(SamplingSettings):
    """``[sampling]``: how the policy draws tokens (see :class:`oppo.models.Sampling`)."""

    stop: Annotated[tuple[int | Filled, ...], FromList()] = setting(
        (), "token ids, or texts that are one token each, which end a response as the end of sequence does"
    )
    eos: bool = setting(
        default=True, description="whether the end-of-sequence tokens of tokenizer and model end a response"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSection:
    """``[step]``: the algorithm, and the schedule of a step."""

    algorithm: Annotated[str, OneOf(tuple(ALGORITHMS), "file.py:name", SPEC)] = setting(
        "ppo",
        "; ".join(f"`{name}`: {about(kind)}" for name, kind in ALGORITHMS.items())
        + "; `file.py:name`: your own, a dataclass or a function with the settings of `[algorithm]`",
    )
    batch: Rollouts = setting(32, "prompts trained in a step, each with all of its responses")
    overcommit: Count | None = setting(
        None,
        "prompts in flight beyond the batch, with all of their responses; their maximum if `admission` adapts the "
        "number; the prompts decoded at a time if it is `continuous`; absent: 0, so nothing is deferred; a quarter of "
        "the batch if adapted; the batch for `continuous` and your own",
    )
    max_deferrals: PositiveCount = setting(
        2, "how often a rollout may be deferred; a step waits for one that was deferred this often"
    )
    admission: Annotated[str, OneOf(ADMISSIONS, "file.py:name", SPEC)] = setting(
        "overcommit",
        "how many prompts are in flight: `overcommit`: always `overcommit` beyond the batch; `continuous`: a new "
        "prompt replaces each that ends, so `overcommit` are decoded at a time until the batch is full; `adaptive`: "
        "as many as save time at the price of their staleness; `slope` and `slope-algorithm1`: more while the score "
        "rises (the paper's two rules); `tail-batched`: a quarter more, and the longest are aborted and restarted "
        "together in a later step, so nothing is ever stale; `file.py:name`: your own class or function, with the "
        "settings of `[admission]`",
    )
    staleness_price: NonNegative = setting(
        1.0, "price of a mean staleness of one version for `adaptive`, as a fraction of a step's time"
    )
    chunk: PositiveCount | Literal["whole", "tuned"] = setting(
        32,
        "tokens streamed to the scorers at a time; `whole`: each response when it has ended; `tuned`: a part of "
        "`max_new_tokens`, which is chosen by trial every 50 steps",
    )
    kv_on_sync: Literal["recompute", "keep"] = setting(
        "recompute",
        "KV cache of a deferred rollout after a weight sync: recomputed with the new weights, or kept (cheaper, but of "
        "several versions, and lost when a run is resumed)",
    )
    lookahead: Annotated[int, Field(ge=0, le=100)] = setting(
        0,
        "steps that may begin before the current one has ended: 0 decodes, scores and trains one step after the "
        "other; 1 decodes the next step while this one is trained (one-step-off), with tokens one version staler",
    )
    loss: Annotated[str, OneOf(("",), "file.py:name", SPEC)] = setting(
        "",
        "`file.py:name` of a loss of your own in place of the algorithm's: a class or a function, with the settings "
        "of `[loss]`",
    )
    stream_updates: bool = setting(
        default=False,
        description="add the gradient of each group once it is scored, while others are still decoded; the result "
        "differs by rounding only; for algorithms that compare the responses of a group, with one epoch and one "
        "minibatch",
    )
    weight_sync: Literal["cut", "in-flight"] = setting(
        "cut",
        "when the policy gets new weights, with `lookahead`: `cut`: between two steps, so the weights of a step do "
        "not depend on timing; `in-flight`: between two decode steps, as soon as there are any, so tokens are fresher",
    )

    def __post_init__(self) -> None:
        if self.overcommit is not None and self.admission == "tail-batched":
            raise ValueError("admission = 'tail-batched' launches a quarter of the batch more: leave overcommit out")
        if self.overcommit == 0 and self.admission == "continuous":
            raise ValueError(
                "admission = 'continuous' decodes so many at a time, so overcommit must be at least 1; as many as the "
                "batch when absent"
            )
        if self.overcommit is not None and self.overcommit > self.batch:
            raise ValueError(
                f"overcommit must be at most batch ({self.batch}), so that overdue rollouts fit; got {self.overcommit}"
            )

    @property
    def most_overcommit(self) -> int:
        if self.overcommit is not None:
            return self.overcommit
        if self.admission in ADMISSIONS:
            return {"overcommit": 0, "continuous": self.batch}.get(self.admission, self.batch // 4)
        return self.batch  # one's own may keep as many as may be


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    """``[eval]``: how the policy answers held-out prompts while it is trained."""

    prompts: HeldOut = setting(
        "", "held-out prompts, as `data.prompts`, without weights; empty: no evaluation", resume="free"
    )
    every: PositiveCount = setting(
        10,
        "steps between evaluations; there is one before the first step and one after the last too, and, with "
        "`run.keep_best`, one before each checkpoint",
        resume="free",
    )
    samples: PositiveCount = setting(
        1,
        "the most likely response to each prompt is scored; above 1, so many are sampled besides, as in training, for "
        "their mean score and pass@k",
        resume="free",
    )
    count: Count = setting(0, "answer only the first so many prompts; 0: all", resume="free")
    pass_score: float | None = setting(
        None,
        "a response of at least this score passes, for pass@k; absent: 1 for one reward function or an agent; with a "
        "reward model or several rewards nothing passes",
        resume="free",
    )
    batch: Rollouts | None = setting(
        None, "responses that are decoded at a time; absent: as many as a step trains", resume="free"
    )
    seed: Seed = setting(0, "keys the noise of sampled responses, the same in every evaluation", resume="free")
