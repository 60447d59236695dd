"""Numbers that callers pass, checked where they come in: a NaN, or half a step, would be met far from there."""

from __future__ import annotations

import math
from numbers import Integral, Real

WHOLE = range(-(2**63), 2**63)
"""What a whole number may be: arrays, random generators and files hold no larger ones."""


def require_whole(name: str, value: object, least: int = WHOLE.start, *, error: type[Exception] = ValueError) -> None:
    """Accept a whole number that is ``least`` or more.

    Raises:
        error: it is none: a bool, a float (though it be 1.0), a NaN, too small or of more than 64 bits.
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
    """Accept a number that is ``least`` or more, and finite, or infinite where that means something.

    Raises:
        error: it is none, too small, or a NaN.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise error(f"{name} must be a {'' if infinite else 'finite '}number, not {value!r}")
    if number < least:
        raise error(f"{name} must be at least {least:g}, not {value}")


def require_range(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    error: type[Exception] = ValueError,
) -> None:
    """Accept a number that is ``at_least`` something, or ``above`` it, ``at_most`` something, or ``below`` it.

    Raises:
        error: it is too small or too large, or a NaN.
    """
    if at_least is not None and not value >= at_least:
        raise error(f"{name} must be {at_least} or more, not {value}")
    if above is not None and not value > above:
        raise error(f"{name} must be more than {above}, not {value}")
    if at_most is not None and not value <= at_most:
        raise error(f"{name} must be {at_most} or less, not {value}")
    if below is not None and not value < below:
        raise error(f"{name} must be less than {below}, not {value}")
