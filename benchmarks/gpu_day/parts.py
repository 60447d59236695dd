"""Parts of a step on their own, with models of Qwen2.5's shapes and random weights; on a CPU tiny ones, to try them.

Beside each time stands the prediction of the roofline of ``oppo simulate``, from the data sheet of a GPU that it knows,
else from what was measured here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

import anyio
import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.harness import Machine, turns
from benchmarks.ladder.directory import drawn
from benchmarks.ladder.workloads import WORKLOADS, BenchWorkload, tiny
from oppo import observe
from oppo.errors import ModelError
from oppo.events import Chunk, Prompt
from oppo.hf.devices import DeviceThread, synchronised, use_cores
from oppo.hf.memory import Load, Trained, longest_batch
from oppo.hf.meta_device import planned_on
from oppo.hf.model_parts import transformer
from oppo.hf.serve.decoder import Decoder, DecodeRow, Deliver, Signals
from oppo.hf.serve.scorers import ReferenceWorker, RewardWorker, ScorerInput
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.packing import CPU_TOKENS, GPU_TOKENS
from oppo.hf.train.trainer import HfTrainerCore
from oppo.losses import ClippedLoss
from oppo.models import Sampling
from oppo.placement import Process
from oppo.placement.trainer import TrainerCounts
from oppo.rollout_buffer import DecodeStep
from oppo.simulate.profile import Gpu, Reached, gpu_named
from oppo.training import TrainerSettings

REACHED: Final = Reached(name="transformers")
SAMPLING: Final = Sampling(max_new_tokens=4096, seed=1)

PASSES: Final = 3  # forward passes' worth of an update that keeps its activations: forward, and twice as much backward

Found: TypeAlias = Mapping[str, object]  # figures of a part by name; one that was predicted is in `NAME, predicted`


@dataclass(frozen=True, slots=True)
class Sizes:
    # rows, prompt: of a decode step, and tokens of its prompts
    rows: int = 64
    prompt: int = 512
    steps: int = 64  # decode steps that are timed
    read: int = 1024  # tokens of a row that is trained
    scored: int = 384  # tokens of a row that a scorer reads, whole chunks
    chunk: int = 128  # tokens that a scorer reads at a time
    trained: int = 32  # rows of an update
    product: int = 8192  # side of the matrices whose product is timed
    times: int = 3  # that each is timed


ON_A_CPU: Final = Sizes(rows=8, prompt=16, steps=12, read=64, scored=32, chunk=16, trained=4, product=512, times=1)


@dataclass(slots=True)
class Day:
    """A device, what it is, and how a part says what it has found so far."""

    device: torch.device
    facts: Found = field(default_factory=dict)
    say: Callable[[Found], None] = lambda found: None

    @property
    def tries(self) -> bool:
        return self.device.type == "cpu"

    @property
    def sizes(self) -> Sizes:
        return ON_A_CPU if self.tries else Sizes()

    def workload(self, name: str) -> BenchWorkload:
        return tiny(WORKLOADS[name]) if self.tries else WORKLOADS[name]

    @property
    def gpu(self) -> Gpu:
        known = gpu_named(str(self.facts.get("device", "")))
        if known is not None:
            return known
        flops, bandwidth, memory = (float(str(self.facts[name])) for name in ("flops", "bandwidth", "memory"))
        return Gpu(flops=flops, bandwidth=bandwidth, memory=memory or 1.0)

    def model(self, role: str, device: torch.device | None = None) -> PreTrainedModel:
        """Return a model of the ladder on a GPU, with random weights and room for longer prompts."""
        workload = replace(self.workload("gpu"), prompt_tokens=(1, 4096))
        return drawn(workload, role, device or self.device)

    def seconds(self, work: Callable[[], object], times: int = 0) -> float:
        took = []
        for _ in range((times or self.sizes.times) + 1):
            synchronised(self.device)
            began = observe.now()
            work()
            synchronised(self.device)
            took.append(observe.now() - began)
        return median(took[1:])

    @contextmanager
    def peak(self, into: dict[str, float]) -> Iterator[None]:
        """Note the most bytes that were allocated on the GPU inside, as ``peak bytes``; the larger of several."""
        if not self.tries:
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        if not self.tries:
            into["peak bytes"] = max(into.get("peak bytes", 0.0), torch.cuda.max_memory_allocated(self.device))


def facts(day: Day) -> Found:
    side, device = day.sizes.product, day.device
    matrix = torch.ones(side, side, device=device, dtype=torch.float32 if day.tries else torch.bfloat16)
    product, copy = day.seconds(lambda: matrix @ matrix, 10), day.seconds(matrix.clone, 10)
    memory = 0 if day.tries else torch.cuda.mem_get_info(device)[1]
    return {
        **asdict(Machine.here(str(device))),
        **{name: version(name) for name in ("torch", "transformers", "accelerate")},
        "cuda": torch.version.cuda,
        "memory": memory,
        "flops": 2 * side**3 / product,
        "bandwidth": 2 * matrix.nbytes / copy,
    }


def tests(day: Day) -> Found:
    chosen = ["--collect-only"] if day.tries else []
    program = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/hf/test_gpu.py", *chosen]
    done = subprocess.run(program, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ModelError(f"pytest -m gpu ended with {done.returncode}: {done.stdout[-1500:]}")
    return {"last": done.stdout.strip().splitlines()[-1]}


def decode(day: Day) -> Found:
    model, sizes = day.model("actor"), day.sizes
    costs, served = (each.decoder(day.gpu, transformer(model), 1) for each in (REACHED, Reached()))
    found: dict[str, object] = {}
    for name, spread in (("equal", 0), ("ragged", sizes.prompt // 2)):
        contexts = np.random.default_rng(0).integers(sizes.prompt - spread, sizes.prompt + spread + 1, sizes.rows)
        short, long = (
            day.seconds(partial(decode_rows, model, contexts.tolist(), times * sizes.steps)) for times in (1, 3)
        )
        step = (long - short) / (2 * sizes.steps)  # without reading the prompts
        read = float(contexts.sum()) + sizes.rows * 2 * sizes.steps
        predicted = costs.seconds(sizes.rows, read)
        found |= {f"{name}, ms": 1e3 * step, f"{name}, ms, predicted": 1e3 * predicted}
        found[f"{name} / predicted for vLLM"] = step / served.seconds(sizes.rows, read)
    return found


def decode_rows(
    model: PreTrainedModel, contexts: Sequence[int], steps: int, deliver: Deliver = lambda step: None
) -> list[DecodeRow]:
    return decoded(decoder_of(model), contexts, steps, deliver)


@dataclass(frozen=True, slots=True)
class Scorer:
    """The reward model, with random weights, where it is hosted."""

    model: PreTrainedModel
    sizes: Sizes

    @classmethod
    def on(cls, device: torch.device) -> Scorer:
        day = Day(device)
        return cls(day.model("reward"), day.sizes)

    def read(self) -> None:
        worker, rows = RewardWorker(self.model, False), range(self.sizes.rows)
        tokens, none = np.ones(self.sizes.chunk, np.int32), np.zeros(self.sizes.chunk, np.float32)
        worker.extend(ScorerInput([Prompt(row, row, np.ones(1, np.int32)) for row in rows]))
        for start in range(0, self.sizes.scored, self.sizes.chunk):
            worker.extend(ScorerInput([Chunk(row, start, tokens, none, tokens) for row in rows]))
        worker.finish(dict.fromkeys(rows, self.sizes.scored))


def overlap(day: Day) -> Found:
    """Decode for as long as the reward model reads, one after the other and at once, in the places of a run.

    ``equal``: in streams of one priority; ``first``: the actor's comes before the scorer's, as in a run; ``process``:
    and the scorer has a process, which takes turns with this one on the GPU, unless both are clients of MPS.
    """
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")
    return {"under MPS": pipe.exists(), **anyio.run(_overlap, day)}


async def _overlap(day: Day) -> Found:
    model, sizes, setup = day.model("actor"), day.sizes, partial(use_cores, 1) if day.tries else None
    contexts, place = [sizes.prompt] * sizes.rows, partial(DeviceThread, device=day.device, setup=setup)
    places = place("actor"), place("actor", first=True), place("scorers"), Process("scorers", setup=setup)
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(each)) for each in places]
        equal, first = (each.host(partial(decoder_of, model)) for each in opened[:2])
        thread, process = (each.host(partial(Scorer.on, day.device)) for each in opened[2:])
        modes = {"alone": (first, thread), "equal": (equal, thread), "first": (first, thread)}
        modes["process"] = first, process

        async def taken(mode: str, steps: int) -> Sequence[float]:
            decoder, scorer = modes[mode]
            took = [0.0, 0.0]

            async def decode() -> None:
                began = observe.now()
                await decoder.call("decode", decoded, contexts, steps)
                took[0] = observe.now() - began

            async def score() -> None:
                began = observe.now()
                await scorer.call("score", Scorer.read)
                took[1] = observe.now() - began

            if mode == "alone":
                await decode()
                await score()
            else:
                async with anyio.create_task_group() as both:
                    both.start_soon(decode)
                    both.start_soon(score)
            return took

        for _ in range(2):  # graphs are captured in the first
            decoding, reading = await taken("alone", sizes.steps)
        steps = max(1, round(sizes.steps * reading / decoding))
        pairs = {mode: list[Sequence[float]]() for mode in modes}
        for number, mode in turns([*modes], sizes.times):
            pairs[mode] += [await taken(mode, steps)][:number]  # none of the warm-up
    found: dict[str, object] = {"decode steps": steps}
    alone = np.sum(pairs["alone"], axis=1)
    for mode, times in pairs.items():
        found |= dict(zip((f"{mode}, decode, s", f"{mode}, score, s"), np.median(times, axis=0).tolist(), strict=True))
        if mode != "alone":
            found[f"{mode}, times as fast"] = float(np.median(alone / np.max(times, axis=1)))
    return found


def decoder_of(model: PreTrainedModel) -> Decoder:
    return Decoder(model, sampling=SAMPLING, deterministic=False, prefill_tokens=8192)


def decoded(
    decoder: Decoder, contexts: Sequence[int], steps: int, deliver: Deliver = lambda step: None
) -> list[DecodeRow]:
    rows = [DecodeRow(at, Prompt(at, at, np.ones(length, np.int32)), steps) for at, length in enumerate(contexts)]
    decoder.run(rows, lambda ended: False, Signals.of(len(rows)), deliver)
    return rows


def launches(day: Day) -> Found:
    model, sizes = day.model("actor"), day.sizes
    contexts, steps = [sizes.prompt] * sizes.rows, max(4, sizes.steps // 8)
    short, long = (counted(day, partial(decode_rows, model, contexts, steps * times)) for times in (1, 2))
    found: dict[str, object] = {name: (long[name] - short[name]) / steps for name in COUNTED}
    launched = Counter({name: long[name] - short[name] for name in long if name not in COUNTED})
    return found | {f"{name[:60]}, us": us / steps for name, us in launched.most_common(8)}


COUNTED: Final = ("launched", "to the device", "to the host", "waits")


def counted(day: Day, work: Callable[[], object]) -> Counter[str]:
    """Return how often work does each of ``COUNTED``, and the microseconds of each kernel."""
    work()
    with torch.profiler.profile(acc_events=True) as profile:
        work()
        synchronised(day.device)
    found = Counter[str]()
    for event in profile.events() or ():
        found["launched"] += "LaunchKernel" in event.name
        found["to the device"] += event.name.startswith("Memcpy HtoD")
        found["to the host"] += event.name.startswith("Memcpy DtoH")
        found["waits"] += event.name.endswith("Synchronize")
        if event.device_type.name == "CUDA":
            found[event.name] += int(event.device_time_total)
    return found


def agree(day: Day) -> Found:
    model, sizes = day.model("actor"), day.sizes
    with torch.no_grad():
        model.get_output_embeddings().get_parameter("weight").mul_(6)  # logits as large as those of a trained model
    drawn: list[list[float]] = [[] for _ in range(sizes.rows)]

    def deliver(step: DecodeStep) -> None:
        for key, logprob in zip(step.keys, step.logprobs.tolist(), strict=True):
            drawn[key].append(logprob)

    rows = decode_rows(model, [sizes.prompt] * sizes.rows, sizes.steps, deliver)
    logprobs = np.array(drawn, np.float32)
    reference = ReferenceWorker(model, deterministic=False, sampling=SAMPLING)
    reference.extend(ScorerInput([row.prompt for row in rows]))
    responses = [np.array(row.tokens, np.int32) for row in rows]
    for start in range(0, sizes.steps, sizes.chunk):
        parts = [tokens[start : start + sizes.chunk] for tokens in responses]
        reference.extend(ScorerInput([Chunk(key, start, part, part * 0.0, part) for key, part in enumerate(parts)]))
    read = np.stack(reference.finish({row.key: sizes.steps for row in rows}))
    batch = longest_batch(sizes.rows, Load(sizes.rows, sizes.prompt, sizes.steps, sizes.chunk), critic=False)
    batch = replace(
        batch,
        responses=tuple(
            replace(response, prompt=row.prompt, tokens=tokens, logprobs=logprobs[row.key])
            for response, row, tokens in zip(batch.responses, rows, responses, strict=True)
        ),
        tokens=np.concatenate(responses),
        logprobs=logprobs.reshape(-1),
        proximal=logprobs.reshape(-1),
        reference=read.reshape(-1),
    )
    core = HfTrainerCore(ActorCritic(model), SAMPLING, TrainerSettings(epochs=1), ClippedLoss(), TrainerCounts.new())
    trained = core.update(batch).metrics
    gap = read - logprobs
    return {
        "reference, k3": float(np.mean(np.expm1(gap) - gap)),
        "reference, largest difference": float(np.abs(gap).max()),
        **{name: trained[name] for name in sorted(trained) if name.startswith(("policy/", "mismatch/", "val/ratio"))},
    }


def update(day: Day) -> Found:
    model, sizes = day.model("actor"), day.sizes
    load = Load(sizes.trained, sizes.read // 4, sizes.read - sizes.read // 4, sizes.chunk)
    settings = TrainerSettings(epochs=1, micro_batch_tokens=CPU_TOKENS if day.tries else GPU_TOKENS)
    core = HfTrainerCore(ActorCritic(model), SAMPLING, settings, loss := ClippedLoss(), TrainerCounts.new())
    batch = longest_batch(sizes.trained, load, critic=False)
    memory: dict[str, float] = {}
    with day.peak(memory):
        took = day.seconds(lambda: core.update(batch))
    flops = PASSES * sizes.trained * transformer(model).passes(1.0).reading(0, load.sequence)
    meta, passes = torch.device("meta"), REACHED.update(day.gpu, transformer(model), head=True)
    with planned_on(day.device):
        estimate = Trained(lambda: ActorCritic(day.model("actor", meta))).under(load, SAMPLING, settings, loss)
    return {
        **memory,
        "seconds": took,
        "seconds, predicted": sizes.trained * passes.reading(0, load.sequence),
        "tokens a second": sizes.trained * load.sequence / took,
        "mfu": flops / took / day.gpu.flops,
        "peak bytes, predicted": estimate.total,
    }
