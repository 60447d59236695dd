"""Weights that come while a model decodes: adopted between decode steps, or after the last in deterministic mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest

from oppo.errors import ModelError
from oppo.events import Response
from oppo.hf.serve.policy import HfPolicy
from oppo.models import Weights
from tests.dialogues import ANSWER
from tests.hf import tiny
from tests.hf.stories import SAMPLING, Serving, Story, assert_close, full_logprobs, prompts

LONG = replace(SAMPLING, max_new_tokens=300, stop=())
"""Responses that end at their limit, so that decoding lasts."""

NEW = Weights(1, actor=tiny.causal(seed=1).state_dict())


async def decoded(policy: HfPolicy, story: Story, while_decoding: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Read a story, and do something once its first rollout has some tokens."""
    async with policy.decoding(story.decodes, story.cut), anyio.create_task_group() as readers:
        story.pieces[0].append(await story.decodes[0].read(5))
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


async def test_a_rollout_goes_on_as_one_that_was_opened_with_the_new_weights(serving: Serving) -> None:
    asked = prompts(4)
    with serving(tiny.causal(), sampling=LONG) as policy:
        story = Story(await policy.open(asked))
        await decoded(policy, story, lambda: policy.load(NEW))
    switches = [versions.index(1) for versions in story.versions()]
    halves = []
    for prompt, pieces, switch in zip(asked, story.pieces, switches, strict=True):
        whole = Response.empty(prompt)
        for piece in pieces:
            whole = whole.then(piece.event(prompt.rollout, len(whole)))
        halves.append(Response.empty(prompt).then(whole.chunk(0, switch)))
    with serving(tiny.causal(seed=1), sampling=LONG) as policy:
        rest = Story(await policy.open(halves))
        await rest.step(policy)
    for tokens, switch, expected in zip(story.tokens(), switches, rest.tokens(), strict=True):
        assert tokens[switch:] == expected


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
                assert (await decode.read(1_000)).from_tool
                last = await decode.read(1_000)
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
            story.pieces[0].append(await first.read(1))
            for version in range(1, 6):
                await policy.load(replace(NEW, version=version))
                while (piece := await first.read(1)).versions[-1] < version:
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
