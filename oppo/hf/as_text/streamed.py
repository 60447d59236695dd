"""A model with another tokenizer or chat template, streamed: it reads the rollout as text while that grows.

A token is sent on when what follows can hardly change it: the last word is held back, and of a word without end its
last tokens. That is a guess. In the end the model has read the tokens of the whole text, in one call of its
tokenizer: where they differ from the tokens that were sent, it goes back to the first difference.

The log-probs that a teacher has of the text are shared out to the tokens that the policy sampled:

::

    policy     un | believ | able | <eos>         ends in characters    2  8  12
    teacher    unbeliev | able | <|im_end|>                                8  12
    spans      [un believ] [able] [<eos>]         a span ends where both have a token that ends

Both models give each span a log-prob, the sum over their tokens in it. Their difference is shared evenly among the
policy's tokens of the span.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ConfigError
from oppo.events import Drop, Finish, FloatArray, IntArray, Prompt, Response, ToolTokens
from oppo.hf.as_text.rendering import (
    EMPTY,
    Form,
    OverLong,
    Pieces,
    PromptText,
    Rendering,
    TextReader,
    TooLong,
    prompt_text,
)
from oppo.hf.kv.prefill import TokenSpan
from oppo.hf.kv.reader import Reader, reader_of
from oppo.hf.loading import worker_maker
from oppo.hf.model_parts import backbone, longest
from oppo.hf.serve.scorers import ScorerHandle, ScorerInput, ScorerWorker, read_back, score_reader
from oppo.hf.tokenizer import HfTokenizer, Rendered
from oppo.losses import Input, token_logprobs
from oppo.models import Sampling
from oppo.placement import Hosting
from oppo.scheduling import IN_ORDER, Priority
from oppo.scorers import RolloutSession, RolloutSessions, ScorerCapabilities

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands in decoded text for an incomplete character
EMPTY_TEXT: Final = Rendered("")  # what is before the response, where that is not known before the end


class GrowingText:
    """Decodes a response a few tokens at a time; unless ``settled``, earlier text has changed, and no more comes."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.tokens: list[int] = []
        self.settled = True
        self._decode = decode
        self._context = 0  # first token of those behind which new ones are decoded
        self._known = 0  # tokens whose text was returned

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain now: all, unless it ends in an incomplete character."""
        self.tokens += tokens
        if not self.settled:
            return ""
        before = self._decode(self.tokens[self._context : self._known])
        after = self._decode(self.tokens[self._context :])
        if not after.startswith(before):
            self.settled = False
            return ""
        if after.endswith(REPLACEMENT):
            return ""
        if len(after) > len(before):
            self._context = self._known
        self._known = len(self.tokens)
        return after[len(before) :]


TAIL: Final = 16  # tokens of a word that are held back at most: merges reach back less far
CONTEXT: Final = 200  # characters before new text that are tokenized again with it, at most

MAX_REWINDS: Final = 3
"""Rewinds after which the rest of a rollout waits for its end: this text cannot be cut where words end."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of the tokens that were sent: the first ``keep`` stay, and ``ids`` follow."""

    keep: int
    ids: Sequence[int]


