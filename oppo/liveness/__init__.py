"""Liveness of a run: a heartbeat on its event loop, and a watchdog that ends it when it hangs."""

from __future__ import annotations

from oppo.liveness.heartbeat import Heartbeat
from oppo.liveness.watchdog import Stall, Watchdog
from oppo.liveness.watched import watched

__all__ = ["Heartbeat", "Stall", "Watchdog", "watched"]
