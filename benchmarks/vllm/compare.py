"""oppo's policy on vLLM beside vLLM alone, in turns, in one engine: decoding, and weight sync beside a copy.

Ours is a step of a graph with one stage, ``Generate`` under ``Synchronous``, without scorers and trainer. Bare is
what a program without oppo would write: a task for each request that iterates over ``AsyncLLM.generate``. It is given
the very requests that the last step of ours has sent: the same prompts, settings and seeds, so the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Final, Protocol
from uuid import uuid4

import anyio
import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import turns
from oppo import observe
from oppo.admission import Synchronous
from oppo.admission.chunking import Fixed
from oppo.errors import DataError
from oppo.events import Chunk, Finish, Prompt, RolloutEvent, StepReport, merge_chunks, rollout_of
from oppo.graph import Graph, GraphBuilder, Receiver, Run, Sender, Step
from oppo.models import Policy, Weights
from oppo.stages import Generate

# Tokens of a prompt: less than a block of the engine's cache, so that nothing of an earlier round is found there
PROMPT: Final = 16


class Completion(Protocol):
    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens since the last output."""


class Output(Protocol):
    @property
    def outputs(self) -> Sequence[Completion]:
        """One completion."""


class Bare(Protocol):
    """The calls of ``AsyncLLM`` that the bare program makes."""

    def generate(self, prompt: object, sampling_params: object, request_id: str) -> AsyncIterator[Output]:
        """Yield what a request has made since the last time."""

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Stop between two decode steps."""

    async def resume_generation(self) -> None:
        """Go on."""


@dataclass(eq=False)
class Recorded:
    """An ``AsyncLLM`` that keeps the prompt and the settings of each request that it passes on."""

    llm: Any
    requests: list[tuple[object, object]] = field(default_factory=list)

    async def add_request(self, request_id: str, prompt: object, params: object, **options: object) -> object:
        self.requests.append((prompt, params))
        return await self.llm.add_request(request_id, prompt, params, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self.llm, name)


TOKENS: Final = "tokens"  # the metric of a step: how many tokens it decoded


class Tally:
    """Reads the rollouts of a step, and counts their tokens."""

    async def run(self, rollouts: Receiver[RolloutEvent], /, *, out: Sender[StepReport], step: Step) -> None:
        tokens, finished, start = 0, list[int](), observe.now()
        while events := await rollouts.drain():
            tokens += sum(len(event.tokens) for event in events if isinstance(event, Chunk))
            finished += [event.rollout for event in events if isinstance(event, Finish)]
        seconds, metrics = observe.now() - start, {TOKENS: float(tokens)}
        await out.send(StepReport(step.index, 0, tuple(finished), (), (), math.nan, seconds, metrics))


def decoding_graph(policy: Policy, batch: int) -> Graph[StepReport]:
    builder = GraphBuilder[Prompt]("decoding", merge=merge_chunks, key=rollout_of)
    rollouts = builder.add("generate", Generate(policy, Synchronous(batch), Fixed(32)), builder.prompts)
    return builder.build(builder.add("tally", Tally(), rollouts))


def prompts_of(lengths: Sequence[int], vocabulary: int) -> Iterator[Prompt]:
    """Yield prompts of random ids without end; their column ``length`` holds the lengths, again and again."""
    dice = np.random.default_rng(0)
    for number in count():
        tokens = dice.integers(3, vocabulary, PROMPT).astype(np.int32)
        yield Prompt(number, number, tokens, columns={"length": lengths[number % len(lengths)]})


def length_of(prompt: Prompt) -> int:
    return int(str(prompt.columns["length"]))


@dataclass(frozen=True, slots=True)
class DecodingComparison:
    """The result of :func:`compare_decoding`, by round."""

    batch: int  # rollouts decoded together
    tokens: int  # made by each of the two in each round
    ours: tuple[float, ...]  # tokens a second of the policy
    bare: tuple[float, ...]  # tokens a second of `AsyncLLM`

    @property
    def ratio(self) -> float:
        return median(self.ours) / median(self.bare)


async def compare_decoding(
    policy: Policy,
    engine: Recorded,
    *,
    lengths: Sequence[int],
    vocabulary: int,
    rounds: int = 5,
    clock: Callable[[], float] = observe.now,
) -> DecodingComparison:
    """Return the speeds of both over ``rounds`` rounds, in turn; one before them is not counted."""
    ours, bare, expected = list[float](), list[float](), sum(lengths)

    async def timed(decode: Callable[[], Awaitable[int]]) -> float:
        start = clock()
        tokens = await decode()
        took = clock() - start
        if tokens != expected:
            raise DataError(f"expected {expected} tokens of both, and one made {tokens}: they did different work")
        return tokens / took

    async with decoding_graph(policy, len(lengths)).open(prompts_of(lengths, vocabulary)) as run:

        async def step() -> float:
            engine.requests.clear()
            return await timed(partial(stepped, run))

        async def alone() -> float:
            await engine.llm.resume_generation()
            speed = await timed(partial(generated, engine.llm, engine.requests))
            await engine.llm.pause_generation(mode="keep", clear_cache=False)
            return speed

        for _, (decode, speeds) in turns(
            [(alone, bare), (step, ours)], rounds
        ):  # first ours, whose requests bare makes
            speeds.append(await decode())
    return DecodingComparison(len(lengths), expected, tuple(ours[1:]), tuple(bare[1:]))


async def stepped(run: Run[StepReport]) -> int:
    """Run a step; return the number of tokens."""
    report = await run.step()
    return 0 if report is None else int(report.metrics[TOKENS])


async def generated(llm: Bare, requests: Sequence[tuple[object, object]]) -> int:
    """Make all requests at once, each read by a task of its own; return the number of tokens."""
    made = [0] * len(requests)

    async def read(at: int, prompt: object, params: object) -> None:
        async for output in llm.generate(prompt, params, f"bare-{uuid4().hex}"):
            made[at] += len(output.outputs[0].token_ids)

    async with anyio.create_task_group() as readers:
        for at, (prompt, params) in enumerate(requests):
            readers.start_soon(read, at, prompt, params)
    return sum(made)


@dataclass(frozen=True, slots=True)
class SyncComparison:
    """The result of :func:`compare_syncing`, by round."""

    bytes: int  # of the weights
    syncing: tuple[float, ...]  # seconds until the engine serves new weights
    copying: tuple[float, ...]  # seconds of copying as many bytes once

    @property
    def ratio(self) -> float:
        return median(self.syncing) / median(self.copying)


async def compare_syncing(
    policy: Policy, tensors: Mapping[str, Tensor], *, rounds: int = 5, clock: Callable[[], float] = observe.now
) -> SyncComparison:
    """Return the seconds of both over ``rounds`` rounds, in turn; one before them is not counted."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    syncing, copying = list[float](), list[float]()

    async def sync_weights() -> None:
        await policy.load(Weights(policy.version + 1, tensors))

    async def copy() -> None:
        target.copy_(source)

    for _, (work, seconds) in turns([(sync_weights, syncing), (copy, copying)], rounds):
        start = clock()
        await work()
        seconds.append(clock() - start)
    return SyncComparison(size, tuple(syncing[1:]), tuple(copying[1:]))
