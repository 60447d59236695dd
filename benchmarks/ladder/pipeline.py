"""From a workload's files, a mode and a layout to the graph of a PPO step and the places of its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from benchmarks.ladder.acting import ENGINES, Acting, Part
from benchmarks.ladder.countdown import EOS, PAD, language_of
from benchmarks.ladder.directory import Files
from benchmarks.ladder.layout import Seats
from benchmarks.ladder.modes import Mode
from benchmarks.ladder.teach import config_of
from benchmarks.ladder.workloads import BenchWorkload, Phase, Scorers, Shape
from oppo.algorithms.ppo import ppo
from oppo.demo.assets import alone
from oppo.events import Drop, Prompt, StepReport
from oppo.graph import Graph
from oppo.hf.devices import DeviceThread, ModelPlace
from oppo.hf.loading import load_causal, load_scalar
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel, ValueModel
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.trainer import HfTrainer
from oppo.models import Sampling, Scorer
from oppo.observe import SpanListener
from oppo.placement import Place, Process
from oppo.rewards import FunctionReward
from oppo.stages import GAE
from oppo.stages.hold import held
from oppo.training import TrainerSettings

WORK: Final[dict[tuple[str, str], Phase]] = {
    ("actor", "decode"): "decode",
    ("reference", "extend"): "score",
    ("reference", "finish"): "score",
    ("reward", "extend"): "score",
    ("reward", "finish"): "score",
    ("critic", "extend"): "score",
    ("critic", "finish"): "score",
    ("trainer", "update"): "update",
}
"""The phase of each span by track and label; spans of publishing weights have none."""

REMEDY: Final = "choose a smaller --workload"


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """The models of a workload; the reward may be a function."""

    actor: PreTrainedModel
    reference: PreTrainedModel
    reward: PreTrainedModel | None
    critic: PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A graph, what decodes for it, and the places of its other models; :meth:`close` closes all of them.

    Attributes:
        lookahead: steps that begin before the current one has ended.
    """

    graph: Graph[StepReport]
    lookahead: int
    acting: Acting
    places: Sequence[Place]

    def close(self) -> None:
        """End the engine, and close the places."""
        self.acting.close()
        for place in self.places:
            place.close()


def pipeline(
    files: Files,
    mode: Mode,
    seats: Seats,
    listener: SpanListener,
    *,
    device: str = "cpu",
    scorers: Scorers = "process",
    engine: str = "transformers",
) -> Pipeline:
    """Return the graph of one mode of a workload, with models of its own, whose spans ``listener`` receives.

    ``engine`` serves the policy: one of :data:`~benchmarks.ladder.acting.ENGINES`.
    """
    workload = files.workload
    models = load(files, device)
    kind = partial(DeviceThread, device=device)
    apart = mode.trains_apart(workload)
    train = Process if apart and device == "cpu" else kind
    training = train("trainer", listener=listener, setup=seats.trainer.take)
    home = kind if scorers == "thread" else Process
    scoring = home("scorers", listener=listener, setup=seats.scorers.take)
    scripted = workload.models.scripted
    sampling = Sampling(
        max_new_tokens=workload.lengths.cap,
        temperature=workload.temperature,
        stop=() if scripted else (EOS,),
        seed=workload.seed,
    )
    limit = length_of if scripted else None
    acting = ENGINES[engine](Part(files, models.actor, sampling, limit, seats.actor, device, listener))
    reward: Scorer[float | Drop] = FunctionReward(countdown_reward, decode=_words(workload))
    if models.reward is not None:
        reward = RewardModel(models.reward, thread=ModelPlace(scoring, "reward", REMEDY))
    trained = ActorCritic(models.actor, models.critic)
    if apart:
        trained = trained.copied()
    graph = ppo(
        policy=acting.policy,
        reference=ReferenceLogprobs(
            models.reference, sampling=sampling, thread=ModelPlace(scoring, "reference", REMEDY)
        ),
        reward=reward,
        critic=ValueModel(models.critic, thread=ModelPlace(scoring, "critic", REMEDY)),
        trainer=HfTrainer(
            trained.actor, trained.critic, sampling=sampling, thread=training, settings=_settings(workload)
        ),
        admission=mode.admission(workload),
        chunks=mode.chunks(workload),
        advantage=GAE(gamma=workload.gamma, lam=workload.lam, kl=workload.kl),
    )
    for place in (scoring, training):
        if isinstance(place, Process):
            place.wait_until_ready()
    return Pipeline(held(graph) if mode.held else graph, mode.lookahead, acting, (scoring, training))


def length_of(prompt: Prompt) -> int:
    return int(str(prompt.columns["length"]))


def countdown_reward(prompts: Sequence[str], completions: Sequence[str], length: Sequence[int]) -> list[float]:
    """Return 1 for each completion of the announced length, else 0."""
    del prompts
    return [float(len(text.split()) == wanted) for text, wanted in zip(completions, length, strict=True)]


def load(files: Files, device: str) -> Models:
    """Return the models of a workload, loaded and probed, or with random weights for scripted lengths."""
    workload = files.workload
    ruled = workload.reward == "rule"
    if not workload.models.scripted:
        return Models(
            actor=load_causal(files.model("actor"), device=device),
            reference=load_causal(files.model("actor"), device=device),
            reward=None if ruled else load_scalar(files.model("reward"), device=device),
            critic=load_scalar(files.model("critic"), device=device),
        )
    shapes = workload.models
    return Models(
        actor=drawn(workload, shapes.actor, device, scalar=False),
        reference=drawn(workload, shapes.actor, device, scalar=False),
        reward=None if ruled else drawn(workload, shapes.reward, device, scalar=True),
        critic=drawn(workload, shapes.critic, device, scalar=True),
    )


def drawn(workload: BenchWorkload, shape: Shape, device: str, *, scalar: bool) -> PreTrainedModel:
    """Return a model with random weights, equal for equal workloads and devices."""
    config = config_of(shape, workload.models.vocabulary or language_of(workload).vocabulary, workload.positions)
    dtype = getattr(torch, workload.models.dtype)
    model: PreTrainedModel
    with alone(workload.seed), torch.device(device):
        if scalar:
            config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.train(mode=False)
    return model


def _words(workload: BenchWorkload) -> Callable[[Sequence[int]], str]:
    """Return a detokenizer to words between blanks, as many as tokens without padding."""
    words = language_of(workload).words()
    return lambda tokens: " ".join(words[token] if token < len(words) else "?" for token in tokens if token != PAD)


def _settings(workload: BenchWorkload) -> TrainerSettings:
    return TrainerSettings(
        learning_rate=workload.learning_rate,
        epochs=workload.epochs,
        minibatches=workload.minibatches,
        micro_batch_tokens=workload.micro_batch_tokens,
        seed=workload.seed,
    )
