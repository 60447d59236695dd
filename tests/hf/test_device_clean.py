"""Models on a device that is not there: all tensors are on it, and the host waits for it as seldom as it must."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.forked import Program

Found = Mapping[str, Mapping[str, Any]]

DECODE: Mapping[str, tuple[int, int]] = {
    "prefill": (1, 2),
    "first step": (1, 1),
    "step": (1, 0),
    "after an end": (1, 1),
    "last": (1, 0),
    "prefill of another version": (2, 2),
}

SCORER: Mapping[str, tuple[int, int]] = {"prompts": (0, 1), "chunks": (0, 1), "finish": (1, 0)}

REFERENCE: Mapping[str, tuple[int, int]] = {**SCORER, "chunks": (0, 6)}
"""It sends the supports of tokens too."""

BUDGET: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "decode": DECODE,
    "decode, six layers": DECODE,
    "decode, large vocabulary": DECODE,
    "decode, greedy": {"step": (1, 0), "after an end": (1, 1)},
    "decode, gpt2": {"step": (1, 0), "after an end": (1, 1)},
    "truncated sampling": {"all": (4, 0)},
    "reference": REFERENCE,
    "reference, 16 rows": REFERENCE,
    **{f"{scorer}{rows}": SCORER for scorer in ("reward", "process reward", "critic") for rows in ("", ", 16 rows")},
    "PPO": {"update": (5, 3 * 2)},
    "PPO, shared trunk": {"update": (5, 3 * 2)},
    "GRPO": {"update": (4, 3 * 2)},
    "adapters": {"update": (4, 3 * 2)},
    "adapters, merged": {"all": (0, 0)},
    "streamed update": {"accumulate": (2, 2 * 2), "commit": (6, 2)},
    "weight sync": {"sync": (0, 0), "copies": (0, 0)},
    "weight sync, gemma2": {"sync": (0, 0), "copies": (0, 0)},
}
"""By work and phase: how often the host may wait for the device, and what it may send there.

The counts are of two layers, eight rows that decode, four that are scored, and three micro-batches, unless a name says
more. None grows with the layers or the rows.
"""

KERNELS_OF_A_LAYER = 3
"""Of ours in a decode step, beside those of the model's own layers: the new keys, the new values, attention."""

KERNELS_OF_AN_END = 8
"""Launched because a row has ended in the decode step before, with any number of layers."""


@pytest.fixture(scope="module")
def found() -> Found:
    """Return what each work did; in a process of its own, which the device changes for good."""
    with Program("from tests.hf.on_fake_device import main\nmain()") as program:
        out, said = program.communicate()
    assert program.returncode == 0, said
    loaded: dict[str, dict[str, Any]] = json.loads(out)
    assert loaded.keys() == {*BUDGET, "the harness"}
    return loaded


@pytest.mark.parametrize("work", [*BUDGET, "the harness"])
def test_every_tensor_is_on_the_device_of_its_model(work: str, found: Found) -> None:
    assert "error" not in found[work], found[work]["error"]


@pytest.mark.parametrize("work", BUDGET)
def test_the_host_waits_for_the_device_no_more_than_it_must(work: str, found: Found) -> None:
    phases: Found = found[work]["phases"]
    for phase, (waits, uploads) in BUDGET[work].items():
        assert sum(phases[phase]["waits"].values()) <= waits, (phase, phases[phase]["waits"])
        assert sum(phases[phase]["uploads"].values()) <= uploads, (phase, phases[phase]["uploads"])
        assert sum(phases[phase]["kernels"].values()) > 0, f"{phase}: nothing ran on the device"


def test_a_row_that_ends_costs_kernels_that_do_not_grow_with_the_layers_and_a_layer_few(found: Found) -> None:
    def kernels(work: str, phase: str, *files: str) -> int:
        places = found[work]["phases"][phase]["kernels"]
        return sum(count for place, count in places.items() if place.startswith(files or "oppo"))

    for phase in ("step", "after an end", "last"):
        two, six = (
            kernels(work, phase, "oppo/hf/kv/cache.py", "oppo/hf/kv/attention.py")
            for work in ("decode", "decode, six layers")
        )
        assert six - two <= 4 * KERNELS_OF_A_LAYER, phase
    for work in ("decode", "decode, six layers"):
        assert kernels(work, "after an end") - kernels(work, "step") <= KERNELS_OF_AN_END


def test_rows_of_any_length_decode_as_one_segment(found: Found) -> None:
    """Launching the kernels of a second segment takes longer than reading what it saves."""
    phases: Found = found["decode"]["phases"]
    assert {name: phases[name]["segments"] for name in ("step", "after an end", "last")} == {
        "step": 1,
        "after an end": 1,
        "last": 1,
    }


def test_the_device_refuses_and_counts_what_a_real_one_does(found: Found) -> None:
    phases: Found = found["the harness"]["phases"]
    assert all("cpu" in phases[name]["refused"] for name in ("joined", "added"))
    assert "gpu:1" in phases["between"]["refused"]
    assert "numpy" in phases["to_numpy"]["refused"]
    assert sum(phases["waits"]["waits"].values()) == 5
    assert sum(phases["uploads"]["uploads"].values()) == 4
