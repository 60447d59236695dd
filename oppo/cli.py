"""The command line: ``oppo train``, and the other commands that ``oppo --help`` lists.

Exit codes: 0, done, or nothing is left to resume; 1, a run failed; 2, settings, data or models cannot be used; 3, a run
trained nothing; 128 plus its number, ended by a signal: 130 by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import anyio
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from oppo.atomic_files import nearby, put
from oppo.declared import require_real, require_whole
from oppo.errors import (
    ConfigError,
    DataError,
    HangError,
    ModelRefused,
    NothingTrained,
    OppoError,
    RunComplete,
    exits_told,
)
from oppo.liveness.signals import Stopped, stoppable
from oppo.log import routed
from oppo.redact import harmless
from oppo.report.panel import displays
from oppo.report.records import ended, require_unused

if TYPE_CHECKING:
    from oppo.config.settings import Settings

DONE, FAILED, UNUSABLE, UNTRAINED, INTERRUPTED = 0, 1, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    app = program("oppo", "PPO-style RLHF as a streaming graph of async stages.")
    app.command(train)
    app.command(resume)
    app.command(doctor)
    app.command(simulate)
    app.command(convert_config)
    app.command(report)
    app.command(push)
    app.command(demo)
    with routed(note):
        return call(app, arguments)


def program(name: str, about: str) -> App:
    return App(
        name=name,
        help=about,
        version=lambda: version("oppo"),
        suppress_keyboard_interrupt=False,
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
    )


@displays()
def call(app: App, arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; losing the terminal or a pipe meanwhile ends nothing."""
    try:
        with stoppable(), exits_told():
            code = app(list(sys.argv[1:] if arguments is None else arguments))
    except CycloptsError as error:
        return complain(str(error), UNUSABLE)
    except (OppoError, OSError) as error:
        return complain(paragraph(error), code_of(error))
    except KeyboardInterrupt as error:
        return complain(interrupted(error), code_of(error))
    except (SystemExit, asyncio.CancelledError) as error:  # raised by user code
        return complain(f"error: the program was left by a {type(error).__name__} that nothing asked for", FAILED)
    except BaseException:  # noqa: BLE001 - the boundary to the terminal: a fault of this program or of user code
        return complain(traceback.format_exc(), FAILED)
    return code if isinstance(code, int) else DONE


