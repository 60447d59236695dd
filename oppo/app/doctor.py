"""``oppo doctor``: where each model of a run goes, what memory it will need there, and whether that is enough."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from rich.filesize import decimal

from oppo.app.assemble import policy_tokenizer
from oppo.app.expected import SHARE, Expected, advice, by_device, crowded, expected, load_of
from oppo.app.layout import devices_of
from oppo.app.provenance import Provenance
from oppo.app.supply import supplied
from oppo.config.settings import Settings
from oppo.hf.devices import available_cores
from oppo.hf.memory import Bytes, Hardware, Load, memory_of
from oppo.log import logger, routed

PACKAGES: Final = ("oppo", "torch", "transformers", "accelerate", "peft", "vllm", "ray", "anyio", "numpy")

_PARTS: Final = [each.name for each in fields(Bytes)]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Memory that a run needs, found without loading its models.

    Attributes:
        needs: of each model.
        load: for which they were estimated.
        faults: sentences about devices with too little memory, and what would fit; empty if there is enough.
        assumed: the hardware that was meant; ``None``: this machine.
    """

    needs: Sequence[Expected]
    load: Load
    faults: Sequence[str]
    assumed: Hardware | None = None

    def lines(self) -> Iterator[str]:
        """Yield the diagnosis for people."""
        yield versions()
        yield ""
        yield (
            f"expected memory, for {self.load.rollouts} rollouts in flight, prompts of {self.load.prompt} tokens and "
            f"responses of {self.load.response}:"
        )
        yield from _table(self.needs)
        yield ""
        for device, models in by_device(self.needs).items():
            total, memory = sum(each.bytes.total for each in models), memory_of(device, self.assumed)
            there = "" if memory is None else f", {decimal(memory[0])} {'free' if self.assumed is None else 'assumed'}"
            yield f"{device}: {decimal(total)} needed{there}; {_largest(models)}"
        for share in {each.share for each in self.needs} - {None}:
            yield f"vLLM takes {share} of its GPUs' memory (vllm.{SHARE}); what its weights leave is the KV cache"
        yield "PyTorch itself, the work space of kernels, and what an allocator keeps come on top."
        yield from (f"too little memory: {fault}" for fault in self.faults)


def examine(settings: Settings, assumed: Hardware | None = None) -> Diagnosis:
    """Return the diagnosis of a run; prompts and tokenizer are read, weights are not.

    Args:
        assumed: the hardware that is meant; ``None``: this machine.

    Raises:
        OppoError: a setting, the data or a model cannot be used.
    """
    if assumed is not None and assumed.machines > 1 and not settings.placement.cluster:
        logger.info("the run is on one machine: --ray, or placement.cluster, places models on others")
    devices = devices_of(settings, assumed)
    with routed():
        tokenizer = policy_tokenizer(settings.models)
        load = load_of(settings, supplied(settings, tokenizer, Provenance.of(settings)).longest)
    needs = expected(settings, devices, load, assumed)
    found = crowded(needs, assumed, spread=settings.placement.spread)
    return Diagnosis(needs, load, [*found, advice(settings, devices, load, assumed)] if found else (), assumed)


def versions() -> str:
    """Return what is installed, with its versions, and the machine's cores."""
    parts = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    return f"{', '.join(parts)}; {available_cores()} cores"


def _table(needs: Sequence[Expected]) -> Iterator[str]:
    rows = [("model", "device", *(name.replace("_", ", ") for name in _PARTS), "total")]
    for each in needs:
        parts = (decimal(getattr(each.bytes, name)) if getattr(each.bytes, name) else "-" for name in _PARTS)
        rows.append((each.model, each.where, *parts, decimal(each.bytes.total)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        yield "  ".join([*names, *numbers])


def _largest(models: Sequence[Expected]) -> str:
    size, model, part = max((getattr(each.bytes, part), each.model, part) for each in models for part in _PARTS)
    return f"most of it {'keys and values' if part == 'keys_values' else part} of the {model} ({decimal(size)})"
