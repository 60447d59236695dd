from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import anyio
import numpy as np
import pytest

from oppo.errors import ModelError, ModelLost, ModelRefused, ProtocolError
from oppo.events import Finish, Prompt, Response
from oppo.testing import check_scorer, run_virtual
from oppo.vllm.reward import ScalarModel, VllmReward
from tests.responses import EOS, PADDING, VOCABULARY, answered, chunk, endings, responses, stream
from tests.vllm import fake_pooling
from tests.vllm.fake_pooling import BLOCK, FakePooling, score

LONGEST = 160
MODEL = ScalarModel("tiny", VOCABULARY, LONGEST, BLOCK, PADDING)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = ModuleType("vllm")
    vllm.__dict__["PoolingParams"] = fake_pooling.PoolingParams
    monkeypatch.setitem(sys.modules, "vllm", vllm)


def config(**changes: object) -> SimpleNamespace:
    """Return a ``VllmConfig`` as far as it is read."""
    facts = {"labels": 1, "pooling": "LAST", "prefix": True, "mean": None, "pools": True, "padding": PADDING, **changes}
    pooler = SimpleNamespace(seq_pooling_type=facts["pooling"], logit_mean=facts["mean"], logit_sigma=None)
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=facts["prefix"], block_size=BLOCK),
        model_config=SimpleNamespace(
            pooler_config=pooler if facts["pools"] else None,
            hf_config=SimpleNamespace(num_labels=facts["labels"]),
            hf_text_config=SimpleNamespace(pad_token_id=facts["padding"]),
            max_model_len=LONGEST,
            get_vocab_size=lambda: VOCABULARY,
        ),
    )


@dataclass(frozen=True)
class Engine:
    llm: FakePooling
    config: SimpleNamespace
    name: str = "tiny"
    advice: str = "go on from the newest checkpoint"
    closed: bool = False

    def require_usable(self) -> None:
        return


def served(llm: FakePooling | None = None, /, **changes: object) -> VllmReward:
    return VllmReward(Engine(llm or FakePooling(), config(**changes)))


def whole(response: Response) -> list[int]:
    return [*response.prompt.tokens.tolist(), *response.tokens.tolist()]


async def test_the_contract_is_kept() -> None:
    async def make() -> VllmReward:
        return served()

    finished = [Finish(each.prompt.rollout, each, "eos") for each in responses() if len(each) >= 4]
    await check_scorer(make, finished, lambda a, b: a == b)


@pytest.mark.parametrize("seed", range(5))
async def test_any_arrival_pattern_gives_the_score_of_the_whole_sequence_and_computes_no_token_twice(seed: int) -> None:
    engine, made = FakePooling(), responses()
    reward = served(engine)
    values = await stream(reward, made, seed)
    assert values == {each.prompt.rollout: score(whole(each)) for each in made}
    assert (reward.tokens.again, reward.tokens.computed) == (0, sum(len(whole(each)) for each in made))


async def test_whole_blocks_are_read_while_a_rollout_grows_and_only_the_rest_when_it_ends() -> None:
    engine = FakePooling()
    reward = served(engine)
    response = answered(0, [5] * 3, list(range(10, 26)))
    await reward.extend([response.prompt])
    assert engine.sequences == []
    for start in range(0, 16, 4):
        await reward.extend([response.chunk(start, start + 4)])
    assert [len(each) for each in engine.sequences] == [8, 16]
    await reward.finish([Finish(0, response, "eos")])
    assert [len(each) for each in engine.sequences] == [8, 16, 19]
    assert reward.tokens.computed == 19


async def test_a_sequence_of_whole_blocks_is_not_asked_for_again() -> None:
    engine = FakePooling()
    reward = served(engine)
    response = answered(0, [5] * 4, [6] * 12)
    await reward.extend([response.prompt, response.chunk()])
    assert await reward.finish([Finish(0, response, "eos")]) == [score(whole(response))]
    assert len(engine.sequences) == 1


async def test_what_the_cache_has_lost_is_computed_and_counted_again() -> None:
    engine = FakePooling(room=1)
    reward = served(engine)
    first, second = answered(0, [5] * 8, [6] * 4), answered(1, [7] * 8, [8] * 4)
    await reward.extend([first.prompt])
    await reward.extend([second.prompt])
    await reward.extend([first.chunk(), second.chunk()])
    got = await reward.finish([Finish(0, first, "eos"), Finish(1, second, "eos")])
    assert got == [score(whole(first)), score(whole(second))]
    assert (reward.tokens.computed, reward.tokens.again) == (8 + 8 + 12 + 12, 16)