def train(
    config: Path,
    /,
    *,
    override: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = (),
    ray: Annotated[str | None, Parameter(show_default=False)] = None,
    dry_run: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    verbose: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Train as a TOML file says; docs/settings.md of the repository has every key of it, with its default.

    Args:
        config: The settings; relative paths in them are relative to the file.
        override: Change one setting: section.key=value, the value as in TOML. Can be repeated.
        ray: A Ray cluster for the models that can be on other machines: auto, or host:port. Sets placement.cluster.
        dry_run: Check settings, run directory, data and code, then load the models; print what was decided, a prompt as
            the policy reads it, and what the reward says of a short response to it; train nothing.
        verbose: Print all settings of a dry run too, and its graph.
    """
    if verbose and not dry_run:
        raise ConfigError("--verbose prints all settings of a dry run: add --dry-run, or leave it out")
    from oppo.config.load import load_settings  # noqa: PLC0415 - `oppo --help` should be quick

    settings = load_settings(config, in_cluster(override, ray))
    require_unused(settings.run_directory)
    try:
        from oppo.run.rewards import first_look  # noqa: PLC0415 - likewise

        look = first_look(settings)  # before torch, which takes seconds to import
    except OppoError as error:
        return complain(paragraph(error), UNUSABLE)
    if not dry_run:
        return carry_out(settings)
    from oppo.run.dry_run import decided, rehearse, rehearse_code  # noqa: PLC0415 - likewise
    from oppo.run.train import prepare  # noqa: PLC0415 - likewise

    found = [] if look is None else anyio.run(rehearse_code, look)
    try:
        session = prepare(settings, dry_run=True)
    except OppoError as error:
        return complain(paragraph(error), UNUSABLE)
    console = Console()
    with session:
        if verbose:
            console.out(settings.toml(), session.graph.table(), "", sep="\n", highlight=False)
        console.out(*decided(session), *anyio.run(rehearse, session, found), sep="\n", highlight=False)
    return DONE


def resume(
    run: Path,
    /,
    *,
    override: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = (),
    ray: Annotated[str | None, Parameter(show_default=False)] = None,
    accept_changed_code: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Go on with a run from its newest checkpoint, half-written responses included.

    Args:
        run: The run directory.
        override: Change one setting of those that may change: section.key=value. Can be repeated.
        ray: The Ray cluster, if its address is another one now, or, unless the run is deterministic, there was none.
            Sets placement.cluster.
        accept_changed_code: Go on with the file of the reward function as it is now, though the run began with another.
    """
    from oppo.run.checkpoint import settings_of  # noqa: PLC0415 - `oppo --help` should be quick

    settings = settings_of(run, in_cluster(override, ray))
    return carry_out(settings, resume=True, accept_changed_code=accept_changed_code)


def in_cluster(overrides: Sequence[str], address: str | None) -> Sequence[str]:
    return overrides if address is None else [*overrides, f"placement.cluster={address}"]


def carry_out(settings: Settings, *, resume: bool = False, accept_changed_code: bool = False) -> int:
    from oppo.run.train import FINAL, prepare, run  # noqa: PLC0415 - `oppo --help` should be quick

    try:
        session = prepare(settings, resume=resume, accept_changed_code=accept_changed_code)
    except RunComplete as error:
        note(str(error))
        return DONE
    except OppoError as error:
        return complain(paragraph(error), UNUSABLE)
    console, directory = Console(), nearby(settings.run_directory)
    try:
        with session:
            try:
                made = anyio.run(partial(run, session, console, last_resort=leave)).made
            except HangError as error:
                leave(error)
            except Exception as error:
                if session.checkpoints.sealed:
                    error.add_note(f"go on with `oppo resume {directory}`")
                raise
    except KeyboardInterrupt as error:  # reported once the models' threads are done: they may be saving
        complete = ended(settings.run_directory)
        if complete is None:
            final = settings.run_directory / FINAL
            saved = f"what was learned is in {nearby(final)}" if final.exists() else "nothing was saved"
            advice = f"go on with `oppo resume {directory}`" if session.checkpoints.sealed else ""
            summary = "; ".join(filter(None, (interrupted(error), saved, advice)))
            return complain("\n".join([summary, *getattr(error, "__notes__", ())]), code_of(error))
        made = complete
    planned = settings.run.steps
    early = f" after {made} of {planned} steps, with the end of the data" if made < planned else ""
    console.out(f"done{early}: {directory}/report.html", highlight=False)
    return DONE


def doctor(
    config: Path,
    /,
    *,
    override: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = (),
    ray: Annotated[str | None, Parameter(show_default=False)] = None,
    assume: Annotated[str | None, Parameter(show_default=False)] = None,
    trial: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Show where each model of a run goes and the memory it will need there; ends with code 2 if that is too much.

    Args:
        config: The settings, as of `oppo train`.
        override: Change one setting: section.key=value, the value as in TOML. Can be repeated.
        ray: A Ray cluster, as of `oppo train`.
        assume: Check the run for such machines in place of this one: 8xH100-80GB, 1x24GB of any kind, or 2x8xH100-80GB
            for two of them. Without [placement], layouts that fit are proposed, as settings to paste.
        trial: Load the models too and make one step, with all responses as long as they may be; save nothing.
    """
    if trial and assume:
        raise ConfigError("--trial makes a step on this machine, and --assume is about another: leave one of them out")
    from oppo.config.load import load_settings  # noqa: PLC0415 - `oppo --help` should be quick
    from oppo.simulate.profile import Hardware  # noqa: PLC0415 - likewise

    machines = Hardware.assumed(assume) if assume else None
    settings, console = load_settings(config, in_cluster(override, ray)), Console()
    from oppo.run.rewards import first_look  # noqa: PLC0415 - likewise

    first_look(settings)  # before torch
    gc.disable()  # importing torch and transformers makes many objects and no garbage: a fifth of the time
    from oppo.run.deployment import Deployment  # noqa: PLC0415 - likewise
    from oppo.run.doctor import attempt, examine  # noqa: PLC0415 - likewise
    from oppo.run.engines import require_engines  # noqa: PLC0415 - likewise

    gc.freeze()
    gc.enable()
    deployment = Deployment.of(settings, machines)
    require_engines(deployment)
    found = examine(deployment)
    console.out(*map(harmless, found.lines()), sep="\n", highlight=False)
    if found.faults:
        return UNUSABLE
    if trial:
        console.out("", *map(harmless, attempt(settings)), sep="\n", highlight=False)
    return DONE


def simulate(
    profile: Path | None = None,
    /,
    *,
    run: Annotated[Path | None, Parameter(name="--from")] = None,
    override: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = (),
    layout: Annotated[Literal["shared", "split"] | None, Parameter(show_default=False)] = None,
    staleness: float = 1.25,
    precise: Annotated[bool, Parameter(negative=())] = False,
    steps: Annotated[int | None, Parameter(show_default=False)] = None,
    seeds: Annotated[int | None, Parameter(show_default=False)] = None,
    json: Path | None = None,
) -> int:
    """Say what each schedule would take: for a run that has finished, or for hardware as a TOML file describes it.

    Args:
        profile: The file that describes hardware, models and lengths; docs/schedules.md says more.
        run: The directory of a run that has finished, instead of a profile: its measurements are simulated.
        override: Change one setting of the profile: section.key=value, the value as in TOML. Can be repeated.
        layout: Of a run: whether decoding, scoring and training share the cores or the device (shared, unless given),
            or have their own (split).
        staleness: The most updates between a token and its training, on average, of a schedule that is recommended.
        precise: Simulate until the speeds are known to half a percent, which takes minutes, not to 2%.
        steps: Steps of each simulated run, of which the first half does not count: 6 to 24, by the batch, unless given;
            at least 16 where as many are deferred as pay.
        seeds: Runs of each schedule, with other lengths: as many as the intervals need unless given.
        json: Write the figures to this file too.
    """
    if steps is not None:
        require_whole("--steps", steps, 6, error=ConfigError)
    if seeds is not None:
        require_whole("--seeds", seeds, 1, error=ConfigError)
    if precise and seeds is not None:
        raise ConfigError("--precise says how many seeds there are, so --seeds beside it has no effect: leave one out")
    require_real("--staleness", staleness, 0.0, error=ConfigError)
    if (profile is None) == (run is None):
        raise ConfigError("oppo simulate needs either a profile, `oppo simulate profile.toml`, or `--from` and a run")
    if run is not None and override:
        raise ConfigError("--set changes a profile; a run is simulated as it was measured")
    if profile is not None and layout is not None:
        raise ConfigError("--layout says what shared the devices of a run (--from); a profile says so in [layout]")
    if json is not None:
        _require_place("--json", json)
    from oppo.run.simulation import of_profile, of_run  # noqa: PLC0415 - `oppo --help` should be quick
    from oppo.simulate.study import WIDTH, advice, as_json, legend, table  # noqa: PLC0415 - likewise

    simulation = of_run(run, layout or "shared") if run is not None else of_profile(profile or Path(), override)
    found = simulation.run(steps=steps, seeds=seeds, precise=precise)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if verdict := simulation.verdict(found):
        console.print(f"{verdict}\n", highlight=False)
    console.print(table(found))
    console.print(f"\n{legend(found)}\n\n{advice(found, staleness)}", highlight=False, markup=False)
    if json is not None:
        put(json, [as_json(found, staleness)])
    return DONE


def convert_config(
    source: Path,
    config: Path = Path("config.toml"),
    /,
    *,
    kind: Annotated[
        Literal["ppo", "grpo", "rloo", "sdpo", "verl", "openrlhf"] | None, Parameter(show_default=False)
    ] = None,
    override: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = (),
) -> int:
    """Write the settings that a configuration of TRL, verl or OpenRLHF becomes, and name what has no setting here.

    Args:
        source: A Python script that calls PPOConfig, GRPOConfig, RLOOConfig or SDPOConfig, a YAML file, or a shell
            script with the arguments of TRL's scripts, of verl or of OpenRLHF. It is read, not run.
        config: The settings file to write.
        kind: Of a file whose fields leave it open: TRL's ppo, grpo, rloo or sdpo, verl, or openrlhf.
        override: Give one setting: section.key=value, such as a model or a file that the source does not name. Can be
            repeated.
    """
    from oppo.config.convert import convert  # noqa: PLC0415 - `oppo --help` should be quick

    if config.exists():
        raise ConfigError(f"{config} is there already: name another file to write, or remove it")
    _require_place("CONFIG", config)
    converted = convert(source, kind=kind, overrides=override)
    put(config, [converted.text])
    for line in converted.lines():
        note(line)
    converted.check(config)
    Console().out(f"written: {config}; `oppo train {config} --dry-run` loads and checks everything", highlight=False)
    return DONE


def report(*runs: Path, live: Annotated[bool, Parameter(negative=(), show_default=False)] = False) -> int:
    """Write the page of a run, report.html; of several runs one that compares them, comparison.html beside the first.

    Args:
        runs: The run directories, of runs that go on too.
        live: Serve the page to browsers of this machine, and follow the runs; Ctrl-C ends it.
    """
    from oppo.report.page import Follower, write_report  # noqa: PLC0415 - `oppo --help` should be quick
    from oppo.report.run_reader import recorded  # noqa: PLC0415 - likewise

    if not runs:
        raise ConfigError("oppo report needs the directory of a run: `oppo report runs/first`")
    found, console = [recorded(run) for run in runs], Console()
    for run in found:
        for problem in run.problems:
            note(f"{run.path}: {problem}")
    if not live:
        console.out(f"written: {write_report(found)}", highlight=False)
        return DONE
    with Follower(runs) as server:
        try:
            console.out(f"following at {server.address}; Ctrl-C ends it", highlight=False)
            server.serve_forever()
        except KeyboardInterrupt as error:
            if code_of(error) != INTERRUPTED:
                raise
    return DONE


def push(
    run: Path,
    repo: str,
    /,
    *,
    private: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    dry_run: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Push a run's policy to the Hugging Face hub, with a model card of its base, data, settings, scores and versions.

    Args:
        run: The run directory, of a run that has ended.
        repo: The repository: owner/name. It is made if it is not there.
        private: Make it a private one.
        dry_run: Write the card into the run directory only.
    """
    from oppo.run.push import push as pushed  # noqa: PLC0415 - `oppo --help` should be quick

    Console().out(f"written: {pushed(run, repo, private=private, dry_run=dry_run)}", highlight=False)
    return DONE


def demo(
    *,
    short: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    seed: int = 0,
    engine: Literal["transformers", "vllm"] = "transformers",
    directory: Path = Path("runs"),
) -> int:
    """Make a small policy and reward model, train with PPO, and show what changed; needs no network.

    Args:
        short: The quick version: smaller models, fewer steps.
        seed: Seed of models, prompts, sampling and training.
        engine: What decodes the policy's responses while it is trained; vllm must be installed: docs/engines.md.
        directory: The folder that holds runs.
    """
    require_whole("--seed", seed, 0, error=ConfigError)
    Console().out("oppo demo: making a small language model, then training it with streamed PPO", highlight=False)
    from oppo.demo.run import demo as run_demo  # noqa: PLC0415 - torch takes seconds to import

    run_demo(directory, short=short, seed=seed, engine=engine)
    return DONE


def _require_place(name: str, path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{name} names a file to write in a directory that is there, and {path} is none")


def interrupted(error: KeyboardInterrupt) -> str:
    return f"interrupted by {error}" if isinstance(error, Stopped) and error.by != signal.SIGINT else "interrupted"


def code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + error.by if isinstance(error, Stopped) else INTERRUPTED
    if isinstance(error, NothingTrained):
        return UNTRAINED
    return UNUSABLE if isinstance(error, ConfigError | DataError | ModelRefused) else FAILED


def complain(text: str, code: int) -> int:
    Console(stderr=True).out(harmless(text), highlight=False)
    return code


def note(message: str) -> None:
    Console(stderr=True).out(harmless(message), style="dim", highlight=False)


def leave(error: HangError) -> NoReturn:
    """End the process at once: a thread that hangs is never waited for, as an orderly exit would."""
    try:
        complain(paragraph(error), FAILED)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(FAILED)


def paragraph(error: BaseException) -> str:
    return "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])
