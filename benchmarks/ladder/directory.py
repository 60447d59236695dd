"""A workload as files, made once and kept, for every contestant, ours and the peer's alike.

::

    <cache>/<workload>-<digest>/
        actor/  reward/  critic/   models and tokenizer as save_pretrained writes them; reference = actor
        prompts.jsonl              {"tokens": [ids], "length": tokens of the response}, used in this order
        spec.json                  the rest: batch, epochs, limits, rates, and statistics of the lengths
        COMPLETE                   written last

Where lengths are scripted there are no models: each contestant draws the same weights from the seed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
import tokenizers
import torch
import transformers

from benchmarks.ladder.countdown import EOS, PAD, language_of, write_prompts
from benchmarks.ladder.teach import AS_ANNOUNCED, lengths_written, scalar_model, taught
from benchmarks.ladder.workloads import BenchWorkload, Bound, Lengths, Models, Shape
from oppo.demo.assets import alone, cache_directory as demos, made_once
from oppo.demo.models import Progress
from oppo.errors import ConfigError, ModelError
from oppo.events import Prompt
from oppo.hf.loading import load_causal
from oppo.hf.model_files import quiet

SOURCES: Final = ("countdown.py", "directory.py", "teach.py")
ROLES: Final = ("actor", "reward", "critic")
EXAMINED: Final = 256
"""Responses of the taught actor that are compared with the announced lengths."""


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Statistics of lengths in tokens: those announced by all prompts, or of the actor's responses to some.

    Attributes:
        capped: fraction at the cap.
        as_announced: fraction equal to the announced length.
    """

    median: float
    p95: float
    mean: float
    capped: float
    as_announced: float


@dataclass(frozen=True, slots=True)
class Facts:
    """Measurements of a workload; parameters by model."""

    announced: LengthStatistics
    written: LengthStatistics | None
    parameters: dict[str, int]


@dataclass(frozen=True, slots=True)
class Files:
    """A workload and the directory that holds it."""

    directory: Path
    workload: BenchWorkload
    facts: Facts

    def model(self, name: str) -> Path:
        """Return the directory of ``actor``, ``reward`` or ``critic``."""
        return self.directory / name

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prompts in the order of the file, again and again, numbered from 0."""
        prompts = read_prompts(self.directory)
        for number in count():
            prompt = prompts[number % len(prompts)]
            yield Prompt(number, number, prompt.tokens, group=number, columns=prompt.columns)


def cache_directory() -> Path:
    """Return the folder of workloads, beside the demo's."""
    return demos().with_name("bench")


def files_of(workload: BenchWorkload, cache: Path, progress: Progress = lambda *_: None) -> Files:
    """Return the files of a workload from ``cache``, where they are made first if they are missing.

    Raises:
        ModelError: the actor did not learn to write responses of the announced lengths.
    """

    def build(directory: Path) -> None:
        _build(directory, workload, cache, progress)

    target = made_once(cache / f"{workload.name}-{_digest(asdict(workload))}", build)
    return open_files(target, workload)


def open_files(directory: Path, workload: BenchWorkload) -> Files:
    facts = json.loads((directory / "spec.json").read_text(encoding="utf-8"))["measured"]
    written = facts["written"]
    return Files(
        directory,
        workload,
        Facts(
            LengthStatistics(**facts["announced"]),
            LengthStatistics(**written) if written else None,
            facts["parameters"],
        ),
    )


def workload_in(directory: Path) -> BenchWorkload:
    """Return the workload of a directory.

    Raises:
        ConfigError: it holds none.
    """
    try:
        recipe = json.loads((directory / "spec.json").read_text(encoding="utf-8"))["recipe"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory} holds no workload of the ladder: {error}") from error
    shapes = recipe.pop("models")
    for name in ROLES:
        shapes[name] = Shape(**shapes[name])
    typed = {
        "lengths": Lengths(**recipe["lengths"]),
        "models": Models(**shapes),
        "shares": tuple(Bound(**bound) for bound in recipe["shares"]),
        "capped": tuple(recipe["capped"]),
        "prompt_tokens": tuple(recipe["prompt_tokens"]),
    }
    return BenchWorkload(**{**recipe, **typed})


