"""Scorers on transformers, which read rollouts while they grow: log-probs, rewards of responses and steps, values.

Each scorer is a handle. Its worker computes where the model lives, in a place that several may share: token ids go in,
floats come out. Pickled, a worker crosses to another process without its open sessions, over the same weights.

Proximal log-probs are of response tokens, under the actor's weights before the update. Where the trainer's backend
also decodes, a token of the current weights has been scored already, and only stale ones are recomputed
(:class:`ProximalLogprobs`). Another engine's log-probs differ by its kernels and its precision, so all are recomputed
(:class:`RecomputedLogprobs`): the mismatch that corrections see then holds both staleness and engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

import anyio
import anyio.to_thread
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ConfigError, ModelLost
from oppo.events import (
    NO_COLUMNS,
    BoolArray,
    Chunk,
    Finish,
    FloatArray,
    Prompt,
    Response,
    Support,
    TokenColumn,
    TokenColumns,
    ToolTokens,
)
from oppo.hf.devices import synchronised
from oppo.hf.head import Measure, OwnHead, separable_head, token_measures, widen_head
from oppo.hf.kv.prefill import IncrementalPrefill, ReadState, TokenSpan
from oppo.hf.kv.reader import Reader, reader_of
from oppo.hf.loading import Loadable, sent, tensors, worker_maker
from oppo.hf.model_parts import backbone, score_head, token_head, vocabulary
from oppo.hf.weights import SentWeights, adopt, copies, lie_among
from oppo.images import ImageRef
from oppo.losses import Input, top_logprobs
from oppo.models import Sampling, Weights
from oppo.placement import Hosting, Make
from oppo.returns import TokenRewards, TopLogprobs
from oppo.scheduling import IN_ORDER, Priority
from oppo.scorers import Growth, ScorerCapabilities


@dataclass(frozen=True, slots=True, eq=False)
class ScorerInput:
    """Events for a scorer, in order within each rollout; pickled, reduced to what a scorer reads."""

    events: Sequence[Growth]
    extra: tuple[type[TokenColumn], ...] = ()
    columns: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        packed = [_packed(event, self.extra, self.columns) for event in self.events]
        return _unpacked, (packed,)


_Packed: TypeAlias = tuple[type[Growth], int, int, Mapping[str, object], bytes, TokenColumns, tuple[ImageRef, ...]]
"""Kind, rollout, start and columns of an event; its tokens, int32, and their further columns; its images."""


def _packed(event: Growth, extra: Sequence[type[TokenColumn]], columns: Sequence[str]) -> _Packed:
    start = 0 if isinstance(event, Prompt) else event.start
    given = event.columns if isinstance(event, Prompt) else {}
    held = {name: given[name] for name in columns if name in given}
    further = event.extra.only(extra) if isinstance(event, Chunk) else NO_COLUMNS
    tokens, images = event.tokens.astype(np.int32, copy=False).tobytes(), getattr(event, "images", ())
    return type(event), event.rollout, start, held, tokens, further, images


def _unpacked(packed: Sequence[_Packed]) -> ScorerInput:
    events: list[Growth] = []
    for kind, rollout, start, columns, buffer, extra, images in packed:
        tokens = np.frombuffer(buffer, np.int32)
        if kind is Prompt:
            events.append(Prompt(rollout, rollout, tokens, columns=columns, images=images))
        elif kind is ToolTokens:
            events.append(ToolTokens(rollout, start, tokens))
        else:
            logprobs, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
            events.append(Chunk(rollout, start, tokens, logprobs, versions, extra))
    return ScorerInput(events)


T = TypeVar("T")


class ScorerWorker(ABC, Generic[T]):
    """Reads rollouts as they grow, and keeps of each span what the scorer's result needs."""

    def __init__(
        self,
        model: PreTrainedModel,
        reader: Reader,
        *,
        deterministic: bool,
        predictive: bool = False,
        logits: bool = False,
    ) -> None:
        self._model = model
        self._deterministic = deterministic
        self._predictive = predictive
        self._logits = logits  # whether results follow from logits
        self._head: OwnHead | None = None
        self._prepared = False
        self.reader = self._prefill(reader)

    def _prefill(self, reader: Reader) -> IncrementalPrefill:
        return IncrementalPrefill(
            reader,
            name=type(self._model).__name__,
            vocabulary=vocabulary(self._model),
            keep=self._keep,
            deterministic=self._deterministic,
            predictive=self._predictive,
        )

    def extend(self, inputs: ScorerInput) -> None:
        self._prepare()
        self.reader.extend(inputs.events)

    def forget(self, rollouts: Iterable[int]) -> None:
        self.reader.forget(rollouts)

    def load(self, weights: Mapping[str, object]) -> None:
        # Every worker over the same memory computes with them.
        adopt(self._model, weights)
        synchronised(self._model.device)

    def _prepare(self) -> None:
        # Before the first pass over rollouts, since it needs one.
        if self._logits and not self._prepared:
            self._head, self._prepared = separable_head(self._model), True
            if self._head is None:
                self.reader = self._prefill(reader_of(self._model))

    def _measured_by(self, outputs: Tensor, measure: Measure) -> Tensor:
        # Outputs are hidden states, or logits if the head cannot run apart from its trunk.
        if self._head is None:
            return measure(outputs, slice(0, len(outputs)), False)["logprobs"]
        return self._head.measured(outputs, measure)["logprobs"]

    @abstractmethod
    def _keep(self, spans: Sequence[TokenSpan], outputs: Sequence[Tensor]) -> None:
        # Each of ``outputs`` [k, D] is at the last k positions of its span.
        ...

    def finish(self, lengths: Mapping[int, int]) -> list[T]:
        return read_back(self.reader.finish(lengths))


