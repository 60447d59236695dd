"""Rollouts in flight, alone: opened, written down, opened again elsewhere, ended, and discarded."""

from __future__ import annotations

import numpy as np
import pytest

from oppo.errors import ConfigError
from oppo.events import Chunk, Finish, RolloutEvent
from oppo.models import Capabilities
from oppo.stages.in_flight import OpenRollouts
from oppo.stages.ledger import InFlightRollout, RolloutSnapshot, Unit
from oppo.testing import FakePolicy, prompts, run_virtual

LENGTH = 6
GROUPS = [(prompt,) for prompt in prompts(4)]


class Sent(list[RolloutEvent]):
    async def send(self, item: RolloutEvent, /) -> None:
        self.append(item)


async def read(policy: FakePolicy, rollout: InFlightRollout, stop: int) -> None:
    """Read up to ``stop`` tokens of a rollout, and no more of any."""
    async with policy.decoding([rollout.decode], lambda finished: True):
        while rollout.length < stop:
            piece = await rollout.decode.read(1)
            rollout.append(piece)
            if piece.state != "live":
                assert piece.state == "eos"
                rollout.reason = piece.state


def test_what_was_written_goes_on_after_a_checkpoint_and_ends_with_the_same_tokens() -> None:
    async def main() -> None:
        policy, sent, ended = FakePolicy(lambda prompt: LENGTH), Sent(), list[int]()
        rollouts = OpenRollouts(None, None)
        opened = await rollouts.open(policy, GROUPS)
        await read(policy, opened[1], 2)
        await read(policy, opened[2], LENGTH)
        states = [rollouts.snapshot(prompt).state_dict() for (prompt,) in GROUPS]

        again = OpenRollouts(None, None)
        again.restore(policy, [RolloutSnapshot.of(state) for state in states])
        assert not again
        assert [len(again.snapshot(prompt).response) for (prompt,) in GROUPS] == [0, 2, LENGTH, 0]
        await again.reopen(policy)
        assert {each.prompt.rollout for each in again.live} == {0, 1, 3}
        for held in (rollouts, again):
            await read(policy, held[1], LENGTH)
            for number in (2, 1):
                await held.finish(Unit(GROUPS[number], 0, set()), sent, ended)
        assert ended == [2, 1, 2, 1]
        tokens = [event.response.tokens.tolist() for event in sent if isinstance(event, Finish)]
        assert tokens[:2] == tokens[2:]
        assert len(tokens[0]) == LENGTH
        assert sorted(again) == [0, 3]

    run_virtual(main)


def test_a_discarded_unit_is_closed_and_its_tokens_are_counted() -> None:
    async def main() -> None:
        policy, rollouts = FakePolicy(lambda prompt: LENGTH), OpenRollouts(None, None)
        opened = await rollouts.open(policy, GROUPS)
        await read(policy, opened[0], 3)
        assert await rollouts.discard(Unit(GROUPS[0], 0, {0})) == 3
        assert sorted(rollouts) == [1, 2, 3]
        assert opened[0].decode.closed  # type: ignore[attr-defined]  # a FakeDecode

    run_virtual(main)


def test_room_is_for_rollouts_as_long_as_those_that_ended() -> None:
    class Small(FakePolicy):
        free_kv_tokens = 100

    async def main() -> None:
        policy, rollouts = Small(lambda prompt: LENGTH), OpenRollouts(None, None)
        opened = await rollouts.open(policy, GROUPS[:2])
        assert rollouts.room(policy, 2) == np.inf, "nothing has ended yet"
        await read(policy, opened[0], LENGTH)
        await rollouts.finish(Unit(GROUPS[0], 0, set()), Sent(), [])
        whole = len(GROUPS[0][0].tokens) + LENGTH
        assert rollouts.room(policy, 2) == (100 - LENGTH) / (2 * whole), "the other one needs so many yet"

    run_virtual(main)


def test_a_policy_that_cannot_go_on_with_responses_is_refused_when_they_are_restored() -> None:
    policy = FakePolicy(capabilities=Capabilities(resumes="refused"))
    begun = OpenRollouts(None, None).snapshot(GROUPS[0][0]).response
    OpenRollouts(None, None).restore(policy, [RolloutSnapshot(begun, None)])
    one = np.ones(1, np.int32)
    begun = begun.then(Chunk(0, 0, one, -np.ones(1, np.float32), one))
    with pytest.raises(ConfigError, match=r"rollouts \[0\] are half-written, and FakePolicy cannot go on"):
        OpenRollouts(None, None).restore(policy, [RolloutSnapshot(begun, None)])
