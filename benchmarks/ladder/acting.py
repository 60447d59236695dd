"""What decodes for a contestant: the policy on transformers, or on vLLM. Nothing else of the ladder asks which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

from transformers import PreTrainedModel

from benchmarks.ladder.directory import Files
from benchmarks.ladder.layout import Seat, claim_cores
from oppo.events import Prompt
from oppo.hf.device import DeviceThread
from oppo.hf.serve.policy import HfPolicy
from oppo.models import Policy, Sampling
from oppo.observe import SpanListener
from oppo.placement import Thread


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


Act: TypeAlias = Callable[[Part], Acting]


def on_transformers(part: Part) -> Acting:
    """Decode with the model that is trained, in a thread."""
    kind = Thread if part.device == "cpu" else DeviceThread
    thread = kind("actor", listener=part.listener, setup=partial(claim_cores, part.seat, part.device))
    policy = HfPolicy(part.actor, sampling=part.sampling, thread=thread, limit=part.limit)
    counters = policy.counters
    return Acting(policy, lambda: Progress(counters.decode_steps, counters.tokens), thread.close)


ENGINES: Final[Mapping[str, Act]] = MappingProxyType({"transformers": on_transformers})
"""By name."""
