"""A fake of a vLLM server: the routes that are used, over the fake of the engine, as a transport of httpx.

``tests/vllm/real/test_server.py`` has a real one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
from torch import Tensor

from oppo.vllm import VllmServer
from oppo.vllm.http import HttpEngine
from oppo.vllm.surface import AsyncEngine
from oppo.vllm.sync import FileSender
from tests.vllm.fake_engine import VOCABULARY, Collector, Completion, FakeAsyncLLM, Output, Request

URL = "http://localhost:8000"


def described(longest: int) -> dict[str, Any]:
    """Return the configuration of a server that was started right."""
    return {
        "model_config": {
            "model": "models/fake",
            "dtype": "torch.float32",
            "max_model_len": longest,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
        },
        "scheduler_config": {"runner_type": "generate", "enable_chunked_prefill": False},
        "device_config": {"device": "cpu"},
        "speculative_config": None,
        "weight_transfer_config": {"backend": "oppo-file"},
    }


@dataclass
class FakeServer(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A server.

    Attributes:
        config: as ``/server_info`` has it.
        instead: answers of routes in the place of its own.
        key: that requests must have.
        forgets: it takes updates without naming their version.
        loads: it loads adapters while it runs.
        adapters: names of those that it has.
        init: what the last ``/init_weight_transfer_engine`` said.
        asked: paths, in order.
    """

    llm: FakeAsyncLLM = field(default_factory=FakeAsyncLLM)
    config: dict[str, Any] = field(default_factory=dict)
    instead: dict[str, httpx.Response] = field(default_factory=dict)
    key: str = ""
    forgets: bool = False
    loads: bool = False
    adapters: list[str] = field(default_factory=list)
    init: Mapping[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.llm.version = "default"
        self.config = self.config or described(self.llm.longest)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer what is asked before the first step."""
        path, body = request.url.path, json.loads(request.content or b"{}")
        if (answer := self._refusal(request)) is not None:
            return answer
        match path:
            case "/version":
                return httpx.Response(200, json={"version": "0.32.0"})
            case "/server_info":
                return httpx.Response(200, json={"vllm_config": self.config})
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "fake"}]})
            case "/weight_info":
                return httpx.Response(200, json={"weight_version": self.llm.version})
            case "/inference/v1/generate":
                return httpx.Response(400, json={"error": {"message": f"Vocabulary size: {VOCABULARY} (...)"}})
            case "/init_weight_transfer_engine":
                self.init = body["init_info"]
                return httpx.Response(200, json={})
            case "/v1/load_lora_adapter" if self.loads:
                return httpx.Response(400, json={"error": {"message": "Field required"}})
            case "/resume":
                self.llm.paused = False
                return httpx.Response(200, json={})
        return httpx.Response(404, json={"detail": "Not Found"})

    def _refusal(self, request: httpx.Request) -> httpx.Response | None:
        path = request.url.path
        self.asked.append(path)
        if self.llm.errored:
            raise httpx.ConnectError("All connection attempts failed")
        guarded = self.key and path.startswith(("/v1", "/inference"))
        if guarded and request.headers.get("Authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        return self.instead.get(path)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        if (answer := self._refusal(request)) is not None:
            return answer
        if path == "/inference/v1/generate":
            self.bodies.append(body)
            prompt = {"prompt_token_ids": body["token_ids"], "cache_salt": body["cache_salt"]}
            params = SimpleNamespace(**body["sampling_params"])
            name = f"generate-tokens-{body['request_id']}"
            collector = await self.llm.add_request(name, prompt, params)
            return httpx.Response(200, stream=Body(self.llm, name, collector))
        if path.endswith("_lora_adapter"):
            assert self.llm.paused, "adapters change between decode steps"
            if path == "/v1/load_lora_adapter":
                self.adapters.append(body["lora_name"])
            else:
                self.adapters.remove(body["lora_name"])
            return httpx.Response(200, text="Success")
        try:
            return httpx.Response(200, json=await self._controlled(path, request.url.params, body))
        except RuntimeError as error:
            return httpx.Response(500, json={"error": {"message": f"Worker failed with error '{error}'"}})

    async def _controlled(self, path: str, parameters: httpx.QueryParams, body: dict[str, Any]) -> dict[str, Any]:
        llm = self.llm
        match path:
            case "/health":
                pass
            case "/pause":
                assert dict(parameters) == {"mode": "abort", "clear_cache": "false"}
                await llm.pause_generation(mode="keep", clear_cache=False)
                for request in list(llm.requests.values()):
                    self._abort(request)
            case "/resume":
                await llm.resume_generation()
            case "/abort_requests":
                assert body["request_ids"], "without ids all requests are aborted"
                for name in body["request_ids"]:
                    if name in llm.requests:
                        self._abort(llm.requests[name])
            case "/reset_prefix_cache":
                running = parameters["reset_running_requests"] == "true"
                return {"success": await llm.reset_prefix_cache(reset_running_requests=running)}
            case "/weight_info":
                return {"weight_version": llm.version}
            case "/update_weight_version":
                await llm.update_weight_version(body["new_version"])
            case "/init_weight_transfer_engine":
                self.init = body["init_info"]
            case "/start_weight_update":
                await llm.start_weight_update()
            case "/update_weights":
                assert llm.paused, "weights change between decode steps"
                await llm.update_weights(body["update_info"])
            case "/finish_weight_update":
                version = body.get("weight_version")
                await llm.finish_weight_update(None if self.forgets else version)
                llm.updates.append(str(version))
            case _:
                raise AssertionError(f"no such route: {path}")
        return {}

    def _abort(self, request: Request) -> None:
        self.llm.requests.pop(request.id)
        self.llm.aborted.append(request)
        if self.llm._ended(request.id):
            spans = self.llm._spans(request) if request.tokens else None
            request.collector.put(Output([Completion([], [], "abort", spans)]))


@dataclass
class Body(httpx.AsyncByteStream):
    """The stream of a request; a client that leaves it has it aborted."""

    llm: FakeAsyncLLM
    name: str
    collector: Collector

    async def __aiter__(self) -> AsyncIterator[bytes]:
        reason = None
        while reason is None:
            try:
                output = await self.collector.get()
            except Exception as error:
                raise httpx.ReadError("the connection was reset") from error
            (completion,) = output.outputs
            reason = completion.finish_reason
            yield f"data: {json.dumps({'choices': [choice_of(completion)]})}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.llm.abort([self.name])


def choice_of(completion: Completion) -> dict[str, Any]:
    content = [
        {
            "token_id": token,
            "logprob": found[token].logprob,
            "top_logprobs": [{"token_id": each, "logprob": max(one.logprob, -9999.0)} for each, one in found.items()],
        }
        for token, found in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    return {
        "token_ids": completion.token_ids,
        "logprobs": {"content": content},
        "finish_reason": completion.finish_reason,
        "weight_versions": None
        if completion.weight_versions is None
        else [vars(span) for span in completion.weight_versions],
    }


class RouteSender(FileSender):
    """Sends no file, but makes the calls; ``seconds`` pass first."""

    def __init__(self, seconds: float = 0.02) -> None:
        super().__init__()
        self.seconds = seconds

    async def send(self, llm: AsyncEngine, tensors: Mapping[str, Tensor], version: str) -> None:
        assert isinstance(llm, HttpEngine)
        await anyio.sleep(self.seconds)
        await self._load(llm, {"path": str(self._file.path), "prints": {}}, version)


def server_of(fake: FakeServer, **given: Any) -> VllmServer:
    """Return a server that is connected to a fake."""
    server = VllmServer(URL, transport=fake, **given)
    server.sender = RouteSender()
    return server
