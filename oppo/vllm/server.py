"""A vLLM server by its URL, in development mode, as the engine of a policy.

A request of the policy is a stream of tokens. The server ends it at each pause, and a new request with the tokens so
far continues it: a server names the version of the weights only when a request ends, so the tokens of a stream that
spans a weight sync would have no known version.

All abilities that a run needs of a server are checked at the connection. The error for a missing one names the
expected and the received answer, and the command that starts the server right.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import anyio
import torch
from anyio.abc import TaskGroup
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from oppo.errors import ConfigError, as_itself, one_line, shortened
from oppo.images import ImageRef
from oppo.libraries import require
from oppo.log import logger
from oppo.vllm.arguments import Route, ServerSettings, address_of, room_for
from oppo.vllm.engine import Engine, NewTokens, ServedWeights, WeightSender, digest_of
from oppo.vllm.plugin import transfer_of
from oppo.vllm.sync import DEADLINE, DeviceSender, FileSender, HostedFiles, WeightFiles

if TYPE_CHECKING:
    import httpx

VERSIONS: Final = SpecifierSet(">=0.32,<0.33")  # the servers whose routes are known here
# A server refuses it before it reads a token, with the size of its vocabulary.
PROBE: Final = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "logit_bias": {str(2**30): 0.0}}}

# What the configs of the trained and of the served model must agree on.
COMPARED: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)

LOCAL: Final = ("localhost", "127.0.0.1", "::1")

UNSYNCED: Final = "default"  # a server's name for the weights that it was started with
GENERATE: Final = "/inference/v1/generate"
LOAD: Final = "/v1/load_lora_adapter"
NO_LOGPROB: Final = -9999.0  # a server's number for minus infinity, or for a log-prob that is NaN
HEALTH: Final = 5.0  # seconds between two looks at whether a server is there that streams tokens
DRAIN: Final = 5.0  # seconds that streams have to end at a pause; then they are given up, and their last tokens


def start_command(
    model: str | Path, url: str, *, backend: str = "file", on_cpu: bool = False, adapters: int = 0
) -> str:
    # On a CPU vLLM's other command finds no package of its name.
    program = "python -m vllm.entrypoints.openai.api_server --model" if on_cpu else "vllm serve"
    port = urlsplit(url).port
    config = shlex.quote(json.dumps({"backend": transfer_of(backend)}))
    loads = " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" if adapters else ""
    return (
        f"VLLM_SERVER_DEV_MODE=1{loads} {program} {shlex.quote(str(model))}{f' --port {port}' if port else ''} "
        f"--enable-scale-out --logprobs-mode processed_logprobs --max-logprobs -1 --weight-transfer-config {config}"
        f"{f' --enable-lora --max-lora-rank {room_for(adapters)}' if adapters else ''}"
        f"{' --no-enable-chunked-prefill --enforce-eager' if on_cpu else ''}"
    )


@dataclass
class Inspection:
    url: str
    client: httpx.Client
    model: str | Path  # as the server's command would name the one that is trained
    keyed: bool  # whether requests carry a key
    backend: str = "file"
    on_cpu: bool = False
    adapters: int = 0  # rank of the adapters that are synced alone; 0: none are
    command: str = ""  # that starts it; empty: as the policy needs it
    faults: list[str] = field(default_factory=list)

    @property
    def _start(self) -> str:
        if self.command:
            return f"start it as\n  {self.command}"
        command = start_command(self.model, self.url, backend=self.backend, on_cpu=self.on_cpu, adapters=self.adapters)
        return f"start it, with oppo installed beside vLLM, as\n  {command}"

    def asked(self, method: str, path: str, body: object = None, *, status: int = 200) -> dict[str, Any]:
        """Return the JSON of an answer; of one with another status, nothing, and a fault is noted."""
        import httpx  # noqa: PLC0415 - an extra

        try:
            answer = self.client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"no vLLM server answers at {self.url} ({one_line(error)}): {self._start}") from error
        try:
            found = answer.json()
        except ValueError:
            found = None
        if answer.status_code in {401, 407}:
            raise ConfigError(
                f"the vLLM server at {self.url} refuses {'the key' if self.keyed else 'requests without a key'}: "
                f"{path} answered {answer.status_code}; expected the key that it was started with (--api-key or "
                "VLLM_API_KEY) in the environment variable that api_key_env names (in a program: api_key=)"
            )
        if not isinstance(found, dict) and (path == "/version" or answer.status_code != 404):
            kind = answer.headers.get("content-type", "nothing")
            raise ConfigError(
                f"what answers at {self.url} is no vLLM server: {path} should be JSON, and is {answer.status_code}, "
                f"{kind}, {shortened(' '.join(answer.text.split()), 80)!r}; give the address of the server itself, "
                "without the path of a route (/v1)"
            )
        if answer.status_code != status:
            said = f": {_message(found)}" if found else ""
            self.faults.append(f"{path} should answer {status}, and answers {answer.status_code}{said}")
            return {}
        return found if isinstance(found, dict) else {}

    def expect(self, what: str, expected: object, came: object, *, ok: bool | None = None) -> None:
        if not (came == expected if ok is None else ok):
            self.faults.append(f"{what} should be {expected}, and is {came}")

    def settle(self) -> None:
        if self.faults:
            listed = "\n".join(f"- {fault}" for fault in self.faults)
            raise ConfigError(f"the vLLM server at {self.url} cannot serve this run:\n{listed}\n{self._start}")

    def check_version(self) -> None:
        version = self.asked("GET", "/version").get("version")
        self.expect("the version of vLLM", VERSIONS, version, ok=_is_known(version))

    def config(self) -> dict[str, Any]:
        self.check_version()
        config: dict[str, Any] = self.asked("GET", "/server_info?config_format=json").get("vllm_config", {})
        if not config:
            self.faults.append(
                "VLLM_SERVER_DEV_MODE=1 is not in its environment: the routes of weight sync are missing"
            )
            self.vocabulary()
            self.settle()
        model, scheduler = config.get("model_config", {}), config.get("scheduler_config", {})
        self.on_cpu = config.get("device_config", {}).get("device") == "cpu"
        self.expect("--logprobs-mode", "processed_logprobs", model.get("logprobs_mode"))
        self.expect("--max-logprobs", -1, model.get("max_logprobs"))
        self.expect("--speculative-config", None, config.get("speculative_config"))
        self.expect("--runner", "generate", scheduler.get("runner_type"))
        if self.on_cpu:  # a part of a prompt whose request has a seed ends the engine
            self.expect("--enable-chunked-prefill on a CPU", False, scheduler.get("enable_chunked_prefill"))
        served = (config.get("weight_transfer_config") or {}).get("backend")
        backends = [transfer_of(each) for each in (("file",) if self.adapters else ("file", "nccl"))]
        if self.adapters:
            rank = (config.get("lora_config") or {}).get("max_lora_rank", 0)
            self.expect(
                "--max-lora-rank, with --enable-lora", f"at least {self.adapters}", rank, ok=rank >= self.adapters
            )
            self.asked("POST", LOAD, {}, status=400)
        else:
            self.expect("--enable-lora", False, config.get("lora_config") is not None)
        self.expect("the backend of --weight-transfer-config", " or ".join(backends), served, ok=served in backends)
        if served == transfer_of("nccl"):
            self.backend = "nccl"
        return config

    def vocabulary(self) -> int:
        refusal = self.asked("POST", "/inference/v1/generate", PROBE, status=400)
        if not refusal:
            self.faults.append("--enable-scale-out is missing, or the model generates no tokens")
            return 0
        found = re.search(r"Vocabulary size: (\d+)", _message(refusal))
        if found is None:
            self.faults.append(f"/inference/v1/generate should tell its vocabulary, and says {_message(refusal)}")
        return 0 if found is None else int(found[1])

    def begin_transfer(self, path: Path, trained: Any) -> None:
        text = None if trained is None else trained.get_text_config()
        wanted = {name: value for name in COMPARED if (value := getattr(text, name, None)) is not None}
        self.asked("POST", "/init_weight_transfer_engine", {"init_info": {"path": str(path), "model": wanted}})


def _is_known(version: object) -> bool:
    try:
        return Version(str(version)) in VERSIONS
    except InvalidVersion:
        return False


def _message(answer: Any) -> str:
    error = answer.get("error", answer.get("detail", answer)) if isinstance(answer, Mapping) else answer
    return shortened(str(error.get("message", error) if isinstance(error, Mapping) else error), 300)


def config_of(model: str | Path, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds to import

    return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)


class ServerFault(Exception):  # noqa: N818 - it says what happened
    """A server is gone, or answered what it should not; to users it comes as :class:`~oppo.errors.ModelLost`."""


class Inbox:
    def __init__(self) -> None:
        self._new: NewTokens | None = None
        self._error: Exception | None = None
        self._ready = anyio.Event()

    def put(self, new: NewTokens) -> None:
        if self._new is None:
            self._new = new
        else:
            self._new.tokens += new.tokens
            self._new.logprobs += new.logprobs
            self._new.reason, self._new.starts = new.reason, new.starts
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    def get_nowait(self) -> NewTokens | None:
        if self._new is not None:
            new, self._new = self._new, None
            if self._error is None:
                self._ready = anyio.Event()
            return new
        if self._error is not None:
            raise self._error
        return None

    async def get(self) -> NewTokens:
        while (new := self.get_nowait()) is None:
            await self._ready.wait()
        return new


@dataclass(eq=False, slots=True)
class Stream:
    """A request of the policy, in as many parts as there were pauses."""

    name: str
    prompt: Sequence[int]
    params: Mapping[str, Any]
    inbox: Inbox
    made: list[int] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)  # versions of tokens, with the first token of each
    parts: int = 0  # requests that the server has had for it
    part: anyio.CancelScope | None = None  # the one that is open, if any; cancelling it gives it up
    over: anyio.Event = field(default_factory=anyio.Event)  # set when there is none

    @property
    def part_name(self) -> str:
        return f"{self.name}-{self.parts}"

    def body(self, model: str, version: str) -> dict[str, object]:
        # The next request's prompt is all that there is.
        made, params = len(self.made), dict(self.params)
        params["max_tokens"] -= made
        params["min_tokens"] = max(0, params["min_tokens"] - made)
        if made:
            params["seed"] = digest_of(f"{params['seed']} {made}")
        return {
            "model": model,
            "request_id": self.part_name,
            "token_ids": [*self.prompt, *self.made],
            "sampling_params": params,
            "cache_salt": version,
            "stream": True,
        }

    def name_weights(self, version: str, start: int) -> None:
        starts = [each for each in self.starts if each[1] < start]
        self.starts = starts if starts and starts[-1][0] == version else [*starts, (version, start)]


class VllmServer(Engine):
    """A vLLM server, which others start and end, as the engine of a policy.

    Tokens come by its route ``/inference/v1/generate``; weights go by its routes of reinforcement learning, through a
    file, or by NCCL if it was started so. One run uses it at a time; the next one has to load its weights first.

    Args:
        model: the one that is trained, a directory or hub name, which the server's is compared with; ``None``: weights
            of another model are noticed at the first weight sync.
        trainer: the device of the weights that will be synced.
        api_key: what it was started with, as ``--api-key``.
        adapters: rank of the adapters that will be synced alone; 0: all weights are synced.
        weights_directory: where the files of weights are, for a server on another machine that has it too.
        files: carry the weights, or the adapters, to where the server reads them; ``None``: in that directory, or in
            this machine's memory.
        timeout: seconds for each call that moves no weights.
        trust_remote_code: the config of ``model`` may come with code.
        transport: of httpx, for tests; it is used for blocking calls too.

    Raises:
        ConfigError: there is no such server, or it lacks something: what was expected, what came, what to do.

    Example:
        >>> server = VllmServer("http://localhost:8000", model="models/actor")  # doctest: +SKIP
        >>> policy = VllmPolicy(server, sampling=Sampling(max_new_tokens=128))  # doctest: +SKIP
    """

    defers = "with other tokens"

    def __init__(
        self,
        url: str,
        *,
        model: str | Path | None = None,
        trainer: torch.device | str = "cpu",
        api_key: str | None = None,
        adapters: int = 0,
        weights_directory: str | Path | None = None,
        files: WeightFiles | HostedFiles | None = None,
        timeout: float = 60.0,
        trust_remote_code: bool = False,
        transport: Any = None,
    ) -> None:
        require("http", "a vLLM server", module="httpx")
        import httpx  # noqa: PLC0415 - an extra

        super().__init__()
        self.url = address_of(url)
        self.adapts = adapters > 0
        self.error: ServerFault | None = None  # why it counts as lost
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout, self._transport = timeout, transport
        with self._client() as client:
            found = Inspection(self.url, client, model or "MODEL", api_key is not None, adapters=adapters)
            config = found.config()
            self.vocabulary = found.vocabulary()
            found.settle()
            trained = None if model is None else config_of(model, trust_remote_code=trust_remote_code)
            served = found.asked("GET", "/v1/models").get("data") or [{}]
            version = found.asked("GET", "/weight_info").get("weight_version")
            device = torch.device(trainer)
            if found.backend == "nccl":
                found.expect("the device of a trainer that sends by NCCL", "cuda", device.type)
                workers = int(found.asked("GET", "/get_world_size").get("world_size", 1))
                self.sender: WeightSender = DeviceSender(_route(self.url, device, workers))
            else:
                files = files or _weight_files(self.url, weights_directory, adapters=self.adapts)
                found.begin_transfer(files.probe, trained)
                self.sender = FileSender(files, adapts=self.adapts)
            found.settle()
        described = config["model_config"]
        self.name = Path(str(model or described["model"])).name
        self.longest = int(described["max_model_len"])
        self.dtype = getattr(torch, str(described["dtype"]).removeprefix("torch."))
        self.dtype_chosen = True
        self.kv_tokens = config.get("cache_config", {}).get("kv_cache_size_tokens")
        self.weights = None
        if model is not None and trained is not None:
            self.weights = ServedWeights.known(model, trained, trust_remote_code)
        self._model = str(served[0].get("id", ""))
        self._synced = version == UNSYNCED  # no other weights were synced since it was started
        self._version = ""
        self._open: dict[str, Stream] = {}
        self._tasks: TaskGroup | None = None
        self._paused = self._pausing = False
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            timeout=timeout,
            # No connection outlives its request, so that the client has nothing to close.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            verify=ssl.create_default_context() if self.url.startswith("https") else False,
            transport=transport,
        )
        logger.info(f"the vLLM server at {self.url} serves {described['model']} in {self.dtype}")

    def _client(self) -> httpx.Client:
        import httpx  # noqa: PLC0415 - an extra

        return httpx.Client(base_url=self.url, headers=self._headers, timeout=self._timeout, transport=self._transport)

    def check_options(self, *, keeps_kv: bool, routed_experts: bool) -> None:
        ServerSettings.check_options(keeps_kv=keeps_kv, routed_experts=routed_experts)

    @property
    def advice(self) -> str:
        cause = "" if self.error is None else f"{self.error}; "
        return (
            f"{cause}start the server at {self.url} again, or go on from the newest checkpoint (oppo resume) with "
            "another; its own output says what happened"
        )

    def abort(self) -> None:
        """Wait for the server no longer; safe to call from any thread."""
        if self._loop is None:
            self.die("the run has given it up")
            return
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self.die, "the run has given it up")

    def close(self) -> None:
        """Leave the server, which goes on with the weights that it has; idempotent."""
        if self.closed:
            return
        self.closed = True
        if not self.errored:
            with suppress(Exception), self._client() as client:  # it may have ended meanwhile
                client.post("/resume", timeout=5.0)

    @property
    def errored(self) -> bool:
        return self.error is not None

    def die(self, reason: str) -> ServerFault:
        self.error = self.error or ServerFault(f"{self.url} is lost: {reason}")
        for stream in self._open.values():
            stream.inbox.fail(self.error)
        return self.error

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        with as_itself():
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._watch, name="watch the vLLM server")
                try:
                    yield
                finally:
                    self._tasks = None
                    tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        while not self.errored:
            await anyio.sleep(HEALTH)
            try:
                await self._call("GET", "/health")
            except ServerFault as error:
                self.die(one_line(error))

    async def submit(
        self, request: str, tokens: list[int], salt: str, params: Mapping[str, Any], images: Sequence[ImageRef] = ()
    ) -> Inbox:
        """Open a stream; a server that is paused gets it when it is resumed. Its salt is the version of its weights."""
        del salt, images
        stream = self._open[request] = Stream(request, tokens, params, Inbox())
        if not self._paused:
            self._begin(stream)
        return stream.inbox

    async def discard(self, requests: Sequence[str]) -> None:
        found = [self._open.pop(each) for each in requests if each in self._open]
        for stream in found:
            stream.inbox.put(NewTokens([], [], "abort"))
        await self._give_up([stream for stream in found if stream.part is not None])

    async def _give_up(self, streams: Sequence[Stream]) -> None:
        # A server notices a connection that is closed, but maybe not behind a proxy. Without ids it would abort all.
        for stream in streams:
            if stream.part is not None:
                stream.part.cancel()
        if streams:
            names = [f"generate-tokens-{stream.part_name}" for stream in streams]
            await self._call("POST", "/abort_requests", body={"request_ids": names})

    async def pause(self) -> None:
        """Stop the server; requests stay as they are here, while their streams end."""
        self._pausing = True
        try:
            await self._call("POST", "/pause", {"mode": "abort", "clear_cache": False})
            running = [stream for stream in self._open.values() if stream.part is not None]
            with anyio.move_on_after(DRAIN):
                for stream in running:
                    await stream.over.wait()
            await self._give_up([stream for stream in running if not stream.over.is_set()])
            for stream in running:
                await stream.over.wait()
        finally:
            self._pausing = False
        self._paused = True

    async def resume(self) -> None:
        """Have the server go on, if it still serves the weights that were synced last."""
        await self._check_version()
        if not self._synced:
            raise ServerFault(
                f"{self.url} has the weights of an earlier run: load those that are trained before the first step, as "
                "oppo train does (policy.load)"
            )
        await self._call("POST", "/resume")
        self._paused = False
        for stream in self._open.values():
            self._begin(stream)

    async def recompute(self) -> bool:
        parameters = {"reset_running_requests": True}
        return bool((await self._call("POST", "/reset_prefix_cache", parameters)).get("success"))

    async def init_transfer(self, info: dict[str, Any]) -> None:
        await self._call("POST", "/init_weight_transfer_engine", body={"init_info": info}, seconds=DEADLINE)

    async def load_adapter(self, version: str, path: str) -> None:
        """Load an adapter for all streams that begin from now on, and unload the one before."""
        named = {"lora_name": version, "lora_path": path}
        await self._call("POST", LOAD, body=named, seconds=DEADLINE, reads=False)
        if self.adapter:
            await self._call("POST", "/v1/unload_lora_adapter", body={"lora_name": self.adapter}, reads=False)
        self._model = self.adapter = version
        self._synced = True

    async def start_update(self) -> None:
        try:
            await self._call("POST", "/start_weight_update", seconds=DEADLINE)
        except ServerFault as fault:
            if "already active" not in str(fault):
                raise
            # A run that ended in the midst of an update has left it open.
            await self._call("POST", "/finish_weight_update", body={}, seconds=DEADLINE)
            await self._call("POST", "/start_weight_update", seconds=DEADLINE)

    async def update(self, info: dict[str, Any]) -> None:
        await self._call("POST", "/update_weights", body={"update_info": info}, seconds=DEADLINE)

    async def finish_update(self, version: str | None = None) -> None:
        body = {} if version is None else {"weight_version": version}
        await self._call("POST", "/finish_weight_update", body=body, seconds=DEADLINE)
        self._synced = True
        if version is not None:
            self._version = version
            await self._check_version()

    async def name_version(self, version: str) -> None:
        await self._call("POST", "/update_weight_version", body={"new_version": version})
        self._version = version
        await self._check_version()

    async def _check_version(self) -> None:
        served = (await self._call("GET", "/weight_info")).get("weight_version")
        if served != self._version:
            raise ServerFault(
                f"{self.url} serves weights {served!r}, and {self._version!r} were synced to it: it has not taken "
                "them, was started again, or another run uses it too"
            )

    async def _call(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str | bool] | None = None,
        *,
        body: object = None,
        seconds: float | None = None,
        reads: bool = True,
    ) -> dict[str, Any]:
        import httpx  # noqa: PLC0415 - an extra

        timeout = self._http.timeout if seconds is None else httpx.Timeout(seconds)
        try:
            answer = await self._http.request(method, path, params=parameters, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise self.die(f"{path}: {one_line(error)}") from error
        if not answer.is_success:
            raise ServerFault(f"{self.url}{path} answered {said(answer)}")
        if not reads:
            return {}
        try:
            found = answer.json() if answer.content else {}
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ServerFault(f"{self.url}{path} answered no JSON object: {shortened(answer.text, 200)!r}")
        return found

    def _begin(self, stream: Stream) -> None:
        if self._tasks is None:
            raise ServerFault(f"{self.url} streams tokens while a policy decodes, and none does")
        stream.part, stream.over = anyio.CancelScope(), anyio.Event()
        self._tasks.start_soon(self._read, stream, stream.part, name=f"stream of request {stream.name}")

    async def _read(self, stream: Stream, part: anyio.CancelScope) -> None:
        import httpx  # noqa: PLC0415 - an extra

        try:
            with part:
                await self._follow(stream)
        except httpx.HTTPError as error:
            self.die(one_line(error))
        except Exception as error:  # noqa: BLE001 - raised where the tokens are awaited
            stream.inbox.fail(error)
        finally:
            stream.part = None
            stream.over.set()

    async def _follow(self, stream: Stream) -> None:
        import httpx  # noqa: PLC0415 - an extra

        stream.parts += 1
        stream.name_weights(self._version, start := len(stream.made))
        body, timeout = stream.body(self._model, self._version), httpx.Timeout(self._http.timeout.connect, read=None)
        async with self._http.stream("POST", GENERATE, json=body, timeout=timeout) as answer:
            if not answer.is_success:
                await answer.aread()
                raise ServerFault(f"{self.url}{GENERATE} answered {said(answer)}")
            ended = False
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    ended = self._take(stream, start, json.loads(line.removeprefix("data: "))) or ended
        if not ended:
            raise ServerFault(f"{self.url} ended a stream of tokens without saying why")

    def _take(self, stream: Stream, start: int, chunk: Mapping[str, Any]) -> bool:
        if failure := chunk.get("error"):
            raise ServerFault(f"{self.url} could not go on: {shortened(str(failure), 200)}")
        try:
            (choice,) = chunk["choices"]
            logprobs: list[Mapping[int, float]] = [
                {each["token_id"]: _finite(each["logprob"]) for each in (one, *one["top_logprobs"])}
                for one in (choice["logprobs"] or {"content": []})["content"]
            ]
            reason = choice["finish_reason"]
            paused = reason == "abort" and self._pausing
            new = NewTokens(list(choice["token_ids"]), logprobs, None if paused else reason)
            starts = [(str(each["version"]), int(each["start"])) for each in choice["weight_versions"] or ()]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault(
                f"{self.url} streamed something else than tokens ({one_line(error)}): "
                f"{shortened(json.dumps(chunk), 200)}"
            ) from error
        stream.made += new.tokens
        for version, first in starts:
            stream.name_weights(version, start + first)
        if new.reason is not None:
            self._open.pop(stream.name, None)
        new.starts = stream.starts
        stream.inbox.put(new)
        return reason is not None


def _finite(logprob: float) -> float:
    return float("-inf") if logprob <= NO_LOGPROB else logprob


def said(answer: httpx.Response) -> str:
    return f"{answer.status_code} {answer.reason_phrase}: {shortened(' '.join(answer.text.split()), 300)}"


def _weight_files(url: str, directory: str | Path | None, *, adapters: bool) -> WeightFiles:
    host = urlsplit(url).hostname
    if directory or host in LOCAL:
        return WeightFiles(Path(directory) if directory else None, adapters=adapters)
    raise ConfigError(
        f"the vLLM server at {url} gets its weights through a file, and {host} is another machine: name a directory "
        "that both have by vllm.weights_directory (in a program: weights_directory=), or start it with the backend "
        f"{transfer_of('nccl')}, for a trainer on a GPU"
    )


def _route(url: str, trainer: torch.device, workers: int) -> Route:
    require("vllm", "a trainer that sends weights by NCCL")
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    kind = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host, port))
        address = str(probe.getsockname()[0])
    number = trainer.index or 0
    return Route("nccl", workers, torch.device("cuda", number) if trainer.type == "cuda" else trainer, address)
