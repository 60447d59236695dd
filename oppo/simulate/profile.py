"""Costs of a step's work, in seconds, as measured or by a roofline of hardware; lengths of responses; profiles.

Costs are linear in what there is to do, as a roofline or a fit gives them::

    decode step of one replica   max(floor, step + row * rows + context * tokens in the rows' context)
    end of a rollout             ending
    reading start .. stop        token * (stop - start) + pair * (stop^2 - start^2) / 2
    update                       fixed + the same over whole rows, prompts included

A roofline: what models cost on GPUs that are known by their data sheets only.

With N parameters, of which M are in the layers, L layers, width d, KV heads of width w together in each layer, and V
ids in the vocabulary, in 16 bits::

    layers, a token                   2 M                    FLOP
    head, a token                     2 V d                  FLOP    not of a reward model or a critic
    attention, a pair of tokens       4 L d                  FLOP
    activations, a token              220 L d                bytes
    logits, a token                   34 V                   bytes   70 V without Triton; a quarter in a forward pass
    weights read by a decode step     2 N                    bytes
    KV cache of a token               4 L w                  bytes

A pass takes its FLOP over the reached share of the peak, and its bytes over the share of the bandwidth, divided by the
number of devices. Small models are bound by bytes: these grow with d, FLOP with d^2. An update takes 3 forward passes
of the layers for each epoch, 4 with checkpointing, and 4 of the head, whose logits are computed again, chunk by chunk.
Two are the backward pass (Kaplan et al. 2020, arXiv 2001.08361, section 2.1): one for the gradients of inputs, one for
the gradients of weights. Frozen weights below adapters (Hu et al. 2021, arXiv 2106.09685, section 4.2), quantised or
not, need the first alone, which leaves 2 of the layers and 3 of the head; attention has no weights, and takes 3. A
decode step of one replica takes the sum of what it reads, what it computes and what it starts, which overlaps in part,
so the sum is an upper bound::

    step     2 N / (bandwidth * reading) + layer * L        the weights; launching a layer's kernels
    row      2 N / (FLOP/s * computing) + sampling * V      matrices; drawing a token
    context  4 L w / (bandwidth * attention)                KV cache
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal, Self, TypeAlias, TypeVar

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from pydantic import ConfigDict

from oppo.atomic_files import read_text
from oppo.declared import (
    STRICT,
    Count,
    Filled,
    Fraction,
    NonNegative,
    Positive,
    PositiveCount,
    Table,
    changed,
    required,
    setting,
)
from oppo.errors import ConfigError, did_you_mean
from oppo.models import Passes

T = TypeVar("T")

ScorerName: TypeAlias = Literal["reward", "reference", "critic", "teacher"]

# The stage of each scorer
STAGES: Final[Mapping[ScorerName, str]] = MappingProxyType(
    {"reference": "ref_logp", "reward": "reward", "critic": "value", "teacher": "teacher_logp"}
)


# `f(kind, other)`: by how much work takes longer beside work of another kind, as a share; 1 is twice as long
Interference: TypeAlias = Callable[[str, str], float]


def time_shared(kind: str, other: str) -> float:
    """Return 1: kinds of work that run side by side take turns, as on a device that one of them keeps busy."""
    del kind, other
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    floor: float = 0.0  # least seconds of a decode step
    step: float = 0.0  # for itself, as for reading the weights
    # the part of `step` in which it starts kernels; `None`: unknown, as of measured steps
    launching: float | None = None
    row: float = 0.0  # for each live row
    context: float = 0.0  # for each token in the context of the live rows, prompts included
    ending: float = 0.0  # for each rollout that ends: the rows left are put together anew
    # reading a rollout's context before it is decoded; decode steps wait meanwhile
    prefill: Passes = field(default_factory=Passes)
    recomputes: bool = True  # whether that is read again with new weights
    replicas: int = 1  # copies of the actor, each with rows and decode steps of its own
    # a row that has ended keeps its place until the cut, padded to the longest; in the serial schedule only
    static: bool = False
    device: str = "actor"

    def seconds(self, rows: float, context: float) -> float:
        return max(self.floor, self.step + self.row * rows + self.context * context)

    def parts(self, seconds: float, steps: float, rows: float, pauses: float) -> Mapping[str, float]:
        # `steps` and `rows`: decode steps in these seconds, and the live rows of each, added up.
        # `pauses`: seconds of reading contexts, and of what follows the end of a rollout.
        known = {"decode steps": steps * self.step}
        if self.launching is not None:
            known = {"launching kernels": steps * self.launching, "weights": steps * (self.step - self.launching)}
        known |= {"rows": rows * self.row, "prefill and ends": pauses}
        rest = "floor and KV cache" if self.floor else "KV cache"
        return {**known, rest: max(0.0, seconds - sum(known.values()))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    passes: Passes = field(default_factory=Passes)
    call: float = 0.0  # for each call that reads
    answer: float = 0.0  # for each rollout that is scored
    # whether it reads along while responses are written; otherwise it reads them whole, after the cut
    streams: bool = True
    padded: bool = False  # whether rows that it reads whole are padded to the longest of the step
    device: str = "scorers"
    place: str = "scorers"  # scorers of a place take turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    passes: Passes = field(default_factory=Passes)  # of all epochs, actor and critic
    fixed: float = 0.0  # for each update: the optimizer, the data
    padded: bool = False  # whether rows are padded to the longest of the batch
    weight_sync: float = 0.0  # from the update to the new weights in the actor
    device: str = "actor"

    def seconds(self, rows: NDArray[np.float64]) -> float:
        # Whole rows, prompts included.
        return self.fixed + self.passes.whole(rows, padded=self.padded)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    decoder: Decoder
    # the scorers; without a `reward` it is a rule that costs nothing
    readers: Mapping[ScorerName, Reader] = field(default_factory=dict)
    updater: Updater = Updater()
    interference: Interference = time_shared  # between `decode`, `score` and `train` on one device
    cache: float = 0.0  # bytes of KV cache for a token of the actor; 0: unknown


# `f(units, samples, seed)`: the lengths of the responses to `units` prompts, int64 [units, samples], in tokens
DrawLengths: TypeAlias = Callable[[int, int, int], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    batch: int  # units in a batch: rollouts, or groups of `samples` rollouts
    lengths: DrawLengths  # draws the lengths of responses
    cap: int  # the longest response, in tokens
    prompt: int  # tokens of a prompt
    samples: int = 1  # rollouts for each prompt


Share: TypeAlias = Annotated[float, Gt(0), Le(1)]

# Bytes that an update moves for each logit, as kernels of `oppo.hf` are counted: of Triton, and of each operation
BY_TRITON, BY_TORCH = 34.0, 70.0

TRAINED_PASSES: Final = 3  # forward passes' worth of an epoch: forward, and twice as much backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    flops: Positive = required("dense FLOP/s in bfloat16")
    bandwidth: Positive = required("of its memory, bytes/s")
    memory: Positive = required("bytes")


# SXM versions where there are several; FLOP/s without sparsity
GPUS: Final[Mapping[str, Gpu]] = MappingProxyType(
    {
        "a100-40gb": Gpu(flops=312e12, bandwidth=1.555e12, memory=40e9),
        "a100-80gb": Gpu(flops=312e12, bandwidth=2.039e12, memory=80e9),
        "b200": Gpu(flops=2250e12, bandwidth=8.0e12, memory=180e9),
        "h100": Gpu(flops=989e12, bandwidth=3.35e12, memory=80e9),
        "h200": Gpu(flops=989e12, bandwidth=4.8e12, memory=141e9),
        "l4": Gpu(flops=121e12, bandwidth=0.3e12, memory=24e9),
        "l40s": Gpu(flops=362e12, bandwidth=0.864e12, memory=48e9),
        "mi300x": Gpu(flops=1307e12, bandwidth=5.3e12, memory=192e9),
        "rtx-4090": Gpu(flops=165e12, bandwidth=1.008e12, memory=24e9),
    }
)

# Words in the names of GPUs that are slower than the one in the table, or a part of it
_OTHERS: Final = frozenset({"d", "laptop", "mig", "nvl", "pcie"})


def gpu_named(name: str) -> Gpu | None:
    """The GPU of a driver's name, such as ``NVIDIA H100 80GB HBM3``; ``None`` for one that is not in the table."""
    words = set(name.lower().replace("-", " ").split())
    found = (gpu for known, gpu in GPUS.items() if words >= set(known.split("-")))
    return None if words & _OTHERS else next(found, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    parameters: Positive = required("their number")
    layers: PositiveCount = required("their number")
    width: PositiveCount = required("of the hidden states")
    cached: PositiveCount = required("width of a layer's keys: KV heads times their width")
    vocabulary: Count = setting(0, "ids that it tells apart; 0: a head without cost of its own")
    tied: bool = setting(default=False, description="whether the matrix of the head is that of the embedding")

    def __post_init__(self) -> None:
        if self.body <= 0:
            raise ConfigError(
                f"a model of {self.parameters:.3g} parameters has no layers left beside the matrices of "
                f"{self.vocabulary} ids, {self.width} wide: expected more parameters, or a smaller vocabulary; tied = "
                "true if its head is its embedding"
            )

    @property
    def cache(self) -> float:
        return 4.0 * self.layers * self.cached

    @property
    def head(self) -> float:
        return float(self.vocabulary * self.width)

    @property
    def body(self) -> float:
        return self.parameters - self.head * (1 if self.tied else 2)

    def passes(self, speed: float, times: float = 1.0) -> Passes:
        # As a model's FLOPs utilisation counts them, 2 N for a token: whatever else takes time is in `speed`.
        return Passes(token=times * 2 * self.parameters / speed, pair=times * 4 * self.layers * self.width / speed)


MODELS: Final[Mapping[str, Transformer]] = MappingProxyType(
    {
        name: Transformer(
            parameters=parameters, layers=layers, width=width, cached=cached, vocabulary=ids, tied=parameters < 4e9
        )
        for name, parameters, layers, width, cached, ids in (
            ("llama-3.1-8b", 8.03e9, 32, 4096, 1024, 128_256),
            ("llama-3.1-70b", 70.6e9, 80, 8192, 1024, 128_256),
            ("qwen2.5-0.5b", 0.494e9, 24, 896, 128, 151_936),
            ("qwen2.5-1.5b", 1.54e9, 28, 1536, 256, 151_936),
            ("qwen2.5-3b", 3.09e9, 36, 2048, 256, 151_936),
            ("qwen2.5-7b", 7.62e9, 28, 3584, 512, 152_064),
            ("qwen2.5-14b", 14.8e9, 48, 5120, 1024, 152_064),
            ("qwen2.5-32b", 32.8e9, 64, 5120, 1024, 152_064),
            ("qwen2.5-72b", 72.7e9, 80, 8192, 1024, 152_064),
        )
    }
)


EngineName: TypeAlias = Literal["vllm", "transformers"]

# Of an engine's decode step, the seconds for each layer, and the share of the bandwidth at which it reads the KV cache.
# vLLM's are fitted to the speeds that Qwen publishes for 3B and 7B on an A100 (one request, bfloat16: 127.61 and 84.28
# tokens a second; their slopes over 30,000 tokens of context). Those of transformers, a step as one CUDA graph, are an
# H100's: 49 kernels for each layer, and 0.95 ms of attention for 41,000 tokens (`benchmarks/results/gpu.md`)
ENGINES: Final[Mapping[EngineName, tuple[float, float]]] = MappingProxyType(
    {"vllm": (1e-4, 0.365), "transformers": (1.2e-4, 0.16)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Shares of a data sheet's figures that engines reach, and the bytes that passes move.

    The defaults of passes, and ``sampling``, are of an H100 (``benchmarks/results/gpu.md``): a 7B reward model, an
    update of a 0.5B actor, of which the head took 40%, and 1.5 ms for the tokens of 64 x 151,936 logits.
    """

    name: EngineName = setting("vllm", "the engine that decodes: `layer` and `attention` are its own where absent")
    reading: Share = setting(0.8, "share of the bandwidth at which a decode step reads the weights")
    attention: Share | None = setting(None, "share of the bandwidth at which it reads the KV cache")
    computing: Share = setting(0.5, "share of the FLOP/s of a decode step's matrices")
    layer: NonNegative | None = setting(None, "seconds of a decode step for each layer: its kernels begin and end")
    sampling: NonNegative = setting(1.5e-10, "seconds of a decode step for each logit of a row: drawing a token")
    scoring: Share = setting(0.7, "share of the FLOP/s of the reward model's matrices")
    forward: Share = setting(0.7, "share of the FLOP/s of the matrices of reference, critic and teacher")
    training: Share = setting(0.7, "share of the FLOP/s of an update's matrices")
    moving: Share = setting(0.66, "share of the bandwidth at which passes move activations and logits")
    activations: NonNegative = setting(220.0, "bytes that a pass moves for each token, layer and unit of the width")
    logits: NonNegative = setting(
        BY_TRITON, f"bytes that an update moves for each logit: {BY_TORCH:g} without Triton; a pass alone a quarter"
    )

    def decoder(self, gpu: Gpu, model: Transformer, replicas: int) -> Decoder:
        layer, attention = ENGINES[self.name]
        launching = (layer if self.layer is None else self.layer) * model.layers
        return Decoder(
            step=2 * model.parameters / (gpu.bandwidth * self.reading) + launching,
            launching=launching,
            row=2 * model.parameters / (gpu.flops * self.computing) + self.sampling * model.vocabulary,
            context=model.cache / (gpu.bandwidth * (self.attention or attention)),
            replicas=replicas,
        )

    def reader(self, gpu: Gpu, model: Transformer, share: float, *, head: bool) -> Passes:
        """Return the costs of reading on one device; ``head``: whether it gives log-probs, not one number a token."""
        body = self._layers(gpu, model, share)
        return body + self._head(gpu, model, share, 1, self.logits / 4) if head else body

    def update(
        self, gpu: Gpu, model: Transformer, *, head: bool, checkpointing: bool = False, frozen: bool = False
    ) -> Passes:
        """Return the costs of an epoch on one device; ``frozen``: only adapters of the model are trained."""
        body, times = self._layers(gpu, model, self.training), TRAINED_PASSES + checkpointing
        found = Passes(token=(times - frozen) * body.token, pair=times * body.pair)
        again = TRAINED_PASSES + 1 - frozen  # as with checkpointing
        return found + self._head(gpu, model, self.training, again, self.logits) if head else found

    def _layers(self, gpu: Gpu, model: Transformer, share: float) -> Passes:
        moved = self.activations * model.layers * model.width / (gpu.bandwidth * self.moving)
        flops = gpu.flops * share
        return Passes(token=2 * model.body / flops + moved, pair=4 * model.layers * model.width / flops)

    def _head(self, gpu: Gpu, model: Transformer, share: float, times: int, moved: float) -> Passes:
        moving = moved * model.vocabulary / (gpu.bandwidth * self.moving)
        return Passes(token=times * 2 * model.head / (gpu.flops * share) + moving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    # at the beginning and at the end of the run, between which it moves in proportion to the prompts
    median: tuple[float, float]
    sigma: float  # standard deviation of the logarithm
    cap: int  # the longest response
    runaways: float = 0.0  # fraction of the responses that run to the cap wherever the lognormal lies

    def __call__(self, units: int, samples: int, seed: int) -> NDArray[np.int64]:
        random, shape = np.random.default_rng(seed), (units, samples)
        first, last = self.median
        median = (first + (last - first) * np.linspace(0, 1, units))[:, None]
        sampled = np.clip((median * np.exp(self.sigma * random.standard_normal(shape))).astype(np.int64), 1, self.cap)
        return np.where(random.random(shape) < self.runaways, self.cap, sampled)


@dataclass(frozen=True, slots=True)
class Observed:
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, path: Path, cap: int) -> Observed:
        """The law of the lengths in a file, cut off at ``cap``.

        A line is a length in tokens, or a JSON object with a key ``tokens``; other JSON objects are left out, so that a
        run's ``journal.jsonl`` can be read.
        """
        try:
            lines = read_text(path, linked=True).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the lengths in {path}: {error}") from error
        lengths = [_length(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
        found = [min(length, cap) for length in lengths if length is not None]
        if not found:
            raise ConfigError(f"{path} holds no lengths: expected a number of tokens on each line")
        return cls(tuple((length,) for length in found))

    def __call__(self, units: int, samples: int, seed: int) -> NDArray[np.int64]:
        # Groups are dealt like shuffled decks of cards, so that a short run has the tail of the observed one.
        random, found = np.random.default_rng(seed), list[NDArray[np.int64]]()
        while len(found) < units:
            for k in random.permutation(len(self.groups)):
                group = np.array(self.groups[k], np.int64)
                found.append(group if len(group) == samples else random.choice(group, samples))
        return np.stack(found[:units])


def _length(line: str, path: Path, number: int) -> int | None:
    # ``None`` for a JSON object without one.
    try:
        found = json.loads(line)
    except ValueError:
        found = line
    length = found.get("tokens") if isinstance(found, dict) else found
    if length is None:
        return None
    if type(length) is not int or length < 1:
        raise ConfigError(f"line {number} of {path}: expected a length, a whole number of 1 or more, got {line!r:.60}")
    return length


# The scorers that read like the reference, if there are any
_FORWARD: Final[Sequence[ScorerName]] = ("critic", "teacher")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSection:
    batch: PositiveCount = required("rollouts in a batch; with `samples`, prompts in it")
    samples: PositiveCount = setting(1, "responses to each prompt, compared with one another")
    prompt: Count = setting(256, "tokens of a prompt")
    epochs: Positive = setting(1.0, "passes of the update over a batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsSection:
    """``[lengths]``: how long responses are, in tokens: lognormal, or read from a file."""

    cap: PositiveCount = required("the longest response")
    median: Positive | None = setting(None, "of a lognormal distribution")
    last_median: Positive | None = setting(None, "the same at the end of the run, if it moves on the way")
    sigma: Positive = setting(0.8, "its spread: standard deviation of the logarithm")
    runaways: Fraction = setting(0.0, "share of the responses that run to the cap in any case")
    file: str = setting("", "a file with a length on each line, or with JSON lines that have a key `tokens`")

    def __post_init__(self) -> None:
        if (self.median is None) == (not self.file):
            raise ConfigError("[lengths] needs either median, of a lognormal distribution, or file, and not both")
        if self.file and (idle := changed(self, {"last_median", "sigma", "runaways"})):
            raise ConfigError(
                f"lengths.{min(idle)} is of a lognormal distribution, and has no effect beside lengths.file: leave it "
                "out, or give lengths.median in place of the file"
            )

    def law(self) -> DrawLengths:
        if self.median is None:
            return Observed.read(Path(self.file), self.cap)
        median = (self.median, self.last_median or self.median)
        return Lognormal(median=median, sigma=self.sigma, cap=self.cap, runaways=self.runaways)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsSection:
    actor: Filled = required("the model that is trained")
    reward: str = setting("", "the reward model; a rule that costs nothing when empty")
    critic: str = setting("", "the critic; none when empty")
    reference: bool = setting(default=True, description="whether there is a reference, as large as the actor")
    teacher: str = setting("", "the teacher of a distillation; none when empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSection:
    gpu: Filled = required("the devices, all alike, by name")
    decode: PositiveCount = required(
        "devices that decode, each a replica: a whole copy of the actor, not a part of one"
    )
    train: Count = setting(0, "devices that train; 0: those that decode")
    score: Count = setting(0, "devices of the reward model; 0: those that decode")
    forward: Literal["decode", "train", "score"] = setting(
        "decode", "devices of the reference, the critic and the teacher"
    )
    stream_forward: bool = setting(
        default=True,
        description="whether reference and critic read along while responses are written, or whole ones after the cut",
    )
    corunning: Annotated[float, Ge(1), Le(2)] = setting(
        1.0,
        "what two kinds of work get done side by side on a device, over what one alone does: 1 if they take turns, 2 "
        "if they do not meet",
    )

    def __post_init__(self) -> None:
        if (self.forward == "train" and not self.train) or (self.forward == "score" and not self.score):
            raise ConfigError(f"layout.forward = {self.forward!r} needs devices: layout.{self.forward} is 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection(Reached):
    """``[engine]``: how fast models run on these devices; seconds that are given replace the roofline's."""

    floor_seconds: NonNegative = setting(0.0, "least seconds of a decode step")
    step_seconds: NonNegative | None = setting(None, "seconds of a decode step for itself")
    row_seconds: NonNegative | None = setting(None, "seconds of a decode step for each live row")
    context_seconds: NonNegative | None = setting(None, "seconds of a decode step for each token in its context")
    call_seconds: NonNegative = setting(0.012, "seconds of each call of a scorer")
    fixed_seconds: NonNegative = setting(2.0, "seconds of a step besides all passes: the optimizer, the data")
    weight_sync_seconds: NonNegative = setting(0.5, "seconds until new weights are in the actor")
    padded: bool = setting(default=False, description="pad updates, and what is read after the cut, to the longest row")
    static: bool = setting(
        default=False, description="in the serial schedule, decode every batch to its end with all rows"
    )
    checkpointing: bool = setting(
        default=False, description="compute activations again for the backward pass (`trainer.gradient_checkpointing`)"
    )
    adapters: bool = setting(
        default=False, description="train adapters of the actor alone, over frozen weights (`models.lora_rank`)"
    )

    def decoder(self, gpu: Gpu, model: Transformer, replicas: int) -> Decoder:
        found = super(EngineSection, self).decoder(gpu, model, replicas)
        return replace(
            found,
            floor=self.floor_seconds,
            step=found.step if self.step_seconds is None else self.step_seconds,
            launching=found.launching if self.step_seconds is None else None,
            row=found.row if self.row_seconds is None else self.row_seconds,
            context=found.context if self.context_seconds is None else self.context_seconds,
            prefill=self.reader(gpu, model, self.forward, head=False),
            static=self.static,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSection:
    overcommit: Count = setting(8, "Delta of the schedules with a fixed one")
    max_deferrals: PositiveCount = setting(2, "the cut waits for rollouts of this age")
    chunk: PositiveCount = setting(256, "tokens that travel at once")
    kv_on_sync: Literal["recompute", "keep"] = setting(
        "recompute", "read the context of rollouts in flight again with new weights, or keep what was read"
    )
    staleness_price: NonNegative = setting(
        1.0, "price of a mean staleness of 1 step, as a share of its time, where it is adaptive"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    workload: Annotated[WorkloadSection, Table()]
    lengths: Annotated[LengthsSection, Table()]
    models: Annotated[ModelsSection, Table()]
    layout: Annotated[LayoutSection, Table()]
    engine: Annotated[EngineSection, Table()] = EngineSection()
    schedule: Annotated[ScheduleSection, Table()] = ScheduleSection()
    gpus: dict[str, Annotated[Gpu, Table()]] = field(default_factory=dict)
    sizes: dict[str, Annotated[Transformer, Table()]] = field(default_factory=dict)

    @property
    def gpu(self) -> Gpu:
        return _named(self.layout.gpu, {**GPUS, **self.gpus}, "layout.gpu", "GPU")

    @property
    def about(self) -> str:
        layout, name = self.layout, self.engine.name
        many = "device decodes" if layout.decode == 1 else "devices decode"
        own = "" if self.engine.step_seconds is None else ", at the seconds of [engine]"
        return (
            f"{layout.decode} {many} on {name}{own}, each a replica: a whole copy of {self.models.actor} with rows and "
            "decode steps of its own (no tensor parallelism)"
        )

    def size(self, key: str) -> Transformer:
        return _named(getattr(self.models, key), {**MODELS, **self.sizes}, f"models.{key}", "model")

    def work(self) -> Workload:
        given = self.workload
        return Workload(
            batch=given.batch,
            samples=given.samples,
            prompt=given.prompt,
            lengths=self.lengths.law(),
            cap=self.lengths.cap,
        )

    def system(self) -> System:
        layout, engine, actor = self.layout, self.engine, self.size("actor")
        trained = {"actor": True, **({"critic": False} if self.models.critic else {})}
        epoch = reduce(
            add,
            [
                engine.update(
                    self.gpu,
                    self.size(key),
                    head=is_actor,
                    checkpointing=engine.checkpointing,
                    frozen=is_actor and engine.adapters,
                )
                for key, is_actor in trained.items()
            ],
        )
        recomputes = self.schedule.kv_on_sync == "recompute"
        return System(
            decoder=replace(engine.decoder(self.gpu, actor, layout.decode), recomputes=recomputes),
            readers=self._readers(),
            updater=Updater(
                passes=_scaled(epoch, self.workload.epochs / (layout.train or layout.decode)),
                fixed=engine.fixed_seconds,
                padded=engine.padded,
                weight_sync=engine.weight_sync_seconds,
                device="trainer" if layout.train else "actor",
            ),
            interference=partial(_slowed, layout.corunning),
            cache=actor.cache,
        )

    def _readers(self) -> dict[ScorerName, Reader]:
        layout, engine = self.layout, self.engine
        devices = {
            "decode": ("actor", layout.decode),
            "train": ("trainer", layout.train),
            "score": ("scorers" if layout.score else "actor", layout.score or layout.decode),
        }
        readers: dict[ScorerName, Reader] = {}
        forward: dict[ScorerName, str] = {"reference": "actor"} if self.models.reference else {}
        forward |= {name: name for name in _FORWARD if getattr(self.models, name)}
        for name, key in forward.items():
            device, count = devices[layout.forward]
            readers[name] = Reader(
                passes=_scaled(
                    engine.reader(self.gpu, self.size(key), engine.forward, head=name != "critic"), 1 / count
                ),
                call=engine.call_seconds,
                streams=layout.stream_forward,
                padded=engine.padded,
                device=device,
                place=f"forward on {device}",
            )
        if self.models.reward:
            device, count = devices["score"]
            readers["reward"] = Reader(
                passes=_scaled(engine.reader(self.gpu, self.size("reward"), engine.scoring, head=False), 1 / count),
                call=engine.call_seconds,
                padded=engine.padded,
                device=device,
            )
        return readers


def _scaled(passes: Passes, by: float) -> Passes:
    return Passes(token=by * passes.token, pair=by * passes.pair)


def _slowed(corunning: float, kind: str, other: str) -> float:
    del kind, other
    return 2 / corunning - 1


def _named(name: str, known: Mapping[str, T], key: str, what: str) -> T:
    if name in known:
        return known[name]
    guess = did_you_mean(name, known)
    table = "gpus" if what == "GPU" else "sizes"
    raise ConfigError(
        f"{key}: there is no {what} {name!r}{guess}; known are {', '.join(known)}, and others can be given as "
        f"[{table}.NAME]"
    )


_ASSUMED: Final = re.compile(
    r"(?:(?P<machines>[1-9]\d{0,3})x)?(?P<gpus>[1-9]\d{0,2})x"
    r"(?:(?P<bare>[1-9]\d{0,4})GB|(?P<name>.+?)(?:-(?P<size>[1-9]\d{0,4})GB)?)"
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs (``bytes``: memory of each; ``gpus``: in each machine) that a run is planned for."""

    name: str
    bytes: int
    gpus: int
    machines: int = 1

    @classmethod
    def assumed(cls, text: str) -> Self:
        """Return the hardware of a text: ``8xH100-80GB``, ``1x24GB`` or, with several machines, ``2x8xH100-80GB``."""
        found = _ASSUMED.fullmatch(text)
        gpu = GPUS.get((found["name"] or "").lower()) if found else None
        memory = (found["size"] or found["bare"]) if found else None
        if found is None or (memory is None and gpu is None):
            alone = (name for name in GPUS if not name.endswith("gb"))
            raise ConfigError(
                f"--assume takes [MACHINESx]GPUSxNAME-MEMORYGB, such as 8xH100-80GB or 2x8xH100-80GB, or the memory "
                f"alone, 1x24GB; of {', '.join(alone)} the memory may be left out; got {text!r}"
            )
        size = int(gpu.memory) if memory is None and gpu is not None else int(memory or 0) * 10**9
        return cls(found["name"] or "GPU", size, int(found["gpus"]), int(found["machines"] or 1))

    @property
    def gpu(self) -> Gpu | None:
        sized = f"{self.name}-{self.bytes // 10**9}gb".lower()
        return GPUS.get(self.name.lower()) or GPUS.get(sized)

    def __str__(self) -> str:
        each = f"{self.gpus} x {self.name} with {self.bytes // 10**9} GB"
        return each if self.machines == 1 else f"{self.machines} machines of {each}"
