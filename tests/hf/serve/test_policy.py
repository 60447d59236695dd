"""What the policy makes, against plain full forwards, and what it refuses."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, Literal, NoReturn, cast

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.group import grpo
from oppo.errors import ModelError, ModelLost, ProtocolError
from oppo.events import Batch, Chunk, ChunkState, Prompt, Response, ToolTokens
from oppo.hf.serve.decoder import Decoder, DecodeRow, PolicyCore, Signals
from oppo.hf.serve.policy import HfDecode, HfPolicy
from oppo.hf.serve.sampling import draw
from oppo.hf.train.trainer import HfTrainer
from oppo.limits import UNLIMITED
from oppo.losses import ClippedLoss
from oppo.models import Policy, Sampling, Trained, Weights
from oppo.placement import Place, PolicyPool, Process, Thread
from oppo.rollout_buffer import DecodeStep, RolloutBuffer, SampledToken
from oppo.testing import FakeScorer, check_policy, fake_scalar
from oppo.training import TrainerSettings
from oppo.turns import SLACK, StopCriteria, turn_so_far
from tests.hf import tiny
from tests.hf.child import ONE
from tests.hf.stories import (
    SAMPLING,
    Serving,
    Story,
    full_logprobs,
    gumbel,
    prompts,
    reference,
    serving,
    told,
)
from tests.kit.dialogues import ANSWER, dialogue, turns_answered
from tests.kit.known import assert_close
from tests.kit.responses import read_chunk


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize(
    "sampling", [SAMPLING, Sampling(max_new_tokens=30, temperature=0.8, top_k=20, top_p=0.9, stop=(2, 3))]
)
async def test_sampled_tokens_are_those_of_full_forwards_with_the_same_noise(name: str, sampling: Sampling) -> None:
    model = tiny.causal(name)
    asked = prompts(5)
    with serving(model, sampling=sampling) as policy:
        story = await told(policy, asked)
    for prompt, tokens, logprobs in zip(asked, story.tokens(), story.logprobs(), strict=True):
        expected, expected_logprobs = reference(model, prompt, sampling)
        assert tokens == expected
        assert_close(logprobs, expected_logprobs)


async def test_greedy_tokens_are_those_of_generate() -> None:
    model = tiny.causal()
    asked = prompts(6)
    with serving(model, sampling=Sampling(max_new_tokens=25, temperature=0, stop=(2,))) as policy:
        story = await told(policy, asked)
    for prompt, tokens in zip(asked, story.tokens(), strict=True):
        ids = torch.tensor(prompt.tokens[None], dtype=torch.int64)
        generate = tiny.apart(cast("Callable[..., Tensor]", model.generate))
        out = generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=25, eos_token_id=2, pad_token_id=0
        )
        assert tokens == out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_policy_keeps_the_contract_of_its_seam(deterministic: bool, serving: Serving) -> None:
    with ExitStack() as stack:

        async def make() -> HfPolicy:
            return stack.enter_context(serving(deterministic=deterministic))

        await check_policy(make, prompts(6))


async def test_fifty_rollouts_of_all_lengths_end_with_a_reason_and_free_their_memory(serving: Serving) -> None:
    asked = prompts(50, longest=100)
    with serving() as policy:
        story = await told(policy, asked, limit=5)
        assert (await policy.memory())[1] == 0
        assert policy.counters.tokens == sum(map(len, story.tokens()))
        assert policy.counters.prefilled == sum(len(prompt.tokens) for prompt in asked)
        assert policy.counters.decode_steps == max(map(len, story.tokens()))
    for tokens, state in zip(story.tokens(), story.states(), strict=True):
        assert state == ("eos" if tokens[-1] == 2 else "stop" if tokens[-1] in SAMPLING.stop else "length")
        assert not set(tokens[:-1]) & set(SAMPLING.stop)
        assert state != "length" or len(tokens) == SAMPLING.max_new_tokens
    assert {"eos", "stop", "length"} == set(story.states())
    assert [sorted(step) for step in story.told] == story.told
    lengths = dict(zip(range(50), map(len, story.tokens()), strict=True))
    assert [rollout for step in story.told for rollout in step] == sorted(lengths, key=lambda r: (lengths[r], r))


async def test_exact_first_log_probs_do_not_depend_on_the_neighbours_to_the_last_bit() -> None:
    asked = prompts(8, longest=90)
    with serving(sampling=Sampling(max_new_tokens=1), deterministic=True) as policy:
        together = (await told(policy, asked)).logprobs()
        alone = [(await told(policy, [prompt])).logprobs()[0] for prompt in asked]
    assert together == alone


@pytest.mark.parametrize("keep", [False, True])
async def test_a_deferred_rollout_goes_on_with_the_weights_that_were_synced(keep: bool, serving: Serving) -> None:
    other, asked = tiny.causal(seed=1), prompts(8)
    with serving(tiny.causal(seed=0), keep=keep) as policy:
        story = Story(await policy.open(asked), cut_after=2)
        await story.step(policy)
        before = [len(tokens) for tokens in story.tokens()]
        await policy.load(Weights(1, actor=other.state_dict()))
        assert policy.version == 1
        assert ((await policy.memory())[1] > 0) == keep
        story.cut_after = 1_000_000
        await story.step(policy)
    resumed = [k for k, versions in enumerate(story.versions()) if 1 in versions]
    assert len(resumed) >= 3
    for k in resumed:
        tokens, versions = story.tokens()[k], story.versions()[k]
        assert versions == [0] * before[k] + [1] * (len(tokens) - before[k])
        if not keep:
            assert_close(story.logprobs()[k][before[k] :], full_logprobs(other, asked[k], tokens)[before[k] :])


async def test_logits_that_are_not_finite_are_an_error_that_names_the_rollouts(serving: Serving) -> None:
    model = tiny.causal()
    with torch.no_grad():
        next(model.get_input_embeddings().parameters())[90] = torch.nan
    asked = [Prompt(0, 0, np.array([7], np.int32)), Prompt(1, 1, np.array([90], np.int32))]
    with serving(model) as policy:
        decodes = await policy.open(asked)
        with pytest.raises(ModelError, match=r"not finite for rollouts \[1\]"):
            async with policy.decoding(decodes, lambda _: False):
                await decodes[1].read(1)


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ([], "is empty"),
        ([7] * tiny.LONGEST, f"has {tiny.LONGEST} tokens.*at most {tiny.LONGEST}"),
        ([7, tiny.VOCABULARY], f"token id {tiny.VOCABULARY}"),
        ([-1, 7], "token id -1"),
    ],
)
async def test_a_prompt_that_cannot_be_read_is_refused_by_name(tokens: list[int], complaint: str) -> None:
    with serving() as policy, pytest.raises(ModelError, match=f"rollout 3.*{complaint}"):
        await policy.open([Prompt(3, 3, np.array(tokens, np.int32))])


async def test_a_response_ends_where_the_model_ends() -> None:
    room = 9
    prompt = Prompt(0, 0, np.full(tiny.LONGEST - room, 7, np.int32))
    with serving(tiny.causal("gpt2"), sampling=Sampling(max_new_tokens=100)) as policy:
        story = await told(policy, [prompt, *prompts(2, first=1)])
    assert len(story.tokens()[0]) == room
    assert story.states() == ["length"] * 3


async def test_a_closed_thread_is_a_lost_model() -> None:
    with serving() as policy:
        decodes = await policy.open(prompts(2))
    with pytest.raises(ModelLost):
        async with policy.decoding(decodes, lambda _: False):
            await decodes[0].read(1)
    await decodes[1].aclose()


GREEDY = replace(SAMPLING, temperature=0.0, seed=99)


async def test_it_makes_the_tokens_of_a_policy_of_its_own(serving: Serving) -> None:
    asked = prompts(5, first=10**12)
    with serving(sampling=GREEDY) as own:
        expected = (await told(own, asked)).tokens()
    with serving() as policy:
        assert policy.capabilities.varies_sampling
        greedy = policy.with_sampling(GREEDY)
        assert (await told(greedy, asked)).tokens() == expected
        assert (await told(policy, asked)).tokens() != expected
        assert (await told(policy.with_sampling(replace(SAMPLING, seed=12)), asked)).tokens() != (
            await told(policy, asked)
        ).tokens()


async def carried(serving: Serving, *, between: bool, deterministic: bool, keep: bool) -> Story:
    """Decode up to a cut, then to the end; meanwhile another sampling answers other prompts."""
    model = tiny.causal()
    with serving(model, deterministic=deterministic, keep=keep) as policy:
        greedy = policy.with_sampling(GREEDY)
        story = Story(await policy.open(prompts(6)), cut_after=2)
        await story.step(policy)
        assert story.live
        if between:
            before = await policy.memory()
            await told(greedy, prompts(3, first=10**12))
            assert await policy.memory() == before
            assert (await greedy.memory())[0] == 0, "the memory of what has ended is free"
        story.cut_after = 1_000
        await story.step(policy)
        return story


@pytest.mark.parametrize(("deterministic", "keep"), [(True, False), (False, True), (False, False)])
async def test_deferred_rollouts_go_on_as_if_nothing_had_been(
    serving: Serving, deterministic: bool, keep: bool
) -> None:
    plain = await carried(serving, between=False, deterministic=deterministic, keep=keep)
    disturbed = await carried(serving, between=True, deterministic=deterministic, keep=keep)
    assert disturbed.tokens() == plain.tokens()
    assert disturbed.logprobs() == plain.logprobs()
    assert disturbed.told == plain.told


async def test_it_has_the_weights_that_are_synced(serving: Serving) -> None:
    other = tiny.causal(seed=1)
    with serving(other, sampling=GREEDY) as own:
        expected = (await told(own, prompts(4))).tokens()
    with serving() as policy:
        greedy = policy.with_sampling(GREEDY)
        await told(greedy, prompts(4))
        await policy.load(Weights(3, actor=dict(other.state_dict())))
        assert greedy.version == policy.version == 3
        story = await told(greedy, prompts(4))
        assert story.tokens() == expected
        assert {version for row in story.versions() for version in row} == {3}


DRAWN = Sampling(max_new_tokens=24, stop=(2, 3), seed=3)


class Checking(HfTrainer):
    """Compares, before each update, log-probs with those of the weights that it would train."""

    actor: PreTrainedModel
    checked: int = 0

    async def update(self, batch: Batch) -> Trained:
        assert (batch.versions == self.version).all()
        for response, row in zip(batch.responses, batch.rows(), strict=True):
            expected = full_logprobs(self.actor, response.prompt, response.tokens.tolist())
            assert_close(batch.logprobs[row].tolist(), expected)
            self.checked += 1
        return await super().update(batch)


def fail_once(patch: pytest.MonkeyPatch, thread: str, at: int) -> None:
    draw, steps = Decoder._draw, 0

    def failing(*arguments: object, **named: object) -> object:
        nonlocal steps
        steps += thread in threading.current_thread().name
        if steps == at:
            steps += 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return draw(*arguments, **named)  # type: ignore[arg-type]  # passed on

    patch.setattr(Decoder, "_draw", failing)


@pytest.mark.parametrize("how", ["raises", "killed"])
async def test_a_run_goes_on_when_an_engine_dies_while_it_decodes(
    how: Literal["raises", "killed"], monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    actor = tiny.causal(seed=1)
    with ExitStack() as stack:
        places: list[Place] = [
            stack.enter_context(Process("first", setup=ONE) if how == "killed" else Thread("first", setup=ONE)),
            stack.enter_context(Thread("second", setup=ONE)),
        ]
        training = stack.enter_context(Thread("training", setup=ONE))

        def member(place: Place) -> HfPolicy:
            return HfPolicy(copy.deepcopy(actor), sampling=DRAWN, place=place)

        async def start(index: int) -> Policy:
            return member(stack.enter_context(Thread("again", setup=ONE)))

        pool = PolicyPool([member(place) for place in places], start=start)
        trainer = Checking(
            actor, sampling=DRAWN, place=training, loss=ClippedLoss(), settings=TrainerSettings(learning_rate=1e-3)
        )
        trainer.actor = actor
        graph = grpo(
            policy=pool,
            reward=FakeScorer(fake_scalar),
            trainer=trainer,
            admission=Overcommit(batch=4, overcommit=0),
            samples=2,
            chunks=Fixed(5),
        )
        if how == "raises":
            fail_once(monkeypatch, "first", at=30)
        asked = [Prompt(n, n, np.arange(10 + n, 14 + n, dtype=np.int32)) for n in range(20)]
        async with graph.open(asked) as run:
            async for step in run.steps(4):
                if step.index == 1 and isinstance(places[0], Process):
                    os.kill(places[0].pid, signal.SIGKILL)
        assert (trainer.version, pool.version, trainer.checked) == (4, 4, 4 * 8)
    assert [message.startswith("member 0 (HfPolicy) of the pool is lost") for message in messages[:1]] == [True]
    assert any("has been started again" in message for message in messages)


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


@pytest.mark.parametrize("order", [*permutations(range(3))])
async def test_in_exact_decoding_turns_of_one_step_end_together_whichever_is_answered_first(
    serving: Serving, order: tuple[int, ...]
) -> None:
    told = list[list[int]]()

    def cut(ended: Sequence[int]) -> bool:
        told.append([*ended])
        return True

    sampling = Sampling(max_new_tokens=8, stop=tuple(range(tiny.VOCABULARY)))
    with serving(sampling=sampling, deterministic=True) as policy:
        decodes = await policy.open_turns(prompts(3))
        async with policy.decoding(decodes, cut):
            for decode in decodes:
                assert await decode.turn() is not None
            for number in order:
                assert decodes[number].finish()
                await anyio.sleep(0.02)
        states = [(await decode.read(9)).state for decode in decodes]
    assert (told, states) == ([[0, 1, 2]], ["stop"] * 3)


async def test_an_answer_that_comes_between_the_cut_and_its_news_waits_for_the_next_decoding(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be up to the machine whether the deferred response has it."""
    asked, sampling = prompts(3)[::2], Sampling(max_new_tokens=3)
    with serving(sampling=sampling, deterministic=True) as policy:
        decodes = await policy.open(asked)
        async with policy.decoding(decodes, lambda finished: False):
            pieces = [await decode.read(3) for decode in decodes]
    assert isinstance(pieces[0], Chunk)
    half = Response.of(asked[0], [pieces[0]]).chunk(0, 2)  # one token short of its cap
    stop, accepted = int(pieces[1].tokens[0]), list[bool]()
    assert stop != pieces[0].tokens[2]
    with serving(sampling=replace(sampling, stop=(stop,)), deterministic=True) as policy:
        first, second = await policy.open_turns([Response.of(asked[0], [half]), asked[1]])

        def put(sampled: SampledToken, state: ChunkState) -> None:
            RolloutBuffer.put(second, sampled, state)
            accepted.append(second.finish())

        with monkeypatch.context() as patched:
            patched.setattr(second, "put", put)
            async with policy.decoding([first, second], lambda finished: True):
                assert (await first.read(3)).state == "length"
                assert [(await second.read(3)).state for _ in range(2)] == ["live", "cut"]
        async with policy.decoding([second], lambda finished: True):
            assert (await second.turn()) is not None
            assert second.finish()
            assert (await second.read(3)).state == "eos"
    assert accepted == [False]


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


