"""What tests ask of a trainer in every rank; importable by name."""

from __future__ import annotations

import operator
import os
import signal
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from oppo.errors import ModelError, one_line
from oppo.events import Batch
from oppo.hf.loading import ModelRecipe
from oppo.hf.meta_device import LiveBytes
from oppo.hf.train.actor_critic import ActorCriticRecipe
from oppo.hf.train.optim import Optimisation, gather_training
from oppo.hf.train.packing import units
from oppo.hf.train.ranks import Ranked, Replicas, whole
from oppo.hf.train.trainer import HfTrainerCore, MakesCore
from oppo.losses import Inputs, LossValue, PPOLoss, Whole
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.training import TrainerSettings
from tests.hf import tiny


def gradient(core: HfTrainerCore, batch: Batch) -> dict[str, NDArray[np.float32]]:
    rows = units(batch, core.loss.unit)
    everyone = list(chain.from_iterable(rows))
    size = Whole.of(batch, everyone, cap=100)
    for part in core._own_parts(batch, rows):
        core.backward(part, core.outputs(part), size)
    core._team.sum_gradients(chain.from_iterable(core.optimisation.weights))
    found = {
        name: whole(weight.grad).numpy().copy()
        for name, weight in core.optimisation.named_weights().items()
        if weight.grad is not None
    }
    core.optimisation.clear()
    return found


def parts_of_gradient(core: HfTrainerCore, batch: Batch) -> list[dict[str, NDArray[np.float32]]]:
    """Return the gradients of a batch's micro-batches one by one, as of one minibatch, and leave none behind."""
    rows = units(batch, core.loss.unit)
    size, found = Whole.of(batch, list(chain.from_iterable(rows)), cap=100), []
    for part in core._own_parts(batch, rows):
        core.backward(part, core.outputs(part), size)
        named = core.optimisation.named_weights().items()
        found.append({name: weight.grad.numpy().copy() for name, weight in named if weight.grad is not None})
        core.optimisation.clear()
    return found


def loaded(folder: Path, sampling: Sampling, settings: TrainerSettings, shard: bool) -> HfTrainerCore:
    """Return a trainer of the models in a folder, as a rank on another machine makes it."""
    actor, critic = ModelRecipe(path=str(folder / "actor")), ModelRecipe(path=str(folder / "critic"), kind="scalar")
    recipe = ActorCriticRecipe(actor=actor, critic=critic)
    replicas = Replicas(shard=shard, recipe=recipe, loaded=True)
    return tiny.apart(MakesCore(recipe, sampling, settings, PPOLoss(), TrainerCounts.new(), replicas))()


def packing(core: HfTrainerCore, batch: Batch) -> list[float]:
    assert core.optimisation
    mine = torch.zeros(core._team.size)
    mine[core._team.rank] = core._packs(batch)
    found: list[float] = core._team.sum(mine).tolist()
    return found


def local_bytes(core: HfTrainerCore) -> tuple[int, int, int, int]:
    """Return the bytes of the trained module's parameters and optimizer states, in this rank and whole."""
    parameters = list(core._models.parameters())
    states = [each for state in core.optimisation.optimizer.state.values() for each in state.values()]
    here = [sum(_local(each).nbytes for each in tensors) for tensors in (parameters, states)]
    there = [sum(each.nbytes for each in tensors) for tensors in (parameters, states)]
    return here[0], here[1], there[0], there[1]


def gathered_bytes(core: HfTrainerCore) -> list[list[float]]:
    """Return of each rank the most bytes alive while a checkpoint is gathered, and those it keeps."""
    with LiveBytes() as live:
        kept = gather_training(core.optimisation, core._team)
    mine = torch.zeros(core._team.size, 2, dtype=torch.float64)
    mine[core._team.rank] = torch.tensor([live.peak, sum(each.nbytes for each in kept.values())])
    found: list[list[float]] = core._team.sum(mine).tolist()
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


@dataclass(frozen=True)
class FailsOnce(PPOLoss):
    """A loss that raises in every rank at its first call there, unless that has been done before."""

    mark: Path = Path()

    def __call__(self, inputs: Inputs) -> LossValue:
        mark = self.mark / str(torch.distributed.get_rank())
        if not mark.exists():
            mark.touch()
            raise ValueError("no loss today")
        return super().__call__(inputs)


def deadly(folder: Path) -> None:
    """Let rank 1 die in its second update, before the optimizer step; ``folder`` says that it has."""
    torch.set_num_threads(1)
    clip, clips = Optimisation.clip, []

    def dying(optimisation: Optimisation) -> tuple[float, ...]:
        clips.append(1)
        if len(clips) == 2 and torch.distributed.get_rank() == 1:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return clip(optimisation)

    pytest.MonkeyPatch().setattr(Optimisation, "clip", dying)


def blind() -> None:
    """Let no rank but the first open a checkpoint, as on a machine that has none."""
    torch.set_num_threads(1)

    def refusing(file: Path, framework: str) -> object:
        if torch.distributed.get_rank():
            raise FileNotFoundError(file)
        return safe_open(file, framework=framework)

    pytest.MonkeyPatch().setattr("oppo.hf.train.optim.safe_open", refusing)


class Talkers:
    """A member of ranks that exchanges values, and knows where the process listens."""

    def __init__(self) -> None:
        self.team: Ranked | None = None

    def join(self, rank: int, size: int, meeting: str) -> None:
        self.team = Ranked(rank, size, meeting, torch.device("cpu"))

    def exchange(self) -> tuple[list[object], set[str], str]:
        """Return what the ranks agreed on, the addresses that rank 0 listens at, and what rank 1 heard of an error."""
        assert self.team is not None
        late = self.team.rank > 0
        texts: tuple[object, ...] = ({"a": [1, [2.5, None, "\u20ac"]]} if late else {}, [], "" if late else "b")
        said = [self.team.first(text) for text in texts]
        heard = ""
        try:
            self.team.once(partial(operator.truediv, 1, 0))
        except (ZeroDivisionError, ModelError) as error:
            heard = one_line(error)
        heard = self.team.first(heard if self.team.rank else "")
        here = [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
        return said, {each.laddr.ip for each in here}, heard
