"""A decode step, and a callback to the parent, in a thread, in a process and, with ``--ray``, on another raylet.

``python -m benchmarks.policy_place [--ray]``: a small model of random weights decodes the same rows in all places, in
turn, with one core each: alone, and beside a Python thread that is always busy. Then each place makes callbacks only.
At last a thread decodes beside a reference in a thread and in a process; both models have many layers that hardly
compute, so that their passes cost what Python does, as on a GPU that is faster than its kernels are started. Prints
medians over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import numpy as np
from cyclopts import Parameter
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Spread, command, turns
from oppo.events import Chunk, Prompt
from oppo.hf.devices import use_cores
from oppo.hf.loading import ModelRecipe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ReferenceLogprobs
from oppo.models import Sampling
from oppo.observe import now
from oppo.placement import Callback, Place, Process, Thread

ROWS, TOKENS, ROUNDS, QUESTIONS = 8, 120, 9, 2000
LAYERS, CHUNK = 28, 24

one_core = partial(use_cores, 1)


def never(finished: Sequence[int]) -> bool:
    return not finished


class Questioner:
    def ask(self, question: Callable[[Sequence[int]], bool], count: int) -> float:
        start = now()
        for _ in range(count):
            question([1, 2])
        return (now() - start) / count


def saved(folder: str, layers: int = 2) -> ModelRecipe:
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return ModelRecipe(path=folder, device="cpu")


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


async def measure(places: Sequence[Place], model: ModelRecipe) -> None:
    policies = [HfPolicy(model, sampling=Sampling(max_new_tokens=TOKENS), place=place) for place in places]
    for what, beside in (("alone", nullcontext), ("beside a busy Python thread", busy_thread)):
        times = [list[float]() for _ in places]
        for number, at in turns(range(len(places)), ROUNDS):
            with beside():
                took = await step_seconds(policies[at])
            if number:
                times[at].append(took)
        for place, taken in zip(places, times, strict=True):
            ratio = "" if taken is times[0] else f"; ratio {Spread.of_ratios(taken, times[0])}"
            print(f"decode step {what}: {place.name} {1e3 * statistics.median(taken):.2f} ms{ratio}")
    for place in places:
        hosted, answer = place.host(Questioner), Callback(never)
        await hosted.call("ask", Questioner.ask, answer, 1)
        costs = [await hosted.call("ask", Questioner.ask, answer, QUESTIONS) for _ in range(ROUNDS)]
        print(f"question and answer: {place.name} {1e6 * statistics.median(costs):.1f} us")


async def reading(reference: ReferenceLogprobs, over: anyio.Event, passes: list[int]) -> None:
    while not over.is_set():
        events: list[Prompt | Chunk] = [Prompt(n, n, np.arange(1, 9, dtype=np.int32)) for n in range(ROWS)]
        await reference.extend(events)
        for start in range(0, TOKENS, CHUNK):
            tokens = np.ones(CHUNK, np.int32)
            chunks = [Chunk(n, start, tokens, tokens.astype(np.float32), tokens) for n in range(ROWS)]
            await reference.extend(chunks)
            passes.append(1)
        await reference.forget(range(ROWS))


async def measure_scorers(acting: Place, scoring: Sequence[Place], model: ModelRecipe) -> None:
    sampling = Sampling(max_new_tokens=TOKENS)
    policy = HfPolicy(model, sampling=sampling, place=acting)
    references = [ReferenceLogprobs(model, sampling=sampling, place=place) for place in scoring]
    alone, rates = list[float](), [list[tuple[float, float]]() for _ in scoring]
    for number, at in turns(range(len(scoring) + 1), ROUNDS):
        if at == len(scoring):
            alone += [1 / await step_seconds(policy)][: bool(number)]
            continue
        over, passes, start = anyio.Event(), list[int](), now()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reading, references[at], over, passes)
            took = await step_seconds(policy)
            rates[at] += [(1 / took, len(passes) / (now() - start))][: bool(number)]
            over.set()
    print(f"deep policy alone: {statistics.median(alone):.0f} decode steps/s")
    for place, found in zip(scoring, rates, strict=True):
        steps, passes_ = (list(each) for each in zip(*found, strict=True))
        print(
            f"deep policy beside a reference in a {place.name}: {statistics.median(steps):.0f} decode steps/s, "
            f"{Spread.of_ratios(steps, alone)} of those alone; {statistics.median(passes_):.0f} passes/s of the other"
        )


@contextmanager
def second_raylet() -> Iterator[Place]:
    """Return a place in an actor on a raylet of this machine that is not this process's own."""
    from ray.cluster_utils import Cluster as Raylets  # noqa: PLC0415 - Ray is an extra
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    from oppo.placement.ray import Cluster, RayPlace  # noqa: PLC0415

    room: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    Path("/tmp/ray").mkdir(exist_ok=True)
    raylets = Raylets(initialize_head=True, head_node_args=room)
    try:
        node: Any = raylets.add_node(**room)
        with Cluster(raylets.address) as cluster:
            other = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            with RayPlace("actor", cluster, setup=one_core, strategy=other, restarts=0) as place:
                yield place
    finally:
        raylets.shutdown()


def compare(*, ray: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Print what decoding costs in a thread and in a process.

    Args:
        ray: in an actor on another raylet too.
    """
    with ExitStack() as stack:
        places: list[Place] = [
            stack.enter_context(Thread("thread", setup=one_core)),
            stack.enter_context(Process("process", setup=one_core)),
        ]
        if ray:
            places.append(stack.enter_context(second_raylet()))
        model = saved(stack.enter_context(tempfile.TemporaryDirectory()))
        anyio.run(measure, places, model)
        scoring = [stack.enter_context(kind(kind.__name__.lower(), setup=one_core)) for kind in (Thread, Process)]
        deep = saved(stack.enter_context(tempfile.TemporaryDirectory()), LAYERS)
        anyio.run(measure_scorers, places[0], scoring, deep)


if __name__ == "__main__":
    sys.exit(command(compare))
