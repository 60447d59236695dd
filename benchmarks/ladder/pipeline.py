"""From a workload's files, a mode and a layout to the graph of a step and the places of its models.

``split`` is the paper's layout: each side has a device of its own in every mode, the serial one too. Here a device is a
core. The update is made on the actor's, which is free then, or, where it may run beside decoding, on the scorers'.
``shared`` is one device: the running side has all cores, and what runs beside decoding has the cores that decoding
leaves. Decoding has one thread in every mode: the matrix products of a decode step of these small models are so small
that two threads mostly wait for each other, and took twice as long on two cores. With more threads the serial modes
would look worse than they are.

The policy is on transformers, or on vLLM; nothing else of the ladder asks which.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from transformers import PreTrainedModel

from benchmarks.ladder.directory import EOS, PAD, Files, drawn, language_of
from benchmarks.ladder.workloads import LISTED, BenchWorkload, Layout, Mode, Phase, Scorers
from benchmarks.peer.reviews import judged
from oppo.algorithms.base import Roles
from oppo.algorithms.distill import Distill
from oppo.algorithms.group import GRPO
from oppo.algorithms.ppo import PPO
from oppo.events import Drop, StepReport
from oppo.graph import Graph
from oppo.hf.devices import DeviceThread, ModelPlace, use_cores
from oppo.hf.loading import load_causal, load_scalar, load_tokenizer
from oppo.hf.memory import at_rest
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel, TeacherLogprobs, ValueModel
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.trainer import HfTrainer
from oppo.models import Policy, Sampling, Scorer
from oppo.observe import SpanListener
from oppo.placement import Place, Process
from oppo.rewards import FunctionReward
from oppo.stages.hold import held
from oppo.training import TrainerSettings


@dataclass(frozen=True, slots=True)
class Seat:
    """The cores of a thread, and its intra-op threads of torch."""

    cores: tuple[int, ...]
    threads: int

    def take(self) -> None:
        """Bind the calling thread and its intra-op threads."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        use_cores(self.threads)


@dataclass(frozen=True, slots=True)
class Seats:
    """The seats of a contestant; its event loop shares the actor's."""

    actor: Seat
    scorers: Seat
    trainer: Seat

    def table(self) -> dict[str, dict[str, object]]:
        named = {"decode": self.actor, "score": self.scorers, "update": self.trainer}
        return {name: {"cores": list(seat.cores), "threads": seat.threads} for name, seat in named.items()}


def seats(layout: Layout, cores: Sequence[int], *, held: bool, apart: bool = False) -> Seats:
    """Return the seats of a layout.

    Example:
        >>> seats("shared", (0, 1), held=False).scorers.threads, seats("shared", (0, 1), held=True).scorers.threads
        (1, 2)
    """
    every = tuple(cores)
    if layout == "split":
        ours, theirs = every[:1], every[1:2] or every[:1]
        return Seats(Seat(ours, 1), Seat(theirs, 1), Seat(theirs if apart else ours, 1))
    whole, decoding = Seat(every, len(every)), Seat(every, 1)
    rest = Seat(every, max(1, len(every) - 1))
    return Seats(decoding, whole if held else rest, rest if apart else whole)


@dataclass(frozen=True, slots=True)
class Progress:
    decode_steps: int  # 0 if it does not count them
    tokens: int  # decoded


@dataclass(frozen=True, slots=True, eq=False)
class Acting:
    policy: Policy
    progress: Callable[[], Progress]  # returns its counts
    close: Callable[[], None]  # ends its engine; idempotent


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    files: Files
    actor: PreTrainedModel  # the model that is trained
    sampling: Sampling
    seat: Seat
    device: str
    listener: SpanListener  # receives the spans of decoding, of track `actor` and label `decode`


ERRORS: Final = Path("/dev/stderr")  # A contestant's standard error, which the ladder keeps in a file

Act: TypeAlias = Callable[[Part], Acting]


