"""Generate: prompts in, rollout events out. Decodes, cuts, defers and resumes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Final, Self, get_args

import anyio
import numpy as np
from anyio.abc import TaskGroup

from oppo.admission import Admission, Observation, Refilling, ReportsMetrics, Restarting
from oppo.admission.chunking import ChunkSize, Fixed
from oppo.declared import PositiveCount, require_whole, validated
from oppo.errors import ConfigError, NothingTrained, ProtocolError, blaming, noted, promised, shown
from oppo.events import (
    NO_COLUMNS,
    Chunk,
    ChunkState,
    Defer,
    Prompt,
    RolloutEvent,
    StepReport,
    TokenColumns,
    ToolTokens,
    described,
)
from oppo.graph import Receiver, Sender, Stateful, Step
from oppo.models import Decoding, Policy, entered, require_model
from oppo.stages.batch import Ended
from oppo.stages.conversations import Conversations
from oppo.stages.dynamic_sampling import DynamicSampling, Round
from oppo.stages.in_flight import Groups, OpenRollouts, require_turns
from oppo.stages.ledger import InFlightRollout, Ledger, RolloutSnapshot, require_prompt
from oppo.stages.metrics import DecodeMeter, StepMetrics, observation
from oppo.turns import Branching, Environment


@dataclass(eq=False)
@validated(ConfigError)
class Generate:
    """Decodes a step's rollouts and sends their events; rollouts that are deferred at the cut are resumed later.

    Attributes:
        policy: the actor.
        admission: decides how many prompts enter and when the step is cut.
        chunks: how many tokens travel at once.
        samples: rollouts for each prompt; with more than one, a prompt's rollouts form a unit of admission.
        replay: journalled observations by step. When a resumed run repeats these steps, its controllers observe them
            instead of new measurements, so they decide as before at any speed of the machine.
        select: which groups of the step's batch are trained; others replace those that are not, in rounds. It
            is a stage of the graph too.
        environment: answers the turns of a response, so that it goes on after a stop token with a tool's result.
        columns: returns the columns of a prompt by its admission number. With it ``state_dict`` leaves columns out, so
            they may hold any type, and ``load_state_dict`` reads them again.

    Example:
        >>> from oppo.admission import Overcommit
        >>> from oppo.testing import FakePolicy
        >>> Generate(FakePolicy(), Overcommit(batch=64, overcommit=8), Fixed(32)).samples
        1
    """

    policy: Policy
    admission: Admission
    chunks: ChunkSize = field(default_factory=Fixed)
    samples: PositiveCount = 1
    replay: Mapping[int, Observation] = field(default_factory=dict)
    columns: Callable[[int], Mapping[str, object]] | None = None
    select: DynamicSampling | None = None
    environment: Environment | None = None

    def __post_init__(self) -> None:
        require_model(self.policy, "Policy", ("version", "capabilities", "load", "open", "decoding"))
        require_model(self.admission, "Admission", ("batch", "max_deferrals", "admit", "cut", "observe"))
        require_model(self.chunks, "ChunkSize", ("size", "observe"))
        if self.select is not None and isinstance(self.admission, Restarting):
            raise ConfigError(
                f"{type(self.admission).__name__} restarts what is late in a later step, and a selection needs it "
                "in this one: choose Overcommit, or select nothing"
            )
        if self._refills and not self.policy.capabilities.adds_while_decoding:
            raise ConfigError(
                f"{type(self.admission).__name__} lets rollouts join while others are decoded, and "
                f"{type(self.policy).__name__} cannot, by its capabilities.adds_while_decoding: choose Overcommit, or "
                "an engine that can (on transformers, one that is not deterministic)"
            )
        if self._refills and isinstance(self.admission, Restarting):
            raise ConfigError(
                f"{type(self.admission).__name__} restarts what is late, in a later step, and lets others take its "
                "place in this one: an admission either refills or restarts"
            )
        if self.environment is not None:
            require_turns(self.policy)
        can = self.policy.capabilities
        fault = self._single(adds=can.adds_while_decoding or can.adds_while_held)
        if getattr(self.environment, "max_segments", 1) > 1 and fault:
            raise ConfigError(f"compaction has rollouts go on in further responses, and {fault}: leave one of them out")
        self._conversations = None if self.environment is None else Conversations(self.environment)
        self._branching = self.environment if isinstance(self.environment, Branching) else None
        self._ledger = Ledger(self.admission, self._may_branch)
        self._opened = AsyncExitStack()
        self._rollouts = OpenRollouts(self._conversations, self._branching)
        self._unheard: list[Observation] = []
        self._ends = Ended()

    @property
    def _refills(self) -> bool:
        return isinstance(self.admission, Refilling)

    def _single(self, *, adds: bool) -> str:
        if isinstance(self.admission, Restarting):
            return f"{type(self.admission).__name__} begins late rollouts anew"
        if adds:
            return ""
        return f"{type(self.policy).__name__} decodes no rollouts that come later (on transformers: run.deterministic)"

    async def __aenter__(self) -> Self:
        if self._branching is not None:
            self._branching.single = self._single(adds=self.policy.capabilities.adds_while_decoding)
        self._opened = await entered([self.policy, self._conversations])
        return self

    async def __aexit__(self, *error: object) -> None:
        rollouts = list(self._rollouts.values())
        self._rollouts.clear()
        self._ledger = Ledger(self.admission, self._may_branch)
        async with self._opened as closing:
            for rollout in rollouts:
                closing.push_async_callback(rollout.aclose)

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Report a selection that is no stage of the graph."""
        del named
        fault = (
            'has a DynamicSampling that reads no scores: add the same one after the reward, g.add("select", selection, '
            "score), and give its output to the advantage stage"
        )
        return [] if self.select is None or any(each is self.select for each in stages) else [fault]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the deferred units with all their tokens, and the state of the controllers."""
        units = [
            {"age": unit.age, "rollouts": [self._state(self._rollouts.snapshot(prompt)) for prompt in unit.prompts]}
            for unit in self._ledger.deferred
        ]
        controllers = {name: each.state_dict() for name, each in self._controllers().items()}
        lengths = {each.prompt.rollout: each.length for each in self._rollouts.live}
        conversations = {} if self._conversations is None else self._conversations.state_dict(lengths)
        return {"units": units, "controllers": controllers, "conversations": conversations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the units that another stage deferred; the first step opens their rollouts.

        Raises:
            ConfigError: a response is incomplete, and the policy cannot continue it.
        """
        units = [(unit["age"], _without_dropped(map(self._restore, unit["rollouts"]))) for unit in state["units"]]
        continued = [] if self._ledger.restarts else [snapshot for _, rollouts in units for snapshot in rollouts]
        self._rollouts.restore(self.policy, continued)
        self._ledger.restore(
            (
                tuple(snapshot.response.prompt for snapshot in rollouts),
                age,
                {snapshot.response.prompt.rollout for snapshot in rollouts if snapshot.reason is None},
            )
            for age, rollouts in units
        )
        for name, controller in self._controllers().items():
            controller.load_state_dict(state["controllers"][name])
        if self._conversations is not None:
            self._conversations.load_state_dict(state["conversations"])

    def _state(self, snapshot: RolloutSnapshot) -> dict[str, Any]:
        state = snapshot.state_dict()
        return state if self.columns is None else {**state, "columns": {}}

    def _restore(self, state: Mapping[str, Any]) -> RolloutSnapshot:
        if self.columns is not None:
            state = {**state, "columns": self.columns(state["admission"])}
        return RolloutSnapshot.of(state)

    def _controllers(self) -> dict[str, Stateful]:
        both = {"admission": self.admission, "chunks": self.chunks}
        return {name: each for name, each in both.items() if isinstance(each, Stateful)}

    def observe(self, report: StepReport, step: Step, /) -> Observation | None:
        """Pass a step's observation to the controllers; return it for the journal unless it comes from there.

        While a later step is alive, they observe it when the first step begins that cannot begin earlier, so that what
        they know at an admission does not depend on timing.

        Raises:
            ProtocolError: the result of the graph is no report.
        """
        if not isinstance(report, StepReport):
            raise ProtocolError(
                f"the result of a graph with {type(self).__name__} must be a StepReport, as Update sends; got "
                f"{shown(report)}: let a stage after Update send on the report that it reads"
            )
        journalled = self.replay.get(report.index)
        observed = journalled or observation(report, step)
        self._unheard.append(observed)
        if not step.followed:
            self._observe(report.index + 1)
        return None if journalled else observed

    def _observe(self, observed: int) -> None:
        due = [each for each in self._unheard if each.step < observed]
        self._unheard = [each for each in self._unheard if each.step >= observed]
        for each in due:
            for controller in (self.admission, self.chunks):
                with blaming(f"{type(controller).__name__}.observe()"):
                    controller.observe(each)

    async def run(self, prompts: Receiver[Prompt], /, *, out: Sender[RolloutEvent], step: Step) -> None:
        """Run one step's generation, up to its cut."""
        self._ends = Ended()
        step.record(self._ends)
        self._observe(step.observed)
        if self._conversations is not None:
            self._conversations.begin(step, self._ends.ended)
        await self._rollouts.reopen(self.policy)
        groups = await self._admit(prompts, step)
        complete = self._ledger.begin(groups)
        if self.select is not None:
            self.select.begin(step.index)
        await self._rollouts.open(self.policy, [*(unit.prompts for unit in self._ledger.restarted), *groups])
        for unit in complete:
            await self._rollouts.finish(unit, out, self._ends.ended)
        await self._decode(prompts, out, step)
        if self.select is not None:
            await self._replace_rejected(self.select, prompts, out, step)
        if late := [unit.age > 0 for unit in self._ledger.placed for _ in unit.prompts]:
            step.record(StepMetrics({"deferral/trained_late": sum(late) / len(late)}))
        deferred = self._ledger.end()
        if self._ledger.restarts and (discarded := [await self._rollouts.discard(unit) for unit in deferred]):
            step.record(StepMetrics({"deferral/discarded_tokens": float(sum(discarded))}))
        for unit in deferred:
            for prompt in unit.prompts:
                if prompt.rollout in self._rollouts:
                    await self._announce(self._rollouts[prompt.rollout], out)
                self._ends.deferred.append(prompt.rollout)
                await out.send(Defer(prompt.rollout, unit.age, self._ledger.restarts))

    async def _replace_rejected(
        self, select: DynamicSampling, prompts: Receiver[Prompt], out: Sender[RolloutEvent], step: Step
    ) -> None:
        rejected = judged = 0
        for number in count(1):
            placed = list(self._ledger.placed)
            refused = [unit for unit in placed if await select.rejects(step.index, unit.prompts)]
            rejected, judged = rejected + len(refused), len(placed) + rejected
            filled = self._ledger.replace(refused)
            for unit in filled:
                await self._rollouts.finish(unit, out, self._ends.ended)
            replaced = self._ledger.refill(step.remaining) if self._refills else len(refused) - len(filled)
            groups = await self._take(prompts, replaced)
            self._ledger.add(groups)
            step.record(
                Round(
                    placed=tuple(unit.admission for unit in placed),
                    rejected=tuple(unit.admission for unit in refused),
                    filled=tuple(unit.admission for unit in filled),
                    admitted=tuple(group[0].admission for group in groups),
                )
            )
            if not (refused and (filled or groups or self._rollouts.live)):
                break
            if number == select.max_rounds:
                raise NothingTrained(
                    f"{rejected} of {judged} groups ({rejected / judged:.0%}) were rejected in the {number} rounds of "
                    f"step {step.number}, and {self.admission.batch} must be accepted: look at the scores of these "
                    "prompts, make more samples of each, raise algorithm.max_rounds, or train such groups all the "
                    "same: algorithm.dynamic_sampling = false"
                )
            await self._rollouts.open(self.policy, groups)
            await self._decode(prompts, out, step)
        step.record(StepMetrics({"selection/rounds": float(number), "selection/rejected": float(rejected)}))

    def _may_branch(self, prompt: Prompt) -> bool:
        return self._branching is not None and self._branching.goes_on(prompt)

    async def _decode(self, prompts: Receiver[Prompt], out: Sender[RolloutEvent], step: Step) -> None:
        live = self._rollouts.live
        open_ended = [each for each in self._rollouts.values() if each.reason and self._branching is not None]
        if not (live or open_ended) or self._ledger.is_cut():
            return
        with blaming(f"{type(self.chunks).__name__}.size()"):
            size = self.chunks.size()
            require_whole("a size", size, 1, error=ProtocolError)
        meter = DecodeMeter(self._rollouts.values(), size)
        decoding = self.policy.decoding([rollout.decode for rollout in live], self._ledger.finished)
        with step.working("decode"):
            async with decoding as engine, anyio.create_task_group() as conversations:
                async with anyio.create_task_group() as readers:

                    def read(round_: DecodingRound, rollout: InFlightRollout) -> None:
                        number = rollout.prompt.rollout
                        readers.start_soon(self._read, rollout, size, out, round_, name=f"read rollout {number}")
                        if self._conversations is not None:
                            name = f"converse in rollout {number}"
                            begin = partial(self._begin_segment, round_, conversations)
                            conversations.start_soon(self._conversations.converse, rollout, step, begin, name=name)

                    round_ = DecodingRound(engine, meter, read)
                    round_.begin(live)
                    for each in open_ended:
                        readers.start_soon(self._settle, each, out, round_, name=f"agent of {each.prompt.rollout}")
                    if self._refills:
                        sources = partial(self._take, prompts), partial(self._rollouts.open, self.policy)
                        readers.start_soon(round_.refill, self._ledger, step.remaining, *sources, name="refill")
                    if self._branching is not None:
                        branches = partial(self._branch, self._branching, round_, readers, conversations)
                        conversations.start_soon(branches, name="branches")
                conversations.cancel_scope.cancel()
        step.record(meter.decoded())
        if self._conversations is not None:
            step.record(self._conversations.measured())
        unfinished = [rollout.prompt.rollout for rollout in self._rollouts.live]
        if unfinished and not self._ledger.is_cut():
            raise ProtocolError(f"the policy stopped decoding rollouts {unfinished} before the step was cut")
        placed = {prompt.rollout for unit in self._ledger.placed for prompt in unit.prompts}
        if broken := sorted(placed & self._rollouts.keys()):
            raise ProtocolError(f"the policy reported that rollouts {broken} finished, but never gave their last chunk")

    async def _branch(self, branching: Branching, round_: DecodingRound, readers: TaskGroup, mine: TaskGroup) -> None:
        def holds(admission: int) -> bool:  # a branch that comes as the round ends waits for the next
            return self._ledger.holds(admission) and not mine.cancel_scope.cancel_called

        while True:
            branch = (await branching.branch(holds)).numbered(self.samples)
            readers.start_soon(self._join, branching, branch, round_, name=f"open rollout {branch.rollout}")

    async def _join(self, branching: Branching, branch: Prompt, round_: DecodingRound) -> None:
        joining = await self._rollouts.open(self.policy, [(branch,)])
        if not self._ledger.join(branch):
            branching.refuse(branch)
            await joining[0].aclose()
            del self._rollouts[branch.rollout]
            return
        await round_.join(joining)

    async def _begin_segment(self, round_: DecodingRound, conversations: TaskGroup, segment: Prompt) -> bool:
        # The unit takes it, since the segment before has not ended. One that begins as the round ends is deferred.
        segment = segment.numbered(self.samples)
        if segment.rollout not in self._rollouts:
            joining = await self._rollouts.open(self.policy, [(segment,)])
            self._ledger.join(segment)
            if not conversations.cancel_scope.cancel_called:
                await round_.join(joining)
        return not conversations.cancel_scope.cancel_called

    async def _admit(self, prompts: Receiver[Prompt], step: Step) -> list[tuple[Prompt, ...]]:
        wanted = self._ledger.wanted(step.remaining, self._rollouts.room(self.policy, self.samples))
        for controller in (self.admission, self.chunks):
            if isinstance(controller, ReportsMetrics):
                with blaming(f"{type(controller).__name__}.metrics()"):
                    step.record(StepMetrics(controller.metrics()))
        return await self._take(prompts, wanted)

    async def _take(self, prompts: Receiver[Prompt], wanted: int) -> list[tuple[Prompt, ...]]:
        groups: list[tuple[Prompt, ...]] = []
        if wanted:
            async for prompt in prompts:
                groups.append(require_prompt(prompt).samples(self.samples))
                if len(groups) == wanted:
                    break
        return groups

    async def _announce(self, rollout: InFlightRollout, out: Sender[RolloutEvent]) -> None:
        if not rollout.announced:
            rollout.announced = True
            await out.send(rollout.prompt)

    async def _read(
        self, rollout: InFlightRollout, size: int, out: Sender[RolloutEvent], round_: DecodingRound
    ) -> None:
        number, turns = rollout.prompt.rollout, self._conversations is not None
        with noted(f"while decoding rollout {number}"):
            await self._announce(rollout, out)  # in this task: decoding does not wait for scorers busy with others
            while rollout.reason is None:
                chunk = await promised(rollout.decode.read(size), "read() of a decode")
                start, oldest = rollout.length, rollout.newest_version
                require_chunk(chunk, self.policy, size, rollout=number, start=start, oldest=oldest, turns=turns)
                if len(chunk.tokens):
                    rollout.append(chunk)
                    if self._conversations is not None:
                        self._conversations.heard(rollout)
                    await out.send(chunk)
                if chunk.state == "cut":
                    round_.note_end(rollout)
                    round_.cut.set()
                    return
                if chunk.state != "live":
                    rollout.reason, rollout.ended = chunk.state, anyio.current_time()
                    self._rollouts.note_end(rollout)
            round_.note_end(rollout)
            await self._settle(rollout, out, round_)

    async def _settle(self, rollout: InFlightRollout, out: Sender[RolloutEvent], round_: DecodingRound) -> None:
        # A unit is complete once its responses and its agents have ended: until then these may begin others.
        if self._branching is not None:
            if self._ledger.is_cut():
                round_.note_cut()
            if self._branching.goes_on(rollout.prompt):
                await round_.unless_cut(partial(self._branching.settled, rollout.prompt))
        unit = self._ledger.place_of(rollout.prompt.rollout)
        round_.note_change()
        if unit and not unit.sent and self._rollouts.is_complete(unit):
            if self._branching is not None and self._ledger.is_cut():
                round_.note_cut()
            await self._rollouts.finish(unit, out, self._ends.ended)


