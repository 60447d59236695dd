"""A roofline: what models cost on GPUs that are known by their data sheets only.

With N parameters, L layers, width d, keys and values of width w in each layer, in 16 bits::

    forward pass, a token             2 N                    FLOP
    attention, a pair of tokens       4 L d                  FLOP
    weights read by a decode step     2 N                    bytes
    keys and values of a token        4 L w                  bytes
    update, an epoch                  4 forward passes       forward, forward again, twice as much backward

A pass takes its FLOP over the reached share of the peak, divided by the number of devices. A decode step of one replica
takes the sum of what it reads, what it computes and what it starts, which overlaps in part, so the sum is an upper
bound::

    step     2 N / (bandwidth * reading) + layer * L        the weights; launching a layer's kernels
    row      2 N / (FLOP/s * computing) + row               matrices; sampling, bookkeeping
    context  4 L w / (bandwidth * attention)                keys and values
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias

from annotated_types import Gt, Le

from oppo.declared import NonNegative, Positive, PositiveCount, require_declared, required, setting
from oppo.errors import ConfigError
from oppo.simulate.system import Decoder, Passes

Share: TypeAlias = Annotated[float, Gt(0), Le(1)]

TRAINED_PASSES: Final = 4
"""Forward passes' worth of an epoch, with activations computed again for the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by its data sheet.

    Attributes:
        flops: dense FLOP/s in bfloat16.
        bandwidth: of its memory, bytes/s.
        memory: bytes.
    """

    flops: Positive = required("dense FLOP/s in bfloat16")
    bandwidth: Positive = required("of its memory, bytes/s")
    memory: Positive = required("bytes")

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)


GPUS: Final[Mapping[str, Gpu]] = MappingProxyType(
    {
        "a100-40gb": Gpu(flops=312e12, bandwidth=1.555e12, memory=40e9),
        "a100-80gb": Gpu(flops=312e12, bandwidth=2.039e12, memory=80e9),
        "b200": Gpu(flops=2250e12, bandwidth=8.0e12, memory=180e9),
        "h100": Gpu(flops=989e12, bandwidth=3.35e12, memory=80e9),
        "h200": Gpu(flops=989e12, bandwidth=4.8e12, memory=141e9),
        "l4": Gpu(flops=121e12, bandwidth=0.3e12, memory=24e9),
        "l40s": Gpu(flops=362e12, bandwidth=0.864e12, memory=48e9),
        "mi300x": Gpu(flops=1307e12, bandwidth=5.3e12, memory=192e9),
        "rtx-4090": Gpu(flops=165e12, bandwidth=1.008e12, memory=24e9),
    }
)
"""SXM versions where there are several; FLOP/s without sparsity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The size of a dense decoder.

    Attributes:
        parameters: N.
        layers: L.
        width: d, of the hidden states.
        cached: w, the width of the keys, and of the values, of a layer: heads for keys and values times their width.
    """

    parameters: Positive = required("their number")
    layers: PositiveCount = required("their number")
    width: PositiveCount = required("of the hidden states")
    cached: PositiveCount = required("width of a layer's keys: heads for keys and values times their width")

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)

    @property
    def cache(self) -> float:
        """Bytes of keys and values for each token."""
        return 4.0 * self.layers * self.cached

    def passes(self, speed: float, times: float = 1.0) -> Passes:
        """Return the seconds of so many forward passes at ``speed`` FLOP/s."""
        return Passes(token=times * 2 * self.parameters / speed, pair=times * 4 * self.layers * self.width / speed)


MODELS: Final[Mapping[str, Transformer]] = MappingProxyType(
    {
        "llama-3.1-8b": Transformer(parameters=8.03e9, layers=32, width=4096, cached=1024),
        "llama-3.1-70b": Transformer(parameters=70.6e9, layers=80, width=8192, cached=1024),
        "qwen2.5-0.5b": Transformer(parameters=0.494e9, layers=24, width=896, cached=128),
        "qwen2.5-1.5b": Transformer(parameters=1.54e9, layers=28, width=1536, cached=256),
        "qwen2.5-3b": Transformer(parameters=3.09e9, layers=36, width=2048, cached=256),
        "qwen2.5-7b": Transformer(parameters=7.62e9, layers=28, width=3584, cached=512),
        "qwen2.5-14b": Transformer(parameters=14.8e9, layers=48, width=5120, cached=1024),
        "qwen2.5-32b": Transformer(parameters=32.8e9, layers=64, width=5120, cached=1024),
        "qwen2.5-72b": Transformer(parameters=72.7e9, layers=80, width=8192, cached=1024),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Shares of a data sheet's figures that engines reach.

    The defaults for decoding are those of vLLM, fitted to the speeds that Qwen publishes for 3B and 7B on an A100 (one
    request, bfloat16: 127.61 and 84.28 tokens a second; their slopes over 30,000 tokens of context).
    """

    reading: Share = setting(0.8, "share of the bandwidth at which a decode step reads the weights")
    attention: Share = setting(0.365, "share of the bandwidth at which it reads keys and values")
    computing: Share = setting(0.5, "share of the FLOP/s of a decode step's matrices")
    layer: NonNegative = setting(1e-4, "seconds of a decode step for each layer")
    row: NonNegative = setting(2e-5, "seconds of a decode step for each row: sampling, bookkeeping")
    scoring: Share = setting(0.40, "share of the FLOP/s at which the reward model reads")
    forward: Share = setting(0.40, "share of the FLOP/s at which reference and critic read")
    training: Share = setting(0.45, "share of the FLOP/s of an update")

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)

    def decoder(self, gpu: Gpu, model: Transformer, replicas: int) -> Decoder:
        """Return the costs of decode steps of as many replicas, a GPU each."""
        return Decoder(
            step=2 * model.parameters / (gpu.bandwidth * self.reading) + self.layer * model.layers,
            row=2 * model.parameters / (gpu.flops * self.computing) + self.row,
            context=model.cache / (gpu.bandwidth * self.attention),
            replicas=replicas,
        )
