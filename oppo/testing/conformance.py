"""Checks that a third-party backend should pass; each raises :class:`ProtocolError` with a message.

Each call of ``make`` returns a fresh model, equal to the one before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from oppo.admission import Admission, Observation
from oppo.algorithms.ppo import ppo
from oppo.data import PromptStream
from oppo.errors import ProtocolError, as_itself, shown
from oppo.events import Batch, Chunk, Finish, IntArray, Prompt, Response, StepReport, Support, ToolTokens
from oppo.graph import Stateful
from oppo.limits import TurnLimit
from oppo.models import Capabilities, Decode, Policy, Scorer, SyncedModel, Trainer, Weights, name_of
from oppo.stages import Generate
from oppo.stages.generate import require_chunk
from oppo.stages.in_flight import require_turns
from oppo.testing.fake_policy import FakePolicy
from oppo.testing.fakes import FakeCritic, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, prompts as made_prompts
from oppo.testing.recorder import Recorder
from oppo.turns import TurnDecode

T = TypeVar("T")
Make: TypeAlias = Callable[[], Awaitable[T]]
"""Returns a fresh model, equal to the one before."""


async def _made(make: Make[T]) -> T:
    found = make()
    if not isinstance(found, Awaitable):  # a lambda that returns the model itself
        raise ProtocolError(
            "the check makes what it checks anew: expected an async function, `async def make(): return "
            f"{type(found).__name__}(...)`, and it returned {shown(found)} without awaiting"
        )
    return await found


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ProtocolError(message)


@dataclass
class Transcript:
    start: int = 0  # position of the first token in the response
    chunks: list[Chunk | ToolTokens] = field(default_factory=list)

    @property
    def tokens(self) -> list[tuple[int, bool]]:
        return [(int(token), isinstance(each, ToolTokens)) for each in self.chunks for token in each.tokens]

    @property
    def versions(self) -> IntArray:
        return np.concatenate([each.versions for each in self.chunks if isinstance(each, Chunk)])

    @property
    def ended(self) -> bool:
        return self.state not in {"live", "cut"}

    @property
    def state(self) -> str:
        return self.chunks[-1].state if self.chunks else "live"

    def first_half(self, prompt: Prompt) -> Response:
        return Response.of(prompt, self.chunks[: len(self.chunks) // 2])


@dataclass
class Trial:
    policy: Policy
    prompts: Sequence[Prompt]
    decodes: Sequence[Decode]
    transcripts: list[Transcript] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)
    cut_at: int = 1_000_000  # the number of these at which it answers true
    has_cut: bool = False
    turns: bool = False  # whether a response may end after its last token

    def __post_init__(self) -> None:
        self.transcripts = [Transcript() for _ in self.prompts]

    @property
    def live(self) -> list[int]:
        return [k for k, transcript in enumerate(self.transcripts) if not transcript.ended]

    @property
    def tokens(self) -> list[list[tuple[int, bool]]]:
        return [transcript.tokens for transcript in self.transcripts]

    def cut(self, finished: Sequence[int]) -> bool:
        require(not self.has_cut, f"cut() was called with {finished} after it had answered true")
        require(len(finished) > 0, "cut() was called though nothing had finished")
        again = set(finished) & set(self.reported)
        require(not again, f"rollouts {sorted(again)} were reported to cut() twice")
        self.reported.extend(finished)
        self.has_cut = len(self.reported) >= self.cut_at
        return self.has_cut

    async def decode(self, limit: int, *, cancel_first: bool = False) -> None:
        self.has_cut = False
        live = self.live
        decoding = self.policy.decoding([self.decodes[k] for k in live], self.cut)
        with as_itself():
            async with decoding, anyio.create_task_group() as readers:
                for k in live:
                    readers.start_soon(self.read, k, limit, cancel_first)

    async def read(self, k: int, limit: int, cancel_first: bool = False) -> None:
        if cancel_first:
            with anyio.move_on_after(0):
                self.transcripts[k].chunks.append(await self.decodes[k].read(limit))
            if self.transcripts[k].ended:
                return
        rollout = self.prompts[k].rollout
        while True:
            chunk = await self.decodes[k].read(limit)
            check_chunk(self.transcripts[k], chunk, limit, self.policy, rollout, turns=self.turns)
            self.transcripts[k].chunks.append(chunk)
            if chunk.state in {"eos", "stop", "length"}:
                require(
                    rollout in self.reported, f"rollout {rollout}: its last chunk was readable before cut() was called"
                )
            if chunk.state != "live":
                return


def check_chunk(
    transcript: Transcript, chunk: Chunk | ToolTokens, limit: int, policy: Policy, rollout: int, *, turns: bool
) -> None:
    sampled = [each.versions[-1] for each in transcript.chunks if isinstance(each, Chunk) and len(each.versions)]
    start = transcript.start + sum(len(each.tokens) for each in transcript.chunks)
    oldest = int(sampled[-1]) if sampled else 0
    require_chunk(chunk, policy, limit, rollout=rollout, start=start, oldest=oldest, turns=turns)
    for before in () if turns else transcript.chunks[-1:]:  # a chunk ends with its turn
        have, whole = len(before.tokens), before.state != "live" or type(before) is not type(chunk)
        require(whole or have == limit, f"rollout {rollout}: a live chunk holds {have} of {limit} tokens")
    if isinstance(chunk, Chunk):
        require(bool(np.all(chunk.logprobs <= 0)), f"rollout {rollout}: a log-prob is above 0")
        require(
            bool(chunk.extra[Support].holds(chunk.tokens).all()),
            f"rollout {rollout}: a token of a chunk is outside of its own support",
        )


@dataclass
class Dialogue(Trial):
    """A trial in which the first turn of each response is answered, and the next one is its last."""

    decodes: Sequence[TurnDecode]
    answer: IntArray = field(default_factory=lambda: np.zeros(1, np.int32))  # int32 [n], to each first turn
    turns: bool = True
    heard: list[list[list[int]]] = field(default_factory=list)  # the turns of each response so far

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heard = [[] for _ in self.prompts]

    async def talk(self, limit: int, *, cancel_first: bool = False, alone: int | None = None) -> None:
        # ``alone``: the one that others join before its first turn is answered.
        self.has_cut, live = False, self.live
        decodes = [self.decodes[k] for k in live if alone in (None, k)]
        with as_itself():
            async with self.policy.decoding(decodes, self.cut) as engine, anyio.create_task_group() as conversations:
                async with anyio.create_task_group() as readers:
                    if alone is not None and (turn := await self.decodes[alone].turn()) is not None:
                        await engine.add([self.decodes[k] for k in live if k != alone])
                        if self.decodes[alone].proceed(self.answer):
                            self.heard[alone].append(turn.tolist())
                    for k in live:
                        readers.start_soon(self.read, k, limit)
                        conversations.start_soon(self.converse, k, cancel_first)
                conversations.cancel_scope.cancel()

    async def converse(self, k: int, cancel_first: bool) -> None:
        decode, heard = self.decodes[k], self.heard[k]
        while True:
            if cancel_first:
                with anyio.move_on_after(0):
                    await decode.turn()
            tokens = await decode.turn()
            if tokens is None or not (decode.finish() if heard else decode.proceed(self.answer)):
                return
            heard.append(tokens.tolist())
            if len(heard) == 2:
                return


async def check_turns(make: Make[Policy], prompts: Sequence[Prompt], plain: Trial) -> None:
    whole = await _dialogue(make, prompts)
    await whole.talk(limit=3)
    require(
        sorted(whole.reported) == sorted(prompt.rollout for prompt in prompts),
        "with turns, cut() was not called with every rollout that ended, but with turns that ended, or not at all",
    )
    require(
        any(whole.heard),
        "capabilities.turns is true, and no turn has ended: give a policy and prompts with responses that end at a "
        "stop token before they reach their length limit",
    )
    _check_answers(whole, plain)
    other = await _dialogue(make, prompts)
    await other.talk(limit=1_000_000, cancel_first=True)
    require(
        (other.tokens, other.heard) == (whole.tokens, whole.heard),
        "a cancelled turn(), or another limit of read(), gives other tokens",
    )
    await _check_turn_cut(make, whole)
    await _check_waiting(make, whole)
    await _check_limit(make, whole)
    await _check_joining_held(make, whole)
    if whole.policy.capabilities.resumes != "refused":
        await _check_reopening(make, whole)


async def _dialogue(make: Make[Policy], prompts: Sequence[Prompt]) -> Dialogue:
    policy = await _made(make)
    decodes = await require_turns(policy).open_turns(prompts)
    require(len(decodes) == len(prompts), f"open_turns() of {len(prompts)} prompts returned {len(decodes)} decodes")
    return Dialogue(policy, prompts, decodes, answer=prompts[0].tokens[:2])


def _check_answers(whole: Dialogue, plain: Trial) -> None:
    for prompt, turns, transcript, alone in zip(
        whole.prompts, whole.heard, whole.transcripts, plain.tokens, strict=True
    ):
        rollout, tokens = f"rollout {prompt.rollout}", transcript.tokens
        given = [token for token, is_given in tokens if is_given]
        sampled = [token for token, is_given in tokens if not is_given]
        for first in turns[:1]:
            require(
                [token for token, _ in alone[: len(first)]] == first,
                f"{rollout}: its first turn has other tokens than the beginning of its response without turns",
            )
            no_room = transcript.state == "length" and len(tokens) == len(first)
            answer = [] if no_room else whole.answer.tolist()
            require(
                given == answer and tokens[len(first) :][: len(given)] == [(token, True) for token in answer],
                f"{rollout}: expected the answer {answer} as tool tokens after its first turn, {first}; got {tokens}",
            )
        require(bool(turns) or not given, f"{rollout}: tokens were given though no turn has ended")
        for second in turns[1:]:
            require(
                sampled == [*turns[0], *second] and transcript.state in {"eos", "stop"},
                f"{rollout}: finish() did not end the response with its turn, but with {transcript.state!r}",
            )


async def _check_turn_cut(make: Make[Policy], whole: Dialogue) -> None:
    trial = await _dialogue(make, whole.prompts)
    while trial.live:
        trial.cut_at = len(trial.reported) + 1
        before = len(trial.reported)
        await trial.talk(limit=4)
        require(len(trial.reported) > before, "a decoding with turns ended though nothing finished")
    same = (trial.tokens, trial.heard) == (whole.tokens, whole.heard)
    require(
        same or trial.policy.capabilities.defers != "with the same tokens",
        "conversations that were deferred and resumed have other tokens than uncut ones",
    )


async def _check_waiting(make: Make[Policy], whole: Dialogue) -> None:
    trial = await _dialogue(make, whole.prompts)
    k = next(k for k, heard in enumerate(whole.heard) if heard)
    rollout, decode = f"rollout {whole.prompts[k].rollout}", trial.decodes[k]
    async with trial.policy.decoding([decode], trial.cut):
        turn = await decode.turn()
    require(
        turn is not None and turn.tolist() == whole.heard[k][0],
        f"{rollout}: turn() returned {turn}, not the tokens of the turn, where it is decoded alone",
    )
    require(await decode.turn() is None, f"{rollout}: turn() returned something though decoding has stopped")
    require(
        not decode.proceed(trial.answer) and not decode.finish(),
        f"{rollout}: proceed() or finish() did something though decoding has stopped",
    )
    require(not trial.reported, f"cut() was called with {trial.reported} though no response has ended")
    async with trial.policy.decoding([decode], trial.cut), anyio.create_task_group() as tasks:
        tasks.start_soon(trial.read, k, 3)
        again = await decode.turn()
        require(
            again is not None and turn is not None and again.tolist() == turn.tolist(),
            f"{rollout}: its turn is {again} after decoding was stopped and went on, not {turn}",
        )
        require(decode.finish(), f"{rollout}: finish() was refused while it was decoded")
    require(trial.transcripts[k].ended, f"{rollout}: it went on after finish()")
    require(trial.reported == [whole.prompts[k].rollout], f"after finish(), cut() was called with {trial.reported}")


async def _check_joining_held(make: Make[Policy], whole: Dialogue) -> None:
    trial, can = await _dialogue(make, whole.prompts), whole.policy.capabilities
    if not (can.adds_while_decoding or can.adds_while_held):
        return
    try:
        await trial.talk(limit=3, alone=next(k for k, heard in enumerate(whole.heard) if heard))
    except ProtocolError as error:
        name = "adds_while_decoding" if can.adds_while_decoding else "adds_while_held"
        words = f"{name} is True, but add() did not work while a turn was unanswered: {error}"
        raise ProtocolError(words) from error
    require(
        (trial.tokens, trial.heard) == (whole.tokens, whole.heard),
        "rollouts that joined while a turn was unanswered, or the one that had it, have other tokens",
    )


async def _check_limit(make: Make[Policy], whole: Dialogue) -> None:
    k, (*first, _) = max(((k, heard[0]) for k, heard in enumerate(whole.heard) if heard), key=lambda pair: len(pair[1]))
    trial = await _dialogue(make, whole.prompts)
    rollout, decode = f"rollout {whole.prompts[k].rollout}", trial.decodes[k]
    if not first:
        return
    decode.bound(TurnLimit(len(first)), 0)
    async with trial.policy.decoding([decode], trial.cut), anyio.create_task_group() as tasks:
        tasks.start_soon(trial.read, k, 3)
        turn = await decode.turn()
        require(
            turn is not None and turn.tolist() == first,
            f"{rollout}: its turn was limited to {len(first)} tokens by bound(), and is {turn}; expected {first}",
        )
        decode.bound(TurnLimit(1), len(first) + len(trial.answer))
        following = await decode.turn() if decode.proceed(trial.answer) else None
        require(
            following is None or len(following) == 1,
            f"{rollout}: the turn after was limited to 1 token by bound(), and is {following}",
        )
        if following is not None:
            decode.finish()


async def _check_reopening(make: Make[Policy], whole: Dialogue) -> None:
    k = next(k for k, heard in enumerate(whole.heard) if heard)
    prompt, first = whole.prompts[k], whole.heard[k][0]
    half = Response.of(prompt, [each for each in whole.transcripts[k].chunks if each.start < len(first)])
    policy = await _made(make)
    (decode,) = await require_turns(policy).open_turns([half])
    async with policy.decoding([decode], lambda finished: False):
        turn = await decode.turn()
        require(
            turn is not None and turn.tolist() == first,
            f"rollout {prompt.rollout}: opened with a turn that has ended, turn() returned {turn}, not its tokens",
        )


async def _trial(make: Make[Policy], prompts: Sequence[Prompt]) -> Trial:
    policy = await _made(make)
    decodes = await policy.open(prompts)
    require(len(decodes) == len(prompts), f"open() of {len(prompts)} prompts returned {len(decodes)} decodes")
    return Trial(policy, prompts, decodes)


async def check_policy(make: Make[Policy], prompts: Sequence[Prompt]) -> None:
    """Check that a policy keeps the contract of :class:`oppo.models.Policy`.

    Args:
        make: returns a fresh policy; its responses must differ in length by some tokens. If it has the capability of
            turns, some must end with one, at a stop token.
        prompts: at least three, with rollout numbers in admission order.
    """
    whole = await _trial(make, prompts)
    await whole.decode(limit=3)
    require(
        sorted(whole.reported) == sorted(p.rollout for p in prompts),
        "cut() was not called with every rollout that ended",
    )
    for limit in (1, 1_000_000):
        other = await _trial(make, prompts)
        await other.decode(limit)
        require(other.tokens == whole.tokens, f"read({limit}) gives other tokens than read(3)")
    cancelled = await _trial(make, prompts)
    await cancelled.decode(limit=2, cancel_first=True)
    require(cancelled.tokens == whole.tokens, "a cancelled read lost or doubled tokens")
    await _check_cut(make, whole)
    await _check_giving_up(make, whole)
    await _check_leaving(make, prompts)
    await _check_joining(make, whole)
    await _check_loading(make, prompts)
    if whole.policy.capabilities.resumes != "refused":
        await _check_resuming(make, whole)
    if whole.policy.capabilities.turns:
        await check_turns(make, prompts, whole)


async def _check_cut(make: Make[Policy], whole: Trial) -> None:
    trial = await _trial(make, whole.prompts)
    steps = 0
    while trial.live:
        trial.cut_at = len(trial.reported) + 1
        before = len(trial.reported)
        await trial.decode(limit=4)
        steps += 1
        require(len(trial.reported) > before, "a decoding with live rollouts ended though nothing finished")
        ended = {p.rollout for p, t in zip(whole.prompts, trial.transcripts, strict=True) if t.ended}
        require(ended == set(trial.reported), f"ended: {sorted(ended)}, reported to cut(): {sorted(trial.reported)}")
    require(steps > 1, "every response ended in the same decode step: give prompts whose responses differ in length")
    require(
        trial.tokens == whole.tokens or trial.policy.capabilities.defers != "with the same tokens",
        "deferred and resumed rollouts have other tokens than uncut ones",
    )
    for transcript in trial.transcripts:
        versions = transcript.versions
        require(bool(np.all(np.diff(versions) >= 0)), "the versions of a rollout decrease")


async def _check_giving_up(make: Make[Policy], whole: Trial) -> None:
    trial, expected = await _trial(make, whole.prompts), whole.tokens
    longest = max(range(len(expected)), key=lambda k: len(expected[k]))
    with as_itself():
        async with trial.policy.decoding(trial.decodes, trial.cut):
            await trial.decodes[longest].read(1)
            async with anyio.create_task_group() as readers:
                for k in set(range(len(expected))) - {longest}:
                    readers.start_soon(trial.read, k, 3)
                await trial.decodes[longest].aclose()
    trial.transcripts[longest].chunks, expected = [], [[] if k == longest else t for k, t in enumerate(expected)]
    require([t.tokens for t in trial.transcripts] == expected, "giving a rollout up changed the tokens of the others")
    try:
        await trial.decodes[longest].read(1)
    except ProtocolError:
        return
    raise ProtocolError("a rollout that was closed can be read")


async def _check_resuming(make: Make[Policy], whole: Trial) -> None:
    halves = [t.first_half(prompt) for prompt, t in zip(whole.prompts, whole.transcripts, strict=True)]
    policy = await _made(make)
    trial = Trial(policy, whole.prompts, await policy.open(halves))
    for half, transcript in zip(halves, trial.transcripts, strict=True):
        transcript.start = len(half)
    await trial.decode(limit=4)
    resumed = [
        [*zip(half.tokens.tolist(), (~half.sampled).tolist(), strict=True), *t.tokens]
        for half, t in zip(halves, trial.transcripts, strict=True)
    ]
    require(not trial.live, "responses that were opened half-written did not go on to an end")
    if policy.capabilities.resumes == "with the same tokens":
        require(
            resumed == whole.tokens,
            "responses that were opened half-written did not go on as they were written",
        )


async def _check_joining(make: Make[Policy], whole: Trial) -> None:
    trial = await _trial(make, whole.prompts)
    first, *others = trial.decodes
    adds, refused = trial.policy.capabilities.adds_while_decoding, False
    with as_itself():
        async with trial.policy.decoding([first], trial.cut) as decoding:
            try:
                await decoding.add(others)
            except ProtocolError:
                refused = True
            async with anyio.create_task_group() as readers:
                for k in range(1 if refused else len(whole.prompts)):
                    readers.start_soon(trial.read, k, 3)
    require(refused is not adds, f"adds_while_decoding is {adds}, but add() did {'not ' * refused}work")
    if adds:
        require(trial.tokens == whole.tokens, "rollouts that joined others have other tokens")
        await _check_joining_late(make, whole)
        await _check_stopping(make, whole)


async def _check_stopping(make: Make[Policy], whole: Trial) -> None:
    trial = await _trial(make, whole.prompts)
    with as_itself():
        async with trial.policy.decoding(trial.decodes, trial.cut) as decoding:
            decoding.stop()
            async with anyio.create_task_group() as readers:
                for k in range(len(whole.prompts)):
                    readers.start_soon(trial.read, k, 3)
    require(any(each.state == "cut" for each in trial.transcripts), "stop() did not end decoding")
    await trial.decode(limit=3)
    require(trial.tokens == whole.tokens, "rollouts that stop() has deferred have other tokens")


async def _check_joining_late(make: Make[Policy], whole: Trial) -> None:
    trial = await _trial(make, whole.prompts)
    trial.cut_at = 1
    with as_itself():
        async with trial.policy.decoding(trial.decodes[:1], trial.cut) as decoding:
            await trial.read(0, 3)
            await decoding.add(trial.decodes[1:])
            await trial.read(1, 3)
    late = trial.transcripts[1]
    require(late.state == "cut" and not late.tokens, "a rollout that joined after the cut was decoded")
    trial.cut_at = 1_000_000
    await trial.decode(limit=3)
    require(trial.tokens == whole.tokens, "rollouts that joined after the cut have other tokens")


async def _check_loading(make: Make[Policy], prompts: Sequence[Prompt]) -> None:
    trial = await _trial(make, prompts)
    policy, before = trial.policy, trial.policy.version
    when, refusals = policy.capabilities.loads_while_decoding, list[ProtocolError]()

    async def load() -> None:
        try:
            await policy.load(Weights(before + 1))
        except ProtocolError as error:
            refusals.append(error)

    with as_itself():
        async with anyio.create_task_group() as tasks, policy.decoding(trial.decodes, trial.cut):
            tasks.start_soon(load)
            await anyio.lowlevel.checkpoint()
            async with anyio.create_task_group() as readers:
                for k in range(len(prompts)):
                    readers.start_soon(trial.read, k, 1)
    made = [transcript.versions for transcript in trial.transcripts]
    newest = max(int(versions[-1]) for versions in made)
    require(
        bool(refusals) is (when == "refused"),
        f"loads_while_decoding is {when!r}, but load() {f'raised {refusals}' if refusals else 'returned'}",
    )
    if when != "refused":
        require(policy.version == before + 1, f"weights loaded while decoding are not served: {policy.version}")
        wanted = before + 1 if when == "between decode steps" else before
        require(newest == wanted, f"loads_while_decoding is {when!r}, but the newest token is of version {newest}")


async def _check_leaving(make: Make[Policy], prompts: Sequence[Prompt]) -> None:
    trial = await _trial(make, prompts)
    try:
        async with trial.policy.decoding(trial.decodes, trial.cut):
            raise _LeftEarlyError  # noqa: TRY301 - leaving by an exception is what is checked
    except _LeftEarlyError:
        pass
    except BaseExceptionGroup as group:
        raise ProtocolError(
            f"decoding wraps an error of its body in {group!r}: expected the error itself, so that callers can catch it"
        ) from group
    made = len(trial.reported)
    await anyio.sleep(0.01)
    require(len(trial.reported) == made, "the policy goes on decoding after its context was left by an exception")
    before = trial.policy.version
    await trial.policy.load(Weights(before + 1))
    require(trial.policy.version == before + 1, "load() did not move the version")
    for decode in trial.decodes:
        await decode.aclose()
        await decode.aclose()


class _LeftEarlyError(Exception):
    """Raised by the check itself, in the body of a decoding."""


# Of responses, in tokens, over and over: alike, of many lengths, with a long tail, evenly spread
_LENGTHS: Final = ((7,), (3, 5, 40, 8, 2, 13), (1, 1, 30), tuple(range(1, 24)))

_STEPS: Final = 8


async def check_admission(make: Make[Admission]) -> None:
    """Check that an admission keeps the contract of :class:`oppo.Admission` in runs of fakes.

    Every batch is full but the last, nothing is deferred more than ``max_deferrals`` times, each prompt is trained
    once, the same observations lead to the same decisions, and so does its state where it has a ``state_dict``.

    Args:
        make: returns a fresh admission.

    Raises:
        AdmissionError: it decided what no step can do.
        ProtocolError: names the expected and the received value.
    """
    for lengths in _LENGTHS:
        admission = await _made(make)
        seen: dict[int, Observation] = {}
        reports, _ = await _decided(admission, lengths, seen)
        batch, most = admission.batch, admission.max_deferrals
        for report in reports:
            require(
                len(report.trained) == batch,
                f"step {report.index + 1} trained {len(report.trained)} prompts, and there were enough for {batch}",
            )
            ages = [event.age for event in report.deferred if not event.restart]
            require(max(ages, default=0) <= most, f"step {report.index + 1}: max_deferrals is {most}, ages are {ages}")
        require(len(reports) == _STEPS, f"{len(reports)} of {_STEPS} steps trained something")
        again, _ = await _decided(await _made(make), lengths, dict(seen))
        require(_decisions(again) == _decisions(reports), "the same observations lead to other decisions")
        if isinstance(admission, Stateful):
            first, state = await _decided(await _made(make), lengths, dict(seen), last=_STEPS // 2)
            rest, _ = await _decided(await _made(make), lengths, dict(seen), first=_STEPS // 2, state=state)
            resumed = _decisions([*first, *rest])
            require(resumed == _decisions(reports), "decisions differ after load_state_dict(state_dict())")


def _decisions(reports: Sequence[StepReport]) -> list[tuple[object, ...]]:
    return [(report.trained, sorted(event.rollout for event in report.deferred)) for report in reports]


async def _decided(
    admission: Admission,
    lengths: Sequence[int],
    seen: dict[int, Observation],
    *,
    first: int = 0,
    last: int = _STEPS,
    state: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
) -> tuple[list[StepReport], tuple[Mapping[str, Any], Mapping[str, Any]]]:
    can, recorder = Capabilities(adds_while_decoding=True), Recorder()
    policy = FakePolicy(lambda prompt: lengths[prompt.admission % len(lengths)], 1e-3, capabilities=can)
    critic = FakeCritic()
    policy.version = critic.version = first
    graph = ppo(
        policy=policy,
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar),
        critic=critic,
        trainer=FakeTrainer(1e-3, version=first),
        admission=admission,
    )
    generate = replace(graph.stage("generate", Generate), replay=dict(seen))
    source = PromptStream(made_prompts(3 * _STEPS * admission.batch), epochs=1)
    async with graph.replace(generate=generate).open(source, observers=[recorder]) as run:
        if state is not None:
            run.load_state_dict(state[0])
            source.load_state_dict(state[1])
        steps = run.steps(_STEPS - first)
        for _ in range(first, last):
            await anext(steps, None)
        after = run.state_dict(), source.state_dict()
    recorder.validate()
    seen |= {item.item.step: item.item for item in recorder.items if isinstance(item.item, Observation)}
    return recorder.reports, after


async def check_scorer(make: Make[Scorer[T]], finished: Sequence[Finish], close: Callable[[T, T], bool]) -> None:
    """Check that a scorer's value of a rollout does not depend on its chunks, and that it refuses a gap.

    Args:
        make: returns a fresh scorer.
        finished: at least two complete rollouts, with at least four response tokens each.
        close: whether two values are equal, up to the backend's rounding: ``1e-5 * (1 + |x|)`` for oppo's own.
    """
    whole = await _made(make)
    for event in finished:
        await whole.extend([event.response.prompt, event.response.chunk(0, 1), event.response.chunk(1)])
    expected = await whole.finish(finished)
    require(len(expected) == len(finished), f"finish() of {len(finished)} rollouts returned {len(expected)} values")
    for size in (1, 2, 3):
        streamed = await _made(make)
        await streamed.forget([event.rollout for event in finished])
        for event in finished:
            await streamed.extend([event.response.prompt])
        responses = [event.response for event in finished]
        for start in range(0, max(map(len, responses)), size):
            await streamed.extend([each.chunk(start, start + size) for each in responses if start < len(each)])
        for event, value in zip(finished, expected, strict=True):
            (got,) = await streamed.finish([event])
            require(close(got, value), f"rollout {event.rollout} in chunks of {size}: {got}, in one piece: {value}")
    await _check_gap(make, finished[0])


async def _check_gap(make: Make[Scorer[T]], event: Finish) -> None:
    scorer = await _made(make)
    await scorer.extend([event.response.prompt])
    try:
        await scorer.extend([event.response.chunk(1, 2)])
        await scorer.finish([event])
    except ProtocolError:
        return
    raise ProtocolError("the scorer accepted a chunk that does not continue its rollout")


async def check_trainer(make: Make[Trainer], batch: Batch, synced: Sequence[SyncedModel]) -> None:
    """Check that a trainer counts its updates and syncs every model."""
    trainer = await _made(make)
    before = trainer.version
    trained = await trainer.update(batch)
    require(trainer.version == before + 1, f"after one update the version is {trainer.version}, not {before + 1}")
    for name, rollouts in (("nonfinite", trained.nonfinite), ("skipped", trained.skipped)):
        strangers = set(rollouts) - set(batch.rollouts)
        require(not strangers, f"{name} names rollouts that are not in the batch: {sorted(strangers)}")
    await trainer.sync_weights(*synced)
    behind = [name_of(model) for model in synced if model.version != trainer.version]
    require(not behind, f"sync_weights() left synced models at another version than {trainer.version}: {behind}")
