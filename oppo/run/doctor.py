"""Checks of a run before it begins.

``oppo doctor`` says where each model goes, what memory it will need there, and whether that is enough. ``oppo doctor
--trial`` makes one step as long as the settings allow, so that memory runs out now if it ever does. Nothing is saved.
"""

from __future__ import annotations

import platform
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

import anyio
from rich.filesize import decimal

from oppo.config.load import with_correction
from oppo.config.sections import PlacementSection
from oppo.config.settings import Settings
from oppo.data import PromptStream
from oppo.errors import ConfigError, in_toml
from oppo.events import Prompt
from oppo.hf.devices import Peak, available_cores, memory_of
from oppo.hf.memory import Bytes, Load
from oppo.hf.model_parts import transformer
from oppo.log import logger, routed
from oppo.run.checkpoint import Provenance
from oppo.run.deployment import Deployment
from oppo.run.loading import reader_of_images
from oppo.run.memory import (
    RANK,
    SHARE,
    Expected,
    Known,
    Outlines,
    at_worst,
    by_device,
    crowded,
    expected,
    on_other_machines,
    too_large,
)
from oppo.run.memory_fit import REMEDIES, Changes, Fit, advice, altered, first_fit, merged
from oppo.run.models import policy_tokenizer
from oppo.run.prompts import supplied
from oppo.run.rewards import begin_of, environment_of
from oppo.run.train import PreparedRun, prepare
from oppo.simulate.profile import BY_TORCH, BY_TRITON, Gpu, Hardware, Reached

PACKAGES: Final = ("oppo", "torch", "transformers", "accelerate", "peft", "vllm", "ray", "anyio", "numpy")

SHOWN: Final = 4  # the layouts whose settings are shown

_PARTS: Final = [field.name for field in fields(Bytes)]


ROLES: Final[Mapping[str, str]] = {
    "policy": "decodes the responses; it keeps the KV cache of all rollouts in flight",
    "policy, asleep": "the engine's weights, which it brings back when it wakes",
    "proximal": "the policy read again, for the log-probs of the newest weights: tokens of older ones are corrected by "
    "them (algorithm.is_correction)",
    "reference": "log-probs of the model that the KL holds the policy to",
    "critic": "values of the tokens, as they are written",
    "teacher": "log-probs that the policy learns",
    "teacher, average": "the average of the policy's weights in float32, which the teacher serves",
    "role": "answers agents in a role that is frozen",
    "trainer": "makes the updates: gradients, optimizer states, float32 copies of what it trains",
    "trainer, whole weights": "all weights, gathered from the ranks for weight sync and checkpoints",
}
"""What a model of the table is for, by its name or what stands before its number."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Memory that a run needs under a load, found without loading its models; no ``faults`` if there is enough."""

    needs: Sequence[Expected]
    load: Load
    faults: Sequence[str]
    assumed: Hardware | None = None
    layouts: Sequence[Layout] = ()

    def lines(self) -> Iterator[str]:
        yield versions()
        yield ""
        yield (
            f"expected memory, for {self.load.rollouts} rollouts in flight, prompts of {self.load.prompt} tokens and "
            f"responses of {self.load.response}:"
        )
        yield from _table(self.needs)
        yield ""
        yield from (f"{name}: {what}" for name, what in _explained(self.needs))
        yield ""
        for device, models in by_device(self.needs).items():
            total, memory = at_worst(models), memory_of(device, self.assumed)
            there = "" if memory is None else f", {decimal(memory[0])} {'free' if self.assumed is None else 'assumed'}"
            yield f"{device}: {decimal(total)} needed{there}; {_largest(models)}"
        for share in {need.share for need in self.needs if need.share}:
            yield f"vLLM takes {share} of its GPUs' memory (vllm.{SHARE}); what its weights leave is the KV cache"
        if any(need.sleeps for need in self.needs):
            yield "vLLM sleeps during an update (placement.share = 'sleep'): not both need their memory at once"
        yield "PyTorch itself, the work space of kernels, and what an allocator keeps come on top."
        yield from (f"too little memory: {fault}" for fault in self.faults)
        yield from _proposals(self.layouts, self.assumed)


