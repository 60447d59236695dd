"""Rewards by models that read whole texts, many side by side: a classifier's logit, the similarity to another text."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Final, Literal, TypeAlias, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from oppo.atomic_files import read_text
from oppo.errors import ConfigError, ModelRefused, RewardError, shown
from oppo.events import Chunk, Drop, Finish, Prompt, ToolTokens
from oppo.hf.as_text.rendering import EMPTY, Form, OverLong, PromptText, Rendering, TextReader, TooLong, prompt_text
from oppo.hf.kv.attention import cheapest_groups, pass_overhead
from oppo.hf.kv.prefill import TOKENS_PER_PASS
from oppo.hf.loading import LoadOptions, load, load_tokenizer
from oppo.hf.model_files import CLASSIFIER, CONFIG, EMBEDDER, MODULES, located, read_object
from oppo.hf.model_parts import FAILURES, longest
from oppo.hf.tokenizer import HfTokenizer, Rendered
from oppo.hf.weights import SharedModel
from oppo.log import logger
from oppo.placement import Hosting, Make
from oppo.scheduling import IN_ORDER, Priority
from oppo.scorers import RolloutSession, RolloutSessions

Pooling: TypeAlias = Literal["cls", "last", "max", "mean"]
"""Which of the last hidden states stand for a text: the first, the last, their largest components, their mean."""

TOLERANCE: Final = 1e-3
"""Largest difference, relative to the largest output, that padding may make before texts are read one by one."""

Features: TypeAlias = Mapping[str, Sequence[int]]
"""A tokenizer's output for one text: the model's inputs by name, one number for each token."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A model with its tokenizer; without a ``pooling`` its outputs are a classifier's logits.

    ``beside``: texts may be read side by side, padded.
    """

    model: PreTrainedModel
    tokenizer: HfTokenizer
    limit: int
    pooling: Pooling | None
    beside: bool = True

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _over, (SharedModel(self.model), self.tokenizer, self.limit, self.pooling, self.beside)

    def outputs(self, texts: Sequence[Features], *, alone: bool = False) -> Tensor:
        """Return logits or pooled states, float32 [n, D] on the CPU; ``alone``: each text in its own pass."""
        lengths = [len(text["input_ids"]) for text in texts]
        groups = [[at] for at in range(len(texts))]
        if self.beside and not alone:
            overhead = pass_overhead(self.model.device)
            groups = cheapest_groups(lengths, range(len(texts)), overhead=overhead, budget=TOKENS_PER_PASS)
        found: dict[int, Tensor] = {}
        for group in groups:
            found.update(zip(group, self._pass([texts[at] for at in group]), strict=True))
        return torch.stack([found[at] for at in range(len(texts))])

    @torch.inference_mode()
    def _pass(self, texts: Sequence[Features]) -> Tensor:
        device = self.model.device
        taken = inspect.signature(self.model.forward).parameters
        tokenizer = self.tokenizer.inner
        padding = {"input_ids": tokenizer.pad_token_id or 0, "token_type_ids": tokenizer.pad_token_type_id}
        inputs = {
            name: pad_sequence(
                [torch.tensor(text[name]) for text in texts], batch_first=True, padding_value=padding.get(name, 0)
            ).to(device)
            for name in texts[0]
            if name in taken
        }
        output = self.model(**inputs)
        if self.pooling is None:
            logits: Tensor = output.logits
            return logits.float().cpu()
        lengths = torch.tensor([len(text["input_ids"]) for text in texts], device=device)
        return pooled(output.last_hidden_state.float(), lengths, self.pooling).cpu()


def _over(model: SharedModel[PreTrainedModel], *others: Any) -> Encoder:
    return Encoder(model.load(), *others)


def pooled(states: Tensor, lengths: Tensor, pooling: Pooling) -> Tensor:
    # One vector [n, D] for each row of hidden states [n, T, D], of which the first ``lengths`` are tokens.
    rows = torch.arange(len(states), device=states.device)
    real = (torch.arange(states.shape[1], device=states.device) < lengths[:, None])[:, :, None]
    match pooling:
        case "cls":
            return states[:, 0]
        case "last":
            return states[rows, lengths - 1]
        case "max":
            return states.masked_fill(~real, -torch.inf).amax(1)
        case "mean":
            return (states * real).sum(1) / lengths[:, None]


def reach(model: PreTrainedModel, tokenizer: HfTokenizer) -> int:
    tables = [
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    # A table with a row for padding, as RoBERTa's, begins to count behind that.
    rows = [table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables]
    return min([longest(model), int(tokenizer.inner.model_max_length), *rows])


def reads_beside(encoder: Encoder) -> bool:
    ids = [number for number in range(len(encoder.tokenizer.inner)) if number != encoder.tokenizer.inner.pad_token_id]
    ends = encoder.model.config.eos_token_id
    end = ends[0] if isinstance(ends, Sequence) and ends else ends
    texts = []
    for length in (3, 5, 9):
        tokens = [ids[at * 7 % len(ids)] for at in range(length)]
        tokens += [end] if end in ids else []  # some pool the state there
        texts.append({"input_ids": tokens, "attention_mask": [1] * len(tokens)})
    try:
        alone = encoder.outputs(texts, alone=True)
    except FAILURES as error:
        raise ModelRefused(f"{type(encoder.model).__name__} failed when it was given a text: {error!r}") from error
    if encoder.tokenizer.inner.pad_token_id is None:
        return False
    try:
        beside = encoder.outputs(texts)
    except FAILURES:  # a model that takes no padding says so in its own way
        return False
    return bool((beside - alone).abs().max() <= TOLERANCE * alone.abs().max())


@dataclass(frozen=True, slots=True)
class EndedRollout:
    """A rollout that has ended, as it crosses to a worker; ``wanted``: texts that the response is compared with."""

    rollout: int
    prompt: PromptText
    tokens: Sequence[int]
    wanted: Sequence[str] = ()


class WholeReader(ABC):
    def __init__(self, encoder: Encoder, policy: HfTokenizer, over_long: OverLong, *, deterministic: bool) -> None:
        self._encoder = encoder
        self._policy = policy
        self._deterministic = deterministic
        self._reader = TextReader(encoder.tokenizer, encoder.limit, over_long)

    def finish(self, ended: Sequence[EndedRollout]) -> list[float | Drop]:
        texts: dict[int, list[Features]] = {}
        drops: dict[int, Drop] = {}
        for each in ended:
            try:
                rows: list[Features] = [self._reader.features(rendered) for rendered in self._texts(each)]
            except TooLong as error:
                reason = self._reader.refused(each.rollout, error, type(self._encoder.model).__name__)
                drops[each.rollout] = Drop(each.rollout, reason)
                continue
            if not all(features["input_ids"] for features in rows):
                drops[each.rollout] = Drop(each.rollout, EMPTY)
                continue
            texts[each.rollout] = rows
        flat = [features for rows in texts.values() for features in rows]
        if not flat:
            return [drops[each.rollout] for each in ended]
        outputs = self._encoder.outputs(flat, alone=self._deterministic).split([len(rows) for rows in texts.values()])
        scores = dict(zip(texts, map(self._score, outputs), strict=True))
        return [drops.get(each.rollout) or scores[each.rollout] for each in ended]

    @abstractmethod
    def _texts(self, ended: EndedRollout) -> Sequence[Rendered]: ...
    @abstractmethod
    def _score(self, outputs: torch.Tensor) -> float: ...


class WholeReward:
    """A scorer that reads each rollout at its end, those that end together, or while it works, in batches."""

    version = 0

    def __init__(self, make: Make[WholeReader], *, place: Hosting, policy: HfTokenizer, prompt_column: str) -> None:
        self._worker = place.host(make)
        self._policy = policy
        self._prompt_column = prompt_column
        self._sessions = RolloutSessions(
            type(self).__name__, lambda prompt: RolloutSession(prompt.rollout, len(prompt.tokens))
        )

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        del priority
        for event in events:
            self._sessions.receive(event)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> list[float | Drop]:
        for event in finished:
            self._sessions.whole(event.rollout, len(event.response))
        self._sessions.forget([event.rollout for event in finished])
        ended = [self._ended(event) for event in finished]
        return await self._worker.at(priority).call("finish", WholeReader.finish, ended)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        del priority
        self._sessions.forget(rollouts)

    def _ended(self, finish: Finish) -> EndedRollout:
        prompt = prompt_text(finish.response.prompt, self._prompt_column, self._policy.decode)
        return EndedRollout(finish.rollout, prompt, finish.response.tokens.tolist(), self._wanted(finish))

    def _wanted(self, finish: Finish) -> Sequence[str]:
        del finish
        return ()


class ClassifierReader(WholeReader):
    def __init__(
        self, encoder: Encoder, policy: HfTokenizer, over_long: OverLong, *, form: Form, label: int, deterministic: bool
    ) -> None:
        super().__init__(encoder, policy, over_long, deterministic=deterministic)
        self._rendering = Rendering(form, encoder.tokenizer)
        self._label = label

    def _texts(self, ended: EndedRollout) -> Sequence[Rendered]:
        return [self._rendering.whole(ended.prompt, self._policy.decode(ended.tokens))]

    def _score(self, outputs: torch.Tensor) -> float:
        return float(outputs[0, self._label])


class ClassifierReward(WholeReward):
    """Scores each rollout with the logit of one label of a classifier that reads it whole, as text.

    The model may be bidirectional, as BERT is, or of any other architecture. The score is that of its own call on this
    one text, up to rounding.

    Args:
        encoder: from :func:`oppo.hf.load_encoder`, with a classification head.
        policy: the policy's tokenizer.
        place: where the model lives: any place.
        form: of the text: ``pair``, as cross-encoders are trained; see :class:`~oppo.hf.as_text.rendering.Rendering`.
        label: name or index of the label; needed where there are several.
        over_long: ``error`` ends the run, ``drop`` drops the rollout, ``truncate`` cuts as the model's tokenizer does.
        prompt_column: the column of the data that holds the prompt.
        deterministic: the bits of results do not depend on which rollouts end together; slower.

    Raises:
        ConfigError: there is no such label, or the encoder has no classification head.
    """

    def __init__(
        self,
        encoder: Encoder,
        policy: HfTokenizer,
        *,
        place: Hosting,
        form: Form = "pair",
        label: str | int | None = None,
        over_long: OverLong = "error",
        prompt_column: str = "prompt",
        deterministic: bool = False,
    ) -> None:
        number = _label(encoder, label)
        make = partial(
            ClassifierReader, encoder, policy, over_long, form=form, label=number, deterministic=deterministic
        )
        super().__init__(make, place=place, policy=policy, prompt_column=prompt_column)


class SimilarityReader(WholeReader):
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
        column: the column that holds the text, or a list of texts, of which the most similar counts.
        policy, place, over_long, deterministic: as for :class:`ClassifierReward`.

    Raises:
        ConfigError: the encoder is a classifier.
    """

    def __init__(
        self,
        encoder: Encoder,
        policy: HfTokenizer,
        *,
        column: str,
        place: Hosting,
        over_long: OverLong = "error",
        deterministic: bool = False,
    ) -> None:
        if encoder.pooling is None:
            raise ConfigError(
                f"{type(encoder.model).__name__} classifies, and gives no vector to compare: expected a sentence "
                "encoder, or oppo.hf.ClassifierReward"
            )
        self._column = column
        make = partial(SimilarityReader, encoder, policy, over_long, deterministic=deterministic)
        super().__init__(make, place=place, policy=policy, prompt_column="")

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


