"""Real vLLM servers as Ray actors, on machines that are played by this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.kit.workplace import records
from tests.placement.ray.machines import MARK, Machines, machines
from tests.vllm.real.program import furnish
from tests.vllm.real.test_program import ENGINE, train

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with machines(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("place"))


def engines(two: Machines) -> list[int]:
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in two.pids()}
    return [pid for pid, name in names.items() if name == ENGINE[:15]]


@pytest.mark.parametrize("sync", ["all", "adapter"])
def test_servers_of_a_cluster_decode_and_one_that_dies_is_started_again(
    two: Machines, place: Path, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    monkeypatch.setenv(MARK, two.mark)
    before = two.pids()
    adapters = () if sync == "all" else ("models.lora_rank=2", "models.lora_sync=adapter")
    where = (f"placement.cluster={two.address}", 'placement.remote=["policy"]', "placement.policy_replicas=2")
    with train(place, sync, "run.steps=4", "sampling.max_new_tokens=100", *where, *adapters) as program:
        program.until("step 1/", 500)
        assert len(engines(two)) == 2
        os.kill(engines(two)[0], signal.SIGKILL)
        assert program.wait(500) == 0, program.said
    assert "of the pool is lost" in program.said
    assert not two.settled(before)
    lines = records(place, sync, "metrics.jsonl")
    assert [line["trained"] for line in lines] == [4, 4, 4, 4]
    assert all(abs(line["mismatch/kl_current"]) < 1e-6 for line in lines), "weights arrive by the object store"
    whole = sum(each.nbytes for each in load_file(place / "actor" / "model.safetensors").values())
    assert all((line["sync/bytes"] < 0.2 * whole) is (sync == "adapter") for line in lines)
