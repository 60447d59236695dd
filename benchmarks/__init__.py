"""Benchmarks, which run from a checkout and measure its ``oppo``: benchmarks/README.md lists them; not installed."""

from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).parents[1]  # the root of the repository