class LogprobWorker(ScorerWorker[T]):
    """Reads with a causal LM, and keeps numbers of each response token that follow from the logits which predict it."""

    def __init__(self, model: PreTrainedModel, deterministic: bool, sampling: Sampling) -> None:
        self._sampling = sampling
        super().__init__(model, reader_of(backbone(model)), deterministic=deterministic, predictive=True, logits=True)

    def load(self, weights: Mapping[str, object]) -> None:
        if weights:
            super().load(weights)

    @abstractmethod
    def _measured(self, logits: Tensor, targets: Tensor, support: Support) -> Tensor:
        # Of logits [t, V] and the tokens that they predict: [t] or [t, n].
        ...

    @torch.inference_mode()
    def _keep(self, spans: Sequence[TokenSpan], outputs: Sequence[Tensor]) -> None:
        # The output at a position predicts the next token: what predicts a span's first token is the last one before.
        before, read = list[Tensor](), list[tuple[ReadState, Tensor, Support]]()
        for span, output in zip(spans, outputs, strict=True):
            if not span.in_prompt:
                first = max(span.state.prompt - span.start, 0)
                before += [output[:-1]] if span.state.tail is None or first else [span.state.tail, output[:-1]]
                read.append((span.state, span.tokens[first:], span.extra.slice(first, None)[Support]))
        if read:
            states, targets, supports = zip(*read, strict=True)
            sizes = [len(tokens) for tokens in targets]
            support = Support.concatenate(zip(supports, sizes, strict=True))
            measured = self._in_chunks(torch.cat(before), torch.cat(targets).to(before[0].device), support)
            for state, each in zip(states, measured.split(sizes), strict=True):
                state.kept.append(each)
        tails = torch.stack([output[-1] for output in outputs])  # a view would keep the outputs alive
        for span, tail in zip(spans, tails.split(1), strict=True):
            span.state.tail = tail

    def _in_chunks(self, outputs: Tensor, targets: Tensor, support: Support) -> Tensor:
        def measure(logits: Tensor, at: slice, again: bool) -> Mapping[Input, Tensor]:
            del again
            given = support.slice(at.start, at.stop)
            return {"logprobs": self._measured(logits, targets[at], given)}

        return self._measured_by(outputs, measure)


