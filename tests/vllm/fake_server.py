"""A fake of a vLLM server: the routes that policies and scorers use, over the fake of the engine, for httpx.

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
import numpy as np
from numpy.typing import NDArray

from oppo.vllm import VllmServer
from tests.vllm.fake_engine import (
    VOCABULARY,
    Collector,
    Completion,
    FakeAsyncLLM,
    FakeSender,
    Output,
    Request,
    logprobs_after,
    score,
)

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
        likely: ids that have all of the probability; 0: all ids.
        failing: so many requests to score are answered with 503 first.
        init: what the last ``/init_weight_transfer_engine`` said.
        asked: paths, in order.
        bodies: of requests for tokens and scores.
    """

    llm: FakeAsyncLLM = field(default_factory=FakeAsyncLLM)
    config: dict[str, Any] = field(default_factory=dict)
    instead: dict[str, httpx.Response] = field(default_factory=dict)
    key: str = ""
    forgets: bool = False
    loads: bool = False
    likely: int = 0
    failing: int = 0
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
                return httpx.Response(200, json={"data": [{"id": "fake", "max_model_len": self.llm.longest}]})
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
            case "/pooling" | "/v1/completions":
                return self._scored(body)
        return httpx.Response(404, json={"detail": "Not Found"})

    def _refusal(self, request: httpx.Request) -> httpx.Response | None:
        path = request.url.path
        self.asked.append(path)
        if self.llm.errored:
            raise httpx.ConnectError("All connection attempts failed")
        guarded = self.key and path.startswith(("/v1", "/inference", "/pooling"))
        if guarded and request.headers.get("Authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        return self.instead.get(path)

    def _scored(self, body: dict[str, Any]) -> httpx.Response:
        self.bodies.append(body)
        sequences = body.get("input") or [body["prompt"]]
        if self.failing and len(self.bodies) > 1:  # not the one that asks whether it can
            self.failing -= 1
            return httpx.Response(503, text="busy")
        if "input" in body:
            scored = [{"index": at, "object": "pooling", "data": [score(each)]} for at, each in enumerate(sequences)]
            return httpx.Response(200, json={"object": "list", "model": "fake", "data": scored})
        (sequence,) = sequences
        places: list[dict[str, Any] | None] = [None]
        for at in range(1, len(sequence)):
            found = self._logprobs_after(sequence[:at])
            order = np.argsort(-found, kind="stable").tolist()
            listed = {sequence[at]: order.index(sequence[at]) + 1}
            listed |= {each: n + 1 for n, each in enumerate(order[: body["prompt_logprobs"]])}
            places.append({str(each): {"logprob": float(found[each]), "rank": n} for each, n in listed.items()})
        choice: dict[str, Any] = {"index": 0, "text": "", "prompt_logprobs": places}
        if allowed := body.get("allowed_token_ids"):
            choice["logprobs"] = {"token_logprobs": [float(self._logprobs_after(sequence)[allowed].max())]}
        return httpx.Response(200, json={"choices": [choice]})

    def _logprobs_after(self, prefix: list[int]) -> NDArray[np.float32]:
        known = self.llm.vllm_config.model_config.get_vocab_size()
        found = np.full(known, -9999.0, np.float32)
        likely = self.likely or known
        found[:likely] = logprobs_after(prefix, likely)
        return found

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        if path in ("/pooling", "/v1/completions"):
            return self.handle_request(request)
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
                await llm.update_weights(body["update_info"])
            case "/finish_weight_update":
                await llm.finish_weight_update(None if self.forgets else body.get("weight_version"))
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


def server_of(fake: FakeServer, **given: Any) -> VllmServer:
    """Return a server that is connected to a fake."""
    server = VllmServer(URL, transport=fake, **given)
    server.sender = FakeSender()
    return server
