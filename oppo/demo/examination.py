"""Examines a policy on held-out prompts: its responses, their scores, and the KL from the base policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import numpy as np

from oppo.data import read_prompts
from oppo.evaluation import Answering, examine as answers_of
from oppo.events import FloatArray
from oppo.hf.devices import available_cores, use_cores
from oppo.hf.loading import load_causal, load_scalar, load_tokenizer
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel
from oppo.hf.tokenizer import HfTokenizer
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.stages import ScoredRollout


@dataclass(frozen=True, slots=True, eq=False)
class DemoAnswers:
    """A policy's responses to the held-out prompts.

    Attributes:
        scores: float32 [N], the reward model's.
        kl: float32 [N], nats: the sum over a response of its log-probs minus those of the base policy.
        lengths: tokens in each response.
        prompts, texts: prompts and responses as text.
    """

    scores: FloatArray
    kl: FloatArray
    lengths: Sequence[int]
    prompts: Sequence[str]
    texts: Sequence[str]


def examine(actor: Path, *, base: Path, reward: Path, held_out: Path, sampling: Sampling, count: int) -> DemoAnswers:
    """Return the answers of ``actor`` to the first ``count`` held-out prompts, with the KL from ``base``."""
    tokenizer = HfTokenizer(load_tokenizer(base))
    prompts = read_prompts(held_out, tokenizer)[:count]
    with Thread("examination", setup=lambda: use_cores(available_cores())) as thread:
        policy = HfPolicy(load_causal(actor), sampling=sampling, thread=thread)
        reference = ReferenceLogprobs(load_causal(base), sampling=sampling, thread=thread)
        judge = RewardModel(load_scalar(reward), thread=thread)
        how = Answering(batch=count)
        found = anyio.run(partial(answers_of, policy, judge, prompts, how, reference=reference)).rollouts
    return DemoAnswers(
        scores=np.array([each.score for each in found], np.float32),
        kl=np.array([kl_of(each) for each in found], np.float32),
        lengths=[len(each.finish.response) for each in found],
        prompts=[tokenizer.decode(each.finish.response.prompt.tokens.tolist()) for each in found],
        texts=[tokenizer.decode(each.finish.response.tokens.tolist()) for each in found],
    )


def kl_of(answer: ScoredRollout) -> float:
    """Return the sum over a response of its log-probs minus those of the reference, nats; NaN without one."""
    reference = answer.reference
    return float("nan") if reference is None else float((answer.finish.response.logprobs - reference).sum())
