"""The settings of a training run: a TOML file in, checked and resolved, and the same file out with every default.

A fault is a sentence that names section and key, what was expected and what came; all faults of a file are told at
once. Relative paths are relative to the folder of the file, ``--set`` included, and come out absolute, so that the
resolved file means the same wherever it lies.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from oppo.errors import ConfigError
from oppo.faults import Faults, require_public
from oppo.overrides import SEEDS, overridden, seeded
from oppo.sections import Count, NonNegative, Positive, PositiveCount, Seconds, Section, StepSection
from oppo.training import Schedule, TrainerSettings

Seed: TypeAlias = Annotated[
    int, Field(ge=SEEDS.start, lt=SEEDS.stop, description="whole number; the run's own when absent")
]
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Filled: TypeAlias = Annotated[str, Field(min_length=1)]

_FUNCTION = re.compile(r"^(?P<file>.+\.py):(?P<function>[^:/\\]+)$")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_OF_A_CRITIC = {
    "models": ("critic", "shared_trunk"),
    "step": ("gamma", "lam", "whiten_rewards"),
    "trainer": ("critic_learning_rate", "critic_warmup", "value_clip", "value_coefficient"),
}


class RunSection(Section):
    """``[run]``: what is run, for how long, and what is written about it."""

    name: Name = Field(default="run", description="the run's folder inside `directory`")
    directory: Filled = Field(default="runs", description="the folder that holds runs")
    steps: PositiveCount = Field(default=100, description="how many updates to make")
    seed: Annotated[int, Field(ge=SEEDS.start, lt=SEEDS.stop)] = Field(
        default=0,
        description="seeds the data order, sampling and training; `--set run.seed=N` moves the seeds of the sections "
        "with it that were the same",
    )
    exact: bool = Field(default=False, description="make every bit independent of timing (slower; float32, CPU)")
    cores: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0, description="cores to work with; 0: all that the process may use"
    )
    policy: Literal["thread", "process"] = Field(
        default="thread",
        description="where the actor decodes: in a thread, or, on a CPU, in a process, without which a run ends",
    )
    scorers: Literal["auto", "thread", "process"] = Field(
        default="auto",
        description="where reward, reference and critic work: in a thread beside the actor's, or in a process of their "
        "own, which is started again if it dies; auto: a process on a CPU with several cores, else a thread",
    )
    trainer: Literal["thread", "process"] = Field(default="thread", description="where updates are made")
    panel: Literal["auto", "live", "lines", "off"] = Field(
        default="auto", description="how progress is shown; auto: live on a terminal, else lines"
    )
    samples: Count = Field(default=4, description="rollouts a step written to samples.jsonl with their text")
    trace: Count | Literal["all"] = Field(
        default=20,
        description="steps at the beginning of the run, and as many at its end, that trace.json shows in "
        "chrome://tracing or Perfetto; `all`: every step, 0: none",
    )
    watchdog_seconds: Seconds = Field(
        default=600.0, description="end a run in which nothing has moved for so long, with hang-report.json; 0: never"
    )
    call_seconds: Seconds = Field(
        default=3600.0,
        description="the same while one call of a model or a reward function is at work, where it is longer; 0: never",
    )
    scorer_restarts: Count = Field(
        default=3, description="how often in an hour a process of the scorers that has died is started again"
    )
    max_empty: Count = Field(
        default=5, description="end a run after so many steps in a row in which no rollout was trained; 0: never"
    )
    max_nonfinite: Count = Field(
        default=3, description="end a run after so many updates in a row that were not finite, with the batch; 0: never"
    )
    checkpoint_every: Count = Field(
        default=25,
        description="write a checkpoint, from which `oppo resume` goes on, after so many steps and the last; 0: never",
    )
    keep_last: PositiveCount = Field(default=2, description="how many of the newest checkpoints are kept")
    keep_best: bool = Field(default=False, description="keep the checkpoint of the best mean score too")


class ModelsSection(Section):
    """``[models]``: directories or hub names; the reward may be a function as ``file.py:function``."""

    policy: Filled = Field(description="directory or hub name of the causal language model to train")
    reward: Filled = Field(description="directory or hub name of a reward model, or file.py:function")
    reference: str = Field(default="", description="directory or hub name; the policy when empty")
    critic: str = Field(
        default="", description="directory or hub name; the reward model, or the policy, when empty; none without PPO"
    )
    shared_trunk: bool = Field(
        default=False,
        description="make the critic a value head on the policy's own trunk, read and trained once for both",
    )
    share_weights: bool = Field(
        default=True, description="train the weights that are served; off: a copy, published after each update"
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        default="float32",
        description="type of the weights; what is trained in 16 bits has float32 copies; no float16 on a CPU",
    )
    device: str = Field(
        default="auto",
        description="where the models are: `auto`, `cpu`, `cuda`, or one of several as `cuda:1`; auto: `cuda` where "
        "there is one and `run.exact` is off, else `cpu`",
    )
    attention: Literal["auto", "parts", "whole", "eager"] = Field(
        default="auto",
        description="how served models attend: SDPA with rows in `parts` of similar length, SDPA with `whole` batches "
        "as long as their longest row, or `eager`, as long too; auto: SDPA where transformers has it, in parts where a "
        "model then agrees with its one-shot forward pass",
    )
    lora_rank: Count = Field(
        default=0, description="train adapters of this rank instead of the policy's weights; 0: all weights"
    )
    lora_alpha: PositiveCount = Field(default=32, description="adapters are scaled by lora_alpha / lora_rank")
    trust_remote_code: bool = Field(default=False, description="run code that comes with a model")
    allow_pickle: bool = Field(
        default=False,
        description="read weights that come as pickles only: tensors and nothing else of them (`weights_only`)",
    )
    ignore_unused_weights: bool = Field(
        default=False, description="leave out weights that a model does not use, and say which, instead of refusing it"
    )
    reward_failure: Literal["fail", "drop", "retry"] = Field(
        default="fail",
        description="when a reward function fails: stop the run, drop the rollout, or call again, then stop",
    )
    reward_process: bool = Field(
        default=False,
        description="call a sync reward function in a process of its own, one call at a time: it may then hold the "
        "interpreter lock for long, or crash, which is a failure like others",
    )

    @model_validator(mode="after")
    def _consistent(self) -> ModelsSection:
        if self.shared_trunk and self.critic:
            raise ValueError(
                "shared_trunk = true makes the critic a head on the policy's trunk: leave critic out; got "
                f"{self.critic!r}"
            )
        return self

    @field_validator("device")
    @classmethod
    def _named(cls, device: str) -> str:
        if _DEVICE.fullmatch(device) is None:
            raise ValueError(f"expected 'auto', 'cpu', 'cuda' or one of several as 'cuda:1', got {device!r}")
        return device

    @property
    def reward_is_function(self) -> bool:
        """Whether the reward is a Python function rather than a model."""
        return self.reward_file is not None

    @property
    def reward_file(self) -> Path | None:
        """The file of the reward function, where the reward is one."""
        function = _FUNCTION.match(self.reward)
        return None if function is None else Path(function["file"])


class DataSection(Section):
    """``[data]``: the prompts and how they are served."""

    prompts: Filled = Field(description="a .jsonl or .parquet file")
    column: Filled = Field(default="prompt", description="the column that holds the prompt: text, or chat messages")
    max_prompt_tokens: PositiveCount = Field(default=512, description="a longer prompt is over-long")
    over_long: Literal["filter", "truncate", "error"] = Field(
        default="filter", description="what to do with over-long prompts"
    )
    epochs: Count = Field(default=0, description="passes over the file; 0: as many as the steps need")
    seed: Seed = 0


class SamplingSection(Section):
    """``[sampling]``: how the policy draws tokens (see :class:`oppo.models.Sampling`)."""

    max_new_tokens: PositiveCount = Field(default=128, description="a response ends at this length")
    temperature: NonNegative = Field(default=1.0, description="divides the logits; 0 is greedy")
    top_k: Count = Field(
        default=0, description="only the k most likely tokens are drawn, and log-probs are among them; 0 keeps all"
    )
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        default=1.0,
        description="only the most likely tokens that reach this probability are drawn, and log-probs are among them; "
        "their ids are stored (4 bytes each, for each token), which `top_k` bounds; 1 keeps all",
    )
    stop: Annotated[tuple[int | Filled, ...], Field(strict=False)] = Field(
        default=(),
        description="token ids, or texts that are one token each; the tokenizer's end of sequence when empty",
    )
    min_new_tokens: Count = Field(
        default=0,
        description="no token of `stop` is drawn before a response is so long, and log-probs are among the others",
    )
    stop_strings: Annotated[tuple[Filled, ...], Field(strict=False)] = Field(
        default=(), description="texts that end a response with the token that completes them"
    )
    seed: Seed = 0

    @model_validator(mode="after")
    def _consistent(self) -> SamplingSection:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens must be at most max_new_tokens; got {self.min_new_tokens}")
        return self


OF_THE_LOSS = {"clip", "value_clip", "value_coefficient", "entropy_coefficient"}
"""The keys of ``[trainer]`` that choose the loss; the others are the optimiser's."""


