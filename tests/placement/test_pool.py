"""A pool of engines in the place of one: where rollouts go, how weights come, and what a lost member costs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import anyio
import anyio.to_thread
import numpy as np
import pytest

from oppo.admission import Overcommit
from oppo.admission.chunking import WholeRollout
from oppo.errors import ConfigError, ModelError, ModelLost, ProtocolError
from oppo.events import Chunk, IntArray, Prompt, Response, ToolTokens
from oppo.models import Capabilities, Decode, Loads, Policy, Resumes, Sampling, Weights
from oppo.placement import PolicyPool
from oppo.stages import Generate
from oppo.testing import FakePolicy, Fault, FaultyPolicy, Hang, Raise, check_policy, prompts, run_virtual
from tests.kit.faulty import Garbage, Silent
from tests.kit.pools import Fate, Mortal
from tests.kit.responses import read_chunk
from tests.testing.test_conformance import some_turns

pytestmark = pytest.mark.virtual

IN_FLIGHT = Capabilities(turns=True, adds_while_decoding=True, loads_while_decoding="between decode steps")


def never(finished: Sequence[int]) -> bool:
    return False


def mortals(*fates: Fate, can: Capabilities = IN_FLIGHT, length: int = 20) -> list[Mortal]:
    return [Mortal(lambda prompt: length, capabilities=can, fate=fate) for fate in fates]


async def read_all(decode: Decode, limit: int = 1_000) -> list[Chunk | ToolTokens]:
    pieces = [await decode.read(limit)]
    while pieces[-1].state == "live":
        pieces.append(await decode.read(limit))
    return pieces


async def decoded(
    pool: PolicyPool, asked: Sequence[Prompt | Response], limit: int = 1_000
) -> list[list[Chunk | ToolTokens]]:
    decodes, found = await pool.open(asked), list[list[Chunk | ToolTokens]]([[] for _ in asked])

    async def read(k: int) -> None:
        found[k] = await read_all(decodes[k], limit)

    async with pool.decoding(decodes, never), anyio.create_task_group() as readers:
        for k in range(len(decodes)):
            readers.start_soon(read, k)
    return found


def tokens_of(pieces: Iterable[Chunk | ToolTokens]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens.tolist()]


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("pace", [None, lambda prompt: 1.0], ids=["together", "apart"])
@pytest.mark.parametrize(
    "can",
    [
        Capabilities(turns=True),
        IN_FLIGHT,
        Capabilities(turns=True, loads_while_decoding="when decoding ends"),
        Capabilities(resumes="with other tokens"),
    ],
    ids=["plain", "in flight", "at the end", "others"],
)
def test_a_pool_keeps_the_contract_of_a_policy(
    members: int, pace: Callable[[Prompt], float] | None, can: Capabilities
) -> None:
    async def make() -> PolicyPool:
        return PolicyPool([FakePolicy(pace=pace, turns=some_turns, capabilities=can) for _ in range(members)])

    run_virtual(check_policy, make, prompts(6))


# What a pool is made of.


class Named(FakePolicy):
    def __init__(self, vocabulary: int, model_name: str = "tiny") -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.model_name = model_name


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([], ["at least one member", "got none", "PolicyPool"]),
        ([Named(8), Named(9)], ["vocabularies", "member 0 has 8", "member 1 has 9", "same model"]),
        ([Named(8), FakePolicy(), Named(8, "small")], ["models", "'tiny'", "member 2 has 'small'"]),
        ([FakePolicy(), FakePolicy(version=3)], ["versions", "member 1 has 3"]),
        ([object()], ["Policy", "decoding"]),
    ],
)
def test_members_that_are_not_alike_are_refused(members: Sequence[Policy], words: Sequence[str]) -> None:
    with pytest.raises((ConfigError, ProtocolError)) as refused:
        PolicyPool(members)
    assert all(word in str(refused.value) for word in words)


def test_a_member_given_twice_and_a_timeout_of_nothing_are_refused() -> None:
    one = FakePolicy()
    with pytest.raises(ConfigError, match=r"given twice.*engine of its own"):
        PolicyPool([one, one])
    with pytest.raises(ConfigError, match="above 0; got 0"):
        PolicyPool([one], timeout=0)


def test_a_pool_can_do_what_each_of_its_members_can() -> None:
    every = Capabilities(True, "with the same tokens", True, "between decode steps", True, True, True, True)
    one = Capabilities(
        False, "with other tokens", False, "when decoding ends", False, False, False, False, "with other tokens"
    )
    assert not {*asdict(every).items()} & {*asdict(one).items()}, "so that one that is forgotten is noticed"
    assert PolicyPool([FakePolicy(capabilities=every), FakePolicy(capabilities=every)]).capabilities == replace(
        every, adds_while_held=False
    ), "a rollout may join a member that holds nothing"
    assert PolicyPool([FakePolicy(capabilities=every), FakePolicy(capabilities=one)]).capabilities == one
    resumes: Sequence[Resumes] = ("refused", "with other tokens", "with the same tokens")
    loads: Sequence[Loads] = ("refused", "when decoding ends", "between decode steps")
    for a, b in product(range(3), range(3)):
        pair = [
            FakePolicy(capabilities=Capabilities(resumes=resumes[k], loads_while_decoding=loads[k])) for k in (a, b)
        ]
        found = PolicyPool(pair).capabilities
        assert (found.resumes, found.loads_while_decoding) == (resumes[min(a, b)], loads[min(a, b)])


# Where rollouts go.


@dataclass(eq=False)
class Roomy(Mortal):
    """An engine that says how much room its KV cache has."""

    free_kv_tokens: int = 100


def homes(engines: Sequence[Mortal]) -> list[list[int]]:
    return [[seat.prompt.rollout for seat in engine.seats] for engine in engines]


def groups(count: int, samples: int) -> list[Prompt]:
    return [sample for prompt in prompts(count) for sample in prompt.samples(samples)]


async def test_rollouts_go_to_the_member_with_the_fewest_tokens() -> None:
    engines = mortals(Fate(), Fate(), Fate())
    await decoded(PolicyPool(engines), list(prompts(6)))
    assert homes(engines) == [[0, 3], [1, 4], [2, 5]]


async def test_rollouts_go_where_the_engine_says_that_there_is_room() -> None:
    engines = [Roomy(free_kv_tokens=free) for free in (1_000, 10, 1_000)]
    await decoded(PolicyPool(engines), list(prompts(4)))
    assert homes(engines) == [[0, 2], [], [1, 3]]


async def test_the_samples_of_a_prompt_share_a_member_where_they_fit(messages: list[str]) -> None:
    engines = mortals(Fate(), Fate())
    await decoded(PolicyPool(engines), groups(4, samples=3))
    assert homes(engines) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    small = [Roomy(lambda prompt: 30, free_kv_tokens=free) for free in (70, 60)]
    pool = PolicyPool(small)
    await decoded(pool, list(prompts(1)))  # so long are responses
    await decoded(pool, groups(2, samples=3)[3:])
    assert homes(small) == [[0, 3, 5], [4]]
    assert not messages
    await decoded(pool, groups(8, samples=3)[6:])
    assert ["less room in their KV caches" in message for message in messages] == [True]


async def test_a_rollout_stays_on_its_member_over_steps() -> None:
    engines = mortals(Fate(), Fate())
    pool = PolicyPool(engines)
    decodes = await pool.open(list(prompts(3)))
    for stop in range(3):
        async with pool.decoding(decodes, never):
            await decodes[stop].read(5)
    assert homes(engines) == [[0, 2], [1]]


# The cut.


async def test_what_ends_after_the_cut_is_told_first_at_the_next_decoding() -> None:
    told: list[list[int]] = []
    pool = PolicyPool([FakePolicy(lambda prompt: 4 if prompt.rollout < 2 else 9) for _ in range(2)])
    decodes = await pool.open(list(prompts(4)))

    def first(finished: Sequence[int]) -> bool:
        told.append(list(finished))
        return True

    pieces: dict[int, list[Chunk | ToolTokens]] = {}

    async def read(k: int) -> None:
        pieces.setdefault(k, []).extend(await read_all(decodes[k]))

    for step in range(2):
        async with pool.decoding(decodes, first), anyio.create_task_group() as readers:
            for k in range(4):
                if not pieces.get(k) or pieces[k][-1].state == "cut":
                    readers.start_soon(read, k)
        states = [pieces[k][-1].state for k in range(4)]
        assert states == [["eos", "cut", "cut", "cut"], ["eos", "eos", "cut", "cut"]][step]
    assert told == [[0], [1]]
    assert [len(tokens_of(pieces[k])) for k in range(4)] == [4, 4, 4, 4]


async def test_an_error_of_the_cut_is_raised_and_costs_no_member() -> None:
    pool = PolicyPool([FakePolicy(), FakePolicy()])
    decodes = await pool.open(list(prompts(2)))

    def cut(finished: Sequence[int]) -> bool:
        raise LookupError(f"no place for {finished}")

    with pytest.raises(LookupError, match="no place for"):
        async with pool.decoding(decodes, cut):
            await read_all(decodes[0])
    assert len(pool.living) == 2


class FromThreads(FakePolicy):
    """Its cut is called from a thread, as that of a model in a thread is."""

    async def cut_in_thread(self, finished: Sequence[int]) -> bool:
        assert self._cut is not None
        return await anyio.to_thread.run_sync(self._cut, finished)


def test_cuts_from_several_threads_come_one_at_a_time_and_never_after_true() -> None:
    anyio.run(cuts_from_several_threads)


async def cuts_from_several_threads() -> None:
    entered, calls, most = 0, list[list[int]](), 0

    def cut(finished: Sequence[int]) -> bool:
        nonlocal entered, most
        entered += 1
        most = max(most, entered)
        threading.Event().wait(0.002)
        calls.append(list(finished))
        entered -= 1
        return len(calls) == 5

    engines = [FromThreads(lambda prompt: 10_000, 1e-3) for _ in range(4)]
    pool = PolicyPool(engines)
    decodes = await pool.open(list(prompts(16)))
    async with pool.decoding(decodes, cut):
        for decode in decodes[:4]:
            await decode.read(1)
        answers: list[bool] = []

        async def end(k: int) -> None:
            answers.append(await engines[k % 4].cut_in_thread([k]))

        async with anyio.create_task_group() as tasks:
            for k in range(16):
                tasks.start_soon(end, k)
    assert (most, len(calls), len(answers)) == (1, 5, 16)
    assert answers.count(False) == 4


async def test_a_member_that_breaks_the_contract_is_left_out() -> None:
    pool = PolicyPool([Silent(), FakePolicy()])
    found = await decoded(pool, list(prompts(2)))
    assert [pieces[-1].state for pieces in found] == ["eos", "eos"]
    assert [type(each) for each in pool.living] == [FakePolicy]


# Weights.


async def test_the_version_moves_when_every_member_has_the_weights_and_newer_tokens_wait_for_it() -> None:
    engines = mortals(Fate(), Fate(loads=(0.1,)))
    pool = PolicyPool(engines)
    decodes = await pool.open(list(prompts(2)))
    moments: list[tuple[int, float]] = []
    async with pool.decoding(decodes, never), anyio.create_task_group() as tasks:
        await decodes[0].read(2)
        tasks.start_soon(pool.load, Weights(1))
        for _ in range(4):
            piece = await read_chunk(decodes[0], 1)
            assert piece.versions.tolist() <= [pool.version]
            moments.append((int(piece.versions[0]), round(anyio.current_time(), 2)))
    assert [version for version, _ in moments] == [0, 1, 1, 1]
    assert moments[1][1] >= 0.12, "made at 0.04 s, and read when the second member has the weights"


STALE = FaultyPolicy("stale", FakePolicy(), (Fault("stale", "load", Garbage("version")),))


@pytest.mark.parametrize(
    "member", [*mortals(Fate(loads=(-1.0,)), Fate(loads=(1_000.0,)), Fate(0.0), Fate(0.0, "hangs")), STALE]
)
async def test_a_member_that_does_not_take_the_weights_is_left_out(member: Policy, messages: list[str]) -> None:
    (engine,) = mortals(Fate())
    pool = PolicyPool([engine, member], timeout=5.0)
    await pool.load(Weights(1))
    assert (pool.version, pool.living) == (1, (engine,))
    assert anyio.current_time() <= 5
    assert f"member 1 ({type(member).__name__}) of the pool is lost" in messages[0]
    assert "1 of 2 members are left" in messages[0]


async def test_weights_that_every_member_refuses_are_the_caller_s_error() -> None:
    faulty = [FaultyPolicy(name, FakePolicy(), (Fault(name, "load", Raise(ModelError)),)) for name in ("one", "two")]
    pool = PolicyPool(faulty)
    with pytest.raises(ModelError, match="load"):
        await pool.load(Weights(1))
    assert (pool.version, len(pool.living)) == (0, 2)
    await pool.load(Weights(1))
    assert pool.version == 1


# Losses.


@pytest.mark.parametrize("how", ["raises", "falls silent", "hangs"])
async def test_a_lost_member_s_rollouts_go_on_elsewhere_from_their_tokens(how: str) -> None:
    can = replace(IN_FLIGHT, reports_progress=True)
    engines = mortals(Fate(0.105, how), Fate(), can=can, length=50)  # type: ignore[arg-type]  # one of the three
    pool, asked = PolicyPool(engines, timeout=5.0), list(prompts(4))
    found = await decoded(pool, asked, limit=1_000)  # nothing is read before the end
    whole = await decoded(PolicyPool(mortals(Fate(), length=50)), asked)
    assert [tokens_of(pieces) for pieces in found] == [tokens_of(pieces) for pieces in whole]
    assert engines[0].tokens in {20, 22}  # as it hangs in a decode step
    assert sum(engine.tokens for engine in engines) == 4 * 50, "no token that had come was made again"
    assert pool.living == (engines[1],)


async def test_what_every_engine_would_refuse_is_raised_and_costs_no_member() -> None:
    script = (Fault("one", "open", Raise(ModelError)),)
    pool = PolicyPool([FaultyPolicy("one", FakePolicy(), script), FakePolicy()])
    with pytest.raises(ModelError, match=r"open\(\) of 'one' fails"):
        await decoded(pool, list(prompts(2)))
    assert len(pool.living) == 2


@pytest.mark.parametrize("fault", [Fault("one", "open", Hang()), Fault("one", "decoding", Hang())])
async def test_a_member_that_does_not_begin_holds_nobody_up(fault: Fault) -> None:
    pool = PolicyPool([FaultyPolicy("one", FakePolicy(), (fault,)), FakePolicy()], timeout=5.0)
    decodes = await pool.open(list(prompts(2)))
    async with pool.decoding(decodes, never):
        await read_all(decodes[1])
        assert anyio.current_time() < 1
        await read_all(decodes[0])
        assert 5 <= anyio.current_time() < 6


async def test_a_member_that_hangs_is_noticed_however_busy_the_others_are() -> None:
    can = replace(IN_FLIGHT, reports_progress=True)
    engines = [
        Mortal(lambda prompt: 50 * prompt.rollout + 50, capabilities=can, fate=fate)
        for fate in (Fate(0.1, "hangs"), Fate())
    ]
    pool = PolicyPool(engines, timeout=5.0)
    decodes = await pool.open(list(prompts(60)))
    async with pool.decoding(decodes, never):
        for decode in decodes[1::2]:  # one ends each second
            await read_all(decode)
            if anyio.current_time() > 10:
                break
        assert pool.living == (engines[1],)


async def test_half_written_rollouts_that_no_member_can_go_on_with_end_the_run() -> None:
    can = replace(IN_FLIGHT, resumes="refused")
    pool = PolicyPool([*mortals(Fate(0.05)), *mortals(Fate(), can=can)])
    with pytest.raises(ModelLost, match=r"rollouts \[0\] are half-written.*capabilities.resumes"):
        await decoded(pool, list(prompts(1)), limit=1)


async def test_without_members_and_no_way_to_get_one_the_run_ends() -> None:
    pool = PolicyPool(mortals(Fate(0.05), Fate(0.1)))
    with pytest.raises(ModelLost, match=r"no engine of the pool is left: member 0.*died.*; member 1.*died"):
        await decoded(pool, list(prompts(2)))
    with pytest.raises(ModelLost, match="no engine of the pool is left"):
        await pool.load(Weights(1))


# Starts.


async def test_a_member_that_is_started_again_gets_the_weights_and_takes_rollouts(messages: list[str]) -> None:
    again = Mortal(lambda prompt: 20, capabilities=IN_FLIGHT)

    async def start(index: int) -> Policy:
        await anyio.sleep(0.5)
        return again

    engines = mortals(Fate(0.1), Fate())
    async with PolicyPool(engines, start=start) as pool:
        await pool.load(Weights(1))
        await decoded(pool, list(prompts(2)))
        assert pool.living == (engines[1],)
        await anyio.sleep(1)
        assert (again.version, list(pool.living)) == (1, [again, engines[1]])
        await decoded(pool, list(prompts(2)))
        assert homes([again]) == [[0]]
    assert "has been started again, with version 1" in messages[-1]


async def test_a_member_that_comes_back_during_an_update_waits_for_the_next_weights() -> None:
    again = Mortal(capabilities=IN_FLIGHT)

    async def start(index: int) -> Policy:
        await anyio.sleep(0.5)
        return again

    async with PolicyPool(mortals(Fate(0.1), Fate()), start=start) as pool:
        await pool.load(Weights(1))
        await decoded(pool, list(prompts(2)))
        await pool.settled()  # from now on the trainer's tensors change
        await anyio.sleep(5)
        assert (again.version, len(pool.living)) == (0, 1)
        await pool.load(Weights(2))
        assert (again.version, pool.version, len(pool.living)) == (2, 2, 2)


async def test_an_update_waits_while_a_member_reads_the_weights_that_it_would_change() -> None:
    async def start(index: int) -> Policy:
        return Mortal(capabilities=IN_FLIGHT, fate=Fate(loads=(1.0,)))

    async with PolicyPool(mortals(Fate(0.1), Fate()), start=start) as pool:
        await pool.load(Weights(1))
        await decoded(pool, list(prompts(2)))
        began = anyio.current_time()
        await pool.settled()
        assert anyio.current_time() - began > 0.5
        assert len(pool.living) == 2


async def test_without_living_members_rollouts_wait_for_one_and_for_no_longer_than_the_timeout() -> None:
    tries = 0

    async def start(index: int) -> Policy:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError("connection refused")
        return mortals(Fate())[0]

    async with PolicyPool(mortals(Fate(0.1)), start=start, timeout=60.0) as pool:
        found = await decoded(pool, list(prompts(1)))
        assert len(tokens_of(found[0])) == 20
        assert 3 <= anyio.current_time() < 5, "tried at once, after 1 s and after 2 s"

    async def in_vain(index: int) -> Policy:
        raise OSError("connection refused")

    async with PolicyPool(mortals(Fate(0.1)), start=in_vain, timeout=60.0) as pool:
        began = anyio.current_time()
        with pytest.raises(ModelLost, match=r"left for 60 s: member 0 .*connection refused"):
            await decoded(pool, list(prompts(1)))
        assert 60 <= anyio.current_time() - began < 61


async def test_another_model_in_place_of_the_lost_one_is_not_taken(messages: list[str]) -> None:
    async def start(index: int) -> Policy:
        return Named(9)

    lost = Named(8)
    lost.length = lambda prompt: 10**6
    async with PolicyPool([lost, Named(8)], start=start, timeout=5.0) as pool:
        pool._members.lose(pool._members.all[0], OSError("gone"))
        await anyio.sleep(10)
        assert len(pool.living) == 1
    assert any("could not be started again" in message and "vocabularies" in message for message in messages)


async def test_a_pool_that_is_opened_again_starts_what_was_lost_meanwhile() -> None:
    async def start(index: int) -> Policy:
        return mortals(Fate())[0]

    pool = PolicyPool(mortals(Fate(0.1), Fate()), start=start)
    await pool.load(Weights(1))
    await decoded(pool, list(prompts(2)))
    await anyio.sleep(5)
    assert len(pool.living) == 1
    for _ in range(2):
        async with pool:
            await anyio.sleep(1)
    assert len(pool.living) == 2
    assert pool.sync_metrics == {"sync/members": 2.0}


# Others.


async def test_decodes_of_others_and_two_decodings_at_once_are_refused() -> None:
    pool, other = PolicyPool([FakePolicy()]), PolicyPool([FakePolicy()])
    foreign = await other.open(list(prompts(1)))
    with pytest.raises(ProtocolError, match="1 are of others"):
        async with pool.decoding(foreign, never):
            pass
    async with pool.decoding([], never):
        with pytest.raises(ProtocolError, match="decoding already"):
            async with pool.decoding([], never):
                pass


@dataclass(eq=False)
class Varied(Mortal):
    """Can draw in several ways, which all end at the same place."""

    drawn: Sampling | None = None

    def with_sampling(self, sampling: Sampling) -> Varied:
        return replace(self, drawn=sampling)


async def test_a_pool_that_draws_otherwise_has_the_same_members() -> None:
    can = replace(IN_FLIGHT, varies_sampling=True)
    pool = PolicyPool([Varied(capabilities=can), Varied(capabilities=can)])
    greedy = pool.with_sampling(Sampling(temperature=0))
    assert [pieces[-1].state for pieces in await decoded(greedy, list(prompts(2)))] == ["eos", "eos"]
    await greedy.load(Weights(1))
    assert (pool.version, greedy.version) == (1, 1)
    async with Generate(pool, Overcommit(2, 0), WholeRollout()):
        async with greedy:
            pass
        assert pool._members._tasks is not None, "an evaluation within a run closes nothing"
        with pytest.raises(ProtocolError, match="open already"):
            async with pool:
                pass
    assert pool._members._tasks is None


def test_pieces_that_a_lost_member_left_are_read_as_they_are_asked_for() -> None:
    async def main() -> list[int]:
        engines = mortals(Fate(0.105), Fate(), length=30)
        pool = PolicyPool(engines)
        decodes = await pool.open(list(prompts(1)))
        async with pool.decoding(decodes, never):
            await anyio.sleep(0.2)
            return [len(piece.tokens) for piece in await read_all(decodes[0], limit=4)]

    sizes = run_virtual(main)
    assert max(sizes) <= 4
    assert sum(sizes) == 30


def tokens(*ids: int) -> IntArray:
    return np.array(ids, np.int32)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("at", [0.055, 0.085, 0.125])
async def test_an_answer_that_came_while_its_rollout_moved_is_not_lost(at: float, keeps: bool) -> None:
    fate = Fate(at, "falls silent", keeps=keeps)
    engines = [
        Mortal(lambda prompt: 9, capabilities=IN_FLIGHT, fate=each, turns=lambda prompt: (5,))
        for each in (fate, Fate())
    ]
    pool = PolicyPool(engines)
    (decode,) = await pool.open_turns(list(prompts(1)))
    async with pool.decoding([decode], never), anyio.create_task_group() as tasks:
        pieces: list[Chunk | ToolTokens] = []

        async def read() -> None:
            pieces.extend(await read_all(decode, limit=2))

        tasks.start_soon(read)
        turn = await decode.turn()
        assert turn is not None
        assert len(turn) == 5
        await anyio.sleep(0.05)
        assert decode.proceed(tokens(7, 8, 9))
        assert await decode.turn() is None
    given = [token for piece in pieces if isinstance(piece, ToolTokens) for token in piece.tokens.tolist()]
    assert given == [7, 8, 9]
    assert len(tokens_of(pieces)) == 12
