"""A policy in a process of its own: its decode loop, its weights, and what happens when the child dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import anyio
import numpy as np
import pytest

from oppo.errors import ModelError, ModelLost, ProtocolError
from oppo.events import ToolTokens
from oppo.hf.serve.decoder import Decoder, DecodeRow, PolicyCore, Signals
from oppo.hf.serve.policy import HfDecode, HfPolicy
from oppo.limits import UNLIMITED
from oppo.models import Sampling, Weights
from oppo.placement import Process
from oppo.rollout_buffer import DecodeStep
from tests.hf import tiny
from tests.hf.child import ONE
from tests.hf.stories import SAMPLING, Serving, Story, full_logprobs, prompts, serving, told
from tests.kit.dialogues import ANSWER
from tests.kit.known import assert_close
from tests.kit.responses import read_chunk


async def test_a_decode_that_cannot_cross_is_refused_by_name(actor_process: Process) -> None:
    sampling = Sampling(stop_strings=("w7",))
    with pytest.raises(ModelError, match=r"cannot go to another process: .*<lambda>.*importable by name"):
        HfPolicy(tiny.causal(), sampling=sampling, place=actor_process, decode=lambda tokens: "")
    HfPolicy(tiny.causal(), sampling=Sampling(), place=actor_process, decode=lambda tokens: "")


async def test_a_place_that_repeats_calls_is_refused() -> None:
    with Process("actor", setup=ONE, restarts=2) as process, serving(place=process) as policy:
        decodes = await policy.open(prompts(2))
        with pytest.raises(ProtocolError, match=r"'decode' for 'actor' calls back.*expected restarts=0"):
            async with policy.decoding(decodes, lambda _: False):
                await decodes[0].read(1)


async def test_what_was_done_is_counted_while_the_child_decodes(actor_process: Process) -> None:
    counted: list[int] = []
    with serving(place=actor_process) as policy:

        def cut(finished: Sequence[int]) -> bool:
            counted.append(policy.counters.decode_steps)
            return False

        story = Story(await policy.open(prompts(6)))
        async with policy.decoding(story.decodes, cut):
            for k in range(6):
                await story.read(k, 50)
        assert policy.counters.tokens == sum(map(len, story.tokens()))
    assert counted == sorted({len(tokens) for tokens in story.tokens()})


async def test_the_trainers_own_weights_are_served_without_a_copy(actor_process: Process) -> None:
    model, other = tiny.causal(seed=0), tiny.causal(seed=1)
    asked = prompts(4)
    with serving(other) as policy:
        expected = await told(policy, asked)
    with serving(model, place=actor_process) as policy:
        model.load_state_dict(other.state_dict())  # in place, as an optimizer does
        versions = [parameter._version for parameter in model.parameters()]
        await policy.load(Weights(1, actor=model.state_dict()))
        assert versions == [parameter._version for parameter in model.parameters()]
        story = await told(policy, asked)
    assert story.tokens() == expected.tokens()
    assert {version for versions in story.versions() for version in versions} == {1}


def test_rows_read_their_tokens_again_before_their_memory_is_freed() -> None:
    """As in a decoding that begins between the load and the call that frees memory."""
    versions: list[int] = []
    core = PolicyCore(
        Decoder(tiny.causal(), sampling=SAMPLING, deterministic=False, prefill_tokens=100), recompute=True
    )
    (prompt,) = prompts(1)

    def run_one_step(*new: DecodeRow) -> None:
        signals = Signals.of(1)

        def stop(step: DecodeStep) -> None:
            versions.append(step.version)
            signals.stop()

        core.run(new, {0: ((), (UNLIMITED, 0))}, lambda _: False, signals, stop)

    run_one_step(DecodeRow(0, prompt, 9))
    core.load(Weights(1))
    run_one_step()
    assert versions == [0, 1]
    assert core.counters.prefilled == len(prompt.tokens) + len(prompt.tokens) + 1


async def lose_while_decoding(policy: HfPolicy, end: Callable[[], object], message: str) -> None:
    """End the process of a policy while it decodes, and check that every reader hears of it."""
    lost: list[BaseException] = []

    async def read(decode: HfDecode) -> None:
        try:
            while (await decode.read(5)).state == "live":
                pass
        except ModelLost as error:
            lost.append(error)

    decodes = await policy.open(prompts(3))

    async def decode_all() -> None:
        async with policy.decoding(decodes, lambda _: False), anyio.create_task_group() as readers:
            await decodes[0].read(3)
            end()
            for decode in decodes:
                readers.start_soon(read, decode)

    with pytest.raises(ModelLost, match=f"{message}.* while it did 'decode' for 'actor'") as raised:
        await decode_all()
    assert lost == [raised.value] * 3
    assert raised.value.__notes__ == ["while decoding rollouts [0, 1, 2]"]
    for decode in decodes:
        await decode.aclose()
    (late,) = await policy.open(prompts(1))
    with pytest.raises(ModelLost):
        async with policy.decoding([late], lambda _: False):
            await late.read(1)


async def test_a_child_killed_while_it_decodes_is_lost_for_every_reader() -> None:
    endless = Sampling(max_new_tokens=450, seed=3)
    with Process("actor", setup=ONE) as process, serving(sampling=endless, place=process) as policy:
        await lose_while_decoding(policy, partial(os.kill, process.pid, signal.SIGKILL), "killed by SIGKILL")


def unreadable(tokens: Sequence[int]) -> NoReturn:
    raise LookupError(f"no text for {len(tokens)} tokens")


async def test_an_error_in_the_childs_decode_loop_has_its_traceback(actor_process: Process) -> None:
    sampling = Sampling(max_new_tokens=60, stop_strings=("w7",))
    policy = HfPolicy(tiny.causal(), sampling=sampling, place=actor_process, decode=unreadable)
    decodes = await policy.open(prompts(3))
    with pytest.raises(LookupError, match="no text for 1 tokens") as raised:
        async with policy.decoding(decodes, lambda _: False):
            await decodes[0].read(5)
    trace, rollouts = raised.value.__notes__
    assert trace.startswith("in the process of 'actor':\nTraceback")
    assert rollouts == "while decoding rollouts [0, 1, 2]"
    assert (await policy.memory())[1] == 0


LONG = replace(SAMPLING, max_new_tokens=300, stop=())  # responses that end at their limit, so that decoding lasts
NEW = Weights(1, actor=tiny.causal(seed=1).state_dict())


async def decoded(policy: HfPolicy, story: Story, while_decoding: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Read a story, and do something once its first rollout has some tokens."""
    async with policy.decoding(story.decodes, story.cut), anyio.create_task_group() as readers:
        story.pieces[0].append(await read_chunk(story.decodes[0], 5))
        readers.start_soon(while_decoding)
        for k in range(len(story.decodes)):
            readers.start_soon(story.read, k, 7)