class ReferenceWorker(LogprobWorker[FloatArray]):
    def _measured(self, logits: Tensor, targets: Tensor, support: Support) -> Tensor:
        return token_measures(logits, targets, support, self._sampling)["logprobs"]


class TeacherWorker(LogprobWorker[TopLogprobs]):
    def __init__(self, model: PreTrainedModel, deterministic: bool, sampling: Sampling, top_k: int) -> None:
        known = min(sampling.vocabulary or vocabulary(model), vocabulary(model))
        if not 0 < top_k <= known:
            raise ConfigError(
                f"a teacher gives the log-probs of its top_k likeliest ids: expected 1 to {known}, the ids that may be "
                f"sampled, got {top_k} (algorithm.distill_top_k): give fewer"
            )
        self._top_k = top_k
        super().__init__(model, deterministic, sampling)

    def _measured(self, logits: Tensor, targets: Tensor, support: Support) -> Tensor:
        logprobs = token_measures(logits, targets, support, self._sampling)["logprobs"]
        logits = logits[:, self._sampling.ids]
        ids = logits.topk(self._top_k).indices
        floats = torch.cat((logprobs[:, None], top_logprobs(logits, ids, self._sampling.temperature)), 1)
        return torch.cat((floats.view(torch.int32), ids.int()), 1)  # one tensor of bits [t, 2 k + 2]: one transfer

    def finish(self, lengths: Mapping[int, int]) -> list[TopLogprobs]:
        found, k = [], self._top_k
        for bits in read_back(self.reader.finish(lengths)):
            table = bits.reshape(-1, 2 * k + 2)
            floats = np.ascontiguousarray(table[:, : k + 2]).view(np.float32)
            ids = table[:, k + 2 :].astype(np.int32)
            found.append(TopLogprobs(floats[:, 0].copy(), ids, floats[:, 1:].copy()))
        return found


class RewardWorker(ScorerWorker[float]):
    def __init__(self, model: PreTrainedModel, deterministic: bool) -> None:
        self._padding = model.config.get_text_config().pad_token_id
        super().__init__(model, score_reader(model), deterministic=deterministic)

    def finish(self, lengths: Mapping[int, int]) -> list[float]:
        return [float(kept[-1]) for kept in read_back(self.reader.finish(lengths))]

    def _keep(self, spans: Sequence[TokenSpan], outputs: Sequence[Tensor]) -> None:
        for span, output in zip(spans, outputs, strict=True):
            real = [len(span.tokens) - 1] if self._padding is None else (span.tokens != self._padding).nonzero()
            if len(real):
                span.state.kept = [output[int(real[-1])]]
            elif span.start == 0:
                span.state.kept = [output[0]]  # the library's choice when there is nothing but padding


class ValueWorker(ScorerWorker[FloatArray]):
    def __init__(self, model: PreTrainedModel, deterministic: bool) -> None:
        super().__init__(model, score_reader(model), deterministic=deterministic)

    @torch.inference_mode()
    def _keep(self, spans: Sequence[TokenSpan], outputs: Sequence[Tensor]) -> None:
        for span, output in zip(spans, outputs, strict=True):
            span.state.kept.append(output[max(span.state.prompt - 1 - span.start, 0) :, 0])


def score_reader(model: PreTrainedModel) -> Reader:
    head = score_head(model)
    widen_head(model)
    model.train(mode=False)
    return reader_of(backbone(model), head=head)


def read_back(states: Sequence[ReadState]) -> list[Any]:
    """Return the kept values of each rollout, float32 [n], or int32 unchanged; the host waits once for all of them."""
    pieces = [piece for state in states for piece in state.kept]
    joined = torch.cat(pieces) if pieces else torch.zeros(0)
    kept = (joined if joined.dtype == torch.int32 else joined.float()).cpu().numpy()
    return np.split(kept, np.cumsum([sum(map(len, state.kept)) for state in states])[:-1])[: len(states)]


