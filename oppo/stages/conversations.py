"""Conversations: an environment answers the turns of rollouts, in calls that go on when a step is cut."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeAlias, cast

import anyio
import anyio.lowlevel
import numpy as np
from anyio.abc import TaskGroup

from oppo.declared import require_real
from oppo.errors import ProtocolError, awaited, blaming, noted, one_line, promised
from oppo.events import AnsweredTurn, Chunk, Drop, IntArray, Prompt, Response, described
from oppo.graph import Step
from oppo.limits import UNLIMITED, TurnLimit
from oppo.models import entered
from oppo.stages.ledger import InFlightRollout
from oppo.stages.metrics import Averaged
from oppo.turns import Answer, Answered, Environment, Turn, TurnDecode, turns_of

TurnOutcome: TypeAlias = Answer | Drop | None

BeginSegment: TypeAlias = Callable[[Prompt], Awaitable[bool]]
"""Begins the next segment of a rollout, unless it was begun before; returns false once decoding has stopped."""


@dataclass(slots=True)
class _Memory:
    """The answered turns of a rollout, and the environment's state after them, as JSON."""

    answered: int = 0
    state: str = "null"
    calls: int = 0  # of tools, in these turns
    failures: int = 0
    length: int = 0  # tokens of the response, up to the last answer
    turns: list[AnsweredTurn] = field(default_factory=list)
    limit: TurnLimit | None = None  # of the turn; that of the prompt before the first answer
    before: list[int] = field(default_factory=list)  # tokens of the turn up to those that interrupted it

    def after(self, answer: Answer, call: _Call) -> _Memory:
        if answer.within:
            return replace(self, before=[*call.tokens, *answer.tokens.tolist()])
        end, said = self.length + len(call.tokens), [dict(each) for each in answer.said]
        reward = None if answer.reward is None else float(answer.reward)
        return _Memory(
            self.answered + bool(len(answer.tokens)),
            _as_json(answer.state),
            self.calls + answer.calls,
            self.failures + answer.failures,
            end + len(answer.tokens),
            [*self.turns, AnsweredTurn(end, reward, answer.key, said)],
            answer.limit,
        )


@dataclass(slots=True, eq=False)
class _Call:
    """One call of the environment, which goes on when a step is cut, and is cancelled if its rollout is closed."""

    started: float
    tokens: list[int]  # of the turn
    ended: float = 0.0
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    outcome: TurnOutcome = None
    error: Exception | None = None

    def result(self) -> TurnOutcome:
        if self.error is not None:
            raise self.error
        return self.outcome

    def answered(self, rollout: int, turn: int, tokens: int = 0, error: str = "") -> Answered:
        return Answered(rollout, turn, tokens, self.ended - self.started, error)


