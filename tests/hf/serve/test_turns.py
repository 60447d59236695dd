"""Turns on a real model: keys and values stay, others decode on, and exact decoding does not depend on time."""

from __future__ import annotations

from dataclasses import replace

import anyio
import numpy as np
import pytest

from oppo.errors import ProtocolError
from oppo.events import Response
from oppo.models import Weights
from oppo.turns import turn_so_far, turns_answered
from tests.dialogues import ANSWER, Dialogue, dialogue
from tests.hf import tiny
from tests.hf.stories import SAMPLING, Serving, Story, full_logprobs, prompts

MOST = replace(SAMPLING, max_new_tokens=90, stop=tuple(range(2, 14)))


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_tokens_after_an_answer_are_those_of_the_whole_sequence(
    serving: Serving, deterministic: bool
) -> None:
    model, asked = tiny.causal(), prompts(5)
    with serving(model, sampling=MOST, deterministic=deterministic) as policy:
        talk = await dialogue(policy, asked)
    assert sorted(rollout for told in talk.told for rollout in told) == [prompt.rollout for prompt in asked]
    for k, response in enumerate(talk.responses()):
        assert turns_answered(response) == 2
        assert response.tokens[~response.sampled].tolist() == [*ANSWER, *ANSWER]
        assert turn_so_far(response) == talk.heard[k][-1].tolist()
        assert talk.states()[k] in {"eos", "stop"}
        expected = full_logprobs(model, asked[k], response.tokens.tolist()).numpy()
        np.testing.assert_allclose(response.logprobs[response.sampled], expected[response.sampled], atol=1e-4)


async def test_only_the_answer_is_read_after_a_turn(serving: Serving) -> None:
    asked = prompts(5)
    with serving(sampling=MOST) as policy:
        await dialogue(policy, asked)
        read = sum(len(prompt.tokens) for prompt in asked) + 2 * len(asked) * (1 + len(ANSWER))
        assert policy.counters.prefilled == read, "prompts, and for each turn its last token and the answer"


async def test_the_others_decode_while_a_tool_works(serving: Serving) -> None:
    asked = prompts(4)
    with serving(sampling=MOST) as policy:
        reached, release = anyio.Event(), anyio.Event()
        first, *others = await policy.open_turns(asked)

        async def slow() -> None:
            assert await first.turn() is not None
            reached.set()
            await release.wait()
            assert first.finish()

        async def quick(number: int) -> None:
            while await others[number].turn() is not None:
                others[number].finish()

        story = Story([first, *others])
        async with policy.decoding(story.decodes, story.cut), anyio.create_task_group() as tasks:
            tasks.start_soon(slow)
            for k in range(len(others)):
                tasks.start_soon(quick, k)
            async with anyio.create_task_group() as readers:
                for k in range(len(others)):
                    readers.start_soon(story.read, k + 1, 5)
            await reached.wait()
            before = policy.counters.decode_steps
            await anyio.sleep(0.05)
            assert policy.counters.decode_steps == before, "where all wait, nothing is computed"
            release.set()
            await story.read(0, 5)
    assert all(state in {"eos", "stop"} for state in story.states())
    assert story.told[-1] == [0]


@pytest.mark.parametrize("cuts", [0, 2])
async def test_exact_decoding_does_not_depend_on_how_long_tools_take(serving: Serving, cuts: int) -> None:
    asked, model = prompts(5), tiny.causal()
    with serving(model, sampling=MOST, deterministic=True) as policy:
        quick = await dialogue(policy, asked, cuts=range(1, cuts + 1))
    with serving(model, sampling=MOST, deterministic=True) as policy:
        slow = await dialogue(policy, asked, lambda k, turn: 0.03 * ((k + turn) % 3), cuts=range(1, cuts + 1))
    assert quick.tokens() == slow.tokens()
    for one, other in zip(quick.responses(), slow.responses(), strict=True):
        assert one.logprobs.tolist() == other.logprobs.tolist()
    assert quick.told == slow.told


async def test_a_half_written_conversation_goes_on_with_the_same_tokens(serving: Serving) -> None:
    asked, model = prompts(4), tiny.causal()
    with serving(model, sampling=MOST) as policy:
        whole = await dialogue(policy, asked)
        halves = []
        for response, prompt in zip(whole.responses(), asked, strict=True):
            end = int(np.flatnonzero(~response.sampled)[len(ANSWER) - 1]) + 3  # a token or two after the first answer
            cut = [piece for piece in response.pieces() if piece.start < end]
            half = Response.of(prompt, cut[:2])
            halves.append(half.then(response.chunk(len(half), end)))
        rest = Dialogue(await policy.open_turns(halves), asked, turns=1)
        await rest.step(policy)
    for half, tokens, all_tokens in zip(halves, rest.tokens(), whole.tokens(), strict=True):
        assert [*half.tokens.tolist(), *tokens] == all_tokens


async def test_a_conversation_that_is_opened_at_the_end_of_a_turn_is_answered_there(serving: Serving) -> None:
    asked, model = prompts(4), tiny.causal()
    with serving(model, sampling=MOST) as policy:
        whole = await dialogue(policy, asked)
        halves = [Response.of(response.prompt, response.pieces()[:1]) for response in whole.responses()]
        rest = Dialogue(await policy.open_turns(halves), asked)
        await rest.step(policy)
    assert [each[0].tolist() for each in rest.heard] == [half.tokens.tolist() for half in halves]
    for half, tokens, all_tokens in zip(halves, rest.tokens(), whole.tokens(), strict=True):
        assert [*half.tokens.tolist(), *tokens] == all_tokens


async def test_an_answer_waits_for_the_next_decoding_if_the_step_was_cut(serving: Serving) -> None:
    asked = prompts(3)
    with serving(sampling=MOST) as policy:
        decodes = await policy.open_turns(asked)
        async with policy.decoding(decodes, lambda finished: False):
            tokens = await decodes[0].turn()
            assert tokens is not None
        assert await decodes[0].turn() is None
        assert not decodes[0].proceed(ANSWER), "nothing is decoded"
        await policy.load(Weights(1))
        async with policy.decoding(decodes, lambda finished: False):
            again = await decodes[0].turn()
            assert again is not None
            assert again.tolist() == tokens.tolist()
            piece = await decodes[0].read(100)
            assert (piece.tokens.tolist(), piece.state) == (tokens.tolist(), "live")
            assert decodes[0].proceed(ANSWER)
            piece = await decodes[0].read(100)
            assert piece.from_tool
            assert piece.tokens.tolist() == ANSWER.tolist()
            with pytest.raises(ProtocolError, match="expected a turn that has ended"):
                decodes[0].proceed(ANSWER)


async def test_a_rollout_may_be_closed_while_its_tool_works(serving: Serving) -> None:
    asked = prompts(2)
    with serving(sampling=MOST) as policy:
        decodes = await policy.open_turns(asked)
        async with policy.decoding(decodes, lambda finished: False):
            for decode in decodes:
                assert await decode.turn() is not None
            for decode in decodes:
                await decode.aclose()
        _, held = await policy.memory()
        assert held == 0


async def test_a_response_ends_at_its_limit_in_any_turn(serving: Serving) -> None:
    asked = prompts(5)
    with serving(sampling=replace(MOST, max_new_tokens=16)) as policy:
        talk = await dialogue(policy, asked)
    assert {"length"} <= set(talk.states())
    for response in talk.responses():
        assert len(response) <= 16
        assert response.sampled[-1]