class ScorerHandle(Generic[T]):
    """A model that reads rollouts as they grow, in the place of its worker, which returns a ``T`` of each."""

    def __init__(
        self,
        make: Make[ScorerWorker[T]],
        place: Hosting,
        *,
        extra: tuple[type[TokenColumn], ...] = (),
        columns: tuple[str, ...] = (),
    ) -> None:
        self._worker = place.host(make)
        self._extra = extra
        self._columns = columns
        self.version = 0

    @property
    def capabilities(self) -> ScorerCapabilities:
        return ScorerCapabilities(time_slice=self._worker.time_slice)

    async def _follow(self, weights: SentWeights, version: int) -> None:
        def served() -> None:
            self.version = version

        await self._worker.load(_load, weights, served)

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        inputs = ScorerInput(events, extra=self._extra, columns=self._columns)
        await self._worker.at(priority).call("extend", _extend, inputs)

    async def _finished(self, finished: Sequence[Finish], priority: Priority) -> Sequence[T]:
        lengths = {event.rollout: len(event.response) for event in finished}
        return await self._worker.at(priority).call("finish", _finish, lengths)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        with suppress(ModelLost):  # sessions are lost with the place they were in
            await self._worker.at(priority).call("forget", _forget, list(rollouts))


# Bound where the worker is: each kind has its own methods.
def _load(worker: ScorerWorker[T], weights: Mapping[str, object]) -> None:
    worker.load(weights)


def _extend(worker: ScorerWorker[T], inputs: ScorerInput) -> None:
    worker.extend(inputs)


def _finish(worker: ScorerWorker[T], lengths: Mapping[int, int]) -> list[T]:
    return worker.finish(lengths)


def _forget(worker: ScorerWorker[T], rollouts: Sequence[int]) -> None:
    worker.forget(rollouts)


class StreamedScorer(ScorerHandle[T]):
    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T]:
        return await self._finished(finished, priority)


class Following(StreamedScorer[T]):
    """A scorer that serves the actor or the critic, as they are trained; sessions of older versions are stale."""

    _part: Literal["actor", "critic"]

    def __init__(self, make: Make[ScorerWorker[T]], model: Loadable, place: Hosting, **options: Any) -> None:
        super().__init__(make, place, **options)
        self._model = model

    def serves(self, weights: Weights) -> bool:
        return lie_among(getattr(weights, self._part), self.tensors())

    def tensors(self) -> frozenset[int]:
        return tensors(self._model)

    async def copied(self, weights: Weights) -> Weights:
        own = await anyio.to_thread.run_sync(copies, getattr(weights, self._part))
        return Weights(weights.version, actor=own) if self._part == "actor" else Weights(weights.version, critic=own)

    async def load(self, weights: Weights) -> None:
        """Serve its part of ``weights`` from the next call on; weights that do not fit are a ``ModelError``."""
        part = getattr(weights, self._part)  # of which a critic's head changes too, beside adapters
        actor = self._part == "actor"
        await self._follow(sent(self._model, part) if actor else SentWeights(part), weights.version)


class ReferenceLogprobs(StreamedScorer[FloatArray]):
    """Scores each response token with its log-prob under a frozen causal LM: float32 [n], natural logarithm.

    It is computed as the trainer does, by :func:`oppo.losses.token_logprobs`: of logits z, the log-prob of token t is
    (z / temperature)[t] - logsumexp(z / temperature), in float32; a temperature of 0 counts as 1. Where the policy's
    sampling left ids out, the logsumexp is over the others, so that the KL is between distributions over one support.
    Tool tokens get a log-prob too.

    Args:
        model: a causal LM that shares the policy's tokenizer; or its recipe, for a place on another machine.
        sampling: the policy's; only the temperature and the ids that may be sampled count.
        place: where the model lives: any place.
        deterministic: the bits of results do not depend on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model cannot be served row by row.
    """

    def __init__(self, model: Loadable, *, sampling: Sampling, place: Hosting, deterministic: bool = False) -> None:
        super().__init__(worker_maker(ReferenceWorker, model, deterministic, sampling), place, extra=(Support,))