POOLINGS: Final[dict[str, Pooling]] = {
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",  # another length, and the same direction
}
"""How a pooling module says which states stand for a text: by one word, or by a key for each."""


def load_encoder(path: str | Path, **options: Unpack[LoadOptions]) -> Encoder:
    """Return the model at a directory or hub name, in evaluation mode, with its own tokenizer.

    A sequence classification model keeps its labels. Any other is a sentence encoder: ``modules.json`` says how its
    states are pooled, as sentence-transformers writes it; without that it is their mean. Arguments and errors are those
    of :func:`oppo.hf.load_causal`.

    Raises:
        ConfigError: also if the directory holds no tokenizer.
        ModelRefused: a sentence encoder has other parts than a transformer, a pooling and a normalisation.
    """
    trusted = options.get("trust_remote_code", False)
    directory = located(path, weights=False, trust_remote_code=trusted)
    transformer, pooling = _parts(directory)
    home = path if transformer == directory else transformer
    architectures = read_object(transformer / CONFIG).get("architectures") if (transformer / CONFIG).is_file() else ()
    classifies = pooling is None and str(architectures).find("ForSequenceClassification") >= 0
    if pooling is None and not classifies:
        logger.info(
            f"{path} has no {MODULES}, which would say how a text becomes one vector: it is the mean of its states"
        )
        pooling = "mean"
    model = load(CLASSIFIER if classifies else EMBEDDER, home, **options)
    tokenizer = HfTokenizer(load_tokenizer(home, trust_remote_code=trusted))
    limit = min(reach(model, tokenizer), _sentence_limit(transformer))
    encoder = Encoder(model, tokenizer, limit, pooling)
    if not reads_beside(encoder):
        logger.info(f"{path} reads texts one by one: padding would change its outputs")
        encoder = replace(encoder, beside=False)
    return encoder


