"""Layouts that fit: which device does what, as settings to paste, with the memory and the seconds of each.

Memory is counted as :mod:`oppo.run.memory` counts it. Seconds are a roofline's (:mod:`oppo.simulate.costs`), of a step
in which every response is as long as it may be: a comparison of layouts, not a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from rich.filesize import decimal
from transformers import PreTrainedModel

from oppo.config.rewards import ModelRewardSection
from oppo.errors import ConfigError, ModelError, ModelRefused, in_toml
from oppo.hf.memory import Hardware, Load
from oppo.hf.model_parts import passes_at
from oppo.log import routed
from oppo.run.deployment import Deployment, named_reward
from oppo.run.engines import require_engines
from oppo.run.memory import Expected, Known, Outlines, at_worst, by_device, crowded, expected
from oppo.simulate.costs import Gpu, Reached, Transformer

Changes: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Settings by section and key."""

_CHECKPOINTING: Final[Changes] = {"trainer": {"gradient_checkpointing": 1}}
_ADAPTERS: Final = {"dtype": "bfloat16", "lora_rank": 16}
_TRUNK: Final = {"shared_trunk": True, "critic": ""}

REMEDIES: Final[Sequence[Changes]] = (
    {},
    _CHECKPOINTING,
    {**_CHECKPOINTING, "models": _ADAPTERS},
    {**_CHECKPOINTING, "models": {**_ADAPTERS, **_TRUNK}},
    {**_CHECKPOINTING, "models": {**_ADAPTERS, "quantization": "nf4"}},
    {**_CHECKPOINTING, "models": {**_ADAPTERS, "quantization": "nf4", **_TRUNK}},
)
"""What a layout does to fit, the first that is enough; each costs time or changes what is trained."""

SMALLER: Final = (
    "step.batch",
    "sampling.max_new_tokens",
    "step.chunk",
    "trainer.micro_batch_tokens",
    "models.lora_rank",
)
"""The numbers of which the largest that fits is looked for, each alone."""