class TeacherLogprobs(StreamedScorer[TopLogprobs]):
    """Scores each response token with its log-prob under a teacher, as :class:`ReferenceLogprobs` does, and its top k.

    The likeliest ids at each token are of the whole vocabulary, at the policy's temperature, whatever sampling left
    out. It keeps ``8 k + 8`` bytes of each token until its rollout finishes, and returns as many.

    Args:
        model, sampling, place, deterministic: as for :class:`ReferenceLogprobs`.
        top_k: ids at each token.

    Raises:
        ConfigError: there are fewer ids than ``top_k``.
    """

    def __init__(
        self, model: Loadable, *, sampling: Sampling, place: Hosting, top_k: int, deterministic: bool = False
    ) -> None:
        super().__init__(worker_maker(TeacherWorker, model, deterministic, sampling, top_k), place, extra=(Support,))


class RewardModel(StreamedScorer[float]):
    """Scores each rollout with one number: a sequence-classification model's, at the end of prompt + response.

    The number is what transformers' own call on this one sequence returns. In particular it is taken at the last token
    *that is not padding*: where the padding token is also the end-of-text token, at the token before it.

    Args:
        model: ``AutoModelForSequenceClassification`` with ``num_labels == 1``; or its recipe, see
            :class:`~oppo.hf.loading.ModelRecipe`.
        place: where the model lives: any place.
        deterministic: the bits of results do not depend on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model has several labels, no ``score`` layer, or cannot be served row by row.
    """

    def __init__(self, model: Loadable, *, place: Hosting, deterministic: bool = False) -> None:
        super().__init__(worker_maker(RewardWorker, model, deterministic), place)


class ValueModel(Following[FloatArray]):
    """Scores each response token with the critic's value of the state before it, and the state after: float32 [n + 1].

    The critic is a sequence-classification model with one label; the value of the state before response token ``i``
    is its ``score`` layer on the hidden state at position ``len(prompt) - 1 + i``. After :meth:`load`, sessions opened
    under an older version are stale: the caller forgets and replays them. Arguments and errors as for
    :class:`RewardModel`.
    """

    _part = "critic"

    def __init__(self, model: Loadable, *, place: Hosting, deterministic: bool = False) -> None:
        super().__init__(worker_maker(ValueWorker, model, deterministic), model, place)


class ProcessRewardWorker(ScorerWorker[TokenRewards]):
    def __init__(
        self, model: PreTrainedModel, deterministic: bool, separators: Sequence[int], label: int, baseline: float
    ):
        labels = int(model.config.num_labels or 0)
        if not -labels <= label < labels:
            raise ConfigError(f"{type(model).__name__} has {labels} labels, and none with the index {label}")
        self._label = label
        self._baseline = baseline
        widen_head(model)
        super().__init__(model, reader_of(backbone(model), head=token_head(model)), deterministic=deterministic)
        self._separators = torch.tensor(separators, dtype=torch.int64)

    @torch.inference_mode()
    def _keep(self, spans: Sequence[TokenSpan], outputs: Sequence[Tensor]) -> None:
        for span, output in zip(spans, outputs, strict=True):
            if not span.in_prompt:
                own = slice(max(span.state.prompt - span.start, 0), None)
                logits = output[own].float()
                rewards = logits[:, 0] if logits.shape[-1] == 1 else logits.softmax(-1)[:, self._label]
                span.state.kept.append(rewards - self._baseline)
                span.state.steps.append(torch.isin(span.tokens[own], self._separators))

    def finish(self, lengths: Mapping[int, int]) -> list[TokenRewards]:
        found = []
        states = self.reader.finish(lengths)
        for state, kept in zip(states, read_back(states), strict=True):
            steps = np.concatenate([[], *(each.numpy() for each in state.steps)]).astype(np.bool_)
            steps[-1:] = True
            found.append(TokenRewards(np.where(steps, kept, np.float32(0))))
        return found


