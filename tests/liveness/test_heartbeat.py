"""The heartbeat says how long the loop was kept from its work, by whoever kept it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import oppo
from oppo.liveness import Heartbeat
from oppo.liveness.watchdog import GAP
from oppo.simulate.models import prompts
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, run_virtual


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.at = 0.0
        self.late = [0.0, 0.25, 0.125]

    def __call__(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        """Oversleep by what is planned for this beat; once nothing is, do not wake."""
        if not self.late:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        self.at += seconds + self.late.pop(0)


async def test_the_worst_delay_is_kept_until_it_is_taken() -> None:
    clock = Clock()
    heartbeat = Heartbeat(0.5, clock=clock, sleep=clock.sleep)
    async with heartbeat.beating():
        while clock.late:
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert heartbeat.take() == 0.25
        assert heartbeat.take() == 0.0


async def test_a_beat_that_is_overdue_counts_already() -> None:
    clock = Clock()
    clock.late = []
    heartbeat = Heartbeat(0.5, clock=clock, sleep=clock.sleep)
    async with heartbeat.beating():
        await anyio.lowlevel.checkpoint()
        clock.at += 3.0  # the loop does something else for so long
        assert heartbeat.take() == 2.5


def test_a_loop_that_is_never_kept_waiting_is_never_late() -> None:
    async def main() -> float:
        heartbeat = Heartbeat(0.25, clock=anyio.current_time)
        async with heartbeat.beating():
            await anyio.sleep(10)
            return heartbeat.take()

    assert run_virtual(main) == 0.0


async def test_an_error_inside_surfaces_as_itself() -> None:
    with pytest.raises(ValueError, match="inside"):
        async with Heartbeat().beating():
            raise ValueError("inside")


def graph() -> oppo.Graph[oppo.StepReport]:
    models = {"policy": FakePolicy(seconds=0.001), "reward": FakeScorer(fake_scalar), "trainer": FakeTrainer()}
    return oppo.grpo(**models, admission=oppo.Overcommit(2))  # type: ignore[arg-type]  # each of the type of its name


async def gaps(tmp_path: Path) -> list[float | None]:
    async with graph().open(prompts(20)) as run, oppo.watched(run, report=tmp_path / "hang.json"):
        return [report.metrics.get(GAP) async for report in run.steps(2)]


def test_the_reports_of_a_watched_run_say_how_long_its_loop_was_blocked(tmp_path: Path) -> None:
    found = anyio.run(gaps, tmp_path)
    assert all(gap is not None and gap >= 0 for gap in found)


def test_in_virtual_time_nothing_beats(tmp_path: Path) -> None:
    assert run_virtual(gaps, tmp_path) == [None, None]
