"""Two tools. What they return has two digits."""

from __future__ import annotations


def double(number: int) -> str:
    """Double a number.

    Args:
        number: which.
    """
    return f"{2 * number:02}"


def square(number: int) -> str:
    """Square a number.

    Args:
        number: which.
    """
    return f"{number**2:02}"