def examine(deployment: Deployment) -> Diagnosis:
    settings, assumed, known = deployment.settings, deployment.assumed, Known()
    if assumed is not None and assumed.machines > 1 and not settings.placement.cluster:
        logger.info("the run is on one machine: --ray, or placement.cluster, places models on others")
    with routed(), TemporaryDirectory() as aside:
        tokenizer = policy_tokenizer(settings.models, settings.data, settings.environment)
        environment = environment_of(settings.environment, settings.agents, settings.data, settings.sampling, tokenizer)
        images = reader_of_images(deployment, Path(aside))
        supply = supplied(settings, tokenizer, Provenance.of(settings), begin=begin_of(environment), images=images)
        load = deployment.load(supply.longest)
    if settings.teacher.note:
        logger.info(settings.teacher.note)
    needs = expected(deployment, load, known)
    faults = crowded(needs, assumed, spread=settings.placement.spread)
    layouts = proposed(deployment, load, known) if settings.placement == PlacementSection() else ()
    if faults:
        last = "take a layout below" if layouts else advice(deployment, load, known)
        faults += [*too_large(needs, assumed), "; or ".join([*largest(deployment, load, known), last])]
    return Diagnosis(needs, load, faults, assumed, layouts)


def _explained(needs: Sequence[Expected]) -> Iterator[tuple[str, str]]:
    seen = set[str]()
    for need in needs:
        name = need.model if need.model in ROLES else re.split(r"[, .]", need.model)[0]
        if need.model.startswith(RANK):
            yield from () if RANK in seen else [("trainer, rank N", "makes its part of each update, on its shard")]
            seen.add(RANK)
        elif name not in seen:
            seen.add(name)
            yield name, ROLES.get(name, "scores the responses")


def _proposals(layouts: Sequence[Layout], assumed: Hardware | None) -> Iterator[str]:
    if not layouts:
        return
    yield ""
    known = bool(layouts[0].seconds)
    speed = "estimated from its data sheet, for responses as long as they may be" if known else "unknown for this GPU"
    yield f"layouts that fit {assumed} (speed: {speed}):"
    rows = [("layout", "memory of a GPU", "step", "bound by", "tokens/s", "idle GPUs", "changes of the run")]
    for layout in layouts:
        times = (f"{layout.step:.0f} s", layout.bound, f"{layout.tokens / layout.step:.0f}") if known else ("-",) * 3
        rows.append((layout.name, layout.memory(), *times, str(layout.idle), layout.remedies or "none"))
    yield from _aligned(rows)
    yield ""
    yield "Write the settings of one into the sections of the file, or give each as --set SECTION.KEY=VALUE:"
    for layout in layouts[:SHOWN]:
        yield from ["", f"# {layout.name}", *(layout.toml or "# nothing changes").splitlines()]


