"""The first code that vLLM's processes run: the plugin that the entry point ``vllm.general_plugins`` names.

It registers our weight transfers in every one of them, a server's included. The rest it does only in processes
that a :class:`~oppo.vllm.VllmEngine` has started, which it knows by :data:`PARENT` in their environment.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from oppo.placement.child import die_with

if TYPE_CHECKING:
    import torch

PARENT: Final = "OPPO_VLLM_PARENT"  # environment variable: id of the process that started the engine
LOG: Final = "OPPO_VLLM_LOG"  # environment variable: the file for what the engine's processes write
LIFELINE: Final = "OPPO_VLLM_LIFELINE"  # environment variable of a server: the pipe whose writer it does not outlive

# In :mod:`oppo.vllm.sync_worker`.
TRANSFERS: Final[Mapping[str, str]] = {"file": "FileTransfer", "ipc": "HandleTransfer", "nccl": "BroadcastTransfer"}

SPIN: Final = 0.002  # seconds for which a reader spins before it sleeps: most messages come sooner
RECHECK: Final = 5  # milliseconds after which a reader that waits for a message looks again


def register() -> None:
    """Detach an engine's process from the terminal, and have each die with its parent; vLLM calls it several times."""
    register_transfers()
    parent = os.environ.get(PARENT)
    if parent is None or int(parent) == os.getpid():
        return
    from vllm.platforms import current_platform  # noqa: PLC0415 - an extra

    if current_platform.is_cpu():  # beside a GPU nothing else needs the core, and a wake-up is longer than a step
        spin_briefly()
    end_with_parent()
    if starter() == int(parent):
        leave_terminal()
        if lifeline := os.environ.get(LIFELINE):
            die_with(int(lifeline))


def starter() -> int:
    # Unlike the id of its parent it stays when that has ended.
    started = multiprocessing.parent_process()
    return os.getppid() if started is None or started.pid is None else started.pid


def transfer_of(backend: str) -> str:
    return f"oppo-{backend}"


def register_transfers() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: PLC0415 - an extra

    for backend, name in TRANSFERS.items():
        with suppress(ValueError):  # it is registered already
            WeightTransferEngineFactory.register_engine(transfer_of(backend), "oppo.vllm.sync_worker", name)


def spin_briefly() -> None:
    # As shipped the engine's processes spin for a second while they wait for one another, on a core that the trainer
    # may need. Without any spin decoding with a small model takes a half longer, since waking up takes milliseconds. A
    # sleeping reader can also miss the notice of a message, and would look again after five seconds.
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 - an extra

    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK
    initialise = shm_broadcast.SpinCondition.__init__

    def spinning_briefly(self: Any, *arguments: Any, **keywords: Any) -> None:
        initialise(self, *arguments, **keywords)
        self.busy_loop_s = min(self.busy_loop_s, SPIN)

    if initialise.__name__ != spinning_briefly.__name__:
        shm_broadcast.SpinCondition.__init__ = spinning_briefly


def leave_terminal() -> None:
    # A Ctrl-C of the terminal is for the run, which ends the engine.
    with suppress(PermissionError):  # it leads a session already
        os.setsid()
    if log := os.environ.get(LOG):
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


def end_with_parent() -> None:
    """Kill this process when the one that started it is dead, if ``multiprocessing`` did; safe to call repeatedly."""
    # It has left its child the end to read of a pipe, and holds the other end as long as the child lives.
    started = multiprocessing.parent_process()
    if started is not None and isinstance(lifeline := started.sentinel, int):
        die_with(lifeline)


class LogitsOfPrompts:
    """An extension of vLLM's workers: logits of the ids that may be sampled, at a temperature."""

    model_runner: Any

    def oppo_temper(self, temperature: float, vocabulary: int) -> None:
        """Divide logits by a temperature, and leave out the ids from ``vocabulary`` on, from now on."""
        model = self.model_runner.model
        plain = getattr(model, "oppo_plain_logits", model.compute_logits)
        model.oppo_plain_logits = plain

        def compute_logits(*given: Any, **named: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = plain(*given, **named)
            if logits is not None:  # which one worker of several has
                logits[..., vocabulary:] = -float("inf")
                logits = logits / temperature
            return logits

        model.compute_logits = compute_logits
