"""A real vLLM server on this machine, started by the command that errors name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import numpy as np
import pytest
from transformers import LlamaForCausalLM

from oppo.errors import ConfigError, ModelLost
from oppo.events import Chunk
from oppo.models import Sampling, Weights
from oppo.testing import check_policy
from oppo.vllm import VllmPolicy, VllmServer
from oppo.vllm.processes import kill_group
from oppo.vllm.server import start_command
from oppo.vllm.sync import free_port
from tests.kit.workplace import furnish, oppo, records
from tests.vllm.real.conftest import VOCABULARY, tiny_actor, wait_until_healthy
from tests.vllm.real.rollouts import (
    adapters_arrive_alone,
    assert_of,
    deferred_across_syncs,
    limit_of_deferred,
    read,
    some,
    until,
    whole,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
KEY = "canary-0123456789"
SMALL = "--dtype float32 --stream-interval 3 --skip-tokenizer-init --kv-cache-memory-bytes 268435456 --max-num-seqs 16"
"""A model without a tokenizer on a small machine."""


@dataclass
class Served:
    """A server that a test may kill and start again on its port."""

    directory: Path
    log: Path
    url: str
    adapters: int = 0
    process: subprocess.Popen[bytes] | None = None
    own: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)  # killed, it leaves its sockets there

    def start(self) -> None:
        command = start_command(self.directory, self.url, on_cpu=True, adapters=self.adapters)
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "VLLM_API_KEY": KEY,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_RPC_BASE_PATH": self.own.name,
            "TMPDIR": self.own.name,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec env {command} --host 127.0.0.1 {SMALL}"],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until_healthy(self.url, self.process, self.log)

    def connected(self) -> VllmServer:
        return VllmServer(self.url, model=self.directory, api_key=KEY, adapters=self.adapters)

    def kill(self) -> None:
        if self.process is not None:
            kill_group(self.process.pid)
            self.process.wait()


@contextmanager
def serving(directory: Path, folder: Path, *, adapters: int = 0) -> Iterator[Served]:
    served = Served(directory, folder / "server.log", f"http://127.0.0.1:{free_port()}", adapters)
    try:
        served.start()
        yield served
    finally:
        served.kill()


@pytest.fixture(scope="module")
def served(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(directory, tmp_path_factory.mktemp("server")) as served:
        yield served


@pytest.fixture
def server(served: Served) -> VllmServer:
    return served.connected()


async def test_it_says_what_a_run_needs_to_know(server: VllmServer) -> None:
    assert (server.vocabulary, server.longest, str(server.dtype)) == (VOCABULARY, 1024, "torch.float32")
    assert server.kv_tokens is not None
    assert server.kv_tokens > 10_000


async def test_another_model_is_refused_before_the_first_step(served: Served, tmp_path: Path) -> None:
    other = tiny_actor().config
    other.num_hidden_layers = 1
    LlamaForCausalLM(other).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="num_hidden_layers 1, not 12 as the one that is served"):
        VllmServer(served.url, model=tmp_path, api_key=KEY)


async def test_a_key_is_needed_where_the_server_has_one(served: Served) -> None:
    for key, fault in ((None, "requests without a key"), ("another", "the key")):
        with pytest.raises(ConfigError, match=f"refuses {fault}: .*api_key_env"):
            VllmServer(served.url, api_key=key)


async def test_it_keeps_the_contract_of_a_policy(server: VllmServer) -> None:
    sampling = Sampling(max_new_tokens=60, seed=11, stop=tuple(range(2, 34)))

    async def make() -> VllmPolicy:
        return VllmPolicy(server, sampling=sampling, limit=lambda prompt: 6 + 18 * prompt.rollout)

    await check_policy(make, some(4))


async def test_tokens_have_the_log_probs_of_the_weights_that_they_name_across_deferrals(server: VllmServer) -> None:
    sampling = Sampling(max_new_tokens=700, top_k=VOCABULARY - 1, seed=1)
    await deferred_across_syncs(VllmPolicy(server, sampling=sampling, limit=limit_of_deferred), tolerance=2e-3)


async def test_weights_are_synced_while_responses_are_decoded(server: VllmServer) -> None:
    models = [tiny_actor(seed) for seed in range(4)]
    policy = VllmPolicy(server, sampling=Sampling(max_new_tokens=700, seed=3))
    await policy.load(Weights(0, models[0].state_dict()))
    prompts = some(3)
    decodes = await policy.open(prompts)
    pieces: list[list[Chunk]] = [[] for _ in decodes]
    async with policy.decoding(decodes, lambda ended: False), anyio.create_task_group() as readers:
        for decode in decodes:
            readers.start_soon(read, decode, pieces[decode.prompt.rollout])
        for version in range(1, 4):
            await until(lambda: policy.tokens >= 120 * version)  # noqa: B023 - it is over before the next
            await policy.load(Weights(version, models[version].state_dict()))
    for each in pieces:
        versions = np.concatenate([piece.versions for piece in each])
        assert len(versions) == 700
        assert set(versions.tolist()) == {0, 1, 2, 3}
    await assert_of(models, prompts, pieces)


def test_a_run_trains_on_it_from_the_weights_that_it_begins_with(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has those of the tests before."""
    place = furnish(tmp_path)
    tiny_actor().save_pretrained(place / "actor")
    monkeypatch.setenv("KEY_OF_THE_TEST", KEY)
    chosen = ("run.name=served", "run.steps=3", "run.panel=off", "models.engine=vllm", "step.max_deferrals=1")
    servers = (f'vllm.urls=["{served.url}"]', "vllm.api_key_env=KEY_OF_THE_TEST")
    assert oppo(place, "", *chosen, *servers) == 0
    lines = records(place, "served", "metrics.jsonl")
    assert [line["trained"] for line in lines] == [4, 4, 4]
    assert all(abs(line["mismatch/kl_current"]) < 1e-4 for line in lines)


async def test_a_server_killed_while_it_decodes_is_lost_at_once_and_usable_when_it_is_back(
    served: Served, server: VllmServer
) -> None:
    sampling = Sampling(max_new_tokens=900, seed=2)
    policy = VllmPolicy(server, sampling=sampling)
    await policy.load(Weights(0, tiny_actor().state_dict()))
    decodes = await policy.open(some(3))

    async def decode_and_kill() -> None:
        async with policy.decoding(decodes, lambda ended: False):
            await decodes[0].read(5)
            served.kill()
            await decodes[0].read(10_000)

    with anyio.fail_after(10), pytest.raises(ModelLost, match=f"is lost: .*start the server at {served.url} again"):
        await decode_and_kill()
    with pytest.raises(ConfigError, match=r"(?s)no vLLM server answers at .* VLLM_SERVER_DEV_MODE=1 "):
        VllmServer(served.url)
    served.start()
    again, model = served.connected(), tiny_actor(9)
    policy = VllmPolicy(again, sampling=replace(sampling, max_new_tokens=20))
    await policy.load(Weights(1, model.state_dict()))
    prompts = some(2)
    pieces = await whole(policy, prompts)
    assert {version for each in pieces for piece in each for version in piece.versions.tolist()} == {1}
    await assert_of([model, model], prompts, pieces)


async def test_adapters_arrive_alone_and_make_the_tokens_that_name_them(directory: Path, tmp_path: Path) -> None:
    with serving(directory, tmp_path, adapters=4) as served:
        with pytest.raises(ConfigError, match="--enable-lora should be False, and is True"):
            VllmServer(served.url, model=directory, api_key=KEY)
        await adapters_arrive_alone(VllmPolicy(served.connected(), sampling=Sampling(max_new_tokens=300, seed=2)))
