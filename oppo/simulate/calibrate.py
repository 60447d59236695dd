"""Calibration: the costs of a system, from the measured steps of one run.

Decode steps are fitted to the stretches of the steps' decode phases, which differ in how many rows are live, how long
they are and how many end; reading to the scorers' calls and tokens; the update to its tokens. The actor reads a prompt
as the reference does, which is the same model: a phase reads its prompts at once, which says little of what they cost.
Work slows down other work beside it. One run cannot tell that apart from the work's own cost: :class:`Contention`
states it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np

from oppo.admission import Observation, Scoring
from oppo.errors import DataError
from oppo.simulate.fitting import fitted
from oppo.simulate.system import Decoder, Passes, Reader, ScorerName, System, Updater

ROLES: Final[Mapping[str, ScorerName]] = MappingProxyType(
    {"ref_logp": "reference", "reward": "reward", "value": "critic"}
)
"""The scorer of each stage."""

WARM_UP: Final = 2
"""First steps that are left out of longer runs: nothing is warm in them."""

LEAST: Final = 4
"""The fewest steps to calibrate on."""

DEVICE: Final = "machine"
"""All work is on one virtual device, on which each kind slows the others down as is stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much longer a kind of work takes beside another, as a share; measured, not fitted.

    Attributes:
        decode: beside scoring.
        score: beside decoding.
        train: of decoding and of training beside each other.
        score_train: of scoring and of training beside each other.
    """

    decode: float
    score: float
    train: float
    score_train: float

    def __call__(self, kind: str, other: str) -> float:
        """Return the share for a kind of work beside another."""
        if "train" in {kind, other}:
            return self.train if "decode" in {kind, other} else self.score_train
        return self.decode if kind == "decode" else self.score


LAYOUTS: Final[Mapping[str, Contention]] = MappingProxyType(
    {
        "split": Contention(decode=0.08, score=0.0, train=0.05, score_train=0.05),
        "shared": Contention(decode=0.12, score=0.12, train=1.0, score_train=1.0),
    }
)
"""``split``: each side has cores, or a device, of its own. ``shared``: they share them.

