"""Gradients of one step, taken by several threads with one torch thread each.

The threads wait for one another once a step. Torch's own intra-op threads would do so within every operator, which is
slower for models this small, and many times slower when something else wants a core.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

import torch

from oppo.hf.cpu import use_cores

M = TypeVar("M", bound=torch.nn.Module)


class Shares(Generic[M]):
    """A model and replicas that share its weights but not its gradients, each with its share of a step's rows.

    What is computed depends on the number of shares only, not on that of threads.

    Args:
        model: gets the gradients; only its optimizer may change the weights, and in place.
        shares: parts that a step is cut into.
        threads: how many parts are worked on at once.
    """

    def __init__(self, model: M, *, shares: int, threads: int) -> None:
        self.model = model
        self._replicas = [model, *(copy.deepcopy(model) for _ in range(shares - 1))]
        for replica in self._replicas[1:]:
            for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
                own.data = shared.data
        self._pool = ThreadPoolExecutor(threads, "oppo-demo", initializer=use_cores, initargs=(1,))

    def backward(self, losses: Sequence[Callable[[M], torch.Tensor]]) -> float:
        """Set the gradient of the sum of the losses, one for each share; return that sum.

        Raises:
            ValueError: there are more or fewer losses than shares.
        """
        if len(losses) != len(self._replicas):
            raise ValueError(f"{len(self._replicas)} shares need as many losses, not {len(losses)}")
        for replica in self._replicas:
            replica.zero_grad()
        values = list(self._pool.map(_backward, self._replicas, losses))
        for replica in self._replicas[1:]:
            for total, part in zip(self.model.parameters(), replica.parameters(), strict=True):
                if total.grad is not None and part.grad is not None:
                    total.grad.add_(part.grad)
        return sum(values)

    def __enter__(self) -> Shares[M]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _backward(model: M, loss: Callable[[M], torch.Tensor]) -> float:
    value = loss(model)
    value.backward()
    return value.item()
