"""Rollouts in flight: which units have a place in this step's batch, which are deferred: inter-step overlap.

A unit (a rollout, or a group of them) takes a place in the batch when it is complete, and keeps it:

- an overdue unit, which may not be deferred again, always has a place: one is reserved while it decodes;
- any other complete unit takes a free place, in finish order;
- a complete unit without a place is deferred like an unfinished one, and is the first to be placed in the next step.

Finish order is the order in which the policy's engine reports: decode step, then admission number; never that of the
scores. A unit of agents is complete when they have ended too. Everything here is synchronous; :meth:`Ledger.finished`
may be called from the engine's thread, also while units join.

Between steps no task owns an :class:`InFlightRollout`. Its snapshot is plain values, and a checkpoint loses no token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from numbers import Integral
from threading import Lock
from typing import Any

import anyio
import numpy as np

from oppo.admission import Admission, AdmitView, CutView, Refilling, RefillView, Restarting
from oppo.declared import require_whole
from oppo.errors import AdmissionError, DataError, ProtocolError, blaming, noted, promised, shown
from oppo.events import (
    COLUMN_KINDS,
    AnsweredTurn,
    Chunk,
    Drop,
    Finish,
    FinishReason,
    Prompt,
    Response,
    TokenColumns,
    ToolTokens,
)
from oppo.images import ImageRef
from oppo.limits import TurnLimit
from oppo.log import logger
from oppo.models import Decode


@dataclass(slots=True, eq=False)
class Unit:
    """Rollouts that are trained together."""

    prompts: tuple[Prompt, ...]  # of the rollouts, in sample order; then of their branches
    age: int = 0  # steps since admission
    unfinished: set[int] = field(default_factory=set)  # those whose response is incomplete
    complete: bool = False  # whether none is, and no agent of them goes on
    placed: bool = False  # whether it has a place in the current step's batch
    sent: bool = False  # whether its responses are sent on, or were

    @property
    def admission(self) -> int:
        return self.prompts[0].admission


@dataclass(slots=True)
class Ledger:
    admission: Admission
    goes_on: Callable[[Prompt], bool] = lambda _: False  # an agent may begin further rollouts; any thread
    deferred: list[Unit] = field(default_factory=list)  # to the next step, oldest first
    placed: list[Unit] = field(default_factory=list)  # in the current step's batch, in finish order
    restarted: list[Unit] = field(default_factory=list)  # in the current step, where admission restarts
    _waiting: list[Unit] = field(default_factory=list)
    _live: list[Unit] = field(default_factory=list)
    _unit_of: dict[int, Unit] = field(default_factory=dict)
    _decoding: Counter[int] = field(default_factory=Counter)
    """Number of decoding units by age, kept up to date because every finish reads it."""
    _changing: Lock = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        for name in ("batch", "max_deferrals"):
            require_whole(f"{name} of {self._name}", getattr(self.admission, name), 1, error=AdmissionError)

    @property
    def restarts(self) -> bool:
        return isinstance(self.admission, Restarting)

    def wanted(self, remaining: int, room: float = math.inf) -> int:
        """Return how many new units enter a step: as admission decides, at most what the run can still train."""
        # Beyond a batch no more enter than the policy has room for; |remaining| steps are left, this one included.
        oldest = max((unit.age for unit in self.deferred), default=0)
        deferred = len(self.deferred)
        complete = sum(map(self._is_complete, self.deferred))
        with self._blaming("admit"):
            admitted: object = self.admission.admit(AdmitView(deferred, oldest, remaining, complete))
        trainable = self._trainable("admit", admitted, remaining, 0 if self.restarts else deferred, deferred)
        if not deferred and not admitted:
            raise AdmissionError(
                f"{self._name}.admit() returned 0 where nothing is deferred: the step would train nothing"
            )
        bound = max(self.admission.batch - deferred, int(min(room, trainable)))
        if bound < trainable:
            logger.once(
                "the engine's KV cache has no room for as many rollouts as admission asks for: fewer enter a step "
                "beyond its batch; give the engine more memory, or lower step.overcommit"
            )
        return min(trainable, max(0, bound))

    @property
    def refills(self) -> bool:
        return isinstance(self.admission, Refilling)

    def refill(self, remaining: int) -> int:
        if not isinstance(self.admission, Refilling):
            return 0
        with self._changing:
            if self.is_cut():
                return 0
            owned, placed = len(self._live), len(self.placed)
            view = RefillView(placed, self.decoding, owned - placed)
        with self._blaming("refill"):
            asked = self.admission.refill(view)
        return self._trainable("refill", asked, remaining, owned, owned)

    def _trainable(self, method: str, asked: object, remaining: int, in_step: int, owned: int) -> int:
        # A batch and as many units beyond it may be in a step: whatever is deferred then fits in one batch.
        batch = self.admission.batch
        room = max(0, 2 * batch - in_step)
        if isinstance(asked, bool) or not isinstance(asked, Integral) or not 0 <= int(asked) <= room:
            raise AdmissionError(
                f"{self._name}.{method}() must return a whole number, 0 to {room}, so that a step has at most two "
                f"batches of {batch}, {in_step} of them being in it; got {shown(asked)}"
            )
        return max(0, min(int(asked), remaining * batch - owned))

    @property
    def _name(self) -> str:
        return type(self.admission).__name__

    def _blaming(self, method: str) -> AbstractContextManager[None]:
        return blaming(f"{self._name}.{method}()")

    def begin(self, groups: Iterable[tuple[Prompt, ...]]) -> list[Unit]:
        groups = list(groups)
        in_flight = (prompt.rollout for unit in self.deferred for prompt in unit.prompts)
        require_new((prompt for group in groups for prompt in group), in_flight)
        new = [Unit(prompts, 0, {prompt.rollout for prompt in prompts}) for prompts in groups]
        deferred = self.deferred
        if self.restarts:
            missing = max(0, self.admission.batch - len(new))
            self.restarted = deferred = deferred[:missing]
            self._waiting = self.deferred[missing:]
        self._live = deferred + new
        self._unit_of = {prompt.rollout: unit for unit in self._live for prompt in unit.prompts}
        for unit in self._live:
            unit.complete = self._is_complete(unit)
        self._decoding = Counter(unit.age for unit in self._live if not unit.complete)
        self.deferred, self.placed = [], []
        for unit in self._live:
            if unit.complete:
                self._place(unit)
        return list(self.placed)

    def finished(self, rollouts: Sequence[int]) -> bool:
        """Note the rollouts that finished in one decode step; return whether the step is cut: the policy's ``Cut``."""
        with self._changing:
            for rollout in rollouts:
                self._finish(rollout)
            return self.is_cut()

    def _finish(self, rollout: int) -> None:
        unit = self._unit_of.get(rollout)
        if unit is None or rollout not in unit.unfinished:
            raise ProtocolError(f"the policy reports that rollout {rollout} finished, but it was not being decoded")
        unit.unfinished.remove(rollout)
        self._settle(unit)

    def _is_complete(self, unit: Unit) -> bool:
        return not unit.unfinished and not any(map(self.goes_on, unit.prompts))

    def _settle(self, unit: Unit) -> None:
        if not unit.complete and self._is_complete(unit):
            unit.complete = True
            self._decoding[unit.age] -= 1
            self._place(unit)

    @property
    def decoding(self) -> int:
        return self._decoding.total()

    def is_cut(self) -> bool:
        """Return whether decoding stops; true at the start if deferred units fill the batch."""
        view = CutView(len(self.placed), self.decoding, self._overdue())
        with self._blaming("cut"):
            cut: object = self.admission.cut(view)
        if not isinstance(cut, bool | np.bool_):
            raise AdmissionError(f"{self._name}.cut() must return a bool; got {shown(cut)}")
        if cut and view.placed < self.admission.batch:
            raise AdmissionError(
                f"{self._name}.cut() may not cut a step in which {view.placed} of {self.admission.batch} units have a "
                f"place, and {view.overdue} that may not be deferred again are decoded: the batch must be full"
            )
        return bool(cut)

    def replace(self, rejected: Sequence[Unit]) -> list[Unit]:
        """Take the places of these units away, which end here; return the complete units that take them."""
        gone = {id(unit) for unit in rejected}
        self._live = [unit for unit in self._live if id(unit) not in gone]
        self.placed = [unit for unit in self.placed if id(unit) not in gone]
        kept = len(self.placed)
        for unit in self._live:
            if unit.complete and not unit.placed:
                self._place(unit)
        return self.placed[kept:]

    def add(self, groups: Sequence[tuple[Prompt, ...]]) -> None:
        require_new((prompt for group in groups for prompt in group), self._unit_of)
        new = [Unit(prompts, 0, {prompt.rollout for prompt in prompts}) for prompts in groups]
        with self._changing:
            self._live += new
            self._unit_of |= {prompt.rollout: unit for unit in new for prompt in unit.prompts}
            self._decoding.update(unit.age for unit in new)

    def holds(self, admission: int) -> bool:
        return any(unit.admission == admission for unit in self._live)

    def join(self, branch: Prompt) -> bool:
        # A complete unit takes no branch.
        with self._changing:
            unit = next((each for each in self._live if each.admission == branch.admission), None)
            if unit is None or unit.complete:
                return False
            unit.prompts = (*unit.prompts, branch)
            unit.unfinished.add(branch.rollout)
            self._unit_of[branch.rollout] = unit
            return True

    def place_of(self, rollout: int) -> Unit | None:
        """Return the unit of a finished rollout, whose agent may have ended, if it has a place in this step's batch."""
        unit = self._unit_of[rollout]
        if rollout in unit.unfinished:
            raise ProtocolError(f"the last chunk of rollout {rollout} came before the policy reported that it finished")
        with self._changing:
            self._settle(unit)
        return unit if unit.placed else None

    def end(self) -> list[Unit]:
        unplaced = [unit for unit in self._live if not unit.placed]
        if self.restarts:
            for unit in unplaced:
                unit.unfinished = {prompt.rollout for prompt in unit.prompts}
        self.deferred = sorted(self._waiting + unplaced, key=lambda unit: -unit.age)
        for unit in self.deferred:
            unit.age += 1
        self._live, self._waiting, self.restarted = [], [], []
        return self.deferred

    def restore(self, units: Iterable[tuple[tuple[Prompt, ...], int, set[int]]]) -> None:
        self.deferred = [Unit(prompts, age, unfinished) for prompts, age, unfinished in units]

    def _overdue(self) -> int:
        return sum(count for age, count in self._decoding.items() if age >= self.admission.max_deferrals)

    def _place(self, unit: Unit) -> None:
        overdue = unit.age >= self.admission.max_deferrals
        if overdue or len(self.placed) + self._overdue() < self.admission.batch:
            unit.placed = True
            self.placed.append(unit)


