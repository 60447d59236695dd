"""What a policy made of some prompts, read to the end, and the same from plain full forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.group import grpo
from oppo.algorithms.ppo import ppo
from oppo.events import Chunk, FloatArray, Prompt, Response, StepReport, Support, TokenColumns
from oppo.graph import Graph
from oppo.hf.devices import use_cores
from oppo.hf.model_parts import backbone, score_head
from oppo.hf.serve.noise import keys_at, noise_of, table_on
from oppo.hf.serve.policy import HfDecode, HfPolicy
from oppo.hf.serve.sampling import draw
from oppo.hf.serve.scorers import ProximalLogprobs, ReferenceLogprobs, RewardModel, ValueModel
from oppo.hf.train.trainer import HfTrainer
from oppo.models import Sampling
from oppo.placement import Hosting, Thread
from tests.hf import tiny
from tests.kit.responses import read_chunk

SAMPLING = Sampling(max_new_tokens=32, stop=(2, 3, 4, 5), seed=11)
"""Random tiny models stop after about 20 tokens with it."""


def gumbel(seed: int, admission: Tensor, sample: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise, float32 [n, vocabulary], that depends only on the arguments of its row."""
    keys = keys_at(seed, torch.stack((admission, sample, position), -1))
    return noise_of(keys, torch.arange(vocabulary, device=keys.device), table_on(keys.device))