@dataclass(eq=False)
class DecodingRound:
    """The rollouts of one decoding; ``read`` starts the reader of one, ``cut`` is set once the step is cut."""

    # ``read`` is given the round: bound to it, it would be a cycle, which keeps all tokens of the step alive.

    engine: Decoding
    meter: DecodeMeter
    read: Callable[[DecodingRound, InFlightRollout], None]
    cut: anyio.Event = field(default_factory=anyio.Event, init=False)
    _news: anyio.Event = field(default_factory=anyio.Event, init=False, repr=False)

    def begin(self, rollouts: Sequence[InFlightRollout]) -> None:
        for rollout in rollouts:
            self.read(self, rollout)

    async def join(self, rollouts: Sequence[InFlightRollout]) -> None:
        self.meter.add(rollouts)
        await self.engine.add([rollout.decode for rollout in rollouts])
        self.begin(rollouts)

    def note_end(self, rollout: InFlightRollout) -> None:
        self.meter.note_end(rollout)
        self.note_change()

    def note_change(self) -> None:
        self._news.set()

    def note_cut(self) -> None:
        """Note that the step is cut, of which the engine knows nothing if an agent has ended last."""
        self.cut.set()
        self.engine.stop()

    async def unless_cut(self, wait: Callable[[], Awaitable[None]]) -> None:
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await self.cut.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop, name="a cut")
            await wait()
            tasks.cancel_scope.cancel()

    async def refill(
        self,
        ledger: Ledger,
        remaining: int,
        take: Callable[[int], Awaitable[Groups]],
        open_: Callable[[Groups], Awaitable[Sequence[InFlightRollout]]],
    ) -> None:
        # Until the step is cut, or no more can join: the prompts or the remaining steps do not reach. What was read of
        # the prompts by the cut is deferred, unwritten: cancelling the read would end an async generator.
        while not ledger.is_cut():
            self._news = anyio.Event()
            wanted = ledger.refill(remaining)
            groups = await take(wanted)
            if groups:
                ledger.add(groups)
                await self.join(await open_(groups))
            if len(groups) < wanted or not ledger.decoding:
                return
            if not wanted:
                await self._news.wait()