class Retokenizer:
    """The state of one rollout; ``reread`` counts tokens that were sent and taken back."""

    def __init__(
        self,
        rendering: Rendering,
        reader: TextReader,
        decode: Callable[[Sequence[int]], str],
        prompt: PromptText,
        closing: Sequence[int] = (),
    ) -> None:
        self.sent: list[int] = []
        self.reread = 0
        self._rendering = rendering
        self._reader = reader
        self._decode = decode
        self._prompt = prompt
        opening = rendering.opening(prompt) if reader.knows_offsets else None
        self._streams = opening is not None
        self._opening = opening or EMPTY_TEXT
        self._text = self._opening.text
        self._end = 0  # of the text that was sent, in characters
        self._rewinds = 0
        self._growing = GrowingText(decode)
        self.tokens: Sequence[int] = self._growing.tokens
        self._closing = closing
        self.whole: Rendered | None = None

    @property
    def begins(self) -> int | None:
        return len(self._opening.text) if self._opening is not EMPTY_TEXT else None

    def grow(self, tokens: Sequence[int]) -> Edit:
        """Return what becomes certain with more of the response; none at first: the prompt alone."""
        self._text += self._growing.push(tokens)
        if not (self._streams and self._growing.settled) or len(self.sent) >= self._reader.limit:
            return Edit(len(self.sent), ())
        return self._continued() or self._restarted()

    def finish(self) -> Edit:
        response = self._decode(self._growing.tokens)
        self.whole = self._rendering.whole(self._prompt, response)
        return self._corrected([*self._reader.features(self.whole)["input_ids"], *self._closing])

    def _continued(self) -> Edit | None:
        start = max(last_word(self._text[: self._end]), self._end - CONTEXT) if self._end else 0
        if not start:
            return self._restarted()
        pieces = self._reader.pieces(replace(self._so_far().after(start), special=False))
        ends = [start + end for end in pieces.ends]
        known = sum(1 for _ in takewhile(lambda end: end <= self._end, ends))
        if not known or ends[known - 1] != self._end or pieces.ids[known - 1] != self.sent[-1]:
            return None
        stop = self._stable(Pieces(pieces.ids, ends))
        return self._sent(Edit(len(self.sent), pieces.ids[known:stop]), ends[max(stop, known) - 1])

    def _restarted(self) -> Edit:
        pieces = self._reader.pieces(self._so_far())
        stop = self._stable(pieces)
        return self._corrected(pieces.ids[:stop], pieces.ends[stop - 1] if stop else 0)

    def _so_far(self) -> Rendered:
        response = (len(self._opening.text), len(self._text))
        return replace(self._opening, text=self._text, data=[*self._opening.data, response])

    def _corrected(self, ids: Sequence[int], end: int = 0) -> Edit:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.sent, ids, strict=False)))
        if taken_back := len(self.sent) - same:
            self.reread += taken_back
            self._rewinds += 1
            self._streams = self._rewinds < MAX_REWINDS
        return self._sent(Edit(same, ids[same:]), end)

    def _sent(self, edit: Edit, end: int) -> Edit:
        room = self._reader.limit - edit.keep
        self.sent[edit.keep :] = edit.ids[:room]
        self._end = end
        return Edit(edit.keep, edit.ids[:room])

    def _stable(self, pieces: Pieces) -> int:
        border, ends = last_word(self._text), pieces.ends
        whole_words = sum(1 for _ in takewhile(lambda end: end <= border, ends))
        stop = max(whole_words, len(ends) - TAIL)
        while 0 < stop < len(ends) and ends[stop - 1] == ends[stop]:  # inside of a character
            stop -= 1
        return stop


def last_word(text: str) -> int:
    head, *word = text.rsplit(maxsplit=1) or [""]
    return len(head) if word else 0


V = TypeVar("V")


class Unaligned(Exception):  # noqa: N818 - it says what happened
    """The tokens of a text cannot be aligned with the policy's."""


REREAD = "bridge/reread_tokens"  # the metric of the tokens of a rollout that were read in vain
TAIL_TOKENS = "bridge/tail_tokens"  # the metric of the tokens of a rollout that were read when it had ended


@dataclass(frozen=True, slots=True)
class Bridge:
    """How a rollout becomes the text that a reward model reads; picklable.

    Attributes:
        policy: the policy's tokenizer.
        reader: the model's.
        form: of the text; see :class:`~oppo.hf.as_text.rendering.Rendering`.
        prompt_column: the column of the data that holds the prompt.
        over_long: what becomes of a rollout that is longer than the model reads, in its own tokens.
    """

    policy: HfTokenizer
    reader: HfTokenizer
    form: Form = "joined"
    prompt_column: str = "prompt"
    over_long: OverLong = "error"


@dataclass(frozen=True, slots=True)
class Found(Generic[V]):
    """The result of one rollout, or why there is none; the tokens read in vain, and those read at its end."""

    value: V | None
    refusal: str
    reread: int
    tail: int


@dataclass(slots=True, eq=False, kw_only=True)
class BridgedSession(RolloutSession):
    retokenizer: Retokenizer
    read: int = 0


