"""``hang-report.json``: what every stage, task and thread of a run was doing when nothing moved any more."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import FrameType

from oppo.graph import Snapshot


def hang_report(
    seconds: float,
    snapshots: Sequence[Snapshot],
    rollouts: Mapping[str, list[int]],
    loop: asyncio.AbstractEventLoop | None,
) -> dict[str, object]:
    """Return the report as JSON values, after ``seconds`` without a move; safe to call from any thread.

    ``snapshots`` are of the steps that are alive, none between steps; ``rollouts`` are ids by state: in flight, parked,
    finished.
    """
    return {
        "still_for_seconds": round(seconds, 3),
        "steps": [
            {
                "step": snapshot.step,
                "summary": snapshot.sentence(),
                "at_work": list(snapshot.working),
                "waits": [asdict(wait) for wait in snapshot.waits],
                "channels": snapshot.channels,
                "table": snapshot.table.splitlines(),
            }
            for snapshot in snapshots
        ],
        "rollouts": rollouts,
        "tasks": [
            {"name": task.get_name(), "stack": list(await_chain(task.get_coro()))}
            for task in (asyncio.all_tasks(loop) if loop is not None else ())
        ],
        "threads": [{"name": name, "stack": traceback.format_stack(frame)} for name, frame in sorted(thread_frames())],
    }


def await_chain(awaited: object) -> Iterator[str]:
    """Yield the position of a suspended coroutine in each call, from the outermost to the innermost."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if isinstance(frame, FrameType):
            yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None) or _driven(awaited)


def _driven(awaited: object) -> object:
    # Code of a user is driven step by step (`oppo.errors.awaited`), so the interpreter does not know what it awaits.
    frame = getattr(awaited, "gi_frame", None)
    return frame.f_locals.get("call") if isinstance(frame, FrameType) else None


def thread_frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the name and the current frame of each thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for identity, frame in sys._current_frames().items():  # noqa: SLF001 - documented, for exactly this
        yield names.get(identity, str(identity)), frame
