"""A run like that of ``oppo train``, begun by a program, with a graph of its own if it wants one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anyio
from rich.console import Console

from oppo.app.compose import MakeGraph
from oppo.app.resume import settings_of
from oppo.app.supply import ProgramRows, Rows
from oppo.app.train import prepare, run
from oppo.config.load import load, overridden, resolve
from oppo.config.own import with_name
from oppo.config.sections import ROWS
from oppo.config.settings import Settings
from oppo.observe import Observer
from oppo.report import RunDirectory


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
        config: a TOML file; or the directory of a run, which is then resumed; or what a file would hold, as a mapping
            of sections, whose paths are relative to the working directory and whose ``step.algorithm`` may be an
            object, such as ``GRPO(samples=8)``; or settings that were checked already.
        overrides: ``section.key=value`` each.
        prompts: rows, each a mapping of columns, in place of what ``data.prompts`` names: a sequence, which is read at
            once and served like a file; or any iterable or async iterable, served as it comes until it ends, in its
            own order (:class:`oppo.data.RowStream`). A resumed run is given the same rows again.
        eval_prompts: held-out rows, in place of what ``eval.prompts`` names.
        graph: makes the graph of a step of the run's models and schedule, in place of that of ``step.algorithm``, whose
            loss and settings stay. Its stages ``generate`` and ``update`` are a ``Generate`` and an ``Update``. A
            trainer of its own is a :class:`oppo.models.ResumableTrainer`; the run saves and restores it. A resumed run
            is given the same function again: unlike files, it is not compared.
        observers: see every item and step, beside those of the run.

    Raises:
        OppoError: settings, data or models cannot be used, or the run failed.
        KeyboardInterrupt: a signal ended it.

    Example:
        >>> directory = train("config.toml", ["run.steps=20"])  # doctest: +SKIP
        >>> directory = train(directory.path, ["run.steps=40"])  # goes on  # doctest: +SKIP
    """
    resume = isinstance(config, str | Path) and Path(config).is_dir()
    held_out = None if eval_prompts is None else list(eval_prompts)
    given = {"data.prompts": prompts, "eval.prompts": held_out}
    named = [f"{key}={ROWS}" for key, rows in given.items() if rows is not None]
    settings, rows = _settings(config, [*overrides, *named]), ProgramRows(prompts, held_out)
    with prepare(settings, resume=resume, graph=graph, rows=rows) as session:
        return anyio.run(run, session, Console(), observers)


def _settings(config: str | Path | Mapping[str, object] | Settings, overrides: Sequence[str]) -> Settings:
    if isinstance(config, str | Path):
        path = Path(config)
        return settings_of(path, overrides) if path.is_dir() else load(path, overrides)
    if isinstance(config, Settings):
        if not overrides:
            return config
        config = config.document()
    return resolve(overridden(with_name(config), overrides), Path.cwd())