@pytest.mark.parametrize("keep", [False, True])
async def test_live_rollouts_go_on_with_the_new_weights(keep: bool, serving: Serving) -> None:
    asked, new = prompts(5), tiny.causal(seed=1)
    with serving(tiny.causal(), sampling=LONG, keep=keep) as policy:
        story = Story(await policy.open(asked))
        live: list[bool] = []

        async def load() -> None:
            await policy.load(NEW)
            live.extend(decode.live for decode in story.decodes)

        await decoded(policy, story, load)
        read = policy.counters.prefilled
        assert policy.version == 1
    assert live == [True] * 5, "nothing was waited for"
    for prompt, tokens, logprobs, versions in zip(
        asked, story.tokens(), story.logprobs(), story.versions(), strict=True
    ):
        switch = versions.index(1)
        assert 5 <= switch < LONG.max_new_tokens
        assert versions == [0] * switch + [1] * (len(tokens) - switch)
        assert_close(logprobs[:switch], full_logprobs(tiny.causal(), prompt, tokens)[:switch])
        fresh = full_logprobs(new, prompt, tokens)[switch:]
        if keep:
            assert not np.allclose(logprobs[switch:], fresh, atol=1e-3), "its keys and values are of both versions"
        else:
            assert_close(logprobs[switch:], fresh)
    once = sum(len(prompt.tokens) for prompt in asked)
    assert (read == once) is keep, "the new weights read everything again, or nothing"


