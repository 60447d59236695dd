"""From rollouts to vLLM's requests, and from its outputs to tokens: what of them may be read, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from oppo.errors import ModelError, ProtocolError
from oppo.events import UNROUTED, UNTRUNCATED, ChunkState, FinishReason, Prompt, Response, RoutedExperts, Support
from oppo.models import Sampling
from oppo.rollout_buffer import DecodeEngine, RolloutBuffer, SampledToken
from oppo.turns import StopCriteria, turn_ended
from oppo.vllm.engine import Collector, Logprob, NewTokens

RoutedRows: TypeAlias = NDArray[Any]
"""Ids of experts, [positions, layers, top_k]."""


class RequestRoutes:
    """A request's routed experts, a row for each position that it reads; tokens have the first ``known`` rows."""

    def __init__(self, known: int) -> None:
        self.known = known
        self.restart()

    def restart(self) -> None:
        self._rows: list[RoutedRows] = []
        self._steps = self._received = 0

    def receive(self, steps: Sequence[RoutedRows], whole: RoutedRows | None) -> None:
        # Those of the steps of a request that goes on, or of the whole that ends it.
        new = list(steps[self._steps :]) if whole is None else [whole[self._received :]]
        self._steps = len(steps)
        self._received += sum(map(len, new))
        self._rows += new

    def before(self, position: int) -> RoutedExperts:
        count = position - self.known
        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, 0, 0), np.uint8)
        if len(rows) < count:
            raise ProtocolError(
                f"vLLM gave the routed experts of {len(rows)} positions for a token that it read {count} for"
            )
        self._rows, self.known = [rows[count:]], position
        return RoutedExperts(rows[:count], np.array([count], np.int32))


class Request:
    """What the engine makes of a rollout: one request, and another one after each turn and each time it is resumed.

    Attributes:
        id: of its request in the engine; empty when there is none.
        error: what the engine made of it that cannot be used, which ends its decoding.
    """

    def __init__(
        self,
        engine: DecodeEngine[Request],
        key: int,
        response: Response,
        limit: int,
        *,
        sampling: Sampling,
        stopping: StopCriteria,
        turns: bool,
        routed_experts: bool = False,
    ) -> None:
        ended = turn_ended(response, stopping, limit) if turns else None
        self.rollout = RolloutBuffer(engine, key, self, response, limit, turns=turns, ended=ended)
        self.prompt = response.prompt
        self.sampling = sampling
        self.id = ""
        self.collector: Collector | None = None
        self.error: Exception | None = None
        self.routes = RequestRoutes(response.routed) if routed_experts else None
        self._stopping = stopping
        self._tokens = response.tokens.tolist()
        self._made = 0  # tokens of the request
        self._last: list[SampledToken] = []
        self._reason: FinishReason | None = None

    @property
    def written(self) -> int:
        """Length of the response in tokens, those included that may not be read yet."""
        return len(self._tokens)

    @property
    def finished(self) -> bool:
        """Whether the response has ended, whether that may be known or not."""
        return self._reason is not None or self.rollout.ending or self.rollout.ended

    @property
    def idle(self) -> bool:
        return self.finished or self.rollout.unanswered

    @property
    def withheld(self) -> bool:
        """Whether the response has ended, and its end has not been reported."""
        return self.finished and not self.rollout.ended

    def params(self, vocabulary: int) -> dict[str, object]:
        """Return the keywords of its ``SamplingParams`` for a model that has so many ids."""
        # vLLM adds at least -100 to a logit: ids that are never sampled become so improbable that, in float32, no
        # log-prob of another id tells.
        sampling, start, truncated = self.sampling, self.written, truncates(self.sampling)
        padding = range(sampling.vocabulary or vocabulary, vocabulary)
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k if truncated else 0,
            "top_p": sampling.top_p if truncated else 1.0,
            "seed": seed_of(sampling.seed, self.prompt, start),
            "max_tokens": self.rollout.limit - start,
            "min_tokens": max(0, sampling.min_new_tokens - start) if sampling.stop else 0,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": True,
            "logprobs": sampling.top_k if truncated else 0,
            "detokenize": False,
            **({"logit_bias": dict.fromkeys(padding, -100.0)} if padding else {}),
            **({} if self.routes is None else {"routed_experts_prompt_start": self.routes.known}),
        }

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt.tokens.tolist(), *self._tokens]

    def submitted(self, collector: Collector) -> None:
        self.collector, self._made = collector, 0
        if self.routes is not None:
            self.routes.restart()

    def answered(self) -> None:
        self.collector = None  # what the engine made after a turn is not of the response
        self._tokens += self.rollout.pop_answer()

    def take(self, new: NewTokens, version_at: Callable[[int], int]) -> bool:
        """Take what is new, maybe late, after a deferral, and return whether the engine has ended the request.

        All that is new of a response that ends is withheld until :meth:`release`. ``version_at`` returns the version
        of the weights that made a token, by its index in the request.
        """
        if self.routes is not None:
            self.routes.receive(new.steps, new.routed)
        fresh: list[SampledToken] = []
        for token, logprob, support in sampled(new, self.sampling, self.written):
            position = len(self.prompt.tokens) + self.written
            experts = UNROUTED if self.routes is None else self.routes.before(position)
            fresh.append((token, logprob, version_at(self._made), support, experts))
            self._tokens.append(token)
            self._made += 1
            self._reason = self._stopping.reason(self._tokens, self.rollout.limit)
            if self.finished:
                break
        turn = self._reason if self.rollout.turns and self._reason != "length" else None
        over = new.reason is not None
        if over and not self.finished:
            raise ProtocolError(
                f"vLLM ended rollout {self.prompt.rollout} with reason {new.reason!r} after "
                f"{self.written} of {self.rollout.limit} tokens, and none of them ends a response"
            )
        if turn is not None:
            self._reason = None
        elif self.finished:
            self._last = fresh
            return over
        going: ChunkState = "live" if self.rollout.live else "cut"
        for at, made in enumerate(fresh, 1):
            self.rollout.put(made, turn if turn and at == len(fresh) else going)
        return over

    def release(self) -> None:
        if self.rollout.ending:
            self.rollout.end()
            return
        if self._reason is None:
            raise ProtocolError(f"rollout {self.prompt.rollout} has not ended")
        last, self._last = self._last, []
        for at, made in enumerate(last, 1):
            self.rollout.put(made, self._reason if at == len(last) else "live")


VllmDecode: TypeAlias = RolloutBuffer[Request]
"""One rollout of a :class:`oppo.vllm.VllmPolicy`."""


def reports_supports(sampling: Sampling) -> bool:
    """Return whether vLLM can say from which ids each token was sampled."""
    # Under top_p it can if top_k bounds them: it reports the log-probs of so many ids, and minus infinity of those that
    # top_p excludes.
    return not truncates(sampling) or sampling.top_k > 0


def truncates(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def seed_of(seed: int, prompt: Prompt, start: int) -> int:
    """Return the seed of a request, 63 bits; one that continues a response has another, so no noise is used twice."""
    key = f"{seed} {prompt.admission} {prompt.stream} {start}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


def sampled(new: NewTokens, sampling: Sampling, start: int) -> list[tuple[int, float, Support]]:
    """Return each new token with its log-prob and its support; ``start``: length of the response before them."""
    return [
        (int(token), _logprob(int(token), found), _support(found, int(token), sampling, start + position))
        for position, (token, found) in enumerate(zip(new.tokens, new.logprobs, strict=True))
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
    return UNTRUNCATED
