"""A policy on a vLLM server, over the fake: what is asked when it connects, tokens, pauses, weight syncs, its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import httpx
import pytest
import torch
from hypothesis import example, given, strategies as st
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from oppo.errors import ConfigError, ModelError, ModelLost
from oppo.events import Prompt
from oppo.log import routed
from oppo.models import Sampling, Weights
from oppo.testing import check_policy, run_virtual
from oppo.vllm import VllmPolicy, VllmServer
from oppo.vllm.arguments import ServerSettings
from oppo.vllm.engine import NewTokens
from oppo.vllm.server import Inbox
from oppo.vllm.sync import FILES, FileSender, WeightFiles
from tests.vllm.bench import SAMPLING, WEIGHTS, Bench, varied
from tests.vllm.fake_engine import VOCABULARY, FakeAsyncLLM, Request, running
from tests.vllm.fake_server import URL, FakeServer, server_of
from tests.vllm.test_sync import adapted


@dataclass
class ServerBench(Bench):
    """A policy over a fake of a server."""

    fake: FakeServer = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fake = FakeServer(self.llm)
        self.server = server_of(self.fake)
        self.policy = VllmPolicy(self.server, sampling=self.sampling, **self.keywords)


def test_it_keeps_the_contract_of_a_policy() -> None:
    async def main() -> None:
        fake = FakeServer()
        server = server_of(fake)

        async def make() -> VllmPolicy:
            return VllmPolicy(server, sampling=SAMPLING)

        async with running(fake.llm):
            await check_policy(make, varied(5))
        assert not fake.llm.requests

    run_virtual(main)


def parts_of(requests: Sequence[Request], prompt: Prompt) -> list[Request]:
    """Return the requests of a rollout that the server has made tokens for, in order."""
    start = prompt.tokens.tolist()
    mine = [each for each in requests if each.tokens and each.prompt[: len(start)] == start]
    return sorted(mine, key=lambda each: len(each.prompt))


@dataclass(frozen=True)
class Case:
    """Steps, each with a weight sync.

    Attributes:
        count: of rollouts.
        at: how many are reported before each cut; then there is none.
        overrun: as :class:`FakeAsyncLLM` has it.
        limit: tokens of a read.
        delay: seconds from the beginning of a step to its weight sync; ``None``: it comes after the step.
    """

    count: int = 3
    at: tuple[int, ...] = (1, 1)
    overrun: int = 4
    limit: int = 3
    delay: float | None = 0.01


CASES = st.builds(
    Case,
    st.integers(1, 5),
    st.lists(st.integers(1, 3), max_size=4).map(tuple),
    st.integers(0, 5),
    st.integers(1, 30),
    st.sampled_from([None, 0.0, 0.003, 0.01]),
)


@given(CASES)
@example(Case())
@example(Case(delay=None))
def test_no_token_is_lost_doubled_or_counted_to_other_weights(case: Case) -> None:
    bench, prompts = ServerBench(FakeAsyncLLM(overrun=case.overrun)), varied(case.count)

    async def main() -> None:
        decodes = await bench.policy.open(prompts)
        for cut_at in [*case.at, 1_000]:
            live = [decode for decode in decodes if not decode.ended]
            await bench.step(live, cut_at, case.limit, load=case.delay)
            if case.delay is None:
                await bench.policy.load(Weights(bench.policy.version + 1, WEIGHTS))

    bench.run(main)
    assert sorted(each for reported in bench.reported for each in reported) == list(range(case.count))
    for prompt in prompts:
        parts = parts_of([*bench.llm.done, *bench.llm.aborted], prompt)
        sequence, versions = prompt.tokens.tolist(), list[str]()
        for part in parts:
            assert part.prompt == sequence, "each part reads all that there is"
            sequence, versions = sequence + part.tokens, versions + part.versions
        assert bench.tokens(prompt.rollout) == sequence[len(prompt.tokens) :]
        assert bench.versions(prompt.rollout) == [bench.policy.number_of(version) for version in versions]
        assert len({part.params.seed for part in parts}) == len(parts), "no noise is used twice"
        assert [part.params.max_tokens for part in parts] == [20 - len(part.prompt) + 2 for part in parts]
    assert not bench.llm.requests


def test_a_request_says_what_sampling_says_and_the_weights_it_may_share_a_prefix_with() -> None:
    sampling = Sampling(max_new_tokens=20, top_k=3, top_p=0.9, min_new_tokens=4, stop=(2, 3), vocabulary=VOCABULARY - 1)
    bench = ServerBench(sampling=sampling)

    bench.play()
    (body,) = bench.fake.bodies
    params = body.pop("sampling_params")
    assert body == {
        "model": "fake",
        "request_id": body["request_id"],
        "token_ids": [10, 4],
        "cache_salt": bench.llm.version,
        "stream": True,
    }
    assert (params["top_k"], params["top_p"], params["logprobs"], params["min_tokens"]) == (3, 0.9, 3, 4)
    assert params["logit_bias"] == {str(VOCABULARY - 1): -100.0}


def test_ids_that_sampling_excludes_are_known_by_what_stands_for_minus_infinity() -> None:
    bench = ServerBench(FakeAsyncLLM(logprob=lambda position: -1.0), sampling=Sampling(max_new_tokens=3, top_k=2))
    content = [
        {"token_id": token, "logprob": -1.0, "top_logprobs": [{"token_id": 5, "logprob": other}]}
        for token, other in ((7, -0.5), (8, -9999.0), (9, -2.0))
    ]
    choice = {"token_ids": [7, 8, 9], "logprobs": {"content": content}, "finish_reason": "length"}
    text = json.dumps({"choices": [{**choice, "weight_versions": None}]})
    bench.fake.instead["/inference/v1/generate"] = httpx.Response(200, text=f"data: {text}\n\ndata: [DONE]\n\n")

    bench.play(limit=100)
    (piece,) = bench.pieces[0]
    assert piece.support.counts.tolist() == [2, 1, 2]
    assert piece.support.ids.tolist() == [5, 7, 8, 5, 9]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "answered 400 Bad Request: .*too long"),
        (httpx.Response(200, text='data: {"choices": [{}]}\n\n'), "streamed something else than tokens"),
        (httpx.Response(200, text='data: {"error": {"message": "no"}}\n\n'), "could not go on: .*no"),
        (httpx.Response(200, text="data: [DONE]\n\n"), "ended a stream of tokens without saying why"),
    ],
)
def test_a_stream_that_is_none_loses_the_model(answer: httpx.Response, message: str) -> None:
    bench = ServerBench()
    bench.fake.instead["/inference/v1/generate"] = answer

    async def main() -> None:
        with pytest.raises(ModelLost, match=rf"http://localhost:8000.* {message}.*start the server at"):
            await bench.step(await bench.policy.open(varied(2)))

    bench.run(main)


def test_a_server_that_dies_while_it_decodes_is_a_lost_model_at_once() -> None:
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 50), sampling=replace(SAMPLING, max_new_tokens=60))

    async def main() -> None:
        async def die() -> None:
            await anyio.sleep(0.1)
            bench.llm.die()

        decodes = await bench.policy.open(varied(3))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(die)
            with pytest.raises(
                ModelLost, match=r"is lost: ReadError: .*start the server at http://localhost:8000 again"
            ):
                await bench.step(decodes)
        assert anyio.current_time() == pytest.approx(0.1, abs=0.02)
        assert bench.tokens(0), "what came before stays"
        with pytest.raises(ModelLost, match="is lost"):
            await bench.policy.load(Weights(1, WEIGHTS))
        for decode in decodes:
            await decode.aclose()

    bench.run(main)


def test_a_server_that_is_silent_is_asked_whether_it_is_there() -> None:
    bench = ServerBench(FakeAsyncLLM(seconds=1000.0))
    bench.fake.instead["/health"] = httpx.Response(503)

    async def main() -> None:
        with pytest.raises(ModelLost, match="/health answered 503"):
            await bench.step(await bench.policy.open(varied(1)))
        assert anyio.current_time() < 10

    bench.run(main)


def test_a_run_may_give_a_server_up_from_another_thread() -> None:
    bench = ServerBench(FakeAsyncLLM(seconds=1000.0))

    async def main() -> None:
        async def give_up() -> None:
            await anyio.sleep(0.1)
            await anyio.to_thread.run_sync(bench.server.abort)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            with pytest.raises(ModelLost, match="the run has given it up"):
                await bench.step(await bench.policy.open(varied(1)))

    bench.run(main, threads=True)


def test_a_server_that_goes_on_without_an_update_is_named() -> None:
    bench = ServerBench()
    bench.fake.forgets = True

    async def main() -> None:
        with pytest.raises(
            ModelLost, match=r"version \w+-1, .*http://localhost:8000 serves weights '\w+-0', and '\w+-1'"
        ):
            await bench.policy.load(Weights(1, WEIGHTS))
        with pytest.raises(ModelLost, match="nothing is decoded any more"):
            await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)


def test_a_server_that_was_started_again_between_two_steps_is_noticed_before_it_decodes() -> None:
    bench = ServerBench()

    async def main() -> None:
        await bench.policy.load(Weights(1, WEIGHTS))
        bench.llm.version = "default"
        with pytest.raises(ModelLost, match=r"serves weights 'default', .* was started again"):
            await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)


def test_an_update_that_an_earlier_run_has_left_open_is_ended() -> None:
    bench = ServerBench()

    async def main() -> None:
        await bench.llm.start_weight_update()
        await bench.policy.load(Weights(1, WEIGHTS))
        assert len(bench.llm.updates) == 1
        bench.fake.instead["/start_weight_update"] = httpx.Response(500, json={"error": "another"})
        with pytest.raises(ModelLost, match="/start_weight_update answered 500"):
            await bench.policy.load(Weights(2, WEIGHTS))

    bench.run(main)


def test_a_server_with_the_weights_of_an_earlier_run_needs_those_of_this_one() -> None:
    bench = ServerBench()

    async def main() -> None:
        await bench.policy.load(Weights(1, WEIGHTS))
        policy = VllmPolicy(server_of(bench.fake), sampling=SAMPLING)
        (decode,) = await policy.open(varied(1))
        with pytest.raises(ModelLost, match="has the weights of an earlier run: load those that are trained"):
            async with policy.decoding([decode], lambda ended: False):
                await decode.read(1)
        await policy.load(Weights(0, WEIGHTS))
        (decode,) = await policy.open(varied(1))
        async with policy.decoding([decode], lambda ended: False):
            assert (await decode.read(1)).versions.tolist() == [0]

    bench.run(main)


def test_tokens_of_weights_that_nobody_synced_are_an_error() -> None:
    bench = ServerBench(FakeAsyncLLM(mislabelled=True))

    async def main() -> None:
        with pytest.raises(Exception, match="vLLM says that weights another-9 made token"):
            await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)


def test_streams_that_do_not_end_at_a_pause_are_given_up() -> None:
    """The server has had a request after it was paused, so that it tells of no end."""
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 4 if prompt[0] == 10 else 30, seconds=0.01))
    begun: list[Any] = []
    abort = bench.fake._abort

    def late(request: Request) -> None:
        if request in begun:
            abort(request)
        else:
            begun.append(request)

    bench.fake._abort = late  # type: ignore[method-assign]  # the pause passes it over, the call by name does not

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes, cut_at=1)
        assert anyio.current_time() > 5
        assert not bench.llm.requests
        await bench.step([decodes[1]])

    bench.run(main)
    assert bench.pieces[1][-1].state != "live"


def test_the_room_in_the_kv_cache_is_what_requests_leave_of_it() -> None:
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 15))
    assert bench.policy.free_kv_tokens is None
    bench.fake.config["cache_config"] = {"kv_cache_size_tokens": 100}
    policy = VllmPolicy(server_of(bench.fake), sampling=SAMPLING)

    async def main() -> None:
        decodes = await policy.open(varied(2))
        async with policy.decoding(decodes, lambda ended: False):
            await decodes[0].read(1)
            assert policy.free_kv_tokens == 100 - 2 * (2 + 1)
            for decode in decodes:
                while (await decode.read(100)).state == "live":
                    pass
        assert policy.free_kv_tokens == 100

    bench.run(main)


def test_what_is_closed_ends_on_the_server() -> None:
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 15))

    async def main() -> None:
        first, second = await bench.policy.open(varied(2))
        async with bench.policy.decoding([first, second], lambda ended: False):
            await first.read(2)
            await first.aclose()
            while (await second.read(100)).state == "live":
                pass
        assert [request.prompt for request in bench.llm.aborted] == [[10, 4]]

    bench.run(main)


def test_a_cancelled_decoding_leaves_nothing_behind() -> None:
    bench = ServerBench(FakeAsyncLLM(length=lambda prompt: 50), sampling=replace(SAMPLING, max_new_tokens=60))

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        with anyio.move_on_after(0.055):
            await bench.step(decodes)
        assert not bench.llm.requests
        assert bench.llm.paused
        await bench.step(decodes)
        assert bench.pieces[0][-1].state == "eos"

    bench.run(main)


def test_a_closed_server_is_left_to_others() -> None:
    bench = ServerBench()

    async def main() -> None:
        await bench.policy.load(Weights(1, WEIGHTS))
        bench.server.close()
        bench.server.close()

    bench.run(main)
    assert bench.fake.asked[-1] == "/resume"
    assert bench.fake.asked.count("/resume") == 1


def test_an_error_waits_behind_the_tokens_before_it() -> None:
    async def main() -> None:
        inbox = Inbox()
        inbox.put(NewTokens([1], [{1: -1.0}]))
        inbox.put(NewTokens([2], [{2: -1.0}], "stop"))
        inbox.fail(ValueError("gone"))
        new = await inbox.get()
        assert (new.tokens, new.reason) == ([1, 2], "stop")
        with pytest.raises(ValueError, match="gone"):
            await inbox.get()

    run_virtual(main)


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
