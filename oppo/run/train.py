"""Whole runs: prepares models, prompts and graph, runs every step, and saves the trained models; or evaluates them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from rich.console import Console

from oppo.agents import Agents
from oppo.atomic_files import nearby
from oppo.config.extensions import with_name
from oppo.config.load import BY_DATA, load_settings, overridden, resolve
from oppo.config.sections import ROWS, RunSection
from oppo.config.settings import Settings
from oppo.errors import CheckpointError, ConfigError, HangError, NothingTrained, RunComplete, behind, exits_told, shown
from oppo.evaluation import Evaluate, Evaluated
from oppo.evaluation.evaluate import BEFORE
from oppo.events import Drop, StepReport
from oppo.graph import Graph, Run
from oppo.liveness import Heartbeat
from oppo.liveness.signals import Interrupt, Stopped, interruptible
from oppo.liveness.watchdog import GAP
from oppo.log import logger
from oppo.observe import Observer
from oppo.placement.place import Closing
from oppo.report import RunDirectory, RunLog
from oppo.report.records import IMAGES, JOURNAL, Lock, Replay, ended, read_replay, require_unused
from oppo.run.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    Checkpoints,
    Provenance,
    fingerprints,
    locked,
    newest,
    require_continued,
    require_same,
    settings_of,
)
from oppo.run.graph import (
    STAGE,
    MakeGraph,
    compose,
    evaluate_first,
    evaluates,
    is_due,
    judged,
    kind_of,
    show_progress,
    trainer_of,
    with_evaluations,
)
from oppo.run.observers import watching
from oppo.run.prompts import (
    NOTHING,
    ProgramRows,
    Rows,
    Supply,
    check_image_tokens,
    of_agents,
    require_room,
    steps_of,
    supplied,
)
from oppo.stages import Generate, Update

if TYPE_CHECKING:
    from oppo.run.models import Assembly


ENGINE_LOG = "vllm.log"
"""The output of vLLM's processes, in the run directory."""