class ProcessRewardModel(StreamedScorer[TokenRewards]):
    """Scores each step of a response: a reward at each token that ends a step, and at the last token.

    The reward is the probability of one label of a token-classification model at that token, as in "Let's Verify Step
    by Step" (Lightman et al. 2023, arXiv 2305.20050); of a model with one label it is the logit. All other tokens have
    reward 0. The score of a response is the sum of its rewards, so a response of more steps has a higher one, unless
    ``baseline`` is the average reward of a step.

    Args:
        model: ``AutoModelForTokenClassification`` of a decoder, which shares the policy's tokenizer; or its recipe.
        separators: ids of the tokens that end a step (:meth:`oppo.hf.tokenizer.HfTokenizer.ending_with`).
        label: index of the label whose probability counts; the last one by default.
        baseline: subtracted from each reward of a step.
        place, deterministic: as for :class:`RewardModel`.

    Raises:
        ConfigError: there is no such label.
        ModelRefused: the model has no linear head, or cannot be served row by row.
    """

    def __init__(
        self,
        model: Loadable,
        *,
        place: Hosting,
        separators: Sequence[int],
        label: int = -1,
        baseline: float = 0.0,
        deterministic: bool = False,
    ) -> None:
        super().__init__(worker_maker(ProcessRewardWorker, model, deterministic, separators, label, baseline), place)


class RecomputedLogprobs(ReferenceLogprobs):
    """Scores each response token with its log-prob under the actor's current weights: float32 [n], natural logarithm.

    It reads responses while they grow, as the reference does, with the same arguments. The model may be the module that
    is trained. After :meth:`load`, sessions opened under an older version are stale: the caller replays them.
    """

    async def load(self, weights: Weights) -> None:
        """Serve ``weights.actor`` from the next call on; tensors that are the model's own are not copied.

        An empty ``weights.actor`` changes the version only. Errors as of :meth:`ValueModel.load`.
        """
        await self._follow(SentWeights(weights.actor), weights.version)


class ProximalLogprobs(RecomputedLogprobs):
    """Scores each response token with its log-prob under the actor's current weights: float32 [n], natural logarithm.

    A token that these weights sampled keeps its recorded log-prob. So the model reads only rollouts with older tokens,
    whole and once, when they finish. Where no rollout was deferred it reads nothing, and the result is, to the bit,
    the behaviour log-probs. Log-probs are over the tokens' supports; recomputed ones agree with recorded ones of the
    same weights as :class:`ReferenceLogprobs` does.

    Args:
        model: the actor. It may be the module that decodes.
        sampling, place, deterministic: as for :class:`ReferenceLogprobs`.
        kv_on_sync: what the policy does with the KV cache of deferred rollouts. With ``keep``, no single version
            sampled the tokens that follow older ones, so they are recomputed too.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sampling: Sampling,
        place: Hosting,
        deterministic: bool = False,
        kv_on_sync: Literal["recompute", "keep"] = "recompute",
    ) -> None:
        super().__init__(model, sampling=sampling, place=place, deterministic=deterministic)
        self._mixed = kv_on_sync == "keep"

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        """Read nothing: which tokens are stale is known when a rollout finishes."""

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[FloatArray]:
        stale = {event.rollout: self._stale(event.response) for event in finished}
        deferred = [event for event in finished if stale[event.rollout].any()]
        logprobs = {event.rollout: event.response.logprobs for event in finished}
        for event, recomputed in zip(deferred, await self._recompute(deferred, priority), strict=True):
            logprobs[event.rollout] = np.where(stale[event.rollout], recomputed, event.response.logprobs)
        return list(logprobs.values())

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Do nothing: no rollout is kept between two calls."""

    def _stale(self, response: Response) -> BoolArray:
        older = response.versions < self.version
        return response.sampled & (np.logical_or.accumulate(older) if self._mixed else older)

    async def _recompute(self, finished: Sequence[Finish], priority: Priority) -> Sequence[FloatArray]:
        if not finished:
            return []
        try:
            events = [event for each in finished for event in (each.response.prompt, each.response.chunk())]
            await super().extend(events, priority=priority)
            return await super().finish(finished, priority=priority)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await super().forget([event.rollout for event in finished], priority=priority)
            raise


