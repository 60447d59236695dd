"""Where the models of a run work, and on which share of the cores.

The actor decodes in a thread or a process of its own with half of the cores; reward, reference and critic take turns in
another thread, or in a process, with the rest; the update, which nothing runs beside, has them all. On a GPU each
thread has a stream of its own. The counts are the same whatever the schedule and the places, so runs can be compared
bit for bit.
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

Policy: TypeAlias = Literal["thread", "process"]
Scorers: TypeAlias = Literal["auto", "thread", "process"]


class Places(NamedTuple):
    """The places of a run; closed together."""

    acting: Place
    scoring: Place
    training: Thread

    @classmethod
    def of(
        cls,
        cores: int,
        device: torch.device,
        scorers: Scorers,
        tell: Callable[[str], None],
        *,
        policy: Policy = "thread",
        restarts: int = 3,
    ) -> Places:
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

        Raises:
            ConfigError: a process is asked for, which cannot be given what is on a GPU.
        """
        on_cpu = device.type == "cpu"
        for setting, asked, others in (
            ("run.scorers", scorers, "'thread' or 'auto'"),
            ("run.policy", policy, "'thread'"),
        ):
            if asked == "process" and not on_cpu:
                raise ConfigError(
                    f"{setting} = 'process' shares weights with a process, which is for a CPU, and the models are on "
                    f"{device}: expected {setting} = {others}"
                )
        if scorers == "auto":
            scorers = "process" if cores > 1 and on_cpu else "thread"
        kind = Thread if on_cpu else DeviceThread
        half, rest = max(1, cores // 2), max(1, cores - cores // 2)
        return cls(
            kind("actor", setup=partial(settle, half, device))
            if policy == "thread"
            else _process("actor", "policy's", half, tell),
            kind("scorers", setup=partial(settle, rest, device))
            if scorers == "thread"
            else _process("scorers", "scorers'", rest, tell, restarts),
            kind("trainer", setup=partial(settle, cores, device)),
        )

    def settle(self) -> None:
        """Return when everything that lives in another process is there: what cannot be is known before a run begins.

        Raises:
            ModelLost: the process died.
            Exception: whatever kept it from starting.
        """
        for process in self._processes():
            process.settle()

    def abort(self) -> None:
        """End what hangs in another process, so that what was learned can be saved; safe to call from any thread."""
        for process in self._processes():
            process.abort()

    def _processes(self) -> list[Process]:
        return [place for place in self if isinstance(place, Process)]

    def close(self) -> None:
        """Close each of them after the call in progress."""
        for place in self:
            place.close()


def _process(name: str, whose: str, cores: int, tell: Callable[[str], None], restarts: int = 0) -> Process:
    tell(f"starting the {whose} process")
    return Process(name, setup=partial(use_cores, cores), restarts=restarts, tell=tell)


def settle(cores: int, device: torch.device) -> None:
    """Let this thread compute on so many cores, and on the device in a stream of its own."""
    use_cores(cores)
    use_stream(device)
