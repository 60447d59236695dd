"""``python -m benchmarks.kv_on_sync config.toml [STEPS] [section.key=value ...]``: both ways, step by step in turn.

Two runs of the same settings, models and prompts live in one process and take turns, a step each, so that disturbances
meet both. The runs are those of ``oppo train`` with ``step.kv_on_sync`` set, and should have a ``step.overcommit``;
their steps drift apart as the weights do. Prints the table and writes no file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import anyio

from benchmarks.harness import Spread, aligned, command
from oppo.config.load import load
from oppo.errors import ConfigError
from oppo.hf.serve.policy import HfPolicy
from oppo.run.train import PreparedRun, prepare

WAYS = ("recompute", "keep")
SKIPPED = 2  # first steps, which do not count: nothing is deferred into the first, and memory is allocated


@dataclass(slots=True, eq=False)
class StepSeries:
    session: PreparedRun
    seconds: list[float] = field(default_factory=list)
    rollouts: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def mean(self, name: str) -> float:
        return fmean(each[name] for each in self.metrics)

    def row(self) -> list[str]:
        stale = ("mismatch/kl", "mismatch/kl_current", "mismatch/ess", "staleness/stale_tokens")
        policy = self.session.assembly.policy
        if not isinstance(policy, HfPolicy):
            raise ConfigError(f"only transformers counts the tokens it prefills, not {type(policy).__name__}")
        return [
            f"{median(self.seconds):.3f}",
            f"{median(self.rollouts):.3f}",
            f"{policy.counters.prefilled}",
            *(f"{self.mean(name):.4g}" for name in stale),
        ]


async def alternate(sessions: Sequence[PreparedRun], steps: int) -> list[StepSeries]:
    measured = [StepSeries(session) for session in sessions]
    async with AsyncExitStack() as stack:
        runs = [await stack.enter_async_context(s.graph.open(s.prompts)) for s in sessions]
        iterators = [run.steps(steps) for run in runs]
        for step in range(steps):
            for one, reports in zip(measured, iterators, strict=True):
                report = await anext(reports)
                if step >= SKIPPED:
                    one.seconds.append(report.seconds)
                    one.rollouts.append(report.metrics["timing_s/rollouts"])
                    one.metrics.append(report.metrics)
    return measured


def compare(config: Path, /, *given: str) -> None:
    """Print seconds a step, tokens prefilled and mismatch of both ways.

    Args:
        config: a configuration of `oppo train`.
        given: the number of steps, and changes to the configuration as section.key=value.
    """
    overrides = [each for each in given if "=" in each]
    steps = next((int(each) for each in given if "=" not in each), 20)
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(prepare(load(config, [*overrides, f"step.kv_on_sync={way}", f"run.name={way}"])))
            for way in WAYS
        ]
        measured = anyio.run(alternate, sessions, steps)
        heads = ["kv_on_sync", "s/step", "s decoding and scoring", "tokens prefilled", "KL stale", "KL current", "ESS"]
        rows = [[*heads, "stale"], *([way, *one.row()] for way, one in zip(WAYS, measured, strict=True))]
    print(aligned(rows))
    ratio = Spread.of_ratios(measured[1].seconds, measured[0].seconds).median
    print(f"a step that keeps the KV cache takes {ratio:.3f} of one that recomputes it (median of ratios)")


def main(arguments: Sequence[str] | None = None) -> int:
    return command("benchmarks.kv_on_sync", "The KV cache after an update: recomputed or kept.", compare, arguments)


if __name__ == "__main__":
    sys.exit(main())
