"""The comparisons of one model, shown and written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import anyio

from benchmarks import CHECKOUT
from benchmarks.machine import Machine
from benchmarks.vllm.decoding import DecodingComparison, Recorded, compare_decoding, length_of
from benchmarks.vllm.models import ARGUMENTS, LENGTHS, Size
from benchmarks.vllm.publishing import PublishComparison, compare_publishing
from benchmarks.vllm.versions import versions
from oppo.errors import ModelLost
from oppo.models import Sampling
from oppo.vllm import VllmEngine, VllmPolicy


@dataclass(frozen=True, slots=True)
class Case:
    """One model, compared.

    Attributes:
        offline: tokens a second of ``LLM``, by round.
    """

    model: str
    parameters: int
    decoding: DecodingComparison
    publishing: PublishComparison
    offline: tuple[float, ...]

    def as_json(self) -> dict[str, object]:
        """Return the entry of a file of results."""
        return {
            **asdict(self),
            "decoding_ratio": self.decoding.ratio,
            "publishing_ratio": self.publishing.ratio,
        }


def measure(size: Size, *, rounds: int, cache: Path | None, log: Path | None, tell: Callable[[str], None]) -> Case:
    """Return the case of a model: first in one engine, then in one of ``LLM``'s own.

    Raises:
        ModelLost: an engine died.
    """
    directory, model = size.directory(cache), size.model()
    with VllmEngine.start(directory, arguments=ARGUMENTS, log=log, tell=tell) as engine:
        alone, recorded = engine.llm, Recorded(engine.llm)
        engine.llm = cast("Any", recorded)
        policy = VllmPolicy(engine, sampling=Sampling(max_new_tokens=max(LENGTHS)), limit=length_of)

        async def compare() -> tuple[DecodingComparison, PublishComparison]:
            decoded = await compare_decoding(
                policy, recorded, lengths=LENGTHS, vocabulary=size.vocabulary, rounds=rounds
            )
            tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
            return decoded, await compare_publishing(policy, tensors, rounds=rounds)

        tell(f"{size.name}: {rounds} rounds of decoding and of publishing")
        decoded, published = anyio.run(compare)
        engine.llm = alone
    tell(f"{size.name}: the same batch by LLM")
    return Case(size.name, model.num_parameters(), decoded, published, offline(directory, rounds))


def offline(directory: Path, rounds: int) -> tuple[float, ...]:
    """Return the tokens a second of ``LLM`` on the same batch, in a process of its own.

    Raises:
        ModelLost: the process failed.
    """
    command = [sys.executable, "-m", "benchmarks.vllm.offline", str(directory), json.dumps(LENGTHS), str(rounds)]
    done = subprocess.run(command, cwd=CHECKOUT, env=dict(os.environ), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelLost(f"vLLM's LLM ended with exit code {done.returncode}; it said last:\n{done.stderr[-1500:]}")
    return tuple(json.loads(done.stdout))


def show(cases: Sequence[Case]) -> str:
    """Return a table of the cases."""
    head = f"{'model':<6} {'ours':>7} {'bare':>7} {'ratio':>6} {'offline':>8}   {'publish':>8} {'copy':>8} {'times':>6}"
    rows = [
        f"{case.model:<6} {median(case.decoding.ours):>7,.0f} {median(case.decoding.bare):>7,.0f} "
        f"{case.decoding.ratio:>6.2f} {median(case.offline):>8,.0f}   {median(case.publishing.publishing):>7.3f}s "
        f"{median(case.publishing.copying):>7.3f}s {case.publishing.ratio:>6.1f}"
        for case in cases
    ]
    foot = "ours, bare, offline: tokens a second, medians over the rounds; publish, copy: seconds, likewise"
    return "\n".join([head, "-" * len(head), *rows, foot])


def as_json(cases: Sequence[Case], rounds: int) -> Mapping[str, object]:
    """Return the file of results."""
    return {
        "machine": asdict(Machine.here("cpu")),
        "versions": versions(),
        "arguments": dict(ARGUMENTS),
        "lengths": LENGTHS,
        "rounds": rounds,
        "cases": [case.as_json() for case in cases],
    }
