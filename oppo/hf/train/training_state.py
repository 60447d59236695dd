"""What training needs to go on elsewhere, as one safetensors file: trained parameters and the optimizer's moments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from oppo.durable import writing
from oppo.errors import CheckpointError

FILE = "trainer.safetensors"
PARAMETER = "parameter"


def write_training(
    directory: Path,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    counts: Mapping[str, int],
) -> None:
    """Write every trained parameter, what the optimizer knows of it, and counts that belong to both.

    Args:
        directory: gets the file.
        trained: what the optimizer steps on, by the names of the parameters it stands for.
        optimizer: their moments.
        counts: of updates, for example.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {
        f"{kind}/{name}": tensor.detach().contiguous()
        for name, parameter in trained.items()
        for kind, tensor in {PARAMETER: parameter, **optimizer.state[parameter]}.items()
    }
    with writing(directory / FILE):
        save_file(tensors, directory / FILE, metadata={name: str(count) for name, count in counts.items()})


@torch.no_grad()
def read_training(
    directory: Path, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, int]:
    """Put what was written into the parameters and the optimizer, in place; return the counts.

    Raises:
        CheckpointError: it was written of other parameters; nothing has changed then.
    """
    stored = dict[str, dict[str, Tensor]]()
    with safe_open(directory / FILE, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            kind, name = key.split("/", 1)
            stored.setdefault(name, {})[kind] = file.get_tensor(key)
        counts: dict[str, str] = file.metadata() or {}
    _require_alike(directory / FILE, trained, {name: kinds[PARAMETER] for name, kinds in stored.items()})
    for name, parameter in trained.items():
        parameter.copy_(stored[name].pop(PARAMETER))
        optimizer.state[parameter] = {kind: tensor.to(parameter.device) for kind, tensor in stored[name].items()}
    return {name: int(count) for name, count in counts.items() if count.isdecimal()}


def _require_alike(file: Path, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name in sorted(ours.keys() | theirs.keys()):
        mine, stored = (_shape(tensors.get(name)) for tensors in (ours, theirs))
        if mine != stored:
            raise CheckpointError(
                f"{file} was written of other models: it has {stored} as {name!r}, this run trains {mine}; resume with "
                "the models and adapters that were trained"
            )


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