DECODING, BESIDE, UPDATE = "decoding", "scoring where it decodes", "update"


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to place the models that fits.

    Attributes:
        name: what it does.
        changes: the settings that make it.
        needs: the memory of each model.
        seconds: of a step, by stage; empty for a GPU whose speed is not known.
        tokens: response tokens of a step.
        idle: GPUs that have nothing to do.
    """

    name: str
    changes: Changes
    needs: Sequence[Expected]
    seconds: Mapping[str, float]
    tokens: int
    idle: Sequence[str]

    @property
    def step(self) -> float:
        """Seconds of a step: decoding with what shares its GPU, beside the scorers elsewhere; then the update."""
        here = self.seconds.get(DECODING, 0.0) + self.seconds.get(BESIDE, 0.0)
        apart = [each for name, each in self.seconds.items() if name not in {DECODING, BESIDE, UPDATE}]
        return max([here, *apart]) + self.seconds.get(UPDATE, 0.0)

    @property
    def bound(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name]) if self.seconds else "unknown"

    @property
    def toml(self) -> str:
        lines = list[str]()
        for name, keys in self.changes.items():
            lines += [f"[{name}]", *(f"{key} = {in_toml(value)}" for key, value in keys.items())]
        return "\n".join(lines)

    def memory(self) -> str:
        on = {device: at_worst(models) for device, models in by_device(self.needs).items() if device.type == "cuda"}
        remote = [need.bytes.total for need in self.needs if need.remote and need.device.type == "cuda"]
        most = [*on.values(), *remote]
        return f"{decimal(min(most))} to {decimal(max(most))}" if min(most) != max(most) else decimal(most[0])


def proposed(deployment: Deployment, load: Load, known: Known) -> list[Layout]:
    """Return the layouts of an assumed machine that fit, the quickest first, each with as few remedies as it needs.

    If none fits, the batch and then the length of responses are halved until one does.
    """
    assumed, found = deployment.assumed, list[Layout]()
    if assumed is None:
        return found
    candidates = dict(_candidates(deployment, assumed))
    for name, changes in candidates.items():
        tried = (_merged(changes, remedy) for remedy in REMEDIES)
        found += _first(name, tried, deployment, load, known)
    for name, changes in candidates.items() if not found else ():
        tried = (_merged(_merged(changes, remedy), less) for less in _less(deployment) for remedy in REMEDIES[2:])
        found += _first(name, tried, deployment, load, known)
    return sorted(found, key=lambda layout: layout.step)


def _first(name: str, tried: Iterable[Changes], deployment: Deployment, load: Load, known: Known) -> list[Layout]:
    for changes in tried:
        fits = _fitting(deployment, changes, load, known)
        if fits is not None:
            return [_described(name, changes, *fits, load, known)]
    return []


def _less(deployment: Deployment) -> Iterator[Changes]:
    batch, length = deployment.settings.step.batch, deployment.settings.sampling.max_new_tokens
    while batch > 1:
        batch //= 2
        yield {"step": {"batch": batch, **_overcommit(deployment, batch)}}
    while length > 64:
        length //= 2
        yield {"step": {"batch": batch, **_overcommit(deployment, batch)}, "sampling": {"max_new_tokens": length}}


def _overcommit(deployment: Deployment, batch: int) -> Mapping[str, int]:
    given = deployment.settings.step.overcommit
    return {"overcommit": batch} if given is not None and given > batch else {}


def largest(deployment: Deployment, load: Load, known: Known) -> Iterator[str]:
    """Yield the largest value that fits, found by halving, of each setting by which a run can be made to fit."""
    for key in SMALLER:
        section, name = key.split(".")
        value = getattr(getattr(deployment.settings, section), name)
        if not isinstance(value, int) or value < 2 or isinstance(value, bool):
            continue
        while value := value // 2:
            more = _overcommit(deployment, value) if key == "step.batch" else {}
            fits = _fitting(deployment, {section: {name: value, **more}}, load, known)
            if fits is not None:
                yield f"{key} = {value} fits"
                break


def _candidates(deployment: Deployment, assumed: Hardware) -> Iterator[tuple[str, Changes]]:
    gpus, critic = assumed.gpus, deployment.settings.algorithm.has_critic
    yield "all on one GPU", {}
    if gpus >= 2:
        rest = [f"cuda:{number}" for number in range(2, gpus)]
        scorers = {"policy": "cuda:0", "scorers": "cuda:1", "trainer": rest or ["cuda:0"]}
        yield f"scorers on a GPU, {max(1, len(rest))} that train", {"placement": scorers}
        yield f"all share the first GPU, {gpus} train", {"placement": {"trainer": [f"cuda:{n}" for n in range(gpus)]}}
    for decoding in (size for size in (1, 2, 4, 8) if size + 2 <= gpus):
        training = [f"cuda:{number}" for number in range(decoding + 1, gpus)]
        placement = {"policy": "cuda:0", "scorers": f"cuda:{decoding}", "trainer": training}
        engine: Changes = {"models": {"engine": "vllm"}, "placement": placement}
        yield (
            f"vLLM on {decoding}, scorers on one, {len(training)} that train",
            (_merged(engine, {"vllm": {"tensor_parallel_size": decoding}}) if decoding > 1 else engine),
        )
        if decoding > 1:
            replicas = {"placement": {**placement, "policy_replicas": decoding}}
            yield f"{decoding} replicas of vLLM, scorers on one, {len(training)} that train", _merged(engine, replicas)
    if gpus >= 5 + critic:
        apart = ["reference", "reward", *(["critic"] if critic else [])]
        first = {name: f"cuda:{number}" for number, name in enumerate(apart, 1)}
        training = [f"cuda:{number}" for number in range(len(apart) + 1, gpus)]
        yield (
            f"each scorer on a GPU, {len(training)} that train",
            {"placement": {"policy": "cuda:0", **first, "trainer": training}},
        )
    if assumed.machines > 1:
        room = (assumed.machines - 1) * gpus - len(deployment.scored)
        ranks = [f"cuda:{min(1, gpus - 1)}", *["cuda"] * max(1, room)]
        yield (
            f"decoding here, {len(ranks)} that train and the scorers in the cluster",
            {"placement": {"cluster": "auto", "policy": "cuda:0", "scorers": "cuda", "trainer": ranks}},
        )


def _merged(changes: Changes, more: Changes) -> Changes:
    return {name: {**changes.get(name, {}), **more.get(name, {})} for name in {**changes, **more}}


def _fitting(
    deployment: Deployment, changes: Changes, load: Load, known: Known
) -> tuple[Deployment, Sequence[Expected]] | None:
    assumed = deployment.assumed
    try:
        settings = deployment.settings.changed(changes)
        with routed():
            other = Deployment.of(settings, assumed)
            require_engines(other)
            under = other.load(load.prompt)
            for asked in (None, under):  # at rest it is counted at once
                needs = expected(other, asked, known)
                if crowded(needs, assumed, spread=settings.placement.spread):
                    return None
    except (ConfigError, ModelError, ModelRefused, ValueError):
        return None  # a layout that these settings do not allow
    return other, needs


def _described(  # noqa: PLR0917 - what a layout consists of
    name: str, changes: Changes, deployment: Deployment, needs: Sequence[Expected], load: Load, known: Known
) -> Layout:
    settings, assumed = deployment.settings, deployment.assumed
    assert assumed is not None  # noqa: S101 - layouts are of machines that are assumed
    load = deployment.load(load.prompt)
    busy = {need.device.index for need in needs if need.device.type == "cuda" and not need.remote}
    idle = [f"cuda:{number}" for number in range(assumed.gpus) if number not in busy]
    if assumed.machines > 1:
        there = (assumed.machines - 1) * assumed.gpus - sum(need.remote for need in needs)
        idle += [f"{there} of the other machines"] * (there > 0)
    batch = settings.step.batch * settings.algorithm.responses
    under = replace(load, rollouts=batch)
    seconds = {} if assumed.gpu is None else _seconds(deployment, needs, under, assumed.gpu, known)
    return Layout(name, changes, needs, seconds, batch * load.response, idle)


def _seconds(
    deployment: Deployment, needs: Sequence[Expected], load: Load, gpu: Gpu, known: Known
) -> Mapping[str, float]:
    made, settings, workers = Outlines(deployment, known), deployment.settings, deployment.engine_workers
    reached = Reached(name="vllm" if deployment.has_engine else "transformers")
    together = replace(gpu, flops=gpu.flops * workers, bandwidth=gpu.bandwidth * workers)
    actor, rows = _sizes(made.actor()), -(-load.rollouts // deployment.devices.replicas)
    weights = replace(actor, parameters=max(actor.parameters, float(made.actor().num_parameters())))
    # A decode step reads all experts of a mixture, and a row is multiplied with few of them.
    decoder = replace(reached.decoder(together, weights, 1), row=reached.decoder(together, actor, 1).row)
    prompts = rows * reached.reader(together, actor, reached.forward, head=False).reading(0, load.prompt)
    context = rows * (load.prompt + load.response / 2)
    found = {DECODING: prompts + load.response * decoder.seconds(rows, context)}
    shared = {need.where for need in needs if need.model.startswith("policy")}
    for need in needs:
        model = _scorer(made, need.model)
        if model is None:
            continue
        share, head = (reached.scoring, False) if need.model in _rewards(made) else (reached.forward, True)
        passes = reached.reader(gpu, _sizes(model), share, head=head and need.model != "critic")
        place = BESIDE if need.where in shared else f"scoring on {need.model if need.remote else need.where}"
        found[place] = found.get(place, 0.0) + load.rollouts * passes.reading(0, load.sequence)
    has_own = settings.algorithm.has_critic and not deployment.models.shared_trunk
    checkpointing = bool(settings.trainer.gradient_checkpointing)
    epoch = sum(
        reached.update(gpu, _sizes(each), head=number == 0, checkpointing=checkpointing).reading(0, load.sequence)
        for number, each in enumerate([made.actor(), *([made.critic()] if has_own else [])])
    )
    ranks = len(deployment.devices.trainer)
    return {**found, UPDATE: settings.trainer.epochs * load.rollouts * epoch / ranks}


def _rewards(made: Outlines) -> Mapping[str, tuple[str, ModelRewardSection]]:
    tables = made.deployment.settings.reward_tables.items()
    return {named_reward(each): (key, each) for key, each in tables if isinstance(each, ModelRewardSection)}


def _scorer(made: Outlines, name: str) -> PreTrainedModel | None:
    models = made.deployment.models
    if name == "critic":
        return made.critic()
    if name == "proximal":
        return made.actor()
    if name == "reference" or name in models.teachers:
        return made.logprobs(name)
    found = _rewards(made).get(name)
    return None if found is None else made.scored(*found)


def _sizes(model: PreTrainedModel) -> Transformer:
    # Of the numbers that a token is multiplied with: of a mixture, those of its experts.
    text = model.config.get_text_config()
    head, numbers = text.vocab_size * text.hidden_size, passes_at(1.0, model).token / 2
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Transformer(
        parameters=numbers if model.get_output_embeddings() is not None else numbers + head,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        cached=heads * width,
        vocabulary=text.vocab_size,
        tied=True,
    )
