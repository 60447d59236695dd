"""Scorers on vLLM: a request reads on from what the prefix cache keeps of its rollout, which is incremental prefill.

::

    Prompt | Chunk | ToolTokens  ->  whole blocks of the cache  ->  a request that fills the cache
    Finish                       ->  to the end                 ->  a request that reads on from there, with the answer

A scalar reward is `classify` on growing prefixes. References and teachers read the log-probs of prompts: vLLM computes
those of the tokens that its cache does not hold. The log-prob of a token comes from the hidden state before it: a
rollout that goes on is read one token past a whole block, which the next request reads again.
"""

from __future__ import annotations

import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeAlias, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import numpy as np

from oppo.errors import ConfigError, ModelLost, ModelRefused, RewardError, as_itself, shortened
from oppo.events import Chunk, Finish, FloatArray, IntArray, Prompt, ToolTokens
from oppo.libraries import require
from oppo.models import Sampling, SamplingSettings, Shared
from oppo.observe import Reporter
from oppo.returns import TopLogprobs
from oppo.scorers import RolloutSession, RolloutSessions
from oppo.vllm.arguments import address_of
from oppo.vllm.async_llm import VllmEngine
from oppo.vllm.server import Inspection, config_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")
A = TypeVar("A")

# Arguments of the engine of a scalar reward model; of a model whose log-probs are at a temperature, or over a part of
# its table of ids.
SCALAR: Final[Mapping[str, object]] = MappingProxyType({"runner": "pooling", "convert": "classify"})
LOGPROBS: Final[Mapping[str, object]] = MappingProxyType({"worker_extension_cls": "oppo.vllm.plugin.LogitsOfPrompts"})

# The request to vLLM: the logit of a sequence; the log-probs of a prompt.
QUESTION: Final = {"task": "classify", "use_activation": False}
READING: Final[Mapping[str, object]] = {
    "max_tokens": 1,
    "temperature": 0,
    "skip_reading_prefix_cache": False,
    "flat_logprobs": True,
    "detokenize": False,
}

SERVED_BLOCK: Final = 16  # tokens of a block of a server's prefix cache, which it does not say: vLLM's on a GPU
LISTED: Final = 20  # likeliest ids that a server lists unless ``--max-logprobs`` says otherwise
NEGLIGIBLE: Final = 1e-4  # probability of all ids beyond the policy's, up to which a server's log-probs pass for its


@dataclass(frozen=True, slots=True)
class ScoringModel:
    name: str
    vocabulary: int  # upper bound of token ids; vLLM itself dies of a larger one
    longest: int  # tokens of a sequence that it reads
    block: int = 0  # tokens of a block of the prefix cache; 0: each rollout is read when it has ended
    padding: int | None = None  # the id that is never scored, unless nothing else was read


@dataclass(slots=True)
class ReadTokens:
    computed: int = 0
    again: int = 0  # among them: computed before, and lost from the cache


