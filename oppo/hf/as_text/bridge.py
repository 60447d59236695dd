"""A reward model with another tokenizer or chat template, streamed: it reads the rollout as text while that grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelError, ModelLost, ProtocolError
from oppo.events import Chunk, Drop, Finish, Given, Prompt
from oppo.hf.as_text.reader import EMPTY, OverLong, Reader, TooLong
from oppo.hf.as_text.rendering import Form, Rendering, prompt_text
from oppo.hf.as_text.retokenizer import Edit, Retokenizer
from oppo.hf.introspection import longest, vocabulary
from oppo.hf.kv.incremental_prefill import IncrementalPrefill, ReadState, TokenSpan
from oppo.hf.serve.scorer_input import ReplayJournal, ScorerInput
from oppo.hf.serve.scorer_workers import score_reader
from oppo.hf.shared_memory import SharedModel
from oppo.hf.tokenizer import HfTokenizer
from oppo.placement import Hosting
from oppo.scheduling import IN_ORDER, Priority, TimeSlice

REREAD = "bridge/reread_tokens"
"""The metric of the tokens of a rollout that were read in vain."""

TAIL_TOKENS = "bridge/tail_tokens"
"""The metric of the tokens of a rollout that were read when it had ended."""


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
class BridgedScore:
    """The score of one rollout, or why there is none; the tokens read in vain, and those read at its end."""

    score: float
    refusal: str
    reread: int
    tail: int


class BridgeWorker:
    """Retokenizes rollouts and reads them; see :class:`BridgedReward`."""

    def __init__(self, model: PreTrainedModel, exact: bool, bridge: Bridge) -> None:
        self._model = model
        self._exact = exact
        self._bridge = bridge
        self._name = type(model).__name__
        self._padding = model.config.get_text_config().pad_token_id
        self._reader = Reader(bridge.reader, longest(model), bridge.over_long)
        self._rendering = Rendering(bridge.form, bridge.reader)
        self._prefill = IncrementalPrefill(
            score_reader(model), name=self._name, vocabulary=vocabulary(model), keep=_keep, exact=exact
        )
        self._open: dict[int, Retokenizer] = {}

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (SharedModel(self._model), self._exact, self._bridge)

    def extend(self, inputs: ScorerInput) -> None:
        """Receive more of some rollouts, and read of their text what is certain.

        Raises:
            ProtocolError: a rollout is opened twice, was never opened, or has a gap.
        """
        grown: dict[int, list[int]] = {}
        for event in inputs.events:
            tokens = grown.setdefault(event.rollout, [])
            tokens += self._received(event, len(tokens))
        self._read({rollout: self._open[rollout].grow(tokens) for rollout, tokens in grown.items()})

    def finish(self, lengths: Mapping[int, int]) -> list[BridgedScore]:
        """Return each rollout's score, and forget it; ``lengths`` are the tokens of the responses, by rollout.

        Raises:
            ModelError: a rollout is longer than the model reads, and such rollouts are neither cut nor dropped.
            ProtocolError: the tokens received are not the whole response.
        """
        edits = {rollout: self._ended(rollout, length) for rollout, length in lengths.items()}
        complete = {rollout: edit for rollout, edit in edits.items() if isinstance(edit, Edit)}
        self._read(complete)
        read = {rollout: sent for rollout in complete if (sent := len(self._open[rollout].sent))}
        scores = {state.rollout: self._score(state) for state in self._prefill.finish(read)}
        found = []
        for rollout, edit in edits.items():
            refusal = edit if isinstance(edit, str) else "" if rollout in scores else EMPTY
            tail = len(edit.ids) if isinstance(edit, Edit) else 0
            found.append(BridgedScore(scores.get(rollout, 0.0), refusal, self._open[rollout].reread, tail))
        self.forget(lengths)
        return found

    def forget(self, rollouts: Iterable[int]) -> None:
        """Drop sessions; unknown rollouts are ignored."""
        rollouts = list(rollouts)
        for rollout in rollouts:
            self._open.pop(rollout, None)
        self._prefill.forget(rollouts)

    def _received(self, event: Prompt | Chunk | Given, pending: int) -> list[int]:
        """Open the rollout of a prompt; return the tokens of a response."""
        if isinstance(event, Prompt):
            self._prefill.extend([Prompt(event.rollout, event.rollout, np.zeros(0, np.int32))])
            decode = self._bridge.policy.decode
            prompt = prompt_text(event, self._bridge.prompt_column, decode)
            self._open[event.rollout] = Retokenizer(self._rendering, self._reader, decode, prompt)
            return []
        expected = self._opened(event.rollout).length + pending
        if event.start != expected:
            raise ProtocolError(
                f"rollout {event.rollout}: {self._name} expected tokens from {expected} of the response on, but "
                f"{type(event).__name__} starts at {event.start}"
            )
        return [*event.tokens.tolist()]

    def _ended(self, rollout: int, length: int) -> Edit | str:
        """Return what makes the text of a rollout whole, or why it is not read."""
        found = self._opened(rollout)
        if found.length != length:
            raise ProtocolError(
                f"rollout {rollout} finished with {length} tokens, but {self._name} was given {found.length}: extend "
                "it by the rest first"
            )
        try:
            return found.finish()
        except TooLong as error:
            if self._reader.over_long == "drop":
                return f"it {error}"
            raise ModelError(
                f"rollout {rollout} {error}, a {self._name}: shorten the prompts, lower max_new_tokens, or have such "
                "rollouts dropped or cut (over_long, models.reward_over_long)"
            ) from error

    def _opened(self, rollout: int) -> Retokenizer:
        if rollout not in self._open:
            raise ProtocolError(f"rollout {rollout} is unknown to {self._name}: its Prompt must come first")
        return self._open[rollout]

    def _read(self, edits: Mapping[int, Edit]) -> None:
        """Bring what the model has read of each rollout to the tokens that were sent."""
        chunks: list[Given] = []
        for rollout, edit in edits.items():
            kept = self._prefill.rewind(rollout, edit.keep)
            tokens = np.array(self._open[rollout].sent[kept:], np.int32)
            if len(tokens):
                chunks.append(Given(rollout, kept, tokens))
        self._prefill.extend(chunks)

    def _score(self, state: ReadState) -> float:
        """Return the score at the last token that is not padding, as transformers has it."""
        ids = self._open[state.rollout].sent
        last = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] != self._padding), 0)
        return float(torch.cat(state.kept)[last])


@torch.inference_mode()
def _keep(span: TokenSpan, outputs: Tensor) -> None:
    """Keep the score at each position, since the last one is known only in the end."""
    before = torch.cat(span.state.kept)[: span.start] if span.state.kept else outputs[:0, 0]
    span.state.kept = [before, outputs[:, 0].float()]


class BridgedReward:
    """Scores each rollout with a reward model that has another tokenizer or chat template, streamed as text.

    The score is that of the model's own call on the whole text: prompt and response, rendered in one of the forms of
    :class:`~oppo.hf.as_text.rendering.Rendering` and tokenized at once. While the rollout grows, the model reads the
    tokens that its end can hardly change; where it does change them, the model goes back. Of each rollout the tokens
    read in vain are in the metrics (``bridge/reread_tokens``), and those read when it had ended
    (``bridge/tail_tokens``). ``Given`` tokens are part of the response's text.

    Args:
        model: ``AutoModelForSequenceClassification`` with ``num_labels == 1``.
        bridge: both tokenizers, and the form of the text.
        thread: where the model lives: any place.
        exact: the bits of results do not depend on arrival patterns and other rollouts; slower.

    Raises:
        ConfigError: the form is ``chat``, and the model's tokenizer has no chat template.
        ModelRefused: the model has several labels, no ``score`` layer, or cannot be served row by row.
    """

    def __init__(self, model: PreTrainedModel, bridge: Bridge, *, thread: Hosting, exact: bool = False) -> None:
        self._columns = (bridge.prompt_column,)
        worker = BridgeWorker(model, exact, bridge)
        self._worker = thread.host(worker, journal=ReplayJournal(BridgeWorker.extend, self._columns))
        self._samples: dict[str, list[float]] = {}

    @property
    def version(self) -> int:
        """Always 0: the model is frozen."""
        return 0

    @property
    def time_slice(self) -> TimeSlice:
        """How long a preemptible call should last, as its place has it."""
        return self._worker.time_slice

    def samples(self) -> Mapping[str, Sequence[float]]:
        """Return the tokens of each rollout that were read in vain, and at its end, since the last call."""
        samples, self._samples = self._samples, {}
        return samples

    async def extend(self, events: Sequence[Prompt | Chunk | Given], *, priority: Priority = IN_ORDER) -> None:
        """Read more of some rollouts."""
        inputs = ScorerInput(events, columns=self._columns)
        await self._worker.at(priority).call("extend", BridgeWorker.extend, inputs)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> list[float | Drop]:
        """Return each rollout's score, or a ``Drop`` of one that is too long, and forget it.

        Raises:
            ModelError: a rollout is longer than the model reads, and such rollouts are not dropped.
        """
        lengths = {event.rollout: len(event.response) for event in finished}
        found = await self._worker.at(priority).call("finish", BridgeWorker.finish, lengths)
        self._samples.setdefault(REREAD, []).extend(float(each.reread) for each in found)
        self._samples.setdefault(TAIL_TOKENS, []).extend(float(each.tail) for each in found)
        return [
            Drop(event.rollout, each.refusal) if each.refusal else each.score
            for event, each in zip(finished, found, strict=True)
        ]

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Drop sessions; unknown rollouts are ignored."""
        with suppress(ModelLost):  # sessions are lost with the place they were in
            await self._worker.at(priority).call("forget", BridgeWorker.forget, list(rollouts))
