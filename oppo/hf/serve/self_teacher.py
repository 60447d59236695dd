"""The policy as its own teacher: its current weights, or their average, behind another prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from oppo.events import FloatArray, Support
from oppo.hf.loading import Loadable, worker_maker
from oppo.hf.serve.scorers import Following, ReferenceWorker, ScorerWorker, TeacherWorker
from oppo.hf.weights import copies
from oppo.models import Sampling, Weights
from oppo.placement import Hosting, Make
from oppo.returns import TopLogprobs


class SelfTeacher(Following[FloatArray | TopLogprobs]):
    """The policy as its own teacher, with its current weights: log-probs as of :class:`TeacherLogprobs`.

    Behind the policy's own prompt it has nothing to teach: see :class:`oppo.scorers.BehindPrompt`.

    Args:
        model: the actor, which may be the module that decodes; or how it is loaded, with its adapters.
        top_k: ids at each token; ``None``: the log-probs of tokens alone, as of :class:`ReferenceLogprobs`.
        sampling, place, deterministic: as for :class:`ReferenceLogprobs`.

    Raises:
        ConfigError: there are fewer ids than ``top_k``.
    """

    _part = "actor"

    def __init__(
        self,
        model: Loadable,
        *,
        sampling: Sampling,
        place: Hosting,
        top_k: int | None = None,
        deterministic: bool = False,
    ) -> None:
        make: Make[ScorerWorker[Any]] = (
            worker_maker(ReferenceWorker, model, deterministic, sampling)
            if top_k is None
            else worker_maker(TeacherWorker, model, deterministic, sampling, top_k)
        )
        super().__init__(make, model, place, extra=(Support,))


class AveragedTeacher(SelfTeacher):
    """The policy as its own teacher, with an exponential moving average of its weights.

    After each update the average is ``(1 - rate) average + rate policy`` (Hübotter et al. 2026, arXiv 2601.20802), of
    the weights that the policy computes with: of adapters, the average of what they add, not of their matrices. It is
    in float32, beside the served model, and a part of the state of a run.

    Args:
        model: a causal LM of the policy's shape, without adapters, that nothing else serves; or how it is loaded.
        start: the policy's weights at the start, under the names of a model without adapters, as
            :meth:`oppo.models.Weights.standalone` returns them.
        rate: above 0, at most 1.
        others: as for :class:`SelfTeacher`.
    """

    def __init__(self, model: Loadable, start: Mapping[str, object], *, rate: float, **others: Any) -> None:
        super().__init__(model, **others)
        self._rate = rate
        self._added = 0
        floats = dict[int, Tensor]()  # a tensor with two names is averaged once
        self._average = {
            name: floats.setdefault(value.data_ptr(), value.detach().float().clone())
            for name, value in start.items()
            if isinstance(value, Tensor)
        }
        self._distinct = dict({id(value): (name, value) for name, value in self._average.items()}.values())

    async def copied(self, weights: Weights) -> Weights:
        """Return a copy of the average with these weights."""
        await self._add(weights)
        return Weights(weights.version, actor=await anyio.to_thread.run_sync(copies, self._average))

    async def load(self, weights: Weights) -> None:
        """Serve the average with these weights from the next call on; each version is added once."""
        await self._add(weights)
        newest = weights.version == self._added
        await self._follow(self._average if newest else weights.actor, weights.version)

    def state_dict(self) -> Mapping[str, object]:
        """Return the average, float32, and the version of the newest weights in it."""
        average = {name: each.cpu().numpy().copy() for name, each in self._distinct.items()}
        return {"version": self._added, "average": average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; they are served from the next :meth:`load` on."""
        for name, value in state["average"].items():
            self._average[name].copy_(torch.from_numpy(value))
        self._added = int(state["version"])

    async def _add(self, weights: Weights) -> None:
        if weights.version > self._added:
            await anyio.to_thread.run_sync(self._lerp, weights.standalone)
            self._added = weights.version

    @torch.no_grad()
    def _lerp(self, standalone: Callable[[], Mapping[str, object]]) -> None:
        given = standalone()
        for name, average in self._distinct.items():
            average.lerp_(cast("Tensor", given[name]).detach().to(average), self._rate)