class TrainerSection(Section):
    """``[trainer]``: losses and optimiser (see :class:`oppo.losses.PPOLoss` and :class:`oppo.TrainerSettings`)."""

    learning_rate: Positive = Field(default=3e-6, description="of AdamW, for the actor")
    critic_learning_rate: Positive | None = Field(
        default=None, description="the actor's when absent; a shared trunk has the actor's"
    )
    critic_warmup: Count = Field(
        default=0, description="updates at the beginning that train the critic only (on a shared trunk: its head)"
    )
    epochs: PositiveCount = Field(default=4, description="passes over each batch")
    minibatches: PositiveCount = Field(default=1, description="optimizer steps in each pass")
    clip: Positive = Field(default=0.2, description="how far the probability ratio may move from 1")
    value_clip: Positive | Literal["none"] = Field(default=0.2, description="how far a value may move in an update")
    value_coefficient: NonNegative = Field(default=0.1, description="weight of the value loss")
    entropy_coefficient: NonNegative = Field(default=0.0, description="weight of the entropy bonus")
    max_grad_norm: Positive = Field(default=1.0, description="each model's gradient is scaled down to this norm")
    weight_decay: NonNegative = Field(default=0.0, description="of AdamW, for matrices only")
    schedule: Schedule = Field(
        default="constant", description="a transformers scheduler, such as constant, linear or cosine"
    )
    warmup_steps: Count = Field(default=0, description="updates over which the learning rate grows from 0")
    gradient_checkpointing: Count = Field(
        default=0, description="recompute every n-th layer in the backward pass: 1 is all layers, 0 none"
    )
    micro_batch_tokens: PositiveCount = Field(
        default=4096, description="at most so many tokens, padding included, in a forward pass"
    )
    seed: Seed = 0


