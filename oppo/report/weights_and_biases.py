"""An observer that logs the metrics of each step to Weights & Biases.

It needs the extra ``wandb``: ``pip install 'oppo[wandb]'``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import wandb

from oppo.durable import make, put
from oppo.errors import ConfigError
from oppo.report.metrics import Tracker
from oppo.report.records import Writer

IDENTITY = "run-id"
"""Holds the identity of the run, so that one that is resumed goes on as the same."""


class WeightsAndBiases(Tracker):
    """An observer that logs each step's metrics, under their names in ``metrics.jsonl``; a context manager.

    The environment variables of wandb choose where to: ``WANDB_API_KEY``, ``WANDB_ENTITY``, ``WANDB_MODE=offline``. Of
    a run that goes on, Weights & Biases leaves out steps that it has already. Neither the standard output nor the
    state of the git repository is sent.

    Args:
        path: the folder, which is made, for what wandb keeps in ``wandb`` below it.
        name: of the run.
        project: of the run; when absent, ``WANDB_PROJECT`` or ``oppo``.
        config: settings to show with the run, without secrets.
        mode: ``offline`` keeps everything in the folder, for ``wandb sync``; when absent, ``WANDB_MODE`` or ``online``.
        threaded: log in a thread; otherwise at once, as virtual time needs it.

    Attributes:
        url: where the run is shown; empty when offline.

    Raises:
        ConfigError: the folder cannot be written, the service does not answer, or it refuses the run.

    Example:
        >>> with WeightsAndBiases(Path("runs/first"), name="first") as log:  # doctest: +SKIP
        ...     async with graph.open(prompts, observers=[log]) as run:
        ...         ...
    """

    kept = "the run of Weights & Biases"

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        project: str | None = None,
        config: Mapping[str, object] | None = None,
        mode: Literal["online", "offline"] | None = None,
        threaded: bool = True,
    ) -> None:
        mode = mode or _mode_of_environment()  # wandb reads it once in a process
        try:
            identity = _identity(path / "wandb")
            self._run = wandb.init(
                project=project or os.environ.get("WANDB_PROJECT", "oppo"),
                name=name,
                dir=path,
                id=identity,
                mode=mode,
                resume=None if mode == "offline" else "allow",
                config=dict(config or {}),
                settings=wandb.Settings(console="off", disable_git=True, silent=True, reinit="create_new"),
            )
        except OSError as error:
            raise ConfigError(f"the folder {path} cannot be written: {error.strerror or error}") from error
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases took no run ({type(error).__name__}: {error}): log in with `wandb login`, or set "
                "WANDB_MODE=offline and `wandb sync` it later"
            ) from error
        self.url = self._run.url or ""
        self._writer = Writer(threaded=threaded)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._writer.submit(partial(self._run.log, dict(metrics), step=step))

    def close(self, *, failed: bool = False) -> None:
        """Complete the run, which is then shown as finished or failed.

        Raises:
            Exception: a step could not be logged.
        """
        try:
            self._writer.close()
        finally:
            self._run.finish(exit_code=int(failed))


def _identity(folder: Path) -> str:
    file = folder / IDENTITY
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    make(folder)
    identity = secrets.token_hex(8)
    put(file, [identity + "\n"])
    return identity


def _mode_of_environment() -> Literal["online", "offline"] | None:
    chosen = os.environ.get("WANDB_MODE")
    return "offline" if chosen == "offline" else "online" if chosen == "online" else None
