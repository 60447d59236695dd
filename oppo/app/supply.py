"""The prompts of a run: read once when it begins, and how many steps they last for."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeAlias, cast

from oppo.app.provenance import Provenance
from oppo.app.sections import DataSection
from oppo.app.settings import Settings
from oppo.app.sources import ROWS, Source, named, sources
from oppo.data import PromptStream, RowStream, Tokenizer, read_prompts
from oppo.errors import ConfigError, DataError
from oppo.events import Prompt
from oppo.report.files import ended
from oppo.training import Schedule

Rows: TypeAlias = Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]]
"""Rows of a program, a mapping of columns each. Those of a length are read at once; others as they come."""

Supply: TypeAlias = PromptStream | RowStream
"""The prompts of a run."""


def supply_of(
    settings: Settings,
    text: Tokenizer,
    tell: Callable[[str], None],
    provenance: Provenance,
    rows: Rows | None = None,
) -> tuple[Supply, Provenance]:
    """Return the prompts of ``settings.data``, tokenized; ``tell`` receives a sentence about what is left out.

    Args:
        provenance: from before any file was read; returned with digests of what no file holds.
        rows: of the program, if the prompts are those.

    Raises:
        DataError: a source cannot be used, or changed while it was read.
        ConfigError: the prompts are a program's rows, and there are none.
    """
    data = settings.data
    if rows is None and ROWS in [each.path for each in sources(data.prompts)]:
        raise ConfigError(
            "the prompts of the run are rows of a program: go on with it there, oppo.train(directory, prompts=rows)"
        )
    if rows is not None and not isinstance(rows, Sized):
        return RowStream(rows, text, tell=tell, **_encoding(data)), provenance
    pools = {name: read(each, data, text, tell, rows) for name, each in named("data.prompts", data.prompts).items()}
    for file in provenance.changed(settings):
        raise DataError(f"{file} changed while it was read: start again when its writer is done")
    unfiled = {name: content_digest(pools[name]) for name in pools if name not in settings.files}
    weights = [each.weight for each in sources(data.prompts) if each.weight is not None]
    if weights:
        weighted = list(zip(weights, pools.values(), strict=True))
        stream = PromptStream.mixed(weighted, seed=data.seed, epochs=data.epochs)
    else:
        every = [prompt for pool in pools.values() for prompt in pool]
        stream = PromptStream(every, seed=data.seed, epochs=data.epochs)
    return stream, provenance.with_digests(unfiled)


def read(
    source: Source, data: DataSection, text: Tokenizer, tell: Callable[[str], None], rows: Rows | None = None
) -> list[Prompt]:
    """Return the prompts of a source, or of a program's rows.

    Raises:
        DataError: it cannot be used.
    """
    if rows is None:
        tell(f"reading {source.path}")
    found = source.file or source.path if rows is None else cast("Iterable[Mapping[str, object]]", rows)
    encoding = _encoding(data) | ({} if source.column is None else {"column": source.column})
    return read_prompts(found, text, split=source.split, subset=source.subset, tell=tell, **encoding)


def _encoding(data: DataSection) -> dict[str, Any]:
    return {name: getattr(data, name) for name in ("column", "max_prompt_tokens", "over_long")}


def content_digest(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of prompts, and of what their columns hold besides."""
    found = hashlib.sha256()
    for prompt in prompts:
        columns = json.dumps(prompt.columns, sort_keys=True, default=lambda value: type(value).__name__)
        found.update(f"{prompt.tokens.tolist()} {columns}\n".encode())
    return found.hexdigest()


def require_unfinished(directory: Path, lasts: int) -> None:
    """Check that a complete run in ``directory`` made fewer than the ``lasts`` steps that its prompts last for.

    Raises:
        DataError: the prompts last for no further step.
    """
    made = ended(directory)
    if made is not None and lasts <= made:
        raise DataError(f"the run has made all of the {made} steps that its data lasts for: there is nothing to resume")


def steps_of(steps: int, data: DataSection, batch: int, prompts: Supply) -> int:
    """Return the steps of a run: ``steps``, or as many as its prompts last for, the last one smaller.

    How many rows will come is not known.
    """
    known = data.epochs and isinstance(prompts, PromptStream)
    return min(steps, math.ceil(len(prompts) / batch)) if known and isinstance(prompts, Sized) else steps


def short_of(steps: int, lasts: int, data: DataSection, schedule: Schedule) -> str:
    """Return the notice that the data ends before the steps do, with the effect on the learning rate."""
    laid_out = f" and the {schedule} schedule of the learning rate breaks off there" * (schedule != "constant")
    return (
        f"the data lasts for {lasts} of {steps} steps: the run ends after these{laid_out}; set run.steps = {lasts}, or "
        f"raise data.epochs from {data.epochs} (0: as many as the steps need)"
    )


def require_room(longest: int, max_new_tokens: int, positions: int) -> None:
    """Check that the longest prompt and the longest response fit together into every model.

    Raises:
        ConfigError: a model has too few positions.
    """
    if longest + max_new_tokens > positions:
        raise ConfigError(
            f"a prompt of {longest} tokens and a response of sampling.max_new_tokens = {max_new_tokens} do not fit "
            f"into the models' {positions} positions: lower sampling.max_new_tokens or data.max_prompt_tokens"
        )
