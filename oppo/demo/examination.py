"""Examines a policy on held-out prompts: its responses, their scores, and the KL from the base policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np

from oppo.app.evaluate import respond, score_all
from oppo.data import read_prompts
from oppo.events import FloatArray, Prompt
from oppo.hf.cpu import available_cores, use_cores
from oppo.hf.loading.models import load_causal, load_scalar, load_tokenizer
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel
from oppo.hf.text import Text
from oppo.models import Sampling
from oppo.placement import Thread


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
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


def examine(actor: Path, *, base: Path, reward: Path, held_out: Path, sampling: Sampling, count: int) -> Answers:
    """Return the answers of ``actor`` to the first ``count`` held-out prompts, with the KL from ``base``."""
    text = Text(load_tokenizer(base))
    prompts = read_prompts(held_out, text)[:count]
    with Thread("examination", setup=lambda: use_cores(available_cores())) as thread:
        policy = HfPolicy(load_causal(actor), sampling=sampling, thread=thread)
        reference = ReferenceLogprobs(load_causal(base), sampling=sampling, thread=thread)
        return anyio.run(_examine, policy, reference, RewardModel(load_scalar(reward), thread=thread), prompts, text)


async def _examine(
    policy: HfPolicy, reference: ReferenceLogprobs, reward: RewardModel, prompts: Sequence[Prompt], text: Text
) -> Answers:
    finished = await respond(policy, prompts)
    base = await score_all(reference, finished)
    scores = await score_all(reward, finished)
    responses = [event.response for event in finished]
    kl = [float((response.logprobs - logprobs).sum()) for response, logprobs in zip(responses, base, strict=True)]
    return Answers(
        scores=np.array(scores, np.float32),
        kl=np.array(kl, np.float32),
        lengths=[len(response) for response in responses],
        prompts=[text.decode(prompt.tokens.tolist()) for prompt in prompts],
        texts=[text.decode(response.tokens.tolist()) for response in responses],
    )
