"""The policy on vLLM over the fake of the engine, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

import anyio
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo.errors import ConfigError, ModelError, ModelLost, ProtocolError
from oppo.events import Prompt, Response
from oppo.models import Sampling, Weights
from oppo.run.checkpoint import write_state
from oppo.stages import Update
from oppo.testing import FakePolicy, FakeTrainer, check_policy, run_virtual
from oppo.vllm import VllmDecode, VllmPolicy
from tests.kit.pipelines import Pipeline, Setting
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

    bench.play(limit=100)
    (request,) = bench.llm.done
    assert request.params.logit_bias == {VOCABULARY - 2: -100.0, VOCABULARY - 1: -100.0}


def test_greedy_decoding_excludes_nothing() -> None:
    bench = Bench(sampling=Sampling(max_new_tokens=5, temperature=0.0, top_k=3, top_p=0.5))

    bench.play(limit=100)
    (request,) = bench.llm.done
    assert (request.params.top_k, request.params.top_p, request.params.logprobs) == (0, 1.0, 0)
    assert not len(bench.pieces[0][0].support.ids), "drawn from the whole vocabulary"


def test_a_token_before_the_least_length_lists_the_stop_tokens_as_excluded() -> None:
    bench = Bench(sampling=Sampling(max_new_tokens=9, min_new_tokens=5, stop=(2, 3)))

    bench.play(limit=100)
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

    bench.play(limit=100)
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


@dataclass(frozen=True)
class Case:
    """Rollouts, the cuts of their steps, and an engine.

    Attributes:
        at: how many rollouts end before the cut, by step.
        late: as :class:`FakeAsyncLLM` has it; a weight sync takes 0.02 s, so outputs may come when it has ended.
        delay: seconds from the beginning of a step to a weight sync.
    """

    count: int = 3
    at: tuple[int, ...] = (1, 1)
    overrun: int = 4
    late: float = 0.0
    limit: int = 3
    delay: float = 0.01


CASES = st.builds(
    Case,
    st.integers(1, 6),
    st.lists(st.integers(1, 3), max_size=4).map(tuple),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.004, 0.015, 0.05]),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.003, 0.01]),
)


@given(CASES, st.sampled_from(["keep", "recompute"]), st.booleans())
@example(Case(), "keep", True)
@example(Case(overrun=0, late=0.015), "keep", True)
@example(Case(overrun=0, late=0.015), "recompute", False)
@example(Case(overrun=0, late=0.05), "recompute", True)
def test_no_token_is_lost_doubled_or_counted_to_other_weights_whatever_the_overrun(
    case: Case, kv_on_sync: str, loads: bool
) -> None:
    count, at, limit, delay = case.count, case.at, case.limit, case.delay
    bench = Bench(FakeAsyncLLM(overrun=case.overrun, late=case.late), keywords={"kv_on_sync": kv_on_sync})
    decodes: list[VllmDecode] = []

    async def main() -> None:
        decodes.extend(await bench.policy.open(varied(count)))
        for cut_at in [*at, 1_000]:
            live = [decode for decode in decodes if not decode.ended]
            await bench.step(live, cut_at, limit, load=delay if loads else None)
            if not loads:
                await bench.policy.load(Weights(bench.policy.version + 1, WEIGHTS))

    bench.run(main)
    assert sorted(each for reported in bench.reported for each in reported) == list(range(count))
    by_prompt = {tuple(request.prompt): request for request in bench.llm.done}
    assert len(by_prompt) == count, "no request was begun twice"
    for decode in decodes:
        request = by_prompt[tuple(decode.prompt.tokens.tolist())]
        assert bench.tokens(decode.prompt.rollout) == request.tokens
        assert bench.versions(decode.prompt.rollout) == [
            bench.policy.number_of(version) for version in request.versions
        ]
    assert not bench.llm.requests


def test_what_ends_in_the_overrun_of_a_cut_is_reported_first_at_the_next_decoding() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2, 11: 3, 12: 9}[prompt[0]], overrun=3))
    at_cut: list[str] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1, limit=100)
        at_cut.extend(bench.pieces[rollout][-1].state for rollout in range(3))
        assert decodes[1].row.withheld
        assert len(bench.tokens(1)) == 2, "the last token cannot be read before it is reported"
        await bench.step(decodes[1:], cut_at=1, limit=100)

    bench.run(main)
    assert at_cut == ["eos", "cut", "cut"]
    assert bench.reported == [[0], [1]], "and the cut that it causes comes before any further token"
    assert bench.tokens(1)[-1] == 2
    assert len(bench.tokens(2)) < 9


def test_a_rollout_that_ended_in_the_overrun_may_be_closed() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2, 11: 3}[prompt[0]], overrun=3))

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes, cut_at=1)
        await decodes[1].aclose()
        with pytest.raises(ProtocolError, match="closed"):
            await decodes[1].read(1)

    bench.run(main)
    assert bench.reported == [[0]]


def test_what_ends_in_the_overrun_of_the_last_step_is_never_reported_and_leaves_nothing_behind() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2, 11: 3, 12: 30}[prompt[0]], overrun=5))

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        assert [decode.row.withheld for decode in decodes] == [False, True, False]
        for decode in decodes:
            await decode.aclose()

    bench.run(main)
    assert bench.reported == [[0]]
    assert len(bench.tokens(1)) < 3
    assert not bench.llm.requests
    assert not bench.engine.requests


def test_a_rollout_that_a_stop_string_ended_in_the_overrun_is_not_decoded_on() -> None:
    bench = Bench(
        FakeAsyncLLM(length=lambda prompt: {10: 2}.get(prompt[0], 40), overrun=3),
        sampling=replace(SAMPLING, max_new_tokens=40, stop_strings=("b",)),
        keywords={"decode": lambda tokens: "b" if len(tokens) == 3 else "a"},
    )
    made: list[int] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(4))
        await bench.step(decodes[:2], cut_at=1, limit=100)
        assert decodes[1].row.withheld
        (request,) = bench.llm.requests.values()
        made.append(len(request.tokens))
        await bench.step(decodes[1:], cut_at=2, limit=100)
        made.append(len(request.tokens))

    bench.run(main)
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
            carried = [cast("VllmDecode", rollout.decode) for rollout in one.generate._in_flight.values()]
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


def test_a_resumed_run_continues_what_was_read_and_nothing_else() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2}.get(prompt[0], 30), overrun=3))
    again = Bench(FakeAsyncLLM(length=lambda prompt: 4))
    halves: list[Response] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes, cut_at=1)
        half = Response.empty(decodes[1].prompt)
        for piece in bench.pieces[1]:
            half = half.then(piece.chunk(1, len(half)))
        halves.append(half)

    async def resumed() -> None:
        await again.step(await again.policy.open(halves))

    bench.run(main)
    again.run(resumed)
    (request,) = again.llm.done
    assert request.prompt == [*halves[0].prompt.tokens.tolist(), *halves[0].tokens.tolist()]
    assert request.params.max_tokens == 20 - len(halves[0])
    assert request.params.seed != bench.llm.requests[next(iter(bench.llm.requests))].params.seed
    assert again.tokens(1) == request.tokens
