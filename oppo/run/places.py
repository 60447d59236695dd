"""Where the models of a run work: their devices and places, here or in a Ray cluster, and the engine of the policy.

One function for each engine, from a run's settings to a :class:`Serving`. Nothing else of the application asks which
engine it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import anyio.to_thread
import torch
from transformers import PreTrainedModel

from oppo.config.rewards import ModelRewardSection, VllmRewardSection
from oppo.config.scorers import OnVllm
from oppo.config.sections import ModelsSection
from oppo.config.settings import Settings
from oppo.durable import make
from oppo.errors import ConfigError, ModelRefused, OppoError
from oppo.hf.devices import (
    SCORED,
    DeviceLayout,
    Devices,
    ModelPlace,
    RemotePlaces,
    acting_share,
    available_cores,
    require_sharable_memory,
    use_cores,
)
from oppo.hf.introspection import longest
from oppo.hf.loading import Loadable, ModelRecipe
from oppo.hf.lora import adapter_matrices, rank_of
from oppo.hf.memory import Hardware
from oppo.hf.model_files import located
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.weights import SentWeights
from oppo.libraries import require
from oppo.log import logger, with_route
from oppo.models import Policy, Sampling
from oppo.observe import Reporter, SpanListener
from oppo.placement import Hosted, Place, PolicyPool, Process
from oppo.rewards.judge import key_of

if TYPE_CHECKING:
    from oppo.vllm import VllmEngine, VllmPolicy, VllmServer
    from oppo.vllm.engine import Engine
    from oppo.vllm.processes import ServerProcess
    from oppo.vllm.server import ServerSettings
    from oppo.vllm.sync import WrittenFile


def devices_of(settings: Settings, assumed: Hardware | None = None) -> Devices:
    return Devices.found(
        {**settings.devices, "actor": (settings.actor_device,)},
        settings.placement.key_of,
        deterministic=settings.run.deterministic,
        remote=settings.remote,
        scorers=settings.run.scorers,
        replicas=settings.placement.policy_replicas,
        gpus=None if assumed is None else assumed.gpus,
    )


def with_types(settings: Settings, devices: Devices, assumed: Hardware | None = None) -> Settings:
    """Return settings that name the type of the weights, and how adapters are synced, where that is by the device."""
    models = settings.models
    if models.dtype == "by-device":
        capable = assumed is not None or torch.cuda.is_bf16_supported(including_emulation=False)
        models = replace(models, dtype="bfloat16" if devices.actor.type == "cuda" and capable else "float32")
    if models.lora_sync == "auto":
        alone = models.dtype in {"bfloat16", "float16"} and not models.unfit_alone
        models = replace(models, lora_sync="adapter" if alone else "merged")
    return settings.model_copy(update={"models": models})


def scored(settings: Settings) -> list[str]:
    exist = {
        "reference": settings.has_reference and "reference" not in settings.on_vllm,
        "reward": True,
        "critic": settings.algorithm.has_critic,
        "teacher": bool(settings.models.teachers.keys() - settings.on_vllm.keys()),
        "proximal": settings.algorithm.corrects,
    }
    return [model for model in SCORED if exist[model]]


def layout_of(settings: Settings, devices: Devices) -> DeviceLayout:
    run, available = settings.run, available_cores()
    if (cores := run.cores or available) > available:
        logger.warning(
            f"run.cores = {cores} is more than the {available} that this process may use: threads will wait for each "
            "other"
        )
    if "critic" in devices.apart - devices.remote and settings.algorithm.has_critic:
        if settings.models.shared_trunk:
            raise ConfigError(
                "models.shared_trunk = true makes the critic a head on the policy's trunk, whose memory on a GPU no "
                "other process shares, and run.scorers = 'process': expected run.scorers = 'thread' or 'auto'"
            )
        require_sharable_memory("the process of the critic", "set run.scorers = 'thread'")
    if devices.replicas > 1 and "policy" not in devices.remote:
        _check_replicas(devices, acting_share(cores))
    with ExitStack() as stack:
        remote = _remote_places(settings, devices)
        stack.callback(remote.close)
        layout = DeviceLayout.of(
            cores,
            devices,
            run.scorers,
            scored=_scored_here(settings),
            policy=run.policy,
            trainer=run.trainer,
            restarts=run.scorer_restarts,
            remote=remote,
        )
        stack.pop_all()
    return layout


def _check_replicas(devices: Devices, cores: int) -> None:
    if devices.weights.type == devices.policy.type == "cuda":
        require_sharable_memory("a replica of the policy", "leave placement.policy_replicas out")
    if devices.policy.type == "cpu" and devices.replicas > cores:
        logger.warning(
            f"placement.policy_replicas = {devices.replicas} share {cores} core(s), half of run.cores: they will wait "
            "for each other"
        )


def _scored_here(settings: Settings) -> list[str]:
    functions = not all(isinstance(each, ModelRewardSection) for each in settings.rewards)
    here = [model for model in scored(settings) if model not in settings.remote]
    return [*here, "reward"] if functions and "reward" not in here else here


def _remote_places(settings: Settings, devices: Devices) -> RemotePlaces:
    chosen = settings.placement
    if not settings.remote:
        return RemotePlaces(_hosting if settings.starts_servers else None)
    from oppo.placement.ray import Cluster, RayPlace, RayRanks, Room  # noqa: PLC0415 - Ray is an extra

    setup = partial(use_cores, chosen.actor_cpus)

    def room(kind: str, workers: int = 1) -> Room:
        return Room(cpus=chosen.actor_cpus, gpus=float(workers * (kind == "cuda")))

    with ExitStack() as stack:
        logger.info(f"connecting to the Ray cluster at {chosen.cluster}")
        cluster = stack.enter_context(Cluster(chosen.cluster))
        training: Place | None = None
        if "trainer" in settings.remote:
            count = len(devices.trainer)
            logger.info(f"starting {count} training ranks, {count - 1} of them in the cluster")
            training = RayRanks(
                "trainer",
                cluster,
                count,
                room=room(devices.trainer[-1].type),
                spread=chosen.spread,
                setup=setup,
            )
            stack.callback(training.close)

        def acting(number: int) -> Place:
            name = "policy" if devices.replicas == 1 else f"policy {number}"
            logger.info(f"starting the actor of the {name} in the cluster")
            takes = room(devices.policy.type, _workers(settings))
            return RayPlace(name, cluster, room=takes, setup=setup, restarts=0)

        actors: dict[str, Place] = {}
        for model, device in devices.scoring(sorted(settings.remote - {"trainer", "policy"})).items():
            logger.info(f"starting the actor of the {model} in the cluster")
            actors[model] = RayPlace(
                model, cluster, room=room(device.type), setup=setup, restarts=settings.run.scorer_restarts
            )
            stack.callback(actors[model].close)
        remote = acting if "policy" in settings.remote else _hosting if settings.starts_servers else None
        return RemotePlaces(remote, actors, training, stack.pop_all().close)


def _hosting(number: int) -> Place:
    return Process(f"policy {number}")


def _workers(settings: Settings) -> int:
    if settings.models.engine != "vllm":
        return 1
    from oppo.vllm.arguments import workers_of  # noqa: PLC0415 - vLLM takes seconds to import, and may be missing

    return workers_of(settings.vllm)


SERVING: Final = "lower step.batch, step.overcommit or sampling.max_new_tokens, or choose models.dtype = 'bfloat16'"
"""Advice to a served model that runs out of memory."""


class Worker(Protocol):
    """Something that works for a run, and reports it: a place, or the reporter of an engine in processes of its own.

    Attributes:
        listener: called with the span of each call.
    """

    listener: SpanListener

    @property
    def at_work(self) -> str:
        """The call in progress; empty when there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """The policy of a run on its engine.

    Attributes:
        policy: the actor.
        positions: the longest sequence, in tokens, that the engine can read.
        gpus: on which it decodes, or 1 for a CPU; 0: not known.
        workers: what tells of its work, besides the places of the run.
        abort: ends an engine whose calls may hang; safe to call from any thread.
        close: ends the engine; idempotent.
    """

    policy: Policy
    positions: int
    workers: tuple[Worker, ...] = ()
    abort: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    gpus: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class ServeRequest:
    """The policy that an engine is to serve.

    Attributes:
        actor: the model that is trained, as transformers has loaded it.
        served: the same; or, of a policy on another machine, how it is loaded there.
        share: of the memory of each of the engine's GPUs that it may take; ``None``: as it chooses.
        log: the file for what the engine's processes write; ``None``: nowhere.
    """

    settings: Settings
    actor: PreTrainedModel
    served: Loadable
    sampling: Sampling
    tokenizer: HfTokenizer
    places: DeviceLayout
    devices: Devices
    share: float | None = None
    log: Path | None = None


