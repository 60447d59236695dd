"""Every number of every workload, in one table.

A workload may state the shares of the phases in a serial step; a run outside of them is INVALID. A workload that states
all of them is calibrated first (:mod:`benchmarks.ladder.calibration`), from the depths of reward model and critic here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

Layout: TypeAlias = Literal["split", "shared"]
Scorers: TypeAlias = Literal["thread", "process"]
Phase: TypeAlias = Literal["decode", "score", "update"]
Range: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of responses with the end token: lognormal, no shorter than ``shortest``, cut off at ``cap``.

    Attributes:
        median, sigma: of the lognormal; ``sigma`` is that of the logarithm.
        over: one in so many prompts announces more than the cap, wherever the lognormal lies; 0: none but its own tail.
    """

    median: float
    sigma: float
    cap: int
    shortest: int = 4
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
    """The shapes of the models; the reference has the actor's.

    Attributes:
        taught: optimizer steps that teach the actor to count down; 0: random weights and scripted lengths.
        dtype: of all models.
        vocabulary: at least that of the language; 0: the same.
    """

    actor: Shape
    reward: Shape
    critic: Shape
    taught: int
    dtype: str = "float32"
    vocabulary: int = 0

    @property
    def scripted(self) -> bool:
        """Whether responses end at the announced length, whatever their tokens."""
        return not self.taught


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """One row of the table.

    Attributes:
        batch: rollouts trained in a step.
        extra: Delta of the overcommitted modes.
        chunk: tokens of a chunk in the streamed modes.
        reward: a model, or a function of the finished response.
        shares: of the phases in a serial step.
        capped: range of the fraction of prompts that announce the cap or more; outside of it the run is INVALID.
        learning_rate: of actor and critic: so small that the lengths do not change.
        micro_batch_tokens: in one forward pass of the update, padding included.
        prompts: number in the workload's directory; they are used in order, again and again.
        prompt_tokens: shortest and longest prompt.
        trains_apart: updates are made in a process of their own in every mode, not only in those that look ahead.
    """

    name: str
    about: str
    lengths: Lengths
    models: Models
    batch: int = 24
    extra: int = 4
    epochs: int = 1
    minibatches: int = 1
    chunk: int = 32
    reward: Literal["model", "rule"] = "model"
    shares: tuple[Bound, ...] = ()
    capped: Range = (0.0, 1.0)
    learning_rate: float = 1e-7
    micro_batch_tokens: int = 4096
    kl: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    temperature: float = 1.0
    seed: int = 20261120
    prompts: int = 2048
    prompt_tokens: tuple[int, int] = (12, 24)
    trains_apart: bool = False

    @property
    def positions(self) -> int:
        """Positions of the models: longest prompt and longest response, rounded up to a multiple of 64."""
        return -(-(self.prompt_tokens[1] + self.lengths.cap) // 64) * 64


DEEP_AND_THIN: Final = Models(
    actor=Shape(hidden=112, intermediate=352, layers=16, heads=7, kv_heads=1),
    reward=Shape(hidden=432, intermediate=1152, layers=8, heads=8),
    critic=Shape(hidden=112, intermediate=320, layers=2, heads=4),
    taught=200,
)
"""An actor whose decode step has a low cost per row, as on a GPU; a reward model 7 times its size.

On the machine it was tuned on, 32 rows take 1.5 times as long as 8.
"""

PAPER: Final = BenchWorkload(
    name="paper",
    about="a reward model eight times the actor, a long tail of lengths, one epoch: the regime of the OPPO paper",
    lengths=Lengths(median=24, sigma=1.5, cap=768),  # of 24 the longest is 7 means, as of 112 with a sigma of 0.95
    prompt_tokens=(16, 40),
    models=Models(
        actor=Shape(hidden=96, intermediate=288, layers=20, heads=3, kv_heads=1),
        reward=Shape(hidden=384, intermediate=1152, layers=10, heads=8),
        critic=Shape(hidden=96, intermediate=288, layers=2, heads=3),
        taught=200,
    ),  # still deeper and thinner, for the shares
    shares=(
        Bound("split", "decode", 0.50, 0.60),
        Bound("split", "score", 0.25, 0.30),
        Bound("split", "update", 0.15, 0.20),
    ),
    capped=(0.0, 0.02),
)

RULE_REWARD: Final = replace(
    PAPER,
    name="rule-reward",
    about="paper without its reward model: what there is to gain lies between the steps",
    reward="rule",
    shares=(),
)

BALANCED: Final = replace(
    RULE_REWARD,
    name="balanced",
    about="a rule as reward, and an update as long as decoding: what there is to gain lies in looking ahead",
    epochs=3,
    trains_apart=True,
)

SHORTER: Final = replace(
    PAPER,
    lengths=Lengths(median=24, sigma=1.35, cap=512),  # of 24 the longest is 6 means
    prompt_tokens=(12, 24),
    models=DEEP_AND_THIN,
    shares=(),
)
"""``paper`` with a shorter tail and other models: the base of the other workloads."""

TRAIN_BOUND: Final = replace(
    SHORTER,
    name="train-bound",
    about="four epochs: the update is most of the step, so overlap can do little and must not hurt",
    epochs=4,
    shares=(Bound("split", "update", 0.35, 1.0),),
)

CAPPED: Final = replace(
    SHORTER,
    name="capped",
    about="an eighth of the responses at the cap, and fewer than those are carried: deferring gains nothing",
    lengths=Lengths(median=40, sigma=0.7, cap=384, over=8),
    extra=2,
    capped=(0.10, 0.15),
)

SMOKE: Final = BenchWorkload(
    name="smoke",
    about="shows that everything works, and measures nothing",
    lengths=Lengths(median=8, sigma=0.5, cap=24),
    models=Models(
        actor=Shape(hidden=32, intermediate=64, layers=2, heads=1),  # vLLM's kernels want heads of 32
        reward=Shape(hidden=48, intermediate=96, layers=2, heads=2),
        critic=Shape(hidden=32, intermediate=64, layers=2, heads=2),
        taught=90,
    ),
    batch=8,
    extra=2,
    chunk=8,
    prompts=128,
    prompt_tokens=(3, 8),
)

WORKLOADS: Final = MappingProxyType(
    {each.name: each for each in (PAPER, TRAIN_BOUND, RULE_REWARD, CAPPED, BALANCED, SMOKE)}
)
"""By name; ``all`` does not include ``smoke``."""

ACTORS_ON_A_GPU: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "0.5b": Shape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2),
        "1.5b": Shape(hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2),
    }
)
"""Qwen2.5's shapes."""


def on_gpu(workload: BenchWorkload, actor: str) -> BenchWorkload:
    """Return the workload with models of usual sizes: random weights, bf16, a 7B-shaped reward model.

    Their lengths are scripted, since teaching them takes too long. It states no shares, which depend on the machine.
    """
    shape = ACTORS_ON_A_GPU[actor]
    return replace(
        workload,
        name=f"{workload.name}-{actor}",
        batch=64,
        extra=2 * workload.extra,
        chunk=128,
        lengths=replace(workload.lengths, median=256, sigma=0.85, cap=2048),
        models=Models(
            actor=shape,
            reward=Shape(hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4),
            critic=shape,
            taught=0,
            dtype="bfloat16",
            vocabulary=151_936,
        ),
        shares=(),
        prompt_tokens=(64, 256),
    )
