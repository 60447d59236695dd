"""The options of ``python -m benchmarks``."""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, TypeAlias

from cyclopts import Parameter

from benchmarks.ladder.workloads import Scorers
from oppo.errors import ConfigError

Flag: TypeAlias = Annotated[bool, Parameter(negative=(), show_default=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options as they were written.

    Attributes:
        workload: paper, train-bound, rule-reward, balanced, capped, several with commas between them, or all; smoke
            measures nothing and shows that everything runs.
        layout: split (each side on a core of its own), shared (all cores for the running side), or all;
            a GPU is always shared.
        modes: serial, rollout, chunk, overcommit, fixed, adaptive, lookahead, lookahead+adaptive, several with commas
            between them, or all.
        against: run every mode as this commit does, too, in the same rounds.
        peer: compare with another program too: trl (make bench-peer installs it).
        steps: PPO steps of each mode in a round.
        rounds: rounds that count, after the warm-up.
        warm_up: PPO steps of each mode before the first round; an adaptive controller needs 8.
        json: write the results to this file.
        plot: write a picture of the ladder to this file.
        engine: measure what a chunk costs the engine instead.
        decoding: measure our decoder beside generate instead.
        scorers: the place of reward, reference and critic: a thread beside the actor's, or a process of their own.
        device: of the models; on a GPU they are large and have random weights, and lengths are scripted.
        actor: on a GPU, the size of the actor: 0.5b or 1.5b.
        policy: the engine that serves the actor: transformers, or vllm where that is installed.
        cache: the folder of workloads, which are made once.
    """

    workload: str = "paper"
    layout: str = "all"
    modes: str = "serial,rollout,chunk,fixed,adaptive"
    against: str | None = None
    peer: str | None = None
    steps: int = 3
    rounds: int = 5
    warm_up: int = 8
    json: Path | None = None
    plot: Path | None = None
    engine: Flag = False
    decoding: Flag = False
    scorers: Scorers = "process"
    device: str = "cpu"
    actor: str = "0.5b"
    policy: str = "transformers"
    cache: Path | None = None

    def keep(self, results: object) -> None:
        """Write results as JSON, if ``json`` names a file."""
        if self.json is not None:
            self.json.write_text(dumps(results, indent=2) + "\n", encoding="utf-8")

    def require_writable(self) -> None:
        """Check that the files of results can be written; make their folders.

        Raises:
            ConfigError: one cannot be written.
        """
        for option, file in (("--json", self.json), ("--plot", self.plot)):
            if file is None:
                continue
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                before = file.exists()
                file.open("a").close()
                if not before:
                    file.unlink()
            except OSError as error:
                raise ConfigError(
                    f"{option}: {file} cannot be written, so nothing is measured: {error.strerror or error}; name a "
                    "file in a folder that is yours"
                ) from error
