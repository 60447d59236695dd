"""Whole PPO graphs of fakes with random settings, and what must hold for any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from oppo.admission import Admission, Continuous, Observation, Overcommit
from oppo.admission.chunking import ChunkSize, Fixed, WholeRollout
from oppo.data import PromptStream
from oppo.events import (
    Batch,
    Chunk,
    Defer,
    Drop,
    Finish,
    FloatArray,
    Prompt,
    RolloutEvent,
    StepReport,
    merge_chunks,
    rollout_of,
)
from oppo.graph import Graph, GraphBuilder
from oppo.models import Capabilities, Loads, Scorer
from oppo.observe import Span
from oppo.run.checkpoint import read_state, write_state
from oppo.stages import GAE, Generate, Score, Update, synced_models
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, prompts


@dataclass(frozen=True)
class Setting:
    """Everything that may vary in a run of fakes."""

    lengths: tuple[int, ...] = (5, 9, 3, 30)
    batch: int = 4
    extra: int = 0
    max_deferrals: int = 2
    chunks: ChunkSize = field(default_factory=lambda: Fixed(4))
    steps: int = 3
    prompts: int = 1_000
    samples: int = 1
    capacity: int = 16
    paces: tuple[float, ...] = ()
    reference: float = 0.0
    reward: float = 0.0
    critic: float = 0.0
    per_call: float = 0.0
    update: float = 0.0
    kept: int = 2
    lookahead: int = 0
    checkpoint_every: int = 1
    refill: bool = False
    in_flight: bool = False

    def is_checkpointed(self, index: int) -> bool:
        """Whether the state of a run may be taken after this step."""
        return (index + 1) % self.checkpoint_every == 0 or index == self.steps - 1

    def length(self, prompt: Prompt) -> int:
        return self.lengths[prompt.rollout % len(self.lengths)]

    @property
    def admission(self) -> Admission:
        if self.refill:
            return Continuous(self.batch, max(1, self.extra), self.max_deferrals)
        return Overcommit(self.batch, self.extra, self.max_deferrals)

    @property
    def most_carried(self) -> int:
        return max(self.extra, self.refill) * self.samples

    @property
    def capabilities(self) -> Capabilities:
        loads: Loads = "between decode steps" if self.in_flight else "refused"
        return Capabilities(turns=True, adds_while_decoding=self.refill, loads_while_decoding=loads)

    @property
    def after(self) -> tuple[str, ...]:
        return () if self.in_flight else ("generate",)

    @property
    def pace(self) -> Callable[[Prompt], float] | None:
        return (lambda prompt: self.paces[prompt.rollout % len(self.paces)]) if self.paces else None


@dataclass
class Tap:
    """An observer that keeps everything."""

    items: list[tuple[int, str, object]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        self.items.append((step, stage, item))

    def on_span(self, span: Span) -> None:
        self.spans.append(span)

    def on_step(self, step: int, result: object, channels: Mapping[str, object]) -> None:
        pass

    def story(self) -> dict[int, list[RolloutEvent]]:
        """Return the events of each rollout, over its life, as Generate sent them."""
        stories: dict[int, list[RolloutEvent]] = {}
        for _, stage, item in self.items:
            if stage == "generate" and isinstance(item, Prompt | Chunk | Defer | Finish | Drop):
                stories.setdefault(item.rollout, []).append(item)
        return stories


@dataclass
class Pipeline:
    """A PPO graph of fakes."""

    setting: Setting
    reward: Scorer[float | Drop] | None = None
    proximal: bool = False
    admission: Admission | None = None
    replay: Mapping[int, Observation] = field(default_factory=dict)
    tap: Tap = field(default_factory=Tap)
    reports: list[StepReport] = field(default_factory=list)
    tasks_between_steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        s = self.setting
        self.policy = FakePolicy(s.length, 0.01, s.pace, kept=s.kept, capabilities=s.capabilities)
        self.critic = FakeCritic(per_token=s.critic, per_call=s.per_call)
        self.trainer = FakeTrainer(s.update)
        self.reward = self.reward or FakeScorer(fake_scalar, s.reward, s.per_call)
        self.reference: FakeScorer[FloatArray] = FakeScorer(fake_per_token, s.reference, s.per_call)
        self.generate = Generate(self.policy, self.admission or s.admission, s.chunks, s.samples, self.replay)

    def graph(self) -> Graph[StepReport]:
        assert self.reward is not None
        capacity = self.setting.capacity
        g: GraphBuilder[Prompt] = GraphBuilder("ppo", capacity=capacity, merge=merge_chunks, key=rollout_of)
        rollout = g.add("generate", self.generate, g.prompts)
        ref = g.add("ref_logp", Score(self.reference), rollout)
        score = g.add("reward", Score(self.reward), rollout)
        values = Score(self.critic)
        value = g.add("value", values, rollout)
        if self.proximal:
            recorded: FakeScorer[FloatArray] = FakeScorer(lambda event, tokens, version: event.response.logprobs)
            again = g.add("proximal", Score(recorded, after="update"), rollout)
            batch = g.add("advantage", GAE(), rollout, score, reference=ref, value=value, proximal=again)
        else:
            batch = g.add("advantage", GAE(), rollout, score, reference=ref, value=value)
        update = Update(self.trainer, synced=synced_models(self.generate.policy, values), after=self.setting.after)
        return g.build(g.add("update", update, batch))

    async def run(self) -> None:
        source, ahead = prompts(self.setting.prompts), self.setting.lookahead
        async with self.graph().open(source, observers=[self.tap], lookahead=ahead) as run:
            async for report in run.steps(self.setting.steps):
                self.reports.append(report)
                self.tasks_between_steps.append(len(asyncio.all_tasks()))

    def prompts(self) -> PromptStream:
        return PromptStream(prompts(self.setting.prompts), epochs=1)

    async def run_part(self, first: int, last: int, directory: Path) -> None:
        """Run steps ``first .. last`` of the whole run; what came before is in ``directory``, and so is what comes."""
        source = self.prompts()
        async with self.graph().open(source, observers=[self.tap], lookahead=self.setting.lookahead) as run:
            if first:
                state = read_state(directory)
                run.load_state_dict(state["run"])
                source.load_state_dict(state["prompts"])
                self.trainer.version = first
                await self.trainer.sync_weights(self.policy, self.critic)
            steps = run.steps(self.setting.steps - first, drain_after=self.setting.is_checkpointed)
            for _ in range(first, last):
                self.reports.append(await anext(steps))
            write_state(directory, {"run": run.state_dict(), "prompts": source.state_dict()})

    @property
    def batches(self) -> Sequence[Batch]:
        return self.trainer.batches


def paces(*each: float) -> st.SearchStrategy[tuple[float, ...]]:
    """Rollouts that are decoded together, in half of all runs, or at these paces."""
    return st.just(()) | st.lists(st.sampled_from(each), min_size=1, max_size=4).map(tuple)


@st.composite
def settings(
    draw: st.DrawFn, prompts: tuple[int, ...] = (0, 3, 7, 1_000), lookaheads: tuple[int, ...] = (0, 0, 1, 2)
) -> Setting:
    """Any run: deferral, rollouts decoded together or apart, fast and slow models, small and large channels."""
    batch = draw(st.integers(1, 5))
    seconds = st.sampled_from([0.0, 0.001, 0.004, 0.03])
    chunk = draw(st.integers(0, 12))
    return Setting(
        lengths=tuple(draw(st.lists(st.integers(1, 40), min_size=3, max_size=12))),
        batch=batch,
        extra=draw(st.integers(0, batch)),
        max_deferrals=draw(st.integers(1, 3)),
        chunks=Fixed(chunk) if chunk else WholeRollout(),
        steps=draw(st.integers(1, 4)),
        prompts=draw(st.sampled_from(prompts)),
        samples=draw(st.sampled_from([1, 1, 2])),
        capacity=draw(st.sampled_from([1, 2, 5])),
        paces=draw(paces(0.5, 1.0, 3.0)),
        reference=draw(seconds),
        reward=draw(seconds),
        critic=draw(seconds),
        per_call=draw(seconds),
        update=draw(st.sampled_from([0.0, 0.5])),
        kept=draw(st.sampled_from([0, 2])),
        lookahead=draw(st.sampled_from(lookaheads)),
        checkpoint_every=draw(st.integers(1, 3)),
    )


@st.composite
def motions(draw: st.DrawFn, lookaheads: tuple[int, ...] = (0, 1, 2, 3)) -> Setting:
    """Any run, with units that join while others are decoded, weights that come meanwhile, or both, or neither."""
    setting = draw(settings(lookaheads=lookaheads))
    return replace(setting, refill=draw(st.booleans()), in_flight=draw(st.booleans()))


def on_policy(setting: Setting) -> Setting:
    """Return the same run with nothing overlapped: no overcommit, whole rollouts, free scoring."""
    return replace(
        setting, chunks=WholeRollout(), capacity=16, paces=(), reference=0.0, reward=0.0, critic=0.0, per_call=0.0
    )


def same_batches(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    """Return whether two runs trained on the same numbers, bit for bit."""
    return len(one) == len(other) and all(
        a.rollouts == b.rollouts
        and a.reasons == b.reasons
        and all(
            np.array_equal(getattr(a, name), getattr(b, name))
            for name in (
                "tokens",
                "versions",
                "logprobs",
                "reference",
                "values",
                "rewards",
                "advantages",
                "returns",
                "scores",
            )
        )
        for a, b in zip(one, other, strict=True)
    )
