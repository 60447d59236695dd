"""Numbers that callers pass, checked where they come in: a NaN, or half a step, would be met far from there."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WHOLE = range(-(2**63), 2**63)
"""What a whole number may be: arrays, random generators and files hold no larger ones."""

_NUMERIC = re.compile(r"(tuple\[)?(int|float)\b[^|]*(\| None)?")


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
    error: type[Exception] = ValueError,
) -> None:
    """Accept a number that is ``at_least`` something, or ``above`` it.

    Raises:
        error: it is too small, or a NaN.
    """
    if at_least is not None and not value >= at_least:
        raise error(f"{name} must be {at_least} or more, not {value}")
    if above is not None and not value > above:
        raise error(f"{name} must be more than {above}, not {value}")


def require_numbers(
    record: DataclassInstance, *, infinite: Collection[str] = (), error: type[Exception] = ValueError
) -> None:
    """Accept a dataclass each of whose arguments annotated ``int`` or ``float`` is one; also ``| None``, and tuples.

    Args:
        record: of a module whose annotations are postponed; ranges are its own affair.
        infinite: the names of those that may be infinite.
        error: what is raised otherwise.

    Example:
        >>> from oppo.models import Sampling
        >>> Sampling(temperature=float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: temperature of Sampling must be a finite number, not nan
    """
    for field in fields(record):
        kind = _NUMERIC.fullmatch(str(field.type)) if field.init else None
        given: object = getattr(record, field.name) if kind else None
        if kind is None or (kind[3] and given is None):
            continue
        name = f"{field.name} of {type(record).__name__}"
        if kind[1] and not isinstance(given, tuple):
            raise error(f"{name} must be a tuple of numbers, not {given!r}")
        for each in given if isinstance(given, tuple) else (given,):
            if kind[2] == "int":
                require_whole(name, each, error=error)
            else:
                require_real(name, each, infinite=field.name in infinite, error=error)
