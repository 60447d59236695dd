"""A few rollouts of each step as text, without secrets."""

from __future__ import annotations

from collections.abc import Iterator

from oppo.events import Batch
from oppo.redact import redacted
from oppo.report.records import Record
from oppo.stopping import Detokenize


def samples(step: int, batch: Batch, count: int, decode: Detokenize) -> Iterator[Record]:
    """Yield up to ``count`` rollouts of a batch, spread evenly from the worst score to the best."""
    order = sorted(range(len(batch)), key=lambda row: (float(batch.scores[row]), row))
    last, rows = len(order) - 1, batch.rows()
    spread = [k * last // (count - 1) for k in range(count)] if count > 1 else [last]
    for row in order if count >= len(order) else [order[place] for place in spread]:
        response, span = batch.responses[row], rows[row]
        kl = None if batch.reference is None else (batch.logprobs[span] - batch.reference[span])[response.sampled]
        yield {
            "step": step,
            "rollout": response.prompt.rollout,
            "score": float(batch.scores[row]),
            "kl": None if kl is None else float(kl.sum()),
            "tokens": len(response),
            "reason": batch.reasons[row],
            "prompt": redacted(decode(response.prompt.tokens.tolist())),
            "completion": redacted(decode(response.tokens.tolist())),
        }