class BridgeWorker(ScorerWorker[Found[V]]):
    """Retokenizes rollouts and reads them; ``overlap`` tokens before the first that changed are read again too."""

    def __init__(
        self,
        model: PreTrainedModel,
        deterministic: bool,
        bridge: Bridge,
        reader: Reader,
        *,
        overlap: int = 0,
        logits: bool = False,
    ) -> None:
        self._bridge = bridge
        self._overlap = overlap
        self._name = type(model).__name__
        self._text = TextReader(bridge.reader, longest(model), bridge.over_long)
        self._rendering = Rendering(bridge.form, bridge.reader)
        self._sessions = RolloutSessions(self._name, self._opened)
        super().__init__(model, reader, deterministic=deterministic, logits=logits)

    @property
    def _closing(self) -> Sequence[int]:
        return ()

    @abstractmethod
    def _value(self, retokenizer: Retokenizer, kept: FloatArray) -> V:
        # The result of the kept tokens of a rollout; raises ``Unaligned``.
        ...

    def extend(self, inputs: ScorerInput) -> None:
        self._prepare()
        grown: dict[int, list[int]] = {}
        for event in inputs.events:
            self._sessions.receive(event)
            tokens = grown.setdefault(event.rollout, [])
            tokens += [] if isinstance(event, Prompt) else event.tokens.tolist()
        self._read({rollout: self._sessions[rollout].retokenizer.grow(tokens) for rollout, tokens in grown.items()})

    def finish(self, lengths: Mapping[int, int]) -> list[Found[V]]:
        edits = {rollout: self._ended(rollout, length) for rollout, length in lengths.items()}
        complete = {rollout: edit for rollout, edit in edits.items() if isinstance(edit, Edit)}
        self._read(complete)
        read = {rollout: sent for rollout in complete if (sent := len(self._sent(rollout)))}
        kept = dict(zip(read, read_back(self.reader.finish(read)), strict=True))
        found = []
        for rollout, edit in edits.items():
            value, refusal = None, edit if isinstance(edit, str) else ""
            retokenizer = self._sessions[rollout].retokenizer
            try:
                value = self._value(retokenizer, kept[rollout]) if rollout in kept else None
            except Unaligned as error:
                refusal = str(error)
            tail = len(edit.ids) if isinstance(edit, Edit) else 0
            refusal = refusal or (EMPTY if value is None else "")
            found.append(Found(value, refusal, retokenizer.reread, tail))
        self.forget(lengths)
        return found

    def forget(self, rollouts: Iterable[int]) -> None:
        rollouts = list(rollouts)
        self._sessions.forget(rollouts)
        self.reader.forget(rollouts)

    def _opened(self, prompt: Prompt) -> BridgedSession:
        self.reader.extend([Prompt(prompt.rollout, prompt.rollout, np.zeros(0, np.int32))])
        decode = self._bridge.policy.decode
        text = prompt_text(prompt, self._bridge.prompt_column, decode)
        retokenizer = Retokenizer(self._rendering, self._text, decode, text, self._closing)
        return BridgedSession(prompt.rollout, len(prompt.tokens), retokenizer=retokenizer)

    def _sent(self, rollout: int) -> list[int]:
        return self._sessions[rollout].retokenizer.sent

    def _ended(self, rollout: int, length: int) -> Edit | str:
        found = self._sessions.whole(rollout, length).retokenizer
        try:
            return found.finish()
        except TooLong as error:
            return self._text.refused(rollout, error, self._name)

    def _read(self, edits: Mapping[int, Edit]) -> None:
        chunks: list[ToolTokens] = []
        for rollout, edit in edits.items():
            session = self._sessions[rollout]
            changed = edit.keep < session.read
            kept = self.reader.rewind(rollout, max(0, edit.keep - self._overlap) if changed else edit.keep)
            tokens = np.array(self._sent(rollout)[kept:], np.int32)
            session.read = len(self._sent(rollout))
            if len(tokens):
                chunks.append(ToolTokens(rollout, kept, tokens))
        self.reader.extend(chunks)


class ScoreWorker(BridgeWorker[float]):
    def __init__(self, model: PreTrainedModel, deterministic: bool, bridge: Bridge) -> None:
        self._padding = model.config.get_text_config().pad_token_id
        super().__init__(model, deterministic, bridge, score_reader(model))

    @torch.inference_mode()
    def _keep(self, spans: Sequence[TokenSpan], outputs: Sequence[Tensor]) -> None:
        # The score at each position is kept, since the last one is known only in the end.
        for span, output in zip(spans, outputs, strict=True):
            before = torch.cat(span.state.kept)[: span.start] if span.state.kept else output[:0, 0]
            span.state.kept = [before, output[:, 0].float()]

    def _value(self, retokenizer: Retokenizer, kept: FloatArray) -> float:
        ids = retokenizer.sent
        last = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] != self._padding), 0)
        return float(kept[last])


