"""Responses that end at a text, and responses that may not end yet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.sampling import draw, gumbel
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.turns import SLACK, StopCriteria
from tests.hf import tiny
from tests.hf.stories import Story, full_logprobs, prompts, serving, told

PIECES = ("", "a", "b", "ab", "ba", "abc", " ", "\n", "\n\n", "c")
"""The text of each token."""


def text(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token % len(PIECES)] for token in tokens)


def ended(tokens: Sequence[int], *stops: str, young: int = 0) -> int | None:
    """Return after how many tokens a response ends with reason stop."""
    ending = StopCriteria(Sampling(stop_strings=stops, min_new_tokens=young), text)
    return next((n for n in range(1, len(tokens) + 1) if ending.reason(tokens[:n], 99) == "stop"), None)


def test_a_response_ends_with_the_token_that_completes_a_stop_text() -> None:
    assert ended([1, 2, 7, 1, 7, 7, 1], "\n\n") == 6
    assert ended([1, 8, 1], "\n\n") == 2
    assert ended([1, 2, 9, 1], "abc") == 3, "a text may span tokens"
    assert ended([6, 5, 1], "bc") == 2, "a token may hold more than the text"
    assert ended([1, 1, 1], "b") is None
    assert ended([1, 1, 2, 9], "c", "b") == 3


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


def test_a_text_is_found_however_long_the_response_is() -> None:
    assert ended([*([1] * 500), 2, 9, 1], "abc") == 502
    longest = "ab" * 40
    assert ended([*([9] * 50), *([1, 2] * 40), 1], longest) == 50 + 80


def test_a_text_that_was_complete_too_early_does_not_end_a_response_later() -> None:
    early = [9, 1, 1, 1, 9]
    assert ended(early, "c", young=0) == 1
    assert ended(early, "c", young=1) == 5
    assert ended(early, "c", young=4) == 5


def test_tokens_without_text_complete_nothing() -> None:
    assert ended([9, 0, 0], "c", young=1) is None


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
    assert not drawn.read_back()[2].whole
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


async def test_a_policy_ends_responses_at_a_text_whether_or_not_they_were_deferred() -> None:
    asked = prompts(8)
    sampling = Sampling(max_new_tokens=64, stop_strings=("ab", "\n"), seed=3)
    with Thread("actor", setup=functools.partial(torch.set_num_threads, 1)) as thread:
        policy = HfPolicy(tiny.causal(), sampling=sampling, place=thread, decode=text)
        story = await told(policy, asked)
        cut = Story(await policy.open(asked), cut_after=3)
        await cut.step(policy)
        cut.cut_after = 1_000_000
        await cut.step(policy)
    assert cut.tokens() == story.tokens()
    assert cut.states() == story.states()
    assert "stop" in story.states()
    for tokens, state in zip(story.tokens(), story.states(), strict=True):
        stopped = "ab" in text(tokens) or "\n" in text(tokens)
        before = text(tokens[:-1])
        assert (state == "stop") == stopped
        assert "ab" not in before
        assert "\n" not in before
