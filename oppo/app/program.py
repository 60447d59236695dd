"""A run like that of ``oppo train``, begun by a program, with a graph of its own if it wants one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
from rich.console import Console

from oppo.app.compose import MakeGraph
from oppo.app.config import load
from oppo.app.resume import settings_of
from oppo.app.train import prepare, run
from oppo.observe import Observer, silent
from oppo.report import RunDirectory


def train(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    graph: MakeGraph | None = None,
    observers: Sequence[Observer] = (),
    tell: Callable[[str], None] = silent,
) -> RunDirectory:
    """Train as a TOML file says, with run directory, checkpoints, panel and watchdog; return the run directory.

    Blocks; call it in the main thread, where Ctrl-C ends the run after the steps in flight.

    Args:
        config: the file, or the directory of a run, which is then resumed.
        overrides: ``section.key=value`` each.
        graph: makes the graph of a step of the run's models and schedule, in place of that of ``step.algorithm``, whose
            loss and settings stay. Its stages ``generate`` and ``update`` are a ``Generate`` and an ``Update``. A
            resumed run is given the same function again: unlike files, it is not compared.
        observers: see every item and step, beside those of the run.
        tell: receives a sentence about each thing that is done.

    Raises:
        OppoError: settings, data or models cannot be used, or the run failed.
        KeyboardInterrupt: a signal ended it.

    Example:
        >>> def dense(roles):  # doctest: +SKIP
        ...     return ppo(**vars(roles)).replace(advantage=MyAdvantage())
        >>> train("config.toml", ["run.steps=20"], graph=dense)  # doctest: +SKIP
    """
    resume = Path(config).is_dir()
    settings = settings_of(Path(config), overrides) if resume else load(Path(config), overrides)
    with prepare(settings, tell, resume=resume, graph=graph) as session:
        return anyio.run(run, session, Console(), observers)
