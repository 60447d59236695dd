"""Teachers behind another prompt, and the policy's own weights as one: against plain forward passes and formulas."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

from oppo.events import IntArray, Prompt
from oppo.graph import Stateful
from oppo.hf import AveragedTeacher, SelfTeacher
from oppo.hf.lora import add_lora, merged
from oppo.hf.weights import copies
from oppo.models import Sampling, Scorer, Weights
from oppo.placement import Inline, Thread
from oppo.returns import TopLogprobs
from oppo.scorers import BehindPrompt, Untaught
from oppo.stages import Score
from tests.hf import tiny
from tests.hf.stories import response_logprobs
from tests.kit.known import assert_close
from tests.kit.responses import VOCABULARY, responses, stream

SAMPLING = Sampling(temperature=0.7)
HERE = Inline("here")

tokens = st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=40).map(lambda ids: np.array(ids, np.int32))


@pytest.fixture(scope="module")
def place() -> Iterator[Thread]:
    with Thread("teacher") as thread:
        yield thread


def behind(scorer: Scorer[object], prompts: list[IntArray | None], otherwise: object) -> BehindPrompt[object]:
    def shown(prompt: Prompt) -> Prompt | None:
        other = prompts[prompt.rollout]
        return None if other is None else replace(prompt, tokens=other)

    return BehindPrompt(scorer, shown, otherwise)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.one_of(st.none(), tokens), min_size=4, max_size=4),
    st.integers(0, 99),
    st.sampled_from([None, 1, 5]),
    st.booleans(),
)
def test_log_probs_are_those_of_one_pass_over_the_other_prompt_and_the_same_response(
    place: Thread, prompts: list[IntArray | None], seed: int, top_k: int | None, deterministic: bool
) -> None:
    """However the tokens come, tool tokens among them; a rollout without a prompt is not read."""
    model, made = tiny.causal("llama"), responses(4, seed)
    teacher = SelfTeacher(model, sampling=SAMPLING, place=place, top_k=top_k, deterministic=deterministic)
    scorer = behind(cast("Scorer[object]", teacher), prompts, Untaught(top_k))
    found = anyio.run(stream, scorer, made, seed)
    for response, other in zip(made, prompts, strict=True):
        said = found[response.prompt.rollout]
        if other is None:
            assert said == Untaught(top_k)
            continue
        whole = replace(response, prompt=replace(response.prompt, tokens=other))
        if top_k is None:
            assert_close(said, response_logprobs(model, whole, SAMPLING.temperature))
            continue
        assert isinstance(said, TopLogprobs)
        assert_close(said.tokens, response_logprobs(model, whole, SAMPLING.temperature))
        assert (said.ids.shape, said.top.shape) == ((len(response), top_k), (len(response), top_k + 1))
        np.testing.assert_allclose(np.exp(said.top).sum(1), 1, rtol=1e-4)
    taught = [float(other is not None) for other in prompts]
    assert sorted(scorer.capabilities.samples()["teacher/taught"]) == sorted(taught)


def averaged(model: PreTrainedModel, rate: float, start: PreTrainedModel | None = None) -> AveragedTeacher:
    served = copy.deepcopy(tiny.causal("llama"))
    begun = merged(start or model, torch.float32)
    return AveragedTeacher(served, begun, rate=rate, sampling=SAMPLING, place=HERE)


@settings(deadline=None, max_examples=20)
@given(st.floats(0.01, 1), st.integers(1, 6), st.booleans(), st.integers(0, 6))
def test_the_average_is_that_of_the_weights_at_every_version(rate: float, count: int, tied: bool, cut: int) -> None:
    """Each version counts once, also if it is given twice, copied before it is served, or given after a resume."""

    def policy(seed: int) -> PreTrainedModel:
        config = copy.deepcopy(tiny.CONFIGS["llama"]())
        config.tie_word_embeddings = tied
        return tiny.of(config, seed=seed)

    async def main() -> None:
        def make() -> AveragedTeacher:
            start = merged(policy(0))
            return AveragedTeacher(policy(9), start, rate=rate, sampling=SAMPLING, place=HERE)

        served = make()
        await served.load(Weights(0, actor=policy(0).state_dict()))
        expected = {name: each.double() for name, each in policy(0).state_dict().items()}
        for version in range(1, count + 1):
            weights = Weights(version, actor=policy(version).state_dict())
            if version % 2:
                await served.load(await served.copied(weights))
            for _ in range(2):
                await served.load(weights)
            expected = {
                name: (1 - rate) * each + rate * cast("torch.Tensor", weights.actor[name]).double()
                for name, each in expected.items()
            }
            if version == cut:
                state = served.state_dict()
                served = make()
                served.load_state_dict(state)
                await served.load(weights)
        for name, each in cast("PreTrainedModel", served._model).state_dict().items():
            np.testing.assert_allclose(each.double(), expected[name], rtol=1e-4, atol=1e-6)

    anyio.run(main)


async def test_adapters_are_averaged_as_what_they_add() -> None:
    """Ten equal updates at 0.05 reach 1 - 0.95^10 = 0.40126 of B A; matrices averaged apart from 0, 0.16101."""
    base, actor = tiny.causal("llama"), tiny.causal("llama")
    add_lora(actor, 4, 8, seed=0)
    teacher = averaged(actor, 0.05)
    with torch.no_grad():
        for name, each in actor.named_parameters():
            if ".lora_B." in name:
                each.fill_(0.1)
    weights = Weights(0, actor=actor.state_dict(), merge=lambda: merged(actor, torch.float32))
    for version in range(1, 11):
        await teacher.load(replace(weights, version=version))
    there, found = merged(actor, torch.float32), cast("PreTrainedModel", teacher._model).state_dict()
    share = [
        float(((found[name] - each) * (there[name] - each)).sum() / (there[name] - each).square().sum())
        for name, each in base.state_dict().items()
        if not torch.equal(there[name], each)
    ]
    assert len(share) > 4
    assert share == pytest.approx([0.40126] * len(share), abs=2e-5)
    assert pytest.approx(0.16101, abs=1e-5) == 0.40126**2


async def test_weights_that_wait_are_copies() -> None:
    actor = tiny.causal("llama")
    live = SelfTeacher(actor, sampling=SAMPLING, place=HERE)
    weights = Weights(1, actor=actor.state_dict())
    assert live.serves(weights)
    assert live.tensors() & {each.data_ptr() for each in actor.parameters()}
    kept = await live.copied(weights)
    assert not live.serves(kept)
    teacher = averaged(actor, 0.5)
    assert not teacher.serves(weights)
    first = await teacher.copied(Weights(1, actor=copies(actor.state_dict())))
    with torch.no_grad():
        next(actor.parameters()).add_(1)
    second = await teacher.copied(Weights(2, actor=actor.state_dict()))
    assert {first.version, second.version} == {1, 2}
    await teacher.load(first)
    assert teacher.version == 1
    name = next(iter(actor.state_dict()))
    served = cast("PreTrainedModel", teacher._model).state_dict()[name]
    assert torch.equal(served, cast("torch.Tensor", first.actor[name]))
    assert not torch.equal(served, cast("torch.Tensor", second.actor[name]))


def test_the_stage_of_a_teacher_has_its_state_and_that_of_a_scorer_without_one_none() -> None:
    teacher = averaged(tiny.causal("llama"), 0.5)
    stage = Score(behind(cast("Scorer[object]", teacher), [], Untaught()))
    assert isinstance(stage, Stateful)
    assert stage.state_dict()["version"] == 0
    stage.load_state_dict({"version": 3, "average": {}})
    assert teacher.state_dict()["version"] == 3
    assert not isinstance(Score(SelfTeacher(tiny.causal("llama"), sampling=SAMPLING, place=HERE)), Stateful)
