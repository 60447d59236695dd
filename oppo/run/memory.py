"""The memory that the models of a run will need, each on its device, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel

from oppo.config.rewards import ModelRewardSection, VllmRewardSection
from oppo.config.scorers import OnVllm
from oppo.config.sections import SamplingSection
from oppo.config.settings import Settings
from oppo.declared import declared
from oppo.errors import ConfigError, ModelRefused
from oppo.hf.as_text.whole import transformer_of
from oppo.hf.devices import CPU, Devices
from oppo.hf.loading import outline
from oppo.hf.lora import Quantization, add_lora, load_lora
from oppo.hf.memory import (
    Bytes,
    Hardware,
    Load,
    at_rest,
    memory_of,
    of_critic,
    of_policy,
    of_process,
    of_reference,
    of_reward,
    of_shortest,
    of_trainer,
)
from oppo.hf.model_files import CAUSAL, CLASSIFIER, EMBEDDER, PROCESS, SCALAR, Kind, RewardKind, located, reward_kind
from oppo.hf.serve.policy import PREFILL_TOKENS
from oppo.hf.train.actor_critic import ActorCritic, value_model_on
from oppo.hf.train.packing import CPU_TOKENS, GPU_TOKENS
from oppo.log import logger, routed
from oppo.models import Sampling, SamplingSettings
from oppo.run.loading import adapter_of, critic_source
from oppo.run.places import scored, served_dtype, with_types
from oppo.run.rewards import kind_of, named_reward
from oppo.vllm.arguments import GIB, gpus_of, placed, workers_of

SHARE: Final = "gpu_memory_utilization"
"""The engine's argument with its share of a GPU's memory."""

CACHE: Final = "kv_cache_memory_bytes"
"""The engine's argument with the size of its KV cache, which takes the place of a share."""

ALONE: Final = 0.92
"""The share that vLLM takes of a GPU by itself."""

BESIDE: Final = 1.1
"""What models take beside an engine, by what they need: allocators keep blocks that are free."""

LEAST_CACHE: Final = GIB
"""Bytes of a KV cache and of work space without which no engine starts."""

KINDS: Final[Mapping[RewardKind, Kind]] = {
    "scalar": SCALAR,
    "process": PROCESS,
    "classifier": CLASSIFIER,
    "similarity": EMBEDDER,
}
RANK: Final = "trainer, rank"
"""The name of a training rank, before its number."""

_SERVED: Final = {"reference": of_reference, "critic": of_critic, "proximal": of_reference}

_SMALLER: Final[Sequence[tuple[str, Mapping[str, Mapping[str, object]]]]] = (
    ("models.dtype = 'bfloat16'", {"models": {"dtype": "bfloat16"}}),
    ("models.lora_rank = 16", {"models": {"lora_rank": 16}}),
    ("both", {"models": {"dtype": "bfloat16", "lora_rank": 16}}),
)
"""Changes that need less memory."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Memory that a model will need on its device; weights that several models share count for the first.

    Attributes:
        model: its name, with the number of a training rank.
        bytes: at its worst moment.
        remote: the device is one of another machine, whose memory is not known here.
        share: of its device's memory that an engine takes; ``None``: it takes what it needs.
        sleeps: it needs none while the policy is trained.
    """

    model: str
    device: torch.device
    bytes: Bytes
    remote: bool = False
    share: float | None = None
    sleeps: bool = False

    @property
    def where(self) -> str:
        return f"{self.device} in the cluster" if self.remote else str(self.device)

    def with_activations(self, times: int) -> Expected:
        return replace(self, bytes=replace(self.bytes, activations=times * self.bytes.activations))

    def at_rest(self) -> Expected:
        """Return the same without what only an update needs."""
        return replace(self, bytes=replace(self.bytes, gradients=0, activations=0))

    def __str__(self) -> str:
        chosen = "" if self.share is None else f", vllm.{SHARE} = {self.share}"
        return f"{self.model} {decimal(self.bytes.total)}{chosen}"


