"""Scorers on vLLM over the fake: rewards and log-probs are those of whole sequences, and no token is computed twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from transformers import LlamaConfig

from oppo.errors import ConfigError, ModelError, ModelLost, ModelRefused, ProtocolError, RewardError
from oppo.events import Finish, FloatArray, Prompt, Response
from oppo.models import Sampling, Scorer
from oppo.observe import Span
from oppo.returns import TopLogprobs
from oppo.testing import check_scorer
from oppo.vllm.plugin import LogitsOfPrompts
from oppo.vllm.scorers import LogprobServer, RewardServer, VllmLogprobs, VllmReward
from tests.kit.responses import EOS, PADDING, VOCABULARY, answered, chunk, endings, finishes, responses, stream
from tests.kit.virtual import virtually
from tests.vllm.fakes import BLOCK, URL, FakeAsyncLLM, FakeServer, engine_of, logprobs_after, score

LONGEST = 160


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = LlamaConfig(vocab_size=VOCABULARY, pad_token_id=PADDING)
    config.num_labels = 1
    config.save_pretrained(tmp_path / "served")
    return tmp_path / "served"


def rewarding(llm: FakeAsyncLLM | None = None, /, key: str = "", **facts: Any) -> VllmReward:
    llm = llm or FakeAsyncLLM()
    llm.facts = {"model": "tiny", "runner": "pooling", "vocabulary": VOCABULARY, "longest": LONGEST, **facts}
    return VllmReward(engine_of(llm), key=key)


@pytest.mark.parametrize("kind", ["reward", "reward on a server", "log-probs"])
async def test_the_contract_is_kept(kind: str, source: Path) -> None:
    async def make() -> Scorer[object]:
        if kind == "log-probs":
            return served()
        return rewarding() if kind == "reward" else reward_server(FakeServer(), source)

    finished = finishes([each for each in responses() if len(each) >= 4])
    await check_scorer(make, finished, lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)))


def whole(response: Response) -> list[int]:
    return [*response.prompt.tokens.tolist(), *response.tokens.tolist()]


@pytest.mark.parametrize("seed", range(5))
async def test_any_arrival_pattern_gives_the_score_of_the_whole_sequence_and_computes_no_token_twice(seed: int) -> None:
    engine, made = FakeAsyncLLM(), responses()
    reward = rewarding(engine)
    values = await stream(reward, made, seed)
    assert values == {each.prompt.rollout: score(whole(each)) for each in made}
    assert (reward.tokens.again, reward.tokens.computed) == (0, sum(len(whole(each)) for each in made))


@pytest.mark.parametrize(("length", "read"), [(16, [8, 16, 19]), (13, [8, 16])])
async def test_whole_blocks_are_read_while_a_rollout_grows_and_only_the_rest_when_it_ends(
    length: int, read: list[int]
) -> None:
    engine = FakeAsyncLLM()
    reward = rewarding(engine)
    response = answered(0, [5] * 3, list(range(10, 10 + length)))
    await reward.extend([response.prompt])
    assert engine.sequences == []
    for start in range(0, length, 4):
        await reward.extend([response.chunk(start, min(start + 4, length))])
    assert [len(each) for each in engine.sequences] == [8, 16]
    assert await reward.finish([Finish(0, response, "eos")]) == [score(whole(response))]
    assert [len(each) for each in engine.sequences] == read
    assert reward.tokens.computed == read[-1]


async def test_what_the_cache_has_lost_is_computed_and_counted_again() -> None:
    engine = FakeAsyncLLM(room=1)
    reward = rewarding(engine)
    first, second = answered(0, [5] * 8, [6] * 4), answered(1, [7] * 8, [8] * 4)
    await reward.extend([first.prompt])
    await reward.extend([second.prompt])
    await reward.extend([first.chunk(), second.chunk()])
    got = await reward.finish([Finish(0, first, "eos"), Finish(1, second, "eos")])
    assert got == [score(whole(first)), score(whole(second))]
    assert (reward.tokens.computed, reward.tokens.again) == (8 + 8 + 12 + 12, 16)


@pytest.mark.parametrize("padding", [PADDING, EOS, None])
async def test_the_score_is_taken_at_the_last_token_that_is_not_padding(padding: int | None) -> None:
    reward = rewarding(padding=padding)
    values = await stream(reward, endings(), seed=3)
    for response in endings():
        tokens = whole(response)
        real = [at for at, token in enumerate(tokens) if token != padding]
        assert values[response.prompt.rollout] == score(tokens[: (real or [0])[-1] + 1])


async def test_events_out_of_place_and_tokens_of_another_vocabulary_are_errors() -> None:
    engine = FakeAsyncLLM()
    reward = rewarding(engine)
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
    for token in (-1, VOCABULARY):
        with pytest.raises(ModelError, match=f"rollout 3 has token ids from .* of tiny has {VOCABULARY}: policy and"):
            await reward.extend([Prompt(3, 3, np.full(BLOCK, token, np.int32))])
    assert not engine.sequences
    await reward.forget([7, 8])
    await reward.extend([response.prompt, response.chunk()])
    assert await reward.finish([Finish(7, response, "eos")]) == [score(whole(response))]


@virtually
async def test_a_cancelled_call_leaves_no_request_behind() -> None:
    engine = FakeAsyncLLM(answers_after=10)
    with anyio.move_on_after(1) as scope:
        await rewarding(engine).extend([Prompt(n, n, np.full(BLOCK, 5, np.int32)) for n in range(3)])
    assert scope.cancelled_caught
    assert (len(engine.sequences), len(engine.asking)) == (3, 0)


@virtually
async def test_an_engine_that_dies_while_it_owes_a_score_is_a_lost_model() -> None:
    engine = FakeAsyncLLM(answers_after=1000)

    async def die() -> None:
        await anyio.sleep(1)
        engine.errored = True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(die)
        with pytest.raises(ModelLost, match="vLLM has died"):
            await rewarding(engine).extend([Prompt(0, 0, np.full(BLOCK, 5, np.int32))])


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
def test_a_model_that_cannot_score_growing_prefixes_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        rewarding(**changes)


@virtually
async def test_its_work_is_reported_and_its_errors_name_the_table() -> None:
    engine, spans = FakeAsyncLLM(answers_after=5), list[Span]()
    reward = rewarding(engine, key="rewards.1")
    reward.reporter.listener = spans.append
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reward.extend, [Prompt(0, 0, np.full(BLOCK, 5, np.int32))])
        await anyio.sleep(1)
        assert reward.reporter.at_work == "reward model: extend"
    engine.errored = True
    with pytest.raises(ModelLost, match=r"^rewards\.1: vLLM has failed"):
        await reward.extend([Prompt(1, 1, np.full(BLOCK, 5, np.int32))])
    assert [span.label for span in spans] == ["extend", "extend"]
    assert reward.reporter.at_work == ""


def reward_server(fake: FakeServer, source: Path, **given: Any) -> VllmReward:
    return VllmReward(RewardServer(URL, source, transport=fake, **given), key="rewards.0")


async def test_all_that_grow_together_are_one_request_for_logits(source: Path) -> None:
    fake = FakeServer(key="secret")
    reward = reward_server(fake, source, api_key="secret")
    await reward.extend([Prompt(n, n, np.full(20, 5 + n, np.int32)) for n in range(3)])
    assert fake.bodies[1:] == [
        {"model": "fake", "task": "classify", "use_activation": False, "input": [[5 + n] * 16 for n in range(3)]}
    ]
    await reward.extend([Prompt(9, 9, np.full(3, 5, np.int32))])
    assert len(fake.bodies) == 2, "no whole block, no request"


async def test_a_request_that_may_pass_is_made_again_and_one_that_still_fails_names_the_table(source: Path) -> None:
    fake = FakeServer(failing=1)
    reward = reward_server(fake, source, attempts=2)
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


def test_a_server_of_a_model_with_labels_is_refused(tmp_path: Path) -> None:
    several = LlamaConfig()
    several.num_labels = 3
    several.save_pretrained(tmp_path / "several")
    with pytest.raises(ModelRefused, match="several has 3 labels"):
        reward_server(FakeServer(), tmp_path / "several")


SAMPLING = Sampling(max_new_tokens=128)


def served(
    llm: FakeAsyncLLM | None = None, *, sampling: Sampling = SAMPLING, top_k: int = 0, **facts: Any
) -> VllmLogprobs:
    llm = llm or FakeAsyncLLM()
    llm.facts = {"model": "tiny", "vocabulary": VOCABULARY, "longest": LONGEST + 1, **facts}
    return VllmLogprobs(engine_of(llm), sampling=sampling, top_k=top_k)


def wanted(response: Response, vocabulary: int = VOCABULARY, temperature: float = 1.0) -> list[FloatArray]:
    """Return what is known of each place of a response: the log-probs of all ids."""
    tokens, start = [*response.prompt.tokens.tolist(), *response.tokens.tolist()], len(response.prompt.tokens)
    return [logprobs_after(tokens[:at], vocabulary, temperature) for at in range(start, len(tokens))]


def assert_own(got: object, response: Response, vocabulary: int = VOCABULARY, temperature: float = 1.0) -> None:
    own = [row[token] for row, token in zip(wanted(response, vocabulary, temperature), response.tokens, strict=True)]
    assert isinstance(got, np.ndarray)
    assert got.dtype == np.float32
    assert got.tolist() == own


@pytest.mark.parametrize("uninitialised", [True, False], ids=["numbers-without-meaning", "no-places"])
@pytest.mark.parametrize("seed", range(5))
async def test_any_arrival_pattern_gives_the_log_probs_of_the_whole_sequence(seed: int, uninitialised: bool) -> None:
    engine, made = FakeAsyncLLM(uninitialised=uninitialised), responses()
    reference = served(engine)
    values = await stream(reference, made, seed)
    for each in made:
        assert_own(values[each.prompt.rollout], each)
    lengths = [len(each.prompt.tokens) + len(each) for each in made]
    asked = len(engine.sequences) - len(made)  # each of these reads a token past its last block, and that again
    assert sum(lengths) <= reference.tokens.computed <= sum(lengths) + asked
    assert reference.tokens.again <= asked


async def test_blocks_are_read_with_the_token_behind_them_and_the_rest_at_the_end() -> None:
    engine = FakeAsyncLLM()
    reference = served(engine)
    response = answered(0, [5] * 3, list(range(10, 31)))
    await reference.extend([response.prompt])
    assert engine.sequences == []
    for start in range(0, 21, 3):
        await reference.extend([response.chunk(start, start + 3)])
    assert [len(each) for each in engine.sequences] == [9, 17]
    (value,) = await reference.finish([Finish(0, response, "eos")])
    assert [len(each) for each in engine.sequences] == [9, 17, 24]
    assert (reference.tokens.computed, reference.tokens.again) == (24 + 2, 2)
    assert_own(value, response)


async def test_two_rollouts_that_begin_alike_or_one_that_comes_again_have_a_cache_each() -> None:
    reference = served()
    made = [answered(n, [5] * BLOCK, [*range(10, 10 + 2 * BLOCK), n]) for n in range(2)]
    await reference.extend([made[0].prompt, made[0].chunk()])
    await reference.forget([0])
    for response in made:
        await reference.extend([response.prompt, response.chunk()])
    for response in made:
        (value,) = await reference.finish([Finish(response.prompt.rollout, response, "eos")])
        assert_own(value, response)


async def test_what_the_cache_has_lost_is_read_again() -> None:
    reference = served(FakeAsyncLLM(room=1))
    made = responses()
    values = await stream(reference, made, 1)
    for each in made:
        assert_own(values[each.prompt.rollout], each)
    assert reference.tokens.again > 50


async def test_without_a_prefix_cache_each_rollout_is_read_when_it_has_ended() -> None:
    engine, made = FakeAsyncLLM(), responses()
    values = await stream(served(engine, prefix=False), made, 2)
    assert len(engine.sequences) == len(made)
    for each in made:
        assert_own(values[each.prompt.rollout], each)


async def test_an_answer_about_other_tokens_is_a_lost_model_and_not_a_number() -> None:
    engine = FakeAsyncLLM()
    reference = served(engine)
    response = answered(0, [5] * 10, [6] * 10)
    await reference.extend([response.prompt, response.chunk()])
    engine.hit = lambda sequence, salt="": len(sequence) - 1  # type: ignore[method-assign]
    with pytest.raises(ModelLost, match=r"the log-probs of 3 tokens, and gave those of"):
        await reference.finish([Finish(0, response, "eos")])


async def test_temperature_and_ids_that_are_never_sampled_are_the_policy_s() -> None:
    engine, made = FakeAsyncLLM(), responses()
    reference = served(engine, sampling=Sampling(max_new_tokens=128, temperature=0.7, vocabulary=96))
    values = await stream(reference, made, 0)
    assert engine.tempers == [(0.7, 96)]
    for each in made:
        assert_own(values[each.prompt.rollout], each, 96, 0.7)


def test_a_worker_s_logits_are_divided_and_cut_once_however_often_it_is_told() -> None:
    torch = pytest.importorskip("torch")

    class Model:
        def compute_logits(self, hidden: Any) -> Any:
            return None if hidden is None else hidden.clone()

    worker = LogitsOfPrompts()
    worker.model_runner = SimpleNamespace(model=Model())
    worker.oppo_temper(4.0, 3)
    worker.oppo_temper(0.5, 2)
    found = worker.model_runner.model.compute_logits(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert found.tolist() == [[2.0, 4.0, -float("inf"), -float("inf")]]
    assert worker.model_runner.model.compute_logits(None) is None


@pytest.mark.parametrize("on", ["engine", "server"])
async def test_a_teacher_lists_the_likeliest_ids_and_what_the_others_have_together(on: str, source: Path) -> None:
    made, k = responses(3), 4
    teacher = served(top_k=k) if on == "engine" else on_server(scoring(), source, top_k=k)
    values = await stream(teacher, made, 0)
    for each in made:
        found, rows = values[each.prompt.rollout], wanted(each)
        assert isinstance(found, TopLogprobs)
        assert_own(found.tokens, each)
        for row, ids, top in zip(rows, found.ids, found.top, strict=True):
            assert ids.tolist() == np.argsort(-row, kind="stable")[:k].tolist()
            np.testing.assert_array_equal(top[:k], row[ids])
            np.testing.assert_allclose(np.exp(top, dtype=np.float64).sum(), 1, atol=1e-6)


async def test_more_ids_than_the_policy_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"tiny knows {VOCABULARY} ids, and top_k = 100"):
        served(top_k=100)
    with pytest.raises(ConfigError, match="tiny knows 7 ids, and top_k = 8"):
        served(top_k=8, sampling=Sampling(max_new_tokens=128, vocabulary=7))


PADDED = VOCABULARY - 7


def known() -> list[Response]:
    return [
        answered(n, (made.prompt.tokens % PADDED).tolist(), (made.tokens % PADDED).tolist())
        for n, made in enumerate(responses())
    ]


@pytest.mark.parametrize("top_k", [0, 4])
async def test_a_server_whose_padding_is_unlikely_has_the_log_probs_over_the_policys_ids(
    source: Path, top_k: int
) -> None:
    sampling, fake = Sampling(max_new_tokens=128, vocabulary=PADDED), scoring(likely=PADDED)
    async with on_server(fake, source, top_k=top_k, sampling=sampling) as teacher:
        values = await stream(teacher, made := known(), 3)
    assert all(body["allowed_token_ids"] == list(range(PADDED, VOCABULARY)) for body in fake.bodies)
    for each in made:
        value = values[each.prompt.rollout]
        assert_own(value.tokens if isinstance(value, TopLogprobs) else value, each, PADDED)


async def test_a_server_whose_padding_is_likely_is_refused_at_its_start_or_behind_a_response(source: Path) -> None:
    sampling, fake = Sampling(max_new_tokens=128, vocabulary=PADDED), scoring()
    expected = (
        rf"served has {VOCABULARY} ids and the policy {PADDED}, .* at most 0\.0001 .*leave url out.*got up to 0\."
    )
    with pytest.raises(ConfigError, match=expected):
        on_server(fake, source, sampling=sampling)
    fake.likely = PADDED
    teacher = on_server(fake, source, sampling=sampling)
    fake.likely = VOCABULARY
    with pytest.raises(RewardError, match=expected):
        await stream(teacher, known(), 0)


async def test_a_server_that_lists_an_id_which_the_policy_lacks_is_refused(source: Path) -> None:
    known = VOCABULARY // 2
    sampling = Sampling(max_new_tokens=128, vocabulary=known)
    teacher = on_server(scoring(likely=known), source, top_k=known + 1, sampling=sampling)
    with pytest.raises(RewardError, match=r"lists the id \d+ .* the policy knows the 48 below 48: .* leave url out"):
        await stream(teacher, responses(), 0)


async def test_a_sequence_as_long_as_the_engine_reads_leaves_no_room_for_its_answer() -> None:
    reference = served()
    assert reference.longest == LONGEST
    with pytest.raises(ModelError, match=f"rollout 3 has 161 tokens, .* reads at most {LONGEST}"):
        await reference.extend([Prompt(3, 3, np.full(LONGEST + 1, 5, np.int32))])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"top_k": 5}, "sampling.top_k = 5 leaves ids out"),
        ({"top_p": 0.9}, "sampling.top_p = 0.9 leaves ids out"),
        ({"min_new_tokens": 3, "stop": (2,)}, "sampling.min_new_tokens = 3 leaves ids out"),
    ],
)
def test_log_probs_over_some_ids_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        served(sampling=Sampling(max_new_tokens=128, **given))


def test_a_model_that_does_not_generate_is_refused() -> None:
    with pytest.raises(ModelRefused, match="tiny does not generate"):
        served(runner="pooling")


def scoring(**given: Any) -> FakeServer:
    return FakeServer(FakeAsyncLLM(facts={"vocabulary": VOCABULARY}), **given)


def on_server(
    fake: FakeServer, source: Path, *, top_k: int = 0, sampling: Sampling = SAMPLING, **given: Any
) -> VllmLogprobs:
    server = LogprobServer(URL, source, top_k=top_k, vocabulary=sampling.vocabulary, transport=fake, **given)
    server.service.pause = 0.0
    return VllmLogprobs(server, sampling=sampling, top_k=top_k, key="scorers.teacher")


async def test_servers_give_the_values_of_whole_sequences_and_one_of_log_probs_is_asked_once(source: Path) -> None:
    fake, made = scoring(key="secret"), responses()
    async with reward_server(FakeServer(), source) as reward:
        assert await stream(reward, made, 3) == {each.prompt.rollout: score(whole(each)) for each in made}
    async with on_server(fake, source, api_key="secret") as teacher:
        values = await stream(teacher, made, 3)
    for each in made:
        assert_own(values[each.prompt.rollout], each)
    assert len(fake.bodies) == 1 + len(made), "one to see whether it can"
    assert fake.bodies[-1].keys() == {"model", "prompt", "max_tokens", "temperature", "prompt_logprobs"}


async def test_a_request_to_a_server_is_made_again_and_a_malformed_answer_is_an_error(source: Path) -> None:
    fake, response = scoring(failing=1), answered(0, [5, 6], [7, 8])
    teacher = on_server(fake, source, attempts=2)
    await teacher.extend([response.prompt, response.chunk()])
    (value,) = await teacher.finish([Finish(0, response, "eos")])
    assert_own(value, response)
    places: list[Any] = [None, {}, {"7": {"logprob": -1.0, "rank": 1}}]
    for wrong in ([], places, [*places, {"9": {"logprob": -1.0, "rank": 1}}], [*places, "none"], [*places, None]):
        fake.instead["/v1/completions"] = httpx.Response(200, json={"choices": [{"prompt_logprobs": wrong}]})
        await teacher.extend([response.prompt, response.chunk()])
        with pytest.raises(RewardError, match=r"^scorers\.teacher: http://localhost:8000 .*the log-probs of 4 tokens"):
            await teacher.finish([Finish(0, response, "eos")])
        await teacher.forget([0])


SCORES, LOGPROBS = "--runner pooling --convert classify", "--max-logprobs 30"


@pytest.mark.parametrize(
    ("path", "answer", "flags", "faults"),
    [
        ("/version", {"version": "0.26.0"}, SCORES, ["the version of vLLM should be", "0.26.0"]),
        ("/v1/models", {"data": [{"id": "x"}]}, SCORES, ["max_model_len", "a number of tokens"]),
        ("/pooling", None, SCORES, ["/pooling should answer 200", "max_logprobs"]),
        ("/pooling", {"data": [{"index": 0, "data": [1.0, 2.0]}]}, SCORES, ["should be a number"]),
        ("/pooling", {"other": 1}, SCORES, ["should be a number"]),
        ("/v1/completions", None, LOGPROBS, ["/v1/completions should answer 200", "max_logprobs"]),
        ("/v1/completions", {"choices": [{"text": "x"}]}, LOGPROBS, ["the log-probs of two tokens"]),
    ],
)
def test_a_server_that_does_not_score_is_refused_with_the_command_that_does(
    source: Path, path: str, answer: dict[str, Any] | None, flags: str, faults: list[str]
) -> None:
    refusal = httpx.Response(400, json={"error": {"message": "max_logprobs"}})
    fake = scoring(instead={path: refusal if answer is None else httpx.Response(200, json=answer)})
    with pytest.raises(ConfigError) as caught:
        reward_server(fake, source) if flags == SCORES else on_server(fake, source, top_k=30)
    said = str(caught.value)
    assert all(fault in said for fault in faults), said
    assert said.endswith(f"vllm serve {source} {flags} --port 8000")


def test_a_server_knows_no_temperature_for_prompts(source: Path) -> None:
    server = LogprobServer(URL, source, transport=scoring())
    with pytest.raises(ConfigError, match=r"sampling\.temperature = 0\.7 divides the logits, .*: set it to 1"):
        VllmLogprobs(server, sampling=Sampling(max_new_tokens=8, temperature=0.7))
