"""What decodes for a contestant: the policy on transformers, or on vLLM. Nothing else of the ladder asks which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from transformers import PreTrainedModel

from benchmarks.ladder.directory import Files
from benchmarks.ladder.layout import Seat
from oppo.demo.assets import made_once
from oppo.events import Prompt
from oppo.hf.devices import DeviceThread
from oppo.hf.memory import at_rest
from oppo.hf.serve.policy import HfPolicy
from oppo.models import Policy, Sampling
from oppo.observe import SpanListener


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of an engine since its start.

    Attributes:
        decode_steps: 0 if it does not count them.
        tokens: decoded.
    """

    decode_steps: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Acting:
    """A policy at work.

    Attributes:
        progress: returns its counts.
        close: ends its engine; idempotent.
    """

    policy: Policy
    progress: Callable[[], Progress]
    close: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What an engine is started for.

    Attributes:
        actor: the model that is trained.
        limit: the length of a response; ``None``: it ends by itself.
        listener: receives the spans of decoding, of track ``actor`` and label ``decode``.
    """

    files: Files
    actor: PreTrainedModel
    sampling: Sampling
    limit: Callable[[Prompt], int] | None
    seat: Seat
    device: str
    listener: SpanListener


ERRORS: Final = Path("/dev/stderr")
"""A contestant's standard error, which the ruler keeps in a file."""

Act: TypeAlias = Callable[[Part], Acting]


def on_transformers(part: Part) -> Acting:
    """Decode with the model that is trained, in a thread."""
    thread = DeviceThread("actor", part.device, listener=part.listener, setup=part.seat.take)
    policy = HfPolicy(part.actor, sampling=part.sampling, thread=thread, limit=part.limit)
    counters = policy.counters
    return Acting(policy, lambda: Progress(counters.decode_steps, counters.tokens), thread.close)


def on_vllm(part: Part) -> Acting:
    """Decode with a copy of the weights in processes of an engine's own, on as many cores as the seat has threads."""
    from oppo.vllm import VllmEngine, VllmPolicy  # noqa: PLC0415 - an extra

    workload = part.files.workload
    engine = VllmEngine.start(
        _directory(part),
        arguments={
            "dtype": workload.models.dtype,
            "max_model_len": workload.positions,
            "max_num_seqs": 2 * workload.batch,  # as many may be carried as a batch holds
            **_share(part),
        },
        cores=part.seat.threads,
        log=ERRORS,
    )
    policy = VllmPolicy(engine, sampling=part.sampling, limit=part.limit)
    policy.reporter.listener = lambda span: part.listener(replace(span, track="actor"))
    return Acting(policy, lambda: Progress(0, policy.progress), engine.close)


def _share(part: Part) -> dict[str, object]:
    """Return vLLM's share of a GPU: half of what is left when actor and critic have what training keeps."""
    if part.device == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info(part.device)
    kept = at_rest(lambda: part.actor)
    left = free - 2 * (kept.optimizer + kept.gradients)
    return {"gpu_memory_utilization": max(0.05, round(left / 2 / total, 2))}


def _directory(part: Part) -> Path:
    """Return the directory of the actor; one of random weights, whose lengths are scripted, is saved first."""
    files = part.files
    if not files.workload.models.scripted:
        return files.model("actor")
    saved = files.directory.with_name(f"{files.directory.name}-actor")
    return made_once(saved, part.actor.save_pretrained)


ENGINES: Final[Mapping[str, Act]] = MappingProxyType({"transformers": on_transformers, "vllm": on_vllm})
"""By name."""