Serve: TypeAlias = Callable[[ServeRequest], Serving]


def serve(request: ServeRequest) -> Serving:
    return ENGINES[request.settings.models.engine](request)


def require_engine_installed(name: str) -> None:
    if name == "vllm":
        from oppo.vllm.arguments import require_installed  # noqa: PLC0415 - likewise

        require_installed()


def require_engine(settings: Settings, assumed: Hardware | None = None) -> None:
    """Check, before anything is loaded, that an engine is installed, and takes its arguments and the trainer's weights.

    Args:
        assumed: the hardware that is meant, where the engine need not be installed here; ``None``: this machine.
    """
    rewards = {key: each for key, each in settings.reward_tables.items() if isinstance(each, VllmRewardSection)}
    for key, each in {**rewards, **{f"scorers.{name}": each for name, each in settings.on_vllm.items()}}.items():
        try:
            _check_scoring_engine(key, each, settings, assumed)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
    if settings.models.engine == "vllm":
        from oppo.vllm.arguments import (  # noqa: PLC0415 - takes seconds to import
            SETTINGS,
            check_sleep,
            computes_on_cpu,
            gpus_of,
            placed,
            require_arguments,
            require_routed_experts,
            route_of,
        )
        from oppo.vllm.server import ServerSettings  # noqa: PLC0415

        if (server := ServerSettings.of(settings.vllm)) is not None:
            server.check_options(
                keeps_kv=settings.step.kv_on_sync == "keep", routed_experts=settings.trainer.router_replay
            )
            if assumed is None:
                server.check_environment()
            return
        require_arguments(settings.vllm, of=SETTINGS, planned=assumed is not None)
        if settings.starts_servers:
            _check_started(settings, assumed)
        devices = devices_of(settings, assumed)
        on_cpu = computes_on_cpu() if assumed is None else devices.policy.type == "cpu"
        if settings.trainer.router_replay:
            require_routed_experts(settings.vllm, on_cpu=on_cpu)
        gpus, arguments = None if assumed is None else assumed.gpus, placed(settings.vllm, devices.policy)
        if settings.placement.share == "sleep":
            check_sleep(on_cpu=on_cpu)
            used, trained = gpus_of(arguments, gpus), [str(each) for each in devices.ranks_here]
            if not any(f"cuda:{number}" in trained for number in used):
                raise ConfigError(
                    f"placement.share = 'sleep' frees the GPUs of vLLM, {', '.join(map(str, used))}, for the trainer, "
                    f"and that is on {', '.join(trained)}: leave share out, or set placement.trainer"
                )
        if settings.starts_servers:
            return
        sender = torch.device("cpu") if settings.models.lora_sync == "adapter" else devices.weights
        route_of(arguments, sender, on_cpu=on_cpu, gpus=gpus)


