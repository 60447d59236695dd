"""The optimizer, the float32 copies of 16-bit weights on which it steps, and the file from which training resumes.

Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982) orthogonalises the momentum of a whole matrix, with updates
as large as AdamW's. Of a sharded matrix each rank gathers weights and momentum, one matrix at a time, makes the same
update, and keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from oppo.atomic_files import writing
from oppo.errors import CheckpointError, ConfigError, one_line
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.ranks import Team, alike, whole
from oppo.training import TrainerSettings


class MasterWeights:
    """The parameters that an optimizer steps on: float32 copies of those with fewer bits, the others themselves."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._copies = {
            parameter: nn.Parameter(parameter.detach().float())
            for parameter in parameters
            if parameter.dtype.itemsize < torch.float32.itemsize
        }

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._copies.get(parameter, parameter)

    @torch.no_grad()
    def collect(self) -> None:
        # Gradients are added to the copies' gradients, and cleared.
        for parameter, master in self._copies.items():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        for parameter, master in self._copies.items():
            parameter.copy_(master)

    def clear(self) -> None:
        # The optimizer clears the gradients of the copies.
        for parameter in self._copies:
            parameter.grad = None


LIKE_ADAMW = "match_rms_adamw"
_BUFFER = "momentum_buffer"


def matrices(models: Sequence[PreTrainedModel]) -> Iterator[nn.Parameter]:
    for model in models:
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        apart = filter(None, [*tables, model.get_output_embeddings(), getattr(model, "score", None)])
        others = {id(each) for module in apart for each in module.parameters()}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.ndim == 2 and ".lora_" not in name and id(parameter) not in others:
                yield parameter


