"""The table of speed in ``docs/performance.md``, from the results of record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchmarks import CHECKOUT

Results: TypeAlias = Mapping[str, Any]
"""A file of results, see :meth:`benchmarks.ladder.rounds.Ladder.as_json`."""

RESULTS: Final = CHECKOUT / "benchmarks" / "results" / "intel-xeon-2-cores"
PICTURE: Final = CHECKOUT / "docs" / "ladder.svg"
ORDER: Final = ("paper", "train-bound", "rule-reward", "capped")
MODES: Final = ("rollout", "chunk", "fixed", "adaptive")


def ladders(directory: Path = RESULTS) -> list[Results]:
    """Return the ladders among the results of record, in the order of the table."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]
    of_workloads = [each for each in found if isinstance(each, dict) and each.get("workload") in ORDER]
    return sorted(of_workloads, key=lambda each: (ORDER.index(each["workload"]), each["layout"] != "split"))


def table(found: Sequence[Results]) -> str:
    """Return a Markdown table: the speed of each mode over serial, and of two over TRL."""
    head = [
        "workload, layout",
        "serial, s a step",
        *MODES,
        "adaptive / chunk",
        "hidden (chunk)",
        "chunk / TRL",
        "adaptive / TRL",
    ]
    rows = [head, ["---"] * len(head)]
    for each in found:
        serial = sorted(each["modes"]["serial"]["seconds_per_step"])
        name = f"{each['workload']}, {each['layout']}{'' if each['valid'] else ' (INVALID)'}"
        ratios = [ratio(each, f"{mode}/serial") for mode in MODES]
        hidden = each["modes"].get("chunk", {}).get("hidden_fraction")
        rows.append(
            [
                name,
                f"{serial[len(serial) // 2]:.1f}",
                *ratios,
                ratio(each, "adaptive/chunk"),
                "-" if hidden is None else f"{hidden:.2f}",
                ratio(each, "chunk/trl"),
                ratio(each, "adaptive/trl"),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def ratio(ladder: Results, name: str) -> str:
    if name not in ladder["ratios"]:
        return "-"
    low, high = ladder["ratio_ranges"][name]
    return f"{ladder['ratios'][name]:.2f} ({low:.2f} - {high:.2f})"
