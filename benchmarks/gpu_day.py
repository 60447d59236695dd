"""``python -m benchmarks.gpu_day``: what a borrowed GPU is for, in one command (``make gpu-day``).

Parts run in order while there are minutes left, and the results so far are written after each::

    facts     versions, memory, FLOP/s of a matrix product, bytes/s of a copy
    tests     ``pytest -m gpu``
    decode    a decode step of 64 rows: with contexts of one length, and ragged ones
    launches  what a decode step launches, copies and waits for, and its longest kernels
    agree     log-probs of the same tokens in 16 bits: of the decoder, a reference and the trainer
    score     a reward model of 7B reads 64 rows of 1024 tokens, in chunks of 128
    overlap   decoding and scoring, one after the other and at once
    update    an epoch on 32 rows of 1024 tokens, and its memory beside the estimate
    ladder    PPO steps, serial and streamed

Models have the shapes of Qwen2.5 and random weights; nothing is fetched. Beside each time stands the prediction of the
roofline of ``oppo simulate``, from the data sheet of a GPU that it knows, else from what was measured here.
``--device cpu`` has tiny models, to try the command.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from benchmarks.harness import Machine, aligned, command
from benchmarks.ladder.workloads import ACTORS_ON_A_GPU, REWARD_ON_A_GPU, Shape
from oppo import observe
from oppo.errors import ConfigError
from oppo.events import Chunk, Prompt
from oppo.hf.devices import synchronised, use_stream
from oppo.hf.memory import Load, longest_batch, of_trainer, planned_on
from oppo.hf.model_parts import transformer
from oppo.hf.serve.decoder import Decoder, DecodeRow, Deliver, Signals
from oppo.hf.serve.scorers import ReferenceWorker, RewardWorker, ScorerInput
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.packing import CPU_TOKENS, GPU_TOKENS
from oppo.hf.train.trainer import HfTrainerCore
from oppo.losses import ClippedLoss
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.rollout_buffer import DecodeStep
from oppo.simulate.costs import Gpu, Reached, gpu_named
from oppo.training import TrainerSettings

TINY: Final = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2)
REACHED: Final = Reached(name="transformers")
SAMPLING: Final = Sampling(max_new_tokens=4096, seed=1)


PASSES: Final = 3  # forward passes' worth of an update that keeps its activations: forward, and twice as much backward


@dataclass(frozen=True, slots=True)
class Sizes:
    # rows, prompt: of a decode step, and tokens of its prompts
    rows: int = 64
    prompt: int = 512
    steps: int = 64  # decode steps that are timed
    read: int = 1024  # tokens of a row that is scored or trained
    chunk: int = 128  # tokens that a scorer reads at a time
    trained: int = 32  # rows of an update
    product: int = 8192  # side of the matrices whose product is timed


ON_A_CPU: Final = Sizes(rows=8, prompt=16, steps=12, read=64, chunk=16, trained=4, product=512)


@dataclass
class Day:
    """A device, the models on it, and what was found."""

    device: torch.device
    actor: Shape
    reward: Shape
    sizes: Sizes
    minutes: float
    began: float = field(default_factory=observe.now)
    found: dict[str, Mapping[str, object]] = field(default_factory=dict)  # results by part

    @property
    def left(self) -> float:
        return 60 * self.minutes - (observe.now() - self.began)

    @property
    def gpu(self) -> Gpu:
        known = gpu_named(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        if known is not None:
            return known
        facts = self.found["facts"]
        flops, bandwidth = (float(str(facts[name])) for name in ("flops", "bandwidth"))
        return Gpu(flops=flops, bandwidth=bandwidth, memory=float(str(facts["memory"])) or 1.0)

    def model(
        self, shape: Shape, kind: type[PreTrainedModel] = Qwen2ForCausalLM, device: torch.device | None = None
    ) -> PreTrainedModel:
        config = Qwen2Config(
            vocab_size=512 if self.device.type == "cpu" else 151_936,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads or shape.heads,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
        config.num_labels = 1
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        with device or self.device:
            model: PreTrainedModel = kind._from_config(config, dtype=dtype)  # noqa: SLF001 - not probed: random weights
        model.train(mode=False)
        return model

    def seconds(self, work: Callable[[], object], times: int = 3) -> float:
        took = []
        for _ in range(times + 1):
            synchronised(self.device)
            began = observe.now()
            work()
            synchronised(self.device)
            took.append(observe.now() - began)
        return median(took[1:])


def facts(day: Day) -> Mapping[str, object]:
    side, device = day.sizes.product, day.device
    matrix = torch.ones(side, side, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    product, copy = day.seconds(lambda: matrix @ matrix, 10), day.seconds(matrix.clone, 10)
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    return {
        **{name: version(name) for name in ("torch", "transformers", "accelerate")},
        "cuda": torch.version.cuda,
        "memory": memory,
        "flops": 2 * side**3 / product,
        "bandwidth": 2 * matrix.nbytes / copy,
    }


def tests(day: Day) -> Mapping[str, object]:
    chosen = ["--collect-only"] if day.device.type == "cpu" else []
    done = run_module(day, "pytest", "-q", "-m", "gpu", "--ignore", "tests/placement/ray", *chosen)
    return {"exit": done.returncode, "last": done.stdout.splitlines()[-3:]}


def decode(day: Day) -> Mapping[str, object]:
    model, sizes = day.model(day.actor), day.sizes
    costs = REACHED.decoder(day.gpu, transformer(model), 1)
    found: dict[str, object] = {}
    for name, spread in (("equal", 0), ("ragged", sizes.prompt // 2)):
        contexts = np.random.default_rng(0).integers(sizes.prompt - spread, sizes.prompt + spread + 1, sizes.rows)
        short, long = (
            day.seconds(partial(decode_rows, model, contexts.tolist(), times * sizes.steps)) for times in (1, 3)
        )
        step = (long - short) / (2 * sizes.steps)  # without reading the prompts
        read = float(contexts.sum()) + sizes.rows * 2 * sizes.steps
        found |= {f"{name}, ms": 1e3 * step, f"{name}, predicted": 1e3 * costs.seconds(sizes.rows, read)}
    return found


def decode_rows(
    model: PreTrainedModel, contexts: Sequence[int], steps: int, deliver: Deliver = lambda step: None
) -> list[DecodeRow]:
    decoder = Decoder(model, sampling=SAMPLING, deterministic=False, prefill_tokens=8192)
    rows = [DecodeRow(at, Prompt(at, at, np.ones(length, np.int32)), steps) for at, length in enumerate(contexts)]
    decoder.run(rows, lambda ended: False, Signals.of(len(rows)), deliver)
    return rows


def launches(day: Day) -> Mapping[str, object]:
    model, sizes = day.model(day.actor), day.sizes
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


def agree(day: Day) -> Mapping[str, object]:
    model, sizes = day.model(day.actor), day.sizes
    with torch.no_grad():
        model.get_input_embeddings().get_parameter("weight").mul_(6)  # logits as large as those of a trained model
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


def score(day: Day) -> Mapping[str, object]:
    model, sizes = day.model(day.reward, Qwen2ForSequenceClassification), day.sizes
    passes = REACHED.reader(day.gpu, transformer(model), REACHED.scoring, head=False)
    took = day.seconds(partial(score_rows, model, sizes))
    predicted = sizes.rows * passes.reading(0, sizes.read)
    flops = sizes.rows * transformer(model).passes(1.0).reading(0, sizes.read)
    return {"seconds": took, "predicted": predicted, "mfu": flops / took / day.gpu.flops}


def score_rows(model: PreTrainedModel, sizes: Sizes) -> None:
    worker, rows = RewardWorker(model, False), range(sizes.rows)
    worker.extend(ScorerInput([Prompt(row, row, np.ones(1, np.int32)) for row in rows]))
    for start in range(0, sizes.read - 1, sizes.chunk):
        tokens = np.ones(min(sizes.chunk, sizes.read - 1 - start), np.int32)
        none = np.zeros(len(tokens), np.float32)
        worker.extend(ScorerInput([Chunk(row, start, tokens, none, tokens) for row in rows]))
    worker.finish(dict.fromkeys(rows, sizes.read - 1))


def overlap(day: Day) -> Mapping[str, object]:
    """Decode as long as a scorer needs alone, then both at once, in threads with a stream each."""
    actor, judge, sizes = day.model(day.actor), day.model(day.reward, Qwen2ForSequenceClassification), day.sizes
    contexts = [sizes.prompt] * sizes.rows
    scoring = partial(score_rows, judge, sizes)
    alone = day.seconds(scoring)
    step = day.seconds(partial(decode_rows, actor, contexts, sizes.steps)) / sizes.steps
    decoding = partial(decode_rows, actor, contexts, max(1, round(alone / step)))
    decoded = day.seconds(decoding)

    def both() -> None:
        threads = [threading.Thread(target=in_a_stream, args=(day.device, work)) for work in (decoding, scoring)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together = day.seconds(both)
    return {"score": alone, "decode": decoded, "together": together, "times as fast": (alone + decoded) / together}


def in_a_stream(device: torch.device, work: Callable[[], None]) -> None:
    use_stream(device)
    work()


def update(day: Day) -> Mapping[str, object]:
    model, sizes = day.model(day.actor), day.sizes
    load = Load(sizes.trained, sizes.read // 4, sizes.read - sizes.read // 4, sizes.chunk)
    settings = TrainerSettings(epochs=1, micro_batch_tokens=CPU_TOKENS if day.device.type == "cpu" else GPU_TOKENS)
    loss = ClippedLoss()
    core = HfTrainerCore(ActorCritic(model), SAMPLING, settings, loss, TrainerCounts.new())
    batch = longest_batch(sizes.trained, load, critic=False)
    if day.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(day.device)
    took = day.seconds(lambda: core.update(batch))
    flops = PASSES * sizes.trained * transformer(model).passes(1.0).reading(0, load.sequence)
    meta = torch.device("meta")
    with planned_on(day.device):
        estimate = of_trainer(lambda: ActorCritic(day.model(day.actor, device=meta)), load, SAMPLING, settings, loss)
    peak = torch.cuda.max_memory_allocated(day.device) if day.device.type == "cuda" else 0
    return {
        "seconds": took,
        "predicted": sizes.trained * REACHED.update(day.gpu, transformer(model), head=True).reading(0, load.sequence),
        "tokens a second": sizes.trained * load.sequence / took,
        "mfu": flops / took / day.gpu.flops,
        "peak bytes": peak,
        "predicted bytes": estimate.total,
    }


def ladder(day: Day) -> Mapping[str, object]:
    chosen = ["--modes", "serial,chunk,fixed", "--rounds", "2", "--warm-up", "2", "--steps", "2"]
    if day.device.type == "cpu":
        chosen = ["--workload", "smoke", "--modes", "serial,chunk", "--rounds", "1", "--warm-up", "1", "--steps", "1"]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "ladder.json"
        done = run_module(
            day, "benchmarks", "--layout", "shared", "--device", str(day.device), "--json", str(file), *chosen
        )
        found: Mapping[str, object] = json.loads(file.read_text()) if file.exists() else {"failed": done.stderr[-2000:]}
    return found


def run_module(day: Day, *arguments: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", *arguments]
    return subprocess.run(command_line, check=False, capture_output=True, text=True, timeout=max(60, day.left))


PARTS: Final[Mapping[str, Callable[[Day], Mapping[str, object]]]] = {
    part.__name__: part for part in (facts, tests, decode, launches, agree, score, overlap, update, ladder)
}


def gpu_day(
    *,
    device: str = "cuda:0",
    actor: str = "0.5b",
    minutes: float = 25,
    parts: str = ",".join(PARTS),
    out: Path = Path("gpu-day.json"),
) -> int:
    """Measure what a GPU is for.

    Args:
        device: of the models; cpu: tiny ones, to try the command.
        actor: its size, 0.5b or 1.5b.
        minutes: no part begins after so many.
        parts: which ones, with commas between them.
        out: the results so far, as JSON, after each part.
    """
    chosen = ["facts", *(name for name in parts.split(",") if name != "facts")]
    if unknown := [name for name in chosen if name not in PARTS]:
        raise ConfigError(f"--parts: expected some of {', '.join(PARTS)}, got {unknown[0]!r}")
    if actor not in ACTORS_ON_A_GPU:
        raise ConfigError(f"--actor: expected one of {', '.join(ACTORS_ON_A_GPU)}, got {actor!r}")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device: there is no {device!r} here; cpu tries the command with tiny models")
    shapes = (TINY, TINY) if place.type == "cpu" else (ACTORS_ON_A_GPU[actor], REWARD_ON_A_GPU)
    day = Day(place, *shapes, ON_A_CPU if place.type == "cpu" else Sizes(), minutes)
    machine = asdict(Machine.here(device))
    for name in chosen:
        try:
            day.found[name] = PARTS[name](day) if day.left > 0 else {"left out": f"{minutes} minutes were over"}
        except Exception as error:  # of any kind: the other parts may work, and minutes on a GPU are few
            day.found[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            if name == "facts":
                raise
        finally:
            gc.collect()  # models of the part lie in cycles
            out.write_text(json.dumps({"machine": machine, "parts": day.found}, indent=1) + "\n", encoding="utf-8")
            if place.type == "cuda":
                torch.cuda.empty_cache()
        print(f"{60 * minutes - day.left:.0f} s  {name}\n{show(day.found[name])}", flush=True)
    return int(any("failed" in found for found in day.found.values()))


def show(found: Mapping[str, object]) -> str:
    rows = [[name, f"{value:,.4g}" if isinstance(value, float) else str(value)[:100]] for name, value in found.items()]
    return aligned([["figure", "value"], *rows])


if __name__ == "__main__":
    sys.exit(command(gpu_day))
