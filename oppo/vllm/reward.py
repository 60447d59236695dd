"""A scalar reward model on vLLM: `classify` on growing prefixes, with the prefix cache, is incremental prefill."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from oppo.errors import ModelRefused, RewardError, shortened
from oppo.vllm.async_llm import VllmEngine
from oppo.vllm.scorers import (
    SERVED_BLOCK,
    Asked,
    ReadRollout,
    ScoringModel,
    ScoringServer,
    VllmScorer,
)
from oppo.vllm.server import Inspection

if TYPE_CHECKING:
    from vllm.config import VllmConfig


SCALAR: Final[Mapping[str, object]] = MappingProxyType({"runner": "pooling", "convert": "classify"})
"""Arguments of the engine of a scalar reward model."""

QUESTION: Final = {"task": "classify", "use_activation": False}
"""What is asked about a sequence: the logit."""


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
    """A vLLM server that scores growing prefixes by its route ``/pooling``; see :class:`ScoringServer`.

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
            found.expect("the score of a token by /pooling", "a number", scored.get("data"), ok=_is_a_score(scored))

    def _described(self, name: str, config: Any, longest: int) -> ScoringModel:
        _check_labels(name, config)
        text = config.get_text_config()
        return ScoringModel(name, int(text.vocab_size), longest, SERVED_BLOCK, text.pad_token_id)

    def _asked(self, sequences: Any) -> dict[str, object]:
        return {"model": self.served, **QUESTION, "input": sequences}

    def _scores(self, answer: Any) -> list[list[float]]:
        return _numbers(answer)


def _is_a_score(answer: Any) -> bool:
    try:
        return [len(each) for each in _numbers(answer)] == [1]
    except (KeyError, TypeError, ValueError):
        return False


def _numbers(answer: Any) -> list[list[float]]:
    # Of each sequence; in the order that was asked.
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
