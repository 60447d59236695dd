"""The arms of the study: schedules of the same training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from oppo.app.settings import Settings


@dataclass(frozen=True, slots=True)
class Arm:
    """One schedule; models, prompts, noise and learning are the same for all.

    Attributes:
        share: rollouts kept in flight beyond the batch, as a fraction of it; ``None``: left to the admission.
        held: scoring waits until decoding has ended (:class:`oppo.stages.hold.Hold`), and then has all cores.
        step: other changes to the demo's ``[step]``.
    """

    name: str
    about: str
    share: float | None = 0.0
    held: bool = False
    step: Mapping[str, object] = field(default_factory=dict)

    def settings(self, demo: Settings, batch: int) -> Settings:
        """Return the demo's settings in this schedule, without the files that a study does not read."""
        extra = {} if self.share is None else {"admission": "overcommit", "extra": round(self.share * batch)}
        quiet = {"panel": "off", "trace": 0, "logged_samples": 0}
        return demo.changed({"step": {"batch": batch, **extra, **self.step}, "run": quiet})


SERIAL: Final = Arm("serial", "decode, then score, then train", held=True, step={"chunk": "whole"})
CHUNK: Final = Arm("chunk", "streamed, nothing carried over")
FIXED: Final = Arm("fixed", "streamed, B / 4 carried over", share=1 / 4)
ADAPTIVE: Final = Arm("adaptive", "streamed, carried over as it pays", share=None, step={"admission": "adaptive"})
STALE: Final = Arm("stale", "streamed, B carried over, up to 8 times", share=1.0, step={"max_deferrals": 8})

ARMS: Final = {arm.name: arm for arm in (SERIAL, CHUNK, FIXED, ADAPTIVE, STALE)}
"""``serial`` is the baseline, ``chunk`` differs from it in rounding only, ``stale`` should do harm."""
