"""Every two features of whole runs, in about a hundred runs; a tenth of them in ``make test``, another each day.

``OPPO_MATRIX`` is the day: it says which tenth that is, and at which moments runs are killed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from oppo.config.load import load_settings
from oppo.errors import ConfigError
from tests.kit.assets import furnish
from tests.kit.pairs import Row, pairs_of
from tests.run.matrix import AXES, BASE, CLASHES, fits, overrides, rows, tried

DAY = int(os.environ.get("OPPO_MATRIX", datetime.now(UTC).toordinal()))
ROWS = 131

APART = {
    (("algorithm", "online_dpo"), ("dialogue", "branches")),
    (("admission", "tail-batched"), ("dialogue", "branches")),
    (("value", "shared-trunk"), ("timing", "in-flight")),
    (("value", "shared-trunk"), ("timing", "streamed")),
    (("update", "warmup"), ("timing", "streamed")),
}
"""Pairs without a row: pairs and rollouts begun anew have no branches; a critic needs PPO, in flight a lookahead."""


def _rows() -> Iterator[ParameterSet]:
    for number in range(ROWS):
        today = number % 10 == DAY % 10
        yield pytest.param(number, marks=pytest.mark.schedules if today else pytest.mark.deep)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("matrix"))


@pytest.mark.timeout(1800)  # four runs, of up to five processes each
@pytest.mark.parametrize("number", [*_rows()])
def test_a_run_trains_and_neither_chunks_nor_a_kill_change_it(number: int, workplace: Path, tmp_path: Path) -> None:
    outcome = tried(rows()[number], workplace, tmp_path / "runs", DAY)
    assert not outcome.fault, f"OPPO_MATRIX={DAY}, row {number}: {outcome.fault}"


def test_any_two_values_that_go_together_meet() -> None:
    assert len(rows()) == ROWS
    met = {frozenset(pair) for row in rows() for pair in pairs_of(row)}
    every = itertools.combinations([(axis, value) for axis, values in AXES.items() for value in values], 2)
    missing = {pair for pair in every if pair[0][0] != pair[1][0] and frozenset(pair) not in met and fits(dict(pair))}
    assert missing == APART


def _clashes() -> Iterator[ParameterSet]:
    for clash, word in CLASHES:
        for values in itertools.product(*(named.split("|") for named in clash.values())):
            row = dict(zip(clash, values, strict=True))
            if word:
                yield pytest.param(row, word, id=" ".join(row.values()))


@pytest.mark.parametrize(("values", "word"), [*_clashes()])
def test_what_does_not_go_together_is_refused_by_name(values: Row, word: str, tmp_path: Path) -> None:
    usual = {axis: next(iter(options)) for axis, options in AXES.items()}
    algorithm = "rloo" if values.get("timing") == "streamed" else "ppo"
    (tmp_path / "config.toml").write_text(BASE)
    with pytest.raises(ConfigError, match=word):
        load_settings(
            tmp_path / "config.toml", overrides({**usual, "timing": "free", "algorithm": algorithm, **values})
        )
