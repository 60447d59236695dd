"""Reports on a run: its directory, its page, the live panel."""

from __future__ import annotations

from oppo.observe import Occupation, occupation
from oppo.report.log import RunLog
from oppo.report.panel import Panel
from oppo.report.records import observations, story
from oppo.report.run_dir import RunDirectory

__all__ = ["Occupation", "Panel", "RunDirectory", "RunLog", "observations", "occupation", "story"]
