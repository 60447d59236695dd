"""Async tests in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import ParamSpec

from oppo.testing import run_virtual

P = ParamSpec("P")


def virtually(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(partial(test, *args, **kwargs))

    return run
