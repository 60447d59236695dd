"""The same policy drawing in another way: its own tokens, the weights at hand, and nothing lost of what is deferred."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from oppo.hf.devices import use_cores
from oppo.models import Weights
from oppo.placement import Process
from tests.hf import tiny
from tests.hf.stories import SAMPLING, Serving, Story, prompts, serving, told

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


async def test_in_a_process_it_makes_the_tokens_that_it_makes_in_a_thread() -> None:
    weights = Weights(1, actor=dict(tiny.causal(seed=1).state_dict()))
    made = []
    for process in (False, True):
        with (
            Process("actor", setup=partial(use_cores, 1)) as place,
            serving(place=place if process else None) as policy,
        ):
            greedy = policy.with_sampling(GREEDY)
            first = await told(greedy, prompts(3))
            await policy.load(weights)
            second = await told(greedy, prompts(3))
            made.append((first.tokens(), second.tokens(), (await told(policy, prompts(3))).tokens()))
    assert made[0] == made[1]
