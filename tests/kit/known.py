"""What a test knows to be there, and what it leaves to ``make test-deep``."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

T = TypeVar("T")


def known(value: T | None) -> T:
    assert value is not None
    return value


def close(got: object, want: object) -> bool:
    """Return whether numbers are equal but for the rounding of float32."""
    return bool(np.allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5))


def assert_close(got: object, want: object) -> None:
    one, other = np.asarray(got), np.asarray(want)
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, equal_nan=False)


def deep(*values: object) -> list[ParameterSet]:
    """Return the parameters of a test with which only ``make test-deep`` runs it; a tuple holds several."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.deep) for each in values]
