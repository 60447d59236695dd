"""What each part is predicted to take and to find on a GPU, by ``oppo simulate``'s roofline; and the goals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks import CHECKOUT
from benchmarks.gpu_day import parts, steps
from benchmarks.gpu_day.parts import PASSES, Day, Found
from benchmarks.harness import markdown
from benchmarks.ladder.directory import counting, drawn
from benchmarks.ladder.workloads import MODES, WORKLOADS, BenchWorkload, Mode
from oppo.admission.chunking import WholeRollout
from oppo.errors import ConfigError
from oppo.hf.model_parts import transformer
from oppo.simulate.profile import (
    GPUS,
    EngineSection,
    Gpu,
    LayoutSection,
    LengthsSection,
    ModelsSection,
    Profile,
    Reached,
    WorkloadSection,
    gpu_named,
)
from oppo.simulate.schedule import Schedule, SimulatedRun

RESULTS: Final = CHECKOUT / "benchmarks" / "results" / "nvidia-h100"


@dataclass(frozen=True, slots=True)
class Part:
    work: Callable[[Day], Found]
    limit: float  # seconds after which it is cut
    seconds: float = 0.0  # of what is not predicted: loading, tests


# In their order: what users decide by, then its parts. `vllm` and `nccl` are for machines that have what they need.
PARTS: Final[Mapping[str, Part]] = {
    "facts": Part(parts.facts, 120, 15),
    "ladder": Part(partial(steps.ladder, steps.LADDER), 360, 30),
    "peer": Part(steps.peer, 260, 50),
    "full": Part(steps.full, 60, 10),
    "rule": Part(partial(steps.ladder, steps.RULE), 90, 10),
    "small": Part(partial(steps.ladder, steps.SMALL), 90, 10),
    "update": Part(parts.update, 30, 6),
    "decode": Part(parts.decode, 40, 6),
    "overlap": Part(parts.overlap, 90, 20),
    "agree": Part(parts.agree, 30, 8),
    "launches": Part(parts.launches, 40, 12),
    "tests": Part(parts.tests, 120, 60),
    "vllm": Part(steps.vllm, 600, 240),
    "nccl": Part(steps.nccl, 300, 60),
}
DEFAULT: Final = tuple(name for name in PARTS if name not in {"vllm", "nccl"})

# At least, or at most, of a part's figures
GOALS: Final[Mapping[str, Mapping[str, tuple[str, float]]]] = {
    "ladder": {"chunk / serial": (">=", 1.1), "adaptive / serial": (">=", 1.8)},
    "peer": {
        f"{about}: {mode} / TRL": (">=", goal)
        for about in ("rule", "model")
        for mode, goal in (("serial", 3.0), ("fixed", 5.0))
    },
    "update": {"mfu": (">=", 0.30)},
    "decode": {"equal / predicted for vLLM": ("<=", 1.2)},
}

# Of a step here besides passes and decode steps. Two kinds of work side by side got 1.19 times as much done, measured.
OURS: Final = EngineSection(name="transformers", fixed_seconds=0.1, weight_sync_seconds=0.005, call_seconds=0.01)
TOGETHER: Final = 1.19
# TRL's `generate` launches kernel by kernel: as long as our steps took without graphs. It pads, and decodes to the end.
THEIRS: Final = replace(OURS, floor_seconds=0.025, padded=True, static=True, weight_sync_seconds=0.0)

STEPS: Final = 64  # that are simulated
SKIPPED: Final = 8
SEEDS: Final = (0, 1)


@dataclass(frozen=True, slots=True)
class Card:
    gpu: Gpu

    def profile(self, workload: BenchWorkload, engine: EngineSection) -> Profile:
        with torch.device("meta"):
            models: dict[str, PreTrainedModel] = {"actor": counting(workload)}
        judged, valued = workload.reward == "model", "critic" in workload.roles
        models |= {role: drawn(workload, role, "meta") for role in ["reward"] * judged + ["critic"] * valued}
        law = workload.lengths
        return Profile(
            workload=WorkloadSection(
                batch=workload.batch // workload.group, samples=workload.group, prompt=workload.prompt_tokens[1]
            ),
            lengths=LengthsSection(cap=law.cap, median=law.median, sigma=law.sigma),
            models=ModelsSection(actor="actor", reward="reward" if judged else "", critic="critic" if valued else ""),
            layout=LayoutSection(gpu="card", decode=1, corunning=TOGETHER),
            engine=engine,
            gpus={"card": self.gpu},
            sizes={role: transformer(model) for role, model in models.items()},
        )

    def outcomes(
        self, workload: BenchWorkload, modes: Sequence[str], engine: EngineSection = OURS
    ) -> dict[str, Outcome]:
        profile = self.profile(workload, engine)
        return {name: Outcome.of(profile, schedule_of(MODES[name], workload)) for name in modes}


def schedule_of(mode: Mode, workload: BenchWorkload) -> Schedule:
    return Schedule(
        name=mode.name,
        about=mode.about,
        admission=partial(mode.admission, workload),
        chunk=None if isinstance(mode.chunks(workload), WholeRollout) else workload.chunk,
        held=mode.held,
        lookahead=mode.lookahead,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step's mean seconds, and seconds for each trained token."""

    seconds: float
    per_token: float

    @classmethod
    def of(cls, profile: Profile, schedule: Schedule) -> Outcome:
        found = [SimulatedRun(profile.system(), profile.work(), schedule, STEPS, SKIPPED, seed).run() for seed in SEEDS]
        return cls(*(float(np.mean([getattr(each, name) for each in found])) for name in ("seconds", "per_token")))


