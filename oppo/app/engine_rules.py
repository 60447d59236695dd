"""What ``models.engine`` means for the other settings: a default that follows it, and what its engine cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from oppo.algorithms.registry import ALGORITHMS
from oppo.declared import declared

if TYPE_CHECKING:
    from oppo.app.settings import Settings

CORRECTION = "truncated"
"""``algorithm.is_correction`` where vLLM decodes and the file names none.

vLLM and the trainer compute the same log-probs with other kernels. Importance weights correct for the difference, and
for stale tokens with it.
"""


def with_correction(document: Mapping[str, object]) -> dict[str, object]:
    """Return the document with :data:`CORRECTION` if vLLM decodes and the algorithm has one but names none."""
    filled = dict(document)
    models, step, algorithm = (filled.get(name, {}) for name in ("models", "step", "algorithm"))
    if not isinstance(models, Mapping) or models.get("engine") != "vllm" or not isinstance(algorithm, Mapping):
        return filled
    name = step.get("algorithm", "ppo") if isinstance(step, Mapping) else "ppo"
    kind = ALGORITHMS.get(name) if isinstance(name, str) else None
    if kind is not None and "is_correction" in declared(kind):
        filled["algorithm"] = {"is_correction": CORRECTION, **algorithm}
    return filled


def require_possible(settings: Settings) -> None:
    """Check that the engine can do what the other settings ask for.

    Raises:
        ValueError: it cannot.
    """
    engine, sampling = settings.models.engine, settings.sampling
    if engine != "vllm":
        if settings.vllm:
            raise ValueError(
                f"[vllm] holds {', '.join(settings.vllm)}, which only vLLM reads, and models.engine = {engine!r}: set "
                "models.engine = 'vllm', or leave [vllm] out"
            )
        return
    if settings.run.exact:
        raise ValueError(
            "run.exact makes every bit independent of timing, and vLLM chooses its batches by time: leave it out, or "
            "set models.engine = 'transformers'"
        )
    if settings.run.policy == "process":
        raise ValueError(
            "run.policy = 'process' places an actor of transformers, and vLLM has processes of its own: leave it out, "
            "or set models.engine = 'transformers'"
        )
    if sampling.top_p < 1:
        raise ValueError(
            f"sampling.top_p = {sampling.top_p} draws from the most likely tokens, and vLLM does not say which those "
            "were, though log-probs are among them: bound them by sampling.top_k, or set models.engine = 'transformers'"
        )
