"""The memory that the models of a run will need, each on its device, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

import torch
from rich.filesize import decimal
from torch import nn
from transformers import PreTrainedModel

from oppo.config.environment import INITIAL
from oppo.config.scorers import ModelRewardSection, OnVllm, VllmRewardSection
from oppo.config.sections import SamplingSection
from oppo.declared import declared
from oppo.errors import ConfigError, ModelRefused, one_line
from oppo.hf.as_text.whole import transformer_of
from oppo.hf.devices import CPU, Devices, memory_of
from oppo.hf.loading import outline
from oppo.hf.lora import load_lora, outline_lora, quantise_base
from oppo.hf.memory import (
    Bytes,
    Load,
    ServedPolicy,
    ServedScorer,
    Trained,
    at_rest,
    same,
    served_critic,
    served_process_reward,
    served_reference,
)
from oppo.hf.meta_device import planned_on
from oppo.hf.model_files import CAUSAL, CLASSIFIER, EMBEDDER, PROCESS, SCALAR, Kind, RewardKind, located, reward_kind
from oppo.hf.model_parts import FAILURES
from oppo.hf.serve.policy import PREFILL_TOKENS
from oppo.hf.train.actor_critic import ActorCritic, value_model_on
from oppo.hf.train.packing import CPU_TOKENS, GPU_TOKENS, most_gpu_tokens
from oppo.log import logger, routed
from oppo.models import Sampling, SamplingSettings
from oppo.run.deployment import Deployment, named_reward
from oppo.run.engines import served_dtype
from oppo.run.loading import adapter_of, critic_source, kind_of
from oppo.simulate.profile import Hardware
from oppo.vllm.arguments import GIB, gpus_of, placed, workers_of

SHARE: Final = "gpu_memory_utilization"  # the engine's argument with its share of a GPU's memory

CACHE: Final = "kv_cache_memory_bytes"
"""The engine's argument with the size of its KV cache, which takes the place of a share."""

ALONE: Final = 0.92  # the share that vLLM takes of a GPU by itself

BESIDE: Final = 1.1
"""Memory reserved for models beside an engine, and for larger micro-batches, as a multiple of their need.

Allocators keep free blocks.
"""

LEAST_CACHE: Final = GIB  # bytes of a KV cache and of work space without which no engine starts

KINDS: Final[Mapping[RewardKind, Kind]] = {
    "scalar": SCALAR,
    "process": PROCESS,
    "classifier": CLASSIFIER,
    "similarity": EMBEDDER,
}
RANK: Final = "trainer, rank"  # the name of a training rank, before its number

T = TypeVar("T")

Known: TypeAlias = dict[Hashable, Any]  # models without weights, and bytes counted, by what they depend on

_SERVED: Final = "vLLM, as its engine, divides it among GPUs (tensor_parallel_size); or take a smaller model"
_DIVIDES: Final[Mapping[str, str]] = {
    "trainer": "several devices in placement.trainer divide its states, and models.lora_rank trains far fewer weights",
    "policy": "models.engine = 'vllm' divides it among vllm.tensor_parallel_size GPUs",
    "critic": "models.critic names a smaller one, and models.shared_trunk = true makes it a head on the policy",
}
"""What makes a model that is larger than its GPU smaller there."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Memory that a model will need on its device at its worst; what several share counts for the first."""

    model: str
    device: torch.device
    bytes: Bytes
    remote: bool = False  # on another machine, whose memory is not known here
    share: float | None = None  # that an engine takes; None: it takes what it needs
    sleeps: bool = False  # needs none during an update

    @property
    def where(self) -> str:
        return f"{self.device} in the cluster" if self.remote else str(self.device)

    def with_activations(self, times: float) -> Expected:
        return replace(self, bytes=replace(self.bytes, activations=int(times * self.bytes.activations)))

    def at_rest(self) -> Expected:
        return replace(self, bytes=replace(self.bytes, gradients=0, activations=0))

    def __str__(self) -> str:
        chosen = "" if self.share is None else f", vllm.{SHARE} = {self.share}"
        return f"{self.model} {decimal(self.bytes.total)}{chosen}"