class Settings(Section):
    """Everything a run is made of, checked; see :func:`load`."""

    run: RunSection = RunSection()
    models: ModelsSection
    data: DataSection
    sampling: SamplingSection = SamplingSection()
    step: StepSection = StepSection()
    trainer: TrainerSection = TrainerSection()

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.run.exact and self.step.admission == "adaptive":
            raise ValueError(
                "run.exact makes every bit independent of timing, and step.admission = 'adaptive' decides by time: "
                "choose another admission"
            )
        if self.run.exact and self.models.dtype != "float32":
            raise ValueError(f"run.exact needs models.dtype = 'float32', got {self.models.dtype!r}")
        if self.run.exact and self.models.device.startswith("cuda"):
            raise ValueError(f"run.exact needs models.device = 'cpu' (or 'auto'), got {self.models.device!r}")
        if self.trainer.schedule == "constant" and self.trainer.warmup_steps:
            raise ValueError(
                f"trainer.warmup_steps: schedule 'constant' has no warm-up, got {self.trainer.warmup_steps}: leave it "
                "out, or choose trainer.schedule = 'constant_with_warmup'"
            )
        if (rise := self.trainer.warmup_steps) >= self.run.steps:
            raise ValueError(f"trainer.warmup_steps: expected fewer than run.steps ({self.run.steps}), got {rise}")
        if not self.has_critic:
            self._require_no_critic()
        if not self.has_critic and self.sampling.temperature == 0:
            raise ValueError(
                f"step.algorithm = {self.step.algorithm!r} compares the responses to a prompt with one another, and "
                "sampling.temperature = 0 makes them all the same: give one above 0"
            )
        return self

    @property
    def has_critic(self) -> bool:
        """Whether values are estimated, by a model that is trained too."""
        return self.step.algorithm == "ppo"

    def _require_no_critic(self) -> None:
        sections: dict[str, Section] = {name: getattr(self, name) for name in _OF_A_CRITIC}
        chosen = {
            f"{name}.{key}": (getattr(section, key), type(section).model_fields[key].default)
            for name, section in sections.items()
            for key in _OF_A_CRITIC[name]
        }
        given = [f"{name} = {value!r}" for name, (value, default) in chosen.items() if value != default]
        if given:
            raise ValueError(
                f"step.algorithm = {self.step.algorithm!r} has no critic, so nothing is made of "
                f"{', '.join(given)}: leave that out"
            )

    @property
    def run_directory(self) -> Path:
        """The folder that this run writes."""
        return Path(self.run.directory) / self.run.name

    def toml(self) -> str:
        """Return the resolved file: loading it gives these settings again, wherever it lies."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of the TOML file at ``path``, with ``section.key=value`` overrides, paths resolved.

    Raises:
        ConfigError: the file cannot be read or is no TOML, or a setting is unknown, missing or out of range.
    """
    try:
        document = tomllib.loads(_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of numbers too long, of a NUL in the path
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return resolve(overridden(document, overrides), path.absolute().parent)


def resolve(document: Mapping[str, object], folder: Path) -> Settings:
    """Return the settings of a parsed file that lies in ``folder``.

    Raises:
        ConfigError: a setting is unknown, missing or out of range.
    """
    try:
        settings = Settings.model_validate(seeded(document))
    except ValidationError as error:
        raise ConfigError(Faults(Settings).told(error)) from error
    models = settings.models
    reward = _model(models.reward, folder)
    policy = _model(models.policy, folder)
    own_critic = policy if models.reward_is_function else reward
    if models.shared_trunk or not settings.has_critic:
        own_critic = ""
    resolved = {
        "policy": policy,
        "reward": reward,
        "reference": _model(models.reference, folder) or policy,
        "critic": _model(models.critic, folder) or own_critic,
    }
    settings = settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"directory": _path(settings.run.directory, folder)}),
            "models": models.model_copy(update=resolved),
            "data": settings.data.model_copy(update={"prompts": _path(settings.data.prompts, folder)}),
        }
    )
    require_public(settings)
    return settings


def trainer_settings(settings: Settings) -> TrainerSettings:
    """Return how the trainer optimises; schedules span the run.

    Raises:
        ConfigError: the schedule and its warm-up do not go together.
    """
    chosen = settings.trainer.model_dump(exclude=OF_THE_LOSS)
    return TrainerSettings(**chosen, total_steps=settings.run.steps)


def _text(path: Path) -> str:
    """Return what a file says; one that is no regular file, and may never end, is not opened."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is no regular file")
    return path.read_text(encoding="utf-8")


def _path(text: str, folder: Path) -> str:
    try:
        return str((folder / Path(text).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an unknown ~user, a NUL
        raise ConfigError(f"{text!r} is no path that can be followed: {error}") from error


def _model(text: str, folder: Path) -> str:
    """Return an absolute path for what is a file or directory, or is spelt as one; a hub name as it stands."""
    if (function := _FUNCTION.match(text)) is not None:
        return f"{_path(function['file'], folder)}:{function['function']}"
    spelt_as_path = text.startswith((".", "/", "~"))
    return _path(text, folder) if text and (spelt_as_path or os.path.lexists(folder / text)) else text
