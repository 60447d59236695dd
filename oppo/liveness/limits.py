"""How long nothing may move in a run before it is reported, ended, and ended by force."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from oppo.numeric import require_real

NOTICE_SECONDS = 30.0
"""Seconds without a move before a stall is reported, and again whenever they have doubled."""

CALL_TIMEOUT = 3600.0
"""Seconds that one call may last while nothing else moves."""

GRACE_SECONDS = 30.0
"""Seconds without a move or a save after which a cancelled run is ended by force."""


@dataclass(frozen=True, slots=True)
class StallLimits:
    """The limits of a stall, in seconds.

    Attributes:
        seconds: without a move, after which the run is ended; 0: never, stalls are only reported.
        call_timeout: replaces ``seconds`` while a call is in progress, if it is longer; 0 sets no limit.
        notice: without a move, after which a stall is reported.
        grace: without a move or a save, after which a cancelled run is ended by force.
        names: of the settings for ``seconds`` and ``call_timeout``, for the error.

    Raises:
        ValueError: one is no number, or less than 0.
    """

    seconds: float
    _: KW_ONLY
    call_timeout: float = CALL_TIMEOUT
    notice: float = NOTICE_SECONDS
    grace: float = GRACE_SECONDS
    names: tuple[str, str] = ("run.watchdog_seconds", "run.call_timeout")

    def __post_init__(self) -> None:
        values = (self.seconds, self.call_timeout, self.notice, self.grace)
        for name, value in zip((*self.names, "notice", "grace"), values, strict=True):
            require_real(name, value, 0, infinite=True)

    def end(self, *, calling: bool) -> tuple[str, float]:
        """Return the setting that limits a stall, and its seconds.

        Args:
            calling: whether a call is in progress.
        """
        if calling and self.seconds and (not self.call_timeout or self.call_timeout > self.seconds):
            return self.names[1], self.call_timeout or math.inf
        return self.names[0], self.seconds or math.inf

    @property
    def longest_cancellation(self) -> float:
        """Seconds after its cancellation at which a run is ended by force even while it moves."""
        return self.call_timeout or math.inf
