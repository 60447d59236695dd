"""The places of a run's models, and their shares of the CPU cores.

The actor decodes on half of the cores; reward, reference and critic take turns on the rest; the update, which runs
alone, has all of them. Each of the three is a thread or a process. One more thread writes checkpoints and computes
nothing. On a GPU each thread has a stream of its own. The core counts are the same for every schedule and every choice
of places, so that runs can be compared bit for bit.
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

Home: TypeAlias = Literal["thread", "process"]
Scorers: TypeAlias = Literal["auto"] | Home


class DeviceLayout(NamedTuple):
    """The places of a run."""

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

        Args:
            cores: how many there are.
            device: of the models.
            scorers: place of the scorers. ``auto`` is a process on a CPU with two cores or more, where scorers can
                compute beside the actor: both spend much of their time in Python, which threads of one interpreter
                cannot do in parallel.
            tell: told, in a sentence, of processes that are started.
            policy: place of the actor. A dead process is not replaced: its rows, and their keys and values, are lost.
            trainer: place of the updates; a dead process is not replaced.
            restarts: how many dead processes of the scorers are replaced in an hour.

        Raises:
            ConfigError: a process is chosen for models on a GPU, whose memory is not shared.
        """
        on_cpu = device.type == "cpu"
        for setting, home in {"scorers": scorers, "policy": policy, "trainer": trainer}.items():
            if home == "process" and not on_cpu:
                expected = "'thread' or 'auto'" if setting == "scorers" else "'thread'"
                raise ConfigError(
                    f"run.{setting} = 'process' shares weights with a process, which is for a CPU, and the models are "
                    f"on {device}: expected run.{setting} = {expected}"
                )
        if scorers == "auto":
            scorers = "process" if cores > 1 and on_cpu else "thread"

        def place(name: str, home: Home, share: int, restarts: int = 0) -> Place:
            setup = partial(claim_cores, share, device)
            if home == "thread":
                return Thread(name, setup=setup) if on_cpu else DeviceThread(name, setup=setup)
            tell(f"starting the process of the {name}")
            return Process(name, setup=setup, restarts=restarts, tell=tell)

        return cls(
            place("actor", policy, acting_share(cores)),
            place("scorers", scorers, max(1, cores - cores // 2), restarts),
            place("trainer", trainer, cores),
            Thread("saver"),
        )

    def wait_until_ready(self) -> None:
        """Return when all processes have received their models, so that their errors come before the run begins.

        Raises:
            ModelLost: the process died.
            Exception: whatever kept it from starting.
        """
        for process in self._processes():
            process.wait_until_ready()

    def abort(self) -> None:
        """Kill processes whose calls may hang, so that what was learned can be saved; safe to call from any thread.

        The trainer's process is killed only during a call: saving needs it.
        """
        for process in self._processes():
            if process is not self.training or process.at_work:
                process.abort()

    def _processes(self) -> list[Process]:
        return [place for place in self if isinstance(place, Process)]

    def close(self) -> None:
        """Close each place after its call in progress; the saver first, since saving needs the trainer."""
        for place in reversed(self):
            place.close()


def acting_share(cores: int) -> int:
    """Return how many of ``cores`` decode, be it in the actor's place or in an engine's processes."""
    return max(1, cores // 2)


def claim_cores(count: int, device: torch.device) -> None:
    """Let the calling thread compute on ``count`` cores, and on ``device`` in a stream of its own."""
    use_cores(count)
    use_stream(device)
