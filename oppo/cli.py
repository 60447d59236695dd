"""The command line: ``oppo train``, ``oppo resume``, ``oppo demo``, ``oppo bench``, ``oppo --version``.

Exit codes: 0, done; 1, a run failed; 2, settings, data or models cannot be used; 130, ended by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from oppo.bench.request import Request
from oppo.errors import ConfigError, DataError, HangError, OppoError
from oppo.redact import redacted
from oppo.report.panel import harmless

if TYPE_CHECKING:
    from oppo.config import Settings

DONE, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    app = App(
        name="oppo",
        help="PPO-style RLHF as a streaming graph of async stages.",
        version=lambda: version("oppo"),
        suppress_keyboard_interrupt=False,
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
    )
    app.command(train)
    app.command(resume)
    app.command(demo)
    app.command(bench)
    try:
        code = app(list(sys.argv[1:] if arguments is None else arguments))
    except CycloptsError as error:
        return complain(str(error), UNUSABLE)
    except OppoError as error:
        return complain(paragraph(error), UNUSABLE if isinstance(error, ConfigError | DataError) else FAILED)
    except OSError as error:
        return complain(paragraph(error), FAILED)
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except Exception:  # noqa: BLE001 - the boundary to the terminal: a fault of this program or of code it was given
        return complain(traceback.format_exc(), FAILED)
    return code if isinstance(code, int) else DONE


def train(
    config: Path,
    /,
    *,
    override: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = (),
    dry_run: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Train as a TOML file says; docs/settings.md of the repository has every key of it, with its default.

    Parameters
    ----------
    config
        The settings; relative paths in them are relative to the file.
    override
        Change one setting: section.key=value, the value as in TOML. Can be repeated.
    dry_run
        Load and check everything, print the resolved settings and the graph, train nothing.
    """
    from oppo.config import load  # noqa: PLC0415 - `oppo --help` should be quick

    return carry_out(load(config, override), dry_run=dry_run)


def resume(
    run: Path,
    /,
    *,
    override: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = (),
) -> int:
    """Go on with a run from its newest checkpoint, half-written responses included.

    Parameters
    ----------
    run
        The run directory.
    override
        Change one setting of those that may change: section.key=value. Can be repeated.
    """
    from oppo.resume import settings_of  # noqa: PLC0415 - `oppo --help` should be quick

    return carry_out(settings_of(run, override), resume=True)


def carry_out(settings: Settings, *, resume: bool = False, dry_run: bool = False) -> int:
    """Prepare and run what the settings say; return the command's exit code."""
    from oppo.train import FINAL, prepare, run  # noqa: PLC0415 - `oppo --help` should be quick

    try:
        session = prepare(settings, note, resume=resume, trial=dry_run)
    except OppoError as error:
        return complain(paragraph(error), UNUSABLE)
    console = Console()
    try:
        with session:
            if dry_run:
                console.out(redacted(settings.toml()), session.graph.table(), sep="\n", highlight=False)
                return DONE
            try:
                anyio.run(partial(run, session, console, last_resort=leave))
            except HangError as error:
                leave(error)
    except KeyboardInterrupt:  # told when the models' threads have ended what they were at: it may be a save
        final = settings.run_directory / FINAL
        saved = f"what was learned is in {final}" if final.exists() else "nothing was saved"
        advice = f"go on with `oppo resume {settings.run_directory}`" if session.checkpoints.sealed else ""
        return complain("; ".join(filter(None, ("interrupted", saved, advice))), INTERRUPTED)
    made, wanted = session.steps, settings.run.steps
    ended = f" after {made} of {wanted} steps, with the end of the data" if made < wanted else ""
    console.out(f"done{ended}: {settings.run_directory / 'report.html'}", highlight=False)
    return DONE


def demo(
    *,
    short: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    seed: int = 0,
    directory: Path = Path("runs"),
) -> int:
    """Make a small policy and reward model, train with PPO, and show what changed; needs no network.

    Parameters
    ----------
    short
        The quick version: smaller models, fewer steps.
    seed
        Of everything that is drawn.
    directory
        The folder that holds runs.
    """
    Console().out("oppo demo: making a small language model, then training it with streamed PPO", highlight=False)
    from oppo.demo.run import demo as run_demo  # noqa: PLC0415 - torch takes seconds to import

    run_demo(directory, short=short, seed=seed)
    return DONE


def bench(request: Annotated[Request, Parameter(name="*")] = Request()) -> int:  # noqa: B008 - it is frozen
    """Measure a PPO step: what overlap gains, where it gains nothing, and what it costs."""
    console = Console()
    request.require_writable()
    if request.engine:
        from oppo.bench import engine  # noqa: PLC0415 - `oppo --help` should be quick

        console.out(engine.bench(request.json), highlight=False)
        return DONE
    if request.decoding:
        from oppo.bench import decoders  # noqa: PLC0415 - torch takes seconds to import

        console.out(decoders.bench(request.json, rounds=request.rounds), highlight=False)
        return DONE
    from oppo.bench.command import WIDTH, bench as measure  # noqa: PLC0415

    measure(request, console if console.is_terminal else Console(width=WIDTH), note)
    return DONE


def complain(text: str, code: int) -> int:
    """Say on standard error why the command ends, and return its exit code."""
    Console(stderr=True).out(harmless(text), highlight=False)
    return code


def note(sentence: str) -> None:
    """Say on standard error what is going on."""
    Console(stderr=True).out(harmless(sentence), style="dim", highlight=False)


def leave(error: HangError) -> None:
    """End the process at once: a thread that hangs is never waited for, as an orderly exit would."""
    complain(paragraph(error), FAILED)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)


def paragraph(error: BaseException) -> str:
    """Return an error and the notes added on its way up, without a traceback."""
    return "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])