def prompts(count: int, *, longest: int = 40, first: int = 0) -> list[Prompt]:
    """Prompts of different lengths; two samples for every third one."""
    generator = np.random.default_rng(5)
    made: list[Prompt] = []
    for admission in range(first, first + count):
        tokens = generator.integers(6, tiny.VOCABULARY, generator.integers(1, longest)).astype(np.int32)
        made.append(Prompt(admission, admission, tokens, sample=admission % 3 // 2))
    return made


@contextmanager
def serving(
    model: PreTrainedModel | None = None,
    *,
    sampling: Sampling = SAMPLING,
    deterministic: bool = False,
    keep: bool = False,
    portion: int = 8192,
    place: Hosting | None = None,
) -> Iterator[HfPolicy]:
    with Thread("actor", setup=functools.partial(use_cores, 1)) as thread:
        yield HfPolicy(
            tiny.causal() if model is None else model,
            sampling=sampling,
            place=thread if place is None else place,
            deterministic=deterministic,
            kv_on_sync="keep" if keep else "recompute",
            prefill_tokens=portion,
        )


Serving: TypeAlias = Callable[..., AbstractContextManager[HfPolicy]]  # is called as serving is


@dataclass
class Story:
    """What was read of some decodes, and what the cut was told."""

    decodes: Sequence[HfDecode]
    pieces: list[list[Chunk]] = field(default_factory=list)
    told: list[list[int]] = field(default_factory=list)
    cut_after: int = 1_000_000

    def __post_init__(self) -> None:
        self.pieces = [[] for _ in self.decodes]

    def cut(self, finished: Sequence[int]) -> bool:
        self.told.append(list(finished))
        return sum(map(len, self.told)) >= self.cut_after

    async def read(self, k: int, limit: int) -> None:
        state = "live"
        while state == "live":
            piece = await read_chunk(self.decodes[k], limit)
            self.pieces[k].append(piece)
            state = piece.state

    async def step(self, policy: HfPolicy, limit: int = 7) -> None:
        """Decode and read until the cut, or the end of every response."""
        async with policy.decoding(self.live, self.cut), anyio.create_task_group() as readers:
            for k, decode in enumerate(self.decodes):
                if decode in self.live:
                    readers.start_soon(self.read, k, limit)

    @property
    def live(self) -> list[HfDecode]:
        return [d for d, p in zip(self.decodes, self.pieces, strict=True) if not p or p[-1].state in ("live", "cut")]

    def tokens(self) -> list[list[int]]:
        return [np.concatenate([piece.tokens for piece in row]).tolist() for row in self.pieces]

    def logprobs(self) -> list[list[float]]:
        return [np.concatenate([piece.logprobs for piece in row]).tolist() for row in self.pieces]

    def versions(self) -> list[list[int]]:
        return [np.concatenate([piece.versions for piece in row]).tolist() for row in self.pieces]

    def supports(self) -> list[Support]:
        return [Support.concatenate((piece.extra[Support], len(piece.tokens)) for piece in row) for row in self.pieces]

    def states(self) -> list[str]:
        return [row[-1].state for row in self.pieces]


async def told(policy: HfPolicy, asked: Sequence[Prompt], limit: int = 7) -> Story:
    story = Story(await policy.open(asked))
    await story.step(policy, limit)
    return story


@tiny.apart
@torch.inference_mode()
def reference(model: PreTrainedModel, prompt: Prompt, sampling: Sampling) -> tuple[list[int], list[float]]:
    sequence, logprobs = prompt.tokens.tolist(), list[float]()
    for position in range(sampling.max_new_tokens):
        logits = model(torch.tensor([sequence])).logits[:, -1]
        admission, sample, at = (torch.tensor([n]) for n in (prompt.admission, prompt.sample, position))
        noise = gumbel(sampling.seed, admission, sample, at, logits.shape[-1]) if sampling.temperature else None
        drawn = draw(logits, noise, sampling)
        sequence.append(int(drawn.tokens))
        logprobs.append(float(drawn.logprobs))
        if sequence[-1] in sampling.stop or len(sequence) == tiny.LONGEST:
            break
    return sequence[len(prompt.tokens) :], logprobs


@tiny.apart
@torch.inference_mode()
def full_logprobs(
    model: PreTrainedModel, prompt: Prompt, tokens: list[int], support: Support | None = None, temperature: float = 1.0
) -> Tensor:
    """Log-probs of a response from one forward pass, over the ids that each token was drawn from."""
    sequence = torch.tensor([[*prompt.tokens.tolist(), *tokens]])
    logits: Tensor = model(sequence, use_cache=False).logits[0, len(prompt.tokens) - 1 : -1].float() / temperature
    logits = logits.masked_fill(~allowed(support or Support(), len(tokens), logits.shape[-1]), -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def response_logprobs(model: PreTrainedModel, response: Response, temperature: float = 1.0) -> FloatArray:
    """Return the same of a response, its tool tokens included."""
    tokens, support = response.tokens.tolist(), response.extra[Support]
    return np.asarray(full_logprobs(model, response.prompt, tokens, support, temperature))


@tiny.apart
@torch.no_grad()
def response_values(model: PreTrainedModel, response: Response) -> FloatArray:
    """Return the score at each position from the last of the prompt on, by one forward pass."""
    ids = torch.tensor([[*response.prompt.tokens.tolist(), *response.tokens.tolist()]])
    hidden = backbone(model)(ids, use_cache=False).last_hidden_state
    values: FloatArray = score_head(model)(hidden)[0, len(response.prompt.tokens) - 1 :, 0].float().numpy()
    return values


def allowed(support: Support, count: int, vocabulary: int) -> Tensor:
    """Which ids each of ``count`` tokens was drawn from, one token at a time: bool [count, vocabulary]."""
    rows = torch.ones(count, vocabulary, dtype=torch.bool)
    for row, one in zip(rows, TokenColumns(support).split(count), strict=True):
        alone = one[Support]
        if alone.counts.sum() > 0:
            row[:] = False
        row[torch.from_numpy(alone.ids).long()] = bool(alone.counts.sum() > 0)
    return rows


def graph_of(
    actor: PreTrainedModel,
    critic: PreTrainedModel | None,
    *,
    trainer: HfTrainer,
    acting: Hosting,
    scoring: Hosting,
    sampling: Sampling,
    batch: int = 4,
    extra: int = 2,
    chunk: int = 5,
    reference: PreTrainedModel | None = None,
    reward: PreTrainedModel | None = None,
    deterministic: bool = True,
    proximal: bool = False,
    **policy: Any,
) -> Graph[StepReport]:
    """Return the graph of PPO or, without a critic, of GRPO with groups of two."""
    exact: dict[str, Any] = {"deterministic": deterministic}
    reading: dict[str, Any] = {"sampling": sampling, "place": scoring, **exact}
    kept = {name: policy[name] for name in ("kv_on_sync",) if name in policy}
    parts: dict[str, Any] = {
        "policy": HfPolicy(actor, sampling=sampling, place=acting, **exact, **policy),
        "reference": ReferenceLogprobs(reference or tiny.causal(seed=1), **reading),
        "reward": RewardModel(reward or tiny.scalar(seed=2), place=scoring, **exact),
        "trainer": trainer,
        "chunks": Fixed(chunk),
        "proximal": ProximalLogprobs(actor, **reading, **kept) if proximal else None,
        "admission": Overcommit(batch, extra),
    }
    if critic is None:
        return grpo(**parts, samples=2)
    return ppo(**parts, critic=ValueModel(critic, place=scoring, **exact))
