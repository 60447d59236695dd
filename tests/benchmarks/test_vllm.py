"""The comparisons with bare vLLM: what they count, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import anyio
import pytest
import torch

from benchmarks.vllm.compare import Recorded, compare_decoding, compare_syncing, length_of
from oppo.errors import DataError
from oppo.events import Prompt, Response
from oppo.models import Weights
from oppo.simulate.policy import FakeDecode
from oppo.testing import FakePolicy, run_virtual

LENGTHS = (9, 3, 20)


@dataclass(frozen=True)
class Output:
    token_ids: list[int]

    @property
    def outputs(self) -> list[Output]:
        return [self]


@dataclass(eq=False)
class FakeLLM:
    """Makes a token of each request in ``seconds``; keeps the requests that it was given in each way."""

    seconds: float
    paused: bool = True
    added: list[tuple[object, object]] = field(default_factory=list)
    generated: list[tuple[object, object]] = field(default_factory=list)

    async def add_request(self, request_id: str, prompt: object, params: object) -> str:
        self.added.append((prompt, params))
        return request_id

    async def generate(self, prompt: object, sampling_params: object, request_id: str) -> AsyncIterator[Output]:
        assert not self.paused
        self.generated.append((prompt, sampling_params))
        assert isinstance(sampling_params, int)
        for token in range(sampling_params):
            await anyio.sleep(self.seconds)
            yield Output([token])

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False


class Asking(FakePolicy):
    """Asks the engine for each rollout that it opens, and decodes by itself."""

    engine: Recorded

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        for each in rollouts:
            assert isinstance(each, Prompt)
            await self.engine.add_request("ours", each.tokens.tolist(), length_of(each))
        return await super().open(rollouts)


def asking(llm: FakeLLM) -> Asking:
    policy = Asking(length_of, seconds=0.1)
    policy.engine = Recorded(llm)
    return policy


def test_both_make_the_same_requests_in_turns_and_their_figures_belong_together() -> None:
    llm = FakeLLM(seconds=0.05)
    policy = asking(llm)

    async def main() -> None:
        found = await compare_decoding(
            policy, policy.engine, lengths=LENGTHS, vocabulary=640, rounds=3, clock=anyio.current_time
        )
        assert (found.batch, found.tokens) == (3, 32)
        assert found.ours == pytest.approx((16.0,) * 3)
        assert found.bare == pytest.approx((32.0,) * 3)
        assert found.ratio == pytest.approx(0.5)

    run_virtual(main)
    steps = [llm.added[at : at + 3] for at in range(0, 12, 3)]
    assert llm.generated == [*steps[0], *steps[0], *steps[2], *steps[2]], "the requests of the last step each time"
    assert llm.paused


def test_different_work_is_no_comparison() -> None:
    policy = asking(FakeLLM(seconds=0.05))
    policy.length = lambda prompt: length_of(prompt) + 1

    async def main() -> None:
        with pytest.raises(DataError, match=r"32.*35"):
            await compare_decoding(policy, policy.engine, lengths=LENGTHS, vocabulary=640)

    run_virtual(main)


class Slow(FakePolicy):
    async def load(self, weights: Weights) -> None:
        await anyio.sleep(3)
        await super().load(weights)


def test_a_sync_is_timed_beside_a_copy_of_as_many_bytes() -> None:
    policy = Slow()

    async def main() -> None:
        found = await compare_syncing(policy, {"a": torch.zeros(5), "b": torch.zeros(2, 3)}, clock=anyio.current_time)
        assert (found.bytes, found.syncing, policy.version) == (44, (3.0,) * 5, 6)
        assert found.copying == (0.0,) * 5

    run_virtual(main)
