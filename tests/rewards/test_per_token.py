"""Reward functions that say which tokens they reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from oppo.errors import RewardError
from oppo.events import Drop, Finish
from oppo.rewards import ByCharacter, FunctionReward, OnFailure, Rewards, TokenRewards
from oppo.rewards.function import token_rewards
from tests.kit.responses import ended

LETTERS = "abcdefgh é;"


def decode(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def finish(rollout: int, text: str) -> Finish:
    return ended(rollout, [LETTERS.index(letter) for letter in text])


async def said(returned: object, text: str = "ab;cd", on_failure: OnFailure = "fail") -> float | Drop:
    def reward(prompts: list[str], completions: list[str]) -> list[object]:
        return [returned]

    (score,) = await FunctionReward(reward, decode, on_failure=on_failure).finish([finish(3, text)])
    return score


@pytest.mark.parametrize(
    ("returned", "rewards"),
    [
        ([0, 0, 0.5, 0, 1], [0, 0, 0.5, 0, 1]),
        (np.array([0, 0, 0.5, 0, 1], np.float64), [0, 0, 0.5, 0, 1]),
        ((0, 0, np.float32(0.5), 0, True), [0, 0, 0.5, 0, 1]),
        (TokenRewards([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5]),
        ({2: 0.5, -1: 1}, [0, 0, 0.5, 0, 1]),
        ({np.int64(2): np.float64(0.5)}, [0, 0, 0.5, 0, 0]),
        ({}, [0, 0, 0, 0, 0]),
        (ByCharacter({2: 0.5, 4: 1.0, -1: 1.0}), [0, 0, 0.5, 0, 2]),
    ],
)
async def test_rewards_are_placed_by_token_by_position_or_by_character(returned: object, rewards: list[float]) -> None:
    score = await said(returned)
    assert isinstance(score, TokenRewards)
    assert score.rewards.tolist() == rewards
    assert score == sum(rewards)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0, 2.0], r"2 rewards for a completion of 5 tokens, .* its score is a number \(rollouts 3\)"),
        ({5: 1.0}, "no token 5 in a response of 5 tokens"),
        ({0.5: 1.0}, "a position must be a whole number"),
        ({"2": 1.0}, "a position must be a whole number"),
        ({2: "1"}, "'1' .str. is no finite number"),
        ([0, 0, 0, 0, float("nan")], "for rollout 3 it returned .*nan .float. is no finite number"),
        ([[1], [2], [3], [4], [5]], "is no finite number"),
        (ByCharacter({5: 1.0}), "no character 5 in a completion of 5 characters"),
        (np.zeros(4), "4 rewards for a completion of 5 tokens"),
    ],
)
async def test_rewards_at_places_that_are_not_there_are_failures_of_the_function(returned: object, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        await said(returned)
    assert isinstance(await said(returned, on_failure="drop"), Drop)


@given(st.text(alphabet="abé\N{GRINNING FACE}", min_size=1, max_size=9), st.data())
def test_the_token_that_completes_a_character_is_rewarded_whatever_the_tokens_are(
    text: str, data: st.DataObject
) -> None:
    end = ended(0, [*text.encode()])
    at = data.draw(st.integers(0, len(text) - 1))
    rewarded = token_rewards(ByCharacter({at: 1.0}), end, lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    first, last = len(text[:at].encode()), len(text[: at + 1].encode())
    (position,) = np.flatnonzero(rewarded.rewards)
    assert first <= position < last


def of_bytes() -> tuple[Tokenizer, Tokenizer]:
    """Return tokenizers of single characters and bytes: one falls back to bytes, as Llama's, the other has bytes only.

    The first decodes a run of bytes as one: while its last character is incomplete, none of the run has been read.
    """
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "a": 258, "b": 259, ";": 260}
    fallback = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    level.pre_tokenizer, level.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return fallback, level


@pytest.mark.parametrize("tokenizer", of_bytes(), ids=["fallback", "level"])
@given(st.text(alphabet="ab;\n é你\N{GRINNING FACE}", min_size=1, max_size=9), st.integers(1, 36))
@example("a\N{GRINNING FACE};b", 36)
@example("\N{GRINNING FACE}\n\n\n\N{GRINNING FACE};", 36)
@example(";\N{GRINNING FACE} é", 7)
def test_a_character_is_earned_by_the_token_from_which_on_every_text_has_it(
    tokenizer: Tokenizer, text: str, most: int
) -> None:
    tokens = np.array(tokenizer.encode(text).ids, np.int32)
    cut = min(most, len(tokens))  # by the length cap, in a character
    end = ended(0, tokens[:cut].tolist())
    texts = [tokenizer.decode(tokens[: n + 1].tolist()) for n in range(cut)]
    for at in range(len(texts[-1])):
        lacking = [n for n, each in enumerate(texts) if not each.startswith(texts[-1][: at + 1])]
        rewards = token_rewards(ByCharacter({at: 1.0}), end, tokenizer.decode).rewards
        assert np.flatnonzero(rewards).tolist() == [max(lacking, default=-1) + 1]


def test_few_texts_are_decoded_to_find_the_token_of_a_character() -> None:
    level = of_bytes()[1]
    asked: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        asked.append(len(ids))
        return level.decode(ids)

    for text in ("ab;" * 1000, "é;b" * 1000):
        asked.clear()
        token_rewards(ByCharacter({1501: 1.0}), ended(0, level.encode(text).ids), decode)
        assert sum(count > 1 for count in asked) < 20


async def test_a_function_that_names_them_is_given_the_token_ids() -> None:
    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]]) -> list[dict[int, float]]:
        return [{at: 1.0 for at, token in enumerate(ids) if token == LETTERS.index(";")} for ids in completion_ids]

    (score,) = await FunctionReward(reward, decode).finish([finish(0, "a;b;")])
    assert isinstance(score, TokenRewards)
    assert score.rewards.tolist() == [0, 1, 0, 1]


async def test_a_function_in_a_process_places_rewards_too() -> None:
    with FunctionReward(stepwise, decode, process=True) as reward:
        (score,) = await reward.finish([finish(0, "a;b")])
    assert isinstance(score, TokenRewards)
    assert score.rewards.tolist() == [0, 0.5, 0]


def stepwise(prompts: list[str], completions: list[str]) -> list[ByCharacter]:
    return [ByCharacter({text.index(";"): 0.5}) for text in completions]


async def test_a_part_of_several_rewards_keeps_its_tokens() -> None:
    def steps(prompts: list[str], completions: list[str]) -> list[dict[int, float]]:
        return [{0: 1.0} for _ in completions]

    def whole(prompts: list[str], completions: list[str]) -> list[float]:
        return [2.0 for _ in completions]

    reward = Rewards({"steps": (0.5, steps), "whole": (1.0, whole)}, decode)
    (score,) = await reward.finish([finish(0, "abc")])
    assert isinstance(score, TokenRewards)
    assert score.rewards.tolist() == [0.5, 0, 2]
    assert reward.capabilities.samples()["rewards/steps/mean"] == [1.0]