def _check_started(settings: Settings, assumed: Hardware | None) -> None:
    from oppo.vllm.server import ServerSettings  # noqa: PLC0415 - takes seconds to import

    ServerSettings.check_options(
        keeps_kv=settings.step.kv_on_sync == "keep", routed_experts=settings.trainer.router_replay
    )
    if assumed is None:
        require("http", "placement.policy_replicas and placement.remote with models.engine = 'vllm'", module="httpx")
    if (workers := _workers(settings)) > 1 and "policy" not in settings.remote:
        raise ConfigError(
            f"placement.policy_replicas gives each replica of this machine a GPU, and [vllm] has {workers} workers: "
            "start servers yourself and name them in vllm.urls, place the policy in a cluster (placement.remote), or "
            "set vllm.data_parallel_size in the place of policy_replicas"
        )


def _check_scoring_engine(key: str, on: OnVllm, settings: Settings, assumed: Hardware | None) -> None:
    from oppo.vllm.arguments import (  # noqa: PLC0415 - takes seconds to import
        OF_LOGPROBS,
        OF_REWARDS,
        computes_on_cpu,
        gpus_of,
        placed,
        require_arguments,
    )

    table, _, name = key.partition(".")
    model = "reward" if table == "rewards" else name.partition(".")[0]
    if model != "reward":
        from oppo.vllm.logprobs import check_log_probs  # noqa: PLC0415 - likewise

        check_log_probs(settings.sampling, server=bool(on.url))
    if on.url:
        if assumed is None:
            require("http", "url", module="httpx")
            key_of(on.api_key_env)
        return
    require_arguments(on.vllm, of=OF_REWARDS if model == "reward" else OF_LOGPROBS, planned=assumed is not None)
    device, where = getattr(devices_of(settings, assumed), model), settings.placement.key_of(model)
    if device.type == "cuda":
        gpus_of(placed(on.vllm, device), None if assumed is None else assumed.gpus)
    elif assumed is None and not computes_on_cpu():
        raise ConfigError(
            f"engine = 'vllm' computes on a GPU here, and {where} has the {model} on a CPU: set placement.{model} = "
            "'cuda' or leave engine out"
        )


