"""``oppo`` as a program of its own on vLLM, and every process that it started, by a mark in their environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self
from uuid import uuid4

from transformers import LlamaConfig

from oppo.vllm.processes import TRACKER
from tests.hf import tiny
from tests.kit import workplace

MARK = "OPPO_TEST_PROGRAM"


def furnish(folder: Path) -> Path:
    """Fill a folder with everything a run on vLLM needs, and return it; the actor has heads that its kernels take."""
    workplace.furnish(folder)
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tiny.LONGEST,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    tiny.of(config, seed=1).save_pretrained(folder / "actor")
    with (folder / "config.toml").open("a") as file:
        file.write("[vllm]\nmax_num_seqs = 8\n")
    return folder


class Program:
    """``oppo`` in a session of its own, so that a signal to its group reaches what a Ctrl-C in a terminal reaches.

    Args:
        arguments: of the command line.
        folder: where it works, and where what it says is written.
        before: Python that the process runs first.
    """

    def __init__(self, arguments: list[str], folder: Path, *, before: str = "") -> None:
        self._mark = uuid4().hex
        self._said = folder / f"said-{self._mark}"
        code = f"import sys\n{before}\nfrom oppo.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        script = folder / f"program-{self._mark}.py"  # a file, as what is spawned imports the main module
        script.write_text(code)
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, str(script), *arguments],
                cwd=folder,
                env={**os.environ, MARK: self._mark},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """Everything it has said so far, on either stream."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def until(self, message: str, seconds: float = 300) -> None:
        """Wait until it has said ``message``."""
        deadline = time.monotonic() + seconds
        while message not in self.said:
            assert self._process.poll() is None, self.said
            assert time.monotonic() < deadline, f"never said {message!r}:\n{self.said}"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, and nobody else."""
        self._process.send_signal(number)

    def interrupt(self) -> None:
        """Press Ctrl-C: every process of the terminal's group gets the signal."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait(self, seconds: float = 300) -> int:
        """Return its exit code."""
        return self._process.wait(seconds)

    @property
    def pids(self) -> dict[int, str]:
        """The processes that are left of it, itself included, with their names."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
            except OSError:  # it has ended meanwhile
                continue
        return found

    @property
    def spawned(self) -> bool:
        """Whether one of its processes was spawned for the engine."""
        lines = [Path(f"/proc/{pid}/cmdline") for pid in self.pids]
        return any(b"spawn_main" in line.read_bytes() for line in lines if line.exists())

    def leaves_nothing(self, seconds: float = 10) -> bool:
        """Return whether no process of it is left, soon after its end."""
        deadline = time.monotonic() + seconds
        while self.pids and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.pids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.pids:
            with suppress(OSError):  # it has ended meanwhile
                # The tracker removes shared memory, and ends by itself.
                if TRACKER.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(30)
