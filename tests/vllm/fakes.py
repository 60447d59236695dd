"""The fake of vLLM's ``AsyncLLM``, with the timing of a process of its own, and of a server over it, for httpx.

``tests/vllm/scenario.py`` holds it to what the real one does; ``tests/vllm/real/test_server.py`` has a real server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.errors import as_itself
from oppo.testing.fakes import noise
from oppo.vllm import VllmEngine, VllmServer
from oppo.vllm.engine import Engine, WeightSender
from oppo.vllm.images import Pictures
from oppo.vllm.processes import Children, EngineFiles
from oppo.vllm.sync import DEADLINE, in_time

VOCABULARY = 1000
LOG = Path("fake.log")
URL = "http://localhost:8000"
BLOCK = 8
"""Tokens of a block of its prefix cache."""


def config(
    *,
    model: str = "models/fake",
    vocabulary: int = VOCABULARY,
    longest: int = 500,
    dtype: torch.dtype = torch.float32,
    runner: str = "generate",
    labels: int = 1,
    pooling: str = "LAST",
    prefix: bool = True,
    mean: float | None = None,
    padding: int | None = 0,
) -> Any:
    """Return a ``VllmConfig`` as far as it is read."""
    pooler = SimpleNamespace(seq_pooling_type=pooling, logit_mean=mean, logit_sigma=None)
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=prefix, block_size=BLOCK),
        model_config=SimpleNamespace(
            model=model,
            dtype=dtype,
            runner_type=runner,
            pooler_config=pooler if runner == "pooling" else None,
            hf_config=SimpleNamespace(num_labels=labels),
            hf_text_config=SimpleNamespace(pad_token_id=padding),
            max_model_len=longest,
            get_vocab_size=lambda: vocabulary,
        ),
    )


def experts_of(sequence: Sequence[int]) -> NDArray[np.uint8]:
    """Return the experts that the fake chooses at each position, [positions, 2, 1]: they tell token and position."""
    return np.array([[[token % 251], [at % 251]] for at, token in enumerate(sequence)], np.uint8)


class EngineDeadError(Exception):
    """vLLM's."""


@dataclass
class Completion:
    token_ids: list[int]
    logprobs: list[dict[int, Any]]
    finish_reason: str | None = None
    weight_versions: list[Any] | None = None
    routed_experts: NDArray[np.uint8] | None = None


@dataclass
class Output:
    outputs: list[Completion]
    num_cached_tokens: int = 0


class Collector:
    """Merges what is new until it is taken, as vLLM's does."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._output: Output | None = None
        self._error: Exception | None = None
        self._ready = anyio.Event()

    def put(self, output: Output) -> None:
        if self._output is None:
            self._output = output
        else:
            (merged,), (fresh,) = self._output.outputs, output.outputs
            merged.token_ids += fresh.token_ids
            merged.logprobs += fresh.logprobs
            merged.finish_reason = fresh.finish_reason
            merged.weight_versions = fresh.weight_versions
            merged.routed_experts = fresh.routed_experts
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    def get_nowait(self) -> Output | None:
        if self._error is not None:
            raise self._error
        output, self._output = self._output, None
        if output is not None:
            self._ready = anyio.Event()
        return output

    async def get(self) -> Output:
        while (output := self.get_nowait()) is None:
            await self._ready.wait()
        return output


@dataclass(eq=False)
class Answering:
    """The collector of a request to score: it has the answer some time after somebody began to wait."""

    name: str
    answer: Any
    llm: FakeAsyncLLM

    async def get(self) -> Any:
        await anyio.sleep(self.llm.answers_after)
        self.llm.asking.remove(self.name)
        return self.answer


@dataclass(eq=False)
class Request:
    id: str
    prompt: list[int]
    salt: str
    params: Any
    collector: Collector
    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    cached: int = 0
    delivered: int = 0
    weight_version_starts: list[tuple[str, int]] = field(default_factory=list)
    routed_experts_chunks: list[NDArray[np.uint8]] = field(default_factory=list)
    lora: Any = None
    images: Sequence[str] = ()  # under which names it has them


@dataclass
class Found:
    """Where the tokens of an image are."""

    count: int

    def to_range(self) -> Any:
        return SimpleNamespace(get_num_embeds=lambda: self.count)


class FakeReader:
    """vLLM's reader of images: it expands each pad of a prompt by what a processor says, its own or the one given."""

    def __init__(self, own: object, pad: int) -> None:
        self.info, self.pad = SimpleNamespace(get_hf_processor=lambda: own), pad
        self.shown: list[Any] = []  # the pixels that it would send

    def read(self, tokens: list[int], pictures: Sequence[Any]) -> list[int]:
        processor, counts = self.info.get_hf_processor(), []
        for picture in pictures:
            made = processor(images=[picture], text=[processor.image_token])
            counts.append([[*made["input_ids"][0]].count(self.pad)])
            self.shown.append(made["pixel_values"])
        ids, found = self._apply_prompt_updates(tokens, {"image": counts, "video": []})
        if len(found["image"]) != len(pictures):
            raise RuntimeError(f"Expected there to be {len(pictures)} prompt placeholders")
        return ids

    def _apply_prompt_updates(self, tokens: list[int], updates: Any) -> tuple[list[int], dict[str, Any]]:
        counts = iter([count for (count,) in updates["image"]])
        ids = [each for token in tokens for each in [token] * (next(counts, 1) if token == self.pad else 1)]
        return ids, self._find_mm_placeholders(ids, updates)

    def _find_mm_placeholders(self, tokens: list[int], updates: Any) -> dict[str, list[Found]]:
        found, at = list[Found](), 0
        for (count,) in updates["image"]:
            run = [self.pad] * count
            start = next((n for n in range(at, len(tokens)) if tokens[n : n + count] == run), None)
            if start is not None:
                found.append(Found(count))
                at = start + count
        return {"image": found, "video": []}


