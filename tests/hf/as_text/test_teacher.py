"""A teacher with another tokenizer: its log-probs of a response, in sum, are those of its own call on the text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import PreTrainedModel

from oppo.events import Chunk, Drop, Finish, Prompt, Response, ToolTokens
from oppo.hf.as_text.rendering import Rendering
from oppo.hf.as_text.streamed import Bridge
from oppo.hf.as_text.teacher import BridgedTeacher, Spans, text_ends
from oppo.hf.serve.scorers import ReferenceLogprobs
from oppo.hf.tokenizer import HfTokenizer
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.testing import check_scorer
from tests.hf import tiny
from tests.hf.as_text.test_streamed import ONE, WORDS, close
from tests.hf.spot_tokenizers import TEMPLATE, TRIMMING, spot
from tests.responses import stream

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def thread() -> Iterator[Thread]:
    with Thread("teacher", setup=ONE) as thread:
        yield thread


def model_of(name: str = "llama") -> PreTrainedModel:
    config = tiny.CONFIGS[name]()
    config.vocab_size = 420
    model: PreTrainedModel = tiny.of(config, seed=3).train(mode=False)
    return model


def sampling_of(policy: HfTokenizer) -> Sampling:
    return Sampling(max_new_tokens=99, temperature=TEMPERATURE, stop=(int(policy.inner.eos_token_id),))


def rollouts(policy: HfTokenizer, count: int = 6, seed: int = 0, *, words: Sequence[str] = WORDS) -> list[Response]:
    dice = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [{"role": "user", "content": " ".join(dice.choices(WORDS, k=4))}]
        opening = Prompt(number, number, np.array(policy.encode("say"), np.int32), columns={"prompt": prompt})
        tokens = policy.encode_exactly(" ".join(dice.choices([*words, "\n", "  "], k=dice.randint(1, 25))))
        tokens.append(int(policy.inner.eos_token_id))
        log = -np.array([dice.random() for _ in tokens], np.float32)
        zeros = np.zeros(len(tokens), np.int32)
        chunk = Chunk(number, 0, np.array(tokens, np.int32), log, zeros)
        made.append(Response.empty(opening).then(chunk))
    return made


@tiny.apart
@torch.no_grad()
def library_sum(model: PreTrainedModel, bridge: Bridge, response: Response) -> float:
    """Return the log-prob of a response and its end by the library's own call on the whole text."""
    text = bridge.policy.decode(response.tokens.tolist())
    rendering = Rendering(bridge.form, bridge.reader)
    rendered = rendering.whole(response.prompt.columns["prompt"], text)  # type: ignore[arg-type] # messages
    opening = rendering.opening(response.prompt.columns["prompt"])  # type: ignore[arg-type] # messages
    assert opening is not None
    found = bridge.reader.inner(rendered.text, add_special_tokens=rendered.special, return_offsets_mapping=True)
    ids = found["input_ids"] + ([] if bridge.form == "chat" else [bridge.reader.inner.eos_token_id])
    begins, ends = len(opening.text), len(opening.text) + len(text)
    logits = model(torch.tensor([ids])).logits[0, :, : bridge.reader.size].float() / TEMPERATURE
    logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
    spans = [*found["offset_mapping"], (ends, ends + 1)][: len(ids)]
    chosen = [at for at, (start, end) in enumerate(spans) if at and begins <= start and begins < end <= ends]
    after = max([at for at, (_, end) in enumerate(spans[: len(found["input_ids"])]) if end <= ends], default=0) + 1
    return float(sum(logprobs[at - 1] for at in [*chosen, after]))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("policy", "reader", "name"),
    [
        ("byte-level", spot("byte-level", TEMPLATE), "llama"),
        ("unigram", spot("byte-level", TEMPLATE), "gpt2"),
        ("sentence-piece", spot("byte-level", TEMPLATE), "qwen2-sliding"),
        ("byte-level", spot("unigram", TEMPLATE), "llama"),
    ],
)
async def test_the_log_prob_of_a_response_is_that_of_the_teachers_own_call_on_its_text(
    policy: str, reader: HfTokenizer, name: str, deterministic: bool, thread: Thread
) -> None:
    tokenizer, model = spot(policy), model_of(name)
    bridge = Bridge(tokenizer, reader, "chat")
    made = rollouts(tokenizer)
    wanted = [library_sum(model, bridge, each) for each in made]
    teacher = BridgedTeacher(
        model, sampling=sampling_of(tokenizer), bridge=bridge, place=thread, deterministic=deterministic
    )
    for seed in range(3):
        found = await stream(teacher, made, seed)
        for response, total in zip(made, wanted, strict=True):
            value = found[response.prompt.rollout]
            assert isinstance(value, np.ndarray), value
            assert value.dtype == np.float32
            unheard = np.isin(response.tokens[:-1], list(tokenizer.control_ids))
            own = float(response.logprobs[:-1][unheard].sum())
            assert value.sum() == pytest.approx(total + own, rel=1e-4, abs=1e-3)