Of two machines with two cores (``benchmarks/results``), without anything carried over: decoding beside scoring takes
1.02 to 1.16 times as long in ``split`` and 1.07 to 1.19 times in ``shared``, where each has one thread. Training on all
cores takes turns with what works there."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measurements of one step.

    Attributes:
        seen: its observation.
        trained: rollouts in its batch.
        tokens: of their responses.
        update, publish: seconds.
        reading, answering: seconds in which each scorer read and answered, by stage, without the wait for others in its
            place; a scorer that is not named took as long as its calls did.
    """

    seen: Observation
    trained: int
    tokens: int
    update: float
    publish: float
    reading: Mapping[str, float] = field(default_factory=dict)
    answering: Mapping[str, float] = field(default_factory=dict)


def calibrated(
    steps: Sequence[MeasuredStep], *, prompt: float, contention: Contention, recomputes: bool = True
) -> System:
    """Return the system whose costs are those of measured steps.

    Args:
        steps: in order.
        prompt: mean tokens of a prompt.
        contention: of the layout in which they were measured, and for which the system is.
        recomputes: whether keys and values of carried rollouts are computed again after an update.

    Raises:
        DataError: the steps are too few, or say nothing of their decode steps.
    """
    known = [step for step in steps if step.seen.stretches and step.trained]
    if len(known) < LEAST:
        raise DataError(
            f"{len(known)} of {len(steps)} steps say what their decode steps were; a calibration needs {LEAST}: run "
            "some more, with this version of oppo"
        )
    known = known[WARM_UP:] if len(known) >= LEAST + WARM_UP else known
    readers = _readers(known, contention)
    reading = readers["reference"].passes if "reference" in readers else None
    return System(
        decoder=_decoder(known, contention, reading, recomputes=recomputes),
        readers=readers,
        updater=_updater(known, prompt, contention),
        interference=contention,
    )


def _decoder(
    steps: Sequence[MeasuredStep], contention: Contention, reading: Passes | None, *, recomputes: bool
) -> Decoder:
    """Return the costs of decode steps; ``reading`` are those of prompts, which are fitted too when ``None``."""
    known = 0.0 if reading is None else reading.token
    work, seconds = [], []
    for step in steps:
        share = _beside(step)[0] / step.seen.decode_seconds if step.seen.decode_seconds > 0 else 0.0
        for each in step.seen.stretches:
            read = each.opened + (each.resumed if recomputes else 0)
            ended = each.ended or len(step.seen.finished) / len(step.seen.stretches)  # older journals do not say
            unknown = read if reading is None else 0
            work.append((float(each.steps), float(each.tokens), float(each.context), float(ended), float(unknown)))
            seconds.append(each.seconds / (1 + contention.decode * share) - known * read)
    per_step, row, context, ending, token = fitted(work, seconds)
    return Decoder(
        step=per_step,
        row=row,
        context=context,
        ending=ending,
        prefill=Passes(token=known or token),
        recomputes=recomputes,
        device=DEVICE,
    )


def _beside(step: MeasuredStep) -> tuple[float, float]:
    """Return the seconds of decoding, and those of the update, beside which some scorer worked."""
    busy = [(_shares(each), _reading(step, each) + _answering(step, each)) for each in step.seen.scoring]
    decoding, training = (sum(shares[k] * seconds for shares, seconds in busy) for k in range(2))
    return min(decoding, step.seen.decode_seconds), min(training, step.update)


def _shares(times: Scoring) -> tuple[float, float]:
    """Return the shares of a scorer's work that it did beside decoding, and beside the update."""
    work = times.busy + times.spare
    return (times.before / work, times.spare / work) if work > 0 else (0.0, 0.0)


def _alone(times: Scoring, contention: Contention) -> float:
    """Return the share of a scorer's seconds that its work would have taken with nothing beside it."""
    decoding, training = _shares(times)
    return decoding / (1 + contention.score) + training / (1 + contention.score_train) + 1 - decoding - training


def _reading(step: MeasuredStep, times: Scoring) -> float:
    return step.reading.get(times.stage, times.busy + times.spare - times.answering)


def _answering(step: MeasuredStep, times: Scoring) -> float:
    return step.answering.get(times.stage, times.answering)


def _readers(steps: Sequence[MeasuredStep], contention: Contention) -> dict[ScorerName, Reader]:
    found: dict[ScorerName, Reader] = {}
    for stage, role in ROLES.items():
        times = [(step, each) for step in steps for each in step.seen.scoring if each.stage == stage]
        if not times:
            continue
        alone = [_alone(each, contention) for _, each in times]
        work = [(float(each.calls), float(each.tokens)) for _, each in times]
        reading = [share * _reading(*each) for share, each in zip(alone, times, strict=True)]
        call, token = fitted(work, reading)
        answering = [share * _answering(*each) for share, each in zip(alone, times, strict=True)]
        answered = sum(each.answered for _, each in times)
        found[role] = Reader(
            passes=Passes(token=token), call=call, answer=sum(answering) / max(1, answered), device=DEVICE
        )
    return found


def _updater(steps: Sequence[MeasuredStep], prompt: float, contention: Contention) -> Updater:
    lost = contention.score_train / (1 + contention.score_train)
    seconds = [step.update - lost * _beside(step)[1] for step in steps]
    fixed, token = fitted([(1.0, step.tokens + prompt * step.trained) for step in steps], seconds)
    alone = [step for step in steps if not step.seen.lookahead]
    others = [max(0.0, step.seen.rest_seconds - step.update - step.publish) for step in alone]
    return Updater(
        passes=Passes(token=token),
        fixed=fixed + (float(np.median(others)) if others else 0.0),
        publish=float(np.median([step.publish for step in steps])),
        device=DEVICE,
    )