@pytest.mark.parametrize("padding", [PADDING, EOS, None])
async def test_the_score_is_taken_at_the_last_token_that_is_not_padding(padding: int | None) -> None:
    reward = served(padding=padding)
    values = await stream(reward, endings(), seed=3)
    for response in endings():
        tokens = whole(response)
        real = [at for at, token in enumerate(tokens) if token != padding]
        assert values[response.prompt.rollout] == score(tokens[: (real or [0])[-1] + 1])


async def test_events_out_of_place_are_errors() -> None:
    reward = served()
    response = answered(7, [5, 6], [8, 9, 10])
    with pytest.raises(ProtocolError, match="rollout 7 is unknown to tiny: its Prompt must come first"):
        await reward.extend([response.chunk()])
    await reward.extend([response.prompt, response.chunk(0, 2)])
    with pytest.raises(ProtocolError, match=r"rollout 7: tiny expected tokens from 2 of the response on, .* at 3"):
        await reward.extend([chunk(7, 3, response.tokens[:1])])
    with pytest.raises(ProtocolError, match=r"rollout 7 finished with 5 tokens, .* was given 4: extend it by the rest"):
        await reward.finish([Finish(7, response, "eos")])
    with pytest.raises(ProtocolError, match="rollout 7 is open in tiny already"):
        await reward.extend([response.prompt])
    await reward.forget([7, 8])
    await reward.extend([response.prompt, response.chunk()])
    assert await reward.finish([Finish(7, response, "eos")]) == [score(whole(response))]


@pytest.mark.parametrize("token", [-1, VOCABULARY])
async def test_a_token_of_another_vocabulary_never_reaches_the_engine(token: int) -> None:
    engine = FakePooling()
    reward = served(engine)
    with pytest.raises(ModelError, match=f"rollout 3 has token ids from .* of tiny has {VOCABULARY}: policy and scor"):
        await reward.extend([Prompt(3, 3, np.full(BLOCK, token, np.int32))])
    assert not engine.sequences


async def test_a_sequence_too_long_is_named() -> None:
    reward = served()
    with pytest.raises(ModelError, match=f"rollout 3 has 161 tokens, .* reads at most {LONGEST}: shorten the prompts"):
        await reward.extend([Prompt(3, 3, np.full(LONGEST + 1, 5, np.int32))])


def test_a_cancelled_call_leaves_no_request_behind() -> None:
    engine = FakePooling(seconds=10)

    async def main() -> None:
        with anyio.move_on_after(1) as scope:
            await served(engine).extend([Prompt(n, n, np.full(BLOCK, 5, np.int32)) for n in range(3)])
        assert scope.cancelled_caught

    run_virtual(main)
    assert (len(engine.sequences), len(engine.open)) == (3, 0)


def test_an_engine_that_dies_while_it_owes_a_score_is_a_lost_model() -> None:
    engine = FakePooling(seconds=1000)

    async def main() -> None:
        async def die() -> None:
            await anyio.sleep(1)
            engine.errored = True

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(die)
            with pytest.raises(ModelLost, match="vLLM has died"):
                await served(engine).extend([Prompt(0, 0, np.full(BLOCK, 5, np.int32))])

    run_virtual(main)


async def test_a_dead_engine_is_a_lost_model() -> None:
    engine = FakePooling(errored=True)
    reward = served(engine)
    with pytest.raises(ModelLost, match=r"vLLM has failed, .*EngineDeadError: EngineCore .* newest checkpoint"):
        await reward.extend([Prompt(0, 0, np.full(BLOCK, 5, np.int32))])


def test_the_facts_of_a_model_are_those_of_its_engine() -> None:
    assert ScalarModel.of("tiny", config()) == MODEL


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": 2}, "tiny has 2 labels, but a score is one number"),
        ({"pooling": "MEAN"}, "tiny pools MEAN with a prefix cache, so it cannot be read as rollouts grow"),
        ({"prefix": False}, "tiny pools LAST without a prefix cache"),
        ({"mean": 0.5}, r"tiny scales its score \(logit_mean 0.5, logit_sigma None\)"),
        ({"pools": False}, 'tiny generates: start its engine with runner="pooling"'),
    ],
)
def test_a_model_that_cannot_score_growing_prefixes_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        served(**changes)
