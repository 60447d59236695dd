"""A policy on a vLLM server, over the fake: what is asked when it connects, tokens, pauses, weight syncs, its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from oppo.errors import ConfigError, ModelError
from oppo.log import routed
from oppo.models import Sampling, Weights
from oppo.vllm import VllmPolicy, VllmServer
from oppo.vllm.arguments import ServerSettings
from oppo.vllm.engine import NewTokens
from oppo.vllm.server import Inbox
from oppo.vllm.sync import FILES, FileSender, WeightFiles
from tests.kit.virtual import virtually
from tests.vllm.bench import varied
from tests.vllm.fakes import URL, VOCABULARY, FakeServer, running, server_of
from tests.vllm.test_sync import adapted


@virtually
async def test_an_error_waits_behind_the_tokens_before_it() -> None:
    inbox = Inbox()
    inbox.put(NewTokens([1], [{1: -1.0}]))
    inbox.put(NewTokens([2], [{2: -1.0}], "stop"))
    inbox.fail(ValueError("gone"))
    new = await inbox.get()
    assert (new.tokens, new.reason) == ([1, 2], "stop")
    with pytest.raises(ValueError, match="gone"):
        await inbox.get()


KEY = "sk-canary-of-the-tests-0123456789"


def refused(fake: FakeServer, url: str = URL, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        VllmServer(url, transport=fake, **given)
    assert KEY not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "actor")
    return tmp_path / "actor"


def test_what_is_known_of_it_is_what_it_says() -> None:
    said: list[str] = []
    with routed(said.append):
        server = server_of(FakeServer())
    assert said == [f"the vLLM server at {URL} serves models/fake in torch.float32"]
    assert (server.name, server.vocabulary, server.longest, server.dtype) == ("fake", VOCABULARY, 500, torch.float32)
    assert server.weights is None


def test_the_workers_are_asked_for_the_file_and_for_the_model_that_is_trained(actor: Path) -> None:
    fake = FakeServer()
    server = VllmServer(URL, transport=fake, model=actor)
    assert Path(fake.init["path"]).exists()
    assert fake.init["model"] == {
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    }
    assert server.weights is not None
    with pytest.raises(ModelError, match="not the weights of actor"):
        anyio.run(VllmPolicy(server, sampling=Sampling()).load, Weights(1, {"other": torch.ones(1)}))


def test_a_server_that_is_not_there_comes_with_the_command_that_starts_it() -> None:
    fake = FakeServer()
    fake.llm.errored = True
    assert refused(fake, model="models/my actor") == (
        f"no vLLM server answers at {URL} (ConnectError: All connection attempts failed): start it, with oppo "
        "installed beside vLLM, as\n  VLLM_SERVER_DEV_MODE=1 vllm serve 'models/my actor' --port 8000 "
        "--enable-scale-out --logprobs-mode processed_logprobs --max-logprobs -1 --weight-transfer-config "
        '\'{"backend": "oppo-file"}\''
    )


@pytest.mark.parametrize(
    ("path", "answer", "faults"),
    [
        ("/version", httpx.Response(200, html="<html>hello</html>"), ["is no vLLM server", "text/html", "<html>hello"]),
        ("/version", httpx.Response(404, text="nothing"), ["is no vLLM server", "404"]),
        ("/version", httpx.Response(200, json={"version": "0.26.0"}), ["the version of vLLM should be", "is 0.26.0"]),
        ("/version", httpx.Response(200, json={"version": "main"}), ["the version of vLLM should be", "is main"]),
        ("/v1/models", httpx.Response(401, json={"error": "Unauthorized"}), ["requests without a key", "api_key_env"]),
        ("/server_info", httpx.Response(404, json={}), ["- VLLM_SERVER_DEV_MODE=1 is not in its environment"]),
        (
            "/inference/v1/generate",
            httpx.Response(403, json={"error": {"message": "Scale-out endpoints are disabled."}}),
            ["answers 403: Scale-out endpoints are disabled.", "- --enable-scale-out is missing"],
        ),
        (
            "/inference/v1/generate",
            httpx.Response(400, json={"error": {"message": "no"}}),
            ["should tell its vocabulary, and says no"],
        ),
        (
            "/init_weight_transfer_engine",
            httpx.Response(500, json={"error": {"message": "this worker cannot read the trainer's file"}}),
            ["answers 500: this worker cannot read the trainer's file"],
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_what_was_expected_and_what_came(
    path: str, answer: httpx.Response, faults: list[str]
) -> None:
    said = refused(FakeServer(instead={path: answer}))
    assert URL in said
    for fault in faults:
        assert fault in said


@pytest.mark.parametrize(
    ("section", "key", "value", "fault"),
    [
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode should be processed_logprobs, and is raw"),
        ("model_config", "max_logprobs", 20, "--max-logprobs should be -1, and is 20"),
        ("scheduler_config", "runner_type", "pooling", "--runner should be generate, and is pooling"),
        ("scheduler_config", "enable_chunked_prefill", True, "--enable-chunked-prefill on a CPU should be False"),
        ("weight_transfer_config", "backend", "nccl", "should be oppo-file or oppo-nccl, and is nccl"),
    ],
)
def test_flags_are_told_together_with_the_command_that_has_them(
    section: str, key: str, value: object, fault: str
) -> None:
    fake = FakeServer()
    fake.config[section][key] = value
    fake.config["speculative_config"] = {"model": "draft"}
    said = refused(fake)
    assert fault in said
    assert "--speculative-config should be None, and is {'model': 'draft'}" in said
    assert said.endswith("--no-enable-chunked-prefill --enforce-eager"), "it is known to be on a CPU"
    assert "/init_weight_transfer_engine" not in fake.asked, "nothing is asked of a server that is wrong"


def test_a_key_goes_with_each_request_and_is_never_shown() -> None:
    fake = FakeServer(key=KEY)
    assert "refuses requests without a key" in refused(fake)
    assert "refuses the key" in refused(fake, api_key=f"{KEY}x")
    server = server_of(fake, api_key=KEY)
    assert KEY not in repr(server)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("localhost:8000", "expected the URL of a vLLM server"),
        ("ftp://localhost", "expected the URL of a vLLM server"),
        (f"http://me:{KEY}@localhost", "holds more than its address"),
        (f"http://localhost?key={KEY}", "holds more than its address"),
    ],
)
def test_an_address_that_is_none_or_holds_more_is_refused(url: str, fault: str) -> None:
    assert fault in refused(FakeServer(), url)


def test_a_server_on_another_machine_gets_its_weights_through_a_directory_that_both_have(tmp_path: Path) -> None:
    assert "names a directory" not in refused(FakeServer(), "http://far:8000")
    assert "vllm.weights_directory" in refused(FakeServer(), "http://far:8000")
    fake = FakeServer()
    server = VllmServer("http://far:8000", transport=fake, weights_directory=tmp_path)
    assert isinstance(server.sender, FileSender)
    assert Path(fake.init["path"]).parent == tmp_path
    assert Path(fake.init["path"]).exists(), "its workers look whether they can read there"
    assert "cannot be written" in refused(FakeServer(), "http://far:8000", weights_directory=tmp_path / "none")


def test_a_shared_file_has_a_new_name_each_time_and_is_removed_in_the_end(tmp_path: Path) -> None:
    files = WeightFiles(tmp_path)
    for value in (1.0, 2.0):
        weight = torch.full((2,), value)
        path = files.write({"a": weight, "tied": weight}, str(value))
        assert load_file(path / FILES[False])["a"].tolist() == [value, value]
        assert list(files.path.iterdir()) == [path]
    assert files.path.stat().st_mode & 0o777 == 0o755, "the server may be another user's"
    del files
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_server_that_takes_weights_by_nccl_needs_a_trainer_on_a_gpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oppo.vllm.server.require", lambda *given, **more: None)
    fake = FakeServer(instead={"/get_world_size": httpx.Response(200, json={"world_size": 4})})
    fake.config["weight_transfer_config"]["backend"] = "oppo-nccl"
    if device == "cpu":
        said = refused(fake)
        assert "the device of a trainer that sends by NCCL should be cuda, and is cpu" in said
        assert '{"backend": "oppo-nccl"}' in said
        return
    route = VllmServer(URL, transport=fake, trainer=device).sender._route  # type: ignore[attr-defined]
    assert (route.backend, route.workers, route.trainer) == ("nccl", 4, torch.device(device))
    assert route.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("keeps", "routed_experts", "fault"),
    [("keep", False, "step.kv_on_sync = 'recompute'"), ("recompute", True, "trainer.router_replay = false")],
)
def test_what_a_server_cannot_do_is_refused(
    keeps: Literal["keep", "recompute"], routed_experts: bool, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        VllmPolicy(server_of(FakeServer()), sampling=Sampling(), kv_on_sync=keeps, routed_experts=routed_experts)


def test_settings_of_servers_are_those_of_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerSettings.of({"max_num_seqs": 3}) is None
    found = ServerSettings.of({"urls": [URL], "api_key_env": "SOME_KEY", "timeout": 5})
    assert found == ServerSettings((URL,), "SOME_KEY", timeout=5.0)
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^vllm\.api_key_env: expected the name of an environment variable"):
        found.api_key()
    monkeypatch.setenv("SOME_KEY", KEY)
    assert found.api_key() == KEY


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({"urls": []}, "vllm.urls: expected"),
        ({"urls": URL}, "vllm.urls: expected"),
        ({"urls": [URL], "timeout": 0}, "vllm.timeout: expected more than 0"),
        ({"urls": [URL, URL]}, "vllm.urls names a server twice"),
        ({"urls": [URL], "max_num_seqs": 8}, "vllm.max_num_seqs is for an engine .*: give it .* as --max-num-seqs"),
    ],
)
def test_settings_that_are_none_of_a_server_are_refused(table: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        ServerSettings.of(table)


def test_a_server_for_adapters_has_room_for_their_rank_and_loads_them_while_it_runs(tmp_path: Path) -> None:
    fake = FakeServer()
    said = refused(fake, adapters=4)
    assert "--max-lora-rank, with --enable-lora should be at least 4, and is 0" in said
    assert "/v1/load_lora_adapter should answer 400, and answers 404" in said
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in said
    assert "--enable-lora --max-lora-rank 8" in said
    fake.config["lora_config"], fake.loads = {"max_lora_rank": 8}, True
    assert VllmServer(URL, transport=fake, adapters=4).adapts
    assert "--enable-lora should be False, and is True" in refused(fake)


def test_a_server_serves_the_newest_adapter_and_no_older_one(tmp_path: Path) -> None:
    fake = FakeServer(loads=True)
    fake.config["lora_config"] = {"max_lora_rank": 8}
    server = VllmServer(URL, transport=fake, adapters=4, weights_directory=tmp_path)
    policy = VllmPolicy(server, sampling=Sampling(max_new_tokens=3))

    async def main() -> None:
        async with running(fake.llm):
            for version in (1, 2, 3):
                await policy.load(adapted(version))
                (decode,) = await policy.open(varied(1))
                async with policy.decoding([decode], lambda ended: True):
                    while (await decode.read(8)).state == "live":
                        pass

    anyio.run(main)
    labels = [policy._label(version) for version in (1, 2, 3)]
    assert fake.adapters == labels[2:]
    assert [body["model"] for body in fake.bodies] == labels
    assert {each.name for each in tmp_path.glob("oppo-weights-*/*")} == {*labels[1:]}, "that before is served meanwhile"