def served_dtype(models: ModelsSection, arguments: Mapping[str, object], trained: torch.dtype) -> str:
    """Return the name of the type in which vLLM serves the policy: that of the trained weights, unless chosen.

    Merged adapters are served in float32: they change a weight by less than 16 bits can hold. Alone they are not.
    """
    chosen = arguments.get("dtype", "auto")
    if chosen != "auto":
        return str(chosen)
    merges = models.adapts and models.lora_sync != "adapter"
    return "float32" if merges else str(trained).removeprefix("torch.")


def _adapter_rank(request: ServeRequest) -> int:
    if request.settings.models.lora_sync != "adapter":
        return 0
    try:
        return rank_of(adapter_matrices(request.actor))
    except ModelRefused as error:
        raise ModelRefused(f"models.lora_sync = 'adapter': {error}") from error


def _on_transformers(request: ServeRequest) -> Serving:
    places, devices = request.places, request.devices

    def policy(number: int) -> HfPolicy:
        served, name = request.served, "policy" if devices.replicas == 1 else f"policy {number}"
        if isinstance(served, ModelRecipe):
            served = replace(served, device=str(devices.policies[number]))
        return HfPolicy(
            served,
            sampling=request.sampling,
            place=ModelPlace(places.acting[number], name, SERVING),
            deterministic=request.settings.run.deterministic,
            kv_on_sync=request.settings.step.kv_on_sync,
            decode=request.tokenizer.decode,
            routed_experts=request.settings.trainer.router_replay,
        )

    def again(number: int) -> HfPolicy:
        place, started = places.replaced(number), policy(number)
        if isinstance(place, Process):
            place.wait_until_ready()
        return started

    async def start(number: int) -> HfPolicy:
        return await anyio.to_thread.run_sync(with_route(again), number)

    policies, gpus = [policy(number) for number in range(devices.replicas)], len(set(devices.policies))
    served = policies[0] if len(policies) == 1 else PolicyPool(policies, start=start)
    return Serving(served, longest(request.actor), gpus=gpus)


def _on_vllm(request: ServeRequest) -> Serving:
    from oppo.vllm.server import ServerSettings  # noqa: PLC0415 - vLLM takes seconds to import, and may be missing

    if (chosen := ServerSettings.of(request.settings.vllm)) is not None:
        return _on_servers(request, partial(_named_server, request, chosen), len(chosen.urls))
    if request.settings.starts_servers:
        started = _StartedServers(request)
        return _on_servers(request, started, request.devices.replicas, started.end)
    if request.settings.placement.share == "sleep":
        deferred = ", and the KV cache of deferred rollouts is recomputed" * bool(request.settings.step.most_overcommit)
        logger.info(f"vLLM sleeps while the policy is trained{deferred} (placement.share = 'sleep')")
    engine = _engine(request)
    policy = _policy_on(engine, request)
    gpus = _workers(request.settings)
    return Serving(policy, engine.longest, (policy.reporter,), engine.abort, engine.close, gpus)


