"""The models of a run that score on vLLM: the engines that are started for them, and servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from oppo.config.rewards import VllmRewardSection
from oppo.config.scorers import OnVllm
from oppo.config.settings import Settings
from oppo.durable import make
from oppo.errors import ConfigError
from oppo.hf.devices import Devices, acting_share, available_cores
from oppo.hf.loading import ModelRecipe, positions_of
from oppo.hf.model_files import RewardKind, located
from oppo.log import logger
from oppo.models import Sampling
from oppo.observe import Reporter
from oppo.rewards.judge import key_of
from oppo.run.loading import RoleLoader
from oppo.run.rewards import ServedRewardModel, named_reward, track_of
from oppo.vllm import VllmEngine, VllmLogprobs, VllmReward
from oppo.vllm.arguments import placed
from oppo.vllm.logprobs import LOGPROBS, LogprobServer
from oppo.vllm.reward import SCALAR, RewardServer
from oppo.vllm.scorers import ScoringServer, VllmScorer

S = TypeVar("S", bound="VllmScorer[Any, Any]")
E = TypeVar("E", bound=ScoringServer)

NOT_ON_VLLM: Final[Mapping[RewardKind, str]] = {
    "process": "rewards each step, and vLLM reads all of a response again for every score at a token",
    "classifier": "is no causal model with one label, which alone vLLM reads as a response grows",
    "similarity": "is a sentence encoder, and vLLM reads a reward model of one label as a response grows",
}
"""Why vLLM does not serve a reward model of a kind."""


@dataclass(slots=True, eq=False)
class ScorersOnVllm:
    """Starts engines and finds servers for models that score.

    Attributes:
        load: knows the models of the run.
        log: the file for what the engines' processes write; ``None``: nowhere.
        scorers: those that it has made.
    """

    settings: Settings
    load: RoleLoader
    devices: Devices
    log: Path | None
    scorers: list[VllmScorer[Any, Any]] = field(default_factory=list)

    def reward(self, key: str, reward: VllmRewardSection) -> ServedRewardModel:
        source, name = reward.source, named_reward(reward)
        with self.load.attributed(name, key):
            model = self.load.recipe(name, "scalar", source, self.devices.reward)
            found = self.load.reward_kind(source)
            if found == "scalar" and model.config().num_labels != 1:
                found = "classifier"
            if found != "scalar":
                raise ConfigError(f"{source} {NOT_ON_VLLM[found]}: leave {key}.engine out, and transformers serves it")
            self.load.check_tokens(source, model)
            engine = self._engine(RewardServer, reward, model, "reward", SCALAR)
            scorer = self._kept(key, engine, partial(VllmReward, engine, key=key))
        scorer.reporter = Reporter(track_of(reward))
        return ServedRewardModel(source, scorer, model, may_be_critic=True)

    def logprobs(self, name: str, sampling: Sampling, *, top_k: int = 0) -> VllmLogprobs:
        models, key = self.settings.models, f"scorers.{name}"
        source = {"reference": models.reference, **models.teachers}[name]
        role = name.partition(".")[0]
        with self.load.attributed(name):
            model = self.load.recipe(name, "causal", source, getattr(self.devices, role))
            self.load.check_tokens(source, model)
        with self.load.attributed(name, key):
            server = partial(LogprobServer, top_k=top_k, vocabulary=sampling.vocabulary)
            engine = self._engine(server, self.settings.on_vllm[name], model, role, LOGPROBS)
            scorer = self._kept(key, engine, partial(VllmLogprobs, engine, sampling=sampling, top_k=top_k, key=key))
        scorer.reporter = Reporter(name)
        return scorer

    def close(self) -> None:
        for each in self.scorers:
            each.engine.close()

    def _engine(
        self,
        server: Callable[..., E],
        on: OnVllm,
        model: ModelRecipe,
        role: str,
        arguments: Mapping[str, object],
    ) -> E | VllmEngine:
        if not on.url:
            return self._started(on, model, role, arguments)
        trusted = self.settings.models.trust_remote_code
        found = server(
            on.url,
            located(model.path, weights=False, trust_remote_code=trusted),
            api_key=key_of(on.api_key_env) or None,
            timeout=on.timeout,
            attempts=on.attempts,
            trust_remote_code=trusted,
        )
        if Path(found.served).name != Path(model.path).name:
            logger.warning(f"the server at {found.url} calls its model {found.served!r}, and it is to be {model.path}")
        return found

    def _started(self, on: OnVllm, model: ModelRecipe, role: str, arguments: Mapping[str, object]) -> VllmEngine:
        settings = self.settings
        if self.log is not None:
            make(self.log.parent)
        cores = settings.run.cores or available_cores()
        # one more, since vLLM answers a request for log-probs with a token
        longest = settings.data.max_prompt_tokens + settings.sampling.max_new_tokens + 1
        given = {
            **arguments,
            "dtype": settings.models.dtype,
            "trust_remote_code": settings.models.trust_remote_code,
            "max_model_len": min(positions_of(model), longest),
        }
        return VllmEngine.start(
            located(model.path, weights=True, allow_pickle=settings.models.allow_pickle),
            arguments=placed({**given, **on.vllm}, getattr(self.devices, role)),
            trainer="cpu",  # no weights are synced
            cores=slice(acting_share(cores), cores),
            log=self.log,
        )

    def _kept(self, key: str, engine: ScoringServer | VllmEngine, make: Callable[[], S]) -> S:
        try:
            scorer = make()
        except BaseException:
            engine.close()
            raise
        self.scorers.append(scorer)
        if (block := scorer.block) > scorer.longest:
            logger.warning(
                f"{key}: its engine reads whole blocks of {block} tokens while a response grows, and none here is so "
                f"long, so it reads each when it has ended: set {key}.vllm.block_size lower"
            )
        return scorer
