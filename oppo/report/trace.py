"""Chrome traces (``chrome://tracing``, Perfetto): a track for each stage and model, an arrow for each rollout.

The format is the array form of Google's "Trace Event Format", whose closing bracket is optional: a trace cut short by
a crash can still be opened.
"""

from __future__ import annotations

import json
from typing import Literal, TypeAlias

from oppo.events import Chunk, Defer, Finish, Given, Prompt
from oppo.observe import Span

Event: TypeAlias = dict[str, object]
Process: TypeAlias = Literal["stages", "models"]

_PIDS: dict[Process, int] = {"stages": 1, "models": 2}


class Trace:
    """Turns spans and items into trace events; says each track's name once. Writes nothing itself."""

    def __init__(self) -> None:
        self._tids: dict[tuple[Process, str], int] = {}
        self._parked: set[int] = set()
        self._events: list[Event] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for name, pid in _PIDS.items()
        ]

    def span(self, span: Span, process: Process) -> None:
        """Add a slice to the span's track."""
        duration = _microseconds(max(0.0, span.end - span.start))
        place = self._place(process, span.track)
        slice_ = {"ph": "X", "name": span.label, "ts": _microseconds(span.start), "dur": duration, **place}
        self._events.append(slice_ | ({"args": dict(span.details)} if span.details else {}))

    def item(self, stage: str, item: object, at: float) -> None:
        """Add the arrow of a rollout: from its prompt, by way of every deferral, to its end."""
        if isinstance(item, Chunk | Given):
            if item.rollout in self._parked:
                self._parked.remove(item.rollout)
                self._arrow("t", stage, item.rollout, at)
        elif isinstance(item, Prompt):
            self._arrow("s", stage, item.rollout, at)
        elif isinstance(item, Defer):
            self._parked.add(item.rollout)
            self._arrow("t", stage, item.rollout, at)
        elif isinstance(item, Finish):
            self._parked.discard(item.rollout)
            self._arrow("f", stage, item.rollout, at)

    def take(self) -> str:
        """Return the text that continues the file by what was added since the last call."""
        text = "".join(json.dumps(event, separators=(",", ":")) + ",\n" for event in self._events)
        self._events = []
        return text

    def _arrow(self, phase: str, stage: str, rollout: int, at: float) -> None:
        place = self._place("stages", stage)
        arrow: Event = {
            "ph": phase,
            "name": "rollout",
            "cat": "rollout",
            "id": rollout,
            "ts": _microseconds(at),
            **place,
        }
        self._events.append(arrow | ({"bp": "e"} if phase == "f" else {}))

    def _place(self, process: Process, track: str) -> dict[str, int]:
        pid, key = _PIDS[process], (process, track)
        if key not in self._tids:
            self._tids[key] = len(self._tids) + 1
            name = {"ph": "M", "name": "thread_name", "pid": pid, "tid": self._tids[key], "args": {"name": track}}
            self._events.append(name)
        return {"pid": pid, "tid": self._tids[key]}


OPENING = "[\n"
CLOSING = '{"ph":"M","name":"process_labels","pid":1,"args":{"labels":"oppo"}}\n]\n'


def _microseconds(at: float) -> float:
    return round(at * 1e6, 3)
