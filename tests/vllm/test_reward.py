from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from transformers import LlamaConfig

from oppo.errors import ConfigError, ModelError, ModelLost, ModelRefused, ProtocolError, RewardError
from oppo.events import Finish, Prompt, Response
from oppo.observe import Span
from oppo.testing import check_scorer, run_virtual
from oppo.vllm.reward import RewardServer, VllmReward
from tests.responses import EOS, PADDING, VOCABULARY, answered, chunk, endings, responses, stream
from tests.vllm.fake_engine import BLOCK, FakeAsyncLLM, engine_of, score
from tests.vllm.fake_server import FakeServer

LONGEST = 160


def served(llm: FakeAsyncLLM | None = None, /, key: str = "", **facts: object) -> VllmReward:
    llm = llm or FakeAsyncLLM()
    llm.facts = {"model": "tiny", "runner": "pooling", "vocabulary": VOCABULARY, "longest": LONGEST, **facts}
    return VllmReward(engine_of(llm), key=key)


def whole(response: Response) -> list[int]:
    return [*response.prompt.tokens.tolist(), *response.tokens.tolist()]


async def test_the_contract_is_kept() -> None:
    async def make() -> VllmReward:
        return served()

    finished = [Finish(each.prompt.rollout, each, "eos") for each in responses() if len(each) >= 4]
    await check_scorer(make, finished, lambda a, b: a == b)


@pytest.mark.parametrize("seed", range(5))
async def test_any_arrival_pattern_gives_the_score_of_the_whole_sequence_and_computes_no_token_twice(seed: int) -> None:
    engine, made = FakeAsyncLLM(), responses()
    reward = served(engine)
    values = await stream(reward, made, seed)
    assert values == {each.prompt.rollout: score(whole(each)) for each in made}
    assert (reward.tokens.again, reward.tokens.computed) == (0, sum(len(whole(each)) for each in made))


async def test_whole_blocks_are_read_while_a_rollout_grows_and_only_the_rest_when_it_ends() -> None:
    engine = FakeAsyncLLM()
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
    engine = FakeAsyncLLM()
    reward = served(engine)
    response = answered(0, [5] * 4, [6] * 12)
    await reward.extend([response.prompt, response.chunk()])
    assert await reward.finish([Finish(0, response, "eos")]) == [score(whole(response))]
    assert len(engine.sequences) == 1


async def test_what_the_cache_has_lost_is_computed_and_counted_again() -> None:
    engine = FakeAsyncLLM(room=1)
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
    engine = FakeAsyncLLM()
    reward = served(engine)
    with pytest.raises(ModelError, match=f"rollout 3 has token ids from .* of tiny has {VOCABULARY}: policy and scor"):
        await reward.extend([Prompt(3, 3, np.full(BLOCK, token, np.int32))])
    assert not engine.sequences


async def test_a_sequence_too_long_is_named() -> None:
    reward = served()
    with pytest.raises(ModelError, match=f"rollout 3 has 161 tokens, .* reads at most {LONGEST}: shorten the prompts"):
        await reward.extend([Prompt(3, 3, np.full(LONGEST + 1, 5, np.int32))])


def test_a_cancelled_call_leaves_no_request_behind() -> None:
    engine = FakeAsyncLLM(answers_after=10)

    async def main() -> None:
        with anyio.move_on_after(1) as scope:
            await served(engine).extend([Prompt(n, n, np.full(BLOCK, 5, np.int32)) for n in range(3)])
        assert scope.cancelled_caught

    run_virtual(main)
    assert (len(engine.sequences), len(engine.asking)) == (3, 0)


def test_an_engine_that_dies_while_it_owes_a_score_is_a_lost_model() -> None:
    engine = FakeAsyncLLM(answers_after=1000)

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
    engine = FakeAsyncLLM(errored=True)
    reward = served(engine)
    with pytest.raises(ModelLost, match=r"vLLM has failed, .*EngineDeadError: EngineCore .* newest checkpoint"):
        await reward.extend([Prompt(0, 0, np.full(BLOCK, 5, np.int32))])


def test_the_facts_of_a_model_are_those_of_its_engine() -> None:
    assert (served().longest, served().block) == (LONGEST, BLOCK)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": 2}, "tiny has 2 labels, but a score is one number"),
        ({"pooling": "MEAN"}, "tiny pools MEAN with a prefix cache, so it cannot be read as rollouts grow"),
        ({"prefix": False}, "tiny pools LAST without a prefix cache"),
        ({"mean": 0.5}, r"tiny scales its score \(logit_mean 0.5, logit_sigma None\)"),
        ({"runner": "generate"}, 'tiny generates: start its engine with runner="pooling"'),
    ],
)
def test_a_model_that_cannot_score_growing_prefixes_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        served(**changes)


