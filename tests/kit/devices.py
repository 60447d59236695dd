"""Devices in virtual time: fake models that share a device slow each other down.

A job moves with the clock where nothing interferes, and slower beside work of other kinds. So the position of its end
is known, whatever else begins and ends until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary

import anyio

from oppo.simulate.profile import Interference, time_shared
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer
from oppo.testing.fake_policy import FakeDecode, Job, Lane, Load
from oppo.testing.fakes import ReadSeconds

T = TypeVar("T")


class Device:
    """Hardware that several kinds of work share; work of one kind does not interfere with itself.

    Args:
        interference: of a kind of work by another; several others add up.

    Example:
        >>> device = Device()
        >>> async def main() -> float:
        ...     async with anyio.create_task_group() as tasks:
        ...         tasks.start_soon(device.work, "decode", 2.0)
        ...         tasks.start_soon(device.work, "score", 1.0)
        ...     return anyio.current_time()
        >>> from oppo.testing import run_virtual
        >>> run_virtual(main)
        3.0
    """

    def __init__(self, interference: Interference = time_shared) -> None:
        self._interference = interference
        self._jobs: dict[SharedJob, None] = {}  # an ordered set

    async def work(self, kind: str, seconds: float) -> None:
        with self.job(kind) as job:
            await job.reach(job.position + seconds)

    @contextmanager
    def job(self, kind: str) -> Iterator[SharedJob]:
        """Be at work on the device while the context lasts."""
        job = SharedJob(kind)
        self._jobs[job] = None
        self._changed()
        try:
            yield job
        finally:
            del self._jobs[job]
            self._changed()

    def _changed(self) -> None:
        kinds = dict.fromkeys(job.kind for job in self._jobs)
        slowed = {kind: 1 + sum(self._interference(kind, other) for other in kinds if other != kind) for kind in kinds}
        for job in self._jobs:
            job.slow_down(slowed[job.kind])


class SharedJob(Job):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self._target = 0.0  # the position that is waited for
        self._slowdown = 1.0
        self._lost = 0.0  # seconds of the clock that brought nothing, while nothing interferes
        self._since = self._at = 0.0  # a time and the position then, while something does

    @property
    def position(self) -> float:
        # Seconds; without interference exactly the loop's time.
        now = self._now()
        return now - self._lost if self._slowdown == 1 else self._at + (now - self._since) / self._slowdown

    def slow_down(self, slowdown: float) -> None:
        if slowdown != self._slowdown:
            self._since, self._at = self._now(), self.position
            self._lost, self._slowdown = self._since - self._at, slowdown
            if self._timer is not None:  # its task sleeps on
                self._timer.cancel()
                self._arm(self._target)

    def _arm(self, position: float) -> None:
        self._target = position
        super()._arm(self._time_of(position))

    def _time_of(self, position: float) -> float:
        if self._slowdown == 1:
            return position + self._lost
        return self._since + (position - self._at) * self._slowdown


@dataclass(eq=False)
class DevicePolicy(FakePolicy):
    """It reads what its KV cache lacks before it goes on with a rollout; decode steps wait meanwhile.

    Attributes:
        reading: seconds for each token that it reads, or a function of the positions; the prompt's are below 0.
        ending: seconds for each rollout that ends. Decode steps wait meanwhile.
        kv_on_sync: whether the KV cache of other weights is recomputed or kept.
        prefilled: tokens read so far.
    """

    reading: float | ReadSeconds = 0.0
    ending: float = 0.0
    kv_on_sync: Literal["recompute", "keep"] = "recompute"
    prefilled: int = 0
    device: Device | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._adopted = self.version  # by every lane
        # the position up to which the KV cache of a rollout reaches, and the version that computed it
        self._cached: WeakKeyDictionary[FakeDecode, tuple[int, int]] = WeakKeyDictionary()

    def working(self) -> AbstractContextManager[Job]:
        return super().working() if self.device is None else self.device.job("decode")

    def _adopt(self, load: Load, lane: Lane) -> None:
        super()._adopt(load, lane)
        if not load.lanes:
            self._adopted = load.version
        for decode in self._live:
            if decode.lane is lane or not load.lanes:
                self._read(decode, load.version)

    def _go_on(self, decode: FakeDecode) -> None:
        if decode.lane is None:
            decode.settle_in(self._home())
        self._read(decode, self._adopted)
        super()._go_on(decode)

    def _read(self, decode: FakeDecode, version: int) -> None:
        lane, made = decode.lane, decode.made
        start, cached = self._cached.get(decode, (0, -1))
        if cached < 0 or (self.kv_on_sync == "recompute" and cached != version):
            start = -len(decode.prompt.tokens)
        elif lane is not None and decode in lane:
            start = max(start, made - 1)
        stop = max(made - 1, 0)
        self._cached[decode] = made, version
        if start < stop and lane is not None:
            self.prefilled += stop - start
            lane.pause(self.reading(start, stop) if callable(self.reading) else self.reading * (stop - start))

    def _remove(self, decode: FakeDecode) -> None:
        decoding = decode.lane is not None and decode in decode.lane
        super()._remove(decode)
        if decoding:
            reach, version = self._cached[decode]
            self._cached[decode] = max(reach, decode.paused - 1), version

    def _end(self, ended: list[FakeDecode]) -> None:
        for decode in ended:
            if self.ending and self._cut is not None and decode.lane is not None:
                decode.lane.pause(self.ending)
        super()._end(ended)


@dataclass(eq=False)
class DeviceScorer(FakeScorer[T]):
    device: Device | None = None

    async def _work(self, seconds: float) -> None:
        await spend(self.device, "score", seconds)


@dataclass(eq=False)
class DeviceTrainer(FakeTrainer):
    device: Device | None = None

    async def _work(self, seconds: float) -> None:
        await spend(self.device, "train", seconds)


async def spend(device: Device | None, kind: str, seconds: float) -> None:
    if device is None or not seconds:
        await anyio.sleep(seconds)
    else:
        await device.work(kind, seconds)