def on_transformers(part: Part) -> Acting:
    """Decode with the model that is trained, in a thread."""
    thread = DeviceThread("actor", part.device, setup=part.seat.take, first=True)
    thread.listener = part.listener
    policy = HfPolicy(part.actor, sampling=part.sampling, place=thread)
    counters = policy.counters
    return Acting(policy, lambda: Progress(counters.decode_steps, counters.tokens), thread.close)


def on_vllm(part: Part) -> Acting:
    """Decode with a copy of the weights in processes of an engine's own, on as many cores as the seat has threads."""
    from oppo.vllm import VllmEngine, VllmPolicy  # noqa: PLC0415 - an extra

    workload = part.files.workload
    engine = VllmEngine.start(
        part.files.model("actor"),
        arguments={
            "dtype": workload.models.dtype,
            "max_model_len": workload.positions,
            "max_num_seqs": 2 * workload.batch,  # as many may be deferred as a batch holds
            **_share(part),
        },
        cores=part.seat.threads,
        log=ERRORS,
    )
    policy = VllmPolicy(engine, sampling=part.sampling)
    policy.reporter.listener = lambda span: part.listener(replace(span, track="actor"))
    return Acting(policy, lambda: Progress(0, policy.progress), engine.close)


def _share(part: Part) -> dict[str, object]:
    """Return vLLM's share of a GPU: half of what is left when actor and critic have what training keeps."""
    if part.device == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info(part.device)
    kept = at_rest(lambda: part.actor)
    left = free - 2 * (kept.optimizer + kept.gradients)
    return {"gpu_memory_utilization": max(0.05, round(left / 2 / total, 2))}


ENGINES: Final[Mapping[str, Act]] = MappingProxyType({"transformers": on_transformers, "vllm": on_vllm})  # by name


_SCORERS: Final = ("reference", "reward", "critic", "teacher")

# The phase of each span by track and label; those of weight sync have none
WORK: Final[dict[tuple[str, str], Phase]] = {
    ("actor", "decode"): "decode",
    **{(scorer, label): "score" for scorer in _SCORERS for label in ("extend", "finish")},
    ("trainer", "update"): "update",
}

REMEDY: Final = "choose a smaller --workload"


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """The models of a workload; the reward may be a function, GRPO has no critic, and a distillation only a teacher."""

    actor: PreTrainedModel
    reference: PreTrainedModel | None
    reward: PreTrainedModel | None
    critic: PreTrainedModel | None
    teacher: PreTrainedModel | None
    rule: FunctionReward  # the reward without a model


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A graph, what decodes for it, and the places of its other models; :meth:`close` closes all of them."""

    graph: Graph[StepReport]
    lookahead: int  # steps that begin before the current one has ended
    actor: PreTrainedModel  # the model that is trained, unless that is done in another process
    acting: Acting
    places: Sequence[Place]

    def close(self) -> None:
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

    ``engine`` serves the policy: one of :data:`ENGINES`.
    """
    workload = files.workload
    models = load(files, device)
    kind = partial(DeviceThread, device=device)
    apart = mode.trains_apart(workload)
    train = Process if apart and device == "cpu" else kind
    training = train("trainer", setup=seats.trainer.take)
    home = kind if scorers == "thread" else Process
    scoring = home("scorers", setup=seats.scorers.take)
    training.listener = scoring.listener = listener
    sampling = sampling_of(workload)
    acting = ENGINES[engine](Part(files, models.actor, sampling, seats.actor, device, listener))
    trainer = trainer_of(workload, models, training, apart=apart)
    graph = graph_of(workload, mode, models, policy=acting.policy, trainer=trainer, scoring=scoring)
    for place in (scoring, training):
        if isinstance(place, Process):
            place.wait_until_ready()
    return Pipeline(graph, mode.lookahead, models.actor, acting, (scoring, training))


def sampling_of(workload: BenchWorkload) -> Sampling:
    return Sampling(
        max_new_tokens=workload.lengths.cap, temperature=workload.temperature, stop=(EOS,), seed=workload.seed
    )