def _without_dropped(rollouts: Iterable[RolloutSnapshot]) -> list[RolloutSnapshot]:
    # An agent one of whose conversations is dropped has ended: the others are dropped too, and it is not run anew.
    found = list(rollouts)
    why = {each.response.prompt.first: each.dropped for each in found if each.dropped}
    gone = [why.get(each.response.prompt.first, "") for each in found]
    return [
        replace(each, reason=each.reason or "stop", dropped=each.dropped or reason) if reason else each
        for each, reason in zip(found, gone, strict=True)
    ]


def require_chunk(
    chunk: object, policy: Policy, limit: int, *, rollout: int, start: int, oldest: int, turns: bool
) -> None:
    if fault := _fault_of(chunk, limit, rollout, start, turns) or _fault_of_sampled(chunk, oldest, policy.version):
        raise ProtocolError(f"rollout {rollout}: read({limit}) of {type(policy).__name__} returned {fault}")


_COLUMNS: Final = (
    ("tokens", np.dtype(np.int32)),
    ("logprobs", np.dtype(np.float32)),
    ("versions", np.dtype(np.int32)),
)
_STATES: Final = get_args(ChunkState)
_ROUNDING: Final = 1e-3  # by which a log-prob may exceed 0


def _fault_of(chunk: object, limit: int, rollout: int, start: int, turns: bool) -> str:
    if not isinstance(chunk, Chunk | ToolTokens):
        return f"{described(chunk)}; expected a Chunk or ToolTokens"
    state, shape = chunk.state, np.shape(chunk.tokens)
    if state not in _STATES:
        return f"a chunk whose state is {state!r}; expected one of {', '.join(_STATES)}"
    if chunk.rollout != rollout or chunk.start != start:
        return f"tokens of rollout {chunk.rollout} from {chunk.start} on; expected tokens from {start} on"
    for name, kind in _COLUMNS if isinstance(chunk, Chunk) else _COLUMNS[:1]:
        column: object = getattr(chunk, name)
        if not isinstance(column, np.ndarray) or column.dtype != kind or column.shape != shape or column.ndim != 1:
            return f"a chunk whose {name} are {described(column)}; expected {kind} [n], n tokens"
    n = shape[0]
    if n > limit:
        return f"a chunk of {n} tokens; expected at most {limit}"
    if not n:
        ends = state == "cut" or (turns and state != "live")
        return "" if ends else f"a chunk with no token that says {state!r}; only 'cut' may"
    least = chunk.tokens[0] if n == 1 else chunk.tokens.min()  # a reduction is ten times as expensive
    return "" if least >= 0 else f"a chunk that holds the token id {least}; expected 0 or more"