async def test_with_the_same_tokenizer_it_says_of_each_token_what_a_reference_does(thread: Thread) -> None:
    tokenizer = spot("byte-level", TEMPLATE)
    model, sampling = model_of(), sampling_of(tokenizer)
    bridge, made = Bridge(tokenizer, tokenizer, "chat"), []
    for each in rollouts(tokenizer, words=[word for word in WORDS if word.isascii()]):
        messages = each.prompt.columns["prompt"]
        ids = tokenizer.encode_chat(messages)  # type: ignore[arg-type] # messages
        prompt = Prompt(each.prompt.rollout, each.prompt.rollout, np.array(ids, np.int32), columns={"prompt": messages})
        made.append(Response.empty(prompt).then(each.chunk()))
    teacher = BridgedTeacher(model, sampling=sampling, bridge=bridge, place=thread)
    reference = ReferenceLogprobs(model, sampling=sampling, place=thread)
    for response in made:
        events: list[Prompt | Chunk | ToolTokens] = [response.prompt, response.chunk()]
        finish = [Finish(response.prompt.rollout, response, "eos")]
        await teacher.extend(events)
        await reference.extend(events)
        (ours,), (theirs,) = await teacher.finish(finish), await reference.finish(finish)
        assert isinstance(ours, np.ndarray)
        np.testing.assert_allclose(ours[:-1], theirs[:-1], atol=1e-4)


async def test_ids_that_a_teacher_s_tokenizer_lacks_make_no_difference(thread: Thread) -> None:
    tokenizer, reader = spot("unigram"), spot("byte-level", TEMPLATE)
    bridge, sampling, said = Bridge(tokenizer, reader, "chat"), sampling_of(tokenizer), []
    assert reader.size == model_of().config.vocab_size
    for model in (model_of(), tiny.lengthened(model_of())):
        teacher = BridgedTeacher(model, sampling=sampling, bridge=bridge, place=thread)
        said.append(await stream(teacher, rollouts(tokenizer), 0))
    for one, other in zip(*(each.values() for each in said), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


async def test_it_keeps_the_contract_of_a_scorer(thread: Thread) -> None:
    tokenizer = spot("unigram")
    bridge = Bridge(tokenizer, spot("byte-level", TEMPLATE), "chat")
    teacher = BridgedTeacher(model_of(), sampling=sampling_of(tokenizer), bridge=bridge, place=thread)
    finished = [Finish(each.prompt.rollout, each, "eos") for each in rollouts(tokenizer)]

    async def make() -> BridgedTeacher:
        return teacher

    await check_scorer(make, finished, close)


async def test_a_response_that_a_template_changes_or_that_is_too_long_is_dropped_by_what_happened(
    thread: Thread,
) -> None:
    tokenizer = spot("byte-level")
    (response,) = rollouts(tokenizer, 1)
    tokens = np.append(tokenizer.encode_exactly("  one"), tokenizer.inner.eos_token_id).astype(np.int32)
    zeros = np.zeros(len(tokens), np.int32)
    spaced = Response.empty(response.prompt).then(Chunk(0, 0, tokens, zeros.astype(np.float32), zeros))
    bridge = Bridge(tokenizer, spot("byte-level", TRIMMING), "chat")
    teacher = BridgedTeacher(model_of(), sampling=sampling_of(tokenizer), bridge=bridge, place=thread)
    found = (await stream(teacher, [spaced], 0))[0]
    assert found == Drop(0, "the teacher's chat template changes the response, so that its tokens cannot be aligned")
    short = Bridge(tokenizer, spot("byte-level", TEMPLATE), "chat", over_long="drop")
    config = tiny.CONFIGS["llama"]()
    config.vocab_size, config.max_position_embeddings = 420, 8
    teacher = BridgedTeacher(tiny.of(config), sampling=sampling_of(tokenizer), bridge=short, place=thread)
    found = (await stream(teacher, [response], 0))[0]
    assert isinstance(found, Drop)
    assert "more than the 8" in found.reason


def test_a_span_with_a_token_that_was_not_sampled_says_nothing() -> None:
    prompt = Prompt(0, 0, np.zeros(1, np.int32))
    log, zeros = np.array([-1, -2, -3], np.float32), np.zeros(3, np.int32)
    response = Response.empty(prompt).then(Chunk(0, 0, zeros, log, zeros))
    response = response.then(ToolTokens(0, 3, np.zeros(1, np.int32))).then(Chunk(0, 4, zeros, log, zeros))
    spans = Spans(np.array([0, 0, 1, 1, 2, -1, 3], np.int32), np.array([-5, -9, -4, -1], np.float32))
    assert spans.beside(response).tolist() == [-2.0, -3.0, -3.0, 0.0, -4.0, -2.0, -1.0]


@given(st.lists(st.sampled_from(["a", " b", "é", "漢字", "\n", " cd"]), max_size=9), st.integers(0, 3))
def test_tokens_end_where_their_text_does(words: list[str], cut: int) -> None:
    tokenizer = spot("byte-level")
    tokens = tokenizer.encode_exactly("".join(words))
    tokens = tokens[: max(0, len(tokens) - cut)]
    ends = text_ends(tokenizer.decode, tokens, tokenizer.decode(tokens))
    assert len(ends) == len(tokens)
    assert (np.diff(ends) >= 0).all()
    assert ends[-1:].tolist() == ([len(tokenizer.decode(tokens))] if tokens else [])
    for at, end in enumerate(ends.tolist()):
        before = tokenizer.decode(tokens[: at + 1])
        if not before.endswith("\N{REPLACEMENT CHARACTER}"):
            assert len(before) == end
