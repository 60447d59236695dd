"""The policy on vLLM over a fake of the engine, in virtual time."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from oppo.errors import ConfigError, ModelError, ModelLost, ProtocolError
from oppo.events import Prompt
from oppo.models import Sampling, Weights
from oppo.stages import Update
from oppo.testing import FakeTrainer, check_policy, run_virtual
from oppo.vllm import VllmPolicy
from tests.vllm.bench import SAMPLING, WEIGHTS, Bench, varied
from tests.vllm.fake_engine import VOCABULARY, FakeAsyncLLM, engine_of, running


def test_it_keeps_the_contract_of_a_policy() -> None:
    async def main() -> None:
        llm = FakeAsyncLLM()
        engine = engine_of(llm)

        async def make() -> VllmPolicy:
            return VllmPolicy(engine, sampling=SAMPLING)

        async with running(llm):
            await check_policy(make, varied(5))

    run_virtual(main)


def test_requests_say_all_that_sampling_says() -> None:
    sampling = Sampling(max_new_tokens=20, temperature=0.7, top_k=3, top_p=0.9, min_new_tokens=4, stop=(2, 3), seed=5)
    bench = Bench(sampling=sampling)

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes)

    bench.run(main)
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
    }
    assert first.params.seed != second.params.seed
    assert 0 <= first.params.seed < 2**63
    assert first.salt == second.salt
    for pieces in bench.pieces.values():
        for piece in pieces:
            assert piece.support.holds(piece.tokens).all()
            assert set(np.abs(piece.support.counts).tolist()) <= {3, 4}


def test_ids_of_a_padded_table_are_never_sampled() -> None:
    bench = Bench(sampling=Sampling(max_new_tokens=5, vocabulary=VOCABULARY - 2))

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)), limit=100)

    bench.run(main)
    (request,) = bench.llm.done
    assert request.params.logit_bias == {VOCABULARY - 2: -100.0, VOCABULARY - 1: -100.0}


def test_greedy_decoding_excludes_nothing() -> None:
    bench = Bench(sampling=Sampling(max_new_tokens=5, temperature=0.0, top_k=3, top_p=0.5))

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)), limit=100)

    bench.run(main)
    (request,) = bench.llm.done
    assert (request.params.top_k, request.params.top_p, request.params.logprobs) == (0, 1.0, 0)
    assert not len(bench.pieces[0][0].support.ids), "drawn from the whole vocabulary"


def test_a_token_before_the_least_length_lists_the_stop_tokens_as_excluded() -> None:
    bench = Bench(sampling=Sampling(max_new_tokens=9, min_new_tokens=5, stop=(2, 3)))

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)), limit=100)

    bench.run(main)
    (piece,) = bench.pieces[0]
    assert piece.support.counts.tolist()[:6] == [-2] * 5 + [0]
    assert piece.support.ids.tolist() == [2, 3] * 5


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


def test_responses_that_end_together_are_reported_together_in_admission_order() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 6))

    async def main() -> None:
        decodes = await bench.policy.open(varied(4))
        await bench.step(decodes[::-1])

    bench.run(main)
    assert bench.reported == [[0, 1, 2, 3]]


def test_another_sampling_draws_in_its_own_way_and_what_is_deferred_goes_on() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2, 11: 3, 12: 9, 13: 4}[prompt[0]], overrun=3))
    greedy = bench.policy.with_sampling(Sampling(max_new_tokens=20, stop=(2,), temperature=0, seed=8))
    held_out = [Prompt(10**12, 10**12, np.array([13, 4], np.int32))]

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1, limit=100)
        await bench.policy.load(Weights(1, WEIGHTS))
        assert greedy.version == 1
        await bench.step(await greedy.open(held_out), limit=100)
        await bench.step(decodes[1:], limit=100)

    bench.run(main)
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

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)), limit=100)

    bench.run(main)
    (piece,) = bench.pieces[0]
    assert (len(piece.tokens), piece.state) == (3, "stop")
    assert len(bench.llm.aborted) == 1


def test_a_dead_engine_is_a_lost_model_that_says_what_to_do() -> None:
    bench = Bench()

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            await bench.step(decodes)

    async def kill() -> None:
        await anyio.sleep(0.02)
        bench.llm.die()

    with pytest.raises(ModelLost, match=r"go on from the newest checkpoint \(oppo resume\)") as caught:
        bench.run(main)
    assert "while decoding rollouts [0, 1]" in caught.value.__notes__


def test_the_engine_is_paused_between_two_decodings() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 100), sampling=Sampling(max_new_tokens=100, stop=(2,)))
    made: list[int] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        with anyio.move_on_after(0.05):
            await bench.step(decodes)
        made.append(sum(len(request.tokens) for request in bench.llm.requests.values()))
        await anyio.sleep(5.0)
        made.append(sum(len(request.tokens) for request in bench.llm.requests.values()))

    bench.run(main)
    assert made[0] == made[1] > 0


def test_a_request_that_is_not_decoded_now_does_not_run() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2}.get(prompt[0], 9)))

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        before = len(bench.tokens(2))
        await bench.step([decodes[1]])
        await bench.step([decodes[2]])
        assert len(bench.tokens(2)) > before

    bench.run(main)
    assert len(bench.reported) == 3


def test_another_policy_on_the_same_engine_begins_clean() -> None:
    bench = Bench()

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        later = VllmPolicy(bench.engine, sampling=SAMPLING)
        (decode,) = await later.open(varied(1))
        async with later.decoding([decode], lambda ended: False):
            piece = await decode.read(100)
        assert set(piece.versions.tolist()) == {0}

    bench.run(main)
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


def test_it_tells_of_its_work() -> None:
    bench = Bench()
    spans: list[str] = []
    bench.policy.reporter.listener = lambda span: spans.append(f"{span.track}: {span.label}")

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(2)))
        await bench.policy.load(Weights(1, WEIGHTS))

    bench.run(main)
    assert spans == ["policy: decode", "policy: load"]
    assert bench.policy.progress == sum(len(request.tokens) for request in bench.llm.done)


def test_a_rollout_may_be_closed_while_the_others_are_decoded() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 8))

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))

        async def close() -> None:
            await anyio.sleep(0.035)
            await decodes[1].aclose()

        async def wait_in_vain() -> None:
            with pytest.raises(ProtocolError, match="closed"):
                await decodes[1].read(100)

        async with anyio.create_task_group() as tasks, bench.policy.decoding(decodes, lambda ended: False):
            tasks.start_soon(close)
            tasks.start_soon(wait_in_vain)
            bench.pieces[0] = [await decodes[0].read(100)]
            bench.pieces[2] = [await decodes[2].read(100)]

    bench.run(main)
    assert (len(bench.tokens(0)), len(bench.tokens(2))) == (8, 8)
    (request,) = bench.llm.aborted
    assert len(request.tokens) < 8


def test_decoding_ends_when_every_rollout_was_closed() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 100), sampling=Sampling(max_new_tokens=100, stop=(2,)))

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        async with bench.policy.decoding(decodes, lambda ended: False):
            for decode in decodes:
                await decode.read(3)
                await decode.aclose()
        assert not bench.llm.requests

    bench.run(main)