@dataclass(frozen=True, slots=True)
class Outlines:
    settings: Settings

    def actor(self) -> PreTrainedModel:
        models = self.settings.models
        actor = self._made("models.policy", CAUSAL, models.policy, quantization=models.quantization)
        if models.lora_rank:
            add_lora(actor, models.lora_rank, models.lora_alpha, experts=models.lora_experts, more=models.lora)
        if models.adapter:
            load_lora(actor, adapter_of(models), weights=False)
        return actor

    def logprobs(self, name: str) -> PreTrainedModel:
        models = self.settings.models
        path = {"reference": models.reference, **models.teachers}[name]
        on_base = name == "reference" and models.is_reference_on_base
        return self._made(f"models.{name}", CAUSAL, path, quantization=models.quantization if on_base else "none")

    def reward(self, key: str, reward: ModelRewardSection, load: Load | None) -> Bytes:
        """Return what a reward model needs; of one that reads whole responses the weights alone are known."""
        path, found = reward.source, self.kind(key, reward)
        directory = transformer_of(self._located(path)) if found == "similarity" else path
        make = partial(self._made, key, KINDS[found], str(directory))
        if load is None or found in {"classifier", "similarity"}:
            return Bytes(at_rest(make).weights)
        return (of_process if found == "process" else of_reward)(make, load)

    def on_vllm(
        self, name: str, make: Callable[[], PreTrainedModel], of: OnVllm, on: torch.device, assumed: Hardware | None
    ) -> Iterator[Expected]:
        """Yield what each worker of a scorer's engine needs; what a server needs is no matter of this run."""
        if of.url:
            return
        arguments = placed(of.vllm, on)
        share, dtype = float(str(arguments.get(SHARE) or ALONE)), str(arguments.get("dtype", "auto"))
        needs = _on_engine(name, make, arguments, dtype=dtype, on=on, share=share, assumed=assumed)
        for each in needs:
            yield replace(each, share=None)  # which is that of the policy's engine

    def scalar(self, key: str, source: str) -> PreTrainedModel:
        return self._made(key, SCALAR, source)

    def kind(self, key: str, reward: ModelRewardSection) -> RewardKind:
        trusted = self.settings.models.trust_remote_code
        return kind_of(key, reward, reward_kind(self._located(reward.source), trusted=trusted))

    def _located(self, path: str) -> Path:
        trusted = self.settings.models.trust_remote_code
        with routed():
            return located(path, weights=False, trust_remote_code=trusted)

    def critic(self) -> PreTrainedModel:
        models = self.settings.models
        if models.shared_trunk:
            return value_model_on(self._made("models.policy", CAUSAL, models.policy))
        fit = [
            each.source
            for key, each in self.settings.reward_tables.items()
            if isinstance(each, VllmRewardSection)
            or (isinstance(each, ModelRewardSection) and self.kind(key, each) == "scalar")
        ]
        return self._made("models.critic", SCALAR, critic_source(models, self.settings.reward_models, fit))

    def trained(self) -> ActorCritic:
        actor = self.actor()
        if not self.settings.algorithm.has_critic:
            return ActorCritic(actor)
        return ActorCritic(actor, value_model_on(actor) if self.settings.models.shared_trunk else self.critic())

    def _made(self, key: str, kind: Kind, path: str, *, quantization: Quantization = "none") -> PreTrainedModel:
        models = self.settings.models
        try:
            return outline(
                kind, path, dtype=models.dtype, quantization=quantization, trust_remote_code=models.trust_remote_code
            )
        except (ConfigError, ModelRefused) as error:
            raise type(error)(f"{key}: {error}") from error


def load_of(settings: Settings, prompt: int) -> Load:
    response, chunk = settings.sampling.max_new_tokens, settings.step.chunk
    # A stage has one step at a time, however many are alive: each model holds the rollouts of one, and the deferred.
    rollouts = (settings.step.batch + settings.step.most_overcommit) * settings.algorithm.responses
    return Load(rollouts, prompt, response, chunk if isinstance(chunk, int) else response)