def _aligned(rows: Sequence[Sequence[str]], numbers: int = 99) -> Iterator[str]:
    """Yield a line for each row; the columns from ``numbers`` on end at their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if column < numbers else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def versions() -> str:
    parts = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    return f"{', '.join(parts)}; {available_cores()} cores"


def _table(needs: Sequence[Expected]) -> Iterator[str]:
    rows = [("model", "device", *(name.replace("_", ", ") for name in _PARTS), "total")]
    for need in needs:
        parts = (decimal(getattr(need.bytes, name)) if getattr(need.bytes, name) else "-" for name in _PARTS)
        rows.append((need.model, need.where, *parts, decimal(need.bytes.total)))
    return _aligned(rows, numbers=2)


def _largest(models: Sequence[Expected]) -> str:
    size, model, part = max((getattr(need.bytes, part), need.model, part) for need in models for part in _PARTS)
    what = {"keys_values": "KV cache", "optimizer": "optimizer states"}.get(part, part)
    return f"the largest part is {what} of the {model} ({decimal(size)})"


def attempt(settings: Settings) -> Iterator[str]:
    if settings.agents.program:
        raise ConfigError("a longest step has no agents: train a step, or try one without agents.program")
    # every response as long as it may be, and no evaluation
    longest: dict[str, dict[str, object]] = {
        "sampling": {"min_new_tokens": settings.sampling.max_new_tokens, "stop_strings": ()},
        "environment": {"source": ""},
        "eval": {"prompts": ""},
    }
    with Peak() as peak, prepare(settings.changed(longest), dry_run=True) as session:
        loaded = peak.by_device()
        logger.info("making one step as long as the settings allow")
        seconds = anyio.run(_step, session)
        most = peak.by_device()
    yield f"the longest step took {seconds:.1f} s; memory in use, at most:"
    for device, used in most.items():
        yield f"  {device}: {decimal(used)}, {decimal(loaded.get(device, 0))} of it with the models loaded"


async def _step(session: PreparedRun) -> float:
    start = anyio.current_time()
    async with session.graph.open(PromptStream([_longest(session)])) as running:
        async for _ in running.steps(1):
            pass
    return anyio.current_time() - start


def _longest(session: PreparedRun) -> Prompt:
    prompts = session.prompts
    assert isinstance(prompts, PromptStream)  # noqa: S101 - only a program has others
    every = (prompts.at(number) for number in range(prompts.size))
    return replace(max(every, key=lambda prompt: len(prompt.tokens)), rollout=0, admission=0, group=0)


REMEDIED: Final = ("models", "trainer", "step", "sampling")  # the sections that remedies change

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
    name: str
    changes: Changes
    needs: Sequence[Expected]
    seconds: Mapping[str, float]
    tokens: int
    idle: int

    @property
    def step(self) -> float:
        """Seconds of a step: decoding and the scorers on its GPU, beside those on other GPUs; then the update."""
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

    @property
    def remedies(self) -> str:
        """What it changes to fit, beside the devices of models."""
        keys = chain.from_iterable(each.items() for name, each in self.changes.items() if name in REMEDIED)
        return ", ".join(f"{key} = {in_toml(value)}" for key, value in keys if key != "engine")

    def memory(self) -> str:
        on = {device: at_worst(models) for device, models in by_device(self.needs).items() if device.type == "cuda"}
        away = [need.bytes.total for need in on_other_machines(self.needs) if need.device.type == "cuda"]
        most = [*on.values(), *away]
        return f"{decimal(min(most))} to {decimal(max(most))}" if min(most) != max(most) else decimal(most[0])


def proposed(deployment: Deployment, load: Load, known: Known) -> list[Layout]:
    """Return the layouts of an assumed machine that fit, the quickest first, each with as few remedies as it needs."""
    assumed, found = deployment.assumed, list[Layout]()
    if assumed is None:
        return found
    smaller_runs = [each for each in _less(deployment) if altered(deployment, each)]
    as_it_is: list[Changes] = [{}]
    for less in (as_it_is, smaller_runs):
        for name, changes in () if found else [*_candidates(deployment, assumed)]:
            remedies = [merged(changes, remedy) for remedy in REMEDIES]
            if less is smaller_runs:  # those with which it fits at rest, whatever the batch
                remedies = [each for each in remedies if first_fit(deployment, [each], None, known)]
            fit = _largest_fit(
                deployment, [[merged(each, smaller) for each in remedies] for smaller in less], load, known
            )
            found += [_described(name, fit, load, known)] if fit else []
    return sorted(found, key=lambda layout: layout.step)


def _largest_fit(deployment: Deployment, smaller: Sequence[Sequence[Changes]], load: Load, known: Known) -> Fit | None:
    # Of changes that need less and less, by bisection.
    at = bisect_left(smaller, True, key=lambda tried: first_fit(deployment, tried, load, known) is not None)
    return first_fit(deployment, smaller[at], load, known) if at < len(smaller) else None


def _less(deployment: Deployment) -> Iterator[Changes]:
    batch, length = deployment.settings.step.batch, deployment.settings.sampling.max_new_tokens
    for halved in _halves(batch):
        yield _of_batch(deployment, halved)
    for halved in (each for each in _halves(length) if each >= 32):
        yield {**_of_batch(deployment, 1), "sampling": {"max_new_tokens": halved}}


def _halves(value: int) -> list[int]:
    return [value >> halvings for halvings in range(1, value.bit_length())]


def _of_batch(deployment: Deployment, batch: int) -> Changes:
    given = deployment.settings.step.overcommit
    return {"step": {"batch": batch, **({"overcommit": batch} if given is not None and given > batch else {})}}


def largest(deployment: Deployment, load: Load, known: Known) -> Iterator[str]:
    for key in SMALLER if first_fit(deployment, [{}], None, known) else ():
        section, name = key.split(".")
        value = getattr(getattr(deployment.settings, section), name)
        halves = _halves(value) if isinstance(value, int) and not isinstance(value, bool) else []
        smaller = [_of_batch(deployment, each) if key == "step.batch" else {section: {name: each}} for each in halves]
        if fit := _largest_fit(deployment, [[each] for each in smaller if altered(deployment, each)], load, known):
            yield f"{key} = {fit.changes[section][name]} fits"


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
        engine: Changes = {**_on_vllm(deployment), "placement": placement}
        yield (
            f"vLLM on {decoding}, scorers on one, {len(training)} that train",
            (merged(engine, {"vllm": {"tensor_parallel_size": decoding}}) if decoding > 1 else engine),
        )
        if decoding > 1:
            replicas = {"placement": {**placement, "policy_replicas": decoding}}
            yield f"{decoding} replicas of vLLM, scorers on one, {len(training)} that train", merged(engine, replicas)
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


def _on_vllm(deployment: Deployment) -> Changes:
    # With the correction that a file has by itself once vLLM decodes: it needs a model more.
    engine: Changes = {"models": {"engine": "vllm"}}
    document = deployment.settings.document()
    algorithm = dict(document["algorithm"])
    if deployment.models.engine == "vllm" or algorithm.pop("is_correction", "") != "none":
        return engine
    filled = with_correction({**engine, "step": document["step"], "algorithm": algorithm})
    chosen = cast("Mapping[str, object]", filled["algorithm"]).get("is_correction")
    return {**engine, "algorithm": {"is_correction": chosen}} if chosen else engine


def _described(name: str, fit: Fit, load: Load, known: Known) -> Layout:
    deployment, needs = fit.deployment, fit.needs
    settings, assumed = deployment.settings, deployment.assumed
    assert assumed is not None  # noqa: S101 - layouts are of machines that are assumed
    load = deployment.load(load.prompt)
    busy = {device.index for device in by_device(needs) if device.type == "cuda"}
    actors = {need.model.partition(".")[0] for need in on_other_machines(needs) if need.device.type == "cuda"}
    idle = assumed.machines * assumed.gpus - len(busy) - len(actors)
    batch = settings.step.batch * settings.algorithm.responses
    under = replace(load, rollouts=batch)
    seconds = {} if assumed.gpu is None else _seconds(deployment, needs, under, assumed.gpu, known)
    return Layout(name, fit.changes, needs, seconds, batch * load.response, idle)


def _seconds(
    deployment: Deployment, needs: Sequence[Expected], load: Load, gpu: Gpu, known: Known
) -> Mapping[str, float]:
    made, settings, workers = Outlines(deployment, known), deployment.settings, deployment.engine_workers
    moved = BY_TORCH if settings.sampling.top_k or settings.sampling.top_p < 1 else BY_TRITON
    reached = Reached(name="vllm" if deployment.has_engine else "transformers", logits=moved)
    together = replace(gpu, flops=gpu.flops * workers, bandwidth=gpu.bandwidth * workers)
    actor, rows = transformer(made.actor()), -(-load.rollouts // deployment.devices.replicas)
    weights = replace(actor, parameters=max(actor.parameters, float(made.actor().num_parameters())))
    # A decode step reads all experts of a mixture, and a row is multiplied with few of them.
    decoder = replace(reached.decoder(together, weights, 1), row=reached.decoder(together, actor, 1).row)
    prompts = rows * reached.reader(together, actor, reached.forward, head=False).reading(0, load.prompt)
    context = rows * (load.prompt + load.response / 2)
    found = {DECODING: prompts + load.response * decoder.seconds(rows, context)}
    shared, away = {need.where for need in needs if need.model.startswith("policy")}, on_other_machines(needs)
    for need in needs:
        model, gives_logprobs = made.scorer(need.model)
        if model is not None:
            share = reached.forward if gives_logprobs or need.model == "critic" else reached.scoring
            place = f"scoring on {need.model if need in away else need.where}"
            place = BESIDE if need.where in shared else place
            passes = reached.reader(gpu, transformer(model), share, head=gives_logprobs)
            found[place] = found.get(place, 0.0) + load.rollouts * passes.reading(0, load.sequence)
    models = deployment.models
    has_own = settings.algorithm.has_critic and not models.shared_trunk
    checkpointing = bool(settings.trainer.gradient_checkpointing)
    epoch = sum(
        reached.update(
            gpu, transformer(each), head=is_actor, checkpointing=checkpointing, frozen=is_actor and models.adapts
        ).reading(0, load.sequence)
        for is_actor, each in ((True, made.actor()), *([(False, made.critic())] if has_own else []))
    )
    ranks = len(deployment.devices.trainer)
    return {**found, UPDATE: settings.trainer.epochs * load.rollouts * epoch / ranks}
