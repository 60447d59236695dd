"""``docs/controllers.md`` and its figure, from the results."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from benchmarks import CHECKOUT
from benchmarks.controllers.compare import (
    CONTROLLERS,
    FIXED,
    FRONTIER,
    FULL,
    SEEDS,
    Results,
    Standing,
    mean_lag,
    mean_speed,
    mean_worth,
)
from benchmarks.controllers.regimes import ENGINES, REGIMES
from oppo.report.charts import Axes, picture, placed

DOCS = CHECKOUT / "docs"

COLOURS = {"tail": "#dc2626", "text": "#2563eb", "algorithm 1": "#7c3aed", "tail batched": "#059669"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 190, 130, 44, 40, 62

PREFACE = """\
# Controllers of overcommit, compared

Made by `python -m benchmarks.controllers` from `benchmarks/controllers/results.json`: do not edit. Every figure comes
from the real graph of stages (`Generate`, `Score`, `GAE`, `Update`) with models of cost in virtual time. **Nothing was
measured on a device**; the costs are in `benchmarks/controllers/regimes.py`, and the lengths are assumptions. Ratios
within one engine are meant, not seconds.

*Speed* is against the same run with nothing deferred, which streams already. *Lag* is the mean number of versions
between a rollout's first token and its update; it comes out as Delta / B (Little's law). Deferrals are bounded by 2 for
all. *Frontier* is the speed over that of a fixed Delta with the same lag, interpolated: more than 1 means that no fixed
Delta in between does as well.

![speed against lag](controllers.svg)
"""

AFTERWORD = """\
## How `TailAdaptive` decides

It estimates the survival function S of the lengths from the last 8 steps (Kaplan and Meier; what is parked is
censored), and the seconds for each decode step and token, each scorer's work, and the rest. For each Delta from 0 to
B / 4 the decode steps N between two cuts solve

    N(Delta) = integral over x >= 0 of  1 - P[Poisson(parked(x)) <= Delta] * P[Poisson(overdue(x)) = 0]
    parked(x) = B * sum over k < max_deferrals of S(k N + x),    overdue(x) = B * S(max_deferrals * N + x)

and the predicted step is `max(decode + tail, busy)` of the slowest scorer, plus the rest. The least Delta is taken
whose `seconds * (1 + price * Delta / B)` is within 1.15 % of the lowest. It does so from the second step on: what one
step has shown decides it, with a prior of how decoding is paid for.

## How `SlopeAdaptive` decides

As the OPPO paper writes it, once in its text and once, differently, in its Algorithm 1: by the sign of the score's
slope over 10 steps. The sum of the differences telescopes, so that two noisy scores decide. On a plateau `extra`
wanders around the middle of its range and does not decay; where scoring, the update or the cap takes the time it pays
lag for nothing.

## Where `TailAdaptive` does not win

"""

ALWAYS = """\
- Where scoring is the bottleneck, a reward model reads parked rollouts while the update runs. That is what fixed 8
  gains there, at a lag; the law does not count on it, since it depends on the order in which the reward model works.
- In one stationary regime with a tuned Delta it ties: no rule that varies Delta beats the best constant.
- The window is 8 steps: lengths that change faster are met too late. Small batches (B = 32) make single predictions
  noisy.