def expected(
    settings: Settings,
    devices: Devices,
    load: Load | None,
    assumed: Hardware | None = None,
) -> list[Expected]:
    """Return what each model of a run needs.

    Args:
        devices: of the models.
        load: the most that is asked of them; ``None``: nothing, so that they hold weights, what training keeps, and the
            states of the policy's rollouts.
        assumed: the hardware that is meant; ``None``: this machine.
    """
    return _planned(settings, devices, load, assumed)[1]


def with_micro_batches(settings: Settings, devices: Devices, load: Load, assumed: Hardware | None = None) -> Settings:
    """Return settings that name the tokens of a micro-batch, where these are by the device; all else stays."""
    if settings.trainer.micro_batch_tokens is not None:
        return settings
    if devices.trainer[0].type == "cpu":
        return _with_tokens(settings, CPU_TOKENS)
    return _with_tokens(settings, _planned(settings, devices, load, assumed)[0])


def _with_tokens(settings: Settings, count: int) -> Settings:
    return settings.model_copy(update={"trainer": replace(settings.trainer, micro_batch_tokens=count)})


def _planned(
    settings: Settings, devices: Devices, load: Load | None, assumed: Hardware | None
) -> tuple[int, list[Expected]]:
    # The tokens of a micro-batch, and what is needed with these: activations grow in proportion to them, at most.
    given, on_cpu = settings.trainer.micro_batch_tokens, devices.trainer[0].type == "cpu"
    tokens = given or (CPU_TOKENS if on_cpu else GPU_TOKENS // 4)
    needs = _needs(_with_tokens(with_types(settings, devices, assumed), tokens), devices, load, assumed)
    for times in () if given or on_cpu or load is None else (8, 4, 2):
        larger = [each.with_activations(times) if each.model.startswith("trainer") else each for each in needs]
        if not crowded(larger, assumed, spread=settings.placement.spread):
            return times * tokens, larger
    return tokens, needs


def _needs(settings: Settings, devices: Devices, load: Load | None, assumed: Hardware | None) -> list[Expected]:
    made = Outlines(settings)
    own_engine = settings.models.engine != "transformers"
    needs, uncounted = list[Expected](), own_engine and not settings.shares_weights
    if not own_engine:
        _counting("policy")
        policy, remote = _policy(settings, made, load, devices.replicas), "policy" in devices.remote
        for number, device in enumerate(devices.policies):
            name = "policy" if devices.replicas == 1 else f"policy {number}"
            needs.append(Expected(name, device, policy, remote))
    for model in sorted(scored(settings), key=lambda model: model != "proximal"):
        device, remote = devices.scoring()[model], model in devices.remote
        teachers = [name for name in settings.models.teachers if name not in settings.on_vllm]
        for name in teachers if model == "teacher" else ():
            _counting(name)
            needs.append(Expected(name, device, _served(partial(made.logprobs, name), of_reference, load), remote))
        if model not in {"reward", "teacher"}:
            _counting(model)
            make = {"critic": made.critic, "proximal": made.actor}.get(model, partial(made.logprobs, model))
            served = _served(make, _SERVED[model], load)
            shares = _shares_the_policy_s(settings, devices, model)
            if shares and uncounted and model != "critic":  # the first that is served over the policy's weights
                shares = uncounted = False
            needs.append(Expected(model, device, replace(served, weights=0) if shares else served, remote))
        for key, reward in settings.reward_tables.items() if model == "reward" else ():
            if isinstance(reward, ModelRewardSection):
                _counting(name := named_reward(reward))
                needs.append(Expected(name, device, made.reward(key, reward, load), remote))
            elif isinstance(reward, VllmRewardSection):
                _counting(name := named_reward(reward))
                make = partial(made.scalar, key, reward.source)
                needs += made.on_vllm(name, make, reward, device, assumed)
    for name, scorer in settings.on_vllm.items():
        _counting(name)
        device = devices.reference if name == "reference" else devices.teacher
        needs += made.on_vllm(name, partial(made.logprobs, name), scorer, device, assumed)
    unshared = None
    if settings.shares_weights:
        apart = {"policy": made.actor, "critic": made.critic}
        there = devices.apart | ({"policy"} if own_engine else set())
        unshared = sum(at_rest(make).weights for model, make in apart.items() if model in there)
    _counting("trainer")
    needs += _training(devices, _trainer(settings, made, load), unshared, shard=settings.placement.shard)
    if own_engine and not settings.on_server:
        sleeps = settings.placement.share == "sleep"
        beside = [each.at_rest() if sleeps and is_of_training(each) else each for each in needs]
        needs = [*_engine(settings, devices, made, beside, assumed), *needs]
    return needs


def _counting(model: str) -> None:
    logger.info(f"counting the memory of the {model}")


def _engine(
    settings: Settings, devices: Devices, made: Outlines, others: Sequence[Expected], assumed: Hardware | None
) -> list[Expected]:
    dtype = served_dtype(settings.models, settings.vllm, made.actor().dtype)
    share = engine_share(settings.vllm, devices, others, assumed)
    needs = list[Expected]()
    for number, on in enumerate(devices.policies):
        name, arguments = "policy" if devices.replicas == 1 else f"policy {number}", placed(settings.vllm, on)
        remote = "policy" in devices.remote
        needs += _on_engine(
            name, made.actor, arguments, dtype=dtype, on=on, share=share, assumed=assumed, remote=remote
        )
    if settings.placement.share != "sleep":
        return needs
    weights = Bytes(sum(each.bytes.weights for each in needs))
    return [Expected("policy, asleep", CPU, weights), *(replace(each, sleeps=True) for each in needs)]


def _on_engine(
    model: str,
    make: Callable[[], PreTrainedModel],
    arguments: Mapping[str, object],
    *,
    dtype: str,
    on: torch.device,
    share: float | None,
    assumed: Hardware | None,
    remote: bool = False,
) -> list[Expected]:
    # Of each worker; a type that torch does not know leaves that of the weights.
    stored = make().dtype
    served = getattr(torch, dtype, stored)
    replicas = int(str(arguments.get("data_parallel_size") or 1))
    each = at_rest(make).weights * served.itemsize // stored.itemsize * replicas // workers_of(arguments)
    if on.type == "cpu":
        return [Expected(model, CPU, Bytes(each, keys_values=int(str(arguments.get(CACHE) or GIB))), remote)]
    gpus = [on] * workers_of(arguments)
    if not remote:
        gpus = [torch.device("cuda", gpu) for gpu in gpus_of(arguments, None if assumed is None else assumed.gpus)]
    needs = []
    for number, device in enumerate(gpus):
        memory = None if remote else memory_of(device, assumed)
        taken = int(share * memory[1]) if memory is not None and share is not None else 0
        cache = int(str(arguments[CACHE])) if arguments.get(CACHE) else max(LEAST_CACHE, taken - each)
        name = model if len(gpus) == 1 else f"{model}, worker {number}"
        needs.append(Expected(name, device, Bytes(each, keys_values=cache), remote, share=share))
    return needs


def engine_share(
    chosen: Mapping[str, object], devices: Devices, others: Sequence[Expected], assumed: Hardware | None = None
) -> float | None:
    """Return the share of a GPU's memory that an engine takes: the one that is chosen, or what others leave.

    ``None`` where the size of its cache is chosen, or it computes on a CPU.
    """
    if devices.policy.type == "cpu" or "policy" in devices.remote or chosen.get(CACHE):
        return None
    if share := chosen.get(SHARE):
        return float(str(share))
    gpus = gpus_of(placed(chosen, devices.policy), None if assumed is None else assumed.gpus)
    shares = [ALONE]
    for device, models in by_device(others).items():
        memory = memory_of(device, assumed)
        if device.type == "cuda" and device.index in gpus and memory is not None:
            left = memory[0] - BESIDE * sum(each.bytes.total for each in models) - GIB
            shares.append(max(0.0, round(left / memory[1], 2)))
    return min(shares)


def _policy(settings: Settings, made: Outlines, load: Load | None, replicas: int) -> Bytes:
    def share(load: Load) -> Load:  # of one replica, to which the responses to a prompt go together
        groups, responses = -(-load.rollouts // settings.algorithm.responses), settings.algorithm.responses
        return replace(load, rollouts=-(-groups // replicas) * responses)

    if load is None:
        return of_shortest(made.actor, share(load_of(settings, 1)).rollouts)
    return of_policy(made.actor, share(load), _sampling(settings.sampling), prefill_tokens=PREFILL_TOKENS)


def _served(
    make: Callable[[], PreTrainedModel], of: Callable[[Callable[[], PreTrainedModel], Load], Bytes], load: Load | None
) -> Bytes:
    return Bytes(at_rest(make).weights) if load is None else of(make, load)


def _shares_the_policy_s(settings: Settings, devices: Devices, model: str) -> bool:
    models = settings.models
    if model == "reference":
        apart = devices.reference != devices.actor or model in devices.apart
        return models.is_reference_on_base and not apart
    if model == "proximal":
        return settings.shares_weights or "policy" not in devices.apart
    return model == "critic" and models.shared_trunk


def _trainer(settings: Settings, made: Outlines, load: Load | None) -> Bytes:
    if load is None:
        return at_rest(made.trained)
    return of_trainer(made.trained, load, _sampling(settings.sampling), settings.trainer, settings.trained_loss())


def _training(devices: Devices, whole: Bytes, unshared: int | None, *, shard: bool) -> list[Expected]:
    ranks, own = devices.trainer, whole.weights if unshared is None else unshared
    if len(ranks) == 1:
        return [Expected("trainer", ranks[0], replace(whole, weights=own))]
    parts = len(ranks) if shard else 1
    needs = [Expected("trainer, whole weights", CPU, Bytes(own))] if own else []
    for rank, device in enumerate(ranks):
        in_place = rank == 0 and parts == 1 and device == CPU
        needs.append(
            Expected(
                f"{RANK} {rank}",
                device,
                replace(
                    whole,
                    weights=0 if in_place else whole.weights // parts,
                    optimizer=whole.optimizer // parts,
                    gradients=whole.gradients // parts,
                ),
                remote=rank > 0 and "trainer" in devices.remote,
            )
        )
    return needs


def _sampling(section: SamplingSection) -> Sampling:
    named = declared(SamplingSettings).keys() - {"stop_strings"}
    return Sampling(**{name: getattr(section, name) for name in named})


def by_device(needs: Iterable[Expected]) -> dict[torch.device, list[Expected]]:
    found: dict[torch.device, list[Expected]] = {}
    for each in needs:
        if each.remote:
            continue
        found.setdefault(each.device, []).append(each)
    return found


def is_of_training(need: Expected) -> bool:
    return need.model.startswith("trainer")


def at_worst(models: Sequence[Expected]) -> int:
    """Return the bytes that models need on their device at once: either an update, or what sleeps meanwhile."""
    total, asleep = sum(each.bytes.total for each in models), sum(each.bytes.total for each in models if each.sleeps)
    trained = [each for each in models if is_of_training(each)]
    return total - min(asleep, sum(each.bytes.total - each.at_rest().bytes.total for each in trained))


def crowded(needs: Sequence[Expected], assumed: Hardware | None = None, *, spread: bool = False) -> list[str]:
    """Return a message about each device that has less memory than its models need.

    ``spread``: each training rank in the cluster has a machine of its own.
    """
    messages = []
    for device, models in by_device(needs).items():
        total, memory = at_worst(models), memory_of(device, assumed)
        each = ", ".join(map(str, models))
        if memory is not None and total > memory[0]:
            messages.append(f"{device} has {decimal(memory[0])} free, and its models need {decimal(total)} ({each})")
        elif memory is not None and any(model.share == 0 for model in models):
            messages.append(
                f"{device} has {decimal(memory[0])} free, of which its models leave an engine none ({each})"
            )
    return messages if assumed is None else [*messages, *_crowded_cluster(needs, assumed, spread=spread)]


def _crowded_cluster(needs: Iterable[Expected], assumed: Hardware, *, spread: bool) -> Iterator[str]:
    actors: dict[str, list[Expected]] = {}
    ranks = sum(each.remote and each.model.startswith(RANK) for each in needs)
    if spread and ranks > assumed.machines - 1:
        yield (
            f"placement.spread puts {ranks} training ranks on as many machines beside this one, and "
            f"{assumed.machines - 1} are assumed"
        )
    for each in needs:
        if each.remote and each.device.type == "cuda":
            actors.setdefault(each.model.partition(".")[0], []).append(each)
    there = (assumed.machines - 1) * assumed.gpus
    if len(actors) > there:
        yield (
            f"{len(actors)} models are actors with a GPU each ({', '.join(actors)}), and beside this machine {there} "
            f"GPUs are assumed ({assumed})"
        )
    for models in actors.values():
        if sum(each.bytes.total for each in models) > assumed.bytes:
            held = ", ".join(map(str, models))
            yield f"a GPU of the cluster has {decimal(assumed.bytes)}, and an actor would hold {held}"


def share_beside(settings: Settings, devices: Devices) -> float | None:
    """Return the share of its GPUs' memory that an engine may take beside the models of a run, before they are loaded.

    ``None``: it takes what it would alone, or what ``[vllm]`` says.
    """
    # `vllm.gpu_memory_utilization` of vLLM itself is most of an empty GPU, which is refused where others have a part.
    if (
        settings.models.engine == "transformers"
        or settings.on_server
        or devices.policy.type == "cpu"
        or "policy" in devices.remote
        or settings.vllm.keys() & {SHARE, CACHE}
    ):
        return None
    gpus = gpus_of(placed(settings.vllm, devices.policy))
    if not any(device.type == "cuda" and device.index in gpus for device in devices.distinct()):
        return None
    with routed():
        needs = expected(settings, devices, load_of(settings, settings.data.max_prompt_tokens))
    if found := crowded([each for each in needs if each.device.type == "cuda" and each.device.index in gpus]):
        raise ConfigError(
            f"{'; '.join(found)}: give the policy a GPU of its own (placement.policy), or choose vllm.{SHARE} yourself"
        )
    return next(each.share for each in needs if each.share is not None)


def require_memory(settings: Settings, devices: Devices) -> None:
    """Check, before anything is loaded, that all weights, what training keeps, and a policy's states fit."""
    try:
        with routed():
            found = crowded(expected(settings, devices, None))
    except (ConfigError, ModelRefused):
        return
    if found:
        raise ConfigError(f"{'; '.join(found)}: {advice(settings, devices, None)}")


def advice(settings: Settings, devices: Devices, load: Load | None, assumed: Hardware | None = None) -> str:
    fitting, tried = [], [settings]
    for name, changes in _SMALLER:
        try:
            changed = settings.changed(changes)
            if changed in tried:
                continue
            tried.append(changed)
            with routed():
                needs = expected(changed, devices, load, assumed)
        except (ConfigError, ModelRefused, ValueError):
            continue
        if not crowded(needs, assumed, spread=settings.placement.spread):
            fitting.append(f"{name} would fit ({decimal(sum(each.bytes.total for each in needs))} in all)")
    return "; ".join(
        [
            *(fitting or ["no models.dtype = 'bfloat16' and no models.lora_rank = 16 would fit"]),
            *(["or have fewer or shorter responses in flight ([step], sampling.max_new_tokens)"] if load else []),
            "or give a model another device, or the trainer several ([placement]), or use smaller models",
        ]
    )
