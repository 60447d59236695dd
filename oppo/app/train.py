"""``oppo train``: prepares models, prompts and graph, runs every step, and saves the trained models."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread
from rich.console import Console

from oppo.app.checkpoint import Checkpoint, Checkpoints
from oppo.app.compose import MakeGraph, compose
from oppo.app.empty_steps import EmptySteps
from oppo.app.interrupt import Interrupt, Stopped, interruptible
from oppo.app.provenance import Provenance, require_continued
from oppo.app.resume import CHECKPOINTS, locked, newest, require_same
from oppo.app.sections import RunSection
from oppo.app.settings import Settings
from oppo.app.supply import require_room, require_unfinished, resolved_prompts, short_of, steps_of
from oppo.app.trackers import require_trackers, tracking
from oppo.data import PromptStream
from oppo.errors import CheckpointError, HangError, behind
from oppo.events import StepReport
from oppo.graph import Graph, Run
from oppo.liveness import Heartbeat, Stall, Watchdog
from oppo.observe import Expendable, Notices, Observer, silent
from oppo.report import Panel, RunDirectory, RunLog, observations
from oppo.report.files import require_unused
from oppo.report.journal import JOURNAL
from oppo.report.lock import Lock
from oppo.report.samples import Detokenize

if TYPE_CHECKING:
    from oppo.app.assemble import Assembly

ENGINE_LOG = "vllm.log"
"""What the processes of vLLM write, in the run directory."""

FINAL = Path(CHECKPOINTS, "final")
"""The trained models in a run directory: ``actor`` and, with one, ``critic``, each with its tokenizer."""

HANG_REPORT = "hang-report.json"
"""The report in the directory of a run that was ended because nothing moved."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRun:
    """A run that is ready to begin; a context manager that ends the models' threads and releases the run directory.

    Attributes:
        provenance: what the run is made of, its files as they were read.
        notices: receives every sentence about the run, while it is prepared too.
        checkpoint: where the run is resumed; ``None`` for a new run.
        lock: of the run directory of a resumed run.
    """

    settings: Settings
    assembly: Assembly
    graph: Graph[StepReport]
    prompts: PromptStream
    provenance: Provenance
    checkpoints: Checkpoints
    notices: Notices
    checkpoint: Checkpoint | None = None
    lock: Lock | None = None

    @property
    def steps(self) -> int:
        """Steps of the whole run: ``run.steps``, or as many as the prompts last for."""
        chosen = self.settings
        return steps_of(chosen.run.steps, chosen.data, chosen.step.batch, self.prompts)

    @property
    def done(self) -> int:
        """Steps made before this process; 0 for a new run."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def is_checkpointed(self, index: int) -> bool:
        """Return whether the run writes a checkpoint after this step."""
        every, made = self.settings.run.checkpoint_every, index + 1
        return every > 0 and (made % every == 0 or made == self.steps)

    async def restore(self, running: Run[StepReport]) -> None:
        """Load the state of run, prompts and models from the checkpoint.

        Raises:
            CheckpointError: it does not fit this run.
        """
        if self.checkpoint is None:
            return
        state = self.checkpoint.state()
        try:
            running.load_state_dict(state["run"])
            self.prompts.load_state_dict(state["prompts"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the state in {self.checkpoint.path} does not fit this run ({type(error).__name__}: {error}): it is "
                "of another version of oppo, or was edited; start a new run"
            ) from error
        await self.assembly.restore(self.checkpoint.path)

    async def keep(self, running: Run[StepReport], report: StepReport) -> None:
        """Write a checkpoint after a step.

        Raises:
            CheckpointError: it could not be written; nothing half-written stays.
        """
        state = {
            "run": running.state_dict(),
            "prompts": self.prompts.state_dict(),
            **self.provenance.state(),
        }
        await self.assembly.saving.checkpoint(self.checkpoints, report.index + 1, report.score, state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        del kind, error, tb
        self.assembly.close()
        if self.lock is not None:
            self.lock.release()


def prepare(
    settings: Settings,
    tell: Callable[[str], None] = silent,
    *,
    resume: bool = False,
    dry_run: bool = False,
    accept_changed_code: bool = False,
    graph: MakeGraph | None = None,
) -> PreparedRun:
    """Return a run with everything loaded and checked; writes nothing but the log of an engine with one.

    Args:
        tell: receives a sentence about each thing that is done.
        resume: lock the run directory and go on from its newest checkpoint, or from the beginning if the run was killed
            before its first. Otherwise the directory must be unused.
        dry_run: prepare only, so the run directory may be in use.
        accept_changed_code: resume with another content of a file of code than the run began with.
        graph: makes the graph of a step, in place of that of ``step.algorithm``.

    Raises:
        OppoError: a setting, the data, the reward or a model cannot be used, or another run writes the run directory.
    """
    chosen, tell = settings.run, Notices(tell)
    checkpoints = Checkpoints(
        settings.run_directory / CHECKPOINTS, keep_last=chosen.keep_last, keep_best=chosen.keep_best, tell=tell
    )
    with ExitStack() as stack:
        lock: Lock | None = None
        checkpoint: Checkpoint | None = None
        if resume:
            lock = locked(settings)
            stack.callback(lock.release)
            checkpoint = newest(settings, checkpoints)
            if checkpoint is None:
                tell(f"the run in {settings.run_directory} ended before its first checkpoint, so it begins anew")
        elif not dry_run:
            require_unused(settings.run_directory)
        from oppo.app.assemble import assemble, load_text  # noqa: PLC0415 - torch takes seconds to import

        require_installed(settings)
        text = load_text(settings.models, tell)
        data, provenance = settings.data, Provenance.of(settings)
        prompts = resolved_prompts(settings, text, tell, provenance)
        stream = PromptStream(prompts, seed=data.seed, epochs=data.epochs)
        if (lasts := steps_of(chosen.steps, data, settings.step.batch, stream)) < chosen.steps:
            tell(short_of(chosen.steps, lasts, data, settings.trainer.schedule))
        if checkpoint is not None:
            before = Provenance.restored(checkpoint.state())
            require_same(before.settings, settings, of="its checkpoint")
            require_continued(before, provenance, settings, tell, accept_changed_code=accept_changed_code)
            require_unfinished(settings.run_directory, lasts)
        done = 0 if checkpoint is None else checkpoint.step
        assembly = assemble(settings, text, tell, engine_log=None if dry_run else settings.run_directory / ENGINE_LOG)
        stack.callback(assembly.close)
        require_room(prompts, assembly.sampling.max_new_tokens, assembly.positions)
        replay = observations(settings.run_directory / JOURNAL, done) if resume else {}
        composed = compose(settings, assembly, stream, replay, graph)
        stack.pop_all()
    return PreparedRun(settings, assembly, composed, stream, provenance, checkpoints, tell, checkpoint, lock)


def require_installed(settings: Settings) -> None:
    """Check that the engine and the trackers that the settings name are installed.

    Raises:
        ConfigError: one is not, or the engine has other arguments.
    """
    from oppo.app.engines import require_engine  # noqa: PLC0415 - torch takes seconds to import

    require_engine(settings.models.engine, settings.vllm, settings.models.device)
    require_trackers(settings.run.track)


async def run(
    session: PreparedRun,
    console: Console,
    observers: Sequence[Observer] = (),
    *,
    last_resort: Callable[[HangError], None] | None = None,
) -> RunDirectory:
    """Run every step, write the run directory, and save the trained models under ``checkpoints/final``.

    They are saved however the run ends, once it has made an update. Ctrl-C, SIGTERM and SIGHUP end the run after the
    step in progress, with a checkpoint. A second signal ends it at once, after an update in progress.

    ``console`` shows the panel and the effect of Ctrl-C; ``last_resort`` is that of :class:`oppo.liveness.Watchdog`.

    Raises:
        ConfigError: the run directory cannot be written.
        HangError: nothing had moved for ``run.watchdog_seconds``.
        ModelError: the trained models could not be saved.
        CheckpointError: a checkpoint could not be written.
        NothingTrained: no rollout was trained in ``run.max_empty`` steps in a row, or in the whole run.
        Stopped: a signal ended the run.
    """
    settings, assembly = session.settings, session.assembly
    chosen, decode = settings.run, assembly.text.decode
    heartbeat = Heartbeat()
    directory = directory_of(session)
    with ExitStack() as stack:
        stack.enter_context(directory)
        log = stack.enter_context(RunLog(directory.path / "log.jsonl", chosen.name))
        session.notices.listeners.append(log.notice)
        stack.callback(session.notices.listeners.remove, log.notice)
        trackers = stack.enter_context(tracking(settings, session.done, session.notices))
        for fault in directory.faults:
            session.notices(fault)
        panel = stack.enter_context(panel_of(chosen, console, decode))
        listeners = [log.on_stall, panel.on_stall]
        watchdog = stack.enter_context(watchdog_of(session, directory, listeners, last_resort))
        assembly.listen(directory.model_span, watchdog.on_span)
        watching = [directory, log, Expendable(panel, session.notices), watchdog, *trackers, *observers]
        async with (
            saving(assembly, directory.path / FINAL),
            heartbeat.beating(),
            watchdog.guarding(),
            session.graph.open(
                session.prompts,
                observers=watching,
                lookahead=settings.step.lookahead,
                gauges={"loop/worst_gap_s": heartbeat.take},
            ) as running,
            interruptible(log.on_interrupt, partial(announce_end, console)) as interrupt,
        ):
            watchdog.watch(running)
            panel.watch(running.snapshot)
            await make_steps(session, running, interrupt, directory)
        note_data(session, log)
        directory.conclude()
    return directory


def watchdog_of(
    session: PreparedRun,
    directory: RunDirectory,
    listeners: Sequence[Callable[[Stall], None]],
    last_resort: Callable[[HangError], None] | None,
) -> Watchdog:
    """Return the watchdog with the limits of the settings."""
    chosen, assembly = session.settings.run, session.assembly

    def leave(error: HangError) -> None:
        directory.abandon()
        if last_resort is not None:
            last_resort(error)

    return Watchdog(
        chosen.watchdog_seconds,
        report=directory.path / HANG_REPORT,
        listeners=listeners,
        progress=assembly.progress,
        calls=assembly.at_work,
        call_timeout=chosen.call_timeout,
        saving=lambda: assembly.saving.is_saving,
        free=assembly.abort,
        last_resort=None if last_resort is None else leave,
    )


def announce_end(console: Console, by: signal.Signals) -> None:
    """Show what a signal does."""
    name = "Ctrl-C" if by is signal.SIGINT else by.name
    console.out(f"{name}: ending after this step, then saving; once more ends the run at once", highlight=False)


def note_data(session: PreparedRun, log: RunLog) -> None:
    """Log that the data ended early, and which files changed meanwhile."""
    chosen = session.settings
    if session.steps < chosen.run.steps:
        log.note("data ended", steps=session.steps, wanted=chosen.run.steps)
    for file in session.provenance.changed(chosen):
        log.note("file changed", file=str(file), used="as it was when the run began")


def directory_of(session: PreparedRun) -> RunDirectory:
    """Return the run directory; a resumed one is rewound to the checkpoint.

    Raises:
        ConfigError: it cannot be written, or another run writes it.
    """
    settings = session.settings
    return RunDirectory(
        settings.run_directory,
        config=settings.toml(),
        decode=session.assembly.text.decode,
        keep=settings.run.logged_samples,
        trace=None if settings.run.trace == "all" else settings.run.trace,
        resumed_at=None if session.lock is None else session.done,
        lock=session.lock,
    )


async def make_steps(
    session: PreparedRun, running: Run[StepReport], interrupt: Interrupt, directory: RunDirectory
) -> None:
    """Make the remaining steps; write a checkpoint every ``run.checkpoint_every``, after the last and after a signal.

    No step is in flight at a checkpoint. The records of all steps are on the disk before their checkpoint is, so a
    resumed run has them.

    Raises:
        NothingTrained: no rollout was trained in ``run.max_empty`` steps in a row, or in the whole run.
        Stopped: a signal came.
    """
    chosen = session.settings.run
    empty = EmptySteps(chosen.max_empty)
    await session.restore(running)
    if session.done >= session.steps:  # it was killed between its last step and its end
        await session.assembly.saving.save(directory.path / FINAL)
    async for report in running.steps(chosen.steps - session.done, drain_after=session.is_checkpointed):
        early = interrupt.by if report.index + 1 < session.steps else None
        if early:
            running.drain()
        if not running.alive and (early or session.is_checkpointed(report.index)):
            await anyio.to_thread.run_sync(directory.flush)
            await session.keep(running, report)
        if early and not running.alive:
            raise Stopped(early)
        empty.after(report)
    empty.require_trained(directory.trained, session.steps)


def panel_of(chosen: RunSection, console: Console, decode: Detokenize) -> Panel:
    """Return the panel in the form that ``run.panel`` names."""
    shown = Console(quiet=True) if chosen.panel == "off" else console
    live = chosen.panel == "live" or (chosen.panel == "auto" and console.is_terminal)
    return Panel(shown, chosen.steps, live=live, decode=decode)


@asynccontextmanager
async def saving(assembly: Assembly, path: Path) -> AsyncIterator[None]:
    """Save the trained models when the context ends, however it ends; a failure never hides what ended the run.

    Without an update in this run, ``path`` stays as it is.
    """

    async def save() -> None:
        if assembly.trainer.has_learned:
            with anyio.CancelScope(shield=True):
                await assembly.saving.save(path)

    try:
        yield
    except BaseException as error:
        with behind(error, f"saving {path}"):
            await save()
        raise
    await save()