def test_its_work_is_reported_and_its_errors_name_the_table() -> None:
    engine, spans = FakeAsyncLLM(answers_after=5), list[Span]()
    reward = served(engine, key="rewards.1")
    reward.reporter.listener = spans.append

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reward.extend, [Prompt(0, 0, np.full(BLOCK, 5, np.int32))])
            await anyio.sleep(1)
            assert reward.reporter.at_work == "reward model: extend"
        engine.errored = True
        with pytest.raises(ModelLost, match=r"^rewards\.1: vLLM has failed"):
            await reward.extend([Prompt(1, 1, np.full(BLOCK, 5, np.int32))])

    run_virtual(main)
    assert [span.label for span in spans] == ["extend", "extend"]
    assert reward.reporter.at_work == ""


URL = "http://localhost:8000"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = LlamaConfig(vocab_size=VOCABULARY, pad_token_id=PADDING)
    config.num_labels = 1
    config.save_pretrained(tmp_path / "served")
    return tmp_path / "served"


def on_server(fake: FakeServer, source: Path, **given: Any) -> VllmReward:
    return VllmReward(RewardServer(URL, source, transport=fake, **given), key="rewards.0")


async def test_a_server_keeps_the_contract_and_gives_the_score_of_the_whole_sequence(source: Path) -> None:
    async def make() -> VllmReward:
        return on_server(FakeServer(), source)

    finished = [Finish(each.prompt.rollout, each, "eos") for each in responses() if len(each) >= 4]
    await check_scorer(make, finished, lambda a, b: a == b)
    async with await make() as reward:
        assert await stream(reward, responses(), 3) == {each.prompt.rollout: score(whole(each)) for each in responses()}


async def test_all_that_grow_together_are_one_request_for_logits(source: Path) -> None:
    fake = FakeServer(key="secret")
    reward = on_server(fake, source, api_key="secret")
    await reward.extend([Prompt(n, n, np.full(20, 5 + n, np.int32)) for n in range(3)])
    assert fake.bodies[1:] == [
        {"model": "fake", "task": "classify", "use_activation": False, "input": [[5 + n] * 16 for n in range(3)]}
    ]
    await reward.extend([Prompt(9, 9, np.full(3, 5, np.int32))])
    assert len(fake.bodies) == 2, "no whole block, no request"


async def test_a_request_that_may_pass_is_made_again_and_one_that_still_fails_names_the_table(source: Path) -> None:
    fake = FakeServer(failing=1)
    reward = on_server(fake, source, attempts=2)
    assert isinstance(reward.engine, RewardServer)
    reward.engine.service.pause = 0.0
    prompt = Prompt(0, 0, np.full(20, 5, np.int32))
    await reward.extend([prompt])
    fake.instead["/pooling"] = httpx.Response(400, text="no")
    with pytest.raises(RewardError, match=r"^rewards\.0: http://localhost:8000/pooling answered 400"):
        await reward.extend([Prompt(1, 1, prompt.tokens)])
    for wrong in ([], [{"index": 0, "data": [1.0, 2.0]}], [{"index": 0, "data": [float("nan")]}], [{"data": 3}]):
        fake.instead["/pooling"] = httpx.Response(200, content=json.dumps({"data": wrong}))
        with pytest.raises(RewardError, match=r"^rewards\.0: http://localhost:8000"):
            await reward.extend([Prompt(2 + len(str(wrong)), 2, prompt.tokens)])


@pytest.mark.parametrize(
    ("instead", "faults"),
    [
        ({"/version": httpx.Response(200, html="<html>hello</html>")}, ["is no vLLM server", "text/html"]),
        ({"/version": httpx.Response(200, json={"version": "0.26.0"})}, ["the version of vLLM should be", "0.26.0"]),
        ({"/v1/models": httpx.Response(401, json={})}, ["refuses requests without a key", "api_key_env"]),
        ({"/pooling": httpx.Response(404, json={"detail": "Not Found"})}, ["/pooling should answer 200", "Not Found"]),
        ({"/pooling": httpx.Response(200, json={"data": [{"index": 0, "data": [1.0, 2.0]}]})}, ["should be a number"]),
        ({"/pooling": httpx.Response(200, json={"other": 1})}, ["should be a number"]),
        ({"/v1/models": httpx.Response(200, json={"data": [{"id": "x"}]})}, ["max_model_len", "a number of tokens"]),
    ],
)
def test_a_server_that_does_not_score_is_refused_with_the_command_that_does(
    source: Path, instead: dict[str, httpx.Response], faults: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        on_server(FakeServer(instead=instead), source)
    said = str(caught.value)
    assert all(fault in said for fault in faults), said
    if "401" not in said and "is no vLLM server" not in said:
        assert said.endswith(f"vllm serve {source} --runner pooling --convert classify --port 8000")


def test_a_server_of_a_model_with_labels_is_refused(tmp_path: Path) -> None:
    several = LlamaConfig()
    several.num_labels = 3
    several.save_pretrained(tmp_path / "several")
    with pytest.raises(ModelRefused, match="several has 3 labels"):
        on_server(FakeServer(), tmp_path / "several")