def trainer_of(workload: BenchWorkload, models: Models, place: Place, *, apart: bool) -> HfTrainer:
    """Return the trainer of actor and critic; ``apart``: of copies of them."""
    trained = ActorCritic(models.actor, models.critic)
    if apart:
        trained = trained.copied()
    return HfTrainer(
        trained.actor,
        trained.critic,
        sampling=sampling_of(workload),
        place=place,
        settings=settings_of(workload),
        loss=algorithm_of(workload).loss(),
    )


def graph_of(
    workload: BenchWorkload, mode: Mode, models: Models, *, policy: Policy, trainer: HfTrainer, scoring: Place
) -> Graph[StepReport]:
    at = {name: ModelPlace(scoring, name, REMEDY) for name in _SCORERS}
    sampling = sampling_of(workload)
    reward: Scorer[float | Drop] = models.rule
    if models.reward is not None:
        reward = RewardModel(models.reward, place=at["reward"])
    critic = teacher = reference = None
    if models.critic is not None:
        critic = ValueModel(models.critic, place=at["critic"])
    if models.teacher is not None:
        teacher = TeacherLogprobs(models.teacher, sampling=sampling, place=at["teacher"], top_k=LISTED)
    if models.reference is not None:
        reference = ReferenceLogprobs(models.reference, sampling=sampling, place=at["reference"])
    roles = Roles(
        policy=policy,
        reference=reference,
        teacher=teacher,
        reward=reward,
        critic=critic,
        proximal=None,
        trainer=trainer,
        admission=mode.admission(workload),
        chunks=mode.chunks(workload),
        max_new_tokens=workload.lengths.cap,
    )
    graph = algorithm_of(workload).graph(roles)
    return held(graph) if mode.held else graph


def algorithm_of(workload: BenchWorkload) -> PPO | GRPO | Distill:
    if workload.teacher:
        return Distill(distill_top_k=LISTED)
    if workload.samples:
        return GRPO(samples=workload.samples, kl=workload.kl)
    normalised = workload.reward == "reviews"  # a utility is not centred, and the critic begins at 0
    return PPO(kl=workload.kl, gamma=workload.gamma, lam=workload.lam, score_norm=normalised)


def countdown_reward(prompts: Sequence[str], completions: Sequence[str], length: Sequence[int]) -> list[float]:
    """Return 1 for each completion of the announced length, else 0."""
    del prompts
    return [float(len(text.split()) == wanted) for text, wanted in zip(completions, length, strict=True)]


def load(files: Files, device: str) -> Models:
    """Return the models of a workload: loaded and probed, or, of those that are not saved, drawn."""
    workload = files.workload

    def model(role: str, *, scalar: bool = False) -> PreTrainedModel:
        if role != "actor" and workload.models.vocabulary:
            return drawn(workload, role, device)
        if scalar:
            return load_scalar(files.model(role), device=device, dtype=workload.models.dtype)
        return load_causal(files.model(role), device=device, dtype=workload.models.dtype)

    taught = workload.teacher is not None
    return Models(
        actor=model("actor"),
        reference=None if taught else model("actor"),
        reward=None if workload.reward != "model" else model("reward", scalar=True),
        critic=model("critic", scalar=True) if "critic" in workload.roles else None,
        teacher=model("teacher") if taught else None,
        rule=FunctionReward(judged, HfTokenizer(load_tokenizer(files.model("actor"))).decode_whole)
        if workload.reward == "reviews"
        else FunctionReward(countdown_reward, decode=_words(workload)),
    )


def _words(workload: BenchWorkload) -> Callable[[Sequence[int]], str]:
    """Return a detokenizer to words between blanks, as many as tokens without padding."""
    words = language_of(workload).words()
    return lambda tokens: " ".join(words[token] if token < len(words) else "?" for token in tokens if token != PAD)


def settings_of(workload: BenchWorkload) -> TrainerSettings:
    return TrainerSettings(
        learning_rate=workload.learning_rate,
        epochs=workload.epochs,
        minibatches=workload.minibatches,
        micro_batch_tokens=workload.micro_batch_tokens,
        seed=workload.seed,
    )
