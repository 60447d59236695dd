"""Rewards by models that read a response whole: a classifier's logit, and the similarity to a text of the data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from oppo.errors import ConfigError, ModelError, ProtocolError, RewardError, shown
from oppo.events import Chunk, Drop, Finish, Given, Prompt
from oppo.hf.as_text.encoder import Encoder, Features
from oppo.hf.as_text.reader import EMPTY, OverLong, Reader, TooLong
from oppo.hf.as_text.rendering import Form, PromptText, Rendering, prompt_text
from oppo.hf.tokenizer import HfTokenizer, Rendered
from oppo.placement import Hosting
from oppo.scheduling import IN_ORDER, Priority


@dataclass(frozen=True, slots=True)
class EndedRollout:
    """A rollout that has ended, as it crosses to a worker.

    Attributes:
        prompt: as the data has it.
        tokens: of the response.
        wanted: texts of the data that the response is compared with.
    """

    rollout: int
    prompt: PromptText
    tokens: Sequence[int]
    wanted: Sequence[str] = ()


class WholeReader(ABC):
    """Scores rollouts in its place: synchronous, without sessions.

    Args:
        encoder: the model.
        policy: the policy's tokenizer.
        over_long: what becomes of a text that is longer than the model reads.
        exact: read each text alone.
    """

    def __init__(self, encoder: Encoder, policy: HfTokenizer, over_long: OverLong, *, exact: bool) -> None:
        self._encoder = encoder
        self._policy = policy
        self._exact = exact
        self._reader = Reader(encoder.tokenizer, encoder.limit, over_long)

    def finish(self, ended: Sequence[EndedRollout]) -> list[float | Drop]:
        """Return the score of each rollout, or a ``Drop`` of one that is too long.

        Raises:
            ModelError: a text is longer than the model reads, and such rollouts are neither cut nor dropped.
        """
        texts: dict[int, list[Features]] = {}
        drops: dict[int, Drop] = {}
        for each in ended:
            try:
                rows: list[Features] = [self._reader.features(rendered) for rendered in self._texts(each)]
            except TooLong as error:
                if self._reader.over_long == "error":
                    name = type(self._encoder.model).__name__
                    raise ModelError(
                        f"rollout {each.rollout} {error}, a {name}: lower max_new_tokens, or have such rollouts "
                        "dropped or cut (over_long, models.reward_over_long)"
                    ) from error
                drops[each.rollout] = Drop(each.rollout, f"it {error}")
                continue
            if not all(features["input_ids"] for features in rows):
                drops[each.rollout] = Drop(each.rollout, EMPTY)
                continue
            texts[each.rollout] = rows
        flat = [features for rows in texts.values() for features in rows]
        if not flat:
            return [drops[each.rollout] for each in ended]
        outputs = self._encoder.outputs(flat, alone=self._exact).split([len(rows) for rows in texts.values()])
        scores = dict(zip(texts, map(self._score, outputs), strict=True))
        return [drops.get(each.rollout) or scores[each.rollout] for each in ended]

    @abstractmethod
    def _texts(self, ended: EndedRollout) -> Sequence[Rendered]:
        """Return what the model reads of a rollout, one text or more."""

    @abstractmethod
    def _score(self, outputs: torch.Tensor) -> float:
        """Return the score from the outputs for these texts, float32 [texts, D]."""


class WholeReward:
    """A scorer that reads nothing until a rollout has ended, and then all of it at once.

    Rollouts that end together are read together, in batches of similar length; so are those that end while it works.

    Args:
        reader: scores them.
        thread: where it lives from now on: any place.
        policy: the policy's tokenizer.
        prompt_column: the column of the data that holds the prompt.
    """

    def __init__(self, reader: WholeReader, *, thread: Hosting, policy: HfTokenizer, prompt_column: str) -> None:
        self._worker = thread.host(reader)
        self._policy = policy
        self._prompt_column = prompt_column
        self._received: dict[int, int] = {}

    @property
    def version(self) -> int:
        """Always 0: the model is frozen."""
        return 0

    async def extend(self, events: Sequence[Prompt | Chunk | Given], *, priority: Priority = IN_ORDER) -> None:
        """Check that the events follow one another.

        Raises:
            ProtocolError: a rollout was never opened, or has a gap.
        """
        del priority
        for event in events:
            if isinstance(event, Prompt):
                self._received[event.rollout] = 0
                continue
            expected = self._received.get(event.rollout)
            if expected != event.start:
                where = "its Prompt must come first" if expected is None else f"expected tokens from {expected} on"
                raise ProtocolError(
                    f"rollout {event.rollout}: {where}, but {type(event).__name__} starts at {event.start}"
                )
            self._received[event.rollout] += len(event.tokens)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> list[float | Drop]:
        """Return each rollout's score, or a ``Drop``, and forget it.

        Raises:
            ModelError: a rollout is longer than the model reads, and such rollouts are neither cut nor dropped.
            ProtocolError: the tokens received are not the whole response.
        """
        for event in finished:
            received = self._received.pop(event.rollout, None)
            if received != len(event.response):
                raise ProtocolError(
                    f"rollout {event.rollout} finished with {len(event.response)} tokens, but {received or 0} were "
                    "given: extend it by the rest first"
                )
        ended = [self._ended(event) for event in finished]
        return await self._worker.at(priority).call("finish", WholeReader.finish, ended)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Drop sessions; unknown rollouts are ignored."""
        del priority
        for rollout in rollouts:
            self._received.pop(rollout, None)

    def _ended(self, finish: Finish) -> EndedRollout:
        prompt = prompt_text(finish.response.prompt, self._prompt_column, self._policy.decode)
        return EndedRollout(finish.rollout, prompt, finish.response.tokens.tolist(), self._wanted(finish))

    def _wanted(self, finish: Finish) -> Sequence[str]:
        """Return the texts of the data that a response is compared with."""
        del finish
        return ()


