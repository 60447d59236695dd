"""Lengths: a law, a file, a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oppo.errors import ConfigError
from oppo.simulate.costs import Lognormal, Observed


def test_lognormal_lengths_have_the_median_the_cap_and_the_runaways_that_are_asked_for() -> None:
    drawn = Lognormal(median=(200, 400), sigma=0.5, cap=1500, runaways=0.05)(20_000, 2, seed=3)
    assert drawn.shape == (20_000, 2)
    first, last = drawn[:4000], drawn[-4000:]
    assert np.median(first) == pytest.approx(220 * np.exp(0.5 * 0.06), rel=0.1)
    assert np.median(last) / np.median(first) == pytest.approx(380 / 220, rel=0.1)
    assert drawn.max() == 1500
    assert np.mean(drawn == 1500) == pytest.approx(0.05, abs=0.01)
    assert drawn.min() >= 1


def test_observed_lengths_come_as_often_as_they_were_observed_and_groups_stay_together() -> None:
    law = Observed(((1, 10), (2, 20), (3, 30)))
    drawn = law(9, 2, seed=0)
    assert sorted(drawn[:, 0].tolist()) == [1] * 3 + [2] * 3 + [3] * 3
    assert (drawn[:, 1] == 10 * drawn[:, 0]).all()
    assert (law(9, 2, seed=1) != drawn).any()
    assert (law(9, 2, seed=0) == drawn).all()
    assert set(law(5, 3, seed=0).ravel().tolist()) <= {1, 2, 3, 10, 20, 30}


def test_a_file_of_lengths_is_numbers_or_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text('12\n{"event": "finished", "tokens": 900}\n\n{"event": "deferred"}\n7\n')
    assert Observed.read(file, cap=256).groups == ((12,), (256,), (7,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12\nlong\n", r"line 2 of .*: expected a length, a whole number of 1 or more, got 'long'"),
        ("0\n", "line 1 of .*got '0'"),
        ("1.5\n", "line 1 of .*got '1.5'"),
        ('{"tokens": "12"}\n', "line 1 of"),
        ("\n", "holds no lengths: expected a number of tokens on each line"),
        ('{"event": "deferred"}\n', "holds no lengths"),
    ],
)
def test_nonsense_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Observed.read(file, cap=256)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the lengths in .*gone"):
        Observed.read(tmp_path / "gone", cap=256)