FINAL = Path(CHECKPOINTS, "final")
"""The trained models in a run directory: ``actor`` and, with one, ``critic``, each with its tokenizer."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRun(Closing):
    """A run that is ready to begin; a context manager that ends the models' threads and releases the run directory."""

    settings: Settings
    assembly: Assembly
    graph: Graph[StepReport]
    prompts: Supply
    provenance: Provenance
    checkpoints: Checkpoints
    checkpoint: Checkpoint | None = None
    lock: Lock | None = None
    replay: Replay = field(default_factory=Replay)
    held: ExitStack = field(default_factory=ExitStack)  # models, lock and, in a dry run, images of rows

    @property
    def steps(self) -> int:
        chosen = self.settings
        return steps_of(chosen.run.steps, chosen.data, chosen.step.batch, self.prompts)

    @property
    def done(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    def is_checkpointed(self, index: int) -> bool:
        return is_due(index, self.settings.run.checkpoint_every, self.steps) or index in self.replay.drains

    async def restore(self, running: Run[StepReport]) -> None:
        if self.checkpoint is None:
            if self.assembly.served_apart:
                await self._sync_weights()
            return
        state, trainer = self.checkpoint.state(), kind_of(self.assembly.saving.trainer)
        if (was := state.get("trainer", trainer)) != trainer:
            raise CheckpointError(
                f"the run was trained by {was}, and would go on with {trainer}: a run with a graph of its own is "
                "resumed by the program that began it, with oppo.resume(directory, graph=...)"
            )
        try:
            running.load_state_dict(state["run"])
            self.prompts.load_state_dict(state["prompts"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state in {self.checkpoint.path} does not fit this run ({type(error).__name__}: {error}): it is "
                "of another version of oppo, or was edited; start a new run from its policy, "
                f"{self.checkpoint.path / 'actor'} (models.policy; of adapters, models.adapter)"
            ) from error
        await self.assembly.saving.trainer.restore(self.checkpoint.path)
        await self._sync_weights()

    async def _sync_weights(self) -> None:
        await self.assembly.saving.trainer.sync_weights(*self.graph.stage("update", Update).synced)

    async def keep(self, running: Run[StepReport], report: StepReport, directory: RunDirectory) -> None:
        """Write a checkpoint; the records of all steps are on the disk before it is."""
        state = {
            "records": await anyio.to_thread.run_sync(directory.flush),
            "run": running.state_dict(),
            "prompts": self.prompts.state_dict(),
            "trainer": kind_of(self.assembly.saving.trainer),
            **self.provenance.state(),
        }
        score = judged(self.settings.eval, self.provenance, report)
        await self.assembly.saving.checkpoint(self.checkpoints, report.index + 1, score, state)

    def close(self) -> None:
        self.held.close()


def prepare(
    settings: Settings,
    *,
    resume: bool = False,
    dry_run: bool = False,
    accept_changed_code: bool = False,
    graph: MakeGraph | None = None,
    rows: ProgramRows = NOTHING,
) -> PreparedRun:
    """Return a run with everything loaded and checked; a ``dry_run`` may look at a run directory that is in use."""
    chosen = settings.run
    checkpoints = Checkpoints(
        settings.run_directory / CHECKPOINTS, keep_last=chosen.keep_last, keep_best=chosen.keep_best
    )
    with ExitStack() as stack:
        lock, checkpoint = _resumed(chosen, settings.run_directory, checkpoints, stack) if resume else (None, None)
        if not resume and not dry_run:
            require_unused(settings.run_directory)
        from oppo.run.deployment import Deployment  # noqa: PLC0415 - torch takes seconds to import
        from oppo.run.engines import require_engines  # noqa: PLC0415 - likewise
        from oppo.run.loading import reader_of_images  # noqa: PLC0415 - likewise
        from oppo.run.models import assemble, policy_tokenizer  # noqa: PLC0415 - likewise
        from oppo.run.rewards import begin_of, environment_of  # noqa: PLC0415 - likewise

        deployment = Deployment.of(settings)
        require_engines(deployment)
        tokenizer = policy_tokenizer(settings.models, settings.data, settings.environment)
        environment = environment_of(settings.environment, settings.agents, settings.data, settings.sampling, tokenizer)
        kept = Path(stack.enter_context(TemporaryDirectory())) if dry_run else settings.run_directory / IMAGES
        begin, images = begin_of(environment), reader_of_images(deployment, kept)
        if isinstance(environment, Agents) and settings.data.images and not isinstance(images, str):
            environment.see(images(Path()))
        supply = supplied(settings, tokenizer, Provenance.of(settings), rows, begin=begin, images=images)
        stream, provenance = supply.stream, supply.provenance
        if chosen.steps == BY_DATA:
            settings = settings.spanning(supply.steps)
            provenance = replace(provenance, settings=fingerprints(settings))
        if checkpoint is not None:
            before = Provenance.restored(checkpoint.state())
            require_same(before.settings, settings, of="its checkpoint")
            require_continued(before, provenance, settings.files, accept_changed_code=accept_changed_code)
            made = ended(settings.run_directory)
            if made is not None and supply.steps <= made:
                raise RunComplete(
                    f"the run has made all of the {made} steps that its data lasts for: there is nothing to resume"
                )
        done = 0 if checkpoint is None else checkpoint.step
        assembly = assemble(
            deployment.spanning(supply.steps),
            tokenizer,
            columns=supply.columns,
            engine_log=None if dry_run else settings.run_directory / ENGINE_LOG,
            environment=environment,
            images=supply.images,
        )
        stack.callback(assembly.close)
        require_room(supply, assembly.sampling, assembly.positions, assembly.roles.teacher)
        check_image_tokens(supply, assembly.image_tokens)
        replay = read_replay(settings.run_directory / JOURNAL, done) if resume else Replay()
        stream = of_agents(stream, assembly.roles.environment, settings.data)
        composed = compose(settings, assembly.roles, assembly.ideal, stream, replay=replay.observations, make=graph)
        assembly = assembly.wired(trainer_of(composed), composed.stage("generate", Generate).environment)
        due = partial(evaluates, settings.run, settings.eval, supply.steps)
        composed = with_evaluations(
            composed,
            settings.eval,
            assembly.roles.reward,
            assembly.sampling,
            supply.held_out,
            due=due,
            data=settings.data,
            batch=settings.step.batch * settings.algorithm.responses,
            by_rule=bool(settings.agents.program) or (len(settings.rewards) == 1 and not settings.reward_models),
        )
        held = stack.pop_all()
    return PreparedRun(settings, assembly, composed, stream, provenance, checkpoints, checkpoint, lock, replay, held)


def _resumed(
    chosen: RunSection, directory: Path, checkpoints: Checkpoints, stack: ExitStack
) -> tuple[Lock, Checkpoint | None]:
    lock = locked(directory)
    stack.callback(lock.release)
    checkpoint = newest(chosen, directory, checkpoints)
    if checkpoint is None:
        logger.info(f"the run in {nearby(directory)} ended before its first checkpoint, so it begins anew")
    else:
        logger.info(f"going on after step {checkpoint.step} of {chosen.steps}")
    return lock, checkpoint


async def run(
    session: PreparedRun,
    console: Console,
    observers: Sequence[Observer] = (),
    *,
    last_resort: Callable[[HangError], None] | None = None,
) -> RunDirectory:
    """Run every step, write the run directory, and save the trained models, however the run ends."""
    settings, assembly = session.settings, session.assembly
    heartbeat = Heartbeat()
    directory = directory_of(session)
    with (
        directory,
        watching(
            settings.run,
            assembly,
            directory,
            console,
            observers,
            algorithm=settings.algorithm,
            config=settings.tables(),
            first=session.done,
            last_resort=last_resort,
        ) as watch,
    ):
        show_progress(session.graph, watch.panel.on_evaluation)
        async with (
            interruptible(watch.on_signal) as interrupt,
            saving(assembly, directory.path / FINAL),
            heartbeat.beating(),
            watch.watchdog.guarding(heartbeat=heartbeat),
            session.graph.open(
                session.prompts,
                observers=watch.observers,
                lookahead=settings.step.lookahead,
                gauges={GAP: heartbeat.take, **assembly.gauges},
            ) as running,
        ):
            watch.look_at(running)
            await session.restore(running)
            watch.begin(running)
            heartbeat.take()  # no gap of the first step: trackers have begun
            await make_steps(session, running, interrupt, directory)
        note_data(session, watch.log, directory.made)
        directory.conclude()
    if interrupt.by is not None:  # it came in the last step: the run is complete, and the program is still to end
        raise Stopped(interrupt.by)
    return directory


def note_data(session: PreparedRun, log: RunLog, made: int) -> None:
    """Log that the data ended early, and which files changed meanwhile."""
    chosen = session.settings
    if made < chosen.run.steps:
        log.note("data ended", steps=made, wanted=chosen.run.steps)
    for file in session.provenance.changed(chosen.files):
        log.note("file changed", file=str(file), used="as it was when the run began")


def directory_of(session: PreparedRun) -> RunDirectory:
    """Return the run directory; a resumed one is rewound to the checkpoint when it begins."""
    settings = session.settings
    return RunDirectory(
        settings.run_directory,
        config=settings.toml(),
        decode=session.assembly.tokenizer.decode,
        keep=settings.run.logged_samples,
        trace=None if settings.run.trace == "all" else settings.run.trace,
        resumed_at=None if session.lock is None else session.done,
        lock=session.lock,
        flushed=None if session.checkpoint is None else session.checkpoint.state().get("records"),
    )


async def make_steps(
    session: PreparedRun, running: Run[StepReport], interrupt: Interrupt, directory: RunDirectory
) -> None:
    """Make the remaining steps; a signal lets those in flight end, and the journal names the last."""
    chosen = session.settings.run
    empty, last, draining = EmptySteps(chosen.max_empty), None, False
    if not session.done and not directory.evaluated:
        await evaluate_first(session.graph, running)
    if session.done >= session.steps:  # it was killed between its last step and its end
        await session.assembly.saving.save(directory.path / FINAL)
    async for report in running.steps(chosen.steps - session.done, drain_after=session.is_checkpointed):
        goes_on = report.index + 1 < session.steps
        ends = interrupt.by if goes_on else None
        if ends and running.alive and not draining:
            draining = True
            directory.drained(running.alive[-1])
            running.drain()
        if not running.alive and (ends or session.is_checkpointed(report.index)):
            await session.keep(running, report, directory)
            ends = interrupt.by if goes_on else None  # it may have come meanwhile
        if ends and not running.alive:
            raise Stopped(ends)
        empty.after(report)
        last = report
    if last is not None and chosen.checkpoint_every and not session.is_checkpointed(last.index):
        await session.keep(running, last, directory)  # the prompts ended earlier than could be known
    if session.steps and not directory.trained:
        raise NothingTrained(f"no rollout was trained in the {session.steps} steps of the run: {empty.in_all}")


@asynccontextmanager
async def saving(assembly: Assembly, path: Path) -> AsyncIterator[None]:
    """Save the trained models when the context ends, however it ends, unless this run made no update."""

    async def save() -> None:
        if assembly.saving.trainer.has_learned:
            with anyio.CancelScope(shield=True):
                await assembly.saving.save(path)

    try:
        yield
    except BaseException as error:
        with behind(error, f"saving {path}"):
            await save()
        raise
    await save()


def train(
    config: str | Path | Mapping[str, object] | Settings,
    overrides: Sequence[str] = (),
    *,
    prompts: Rows | None = None,
    eval_prompts: Iterable[Mapping[str, object]] | None = None,
    graph: MakeGraph | None = None,
    observers: Sequence[Observer] = (),
) -> RunDirectory:
    """Train as settings say, with run directory, checkpoints, panel and watchdog; return the run directory.

    Blocks; call it in the main thread, where Ctrl-C ends the run after the steps in flight.

    Args:
        config: a TOML file; or what a file would hold, as a mapping of sections, whose paths are relative to the
            working directory and whose ``step.algorithm`` may be an object, such as ``GRPO(samples=8)``; or settings
            that were checked already (:func:`oppo.load_settings`).
        overrides: ``section.key=value`` each.
        prompts: rows, each a mapping of columns, in place of what ``data.prompts`` names: a sequence, which is read at
            once and served like a file; or any iterable or async iterable, served as it comes until it ends, in its
            own order (:class:`oppo.data.RowStream`).
        eval_prompts: held-out rows, in place of what ``eval.prompts`` names.
        graph: makes the graph of a step of the run's models and schedule, in place of that of ``step.algorithm``, whose
            loss and settings stay. Its stages ``generate`` and ``update`` are a ``Generate`` and an ``Update``. A
            trainer of its own is a :class:`oppo.models.ResumableTrainer`; the run saves and restores it.
        observers: see every item and step, beside the run's own observers, with the names of ``run.metric_names``.

    Raises:
        OppoError: settings, data or models cannot be used, or the run failed.
        KeyboardInterrupt: a signal ended it.

    Example:
        >>> directory = train("config.toml", ["run.steps=20"])  # doctest: +SKIP
    """
    rows = ProgramRows(prompts, None if eval_prompts is None else list(eval_prompts))
    settings = _settings(config, [*overrides, *_named(rows)])
    with exits_told(), prepare(settings, graph=graph, rows=rows) as session:
        return anyio.run(run, session, Console(), observers)


def resume(
    directory: str | Path,
    overrides: Sequence[str] = (),
    *,
    prompts: Rows | None = None,
    eval_prompts: Iterable[Mapping[str, object]] | None = None,
    graph: MakeGraph | None = None,
    observers: Sequence[Observer] = (),
    accept_changed_code: bool = False,
) -> RunDirectory:
    """Go on with the run in a directory from its newest checkpoint, as ``oppo resume`` does; return the run directory.

    The other arguments are those of :func:`train`: a run that was given rows or a graph is given the same again. Rows
    are compared with those that it began with, a graph is not.

    Args:
        overrides: of settings that may change, such as ``run.steps``.
        accept_changed_code: go on with another content of a file of code than the run began with.

    Raises:
        RunComplete: nothing is left to do.
        OppoError: there is no run, another process writes it, what it is made of has changed, or it failed.
        KeyboardInterrupt: a signal ended it.

    Example:
        >>> directory = resume("runs/first", ["run.steps=40"])  # doctest: +SKIP
    """
    rows = ProgramRows(prompts, None if eval_prompts is None else list(eval_prompts))
    settings = settings_of(Path(directory), [*overrides, *_named(rows)])
    how = partial(prepare, resume=True, accept_changed_code=accept_changed_code)
    with exits_told(), how(settings, graph=graph, rows=rows) as session:
        return anyio.run(run, session, Console(), observers)


def evaluate(
    config: str | Path | Mapping[str, object] | Settings,
    overrides: Sequence[str] = (),
    *,
    eval_prompts: Iterable[Mapping[str, object]] | None = None,
) -> Evaluated:
    """Answer the held-out prompts and score the answers, as an evaluation of a run does; train and write nothing.

    Args:
        config: as of :func:`train`; or the directory of a run, whose trained policy is evaluated.
        overrides: ``section.key=value`` each.
        eval_prompts: held-out rows, in place of what ``eval.prompts`` names.

    Raises:
        ConfigError: there are no held-out prompts; or the run has no trained policy.
        OppoError: settings, data or models cannot be used.

    Example:
        >>> evaluate("runs/first", ["eval.samples=8"]).metrics["eval/score"]  # doctest: +SKIP
        0.71
    """
    held_out = None if eval_prompts is None else list(eval_prompts)
    named = _named(ProgramRows(None, held_out))
    if isinstance(config, str | Path) and Path(config).is_dir():
        settings = load_settings(Path(config) / "config.toml", [*_trained(Path(config)), *overrides, *named])
    else:
        settings = _settings(config, [*overrides, *named])
    if not settings.eval.prompts or (held_out is None and settings.eval.prompts == ROWS):
        raise ConfigError("nothing is evaluated without held-out prompts: give eval.prompts, or rows as eval_prompts")
    by_program = settings.data.prompts == ROWS
    if by_program:  # the prompts of training are not needed
        settings = settings.changed({"data": {"prompts": settings.eval.prompts}})
    rows = ProgramRows(held_out if by_program else None, held_out)
    with exits_told(), prepare(settings, dry_run=True, rows=rows) as session:
        return anyio.run(_evaluated, session)


def _trained(directory: Path) -> Sequence[str]:
    actor = (directory / FINAL / "actor").absolute()  # the settings' own paths are relative to their file
    if not actor.is_dir():
        raise ConfigError(f"{directory} has no trained policy in {actor}: name a run that has ended, or a file")
    named = json.dumps(str(actor), ensure_ascii=False)
    if not (actor / "adapter_config.json").exists():
        return [f"models.policy={named}"]
    anew = ["models.lora_rank=0", "models.lora_alpha=32", "models.lora_experts=false", "models.lora={}"]
    return [f"models.adapter={named}", *anew]


async def _evaluated(session: PreparedRun) -> Evaluated:
    async with session.graph.open(session.prompts) as running:
        await session.restore(running)
        return await session.graph.stage(STAGE, Evaluate).evaluation.measure(BEFORE)


def _named(rows: ProgramRows) -> list[str]:
    given = {"data.prompts": rows.prompts, "eval.prompts": rows.held_out}
    return [f"{key}={ROWS}" for key, found in given.items() if found is not None]


def _settings(config: str | Path | Mapping[str, object] | Settings, overrides: Sequence[str]) -> Settings:
    if isinstance(config, str | Path):
        return load_settings(Path(config), overrides)
    if isinstance(config, Settings):
        if not overrides:
            return config
        config = config.document()
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"settings are a file's path, a mapping of what a file holds, or Settings; got {shown(config)}"
        )
    return resolve(overridden(with_name(config), overrides), Path.cwd())


SHOWN = 3
"""Reasons in the message."""

_KINDS = 1000  # distinct reasons that are counted one by one


@dataclass(slots=True)
class Reasons:
    """Counts drops by reason; reasons that differ only in numbers are one kind, named by its first."""

    counts: Counter[str] = field(default_factory=Counter)
    _first: dict[str, str] = field(default_factory=dict)

    def add(self, drops: Iterable[Drop]) -> None:
        for drop in drops:
            kind = re.sub(r"\d+", "", drop.reason) if len(self._first) < _KINDS else ""
            self.counts[self._first.setdefault(kind, drop.reason if kind else "other reasons")] += 1

    def __str__(self) -> str:
        shown = [f"{count} x {reason}" for reason, count in self.counts.most_common(SHOWN)]
        rest = len(self.counts) - len(shown)
        return "; ".join([*shown, *([f"{rest} other reasons"] if rest > 0 else [])]) or "no rollout ended"


@dataclass(slots=True)
class EmptySteps:
    """Counts consecutive steps that train nothing."""

    limit: int
    in_all: Reasons = field(default_factory=Reasons)
    _in_a_row: int = 0
    _since_trained: Reasons = field(default_factory=Reasons)

    def after(self, report: StepReport) -> None:
        self.in_all.add(report.dropped)
        if report.trained:
            self._in_a_row, self._since_trained = 0, Reasons()
            return
        self._in_a_row += 1
        self._since_trained.add(report.dropped)
        if self._in_a_row == self.limit:
            raise NothingTrained(
                f"no rollout was trained in {self.limit} steps in a row ({self._since_trained}): look at these "
                f"reasons; run.max_empty = {self.limit} is the limit, 0 sets none"
            )
