"""Turns on the real engine: the tokens after an answer are those of the whole sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oppo.turns import turns_answered
from oppo.vllm import VllmEngine, VllmPolicy
from tests.dialogues import ANSWER, dialogue
from tests.vllm.real.conftest import tiny_actor
from tests.vllm.real.test_policy import SAMPLING, TOLERANCE, expected, some

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@pytest.mark.parametrize("cuts", [(), (1, 2)])
async def test_an_answer_goes_on_with_what_the_engine_has_read(engine: VllmEngine, cuts: tuple[int, ...]) -> None:
    sampling = replace(SAMPLING, max_new_tokens=200, stop=tuple(range(2, 40)))
    policy, asked, model = VllmPolicy(engine, sampling=sampling), some(4), tiny_actor()
    talk = await dialogue(policy, asked, lambda k, turn: 0.05 * (k % 2), cuts)
    assert sorted(rollout for told in talk.told for rollout in told) == [0, 1, 2, 3]
    for prompt, response in zip(asked, talk.responses(), strict=True):
        assert turns_answered(response) == 2
        assert response.tokens[~response.sampled].tolist() == [*ANSWER, *ANSWER]
        tokens = response.tokens.tolist()
        logprobs = (await expected(model, prompt, tokens, sampling)).numpy()[np.arange(len(tokens)), tokens]
        sampled = response.sampled
        np.testing.assert_allclose(response.logprobs[sampled], logprobs[sampled], atol=TOLERANCE)