@dataclass(eq=False)
class FakeAsyncLLM:
    """Makes one token of each request in a decode step, while it is not paused."""

    # tokens after which a request with this prompt ends by a stop token, if it has one
    length: Callable[[Sequence[int]], int] = lambda prompt: 4 + prompt[0] % 7
    seconds: float = 0.01  # of a decode step
    overrun: int = 1  # decode steps that it makes between the call of ``pause_generation`` and its return
    # seconds from a decode step until its outputs can be had, though the engine may have been paused meanwhile
    late: float = 0.0
    longest: int = 500
    mislabelled: bool = False  # it names other weights than made the tokens
    dtype: torch.dtype = torch.float32
    # of a token, by the length of the sequence before it
    logprob: Callable[[int], float] = lambda position: -1.0 - position / 1000
    version: str = "as loaded"
    paused: bool = False
    errored: bool = False
    requests: dict[str, Request] = field(default_factory=dict)
    done: list[Request] = field(default_factory=list)
    aborted: list[Request] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    recomputed: int = 0
    facts: dict[str, Any] = field(default_factory=dict)  # of its configuration, as :func:`config` has them
    reader: FakeReader | None = None  # of images
    room: int = 1_000_000  # blocks of the prefix cache; the oldest makes room for a new one
    # heads of sequences whose keys and values it has, by salt
    cached: dict[tuple[str, tuple[int, ...]], None] = field(default_factory=dict)
    answers_after: float = 0.0  # seconds until a request to score is answered
    uninitialised: bool = True  # places of tokens that were cached have numbers without meaning, or are not there
    sequences: list[tuple[int, ...]] = field(default_factory=list)  # of all requests to score, in order
    asking: set[str] = field(default_factory=set)  # names of those that were not answered
    tempers: list[tuple[Any, ...]] = field(default_factory=list)  # what its workers were told of logits
    rows: list[int] = field(default_factory=list)  # the requests of each decode step
    adapters: list[Any] = field(default_factory=list)  # vLLM's requests for them, as they were loaded
    transfers: list[Any] = field(default_factory=list)  # the requests that initialised a weight transfer
    # what it has no memory for; with the last part that wakes it goes on, as vLLM does
    asleep: list[str] = field(default_factory=list)
    slept: int = 0  # how often it fell asleep
    output_processor: Any = field(default_factory=lambda: SimpleNamespace(request_states={}))
    _updating: bool = False
    _open: dict[str, Request] = field(default_factory=dict)
    _sent: list[tuple[float, Request, Output, str]] = field(default_factory=list)
    _mail: anyio.Event = field(default_factory=anyio.Event)
    _work: anyio.Event = field(default_factory=anyio.Event)

    @property
    def renderer(self) -> Any:
        return SimpleNamespace(mm_processor=self.reader)

    @property
    def vllm_config(self) -> Any:
        return config(**{"longest": self.longest, "dtype": self.dtype, **self.facts})

    def shutdown(self, timeout: float | None = None) -> None:
        self.errored = True

    async def add_request(
        self, request_id: str, prompt: Mapping[str, Any], params: Any, *, lora_request: Any = None
    ) -> Any:
        self._require_alive()
        await anyio.lowlevel.checkpoint()
        if prompt.get("type") == "token":
            return self._asked(request_id, prompt, params)
        salt, collector = str(prompt["cache_salt"]), Collector(f"{request_id}-inside")
        tokens, names = list(prompt["prompt_token_ids"]), prompt.get("multi_modal_uuids", {"image": ()})["image"]
        if names and self.reader is not None:
            tokens = self.reader.read(tokens, prompt["multi_modal_data"]["image"])
        request = Request(request_id, tokens, salt, params, collector, lora=lora_request, images=names)
        self.requests[request_id] = self._open[request_id] = request
        self.output_processor.request_states[collector.request_id] = request
        self._work.set()
        return request.collector

    async def add_lora(self, lora_request: Any) -> bool:
        self._require_alive()
        assert self.paused, "adapters change between decode steps"
        await anyio.lowlevel.checkpoint()
        self.adapters.append(lora_request)
        return True

    async def abort(self, request_id: Sequence[str]) -> None:
        for each in request_id:
            if request := self._ended(each):  # its collector learns it at once
                request.collector.put(Output([Completion([], [], "abort")]))
        self.asking -= set(request_id)
        if self.errored:
            return
        await anyio.lowlevel.checkpoint()
        for each in request_id:
            if request := self.requests.pop(each, None):
                self.aborted.append(request)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self._require_alive()
        for _ in range(self.overrun):
            await anyio.sleep(self.seconds)
        self.paused = True

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        assert (level, mode) == (1, "keep")
        assert not self.asleep
        await self.pause_generation(mode=mode, clear_cache=False)
        await self.reset_prefix_cache(reset_running_requests=True)
        self.asleep, self.slept = ["weights", "kv_cache"], self.slept + 1

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._require_alive()
        await anyio.sleep(self.seconds)
        for tag in tags or list(self.asleep):
            self.asleep.remove(tag)
        if not self.asleep:
            await self.resume_generation()

    async def resume_generation(self) -> None:
        self._require_alive()
        assert not self.asleep, "vLLM would compute with memory that it does not have"
        await anyio.lowlevel.checkpoint()
        self.paused = False
        self._work.set()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self._require_alive()
        if self.requests and not reset_running_requests:
            return False
        self.recomputed += 1
        self.cached.clear()
        return True

    async def update_weight_version(self, new_version: str) -> None:
        self._require_alive()
        self.version = new_version

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self._require_alive()
        self.transfers.append(request)

    async def start_weight_update(self) -> None:
        self._require_alive()
        if self._updating:
            raise RuntimeError("a weight update is already active")
        self._updating = True

    async def update_weights(self, request: Any) -> None:
        self._require_alive()
        if not self._updating:
            raise RuntimeError("start_weight_update must be called before update_weights")
        assert self.paused, "weights change between decode steps"
        assert "weights" not in self.asleep, "there is no memory for them"

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._require_alive()
        if not self._updating:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self._updating = False
        if weight_version is not None:
            await self.update_weight_version(weight_version)
            self.updates.append(weight_version)

    def _require_alive(self) -> None:
        if self.errored:
            raise EngineDeadError("EngineCore encountered an issue")

    def die(self) -> None:
        """End as a killed process does."""
        self.errored = True
        for request in self._open.values():
            request.collector.fail(EngineDeadError("EngineCore encountered an issue"))

    async def run(self) -> None:
        """Decode for ever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._deliver)
            while not self.errored:
                if self.paused or not self.requests:
                    self._work = anyio.Event()
                    await self._work.wait()
                    continue
                await anyio.sleep(self.seconds)
                if not self.errored and not self.paused:
                    self.rows.append(len(self.requests))
                    for request in list(self.requests.values()):
                        self._advance(request)
            tasks.cancel_scope.cancel()

    async def _deliver(self) -> None:
        """Put outputs into their collectors as they become due."""
        while True:
            if not self._sent:
                self._mail = anyio.Event()
                await self._mail.wait()
            due, request, output, version = self._sent.pop(0)
            await anyio.sleep(max(0.0, due - anyio.current_time()))
            self._put(request, output, version)

    def _put(self, request: Request, output: Output, version: str) -> None:
        if request.id not in self._open:  # it was aborted meanwhile
            return
        if not request.weight_version_starts or request.weight_version_starts[-1][0] != version:
            request.weight_version_starts.append((version, request.delivered))
        self._route(request, output.outputs[0])
        request.delivered += len(output.outputs[0].token_ids)
        if output.outputs[0].finish_reason is not None:
            self._ended(request.id)
        request.collector.put(output)

    def _route(self, request: Request, completion: Completion) -> None:
        """Give the experts of the positions that the token was made of: in the prompt, those that were asked for."""
        begin = getattr(request.params, "routed_experts_prompt_start", None)
        if begin is None:
            return
        end = len(request.prompt) + request.delivered
        start = begin if request.delivered == 0 else end - 1
        request.routed_experts_chunks.append(experts_of([*request.prompt, *request.tokens])[start:end])
        if completion.finish_reason is not None:
            completion.routed_experts = np.concatenate(request.routed_experts_chunks)

    def _ended(self, name: str) -> Request | None:
        if request := self._open.pop(name, None):
            del self.output_processor.request_states[request.collector.request_id]
        return request

    def _advance(self, request: Request) -> None:
        position = len(request.prompt) + len(request.tokens)
        params = request.params
        if not request.tokens:
            request.cached = self.hit(tuple(request.prompt), request.salt)
        others = [token for token in range(10, VOCABULARY) if token not in params.stop_token_ids]
        token = others[int(noise(params.seed, len(request.tokens)) * len(others))]
        ends = bool(params.stop_token_ids) and len(request.tokens) + 1 >= max(
            self.length(request.prompt), params.min_tokens
        )
        if ends:
            token = params.stop_token_ids[0]
        found = {token: SimpleNamespace(logprob=self.logprob(position))}
        found |= {1 + k: SimpleNamespace(logprob=-2.0) for k in range(params.logprobs) if 1 + k != token}
        request.tokens.append(token)
        request.versions.append(self.version)
        reason = "stop" if ends else "length" if len(request.tokens) >= params.max_tokens else None
        output = Output([Completion([token], [found], reason)], request.cached)
        if reason is not None:
            output.outputs[0].weight_versions = self._spans(request)
            self.done.append(self.requests.pop(request.id))
        if self.late:
            self._sent.append((anyio.current_time() + self.late, request, output, self.version))
            self._mail.set()
        else:
            self._put(request, output, self.version)

    def hit(self, sequence: tuple[int, ...], salt: str = "") -> int:
        """Return how many tokens were cached, never all of them; cache the whole blocks."""
        heads = [(salt, sequence[:end]) for end in range(BLOCK, len(sequence) + 1, BLOCK)]
        hit = 0
        for _, head in heads:
            if (salt, head) not in self.cached or len(head) == len(sequence):
                break
            hit = len(head)
        for each in heads:
            self.cached.pop(each, None)
            self.cached[each] = None
        while len(self.cached) > self.room:
            del self.cached[next(iter(self.cached))]
        return hit

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> None:
        assert method == "oppo_temper"
        self.tempers.append(args)

    def _asked(self, name: str, prompt: Mapping[str, Any], params: Any) -> Answering:
        sequence = tuple(prompt["prompt_token_ids"])
        assert sequence
        assert name not in self.asking
        self.sequences.append(sequence)
        self.asking.add(name)
        if hasattr(params, "task"):
            assert vars(params) == {"task": "classify", "use_activation": False}
            pooled = SimpleNamespace(data=np.array([score(sequence)]))
            answer = SimpleNamespace(num_cached_tokens=self.hit(sequence), outputs=pooled)
            return Answering(name, answer, self)
        assert (params.max_tokens, params.skip_reading_prefix_cache, params.flat_logprobs) == (1, False, True)
        return Answering(name, self._read(sequence, str(prompt["cache_salt"]), params.prompt_logprobs), self)

    def _read(self, sequence: tuple[int, ...], salt: str, k: int) -> Any:
        cached, flat = self.hit(sequence, salt), SimpleNamespace(token_ids=[], logprobs=[])
        temperature, known = self.tempers[-1] if self.tempers else (1.0, self.vllm_config.model_config.get_vocab_size())
        for at in range(1, len(sequence)):
            ids, logprobs = [-1] * (1 + k), [float("nan")] * (1 + k)
            if at > cached:
                found = logprobs_after(sequence[:at], known, temperature)
                ids = [sequence[at], *np.argsort(-found, kind="stable")[:k].tolist()]
                logprobs = found[ids].tolist()
            if at > cached or self.uninitialised:
                flat.token_ids += ids
                flat.logprobs += logprobs
        return SimpleNamespace(num_cached_tokens=cached, prompt_logprobs=flat)

    def _spans(self, request: Request) -> list[Any]:
        if self.mislabelled:
            return [SimpleNamespace(version="another-9", start=0, end=len(request.tokens))]
        starts = [k for k, version in enumerate(request.versions) if k == 0 or version != request.versions[k - 1]]
        ends = [*starts[1:], len(request.versions)]
        return [
            SimpleNamespace(version=request.versions[start], start=start, end=end)
            for start, end in zip(starts, ends, strict=True)
        ]


def score(sequence: Sequence[int]) -> float:
    return noise(*sequence)


def logprobs_after(prefix: Sequence[int], vocabulary: int, temperature: float = 1.0) -> NDArray[np.float32]:
    """Return the log-probs of the next token, float32 [vocabulary]."""
    seed = int(noise(*prefix) * 2**31)
    logits = np.random.default_rng(seed).normal(scale=2.0, size=vocabulary) / temperature
    shifted = logits - logits.max()
    logprobs: NDArray[np.float32] = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    return logprobs


@dataclass
class FakeSender:
    """Has an engine take weights after some seconds, without a file; ``fails`` raises instead, once."""

    seconds: float = 0.02
    fails: Exception | None = None

    async def send(self, engine: Engine, tensors: Mapping[str, Tensor], version: str) -> None:
        await anyio.sleep(self.seconds)
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        async with in_time(DEADLINE, version):
            await engine.start_update()
            await engine.update({})
            await engine.finish_update(version)


class FakeEngine(VllmEngine):
    """An engine around the fake; vLLM is not installed."""

    @staticmethod
    def sampling(keywords: Mapping[str, Any], *, new: bool = False) -> object:
        return SimpleNamespace(**keywords)

    @staticmethod
    def pooling(keywords: Mapping[str, Any]) -> object:
        return SimpleNamespace(**keywords)

    @staticmethod
    def lora(name: str, path: str, *, replaces: bool) -> object:
        return SimpleNamespace(name=name, path=path, replaces=replaces)


def engine_of(
    llm: FakeAsyncLLM, sender: WeightSender | None = None, *, adapts: bool = False, pictures: Pictures | None = None
) -> VllmEngine:
    """Return an engine around a fake."""
    files = EngineFiles(LOG)
    return FakeEngine(
        llm, sender or FakeSender(), Children(), ExitStack(), files=files, adapts=adapts, pictures=pictures
    )


@asynccontextmanager
async def running(llm: FakeAsyncLLM) -> AsyncIterator[None]:
    """Let the fake decode beside the body."""
    with as_itself():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(llm.run)
            yield
            tasks.cancel_scope.cancel()


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
    llm: FakeAsyncLLM = field(default_factory=FakeAsyncLLM)
    config: dict[str, Any] = field(default_factory=dict)  # as ``/server_info`` has it
    instead: dict[str, httpx.Response] = field(default_factory=dict)  # answers of routes in the place of its own
    key: str = ""  # that requests must have
    forgets: bool = False  # it takes updates without naming their version
    loads: bool = False  # it loads adapters while it runs
    likely: int = 0  # ids that have all of the probability; 0: all ids
    failing: int = 0  # so many requests to score are answered with 503 first
    adapters: list[str] = field(default_factory=list)  # names of those that it has
    init: Mapping[str, Any] = field(default_factory=dict)  # what the last ``/init_weight_transfer_engine`` said
    asked: list[str] = field(default_factory=list)  # paths, in order
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of requests for tokens and scores

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
