"""``oppo train``: models, prompts and graph from settings, run to the end or to Ctrl-C, with what was learned saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
from rich.console import Console

from oppo.admission import Overcommit
from oppo.chunking import Fixed, WholeRollout
from oppo.config import Settings, StepSection, trainer_settings
from oppo.data import PromptStream, read_prompts, silent
from oppo.errors import ConfigError
from oppo.estimators import AdaptiveKL
from oppo.events import Prompt, StepReport
from oppo.graph import Graph
from oppo.observe import Observer
from oppo.recipes import ppo
from oppo.report import Panel, RunDirectory, RunLog
from oppo.report.rundir import require_unused

if TYPE_CHECKING:
    from oppo.hf.assemble import Assembly

FINAL = Path("checkpoints", "final")
"""Where a run directory holds what was learned: ``actor`` and ``critic``, each with its tokenizer."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A run that is ready to begin; a context manager that ends the models' threads."""

    settings: Settings
    assembly: Assembly
    graph: Graph[StepReport]
    prompts: PromptStream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.assembly.__exit__(kind, error, tb)


def prepare(settings: Settings, tell: Callable[[str], None] = silent) -> Session:
    """Return a session with everything loaded and checked; nothing is written.

    Args:
        settings: of the run.
        tell: told, in a sentence, what is being done.

    Raises:
        OppoError: a setting, the data, the reward or a model cannot be used.
    """
    require_unused(settings.run_directory)
    trainer_settings(settings)
    from oppo.hf.assemble import assemble, load_text  # noqa: PLC0415 - torch takes seconds to import

    text = load_text(settings)
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
    assembly = assemble(settings, text, tell)
    with ExitStack() as stack:
        stack.enter_context(assembly)
        require_room(prompts, assembly.sampling.max_new_tokens, assembly.positions)
        graph = compose(settings.step, assembly)
        stack.pop_all()
    return Session(settings, assembly, graph, PromptStream(prompts, seed=data.seed, epochs=data.epochs))


def compose(step: StepSection, assembly: Assembly) -> Graph[StepReport]:
    """Return the graph of a step."""
    adaptive = step.kl_target is not None and step.kl_horizon is not None
    return ppo(
        policy=assembly.policy,
        reference=assembly.reference,
        reward=assembly.reward,
        critic=assembly.critic,
        trainer=assembly.trainer,
        admission=Overcommit(batch=step.batch, extra=step.extra, max_deferrals=step.max_deferrals),
        chunks=WholeRollout() if step.chunk == "whole" else Fixed(step.chunk),
        kl=AdaptiveKL(step.kl, step.kl_target or 0, step.kl_horizon or 0) if adaptive else step.kl,
        kl_estimator=step.kl_estimator,
        gamma=step.gamma,
        lam=step.lam,
    )


async def run(session: Session, console: Console, observers: Sequence[Observer] = ()) -> RunDirectory:
    """Run every step, write the run directory, and save actor and critic under ``checkpoints/final``.

    They are saved however the run ends, Ctrl-C included: an update in progress is waited for, then saved.

    Raises:
        ConfigError: the run directory cannot be written.
    """
    settings, assembly = session.settings, session.assembly
    chosen = settings.run
    decode = assembly.text.decode
    directory = RunDirectory(
        settings.run_directory, config=settings.toml(), decode=decode, keep=chosen.samples, trace=chosen.trace
    )
    with ExitStack() as stack:
        stack.enter_context(directory)
        log = stack.enter_context(RunLog(directory.path / "log.jsonl", chosen.name))
        watching: list[Observer] = [directory, log, *observers]
        if chosen.panel != "off":
            live = chosen.panel == "live" or (chosen.panel == "auto" and console.is_terminal)
            watching.append(stack.enter_context(Panel(console, chosen.steps, live=live, decode=decode)))
        assembly.listen(directory.model_span)
        try:
            async with session.graph.open(session.prompts, observers=watching) as running:
                async for _ in running.steps(chosen.steps):
                    pass
        finally:
            with anyio.CancelScope(shield=True):
                await assembly.save(directory.path / FINAL)
    return directory


def require_room(prompts: Sequence[Prompt], max_new_tokens: int, positions: int | None) -> None:
    """Check that the longest prompt and the longest response fit together into every model.

    Raises:
        ConfigError: they do not.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    if positions is not None and longest + max_new_tokens > positions:
        raise ConfigError(
            f"a prompt of {longest} tokens and a response of sampling.max_new_tokens = {max_new_tokens} do not fit "
            f"into the models' {positions} positions: lower sampling.max_new_tokens or data.max_prompt_tokens"
        )
