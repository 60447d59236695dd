"""Log-probs of growing responses on vLLM: a reference or a teacher, by the log-probs of prompts, read incrementally.

vLLM computes the log-prob of each token of a prompt that its prefix cache does not hold, so a request that may read the
cache gives the log-probs of the new tokens. The log-prob of a token comes from the hidden state before it: a rollout
that goes on is read one token past a whole block, which the next request reads again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import numpy as np

from oppo.errors import ConfigError, ModelLost, ModelRefused, RewardError, as_itself, shortened
from oppo.events import FloatArray, IntArray
from oppo.models import Sampling, SamplingSettings
from oppo.returns import TopLogprobs
from oppo.vllm.async_llm import VllmEngine
from oppo.vllm.scorers import (
    Asked,
    ReadRollout,
    ScoringModel,
    ScoringServer,
    VllmScorer,
)
from oppo.vllm.server import Inspection

if TYPE_CHECKING:
    import torch

Rows: TypeAlias = tuple[IntArray, FloatArray]
"""Of tokens: ids int32 [n, 1 + k] and their log-probs float32 [n, 1 + k], the token itself and the k likeliest."""

LOGPROBS: Final[Mapping[str, object]] = MappingProxyType({"worker_extension_cls": "oppo.vllm.logprobs.LogitsOfPrompts"})
"""Arguments of the engine of a model whose log-probs are at a temperature, or over a part of its table of ids."""

READING: Final[Mapping[str, object]] = {
    "max_tokens": 1,
    "temperature": 0,
    "skip_reading_prefix_cache": False,
    "flat_logprobs": True,
    "detokenize": False,
}
"""Keywords of the ``SamplingParams`` with which a prompt is read."""

LISTED: Final = 20
"""Likeliest ids that a server lists unless ``--max-logprobs`` says otherwise."""

NEGLIGIBLE: Final = 1e-4
"""Probability of all ids beyond the policy's, up to which a server's log-probs pass for those over the policy's."""


def check_log_probs(sampling: SamplingSettings, *, server: bool) -> None:
    left_out = {
        f"sampling.top_k = {sampling.top_k}": sampling.top_k > 0,
        f"sampling.top_p = {sampling.top_p}": sampling.top_p < 1,
        f"sampling.min_new_tokens = {sampling.min_new_tokens}": sampling.min_new_tokens > 0,
    }
    if found := [key for key, leaves_out in left_out.items() if leaves_out]:
        raise ConfigError(
            f"{', '.join(found)} leaves ids out, and vLLM's log-probs of what was written are over all of them: leave "
            "that out, or have transformers serve the model (engine = 'transformers')"
        )
    if server and sampling.temperature not in {0, 1}:
        raise ConfigError(
            f"sampling.temperature = {sampling.temperature} divides the logits, and a vLLM server gives the log-probs "
            "of what was written at temperature 1: set it to 1, or leave url out, so that the run starts an engine"
        )


