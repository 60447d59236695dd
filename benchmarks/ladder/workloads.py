"""The workloads of the ladder, whose numbers are in ``workloads.toml``, its schedules, and the options to choose them.

A workload may state the shares of the phases in a serial step; a run outside of them is INVALID. A workload that states
all of them is calibrated first (:func:`benchmarks.ladder.measures.calibrate`), from the depths of reward model and
critic here. Each mode adds one overlap. A new controller of chunks or of admission is one more row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias, cast, get_args

from cyclopts import Parameter
from pydantic import TypeAdapter

from oppo.admission import Admission, Overcommit, Synchronous, TailAdaptive
from oppo.admission.chunking import ChunkSize, Fixed, WholeRollout
from oppo.errors import ConfigError

Layout: TypeAlias = Literal["split", "shared"]
Scorers: TypeAlias = Literal["thread", "process"]
Engine: TypeAlias = Literal["transformers", "vllm"]
Phase: TypeAlias = Literal["decode", "score", "update"]
Reward: TypeAlias = Literal["model", "rule", "reviews"]  # `reviews`: the utility of the demo's language
Architecture: TypeAlias = Literal["llama", "qwen3_5_text"]
Range: TypeAlias = tuple[float, float]


LISTED: Final = 64  # ids that a teacher lists at each token


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a Llama, or of a model of another architecture with as many parameters."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int | None = None
    architecture: Architecture = "llama"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of responses with the end token: lognormal, no shorter than ``shortest``, cut off at ``cap``."""

    # median, sigma: of the lognormal; `sigma` is that of the logarithm
    median: float
    sigma: float
    cap: int
    shortest: int = 4
    # one in so many prompts announces more than the cap, wherever the lognormal lies; 0: none but its own tail
    over: int = 0