PIECES = ("", "a", "b", "ab", "ba", "abc", " ", "\n", "\n\n", "c")  # the text of each token


def text(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token % len(PIECES)] for token in tokens)


def ended(tokens: Sequence[int], *stops: str, young: int = 0) -> int | None:
    """Return after how many tokens a response ends with reason stop."""
    ending = StopCriteria(Sampling(stop_strings=stops, min_new_tokens=young), text)
    return next((n for n in range(1, len(tokens) + 1) if ending.reason(tokens[:n], 99) == "stop"), None)


@pytest.mark.parametrize(
    ("tokens", "stops", "young", "end"),
    [
        ([1, 2, 7, 1, 7, 7, 1], ("\n\n",), 0, 6),
        ([1, 8, 1], ("\n\n",), 0, 2),
        pytest.param([1, 2, 9, 1], ("abc",), 0, 3, id="a text may span tokens"),
        pytest.param([6, 5, 1], ("bc",), 0, 2, id="a token may hold more than the text"),
        ([1, 1, 1], ("b",), 0, None),
        ([1, 1, 2, 9], ("c", "b"), 0, 3),
        pytest.param([*([1] * 500), 2, 9, 1], ("abc",), 0, 502, id="however long the response is"),
        pytest.param([*([9] * 50), *([1, 2] * 40), 1], ("ab" * 40,), 0, 130, id="however long the text is"),
        ([9, 1, 1, 1, 9], ("c",), 0, 1),
        pytest.param([9, 1, 1, 1, 9], ("c",), 1, 5, id="what was complete too early ends nothing later"),
        ([9, 1, 1, 1, 9], ("c",), 4, 5),
        pytest.param([9, 0, 0], ("c",), 1, None, id="tokens without text complete nothing"),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_text(
    tokens: list[int], stops: tuple[str, ...], young: int, end: int | None
) -> None:
    assert ended(tokens, *stops, young=young) == end


def bytes_text(tokens: Sequence[int]) -> str:
    """Return the text of tokens that are one byte each, as a byte-level tokenizer gives it."""
    return bytes(tokens).decode("utf-8", errors="replace")


def byte_runs_text(tokens: Sequence[int]) -> str:
    """Return the same as a tokenizer with a fallback to bytes gives it: a run that is no text is a mark for each."""
    try:
        return bytes(tokens).decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(tokens)


@pytest.mark.parametrize("decode", [bytes_text, byte_runs_text])
@pytest.mark.parametrize("stop", ["\N{OCTAGONAL SIGN}", "so\N{OCTAGONAL SIGN}", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
@pytest.mark.parametrize("young", [0, 3])
def test_a_text_whose_last_character_takes_several_tokens_ends_a_response(
    decode: Callable[[Sequence[int]], str], stop: str, young: int
) -> None:
    ending = StopCriteria(Sampling(stop_strings=(stop,), min_new_tokens=young), decode)
    tokens = list(f"also{stop} and on".encode())
    found = next(n for n in range(1, len(tokens) + 1) if ending.reason(tokens[:n], 99) == "stop")
    assert bytes(tokens[:found]).decode() == f"also{stop}"


@pytest.mark.parametrize("decode", [bytes_text, byte_runs_text])
def test_a_character_that_is_incomplete_makes_no_earlier_text_a_new_one(decode: Callable[[Sequence[int]], str]) -> None:
    first, later = "\N{OCTAGONAL SIGN}", "\N{LATIN SMALL LETTER E WITH ACUTE}"
    ending = StopCriteria(Sampling(stop_strings=(first,), min_new_tokens=4), decode)
    tokens = list(f"{first}{later}{first}".encode())
    reasons = [ending.reason(tokens[:n], 99) for n in range(1, len(tokens) + 1)]
    assert reasons == [*[None] * (len(tokens) - 1), "stop"]


def test_only_the_last_tokens_are_decoded() -> None:
    seen: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return text(tokens)

    ending = StopCriteria(Sampling(stop_strings=("é\n",)), decode)
    for n in range(1, 100):
        ending.reason([1] * n, 999)
    assert max(seen) == SLACK + len("é\n".encode())


def test_stop_tokens_and_the_length_end_responses_too() -> None:
    ending = StopCriteria(Sampling(stop=(3, 4), stop_strings=("c",)), text)
    assert [ending.reason([1, last], 2) for last in (3, 4, 9, 1)] == ["eos", "stop", "stop", "length"]
    assert ending.reason([1], 2) is None


def test_stop_texts_need_a_way_to_read_tokens() -> None:
    with pytest.raises(ValueError, match="give the policy decode="):
        StopCriteria(Sampling(stop_strings=("x",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_new_tokens": 9, "max_new_tokens": 8}, r"must be at most max_new_tokens \(8\); got 9"),
        ({"min_new_tokens": -1}, "not -1"),
        ({"stop_strings": ("x", "")}, "at least one character"),
    ],
)
def test_impossible_endings_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)  # type: ignore[arg-type] # by keyword


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("top_k", [0, 3])
def test_rows_that_must_not_end_yet_draw_no_stop_token_and_others_are_unchanged(temperature: float, top_k: int) -> None:
    logits = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    logits[:, 4] += 4
    sampling = Sampling(temperature=temperature, top_k=top_k, stop=(4, 5, 99))
    places = torch.arange(64)
    noise = gumbel(0, places, places, places, 12)
    short = places % 2 == 0
    plain, plain_logprobs, _, _ = draw(logits, noise, sampling)
    drawn = draw(logits, noise, sampling, range(0, 64, 2))
    tokens, logprobs = drawn.tokens, drawn.logprobs
    assert not set(tokens[short].tolist()) & {4, 5}
    assert 4 in plain[short].tolist()
    assert torch.equal(tokens[~short], plain[~short])
    assert torch.equal(logprobs[~short], plain_logprobs[~short])
    assert not drawn.read_back()[2].empty
    if not (top_k and temperature):
        logits[short, 4:6] = -torch.inf
        expected = (logits / (temperature or 1)).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected)


async def test_responses_are_as_long_as_asked_and_their_log_probs_are_the_models() -> None:
    asked = prompts(8)
    model = tiny.causal()
    sampling = Sampling(max_new_tokens=32, min_new_tokens=12, stop=tuple(range(2, 40)), seed=11)
    with serving(model, sampling=sampling) as policy:
        story = await told(policy, asked)
        cut = Story(await policy.open(asked), cut_after=2)
        await cut.step(policy, limit=3)
        cut.cut_after = 1_000_000
        await cut.step(policy, limit=3)
    assert min(map(len, story.tokens())) == 13, "some response ends as soon as it may"
    assert {"eos", "stop"} & set(story.states())
    assert cut.tokens() == story.tokens()
    for prompt, tokens, logprobs, support in zip(
        asked, story.tokens(), story.logprobs(), story.supports(), strict=True
    ):
        assert support.counts.tolist() == [-38] * 12 + [0] * (len(tokens) - 12)
        np.testing.assert_allclose(logprobs, full_logprobs(model, prompt, tokens, support), atol=1e-5)


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
    core.load({}, 1)
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
