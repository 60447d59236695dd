"""Liveness of a run: a heartbeat on its event loop, and a watchdog that ends it when it hangs."""

from __future__ import annotations

from oppo.liveness.watchdog import Heartbeat, Stall, StallLimits, Vitals, Watchdog, watched

__all__ = ["Heartbeat", "Stall", "StallLimits", "Vitals", "Watchdog", "watched"]
