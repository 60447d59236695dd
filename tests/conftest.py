"""Hypothesis profiles: how many schedules are tried is one number, ``OPPO_SCHEDULES``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SCHEDULES = int(os.environ.get("OPPO_SCHEDULES", "300"))
PROPERTIES = 30
"""About as many property tests share the schedules."""

settings.register_profile(
    "oppo",
    max_examples=max(20, SCHEDULES // PROPERTIES),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)
settings.load_profile("oppo")
