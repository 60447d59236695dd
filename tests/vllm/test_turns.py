"""Turns over a fake of the engine: another request after each answer, whatever is cut or synced meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import numpy as np
from hypothesis import given, strategies as st

from oppo.events import Prompt
from oppo.models import Sampling, Weights
from oppo.testing import run_virtual
from oppo.turns import turns_answered
from oppo.vllm import VllmPolicy
from tests.dialogues import ANSWER, Dialogue, Seconds, at_once, dialogue
from tests.vllm.bench import WEIGHTS, varied
from tests.vllm.fake_engine import FakeAsyncLLM, FakeSender, engine_of, experts_of, running

SAMPLING = Sampling(max_new_tokens=60, stop=(2, 3), seed=5)


def talked(
    llm: FakeAsyncLLM, asked: Sequence[Prompt], seconds: Seconds = at_once, cuts: Sequence[int] = (), load: float = 0.0
) -> tuple[VllmPolicy, Dialogue]:
    policy = VllmPolicy(engine_of(llm, FakeSender()), sampling=SAMPLING, routed_experts=True)

    async def sync_weights() -> None:
        while load:
            await anyio.sleep(load)
            await policy.load(Weights(policy.version + 1, WEIGHTS))

    async def main() -> Dialogue:
        async with running(llm), anyio.create_task_group() as beside:
            beside.start_soon(sync_weights)
            talk = await dialogue(policy, asked, seconds, cuts)
            beside.cancel_scope.cancel()
        return talk

    return policy, run_virtual(main)


def test_an_answer_is_another_request_with_the_turn_as_its_prefix() -> None:
    llm = FakeAsyncLLM()
    asked = varied(3)
    _, talk = talked(llm, asked)
    assert not llm.requests
    for prompt, response in zip(asked, talk.responses(), strict=True):
        requests = sorted(
            (each for each in llm.done if each.prompt[0] == prompt.tokens[0]), key=lambda each: len(each.prompt)
        )
        assert len(requests) == 3
        assert len({request.params.seed for request in requests}) == 3, "no noise is used twice"
        assert len({request.salt for request in requests}) == 1
        written = prompt.tokens.tolist()
        for request in requests:
            assert request.prompt == written
            assert request.params.max_tokens == 60 - (len(written) - len(prompt.tokens))
            written = [*written, *request.tokens, *ANSWER.tolist()]
        assert [*prompt.tokens.tolist(), *response.tokens.tolist(), *ANSWER.tolist()] == written


def test_the_others_decode_while_a_tool_works() -> None:
    llm = FakeAsyncLLM(length=lambda prompt: 5)
    _, talk = talked(llm, varied(3), lambda k, turn: 1.0 if k == 0 else 0.0)
    assert [rollout for told in talk.told for rollout in told] == [1, 2, 0]


@given(
    st.integers(2, 4),
    st.lists(st.integers(1, 3), max_size=3),
    st.sampled_from([0.0, 0.004, 0.03, 0.2]),
    st.sampled_from([0.0, 0.0, 0.015, 0.1]),
    st.integers(0, 3),
)
def test_no_token_is_lost_or_doubled_whatever_is_cut_or_synced(
    count: int, cuts: list[int], seconds: float, load: float, overrun: int
) -> None:
    llm = FakeAsyncLLM(overrun=overrun)
    asked = varied(count)
    policy, talk = talked(llm, asked, lambda k, turn: seconds * (k % 2 + turn), sorted(cuts), load)
    assert sorted(rollout for told in talk.told for rollout in told) == list(range(count))
    for prompt, response, turns in zip(asked, talk.responses(), talk.heard, strict=True):
        assert turns_answered(response) == 2
        assert (np.diff(response.versions) >= 0).all()
        made = [each for each in llm.done if each.prompt[0] == prompt.tokens[0]]
        made.sort(key=lambda each: len(each.prompt))
        assert [turn.tolist() for turn in turns] == [request.tokens for request in made]
        sampled = [policy.number_of(version) for request in made for version in request.versions]
        assert response.versions[response.sampled].tolist() == sampled
        known = len(prompt.tokens) + int(np.flatnonzero(response.sampled)[-1])
        assert response.routed == known
        assert np.array_equal(response.routed_experts.positions(), np.arange(known) - len(prompt.tokens))
        expected = experts_of([*prompt.tokens.tolist(), *response.tokens.tolist()])[:known]
        assert np.array_equal(response.routed_experts.ids, expected)
    assert not llm.requests
