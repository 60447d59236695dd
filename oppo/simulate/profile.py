"""Hardware that one does not have yet: the sections of a profile, and the system that they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import numpy as np
from annotated_types import Ge, Le

from oppo.declared import (
    Count,
    Filled,
    Fraction,
    NonNegative,
    Positive,
    PositiveCount,
    required,
    setting,
)
from oppo.errors import ConfigError, did_you_mean
from oppo.simulate.costs import (
    GPUS,
    MODELS,
    TRAINED_PASSES,
    Decoder,
    DrawLengths,
    Gpu,
    Lognormal,
    Observed,
    Reached,
    Reader,
    ScorerName,
    System,
    Transformer,
    Updater,
    Workload,
)

T = TypeVar("T")

# The scorers that read like the reference, if there are any
_FORWARD: Final[Sequence[ScorerName]] = ("critic", "teacher")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSection:
    """``[workload]``: what is trained."""

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

    def law(self, folder: Path) -> DrawLengths:
        if self.median is None:
            return Observed.read(folder / self.file, self.cap)
        median = (self.median, self.last_median or self.median)
        return Lognormal(median=median, sigma=self.sigma, cap=self.cap, runaways=self.runaways)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsSection:
    """``[models]``: the sizes of the models, by name."""

    actor: Filled = required("the model that is trained")
    reward: str = setting("", "the reward model; a rule that costs nothing when empty")
    critic: str = setting("", "the critic; none when empty")
    reference: bool = setting(default=True, description="whether there is a reference, as large as the actor")
    teacher: str = setting("", "the teacher of a distillation; none when empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSection:
    """``[layout]``: which devices do what."""

    gpu: Filled = required("the devices, all alike, by name")
    decode: PositiveCount = required("devices that decode, each with a copy of the actor")
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

    def decoder(self, gpu: Gpu, model: Transformer, replicas: int) -> Decoder:
        found = super(EngineSection, self).decoder(gpu, model, replicas)
        return replace(
            found,
            floor=self.floor_seconds,
            step=found.step if self.step_seconds is None else self.step_seconds,
            launching=found.launching if self.step_seconds is None else None,
            row=found.row if self.row_seconds is None else self.row_seconds,
            context=found.context if self.context_seconds is None else self.context_seconds,
            prefill=model.passes(gpu.flops * self.forward),
            static=self.static,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSection:
    """``[schedule]``: what the schedules carry, and what they send."""

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
    workload: WorkloadSection
    lengths: LengthsSection
    models: ModelsSection
    layout: LayoutSection
    engine: EngineSection = EngineSection()
    schedule: ScheduleSection = ScheduleSection()
    gpus: Mapping[str, Gpu] = field(default_factory=lambda: GPUS)
    sizes: Mapping[str, Transformer] = field(default_factory=lambda: MODELS)
    folder: Path = Path()

    @property
    def gpu(self) -> Gpu:
        return _named(self.layout.gpu, self.gpus, "layout.gpu", "GPU")

    def size(self, key: str) -> Transformer:
        return _named(getattr(self.models, key), self.sizes, f"models.{key}", "model")

    def work(self) -> Workload:
        given = self.workload
        return Workload(
            batch=given.batch,
            samples=given.samples,
            prompt=given.prompt,
            lengths=self.lengths.law(self.folder),
            cap=self.lengths.cap,
        )

    def system(self) -> System:
        layout, engine, actor = self.layout, self.engine, self.size("actor")
        training = (layout.train or layout.decode) * self.gpu.flops * engine.training
        times = TRAINED_PASSES * self.workload.epochs
        trained = [actor, *([self.size("critic")] if self.models.critic else [])]
        recomputes = self.schedule.kv_on_sync == "recompute"
        return System(
            decoder=replace(engine.decoder(self.gpu, actor, layout.decode), recomputes=recomputes),
            readers=self._readers(),
            updater=Updater(
                passes=reduce(add, [size.passes(training, times) for size in trained]),
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
                passes=self.size(key).passes(count * self.gpu.flops * engine.forward),
                call=engine.call_seconds,
                streams=layout.stream_forward,
                padded=engine.padded,
                device=device,
                place=f"forward on {device}",
            )
        if self.models.reward:
            device, count = devices["score"]
            readers["reward"] = Reader(
                passes=self.size("reward").passes(count * self.gpu.flops * engine.scoring),
                call=engine.call_seconds,
                padded=engine.padded,
                device=device,
            )
        return readers

    def bound(self, lengths: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
        """Return the seconds of a step below which no schedule comes on these devices (the work bound).

        All devices but the reward model's share all work but its own, and decode steps cost what their rows do::

            max( (decoding of rows + reference and critic + update) / devices + fixed + weight sync,  reward model )
        """
        layout, engine, system = self.layout, self.engine, self.system()
        pool = layout.decode + layout.train
        rows = self.workload.prompt + lengths.astype(np.float64)
        decoder, updater = system.decoder, system.updater
        context = self.workload.prompt + lengths / 2
        decoding = (lengths * (decoder.row + decoder.context * context)).sum(1) / pool
        share = {"actor": layout.decode, "trainer": layout.train}
        training = np.array([updater.seconds(row) for row in rows]) - updater.fixed
        total = decoding + training * share[updater.device] / pool
        busy = np.zeros(len(rows))
        for reader in system.readers.values():
            seconds = np.array([reader.passes.whole(row) for row in rows])
            if reader.device in share:
                total = total + seconds * share[reader.device] / pool
            else:
                busy = busy + seconds
        return float(np.maximum(total + engine.fixed_seconds + engine.weight_sync_seconds, busy).mean())


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