@dataclass(slots=True, eq=False)
class ReadRollout(RolloutSession, Generic[A]):
    tokens: list[int] = field(default_factory=list)
    salt: str = field(default_factory=lambda: uuid4().hex)  # names it among all sessions
    read: int = 0
    answers: list[A] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request about the beginning of a rollout; requests before have ``read`` tokens, or at least the prompt."""

    salt: str
    tokens: list[int]
    read: int

    @property
    def unread(self) -> list[int]:
        return self.tokens[self.read :]


Asks: TypeAlias = Callable[[Sequence[Asked]], Awaitable[list[tuple[A, int | None]]]]
"""Returns each answer, and how many tokens of its request were not computed, if that is known."""


class VllmScorer(Shared, Generic[T, A]):
    """Reads each rollout while it grows, and returns its value at the end. No other scorer uses its engine.

    Nothing is computed twice while the cache has room for the open rollouts; ``tokens`` counts what was.
    """

    def __init__(
        self, engine: VllmEngine | ScoringServer, model: ScoringModel, ask: Asks[A], *, key: str, track: str
    ) -> None:
        self.engine, self.tokens, self.reporter = engine, ReadTokens(), Reporter(track)
        self._key, self._model, self._ask = key, model, ask
        self.longest, self.block, self.version = model.longest, model.block, 0
        self._sessions = RolloutSessions(
            model.name,
            lambda prompt: ReadRollout[A](prompt.rollout, len(prompt.tokens)),
            vocabulary=model.vocabulary,
            longest=model.longest,
            remedy="shorten the prompts, lower max_new_tokens, or raise the engine's max_model_len",
        )

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        grown = {event.rollout: self._received(event) for event in events}
        if self.block:
            await self._read("extend", [(session, self._cached_end(session)) for session in grown.values()])

    async def finish(self, finished: Sequence[Finish]) -> list[T]:
        sessions = [self._sessions.whole(event.rollout, len(event.response)) for event in finished]
        await self._read("finish", [(session, self._last_end(session)) for session in sessions])
        await self.forget([session.rollout for session in sessions])
        return [self._value(session) for session in sessions]

    async def forget(self, rollouts: Sequence[int]) -> None:
        self._sessions.forget(rollouts)

    @abstractmethod
    def _cached_end(self, session: ReadRollout[A]) -> int:
        """Return how far to read a rollout that goes on, so that the cache keeps whole blocks."""

    @abstractmethod
    def _last_end(self, session: ReadRollout[A]) -> int:
        """Return how far to read a rollout that has ended."""

    @abstractmethod
    def _value(self, session: ReadRollout[A]) -> T:
        """Return the value of a rollout that was read."""

    def _received(self, event: Prompt | Chunk | ToolTokens) -> ReadRollout[A]:
        session = self._sessions.receive(event)
        session.tokens += event.tokens.tolist()
        return session

    async def _read(self, label: str, ends: Sequence[tuple[ReadRollout[A], int]]) -> None:
        unread = [(session, end) for session, end in ends if end > 0 and end != session.read]
        if not unread:
            return
        asked = [Asked(each.salt, each.tokens[:end], max(each.read, each.prompt)) for each, end in unread]
        try:
            with self.reporter.reported(label):
                answers = await self._ask(asked)
        except (ModelLost, RewardError) as error:
            raise type(error)(f"{self._key}: {error}" if self._key else str(error)) from error
        for (session, end), (answer, cached) in zip(unread, answers, strict=True):
            if cached is not None:
                self.tokens.computed += end - cached
                self.tokens.again += max(0, min(session.read, end) - cached)
            session.read = end
            session.answers.append(answer)

    async def _open(self, stack: AsyncExitStack) -> None:
        if isinstance(self.engine, ScoringServer):
            await stack.enter_async_context(self.engine.service)


class ScoringServer(ABC):
    """A vLLM server that scores by one of its routes; others start and end it.

    ``source``: the model that it serves, a directory or hub name, whose configuration is read here. The rest is of
    :class:`~oppo.rewards.http.HttpReward`, which makes a request again that fails in a way that may pass.
    """

    ROUTE: ClassVar[str]
    flags = ""
    bytes_of_token = 0  # in an answer

    def __init__(
        self,
        url: str,
        source: str | Path,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        attempts: int = 4,
        trust_remote_code: bool = False,
        transport: Any = None,
    ) -> None:
        require("http", "a vLLM server", module="httpx")
        import httpx  # noqa: PLC0415 - an extra

        from oppo.rewards.http import HttpReward  # noqa: PLC0415

        self.url, name = address_of(url), Path(str(source)).name
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        config = config_of(source, trust_remote_code=trust_remote_code)
        with httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport) as client:
            port = f" --port {urlsplit(self.url).port}" if urlsplit(self.url).port else ""
            command = f"vllm serve {shlex.quote(str(source))}{self.flags}{port}"
            found = Inspection(self.url, client, source, bool(api_key), command=command)
            found.check_version()
            served = (found.asked("GET", "/v1/models").get("data") or [{}])[0]
            self.served = str(served.get("id", ""))
            longest = served.get("max_model_len", 0)
            found.expect("max_model_len in /v1/models", "a number of tokens", longest, ok=longest > 0)
            self.model = self._described(name, config, longest)
            self._try(found)
            found.settle()
        self.service = HttpReward(
            f"{self.url}{self.ROUTE}",
            headers=headers,
            timeout=timeout,
            attempts=attempts,
            request=lambda _, sequences, __: self._asked(sequences),
            scores=self._scores,
            most_bytes=10_000_000 + self.bytes_of_token * longest,
            transport=transport,
        )

    @abstractmethod
    def _try(self, found: Inspection) -> None:
        """Score something, and note faults."""

    @abstractmethod
    def _described(self, name: str, config: Any, longest: int) -> ScoringModel:
        """Return the facts of a model of transformers' ``config`` that is read up to ``longest`` tokens."""

    @abstractmethod
    def _asked(self, sequences: Any) -> dict[str, object]:
        """Return the body of a request."""

    @abstractmethod
    def _scores(self, answer: Any) -> object:
        """Return an answer's numbers for each sequence; raises ``LookupError``, ``TypeError`` or ``ValueError``."""

    def abort(self) -> None:  # noqa: B027 - a request ends by its timeout
        """Do nothing."""

    close = abort  # others end the server