class Conversations:
    """Answers the turns of a run's rollouts.

    Calls of several rollouts overlap. Between steps no rollout has a task, but a call goes on: its outcome waits here
    for the step that decodes the rollout on.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._follow = getattr(environment, "follow", None)
        self._memories: dict[int, _Memory] = {}
        self._before: dict[int, _Memory] = {}  # without the last answer
        self._calls: dict[int, _Call] = {}
        self._known: dict[int, Prompt] = {}  # rollouts that the environment may hold something of
        self._over: dict[int, Sequence[int]] = {}  # those that ended, by step
        self._ended: list[_Memory] = []
        self._most = getattr(environment, "max_segments", 1)
        self._branches: dict[int, int] = {}  # the last segment of a rollout, while its responses are forgotten
        self._segments: list[float] = []
        self._summaries: list[float] = []  # their lengths, in tokens
        self._tools = False
        self._tasks: TaskGroup | None = None
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._opened = await entered([self._environment])
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks, self._tasks = self._tasks, None
        self._memories, self._before, self._calls = {}, {}, {}
        async with self._opened:
            if tasks is not None:
                tasks.cancel_scope.cancel()
                await tasks.__aexit__(None, None, None)
            self.release([*self._known])
            self._over.clear()

    def begin(self, step: Step, ended: Sequence[int]) -> None:
        for index in [each for each in self._over if each < step.observed]:
            self.release(self._over.pop(index))
        self._over[step.index] = ended

    async def converse(self, rollout: InFlightRollout, step: Step, begin: BeginSegment) -> None:
        number, decode = rollout.prompt.rollout, cast("TurnDecode", rollout.decode)
        while (tokens := await self._turn(number, decode)) is not None:
            memory = self._memories.setdefault(number, _Memory())
            with noted(f"while answering turn {memory.answered} of rollout {number}"):
                call = self._calls.get(number) or self._ask(rollout, memory, [*memory.before, *tokens.tolist()])
                await call.done.wait()
                try:
                    outcome = call.result()
                except Exception as error:
                    step.note(call.answered(number, memory.answered, error=one_line(error)))
                    raise
            given = outcome.tokens if isinstance(outcome, Answer) and len(outcome.tokens) else None
            if isinstance(outcome, Drop):
                rollout.dropped = outcome.reason
            segment = outcome.segment if isinstance(outcome, Answer) else None
            if segment is not None:
                following = replace(rollout.prompt, tokens=segment, branch=rollout.prompt.branch + 1, limit=UNLIMITED)
                if not await begin(following):
                    return
            after = memory.after(outcome, call) if isinstance(outcome, Answer) else memory
            limits = [each.limit or rollout.prompt.limit for each in (memory, after)]
            if given is not None and limits != [UNLIMITED, UNLIMITED]:
                decode.bound(limits[-1], after.length)
            if not (decode.finish() if given is None else decode.proceed(given)):
                return
            del self._calls[number]
            if isinstance(outcome, Answer) and outcome.within:
                self._memories[number] = after
                continue
            if segment is not None:
                self._summaries.append(float(len(call.tokens)))
            step.note(call.answered(number, memory.answered, 0 if given is None else len(given), rollout.dropped))
            if isinstance(outcome, Answer):
                self._before[number], self._memories[number] = memory, after
                self._tools = self._tools or bool(outcome.calls)
            step.record(Averaged({"turns/answer_seconds": [call.ended - call.started]}))
            for name, seconds in outcome.seconds if isinstance(outcome, Answer) else ():
                step.record(Averaged({f"tools/{name}/seconds": [seconds]}))

    async def _turn(self, rollout: int, decode: TurnDecode) -> IntArray | None:
        with noted(f"while waiting for a turn of rollout {rollout}"):
            return await decode.turn()

    def opened(self, rollout: Prompt | Response, decode: TurnDecode) -> None:
        prompt = rollout if isinstance(rollout, Prompt) else rollout.prompt
        memory = self._memories.get(prompt.rollout, _Memory())
        if (limit := memory.limit or prompt.limit) != UNLIMITED:
            decode.bound(limit, memory.length)

    def heard(self, rollout: InFlightRollout) -> None:
        """Show new tokens of a rollout to the environment, if it follows turns."""
        if self._follow is not None:
            memory = self._memories.get(rollout.prompt.rollout, _Memory())

            def turn() -> list[int]:
                pieces = (each.tokens for each in rollout.pieces if each.start >= memory.length)
                return [token for tokens in pieces for token in tokens.tolist()]

            self._follow(rollout.prompt, memory.answered, turn)

    def _ask(self, rollout: InFlightRollout, memory: _Memory, tokens: list[int]) -> _Call:
        if self._tasks is None:
            raise ProtocolError("an environment answers in a run only: open the graph first")
        number = rollout.prompt.rollout
        self._known[number] = rollout.prompt
        call = self._calls[number] = _Call(anyio.current_time(), tokens)
        said = partial(_turns_read, rollout, memory.turns, memory.length + len(tokens))
        state, length = json.loads(memory.state), memory.length + len(tokens)
        turn = Turn(rollout.prompt, memory.answered, np.array(tokens, np.int32), state, said, length)
        self._tasks.start_soon(self._answer, call, turn, name=f"answer rollout {number}")
        return call

    async def _answer(self, call: _Call, turn: Turn) -> None:
        try:
            with call.scope, blaming(f"{type(self._environment).__name__}.answer()"):
                await anyio.lowlevel.checkpoint_if_cancelled()  # its rollout may have been closed
                call.outcome = _require_outcome(
                    await awaited(promised(self._environment.answer(turn), "answer() of the environment"))
                )
        except Exception as error:  # noqa: BLE001 - the rollout's own task raises it
            call.error = error
        call.ended = anyio.current_time()
        call.done.set()

    def answered(self, rollout: int) -> Sequence[AnsweredTurn]:
        return self._memories.get(rollout, _Memory()).turns

    def forget(self, prompt: Prompt) -> None:
        """Forget a rollout whose response has ended, or begins again; cancel a call that nothing waits for any more."""
        memory, call = self._memories.pop(prompt.rollout, _Memory()), self._calls.pop(prompt.rollout, None)
        self._before.pop(prompt.rollout, None)
        self._ended.append(memory)
        last = self._branches[prompt.first] = max(prompt.branch, self._branches.get(prompt.first, 0))
        if not prompt.branch and self._branches.pop(prompt.first) is not None and self._most > 1:
            self._segments.append(last + 1.0)
        if call is not None:
            call.scope.cancel()
            memory = memory.after(call.outcome, call) if isinstance(call.outcome, Answer) else memory
        self._known[prompt.rollout] = prompt
        if (forget := getattr(self._environment, "forget", None)) is not None:
            forget(prompt, json.loads(memory.state))

    def release(self, rollouts: Iterable[int]) -> None:
        release = getattr(self._environment, "release", None)
        for prompt in filter(None, [self._known.pop(rollout, None) for rollout in rollouts]):
            if release is not None:
                release(prompt)

    def measured(self) -> Averaged:
        # Of rollouts that ended since the last call, and the ``samples()`` of the environment.
        ended, self._ended = self._ended, []
        turns = [each.answered + 1.0 for each in ended]
        found = {"num_turns/mean": turns, "num_turns/min": turns, "num_turns/max": turns}
        if self._tools:
            failed = [float(number < each.failures) for each in ended for number in range(each.calls)]
            found |= {"tools/call_frequency": [float(each.calls) for each in ended], "tools/failure_frequency": failed}
        if self._most > 1:
            found |= {"compaction/segments/mean": self._segments, "compaction/segments/max": self._segments}
            found |= {"compaction/capped": [float(each >= self._most) for each in self._segments]}
            found |= {"compaction/summary_tokens": self._summaries}
            self._segments, self._summaries = [], []
        found |= getattr(self._environment, "samples", dict)()
        return Averaged(found)

    def state_dict(self, unfinished: Mapping[int, int]) -> dict[str, Any]:
        # Unfinished rollouts have these lengths. An answer that ends one, and came too late for the step, is left out:
        # a resumed run finds the turn at the response's end, and asks for its answer again.
        late = {
            rollout: self._before[rollout]
            for rollout, length in unfinished.items()
            if rollout in self._before and self._memories[rollout].turns[-1].end == length
        }
        known = {**self._memories, **late}
        return {str(rollout): asdict(memory) for rollout, memory in known.items() if memory.turns or memory.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memories = {
            int(rollout): _Memory(
                **{
                    **memory,
                    "turns": [AnsweredTurn(**turn) for turn in memory["turns"]],
                    "limit": None if memory["limit"] is None else TurnLimit(**memory["limit"]),
                }
            )
            for rollout, memory in state.items()
        }
        self._tools = any(memory.calls for memory in self._memories.values())


async def _turns_read(rollout: InFlightRollout, answered: Sequence[AnsweredTurn], length: int) -> Sequence[Chunk]:
    # All turns up to the one that ends here, which its reader may not have had yet.
    while rollout.length < length:
        rollout.grown = anyio.Event()
        await rollout.grown.wait()
    return turns_of(rollout.response(), [*answered, AnsweredTurn(length)])[: len(answered) + 1]


def _require_outcome(outcome: object) -> TurnOutcome:
    if outcome is None or isinstance(outcome, Drop):
        return outcome
    if not isinstance(outcome, Answer):
        raise ProtocolError(f"an environment returns an Answer, a Drop, or None to end; got {described(outcome)}")
    tokens: object = outcome.tokens
    ends = outcome.reward is not None or outcome.key or outcome.segment is not None
    least = 0 if ends else 1  # without any it ends the response
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1 or len(tokens) < least:
        raise ProtocolError(f"an answer has tokens, a NumPy array, int32 [{least} or more]; got {described(tokens)}")
    if outcome.reward is not None:
        require_real("the reward of a turn", outcome.reward, error=ProtocolError)
    if not isinstance(outcome.key, str):
        raise ProtocolError(f"the key of the state of a turn is a text; got {described(outcome.key)}")
    for each in (outcome.state, [*map(dict, outcome.said)]):
        _as_json(each)
    return outcome


def _as_json(state: object) -> str:
    try:
        return json.dumps(state)
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            "the state of an environment and what it said are kept in checkpoints, so they must be JSON values; got "
            f"{described(state)}"
        ) from error
