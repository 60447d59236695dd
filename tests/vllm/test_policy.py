"""The policy on vLLM over a fake of the engine: cuts, overruns, publishes and ends, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

from oppo.errors import ConfigError, ModelError, ModelLost, ProtocolError
from oppo.events import Prompt, Response
from oppo.models import Piece, Sampling, Weights
from oppo.testing import check_policy, prompts, run_virtual
from oppo.vllm import VllmDecode, VllmPolicy
from tests.vllm.fake_engine import FakeAsyncLLM, FakeSender, engine_of, running

SAMPLING = Sampling(max_new_tokens=20, stop=(2, 3), seed=5)
WEIGHTS = {"weight": torch.zeros(1)}


def some(count: int) -> list[Prompt]:
    return [prompt for prompt, _ in zip(prompts(count), range(count), strict=True)]


def varied(count: int) -> list[Prompt]:
    """Return prompts whose responses differ in length."""
    return [Prompt(n, n, np.array([10 + n, 4], np.int32)) for n in range(count)]


@dataclass
class Bench:
    """A policy over a fake, and what was read of each rollout."""

    llm: FakeAsyncLLM = field(default_factory=FakeAsyncLLM)
    sampling: Sampling = SAMPLING
    sender: FakeSender = field(default_factory=FakeSender)
    keywords: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = engine_of(self.llm, self.sender)
        self.policy = VllmPolicy(self.engine, sampling=self.sampling, **self.keywords)
        self.pieces: dict[int, list[Piece]] = {}
        self.reported: list[list[int]] = []

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async def beside() -> None:
            async with running(self.llm):
                await main()

        run_virtual(beside)

    async def step(
        self, decodes: Sequence[VllmDecode], cut_at: int = 1_000, limit: int = 3, *, load: float | None = None
    ) -> None:
        """Decode until ``cut_at`` rollouts were reported, reading everything."""
        ended = 0

        def cut(finished: Sequence[int]) -> bool:
            nonlocal ended
            self.reported.append(list(finished))
            ended += len(finished)
            return ended >= cut_at

        async def read(decode: VllmDecode) -> None:
            while True:
                piece = await decode.read(limit)
                self.pieces.setdefault(decode.prompt.rollout, []).append(piece)
                if piece.state != "live":
                    return

        async def publish(seconds: float) -> None:
            await anyio.sleep(seconds)
            await self.policy.load(Weights(self.policy.version + 1, WEIGHTS))

        async with anyio.create_task_group() as tasks, self.policy.decoding(decodes, cut):
            if load is not None:
                tasks.start_soon(publish, load)
            async with anyio.create_task_group() as readers:
                for decode in decodes:
                    if not decode.ended:
                        readers.start_soon(read, decode)

    def tokens(self, rollout: int) -> list[int]:
        return [int(token) for piece in self.pieces.get(rollout, []) for token in piece.tokens]

    def versions(self, rollout: int) -> list[int]:
        return [int(version) for piece in self.pieces.get(rollout, []) for version in piece.versions]


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
    sampling = Sampling(max_new_tokens=20, temperature=0.7, top_k=3, min_new_tokens=4, stop=(2, 3), seed=5)
    bench = Bench(sampling=sampling)

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes)

    bench.run(main)
    first, second = sorted(bench.llm.done, key=lambda request: request.prompt)
    assert vars(first.params) == {
        "temperature": 0.7,
        "top_k": 3,
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


def test_a_token_before_the_least_length_lists_the_stop_tokens_as_excluded() -> None:
    bench = Bench(sampling=Sampling(max_new_tokens=9, min_new_tokens=5, stop=(2, 3)))

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)), limit=100)

    bench.run(main)
    (piece,) = bench.pieces[0]
    assert piece.support.counts.tolist()[:6] == [-2] * 5 + [0]
    assert piece.support.ids.tolist() == [2, 3] * 5


def test_truncation_that_vllm_does_not_report_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"top_p = 0\.9 .* bound them by top_k instead"):
        Bench(sampling=Sampling(top_p=0.9))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[int], int, int, float]:
    count = draw(st.integers(1, 6))
    at = draw(st.lists(st.integers(1, 3), min_size=0, max_size=4))
    return count, at, draw(st.integers(0, 5)), draw(st.integers(1, 30)), draw(st.sampled_from([0.0, 0.003, 0.01]))


@given(cuts(), st.sampled_from(["keep", "recompute"]), st.booleans())
@example((3, [1, 1], 4, 3, 0.01), "keep", True)
def test_no_token_is_lost_doubled_or_counted_to_other_weights_whatever_the_overrun(
    case: tuple[int, list[int], int, int, float], on_publish: str, loads: bool
) -> None:
    count, at, overrun, limit, delay = case
    bench = Bench(FakeAsyncLLM(overrun=overrun), keywords={"on_publish": on_publish})
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


def test_responses_that_end_together_are_reported_together_in_admission_order() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 6))

    async def main() -> None:
        decodes = await bench.policy.open(varied(4))
        await bench.step(decodes[::-1])

    bench.run(main)
    assert bench.reported == [[0, 1, 2, 3]]


def test_what_ends_in_the_overrun_of_a_cut_is_reported_first_at_the_next_decoding() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2, 11: 3, 12: 9}[prompt[0]], overrun=3))
    at_cut: list[str] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1, limit=100)
        at_cut.extend(bench.pieces[rollout][-1].state for rollout in range(3))
        assert decodes[1].withheld
        assert len(bench.tokens(1)) == 2, "the last token cannot be read before it is reported"
        await bench.step(decodes[1:], cut_at=1, limit=100)

    bench.run(main)
    assert at_cut == ["eos", "cut", "cut"]
    assert bench.reported == [[0], [1]], "and the cut that it causes comes before any further token"
    assert bench.tokens(1)[-1] == 2
    assert len(bench.tokens(2)) < 9


def test_another_sampling_draws_in_its_own_way_and_what_is_parked_goes_on() -> None:
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
    with pytest.raises(ConfigError, match="top_p"):
        bench.policy.with_sampling(Sampling(top_p=0.5))


def test_a_rollout_that_ended_in_the_overrun_may_be_given_up() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: {10: 2, 11: 3}[prompt[0]], overrun=3))

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes, cut_at=1)
        await decodes[1].aclose()
        with pytest.raises(ProtocolError, match="given up"):
            await decodes[1].read(1)

    bench.run(main)
    assert bench.reported == [[0]]


def test_a_last_step_that_overruns_leaves_nothing_to_report() -> None:
    bench = Bench(FakeAsyncLLM(length=lambda prompt: 3, overrun=5))

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(3)), cut_at=3)

    bench.run(main)
    assert bench.reported == [[0, 1, 2]]


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


@pytest.mark.parametrize(("on_publish", "recomputed"), [("keep", 0), ("recompute", 2)])
def test_parked_rollouts_keep_their_keys_and_values_or_compute_them_again(on_publish: str, recomputed: int) -> None:
    bench = Bench(keywords={"on_publish": on_publish})

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        await bench.policy.load(Weights(1, WEIGHTS))
        await bench.policy.load(Weights(2))
        await bench.policy.load(Weights(3, WEIGHTS))
        await bench.step(await bench.policy.open([Prompt(9, 9, np.array([12], np.int32))]))

    bench.run(main)
    assert bench.llm.recomputed == recomputed
    assert len(bench.llm.updates) == 2, "an actor that was not trained is not sent"
    salts = {request.salt for request in bench.llm.done}
    assert len(salts) == 2, "no prefix of other weights is used"


def test_weights_that_cannot_be_sent_leave_the_engine_running_on_the_old_ones() -> None:
    bench = Bench(sender=FakeSender(fails=ModelError("no room")))
    errors: list[Exception] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))

        async def publish() -> None:
            await anyio.sleep(0.02)
            try:
                await bench.policy.load(Weights(1, WEIGHTS))
            except ModelError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            await bench.step(decodes)

    bench.run(main)
    assert [str(error) for error in errors] == ["no room"]
    assert set(bench.versions(0) + bench.versions(1)) == {0}
    assert bench.policy.version == 0


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


def test_versions_are_compared_with_those_that_the_engine_names() -> None:
    bench = Bench(FakeAsyncLLM(mislabelled=True))

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)))

    with pytest.raises(ProtocolError, match=r"vLLM says that weights another-9 made tokens 0 \.\. "):
        bench.run(main)


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
    ("tokens", "sentence"),
    [([], "is empty"), ([1] * 500, "reads at most 500"), ([5000], "holds token id 5000"), ([-1], "holds token id -1")],
)
def test_prompts_that_cannot_be_read_are_refused_by_name(tokens: list[int], sentence: str) -> None:
    bench = Bench()

    async def main() -> None:
        await bench.policy.open([Prompt(7, 7, np.array(tokens, np.int32))])

    with pytest.raises(ModelError, match=sentence):
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
