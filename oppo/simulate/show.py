"""A study as a table and a recommendation, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

import tomli_w
from rich.table import Table

from oppo.simulate.schedules import Schedule
from oppo.simulate.study import FEWEST, Spread, Standing, Study

WIDTH: Final = 120
"""Columns where the output is no terminal."""

LEGEND: Final = (
    "Speed is trained tokens a second over those of {baseline!r} (*); ranges are over seeds. Lag is in updates, from "
    "a response's first token to its training. Idle is the share of the time in which the actor decodes nothing; in "
    "flight is what it decodes at once at the most, with its KV cache."
)


NOT_SIMULATED: Final = "not simulated: streamed updates (step.stream_updates), slope and tail-batched admissions"


def table(study: Study) -> Table:
    """Return the table of a study, a line for each schedule."""
    found = Table(show_edge=False, header_style="bold", pad_edge=False)
    found.add_column("schedule")
    for name in ("seconds a step", "speed", "mean lag", "largest", "idle", memory_of(study)):
        found.add_column(name, justify="right")
    for name, each in study.standings.items():
        marked = f"{name} *" if name == study.baseline else name
        found.add_row(marked, *cells(study, each))
    return found


def legend(study: Study) -> str:
    """Return what each schedule does, and what the columns mean."""
    width = max(map(len, study.standings))
    lines = [f"  {name:<{width}}  {each.schedule.about}" for name, each in study.standings.items()]
    return "\n".join([*lines, "", LEGEND.format(baseline=study.baseline)])


def cells(study: Study, each: Standing) -> Iterator[str]:
    """Yield the figures of a schedule."""
    yield ranged(each.seconds)
    yield ranged(each.speed)
    yield f"{each.lag:.2f}"
    yield f"{each.longest_lag}"
    yield f"{each.idle:.0%}".replace("%", " %")
    yield f"{each.peak_tokens * study.cache / 1e9:.1f}" if study.cache else f"{each.peak_tokens:,.0f}"


def memory_of(study: Study) -> str:
    """Return the name of the column of memory in flight."""
    return "GB in flight" if study.cache else "tokens in flight"


def ranged(spread: Spread) -> str:
    """Return a mean with its range; shorter where there is none."""
    digits = 3 if spread.mean < 1 else 2 if spread.mean < 100 else 0
    if spread.low == spread.high:
        return f"{spread.mean:.{digits}f}"
    return f"{spread.mean:.{digits}f} ({spread.low:.{digits}f} - {spread.high:.{digits}f})"


def advice(study: Study, most_lag: float) -> str:
    """Return what to do, in words, why not what is faster, and the settings to paste."""
    if len(study.seeds) < FEWEST:
        return f"{len(study.seeds)} seeds are too few to recommend a schedule: give --seeds {FEWEST} or more"
    name = study.recommended(most_lag)
    chosen = study.standings[name]
    seeds = f"over {len(study.seeds)} seeds"
    if name == study.baseline:
        said = (
            f"leave it as it is: no schedule of a mean lag of at most {most_lag:g} is 5 % faster than {name!r} with "
            f"every seed ({seeds})"
        )
    else:
        said = (
            f"choose {name!r} ({chosen.schedule.about}): {ranged(chosen.speed)} times as fast as {study.baseline!r} "
            f"{seeds}, at a mean lag of {chosen.lag:.2f} updates, {chosen.longest_lag} at most; what lag costs in "
            "learning is not simulated (docs/learning.md)"
        )
    faster = [
        f"  {other!r}, {ranged(study.standings[other].speed)} times as fast: {why}"
        for other, why in study.left_out(most_lag).items()
    ]
    left_out = ["", "faster, and left out:", *faster] if faster else []
    settings = [] if name == study.baseline else ["", f"the settings of {name!r}:", "", snippet(chosen.schedule)]
    return "\n".join([said, *left_out, "", NOT_SIMULATED, *settings])


def snippet(schedule: Schedule) -> str:
    """Return the settings with which ``oppo train`` runs a schedule, as TOML."""
    return tomli_w.dumps({"step": dict(schedule.step)}).rstrip()


def as_json(study: Study, most_lag: float) -> str:
    """Return a study as JSON: the recommendation, and the figures of each schedule."""
    schedules = {
        name: {
            "about": each.schedule.about,
            "step": dict(each.schedule.step),
            "seconds": asdict(each.seconds),
            "speed": asdict(each.speed),
            "lag": each.lag,
            "longest_lag": each.longest_lag,
            "idle": each.idle,
            "tokens_in_flight": each.peak_tokens,
            "bytes_in_flight": each.peak_tokens * study.cache or None,
        }
        for name, each in study.standings.items()
    }
    facts = {
        "baseline": study.baseline,
        "recommended": study.recommended(most_lag) if len(study.seeds) >= FEWEST else None,
        "left_out": dict(study.left_out(most_lag)),
        "seeds": list(study.seeds),
        "schedules": schedules,
    }
    return json.dumps(facts, indent=2) + "\n"
