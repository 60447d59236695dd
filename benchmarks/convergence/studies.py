"""The studies, by name."""

from __future__ import annotations

from typing import Final

from benchmarks.convergence.lookahead import LOOKAHEAD
from benchmarks.convergence.schedules import SCHEDULES

STUDIES: Final = {study.name: study for study in (SCHEDULES, LOOKAHEAD)}
"""The first is made where none is named."""
