"""Checks of a run before it begins.

``oppo doctor`` says where each model goes, what memory it will need there, and whether that is enough. ``oppo doctor
--trial`` makes one step as long as the settings allow, so that memory runs out now if it ever does. ``oppo train
--dry-run`` tries out a prompt as it is read, what ends a response, the reward, an environment. Nothing is saved.
"""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, cast

import anyio
from rich.filesize import decimal

from oppo.config.settings import Settings
from oppo.data import PromptStream
from oppo.environments import first_answer
from oppo.errors import ConfigError, noted
from oppo.evaluation import Answering, respond
from oppo.events import Drop, Finish, IntArray, Prompt
from oppo.hf.devices import available_cores
from oppo.hf.memory import Bytes, Hardware, Load, Peak, memory_of
from oppo.log import logger, routed
from oppo.models import Sampling, VariesSampling
from oppo.redact import harmless
from oppo.run.checkpoint import Provenance
from oppo.run.deployment import Deployment
from oppo.run.memory import SHARE, Expected, advice, at_worst, by_device, crowded, expected
from oppo.run.models import policy_tokenizer
from oppo.run.prompts import supplied
from oppo.run.rewards import begin_of, environment_of
from oppo.run.train import PreparedRun, prepare
from oppo.scorers import capabilities_of
from oppo.stages import Generate

if TYPE_CHECKING:
    from oppo.hf.tokenizer import HfTokenizer


PACKAGES: Final = ("oppo", "torch", "transformers", "accelerate", "peft", "vllm", "ray", "anyio", "numpy")

_PARTS: Final = [field.name for field in fields(Bytes)]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Memory that a run needs under a load, found without loading its models; no ``faults`` if there is enough."""

    needs: Sequence[Expected]
    load: Load
    faults: Sequence[str]
    assumed: Hardware | None = None

    def lines(self) -> Iterator[str]:
        yield versions()
        yield ""
        yield (
            f"expected memory, for {self.load.rollouts} rollouts in flight, prompts of {self.load.prompt} tokens and "
            f"responses of {self.load.response}:"
        )
        yield from _table(self.needs)
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


def examine(deployment: Deployment) -> Diagnosis:
    """Return the diagnosis of a run; prompts and tokenizer are read, weights are not."""
    settings, assumed = deployment.settings, deployment.assumed
    if assumed is not None and assumed.machines > 1 and not settings.placement.cluster:
        logger.info("the run is on one machine: --ray, or placement.cluster, places models on others")
    with routed():
        tokenizer = policy_tokenizer(settings)
        environment = environment_of(settings.environment, settings.agents, settings.data, settings.sampling, tokenizer)
        supply = supplied(settings, tokenizer, Provenance.of(settings), begin=begin_of(environment))
        load = deployment.load(supply.longest)
    needs = expected(deployment, load)
    faults = crowded(needs, assumed, spread=settings.placement.spread)
    return Diagnosis(needs, load, [*faults, advice(deployment, load)] if faults else (), assumed)


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


LONGEST: Final = 32
"""Tokens that are sampled at most."""

WIDTH: Final = 100
"""Characters of a line of text."""


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """Two responses: the first, the scores of both, the environment's answer to a turn that did not end by itself."""

    finish: Finish
    scores: Sequence[float | Drop]
    seconds: float
    parts: Mapping[str, float]
    answer: IntArray | None


async def rehearse(session: PreparedRun) -> list[str]:
    tokenizer = session.assembly.tokenizer
    prompts = session.prompts
    if not isinstance(prompts, PromptStream):
        return []
    with noted("while a response was tried out, before the run"):
        tried = await _try(session, [prompts.at(0), prompts.at(1 % prompts.size)])
    lines = [
        f"prompts: {prompts.size}, the longest of {prompts.longest} tokens; the first is",
        *_shown(tokenizer, tried.finish.response.prompt.tokens.tolist()),
        *_ending(tokenizer, session.assembly.sampling),
        f"a response to it, cut off at {LONGEST} tokens at the latest, is ({tried.finish.reason})",
        *_shown(tokenizer, tried.finish.response.tokens.tolist()),
        *(
            ["the environment answers that with", *_shown(tokenizer, tried.answer.tolist())]
            if tried.answer is not None
            else []
        ),
        _scored([reward.source for reward in session.settings.rewards], tried),
    ]
    return [harmless(line) for line in lines]


async def _try(session: PreparedRun, prompts: Sequence[Prompt]) -> Tried:
    assembly, generate = session.assembly, session.graph.stage("generate", Generate)
    policy, sampling = generate.policy, assembly.sampling
    short = min(LONGEST, sampling.max_new_tokens)
    drawing = policy
    if policy.capabilities.varies_sampling:
        fewest = min(short, sampling.min_new_tokens)
        drawing = cast("VariesSampling", policy).with_sampling(
            replace(sampling, max_new_tokens=short, min_new_tokens=fewest)
        )
    numbered = [replace(prompt, rollout=at, admission=at) for at, prompt in enumerate(prompts)]
    finished = await respond(drawing, numbered, Answering(environment=generate.environment))
    environment = generate.environment
    asked = any(finish.reason != "length" or not finish.response.sampled.all() for finish in finished)
    answer = None if environment is None or asked else await first_answer(environment, finished[0].response)
    start = anyio.current_time()
    await assembly.reward.extend(
        [event for finish in finished for event in (finish.response.prompt, *finish.response.pieces())]
    )
    scores = await assembly.reward.finish(finished)
    seconds = anyio.current_time() - start
    measured = capabilities_of(assembly.reward).samples()
    return Tried(finished[0], scores, seconds, {name: values[0] for name, values in measured.items() if values}, answer)


def _shown(tokenizer: HfTokenizer, tokens: list[int]) -> Iterator[str]:
    for line in tokenizer.decode_whole(tokens).splitlines():
        yield from textwrap.wrap(line, WIDTH, initial_indent="    ", subsequent_indent="    ") or [""]


def _ending(tokenizer: HfTokenizer, sampling: Sampling) -> Iterator[str]:
    ids = ", ".join(f"{number} {tokenizer.name_of(number)!r}" for number in sampling.stop)
    yield f"a response ends at {sampling.max_new_tokens} tokens, or with one of these: {ids or 'none'}"
    if sampling.stop_strings:
        yield f"or with the text {' or '.join(map(repr, sampling.stop_strings))}"


def _scored(rewards: Sequence[str], tried: Tried) -> str:
    parts = ", ".join(f"{name.removeprefix('rewards/')} {value:g}" for name, value in tried.parts.items())
    said = [f"drops it ({one.reason})" if isinstance(one, Drop) else f"says {float(one):g}" for one in tried.scores]
    first, second = said
    return (
        f"the reward {' with '.join(rewards) or 'of the environment'} {first}"
        + f" ({parts})" * bool(parts)
        + f", and of a second response it {second}, after {tried.seconds:.3f} s"
    )
