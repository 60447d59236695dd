"""The fakes keep the contracts, and the checks find models that do not, with turns too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import get_args

import anyio
import numpy as np
import pytest

from oppo.errors import ProtocolError
from oppo.events import Chunk, Finish, IntArray, Prompt, Response, Support, ToolTokens
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Loads, Policy, SyncedModel, Weights
from oppo.stages import GAE
from oppo.stages.batch import ScoredRollout
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    check_policy,
    check_scorer,
    check_trainer,
    fake_scalar,
    noise,
    prompts,
    respond_serially,
    run_virtual,
)
from oppo.testing.fake_policy import FakeDecode
from tests.kit.faulty import Silent
from tests.kit.virtual import virtually


def finished(count: int = 3) -> list[Finish]:
    return run_virtual(respond_serially, FakePolicy(), prompts(count))


def checked(make: Callable[[], Policy]) -> None:
    """Check a policy, which is made as often as it is asked for."""

    async def made() -> Policy:
        return make()

    run_virtual(check_policy, made, prompts(6))


HELD = Capabilities(turns=True, adds_while_held=True)


@pytest.mark.parametrize("pace", [None, lambda prompt: 1 + noise(prompt.rollout)], ids=["together", "apart"])
@pytest.mark.parametrize(
    "can",
    [Capabilities(turns=True), HELD, Capabilities(turns=True, adds_while_decoding=True)],
    ids=["", "held", "adds"],
)
def test_the_fake_policy_keeps_the_contract_however_it_decodes(
    pace: Callable[[Prompt], float] | None, can: Capabilities
) -> None:
    checked(lambda: FakePolicy(pace=pace, turns=some_turns, holds=can.adds_while_held, capabilities=can))


def some_turns(prompt: Prompt) -> Sequence[int]:
    """Return where turns end: none, one or two of them."""
    return (2, 4)[: prompt.admission % 3]


@pytest.mark.parametrize("pace", [None, lambda prompt: 1.0], ids=["together", "apart"])
@pytest.mark.parametrize("given", [range(1), range(3, 6), range(1, 20), range(4, 100)], ids=str)
def test_a_policy_whose_tokens_are_partly_given_keeps_it_too(
    pace: Callable[[Prompt], float] | None, given: range
) -> None:
    lengths, can = (lambda prompt: 8 + prompt.admission % 7), Capabilities()
    checked(lambda: FakePolicy(length=lengths, pace=pace, given=lambda prompt: given, capabilities=can))


@pytest.mark.parametrize("pace", [None, lambda prompt: 1.0], ids=["together", "apart"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("loads", get_args(Loads))
def test_a_policy_can_what_it_says_it_can(pace: Callable[[Prompt], float] | None, adds: bool, loads: Loads) -> None:
    can = Capabilities(adds_while_decoding=adds, loads_while_decoding=loads)
    checked(lambda: FakePolicy(pace=pace, capabilities=can))


class Vain(FakePolicy):
    @asynccontextmanager
    async def _decoding(self, live: list[FakeDecode], cut: Cut) -> AsyncIterator[Decoding]:
        async with super()._decoding(live, cut):
            yield FixedDecoding("Vain")


class Shy(FakePolicy):
    """Serves weights at once, and claims to wait."""

    async def load(self, weights: Weights) -> None:
        self.version = weights.version
        for decode in self._live:
            decode.follow(self.version)


@virtually
async def test_nothing_joins_a_decoding_that_has_ended() -> None:
    policy = FakePolicy(lambda prompt: 3, capabilities=Capabilities(adds_while_decoding=True))
    first, late = await policy.open(prompts(2))
    async with policy.decoding([first], lambda ended: True) as decoding:
        assert len((await first.read(9)).tokens) == 3
    with pytest.raises(ProtocolError, match="1 rollouts were added to a decoding that has ended"):
        await decoding.add([late])


def test_the_fake_scorers_keep_the_contract() -> None:
    async def scalar() -> FakeScorer[float]:
        return FakeScorer(fake_scalar)

    async def critic() -> FakeCritic:
        return FakeCritic()

    run_virtual(check_scorer, scalar, finished(), lambda a, b: a == b)
    run_virtual(check_scorer, critic, finished(), np.array_equal)


def test_the_fake_trainer_keeps_the_contract() -> None:
    rows = [
        ScoredRollout(event, event.response.logprobs, 1.0, np.zeros(len(event.response), np.float32))
        for event in finished()
    ]

    async def make() -> FakeTrainer:
        return FakeTrainer()

    synced: list[SyncedModel] = [FakePolicy(), FakeCritic()]
    run_virtual(check_trainer, make, GAE().batch(rows), synced)


class Frugal(FakeDecode):
    async def read(self, limit: int) -> Chunk | ToolTokens:
        return await super().read(max(1, limit - 1))


class FrugalPolicy(FakePolicy):
    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        return [Frugal(self, decode.prompt, decode.length) for decode in await super().open(rollouts)]


class Restless(FakePolicy):
    """Makes other tokens at each reading: its noise is keyed by time."""

    def attend(self, rows: Sequence[FakeDecode]) -> None:
        self.seed += 1
        super().attend(rows)


class Elsewhere(FakePolicy):
    """Reports a support that does not hold its tokens."""

    def support(self, tokens: IntArray) -> Support:
        return Support(tokens + 1, np.ones(len(tokens), np.int32))


class Short(FakePolicy):
    def support(self, tokens: IntArray) -> Support:
        return Support(tokens[1:], np.ones(len(tokens) - 1, np.int32))


class Unsure(FakePolicy):
    """Gives the fourth token of each response, but not when it has written half of it before."""

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        self.given = lambda prompt: range(3, 4) if isinstance(rollouts[0], Prompt) else range(0)
        return await super().open(rollouts)


class Wrapping(FakePolicy):
    """Leaves a task group in the way of an error in the body of its decoding."""

    @asynccontextmanager
    async def wrapped(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        async with anyio.create_task_group(), super().decoding(live, cut) as decoding:
            yield decoding

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        return self.wrapped(live, cut)


def of(decode: FakeDecode, response: Response) -> tuple[FakePolicy, Prompt, int, int, list[int]]:
    return decode.policy, decode.prompt, decode.length, len(response), response.versions.tolist()


class ClosesAllDecode(FakeDecode):
    """Ends the decoding of all when it is closed."""

    async def aclose(self) -> None:
        self.closed = True
        if self.policy.is_decoding(self):
            for decode in list(self.policy._live):
                decode.length = decode.made + 1


class ClosesAll(FakePolicy):
    def _decode(self, response: Response) -> FakeDecode:
        return ClosesAllDecode(*of(super()._decode(response), response))


class ReadableDecode(FakeDecode):
    """Is never closed."""

    async def aclose(self) -> None:
        return


class Undying(FakePolicy):
    def _decode(self, response: Response) -> FakeDecode:
        return ReadableDecode(*of(super()._decode(response), response))


class LastChunkOnly(FakeScorer[float]):
    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        self.last = [len(event.tokens) for event in events]
        await super().extend(events)

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        await super().finish(finished)
        return [float(self.last[0])] * len(finished)


def test_a_scorer_that_depends_on_the_chunks_is_found_out() -> None:
    async def make() -> LastChunkOnly:
        return LastChunkOnly(fake_scalar)

    with pytest.raises(ProtocolError, match="in chunks of 1"):
        run_virtual(check_scorer, make, finished(), lambda a, b: a == b)


class DeafDecode(FakeDecode):
    def proceed(self, given: IntArray) -> bool:
        self.waiting = False
        self.policy.rejoin(self)
        return True


class Stammering(FakeDecode):
    def proceed(self, given: IntArray) -> bool:
        return super().proceed(np.concatenate([given, given]))


class RestlessDecode(FakeDecode):
    def proceed(self, given: IntArray) -> bool:
        return super().proceed(given) or True


class ForgetfulDecode(FakeDecode):
    """Knows its turn in part only, once decoding has stopped."""

    stopped: bool = False

    async def turn(self) -> IntArray | None:
        tokens = await super().turn()
        self.stopped = self.stopped or tokens is None
        return tokens[:1] if self.stopped and tokens is not None else tokens


class Endless(FakeDecode):
    def finish(self) -> bool:
        if not self.policy.is_decoding(self):
            return False
        self.waiting = False
        self.policy.rejoin(self)
        return True


class Taciturn(FakeDecode):
    """Ends with its first turn, whatever is answered."""

    def proceed(self, given: IntArray) -> bool:
        return super().finish()


class Talkative(FakePolicy):
    def __init__(self, kind: type[FakeDecode]) -> None:
        super().__init__(turns=some_turns)
        self.kind = kind

    def _decode(self, response: Response) -> FakeDecode:
        length = min(self.cap, self.length(response.prompt))
        return self.kind(self, response.prompt, length, len(response), response.versions.tolist())


class Plain:
    """Only says that it has turns."""

    def __init__(self) -> None:
        self.inner = FakePolicy(turns=some_turns)
        self.capabilities, self.open, self.decoding = self.inner.capabilities, self.inner.open, self.inner.decoding
        self.load = self.inner.load

    @property
    def version(self) -> int:
        return self.inner.version


ADDS = Capabilities(adds_while_decoding=True)
LATE = Capabilities(loads_while_decoding="when decoding ends")
TOOLLESS = "rollout 1: expected the answer [0, 1] as tool tokens after its first turn"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Vain, capabilities=ADDS), "adds_while_decoding is True, but add() did not work"),
        (
            partial(Vain, turns=some_turns, holds=True, capabilities=HELD),
            "adds_while_held is True, but add() did not work while a turn was unanswered: Vain decodes what it was",
        ),
        (partial(Shy, capabilities=Capabilities()), "loads_while_decoding is 'refused', but load() returned"),
        (
            partial(Shy, capabilities=LATE),
            "loads_while_decoding is 'when decoding ends', but the newest token is of version 1",
        ),
        (ClosesAll, "giving a rollout up changed the tokens of the others"),
        (Undying, "a rollout that was closed can be read"),
        (Wrapping, "decoding wraps an error of its body in ExceptionGroup"),
        (Unsure, "did not go on as they were written"),
        (Elsewhere, "outside of its own support"),
        (Short, "whose support is of 2 tokens"),
        (FrugalPolicy, "a live chunk holds 2 of 3 tokens"),
        (Silent, "readable before cut"),
        (Restless, "gives other tokens"),
        (partial(Talkative, DeafDecode), TOOLLESS),
        (partial(Talkative, Stammering), TOOLLESS),
        (partial(Talkative, Taciturn), TOOLLESS),
        (
            partial(Talkative, RestlessDecode),
            "rollout 1: proceed() or finish() did something though decoding has stopped",
        ),
        (
            partial(Talkative, ForgetfulDecode),
            "conversations that were deferred and resumed have other tokens than uncut ones",
        ),
        (partial(Talkative, Endless), "rollout 2: finish() did not end the response with its turn, but with 'eos'"),
        (FakePolicy, "capabilities.turns is true, and no turn has ended: give a policy and"),
        (Plain, "Plain, which has no open_turns"),
    ],
)
def test_a_policy_that_breaks_the_contract_or_its_own_word_is_found_out(
    make: Callable[[], Policy], message: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        checked(make)
    assert message in str(caught.value)
