"""Measures the speed of oppo, and whether its schedules change what is learned; not installed.

::

    python -m benchmarks               ladder/: a PPO step in every schedule, beside one in which nothing overlaps
      --peer trl-grpo                  peer/: the same step by a trainer of TRL, in an environment of its own
      --engine                         engine: the engine's cost of a chunk
      --decoding                       decoding: our decoder beside ``generate``
    python -m benchmarks.ladder        the README's table and picture, from results/
    python -m benchmarks.peer.sweep    the fastest settings of a peer
    python -m benchmarks.convergence   benchmarks/convergence/README.md: what schedules and lookahead do to learning
    python -m benchmarks.controllers   benchmarks/results/controllers.md: controllers of overcommit in virtual time
    python -m benchmarks.kv_on_sync    the KV cache after an update: recomputed or kept
    python -m benchmarks.policy_place  decoding in a thread and in a process
    python -m benchmarks.remote_call   a call in each place
    python -m benchmarks.agents        a request of an agent, by how many wait and by their clients
    python -m benchmarks.turns         what a tool's answer costs the rollouts that are decoded on
    python -m benchmarks.simulate      the simulator beside the ladder, and the OPPO paper's settings in simulation
    python -m benchmarks.vllm          vllm/: our policy on vLLM beside vLLM alone
    python -m benchmarks.ruler         whether two commits train the same, to the last bit

All of them run from a checkout and measure its ``oppo``; ``harness`` is what they share.
"""

from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).parents[1]  # the root of the repository
