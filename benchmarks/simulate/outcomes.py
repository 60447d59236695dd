"""Outcomes of simulated runs, by cell, in a file that later calls add to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeVar

from oppo.log import logger
from oppo.simulate.schedule import Restarts, ScheduleOutcome

Run = TypeVar("Run", bound=Any)
"""The dataclass of a cell: its ``run`` makes the run."""


class Outcomes(Generic[Run]):
    def __init__(self, path: Path, cell: type[Run]) -> None:
        self._path = path
        written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        self._outcomes: dict[Run, ScheduleOutcome] = {
            cell(**each["cell"]): outcome_of(each["outcome"]) for each in written
        }

    def __len__(self) -> int:
        return len(self._outcomes)

    def __contains__(self, cell: Run) -> bool:
        return cell in self._outcomes

    def __getitem__(self, cell: Run) -> ScheduleOutcome:
        return self._outcomes[cell]

    def simulate(self, cells: Iterable[Run]) -> None:
        """Make the runs that are missing, as many at a time as there are cores; each is kept when it is over."""
        missing = [cell for cell in dict.fromkeys(cells) if cell not in self._outcomes]
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            runs = {pool.submit(cell.run): cell for cell in missing}
            for number, run in enumerate(as_completed(runs), 1):
                self._outcomes[runs[run]] = run.result()
                logger.info(f"{number} of {len(missing)}: {runs[run]}")
                self._save()

    def _save(self) -> None:
        ordered = sorted(self._outcomes.items(), key=lambda each: str(each[0]))
        records = [{"cell": asdict(cell), "outcome": record_of(outcome)} for cell, outcome in ordered]
        self._path.write_text("[\n" + ",\n".join(json.dumps(each) for each in records) + "\n]\n", encoding="utf-8")


def record_of(outcome: ScheduleOutcome) -> dict[str, Any]:
    """Return what is kept of an outcome: what bounds a step, and its parts, are for people who look at one."""
    return {name: value for name, value in asdict(outcome).items() if name not in {"parts", "blocks"}}


def outcome_of(record: Mapping[str, Any]) -> ScheduleOutcome:
    restarts = record.get("restarts")
    typed = {"extras": tuple(record["extras"]), "restarts": Restarts(**restarts) if restarts else None}
    return ScheduleOutcome(**{**record, **typed})