class Bridged(ScorerHandle[Found[V]]):
    """A frozen model that reads rollouts as text while they grow; ``column`` of the data holds the prompt."""

    def __init__(self, make: Callable[[], BridgeWorker[V]], place: Hosting, column: str) -> None:
        super().__init__(make, place, columns=(column,))
        self._samples: dict[str, list[float]] = {}

    @property
    def capabilities(self) -> ScorerCapabilities:
        return ScorerCapabilities(time_slice=self._worker.time_slice, samples=self._taken)

    def _taken(self) -> Mapping[str, Sequence[float]]:
        samples, self._samples = self._samples, {}
        return samples

    async def _values(self, finished: Sequence[Finish], priority: Priority) -> list[V | Drop]:
        found = await self._finished(finished, priority)
        self._samples.setdefault(REREAD, []).extend(float(each.reread) for each in found)
        self._samples.setdefault(TAIL_TOKENS, []).extend(float(each.tail) for each in found)
        return [
            Drop(event.rollout, each.refusal) if each.value is None else each.value
            for event, each in zip(finished, found, strict=True)
        ]


class BridgedReward(Bridged[float]):
    """Scores each rollout with a reward model that has another tokenizer or chat template, streamed as text.

    The score is the model's own, of the whole text: prompt and response, rendered in one of the forms of
    :class:`~oppo.hf.as_text.rendering.Rendering` and tokenized at once. While the rollout grows, the model reads the
    tokens that its end can hardly change; where it does change them, the model goes back. Metrics count the tokens read
    in vain (``bridge/reread_tokens``), and at the end (``bridge/tail_tokens``). ``ToolTokens`` are part of the text.

    Args:
        model: ``AutoModelForSequenceClassification`` with ``num_labels == 1``.
        bridge: both tokenizers, and the form of the text.
        place, deterministic: as for :class:`oppo.hf.RewardModel`.

    Raises:
        ConfigError: the form is ``chat``, and the model's tokenizer has no chat template.
        ModelRefused: the model has several labels, no ``score`` layer, or cannot be served row by row.
    """

    def __init__(self, model: PreTrainedModel, bridge: Bridge, *, place: Hosting, deterministic: bool = False) -> None:
        super().__init__(worker_maker(ScoreWorker, model, deterministic, bridge), place, bridge.prompt_column)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> list[float | Drop]:
        """Return each rollout's score, or a ``Drop`` of one that is too long, and forget it.

        Raises:
            ModelError: a rollout is longer than the model reads, and such rollouts are not dropped.
        """
        return await self._values(finished, priority)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """A teacher's log-probs [s] of spans of a response, and the span of each of its tokens, int32 [n]; -1: none."""

    of: IntArray
    logprobs: FloatArray

    def beside(self, response: Response) -> FloatArray:
        """Return float32 [n] whose sums over spans are the teacher's; the own log-probs in a span with tool tokens."""
        own = response.logprobs.astype(np.float64)
        at, count = np.maximum(self.of, 0), len(self.logprobs)
        policy, tokens, foreign = (
            np.bincount(at, weights * (self.of >= 0), minlength=count)
            for weights in (own, np.ones(len(own)), ~response.sampled)
        )
        shares = np.where(foreign > 0, 0.0, (self.logprobs - policy) / np.maximum(tokens, 1))
        return (own + np.where(self.of >= 0, shares[at] if count else 0.0, 0.0)).astype(np.float32)


def text_ends(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], text: str) -> IntArray:
    """Return where each token ends in the text of all of them, int32 [n]; a character of several ends with the last."""
    alone = {token: decode([token]) for token in {*tokens}}
    if "".join(alone[token] for token in tokens) == text:
        return np.array([*accumulate(len(alone[token]) for token in tokens)], np.int32)
    growing = GrowingText(decode)
    ends = np.array([*accumulate(len(growing.push([token])) for token in tokens)], np.int32)
    if not growing.settled:
        raise Unaligned("the text of a token changes with those that follow, so tokens have no ends in it")
    if len(text) > (known := int(ends[-1])):  # with an incomplete character
        ends[int(np.argmax(ends == known)) + (known > 0) :] = len(text)
    return ends


