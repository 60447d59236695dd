"""Real vLLM servers as Ray actors, on machines that are played by this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest
from safetensors.torch import load_file

from oppo.hf.weights import SentWeights
from oppo.models import Sampling
from oppo.vllm import VllmPolicy, VllmServer
from oppo.vllm.processes import ServerProcess
from oppo.vllm.sync import FILES, HostedFiles
from tests.kit.workplace import records
from tests.placement.ray.machines import MARK, Machines, machines
from tests.vllm.real.program import furnish
from tests.vllm.real.rollouts import adapters_arrive_alone
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


def test_adapters_alone_go_to_the_machine_of_a_server_and_make_the_tokens_that_name_them(
    two: Machines, directory: Path, tmp_path: Path
) -> None:
    """The second arrives while a response is decoded."""
    from ray.util import get_node_ip_address

    from oppo.placement.ray import Cluster, RayPlace

    folders: list[Path] = []
    given = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 16, "stream_interval": 3}
    start = partial(ServerProcess, directory, given, key="canary", address=get_node_ip_address, adapters=4, cores=1)

    async def main() -> None:
        hosted = actor.host(partial(start, log=tmp_path / "vllm.log"))

        async def load(weights: SentWeights, version: str) -> None:
            await hosted.load(partial(ServerProcess.write, version=version), weights)

        url, path = await hosted.call("start", ServerProcess.whereabouts, writes=True)
        assert path is not None
        server = VllmServer(url, model=directory, api_key="canary", adapters=4, files=HostedFiles(path, load))
        policy = VllmPolicy(server, sampling=Sampling(max_new_tokens=300, seed=2))
        await adapters_arrive_alone(policy)
        files = [each / FILES[True] for each in path.iterdir()]
        assert len(files) == 2
        assert {int(file.readlink().parts[2]) for file in files} == {actor.pid}, "of its machine's memory"
        folders.append(path)
        await hosted.call("end", ServerProcess.end)

    with Cluster(two.address) as cluster, RayPlace("policy", cluster, restarts=0) as actor:
        anyio.run(main)
    assert not any(each.exists() for each in folders)