"""


def write(results: Results) -> None:
    (DOCS / "controllers.svg").write_text(figure(results, FULL), encoding="utf-8")
    (DOCS / "controllers.md").write_text(page(results), encoding="utf-8")


def page(results: Results) -> str:
    return "\n".join([PREFACE, *tables(results, FULL), *seeds(results), AFTERWORD + losses(results, FULL)])


def seeds(results: Results) -> Iterator[str]:
    """Yield the table of all engines and seeds, a line for each pair."""
    yield (
        "## `TailAdaptive` with other lengths, and on both engines\n\n"
        "Geometric means of speeds and arithmetic ones of lags over the eight regimes; *frontier* and *predicted /\n"
        "realised* are the least and the greatest of them. *Worth* is the geometric mean of speed / (1 + lag): what\n"
        "the price of 1 leaves of it; the best fixed Delta is that of the greatest worth. Seed 0 is that of the\n"
        "tables above. Where more is carried than with fixed 16, that is what the frontier is.\n"
    )
    yield (
        "| engine | seed | speed, fixed 8 | lag, fixed 8 | speed | lag | worth, best fixed Delta | worth | frontier "
        "| predicted / realised |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for engine in ENGINES:
        for seed in SEEDS:
            fixed, tail = (results.standings(engine, name, seed) for name in ("fixed 8", "tail"))
            ahead = [each.speed / each.frontier for each in tail]
            predicted = [each.outcome.predicted for each in tail]
            best = max(mean_worth(results.standings(engine, name, seed)) for name in FRONTIER)
            figures = [mean_speed(fixed), mean_lag(fixed), mean_speed(tail), mean_lag(tail), best, mean_worth(tail)]
            ranges = [f"{min(each):.3f} - {max(each):.3f}" for each in (ahead, predicted)]
            yield " | ".join([f"| {engine}", str(seed), *(f"{each:.3f}" for each in figures), *ranges]) + " |"
    yield ""


def tables(results: Results, engine: str) -> Iterator[str]:
    names = [*(f"fixed {extra}" for extra in FIXED), *CONTROLLERS]
    standings = {name: results.standings(engine, name) for name in names}
    yield f"## In the mean of the eight regimes, engine `{engine}`\n"
    yield "| controller | speed (geometric mean) | lag (mean) | largest lag |\n|---|---|---|---|"
    for name, each in standings.items():
        worst = max(one.outcome.longest_lag for one in each)
        yield f"| {name} | {mean_speed(each):.3f} | {mean_lag(each):.3f} | {worst} |"
    yield f"\n## `TailAdaptive` by regime, engine `{engine}`\n"
    yield (
        "| regime | speed, fixed 8 | lag, fixed 8 | speed | lag | mean Delta | frontier | predicted / realised | "
        "error of one prediction |\n|---|---|---|---|---|---|---|---|---|"
    )
    for fixed, tail in zip(standings["fixed 8"], standings["tail"], strict=True):
        out = tail.outcome
        yield (
            f"| {tail.regime} | {fixed.speed:.3f} | {fixed.lag:.3f} | {tail.speed:.3f} | {tail.lag:.3f} "
            f"| {out.extra:.1f} | {tail.speed / tail.frontier:.3f} | {out.predicted:.3f} | {out.spread:.0%} |"
        )
    yield f"\n## `TailBatched` by regime, engine `{engine}`\n"
    yield "| regime | speed | lag | tokens given up, for each trained | swing of the batches' mean length |"
    yield "|---|---|---|---|---|"
    for one in standings["tail batched"]:
        if (cost := one.outcome.restarts) is not None:
            yield f"| {one.regime} | {one.speed:.3f} | {one.lag:.3f} | {cost.waste:.0%} | {cost.swing:.0%} |"
    yield ""


def losses(results: Results, engine: str) -> str:
    """Return a line for each regime in which it is slower than a fixed Delta of 8 or behind the frontier."""
    lines = []
    for fixed, tail in zip(results.standings(engine, "fixed 8"), results.standings(engine, "tail"), strict=True):
        lines += list(_lost(fixed, tail))
    return "\n".join([*lines, ALWAYS])


def _lost(fixed: Standing, tail: Standing) -> Iterator[str]:
    if tail.speed < 0.995 * fixed.speed:
        yield (
            f"- {tail.regime}: {1 - tail.speed / fixed.speed:.1%} slower than fixed 8, at lag {tail.lag:.3f} instead "
            f"of {fixed.lag:.3f}."
        )
    if tail.speed < 0.995 * tail.frontier:
        yield f"- {tail.regime}: {1 - tail.speed / tail.frontier:.1%} behind a fixed Delta of the same lag."


def figure(results: Results, engine: str) -> str:
    """Return a panel for each regime as SVG: the frontier of fixed Delta, and the controllers."""
    panels = [
        placed(_LEFT + k % 4 * (_WIDTH + _GAP), _TOP + k // 4 * (_HEIGHT + _GAP), panel(results, engine, regime.name))
        for k, regime in enumerate(REGIMES)
    ]
    width, height = 4 * (_WIDTH + _GAP), 2 * (_HEIGHT + _GAP) + _TOP
    legend = [f'<text x="{_LEFT}" y="14" fill="#555">-- fixed Delta {", ".join(map(str, FIXED))}</text>']
    for k, name in enumerate(CONTROLLERS):
        x = _LEFT + 190 + 110 * k
        legend.append(f'<circle cx="{x}" cy="10" r="4" fill="{COLOURS[name]}"/><text x="{x + 9}" y="14">{name}</text>')
    return picture(width, height, "".join([*legend, *panels]), size=11)


def panel(results: Results, engine: str, regime: str) -> str:
    """Return one panel: lag to the right, speed upwards."""
    fixed = results.frontier(engine, regime)
    points = {
        name: (each.lag, each.speed)
        for name in CONTROLLERS
        for each in results.standings(engine, name)
        if each.regime == regime
    }
    right = max(lag for lag, _ in [*fixed, *points.values()]) * 1.05
    top = max(1.1, *(speed for _, speed in [*fixed, *points.values()]))
    axes = Axes(_WIDTH, _HEIGHT, right, 0.95, top)
    line = "L".join(axes.at(*point) for point in fixed)
    marks = "".join(_dot(axes.at(*point), "#555", 2.5) for point in fixed)
    marks += "".join(_dot(axes.at(*point), COLOURS[name], 4) for name, point in points.items())
    drawn = f'<path d="M{line}" fill="none" stroke="#555" stroke-dasharray="4 3"/>{marks}'
    heading = f'<text y="-8" font-weight="600">{escape(regime)}</text>'
    return heading + axes.framed(drawn, label="mean lag", end=f"{right:.2f}", y=".2f")


def _dot(place: str, colour: str, radius: float) -> str:
    x, y = place.split()
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}"/>'