@dataclass(frozen=True, slots=True)
class Outlines:
    """The models of a run without weights or adapters, and what has been counted of them."""

    deployment: Deployment
    known: Known = field(default_factory=dict)  # runs that are compared share it

    def actor(self) -> PreTrainedModel:
        return self.outlined("models.policy", CAUSAL, self.deployment.models.policy)

    def adapted(self, actor: PreTrainedModel) -> PreTrainedModel:
        models = self.deployment.models
        if models.quantization != "none":
            quantise_base(actor, models.quantization, actor.device)
        if models.lora_rank:
            outline_lora(actor, models.lora_rank, models.lora_alpha, experts=models.lora_experts, more=models.lora)
        if models.adapter:
            load_lora(actor, adapter_of(models), weights=False)
        return actor

    @property
    def adapt(self) -> Callable[[PreTrainedModel], PreTrainedModel]:
        return self.adapted if self.deployment.models.adapts else same

    @property
    def adapter(self) -> Hashable:
        models = self.deployment.models
        return models.quantization, models.lora_rank, models.lora_experts, repr(models.lora), models.adapter

    def logprobs(self, name: str) -> PreTrainedModel:
        models = self.deployment.models
        path = {"reference": models.reference, **self.deployment.settings.teachers}[name]
        return self.outlined(f"models.{name}", CAUSAL, path)

    def over_base(self, name: str) -> Callable[[PreTrainedModel], PreTrainedModel]:
        models = self.deployment.models
        if name != "reference" or not models.is_reference_on_base or models.quantization == "none":
            return same

        def quantised(model: PreTrainedModel) -> PreTrainedModel:
            quantise_base(model, models.quantization, model.device)
            return model

        return quantised

    def reward(self, key: str, reward: ModelRewardSection, load: Load | None, device: torch.device) -> Bytes:
        path, kind = reward.source, self.kind(key, reward)
        directory = transformer_of(self._located(path)) if kind == "similarity" else path
        make = partial(self.outlined, key, KINDS[kind], str(directory))
        if kind in {"classifier", "similarity"}:  # these read whole responses: weights alone are known
            return Bytes(at_rest(make).weights)
        if kind == "process":
            return self.served(named_reward(reward), (kind, path), partial(served_process_reward, make), load, device)
        # A critic keeps a number of each token, and a reward model that of the last one: one count is both's.
        return self.served(named_reward(reward), ("critic", path), partial(served_critic, make), load, device)

    def served(
        self,
        name: str,
        key: Hashable,
        make: Callable[[], ServedScorer[Any]],
        load: Load | None,
        device: torch.device,
    ) -> Bytes:
        scorer = self.kept((key, device.type), make)

        def count() -> Bytes:
            with planned_on(device):
                return scorer.under(load) if load else scorer.at_rest

        return self.counted(name, (key, device.type, load), count)

    def policy(self) -> ServedPolicy:
        key = "policy", self.deployment.models.policy, self.adapter
        return self.kept(key, lambda: ServedPolicy(self.actor, self.adapt))

    def scorer(self, name: str) -> tuple[PreTrainedModel | None, bool]:
        """Return the model of a row of the table, if its passes are known, and whether it gives log-probs."""
        for key, reward in self.deployment.settings.reward_tables.items():
            if isinstance(reward, ModelRewardSection) and named_reward(reward) == name:
                kind = self.kind(key, reward)
                known = kind in {"scalar", "process"}
                return self.outlined(key, KINDS[kind], reward.source) if known else None, False
        if name == "critic":
            return self.critic(), False
        if name == "proximal":
            return self.actor(), True
        return (
            (self.logprobs(name), True)
            if name == "reference" or name in self.deployment.settings.teachers
            else (None, True)
        )

    def kind(self, key: str, reward: ModelRewardSection) -> RewardKind:
        trusted, found = self.deployment.models.trust_remote_code, ("kind", reward.source)
        if found not in self.known:
            self.known[found] = reward_kind(self._located(reward.source), trusted=trusted)
        return kind_of(key, reward, self.known[found])

    def _located(self, path: str) -> Path:
        trusted = self.deployment.models.trust_remote_code
        with routed():
            return located(path, weights=False, trust_remote_code=trusted)

    @property
    def critic_source(self) -> str:
        models, settings = self.deployment.models, self.deployment.settings
        if models.shared_trunk:
            return ""
        fit = [
            reward.source
            for key, reward in settings.reward_tables.items()
            if isinstance(reward, VllmRewardSection)
            or (isinstance(reward, ModelRewardSection) and self.kind(key, reward) == "scalar")
        ]
        return critic_source(models, settings.reward_models, fit)

    def critic(self) -> PreTrainedModel:
        if self.deployment.models.shared_trunk:
            return value_model_on(self.actor())
        return self.outlined("models.critic", SCALAR, self.critic_source)

    def trained(self) -> nn.ModuleDict:
        own = self.deployment.settings.algorithm.has_critic and not self.deployment.models.shared_trunk
        return nn.ModuleDict({"actor": self.actor(), **({"critic": self.critic()} if own else {})})

    def training(self, models: nn.ModuleDict) -> ActorCritic:
        held = cast("dict[str, PreTrainedModel]", dict(models.items()))
        actor, critic = self.adapted(held["actor"]), held.get("critic")
        shares = self.deployment.settings.algorithm.has_critic and self.deployment.models.shared_trunk
        return ActorCritic(actor, value_model_on(actor) if shares else critic)

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        key = ("kept", key, self.deployment.models.dtype)
        if key not in self.known:
            self.known[key] = make()
        return cast("T", self.known[key])

    def counted(self, model: str, key: Hashable, count: Callable[[], Bytes]) -> Bytes:
        key = (key, self.deployment.models.dtype)
        if key not in self.known:
            logger.info(f"counting the memory of the {model}")
            try:
                self.known[key] = count()
            except FAILURES as error:
                raise ConfigError(
                    f"the memory of the {model} could not be counted: its passes failed on tensors without data "
                    f"({one_line(error)}); `oppo doctor --trial` makes a step on this machine and measures it"
                ) from error
        return cast("Bytes", self.known[key])

    def outlined(self, key: str, kind: Kind, path: str) -> PreTrainedModel:
        models = self.deployment.models
        found = (kind.name, path, models.dtype)
        if found not in self.known:
            try:
                self.known[found] = outline(kind, path, dtype=models.dtype, trust_remote_code=models.trust_remote_code)
            except (ConfigError, ModelRefused) as error:
                raise type(error)(f"{key}: {error}") from error
        return cast("PreTrainedModel", self.known[found])