def figures(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    first = next(iter(outcomes))
    found = dict[str, float]()
    for name, each in outcomes.items():
        found |= {f"{name}, s a step": each.seconds, f"{name}, tokens a second": 1 / each.per_token}
        if name != first:
            found[f"{name} / {first}"] = outcomes[first].per_token / each.per_token
    return found


def planned(name: str) -> dict[str, dict[str, float]]:
    """Return the predicted seconds and figures of each part on a GPU by name; ``seconds`` are those that it takes.

    Raises:
        ConfigError: its data sheet is unknown.
    """
    gpu = GPUS.get(name.lower()) or gpu_named(name)
    if gpu is None:
        raise ConfigError(f"--plan: no data sheet of a GPU {name!r}; expected one of {', '.join(GPUS)}")
    card, day = Card(gpu), Day(torch.device("cuda"))
    found: dict[str, dict[str, float]] = {part: {TAKES: 0.0} for part in PARTS} | alone(gpu, day)
    for part, chosen in (("ladder", steps.LADDER), ("full", steps.FULL), ("rule", steps.RULE), ("small", steps.SMALL)):
        workload = WORKLOADS[chosen.workload]
        outcomes = card.outcomes(workload, chosen.modes)
        took = sum(chosen.of(mode) * each.seconds for mode, each in outcomes.items())
        fits, needed = steps.fitted(workload, chosen.deferring, day.device, gpu.memory)
        found[part] = {TAKES: took, **figures(outcomes), "peak bytes": needed}
        found[part]["micro-batch, tokens"] = fits.micro_batch_tokens
    for chosen in steps.PEER:
        workload = WORKLOADS[chosen.workload]
        both = {"TRL": card.outcomes(workload, ["serial"], THEIRS)["serial"], **card.outcomes(workload, chosen.modes)}
        about = "rule" if workload.reward == "rule" else "model"
        found["peer"] |= {f"{about}: {key}": value for key, value in figures(both).items()}
        tried = len(steps.PASSES_TRIED) if about == "rule" else 1
        found["peer"][TAKES] += sum(chosen.of(mode) * each.seconds for mode, each in both.items())
        found["peer"][TAKES] += (tried - chosen.warm_up) * both["TRL"].seconds
    for part, figures_ in found.items():
        figures_[TAKES] += PARTS[part].seconds
    return found


TAKES: Final = "takes, s"  # a part's own seconds, among its figures


def alone(gpu: Gpu, day: Day) -> dict[str, dict[str, float]]:
    """Return the seconds and the figures of parts that are no whole steps."""
    sizes, runs, reached = day.sizes, day.sizes.times + 1, parts.REACHED
    actor, judge = (transformer(day.model(role, torch.device("meta"))) for role in ("actor", "reward"))
    asked = sizes.rows, sizes.rows * (sizes.prompt + 2 * sizes.steps)
    step, served = (each.decoder(gpu, actor, 1).seconds(*asked) for each in (reached, Reached()))
    update = sizes.trained * reached.update(gpu, actor, head=True).reading(0, sizes.read)
    score = sizes.rows * reached.reader(gpu, judge, reached.scoring, head=False).reading(0, sizes.scored)
    useful = PASSES * sizes.trained * actor.passes(gpu.flops).reading(0, sizes.read)
    return {
        "decode": {
            TAKES: runs * 2 * (1 + 3) * sizes.steps * step,
            "equal, ms": 1e3 * step,
            "equal / predicted for vLLM": step / served,
        },
        # Reading alone is as long as decoding alone. Processes that take turns gain nothing.
        "overlap": {
            TAKES: 2 * (score + sizes.steps * step) + runs * 2 * score * (1 + 2 / TOGETHER + 1),
            "equal, times as fast": TOGETHER,
        },
        "update": {TAKES: runs * update, "seconds": update, "mfu": useful / update},
    }


def printed(prediction: Mapping[str, Mapping[str, float]], chosen: Sequence[str]) -> str:
    """Return the plan: the parts in their order, their seconds and limits; and what they are predicted to find."""
    rows, total = [], 0.0
    for name in chosen:
        took = prediction[name][TAKES]
        total += took
        rows.append([name, f"{took:.0f}", f"{total:.0f}", f"{PARTS[name].limit:.0f}"])
    plan = markdown(["part", "predicted, s", "then over, s", "limit, s"], rows)
    return f"{plan}\n\n{compared({'parts': {name: {} for name in chosen}}, prediction=prediction)}"


def compared(
    results: Mapping[str, Any], only: str = "", prediction: Mapping[str, Mapping[str, float]] | None = None
) -> str:
    """Return figures measured, predicted and wanted, side by side; of one part, or of all that ran."""
    found: Mapping[str, Mapping[str, Any]] = results["parts"]
    gpu = results.get("machine", found.get("facts", {})).get("device", "")
    rows = []
    for part in [only] if only else found:
        foretold, goals = (prediction or recorded(str(gpu))).get(part, {}), GOALS.get(part, {})
        measured = found[part]
        names = dict.fromkeys(
            name.removesuffix(", predicted") for name in (*measured, *foretold, *goals) if name != TAKES
        )
        for name in names if part != "facts" or only else ():
            told = measured.get(f"{name}, predicted", foretold.get(name))
            goal = " ".join([goals[name][0], f"{goals[name][1]:g}"]) if name in goals else "-"
            rows.append([part, name, shown(measured.get(name)), shown(told), goal])
    return markdown(["part", "figure", "measured", "predicted", "goal"], rows)


def recorded(gpu: str) -> Mapping[str, Mapping[str, float]]:
    """Return the prediction of record for a GPU by its driver's name; none for others."""
    known = gpu_named(gpu)
    for file in RESULTS.glob("prediction-*.json"):
        if known is not None and GPUS[file.stem.partition("-")[2]] == known:
            found: Mapping[str, Mapping[str, float]] = json.loads(file.read_text(encoding="utf-8"))
            return found
    return {}


def shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return " to ".join(map(shown, value))
    if isinstance(value, float | int):
        return f"{value / 1e9:.2f}e9" if value >= 1e9 else f"{value:,.4g}"
    text = "-" if value is None else " ".join(str(value).split()).replace("|", "/")
    return text if len(text) <= 300 else f"{text[:80]} ... {text[-220:]}"
