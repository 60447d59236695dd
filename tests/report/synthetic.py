"""Events of a two-step run in which rollout 2 is deferred from the first step into the second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from oppo.events import Batch, Chunk, Defer, Drop, Finish, Prompt, Response, StepReport
from oppo.observe import Observer, Span

WORDS = ("zero", "one", "<b>two</b>", "three", "four\x1b[31m", "five")


def decode(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def prompt(rollout: int) -> Prompt:
    return Prompt(rollout, rollout, np.array([0, 2], np.int32))


def chunk(rollout: int, start: int, *tokens: int) -> Chunk:
    n = len(tokens)
    return Chunk(rollout, start, np.array(tokens, np.int32), np.full(n, -1, np.float32), np.zeros(n, np.int32))


def finish(rollout: int, *tokens: int) -> Finish:
    return Finish(rollout, Response.empty(prompt(rollout)).then(chunk(rollout, 0, *tokens)), "eos")


def batch(finished: Sequence[Finish], scores: Sequence[float]) -> Batch:
    responses = tuple(each.response for each in finished)
    offsets = np.cumsum([0, *(len(response) for response in responses)])
    total = int(offsets[-1])
    floats = np.zeros(total, np.float32)
    tokens = np.concatenate([response.tokens for response in responses])
    return Batch(
        responses=responses, reasons=tuple(each.reason for each in finished), scores=np.array(scores, np.float32),
        offsets=offsets.astype(np.int64), tokens=tokens, versions=np.zeros(total, np.int32),
        sampled=np.ones(total, np.bool_), logprobs=np.full(total, -1, np.float32),
        proximal=np.full(total, -1, np.float32), reference=np.full(total, -1.5, np.float32), values=floats,
        rewards=floats, advantages=floats, returns=floats,
    )  # fmt: skip


def report(index: int, trained: tuple[int, ...], score: float, deferred: tuple[Defer, ...] = ()) -> StepReport:
    metrics = {"objective/kl": 0.25 * index, "response_length/mean": 2.0, "response_length/tokens": 4.0}
    metrics |= {"response_length/max": 3.0, "timing_s/rollouts": 1.5}
    metrics |= {"timing_s/update": 0.5, "timing_s/weight_sync": 0.0}
    dropped = (Drop(1, "nonfinite"),) if index == 1 else ()
    return StepReport(index, index + 1, trained, dropped, deferred, score, 2.0, metrics)


CHANNELS = {"generate->reward": {"sent": 9, "peak": 3, "merged": 1, "capacity": 16}}


def play(observer: Observer) -> None:
    play_first(observer)
    play_second(observer)


def play_first(observer: Observer) -> None:
    first = finish(0, 1, 3)
    for at, item in enumerate((prompt(0), prompt(2), chunk(0, 0, 1, 3), chunk(2, 0, 1), first, Defer(2, 1))):
        observer.on_item(0, "generate", item, at / 4)
    observer.on_item(0, "advantage", batch([first], [0.5]), 1.5)
    observer.on_span(Span("generate", "run", 0.0, 1.4, 0, kind="execution"))
    observer.on_step(0, report(0, (0,), 0.5, (Defer(2, 1),)), CHANNELS)


def play_second(observer: Observer) -> None:
    second = [finish(1, 5), finish(2, 1, 4, 5)]
    for at, item in enumerate((prompt(1), chunk(1, 0, 5), chunk(2, 1, 4, 5), *second)):
        observer.on_item(1, "generate", item, 2 + at / 4)
    observer.on_item(1, "advantage", batch(second, [-1.0, 2.0]), 3.5)
    observer.on_span(Span("generate", "run", 2.0, 3.4, 1, kind="execution"))
    observer.on_step(1, report(1, (2,), float("nan")), CHANNELS)


def all_nested(slices: Sequence[Mapping[str, float]]) -> bool:
    """Return whether a viewer can show the slices of a trace: on each track they are disjoint, or one in another."""
    for one, other in combinations(slices, 2):
        first, second = sorted((one, other), key=lambda each: (each["ts"], -each["dur"]))
        end, later = first["ts"] + first["dur"], second["ts"] + second["dur"]
        rounding = 0.001
        if one["tid"] == other["tid"] and second["ts"] < end - rounding and later > end + rounding:
            return False
    return True
