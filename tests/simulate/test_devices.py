"""The devices on which the oracle of a simulated run works: kinds of work slow each other down."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import pytest

from oppo.simulate.costs import Interference
from oppo.testing import fake_batch, fake_scalar, prompts, run_virtual
from tests.kit.devices import Device, DevicePolicy, DeviceScorer, DeviceTrainer, spend

Work = tuple[str, float, float]  # A kind, when it begins, and its seconds


def ends(works: list[Work], interference: Interference | None = None) -> list[float]:
    async def main() -> list[float]:
        device = Device() if interference is None else Device(interference)
        found = [0.0] * len(works)

        async def do(k: int) -> None:
            kind, begin, seconds = works[k]
            await anyio.sleep_until(begin)
            await spend(device, kind, seconds)
            found[k] = anyio.current_time()

        async with anyio.create_task_group() as tasks:
            for k in range(len(works)):
                tasks.start_soon(do, k)
        return found

    return run_virtual(main)


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([("decode", 0, 4)], [4]),
        ([("decode", 0, 4), ("decode", 1, 1)], [4, 2]),
        ([("decode", 0, 4), ("score", 1, 1)], [5, 3]),
        ([("decode", 0, 2), ("score", 0, 2), ("train", 0, 2)], [6, 6, 6]),
        ([("decode", 0, 3), ("score", 1, 1), ("score", 2, 1)], [4.5, 3, 4]),
    ],
)
def test_kinds_of_work_take_turns(works: list[Work], expected: list[float]) -> None:
    assert ends(works) == pytest.approx(expected)


def test_each_kind_is_slowed_down_by_as_much_as_another_does() -> None:
    share: Mapping[tuple[str, str], float] = {("decode", "score"): 0.25, ("score", "decode"): 1.0}
    assert ends([("decode", 0, 4), ("score", 0, 1)], lambda *kinds: share[kinds]) == pytest.approx([4.4, 2])


def test_without_interference_times_are_those_of_work_alone_to_the_last_bit() -> None:
    works = [("decode", 0.1, 0.7), ("score", 0.3, 0.1), ("train", 0.3, 1 / 3)]
    assert ends(works, lambda *_: 0.0) == [begin + seconds for _, begin, seconds in works]


def test_fakes_on_one_device_slow_each_other_down() -> None:
    async def main() -> tuple[float, float]:
        device = Device()
        policy = DevicePolicy(lambda prompt: 4, 1.0, device=device)
        scorer = DeviceScorer(fake_scalar, per_call=1.0, device=device)
        trainer = DeviceTrainer(2.0, device=device)
        (decode,) = await policy.open(prompts(1))
        async with policy.decoding([decode], lambda finished: True), anyio.create_task_group() as tasks:
            tasks.start_soon(scorer.extend, prompts(1))
            await decode.read(9)
        decoded = anyio.current_time()
        await trainer.update(fake_batch())
        return decoded, anyio.current_time()

    assert run_virtual(main) == pytest.approx((5, 7))


def test_what_is_cancelled_slows_nothing_down_any_more() -> None:
    async def main() -> float:
        device = Device()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(spend, device, "decode", 4.0)
            with anyio.move_on_after(2):
                await spend(device, "score", 9.0)
        return anyio.current_time()

    assert run_virtual(main) == pytest.approx(5)