def _scalar_model(name: str, config: VllmConfig) -> ScoringModel:
    model, cache, pooler = config.model_config, config.cache_config, config.model_config.pooler_config
    if pooler is None:
        raise ModelRefused(f'{name} generates: start its engine with runner="pooling" and convert="classify"')
    _check_labels(name, model.hf_config)
    if pooler.seq_pooling_type != "LAST" or not cache.enable_prefix_caching:
        raise ModelRefused(
            f"{name} pools {pooler.seq_pooling_type} {'with' if cache.enable_prefix_caching else 'without'} a "
            "prefix cache, so it cannot be read as rollouts grow: choose a causal model that is scored at its last "
            "token, or serve it as a whole-rollout scorer"
        )
    if pooler.logit_mean is not None or pooler.logit_sigma is not None:
        raise ModelRefused(
            f"{name} scales its score (logit_mean {pooler.logit_mean}, logit_sigma {pooler.logit_sigma}), which no "
            "other backend does: take these out of its pooling configuration"
        )
    padding = model.hf_text_config.pad_token_id
    return ScoringModel(name, model.get_vocab_size(), model.max_model_len, cache.block_size, padding)


def _check_labels(name: str, config: Any) -> None:
    if (labels := config.num_labels) != 1:
        raise ModelRefused(f"{name} has {labels} labels, but a score is one number: choose a model with one label")


class RewardServer(ScoringServer):
    """A vLLM server that scores growing prefixes; see :class:`ScoringServer`.

    Example:
        >>> reward = VllmReward(RewardServer("http://localhost:8000", "models/reward"))  # doctest: +SKIP
    """

    ROUTE = "/pooling"
    flags = " --runner pooling --convert classify"

    async def classify(self, asked: Sequence[Asked]) -> list[tuple[float, int | None]]:
        service: Any = self.service
        found: list[list[float]] = await service([], [each.tokens for each in asked])
        if [len(each) for each in found] != [1] * len(asked) or not all(map(math.isfinite, chain(*found))):
            raise RewardError(
                f"{self.url} was asked for {len(asked)} scores, and answered {shortened(str(found), 200)}"
            )
        return [(score, None) for (score,) in found]

    def _try(self, found: Inspection) -> None:
        if scored := found.asked("POST", self.ROUTE, self._asked([[0]])):
            try:
                ok = [len(each) for each in self._scores(scored)] == [1]
            except _MALFORMED:
                ok = False
            found.expect("the score of a token by /pooling", "a number", scored.get("data"), ok=ok)

    def _described(self, name: str, config: Any, longest: int) -> ScoringModel:
        _check_labels(name, config)
        text = config.get_text_config()
        return ScoringModel(name, int(text.vocab_size), longest, SERVED_BLOCK, text.pad_token_id)

    def _asked(self, sequences: Any) -> dict[str, object]:
        return {"model": self.served, **QUESTION, "input": sequences}

    def _scores(self, answer: Any) -> list[list[float]]:
        found = sorted(answer["data"], key=lambda each: each["index"])
        return [[float(number) for number in each["data"]] for each in found]


