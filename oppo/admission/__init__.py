"""Admission: how many prompts enter a step, and when a step is cut. Pure policies: no I/O, no clock, no torch.

All counts are in *units*: a rollout, or a whole group of rollouts that are compared with one another.

With ``batch`` = B and at most ``overcommit`` = Delta units beyond it, which enter at a step's start or join while it is
decoded, at most Delta are deferred to the next step; the cut waits for units of age ``max_deferrals``; since
``overcommit <= batch``, all of those fit in one batch. So a unit's age when it is trained is at most ``max_deferrals``:
a theorem, tested as a property in ``tests/stages/test_ledger.py``.

Policies that learn have a ``state_dict()``. The same observations in the same order make the same decisions.
"""

from oppo.admission.bottleneck import Bottleneck, bottleneck, together
from oppo.admission.overcommit import Continuous, Overcommit, SlopeAdaptive, Synchronous, TailAdaptive, TailBatched
from oppo.admission.protocol import (
    Admission,
    AdmitView,
    CutView,
    Observation,
    Refilling,
    RefillView,
    ReportsMetrics,
    Restarting,
    Scoring,
    Stretch,
)

__all__ = [
    "Admission",
    "AdmitView",
    "Bottleneck",
    "Continuous",
    "CutView",
    "Observation",
    "Overcommit",
    "RefillView",
    "Refilling",
    "ReportsMetrics",
    "Restarting",
    "Scoring",
    "SlopeAdaptive",
    "Stretch",
    "Synchronous",
    "TailAdaptive",
    "TailBatched",
    "bottleneck",
    "together",
]