def _fault_of_sampled(chunk: object, oldest: int, newest: int) -> str:
    if not isinstance(chunk, Chunk) or not (n := len(chunk.tokens)):
        return ""
    logprobs, versions = chunk.logprobs, chunk.versions
    extra: object = chunk.extra
    if not isinstance(extra, TokenColumns):
        return f"a chunk whose further columns are {described(extra)}; expected TokenColumns"
    for column in extra if extra is not NO_COLUMNS else ():
        if len(column.counts) != n or column.ids.ndim != 1 + column.dimensions or column.ids.dtype.kind not in "iu":
            return (
                f"a chunk of {n} tokens whose {column.name} is of {len(column.counts)} tokens, with "
                f"{described(column.ids)}; expected integers of {1 + column.dimensions} dimensions, of each token"
            )
    if logprobs[0] > _ROUNDING or (n > 1 and (logprobs > _ROUNDING).any()):
        return f"a chunk with a log-prob of {logprobs.max()}; expected at most 0, the log of a probability"
    if not oldest <= versions[0] <= versions[-1] <= newest or (n > 1 and (versions[1:] < versions[:-1]).any()):
        return (
            f"a chunk whose tokens were made by versions {np.unique(versions).tolist()}, lastly {versions[-1]}, after "
            f"{oldest}; versions never decrease, and the policy's is {newest}"
        )
    return ""
