"""Writes the pairs of settings in ``docs/guarantees.md`` from :mod:`tests.run.matrix`: ``python -m docs.make_pairs``.

A pair is in a row of the matrix, which runs, or no row can hold it. Then rules refuse it, each with an error, which is
provoked here to be shown.
"""  # noqa: INP001 - a script beside its page

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from benchmarks.harness import markdown, placed
from oppo.config.load import load_settings
from oppo.errors import ConfigError
from tests.kit.pairs import Pair, Row, pairs_of
from tests.run.matrix import AXES, BASE, CLASHES, IN_A_RUN, context, overrides, rows

PAGE: Final = Path(__file__).with_name("guarantees.md")
BEGIN: Final = "<!-- python -m docs.make_pairs -->\n"
DECIDING: Final = ("algorithm", "dialogue", "lookahead")
"""Axes of which each value may be refused by another rule, so that a pair has no row though no rule names it."""

RULES: Final = (*CLASHES, *IN_A_RUN)


def every_pair() -> list[Pair]:
    """Return all pairs of values of two axes."""
    values = [(axis, value) for axis, options in AXES.items() for value in options]
    return [(one, other) for one, other in itertools.combinations(values, 2) if one[0] != other[0]]


def without_row() -> list[Pair]:
    """Return the pairs that meet in no row."""
    met = {frozenset(pair) for row in rows() for pair in pairs_of(row)}
    return [pair for pair in every_pair() if frozenset(pair) not in met]


def refusing(pair: Pair) -> list[int]:
    """Return the rules, from 1 on, of which one applies whatever else is set; none if a row could hold the pair."""
    free = [axis for axis in DECIDING if axis not in dict(pair)]
    chosen = itertools.product(*(AXES[axis] for axis in free))
    ways = [{**dict(zip(free, values, strict=True)), **dict(pair)} for values in chosen]
    applying = [{number for number, (clash, _) in enumerate(RULES, 1) if _applies(clash, way)} for way in ways]
    needed: list[int] = []
    while applying and all(applying):
        needed.append(max(sorted(set.union(*applying)), key=lambda number: sum(number in each for each in applying)))
        applying = [each for each in applying if needed[-1] not in each]
    return [] if applying else sorted(needed)


def _applies(clash: Mapping[str, str], row: Row) -> bool:
    return all(row.get(axis) in values.split("|") for axis, values in clash.items())


def refusal(clash: Mapping[str, str], word: str) -> str:
    """Return the error of the first values of a rule, as one line."""
    values = {axis: named.split("|")[0] for axis, named in clash.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.toml")
        file.write_text(BASE)
        try:
            load_settings(file, overrides(context(values)))
        except ConfigError as error:
            line = next(each.strip() for each in str(error).splitlines() if word in each)
            return line.partition(" (it is a key of")[0].replace("|", "\\|")
    return f"in the run: ... {word} ..."


def content() -> str:
    """Return the part of the page."""
    return "\n".join(["", *_content(), ""])


def _content() -> Iterator[str]:
    apart, every = without_row(), every_pair()
    yield markdown(["axis", "values"], [[axis, ", ".join(f"`{value}`" for value in AXES[axis])] for axis in AXES])
    yield (
        f"\nOf {len(every):,} pairs, {len(every) - len(apart):,} are in one of {len(rows())} rows, and "
        f"{len(apart)} are refused; {sum(not refusing(pair) for pair in apart)} are neither. The rules:\n"
    )
    yield markdown(
        ["", "values", "error"],
        [[str(at), _named(clash), refusal(clash, word)] for at, (clash, word) in enumerate(RULES, 1)],
    )
    several = [(pair, refusing(pair)) for pair in apart]
    yield "\nPairs that no rule names, and of which whatever else is set one of several rules refuses:\n"
    yield markdown(
        ["pair", "rules"],
        [
            [" with ".join(f"{axis} `{value}`" for axis, value in pair), ", ".join(map(str, numbers))]
            for pair, numbers in several
            if not any(clash.keys() == dict(pair).keys() and _applies(clash, dict(pair)) for clash, _ in RULES)
        ],
    )


def _named(clash: Mapping[str, str]) -> str:
    return " with ".join(f"{axis} {named.replace('|', ', ')}" for axis, named in clash.items())


def page() -> str:
    """Return the whole page."""
    return placed(PAGE.read_text(encoding="utf-8"), BEGIN, content())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