def expected(deployment: Deployment, load: Load | None, known: Known | None = None) -> list[Expected]:
    """Return the memory of each model under a load; ``None``: weights, optimizer states, states of rollouts."""
    return planned(deployment, load, {} if known is None else known)[1]


def with_micro_batches(deployment: Deployment, load: Load) -> Deployment:
    if deployment.trainer.micro_batch_tokens is not None:
        return deployment
    on_cpu = deployment.devices.trainer[0].type == "cpu"
    return _with_tokens(deployment, CPU_TOKENS if on_cpu else planned(deployment, load, {})[0])


def _with_tokens(deployment: Deployment, count: int) -> Deployment:
    return replace(deployment, trainer=replace(deployment.trainer, micro_batch_tokens=count))


def planned(deployment: Deployment, load: Load | None, known: Known) -> tuple[int, list[Expected]]:
    # The most tokens that leave room. Each is counted: gradients of 16 bits and chunks of logits do not grow with them.
    given, on_cpu = deployment.trainer.micro_batch_tokens, deployment.devices.trainer[0].type == "cpu"
    tokens = given or (CPU_TOKENS if on_cpu else GPU_TOKENS // 4)
    needs, spread = _needs(_with_tokens(deployment, tokens), load, known), deployment.settings.placement.spread
    if given or on_cpu or load is None or crowded(needs, deployment.assumed, spread=spread):
        return tokens, needs
    most = most_gpu_tokens(sum(each.numel() for each in Outlines(deployment, known).actor().parameters()))
    while most > tokens:
        larger = _needs(_with_tokens(deployment, most), load, known)
        # An engine takes what others leave, so its cache is the one that it has beside the smallest.
        reserved = [
            now.with_activations(BESIDE) if is_of_training(now) else before
            for before, now in zip(needs, larger, strict=True)
        ]
        if not crowded(reserved, deployment.assumed, spread=spread):
            return most, larger
        most //= 2
    return tokens, needs


def _needs(deployment: Deployment, load: Load | None, known: Known) -> list[Expected]:
    made, settings, devices = Outlines(deployment, known), deployment.settings, deployment.devices
    own_engine, needs = deployment.has_engine, list[Expected]()
    if not own_engine:
        policy, remote = _policy(deployment, made, load), "policy" in devices.remote
        for number, device in enumerate(devices.policies):
            needs.append(Expected(deployment.policy_name(number), device, policy, remote))
    needs += _of_scorers(deployment, made, load)
    for role, player in settings.agents.frozen.items():
        needs.append(Expected(f"role {role!r}", devices.actor, _player(made, f"agents.roles.{role}", player, load)))
    unshared = None
    if settings.shares_weights:
        apart = {"policy": made.actor, "critic": made.critic}
        there = devices.apart | ({"policy"} if own_engine else set())
        unshared = sum(
            made.policy().at_rest.weights if model == "policy" else at_rest(make).weights
            for model, make in apart.items()
            if model in there
        )
    needs += _training(devices, _trained(deployment, made, load), unshared, shard=settings.placement.shard)
    if own_engine and not settings.on_server:
        sleeps = settings.placement.share == "sleep"
        beside = [need.at_rest() if sleeps and is_of_training(need) else need for need in needs]
        needs = [*_policy_on_engine(deployment, made, beside), *needs]
    return needs


def _trained(deployment: Deployment, made: Outlines, load: Load | None) -> Bytes:
    settings, trainer, device = deployment.settings, deployment.trainer, deployment.devices.trainer[0]
    own = settings.algorithm.has_critic and (deployment.models.shared_trunk or made.critic_source)
    loss, sampling = settings.trained_loss(), _sampling(settings.sampling)

    models = deployment.models.policy, made.adapter, own
    trained = made.kept(("trained", models), lambda: Trained(made.trained, made.training))
    if load is None:
        return trained.at_rest(trainer.optimizer)

    def count() -> Bytes:
        with planned_on(device):
            return trained.under(load, sampling, trainer, loss)

    tokens = min(trainer.micro_batch_tokens or CPU_TOKENS, load.rollouts * (load.sequence - 1))
    asked = tokens, load.rollouts, load.prompt, load.response, trainer.gradient_checkpointing
    key = "trainer", models, asked, device.type, trainer.optimizer, repr(loss), sampling.temperature
    return made.counted("trainer", key, count)


def _of_scorers(deployment: Deployment, made: Outlines, load: Load | None) -> Iterator[Expected]:
    settings, devices = deployment.settings, deployment.devices
    uncounted = deployment.has_engine and not settings.shares_weights
    for model in sorted(deployment.scored, key=lambda model: model != "proximal"):
        device, remote = devices.scoring()[model], model in devices.remote
        for role in deployment.roles_of("teacher") if model == "teacher" else ():
            served = _served(made, role.name, load, device)
            yield Expected(
                role.name, device, replace(served, weights=0) if deployment.teacher_shares else served, remote
            )
        if settings.teacher.weights == "average" and model == "teacher":
            floats = 4 * sum(each.numel() for each in made.actor().parameters())
            yield Expected("teacher, average", devices.actor, Bytes(floats))
        if model not in {"reward", "teacher"}:
            served = _served(made, model, load, device)
            shares = _shares_the_policy_s(deployment, model)
            if shares and uncounted and model != "critic":  # the first that is served over the policy's weights
                shares = uncounted = False
            yield Expected(model, device, replace(served, weights=0) if shares else served, remote)
        for key, reward in settings.reward_tables.items() if model == "reward" else ():
            if isinstance(reward, ModelRewardSection):
                yield Expected(named_reward(reward), device, made.reward(key, reward, load, device), remote)
            elif isinstance(reward, VllmRewardSection):
                make = partial(made.outlined, key, SCALAR, reward.source)
                yield from _on_engine(named_reward(reward), make, reward, device, deployment.assumed)
    for role, on in deployment.on_vllm("reference", "teacher"):
        yield from _on_engine(role.name, partial(made.logprobs, role.name), on, role.device, deployment.assumed)


def _policy_on_engine(deployment: Deployment, made: Outlines, others: Sequence[Expected]) -> list[Expected]:
    chosen, devices = deployment.settings.vllm, deployment.devices
    stored = made.actor().dtype
    dtype = served_dtype(deployment.models, chosen, stored)
    weights = made.policy().at_rest.weights
    share, remote = engine_share(deployment, others), "policy" in devices.remote
    needs = list[Expected]()
    for number, on in enumerate(devices.policies):
        needs += _workers(
            deployment.policy_name(number),
            (weights, stored),
            placed(chosen, on),
            dtype=dtype,
            on=on,
            share=share,
            assumed=deployment.assumed,
            remote=remote,
        )
    if deployment.settings.placement.share != "sleep":
        return needs
    asleep = Bytes(sum(need.bytes.weights for need in needs))
    return [Expected("policy, asleep", CPU, asleep), *(replace(need, sleeps=True) for need in needs)]


def _on_engine(
    name: str, make: Callable[[], PreTrainedModel], of: OnVllm, on: torch.device, assumed: Hardware | None
) -> Iterator[Expected]:
    # Of each worker of a scorer's engine; what a server needs is no matter of this run.
    if of.url:
        return
    arguments = placed(of.vllm, on)
    share, dtype = float(str(arguments.get(SHARE) or ALONE)), str(arguments.get("dtype", "auto"))
    model = make()
    for need in _workers(
        name, (at_rest(make).weights, model.dtype), arguments, dtype=dtype, on=on, share=share, assumed=assumed
    ):
        yield replace(need, share=None)  # which is the share of the policy's engine


def _workers(
    model: str,
    held: tuple[int, torch.dtype],
    arguments: Mapping[str, object],
    *,
    dtype: str,
    on: torch.device,
    share: float | None,
    assumed: Hardware | None,
    remote: bool = False,
) -> list[Expected]:
    # For each worker; a dtype that torch does not know counts as the weights' own.
    whole, stored = held
    served = getattr(torch, dtype, stored)
    replicas = int(str(arguments.get("data_parallel_size") or 1))
    weights = whole * served.itemsize // stored.itemsize * replicas // workers_of(arguments)
    if on.type == "cpu":
        return [Expected(model, CPU, Bytes(weights, keys_values=int(str(arguments.get(CACHE) or GIB))), remote)]
    gpus = [on] * workers_of(arguments)
    if not remote:
        gpus = [torch.device("cuda", gpu) for gpu in gpus_of(arguments, None if assumed is None else assumed.gpus)]
    needs = []
    for number, device in enumerate(gpus):
        memory = None if remote else memory_of(device, assumed)
        taken = int(share * memory[1]) if memory is not None and share is not None else 0
        cache = int(str(arguments[CACHE])) if arguments.get(CACHE) else max(LEAST_CACHE, taken - weights)
        name = model if len(gpus) == 1 else f"{model}, worker {number}"
        needs.append(Expected(name, device, Bytes(weights, keys_values=cache), remote, share=share))
    return needs


def engine_share(deployment: Deployment, others: Sequence[Expected]) -> float | None:
    """Return the share of a GPU's memory for the policy's engine; ``None``: its cache has a size, or it is on a CPU."""
    chosen, on = deployment.settings.vllm, deployment.devices.policy
    if on.type == "cpu" or "policy" in deployment.devices.remote or chosen.get(CACHE):
        return None
    if share := chosen.get(SHARE):
        return float(str(share))
    gpus, shares = gpus_of(placed(chosen, on), deployment.gpus), [ALONE]
    for device, models in by_device(others).items():
        memory = memory_of(device, deployment.assumed)
        if device.type == "cuda" and device.index in gpus and memory is not None:
            left = memory[0] - BESIDE * sum(need.bytes.total for need in models) - GIB
            shares.append(max(0.0, round(left / memory[1], 2)))
    return min(shares)


def _policy(deployment: Deployment, made: Outlines, load: Load | None) -> Bytes:
    settings = deployment.settings

    def share(load: Load) -> Load:  # of one replica, to which the responses to a prompt go together
        groups, responses = -(-load.rollouts // settings.algorithm.responses), settings.algorithm.responses
        return replace(load, rollouts=-(-groups // deployment.devices.replicas) * responses)

    def count() -> Bytes:
        if load is None:
            return made.policy().shortest(share(deployment.load(1)).rollouts)
        return made.policy().under(share(load), _sampling(settings.sampling), prefill_tokens=PREFILL_TOKENS)

    mine = replace(share(deployment.load(1) if load is None else load), chunk=1)
    chosen = settings.sampling.temperature > 0, settings.sampling.top_k, settings.sampling.top_p
    return made.counted("policy", ("policy", deployment.models.policy, made.adapter, mine, load is None, chosen), count)


def _player(made: Outlines, key: str, player: str, load: Load | None) -> Bytes:
    # Of a frozen role, which at most all rollouts ask at a time.
    models, sampling = made.deployment.models, _sampling(made.deployment.settings.sampling)
    path = models.policy if player == INITIAL else player
    make = partial(made.outlined, key, CAUSAL, path)
    served = made.kept(("player", path), lambda: ServedPolicy(make))
    if load is None:
        return served.at_rest
    return made.counted(
        key, ("player", path, load), lambda: served.under(load, sampling, prefill_tokens=PREFILL_TOKENS)
    )


def _served(made: Outlines, model: str, load: Load | None, device: torch.device) -> Bytes:
    # The critic, or what gives the log-probs of the name's model.
    models = made.deployment.models
    if model == "critic":
        source = (models.shared_trunk and models.policy) or made.critic_source
        return made.served(model, ("critic", source), partial(served_critic, made.critic), load, device)
    if model == "proximal":
        key = "logprobs", models.policy, made.adapter
        return made.served(model, key, partial(served_reference, made.actor, made.adapt), load, device)
    adapt = made.over_base(model)
    path = {"reference": models.reference, **made.deployment.settings.teachers}[model]
    of_base = "logprobs", path, models.quantization if adapt is not same else "none"
    return made.served(model, of_base, partial(served_reference, partial(made.logprobs, model), adapt), load, device)


def _shares_the_policy_s(deployment: Deployment, model: str) -> bool:
    models = deployment.models
    if model == "reference":
        return models.is_reference_on_base and not deployment.reference_is_apart
    if model == "proximal":
        return deployment.settings.shares_weights or "policy" not in deployment.devices.apart
    return model == "critic" and models.shared_trunk


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
    needs_of: dict[torch.device, list[Expected]] = {}
    for need in needs:
        if need.remote:
            continue
        needs_of.setdefault(need.device, []).append(need)
    return needs_of


def on_other_machines(needs: Iterable[Expected]) -> list[Expected]:
    return [need for need in needs if need.remote]


def is_of_training(need: Expected) -> bool:
    return need.model.startswith("trainer")


def at_worst(models: Sequence[Expected]) -> int:
    """Return the bytes that models need on their device at once: either an update, or what sleeps meanwhile."""
    total, asleep = sum(need.bytes.total for need in models), sum(need.bytes.total for need in models if need.sleeps)
    trained = [need for need in models if is_of_training(need)]
    return total - min(asleep, sum(need.bytes.total - need.at_rest().bytes.total for need in trained))


def crowded(needs: Sequence[Expected], assumed: Hardware | None = None, *, spread: bool = False) -> list[str]:
    messages = []
    for device, models in by_device(needs).items():
        total, memory = at_worst(models), memory_of(device, assumed)
        listed = ", ".join(map(str, models))
        if memory is not None and total > memory[0]:
            messages.append(f"{device} has {decimal(memory[0])} free, and its models need {decimal(total)} ({listed})")
        elif memory is not None:
            messages += [
                f"{device} has {decimal(memory[0])} free, of which an engine has {decimal(taken)} where its weights "
                f"and the smallest cache are {decimal(model.bytes.total)} ({listed})"
                for model in models
                if model.share is not None and (taken := int(model.share * memory[1])) < model.bytes.total
            ]
    return messages if assumed is None else [*messages, *_crowded_cluster(needs, assumed, spread=spread)]


def too_large(needs: Iterable[Expected], assumed: Hardware | None = None) -> Iterator[str]:
    for need in needs:
        memory = None if need.remote else memory_of(need.device, assumed)
        if memory is not None and need.bytes.total > memory[0] and need.device.type == "cuda":
            how = _DIVIDES.get(re.split("[, .]", need.model)[0], _SERVED)
            yield f"the {need.model} alone needs {decimal(need.bytes.total)} on {need.device}: {how}"


def _crowded_cluster(needs: Iterable[Expected], assumed: Hardware, *, spread: bool) -> Iterator[str]:
    actors: dict[str, list[Expected]] = {}
    ranks = sum(need.remote and need.model.startswith(RANK) for need in needs)
    if spread and ranks > assumed.machines - 1:
        yield (
            f"placement.spread puts {ranks} training ranks on as many machines beside this one, and "
            f"{assumed.machines - 1} are assumed"
        )
    for need in needs:
        if need.remote and need.device.type == "cuda":
            actors.setdefault(need.model.partition(".")[0], []).append(need)
    there = (assumed.machines - 1) * assumed.gpus
    if len(actors) > there:
        yield (
            f"{len(actors)} models are actors with a GPU each ({', '.join(actors)}), and beside this machine {there} "
            f"GPUs are assumed ({assumed})"
        )
    for models in actors.values():
        if sum(need.bytes.total for need in models) > assumed.bytes:
            held = ", ".join(map(str, models))
            yield f"a GPU of the cluster has {decimal(assumed.bytes)}, and an actor would hold {held}"


def with_share(deployment: Deployment, load: Load) -> Deployment:
    settings, devices = deployment.settings, deployment.devices
    # vLLM's own default is most of an empty GPU, which is refused where others have a part.
    if (
        not deployment.has_engine
        or settings.on_server
        or devices.policy.type == "cpu"
        or "policy" in devices.remote
        or settings.vllm.keys() & {SHARE, CACHE}
    ):
        return deployment
    gpus = gpus_of(placed(settings.vllm, devices.policy))
    if not any(device.type == "cuda" and device.index in gpus for device in devices.distinct()):
        return deployment
    with routed():
        needs = expected(deployment, load)
    if faults := crowded([need for need in needs if need.device.type == "cuda" and need.device.index in gpus]):
        raise ConfigError(
            f"{'; '.join(faults)}: give the policy a GPU of its own (placement.policy), or choose vllm.{SHARE} yourself"
        )
    return replace(deployment, share=next(need.share for need in needs if need.share is not None))