class ClassifierReader(WholeReader):
    """A logit of a classifier; see :class:`ClassifierReward`."""

    def __init__(
        self, encoder: Encoder, policy: HfTokenizer, over_long: OverLong, *, form: Form, label: int, exact: bool
    ) -> None:
        super().__init__(encoder, policy, over_long, exact=exact)
        self._rendering = Rendering(form, encoder.tokenizer)
        self._label = label

    def _texts(self, ended: EndedRollout) -> Sequence[Rendered]:
        return [self._rendering.whole(ended.prompt, self._policy.decode(ended.tokens))]

    def _score(self, outputs: torch.Tensor) -> float:
        return float(outputs[0, self._label])


class ClassifierReward(WholeReward):
    """Scores each rollout with the logit of one label of a classifier that reads it whole, as text.

    The model may be bidirectional, as BERT is, or of any other architecture: it sees nothing of a response that goes
    on. The score is that of its own call on this one text, up to rounding; padding makes no difference.

    Args:
        encoder: from :func:`oppo.hf.load_encoder`, with a classification head.
        policy: the policy's tokenizer.
        thread: where the model lives: any place.
        form: of the text: ``pair``, as cross-encoders are trained; see :class:`~oppo.hf.as_text.rendering.Rendering`.
        label: name or index of the label; needed where there are several.
        over_long: ``error`` ends the run, ``drop`` drops the rollout, ``truncate`` cuts as the model's tokenizer does.
        prompt_column: the column of the data that holds the prompt.
        exact: the bits of results do not depend on which rollouts end together; slower.

    Raises:
        ConfigError: there is no such label, or the encoder has no classification head.
    """

    def __init__(
        self,
        encoder: Encoder,
        policy: HfTokenizer,
        *,
        thread: Hosting,
        form: Form = "pair",
        label: str | int | None = None,
        over_long: OverLong = "error",
        prompt_column: str = "prompt",
        exact: bool = False,
    ) -> None:
        number = _label(encoder, label)
        reader = ClassifierReader(encoder, policy, over_long, form=form, label=number, exact=exact)
        super().__init__(reader, thread=thread, policy=policy, prompt_column=prompt_column)


class SimilarityReader(WholeReader):
    """Cosine similarities of one text to others; see :class:`SimilarityReward`."""

    def _texts(self, ended: EndedRollout) -> Sequence[Rendered]:
        texts = (self._policy.decode(ended.tokens), *ended.wanted)
        return [Rendered(text, data=[(0, len(text))]) for text in texts]

    def _score(self, outputs: torch.Tensor) -> float:
        own, *wanted = normalize(outputs, dim=-1)
        return max(float(own @ each) for each in wanted)


class SimilarityReward(WholeReward):
    """Scores each response with its cosine similarity, -1 to 1, to a text of the data, by a sentence encoder.

    Args:
        encoder: from :func:`oppo.hf.load_encoder`, with a pooling.
        policy: the policy's tokenizer.
        column: the column that holds the text, or a list of texts, of which the most similar counts.
        thread: where the model lives: any place.
        over_long: ``error`` ends the run, ``drop`` drops the rollout, ``truncate`` cuts as the model's tokenizer does.
        exact: the bits of results do not depend on which rollouts end together; slower.

    Raises:
        ConfigError: the encoder is a classifier.
    """

    def __init__(
        self,
        encoder: Encoder,
        policy: HfTokenizer,
        *,
        column: str,
        thread: Hosting,
        over_long: OverLong = "error",
        exact: bool = False,
    ) -> None:
        if encoder.pooling is None:
            raise ConfigError(
                f"{type(encoder.model).__name__} classifies, and gives no vector to compare: expected a sentence "
                "encoder, or oppo.hf.ClassifierReward"
            )
        self._column = column
        reader = SimilarityReader(encoder, policy, over_long, exact=exact)
        super().__init__(reader, thread=thread, policy=policy, prompt_column="")

    def _wanted(self, finish: Finish) -> Sequence[str]:
        found = finish.response.prompt.columns.get(self._column)
        texts = [found] if isinstance(found, str) else found if isinstance(found, list) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise RewardError(
                f"rollout {finish.rollout}: expected the text to compare a response with, or a list of texts, in the "
                f"data's column {self._column!r}; got {shown(found)}"
            )
        return texts


def _label(encoder: Encoder, label: str | int | None) -> int:
    """Return the index of a label."""
    model = encoder.model
    if encoder.pooling is not None:
        raise ConfigError(
            f"{type(model).__name__} has no classification head: expected a sequence classification model, or "
            "oppo.hf.SimilarityReward"
        )
    names = {int(at): str(name) for at, name in (model.config.id2label or {}).items()}
    if label is None and len(names) == 1:
        return 0
    chosen = next((at for at, name in names.items() if label in (name, at, str(at))), None)
    if chosen is None:
        raise ConfigError(
            f"{type(model).__name__} has the labels {', '.join(names.values())}: expected one of them as the label "
            f"whose logit is the score, got {label!r}"
        )
    return chosen
