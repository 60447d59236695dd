"""Measures how fast oppo is, and whether what makes it fast changes what is learned; none of it is installed.

::

    python -m benchmarks              ladder/: a PPO step in every schedule, beside one in which nothing overlaps
      --peer trl                      peer/: the same step by TRL's PPO trainer, in an environment of its own
      --engine                        engine/: what a chunk costs the engine
      --decoding                      decoding/: our decoder beside ``generate``
    python -m benchmarks.ladder       the README's table and picture, from results/
    python -m benchmarks.peer.sweep   the settings under which the peer is fastest
    python -m benchmarks.convergence  whether schedules differ in what is learned
    python -m benchmarks.controllers  docs/controllers.md: controllers of overcommit in virtual time
    python -m benchmarks.on_publish   keys and values after an update: computed again, or kept
    python -m benchmarks.ruler        whether two commits train the same, to the last bit

All of them run from a checkout, whose ``oppo`` they measure.
"""

from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).parents[1]
"""The root of the repository."""