@dataclass(frozen=True, slots=True)
class Bound:
    """Bounds on the share of a phase in a serial step of a layout; outside of them a run is INVALID."""

    layout: Layout
    phase: Phase
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Models:
    """The shapes of the models; the reference has the actor's."""

    actor: Shape
    reward: Shape
    critic: Shape
    dtype: str = "float32"  # of all models
    vocabulary: int = 0  # of models for a GPU, more than the language's; 0: the same


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    name: str
    about: str
    lengths: Lengths
    models: Models
    batch: int = 24  # rollouts trained in a step
    extra: int = 4  # delta of the overcommitted modes, in rollouts
    epochs: int = 1
    minibatches: int = 1
    chunk: int = 32  # tokens of a chunk in the streamed modes
    reward: Reward = "model"  # a model, or a function of the finished response
    shares: tuple[Bound, ...] = ()  # of the phases in a serial step
    # range of the fraction of prompts that announce the cap or more; outside of it the run is INVALID
    capped: Range = (0.0, 1.0)
    learning_rate: float = 1e-7  # of actor and critic: so small that the lengths do not change
    micro_batch_tokens: int = 4096  # in one forward pass of the update, padding included
    kl: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    temperature: float = 1.0
    seed: int = 20261120
    prompts: int = 2048  # number in the workload's directory; they are used in order, again and again
    prompt_tokens: tuple[int, int] = (12, 24)  # shortest and longest prompt
    # updates are made in a process of their own in every mode, not only in those that look ahead
    trains_apart: bool = False
    samples: int = 0  # responses to each prompt, which GRPO compares; 0: one, and PPO with a critic, or a teacher
    # of random weights, from whose likeliest ids the actor learns; `None`: it learns from the reward
    teacher: Shape | None = None

    @property
    def algorithm(self) -> str:
        return "distillation" if self.teacher else "GRPO" if self.samples else "PPO"

    @property
    def roles(self) -> tuple[str, ...]:
        if self.teacher:
            return "actor", "teacher"
        return ("actor", "reward") if self.samples else ("actor", "reward", "critic")

    def shape(self, role: str) -> Shape:
        return self.teacher if role == "teacher" and self.teacher else cast("Shape", getattr(self.models, role))

    @property
    def group(self) -> int:
        return max(1, self.samples)

    @property
    def positions(self) -> int:
        """Positions of the models: longest prompt and longest response, rounded up to a multiple of 64."""
        return -(-(self.prompt_tokens[1] + self.lengths.cap) // 64) * 64


_TABLES: Final[Mapping[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def _workload(name: str) -> dict[str, Any]:
    table = dict(_TABLES[name])
    like = table.pop("like", "")
    base = _workload(like) if like else {}
    models = {**base.get("models", {}), **table.get("models", {})}
    return {**base, **table, "models": models, "name": name}


# By name; `all` includes neither `smoke` nor those of a GPU
WORKLOADS: Final = MappingProxyType(
    {name: TypeAdapter(BenchWorkload).validate_python(_workload(name)) for name in _TABLES}
)
PAPER, GRPO, DISTILL, TRAIN_BOUND, RULE_REWARD, CAPPED, BALANCED, SMOKE, *_ = WORKLOADS.values()


def tiny(workload: BenchWorkload) -> BenchWorkload:
    """Return a workload as small as smoke, to try on a CPU what is for a GPU."""
    kept = {name: getattr(workload, name) for name in ("about", "reward", "samples")}
    full = workload.lengths.median > workload.lengths.cap
    lengths = replace(workload.lengths, cap=SMOKE.lengths.cap) if full else SMOKE.lengths
    return replace(SMOKE, name=f"{workload.name}-tiny", lengths=lengths, **kept)


def with_reward_architecture(workload: BenchWorkload, architecture: Architecture) -> BenchWorkload:
    """Return the workload with a reward model of another architecture, under a name that says so."""
    models = workload.models
    if architecture == models.reward.architecture:
        return workload
    reward = replace(models.reward, architecture=architecture)
    return replace(workload, name=f"{workload.name}-{architecture}", models=replace(models, reward=reward))


@dataclass(frozen=True, slots=True)
class Mode:
    """The schedule of a contestant; models, engine and data are the same for all."""

    name: str
    about: str
    held: bool  # scoring waits until decoding has ended
    # chunks, admission: made anew for each contestant
    chunks: Callable[[BenchWorkload], ChunkSize]
    admission: Callable[[BenchWorkload], Admission]
    over: str = "serial"  # the mode it extends, with which it is compared besides the serial one
    lookahead: int = 0  # steps that begin before the current one has ended

    def trains_apart(self, workload: BenchWorkload) -> bool:
        return workload.trains_apart or self.lookahead > 0


def _whole(_: BenchWorkload) -> ChunkSize:
    return WholeRollout()


def _fixed(workload: BenchWorkload) -> ChunkSize:
    return Fixed(workload.chunk)


def _synchronous(workload: BenchWorkload) -> Admission:
    return Synchronous(workload.batch // workload.group)


def _overcommitted(workload: BenchWorkload) -> Admission:
    return Overcommit(batch=workload.batch // workload.group, overcommit=workload.extra // workload.group)


def _adaptive(workload: BenchWorkload) -> Admission:
    return TailAdaptive(batch=workload.batch // workload.group)


SERIAL: Final = Mode("serial", "decode, then score, then train", True, _whole, _synchronous)

# By name, in the order of the ladder
MODES: Final = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            SERIAL,
            Mode("rollout", "each response is scored when it ends", False, _whole, _synchronous),
            Mode("chunk", "responses are scored while they are written", False, _fixed, _synchronous),
            Mode("overcommit", "serial, stragglers deferred", True, _whole, _overcommitted),
            Mode("fixed", "chunk, stragglers deferred", False, _fixed, _overcommitted, over="chunk"),
            Mode("adaptive", "chunk, as many stragglers deferred as pay", False, _fixed, _adaptive, over="chunk"),
            Mode("lookahead", "chunk, the next step decoded meanwhile", False, _fixed, _synchronous, "chunk", 1),
            Mode("lookahead+adaptive", "both of these", False, _fixed, _adaptive, "adaptive", 1),
        )
    }
)


Flag: TypeAlias = Annotated[bool, Parameter(negative=(), show_default=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of ``python -m benchmarks`` as they were written.

    Attributes:
        workload: paper, grpo, distill, train-bound, rule-reward, balanced, capped, several with commas between them, or
            all; smoke measures nothing and shows that everything runs.
        layout: split (each side on a core of its own), shared (all cores for the running side), or all.
        modes: serial, rollout, chunk, overcommit, fixed, adaptive, lookahead, lookahead+adaptive, several with commas
            between them, or all.
        against: run every mode as this commit does, too, in the same rounds.
        peer: compare with another program too: trl-grpo, or trl for PPO (make bench-peer installs them).
        steps: PPO steps of each mode in a round.
        rounds: rounds that count, after the warm-up.
        warm_up: PPO steps of each mode before the first round; an adaptive controller needs 8.
        json: write the results to this file.
        plot: write a picture of the ladder to this file.
        decoding: measure our decoder beside generate instead.
        scorers: the place of reward, reference and critic: a thread beside the actor's, or a process of their own.
        reward_architecture: of the reward model: llama; qwen3_5_text, as large, whose layers are recurrent but for each
            fourth; or all.
        policy: the engine that serves the actor: transformers, or vllm where that is installed.
        cache: the folder of workloads, which are made once.
    """

    workload: str = "paper"
    layout: str = "all"
    modes: str = "serial,rollout,chunk,fixed,adaptive"
    against: str | None = None
    peer: str | None = None
    steps: int = 3
    rounds: int = 5
    warm_up: int = 8
    json: Path | None = None
    plot: Path | None = None
    decoding: Flag = False
    scorers: Scorers = "process"
    reward_architecture: str = "llama"
    policy: Engine = "transformers"
    cache: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    steps: int = 3  # of each contestant in a round
    rounds: int = 5  # counted ones
    warm_up: int = 8  # steps of each contestant before the first round
    scorers: Scorers = "process"  # the place of the scorers: a thread, or a process of their own
    device: str = "cpu"  # of the models
    engine: Engine = "transformers"  # serves the policy


def plan_of(request: Request) -> Plan:
    steps, rounds, warm_up = request.steps, request.rounds, request.warm_up
    if min(steps, rounds, warm_up) < 1:
        raise ConfigError(f"at least one step, round and step of warm-up are needed, not {steps}, {rounds}, {warm_up}")
    return Plan(steps, rounds, warm_up, request.scorers, engine=request.policy)


def layouts_of(request: Request) -> list[Layout]:
    names = chosen("layout", request.layout, get_args(Layout), get_args(Layout))
    return [cast("Layout", name) for name in names]


def workloads_of(request: Request) -> list[BenchWorkload]:
    small = [name for name, each in WORKLOADS.items() if not each.models.vocabulary]
    known = get_args(Architecture)
    architectures = chosen("reward architecture", request.reward_architecture, known, known)
    return [
        with_reward_architecture(WORKLOADS[name], cast("Architecture", architecture))
        for name in chosen("workload", request.workload, small, [name for name in small if name != SMOKE.name])
        for architecture in architectures
    ]


def chosen(what: str, listed: str, known: Collection[str], everything: Sequence[str]) -> list[str]:
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if names == ["all"]:
        return list(everything)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no {what} {unknown[0]!r}; expected all, or some of {', '.join(known)}")
    if not names:
        raise ConfigError(f"no {what} is named; expected all, or some of {', '.join(known)}")
    return list(dict.fromkeys(names))
