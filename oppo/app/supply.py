"""The prompts of a run: read once when it begins, and how many steps they last for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oppo.app.provenance import Provenance
from oppo.app.sections import DataSection
from oppo.app.settings import Settings
from oppo.data import PromptStream, read_prompts
from oppo.errors import ConfigError, DataError
from oppo.events import Prompt
from oppo.report.files import ended
from oppo.training import Schedule

if TYPE_CHECKING:
    from oppo.hf.text import Text


def resolved_prompts(
    settings: Settings, text: Text, tell: Callable[[str], None], provenance: Provenance
) -> list[Prompt]:
    """Return the prompts of ``settings.data``, tokenized; ``tell`` receives a sentence about what is left out.

    ``provenance`` is from before any file was read.

    Raises:
        DataError: the file cannot be used, or changed while it was read.
    """
    data = settings.data
    tell(f"reading {data.prompts}")
    prompts = read_prompts(
        Path(data.prompts),
        text,
        column=data.column,
        max_prompt_tokens=data.max_prompt_tokens,
        over_long=data.over_long,
        tell=tell,
    )
    for file in provenance.changed(settings):
        raise DataError(f"{file} changed while it was read: start again when its writer is done")
    return prompts


def require_unfinished(directory: Path, lasts: int) -> None:
    """Check that a complete run in ``directory`` made fewer than the ``lasts`` steps that its prompts last for.

    Raises:
        DataError: the prompts last for no further step.
    """
    made = ended(directory)
    if made is not None and lasts <= made:
        raise DataError(f"the run has made all of the {made} steps that its data lasts for: there is nothing to resume")


def steps_of(steps: int, data: DataSection, batch: int, prompts: PromptStream) -> int:
    """Return the steps of a run: ``steps``, or as many as its prompts last for, the last one smaller."""
    return min(steps, math.ceil(len(prompts) / batch)) if data.epochs else steps


def short_of(steps: int, lasts: int, data: DataSection, schedule: Schedule) -> str:
    """Return the notice that the data ends before the steps do, with the effect on the learning rate."""
    laid_out = f" and the {schedule} schedule of the learning rate breaks off there" * (schedule != "constant")
    return (
        f"the data lasts for {lasts} of {steps} steps: the run ends after these{laid_out}; set run.steps = {lasts}, or "
        f"raise data.epochs from {data.epochs} (0: as many as the steps need)"
    )


def require_room(prompts: Sequence[Prompt], max_new_tokens: int, positions: int) -> None:
    """Check that the longest prompt and the longest response fit together into every model.

    Raises:
        ConfigError: a model has too few positions.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest + max_new_tokens > positions:
        raise ConfigError(
            f"a prompt of {longest} tokens and a response of sampling.max_new_tokens = {max_new_tokens} do not fit "
            f"into the models' {positions} positions: lower sampling.max_new_tokens or data.max_prompt_tokens"
        )
