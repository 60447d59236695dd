"""An arm of a study: one schedule of the demo's training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oppo.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Arm:
    """One schedule; models, prompts, noise and learning are the same for all arms of a study.

    Attributes:
        colour: of its line in the figure.
        dashed: draw that line in dashes.
        share: rollouts kept in flight beyond the batch, as a fraction of it; ``None``: left to the admission.
        held: scoring waits until decoding has ended (:class:`oppo.stages.hold.Hold`), and then has all cores.
        step: other changes to the demo's ``[step]``.
        algorithm: changes to its ``[algorithm]``.
    """

    name: str
    about: str
    colour: str
    dashed: bool = False
    share: float | None = 0.0
    held: bool = False
    step: Mapping[str, object] = field(default_factory=dict)
    algorithm: Mapping[str, object] = field(default_factory=dict)

    def settings(self, demo: Settings, batch: int) -> Settings:
        """Return the demo's settings in this schedule, without the files that a study does not read."""
        extra = {} if self.share is None else {"admission": "overcommit", "extra": round(self.share * batch)}
        quiet = {"panel": "off", "trace": 0, "logged_samples": 0}
        step = {"batch": batch, **extra, **self.step}
        return demo.changed({"step": step, "algorithm": self.algorithm, "run": quiet})
