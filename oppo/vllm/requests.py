"""From rollouts to vLLM's requests, and from its outputs to tokens."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from oppo.errors import ModelError
from oppo.events import Prompt
from oppo.models import Sampling
from oppo.support import Support
from oppo.vllm.surface import Completion, Logprob

if TYPE_CHECKING:
    from oppo.vllm.requests import VllmDecode


def reports_supports(sampling: Sampling) -> bool:
    """Return whether vLLM can say from which ids each token was drawn.

    Under ``top_p`` it can if ``top_k`` bounds them: it reports the log-probs of so many ids, and of those that
    ``top_p`` excludes minus infinity.
    """
    return not truncates(sampling) or sampling.top_k > 0


def truncates(sampling: Sampling) -> bool:
    """Return whether ids are excluded because they are unlikely; greedy decoding excludes none."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def seed_of(seed: int, prompt: Prompt, start: int) -> int:
    """Return the seed of a request, 63 bits: a hash of the run's seed, the rollout, and where its tokens begin.

    A request that continues a response has another seed than the one that began it, so no noise is used twice.
    """
    key = f"{seed} {prompt.admission} {prompt.sample} {start}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


def params_of(sampling: Sampling, decode: VllmDecode, vocabulary: int) -> dict[str, object]:
    """Return the keywords of a request's ``SamplingParams`` for a model that has so many ids.

    vLLM adds at least -100 to a logit: those of ids that are never drawn become so improbable that, in float32, no
    log-prob of another id tells.
    """
    padding = range(sampling.vocabulary or vocabulary, vocabulary)
    start, truncated = decode.written, truncates(sampling)
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k if truncated else 0,
        "top_p": sampling.top_p if truncated else 1.0,
        "seed": seed_of(sampling.seed, decode.prompt, start),
        "max_tokens": decode.limit - start,
        "min_tokens": max(0, sampling.min_new_tokens - start) if sampling.stop else 0,
        "stop_token_ids": list(sampling.stop),
        "ignore_eos": True,
        "logprobs": sampling.top_k if truncated else 0,
        "detokenize": False,
        **({"logit_bias": dict.fromkeys(padding, -100.0)} if padding else {}),
    }


def prompt_of(decode: VllmDecode, salt: str) -> dict[str, object]:
    """Return the prompt of a request: token ids, and a salt that keeps it from keys and values of other weights."""
    return {"prompt_token_ids": decode.sequence, "cache_salt": salt}


def drawn(completion: Completion, sampling: Sampling, start: int) -> list[tuple[int, float, Support]]:
    """Return each new token with its log-prob and its support.

    Args:
        completion: the new tokens.
        start: length of the response before them.

    Raises:
        ModelError: a log-prob is missing or not finite.
    """
    logprobs = completion.logprobs or [{}] * len(completion.token_ids)
    return [
        (int(token), _logprob(int(token), found), _support(found, int(token), sampling, start + position))
        for position, (token, found) in enumerate(zip(completion.token_ids, logprobs, strict=True))
    ]


def _logprob(token: int, found: Mapping[int, Logprob]) -> float:
    value = found[token].logprob if token in found else float("nan")
    if not np.isfinite(value):
        raise ModelError(
            f"vLLM gave token {token} the log-prob {value}, which is not finite: the weights have diverged or overflow "
            "their dtype"
        )
    return min(0.0, float(value))


def _support(found: Mapping[int, Logprob], token: int, sampling: Sampling, position: int) -> Support:
    if truncates(sampling) and sampling.top_k:
        ids = sorted({token, *(each for each, one in found.items() if np.isfinite(one.logprob))})
        return Support(np.array(ids, np.int32), np.array([len(ids)], np.int32))
    if position < sampling.min_new_tokens and sampling.stop:
        return Support(np.array(sampling.stop, np.int32), np.array([-len(sampling.stop)], np.int32))
    return WHOLE


WHOLE = Support()
"""The support of a token that was drawn from the whole vocabulary."""