class TeacherWorker(BridgeWorker[Spans]):
    def __init__(self, model: PreTrainedModel, deterministic: bool, sampling: Sampling, bridge: Bridge) -> None:
        self._temperature = sampling.temperature
        self._known = bridge.reader.size  # the table may be padded with ids that its tokenizer does not have
        self._stop = frozenset(sampling.stop)
        self._control = list(bridge.policy.control_ids)
        super().__init__(model, deterministic, bridge, reader_of(backbone(model)), overlap=1, logits=True)
        if not self._text.knows_offsets:
            raise ConfigError(
                "its tokenizer does not say where tokens end in a text, so they cannot be aligned with the policy's: "
                "expected a fast tokenizer (tokenizer.json)"
            )

    @property
    def _closing(self) -> Sequence[int]:
        end = self._bridge.reader.inner.eos_token_id
        return [] if self._bridge.form == "chat" or end is None else [int(end)]

    @torch.inference_mode()
    def _keep(self, spans: Sequence[TokenSpan], outputs: Sequence[Tensor]) -> None:
        # The log-prob of each token but the first; the output before a token that is read again is not needed.
        for span, output in zip(spans, outputs, strict=True):
            state = span.state
            known = torch.cat(state.kept)[: span.start] if state.kept else output.new_zeros(0, dtype=torch.float32)
            before, targets = output[:-1], span.tokens[1:]
            if state.tail is not None and len(known) < span.start:
                before, targets = torch.cat((state.tail, before)), span.tokens
            state.kept = [known, self._logprobs(before, targets.to(output.device))]
            state.tail = output[-1:].clone()

    def _logprobs(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not len(outputs):
            return outputs.new_zeros(0, dtype=torch.float32)

        def measure(logits: Tensor, at: slice, again: bool) -> Mapping[Input, Tensor]:
            del again
            return {"logprobs": token_logprobs(logits[:, : self._known], targets[at], self._temperature)}

        return self._measured_by(outputs, measure)

    def _value(self, retokenizer: Retokenizer, kept: FloatArray) -> Spans:
        begins, whole, tokens = retokenizer.begins, retokenizer.whole, retokenizer.tokens
        decode = self._bridge.policy.decode
        text = decode(tokens)
        if whole is None or begins is None or whole.text[begins : begins + len(text)] != text:
            raise Unaligned("the teacher's chat template changes the response, so that its tokens cannot be aligned")
        pieces = self._text.pieces(whole)
        theirs = np.array(pieces.ends, np.int64) - begins
        ours = text_ends(decode, tokens, text)
        inside = np.flatnonzero((theirs > 0) & (theirs <= len(text)) & (np.arange(len(theirs)) > 0))
        borders = np.intersect1d(theirs[inside], ours)
        at = np.searchsorted(borders, theirs[inside])
        sums = np.zeros(len(borders) + 2)  # behind the spans: the end, and what no border follows
        np.add.at(sums, np.where(at < len(borders), at, -1), kept[inside - 1])
        of = np.searchsorted(borders, ours)
        begun_before = at[:1] if len(inside) and theirs[inside[0] - 1] < 0 else at[:0]  # in the prompt
        of[(of == len(borders)) | np.isin(of, begun_before) | np.isin(tokens, self._control)] = -1
        after = int(np.searchsorted(theirs, len(text), side="right"))
        if tokens and tokens[-1] in self._stop and not decode(tokens[-1:]) and after < len(retokenizer.sent):
            of[-1], sums[len(borders)] = len(borders), kept[after - 1]
        return Spans(of.astype(np.int32), sums[:-1].astype(np.float32))


class BridgedTeacher(Bridged[Spans]):
    """Log-probs of a teacher with another tokenizer, streamed as text: float32 [n] for a response of n tokens.

    The teacher reads prompt and response as its own chat template renders them, or one after the other if it has none,
    tokenized at once in the end. A span ends where a token of either ends. The difference between the teacher's and the
    policy's log-prob of a span is spread evenly over the policy's tokens in it, so that the log-probs of the response
    sum to those of the teacher's own call, over the ids that its tokenizer has. Where a response has stopped, the token
    that ended it stands for the one that ends the teacher's turn. A rollout whose text the template changes, or longer
    than the teacher reads, is dropped.

    Args:
        model: a causal LM.
        sampling: the policy's; only the temperature and the tokens that end a response count.
        bridge, place, deterministic: as for :class:`oppo.hf.BridgedReward`.

    Raises:
        ConfigError: the teacher's tokenizer has no offsets, or no chat template and the form is ``chat``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sampling: Sampling,
        bridge: Bridge,
        place: Hosting,
        deterministic: bool = False,
    ) -> None:
        make = worker_maker(TeacherWorker, model, deterministic, sampling, bridge)
        super().__init__(make, place, bridge.prompt_column)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> list[FloatArray | Drop]:
        """Return each rollout's log-probs, or a ``Drop`` of one that cannot be aligned, and forget it."""
        found = await self._values(finished, priority)
        return [
            each if isinstance(each, Drop) else each.beside(event.response)
            for event, each in zip(finished, found, strict=True)
        ]