class LogitsOfPrompts:
    """An extension of vLLM's workers: logits of the ids that may be sampled, at a temperature."""

    model_runner: Any

    def oppo_temper(self, temperature: float, vocabulary: int) -> None:
        """Divide logits by a temperature, and leave out the ids from ``vocabulary`` on, from now on."""
        model = self.model_runner.model
        plain = getattr(model, "oppo_plain_logits", model.compute_logits)
        model.oppo_plain_logits = plain

        def compute_logits(*given: Any, **named: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = plain(*given, **named)
            if logits is not None:  # which one worker of several has
                logits[..., vocabulary:] = -float("inf")
                logits = logits / temperature
            return logits

        model.compute_logits = compute_logits


class LogprobServer(ScoringServer):
    """A vLLM server that gives the log-probs of whole sequences by its route ``/v1/completions``.

    It reads each rollout when that has ended, since it does not say what its cache held. ``top_k``: the server needs
    ``--max-logprobs`` of as many. ``vocabulary``: ids of the policy; a server cannot leave the others out (rows that
    pad its table), so it is asked for the likeliest of them behind each response.
    """

    ROUTE = "/v1/completions"

    def __init__(self, url: str, source: str | Path, *, top_k: int = 0, vocabulary: int = 0, **given: Any) -> None:
        self.top_k = top_k
        self.vocabulary = vocabulary
        self.flags = f" --max-logprobs {top_k}" if top_k > LISTED else ""
        super().__init__(url, source, **given)

    async def rows(self, asked: Sequence[Asked]) -> list[tuple[Rows, int | None]]:
        service: Any = self.service
        found: dict[str, Rows] = {}

        async def ask(each: Asked) -> None:
            choice = await service([], each.tokens)
            try:
                found[each.salt] = _listed(choice["prompt_logprobs"][each.read :], each.unread, self.top_k)
                beyond = self._beyond(choice)
            except _MALFORMED as error:
                raise RewardError(
                    f"{self.url} was asked for the log-probs of {len(each.tokens)} tokens, and answered "
                    f"{shortened(str(choice), 200)}"
                ) from error
            if beyond > NEGLIGIBLE:
                raise RewardError(f"{self.url}: {self._expected}, and got up to {beyond:.2g}")

        with as_itself():
            async with anyio.create_task_group() as tasks:
                for each in asked:
                    tasks.start_soon(ask, each)
        return [(found[each.salt], None) for each in asked]

    def _try(self, found: Inspection) -> None:
        if scored := found.asked("POST", self.ROUTE, self._asked([0, 0])):
            beyond = 0.0
            try:
                choice = self._scores(scored)
                ok = bool(_listed(choice["prompt_logprobs"][1:], [0], self.top_k))
                beyond = self._beyond(choice)
            except _MALFORMED:
                ok = False
            came = shortened(str(scored.get("choices")), 200)
            found.expect(f"the log-probs of two tokens by {self.ROUTE}", "one, of the second", came, ok=ok)
            if beyond > NEGLIGIBLE:
                raise ConfigError(f"{self.url}: {self._expected}, and got up to {beyond:.2g}")

    def _described(self, name: str, config: Any, longest: int) -> ScoringModel:
        return ScoringModel(name, int(config.get_text_config().vocab_size), longest - 1)

    def _asked(self, sequences: Any) -> dict[str, object]:
        asked = {"model": self.served, "prompt": sequences, "max_tokens": 1, "temperature": 0}
        # Of the ids that may follow, the likeliest is written, and its log-prob is the one over the whole table.
        padding = {"allowed_token_ids": list(self._padding), "logprobs": 0} if self._padding else {}
        return {**asked, **padding, "prompt_logprobs": self.top_k}

    def _scores(self, answer: Any) -> Any:
        return answer["choices"][0]

    @property
    def _padding(self) -> range:
        return range(self.vocabulary or self.model.vocabulary, self.model.vocabulary)

    def _beyond(self, choice: Any) -> float:
        # An upper bound of the probability of all ids that the policy lacks.
        if not self._padding:
            return 0.0
        (logprob,) = choice["logprobs"]["token_logprobs"]
        return min(1.0, len(self._padding) * math.exp(logprob))

    @property
    def _expected(self) -> str:
        return (
            f"{self.model.name} has {self.model.vocabulary} ids and the policy {self.vocabulary}, and a vLLM server "
            f"cannot leave the others out: expected a probability of at most {NEGLIGIBLE:g} of them all (or leave url "
            "out: an engine that the run starts leaves them out)"
        )

    def _most_bytes(self, longest: int) -> int:
        return super()._most_bytes(longest) + 200 * longest * (1 + self.top_k)


_MALFORMED: Final = (AttributeError, LookupError, TypeError, ValueError)


def _listed(places: Any, tokens: Sequence[int], k: int) -> Rows:
    # Each place lists the token of the text and the likeliest ones, by id.
    ids, logprobs = [], []
    for place, token in zip(places, tokens, strict=True):
        likeliest = sorted(place, key=lambda each: place[each]["rank"])[:k]
        ids.append([token, *map(int, likeliest)])
        logprobs.append([place[each]["logprob"] for each in (str(token), *likeliest)])
    return np.array(ids, np.int32).reshape(-1, 1 + k), np.array(logprobs, np.float32).reshape(-1, 1 + k)


class VllmLogprobs(VllmScorer[FloatArray | TopLogprobs, Rows]):
    """Scores each response token with its log-prob under a frozen causal LM: float32 [n], natural logarithm.

    Up to rounding they equal :class:`oppo.hf.serve.scorers.ReferenceLogprobs`, and with ``top_k``
    :class:`oppo.hf.serve.scorers.TeacherLogprobs`. An engine has its logits over the ids that may be sampled; a server
    over all ids of its model's table, and is refused where those beyond the policy's are likely. The probability of all
    ids that ``top_k`` leaves out is what the others, in float32, leave of 1, and at least 1e-7. See
    :class:`~oppo.vllm.scorers.VllmScorer`.

    Args:
        engine: serves a causal LM that shares the policy's tokenizer; or a server that does.
        sampling: the policy's; only the temperature and the ids that may be sampled count.
        top_k: of the likeliest ids at each token, so many are listed; 0: a float for each token and nothing else.
        key: what names it in errors, ``scorers.reference``.

    Raises:
        ConfigError: sampling leaves ids out, or a server would need a temperature.
        ModelRefused: the engine's model does not generate.

    Example:
        >>> with VllmEngine.start("models/sft", arguments=LOGPROBS) as engine:  # doctest: +SKIP
        ...     reference = VllmLogprobs(engine, sampling=policy.sampling)
    """

    def __init__(
        self, engine: VllmEngine | LogprobServer, *, sampling: Sampling, top_k: int = 0, key: str = ""
    ) -> None:
        server = isinstance(engine, LogprobServer)
        check_log_probs(sampling, server=server)
        self._top_k = top_k
        self._sampled = sampling.vocabulary
        if isinstance(engine, LogprobServer):
            super().__init__(engine, engine.model, engine.rows, key=key, track="log-probs")
            return
        config = engine.config
        if config.model_config.runner_type != "generate":
            raise ModelRefused(f"{engine.name} does not generate, and a log-prob is of a token: choose a causal model")
        size, cache = config.model_config.get_vocab_size(), config.cache_config
        known = min(sampling.vocabulary or size, size)
        if top_k > known:
            raise ConfigError(f"{engine.name} knows {known} ids, and top_k = {top_k} of them are asked for: give fewer")
        block = cache.block_size if cache.enable_prefix_caching else 0
        model = ScoringModel(engine.name, size, config.model_config.max_model_len - 1, block)
        super().__init__(engine, model, self._rows, key=key, track="log-probs")
        self._params = engine.sampling({**READING, "prompt_logprobs": top_k})
        self._tempers = (sampling.temperature or 1.0, known)
        self._tempered = self._tempers == (1.0, size)

    async def _rows(self, asked: Sequence[Asked]) -> list[tuple[Rows, int | None]]:
        # What others have left in the cache would give no log-probs, so each session has a cache of its own.
        engine: Any = self.engine
        if not self._tempered:
            await engine.call_workers("oppo_temper", *self._tempers)
            self._tempered = True
        prompts = [{"prompt_token_ids": each.tokens, "cache_salt": each.salt} for each in asked]
        answers = await engine.answers(prompts, self._params)
        return [
            (self._of_the_last(each, answer.prompt_logprobs), answer.num_cached_tokens)
            for each, answer in zip(asked, answers, strict=True)
        ]

    def _of_the_last(self, asked: Asked, flat: Any) -> Rows:
        # vLLM has none of the tokens that it took from its cache, or numbers without meaning.
        width, tokens = 1 + self._top_k, asked.unread
        since = len(flat.token_ids) - width * len(tokens)
        ids = np.array(flat.token_ids[max(since, 0) :], np.int32).reshape(-1, width)
        if ids[:, 0].tolist() != tokens:
            raise ModelLost(
                f"vLLM was asked for the log-probs of {len(tokens)} tokens, and gave those of {len(ids)}, other ones"
            )
        return ids, np.array(flat.logprobs[since:], np.float32).reshape(-1, width)

    def _cached_end(self, session: ReadRollout[Rows]) -> int:
        blocks = (len(session.tokens) - 1) // self.block
        return blocks * self.block + 1 if blocks else 0

    def _last_end(self, session: ReadRollout[Rows]) -> int:
        return len(session.tokens)

    def _value(self, session: ReadRollout[Rows]) -> FloatArray | TopLogprobs:
        ids, logprobs = (np.concatenate(each) for each in zip(*session.answers, strict=True))
        if not self._top_k:
            return logprobs[:, 0]
        if self._sampled and (unknown := ids[ids >= self._sampled]).size:  # an engine leaves them out
            raise RewardError(
                f"{self._model.name} lists the id {unknown[0]} among the top_k = {self._top_k} likeliest, and the "
                f"policy knows the {self._sampled} below {self._sampled}: ask for fewer, or leave url out, so that the "
                "run starts an engine, which leaves such ids out"
            )
        limits = np.finfo(np.float32)
        top = np.maximum(logprobs[:, 1:], limits.min)
        rest = 1 - np.exp(top, dtype=np.float64).sum(1, keepdims=True)
        others = np.log(np.maximum(rest, limits.eps)).astype(np.float32)
        return TopLogprobs(logprobs[:, 0].copy(), ids[:, 1:].copy(), np.concatenate((top, others), 1))
