"""What a model's process is told first, so that it computes as the tests' own process does; importable by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

import oppo.hf.train.trainer
from oppo.events import Batch
from oppo.hf.devices import use_cores
from oppo.hf.kv.prefill import IncrementalPrefill, ReadState
from oppo.hf.train.packing import MicroBatch, pack
from oppo.losses import Input, Inputs, LossValue, PPOLoss

ONE = partial(use_cores, 1)  # computes on one core
SEGMENT_BYTES = 2048  # rows of the suite's tiny models are segmented as those of real ones are
CHUNK = 4 * 96 * 7  # bytes of the logits of seven tokens of the suite's tiny models


def set_up() -> None:
    use_cores(1)
    pytest.MonkeyPatch().setattr("oppo.hf.kv.attention.SEGMENT_BYTES", SEGMENT_BYTES)


AT = {"extend": 7, "finish": 2}  # at which call of its kind, in one process, it dies


def deadly(folder: Path) -> None:
    """Let this process die when it has done half of a call, unless ``folder`` says that one has died so before."""
    torch.set_num_threads(1)
    advance, calls = IncrementalPrefill._advance, dict.fromkeys(AT, 0)

    def dying(reader: IncrementalPrefill, sessions: Sequence[ReadState], *, final: bool) -> None:
        kind = "finish" if final else "extend"
        calls[kind] += 1
        mark = folder / kind
        if calls[kind] >= AT[kind] and not mark.exists():
            advance(reader, sessions[: (len(sessions) + 1) // 2], final=final)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        advance(reader, sessions, final=final)

    pytest.MonkeyPatch().setattr(IncrementalPrefill, "_advance", dying)


@dataclass(frozen=True)
class Pausing(PPOLoss):
    """A loss that says on one named pipe that it has been asked for once, and waits for the other to be written."""

    begun: Path = Path()
    go_on: Path = Path()

    def __call__(self, inputs: Inputs) -> LossValue:
        if self.begun.exists():
            self.begun.write_text("begun")
            self.begun.unlink()
            self.go_on.read_text()
        return super().__call__(inputs)


def deadly_update(folder: Path, call: int) -> None:
    """Let this process die in the middle of an update, at a micro-batch; ``folder`` tells that it has."""
    torch.set_num_threads(1)
    calls: list[int] = []

    def dying(
        batch: Batch, rows: Sequence[int], device: torch.device, asked: Collection[Input], *, packed: bool
    ) -> MicroBatch:
        calls.append(1)
        if len(calls) == call:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return pack(batch, rows, device, asked, packed=packed)

    pytest.MonkeyPatch().setattr(oppo.hf.train.trainer, "pack", dying)
