"""Checks of a run before it begins.

``oppo doctor`` says where each model goes, what memory it will need there, and whether that is enough. ``oppo doctor
--trial`` makes one step as long as the settings allow, so that memory runs out now if it ever does. Nothing is saved.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import anyio
from rich.filesize import decimal

from oppo.config.sections import PlacementSection
from oppo.config.settings import Settings
from oppo.data import PromptStream
from oppo.errors import ConfigError
from oppo.events import Prompt
from oppo.hf.devices import available_cores
from oppo.hf.memory import Bytes, Hardware, Load, Peak, memory_of
from oppo.log import logger, routed
from oppo.run.checkpoint import Provenance
from oppo.run.deployment import Deployment
from oppo.run.layouts import Layout, largest, proposed
from oppo.run.memory import RANK, SHARE, Expected, advice, at_worst, by_device, crowded, expected
from oppo.run.models import policy_tokenizer
from oppo.run.prompts import supplied
from oppo.run.rewards import begin_of, environment_of
from oppo.run.train import PreparedRun, prepare

PACKAGES: Final = ("oppo", "torch", "transformers", "accelerate", "peft", "vllm", "ray", "anyio", "numpy")

SHOWN: Final = 4
"""The layouts whose settings are shown."""

_PARTS: Final = [field.name for field in fields(Bytes)]


ROLES: Final[Mapping[str, str]] = {
    "policy": "decodes the responses; it keeps the KV cache of all rollouts in flight",
    "policy, asleep": "the engine's weights, which it brings back when it wakes",
    "proximal": "the policy read again, for the log-probs of the newest weights: tokens of older ones are corrected by "
    "them (algorithm.is_correction)",
    "reference": "log-probs of the model that the KL holds the policy to",
    "critic": "values of the tokens, as they are written",
    "teacher": "log-probs that the policy learns",
    "trainer": "makes the updates: gradients, optimizer states, float32 copies of what it trains",
    "trainer, whole weights": "all weights, gathered from the ranks for weight sync and checkpoints",
}
"""What a model of the table is for, by its name or what stands before its number."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Memory that a run needs under a load, found without loading its models; no ``faults`` if there is enough.

    ``layouts``: others that fit, of a run that places nothing itself.
    """

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
    """Return the diagnosis of a run; prompts and tokenizer are read, weights are not."""
    settings, assumed, known = deployment.settings, deployment.assumed, dict[Hashable, Any]()
    if assumed is not None and assumed.machines > 1 and not settings.placement.cluster:
        logger.info("the run is on one machine: --ray, or placement.cluster, places models on others")
    with routed():
        tokenizer = policy_tokenizer(settings.models, settings.data, settings.environment)
        environment = environment_of(settings.environment, settings.agents, settings.data, settings.sampling, tokenizer)
        supply = supplied(settings, tokenizer, Provenance.of(settings), begin=begin_of(environment))
        load = deployment.load(supply.longest)
    needs = expected(deployment, load, known)
    faults = crowded(needs, assumed, spread=settings.placement.spread)
    if faults:
        faults = [*faults, "; or ".join([*largest(deployment, load, known), advice(deployment, load, known)])]
    layouts = proposed(deployment, load, known) if settings.placement == PlacementSection() else ()
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
    speed = "seconds by its data sheet" if layouts[0].seconds else "whose speed is not known here"
    yield f"layouts that fit {assumed}, {speed}, if all responses are as long as they may be:"
    rows = [("layout", "memory of a GPU", "step", "bound by", "tokens/s", "idle")]
    for layout in layouts:
        times = (
            (f"{layout.step:.0f} s", layout.bound, f"{layout.tokens / layout.step:.0f}")
            if layout.seconds
            else ("-",) * 3
        )
        rows.append((layout.name, layout.memory(), *times, ", ".join(layout.idle) or "none"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    yield from ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    for layout in layouts[:SHOWN]:
        yield from ["", f"# {layout.name}", *(layout.toml or "# nothing changes").splitlines()]


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
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        yield "  ".join([*names, *numbers])


def _largest(models: Sequence[Expected]) -> str:
    size, model, part = max((getattr(need.bytes, part), need.model, part) for need in models for part in _PARTS)
    return f"most of it {'KV cache' if part == 'keys_values' else part} of the {model} ({decimal(size)})"


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
