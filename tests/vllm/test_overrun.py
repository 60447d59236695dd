"""What the engine makes between a cut and its pause: withheld, reported first, never lost, doubled or decoded on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

import pytest
from hypothesis import example, given, strategies as st

from oppo.errors import ModelLost, ProtocolError
from oppo.events import Response
from oppo.models import Weights
from oppo.run.checkpoint import write_state
from oppo.testing import FakePolicy, run_virtual
from oppo.vllm import VllmDecode, VllmPolicy
from tests.pipelines import Pipeline, Setting
from tests.vllm.bench import SAMPLING, WEIGHTS, Bench, varied
from tests.vllm.fake_engine import FakeAsyncLLM, engine_of, running


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
