"""Liveness of a run: a heartbeat on its event loop, and a watchdog that ends it when it hangs."""

from __future__ import annotations

from oppo.liveness.heartbeat import Heartbeat
from oppo.liveness.limits import StallLimits
from oppo.liveness.watchdog import Stall, Vitals, Watchdog
from oppo.liveness.watched import watched

__all__ = ["Heartbeat", "Stall", "StallLimits", "Vitals", "Watchdog", "watched"]
