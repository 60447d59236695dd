"""The policy on a fake of a vLLM server, in virtual time: tokens, pauses, weight syncs, and what ends it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.to_thread
import httpx
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo.errors import ModelLost
from oppo.events import Prompt
from oppo.models import Sampling, Weights
from oppo.testing import check_policy, run_virtual
from oppo.vllm import VllmPolicy
from oppo.vllm.engine import NewTokens
from oppo.vllm.http import Inbox, Logprob
from tests.vllm.bench import SAMPLING, WEIGHTS, Bench, varied
from tests.vllm.fake_engine import VOCABULARY, FakeAsyncLLM, Request, running
from tests.vllm.fake_server import FakeServer, described, server_of


@dataclass
class ServerBench(Bench):
    """A policy over a fake of a server."""

    fake: FakeServer = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fake = FakeServer(self.llm)
        self.server = server_of(self.fake)
        self.policy = VllmPolicy(self.server, sampling=self.sampling, **self.keywords)


def test_it_keeps_the_contract_of_a_policy() -> None:
    async def main() -> None:
        fake = FakeServer()
        server = server_of(fake)

        async def make() -> VllmPolicy:
            return VllmPolicy(server, sampling=SAMPLING)

        async with running(fake.llm):
            await check_policy(make, varied(5))
        assert not fake.llm.requests

    run_virtual(main)


def parts_of(requests: Sequence[Request], prompt: Prompt) -> list[Request]:
    """Return the requests of a rollout that the server has made tokens for, in order."""
    start = prompt.tokens.tolist()
    mine = [each for each in requests if each.tokens and each.prompt[: len(start)] == start]
    return sorted(mine, key=lambda each: len(each.prompt))


@dataclass(frozen=True)
class Case:
    """Steps, each with a weight sync.

    Attributes:
        count: of rollouts.
        at: how many are reported before each cut; then there is none.
        overrun: as :class:`FakeAsyncLLM` has it.
        limit: tokens of a read.
        delay: seconds from the beginning of a step to its weight sync; ``None``: it comes after the step.
    """

    count: int = 3
    at: tuple[int, ...] = (1, 1)
    overrun: int = 4
    limit: int = 3
    delay: float | None = 0.01


CASES = st.builds(
    Case,
    st.integers(1, 5),
    st.lists(st.integers(1, 3), max_size=4).map(tuple),
    st.integers(0, 5),
    st.integers(1, 30),
    st.sampled_from([None, 0.0, 0.003, 0.01]),
)


@given(CASES)
@example(Case())
@example(Case(delay=None))
def test_no_token_is_lost_doubled_or_counted_to_other_weights(case: Case) -> None:
    bench, prompts = ServerBench(FakeAsyncLLM(overrun=case.overrun)), varied(case.count)

    async def main() -> None:
        decodes = await bench.policy.open(prompts)
        for cut_at in [*case.at, 1_000]:
            live = [decode for decode in decodes if not decode.ended]
            await bench.step(live, cut_at, case.limit, load=case.delay)
            if case.delay is None:
                await bench.policy.load(Weights(bench.policy.version + 1, WEIGHTS))

    bench.run(main)
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
    assert not bench.llm.requests


def test_a_request_says_what_sampling_says_and_the_weights_it_may_share_a_prefix_with() -> None:
    sampling = Sampling(max_new_tokens=20, top_k=3, top_p=0.9, min_new_tokens=4, stop=(2, 3), vocabulary=VOCABULARY - 1)
    bench = ServerBench(sampling=sampling)

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)
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
    bench = ServerBench(FakeAsyncLLM(logprob=lambda position: -1.0), sampling=Sampling(max_new_tokens=3, top_k=2))
    content = [
        {"token_id": token, "logprob": -1.0, "top_logprobs": [{"token_id": 5, "logprob": other}]}
        for token, other in ((7, -0.5), (8, -9999.0), (9, -2.0))
    ]
    choice = {"token_ids": [7, 8, 9], "logprobs": {"content": content}, "finish_reason": "length"}
    text = json.dumps({"choices": [{**choice, "weight_versions": None}]})
    bench.fake.instead["/inference/v1/generate"] = httpx.Response(200, text=f"data: {text}\n\ndata: [DONE]\n\n")

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)), limit=100)

    bench.run(main)
    (piece,) = bench.pieces[0]
    assert piece.support.counts.tolist() == [2, 1, 2]
    assert piece.support.ids.tolist() == [5, 7, 8, 5, 9]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "answered 400 Bad Request: .*too long"),
        (httpx.Response(200, text='data: {"choices": [{}]}\n\n'), "streamed something else than tokens"),
        (httpx.Response(200, text='data: {"error": {"message": "no"}}\n\n'), "could not go on: .*no"),
        (httpx.Response(200, text="data: [DONE]\n\n"), "ended a stream of tokens without saying why"),
    ],
)
def test_a_stream_that_is_none_loses_the_model(answer: httpx.Response, message: str) -> None:
    bench = ServerBench()
    bench.fake.instead["/inference/v1/generate"] = answer

    async def main() -> None:
        with pytest.raises(ModelLost, match=rf"http://localhost:8000.* {message}.*start the server at"):
            await bench.step(await bench.policy.open(varied(2)))

    bench.run(main)


def test_a_server_that_dies_while_it_decodes_is_a_lost_model_at_once() -> None:
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 50), sampling=replace(SAMPLING, max_new_tokens=60))

    async def main() -> None:
        async def die() -> None:
            await anyio.sleep(0.1)
            bench.llm.die()

        decodes = await bench.policy.open(varied(3))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(die)
            with pytest.raises(
                ModelLost, match=r"is lost: ReadError: .*start the server at http://localhost:8000 again"
            ):
                await bench.step(decodes)
        assert anyio.current_time() == pytest.approx(0.1, abs=0.02)
        assert bench.tokens(0), "what came before stays"
        with pytest.raises(ModelLost, match="is lost"):
            await bench.policy.load(Weights(1, WEIGHTS))
        for decode in decodes:
            await decode.aclose()

    bench.run(main)


def test_a_server_that_is_silent_is_asked_whether_it_is_there() -> None:
    bench = ServerBench(FakeAsyncLLM(seconds=1000.0))
    bench.fake.instead["/health"] = httpx.Response(503)

    async def main() -> None:
        with pytest.raises(ModelLost, match="/health answered 503"):
            await bench.step(await bench.policy.open(varied(1)))
        assert anyio.current_time() < 10

    bench.run(main)


def test_a_run_may_give_a_server_up_from_another_thread() -> None:
    bench = ServerBench(FakeAsyncLLM(seconds=1000.0))

    async def main() -> None:
        async def give_up() -> None:
            await anyio.sleep(0.1)
            await anyio.to_thread.run_sync(bench.server.abort)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            with pytest.raises(ModelLost, match="the run has given it up"):
                await bench.step(await bench.policy.open(varied(1)))

    bench.run(main, threads=True)


def test_a_server_that_goes_on_without_an_update_is_named() -> None:
    bench = ServerBench()
    bench.fake.forgets = True

    async def main() -> None:
        with pytest.raises(
            ModelLost, match=r"version \w+-1, .*http://localhost:8000 serves weights '\w+-0', and '\w+-1'"
        ):
            await bench.policy.load(Weights(1, WEIGHTS))
        with pytest.raises(ModelLost, match="nothing is decoded any more"):
            await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)


def test_a_server_that_was_started_again_between_two_steps_is_noticed_before_it_decodes() -> None:
    bench = ServerBench()

    async def main() -> None:
        await bench.policy.load(Weights(1, WEIGHTS))
        bench.llm.version = "default"
        with pytest.raises(ModelLost, match=r"serves weights 'default', .* was started again"):
            await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)


def test_an_update_that_an_earlier_run_has_left_open_is_ended() -> None:
    bench = ServerBench()

    async def main() -> None:
        await bench.llm.start_weight_update()
        await bench.policy.load(Weights(1, WEIGHTS))
        assert len(bench.llm.updates) == 1
        bench.fake.instead["/start_weight_update"] = httpx.Response(500, json={"error": "another"})
        with pytest.raises(ModelLost, match="/start_weight_update answered 500"):
            await bench.policy.load(Weights(2, WEIGHTS))

    bench.run(main)


def test_a_server_with_the_weights_of_an_earlier_run_needs_those_of_this_one() -> None:
    bench = ServerBench()

    async def main() -> None:
        await bench.policy.load(Weights(1, WEIGHTS))
        policy = VllmPolicy(server_of(bench.fake), sampling=SAMPLING)
        (decode,) = await policy.open(varied(1))
        with pytest.raises(ModelLost, match="has the weights of an earlier run: load those that are trained"):
            async with policy.decoding([decode], lambda ended: False):
                await decode.read(1)
        await policy.load(Weights(0, WEIGHTS))
        (decode,) = await policy.open(varied(1))
        async with policy.decoding([decode], lambda ended: False):
            assert (await decode.read(1)).versions.tolist() == [0]

    bench.run(main)


def test_tokens_of_weights_that_nobody_synced_are_an_error() -> None:
    bench = ServerBench(FakeAsyncLLM(mislabelled=True))

    async def main() -> None:
        with pytest.raises(Exception, match="vLLM says that weights another-9 made token"):
            await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)


def test_streams_that_do_not_end_at_a_pause_are_given_up() -> None:
    """The server has had a request after it was paused, so that it tells of no end."""
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 4 if prompt[0] == 10 else 30, seconds=0.01))
    begun: list[Any] = []
    abort = bench.fake._abort

    def late(request: Request) -> None:
        if request in begun:
            abort(request)
        else:
            begun.append(request)

    bench.fake._abort = late  # type: ignore[method-assign]  # the pause passes it over, the call by name does not

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes, cut_at=1)
        assert anyio.current_time() > 5
        assert not bench.llm.requests
        await bench.step([decodes[1]])

    bench.run(main)
    assert bench.pieces[1][-1].state != "live"


def test_the_room_in_the_kv_cache_is_what_requests_leave_of_it() -> None:
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 15))
    assert bench.policy.free_kv_tokens is None
    bench.fake.config["cache_config"] = {"kv_cache_size_tokens": 100}
    policy = VllmPolicy(server_of(bench.fake), sampling=SAMPLING)

    async def main() -> None:
        decodes = await policy.open(varied(2))
        async with policy.decoding(decodes, lambda ended: False):
            await decodes[0].read(1)
            assert policy.free_kv_tokens == 100 - 2 * (2 + 1)
            for decode in decodes:
                while (await decode.read(100)).state == "live":
                    pass
        assert policy.free_kv_tokens == 100

    bench.run(main)


def test_what_is_closed_ends_on_the_server() -> None:
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 15))

    async def main() -> None:
        first, second = await bench.policy.open(varied(2))
        async with bench.policy.decoding([first, second], lambda ended: False):
            await first.read(2)
            await first.aclose()
            while (await second.read(100)).state == "live":
                pass
        assert [request.prompt for request in bench.llm.aborted] == [[10, 4]]

    bench.run(main)


def test_a_cancelled_decoding_leaves_nothing_behind() -> None:
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 50), sampling=replace(SAMPLING, max_new_tokens=60))

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        with anyio.move_on_after(0.055):
            await bench.step(decodes)
        assert not bench.llm.requests
        assert bench.llm.paused
        await bench.step(decodes)
        assert bench.pieces[0][-1].state == "eos"

    bench.run(main)


def test_a_closed_server_is_left_to_others() -> None:
    bench = ServerBench()

    async def main() -> None:
        await bench.policy.load(Weights(1, WEIGHTS))
        bench.server.close()
        bench.server.close()

    bench.run(main)
    assert bench.fake.asked[-1] == "/resume"
    assert bench.fake.asked.count("/resume") == 1


def test_an_error_waits_behind_the_tokens_before_it() -> None:
    async def main() -> None:
        inbox = Inbox()
        inbox.put(NewTokens([1], [{1: Logprob(-1.0)}]))
        inbox.put(NewTokens([2], [{2: Logprob(-1.0)}], "stop"))
        inbox.fail(ValueError("gone"))
        new = await inbox.get()
        assert (new.tokens, new.reason) == ([1, 2], "stop")
        with pytest.raises(ValueError, match="gone"):
            await inbox.get()

    run_virtual(main)


def test_longest_sequences_are_those_of_the_server() -> None:
    fake = FakeServer(config=described(30))
    policy = VllmPolicy(server_of(fake), sampling=replace(SAMPLING, max_new_tokens=100))

    async def main() -> None:
        (decode,) = await policy.open([Prompt(0, 0, np.arange(4, 24, dtype=np.int32))])
        assert decode.limit == 10

    run_virtual(main)
