"""Rows that are decoded together: jumping from event to event is as if every decode step had been waited for."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import pytest
from hypothesis import given, strategies as st

from oppo.events import Prompt
from oppo.models import Capabilities, Weights
from oppo.simulate.engine import Device, Lane
from oppo.simulate.policy import FakeDecode
from oppo.testing import FakePolicy, prompts, run_virtual


def cost(rows: int, tokens: int) -> float:
    return 0.5 + 0.125 * rows + 2**-10 * tokens  # sums of these are exact


@dataclass
class Rollout:
    """What happens to a rollout: it joins, and may be parked."""

    length: int
    joins: float = 0.0
    parked: float = 1e6
    made: int = 0
    ended: float = -1.0


@dataclass
class StepByStep:
    """Decodes without jumps: the oracle."""

    rollouts: list[Rollout]
    loads: list[float]
    now: float = 0.0
    versions: dict[int, list[int]] = field(default_factory=dict)

    def run(self) -> None:
        while True:
            live = [each for each in self.rollouts if self.live(each)]
            if not live:
                later = [each.joins for each in self.rollouts if each.joins > self.now and each.ended < 0]
                if not later:
                    return
                self.now = min(later)
                continue
            version = sum(load <= self.now for load in self.loads)
            end = self.now + cost(len(live), sum(each.made for each in live))
            left = max(each.parked for each in live)
            if left <= end and not any(self.now < each.joins <= left for each in self.rollouts):
                self.now = left  # a step without rows is not made to its end
                continue
            self.now = end
            for each in live:
                if each.parked > self.now:
                    each.made += 1
                    self.versions.setdefault(id(each), []).append(version)
                    if each.made == each.length:
                        each.ended = self.now

    def live(self, each: Rollout) -> bool:
        return each.joins <= self.now < each.parked and each.made < each.length


times = st.integers(1, 400).filter(lambda n: n % 7).map(lambda n: n / 7)  # never a time at which a decode step ends


@st.composite
def rollouts(draw: st.DrawFn) -> list[Rollout]:
    made = [Rollout(draw(st.integers(1, 40))) for _ in range(draw(st.integers(1, 4)))]
    made += [Rollout(draw(st.integers(1, 40)), joins=draw(times)) for _ in range(draw(st.integers(0, 3)))]
    for each in made:
        if draw(st.booleans()):
            sevenths = round(7 * each.joins)
            each.parked = draw(st.integers(1, 400).map(sevenths.__add__).filter(lambda n: n % 7)) / 7
    return made


@pytest.mark.schedules
@given(rollouts(), st.lists(times, max_size=3, unique=True).map(sorted), st.integers(1, 9))
def test_jumps_change_no_time_no_token_and_no_version(given: list[Rollout], loads: list[float], limit: int) -> None:
    oracle = StepByStep([Rollout(each.length, each.joins, each.parked) for each in given], loads)
    oracle.run()
    ends: dict[int, float] = {}

    async def main() -> list[FakeDecode]:
        capabilities = Capabilities(adds_while_decoding=True, loads_while_decoding="between decode steps")
        policy = FakePolicy(lambda prompt: given[prompt.rollout].length, cost, capabilities=capabilities)
        decodes = list(await policy.open(prompts(len(given))))

        def cut(finished: object) -> bool:
            ends.update({rollout: anyio.current_time() for rollout in finished})  # type: ignore[attr-defined]
            return False

        async def life(k: int) -> None:
            await anyio.sleep_until(given[k].joins)
            if given[k].joins:
                await decoding.add([decodes[k]])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, k)
                await anyio.sleep_until(given[k].parked)
                policy.stop([decodes[k]])

        async def read(k: int) -> None:
            while (await decodes[k].read(limit)).state == "live":
                pass

        async def load(version: int, at: float) -> None:
            await anyio.sleep_until(at)
            await policy.load(Weights(version))

        first = [decodes[k] for k, each in enumerate(given) if not each.joins]
        async with policy.decoding(first, cut) as decoding, anyio.create_task_group() as tasks:
            for version, at in enumerate(loads, 1):
                tasks.start_soon(load, version, at)
            for k in range(len(given)):
                tasks.start_soon(life, k)
        assert policy.tokens == sum(each.made for each in oracle.rollouts)
        return decodes

    decodes = run_virtual(main)
    for k, each in enumerate(oracle.rollouts):
        assert decodes[k].made == each.made
        assert decodes[k].versions(0, each.made).tolist() == oracle.versions.get(id(each), [])
        assert ends.get(k, -1.0) == pytest.approx(each.ended, abs=1e-9)


def test_a_response_of_a_million_tokens_takes_as_many_events_as_a_short_one() -> None:
    waits = 0

    class Counted(Device):
        def _changed(self) -> None:
            nonlocal waits
            waits += 1
            super()._changed()

    async def main() -> float:
        policy = FakePolicy(lambda prompt: 500_000, 1.0, device=Counted())
        (decode,) = await policy.open(prompts(1))
        async with policy.decoding([decode], lambda finished: True):
            while (await decode.read(100_000)).state == "live":
                pass
        return anyio.current_time()

    assert run_virtual(main) == 500_000
    assert waits == 2


async def decoded(policy: FakePolicy, lengths: list[int]) -> list[float]:
    """Return when each response ended."""
    ends = [0.0] * len(lengths)

    async def read(k: int, decode: FakeDecode) -> None:
        while (await decode.read(1_000)).state == "live":
            pass
        ends[k] = anyio.current_time()

    decodes = await policy.open(prompts(len(lengths)))
    async with policy.decoding(decodes, lambda finished: False), anyio.create_task_group() as readers:
        for k, decode in enumerate(decodes):
            readers.start_soon(read, k, decode)
    return ends


def length_in(lengths: list[int]) -> FakePolicy:
    return FakePolicy(lambda prompt: lengths[prompt.rollout], lambda rows, tokens: float(rows))


def test_replicas_decode_side_by_side_each_at_its_own_pace() -> None:
    lengths = [4, 2, 1, 9]
    one, two = length_in(lengths), length_in(lengths)
    two.replicas = 2
    two.__post_init__()
    assert run_virtual(decoded, one, lengths) == [4 + 3 + 2 + 2, 4 + 3, 4, 4 + 3 + 2 + 2 + 5]
    assert run_virtual(decoded, two, lengths) == [2 + 3, 2 + 2, 2, 2 + 2 + 7]


def test_a_static_batch_is_decoded_to_its_end_with_all_its_rows() -> None:
    policy = FakePolicy(lambda prompt: [2, 5][prompt.rollout], lambda rows, tokens: rows + tokens / 8, static=True)
    padded = sum(2 + 2 * made / 8 for made in range(5))
    assert run_virtual(decoded, policy, [2, 5])[1] == padded
    policy.static = False
    policy.__post_init__()
    assert run_virtual(decoded, policy, [2, 5])[1] == 2 + 2.25 + sum(1 + made / 8 for made in (2, 3, 4))


def test_a_lane_knows_only_rows_that_it_decodes() -> None:
    lane: Lane[FakeDecode] = Lane(lambda rows, tokens: 1.0, lambda rows: None, lambda tokens: None)
    decode = FakeDecode(FakePolicy(), Prompt(0, 0, prompts(1)[0].tokens), 5, made=3)
    assert decode not in lane
    assert (len(lane), lane.made(decode)) == (0, 3)
