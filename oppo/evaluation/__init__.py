"""Evaluation: how a policy answers held-out prompts, while it is trained or at any time, and what its answers score.

::

    generate ──> reward ──> collect        a graph of its own, on the policy and the scorer that are there
        └──────> ref_logp ────┘            optional

Prompts are answered in batches, each to its end. In an evaluation, numbers of prompts and noise are apart from those of
training, so that a run with evaluations trains what it trains without.
"""

from oppo.evaluation.evaluate import (
    Answering,
    Answers,
    Comparison,
    Evaluate,
    Evaluated,
    Evaluation,
    compare,
    examine,
    half_width,
    pass_at_k,
    respond,
    respond_serially,
    score_serially,
)

__all__ = [
    "Answering",
    "Answers",
    "Comparison",
    "Evaluate",
    "Evaluated",
    "Evaluation",
    "compare",
    "examine",
    "half_width",
    "pass_at_k",
    "respond",
    "respond_serially",
    "score_serially",
]
