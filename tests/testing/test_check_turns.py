"""The checks find policies that do not go on after a turn as they should."""

from __future__ import annotations

import numpy as np
import pytest

from oppo.errors import ProtocolError
from oppo.events import IntArray, Response
from oppo.simulate.policy import FakeDecode
from oppo.testing import FakePolicy, check_policy, prompts, run_virtual
from tests.testing.test_conformance import some_turns


class Strange(FakeDecode):
    """A decode with turns that does something else than it should."""


class Deaf(Strange):
    def proceed(self, given: IntArray) -> bool:
        self.waiting = False
        self.policy.rejoin(self)
        return True


class Stammering(Strange):
    def proceed(self, given: IntArray) -> bool:
        return super().proceed(np.concatenate([given, given]))


class Restless(Strange):
    def proceed(self, given: IntArray) -> bool:
        return super().proceed(given) or True


class Forgetful(Strange):
    """Knows its turn in part only, once decoding has stopped."""

    stopped: bool = False

    async def turn(self) -> IntArray | None:
        tokens = await super().turn()
        self.stopped = self.stopped or tokens is None
        return tokens[:1] if self.stopped and tokens is not None else tokens


class Endless(Strange):
    def finish(self) -> bool:
        if not self.policy.is_decoding(self):
            return False
        self.waiting = False
        self.policy.rejoin(self)
        return True


class Taciturn(Strange):
    """Ends with its first turn, whatever is answered."""

    def proceed(self, given: IntArray) -> bool:
        return super().finish()


class Talkative(FakePolicy):
    kind: type[FakeDecode] = FakeDecode

    def _decode(self, response: Response) -> FakeDecode:
        length = min(self.cap, self.length(response.prompt))
        return self.kind(self, response.prompt, length, len(response), response.versions.tolist())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Deaf, "rollout 1: expected the answer [0, 1] as tool tokens after its first turn"),
        (Stammering, "rollout 1: expected the answer [0, 1] as tool tokens after its first turn"),
        (Taciturn, "rollout 1: expected the answer [0, 1] as tool tokens after its first turn"),
        (Restless, "rollout 1: proceed() or finish() did something though decoding has stopped"),
        (Forgetful, "conversations that were deferred and resumed have other tokens than uncut ones"),
        (Endless, "rollout 2: finish() did not end the response with its turn, but with 'eos'"),
    ],
)
def test_a_policy_that_does_not_go_on_as_it_should_is_found_out(kind: type[FakeDecode], message: str) -> None:
    async def make() -> FakePolicy:
        policy = Talkative(turns=some_turns)
        policy.kind = kind
        return policy

    with pytest.raises(ProtocolError) as caught:
        run_virtual(check_policy, make, prompts(6))
    assert message in str(caught.value)


def test_a_policy_whose_turns_cannot_be_seen_is_not_found_to_be_right() -> None:
    async def make() -> FakePolicy:
        return FakePolicy()

    with pytest.raises(ProtocolError, match=r"capabilities.turns is true, and no turn has ended: give a policy and"):
        run_virtual(check_policy, make, prompts(6))


def test_a_policy_that_only_says_that_it_has_turns_is_found_out() -> None:
    class Plain:
        def __init__(self) -> None:
            self.inner = FakePolicy(turns=some_turns)
            self.capabilities, self.open, self.decoding = self.inner.capabilities, self.inner.open, self.inner.decoding
            self.load = self.inner.load

        @property
        def version(self) -> int:
            return self.inner.version

    async def make() -> Plain:
        return Plain()

    with pytest.raises(ProtocolError, match=r"MultiTurnPolicy.*Plain, which has no open_turns"):
        run_virtual(check_policy, make, prompts(6))