class VllmReward(VllmScorer[float, float]):
    """Scores each rollout with one number: a sequence-classification model's, at the end of prompt + response.

    The number is the model's logit, without activation, at the last token *that is not padding*: the same that
    :class:`oppo.hf.serve.scorers.RewardModel` returns, up to rounding. See :class:`~oppo.vllm.scorers.VllmScorer`.

    Args:
        engine: serves ``AutoModelForSequenceClassification`` with ``num_labels == 1``; started with :data:`SCALAR`. Or
            a server that does.
        key: what names it in errors, ``rewards.0``.

    Raises:
        ModelRefused: the engine's model cannot score growing prefixes.

    Example:
        >>> with VllmEngine.start("models/reward", arguments=SCALAR) as engine:  # doctest: +SKIP
        ...     reward = VllmReward(engine)
    """

    def __init__(self, engine: VllmEngine | RewardServer, *, key: str = "") -> None:
        if isinstance(engine, RewardServer):
            super().__init__(engine, engine.model, engine.classify, key=key, track="reward model")
            return
        model, question = _scalar_model(engine.name, engine.config), engine.pooling(QUESTION)

        async def classify(asked: Sequence[Asked]) -> list[tuple[float, int | None]]:
            answers = await engine.answers([{"prompt_token_ids": each.tokens} for each in asked], question)
            return [(each.outputs.data.tolist()[0], each.num_cached_tokens) for each in answers]

        super().__init__(engine, model, classify, key=key, track="reward model")

    def _cached_end(self, session: ReadRollout[float]) -> int:
        return len(session.tokens) // self.block * self.block

    def _last_end(self, session: ReadRollout[float]) -> int:
        # The last token that is not padding is scored, as transformers has it.
        tokens, padding = session.tokens, self._model.padding
        real = (end for end in range(len(tokens), 0, -1) if tokens[end - 1] != padding)
        return next(real, 1)

    def _value(self, session: ReadRollout[float]) -> float:
        return session.answers[-1]


# Of tokens: ids int32 [n, 1 + k] and their log-probs float32 [n, 1 + k], the token itself and the k likeliest.
Rows: TypeAlias = tuple[IntArray, FloatArray]
_MALFORMED: Final = (AttributeError, LookupError, TypeError, ValueError)


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


class LogprobServer(ScoringServer):
    """A vLLM server that gives the log-probs of whole sequences: it does not say what its cache held.

    ``top_k``: the server needs ``--max-logprobs`` of as many. ``vocabulary``: ids of the policy; a server cannot leave
    the others out (rows that pad its table), so it is asked for the likeliest of them behind each response.
    """

    ROUTE = "/v1/completions"

    def __init__(self, url: str, source: str | Path, *, top_k: int = 0, vocabulary: int = 0, **given: Any) -> None:
        self.top_k = top_k
        self.vocabulary = vocabulary
        self.flags = f" --max-logprobs {top_k}" if top_k > LISTED else ""
        self.bytes_of_token = 200 * (1 + top_k)
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
        top_k: the number of likeliest ids that are listed at each token; 0: a float for each token and nothing else.
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
        # Prefix-cache hits on other sessions' tokens give no log-probs, so each session has a cache of its own.
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
