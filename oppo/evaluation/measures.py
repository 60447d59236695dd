"""Statistics of held-out scores: means with their confidence, pass@k, paired differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from oppo.evaluation.examine import Answers
from oppo.events import FloatArray

PREFIX: Final = "eval/"
"""Of what a reward or an environment measures of held-out responses, before its name in training."""

Z: Final = 1.96
"""Standard deviations on either side of the mean that hold 95 % of a normal distribution."""


def half_width(means: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of a mean over prompts; NaN for fewer than two.

    The standard error is that of the prompts' own means, since the responses to one prompt are no independent draws
    (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2); the interval is that of a normal
    distribution.

    Example:
        >>> round(half_width([0.0, 1.0, 1.0, 0.0]), 3)
        0.566
    """
    count = len(means)
    return Z * float(np.std(np.asarray(means, np.float64), ddof=1)) / math.sqrt(count) if count > 1 else math.nan


def pass_at_k(count: int, passed: int, k: int) -> float:
    """Return the probability that at least one of ``k`` responses to a prompt passes, estimated without bias.

    It is 1 - C(n - c, k) / C(n, k) for ``c`` of ``n`` responses that passed: the share of all choices of ``k`` among
    these that hold one (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374,
    equation 1).

    Raises:
        ValueError: ``k`` is not in 1 .. ``count``, or ``passed`` not in 0 .. ``count``.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not (1 <= k <= count and 0 <= passed <= count):
        raise ValueError(f"expected 1 <= k <= count and 0 <= passed <= count, got {k=}, {count=}, {passed=}")
    return 1 - math.comb(count - passed, k) / math.comb(count, k)


def of_greedy(answers: Answers, pass_score: float | None) -> Mapping[str, float]:
    """Return the metrics of the most likely responses, one to each prompt.

    Args:
        pass_score: a response of at least this score passes; ``None``: none does.
    """
    rollouts = answers.rollouts
    scores = [each.score for each in rollouts]
    metrics = {"eval/dropped": float(len(answers.dropped)), **_mean("eval/score", "eval/score_ci95", scores)}
    if rollouts:
        metrics["eval/response_length"] = float(np.mean([len(each.finish.response) for each in rollouts]))
        metrics["eval/capped"] = float(np.mean([each.finish.reason == "length" for each in rollouts]))
        if pass_score is not None:
            metrics["eval/passed"] = float(np.mean([score >= pass_score for score in scores]))
    measured = {name: values for name, values in answers.measured.items() if len(values)}
    return metrics | {PREFIX + name: float(np.mean(values)) for name, values in measured.items()}


def of_sampled(answers: Answers, samples: int, pass_score: float | None) -> Mapping[str, float]:
    """Return the metrics of several responses to each prompt, drawn as in training.

    A prompt counts as much as any other, however many of its responses were dropped; towards pass@k it counts if it has
    ``k`` left.

    Args:
        samples: responses that were asked for to each prompt.
        pass_score: a response of at least this score passes; ``None``: none does.
    """
    groups = answers.by_prompt()
    metrics = _mean("eval/sampled_score", "eval/sampled_score_ci95", [float(np.mean(each)) for each in groups])
    if pass_score is None:
        return metrics
    for k in _sizes(samples):
        known = [
            pass_at_k(len(scores), int(np.sum(np.asarray(scores) >= pass_score)), k)
            for scores in groups
            if len(scores) >= k
        ]
        if known:
            metrics[f"eval/pass_at_{k}"] = float(np.mean(known))
    return metrics


def _mean(name: str, interval: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    width = half_width(values)
    found = {name: float(np.mean(np.asarray(values, np.float64)))}
    return found if math.isnan(width) else found | {interval: width}


def _sizes(samples: int) -> Iterator[int]:
    k = 1
    while k < samples:
        yield k
        k *= 2
    yield samples


@dataclass(frozen=True, slots=True)
class Comparison:
    """Scores of the same prompts before and after.

    Attributes:
        before, after: mean scores.
        spread: standard deviation of the scores before.
        gain: mean of the paired differences, after minus before.
        half_width: of the 95 % confidence interval of the gain (normal approximation).
    """

    before: float
    after: float
    spread: float
    gain: float
    half_width: float


def compare(before: FloatArray, after: FloatArray) -> Comparison:
    """Return the change of scores that are paired by prompt.

    Args:
        before, after: float32 [N], N >= 2.

    Raises:
        ValueError: the arrays differ in length or hold fewer than two scores.
    """
    if before.shape != after.shape or before.ndim != 1 or len(before) < 2:
        raise ValueError(f"expected two score arrays of one length >= 2, got shapes {before.shape} and {after.shape}")
    difference: NDArray[np.float64] = after.astype(np.float64) - before
    return Comparison(
        before=float(before.mean(dtype=np.float64)),
        after=float(after.mean(dtype=np.float64)),
        spread=float(before.std(ddof=1, dtype=np.float64)),
        gain=float(difference.mean()),
        half_width=half_width(difference.tolist()),
    )
