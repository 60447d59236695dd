"""The devices on which the oracle of a simulated run works, and the actor that reads what its KV cache lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import anyio
import pytest

from oppo.events import Response
from oppo.models import Capabilities, Weights
from oppo.simulate.profile import Interference
from oppo.testing import fake_batch, fake_scalar, prompts, run_virtual
from oppo.testing.fake_policy import FakeDecode
from tests.kit.devices import Device, DevicePolicy, DeviceScorer, DeviceTrainer, spend
from tests.kit.responses import read_chunk
from tests.kit.virtual import virtually

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


def reading_policy(kv_on_sync: Literal["recompute", "keep"] = "recompute") -> DevicePolicy:
    loads = Capabilities(adds_while_decoding=True, loads_while_decoding="between decode steps")
    return DevicePolicy(lambda prompt: 8, 1.0, reading=0.25, kv_on_sync=kv_on_sync, capabilities=loads)


async def timed(policy: DevicePolicy, decodes: Sequence[FakeDecode], count: int) -> float:
    """Return the seconds in which the first rollout gains so many tokens, in a decoding that is then left."""
    start = anyio.current_time()
    async with policy.decoding(decodes, lambda ended: True):
        await decodes[0].read(count)
    return anyio.current_time() - start


@virtually
async def test_prompts_are_read_when_their_rollouts_join() -> None:
    policy = reading_policy()
    first, second = await policy.open(prompts(2, length=8))
    async with policy.decoding([first], lambda ended: True) as decoding:
        await first.read(1)
        assert anyio.current_time() == 8 * 0.25 + 1
        await first.read(1)
        assert anyio.current_time() == 8 * 0.25 + 2, "they are read once"
        await decoding.add([second])
        await second.read(1)
        assert anyio.current_time() == 2 * 8 * 0.25 + 4, "the step in progress ends first, without it"
    assert policy.prefilled == 16


@pytest.mark.parametrize(("kv_on_sync", "again"), [("recompute", 4 + 4 - 1), ("keep", 0)])
@virtually
async def test_deferred_rollouts_are_read_again_under_other_weights(
    kv_on_sync: Literal["recompute", "keep"], again: int
) -> None:
    policy = reading_policy(kv_on_sync)
    decodes = await policy.open(prompts(1, length=4))
    assert await timed(policy, decodes, 3) == 4 * 0.25 + 3
    assert await timed(policy, decodes, 1) == 1.0, "of the same weights there are keys and values"
    await policy.load(Weights(1))
    assert await timed(policy, decodes, 1) == again * 0.25 + 1


@virtually
async def test_live_rollouts_are_read_again_after_the_step_in_which_weights_come() -> None:
    policy = reading_policy()
    decodes = await policy.open(prompts(2, length=4))
    async with policy.decoding(decodes, lambda ended: True):
        await decodes[0].read(2)
        start = anyio.current_time()
        await anyio.sleep(0.5)
        await policy.load(Weights(1))
        assert anyio.current_time() == start + 1, "between two decode steps"
        piece = await read_chunk(decodes[0], 2)
        assert piece.versions.tolist() == [0, 1]
        assert anyio.current_time() == start + 1 + 2 * (4 + 3 - 1) * 0.25 + 1


def test_what_was_written_by_others_is_read_whole() -> None:
    async def main() -> None:
        (prompt,) = prompts(1, length=4)
        policy = reading_policy()
        whole = await policy.open([prompt])
        async with policy.decoding(whole, lambda ended: True):
            piece = await whole[0].read(5)
        spans: list[tuple[int, int]] = []

        def reading(start: int, stop: int) -> float:
            spans.append((start, stop))
            return 2.0

        other = DevicePolicy(lambda prompt: 8, 1.0, reading=reading)
        half = await other.open([Response.empty(prompt).then(piece)])
        assert await timed(other, half, 1) == 3.0
        assert spans == [(-4, 4)], "all but the last token, which the decode step reads"

    run_virtual(main)


@virtually
async def test_decode_steps_wait_for_each_rollout_that_ends() -> None:
    policy = DevicePolicy(lambda prompt: 2 if prompt.rollout == 0 else 4, 1.0, ending=3.0)
    decodes = await policy.open(prompts(2))
    async with policy.decoding(decodes, lambda ended: False):
        await decodes[0].read(2)
        assert anyio.current_time() == 2
        await decodes[1].read(3)
        assert anyio.current_time() == 2 + 3 + 1