class Muon(torch.optim.Muon):
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # untyped
        for group in self.param_groups:
            for shard in group["params"]:
                if isinstance(shard, DTensor) and shard.grad is not None:
                    self._step_of_shard(shard, shard.grad, group)
        loss: float | None = super().step(closure)  # type: ignore[no-untyped-call]
        return loss

    def _step_of_shard(self, shard: DTensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        momentum, state = group["momentum"], self.state[shard]
        if _BUFFER not in state:
            state[_BUFFER] = torch.zeros_like(gradient)
        buffer = state[_BUFFER].lerp_(gradient, 1 - momentum)
        matrix = nn.Parameter(whole(shard).clone())
        matrix.grad = whole(gradient.lerp(buffer, momentum) if group["nesterov"] else buffer)
        options = {name: value for name, value in group.items() if name in self.defaults}
        torch.optim.Muon([matrix], **{**options, "momentum": 0.0, "nesterov": False}).step()
        shard.copy_(alike(matrix.detach(), shard))
        shard.grad = None  # the rest of the step is of whole matrices


class MuonAndAdamW(torch.optim.Optimizer):
    """Both as one optimizer, of groups of parameters that are ``matrices`` and of ``others``."""

    def __init__(self, matrices: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], **options: Any) -> None:
        self._parts = [
            Muon(matrices, adjust_lr_fn=LIKE_ADAMW),
            torch.optim.AdamW(others, fused=True, **options),
        ]
        super().__init__([*matrices, *others], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # untyped
        for part in self._parts:
            part.step()
        return None if closure is None else closure()


class Optimisation:
    """An optimizer through accelerate, on float32 copies of 16-bit weights; it clips each model's gradient apart."""

    def __init__(self, models: ActorCritic, settings: TrainerSettings) -> None:
        self._max_grad_norm = settings.max_grad_norm
        # Models and batches stay on the actor's device; accelerate would choose one for the whole process.
        # Only a plugin takes precedence over the environment, and nothing but an update accumulates gradients here.
        self._accelerator = Accelerator(
            device_placement=False,
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        trained = models.trained()
        self.masters = MasterWeights(parameter for part in trained for parameter in part)
        self.weights = [[self.masters.of(parameter) for parameter in part] for part in trained]
        self._held: dict[nn.Parameter, Tensor] = {}
        self._matrices = set[nn.Parameter]()
        if settings.optimizer == "muon":
            self._matrices = {self.masters.of(each) for each in matrices(models.pretrained)}
            if not self._matrices:
                raise ConfigError(
                    "trainer.optimizer = 'muon' is of matrices of layers, and none is trained: adapters, embeddings "
                    "and heads have AdamW; leave optimizer out"
                )
        optimizer = _optimizer(settings, self.weights, self._matrices)
        self.models, self.optimizer = self._accelerator.prepare(models, optimizer)

    def scale(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor

    def require_every_step(self) -> None:
        # accelerate's state is the process's: another Accelerator may divide losses or skip steps.
        steps, synchronised = self._accelerator.gradient_accumulation_steps, self._accelerator.sync_gradients
        if steps != 1 or not synchronised:
            raise ConfigError(
                f"accelerate accumulates gradients over {steps} steps{'' if synchronised else ', and makes none now'}: "
                "expected 1, and each one made. Its state is shared in a process: give every other Accelerator "
                "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1), or train in another process"
            )

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)
        self.masters.collect()

    def is_finite(self) -> bool:
        finite = [_local(grad).isfinite().all() for grad in self._gradients().values()]
        return not finite or bool(torch.stack(finite).all())  # one answer of the device, not one for each gradient

    def hold(self) -> None:
        for weight, grad in self._gradients().items():
            held = self._held.get(weight)
            self._held[weight] = grad if held is None else held.add_(grad)
            weight.grad = None

    def release(self, factor: float) -> None:
        for weight, grad in self._held.items():
            weight.grad = grad.mul_(factor)
        self.forget()

    def forget(self) -> None:
        self._held = {}

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        return {weight: weight.grad for part in self.weights for weight in part if weight.grad is not None}

    def clip(self) -> tuple[float, ...]:
        # each model's apart
        return tuple(float(self._accelerator.clip_grad_norm_(part, self._max_grad_norm)) for part in self.weights)

    def step(self) -> None:
        self.optimizer.step()
        self.masters.write_back()

    def clear(self) -> None:
        self.optimizer.zero_grad()
        self.masters.clear()

    def named_weights(self) -> dict[str, nn.Parameter]:
        named = self.models.named_parameters()
        return {name: self.masters.of(parameter) for name, parameter in named if parameter.requires_grad}


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _optimizer(
    settings: TrainerSettings, weights: Sequence[Sequence[nn.Parameter]], by_muon: AbstractSet[nn.Parameter]
) -> torch.optim.Optimizer:
    # Only matrices decay.
    rate, critic_rate = settings.learning_rate, settings.critic_learning_rate
    rates = rate, rate if critic_rate is None else critic_rate
    groups: list[dict[str, Any]] = [
        {"params": parameters, "lr": peak, "peak": peak, "weight_decay": decay}
        for part, peak in zip(weights, rates, strict=False)
        for parameters, decay in (
            ([each for each in part if each in by_muon], settings.weight_decay),
            ([each for each in part if each.ndim >= 2 and each not in by_muon], settings.weight_decay),
            ([each for each in part if each.ndim < 2], 0.0),
        )
        if parameters
    ]
    if not by_muon:
        return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)
    first = [group for group in groups if group["params"][0] in by_muon]
    others = [group for group in groups if group["params"][0] not in by_muon]
    return MuonAndAdamW(first, others, betas=settings.betas, eps=settings.eps)


_FILE = "trainer.safetensors"
_PARAMETER = "parameter"
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_STEP = "step"  # the one state that has not the parameter's shape


def gather_training(optimisation: Optimisation, team: Team) -> dict[str, Tensor]:
    """Return every trained parameter and its state in the optimizer, whole, on the CPU; other ranks than 0 get none."""
    # All ranks call it. No rank's device holds more than one of the gathered tensors at a time.
    gathered = dict[str, Tensor]()
    for name, parameter in optimisation.named_weights().items():
        for kind, tensor in {_PARAMETER: parameter, **optimisation.optimizer.state[parameter]}.items():
            each = whole(tensor)
            if not team.rank:
                gathered[f"{kind}/{name}"] = each.cpu().contiguous()
    return gathered


def write_training(directory: Path, tensors: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
    with writing(directory / _FILE):
        save_file(dict(tensors), directory / _FILE, metadata={name: str(count) for name, count in counts.items()})


@torch.no_grad()
def read_training(directory: Path, optimisation: Optimisation, team: Team) -> dict[str, int]:
    # Only rank 0 reads the file, which other machines may lack. Nothing is changed where it does not fit.
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
