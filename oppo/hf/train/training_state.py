"""The state from which training resumes, as one safetensors file: trained parameters and the optimizer's moments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from oppo.durable import writing
from oppo.errors import CheckpointError, one_line
from oppo.hf.train.optimisation import Optimisation
from oppo.hf.train.sharding import alike, whole
from oppo.hf.train.team import Team

_FILE = "trainer.safetensors"
_PARAMETER = "parameter"
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_STEP = "step"
"""The one state of AdamW that has not the parameter's shape."""


def gather_training(optimisation: Optimisation, team: Team) -> dict[str, Tensor]:
    """Return every trained parameter and its state in the optimizer, whole, on the CPU; other ranks than 0 get none.

    All ranks call it. No rank's device holds more than one of the gathered tensors at a time.
    """
    gathered = dict[str, Tensor]()
    for name, parameter in optimisation.named_weights().items():
        for kind, tensor in {_PARAMETER: parameter, **optimisation.optimizer.state[parameter]}.items():
            each = whole(tensor)
            if not team.rank:
                gathered[f"{kind}/{name}"] = each.cpu().contiguous()
    return gathered


def write_training(directory: Path, tensors: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
    """Write what :func:`gather_training` returned, and counts, of updates for example.

    Raises:
        OSError: the file cannot be written.
    """
    with writing(directory / _FILE):
        save_file(dict(tensors), directory / _FILE, metadata={name: str(count) for name, count in counts.items()})


@torch.no_grad()
def read_training(directory: Path, optimisation: Optimisation, team: Team) -> dict[str, int]:
    """Restore parameters and optimizer in place; return the counts.

    Only rank 0 reads the file, which other machines may lack.

    Raises:
        CheckpointError: the file cannot be read, or was written of other parameters; nothing is changed.
    """
    stored, counts = dict[str, dict[str, Tensor]](), dict[str, int]()
    trained = optimisation.named_weights()

    def read() -> None:
        try:
            with safe_open(directory / _FILE, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - it is no mapping
                    kind, name = key.split("/", 1)
                    stored.setdefault(name, {})[kind] = file.get_tensor(key)
                texts = (file.metadata() or {}).items()
                counts.update({name: int(count) for name, count in texts if count.isdecimal()})
            theirs = {name: kinds[_PARAMETER] for name, kinds in stored.items()}
        except Exception as error:  # safetensors raises errors of its own, and a tensor may be missing
            raise CheckpointError(f"{directory / _FILE} cannot be read: {one_line(error)}") from error
        _require_alike(directory / _FILE, trained, theirs)

    team.once(read)
    shapes = team.first(
        {
            name: {kind: (tuple(each.shape), str(each.dtype)) for kind, each in kinds.items()}
            for name, kinds in stored.items()
        }
    )
    for name, parameter in trained.items():
        given = {
            kind: team.broadcast(stored[name].pop(kind) if stored else torch.empty(shape, dtype=_DTYPES[dtype]))
            for kind, (shape, dtype) in shapes[name].items()
        }
        parameter.copy_(alike(given.pop(_PARAMETER), parameter))
        optimisation.optimizer.state[parameter] = {
            kind: tensor.to(parameter.device) if kind == _STEP else alike(tensor, parameter)
            for kind, tensor in given.items()
        }
    optimisation.masters.write_back()
    return team.first(counts)


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