def transformer_of(directory: Path) -> Path:
    return _parts(directory)[0]


def _parts(directory: Path) -> tuple[Path, Pooling | None]:
    file = directory / MODULES
    if not file.is_file():
        return directory, None
    try:
        parts = json.loads(read_text(file, linked=True))
        modules = [(PurePath(str(part["path"])), str(part["type"]).rpartition(".")[2]) for part in parts]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is no list of modules with path and type: {error}") from error
    names = [name for _, name in modules]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelRefused(
            f"{directory} is a sentence encoder of the modules {', '.join(names)}: expected Transformer, Pooling and, "
            "maybe, Normalize; serve another as a reward function"
        )
    if any(path.is_absolute() or ".." in path.parts for path, _ in modules):
        raise ConfigError(f"{file} names a module outside of its directory")
    return directory / modules[0][0], _pooling(directory / modules[1][0])


def _pooling(module: Path) -> Pooling:
    chosen = read_object(module / CONFIG)
    flags = [key for key, value in chosen.items() if value is True and key.startswith("pooling_mode")]
    modes = [str(chosen["pooling_mode"])] if "pooling_mode" in chosen else flags
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelRefused(f"{module} pools by {', '.join(modes) or 'nothing'}: expected one of {', '.join(POOLINGS)}")
    return POOLINGS[modes[0]]


def _sentence_limit(directory: Path) -> int:
    file = directory / "sentence_bert_config.json"
    limit = read_object(file).get("max_seq_length") if file.is_file() else None
    return limit if isinstance(limit, int) else 1 << 30