def read_prompts(directory: Path) -> list[Prompt]:
    """Return the prompts of a workload's directory; column ``length`` is that of the response."""
    prompts = []
    for number, line in enumerate((directory / "prompts.jsonl").read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        tokens = np.asarray(row["tokens"], np.int32)
        prompts.append(Prompt(number, number, tokens, group=number, columns={"length": row["length"]}))
    return prompts


def statistics(lengths: list[int], wanted: list[int], cap: int) -> LengthStatistics:
    """Return the statistics of lengths; ``wanted`` are the announced ones, at most ``cap``."""
    return LengthStatistics(
        median=float(np.median(lengths)),
        p95=float(np.percentile(lengths, 95)),
        mean=float(np.mean(lengths)),
        capped=float(np.mean([length >= cap for length in lengths])),
        as_announced=float(np.mean([length == want for length, want in zip(lengths, wanted, strict=True)])),
    )


def _digest(recipe: object) -> str:
    """Return 12 hexadecimal digits that change with the recipe, its sources and their libraries."""
    versions = [library.__version__ for library in (torch, transformers, tokenizers)]
    digest = hashlib.sha256(json.dumps([recipe, versions], sort_keys=True).encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:12]


def _build(directory: Path, workload: BenchWorkload, cache: Path, progress: Progress) -> None:
    parameters: dict[str, int] = {}
    write_prompts(directory / "prompts.jsonl", workload)
    if not workload.models.scripted:
        for role in ROLES:
            made = _model(role, workload, cache, progress)
            parameters[role] = int((made / "parameters").read_text(encoding="utf-8"))
            shutil.copytree(made / "model", directory / role)
    facts = Facts(*_examine(directory, workload, progress), parameters)
    spec = {
        "workload": workload.name,
        "batch": workload.batch,
        "epochs": workload.epochs,
        "minibatches": workload.minibatches,
        "max_new_tokens": workload.lengths.cap,
        "learning_rate": workload.learning_rate,
        "critic_learning_rate": workload.learning_rate,
        "temperature": workload.temperature,
        "eos": EOS,
        "pad": PAD,
        "seed": workload.seed,
        "kl": workload.kl,
        "gamma": workload.gamma,
        "lam": workload.lam,
        "reward": workload.reward,
        "lengths": "scripted" if workload.models.scripted else "trained",
        "measured": asdict(facts),
        "recipe": asdict(workload),
    }
    (directory / "spec.json").write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")


def _model(role: str, workload: BenchWorkload, cache: Path, progress: Progress) -> Path:
    """Return the directory of a model in ``cache``, made first if it is missing; workloads may share it."""
    models, language, positions = workload.models, language_of(workload), workload.positions
    shape: Shape = getattr(models, role)
    lessons = models.taught if role == "actor" else 0

    def build(directory: Path) -> None:
        with alone(workload.seed):
            if lessons:
                model = taught(language, shape, steps=lessons, positions=positions, progress=progress)
            else:
                model = scalar_model(shape, language.vocabulary, positions)
        with quiet():
            model.save_pretrained(directory / "model")
            language.tokenizer(positions).save_pretrained(directory / "model")
        (directory / "parameters").write_text(f"{model.num_parameters()}\n", encoding="utf-8")

    recipe = [role, asdict(shape), lessons, workload.lengths.cap, positions, workload.seed]
    return made_once(cache / f"{role}-{_digest(recipe)}", build)


def _examine(
    directory: Path, workload: BenchWorkload, progress: Progress
) -> tuple[LengthStatistics, LengthStatistics | None]:
    """Return the statistics of the announced lengths and of the actor's responses; ``None`` for scripted ones.

    Raises:
        ModelError: they differ too often.
    """
    prompts, cap = read_prompts(directory), workload.lengths.cap
    wanted = [int(str(prompt.columns["length"])) for prompt in prompts]
    announced = statistics(wanted, wanted, cap)
    if workload.models.scripted:
        return announced, None
    progress("examining the actor", 0.0)
    actor = load_causal(directory / "actor")
    lengths = lengths_written(actor, prompts[:EXAMINED], cap=cap, seed=workload.seed)
    written = statistics(lengths, wanted[:EXAMINED], cap)
    if written.as_announced < AS_ANNOUNCED:
        raise ModelError(
            f"only {written.as_announced:.1%} of the actor's responses are as long as announced, and a comparison asks "
            f"for {AS_ANNOUNCED:.0%}: raise models.taught of workload {workload.name!r} in "
            "benchmarks/ladder/workloads.py"
        )
    return announced, written
