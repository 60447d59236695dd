"""Our decoder beside ``model.generate``: the same prompts, lengths and weights, in turns, in one thread.

Both make ``lengths[i]`` tokens for prompt ``i``, drawn from the whole distribution at temperature 1; ours with their
log-probs. ``generate`` decodes all rows until the longest has ended; tokens beyond a row's length do not count. So
equal lengths compare decode steps, and ragged ones whole batches of rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median
from types import MappingProxyType
from typing import Final, cast

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.harness import Spread, aligned, on_this_machine, turns
from benchmarks.ladder.directory import config_of
from benchmarks.ladder.workloads import PAPER, Shape
from oppo import observe
from oppo.demo.assets import alone
from oppo.events import Prompt
from oppo.hf.devices import use_cores
from oppo.hf.serve.decoder import Decoder, DecodeRow, Signals
from oppo.models import Sampling
from oppo.rollout_buffer import DecodeStep


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Memory of the cache over a run, sampled after each decode step."""

    allocated: int  # peak bytes of the KV cache
    needed: int  # peak bytes that the tokens read by then need
    worst: float  # the largest ratio of the two while at least half of the peak is needed


@dataclass(frozen=True, slots=True)
class DecodingComparison:
    """The result of :func:`compare_decoding`, by round."""

    batch: int  # rows decoded together
    tokens: int  # made by each of the two in each round
    ours: tuple[float, ...]  # tokens a second of the decoder
    generate: tuple[float, ...]  # tokens a second of `model.generate`
    cache: Occupancy  # memory of the decoder's cache

    @property
    def ratio(self) -> Spread:
        return Spread.of_ratios(self.ours, self.generate)


def lognormal_lengths(count: int, *, middle: int = 48, sigma: float = 1.0, cap: int = 384, seed: int = 0) -> list[int]:
    """Return ``count`` lengths in 1 .. ``cap``, lognormal about the median ``middle``: as responses are."""
    drawn = np.random.default_rng(seed).lognormal(np.log(middle), sigma, count)
    return [int(length) for length in drawn.round().clip(1, cap)]


def compare_decoding(
    model: PreTrainedModel,
    *,
    lengths: Sequence[int],
    prompts: Sequence[int],
    rounds: int = 5,
    threads: int = 1,
    clock: Callable[[], float] = observe.now,
) -> DecodingComparison:
    """Return the speeds of the decoder and of ``generate``, over rounds in which they take turns.

    A round before the first is not counted. The calling thread's intra-op thread count is restored.
    """
    if len(prompts) != len(lengths) or min((*lengths, *prompts), default=0) < 1:
        raise ValueError(
            f"expected as many prompts as lengths, each of at least 1 token; got lengths {list(lengths)} and prompts "
            f"{list(prompts)}"
        )
    before = torch.get_num_threads()
    use_cores(threads)
    try:
        contest = _Contest(model, lengths, prompts)
        ours, generate, total = list[float](), list[float](), sum(lengths)
        for _, (run, speeds) in turns([(contest.ours, ours), (contest.generate, generate)], rounds):
            start = clock()
            run()
            took = clock() - start
            speeds.append(total / took)
    finally:
        use_cores(before)
    return DecodingComparison(len(lengths), total, tuple(ours[1:]), tuple(generate[1:]), contest.occupancy())


class _Contest:
    def __init__(self, model: PreTrainedModel, lengths: Sequence[int], prompts: Sequence[int]) -> None:
        generator = np.random.default_rng(0)
        vocabulary = int(model.config.get_text_config().vocab_size)
        self._lengths = lengths
        self._prompts = [generator.integers(0, vocabulary, length).astype(np.int32) for length in prompts]
        self._model = model
        self._decoder = Decoder(
            model, sampling=Sampling(max_new_tokens=max(lengths)), deterministic=False, prefill_tokens=2048
        )
        width = max(prompts)
        self._ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=model.device)
        self._mask = torch.zeros_like(self._ids)
        for row, tokens in enumerate(self._prompts):
            self._ids[row, width - len(tokens) :] = torch.from_numpy(tokens)
            self._mask[row, width - len(tokens) :] = 1

    def ours(self, watch: Callable[[DecodeStep], None] = lambda made: None) -> None:
        rows = [
            DecodeRow(number, Prompt(number, number, tokens), length)
            for number, (tokens, length) in enumerate(zip(self._prompts, self._lengths, strict=True))
        ]
        self._decoder.run(rows, lambda ended: False, Signals.of(len(rows)), watch)

    def generate(self) -> None:
        longest = max(self._lengths)
        generate = cast("Callable[..., object]", self._model.generate)
        generate(
            self._ids,
            attention_mask=self._mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
            eos_token_id=None,
        )

    def occupancy(self) -> Occupancy:
        """Decode once more, and sample the cache after each decode step."""
        seen = list[tuple[int, int]]()
        self.ours(lambda made: seen.append(self._decoder.reader.memory()))
        peak = max(needed for _, needed in seen)
        worst = max(allocated / needed for allocated, needed in seen if 2 * needed >= peak)
        return Occupancy(max(allocated for allocated, _ in seen), peak, worst)


VOCABULARY: Final = 640
POSITIONS: Final = 512
PROMPT: Final = 16
SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "deep and thin": PAPER.models.actor,
        "5M": Shape(hidden=256, intermediate=704, layers=6, heads=4),
    }
)
# Batches: lengths as of responses, equal lengths, with which `generate` wastes nothing, and one row
LENGTHS: Final[Mapping[str, Sequence[int]]] = MappingProxyType(
    {"32 ragged": lognormal_lengths(32), "32 equal": [96] * 32, "1": [192]}
)


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    batch: str
    parameters: int
    found: DecodingComparison

    def row(self) -> list[str]:
        speeds = [f"{median(speeds):,.0f}" for speeds in (self.found.ours, self.found.generate)]
        size, ratio = f"{self.parameters / 1e6:.1f}M", str(self.found.ratio)
        return [self.model, size, self.batch, *speeds, ratio, f"{self.found.cache.worst:.2f}"]


def measure(
    rounds: int, shapes: Mapping[str, Shape] = SHAPES, batches: Mapping[str, Sequence[int]] = LENGTHS
) -> Sequence[Case]:
    return [
        Case(name, batch, *_compared(shape, lengths, rounds))
        for name, shape in shapes.items()
        for batch, lengths in batches.items()
    ]


def show(cases: Sequence[Case]) -> str:
    head = ["model", "size", "batch", "ours", "generate", "ratio (min - max)", "cache"]
    foot = (
        "tokens a second on one thread; ratio above 1: ours is faster; cache: bytes taken over bytes needed, at worst"
    )
    return "\n".join([aligned([head, *(case.row() for case in cases)]), foot])


def as_json(cases: Sequence[Case], rounds: int) -> Mapping[str, object]:
    entries = [{**asdict(case), "ratio": astuple(case.found.ratio)} for case in cases]
    return on_this_machine({"threads": 1, "rounds": rounds, "cases": entries})


def _compared(shape: Shape, lengths: Sequence[int], rounds: int) -> tuple[int, DecodingComparison]:
    with alone(0):
        model = LlamaForCausalLM(config_of(shape, VOCABULARY, POSITIONS))
    model.train(mode=False)
    found = compare_decoding(model, lengths=lengths, prompts=[PROMPT] * len(lengths), rounds=rounds)
    return model.num_parameters(), found