def _policy_on(engine: Engine, request: ServeRequest) -> VllmPolicy:
    from oppo.vllm import VllmPolicy  # noqa: PLC0415

    try:
        return VllmPolicy(
            engine,
            sampling=request.sampling,
            kv_on_sync=request.settings.step.kv_on_sync,
            decode=request.tokenizer.decode,
            routed_experts=request.settings.trainer.router_replay,
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

    async def start(number: int) -> VllmPolicy:
        return await anyio.to_thread.run_sync(with_route(connect), number)

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
        policy = policies[0] if count == 1 else PolicyPool(policies, start=start)
        stack.pop_all()
    positions = min(server.longest for server in connected)
    return Serving(policy, positions, tuple(reporters), abort, close, gpus=0)


class _StartedServers:
    """Starts the servers of replicas, each in its place, and connects to them."""

    def __init__(self, request: ServeRequest) -> None:
        self._request = request
        self._key = token_urlsafe(32)
        self._hosted: dict[int, Hosted[ServerProcess]] = {}

    def __call__(self, number: int) -> VllmServer:
        from oppo.vllm.processes import ServerProcess  # noqa: PLC0415 - takes seconds to import
        from oppo.vllm.sync import HostedFile  # noqa: PLC0415

        request, places = self._request, self._request.places
        place = places.replaced(number) if number in self._hosted else places.acting[number]
        logger.info(f"starting vLLM with {Path(request.settings.models.policy).name}, replica {number}")
        hosted = place.host(self._make(number), track=f"policy {number}")

        async def load(weights: SentWeights, version: str) -> None:
            await hosted.load(partial(ServerProcess.write, version=version), weights)

        remote = "policy" in request.devices.remote
        url, path = anyio.run(partial(hosted.call, "start", ServerProcess.whereabouts, writes=remote))
        self._hosted[number] = hosted
        return _server(url, request, api_key=self._key, file=None if path is None else HostedFile(path, load))

    def end(self) -> None:
        from oppo.vllm.processes import ServerProcess  # noqa: PLC0415 - likewise

        for hosted in self._hosted.values():
            with suppress(OppoError):
                anyio.run(hosted.call, "end", ServerProcess.end)

    def _make(self, number: int) -> Callable[[], ServerProcess]:
        from oppo.vllm.arguments import placed  # noqa: PLC0415 - takes seconds to import
        from oppo.vllm.processes import ServerProcess  # noqa: PLC0415

        request, devices, settings = self._request, self._request.devices, self._request.settings
        device, adapters, remote = devices.policies[number], _adapter_rank(request), "policy" in devices.remote
        by_nccl = devices.weights.type == "cuda" and (remote or device not in devices.trainer) and not adapters
        given = placed({**_engine_arguments(request), **settings.vllm}, device)
        backend = "nccl" if by_nccl else "file"
        start = partial(ServerProcess, key=self._key, given=given, backend=backend, adapters=adapters)
        if remote:
            from ray.util import get_node_ip_address  # noqa: PLC0415 - an extra

            cores = settings.placement.actor_cpus
            return partial(start, settings.models.policy, address=get_node_ip_address, cores=cores)
        cores = max(1, acting_share(settings.run.cores or available_cores()) // devices.replicas)
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
    file: WrittenFile | None = None,
    timeout: float = 60.0,
) -> VllmServer:
    from oppo.vllm import VllmServer  # noqa: PLC0415 - takes seconds to import

    models = request.settings.models
    server = VllmServer(
        url,
        model=_policy_directory(request),
        trainer=request.devices.weights,
        api_key=api_key,
        adapters=_adapter_rank(request),
        weights_directory=weights_directory,
        file=file,
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
    from oppo.vllm import VllmEngine  # noqa: PLC0415
    from oppo.vllm.arguments import placed  # noqa: PLC0415

    settings = request.settings
    return VllmEngine.start(
        _policy_directory(request),
        arguments=placed({**_engine_arguments(request), **settings.vllm}, request.devices.policy),
        trainer=request.devices.weights,
        cores=acting_share(settings.run.cores or available_cores()),
        adapters=_adapter_rank(request),
        log=request.log,
        sleeps=settings.placement.share == "sleep",
    )


def _policy_directory(request: ServeRequest) -> Path:
    models = request.settings.models
    return located(models.policy, weights=True, allow_pickle=models.allow_pickle)


def _engine_arguments(request: ServeRequest) -> dict[str, object]:
    settings, models, data = request.settings, request.settings.models, request.settings.data
    if request.log is not None:
        make(request.log.parent)
    reach = min(longest(request.actor), data.max_prompt_tokens + request.sampling.max_new_tokens)
    return {
        "dtype": served_dtype(models, settings.vllm, request.actor.dtype),
        "trust_remote_code": models.trust_remote_code,
        "max_model_len": reach,
        **({} if request.share is None else {"gpu_memory_utilization": request.share}),
        **({"enable_return_routed_experts": True} if settings.trainer.router_replay else {}),
    }


ENGINES: Final[Mapping[str, Serve]] = {"transformers": _on_transformers, "vllm": _on_vllm}
