"""Checks of numbers that callers pass: a NaN, or half a step, would otherwise fail far from its origin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import SupportsFloat

from oppo.errors import shown

WHOLE = range(-(2**63), 2**63)
"""The whole numbers that are accepted: arrays, random generators and files hold 64 bits."""


def require_whole(name: str, value: object, least: int = WHOLE.start, *, error: type[Exception] = ValueError) -> None:
    """Require a whole number that is ``least`` or more.

    Raises:
        error: it is a bool, a float (even 1.0), too small, or needs more than 64 bits.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{name} must be a whole number, not {value!r}")
    if int(value) < least:
        raise error(f"{name} must be at least {least}, not {value}")
    if int(value) >= WHOLE.stop:
        raise error(f"{name} must be below 2**63, not {value}")


def require_real(
    name: str,
    value: object,
    least: float = -math.inf,
    *,
    infinite: bool = False,
    error: type[Exception] = ValueError,
) -> None:
    """Require a number that is ``least`` or more, and finite unless ``infinite``.

    Raises:
        error: it is no number, too small, infinite or a NaN.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise error(f"{name} must be a {'' if infinite else 'finite '}number, not {value!r}")
    if number < least:
        raise error(f"{name} must be at least {least:g}, not {value}")


def require_metrics(name: str, metrics: object, *, error: type[Exception] = ValueError) -> None:
    """Require a mapping from names to numbers, finite or not.

    Raises:
        error: it is none.
    """
    if not isinstance(metrics, Mapping):
        raise error(f"{name} must be a mapping from names to numbers; got {shown(metrics)}")
    for metric, value in metrics.items():
        number = isinstance(value, SupportsFloat) and not isinstance(value, str | bytes)
        if not (isinstance(metric, str) and number) or len(getattr(value, "shape", "")):
            raise error(f"{name} must map names to numbers; got {shown(metric)}: {shown(value)}")
