"""The comparisons of one model, shown and written; the models are Llamas of random weights that are made once.

``python -m benchmarks.vllm.cases DIRECTORY LENGTHS ROUNDS`` is vLLM's offline ``LLM`` on a batch, tokens a second. All
requests are given to one call of ``LLM.generate``, which returns when the last has ended. ``LENGTHS`` is a JSON list;
the answer is one on standard output. Everything else goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final, cast

import anyio
from transformers import LlamaForCausalLM

from benchmarks import CHECKOUT
from benchmarks.decoding import lognormal_lengths
from benchmarks.harness import aligned, on_this_machine, versions
from benchmarks.ladder.directory import cache_directory, config_of
from benchmarks.ladder.workloads import Shape
from benchmarks.vllm.compare import (
    DecodingComparison,
    Recorded,
    SyncComparison,
    compare_decoding,
    compare_syncing,
    length_of,
    prompts_of,
)
from oppo import observe
from oppo.demo.assets import alone, made_once
from oppo.errors import ModelLost
from oppo.log import logger
from oppo.models import Sampling
from oppo.vllm import VllmEngine, VllmPolicy
from oppo.vllm.arguments import ALWAYS, ON_CPU

POSITIONS: Final = 512

LENGTHS: Final = lognormal_lengths(32)  # tokens of the responses of a batch

# Of every engine, beside those that oppo sets and its defaults
ARGUMENTS: Final[Mapping[str, object]] = MappingProxyType(
    {"dtype": "float32", "max_model_len": POSITIONS, "max_num_seqs": 64}
)


@dataclass(frozen=True, slots=True)
class Size:
    name: str
    shape: Shape
    vocabulary: int
    tied: bool = False  # whether the output layer is the embedding

    def model(self) -> LlamaForCausalLM:
        """Return the model in float32, its weights always the same."""
        config = config_of(self.shape, self.vocabulary, POSITIONS)
        config.tie_word_embeddings = self.tied
        with alone(0):
            return LlamaForCausalLM(config)

    def directory(self, cache: Path | None = None) -> Path:
        """Return the directory that the model is saved in; it is made once, in ``cache``."""
        return made_once((cache or cache_directory()) / f"vllm-{self.name}", self._save)

    def _save(self, directory: Path) -> None:
        self.model().save_pretrained(directory)


# By name; the larger has the shape of SmolLM2-135M
SIZES: Final[Mapping[str, Size]] = MappingProxyType(
    {
        "5m": Size("5m", Shape(hidden=256, intermediate=704, layers=6, heads=4), vocabulary=640),
        "135m": Size(
            "135m",
            Shape(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3),
            vocabulary=49_152,
            tied=True,
        ),
    }
)


def made_with() -> Mapping[str, str]:
    """Return the versions of torch, transformers and vLLM, whatever distribution vLLM came in."""
    (vllm, *_) = packages_distributions().get("vllm", ["vllm"])
    return versions("torch", "transformers", vllm)


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    parameters: int
    decoding: DecodingComparison
    syncing: SyncComparison
    offline: tuple[float, ...]  # tokens a second of `LLM`, by round

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "decoding_ratio": self.decoding.ratio,
            "sync_ratio": self.syncing.ratio,
        }


def measure(size: Size, *, rounds: int, cache: Path | None, log: Path | None) -> Case:
    """Return the case of a model: first in one engine, then in one of ``LLM``'s own."""
    directory, model = size.directory(cache), size.model()
    with VllmEngine.start(directory, arguments=ARGUMENTS, log=log) as engine:
        alone, recorded = engine.llm, Recorded(engine.llm)
        engine.llm = cast("Any", recorded)
        policy = VllmPolicy(engine, sampling=Sampling(max_new_tokens=max(LENGTHS)), limit=length_of)

        async def compare() -> tuple[DecodingComparison, SyncComparison]:
            decoded = await compare_decoding(
                policy, recorded, lengths=LENGTHS, vocabulary=size.vocabulary, rounds=rounds
            )
            tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
            return decoded, await compare_syncing(policy, tensors, rounds=rounds)

        logger.info(f"{size.name}: {rounds} rounds of decoding and of weight sync")
        decoded, synced = anyio.run(compare)
        engine.llm = alone
    logger.info(f"{size.name}: the same batch by LLM")
    return Case(size.name, model.num_parameters(), decoded, synced, offline(directory, rounds))


def offline(directory: Path, rounds: int) -> tuple[float, ...]:
    """Return the tokens a second of ``LLM`` on the same batch, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.vllm.cases", str(directory), json.dumps(LENGTHS), str(rounds)]
    done = subprocess.run(command, cwd=CHECKOUT, env=dict(os.environ), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelLost(f"vLLM's LLM ended with exit code {done.returncode}; it said last:\n{done.stderr[-1500:]}")
    return tuple(json.loads(done.stdout))


def show(cases: Sequence[Case]) -> str:
    rows = [["model", "ours", "bare", "ratio", "offline", "weight_sync", "copy", "times"]]
    for case in cases:
        decoding, syncing = case.decoding, case.syncing
        ours, bare, offline = (f"{median(speeds):,.0f}" for speeds in (decoding.ours, decoding.bare, case.offline))
        seconds = [f"{median(each):.3f}s" for each in (syncing.syncing, syncing.copying)]
        rows.append([case.model, ours, bare, f"{decoding.ratio:.2f}", offline, *seconds, f"{syncing.ratio:.1f}"])
    foot = "ours, bare, offline: tokens a second, medians over the rounds; sync, copy: seconds, likewise"
    return "\n".join([aligned(rows), foot])


def as_json(cases: Sequence[Case], rounds: int) -> Mapping[str, object]:
    return on_this_machine(
        {
            "versions": made_with(),
            "arguments": dict(ARGUMENTS),
            "lengths": LENGTHS,
            "rounds": rounds,
            "cases": [case.as_json() for case in cases],
        }
    )


def main(directory: str, lengths: str, rounds: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - it logs to standard output when imported
    from vllm.platforms import current_platform  # noqa: PLC0415

    wanted: list[int] = json.loads(lengths)
    vocabulary = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = [prompt for prompt, _ in zip(prompts_of(wanted, vocabulary), wanted, strict=False)]
    llm = LLM(model=directory, **ALWAYS, **(ON_CPU if current_platform.is_cpu() else {}), **ARGUMENTS)
    speeds = []
    for _ in range(int(rounds) + 1):
        start = observe.now()
        made = llm.generate(
            [{"prompt_token_ids": prompt.tokens.tolist()} for prompt in prompts],
            [
                SamplingParams(
                    max_tokens=length_of(prompt), seed=prompt.admission, logprobs=0, ignore_eos=True, detokenize=False
                )
                for prompt in prompts
            ],
            use_tqdm=False,
        )
        speeds.append(sum(len(each.outputs[0].token_ids) for each in made) / (observe.now() - start))
    answers.write(json.dumps(speeds[1:]) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
