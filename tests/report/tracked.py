"""What trackers have written: TensorBoard's event files, the logs of Weights & Biases offline, Trackio's database."""

from __future__ import annotations

import atexit
import json
import os
import sqlite3
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from oppo.atomic_files import temporary

_kept = ExitStack()
atexit.register(_kept.close)
# Where Trackio keeps its runs: it reads that once in a process
TRACKIO = Path(os.environ.setdefault("TRACKIO_DIR", str(_kept.enter_context(temporary("trackio")))))

Scalars = Mapping[str, Mapping[int, float]]


def board(path: Path) -> Scalars:
    shown = EventAccumulator(str(path))
    shown.Reload()
    return {name: {each.step: each.value for each in shown.Scalars(name)} for name in shown.Tags()["scalars"]}


def texts(path: Path) -> Mapping[int, str]:
    shown = EventAccumulator(str(path))
    shown.Reload()
    return {each.step: each.tensor_proto.string_val[0].decode() for each in shown.Tensors("samples/text_summary")}


def trackio_history(project: str) -> list[tuple[str, int, dict[str, object]]]:
    """Return what Trackio keeps of a project: the run's name, the step and what was logged, in order."""
    database = sqlite3.connect(TRACKIO / f"{project}.db")
    try:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    finally:
        database.close()
    return [(name, step, json.loads(metrics)) for name, step, metrics in rows]


def logs(path: Path) -> list[Sequence[Record]]:
    return sorted(map(finished, path.glob("wandb/offline-run-*/*.wandb")), key=began)


def began(log: Sequence[Record]) -> int:
    runs = (record.run for record in log if record.WhichOneof("record_type") == "run")
    return min(int(run.start_time.ToNanoseconds()) for run in runs)


def finished(file: Path, patience: float = 60.0) -> Sequence[Record]:
    """Return the records of a log once it holds the run's end, which a process of wandb's writes in its own time."""
    deadline = time.monotonic() + patience
    while True:
        log = list(records(file.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in log) or time.monotonic() > deadline:
            return log
        time.sleep(0.02)


def records(log: bytes) -> Iterator[Record]:
    """Yield the whole records of a log in LevelDB's format, in one block: CRC, length, kind and content of each."""
    assert log.startswith(b":W&B")
    at = 7
    while at + 7 <= len(log):
        _, length, kind = struct.unpack_from("<IHB", log, at)
        if at + 7 + length > len(log):
            return
        assert kind == 1, "a record that is whole"
        record = Record()
        record.ParseFromString(log[at + 7 : at + 7 + length])
        at += 7 + length
        yield record


def history(log: Sequence[Record]) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for record in log:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            own = ("_", "samples/")
            steps[items["_step"]] = {name: value for name, value in items.items() if not name.startswith(own)}
    return steps
