"""What makes an update stop, or its process die, in the middle of its work; importable by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import oppo.hf.train.trainer
from oppo.events import Batch
from oppo.hf.train.packing import MicroBatch, pack
from oppo.losses import Input, Inputs, LossValue, PPOLoss


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


def deadly(folder: Path, call: int) -> None:
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
