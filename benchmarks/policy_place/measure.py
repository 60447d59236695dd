"""A decode step, and a callback to the parent, in a thread and in a process.

A small model of random weights decodes the same rows in both places, in turn, with one core each: alone, and beside a
Python thread that is always busy. Then each place makes callbacks only. Prints medians over the rounds.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import anyio
import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from oppo.events import Prompt
from oppo.hf.cpu import use_cores
from oppo.hf.serve.policy import HfPolicy
from oppo.models import Sampling
from oppo.observe import now
from oppo.placement import Callback, Place, Process, Thread

ROWS, TOKENS, ROUNDS, QUESTIONS = 8, 120, 9, 2000


def never(finished: Sequence[int]) -> bool:
    """Cut nothing."""
    return not finished


class Questioner:
    """Asks one question after another."""

    def ask(self, question: Callable[[Sequence[int]], bool], count: int) -> float:
        """Return the seconds of a question with its answer."""
        start = now()
        for _ in range(count):
            question([1, 2])
        return (now() - start) / count


def policy_in(place: Place) -> HfPolicy:
    """Return a policy of two layers, whose decode steps cost little more than Python."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return HfPolicy(LlamaForCausalLM(config), sampling=Sampling(max_new_tokens=TOKENS), thread=place)


async def step_seconds(policy: HfPolicy) -> float:
    """Return the seconds of a decode step of :data:`ROWS` rows, with a reader for each."""
    prompts = [Prompt(n, n, np.arange(1, 9, dtype=np.int32)) for n in range(ROWS)]
    decodes, before, start = await policy.open(prompts), policy.counters.decode_steps, now()
    async with policy.decoding(decodes, never), anyio.create_task_group() as readers:
        for decode in decodes:
            readers.start_soon(decode.read, TOKENS)
    return (now() - start) / (policy.counters.decode_steps - before)


@contextmanager
def busy_thread() -> Iterator[None]:
    """Keep the interpreter of this process busy with Python code."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def measure(places: Sequence[Place]) -> None:
    policies = [policy_in(place) for place in places]
    for policy in policies:
        await step_seconds(policy)
    for what in ("alone", "beside a busy Python thread"):
        times: list[list[float]] = [[] for _ in places]
        for _ in range(ROUNDS):
            for policy, taken in zip(policies, times, strict=True):
                if what == "alone":
                    taken.append(await step_seconds(policy))
                else:
                    with busy_thread():
                        taken.append(await step_seconds(policy))
        medians = [statistics.median(taken) for taken in times]
        ratios = [own / first for first, own in zip(*times, strict=True)]
        steps = ", ".join(f"{place.name} {1e3 * each:.2f} ms" for place, each in zip(places, medians, strict=True))
        print(
            f"decode step {what}: {steps}; ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )
    for place in places:
        hosted, answer = place.host(Questioner()), Callback(never)
        costs = [await hosted.call("ask", Questioner.ask, answer, QUESTIONS) for _ in range(ROUNDS)]
        print(f"question and answer: {place.name} {1e6 * statistics.median(costs):.1f} us")


def main() -> None:
    one = partial(use_cores, 1)
    with Thread("thread", setup=one) as thread, Process("process", setup=one) as process:
        anyio.run(measure, (thread, process))
