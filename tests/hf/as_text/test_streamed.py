"""A reward model with another tokenizer, streamed as text: its score is that of its own call on the whole text."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.errors import ModelError, ProtocolError, SessionsLost
from oppo.events import Drop, Finish, Prompt, Response
from oppo.hf.as_text.rendering import EMPTY, Form, OverLong, Rendering, prompt_text
from oppo.hf.as_text.streamed import REREAD, TAIL_TOKENS, Bridge, BridgedReward
from oppo.hf.devices import use_cores
from oppo.hf.probe import probe
from oppo.hf.tokenizer import HfTokenizer
from oppo.placement import Place, Process, Thread
from oppo.report.metrics import metric
from oppo.stages import GAE
from oppo.testing import FakePolicy, FakeTrainer, check_scorer, prompts
from tests.hf import tiny
from tests.hf.spot_tokenizers import CORPUS, TEMPLATE, TRIMMING, spot
from tests.responses import chunk, stream

ONE = partial(use_cores, 1)
WORDS = " ".join(CORPUS[:6]).split(" ")


@pytest.fixture(scope="module")
def thread() -> Iterator[Thread]:
    with Thread("scorers", setup=ONE) as thread:
        yield thread


def model_of(name: str = "llama", *, pad: int | None = 0) -> PreTrainedModel:
    """Return a reward model whose vocabulary has room for any tokenizer made on the spot."""
    config = tiny.CONFIGS[name]()
    config.num_labels, config.vocab_size, config.pad_token_id = 1, 420, pad
    return tiny.scalar_of(config)


def rollouts(policy: HfTokenizer, count: int = 5, seed: int = 0) -> list[Response]:
    dice = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [{"role": "user", "content": " ".join(dice.choices(WORDS, k=4))}]
        opening = Prompt(number, number, np.array(policy.encode("say"), np.int32), columns={"prompt": prompt})
        tokens = policy.encode_exactly(" ".join(dice.choices([*WORDS, "\n", "  "], k=dice.randint(1, 25))))
        made.append(Response.empty(opening).then(chunk(number, 0, np.array(tokens or [7], np.int32))))
    return made


@tiny.apart
@torch.no_grad()
def library_score(model: PreTrainedModel, bridge: Bridge, response: Response) -> float:
    prompt = prompt_text(response.prompt, "prompt", bridge.policy.decode)
    rendered = Rendering(bridge.form, bridge.reader).whole(prompt, bridge.policy.decode(response.tokens.tolist()))
    ids = bridge.reader.inner(rendered.text, add_special_tokens=rendered.special, return_tensors="pt")["input_ids"]
    return float(model.eval()(ids).logits[0, 0])


def close(a: object, b: object) -> bool:
    return bool(np.allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("policy", "reader", "name"),
    [
        ("byte-level", spot("sentence-piece"), "llama"),
        ("sentence-piece", spot("byte-level", TEMPLATE), "gpt2"),
        ("unigram", spot("byte-level", TRIMMING), "qwen2-sliding"),
        ("byte-level", spot("byte-level", TEMPLATE), "neox"),
        ("byte-level", spot("unigram"), "llama"),
        ("unigram", spot("word-piece"), "gpt2"),
    ],
    ids=lambda given: given if isinstance(given, str) else "chat" if given.has_chat_template else "joined",
)
async def test_a_score_streamed_as_text_is_that_of_the_librarys_own_call_on_the_whole_text(
    policy: str, reader: HfTokenizer, name: str, deterministic: bool, thread: Thread
) -> None:
    bridge = Bridge(spot(policy), reader, "chat" if reader.has_chat_template else "joined")
    model, made = model_of(name), rollouts(spot(policy))
    scorer = BridgedReward(model, bridge, place=thread, deterministic=deterministic)
    for seed in (1, 2):
        values = await stream(scorer, made, seed)
        for response in made:
            assert close(values[response.prompt.rollout], library_score(model, bridge, response))
    assert sorted(scorer.capabilities.samples()) == [REREAD, TAIL_TOKENS]
    assert scorer.capabilities.samples() == {}


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_model_that_reads_whole_responses_reads_them_as_text_too(deterministic: bool, thread: Thread) -> None:
    config = tiny.ONLY_WHOLE["jamba"]()
    config.vocab_size, config.num_labels = 512, 1
    model, bridge = tiny.scalar_of(config, seed=3), Bridge(spot("byte-level"), spot("sentence-piece"))
    assert tiny.apart(probe)(model) == "whole"
    made = rollouts(spot("byte-level"))
    values = await stream(BridgedReward(model, bridge, place=thread, deterministic=deterministic), made, 1)
    for response in made:
        assert close(values[response.prompt.rollout], library_score(model, bridge, response))


@pytest.mark.parametrize("pad", [0, 2, None], ids=["padding", "end", "none"])
async def test_an_end_of_sequence_that_is_padding_is_not_scored(pad: int | None, thread: Thread) -> None:
    policy, reader = spot("byte-level"), spot("unigram")
    bridge, model = Bridge(policy, reader), model_of(pad=pad)
    assert reader.around[1] == [2], "it ends every text with the token of id 2"
    made = rollouts(policy)
    values = await stream(BridgedReward(model, bridge, place=thread), made, seed=3)
    for response in made:
        assert close(values[response.prompt.rollout], library_score(model, bridge, response))


async def test_exact_scores_are_equal_to_the_bit_for_any_arrival_pattern_and_in_a_process(thread: Thread) -> None:
    bridge = Bridge(spot("unigram"), spot("byte-level", TRIMMING), "chat")
    made = rollouts(spot("unigram"), 4)

    async def seen(place: Place, seed: int) -> list[object]:
        values = await stream(BridgedReward(model_of(), bridge, place=place, deterministic=True), made, seed)
        return [values[response.prompt.rollout] for response in made]

    first = await seen(thread, 0)
    assert all([await seen(thread, seed) == first for seed in range(1, 8)])
    with Process("scorers", setup=ONE) as process:
        assert await seen(process, 9) == first


@pytest.mark.parametrize("deterministic", [False, True])
async def test_it_keeps_the_contract_of_a_scorer(deterministic: bool, thread: Thread) -> None:
    policy = spot("byte-level")
    finished = [Finish(each.prompt.rollout, each, "eos") for each in rollouts(policy, 4, seed=4) if len(each) >= 4]

    async def make() -> BridgedReward:
        bridge = Bridge(policy, spot("sentence-piece"))
        return BridgedReward(model_of(), bridge, place=thread, deterministic=deterministic)

    assert len(finished) >= 2
    await check_scorer(make, finished, close)


async def test_events_out_of_place_are_errors(thread: Thread) -> None:
    policy = spot("byte-level")
    scorer = BridgedReward(model_of(), Bridge(policy, spot("unigram")), place=thread)
    (response,) = rollouts(policy, 1)
    with pytest.raises(ProtocolError, match="rollout 0 is unknown to LlamaFor"):
        await scorer.extend([response.chunk()])
    await scorer.extend([response.prompt, response.chunk(0, 1)])
    with pytest.raises(ProtocolError, match="a second time"):
        await scorer.extend([response.prompt])
    with pytest.raises(ProtocolError, match=r"rollout 0 finished with \d+ tokens, .* was given"):
        await scorer.finish([Finish(0, response, "eos")])
    await scorer.forget([0, 99])
    with pytest.raises(ProtocolError, match="unknown"):
        await scorer.finish([Finish(0, response, "eos")])


@pytest.mark.parametrize("over_long", ["error", "drop", "truncate"])
async def test_a_rollout_that_is_longer_as_text_than_the_model_reads_ends_as_chosen(
    over_long: OverLong, thread: Thread
) -> None:
    policy = spot("byte-level")
    config = tiny.CONFIGS["gpt2"]()
    config.num_labels, config.vocab_size, config.n_positions = 1, 420, 64
    model = tiny.scalar_of(config)
    bridge = Bridge(policy, spot("word-piece"), over_long=over_long)
    long, short = (
        Response.empty(Prompt(n, n, np.array([9], np.int32), columns={"prompt": "so"})).then(
            chunk(n, 0, np.array(policy.encode_exactly(text), np.int32))
        )
        for n, text in enumerate([" ".join(WORDS * 2), "the dog"])
    )
    scorer, finished = BridgedReward(model, bridge, place=thread), [Finish(0, long, "eos"), Finish(1, short, "eos")]
    await scorer.extend([long.prompt, short.prompt, long.chunk(), short.chunk()])
    if over_long == "error":
        with pytest.raises(
            ModelError, match=r"rollout 0 has \d+ tokens as text, more than the 64 .*rewards\.N\.over_long"
        ):
            await scorer.finish(finished)
        return
    first, second = await scorer.finish(finished)
    assert close(second, library_score(model, bridge, short))
    if over_long == "drop":
        assert isinstance(first, Drop)
        assert "more than the 64" in first.reason
    else:
        assert isinstance(first, float)


async def test_a_rollout_without_text_is_dropped(thread: Thread) -> None:
    policy = spot("byte-level")
    scorer = BridgedReward(model_of(), Bridge(policy, spot("byte-level"), "response"), place=thread)
    silent = Response.empty(Prompt(0, 0, np.array([9], np.int32))).then(chunk(0, 0, np.array([2], np.int32)))
    await scorer.extend([silent.prompt, silent.chunk()])
    (value,) = await scorer.finish([Finish(0, silent, "eos")])
    assert value == Drop(0, EMPTY)


async def test_a_process_that_replaces_a_dead_one_reads_rollouts_with_their_messages() -> None:
    policy, bridge = spot("byte-level"), Bridge(spot("byte-level"), spot("sentence-piece", TEMPLATE), "chat")
    model, made = model_of(), rollouts(policy, 3)
    with Process("scorers", setup=ONE, restarts=1) as process:
        scorer = BridgedReward(model, bridge, place=process)
        for response in made:
            await scorer.extend([response.prompt, response.chunk(0, 2)])
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SessionsLost):
            await scorer.extend([made[0].chunk(2)])
        for response in made:
            await scorer.extend([response.prompt, response.chunk()])
        values = await scorer.finish([Finish(each.prompt.rollout, each, "eos") for each in made])
    for response, value in zip(made, values, strict=True):
        assert close(value, library_score(model, bridge, response))


@pytest.mark.parametrize("form", ["joined", "response"])
async def test_most_of_a_rollout_is_read_before_it_ends(form: Form, thread: Thread) -> None:
    policy = spot("byte-level")
    scorer = BridgedReward(model_of(), Bridge(policy, spot("sentence-piece"), form), place=thread)
    text = " ".join(CORPUS[:2])
    made = [
        Response.empty(Prompt(n, n, np.array([9], np.int32), columns={"prompt": "so "})).then(
            chunk(n, 0, np.array(policy.encode_exactly(text), np.int32))
        )
        for n in range(3)
    ]
    for response in made:
        await scorer.extend([response.prompt])
    for start in range(0, len(made[0]), 8):
        await scorer.extend([each.chunk(start, min(start + 8, len(each))) for each in made])
    await scorer.finish([Finish(each.prompt.rollout, each, "eos") for each in made])
    samples = scorer.capabilities.samples()
    assert samples[REREAD] == [0.0] * 3
    assert max(samples[TAIL_TOKENS]) <= 16


async def test_a_run_trains_with_it_and_its_metrics_are_in_the_report(thread: Thread) -> None:
    graph = ppo(
        policy=FakePolicy(length=lambda prompt: 9 + prompt.admission % 7),
        reward=BridgedReward(model_of(), Bridge(spot("byte-level"), spot("unigram")), place=thread),
        trainer=FakeTrainer(),
        admission=Overcommit(batch=4, overcommit=1),
        advantage=GAE(kl=0.0),
        chunks=Fixed(4),
    )
    async with graph.open(prompts(12)) as run:
        reports = [report async for report in run.steps(2)]
    for report in reports:
        assert np.isfinite(report.score)
        assert report.metrics[TAIL_TOKENS] > 0
        assert report.metrics[REREAD] >= 0
        assert all(metric(name) is not None for name in (TAIL_TOKENS, REREAD))
