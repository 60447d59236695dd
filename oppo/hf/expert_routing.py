"""The routers of a mixture of experts: their outputs, router replay, load metrics and the load-balancing loss."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from oppo.errors import ConfigError, ModelError, ModelRefused
from oppo.events import Batch, RoutedExperts
from oppo.hf.model_parts import FAILURES, backbone, has_experts
from oppo.observe import set_to


def routers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    trunk = backbone(model)
    known = (trunk._can_record_outputs or {}).get("router_logits", [])  # noqa: SLF001 - no public name says it
    recorders = known if isinstance(known, list) else [known]
    kinds = {getattr(each, "target_class", each): getattr(each, "index", 1) for each in recorders}
    found = {name: module for name, module in trunk.named_modules() if type(module) in kinds}
    return [(found[name], kinds[type(found[name])]) for name in sorted(found, key=_layer)]


def _layer(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdecimal())


class Route(NamedTuple):
    """The answer of the router of a ``layer``: logits [N, E] and experts, int64 [N, k]; ``None``: it does not say."""

    # own: those that it would have chosen, where others were replayed; -1 where it chose freely

    layer: int
    logits: Tensor
    experts: Tensor | None
    own: Tensor | None = None


_routes: ContextVar[list[Route] | None] = ContextVar("routes", default=None)
_replayed: ContextVar[Tensor | None] = ContextVar("replayed", default=None)


@dataclass(frozen=True)
class _RouterHook:
    # A forward hook that can be pickled. Other threads may serve the model meanwhile: their passes are not recorded,
    # and choose freely.
    layer: int
    index: int

    def __call__(
        self, module: nn.Module, inputs: tuple[object, ...], options: dict[str, object], output: object
    ) -> object:
        found, replayed = _routes.get(), _replayed.get()
        if found is None and replayed is None:
            return output
        logits, experts = self._parts(output)
        own = None
        if replayed is not None:
            replay = _Choose(replayed[self.layer], logits.shape[-1])
            own = self._own(module, experts, replay.chosen)
            with replay:
                output = module.forward(*inputs, **options)
            logits, experts = self._parts(output)
            if not replay.taken:
                raise self._cannot(module, replay.chosen, f"it asked topk for none of {logits.shape[-1]} experts so")
        if found is not None:
            found.append(Route(self.layer, logits, experts, own))
        return output

    def _own(self, module: nn.Module, experts: Tensor | None, chosen: Tensor) -> Tensor:
        if experts is None or experts.shape != chosen.shape:
            said = "it does not say its own" if experts is None else f"its own are {list(experts.shape)}"
            raise self._cannot(module, chosen, said)
        return experts.where(chosen >= 0, -1)

    def _cannot(self, module: nn.Module, chosen: Tensor, why: str) -> ModelError:
        return ModelError(
            f"router {self.layer} ({type(module).__name__}) cannot replay experts {list(chosen.shape)}, tokens and "
            f"choices of each: {why}"
        )

    def _parts(self, output: object) -> tuple[Tensor, Tensor | None]:
        parts = output if isinstance(output, tuple) else (output,) * (self.index + 1)
        logits = cast("Tensor", parts[self.index])
        chosen = [each for each in parts if isinstance(each, Tensor) and each.dtype == torch.int64]
        return logits, next((each for each in chosen if each.ndim == 2 and len(each) == len(logits)), None)


class _Choose(TorchFunctionMode):
    # A router scores all experts, takes the first k by ``topk``, and makes gate weights of what it took: with another
    # choice in place of that one, scores, weights and gradients are the router's own.
    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.taken = False
        self._experts = experts

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in _TOPK or found.indices.shape != self.chosen.shape:
            return found
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._experts:  # of groups of experts
            return found
        self.taken = True
        chosen = self.chosen.where(self.chosen >= 0, found.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


_TOPK: Final = (torch.topk, Tensor.topk)


def record_routers(model: PreTrainedModel) -> None:
    for layer, (module, index) in enumerate(routers(model) if has_experts(model) else ()):
        hook = _RouterHook(layer, index)
        if hook not in module._forward_hooks.values():  # noqa: SLF001 - a copy has it already
            module.register_forward_hook(hook, with_kwargs=True)


@contextmanager
def recorded_routes() -> Iterator[list[Route]]:
    found = list[Route]()
    with set_to(_routes, found):
        yield found
    found.sort(key=lambda route: route.layer)


def replaying(experts: Tensor | None) -> AbstractContextManager[None]:
    """Let routers take these experts, int64 [layers, N, k], in passes of this context; -1 or ``None``: their own."""
    return set_to(_replayed, experts)


def replayed() -> Tensor | None:
    return _replayed.get()


@dataclass(frozen=True, slots=True)
class RouterReplay:
    """Trains with the experts that the policy chose while it decoded ("R3": Ma et al. 2025, arXiv 2510.11370)."""

    # A router that chooses anew may choose others, by rounding or under newer weights, so that importance ratios
    # compare two models. Replayed, its scores, gate weights and gradients still belong to the weights that are trained.
    # A critic on the actor's trunk reads replayed states in an update, while the values of the rollouts came from
    # routers that chose freely.

    layers: tuple[int, ...]
    depth: int
    experts: int
    k: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> RouterReplay:
        record_routers(model)
        names = {module: name for name, module in backbone(model).named_modules()}
        found = [module for module, _ in routers(model)] if has_experts(model) else []
        refused = f"trainer.router_replay = true replays the experts of a mixture, and {type(model).__name__} "
        if not found:
            raise ModelRefused(f"{refused}has no routers that transformers names: set trainer.router_replay = false")
        obeyed = False
        with suppress(*FAILURES, ModelError):
            free = _tried(model, None)
            other = [(route.logits.shape[-1] - 1 - cast("Tensor", route.experts)) for route in free]
            told = _tried(model, torch.stack(other))
            obeyed = all(
                route.experts is not None and (route.experts.is_meta or torch.equal(route.experts, chosen))
                for route, chosen in zip(told, other, strict=True)
            )
        if not obeyed:
            kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in found))
            raise ModelRefused(
                f"{refused}has routers ({kinds}) that do not say whom they choose, or choose otherwise than by topk: "
                "set trainer.router_replay = false"
            )
        layers = [_layer(names[each]) for each in found]
        depth = int(model.config.get_text_config().num_hidden_layers)
        return cls(tuple(layers), depth, free[0].logits.shape[-1], other[0].shape[-1])

    def chosen(self, batch: Batch, rows: Sequence[int], lengths: Sequence[int], *, packed: bool = False) -> Tensor:
        """Return the experts of a pass over rows of these lengths, int64 [layers, ids, k], -1 where there are none."""
        if all(response.extra[RoutedExperts].empty for response in batch.responses):
            raise ConfigError(
                "trainer.router_replay = true replays the experts that the policy chose, and no response of the batch "
                "has any: the policy must give them (HfPolicy and VllmPolicy do with routed_experts=True), or set "
                "trainer.router_replay = false"
            )
        found = np.full((len(rows), max(lengths), len(self.layers), self.k), -1, np.int64)
        for row, response in enumerate(batch.responses[each] for each in rows):
            routed = response.extra[RoutedExperts]
            if routed.empty:
                continue
            ids, positions, start = routed.ids, routed.positions(), len(response.prompt.tokens)
            if ids.shape[1] == self.depth:
                ids = ids[:, self.layers]
            if ids.shape[1:] != found.shape[2:] or ids.max() >= self.experts or positions[0] < -start:
                raise ModelError(
                    f"rollout {response.prompt.rollout} has routed experts {list(routed.ids.shape)} up to "
                    f"{routed.ids.max()}, from position {start + positions[0]} on; expected [n, {len(self.layers)} or "
                    f"{self.depth}, {self.k}], layers and choices of a token, below {self.experts}: is the policy "
                    "another model than the actor that is trained?"
                )
            found[row, start + positions] = ids
        real = np.arange(max(lengths)) < (np.array(lengths)[:, None] if packed else max(lengths))
        return torch.from_numpy(found[np.broadcast_to(real, found.shape[:2])]).transpose(0, 1)


@torch.no_grad()
def _tried(model: PreTrainedModel, experts: Tensor | None) -> list[Route]:
    with replaying(experts), recorded_routes() as routes:
        for layer, (module, index) in enumerate(routers(model)):
            hidden = next(module.parameters()).new_zeros(1, int(model.config.get_text_config().hidden_size))
            _RouterHook(layer, index)(module, (hidden,), {}, module.forward(hidden))
    return routes


class RouteRecords:
    """The experts of the tokens that a model reads, by rows, until they are popped."""

    def __init__(self, replay: RouterReplay) -> None:
        self._layers = [*range(len(replay.layers))]
        self._dtype = torch.uint8 if replay.experts <= 256 else torch.int16
        self._none = np.zeros((0, len(replay.layers), replay.k), np.uint8)
        self._rows: dict[int, list[NDArray[Any]]] = {}

    @contextmanager
    def of(self, rows: Sequence[int], pads: NDArray[np.int64] | None) -> Iterator[None]:
        """Record a pass over these rows; ``pads``: padding tokens before each row, int64 [n]; ``None``: none."""
        with recorded_routes() as routes:
            yield
        called = [route.layer for route in routes]
        if called != self._layers:
            raise ModelError(
                f"one pass called the routers {called}, by layer; expected each of {len(self._layers)} once: set "
                "trainer.router_replay = false"
            )
        experts = torch.stack([cast("Tensor", route.experts) for route in routes], 1).to(self._dtype).cpu().numpy()
        skipped = [0] * len(rows) if pads is None else pads.tolist()
        for row, each, pad in zip(rows, np.split(experts, len(rows)), skipped, strict=True):
            self._rows.setdefault(row, []).append(each[pad:])

    def pop(self, row: int) -> NDArray[Any]:
        return np.concatenate([self._none, *self._rows.pop(row, [])])


@dataclass(frozen=True, slots=True)
class LoadBalancing:
    """The auxiliary loss of the routers as transformers has it (Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6)."""

    # E * sum(f * p): the mean number of times that an expert is among the first k, and its mean probability, over the
    # tokens of a minibatch and all layers, padding left out. f has no gradient, so with f of the whole minibatch the
    # loss is a sum over micro-batches.

    weight: float = 0.0
    experts: int = 0
    k: int = 0

    @classmethod
    def of(cls, actor: PreTrainedModel, weight: float | None) -> LoadBalancing:
        if weight is None:
            asked = getattr(actor.config.get_text_config(), "output_router_logits", False)
            named = [getattr(actor, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef")]
            weight = next((each for each in named if each is not None), None) if asked else 0.0
        if weight == 0:
            return cls()
        modules = [sys.modules[kind.__module__] for kind in type(actor).__mro__]
        loss = next(filter(None, (getattr(each, "load_balancing_loss_func", None) for each in modules)), None)
        taken = ["gate_logits", "num_experts", "top_k", "attention_mask"]
        known = loss is not None and [*inspect.signature(loss).parameters] == taken
        if weight is None or not known or not has_experts(actor):
            raise ModelRefused(
                f"trainer.router_aux_loss, or output_router_logits in the config of {type(actor).__name__}, asks for a "
                "load-balancing loss, and transformers has none for this model: set trainer.router_aux_loss = 0"
            )
        return cls(weight, int(cast("int", actor.num_experts)), int(cast("int", actor.num_experts_per_tok)))

    def choices(self, routes: Sequence[Route], read: Tensor) -> Tensor:
        """Return how often each expert was among the first k, and the number of tokens times layers: int64 [E + 1]."""
        counted = read.flatten().long()
        found = counted.new_zeros(self.experts)
        for route in routes:
            first = route.logits.detach().softmax(-1).topk(self.k, dim=-1).indices
            found.scatter_add_(0, first.flatten(), counted.repeat_interleave(self.k))
        return torch.cat((found, counted.sum()[None] * len(routes)))

    def loss(self, routes: Sequence[Route], read: Tensor, choices: Tensor) -> Tensor:
        """Return the part of a pass in the loss of the minibatch that made these ``choices``: float32, not weighted."""
        counted = read.flatten()[:, None]
        sums = torch.stack([(route.logits.softmax(-1).float() * counted).sum(0) for route in routes]).sum(0)
        share, total = choices[:-1] / choices[-1], choices[-1]
        return self.experts * (share * sums / total).sum()


def expert_loads(routes: Sequence[Route], read: Tensor) -> Tensor | None:
    """Return counts of tokens, without padding, int64 [layers, E + 2]; ``None`` if the routers do not say."""
    # Each expert's tokens, those whose experts were replayed, and of these those with other experts than the router's
    # own.
    counted, loads = read.flatten().long(), list[Tensor]()
    for _, logits, experts, own in routes:
        if experts is not None:
            each = counted.repeat_interleave(experts.shape[-1])
            load = counted.new_zeros(logits.shape[-1]).scatter_add_(0, experts.flatten(), each)
            replayed = other = counted.new_zeros(len(counted))
            if own is not None:
                replayed = counted * (own[:, 0] >= 0)
                other = replayed * (own.sort(-1).values != experts.sort(-1).values).any(-1)
            loads.append(torch.cat((load, replayed.sum()[None], other.sum()[None])))
    return torch.stack(loads) if len({len(each) for each in loads}) == 1 else None


def router_metrics(loads: Tensor) -> dict[str, float]:
    """Return the metrics of counts [layers, E + 2], see :func:`expert_loads`; of loads each is a mean over layers."""
    loads, (replayed, other) = loads[:, :-2], loads[:, -2:].sum(0).tolist()
    share, experts = loads.double() / loads.sum(1, keepdim=True), loads.shape[1]
    entropy = -torch.special.xlogy(share, share).sum(1).mean()
    metrics = {
        "router/max_load": float(share.max(1).values.mean()) * experts,
        "router/load_entropy": float(entropy) / math.log(experts),
    }
    return {**metrics, "router/replay_mismatch": other / replayed} if replayed else metrics
