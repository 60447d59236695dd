"""The policy on vLLM over the fake of the engine, in this process or behind a server, in virtual time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import httpx
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo.errors import ConfigError, ModelError, ModelLost, ProtocolError
from oppo.events import Prompt, Response, Support
from oppo.models import Sampling, Weights
from oppo.run.checkpoint import write_state
from oppo.stages import Update
from oppo.testing import FakePolicy, FakeTrainer, check_policy, run_virtual
from oppo.vllm import VllmDecode, VllmPolicy
from tests.kit.pipelines import Pipeline, Setting
from tests.kit.responses import read_chunk
from tests.kit.virtual import virtually
from tests.vllm.bench import SAMPLING, WEIGHTS, Bench, varied
from tests.vllm.fakes import VOCABULARY, FakeAsyncLLM, FakeSender, Output, Request, engine_of, running, server_of

on_both = pytest.mark.parametrize("on", ["engine", "server"])
LONG = replace(SAMPLING, max_new_tokens=60)


@on_both
def test_it_keeps_the_contract_of_a_policy(on: str) -> None:
    bench = Bench(on=on)

    async def make() -> VllmPolicy:
        return VllmPolicy(bench.engine, sampling=SAMPLING)

    bench.run(partial(check_policy, make, varied(5)))
    assert not bench.llm.requests or on == "engine"


def parts_of(requests: Sequence[Request], prompt: Prompt) -> list[Request]:
    """Return the requests of a rollout that have made tokens, in order."""
    start = prompt.tokens.tolist()
    mine = [each for each in requests if each.tokens and each.prompt[: len(start)] == start]
    return sorted(mine, key=lambda each: len(each.prompt))


@dataclass(frozen=True)
class Case:
    """Rollouts, the cuts of their steps, and an engine.

    Attributes:
        at: how many rollouts end before the cut, by step; then there is none.
        late: as :class:`FakeAsyncLLM` has it; a weight sync takes 0.02 s, so outputs may come when it has ended.
        limit: tokens of a read.
        delay: seconds from the beginning of a step to its weight sync; ``None``: it comes after the step.
    """

    count: int = 3
    at: tuple[int, ...] = (1, 1)
    overrun: int = 4
    late: float = 0.0
    limit: int = 3
    delay: float | None = 0.01


CASES = st.builds(
    Case,
    st.integers(1, 6),
    st.lists(st.integers(1, 3), max_size=4).map(tuple),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.004, 0.015, 0.05]),
    st.integers(1, 30),
    st.sampled_from([None, 0.0, 0.003, 0.01]),
)


@pytest.mark.parametrize(("on", "kept"), [("engine", "keep"), ("engine", "recompute"), ("server", "recompute")])
@given(CASES)
@example(Case())
@example(Case(delay=None))
@example(Case(overrun=0, late=0.015))
@example(Case(overrun=0, late=0.05))
@virtually
async def test_no_token_is_lost_doubled_or_counted_to_other_weights_whatever_the_overrun(
    on: str, kept: str, case: Case
) -> None:
    late = case.late if on == "engine" else 0.0
    bench = Bench(FakeAsyncLLM(overrun=case.overrun, late=late), keywords={"kv_on_sync": kept}, on=on)
    prompts = varied(case.count)
    async with running(bench.llm):
        decodes = await bench.policy.open(prompts)
        for cut_at in [*case.at, 1_000]:
            live = [decode for decode in decodes if not decode.ended]
            await bench.step(live, cut_at, case.limit, load=case.delay)
            if case.delay is None:
                await bench.policy.load(Weights(bench.policy.version + 1, WEIGHTS))
    assert sorted(each for reported in bench.reported for each in reported) == list(range(case.count))
    for prompt in prompts:
        parts = parts_of([*bench.llm.done, *bench.llm.aborted], prompt)
        sequence, versions = prompt.tokens.tolist(), list[str]()
        for part in parts:
            assert part.prompt == sequence, "each part reads all that there is"
            sequence, versions = sequence + part.tokens, versions + part.versions
        assert bench.tokens(prompt.rollout) == sequence[len(prompt.tokens) :]
        assert bench.versions(prompt.rollout) == [bench.policy.number_of(version) for version in versions]
        assert len({part.params.seed for part in parts}) == len(parts), "no noise is used twice"
        assert [part.params.max_tokens for part in parts] == [20 - len(part.prompt) + 2 for part in parts]
        assert on == "server" or len(parts) == 1, "no request was begun twice"
    assert not bench.llm.requests


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("engine", r"go on from the newest checkpoint \(oppo resume\)"),
        ("server", r"is lost: ReadError: .*start the server at http://localhost:8000 again"),
    ],
)
@virtually
async def test_an_engine_that_dies_while_it_decodes_is_lost_at_once(on: str, message: str) -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 50), sampling=LONG, on=on)
    async with running(bench.llm):

        async def die() -> None:
            await anyio.sleep(0.1)
            bench.llm.die()

        decodes = await bench.policy.open(varied(2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(die)
            with pytest.raises(ModelLost, match=message) as caught:
                await bench.step(decodes)
        assert "while decoding rollouts [0, 1]" in caught.value.__notes__
        assert anyio.current_time() == pytest.approx(0.1, abs=0.02)
        assert bench.tokens(0), "what came before stays"
        with pytest.raises(ModelLost):
            await bench.policy.load(Weights(1, WEIGHTS))
        for decode in decodes:
            await decode.aclose()


class Odd(FakeAsyncLLM):
    def _put(self, request: Request, output: Output, version: str) -> None:
        output.outputs[0].logprobs = [{}]
        super()._put(request, output, version)


GENERATE, HEALTH = "/inference/v1/generate", "/health"
AT_THE_SERVER = r"http://localhost:8000.* {}.*start the server at"


@pytest.mark.parametrize(
    ("llm", "instead", "message"),
    [
        (
            Odd(),
            {},
            r"vLLM has failed, .*expected one completion with the log-prob of each token, and got Output",
        ),
        (
            FakeAsyncLLM(),
            {GENERATE: httpx.Response(400, json={"error": {"message": "too long"}})},
            AT_THE_SERVER.format("answered 400 Bad Request: .*too long"),
        ),
        (
            FakeAsyncLLM(),
            {GENERATE: httpx.Response(200, text='data: {"choices": [{}]}\n\n')},
            AT_THE_SERVER.format("streamed something else than tokens"),
        ),
        (
            FakeAsyncLLM(),
            {GENERATE: httpx.Response(200, text='data: {"error": {"message": "no"}}\n\n')},
            AT_THE_SERVER.format("could not go on: .*no"),
        ),
        (
            FakeAsyncLLM(),
            {GENERATE: httpx.Response(200, text="data: [DONE]\n\n")},
            AT_THE_SERVER.format("ended a stream of tokens without saying why"),
        ),
        (FakeAsyncLLM(seconds=1000.0), {HEALTH: httpx.Response(503)}, "/health answered 503"),
        (
            FakeAsyncLLM(mislabelled=True),
            {HEALTH: httpx.Response(200, json={})},
            "weights another-9 made",
        ),
    ],
)
def test_an_engine_that_gives_no_tokens_is_lost_with_what_came_instead(
    llm: FakeAsyncLLM, instead: dict[str, httpx.Response], message: str
) -> None:
    bench = Bench(llm, on="server" if instead else "engine")
    if instead:
        bench.fake.instead |= instead
    with pytest.raises((ModelLost, ProtocolError), match=message):
        bench.play(2)


@on_both
@virtually
async def test_the_engine_makes_nothing_between_two_decodings(on: str) -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 50), sampling=LONG, on=on)
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(2))
        with anyio.move_on_after(0.055):
            await bench.step(decodes)
        assert bench.llm.paused
        made = [len(request.tokens) for request in bench.llm.requests.values()]
        assert len(made) == (2 if on == "engine" else 0)
        await anyio.sleep(5.0)
        assert made == [len(request.tokens) for request in bench.llm.requests.values()]
        await bench.step(decodes)
        assert bench.pieces[0][-1].state == "eos"


@on_both
@virtually
async def test_decoding_ends_when_every_rollout_was_closed(on: str) -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 50), sampling=LONG, on=on)
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(2))
        async with bench.policy.decoding(decodes, lambda ended: False):
            for decode in decodes:
                await decode.read(3)
                await decode.aclose()
        assert not bench.llm.requests


def test_requests_say_all_that_sampling_says() -> None:
    sampling = Sampling(
        max_new_tokens=20,
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        min_new_tokens=4,
        stop=(2, 3),
        seed=5,
        vocabulary=VOCABULARY - 2,
    )
    bench = Bench(sampling=sampling)

    bench.play(2)
    first, second = sorted(bench.llm.done, key=lambda request: request.prompt)
    assert vars(first.params) == {
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.9,
        "seed": first.params.seed,
        "max_tokens": 20,
        "min_tokens": 4,
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "logprobs": 3,
        "detokenize": False,
        "logit_bias": {VOCABULARY - 2: -100.0, VOCABULARY - 1: -100.0},
    }
    assert first.params.seed != second.params.seed
    assert 0 <= first.params.seed < 2**63
    assert first.salt == second.salt
    for pieces in bench.pieces.values():
        for piece in pieces:
            assert piece.extra[Support].holds(piece.tokens).all()
            assert set(np.abs(piece.extra[Support].counts).tolist()) <= {3, 4}


class Slow(FakeAsyncLLM):
    """Reads images, say, before it has a request."""

    async def add_request(self, request_id: str, prompt: Mapping[str, Any], *given: Any, **named: Any) -> Any:
        await anyio.sleep(0.02)
        assert prompt["cache_salt"] == self.version, "the salt is of the weights that are served"
        return await super().add_request(request_id, prompt, *given, **named)


@pytest.mark.parametrize("load", [0.03, 0.045, 0.06])
def test_a_request_is_added_under_the_salt_of_the_weights_that_are_served_then(load: float) -> None:
    bench = Bench(Slow(), keywords={"kv_on_sync": "keep"})
    bench.play(4, load=load)
    assert len({request.salt for request in bench.llm.done}) == 2, "it was loaded between them"


@virtually
async def test_a_rollout_that_is_closed_while_its_request_waits_for_a_load_is_not_begun() -> None:
    bench = Bench(Slow(), sender=FakeSender(seconds=1.0))

    async def load() -> None:
        await anyio.sleep(0.02)
        await bench.policy.load(Weights(1, WEIGHTS))

    async with running(bench.llm):
        first, second = await bench.policy.open(varied(2))
        async with bench.policy.decoding([first, second], lambda finished: False), anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await anyio.sleep(0.5)
            await second.aclose()
            assert (await read_chunk(first, 100)).state == "eos"
    assert [request.prompt for request in bench.llm.done] == [first.prompt.tokens.tolist()]
    assert not bench.llm.requests


def test_greedy_decoding_excludes_nothing() -> None:
    bench = Bench(sampling=Sampling(max_new_tokens=5, temperature=0.0, top_k=3, top_p=0.5))

    bench.play(limit=100)
    (request,) = bench.llm.done
    assert (request.params.top_k, request.params.top_p, request.params.logprobs) == (0, 1.0, 0)
    assert not len(bench.pieces[0][0].extra[Support].ids), "drawn from the whole vocabulary"


@pytest.mark.parametrize(
    ("barred", "counts", "ids"),
    [((), [-2] * 5 + [0], [2, 3] * 5), ((7,), [-3] * 5 + [-1], [7, 2, 3] * 5 + [7])],
    ids=["none", "barred"],
)
def test_stop_tokens_before_the_least_length_and_barred_ids_are_never_drawn_and_listed_as_excluded(
    barred: tuple[int, ...], counts: list[int], ids: list[int]
) -> None:
    bench = Bench(sampling=Sampling(max_new_tokens=9, min_new_tokens=5, stop=(2, 3), barred=barred))
    bench.play(limit=100)
    (piece,) = bench.pieces[0]
    assert piece.extra[Support].counts.tolist()[:6] == counts
    assert piece.extra[Support].ids.tolist()[: len(ids)] == ids
    assert not {*barred} & {*piece.tokens.tolist()}


@pytest.mark.parametrize(
    ("sampling", "supports"),
    [
        (Sampling(), True),
        (Sampling(top_k=5), True),
        (Sampling(top_k=5, top_p=0.9), True),
        (Sampling(top_p=0.9), False),
        (Sampling(top_p=0.9, temperature=0.0), True),
    ],
)
def test_tokens_whose_support_vllm_does_not_report_are_not_trained_on(sampling: Sampling, supports: bool) -> None:
    policy = Bench(sampling=sampling).policy
    assert policy.capabilities.supports is supports
    if supports:
        Update(FakeTrainer(), synced=[policy])
    else:
        with pytest.raises(ConfigError, match="VllmPolicy does not report from which ids it draws each token"):
            Update(FakeTrainer(), synced=[policy])


@virtually
async def test_responses_that_end_together_are_reported_together_in_admission_order() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 6))
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(4))
        await bench.step(decodes[::-1])
    assert bench.reported == [[0, 1, 2, 3]]


@virtually
async def test_another_sampling_draws_in_its_own_way_and_what_is_deferred_goes_on() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2, 11: 3, 12: 9, 13: 4}[prompt[0]], overrun=3))
    greedy = bench.policy.with_sampling(Sampling(max_new_tokens=20, stop=(2,), temperature=0, seed=8))
    held_out = [Prompt(10**12, 10**12, np.array([13, 4], np.int32))]
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1, limit=100)
        await bench.policy.load(Weights(1, WEIGHTS))
        assert greedy.version == 1
        await bench.step(await greedy.open(held_out), limit=100)
        await bench.step(decodes[1:], limit=100)
    assert bench.reported == [[0], [10**12], [1], [2]]
    assert [bench.tokens(rollout)[-1] for rollout in (0, 10**12, 1, 2)] == [2, 2, 2, 2]
    drawn = {tuple(request.prompt[:1]): request.params for request in bench.llm.done}
    assert (drawn[13,].temperature, drawn[13,].stop_token_ids) == (0, [2])
    assert {drawn[first,].temperature for first in (10, 12)} == {1}
    assert greedy.capabilities.supports
    assert not bench.policy.with_sampling(Sampling(top_p=0.5)).capabilities.supports


def test_stop_strings_end_a_response_with_the_token_that_completes_them() -> None:
    sampling = Sampling(max_new_tokens=20, stop_strings=("b",), seed=5)
    texts = {3: "b"}
    bench = Bench(sampling=sampling, keywords={"decode": lambda tokens: "".join(texts.get(len(tokens), "a"))})

    bench.play(limit=100)
    (piece,) = bench.pieces[0]
    assert (len(piece.tokens), piece.state) == (3, "stop")
    assert len(bench.llm.aborted) == 1


@virtually
async def test_a_request_that_is_not_decoded_now_does_not_run() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2}.get(prompt[0], 9)))
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        before = len(bench.tokens(2))
        await bench.step([decodes[1]])
        await bench.step([decodes[2]])
        assert len(bench.tokens(2)) > before
    assert len(bench.reported) == 3


@virtually
async def test_another_policy_on_the_same_engine_begins_clean() -> None:
    bench = Bench()
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        later = VllmPolicy(bench.engine, sampling=SAMPLING)
        (decode,) = await later.open(varied(1))
        async with later.decoding([decode], lambda ended: False):
            piece = await read_chunk(decode, 100)
        assert set(piece.versions.tolist()) == {0}
    assert len(bench.llm.aborted) == 1
    assert not bench.engine.requests


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "is empty"), ([1] * 500, "reads at most 500"), ([5000], "holds token id 5000"), ([-1], "holds token id -1")],
)
def test_prompts_that_cannot_be_read_are_refused_by_name(tokens: list[int], message: str) -> None:
    bench = Bench()

    async def main() -> None:
        await bench.policy.open([Prompt(7, 7, np.array(tokens, np.int32))])

    with pytest.raises(ModelError, match=message):
        bench.run(main)


@virtually
async def test_it_tells_of_its_work() -> None:
    bench = Bench()
    spans: list[str] = []
    bench.policy.reporter.listener = lambda span: spans.append(f"{span.track}: {span.label}")
    async with running(bench.llm):
        await bench.step(await bench.policy.open(varied(2)))
        await bench.policy.load(Weights(1, WEIGHTS))
    assert spans == ["policy: decode", "policy: load"]
    assert bench.policy.progress == sum(len(request.tokens) for request in bench.llm.done)


@virtually
async def test_what_ends_in_the_overrun_of_a_cut_is_reported_first_at_the_next_decoding_or_closed() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2, 11: 3, 12: 9, 13: 3}[prompt[0]], overrun=3))
    at_cut: list[str] = []
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(4))
        await bench.step(decodes, cut_at=1, limit=100)
        at_cut.extend(bench.pieces[rollout][-1].state for rollout in range(4))
        assert [decode.row.withheld for decode in decodes] == [False, True, False, True]
        assert len(bench.tokens(1)) == 2, "the last token cannot be read before it is reported"
        await decodes[3].aclose()
        await bench.step(decodes[1:3], cut_at=1, limit=100)
        for decode in decodes:
            await decode.aclose()
    assert at_cut == ["eos", "cut", "cut", "cut"]
    assert bench.reported == [[0], [1]], "and the cut that it causes comes before any further token"
    assert bench.tokens(1)[-1] == 2
    assert len(bench.tokens(2)) < 9
    assert not bench.llm.requests
    assert not bench.engine.requests


@virtually
async def test_a_rollout_that_a_stop_string_ended_in_the_overrun_is_not_decoded_on() -> None:
    bench = Bench(
        FakeAsyncLLM(length=lambda prompt: {10: 2}.get(prompt[0], 40), overrun=3),
        sampling=replace(SAMPLING, max_new_tokens=40, stop_strings=("b",)),
        keywords={"decode": lambda tokens: "b" if len(tokens) == 3 else "a"},
    )
    made: list[int] = []
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(4))
        await bench.step(decodes[:2], cut_at=1, limit=100)
        assert decodes[1].row.withheld
        (request,) = bench.llm.requests.values()
        made.append(len(request.tokens))
        await bench.step(decodes[1:], cut_at=2, limit=100)
        made.append(len(request.tokens))
    assert made[0] == made[1], "its request was over before the engine went on"
    assert bench.reported == [[0], [1], [2, 3]]
    assert [len(bench.tokens(rollout)) for rollout in range(4)] == [2, 3, 3, 3]


def test_a_run_that_dies_with_a_withheld_rollout_trains_it_once_when_it_is_resumed(tmp_path: Path) -> None:
    def pipeline() -> tuple[Pipeline, FakeAsyncLLM]:
        lengths = iter((2, 3, 4, 30))
        length = cache(lambda prompt: next(lengths, 5))  # by the order in which they come
        llm = FakeAsyncLLM(length=lambda prompt: length(tuple(prompt)), overrun=4)
        made = Pipeline(Setting(batch=2, extra=2, steps=3))
        policy = VllmPolicy(engine_of(llm), sampling=replace(SAMPLING, max_new_tokens=40))
        made.policy, made.generate = cast("FakePolicy", policy), replace(made.generate, policy=policy)
        return made, llm

    one, llm = pipeline()
    two, other = pipeline()

    async def killed() -> None:
        source = one.prompts()
        async with running(llm), one.graph().open(source) as run:
            await run.step()
            carried = [cast("VllmDecode", rollout.decode) for rollout in one.generate._rollouts.values()]
            assert [(each.prompt.rollout, each.row.withheld) for each in carried] == [(2, True), (3, False)]
            write_state(tmp_path, {"run": run.state_dict(), "prompts": source.state_dict()})
            llm.die()
            await run.step()

    async def resumed() -> None:
        async with running(other):
            await two.run_part(1, 3, tmp_path)

    with pytest.raises(ModelLost):
        run_virtual(killed)
    run_virtual(resumed)
    trained = [rollout for batch in (*one.batches, *two.batches) for rollout in batch.rollouts]
    assert len(trained) == len(set(trained)) == 6
    assert {2, 3} <= set(trained)


@virtually
async def test_a_resumed_run_continues_what_was_read_and_nothing_else() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2}.get(prompt[0], 30), overrun=3))
    again = Bench(FakeAsyncLLM(length=lambda prompt: 4))
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes, cut_at=1)
        half = Response.of(decodes[1].prompt, bench.pieces[1])
    async with running(again.llm):
        await again.step(await again.policy.open([half]))
    (request,) = again.llm.done
    assert request.prompt == [*half.prompt.tokens.tolist(), *half.tokens.tolist()]
    assert request.params.max_tokens == 20 - len(half)
    assert request.params.seed != bench.llm.requests[next(iter(bench.llm.requests))].params.seed
    assert again.tokens(1) == request.tokens


def test_a_request_says_what_sampling_says_and_the_weights_it_may_share_a_prefix_with() -> None:
    sampling = Sampling(max_new_tokens=20, top_k=3, top_p=0.9, min_new_tokens=4, stop=(2, 3), vocabulary=VOCABULARY - 1)
    bench = Bench(sampling=sampling, on="server")

    bench.play()
    (body,) = bench.fake.bodies
    params = body.pop("sampling_params")
    assert body == {
        "model": "fake",
        "request_id": body["request_id"],
        "token_ids": [10, 4],
        "cache_salt": bench.llm.version,
        "stream": True,
    }
    assert (params["top_k"], params["top_p"], params["logprobs"], params["min_tokens"]) == (3, 0.9, 3, 4)
    assert params["logit_bias"] == {str(VOCABULARY - 1): -100.0}


def test_ids_that_sampling_excludes_are_known_by_what_stands_for_minus_infinity() -> None:
    bench = Bench(
        FakeAsyncLLM(logprob=lambda position: -1.0), sampling=Sampling(max_new_tokens=3, top_k=2), on="server"
    )
    content = [
        {"token_id": token, "logprob": -1.0, "top_logprobs": [{"token_id": 5, "logprob": other}]}
        for token, other in ((7, -0.5), (8, -9999.0), (9, -2.0))
    ]
    choice = {"token_ids": [7, 8, 9], "logprobs": {"content": content}, "finish_reason": "length"}
    text = json.dumps({"choices": [{**choice, "weight_versions": None}]})
    bench.fake.instead["/inference/v1/generate"] = httpx.Response(200, text=f"data: {text}\n\ndata: [DONE]\n\n")

    bench.play(limit=100)
    (piece,) = bench.pieces[0]
    assert piece.extra[Support].counts.tolist() == [2, 1, 2]
    assert piece.extra[Support].ids.tolist() == [5, 7, 8, 5, 9]


def test_a_run_may_give_a_server_up_from_another_thread() -> None:
    bench = Bench(FakeAsyncLLM(seconds=1000.0), on="server")

    async def main() -> None:
        async def give_up() -> None:
            await anyio.sleep(0.1)
            await anyio.to_thread.run_sync(bench.engine.abort)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            with pytest.raises(ModelLost, match="the run has given it up"):
                await bench.step(await bench.policy.open(varied(1)))

    bench.run(main, threads=True)


@virtually
async def test_a_server_that_goes_on_without_an_update_is_named() -> None:
    bench = Bench(on="server")
    bench.fake.forgets = True
    async with running(bench.llm):
        with pytest.raises(
            ModelLost, match=r"version \w+-1, .*http://localhost:8000 serves weights '\w+-0', and '\w+-1'"
        ):
            await bench.policy.load(Weights(1, WEIGHTS))
        with pytest.raises(ModelLost, match="nothing is decoded any more"):
            await bench.step(await bench.policy.open(varied(1)))


@virtually
async def test_a_server_that_was_started_again_between_two_steps_is_noticed_before_it_decodes() -> None:
    bench = Bench(on="server")
    async with running(bench.llm):
        await bench.policy.load(Weights(1, WEIGHTS))
        bench.llm.version = "default"
        with pytest.raises(ModelLost, match=r"serves weights 'default', .* was started again"):
            await bench.step(await bench.policy.open(varied(1)))


@virtually
async def test_an_update_that_an_earlier_run_has_left_open_is_ended() -> None:
    bench = Bench(on="server")
    async with running(bench.llm):
        await bench.llm.start_weight_update()
        await bench.policy.load(Weights(1, WEIGHTS))
        assert len(bench.llm.updates) == 1
        bench.fake.instead["/start_weight_update"] = httpx.Response(500, json={"error": "another"})
        with pytest.raises(ModelLost, match="/start_weight_update answered 500"):
            await bench.policy.load(Weights(2, WEIGHTS))


@virtually
async def test_a_server_with_the_weights_of_an_earlier_run_needs_those_of_this_one() -> None:
    bench = Bench(on="server")
    async with running(bench.llm):
        await bench.policy.load(Weights(1, WEIGHTS))
        policy = VllmPolicy(server_of(bench.fake), sampling=SAMPLING)
        (decode,) = await policy.open(varied(1))
        with pytest.raises(ModelLost, match="has the weights of an earlier run: load those that are trained"):
            async with policy.decoding([decode], lambda ended: False):
                await decode.read(1)
        await policy.load(Weights(0, WEIGHTS))
        (decode,) = await policy.open(varied(1))
        async with policy.decoding([decode], lambda ended: False):
            assert (await read_chunk(decode, 1)).versions.tolist() == [0]


@virtually
async def test_streams_that_do_not_end_at_a_pause_are_given_up() -> None:
    """The server has had a request after it was paused, so that it tells of no end."""
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 4 if prompt[0] == 10 else 30, seconds=0.01), on="server")
    begun: list[Any] = []
    abort = bench.fake._abort

    def late(request: Request) -> None:
        if request in begun:
            abort(request)
        else:
            begun.append(request)

    bench.fake._abort = late  # type: ignore[method-assign]  # the pause passes it over, the call by name does not
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes, cut_at=1)
        assert anyio.current_time() > 5
        assert not bench.llm.requests
        await bench.step([decodes[1]])
    assert bench.pieces[1][-1].state != "live"


@virtually
async def test_the_room_in_the_kv_cache_is_what_requests_leave_of_it() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 15), on="server")
    assert bench.policy.free_kv_tokens is None
    bench.fake.config["cache_config"] = {"kv_cache_size_tokens": 100}
    policy = VllmPolicy(server_of(bench.fake), sampling=SAMPLING)
    async with running(bench.llm):
        decodes = await policy.open(varied(2))
        async with policy.decoding(decodes, lambda ended: False):
            await decodes[0].read(1)
            assert policy.free_kv_tokens == 100 - 2 * (2 + 1)
            for decode in decodes:
                while (await decode.read(100)).state == "live":
                    pass
        assert policy.free_kv_tokens == 100


@virtually
async def test_a_closed_server_is_left_to_others() -> None:
    bench = Bench(on="server")
    async with running(bench.llm):
        await bench.policy.load(Weights(1, WEIGHTS))
        bench.engine.close()
        bench.engine.close()
    assert bench.fake.asked[-1] == "/resume"
    assert bench.fake.asked.count("/resume") == 1
