"""Checks that a third-party backend should pass; each raises :class:`ProtocolError` with a sentence.

Each call of ``make`` returns a fresh model, equal to the one before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from oppo.errors import ProtocolError, as_itself
from oppo.events import Batch, Finish, Prompt, Response
from oppo.models import Decode, Follower, Piece, Policy, Scorer, Trainer, Weights

T = TypeVar("T")
Make: TypeAlias = Callable[[], Awaitable[T]]


def require(holds: bool, sentence: str) -> None:
    """Raise a :class:`ProtocolError` with ``sentence`` unless ``holds``."""
    if not holds:
        raise ProtocolError(sentence)


@dataclass
class Transcript:
    """The pieces read of one rollout."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def tokens(self) -> list[tuple[int, bool]]:
        """All tokens, in order, and whether each was given."""
        return [(int(token), piece.given) for piece in self.pieces for token in piece.tokens]

    @property
    def state(self) -> str:
        """The state of the last piece."""
        return self.pieces[-1].state if self.pieces else "live"

    def first_half(self, prompt: Prompt) -> Response:
        """Return the response to ``prompt`` as it was after half of the pieces."""
        half, start = Response.empty(prompt), 0
        for piece in self.pieces[: len(self.pieces) // 2]:
            half = half.then(piece.event(prompt.rollout, start))
            start += len(piece.tokens)
        return half


@dataclass
class _Trial:
    """One policy, its decodes, and the rollouts reported to the cut."""

    policy: Policy
    prompts: Sequence[Prompt]
    decodes: Sequence[Decode]
    transcripts: list[Transcript]
    reported: list[int] = field(default_factory=list)
    cut_at: int = 1_000_000
    has_cut: bool = False

    def cut(self, finished: Sequence[int]) -> bool:
        require(not self.has_cut, f"cut() was called with {finished} after it had answered true")
        require(len(finished) > 0, "cut() was called though nothing had finished")
        again = set(finished) & set(self.reported)
        require(not again, f"rollouts {sorted(again)} were reported to cut() twice")
        self.reported.extend(finished)
        self.has_cut = len(self.reported) >= self.cut_at
        return self.has_cut

    async def decode(self, limit: int, *, cancel_first: bool = False) -> None:
        """Decode one step and read all of it, ``limit`` tokens at a time."""
        self.has_cut = False
        live = [k for k, transcript in enumerate(self.transcripts) if transcript.state in {"live", "cut"}]
        decoding = self.policy.decoding([self.decodes[k] for k in live], self.cut)
        with as_itself():
            async with decoding, anyio.create_task_group() as readers:
                for k in live:
                    readers.start_soon(self.read, k, limit, cancel_first)

    async def read(self, k: int, limit: int, cancel_first: bool = False) -> None:
        if cancel_first:
            with anyio.move_on_after(0):
                self.transcripts[k].pieces.append(await self.decodes[k].read(limit))
            if self.transcripts[k].state not in {"live", "cut"}:
                return
        rollout = self.prompts[k].rollout
        while True:
            piece = await self.decodes[k].read(limit)
            _check_piece(rollout, piece, limit, self.transcripts[k].pieces)
            self.transcripts[k].pieces.append(piece)
            if piece.state in {"eos", "stop", "length"}:
                require(
                    rollout in self.reported, f"rollout {rollout}: its last piece was readable before cut() was called"
                )
            if piece.state != "live":
                return


def _check_piece(rollout: int, piece: Piece, limit: int, earlier: Sequence[Piece]) -> None:
    n = len(piece.tokens)
    require(n == len(piece.logprobs) == len(piece.versions), f"rollout {rollout}: a piece's arrays differ in length")
    require(n <= limit, f"rollout {rollout}: read({limit}) returned {n} tokens")
    require(n > 0 or piece.state == "cut", f"rollout {rollout}: an empty piece with state {piece.state!r}")
    for before in earlier[-1:]:
        have, whole = len(before.tokens), before.state != "live" or before.given is not piece.given
        require(whole or have == limit, f"rollout {rollout}: a live piece holds {have} of {limit} tokens")
    if not piece.given:
        require(bool(np.all(piece.logprobs <= 0)), f"rollout {rollout}: a log-prob is above 0")
        require(
            piece.support.describes(n) and bool(piece.support.holds(piece.tokens).all()),
            f"rollout {rollout}: a token of a piece is outside of its own support",
        )


async def _trial(make: Make[Policy], prompts: Sequence[Prompt]) -> _Trial:
    policy = await make()
    decodes = await policy.open(prompts)
    require(len(decodes) == len(prompts), f"open() of {len(prompts)} prompts returned {len(decodes)} decodes")
    return _Trial(policy, prompts, decodes, [Transcript() for _ in prompts])


async def check_policy(make: Make[Policy], prompts: Sequence[Prompt]) -> None:
    """Check that a policy keeps the contract of :class:`oppo.models.Policy`.

    Args:
        make: returns a fresh policy; its responses must differ in length by some tokens.
        prompts: at least three, with rollout numbers in admission order.

    Raises:
        ProtocolError: what was expected and what came.
    """
    whole = await _trial(make, prompts)
    await whole.decode(limit=3)
    expected = [transcript.tokens for transcript in whole.transcripts]
    require(
        sorted(whole.reported) == sorted(p.rollout for p in prompts),
        "cut() was not called with every rollout that ended",
    )
    for limit in (1, 1_000_000):
        other = await _trial(make, prompts)
        await other.decode(limit)
        require([t.tokens for t in other.transcripts] == expected, f"read({limit}) gives other tokens than read(3)")
    cancelled = await _trial(make, prompts)
    await cancelled.decode(limit=2, cancel_first=True)
    require([t.tokens for t in cancelled.transcripts] == expected, "a cancelled read lost or doubled tokens")
    await _check_cut(make, prompts, expected)
    await _check_giving_up(make, prompts, expected)
    await _check_leaving(make, prompts)
    await _check_joining(make, prompts, expected)
    await _check_loading(make, prompts)
    if whole.policy.capabilities.resumes != "refused":
        await _check_resuming(make, whole)


async def _check_cut(make: Make[Policy], prompts: Sequence[Prompt], expected: list[list[tuple[int, bool]]]) -> None:
    trial = await _trial(make, prompts)
    steps = 0
    while any(transcript.state in {"live", "cut"} for transcript in trial.transcripts):
        trial.cut_at = len(trial.reported) + 1
        before = len(trial.reported)
        await trial.decode(limit=4)
        steps += 1
        require(len(trial.reported) > before, "a decoding with live rollouts ended though nothing finished")
        ended = {p.rollout for p, t in zip(prompts, trial.transcripts, strict=True) if t.state not in {"live", "cut"}}
        require(ended == set(trial.reported), f"ended: {sorted(ended)}, reported to cut(): {sorted(trial.reported)}")
    require(steps > 1, "every response ended in the same decode step: give prompts whose responses differ in length")
    require(
        [t.tokens for t in trial.transcripts] == expected,
        "parked and resumed rollouts have other tokens than uncut ones",
    )
    for transcript in trial.transcripts:
        versions = np.concatenate([piece.versions for piece in transcript.pieces])
        require(bool(np.all(np.diff(versions) >= 0)), "the versions of a rollout decrease")


async def _check_giving_up(
    make: Make[Policy], prompts: Sequence[Prompt], expected: list[list[tuple[int, bool]]]
) -> None:
    trial = await _trial(make, prompts)
    longest = max(range(len(prompts)), key=lambda k: len(expected[k]))
    with as_itself():
        async with trial.policy.decoding(trial.decodes, trial.cut):
            await trial.decodes[longest].read(1)
            async with anyio.create_task_group() as readers:
                for k in set(range(len(prompts))) - {longest}:
                    readers.start_soon(trial.read, k, 3)
                await trial.decodes[longest].aclose()
    trial.transcripts[longest].pieces, expected = [], [[] if k == longest else t for k, t in enumerate(expected)]
    require([t.tokens for t in trial.transcripts] == expected, "giving a rollout up changed the tokens of the others")
    try:
        await trial.decodes[longest].read(1)
    except ProtocolError:
        return
    raise ProtocolError("a rollout that was given up can be read")


async def _check_resuming(make: Make[Policy], whole: _Trial) -> None:
    halves = [t.first_half(prompt) for prompt, t in zip(whole.prompts, whole.transcripts, strict=True)]
    policy = await make()
    trial = _Trial(policy, whole.prompts, await policy.open(halves), [Transcript() for _ in halves])
    await trial.decode(limit=4)
    resumed = [
        [*zip(half.tokens.tolist(), (~half.sampled).tolist(), strict=True), *t.tokens]
        for half, t in zip(halves, trial.transcripts, strict=True)
    ]
    ended = [transcript.state not in {"live", "cut"} for transcript in trial.transcripts]
    require(all(ended), "responses that were opened half-written did not go on to an end")
    if policy.capabilities.resumes == "with the same tokens":
        require(
            resumed == [t.tokens for t in whole.transcripts],
            "responses that were opened half-written did not go on as they were written",
        )


async def _check_joining(make: Make[Policy], prompts: Sequence[Prompt], expected: list[list[tuple[int, bool]]]) -> None:
    trial = await _trial(make, prompts)
    first, *others = trial.decodes
    adds, refused = trial.policy.capabilities.adds_while_decoding, False
    with as_itself():
        async with trial.policy.decoding([first], trial.cut) as decoding:
            try:
                await decoding.add(others)
                await decoding.park(others[:1])
            except ProtocolError:
                refused = True
            async with anyio.create_task_group() as readers:
                for k in range(1 if refused else len(prompts)):
                    readers.start_soon(trial.read, k, 3)
    require(refused is not adds, f"adds_while_decoding is {adds}, but add() and park() did {'not ' * refused}work")
    if adds:
        require(trial.transcripts[1].state == "cut", "a rollout that was parked was decoded on")
        await trial.decode(limit=3)
        require([t.tokens for t in trial.transcripts] == expected, "rollouts that joined or left have other tokens")


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
            trial.transcripts[0].pieces.append(await trial.decodes[0].read(1))
            tasks.start_soon(load)
            await anyio.lowlevel.checkpoint()
            async with anyio.create_task_group() as readers:
                for k in range(len(prompts)):
                    readers.start_soon(trial.read, k, 1)
    made = [np.concatenate([piece.versions for piece in transcript.pieces]) for transcript in trial.transcripts]
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


async def check_scorer(make: Make[Scorer[T]], finished: Sequence[Finish], close: Callable[[T, T], bool]) -> None:
    """Check that a scorer's value of a rollout does not depend on its chunks, and that it refuses a gap.

    Args:
        make: returns a fresh scorer.
        finished: at least two complete rollouts, with at least four response tokens each.
        close: whether two values are equal, up to the backend's rounding: ``1e-5 * (1 + |x|)`` for those of oppo.

    Raises:
        ProtocolError: what was expected and what came.
    """
    whole = await make()
    for event in finished:
        await whole.extend([event.response.prompt, event.response.chunk(0, 1), event.response.chunk(1)])
    expected = await whole.finish(finished)
    require(len(expected) == len(finished), f"finish() of {len(finished)} rollouts returned {len(expected)} values")
    for size in (1, 2, 3):
        streamed = await make()
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
    scorer = await make()
    await scorer.extend([event.response.prompt])
    try:
        await scorer.extend([event.response.chunk(1, 2)])
        await scorer.finish([event])
    except ProtocolError:
        return
    raise ProtocolError("the scorer accepted a chunk that does not continue its rollout")


async def check_trainer(make: Make[Trainer], batch: Batch, followers: Sequence[Follower]) -> None:
    """Check that a trainer counts its updates and publishes to every follower.

    Raises:
        ProtocolError: what was expected and what came.
    """
    trainer = await make()
    before = trainer.version
    trained = await trainer.update(batch)
    require(trainer.version == before + 1, f"after one update the version is {trainer.version}, not {before + 1}")
    for name, rollouts in (("nonfinite", trained.nonfinite), ("skipped", trained.skipped)):
        strangers = set(rollouts) - set(batch.rollouts)
        require(not strangers, f"{name} names rollouts that are not in the batch: {sorted(strangers)}")
    await trainer.publish(*followers)
    behind = [type(follower).__name__ for follower in followers if follower.version != trainer.version]
    require(not behind, f"publish() left followers at another version than {trainer.version}: {behind}")
