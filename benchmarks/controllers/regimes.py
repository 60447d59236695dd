"""The simulation: eight workloads on two engines, and their costs. Nothing here was measured on a device.

Seven devices hold actor, critic and reference, and decode side by side; one holds the reward model. The reference and
the critic read a step's rollouts after the cut, on the actor's devices. FLOPs are 2 N a token and 4 L d a token and
token of context, at the stated part of a peak of 989 TFLOP/s; training is four forward passes an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from oppo.simulate.costs import (
    GPUS,
    MODELS,
    TRAINED_PASSES,
    Decoder,
    Lognormal,
    Reader,
    ScorerName,
    System,
    Updater,
    Workload,
)

PEAK = GPUS["h200"].flops
DEVICES = 7

SIZES = {"3B": MODELS["qwen2.5-3b"], "7B": MODELS["qwen2.5-7b"], "70B": MODELS["llama-3.1-70b"]}


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

    @property
    def workload(self) -> Workload:
        """What is trained."""
        lengths = Lognormal(median=self.median, sigma=self.sigma, cap=self.cap, runaways=self.runaways)
        return Workload(batch=self.batch, lengths=lengths, cap=self.cap, prompt=self.prompt)


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


def system(regime: Regime, engine: Engine) -> System:
    """Return the costs of a regime on an engine; the seven replicas of the actor decode equal shares of every row."""
    size, actor = SIZES[regime.actor], regime.actor
    readers: dict[ScorerName, Reader] = {
        name: Reader(
            passes=size.passes(DEVICES * PEAK * engine.forward),
            streams=False,
            padded=engine.padded,
            device="actor",
            place="forward",
        )
        for name in ("reference", "critic")
    }
    if regime.reward is not None:
        reading = SIZES[regime.reward].passes(PEAK * engine.reading)
        readers["reward"] = Reader(passes=reading, call=engine.call)
    return System(
        decoder=Decoder(
            floor=engine.launch[actor],
            step=engine.weights[actor],
            row=engine.row[actor] / DEVICES,
            context=engine.context[actor] / DEVICES,
        ),
        readers=readers,
        updater=Updater(
            passes=size.passes(DEVICES * PEAK * engine.training, 2 * TRAINED_PASSES * regime.epochs),
            fixed=engine.overhead,
            padded=engine.padded,
            publish=engine.publish,
        ),
    )
