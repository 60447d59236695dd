"""The engines of a run: the policy's, and vLLM for scorers. Only this module distinguishes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, Final, TypeAlias, TypeVar

import anyio.to_thread
import torch
from transformers import PreTrainedModel

from oppo.atomic_files import make
from oppo.config.scorers import OnVllm, VllmRewardSection
from oppo.config.sections import ModelsSection
from oppo.errors import ConfigError, ModelRefused, OppoError
from oppo.hf.devices import DeviceLayout, ModelPlace, acting_share
from oppo.hf.loading import Loadable, ModelRecipe, positions_of
from oppo.hf.lora import adapter_matrices, rank_of
from oppo.hf.model_files import RewardKind, located
from oppo.hf.model_parts import longest
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.weights import SentWeights
from oppo.libraries import require
from oppo.log import logger, with_route
from oppo.models import Policy, Sampling
from oppo.observe import Reporter
from oppo.placement import Hosted, Place, PolicyPool, Process
from oppo.redact import key_of
from oppo.run.deployment import Deployment, Role
from oppo.run.loading import RoleLoader, ServedRewardModel
from oppo.run.rewards import track_of
from oppo.vllm import VllmEngine, VllmLogprobs, VllmPolicy, VllmReward, VllmServer
from oppo.vllm.arguments import (
    OF_LOGPROBS,
    OF_REWARDS,
    SETTINGS,
    ServerSettings,
    check_arguments,
    check_on_cpu,
    check_routed_experts,
    computes_on_cpu,
    gpus_of,
    placed,
    route_of,
)
from oppo.vllm.engine import Engine
from oppo.vllm.processes import ServerProcess
from oppo.vllm.scorers import LOGPROBS, SCALAR, LogprobServer, RewardServer, ScoringServer, VllmScorer, check_log_probs
from oppo.vllm.sync import HostedFiles

S = TypeVar("S", bound="VllmScorer[Any, Any]")
E = TypeVar("E", bound=ScoringServer)

NOT_ON_VLLM: Final[Mapping[RewardKind, str]] = {
    "process": "rewards each step, and vLLM reads all of a response again for every score at a token",
    "classifier": "is no causal model with one label, which alone vLLM reads as a response grows",
    "similarity": "is a sentence encoder, and vLLM reads a reward model of one label as a response grows",
}
"""Why vLLM does not serve a reward model of a kind."""

SERVING: Final = "lower step.batch, step.overcommit or sampling.max_new_tokens, or choose models.dtype = 'bfloat16'"
"""Advice to a served model that runs out of memory."""


Worker: TypeAlias = Place | Reporter  # a place, or the reporter of an engine in processes of its own


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    policy: Policy
    positions: int  # the longest sequence, in tokens, that the engine can read
    workers: tuple[Worker, ...] = ()
    abort: Callable[[], None] = lambda: None  # for one whose calls may hang; from any thread
    close: Callable[[], None] = lambda: None
    gpus: int = 1  # on which it decodes, or 1 for a CPU; 0: not known


@dataclass(frozen=True, slots=True, eq=False)
class ServeRequest:
    deployment: Deployment
    actor: PreTrainedModel  # the model that is trained, as transformers has loaded it
    served: Loadable  # the same, or how it is loaded on another machine
    sampling: Sampling
    tokenizer: HfTokenizer
    places: DeviceLayout
    log: Path | None = None  # for what the engine's processes write
    images: bool = False  # whether prompts show any


def serve(request: ServeRequest) -> Serving:
    return _on_vllm(request) if request.deployment.has_engine else _on_transformers(request)


def require_engines(deployment: Deployment) -> None:
    settings, assumed = deployment.settings, deployment.assumed
    for name in settings.run.track if assumed is None else ():
        require(name, f"run.track = [{name!r}]")
    for role, on in deployment.on_vllm("reward", "reference", "teacher"):
        try:
            _check_scoring(role, on, deployment)
        except ConfigError as error:
            raise ConfigError(f"{role.engine_key}: {error}") from error
    if not deployment.has_engine:
        return
    replays = settings.trainer.router_replay
    if (server := ServerSettings.of(settings.vllm)) is not None:
        server.check_options(keeps_kv=settings.step.kv_on_sync == "keep", routed_experts=replays)
        if assumed is None:
            server.check_environment()
        return
    check_arguments(settings.vllm, of=SETTINGS, planned=assumed is not None)
    if settings.starts_servers:
        _check_started(deployment)
    devices, gpus = deployment.devices, deployment.gpus
    on_cpu = computes_on_cpu() if assumed is None else devices.policy.type == "cpu"
    sleeps = settings.placement.share == "sleep"
    if on_cpu:
        check_on_cpu(settings.vllm, sleeps=sleeps, routed_experts=replays)
    if replays:
        check_routed_experts(settings.vllm)
    arguments = placed(settings.vllm, devices.policy)
    if sleeps:
        used, trained = gpus_of(arguments, gpus), [str(device) for device in devices.ranks_here]
        if not any(f"cuda:{number}" in trained for number in used):
            raise ConfigError(
                f"placement.share = 'sleep' frees the GPUs of vLLM, {', '.join(map(str, used))}, for the trainer, "
                f"and that is on {', '.join(trained)}: leave share out, or set placement.trainer"
            )
    if not settings.starts_servers:
        sender = torch.device("cpu") if deployment.models.lora_sync == "adapter" else devices.weights
        route_of(arguments, sender, on_cpu=on_cpu, gpus=gpus)


def _check_started(deployment: Deployment) -> None:
    settings = deployment.settings
    ServerSettings.check_options(
        keeps_kv=settings.step.kv_on_sync == "keep", routed_experts=settings.trainer.router_replay
    )
    if deployment.assumed is None:
        require("http", "placement.policy_replicas and placement.remote with models.engine = 'vllm'", module="httpx")
    if (workers := deployment.engine_workers) > 1 and "policy" not in settings.remote:
        raise ConfigError(
            f"placement.policy_replicas gives each replica of this machine a GPU, and [vllm] has {workers} workers: "
            "start servers yourself and name them in vllm.urls, place the policy in a cluster (placement.remote), or "
            "set vllm.data_parallel_size in the place of policy_replicas"
        )


def _check_scoring(role: Role, on: OnVllm, deployment: Deployment) -> None:
    settings, here, model = deployment.settings, deployment.assumed is None, role.model
    if model != "reward":
        check_log_probs(settings.sampling, server=bool(on.url))
    if on.url:
        if here:
            require("http", "url", module="httpx")
            key_of(on.api_key_env)
        return
    check_arguments(on.vllm, of=OF_REWARDS if model == "reward" else OF_LOGPROBS, planned=not here)
    if role.device.type == "cuda":
        gpus_of(placed(on.vllm, role.device), deployment.gpus)
    elif here and not computes_on_cpu():
        raise ConfigError(
            f"engine = 'vllm' computes on a GPU here, and {settings.placement.key_of(model)} has the {model} on a CPU: "
            f"set placement.{model} = 'cuda' or leave engine out"
        )


def served_dtype(models: ModelsSection, arguments: Mapping[str, object], trained: torch.dtype) -> str:
    # Merged adapters are served in float32: they change a weight by less than 16 bits can hold. Alone they are not.
    chosen = arguments.get("dtype", "auto")
    if chosen != "auto":
        return str(chosen)
    merges = models.adapts and models.lora_sync != "adapter"
    return "float32" if merges else str(trained).removeprefix("torch.")


def _adapter_rank(request: ServeRequest) -> int:
    if request.deployment.models.lora_sync != "adapter":
        return 0
    try:
        return rank_of(adapter_matrices(request.actor))
    except ModelRefused as error:
        raise ModelRefused(f"models.lora_sync = 'adapter': {error}") from error


def _on_transformers(request: ServeRequest) -> Serving:
    places, devices, settings = request.places, request.deployment.devices, request.deployment.settings

    def policy(number: int) -> HfPolicy:
        served, name = request.served, request.deployment.policy_name(number)
        if isinstance(served, ModelRecipe):
            served = replace(served, device=str(devices.policies[number]))
        return HfPolicy(
            served,
            sampling=request.sampling,
            place=ModelPlace(places.acting[number], name, SERVING),
            deterministic=settings.run.deterministic,
            kv_on_sync=settings.step.kv_on_sync,
            decode=request.tokenizer.decode,
            routed_experts=settings.trainer.router_replay,
        )

    def again(number: int) -> HfPolicy:
        place, started = places.replaced(number), policy(number)
        if isinstance(place, Process):
            place.wait_until_ready()
        return started

    policies, gpus = [policy(number) for number in range(devices.replicas)], len(set(devices.policies))
    return Serving(_pooled(policies, again), longest(request.actor), gpus=gpus)


def _pooled(policies: Sequence[Policy], again: Callable[[int], Policy]) -> Policy:
    async def start(number: int) -> Policy:
        return await anyio.to_thread.run_sync(with_route(again), number)

    return policies[0] if len(policies) == 1 else PolicyPool(policies, start=start)


def _on_vllm(request: ServeRequest) -> Serving:
    settings = request.deployment.settings
    if (chosen := ServerSettings.of(settings.vllm)) is not None:
        return _on_servers(request, partial(_named_server, request, chosen), len(chosen.urls))
    if settings.starts_servers:
        started = _StartedServers(request)
        return _on_servers(request, started, request.deployment.devices.replicas, started.end)
    if settings.placement.share == "sleep":
        deferred = ", and the KV cache of deferred rollouts is recomputed" * bool(settings.step.most_overcommit)
        logger.info(f"vLLM sleeps while the policy is trained{deferred} (placement.share = 'sleep')")
    engine = _engine(request)
    policy = _policy_on(engine, request)
    gpus = request.deployment.engine_workers
    return Serving(policy, engine.longest, (policy.reporter,), engine.abort, engine.close, gpus)


def _policy_on(engine: Engine, request: ServeRequest) -> VllmPolicy:
    settings = request.deployment.settings
    try:
        return VllmPolicy(
            engine,
            sampling=request.sampling,
            kv_on_sync=settings.step.kv_on_sync,
            decode=request.tokenizer.decode,
            routed_experts=settings.trainer.router_replay,
        )
    except BaseException:
        engine.close()
        raise


def _on_servers(
    request: ServeRequest, reach: Callable[[int], VllmServer], count: int, end: Callable[[], None] = lambda: None
) -> Serving:
    connected: list[VllmServer] = []
    reporters = [Reporter("policy" if count == 1 else f"policy {number}") for number in range(count)]

    def connect(number: int) -> VllmPolicy:
        connected.append(server := reach(number))
        policy = _policy_on(server, request)
        policy.reporter = reporters[number]
        return policy

    def abort() -> None:
        for server in connected:
            server.abort()

    def close() -> None:
        for server in connected:
            server.close()
        end()

    with ExitStack() as stack, ThreadPoolExecutor(count) as threads:  # servers start side by side
        stack.callback(close)
        try:
            policies = list(threads.map(with_route(connect), range(count)))
        except BaseException:
            request.places.abort()
            raise
        policy = _pooled(policies, connect)
        stack.pop_all()
    positions = min(server.longest for server in connected)
    return Serving(policy, positions, tuple(reporters), abort, close, gpus=0)


class _StartedServers:
    def __init__(self, request: ServeRequest) -> None:
        self._request = request
        self._key = token_urlsafe(32)
        self._hosted: dict[int, Hosted[ServerProcess]] = {}

    def __call__(self, number: int) -> VllmServer:
        request, places = self._request, self._request.places
        place = places.replaced(number) if number in self._hosted else places.acting[number]
        logger.info(f"starting vLLM with {Path(request.deployment.models.policy).name}, replica {number}")
        hosted = place.host(self._make(number), track=f"policy {number}")

        async def load(weights: SentWeights, version: str) -> None:
            await hosted.load(partial(ServerProcess.write, version=version), weights)

        remote = "policy" in request.deployment.devices.remote
        url, path = anyio.run(partial(hosted.call, "start", ServerProcess.whereabouts, writes=remote))
        self._hosted[number] = hosted
        return _server(url, request, api_key=self._key, files=None if path is None else HostedFiles(path, load))

    def end(self) -> None:
        for hosted in self._hosted.values():
            with suppress(OppoError):
                anyio.run(hosted.call, "end", ServerProcess.end)

    def _make(self, number: int) -> Callable[[], ServerProcess]:
        request, deployment = self._request, self._request.deployment
        devices, settings = deployment.devices, deployment.settings
        device, adapters, remote = devices.policies[number], _adapter_rank(request), "policy" in devices.remote
        by_nccl = devices.weights.type == "cuda" and (remote or device not in devices.trainer) and not adapters
        given = placed({**_engine_arguments(request), **settings.vllm}, device)
        backend = "nccl" if by_nccl else "file"
        start = partial(ServerProcess, key=self._key, given=given, backend=backend, adapters=adapters)
        if remote:
            from ray.util import get_node_ip_address  # noqa: PLC0415 - an extra

            cores = settings.placement.actor_cpus
            return partial(start, settings.models.policy, address=get_node_ip_address, cores=cores)
        cores = max(1, acting_share(deployment.cores) // devices.replicas)
        return partial(start, _policy_directory(request), cores=cores, log=request.log)


def _named_server(request: ServeRequest, chosen: ServerSettings, number: int) -> VllmServer:
    directory = chosen.weights_directory or None
    return _server(
        chosen.urls[number], request, api_key=chosen.api_key(), weights_directory=directory, timeout=chosen.timeout
    )


def _server(
    url: str,
    request: ServeRequest,
    *,
    api_key: str | None,
    weights_directory: str | None = None,
    files: HostedFiles | None = None,
    timeout: float = 60.0,
) -> VllmServer:
    models = request.deployment.models
    server = VllmServer(
        url,
        model=_policy_directory(request),
        trainer=request.deployment.devices.weights,
        api_key=api_key,
        adapters=_adapter_rank(request),
        weights_directory=weights_directory,
        files=files,
        timeout=timeout,
        trust_remote_code=models.trust_remote_code,
    )
    wanted = served_dtype(models, {}, request.actor.dtype)
    if str(server.dtype) != f"torch.{wanted}":
        logger.warning(
            f"the vLLM server at {server.url} rounds the weights to {server.dtype}: start it with --dtype {wanted} if "
            "it should serve them as they are"
        )
    return server


def _engine(request: ServeRequest) -> VllmEngine:
    deployment, settings = request.deployment, request.deployment.settings
    return VllmEngine.start(
        _policy_directory(request),
        arguments=placed({**_engine_arguments(request), **settings.vllm}, deployment.devices.policy),
        trainer=request.deployment.devices.weights,
        cores=acting_share(deployment.cores),
        adapters=_adapter_rank(request),
        log=request.log,
        sleeps=settings.placement.share == "sleep",
        images=request.images,
    )


def _policy_directory(request: ServeRequest) -> Path:
    models = request.deployment.models
    return located(models.policy, weights=True, allow_pickle=models.allow_pickle)


def _engine_arguments(request: ServeRequest) -> dict[str, object]:
    deployment, settings = request.deployment, request.deployment.settings
    if request.log is not None:
        make(request.log.parent)
    reach = min(longest(request.actor), settings.data.max_prompt_tokens + request.sampling.max_new_tokens)
    return {
        "dtype": served_dtype(deployment.models, settings.vllm, request.actor.dtype),
        "trust_remote_code": deployment.models.trust_remote_code,
        "max_model_len": reach,
        **({} if deployment.share is None else {"gpu_memory_utilization": deployment.share}),
        **({"enable_return_routed_experts": True} if settings.trainer.router_replay else {}),
    }


@dataclass(slots=True, eq=False)
class ScorersOnVllm:
    deployment: Deployment
    load: RoleLoader
    log: Path | None
    scorers: list[VllmScorer[Any, Any]] = field(default_factory=list)

    def reward(self, role: Role, reward: VllmRewardSection) -> ServedRewardModel:
        with self.load.attributed(role):
            model = self.load.recipe(role, "scalar")
            kind = self.load.reward_kind(role.source)
            if kind == "scalar" and model.config().num_labels != 1:
                kind = "classifier"
            if kind != "scalar":
                raise ConfigError(
                    f"{role.source} {NOT_ON_VLLM[kind]}: leave {role.key}.engine out, and transformers serves it"
                )
            self.load.check_tokens(role, model)
            engine = self._engine(RewardServer, role, reward, model, SCALAR)
            scorer = self._kept(role, engine, partial(VllmReward, engine, key=role.key))
        scorer.reporter = Reporter(track_of(reward))
        return ServedRewardModel(role.source, scorer, model, may_be_critic=True)

    def logprobs(self, role: Role, on: OnVllm, sampling: Sampling, *, top_k: int = 0) -> VllmLogprobs:
        with self.load.attributed(role):
            model = self.load.recipe(role, "causal")
            self.load.check_tokens(role, model)
        with self.load.attributed(role, key := role.engine_key):
            server = partial(LogprobServer, top_k=top_k, vocabulary=sampling.vocabulary)
            engine = self._engine(server, role, on, model, LOGPROBS)
            scorer = self._kept(role, engine, partial(VllmLogprobs, engine, sampling=sampling, top_k=top_k, key=key))
        scorer.reporter = Reporter(role.name)
        return scorer

    def close(self) -> None:
        for scorer in self.scorers:
            scorer.engine.close()

    def _engine(
        self,
        server: Callable[..., E],
        role: Role,
        on: OnVllm,
        model: ModelRecipe,
        arguments: Mapping[str, object],
    ) -> E | VllmEngine:
        if not on.url:
            return self._started(role, on, model, arguments)
        trusted = self.deployment.models.trust_remote_code
        reached = server(
            on.url,
            located(model.path, weights=False, trust_remote_code=trusted),
            api_key=key_of(on.api_key_env) or None,
            timeout=on.timeout,
            attempts=on.attempts,
            trust_remote_code=trusted,
        )
        if Path(reached.served).name != Path(model.path).name:
            logger.warning(
                f"the server at {reached.url} calls its model {reached.served!r}, and it is to be {model.path}"
            )
        return reached

    def _started(self, role: Role, on: OnVllm, model: ModelRecipe, arguments: Mapping[str, object]) -> VllmEngine:
        if self.log is not None:
            make(self.log.parent)
        settings, models, cores = self.deployment.settings, self.deployment.models, self.deployment.cores
        # one more, since vLLM answers a request for log-probs with a token
        reach = settings.data.max_prompt_tokens + settings.sampling.max_new_tokens + 1
        given = {
            **arguments,
            "dtype": models.dtype,
            "trust_remote_code": models.trust_remote_code,
            "max_model_len": min(positions_of(model), reach),
        }
        return VllmEngine.start(
            located(model.path, weights=True, allow_pickle=models.allow_pickle),
            arguments=placed({**given, **on.vllm}, role.device),
            trainer="cpu",  # no weights are synced
            cores=slice(acting_share(cores), cores),
            log=self.log,
        )

    def _kept(self, role: Role, engine: ScoringServer | VllmEngine, make: Callable[[], S]) -> S:
        try:
            scorer = make()
        except BaseException:
            engine.close()
            raise
        self.scorers.append(scorer)
        if (block := scorer.block) > scorer.longest:
            logger.warning(
                f"{role.engine_key}: its engine reads whole blocks of {block} tokens while a response grows, and none "
                f"here is so long, so it reads each when it has ended: set {role.engine_key}.vllm.block_size lower"
            )
        return scorer
