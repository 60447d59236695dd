"""What the simulated actor charges for reading: prompts, and whatever other weights must read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import anyio
import pytest

from oppo.events import Response
from oppo.models import Capabilities, Weights
from oppo.simulate.policy import FakeDecode
from oppo.testing import FakePolicy, prompts, run_virtual


def reading_policy(kv_on_sync: Literal["recompute", "keep"] = "recompute") -> FakePolicy:
    loads = Capabilities(adds_while_decoding=True, loads_while_decoding="between decode steps")
    return FakePolicy(lambda prompt: 8, 1.0, reading=0.25, kv_on_sync=kv_on_sync, capabilities=loads)


async def timed(policy: FakePolicy, decodes: Sequence[FakeDecode], count: int) -> float:
    """Return the seconds in which the first rollout gains so many tokens, in a decoding that is then left."""
    start = anyio.current_time()
    async with policy.decoding(decodes, lambda ended: True):
        await decodes[0].read(count)
    return anyio.current_time() - start


def test_prompts_are_read_when_their_rollouts_join() -> None:
    async def main() -> None:
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

    run_virtual(main)


@pytest.mark.parametrize(("kv_on_sync", "again"), [("recompute", 4 + 4 - 1), ("keep", 0)])
def test_deferred_rollouts_are_read_again_under_other_weights(
    kv_on_sync: Literal["recompute", "keep"], again: int
) -> None:
    async def main() -> None:
        policy = reading_policy(kv_on_sync)
        decodes = await policy.open(prompts(1, length=4))
        assert await timed(policy, decodes, 3) == 4 * 0.25 + 3
        assert await timed(policy, decodes, 1) == 1.0, "of the same weights there are keys and values"
        await policy.load(Weights(1))
        assert await timed(policy, decodes, 1) == again * 0.25 + 1

    run_virtual(main)


def test_live_rollouts_are_read_again_after_the_step_in_which_weights_come() -> None:
    async def main() -> None:
        policy = reading_policy()
        decodes = await policy.open(prompts(2, length=4))
        async with policy.decoding(decodes, lambda ended: True):
            await decodes[0].read(2)
            start = anyio.current_time()
            await anyio.sleep(0.5)
            await policy.load(Weights(1))
            assert anyio.current_time() == start + 1, "between two decode steps"
            piece = await decodes[0].read(2)
            assert piece.versions.tolist() == [0, 1]
            assert anyio.current_time() == start + 1 + 2 * (4 + 3 - 1) * 0.25 + 1

    run_virtual(main)


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

        other = FakePolicy(lambda prompt: 8, 1.0, reading=reading)
        half = await other.open([Response.empty(prompt).then(piece.chunk(prompt.rollout, 0))])
        assert await timed(other, half, 1) == 3.0
        assert spans == [(-4, 4)], "all but the last token, which the decode step reads"

    run_virtual(main)


def test_decode_steps_wait_for_each_rollout_that_ends() -> None:
    async def main() -> None:
        policy = FakePolicy(lambda prompt: 2 if prompt.rollout == 0 else 4, 1.0, ending=3.0)
        decodes = await policy.open(prompts(2))
        async with policy.decoding(decodes, lambda ended: False):
            await decodes[0].read(2)
            assert anyio.current_time() == 2
            await decodes[1].read(3)
            assert anyio.current_time() == 2 + 3 + 1

    run_virtual(main)
