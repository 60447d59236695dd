"""Faults of the engine's own contracts, and whole PPO graphs of fakes in which those of a script happen.

A run with faults can be gone on with afterwards.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from oppo.admission import Admission, Overcommit, TailAdaptive, TailBatched
from oppo.data import PromptStream
from oppo.errors import ModelError
from oppo.events import Batch, Chunk, Drop, Prompt, Response, StepReport
from oppo.graph import Graph, Run
from oppo.models import Scorer, SyncedModel, Trained, name_of
from oppo.rewards import FunctionReward, OnFailure
from oppo.stages import Generate, Score, Update
from oppo.testing import (
    FakePolicy,
    Fault,
    FaultyCritic,
    FaultyPolicy,
    FaultyScorer,
    FaultyTrainer,
    Script,
    faulty_reward,
    run_virtual,
)
from oppo.testing.fake_policy import FakeDecode
from oppo.testing.faulty import Call, FaultKind, Method
from oppo.turns import Answer
from tests.kit.pipelines import Pipeline, Setting, Tap

Spoilt: TypeAlias = Literal["nan", "count", "shape", "none", "empty", "version", "order", "token", "stranger"]

# How the answer of each method can be wrong; the other methods return nothing
SPOILT: Mapping[Method, tuple[Spoilt, ...]] = {
    "open": ("count",),
    "read": ("nan", "shape", "empty", "version", "order", "token"),
    "load": ("version",),
    "finish": ("nan", "count", "shape", "none"),
    "update": ("version", "stranger"),
    "commit": ("version", "stranger"),
    "call": ("nan", "count", "none"),
    "answer": ("empty", "token"),
}

FAR = 1_000  # versions by which a spoilt piece is ahead of the current weights, or behind them


@dataclass(frozen=True, slots=True)
class Garbage(FaultKind):
    """The call does its work and returns an invalid answer.

    ``count``: one item too few. ``nan``: no numbers (of a chunk: its log-probs). ``shape``: per-token values for one
    token too few; a scalar as an array; of a chunk, one log-prob too few. ``none``: ``None`` for each rollout.
    ``empty``: a chunk or an answer without tokens. ``version``: weights that do not exist yet; of ``load`` and
    ``update``: the version does not move. ``order``: a chunk ends with older weights than it began with. ``token``: an
    id below 0. ``stranger``: of an update, a rollout that is not in the batch.
    """

    what: Spoilt

    def fits(self, method: Method) -> bool:
        return self.what in SPOILT.get(method, ())

    def after(self, call: Call, answer: Any) -> Any:
        if self.what == "version" and call.method != "read":
            call.model.behind += 1
        elif isinstance(answer, Trained):
            return replace(answer, nonfinite=(*answer.nonfinite, -1))
        elif isinstance(answer, Answer):
            return replace(answer, tokens=answer.tokens[:0] if self.what == "empty" else -1 - answer.tokens)
        elif isinstance(answer, Chunk):
            return self._chunk(answer)
        elif self.what == "count":
            return answer[:-1]
        elif call.method in {"finish", "call"}:
            return [self._value(value) for value in cast("Sequence[object]", answer)]
        return answer

    def _chunk(self, chunk: Chunk) -> Chunk:
        if self.what == "empty":
            return replace(chunk.part(0, 0), state="live")
        old = chunk.versions[:1] - np.int32(FAR)
        spoilt: dict[str, Callable[[], Chunk]] = {
            "nan": lambda: replace(chunk, logprobs=np.full_like(chunk.logprobs, np.nan)),
            "shape": lambda: replace(chunk, logprobs=chunk.logprobs[:-1]),
            "version": lambda: replace(chunk, versions=chunk.versions + np.int32(FAR)),
            "order": lambda: replace(chunk, versions=np.append(chunk.versions[:-1], old)),
            "token": lambda: replace(chunk, tokens=-1 - chunk.tokens),
        }
        return spoilt[self.what]() if len(chunk.tokens) else chunk

    def _value(self, value: object) -> object:
        if self.what == "none":
            return None
        if self.what == "nan":
            return np.full_like(value, np.nan) if isinstance(value, np.ndarray) else float("nan")
        return value[:-1] if isinstance(value, np.ndarray) else np.array([value])


@dataclass(frozen=True, slots=True)
class LoseSessions(FaultKind):
    """The model loses all its sessions before the call: a policy those of the decoding, a fake scorer all."""

    def fits(self, method: Method) -> bool:
        return method in {"decoding", "extend", "finish"}

    async def before(self, call: Call) -> tuple[Any, ...]:
        if call.method == "decoding":
            for decode in call.arguments[0]:
                await decode.aclose()
        else:
            sessions = call.model.inner.sessions
            sessions.forget(list(sessions))
        return call.arguments


@dataclass(frozen=True, slots=True)
class HalfSynced(FaultKind):
    """The first half of the synced models (rounded down) gets the weights; if not ``silent``, the call then raises."""

    silent: bool = False

    def fits(self, method: Method) -> bool:
        return method == "sync_weights"

    async def before(self, call: Call) -> tuple[Any, ...]:
        return call.arguments[: len(call.arguments) // 2]

    def after(self, call: Call, answer: Any) -> Any:
        if not self.silent:
            held = ", ".join(f"{name_of(one)} has version {one.version}" for one in call.arguments)
            raise ModelError(f"{call.place} fails half-way, as its script says: {held}")
        return answer


Kind = Literal["overcommit", "adaptive", "batched"]

STAGES = {"actor": "generate", "reference": "ref_logp", "reward": "reward", "critic": "value", "trainer": "update"}
"""The stage that calls each model; ``load`` is called in ``update``."""


@dataclass
class Counters(Tap):
    """A tap that also keeps the counters of the channels."""

    channels: list[Mapping[str, Mapping[str, int]]] = field(default_factory=list)

    def on_step(self, step: int, result: object, channels: Mapping[str, object]) -> None:
        self.channels.append({name: dict(counters) for name, counters in channels.items()})  # type: ignore[call-overload]  # they are mappings


class Silent(FakePolicy):
    """Does not say what has finished."""

    def _end(self, ended: list[FakeDecode]) -> None:
        for decode in ended:
            self._remove(decode)


@dataclass(eq=False)
class Remembering(FakePolicy):
    """A policy that remembers what it opened, and whose times add up exactly: its second has 64 parts."""

    seconds: float = 1 / 64
    opened: list[FakeDecode] = field(default_factory=list)

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        decodes = await super().open(rollouts)
        self.opened += decodes
        return decodes


@dataclass
class FaultyPipeline(Pipeline):
    """A PPO graph of fakes that keep to a script; after each step it remembers how to go on from there."""

    script: Script = ()
    kind: Kind = "overcommit"
    judge: OnFailure | None = None
    tap: Counters = field(default_factory=Counters)
    saved: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    tasks_left: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.reward is not None
        s = self.setting
        self.policy = self.remembering = Remembering(s.length, pace=s.pace, kept=s.kept)
        self.actor = FaultyPolicy("actor", self.policy, self.script)
        self.scripted_reference = FaultyScorer("reference", self.reference, self.script)
        self.scripted_reward = FaultyScorer("reward", self.reward, self.script)
        self.scripted_critic = FaultyCritic("critic", self.critic, self.script)
        self.scripted_trainer = FaultyTrainer("trainer", self.trainer, self.script)
        self.generate = Generate(self.actor, self.chosen_admission(), self.setting.chunks, self.setting.samples)

    def chosen_admission(self) -> Admission:
        s = self.setting
        if self.kind == "batched":
            return TailBatched(s.batch, launch=1 + s.extra / s.batch)
        if self.kind == "adaptive":
            return TailAdaptive(s.batch, price=0.1, max_deferrals=s.max_deferrals, most=s.extra, window=3)
        return Overcommit(s.batch, s.extra, s.max_deferrals)

    def graph(self) -> Graph[StepReport]:
        reward: Scorer[float | Drop] = self.scripted_reward
        if self.judge is not None:
            # A script counts calls: what fails a few times in a row recovers for a caller that waits for its answer.
            one = 1 if self.judge == "retry" else None
            function = faulty_reward("judge", judged, self.script)
            reward = FunctionReward(function, decode=str, on_failure=self.judge, concurrency=one)
        synced: list[SyncedModel] = [self.actor, self.scripted_critic]
        return (
            super()
            .graph()
            .replace(
                ref_logp=Score(self.scripted_reference),
                reward=Score(reward),
                value=Score(self.scripted_critic),
                update=Update(self.scripted_trainer, synced, ("generate", "value"), max_nonfinite=0),
            )
        )

    async def run(self) -> None:
        """Run what is left of the steps; what ends the run before is in ``error``."""
        source = self.prompts()
        try:
            async with self.graph().open(source, observers=[self.tap], lookahead=self.setting.lookahead) as run:
                first = await self._go_on(run, source)
                self._save(run, source)
                async for report in run.steps(self.setting.steps - first, drain_after=self.setting.is_checkpointed):
                    self.reports.append(report)
                    if not run.alive:
                        self._save(run, source)
                self._save(run, source)  # where the data has ended the last steps report nothing
        except Exception as error:  # noqa: BLE001 - what ends a run is looked at
            self.error = error
        self.tasks_left = len(asyncio.all_tasks()) - 1

    async def _go_on(self, run: Run[StepReport], source: PromptStream) -> int:
        """Take up what was saved; return how many steps that was."""
        if not self.saved:
            return 0
        source.load_state_dict(self.saved["prompts"])
        run.load_state_dict(self.saved["run"])
        first = int(self.saved["run"]["steps"])
        self.trainer.version = first
        await self.trainer.sync_weights(self.policy, self.critic)
        return first

    def _save(self, run: Run[StepReport], source: PromptStream) -> None:
        self.saved = {"run": run.state_dict(), "prompts": source.state_dict()}

    def play(self) -> FaultyPipeline:
        """Run, and return itself; a deadlock is in ``error``, too."""
        try:
            run_virtual(self.run)
        except Exception as error:  # noqa: BLE001 - what ends a run is looked at
            self.error = error
        return self

    def resumed(self) -> FaultyPipeline:
        """Return a run that has gone on, to its end and with nothing wrong, from what this one had saved."""
        rest = FaultyPipeline(self.setting, kind=self.kind, judge=self.judge, saved=self.saved)
        return rest.play()

    @property
    def struck(self) -> list[Fault]:
        """The faults that have happened, those of each model in order."""
        models = (
            self.actor,
            self.scripted_reference,
            self.scripted_reward,
            self.scripted_critic,
            self.scripted_trainer,
        )
        return [fault for model in models for fault in model.struck]

    @property
    def complete(self) -> list[Batch]:
        """The batches of the steps up to the last that was saved."""
        return self.trainer.batches[: len(self.saved_reports)]

    @property
    def saved_reports(self) -> list[StepReport]:
        """The reports of the steps up to the last that was saved; without lookahead, of all that came to their end."""
        saved = int(self.saved["run"]["steps"]) if self.saved else 0
        return [report for report in self.reports if report.index < saved]

    def carried(self) -> list[int]:
        """Return the rollouts that were held between the last complete step and the next."""
        units = self.saved["run"]["stages"]["generate"]["units"]
        return [deferred["rollout"] for unit in units for deferred in unit["rollouts"]]

    def taken(self) -> int:
        return int(self.saved["prompts"]["position"]) * self.setting.samples


def judged(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]


def stage_of(fault: Fault) -> str:
    """Return the stage in which a fault is noticed by its call."""
    return "update" if fault.method == "load" else STAGES[fault.model]


@dataclass(frozen=True)
class Case:
    """Everything that decides how a run goes.

    Attributes:
        judge: what becomes of failures of the reward function that stands for the reward model, if one does.
    """

    setting: Setting
    script: Script = ()
    kind: Kind = "overcommit"
    judge: OnFailure | None = None

    def play(self) -> FaultyPipeline:
        return FaultyPipeline(self.setting, script=self.script, kind=self.kind, judge=self.judge).play()

    def without_faults(self) -> FaultyPipeline:
        """Return the same run in which nothing goes wrong, over."""
        return replace(self, script=()).play()
