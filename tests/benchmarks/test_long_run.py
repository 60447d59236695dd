"""A short form of the long run: what its processes hold and what lies on the disk does not grow, but for records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.long_run import BEGUN, USAGE, Usage, figure, furnish, lives, noted
from tests.kit.forked import Program

STEPS, KILLS, EVERY = 60, 15, 5

LIVE = """
import json, sys
from pathlib import Path
from benchmarks.long_run import live
folder, every, kill, settings = json.loads(sys.argv[1])
live(Path(folder), every, kill, settings)
"""


def forked(folder: Path, every: int, kill: int, settings: Sequence[str]) -> int:
    with Program(LIVE, [json.dumps([str(folder), every, kill, list(settings)])], forks=True) as life:
        life.communicate(timeout=120)
        return life.wait()


def test_a_run_that_is_killed_and_resumed_holds_no_more_than_in_its_first_steps(tmp_path: Path) -> None:
    folder = furnish(tmp_path / "long", STEPS)
    assert [*lives(folder, STEPS, KILLS, EVERY, forked)] == [15, 30, 45, 60, 61]
    assert [each["step"] for each in noted(folder / BEGUN)] == [0, 0, 20, 40, 60]
    usage = [Usage(**each) for each in noted(folder / USAGE)]
    settled = [each for each in usage if each.step > KILLS]
    for name in ("files", "threads", "processes", "shared"):
        early, late = ([getattr(each, name) for each in some] for some in (settled[:KILLS], settled[-KILLS:]))
        assert min(late) <= min(early) + 1, name  # the least: connections and writers come and go
    first, last = settled[0], settled[-1]
    growth = (last.records - first.records) / (last.step - first.step)
    assert growth < 2 * first.records / first.step, "the records of a step are as long at the end"
    assert last.entries - first.entries <= 4, "a life adds a file, its trace"
    assert figure(usage).startswith("<svg ")
