"""What a vLLM server must be started with, and what one lacks.

All that a run needs of the server is asked for when the two connect. What is missing is an error that names what was
expected and what came, with the command that starts the server right.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self
from urllib.parse import urlsplit

from annotated_types import Gt, MinLen
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import TypeAdapter, ValidationError

from oppo.declared import expectation, split_url
from oppo.errors import ConfigError, did_you_mean, one_line, shortened
from oppo.libraries import require
from oppo.vllm.arguments import room_for
from oppo.vllm.plugin import transfer_of

if TYPE_CHECKING:
    import httpx

VERSIONS: Final = SpecifierSet(">=0.32,<0.33")
"""The servers whose routes are known here."""

PROBE: Final = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "logit_bias": {str(2**30): 0.0}}}
"""A request that a server refuses before it reads a token, with the size of its vocabulary."""

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
"""What the configs of the trained and of the served model must agree on."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The keys of ``[vllm]`` that are about servers; ``timeout`` is for each call that moves no weights."""

    urls: Annotated[tuple[str, ...], MinLen(1)]
    api_key_env: str = ""
    weights_directory: str = ""
    timeout: Annotated[float, Gt(0)] = 60.0

    @classmethod
    def of(cls, table: Mapping[str, object]) -> Self | None:
        if "urls" not in table:
            return None
        own = [each.name for each in fields(cls)]
        faults = [
            f"vllm.{name}{did_you_mean(name, own)} is for an engine that the run starts, and vllm.urls names a server: "
            f"give it to the server's command, as --{name.replace('_', '-')}, or leave urls out"
            for name in table
            if name not in own
        ]
        try:
            found = TypeAdapter(cls).validate_python({name: table[name] for name in table if name in own})
        except ValidationError as error:
            faults += [f"vllm.{each['loc'][0]}: expected {expectation(each)}" for each in error.errors()]
        else:
            for url in found.urls:
                try:
                    address_of(url)
                except ConfigError as error:
                    faults.append(f"vllm.urls: {error}")
            if len(set(found.urls)) < len(found.urls):
                faults.append("vllm.urls names a server twice: name each once")
        if faults:
            raise ConfigError("\n".join(faults))
        return found

    def api_key(self) -> str | None:
        if not self.api_key_env:
            return None
        if key := os.environ.get(self.api_key_env):
            return key
        raise ConfigError(
            "vllm.api_key_env: expected the name of an environment variable that holds the server's key, and none of "
            "this name is set"
        )

    def check_environment(self) -> None:
        require("http", "vllm.urls", module="httpx")
        self.api_key()

    @staticmethod
    def check_options(*, keeps_kv: bool, routed_experts: bool) -> None:
        """Raise ``ConfigError`` where a policy is to do what a server cannot."""
        if keeps_kv:
            raise ConfigError(
                "kv_on_sync = 'keep' has rollouts go on over a weight sync, and a vLLM server says only at the end of "
                "a request which weights made its tokens: set step.kv_on_sync = 'recompute', or have one engine of "
                "this machine decode, without vllm.urls, replicas and clusters"
            )
        if routed_experts:
            raise ConfigError(
                "a vLLM server tells the routed experts of a request when it ends, and the trainer needs them with "
                "each token: set trainer.router_replay = false, or have one engine of this machine decode, without "
                "vllm.urls, replicas and clusters"
            )


LOAD: Final = "/v1/load_lora_adapter"


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
    """Asks a server for all that a run needs, and collects ``faults``.

    Attributes:
        model: the one that is trained, as the server's command would name it.
        keyed: whether requests carry a key.
        adapters: rank of the adapters that are synced by themselves; 0: none are.
        command: that starts it; empty: as the policy needs it.
    """

    url: str
    client: httpx.Client
    model: str | Path
    keyed: bool
    backend: str = "file"
    on_cpu: bool = False
    adapters: int = 0
    command: str = ""
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
        config = self.asked("GET", "/server_info?config_format=json").get("vllm_config", {})
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
        return dict(config)

    def vocabulary(self) -> int:
        refusal = self.asked("POST", "/inference/v1/generate", PROBE, status=400)
        if not refusal:
            self.faults.append("--enable-scale-out is missing, or the model generates no tokens")
            return 0
        found = re.search(r"Vocabulary size: (\d+)", _message(refusal))
        if found is None:
            self.faults.append(f"/inference/v1/generate should tell its vocabulary, and says {_message(refusal)}")
        return 0 if found is None else int(found[1])

    def agree(self, path: Path, model: str | Path | None, *, trust_remote_code: bool) -> None:
        wanted = {} if model is None else compared(config_of(model, trust_remote_code=trust_remote_code))
        self.asked("POST", "/init_weight_transfer_engine", {"init_info": {"path": str(path), "model": wanted}})


def address_of(url: str) -> str:
    """Return the URL of a server, without a slash at its end."""
    parts = split_url(url, "a vLLM server")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            f"the URL of the vLLM server at {parts.hostname} holds more than its address, and URLs are shown: give its "
            "key by api_key_env (in a program: api_key=)"
        )
    return url.rstrip("/")


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


def compared(config: Any) -> dict[str, object]:
    text = config.get_text_config()
    return {name: value for name in COMPARED if (value := getattr(text, name, None)) is not None}
