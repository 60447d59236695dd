"""The prompts of a run: read once when it begins, and how many steps they last for."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import numpy as np

from oppo.agents import AgentPrompts, Agents
from oppo.atomic_files import nearby
from oppo.config.load import BY_DATA
from oppo.config.sections import ROWS, DataSection, Prompts, PromptSource, named, sources
from oppo.config.settings import Settings
from oppo.data import PromptStream, RowStream, Tokenizer, read_prompts
from oppo.data.prompts import TEXT_ONLY, Begin, PrivilegedPrompt, ReadImages
from oppo.environments import verifiers
from oppo.errors import ConfigError, DataError, counted, did_you_mean
from oppo.events import Prompt
from oppo.log import logger
from oppo.models import Sampling
from oppo.run.checkpoint import Provenance
from oppo.scorers import SIBLING, BehindPrompt

Rows: TypeAlias = Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]]
"""Rows of a program, a mapping of columns each. Those of a length are read at once; others as they come."""

ImagesIn: TypeAlias = Callable[[Path], ReadImages]
"""Returns what reads prompts with images, whose relative paths begin in a folder."""

UNSAID: Final = "rows that come one by one show images with data.images = true only"

P = TypeVar("P", bound="Iterable[Prompt] | AsyncIterable[Prompt]")

Supply: TypeAlias = PromptStream | RowStream | AgentPrompts


@dataclass(frozen=True, slots=True, eq=False)
class ProgramRows:
    prompts: Rows | None = None
    held_out: Iterable[Mapping[str, object]] | None = None


NOTHING: Final = ProgramRows()


@dataclass(frozen=True, slots=True, eq=False)
class Supplied:
    stream: Supply
    held_out: Sequence[Prompt]
    steps: int  # run.steps, or as many as the prompts last for
    provenance: Provenance
    columns: Sequence[frozenset[str]]  # of all prompts that are trained on, and of all that are held out, if known
    most: int = 0  # tokens that a prompt may have whose length is known only when it is asked for
    images: bool = False  # prompts may show images

    @property
    def longest(self) -> int:
        return max(self.most, self.stream.longest, *(len(prompt.tokens) for prompt in self.held_out), 0)


def supplied(
    settings: Settings,
    tokenizer: Tokenizer,
    provenance: Provenance,
    rows: ProgramRows = NOTHING,
    *,
    begin: Begin | None = None,
    images: ImagesIn | str = TEXT_ONLY,
) -> Supplied:
    """Return the prompts of a run, tokenized; ``provenance`` is from before any file was read.

    ``images`` returns what reads the images of rows, given the folder of relative paths; or says why none are read.
    """
    data, prompts, held_out = settings.data, rows.prompts, rows.held_out
    named_by = {"prompts": (prompts, data.prompts), "eval_prompts": (held_out, settings.eval.prompts)}
    for argument, (given, chosen) in named_by.items():
        if given is None and ROWS in [source.path for source in sources(chosen)]:
            raise ConfigError(
                f"its prompts are rows of a program: go on with it there, oppo.resume(directory, {argument}=rows)"
            )
    as_they_come = prompts is not None and not isinstance(prompts, Sized)
    encoding = {"tokenizer": tokenizer, "begin": begin, **encoding_of(data, read_by=settings.agents.program)}
    if data.images and not as_they_come and not settings.agents.program:
        raise ConfigError(
            "data.images is for rows that come one by one and requests of agents, and others show what they have: "
            "leave it out"
        )
    if data.images and isinstance(images, str):
        raise ConfigError(f"data.images = true reads images in prompts, and {images}: leave it out")
    trained = {} if as_they_come else _pools("data.prompts", data.prompts, encoding, prompts, images)
    apart = _pools("eval.prompts", settings.eval.prompts, encoding, held_out, images)
    for file in provenance.changed(settings.files):
        raise DataError(f"{file} changed while it was read: start again when its writer is done")
    pools = trained | apart
    if pools and (tools := settings.environment.tools_column) and tools not in (known := _columns(pools)):
        guess = did_you_mean(tools, known) or f": rows have {', '.join(sorted(known))}"
        raise DataError(f"environment.tools_column = {tools!r} is a column of no row{guess}")
    unfiled = {name: content_digest(pool) for name, pool in pools.items() if name not in settings.files}
    stream = (
        RowStream(
            cast("Rows", prompts), **encoding, images=images(Path()) if data.images and callable(images) else UNSAID
        )
        if as_they_come
        else _stream(data, [*trained.values()], settings.step.batch)
    )
    every, longer = [prompt for pool in apart.values() for prompt in pool], settings.environment.longer
    wanted = settings.run.steps
    steps = steps_of(wanted, data, settings.step.batch, stream)
    if as_they_come and (wanted == BY_DATA or data.drop_last):
        idle = "set run.steps, and leave data.epochs out" if wanted == BY_DATA else "leave data.drop_last out"
        raise ConfigError(f"rows that come one by one are not counted, and end once: {idle}")
    if steps < wanted != BY_DATA:
        logger.info(
            f"the data lasts for {steps} of {wanted} steps: run and learning-rate schedule end after these; set "
            f"run.steps = {steps}, or raise data.epochs from {data.epochs} (0: as many as the steps need)"
        )
    if isinstance(stream, PromptStream) and stream.size < settings.step.batch:
        logger.warning(few(stream.size, settings.step.batch, data.epochs))
    return Supplied(
        stream=stream,
        held_out=every[: settings.eval.count or len(every)],
        steps=steps,
        provenance=replace(provenance, files={**provenance.files, **unfiled}),
        columns=[_columns(pools) for pools in (trained, apart) if pools],
        images=data.images or any(prompt.images for pool in pools.values() for prompt in pool),
        most=data.max_prompt_tokens + longer if settings.agents.program or longer else 0,
    )


def of_agents(stream: P, environment: object, data: DataSection) -> P | AgentPrompts:
    if not isinstance(environment, Agents):
        return stream
    refuses = data.over_long == "error"
    return environment.prompts(
        stream, max_prompt_tokens=data.max_prompt_tokens, over_long="error" if refuses else "filter"
    )


def _columns(pools: Mapping[str, Sequence[Prompt]]) -> frozenset[str]:
    return frozenset(name for pool in pools.values() for prompt in pool for name in prompt.columns)


def _pools(
    key: Literal["data.prompts", "eval.prompts"],
    chosen: Prompts,
    encoding: Mapping[str, Any],
    rows: Rows | None,
    images: ImagesIn | str,
) -> dict[str, list[Prompt]]:
    return {name: read(source, encoding, rows, images) for name, source in named(key, chosen).items()}


def _stream(data: DataSection, pools: Sequence[Sequence[Prompt]], batch: int) -> PromptStream:
    weights = [source.weight for source in sources(data.prompts) if source.weight is not None]
    if weights:
        return PromptStream.mixed(list(zip(weights, pools, strict=True)), seed=data.seed, epochs=data.epochs)
    prompts = [prompt for pool in pools for prompt in pool]
    return PromptStream(prompts, seed=data.seed, epochs=data.epochs, multiple=batch if data.drop_last else 1)


def read(source: PromptSource, encoding: Mapping[str, Any], rows: Rows | None, images: ImagesIn | str) -> list[Prompt]:
    if rows is None:
        logger.info(f"reading {nearby(source.path)}")
    if rows is None and source.taskset:
        rows = verifiers(source.taskset, **(source.config or {}))
    of = source.file or source.path if rows is None else cast("Iterable[Mapping[str, object]]", rows)
    own = {} if source.column is None else {"column": source.column}
    seen = images if isinstance(images, str) else images(Path() if source.file is None else source.file.parent)
    return read_prompts(of, split=source.split, subset=source.subset, images=seen, **{**encoding, **own})


def encoding_of(data: DataSection, *, read_by: str) -> dict[str, Any]:
    column = "" if read_by else data.column  # an agent reads its row itself
    return {"column": column, "max_prompt_tokens": data.max_prompt_tokens, "over_long": data.over_long}


def content_digest(prompts: Sequence[Prompt]) -> str:
    content = hashlib.sha256()
    for prompt in prompts:
        columns = json.dumps(prompt.columns, sort_keys=True, default=lambda value: type(value).__name__)
        images = "".join(f" {image.sha256}" for image in prompt.images)
        content.update(f"{prompt.tokens.tolist()} {columns}{images}\n".encode())
    return content.hexdigest()


def steps_of(steps: int, data: DataSection, batch: int, prompts: Supply) -> int:
    known = data.epochs and isinstance(prompts, PromptStream)
    return min(steps, math.ceil(len(prompts) / batch)) if known and isinstance(prompts, Sized) else steps


def few(count: int, batch: int, epochs: int) -> str:
    then = "so a step trains a prompt several times" if epochs != 1 else "so the one step of an epoch is smaller"
    fewer = f"{counted(count, 'prompt')}, fewer than step.batch = {batch}"
    return f"data.prompts has {fewer}, {then}: add prompts, or lower step.batch"


def check_image_tokens(supply: Supplied, pads: Sequence[int]) -> None:
    known = [*(supply.stream.prompts if isinstance(supply.stream, PromptStream) else ()), *supply.held_out]
    for prompt in known if pads else ():
        if (found := int(np.isin(prompt.tokens, pads).sum())) != (shown := sum(each.tokens for each in prompt.images)):
            raise DataError(
                f"the prompt that begins with the ids {prompt.tokens[:8].tolist()} has tokens that stand for images, "
                f"{found}, of which its images have {shown}: name their column 'image' or 'images', or take the text "
                "out"
            )


def require_room(supply: Supplied, sampling: Sampling, positions: int, teacher: object) -> None:
    max_new_tokens = sampling.max_new_tokens
    if supply.longest + max_new_tokens > positions:
        raise ConfigError(
            f"a prompt of {supply.longest} tokens and a response of sampling.max_new_tokens = {max_new_tokens} do not "
            f"fit into the models' {positions} positions: lower sampling.max_new_tokens or data.max_prompt_tokens"
        )
    if not isinstance(teacher, BehindPrompt) or not isinstance(supply.stream, PromptStream):
        return
    make = cast("PrivilegedPrompt", teacher.prompt)
    key = "teacher.column" if make.column else "teacher.template"
    sibling = np.zeros(0, np.int32) if make.of_siblings else None
    room = max_new_tokens * (2 if make.of_siblings else 1)
    for number, prompt in enumerate(supply.stream.prompts, 1):
        read = make(replace(prompt, columns={**prompt.columns, SIBLING: sibling}) if make.of_siblings else prompt)
        if read is not None and len(read.tokens) + room > positions:
            held = "a sibling and a response" if make.of_siblings else "a response"
            raise ConfigError(
                f"{key} makes a prompt of {len(read.tokens)} tokens of prompt {number} of data.prompts, and "
                f"with {held} of sampling.max_new_tokens = {max_new_tokens} that is more than the {positions} that the "
                "teacher reads: shorten what it is made of, or lower sampling.max_new_tokens"
            )
