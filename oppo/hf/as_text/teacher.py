"""A teacher with another tokenizer: its log-probs of the text, shared out to the tokens that the policy sampled.

::

    policy     un | believ | able | <eos>         ends in characters    2  8  12
    teacher    unbeliev | able | <|im_end|>                                8  12
    spans      [un believ] [able] [<eos>]         a span ends where both have a token that ends

Both models give each span a log-prob, the sum over their tokens in it. Their difference is shared evenly among the
policy's tokens of the span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ConfigError
from oppo.events import Drop, Finish, FloatArray, IntArray, Response
from oppo.hf.as_text.streamed import Bridge, Bridged, BridgeWorker, GrowingText, Retokenizer, Unaligned
from oppo.hf.head import OwnHead, separable_head
from oppo.hf.introspection import backbone
from oppo.hf.kv.prefill import TokenSpan
from oppo.hf.kv.reader import reader_of
from oppo.hf.loading import worker_maker
from oppo.losses import Input, token_logprobs
from oppo.models import Sampling
from oppo.placement import Hosting
from oppo.scheduling import IN_ORDER, Priority


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
        self._model = model
        self._head: OwnHead | None = None
        self._prepared = False
        super().__init__(model, deterministic, bridge, reader_of(backbone(model)), overlap=1)
        if not self._reader.knows_offsets:
            raise ConfigError(
                "its tokenizer does not say where tokens end in a text, so they cannot be aligned with the policy's: "
                "expected a fast tokenizer (tokenizer.json)"
            )

    def _prepare(self) -> None:
        if not self._prepared:
            self._head, self._prepared = separable_head(self._model), True
            if self._head is None:
                self._prefill = self._prefill_with(reader_of(self._model))

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

        if self._head is None:
            return measure(outputs, slice(None), False)["logprobs"]
        return self._head.measured(outputs, measure)["logprobs"]

    def _value(self, retokenizer: Retokenizer, kept: FloatArray) -> Spans:
        begins, whole, tokens = retokenizer.begins, retokenizer.whole, retokenizer.tokens
        decode = self._bridge.policy.decode
        text = decode(tokens)
        if whole is None or begins is None or whole.text[begins : begins + len(text)] != text:
            raise Unaligned("the teacher's chat template changes the response, so that its tokens cannot be aligned")
        pieces = self._reader.pieces(whole)
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
    tokenized at once in the end. A span ends where a token of either ends. What the teacher's log-prob of a span is
    more than the policy's is shared evenly among the policy's tokens in it, so that the sum over the response is that
    of the teacher's own call, over the ids that its tokenizer has. Where a response has stopped, the token that ended
    it stands for the one that ends the teacher's turn. A rollout whose text the template changes, or that is longer
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
        found = await self._finished(finished, priority)
        return [
            each if isinstance(each, Drop) else each.beside(event.response)
            for event, each in zip(finished, found, strict=True)
        ]
