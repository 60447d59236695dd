"""The findings of a demo run, for ``summary.json`` and in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from oppo.demo.exactness import Digests
from oppo.evaluation import Comparison
from oppo.report.records import JOURNAL, read

LENGTH_HACK = 2.0
"""Responses this many times as long as before suggest that the policy exploits their length."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a run.

    Attributes:
        scores: on held-out prompts, before and after.
        kl: nats a response, from the base policy, on held-out prompts.
        length_before, length_after: mean tokens in a response to a held-out prompt.
        hidden_fraction: fraction of the scoring seconds hidden behind decoding or training; ``None``: hardly any.
        deferred_fraction: fraction of the finished rollouts that were carried into a later step.
        deferral_steps: rollouts carried over, by the number of steps.
        digests: of a serial and of a streamed run in exact mode.
        directory: of the run.
        actor: directory of the trained policy.
        assets: directory of the models and prompts that the demo made.
        steps: of PPO.
        seconds: of the whole demo.
    """

    scores: Comparison
    kl: float
    length_before: float
    length_after: float
    hidden_fraction: float | None
    deferred_fraction: float
    deferral_steps: Mapping[int, int]
    digests: Digests
    directory: Path
    actor: Path
    assets: Path
    steps: int
    seconds: float

    def facts(self) -> dict[str, object]:
        """Return the entries of ``summary.json``."""
        return {
            "score_before": self.scores.before,
            "score_after": self.scores.after,
            "score_gain": self.scores.gain,
            "score_after_ci95": self.scores.half_width,
            "score_spread_before": self.scores.spread,
            "kl": self.kl,
            "length_before": self.length_before,
            "length_after": self.length_after,
            "seconds": self.seconds,
            "hidden_fraction": self.hidden_fraction,
            "deferred_fraction": self.deferred_fraction,
            "deferral_steps": dict(self.deferral_steps),
            "tokens_identical_to_serial": self.digests.identical,
            "digests": asdict(self.digests),
            "actor": str(self.actor),
            "steps": self.steps,
        }

    def lines(self) -> list[str]:
        """Return a line for each finding."""
        scores = self.scores
        ratio = self.length_after / self.length_before
        hack = f"; length hack: {ratio:.1f} times as long" if ratio > LENGTH_HACK else ""
        same = "the same" if self.digests.identical else "OTHER"
        found = {
            "score": f"{scores.before:+.2f} before, {scores.after:+.2f} after on held-out prompts: gain "
            f"{scores.gain:+.2f} +- {scores.half_width:.2f} (95 %), {scores.gain / scores.spread:.1f} standard "
            "deviations of the base policy's scores",
            "KL": f"{self.kl:.1f} nats a response from the base policy",
            "length": f"{self.length_before:.0f} tokens before, {self.length_after:.0f} after{hack}",
            "overlap": self._overlap(),
            "deferral": self._deferral(),
            "exactness": f"a serial and a streamed run, in exact mode, made {same} tokens: "
            f"{self.digests.serial[:12]} and {self.digests.streamed[:12]}",
            "inputs": f"policy (actor), reward model (reward) and prompts.jsonl are in {self.assets}",
            "outputs": f"{self.directory}/report.html, {self.actor}",
            "again": f"oppo train {self.directory}/config.toml --set run.name=again",
            "time": f"{self.seconds:.0f} s",
        }
        return [f"{name:<10} {finding}" for name, finding in found.items()]

    def _overlap(self) -> str:
        if self.hidden_fraction is None:
            return "scoring took hardly any time: there was nothing to hide"
        return f"{self.hidden_fraction:.0%} of the scoring was hidden behind decoding and training"

    def _deferral(self) -> str:
        if not self.deferral_steps:
            return "nothing was carried over: no number of extra rollouts promised to save more time than its lag costs"
        carried = ", ".join(f"{count} for {age}" for age, count in self.deferral_steps.items())
        return f"{self.deferred_fraction:.1%} of the rollouts were carried over; steps carried: {carried}"


def deferrals(run: Path) -> tuple[float, dict[int, int]]:
    """Return the fraction of a run's finished rollouts that were carried over, and their number by steps carried."""
    records = list(read(run / JOURNAL))
    ages = {record["rollout"]: cast("int", record["age"]) for record in records if record["event"] == "deferred"}
    finished = {record["rollout"] for record in records if record["event"] == "finished"}
    return len(ages) / max(1, len(finished)), dict(sorted(Counter(ages.values()).items()))
