"""Where the models of a run work, and on which share of the cores.

The actor decodes with half of the cores; reward, reference and critic take turns with the rest; the update, which
nothing runs beside, has them all: each in a thread or in a process. Checkpoints are put together in one more thread,
which computes nothing. On a GPU each thread has a stream of its own. The counts are the same whatever the schedule and
the places, so runs can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch

from oppo.errors import ConfigError
from oppo.hf.cpu import use_cores
from oppo.hf.device import DeviceThread, use_stream
from oppo.placement import Place, Process, Thread

Scorers: TypeAlias = Literal["auto", "thread", "process"]
Home: TypeAlias = Literal["thread", "process"]


class DeviceLayout(NamedTuple):
    """The places of a run; closed together."""

    acting: Place
    scoring: Place
    training: Place
    saving: Thread

    @classmethod
    def of(
        cls,
        cores: int,
        device: torch.device,
        scorers: Scorers,
        tell: Callable[[str], None],
        *,
        policy: Home = "thread",
        trainer: Home = "thread",
        restarts: int = 3,
    ) -> DeviceLayout:
        """Return places that share ``cores``, for models on ``device``.

        ``auto`` is a process wherever scorers can compute beside the actor: on a CPU with two cores or more. There both
        are Python to a good part, and two threads of one interpreter take turns at that. The policy's process is not
        started again: the tokens it was at, and their keys and values, are lost with it.

        Args:
            cores: how many there are.
            device: where the models are.
            scorers: where the scorers work.
            tell: told, in a sentence, of processes that are started.
            policy: where the actor decodes.
            restarts: how many dead processes of the scorers are replaced in an hour.
            trainer: where updates are made; a dead process of the trainer is not replaced.

        Raises:
            ConfigError: a process is asked for, which cannot be given what is on a GPU.
        """
        on_cpu = device.type == "cpu"
        if not on_cpu:
            _require_thread("run.scorers", scorers, device, "'thread' or 'auto'")
            _require_thread("run.policy", policy, device, "'thread'")
            _require_thread("run.trainer", trainer, device, "'thread'")
        if scorers == "auto":
            scorers = "process" if cores > 1 and on_cpu else "thread"
        kind = Thread if on_cpu else DeviceThread
        half, rest = max(1, cores // 2), max(1, cores - cores // 2)
        return cls(
            kind("actor", setup=partial(claim_cores, half, device))
            if policy == "thread"
            else _process("actor", half, tell),
            kind("scorers", setup=partial(claim_cores, rest, device))
            if scorers == "thread"
            else _process("scorers", rest, tell, restarts),
            kind("trainer", setup=partial(claim_cores, cores, device))
            if trainer == "thread"
            else _process("trainer", cores, tell),
            Thread("saver"),
        )

    def wait_until_ready(self) -> None:
        """Return when everything that lives in another process is there: what cannot be is known before a run begins.

        Raises:
            ModelLost: the process died.
            Exception: whatever kept it from starting.
        """
        for process in self._processes():
            process.wait_until_ready()

    def abort(self) -> None:
        """End what hangs in another process, so that what was learned can be saved; safe to call from any thread.

        The trainer's process is ended only if it is at work: otherwise it is needed for saving.
        """
        for process in self._processes():
            if process is not self.training or process.at_work:
                process.abort()

    def _processes(self) -> list[Process]:
        return [place for place in self if isinstance(place, Process)]

    def close(self) -> None:
        """Close each of them after the call in progress; what is being saved needs the trainer until then."""
        for place in reversed(self):
            place.close()


def _require_thread(setting: str, chosen: str, device: torch.device, expected: str) -> None:
    if chosen == "process":
        raise ConfigError(
            f"{setting} = 'process' shares weights with a process, which is for a CPU, and the models are on {device}: "
            f"expected {setting} = {expected}"
        )


def _process(name: str, cores: int, tell: Callable[[str], None], restarts: int = 0) -> Process:
    tell(f"starting the process of the {name}")
    return Process(name, setup=partial(use_cores, cores), restarts=restarts, tell=tell)


def claim_cores(cores: int, device: torch.device) -> None:
    """Let this thread compute on so many cores, and on the device in a stream of its own."""
    use_cores(cores)
    use_stream(device)
