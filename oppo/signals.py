"""The signals that ask a program to end."""

from __future__ import annotations

import signal
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent by a terminal, by a job scheduler, and by a terminal that is closed."""
