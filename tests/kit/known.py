"""What a test knows to be there, and what it leaves to ``make test-deep``."""

from __future__ import annotations

from typing import TypeVar

import pytest
from _pytest.mark.structures import ParameterSet

T = TypeVar("T")


def known(value: T | None) -> T:
    """Return the value, which is there."""
    assert value is not None
    return value


def deep(*values: object) -> list[ParameterSet]:
    """Return the parameters of a test with which only ``make test-deep`` runs it; a tuple holds several."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.deep) for each in values]