class SelfTeacher(Following[FloatArray | TopLogprobs]):
    """The policy as its own teacher, with its current weights: log-probs as of :class:`TeacherLogprobs`.

    Behind the policy's own prompt it has nothing to teach: see :class:`oppo.scorers.BehindPrompt`.

    Args:
        model: the actor, which may be the module that decodes; or how it is loaded, with its adapters.
        top_k: ids at each token; ``None``: the log-probs of tokens alone, as of :class:`ReferenceLogprobs`.
        sampling, place, deterministic: as for :class:`ReferenceLogprobs`.

    Raises:
        ConfigError: there are fewer ids than ``top_k``.
    """

    _part = "actor"

    def __init__(
        self,
        model: Loadable,
        *,
        sampling: Sampling,
        place: Hosting,
        top_k: int | None = None,
        deterministic: bool = False,
    ) -> None:
        make: Make[ScorerWorker[Any]] = (
            worker_maker(ReferenceWorker, model, deterministic, sampling)
            if top_k is None
            else worker_maker(TeacherWorker, model, deterministic, sampling, top_k)
        )
        super().__init__(make, model, place, extra=(Support,))


class AveragedTeacher(SelfTeacher):
    """The policy as its own teacher, with an exponential moving average of its weights.

    After each update the average is ``(1 - rate) average + rate policy`` (Hübotter et al. 2026, arXiv 2601.20802), of
    the weights that the policy computes with: of adapters, the average of what they add, not of their matrices. It is
    in float32, beside the served model, and a part of the state of a run.

    Args:
        model: a causal LM of the policy's shape, without adapters, that nothing else serves; or how it is loaded.
        start: the policy's weights at the start, under the names of a model without adapters, as
            :meth:`oppo.models.Weights.standalone` returns them.
        rate: above 0, at most 1.
        others: as for :class:`SelfTeacher`.
    """

    def __init__(self, model: Loadable, start: Mapping[str, object], *, rate: float, **others: Any) -> None:
        super().__init__(model, **others)
        self._rate = rate
        self._added = 0
        floats = dict[int, Tensor]()  # a tensor with two names is averaged once
        self._average = {
            name: floats.setdefault(value.data_ptr(), value.detach().float().clone())
            for name, value in start.items()
            if isinstance(value, Tensor)
        }
        self._distinct = dict({id(value): (name, value) for name, value in self._average.items()}.values())

    async def copied(self, weights: Weights) -> Weights:
        """Return a copy of the average with these weights."""
        await self._add(weights)
        return Weights(weights.version, actor=await anyio.to_thread.run_sync(copies, self._average))

    async def load(self, weights: Weights) -> None:
        """Serve the average with these weights from the next call on; each version is added once."""
        await self._add(weights)
        newest = weights.version == self._added
        await self._follow(SentWeights(self._average if newest else weights.actor), weights.version)

    def state_dict(self) -> Mapping[str, object]:
        """Return the average, float32, and the version of the newest weights in it."""
        average = {name: each.cpu().numpy().copy() for name, each in self._distinct.items()}
        return {"version": self._added, "average": average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; they are served from the next :meth:`load` on."""
        for name, value in state["average"].items():
            self._average[name].copy_(torch.from_numpy(value))
        self._added = int(state["version"])

    async def _add(self, weights: Weights) -> None:
        if weights.version > self._added:
            await anyio.to_thread.run_sync(self._lerp, weights.standalone)
            self._added = weights.version

    @torch.no_grad()
    def _lerp(self, standalone: Callable[[], Mapping[str, object]]) -> None:
        given = standalone()
        for name, average in self._distinct.items():
            average.lerp_(cast("Tensor", given[name]).detach().to(average), self._rate)
