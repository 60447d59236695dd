"""Generate: prompts in, rollout events out. Decodes, cuts, parks and resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import anyio

from oppo.admission import Admission, Measured, Observation
from oppo.chunking import ChunkSize, Fixed
from oppo.errors import ConfigError, ProtocolError, noted
from oppo.events import Chunk, Defer, Finish, FinishReason, Given, Prompt, Response, RolloutEvent, StepReport
from oppo.graph import Receiver, Sender, Stateful, Step
from oppo.models import Decode, Policy
from oppo.numeric import require_whole
from oppo.stages.contract import require_count, require_model, require_piece
from oppo.stages.intake import prompt_of
from oppo.stages.ledger import Ledger, Unit
from oppo.stages.measure import DecodePhase, Decoding, StepMetrics, observation
from oppo.stages.snapshot import RolloutSnapshot


@dataclass(slots=True, eq=False)
class InFlightRollout:
    """One rollout in flight: its decode and what has been read from it. Between steps no task owns it."""

    prompt: Prompt
    decode: Decode
    announced: bool = False
    pieces: list[Chunk | Given] = field(default_factory=list)
    length: int = 0
    reason: FinishReason | None = None

    @property
    def newest(self) -> int:
        """Version of the weights that made its last sampled token; 0 while there is none."""
        return next((int(each.versions[-1]) for each in reversed(self.pieces) if isinstance(each, Chunk)), 0)

    def parked(self) -> RolloutSnapshot:
        """Return it as it stands between two steps."""
        return RolloutSnapshot(self.response(), self.reason)

    async def aclose(self) -> None:
        """Give up its decode; an error names the rollout."""
        with noted(f"while giving up rollout {self.prompt.rollout}"):
            await self.decode.aclose()

    def response(self) -> Response:
        """Return everything read so far as one response."""
        return Response.of(self.prompt, self.pieces)


@dataclass(eq=False)
class Generate:
    """Decodes a step's rollouts and sends their events; stragglers are parked at the cut and resumed later.

    Attributes:
        policy: the actor.
        admission: decides how many prompts enter and when the step is cut.
        chunks: how many tokens travel at once.
        samples: rollouts for each prompt; with more than one, a prompt's rollouts form a unit of admission.
        replay: what steps showed before a kill, by their ordinals. The controllers are told it instead of what those
            steps show when they are made again, so that they decide as they did, however fast the machine is now.

    Example:
        >>> from oppo.admission import Overcommit
        >>> from oppo.testing import FakePolicy
        >>> Generate(FakePolicy(), Overcommit(batch=64, extra=8), Fixed(32)).samples
        1
    """

    policy: Policy
    admission: Admission
    chunks: ChunkSize = field(default_factory=Fixed)
    samples: int = 1
    replay: Mapping[int, Observation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_whole("samples", self.samples, 1, error=ConfigError)
        require_model(self.policy, "Policy", ("version", "capabilities", "load", "open", "decoding"))
        require_model(self.admission, "Admission", ("batch", "max_deferrals", "admit", "cut", "observe"))
        require_model(self.chunks, "ChunkSize", ("size", "observe"))
        self._ledger = Ledger(self.admission)
        self._flights: dict[int, InFlightRollout] = {}
        self._restored: list[RolloutSnapshot] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Give up every rollout that is still in flight."""
        flights, self._flights, self._ledger = self._flights, {}, Ledger(self.admission)
        async with AsyncExitStack() as closing:
            for flight in flights.values():
                closing.push_async_callback(flight.aclose)

    def state_dict(self) -> Mapping[str, Any]:
        """Return what is carried into the next step, with every token of it, and what the controllers learned."""
        units = [
            {
                "age": unit.age,
                "rollouts": [self._parked(prompt).state_dict() for prompt in unit.prompts],
            }
            for unit in self._ledger.carried
        ]
        controllers = {name: each.state_dict() for name, each in self._controllers().items()}
        return {"units": units, "controllers": controllers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry what another stage carried; its rollouts are opened at the start of the first step.

        Raises:
            ConfigError: a response is half-written, and the policy cannot go on with it.
        """
        units = [(unit["age"], [RolloutSnapshot.of(each) for each in unit["rollouts"]]) for unit in state["units"]]
        self._restored = [parked for _, rollouts in units for parked in rollouts if not self._ledger.restarts]
        begun = [parked.response.prompt.rollout for parked in self._restored if len(parked.response)]
        if begun and not self.policy.capabilities.resumes:
            raise ConfigError(
                f"rollouts {begun} are half-written, and {type(self.policy).__name__} cannot go on with a response as "
                "if it had written it in one piece: begin a new run, or choose an admission that carries nothing over"
            )
        self._ledger.restore(
            (
                tuple(parked.response.prompt for parked in rollouts),
                age,
                {parked.response.prompt.rollout for parked in rollouts if parked.reason is None},
            )
            for age, rollouts in units
        )
        for name, controller in self._controllers().items():
            controller.load_state_dict(state["controllers"][name])

    def _parked(self, prompt: Prompt) -> RolloutSnapshot:
        flight = self._flights.get(prompt.rollout)
        return flight.parked() if flight else RolloutSnapshot(Response.empty(prompt), None)

    def _controllers(self) -> dict[str, Stateful]:
        both = {"admission": self.admission, "chunks": self.chunks}
        return {name: each for name, each in both.items() if isinstance(each, Stateful)}

    def observe(self, report: StepReport, step: Step, /) -> Observation | None:
        """Tell the controllers what a finished step showed; return it, for the journal, unless it is from there."""
        journalled = self.replay.get(report.index)
        seen = journalled or observation(report, step)
        self.admission.observe(seen)
        self.chunks.observe(seen)
        return None if journalled else seen

    async def run(self, prompts: Receiver[Prompt], /, *, out: Sender[RolloutEvent], step: Step) -> None:
        """Run one step's generation, up to its cut."""
        await self._reopen()
        groups = await self._take(prompts, step)
        complete = self._ledger.begin(groups)
        again = [prompt for unit in self._ledger.restarted for prompt in unit.prompts]
        await self._open(again + [prompt for group in groups for prompt in group])
        for unit in complete:
            await self._finish(unit, out)
        live = [flight for flight in self._flights.values() if flight.reason is None]
        if live and not self._ledger.is_cut():
            size = self.chunks.size()
            measured, start = Decoding(self._flights.values()), anyio.current_time()
            decoding = self.policy.decoding([flight.decode for flight in live], self._ledger.finished)
            async with decoding, anyio.create_task_group() as readers:
                for flight in live:
                    readers.start_soon(self._follow, flight, size, out, name=f"read rollout {flight.prompt.rollout}")
            step.record(DecodePhase(start, anyio.current_time(), measured.progress()))
            self._require_over(live)
        carried = self._ledger.end()
        if self._ledger.restarts and (discarded := [await self._give_up(unit) for unit in carried]):
            step.record(StepMetrics({"deferral/discarded_tokens": float(sum(discarded))}))
        for unit in carried:
            for prompt in unit.prompts:
                if prompt.rollout in self._flights:
                    await self._announce(self._flights[prompt.rollout], out)
                await out.send(Defer(prompt.rollout, unit.age, self._ledger.restarts))

    def _require_over(self, live: Sequence[InFlightRollout]) -> None:
        """Raise unless the policy went on until the cut or the end, and gave whole what it said had finished.

        Raises:
            ProtocolError: it did not.
        """
        unfinished = [flight.prompt.rollout for flight in live if flight.reason is None]
        if unfinished and not self._ledger.is_cut():
            raise ProtocolError(f"the policy stopped decoding rollouts {unfinished} before the step was cut")
        placed = {prompt.rollout for unit in self._ledger.placed for prompt in unit.prompts}
        broken = sorted(placed & self._flights.keys())
        if broken:
            raise ProtocolError(f"the policy reported that rollouts {broken} finished, but never gave their last piece")

    async def _give_up(self, unit: Unit) -> int:
        """Free what there is of a unit that will begin anew; return how many tokens are discarded."""
        flights = [self._flights[prompt.rollout] for prompt in unit.prompts if prompt.rollout in self._flights]
        for flight in flights:
            await self._close(flight)
        return sum(flight.length for flight in flights)

    async def _close(self, flight: InFlightRollout) -> None:
        """Give up its decode; until that is done it is one of those in flight, so that it is not forgotten."""
        await flight.aclose()
        del self._flights[flight.prompt.rollout]

    async def _take(self, prompts: Receiver[Prompt], step: Step) -> list[tuple[Prompt, ...]]:
        wanted = self._ledger.wanted(step.remaining)
        for controller in (self.admission, self.chunks):
            if isinstance(controller, Measured):
                step.record(StepMetrics(controller.metrics()))
        groups: list[tuple[Prompt, ...]] = []
        if wanted:
            async for prompt in prompts:
                groups.append(prompt_of(prompt).samples(self.samples))
                if len(groups) == wanted:
                    break
        return groups

    async def _open(self, prompts: list[Prompt]) -> None:
        decodes = await self._decodes(prompts)
        for prompt, decode in zip(prompts, decodes, strict=True):
            self._flights[prompt.rollout] = InFlightRollout(prompt, decode)

    async def _reopen(self) -> None:
        """Open what was restored. Scorers read it whole when it finishes, from its ``Finish``."""
        restored, self._restored = self._restored, []
        decodes = await self._decodes([parked.response for parked in restored]) if restored else []
        for parked, decode in zip(restored, decodes, strict=True):
            prompt, length = parked.response.prompt, len(parked.response)
            so_far = parked.response.pieces()
            self._flights[prompt.rollout] = InFlightRollout(prompt, decode, True, so_far, length, parked.reason)

    async def _decodes(self, rollouts: Sequence[Prompt | Response]) -> Sequence[Decode]:
        """Open a decode for each; an error names the rollouts."""
        numbers = [(each if isinstance(each, Prompt) else each.prompt).rollout for each in rollouts]
        with noted(f"while opening rollouts {numbers}"):
            decodes = await self.policy.open(rollouts)
            require_count(decodes, len(rollouts), "open() of the policy")
        return decodes

    async def _announce(self, flight: InFlightRollout, out: Sender[RolloutEvent]) -> None:
        if not flight.announced:
            flight.announced = True
            await out.send(flight.prompt)

    async def _follow(self, flight: InFlightRollout, size: int, out: Sender[RolloutEvent]) -> None:
        with noted(f"while decoding rollout {flight.prompt.rollout}"):
            await self._read(flight, size, out)

    async def _read(self, flight: InFlightRollout, size: int, out: Sender[RolloutEvent]) -> None:
        rollout = flight.prompt.rollout
        await self._announce(flight, out)  # here, so that decoding does not wait for scorers busy with other prompts
        while True:
            piece = await flight.decode.read(size)
            require_piece(piece, rollout, flight.newest, self.policy.version)
            if len(piece.tokens):
                event = piece.event(rollout, flight.length)
                flight.pieces.append(event)
                flight.length += len(piece.tokens)
                await out.send(event)
            if piece.state == "cut":
                return
            if piece.state != "live":
                flight.reason = piece.state
                break
        unit = self._ledger.place_of(rollout)
        if unit and all(self._flights[prompt.rollout].reason for prompt in unit.prompts):
            await self._finish(unit, out)

    async def _finish(self, unit: Unit, out: Sender[RolloutEvent]) -> None:
        for flight in [self._flights[prompt.rollout] for prompt in unit.prompts]:
            if flight.reason is None:
                raise ProtocolError(f"rollout {flight.prompt.rollout} has a place in the batch but is still being read")
            await self._close(flight)
            await out.send(Finish(flight.prompt.rollout, flight.response(), flight.reason))
