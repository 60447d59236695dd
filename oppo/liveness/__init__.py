"""Liveness of a run: a heartbeat on its event loop, a watchdog that ends it when it hangs, and signals that end it."""

from __future__ import annotations

from oppo.liveness.watchdog import Heartbeat, Stall, StallLimits, Vitals, Watchdog, watched

__all__ = ["Heartbeat", "Stall", "StallLimits", "Vitals", "Watchdog", "watched"]
