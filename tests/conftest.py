"""Settings of every test: schedules by one number, one torch thread each, no network."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores
os.environ["HF_HUB_OFFLINE"] = "1"

SCHEDULES = int(os.environ.get("OPPO_SCHEDULES", "300"))
"""How many random schedules are tried in all, at least."""

PROPERTIES = 12
"""At least as many property tests share them."""

settings.register_profile(
    "oppo",
    max_examples=max(25, SCHEDULES // PROPERTIES),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)
settings.load_profile("oppo")