async def test_in_exact_mode_weights_wait_for_the_end_of_decoding(serving: Serving) -> None:
    asked = prompts(3)
    with serving(tiny.causal(), sampling=LONG, deterministic=True) as policy:
        story = Story(await policy.open(asked))
        await decoded(policy, story, lambda: policy.load(NEW))
        assert policy.version == 1
    assert {version for versions in story.versions() for version in versions} == {0}
    assert story.states() == ["length"] * 3


@pytest.mark.parametrize("deterministic", [False, True])
async def test_weights_that_come_while_every_rollout_waits_for_its_tool(deterministic: bool, serving: Serving) -> None:
    """The place is free then, but decoding has not ended."""
    turns = replace(SAMPLING, max_new_tokens=90, stop=tuple(range(2, 14)))
    with serving(tiny.causal(), sampling=turns, deterministic=deterministic) as policy:
        decodes = await policy.open_turns(prompts(1 if deterministic else 3))
        async with policy.decoding(decodes, lambda finished: False), anyio.create_task_group() as tasks:
            for decode in decodes:
                assert await decode.turn() is not None
            loading = anyio.Event()

            async def load() -> None:
                await policy.load(NEW)
                loading.set()

            tasks.start_soon(load)
            if deterministic:
                await anyio.sleep(0.05)
                assert policy.version == 0
            else:
                await loading.wait()
                assert policy.version == 1
            for decode in decodes:
                assert decode.proceed(ANSWER)
                assert await decode.turn() is not None
                decode.finish()
            for decode in decodes:
                await decode.read(1_000)
                assert isinstance(await decode.read(1_000), ToolTokens)
                last = await read_chunk(decode, 1_000)
                assert set(last.versions.tolist()) == {0 if deterministic else 1}
        assert policy.version == 1


async def test_weights_that_do_not_fit_leave_the_others_decoding(serving: Serving) -> None:
    asked = prompts(3)
    with serving(tiny.causal(), sampling=LONG) as policy:
        story = Story(await policy.open(asked))

        async def load() -> None:
            with pytest.raises(ModelError, match="missing"):
                await policy.load(Weights(1, actor={"one": np.zeros(1)}))

        await decoded(policy, story, load)
        assert policy.version == 0
    for prompt, tokens, logprobs in zip(asked, story.tokens(), story.logprobs(), strict=True):
        assert len(tokens) == LONG.max_new_tokens
        assert_close(logprobs, full_logprobs(tiny.causal(), prompt, tokens))


async def test_many_weights_may_come_in_one_decoding(serving: Serving) -> None:
    with serving(tiny.causal(), sampling=LONG) as policy:
        story = Story(await policy.open(prompts(4)))
        first, others = story.decodes[0], range(1, 4)
        async with policy.decoding(story.decodes, story.cut), anyio.create_task_group() as readers:
            for k in others:
                readers.start_soon(story.read, k, 7)
            story.pieces[0].append(await read_chunk(first, 1))
            for version in range(1, 6):
                await policy.load(replace(NEW, version=version))
                while (piece := await read_chunk(first, 1)).versions[-1] < version:
                    story.pieces[0].append(piece)
                story.pieces[0].append(piece)
            await story.read(0, 7)
        assert policy.version == 5
    for versions in story.versions():
        assert versions == sorted(versions)
    assert sorted(set(story.versions()[0])) == list(range(6))


async def test_weights_may_come_when_the_step_has_just_been_cut(serving: Serving) -> None:
    loop, was_cut = asyncio.get_running_loop(), anyio.Event()
    with serving(tiny.causal(), sampling=SAMPLING) as policy:
        story = Story(await policy.open(prompts(6)), cut_after=1)

        def cut(finished: Sequence[int]) -> bool:
            loop.call_soon_threadsafe(was_cut.set)
            return story.cut(finished)

        async with policy.decoding(story.decodes, cut), anyio.create_task_group() as tasks:
            await was_cut.wait()
            tasks.start_soon(policy.load, NEW)
            for k in range(6):
                tasks.start_soon(story.read, k, 7)
        assert policy.version == 1
        story.cut_after = 1_000
        await story.step(policy)
    assert all(state != "cut" for state in story.states())
    assert {versions[-1] for versions in story.versions()} == {0, 1}
