"""What a run directory holds, as far as it can be read: a page's figures, samples, settings and machine."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from oppo.atomic_files import put, read_text
from oppo.errors import ConfigError, one_line
from oppo.redact import excerpt, on_one_line, printable
from oppo.report.charts import Excerpt
from oppo.report.metrics import Metrics, metrics_of
from oppo.report.records import (
    EVALUATIONS,
    METRICS,
    SAMPLES,
    Damaged,
    Record,
    ended,
    is_locked,
    is_sample,
    listed,
    read,
)

T = TypeVar("T")

CONFIG: Final = "config.toml"
LOG: Final = "log.jsonl"
TIMELINE: Final = "timeline.json"
_SHORTEST: Final = 1e-9  # seconds of a timeline
_REASON: Final = 1_000  # characters
SHOWN: Final = 500  # samples of training on a page, about


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    path: Path
    records: Sequence[Metrics]
    evaluations: Sequence[Record]
    samples: Sequence[Record]
    excerpts: Sequence[Excerpt]
    config: str
    settings: Mapping[str, Any]
    begun: Mapping[str, object]
    state: str
    problems: Sequence[str]
    reason: str = ""  # why it failed

    @property
    def name(self) -> str:
        return printable(self.path.absolute().name)

    def setting(self, section: str, key: str) -> Any:
        held = self.settings.get(section)
        return held.get(key) if isinstance(held, dict) else None

    def models(self) -> Mapping[str, str]:
        rewards = self.settings.get("rewards")
        found = rewards if isinstance(rewards, list) else []
        sources = [str(each.get("source", "")) for each in found if isinstance(each, dict)]
        named = {role: str(self.setting("models", role) or "") for role in ("policy", "reference", "critic", "teacher")}
        many = len(sources) > 1
        named |= {f"reward {number}" if many else "reward": source for number, source in enumerate(sources, 1)}
        return {role: name for role, name in named.items() if name}


def _refuse_others(path: Path) -> None:
    if any((path / name).exists() for name in (METRICS, CONFIG, LOG, SAMPLES, EVALUATIONS)):
        return
    fault = "is no directory" if path.exists() else "does not exist"
    runs = []
    if path.is_dir():
        fault = f"holds none of the files of a run ({METRICS}, {CONFIG}, {LOG}, ...)"
        runs = sorted(each.parent.name for each in path.glob(f"*/{METRICS}"))[:5]
    advice = f"one of its runs: {', '.join(str(path / name) for name in runs)}" if runs else "such as runs/first"
    raise ConfigError(f"{path} {fault}: expected the directory of a run, {advice}")


def recorded(path: Path, *, over: bool = False) -> Recorded:
    """Read a run directory; ``over``: its run has ended, though it still holds the lock."""
    _refuse_others(path)
    files = _Files(path)
    records = files.read(METRICS, lambda damaged: metrics_of(path, damaged))
    evaluations = files.read(EVALUATIONS, lambda damaged: read(path / EVALUATIONS, damaged), needed=False)
    last = max((int(each["step"] or 0) for each in records), default=0)
    samples = files.read(SAMPLES, lambda damaged: _chosen(read(path / SAMPLES, damaged), last))
    config = "".join(files.read(CONFIG, lambda damaged: [read_text(path / CONFIG)]))
    settings = dict(files.read(CONFIG, lambda damaged: tomllib.loads(config).items()))
    excerpts = files.read(TIMELINE, lambda damaged: _times(read_text(path / TIMELINE)), needed=False)
    log = files.read(LOG, lambda damaged: _events(read_text(path / LOG), damaged), needed=False)
    begun: Mapping[str, object] = next((each for each in reversed(log) if each["event"] == "begin"), {})
    state = _state(path, log, over=over)
    reason = _reason(log) if state == "failed" else ""
    problems = [*files.problems]
    return Recorded(path, records, evaluations, samples, excerpts, config, settings, begun, state, problems, reason)


@dataclass
class _Files:
    path: Path
    problems: dict[str, None] = field(default_factory=dict)

    def read(self, name: str, reading: Callable[[Damaged], Iterable[T]], *, needed: bool = True) -> Sequence[T]:
        lines = list[int]()
        if not (self.path / name).exists():
            self.problems |= {f"{name} is missing": None} if needed else {}
            return ()
        try:
            found = tuple(reading(lambda number, line: lines.append(number)))
        except (OSError, ValueError, RecursionError) as error:
            self.problems[f"{name} cannot be read: {one_line(error)}"] = None
            return ()
        if lines:
            self.problems[f"{name}: {listed('line', lines)} left out as damaged"] = None
        return found


@cache
def _excerpts() -> TypeAdapter[list[Excerpt]]:
    return TypeAdapter(list[Excerpt])


def note_times(run: Path, excerpts: Sequence[Excerpt]) -> None:
    put(run / TIMELINE, [_excerpts().dump_json([each.as_shown() for each in excerpts]).decode() + "\n"])


def _times(text: str) -> list[Excerpt]:
    try:
        found = _excerpts().validate_json(text)
    except ValidationError as error:
        raise ValueError("it holds no steps in time") from error
    steps = [end for each in found for step in each.steps for end in (step.start, step.end)]
    ends = steps + [end for each in found for span in each.work for end in (span.start, span.end)]
    if not all(map(math.isfinite, ends)) or not all(each.steps and each.seconds > _SHORTEST for each in found):
        raise ValueError("its steps take no time")
    return found


def _chosen(samples: Iterator[Record], last: int) -> Iterator[Record]:
    # Of the first step, of the last three, and of others between them that lie evenly
    stride = 1
    for number, (step, group) in enumerate(groupby(samples, key=itemgetter("step"))):
        kept = list(group)
        stride = stride if number else math.ceil((last + 1) * len(kept) / SHOWN)
        at = cast("int", step)
        if not number or at % stride == 0 or at > last - 3:
            yield from kept


def _events(text: str, damaged: Damaged) -> Iterator[Record]:
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and isinstance(found.get("event"), str):
            yield found
        else:
            damaged(number, b"")


def _state(path: Path, log: Sequence[Record], *, over: bool) -> str:
    endings = {"begin": "", "end": "complete", "failed": "failed", "interrupted": "interrupted"}
    last = next((endings[event] for each in reversed(log) if (event := str(each["event"])) in endings), "")
    with suppress(OSError):
        if not over and is_locked(path):
            return "running"
    return "complete" if ended(path) is not None else last or "ended early"


def _reason(log: Sequence[Record]) -> str:
    failed: Record = next((each for each in reversed(log) if each["event"] == "failed"), {})
    told, notes = failed.get("exception"), failed.get("notes")
    error = told[0] if isinstance(told, list) and told and isinstance(told[0], dict) else {}
    said = [f"{error.get('exc_type', '')}: {error.get('exc_value', '')}", *(notes if isinstance(notes, list) else ())]
    return on_one_line("\n".join(excerpt(str(each), _REASON) for each in said)) if error else ""


def held_out(evaluations: Sequence[Record]) -> Iterator[Record]:
    for each in [*evaluations[:1], *evaluations[1:][-1:]]:
        found = each.get("samples")
        for sample in found if isinstance(found, list) else ():
            if isinstance(sample, dict) and is_sample(sample):
                yield {**sample, "step": each["step"], "held_out": True}


def parameters(model: str) -> int | None:
    """Return how many parameters a model has in its files, here or in the hub's cache; ``None`` if they are not there.

    Adapters count alone, and numbers of fewer than eight bits as they are packed.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - .2 s

        try:
            cached = try_to_load_from_cache(model, "config.json")
        except (ValueError, OSError):  # it is no name of the hub
            return None
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    try:
        return sum(map(_numbers, folder.glob("*.safetensors"))) or None
    except (OSError, SafetensorError):
        return None


def _numbers(file: Path) -> int:
    with safe_open(file, framework="np") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no mapping


def differing(runs: Iterable[Recorded]) -> dict[str, list[object]]:
    flat = [dict(_flat(each.settings)) for each in runs]
    keys = dict.fromkeys(key for each in flat for key in each if key not in {"run.name", "run.directory"})
    found = {key: [each.get(key) for each in flat] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            yield from _flat({str(number): each for number, each in enumerate(value, 1)}, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
