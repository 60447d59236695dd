"""From settings to served models: what ``oppo train`` loads, and on which cores each part works.

The actor decodes in a thread of its own with half of the cores; reward, reference and critic take turns in another
with the rest; the update, which nothing runs beside, has them all. The counts are the same whatever the schedule, so
schedules can be compared bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from oppo.config import Settings, trainer_settings
from oppo.errors import ConfigError
from oppo.events import FloatArray
from oppo.hf.load import load_causal, load_scalar, load_tokenizer
from oppo.hf.policy import HfPolicy
from oppo.hf.scorers import ReferenceLogprobs, RewardModel, ValueModel
from oppo.hf.text import Text
from oppo.hf.trainer import HfTrainer
from oppo.models import Sampling, Scorer
from oppo.observe import SpanListener
from oppo.placement import Thread
from oppo.rewards import FunctionReward, load_function


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers off the terminal: what is going on is told in sentences, and what is wrong is raised."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """The models of a run and the threads they work in; a context manager that ends the threads.

    Attributes:
        positions: tokens that every model can read, ``None`` where no model says so.
    """

    policy: HfPolicy
    reference: Scorer[FloatArray]
    reward: Scorer[float]
    critic: ValueModel
    trainer: HfTrainer
    text: Text
    sampling: Sampling
    positions: int | None
    threads: tuple[Thread, ...]

    def listen(self, listener: SpanListener) -> None:
        """Have ``listener`` told of everything the models do."""
        for thread in self.threads:
            thread.listener = listener

    async def save(self, directory: Path) -> None:
        """Write actor and critic, each with the tokenizer, so that the directory appears complete or not at all."""
        aside = directory.with_name(f".{directory.name}.partial")
        with _quiet():
            await self.trainer.save(aside)
        for name in ("actor", "critic"):
            self.text.tokenizer.save_pretrained(aside / name)
        aside.rename(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for thread in self.threads:
            thread.close()


def load_text(settings: Settings) -> Text:
    """Return the policy's tokenizer.

    Raises:
        ConfigError: there is none.
    """
    models = settings.models
    return Text(load_tokenizer(models.policy, trust_remote_code=models.trust_remote_code))


@_quiet()
def assemble(settings: Settings, text: Text, tell: Callable[[str], None]) -> Assembly:
    """Return the models of ``settings``, loaded and probed.

    The actor is served and trained as one module, and so is the critic; the reference is a module of its own.

    Args:
        settings: of the run.
        text: the policy's tokenizer.
        tell: told, in a sentence, what is being loaded.

    Raises:
        ConfigError: a model cannot be loaded, or reads other token ids than the policy.
        RewardError: the reward function cannot be loaded.
        ModelRefused: a model cannot be served exactly.
    """
    models = settings.models
    function = load_function(models.reward) if models.reward_is_function else None
    tell(f"loading the policy {models.policy}")
    actor = load_causal(models.policy, dtype=models.dtype, trust_remote_code=models.trust_remote_code)
    tell(f"loading the reference {models.reference}")
    reference = load_causal(models.reference, dtype=models.dtype, trust_remote_code=models.trust_remote_code)
    tell(f"loading the critic {models.critic}")
    critic = load_scalar(models.critic, dtype=models.dtype, trust_remote_code=models.trust_remote_code, new_head=True)
    sampling = _sampling(settings, text, actor)
    for name in ("reference", "critic", *(() if function else ("reward",))):
        _require_same_tokens(settings, text, name)
    cores = settings.run.cores or available_cores()
    exact = settings.run.exact
    acting = _thread("actor", max(1, cores // 2))
    scoring = _thread("scorers", max(1, cores - cores // 2))
    training = _thread("trainer", cores)
    served = [actor, reference, critic]
    reward: Scorer[float]
    if function is None:
        tell(f"loading the reward model {models.reward}")
        scalar = load_scalar(models.reward, dtype=models.dtype, trust_remote_code=models.trust_remote_code)
        served.append(scalar)
        reward = RewardModel(scalar, thread=scoring, exact=exact)
    else:
        reward = FunctionReward(function, text.decode, prompt_column=settings.data.column)
    return Assembly(
        policy=HfPolicy(actor, sampling=sampling, thread=acting, exact=exact),
        reference=ReferenceLogprobs(reference, sampling=sampling, thread=scoring, exact=exact),
        reward=reward,
        critic=ValueModel(critic, thread=scoring, exact=exact),
        trainer=HfTrainer(actor, critic, sampling=sampling, thread=training, settings=trainer_settings(settings)),
        text=text,
        sampling=sampling,
        positions=min((limit for model in served if (limit := _positions(model)) is not None), default=None),
        threads=(acting, scoring, training),
    )


def available_cores() -> int:
    """Return how many cores this process may use: those it is bound to, no more than ``OMP_NUM_THREADS`` says."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(bound, int(wanted)) if wanted.isdecimal() and int(wanted) else bound


def _thread(name: str, cores: int) -> Thread:
    return Thread(name, setup=lambda: torch.set_num_threads(cores))


def _sampling(settings: Settings, text: Text, actor: PreTrainedModel) -> Sampling:
    own = actor.generation_config.eos_token_id if actor.generation_config is not None else None
    generation_stop = own if isinstance(own, list) else [own] if isinstance(own, int) else []
    section = settings.sampling
    return Sampling(
        max_new_tokens=section.max_new_tokens,
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        stop=text.stop(section.stop, generation_stop),
        seed=section.seed,
    )


def _require_same_tokens(settings: Settings, text: Text, name: str) -> None:
    """Refuse a model whose own tokenizer reads the policy's token ids differently: it would score gibberish."""
    path = str(getattr(settings.models, name))
    if path == settings.models.policy:
        return
    try:
        other = Text(load_tokenizer(path, trust_remote_code=settings.models.trust_remote_code))
    except ConfigError:  # a directory without a tokenizer of its own: nothing to compare
        return
    if (difference := text.differs(other)) is not None:
        raise ConfigError(f"models.{name} {path} does not share the policy's tokenizer: {difference}")


def _positions(model: PreTrainedModel) -> int | None:
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
