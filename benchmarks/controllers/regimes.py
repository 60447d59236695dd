"""The simulation: eight workloads on two engines, and their costs. Nothing here was measured on a device.

Seven devices hold actor, critic and reference, and decode side by side; one holds the reward model. The reference and
the critic read a step's rollouts after the cut, on the actor's devices. FLOPs are 2 N a token and 4 L d a token and
token of context, at the stated part of a peak of 989 TFLOP/s; training is four forward passes an epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PEAK = 989e12
DEVICES = 7


@dataclass(frozen=True, slots=True)
class Model:
    """The size of a transformer."""

    parameters: float
    layers: int
    width: int

    def prefix_flops(self, start: int, stop: int) -> float:
        """Return what reading positions ``start .. stop`` costs."""
        count = stop - start
        return 2 * self.parameters * count + 2 * self.layers * self.width * count * (start + stop)


MODELS = {
    "3B": Model(3.09e9, 36, 2048),
    "7B": Model(7.62e9, 28, 3584),
    "70B": Model(70.6e9, 80, 8192),
}


@dataclass(frozen=True, slots=True)
class Engine:
    """How fast models run.

    Attributes:
        launch: seconds below which no decode step falls, by actor.
        weights: seconds a decode step needs to read the weights, by actor.
        row: seconds for each live row.
        context: seconds for each token of context of the live rows.
        padded: whether forward passes are padded to the longest row.
        reading, forward, training: reached fraction of the peak.
        call: seconds of one call of the reward model.
        overhead, publish: seconds a step.
    """

    launch: dict[str, float]
    weights: dict[str, float]
    row: dict[str, float]
    context: dict[str, float]
    padded: bool
    reading: float
    forward: float
    training: float
    call: float
    overhead: float
    publish: float


ENGINES = {
    "modern": Engine(
        launch={"3B": 0.0, "7B": 0.0},
        weights={"3B": 4.0e-3, "7B": 5.8e-3},
        row={"3B": 3.5e-5, "7B": 5e-5},
        context={"3B": 2.2e-8, "7B": 3.3e-8},
        padded=False,
        reading=0.40,
        forward=0.40,
        training=0.45,
        call=0.012,
        overhead=2.0,
        publish=0.5,
    ),
    "plain": Engine(
        launch={"3B": 0.070, "7B": 0.056},
        weights={"3B": 2.5e-3, "7B": 4.5e-3},
        row={"3B": 1e-4, "7B": 1e-4},
        context={"3B": 3.7e-7, "7B": 5.8e-7},
        padded=True,
        reading=0.12,
        forward=0.25,
        training=0.30,
        call=0.03,
        overhead=10.0,
        publish=2.0,
    ),
}
"""``modern``: a serving engine that decodes; ``plain``: ``generate`` in a loop bound by launches, padded passes."""


@dataclass(frozen=True, slots=True)
class Regime:
    """A workload.

    Attributes:
        reward: size of the reward model; ``None``: a rule that costs nothing.
        median: of the lengths, at the beginning and at the end of the run; they are lognormal.
        sigma: spread of their logarithm.
        cap: the longest response.
        runaways: fraction of the responses that run to the cap regardless of the lognormal.
    """

    name: str
    actor: str
    reward: str | None
    batch: int
    prompt: int
    median: tuple[float, float]
    sigma: float
    cap: int
    epochs: int = 2
    runaways: float = 0.0

    def lengths(self, count: int, seed: int) -> NDArray[np.int64]:
        """Return the lengths of the responses to ``count`` prompts, in tokens."""
        random = np.random.default_rng(seed)
        first, last = self.median
        median = first + (last - first) * np.linspace(0, 1, count)
        drawn = np.clip((median * np.exp(self.sigma * random.standard_normal(count))).astype(np.int64), 1, self.cap)
        return np.where(random.random(count) < self.runaways, self.cap, drawn)


REGIMES = (
    Regime("SE-7B", "7B", "7B", 112, 250, (300, 450), 0.80, 4096),
    Regime("SE-3B", "3B", "7B", 112, 250, (350, 600), 0.85, 4096),
    Regime("GSM8K-7B", "7B", None, 112, 120, (250, 200), 0.45, 2048, runaways=0.004),
    Regime("code-3B", "3B", "7B", 112, 200, (350, 500), 0.75, 2048),
    Regime("capped", "7B", None, 112, 200, (1600, 1600), 0.80, 4096),
    Regime("long-16k", "7B", "7B", 32, 300, (4500, 6500), 0.70, 16384),
    Regime("train-bound", "7B", "7B", 112, 500, (150, 150), 0.40, 512, epochs=4),
    Regime("score-bound", "7B", "70B", 112, 250, (300, 450), 0.80, 4096),
)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a regime on an engine in seconds; lengths are of responses, in tokens."""

    regime: Regime
    engine: Engine
    grain: int = 8
    chunk: int = 256

    @property
    def call(self) -> float:
        """Seconds of one call of the reward model."""
        return self.engine.call

    @property
    def publish(self) -> float:
        """Seconds until the weights have arrived."""
        return self.engine.publish

    def decoding(self, rows: int, context: float, steps: int) -> float:
        """Return the seconds of ``steps`` decode steps of ``rows`` live rows with ``context`` tokens at the start."""
        actor, engine = self.regime.actor, self.engine
        filled = (context + rows * steps / 2) / DEVICES
        step = engine.weights[actor] + engine.row[actor] * rows / DEVICES + engine.context[actor] * filled
        return steps * max(engine.launch[actor], step)

    def reading(self, start: int, stop: int) -> float:
        """Return the seconds in which the reward model reads positions ``start .. stop`` of a row."""
        if self.regime.reward is None:
            return 0.0
        return MODELS[self.regime.reward].prefix_flops(start, stop) / (PEAK * self.engine.reading)

    def forward(self, lengths: NDArray[np.int64]) -> float:
        """Return the seconds in which the reference and the critic read whole rows."""
        return self._passes(lengths) / (DEVICES * PEAK * self.engine.forward)

    def training(self, lengths: NDArray[np.int64]) -> float:
        """Return the seconds of an update of actor and critic."""
        passes = 4 * self.regime.epochs * self._passes(lengths)
        return passes / (DEVICES * PEAK * self.engine.training) + self.engine.overhead

    def _passes(self, lengths: NDArray[np.int64]) -> float:
        rows = self.regime.prompt + lengths
        if self.engine.padded:
            rows = np.full_like(rows, rows.max(initial=0))
        actor = MODELS[self.regime.actor]
        return 2 * math.fsum(actor.prefix_flops(0, int(row)) for row in rows)
