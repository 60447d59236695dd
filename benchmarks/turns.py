"""How long rollouts pause when another one's tool answers: ``python -m benchmarks.turns``.

The call that decodes returns, and another begins. Rows decode together; now and then one draws a stop token and waits,
its answer comes at once, and it joins again. A *gap* is the time from one decode step to the next. That in which an
answer joined also reads the answer. Other gaps have a call that is only interrupted: it returns, and the next has the
same rows. Each is compared with the gaps within calls on either side of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Final
from unittest.mock import patch

import anyio
import numpy as np
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.decoding import POSITIONS, PROMPT, SHAPES, VOCABULARY
from benchmarks.harness import aligned, command
from benchmarks.ladder.directory import config_of
from oppo import observe
from oppo.demo.assets import alone
from oppo.events import Prompt
from oppo.hf import HfPolicy
from oppo.hf.devices import use_cores
from oppo.hf.model_parts import vocabulary as vocabulary_of
from oppo.hf.serve.decoder import DecodeRow
from oppo.hf.serve.policy import DecodeCalls, HfDecode
from oppo.models import Sampling
from oppo.placement import Place, Process, Thread
from oppo.rollout_buffer import DecodeStep, DecodeSteps

ROWS: Final = 32
LENGTH: Final = 192
ANSWER: Final = 8  # tokens of an answer

STOPS: Final = 2  # token ids that end a turn, of the vocabulary

EVERY: Final = 7  # decode steps between two interruptions


@dataclass(slots=True)
class Course:
    ends: list[float] = field(default_factory=list)  # of each decode step, in seconds
    calls: list[int] = field(default_factory=list)  # the number of the call that made each
    joined: set[int] = field(default_factory=set)  # calls that a rollout joined after an answer

    def borders(self, *, joined: bool) -> Iterator[tuple[float, float]]:
        """Yield each gap between two calls and the mean of the gaps within calls on either side of it, in seconds."""
        gaps = np.diff(self.ends)
        border = np.diff(self.calls) > 0
        for at in np.flatnonzero(border):
            beside = [float(gaps[k]) for k in (at - 1, at + 1) if 0 <= k < len(gaps) and not border[k]]
            if beside and (self.calls[at + 1] in self.joined) is joined:
                yield float(gaps[at]), sum(beside) / len(beside)


@dataclass(frozen=True, slots=True)
class Pauses:
    """What was found, in seconds; medians."""

    step: float  # of a decode step
    interrupted: float  # by which a gap is longer in which the call was interrupted and nothing else
    answered: float  # by which a gap is longer in which an answer joined, the reading of it included
    # interruptions, answers: how many were measured
    interruptions: int
    answers: int

    @classmethod
    def of(cls, courses: Sequence[Course]) -> Pauses:
        """Return the medians over courses; NaN without a case."""
        alone_, joined = ([pair for each in courses for pair in each.borders(joined=kind)] for kind in (False, True))
        every = [beside for _, beside in (*alone_, *joined)]
        longer = [median([gap - beside for gap, beside in kind] or [float("nan")]) for kind in (alone_, joined)]
        return cls(median(every), longer[0], longer[1], len(alone_), len(joined))


async def course(policy: HfPolicy, *, rows: int, first: int, vocabulary: int) -> Course:
    """Decode so many rows to their length, answering each turn at once and interrupting now and then."""
    found, push, create = Course(), DecodeSteps.push, DecodeSteps.__init__
    calls = 0

    def opened(steps: DecodeSteps[DecodeRow | None], decodes: Sequence[HfDecode]) -> None:
        nonlocal calls
        calls += 1
        create(steps, decodes)

    def delivered(steps: DecodeSteps[DecodeRow | None], step: DecodeStep) -> None:
        found.ends.append(observe.now())
        found.calls.append(calls)
        push(steps, step)

    generator = np.random.default_rng(first)
    prompts = [
        Prompt(first + k, first + k, generator.integers(0, vocabulary, PROMPT).astype(np.int32)) for k in range(rows)
    ]
    decodes = await policy.open_turns(prompts)
    with patch.object(DecodeSteps, "push", delivered), patch.object(DecodeSteps, "__init__", opened):
        async with policy.decoding(decodes, lambda ended: False) as loop, anyio.create_task_group() as others:

            async def converse(decode: HfDecode) -> None:
                while await decode.turn() is not None:
                    if not decode.proceed(np.arange(ANSWER, dtype=np.int32)):
                        return
                    found.joined.add(calls + 1)

            async def interrupt() -> None:
                seen = 0
                while True:
                    await anyio.sleep(0.001)
                    if len(found.ends) - seen >= EVERY and decodes[0].live and isinstance(loop, DecodeCalls):
                        seen = len(found.ends)
                        loop.note_answer()

            for decode in decodes:
                others.start_soon(converse, decode)
            others.start_soon(interrupt)
            async with anyio.create_task_group() as readers:
                for decode in decodes:
                    readers.start_soon(read, decode)
            others.cancel_scope.cancel()
    for decode in decodes:
        await decode.aclose()
    return found


async def read(decode: HfDecode) -> None:
    while (await decode.read(32)).state == "live":
        pass


def measure(model: PreTrainedModel, place: Place, *, rounds: int, rows: int = ROWS, length: int = LENGTH) -> Pauses:
    """Return what answers cost, over so many rounds; one before them is not counted."""
    sampling = Sampling(max_new_tokens=length, stop=tuple(range(STOPS)), seed=1)
    policy, vocabulary = HfPolicy(model, sampling=sampling, place=place), vocabulary_of(model)

    async def main() -> Sequence[Course]:
        firsts = range(0, rows * (rounds + 1), rows)
        return [await course(policy, rows=rows, first=first, vocabulary=vocabulary) for first in firsts]

    return Pauses.of(anyio.run(main)[1:])


def compare(*, rounds: int = 12) -> None:
    """Print what an answer costs the others, with the model in a thread or a process.

    Args:
        rounds: that count, after one that does not.
    """
    rows = [["model", "place", "step", "interrupted", "in steps", "answered", "in steps", "answers"]]
    for name, shape in SHAPES.items():
        for kind in ("thread", "process"):
            with alone(0), ExitStack() as stack:
                model = LlamaForCausalLM(config_of(shape, VOCABULARY, POSITIONS))
                make = Process if kind == "process" else Thread
                place = stack.enter_context(make("actor", setup=partial(use_cores, 1)))
                found = measure(model, place, rounds=rounds)
            cells = [
                cell
                for each in (found.interrupted, found.answered)
                for cell in (f"{1e3 * each:.2f} ms", f"{each / found.step:.2f}")
            ]
            rows.append([name, kind, f"{1e3 * found.step:.2f} ms", *cells, f"{found.answers}"])
    print(aligned(rows))
    print(f"{ROWS} rows, answers of {ANSWER} tokens, one core; medians")


if __name__ == "__main__":
    sys.exit(command(compare))
