"""``oppo doctor --trial``: one step as long as the settings allow, so that memory runs out now if it ever does.

Nothing is saved. Every rollout has the longest prompt of the data, and a response as long as responses may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
from rich.filesize import decimal

from oppo.app.train import PreparedRun, prepare
from oppo.config.settings import Settings
from oppo.data import PromptStream
from oppo.hf.memory import Peak
from oppo.log import logger

if TYPE_CHECKING:
    from oppo.events import Prompt


def longest_of(settings: Settings) -> Settings:
    """Return the settings of a run whose responses are all as long as they may be, and which evaluates nothing."""
    return settings.changed(
        {
            "sampling": {"min_new_tokens": settings.sampling.max_new_tokens, "stop_strings": ()},
            "environment": {"source": ""},
            "eval": {"prompts": ""},
        }
    )


def attempt(settings: Settings) -> Iterator[str]:
    """Yield the outcome of a longest step, in lines for people.

    Raises:
        OppoError: the run cannot be prepared, or memory ran out; it names the model and what needs less.
    """
    with Peak() as peak, prepare(longest_of(settings), dry_run=True) as session:
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