@dataclass(slots=True, eq=False)
class InFlightRollout:
    """One rollout in flight: its decode and the tokens read from it. Between steps no task owns it."""

    prompt: Prompt
    decode: Decode
    announced: bool = False  # whether its prompt has been sent to the scorers
    pieces: list[Chunk | ToolTokens] = field(default_factory=list)
    length: int = 0
    reason: FinishReason | None = None  # why the response ended; None while it is unfinished
    dropped: str = ""  # why the rollout is not trained; empty if it is
    ended: float = math.nan  # loop time at which its last chunk was read; NaN while it is unfinished
    tool_tokens: int = 0
    newest_version: int = 0  # of the weights that made the last sampled token
    grown: anyio.Event | None = None  # set when tokens are appended; a reader waits for it

    def append(self, piece: Chunk | ToolTokens) -> None:
        n = len(piece.tokens)
        self.pieces.append(piece)
        self.length += n
        if isinstance(piece, Chunk):
            self.newest_version = int(piece.versions[-1])
        else:
            self.tool_tokens += n
        if self.grown is not None:
            self.grown.set()

    @property
    def sampled(self) -> int:
        return self.length - self.tool_tokens

    def response(self) -> Response:
        return Response.of(self.prompt, self.pieces)

    def ending(self, answered: Sequence[AnsweredTurn] = ()) -> Finish | Drop:
        number = self.prompt.rollout
        if self.reason is None:
            raise ProtocolError(f"rollout {number} has a place in the batch but is still being read")
        return Drop(number, self.dropped) if self.dropped else Finish(number, self.response(), self.reason, answered)

    async def aclose(self) -> None:
        with noted(f"while closing rollout {self.prompt.rollout}"):
            await promised(self.decode.aclose(), "aclose() of a decode")


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSnapshot:
    """A rollout between two steps; for ``reason`` and ``dropped`` see :class:`InFlightRollout`."""

    response: Response
    reason: FinishReason | None
    dropped: str = ""

    def state_dict(self) -> dict[str, Any]:
        prompt, response = self.response.prompt, self.response
        return {
            "rollout": prompt.rollout,
            "admission": prompt.admission,
            "sample": prompt.sample,
            "group": prompt.group,
            "branch": prompt.branch,
            "limit": asdict(prompt.limit),
            "role": prompt.role,
            "images": [asdict(image) for image in prompt.images],
            "prompt": prompt.tokens,
            "columns": dict(prompt.columns),
            "tokens": response.tokens,
            "logprobs": response.logprobs,
            "versions": response.versions,
            "sampled": response.sampled,
            "extra": {column.name: {"ids": column.ids, "counts": column.counts} for column in response.extra},
            "reason": self.reason,
            "dropped": self.dropped,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RolloutSnapshot:
        prompt = Prompt(
            rollout=state["rollout"],
            admission=state["admission"],
            tokens=state["prompt"],
            sample=state["sample"],
            group=state["group"],
            columns=state["columns"],
            branch=state["branch"],
            limit=TurnLimit(**state["limit"]),
            role=state["role"],
            images=tuple(ImageRef(**image) for image in state.get("images", ())),
        )
        columns = {name: state[name] for name in ("tokens", "logprobs", "versions", "sampled")}
        extra = TokenColumns(*(COLUMN_KINDS[name](**column) for name, column in state["extra"].items()))
        return cls(Response(prompt, **columns, extra=extra), state["reason"], state["dropped"])


_HOW = "oppo.read_prompts makes prompts of a file, and oppo.PromptStream numbers them"


def require_prompt(item: object) -> Prompt:
    if not isinstance(item, Prompt):
        raise DataError(f"a graph reads prompts as oppo.Prompt, token ids with a number; got {item!r:.60}. {_HOW}")
    tokens: object = item.tokens
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1 or not len(tokens):
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else f"{tokens!r:.60}"
        raise DataError(f"the tokens of prompt {item.admission} must be a NumPy array, int32 [1 or more], not {got}")
    return item


def require_new(prompts: Iterable[Prompt], in_flight: Iterable[int]) -> None:
    seen = set(in_flight)
    for prompt in prompts:
        if prompt.rollout in seen:
            raise DataError(
                f"prompt {prompt.admission} came again while a rollout of that number is in flight: the number keys "
                "its tokens and its place in the batch, so no two prompts of a run may share one, nor an epoch repeat "
                f"those of another. {_HOW}, anew in each epoch"
            )
        seen.add(prompt.rollout)
