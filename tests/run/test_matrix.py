"""Every two features of whole runs, in about a hundred runs; a tenth of them in ``make test``, another each day.

``OPPO_MATRIX`` is the day: it says which tenth that is, and at which moments runs are killed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from docs.make_pairs import PAGE, page, refusing, without_row
from oppo.config.load import load_settings
from oppo.errors import ConfigError
from tests.kit.assets import furnish
from tests.kit.pairs import Row
from tests.run.matrix import BASE, CLASHES, IN_A_RUN, context, overrides, rows, tried

DAY = int(os.environ.get("OPPO_MATRIX", datetime.now(UTC).toordinal()))
ROWS = 134


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


def test_any_two_values_meet_in_a_row_or_are_refused_whatever_else_is_set() -> None:
    assert len(rows()) == ROWS
    assert [pair for pair in without_row() if not refusing(pair)] == []


def test_settings_accept_each_row(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(BASE)
    for row in rows():
        load_settings(tmp_path / "config.toml", overrides(row))


def test_the_page_of_pairs_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m docs.make_pairs"


def _clashes(clashes: Sequence[tuple[Mapping[str, str], str]]) -> Iterator[ParameterSet]:
    for clash, word in clashes:
        for values in itertools.product(*(named.split("|") for named in clash.values())):
            row = dict(zip(clash, values, strict=True))
            yield pytest.param(row, word, id=" ".join(row.values()))


@pytest.mark.parametrize(("values", "word"), [*_clashes(CLASHES)])
def test_what_does_not_go_together_is_refused_by_name(values: Row, word: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(BASE)
    with pytest.raises(ConfigError, match=word):
        load_settings(tmp_path / "config.toml", overrides(context(values)))


@pytest.mark.parametrize(("values", "word"), [*_clashes(IN_A_RUN)])
def test_what_only_a_run_shows_is_refused_there(values: Row, word: str, workplace: Path, tmp_path: Path) -> None:
    outcome = tried(context(values), workplace, tmp_path / "run", only_uncut=True)
    assert outcome.fault.startswith("refused: ")
    assert word in outcome.fault
