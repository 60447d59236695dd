"""A training step that somebody has already, as a trainer: a function of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from oppo.errors import ModelError
from oppo.events import Batch
from oppo.models import Trained, Weights
from oppo.placement import Thread
from oppo.publishing import Publisher

TrainStep: TypeAlias = Callable[[Batch], Mapping[str, float] | None]
"""Trains on a batch, in place; returns metrics by name, or nothing."""


class Module(Protocol):
    """What has weights: a ``torch.nn.Module``, for example."""

    def state_dict(self) -> Mapping[str, object]:
        """Return the tensors by name; they lie in the module's own memory."""


class FunctionTrainer(Publisher):
    """A training step as a :class:`oppo.models.Trainer`.

    Optimizer and schedule stay the function's own; so do checkpoints of them.

    Args:
        step: trains on a batch, in place, and returns metrics or nothing.
        actor: the module that it trains, which the policy serves, or has a copy of.
        critic: the value model that it trains; ``None`` without one.
        thread: where the function is called; ``None``: on the event loop, where everything else waits for it.

    Attributes:
        version: the number of updates made so far.

    Example:
        >>> class Nothing:
        ...     def state_dict(self):
        ...         return {}
        >>> FunctionTrainer(lambda batch: {"loss/policy_avg": 0.0}, Nothing()).version
        0
    """

    def __init__(
        self, step: TrainStep, actor: Module, critic: Module | None = None, *, thread: Thread | None = None
    ) -> None:
        self.version = 0
        self._step = step
        self._actor = actor
        self._critic = critic
        self._thread = thread

    async def update(self, batch: Batch) -> Trained:
        """Train on one batch; one without a rollout is passed over.

        Raises:
            ModelError: the function returned something else than metrics.
            Exception: whatever it raised.
        """
        metrics: Mapping[str, float] | None = {}
        if len(batch):
            metrics = self._step(batch) if self._thread is None else await self._trained(self._thread, batch)
        self.version += 1
        try:
            return Trained({name: float(value) for name, value in dict(metrics or {}).items()})
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"a training step returns metrics, a mapping from names to numbers, or nothing; got {metrics!r:.200}"
            ) from error

    async def _trained(self, thread: Thread, batch: Batch) -> Mapping[str, float] | None:
        return await thread.call("update", self._step, batch)

    def weights(self) -> Weights:
        """Return the current weights by reference."""
        critic = {} if self._critic is None else self._critic.state_dict()
        return Weights(self.version, self._actor.state_dict(), critic)
