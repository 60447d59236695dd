"""``eval.jsonl``: a line for each evaluation on held-out prompts, with its metrics and a few answers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from oppo.evaluation import Evaluated
from oppo.redact import redacted
from oppo.report.metrics import finite
from oppo.report.records import Record
from oppo.stopping import Detokenize

SCORE = "eval/score"


def evaluation_record(found: Evaluated, count: int, decode: Detokenize | None) -> Record:
    """Return the line of an evaluation, with the answers to the first ``count`` prompts, the same in every line."""
    answers = () if decode is None else found.answers[:count]
    metrics = {name: finite(value) for name, value in found.metrics.items()}
    return {
        "step": found.step,
        "version": found.version,
        **metrics,
        "samples": [
            {
                "score": float(each.score),
                "reason": each.finish.reason,
                "prompt": redacted(decode(each.finish.response.prompt.tokens.tolist())),
                "completion": redacted(decode(each.finish.response.tokens.tolist())),
            }
            for each in answers
            if decode is not None
        ],
    }


def by_version(records: Sequence[Record], name: str) -> list[float | None]:
    """Return a metric of the weights after 0, 1, 2, ... steps; ``None`` where there is none."""
    known = {cast("int", each["step"]) + 1: cast("float | None", each.get(name)) for each in records}
    return [known.get(made) for made in range(max(known, default=-1) + 1)]


def summary_of(records: Sequence[Record]) -> Mapping[str, float | int | None]:
    """Return what evaluations come to: the first, the last and the best score, and the steps made before the best."""
    scored = [
        (cast("int", each["step"]) + 1, float(score)) for each in records if isinstance(score := each.get(SCORE), float)
    ]
    if not scored:
        return {}
    steps, best = max(scored, key=lambda each: each[1])
    return {
        "eval_score_first": scored[0][1],
        "eval_score_last": scored[-1][1],
        "eval_score_best": best,
        "eval_steps_best": steps,
    }
