"""Decoding that is cut, left, cancelled, closed or that fails: in a thread and in a process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest

from oppo.errors import ProtocolError
from oppo.hf.serve.policy import HfDecode, HfPolicy
from oppo.models import Sampling, Weights
from tests.hf.stories import Serving, Story, assert_close, prompts, told


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_deferred_rollout_goes_on_as_if_it_had_never_been_cut(serving: Serving, deterministic: bool) -> None:
    asked = prompts(10)
    with serving(deterministic=deterministic) as policy:
        whole = await told(policy, asked)
        story = Story(await policy.open(asked), cut_after=3)
        read_at_first = policy.counters.prefilled
        await story.step(policy)
        deferred = [k for k, state in enumerate(story.states()) if state == "cut"]
        finished = sum(map(len, story.told))
        assert 3 <= finished == len(asked) - len(deferred) < len(asked)
        cut_at = {len(tokens) for tokens in (story.tokens()[k] for k in deferred)}
        assert len(cut_at) == 1, "all deferred rows have made as many decode steps"
        first_prefill = policy.counters.prefilled
        story.cut_after = 7
        await story.step(policy)
        story.cut_after = 1_000_000
        await story.step(policy)
        assert policy.counters.prefilled == first_prefill == 2 * read_at_first, "nothing was read twice"
    assert story.tokens() == whole.tokens()
    assert_close([x for row in story.logprobs() for x in row], [x for row in whole.logprobs() for x in row])
    assert story.states() == whole.states()
    assert story.told == whole.told


async def test_rollouts_may_join_the_deferred_ones(serving: Serving) -> None:
    asked = prompts(9)
    with serving() as policy:
        whole = (await told(policy, asked)).tokens()
        story = Story(await policy.open(asked[:5]), cut_after=2)
        await story.step(policy)
        late = await policy.open(asked[5:])
        story.decodes, story.cut_after = [*story.decodes, *late], 1_000_000
        story.pieces += [[] for _ in late]
        await story.step(policy)
    assert story.tokens() == whole


@pytest.mark.parametrize("deterministic", [False, True])
async def test_runs_agree_bit_for_bit_however_they_are_read(serving: Serving, deterministic: bool) -> None:
    asked = prompts(8, longest=90)
    stories = []
    for limit in (1, 3, 1000):
        with serving(deterministic=deterministic) as policy:
            story = Story(await policy.open(asked), cut_after=4)
            await story.step(policy, limit)
            story.cut_after = 1_000_000
            await story.step(policy, limit)
            stories.append(story)
    assert stories[0].tokens() == stories[1].tokens() == stories[2].tokens()
    assert stories[0].logprobs() == stories[1].logprobs() == stories[2].logprobs()


async def test_a_cancelled_read_has_taken_nothing(serving: Serving) -> None:
    asked = prompts(6)
    with serving() as policy:
        whole = await told(policy, asked)
        story = Story(await policy.open(asked))
        async with policy.decoding(story.decodes, story.cut):
            for k in range(len(asked)):
                while not story.pieces[k] or story.pieces[k][-1].state == "live":
                    with anyio.CancelScope() as scope:
                        asyncio.get_running_loop().call_later(0.001, scope.cancel)
                        story.pieces[k].append(await story.decodes[k].read(9))
    assert story.tokens() == whole.tokens()


async def test_leaving_early_parks_the_rollouts_and_their_tokens_wait(serving: Serving) -> None:
    asked = prompts(6)

    async def leave_early(policy: HfPolicy, story: Story) -> None:
        async with policy.decoding(story.decodes, story.cut):
            story.pieces[0].append(await story.decodes[0].read(1))
            raise ZeroDivisionError

    with serving() as policy:
        whole = await told(policy, asked)
        story = Story(await policy.open(asked))
        with pytest.raises(ZeroDivisionError):
            await leave_early(policy, story)
        for k in range(len(asked)):
            await story.read(k, 1_000)
        assert "cut" in story.states()
        await story.step(policy)
    assert story.tokens() == whole.tokens()


async def test_a_body_that_is_cancelled_leaves_the_thread_free(serving: Serving) -> None:
    with serving(sampling=Sampling(max_new_tokens=120)) as policy:
        decodes = await policy.open(prompts(3))
        with anyio.CancelScope() as scope:
            async with policy.decoding(decodes, lambda _: False):
                await decodes[0].read(3)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        steps = policy.counters.decode_steps
        await policy.load(Weights(1))
        assert policy.counters.decode_steps == steps
        async with policy.decoding(decodes, lambda _: False):
            piece = await decodes[0].read(120)
        assert (len(piece.tokens), piece.state) == (117, "length")


async def test_a_task_that_is_cancelled_while_it_decodes_leaves_the_policy_usable(serving: Serving) -> None:
    """As Ctrl-C does: it cancels a task, not a scope."""
    with serving(sampling=Sampling(max_new_tokens=120)) as policy:
        decodes = await policy.open(prompts(3))
        begun = anyio.Event()

        async def decode_for_ever() -> None:
            async with policy.decoding(decodes, lambda _: False):
                await decodes[0].read(3)
                begun.set()
                await anyio.sleep_forever()

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(decode_for_ever())
            await begun.wait()
            task.cancel()
        assert task.cancelled()
        steps = policy.counters.decode_steps
        await policy.load(Weights(1))
        assert policy.counters.decode_steps == steps
        async with policy.decoding(decodes, lambda _: False):
            assert (await decodes[0].read(120)).state == "length"


async def test_an_error_of_the_body_is_told_with_the_error_of_the_decode_loop(serving: Serving) -> None:
    def failing(finished: Sequence[int]) -> bool:
        raise LookupError(f"no place for {finished}")

    async def fail_too(policy: HfPolicy, decode: HfDecode) -> None:
        async with policy.decoding([decode], failing):
            with suppress(LookupError):
                while True:
                    await decode.read(5)
            raise KeyError("the channel is gone")

    with serving() as policy:
        (decode,) = await policy.open(prompts(1))
        with pytest.raises(LookupError, match="no place") as caught:
            await fail_too(policy, decode)
        assert caught.value.__notes__ == ["while decoding rollouts [0]", "and then KeyError: 'the channel is gone'"]


async def test_an_error_of_the_decode_loop_reaches_every_reader_and_the_context(serving: Serving) -> None:
    asked = prompts(3)
    caught: list[BaseException] = []

    def failing(finished: Sequence[int]) -> bool:
        raise LookupError(f"no place for {finished}")

    async def read(decode: HfDecode) -> None:
        try:
            while (await decode.read(5)).state == "live":
                pass
        except LookupError as error:
            caught.append(error)

    async def decode_all(policy: HfPolicy, decodes: Sequence[HfDecode]) -> None:
        async with policy.decoding(decodes, failing), anyio.create_task_group() as readers:
            for decode in decodes:
                readers.start_soon(read, decode)

    with serving() as policy:
        decodes = await policy.open(asked)
        with pytest.raises(LookupError, match="no place") as raised:
            await decode_all(policy, decodes)
        assert caught == [raised.value] * 3
        assert "while decoding rollouts [0, 1, 2]" in raised.value.__notes__
        assert (await policy.memory())[1] == 0
        with pytest.raises(ProtocolError, match="failed"):
            async with policy.decoding(decodes, failing):
                pass
        assert (await told(policy, asked)).states(), "the policy itself goes on"


async def test_closing_frees_the_memory_of_deferred_and_of_live_rollouts(serving: Serving) -> None:
    asked = prompts(6)
    with serving(sampling=Sampling(max_new_tokens=300, seed=3)) as policy:
        decodes = await policy.open(asked)
        async with policy.decoding(decodes, lambda _: False):
            await decodes[0].read(3)
            await decodes[1].aclose()
            await decodes[1].aclose()
            with pytest.raises(ProtocolError, match="closed"):
                await decodes[1].read(1)
            await decodes[0].read(20)
        deferred = (await policy.memory())[1]
        assert deferred > 0
        await decodes[0].aclose()
        assert 0 < (await policy.memory())[1] < deferred
        with pytest.raises(ProtocolError, match="closed"):
            async with policy.decoding(decodes, lambda _: False):
                pass
        for decode in decodes:
            await decode.aclose()
        assert (await policy.memory())[1] == 0


async def test_a_rollout_closed_after_the_cut_is_freed_with_the_context(serving: Serving) -> None:
    asked = prompts(3)
    with serving() as policy:
        decodes = await policy.open(asked)
        async with policy.decoding(decodes, lambda _: True):
            while any(decode.live for decode in decodes):
                await anyio.lowlevel.checkpoint()
            for decode in decodes:
                await decode.aclose()
        assert (await policy.memory())[1] == 0


async def test_one_reader_one_context_and_decodes_of_this_policy(serving: Serving) -> None:
    asked = prompts(2)
    with serving() as policy, serving() as other:
        decodes = await policy.open(asked)
        with pytest.raises(ProtocolError, match="foreign"):
            async with other.decoding(decodes, lambda _: False):
                pass
        assert (await decodes[0].read(4)).state == "cut", "outside of decoding a read does not wait"
        with pytest.raises(ValueError, match="at least 1 token"):
            await decodes[0].read(0)
        async with policy.decoding(decodes, lambda _: False):
            with pytest.raises(ProtocolError, match="decoding already"):
                async with policy.decoding(decodes, lambda _: False):
                    pass
        async with policy.decoding([], lambda _: False):
            pass


async def test_two_reads_at_once_are_refused(serving: Serving) -> None:
    with serving(sampling=Sampling(max_new_tokens=200)) as policy:
        (decode,) = await policy.open(prompts(1))
        async with policy.decoding([decode], lambda _: False), anyio.create_task_group() as readers:
            readers.start_soon(decode.read, 200)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            with pytest.raises(ProtocolError, match="one reader"):
                await decode.read(1)


async def test_reading_beyond_the_end_is_refused(serving: Serving) -> None:
    with serving() as policy:
        story = await told(policy, prompts(1))
        with pytest.raises(ProtocolError, match="last piece of rollout 0"):
            await story.decodes[0].read(1)
