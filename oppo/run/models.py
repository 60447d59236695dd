"""The models of a run: loaded, served and trained in their places, and saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, cast

import anyio
import torch
from transformers import PreTrainedModel

from oppo.agents import Agents
from oppo.algorithms.base import Roles
from oppo.atomic_files import nearby, whole, writing
from oppo.config.environment import EnvironmentSection
from oppo.config.scorers import ModelRewardSection, TeacherSection, VllmRewardSection
from oppo.config.sections import DataSection, ModelsSection, SamplingSection
from oppo.data.prompts import PrivilegedPrompt
from oppo.declared import declared
from oppo.environments import Environments, FunctionEnvironment, Tools
from oppo.errors import ConfigError, ModelError
from oppo.events import Drop, FloatArray
from oppo.graph.stage import Gauge
from oppo.hf.as_text.rendering import Form
from oppo.hf.as_text.streamed import Bridge, BridgedTeacher
from oppo.hf.devices import DeviceLayout, ModelPlace, memory_gauges
from oppo.hf.loading import Loadable, ModelRecipe, load_tokenizer, positions_of
from oppo.hf.lora import add_lora, load_lora, merged, share_base
from oppo.hf.model_files import ADAPTER, CONFIG, located, processor_files, quiet, read_object
from oppo.hf.model_parts import end_ids, pads_of, passes_at, vocabulary
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import (
    AveragedTeacher,
    ProximalLogprobs,
    RecomputedLogprobs,
    ReferenceLogprobs,
    SelfTeacher,
    TeacherLogprobs,
    ValueModel,
)
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.train.actor_critic import ActorCritic, ActorCriticRecipe, value_model_on
from oppo.hf.train.trainer import HfTrainer
from oppo.log import logger
from oppo.models import Passes, ReportsProgress, ResumableTrainer, Sampling, SamplingSettings, Scorer
from oppo.observe import Span, SpanListener
from oppo.placement import Place, Process, Thread
from oppo.run.checkpoint import Checkpoints, State, write_state
from oppo.run.deployment import Deployment, Role, named_reward, places_of
from oppo.run.engines import SERVING, ScorersOnVllm, ServeRequest, Serving, Worker, serve
from oppo.run.graph import admission_of, chunks_of
from oppo.run.loading import RewardModels, RoleLoader, ServedRewardModel, adapter_of, check_sight, critic_source
from oppo.run.memory_fit import fitted
from oppo.run.rewards import AnyEnvironment, UserCode, chatting_as, track_of
from oppo.scorers import BehindPrompt, ByColumn, Lesson, Untaught, capabilities_of
from oppo.stages.hold import Siblings
from oppo.turns import Environment
from oppo.vllm.scorers import VllmScorer

_TRAINING = "lower trainer.micro_batch_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """The models of a run in their places; :meth:`close` closes them. A model that it does not have is ``None``."""

    serving: Serving
    roles: Roles
    saving: Saving
    tokenizer: HfTokenizer
    sampling: Sampling
    image_tokens: Sequence[int]
    positions: int  # of the longest sequence that every model can read
    places: DeviceLayout
    # A model is served from weights other than those that are trained, so it is synced before the first step: a
    # critic's head may be new, an engine has the policy without its adapter, a server an earlier run's.
    served_apart: bool = False
    described: Mapping[str, str] = field(default_factory=dict)  # what each model is and where it works
    ideal: Mapping[str, Passes] = field(default_factory=dict)  # costs of what models read, at their peak
    gauges: Mapping[str, Gauge] = field(default_factory=dict)  # of the devices' memory, by metric
    scoring: tuple[VllmScorer[Any, Any], ...] = ()  # on vLLM

    def listen(self, *listeners: SpanListener) -> None:
        def pass_on(span: Span) -> None:
            for listener in listeners:
                listener(span)

        for worker in self._workers:
            worker.listener = pass_on

    @property
    def _workers(self) -> tuple[Worker, ...]:
        return *self.places, *self.serving.workers, *(scorer.reporter for scorer in self.scoring)

    def progress(self) -> tuple[object, ...]:
        """Return a value that changes while models work and when a call begins, even if no item is sent."""
        policy = self.roles.policy
        decoded = cast("ReportsProgress", policy).progress if policy.capabilities.reports_progress else 0
        return decoded, self.saving.trainer.progress, *self.at_work()

    def at_work(self) -> tuple[str, ...]:
        calls = [worker.at_work for worker in self._workers]
        calls.append(capabilities_of(self.roles.reward).at_work())
        calls.append(getattr(self.roles.environment, "at_work", ""))
        return tuple(filter(None, calls))

    def wired(self, trainer: ResumableTrainer, environment: Environment | None) -> Assembly:
        roles = replace(self.roles, trainer=trainer, environment=environment)
        return replace(self, roles=roles, saving=replace(self.saving, trainer=trainer))

    def abort(self) -> None:
        """Kill processes whose calls may hang, so that trained weights can be saved; safe to call from any thread."""
        self.serving.abort()
        for scorer in self.scoring:
            scorer.engine.abort()
        self.places.abort()

    def close(self) -> None:
        with ExitStack() as stack:
            for scorer in self.scoring:
                stack.callback(scorer.engine.close)
            stack.callback(self.places.close)
            stack.callback(self.serving.close)  # while the places of its servers live
            stack.callback(capabilities_of(self.roles.reward).close)
            if isinstance(self.roles.environment, FunctionEnvironment | Tools):
                stack.callback(self.roles.environment.close)


def policy_tokenizer(models: ModelsSection, data: DataSection, environment: EnvironmentSection) -> HfTokenizer:
    return chatting_as(_own_tokenizer(models), data, environment)


def _check_ends(environment: Environment | None, sampling: Sampling, tokenizer: HfTokenizer) -> None:
    first = next(iter(environment.classes.values())) if isinstance(environment, Environments) else environment
    chat = first if isinstance(first, Agents) else first.chat if isinstance(first, Tools) else None
    ends = [] if chat is None else sorted(chat.ends)
    if ends and not set(ends).intersection(sampling.stop) and not sampling.stop_strings:
        wanted = ", ".join(f"{tokenizer.name_of(end)!r}" for end in ends)
        raise ConfigError(
            f"by the chat template the policy ends what it says with {wanted}, and no such token ends that here: set "
            f"sampling.stop = [{wanted}]"
        )


def _own_tokenizer(models: ModelsSection) -> HfTokenizer:
    path, trusted = models.policy, models.trust_remote_code
    try:
        directory = located(path, weights=False, trust_remote_code=trusted)
        if (directory / CONFIG).exists() or not (directory / ADAPTER).is_file():
            return HfTokenizer(load_tokenizer(path, trust_remote_code=trusted), processor_files(directory))
        base = read_object(directory / ADAPTER).get("base_model_name_or_path")
    except ConfigError as error:
        raise ConfigError(f"models.policy: {error}") from error
    raise ConfigError(
        f"models.policy: {path} holds an adapter of PEFT for the model {base!r}, and a policy is a whole model: merge "
        "the two, PeftModel.from_pretrained(base, adapter).merge_and_unload(), and save that with its tokenizer; or "
        "name the base, and train this adapter on with models.adapter, or new ones with models.lora_rank"
    )


@quiet()
def assemble(
    deployment: Deployment,
    tokenizer: HfTokenizer,
    *,
    columns: Iterable[Collection[str]],
    engine_log: Path | None,
    environment: AnyEnvironment | None,
    images: bool,
) -> Assembly:
    settings = deployment.settings
    deployment = fitted(deployment)
    places = places_of(deployment)
    with ExitStack() as stack:
        stack.callback(places.close)
        here = ModelPlace(places.scoring.get("reward", places.saving), "reward", SERVING)
        code = UserCode.of(settings.reward_tables, tokenizer, here, environment, run=settings.run, data=settings.data)
        known = [*columns]
        for names in known:
            code.check_columns(names)
        taught = _teacher_prompts(settings.teacher, settings.data, code.environment, tokenizer)
        column = settings.models.teacher_column
        if known and column and column not in known[0]:
            raise ConfigError(
                f"models.teacher_column = {column!r} is no column of data.prompts; the columns there are "
                f"{', '.join(sorted(known[0]))}"
            )
        if known and taught is not None:
            taught.check_columns(known[0])

        def started(request: ServeRequest) -> Serving:
            serving = serve(replace(request, log=engine_log))
            stack.callback(serving.close)
            return serving

        load = RoleLoader(deployment, tokenizer)
        on_vllm = ScorersOnVllm(deployment, load, engine_log)
        stack.callback(on_vllm.close)
        assembly = _Making(deployment, tokenizer, places, code, load, on_vllm, taught).assembly(started, images=images)
        _seat(deployment, load, assembly)
        stack.pop_all()
    return assembly


@dataclass(frozen=True, slots=True, eq=False)
class _Making:
    deployment: Deployment
    tokenizer: HfTokenizer
    places: DeviceLayout
    code: UserCode
    load: RoleLoader
    on_vllm: ScorersOnVllm
    taught: PrivilegedPrompt | None

    def assembly(self, serve: Callable[[ServeRequest], Serving], *, images: bool) -> Assembly:
        deployment, tokenizer, places, code, load = self.deployment, self.tokenizer, self.places, self.code, self.load
        settings, chosen, devices = deployment.settings, deployment.models, deployment.devices
        actor, reference, start = _actor_and_reference(deployment, load)
        teachers = load.teachers(actor, start or reference)
        rewards = self._reward_models()
        critic = load_critic(deployment, actor, [*rewards.values()], load)
        models: dict[str, list[Loadable | None]] = {
            "policy": [actor],
            "reference": [reference],
            "teacher": [model for model, _ in teachers.values()],
            "reward": [reward.model for reward in rewards.values()],
            "critic": [critic.trained],
        }
        read = [positions_of(model) for loaded in models.values() for model in loaded if model is not None]
        if images:
            check_sight(deployment, models, rewards, reads_text=any(reader for _, reader in teachers.values()))
        sampling = _sampling(settings.sampling, tokenizer, actor, barred=pads_of(actor.config) if images else ())
        _check_ends(code.environment, sampling, tokenizer)
        if settings.step.most_overcommit and not sampling.varies:
            logger.warning(
                f"every response has sampling.max_new_tokens = {sampling.max_new_tokens} tokens, so none is late, and "
                "rollouts in flight beyond the batch gain nothing: set step.admission = 'overcommit', "
                "step.overcommit = 0"
            )
        trained = ActorCritic(actor, critic.trained)
        if not settings.shares_weights:
            trained = trained.copied(devices.weights)
        trainer = self._trainer(trained, critic, sampling)
        served = load.actor_recipe(devices.policy) if "policy" in devices.apart else actor
        serving = serve(ServeRequest(deployment, actor, served, sampling, tokenizer, places, images=images))
        teacher, taught = self._teacher(teachers, sampling, actor), settings.teacher
        threshold = 1.0 if taught.threshold is None else taught.threshold
        siblings = Siblings(settings.algorithm.responses, threshold) if taught.of_siblings else None
        places.wait_until_ready()
        return Assembly(
            serving=serving,
            roles=Roles(
                policy=serving.policy,
                reference=self._reference(reference, sampling),
                teacher=teacher,
                siblings=siblings,
                reward=code.reward({key: reward.scorer for key, reward in rewards.items()}),
                critic=self._critic(critic.served),
                proximal=self._proximal(actor, sampling) if settings.algorithm.corrects else None,
                trainer=trainer,
                admission=settings.own_admission() or admission_of(settings.step),
                chunks=chunks_of(settings.step, sampling.max_new_tokens),
                max_new_tokens=sampling.max_new_tokens,
                environment=code.environment,
            ),
            saving=Saving(trainer, tokenizer, ("actor", "critic") if critic.trained else ("actor",), places.saving),
            tokenizer=tokenizer,
            sampling=sampling,
            image_tokens=pads_of(actor.config),
            positions=min(serving.positions, *read, *(scorer.longest for scorer in self.on_vllm.scorers)),
            places=places,
            served_apart=critic.served is not critic.trained
            or served is not actor
            or settings.on_server
            or (settings.teacher.weights == "average" and bool(chosen.adapter))
            or (deployment.has_engine and chosen.begins_off_base),
            described=_described(deployment, places, models),
            ideal=_ideal(deployment, models, serving.gpus),
            gauges=memory_gauges(devices.distinct()),
            scoring=tuple(self.on_vllm.scorers),
        )

    def _reward_models(self) -> dict[str, ServedRewardModel]:
        settings, roles, served = self.deployment.settings, self.deployment.roles, dict[str, ServedRewardModel]()
        models = RewardModels(self.tokenizer, self.load, settings.data.column, settings.run.deterministic)
        for key, reward in settings.reward_tables.items():
            if isinstance(reward, ModelRewardSection):
                place = self._scoring("reward", track_of(reward))
                served[key] = models.serve(roles[named_reward(reward)], reward, place)
            elif isinstance(reward, VllmRewardSection):
                served[key] = self.on_vllm.reward(roles[named_reward(reward)], reward)
        return served

    def _teacher(
        self, models: Mapping[Role, tuple[Loadable, HfTokenizer | None]], sampling: Sampling, actor: PreTrainedModel
    ) -> Scorer[Lesson | Drop] | None:
        settings = self.deployment.settings
        section, exact = settings.teacher, settings.run.deterministic
        top_k = getattr(settings.algorithm, "distill_top_k", None)
        known = dict[str, Scorer[Lesson | Drop]]()
        for role, (model, reader) in models.items():
            place, name = self._scoring("teacher", role.name), role.name.partition(".")[2]
            options: dict[str, Any] = {"sampling": sampling, "place": place, "deterministic": exact}
            if reader is not None:
                _check_reader(role, top_k, answered=self.code.environment is not None)
                form: Form = "chat" if reader.has_chat_template else "joined"
                bridge = Bridge(self.tokenizer, reader, form, settings.data.column, "drop")
                known[name] = BridgedTeacher(cast("PreTrainedModel", model), bridge=bridge, **options)
            elif section.weights == "live":
                known[name] = SelfTeacher(model, top_k=top_k, **options)
            elif section.weights == "average":
                start = merged(actor, torch.float32)
                known[name] = AveragedTeacher(model, start, rate=section.rate, top_k=top_k, **options)
            elif top_k is None:
                known[name] = ReferenceLogprobs(model, **options)
            else:
                known[name] = TeacherLogprobs(model, top_k=top_k, **options)
        for role, on in self.deployment.on_vllm("teacher"):
            known[role.name.partition(".")[2]] = self.on_vllm.logprobs(role, on, sampling, top_k=top_k or 0)
        column = settings.models.teacher_column
        teacher = ByColumn(column, known) if column else known.get("")
        if teacher is None or self.taught is None:
            return teacher
        if section.note:
            logger.info(section.note)
        return BehindPrompt(teacher, self.taught, Untaught(top_k))

    def _reference(self, model: Loadable | None, sampling: Sampling) -> Scorer[FloatArray] | None:
        for role, on in self.deployment.on_vllm("reference"):
            return cast("Scorer[FloatArray]", self.on_vllm.logprobs(role, on, sampling))
        if model is None:
            return None
        place, deterministic = self._scoring("reference"), self.deployment.settings.run.deterministic
        return ReferenceLogprobs(model, sampling=sampling, place=place, deterministic=deterministic)

    def _critic(self, model: Loadable | None) -> ValueModel | None:
        if model is None:
            return None
        deterministic = self.deployment.settings.run.deterministic
        return ValueModel(model, place=self._scoring("critic"), deterministic=deterministic)

    def _proximal(self, actor: PreTrainedModel, sampling: Sampling) -> RecomputedLogprobs:
        # of stale tokens only, if the trainer's backend decodes too
        settings = self.deployment.settings
        thread, deterministic = self._scoring("proximal"), settings.run.deterministic
        if self.deployment.has_engine:
            return RecomputedLogprobs(actor, sampling=sampling, place=thread, deterministic=deterministic)
        return ProximalLogprobs(
            actor, sampling=sampling, place=thread, deterministic=deterministic, kv_on_sync=settings.step.kv_on_sync
        )

    def _trainer(self, models: ActorCritic, critic: Critic, sampling: Sampling) -> HfTrainer:
        deployment, settings, devices = self.deployment, self.deployment.settings, self.deployment.devices.trainer
        loss, top_k = settings.trained_loss(), getattr(settings.algorithm, "distill_top_k", None)
        if top_k is not None and not loss.reads & {"top_logprobs", "teacher_top"}:
            raise ConfigError(
                f"algorithm.distill_top_k = {top_k} gives the loss a teacher's likeliest ids, and "
                f"{type(loss).__name__} reads neither top_logprobs nor teacher_top: name them in its reads, or leave "
                "distill_top_k out"
            )
        return HfTrainer(
            models.actor,
            models.critic,
            sampling=sampling,
            place=ModelPlace(self.places.training, "trainer", _TRAINING),
            settings=deployment.trainer,
            loss=loss,
            shard=settings.placement.shard,
            devices=devices if len(devices) > 1 else (),
            recipe=_copies(deployment, self.load, critic) if deployment.trains_elsewhere else None,
        )

    def _scoring(self, model: str, name: str = "") -> ModelPlace:
        return ModelPlace(self.places.place_of(model), name or model, SERVING)


def _described(
    deployment: Deployment, places: DeviceLayout, models: Mapping[str, Sequence[Loadable | None]]
) -> dict[str, str]:
    found, loaded = dict[str, str](), {kind: iter(of_kind) for kind, of_kind in models.items()}
    for role in deployment.roles.values():
        is_policy, of_kind = role.name == "policy", loaded.get(role.model, iter(()))
        model = None if role.model == "teacher" and role.on is not None else next(of_kind, None)
        if role.on is not None or (is_policy and deployment.has_engine):
            home = "vLLM"
        else:
            home = _home(places.acting[0] if is_policy else places.place_of(role.model))
        size = "" if model is None or isinstance(model, ModelRecipe) else _size(model)
        found[role.name] = (
            f"{nearby(role.source)}{size}; {'decodes' if is_policy else 'reads'} on {role.device}, {home}"
        )
    trained = " and ".join(name for name in ("policy", "critic") if name in found)
    on = ", ".join(map(str, deployment.devices.trainer))
    return found | {"trainer": f"{trained} on {on}, {_home(places.training)}"}


def _size(model: PreTrainedModel) -> str:
    count, unit = float(model.num_parameters()), ""
    while count >= 1000:
        count, unit = count / 1000, {"": "k", "k": "M", "M": "B", "B": "T"}[unit]
    kind, dtype = model.config.model_type, str(model.dtype).removeprefix("torch.")
    return f", {kind} of {count:.3g}{unit} parameters in {dtype}"


def _home(place: Place) -> str:
    kinds = {Thread: "thread", Process: "process"}
    return f"{next((name for kind, name in kinds.items() if isinstance(place, kind)), 'cluster')} {place.name!r}"


def _seat(deployment: Deployment, load: RoleLoader, assembly: Assembly) -> None:
    options: dict[str, Any] = {"sampling": assembly.sampling, "decode": assembly.tokenizer.decode}
    for name, player in deployment.settings.agents.frozen.items():
        role, model = load.player(name, player)
        place = ModelPlace(assembly.places.place_of(role.name), role.name, SERVING)
        policy = HfPolicy(model, place=place, deterministic=deployment.settings.run.deterministic, **options)
        cast("Agents", assembly.roles.environment).seat(name, policy)


def _teacher_prompts(
    section: TeacherSection, data: DataSection, environment: object, tokenizer: HfTokenizer
) -> PrivilegedPrompt | None:
    if not section.privileged:
        return None

    def of_row(row: Mapping[str, object]) -> HfTokenizer:
        return environment.of(row).chat.tokenizer if isinstance(environment, Tools | Environments) else tokenizer

    shown = {"column": section.column, "template": section.template, "prompt_column": data.column}
    return PrivilegedPrompt(tokenizer=of_row, decode=tokenizer.decode, **shown)


def _check_reader(role: Role, top_k: int | None, *, answered: bool) -> None:
    if top_k is not None:
        raise ConfigError(
            f"algorithm.distill_top_k = {top_k} has the policy learn a teacher's likeliest ids, and {role.key} "
            "has ids of its own: leave distill_top_k out, or name a teacher with the policy's tokenizer"
        )
    if answered:
        raise ConfigError(
            f"{role.key} has another tokenizer and reads a response as one text, in which turns and answers "
            "cannot be told apart: expected a teacher with the policy's tokenizer, or no [environment]"
        )


def _ideal(deployment: Deployment, models: Mapping[str, Sequence[Loadable | None]], gpus: int) -> dict[str, Passes]:
    # Of models that are here and read the policy's tokens; a head on the actor's trunk takes hardly any time.
    epochs, cores, known = deployment.trainer.epochs, deployment.cores, dict[str, Passes]()
    trained = [*models["policy"], *([] if deployment.models.shared_trunk else filter(None, models["critic"]))]
    for role, loaded in {**models, "trainer": trained}.items():
        here = [model for model in loaded if isinstance(model, PreTrainedModel)]
        several = role == "teacher" and len(loaded) > 1  # each reads a share
        if (
            here
            and len(here) == len(loaded)
            and not several
            and (speed := deployment.devices.speed(role, here[0].dtype, cores, gpus))
        ):
            passes = [passes_at(speed, model, epochs=epochs if role == "trainer" else 0) for model in here]
            known[role] = reduce(add, passes)
    return known


def _actor_and_reference(
    deployment: Deployment, load: RoleLoader
) -> tuple[PreTrainedModel, Loadable | None, PreTrainedModel | None]:
    # With adapters both are over the same base in memory, unless they are apart: on two devices or machines. So is the
    # last one, a teacher that is the policy as it begins.
    models = deployment.models
    refers = bool(deployment.roles_of("reference"))
    adapter = adapter_of(models) if models.adapter else None
    actor = load.policy()
    shared = models.is_reference_on_base and not deployment.reference_is_apart
    base = share_base(actor) if refers and shared else None
    frozen = deployment.settings.teacher.weights == "frozen" and deployment.teacher_shares and models.adapts
    start = share_base(actor) if frozen else None
    if models.lora_rank:
        add_lora(
            actor,
            models.lora_rank,
            models.lora_alpha,
            seed=deployment.trainer.seed,
            experts=models.lora_experts,
            more=models.lora,
        )
    if adapter is not None:
        with load.attributed(deployment.roles["policy"], "models.adapter"):
            load_lora(actor, adapter)
            if base is not None and models.reference == models.adapter:
                load_lora(base, adapter, trained=False)
            if start is not None:
                load_lora(start, adapter, trained=False)
    return actor, load.reference() if refers and base is None else base, start


def _copies(deployment: Deployment, load: RoleLoader, critic: Critic) -> ActorCriticRecipe:
    device, role = deployment.devices.trainer[-1], deployment.roles.get("critic")
    source = None if role is None or critic.source is None else replace(role, source=critic.source)
    return ActorCriticRecipe(
        actor=load.actor_recipe(device),
        critic=None if source is None else load.recipe(source, "scalar", device),
        shared_trunk=deployment.models.shared_trunk,
    )


def _sampling(
    section: SamplingSection, tokenizer: HfTokenizer, actor: PreTrainedModel, *, barred: tuple[int, ...]
) -> Sampling:
    settings = {name: getattr(section, name) for name in declared(SamplingSettings)}
    settings["stop_strings"] = tokenizer.stop_strings(section.stop_strings)
    stop = tokenizer.stop(section.stop, end_ids(actor), eos=section.eos)
    # given even where the policy's table is not padded: a reference's or a teacher's may be
    return Sampling(**settings, stop=stop, vocabulary=min(tokenizer.size, vocabulary(actor)), barred=barred)


@dataclass(frozen=True, slots=True, eq=False)
class Critic:
    trained: PreTrainedModel | None = None
    served: Loadable | None = None  # the same module, or how it is loaded on another machine
    source: str | None = None  # None without a critic, or on the actor's trunk


def load_critic(
    deployment: Deployment, actor: PreTrainedModel, rewards: Sequence[ServedRewardModel], load: RoleLoader
) -> Critic:
    settings, models = deployment.settings, deployment.models
    if not settings.algorithm.has_critic:
        return Critic()
    if models.shared_trunk:
        trunk = value_model_on(actor)
        return Critic(trunk, trunk)
    source = critic_source(
        models, settings.reward_models, [reward.source for reward in rewards if reward.may_be_critic]
    )
    if source != models.critic:
        logger.info(
            f"models.critic: {models.critic} does not read the policy's tokens one by one, so it cannot be a critic, "
            f"which starts from {'the policy' if source == models.policy else source} instead"
        )
    return Critic(*load.critic(source), source)


@dataclass(eq=False)
class Saving:
    """Writes the trainer's models with the run's state and tokenizers beside them.

    A write that has begun is completed even if its caller is cancelled, by Ctrl-C too: it runs in a thread, which waits
    for the trainer in an event loop of its own.
    """

    trainer: ResumableTrainer
    tokenizer: HfTokenizer
    models: Sequence[str]
    thread: Thread
    is_saving: bool = False

    async def checkpoint(self, checkpoints: Checkpoints, step: int, score: tuple[float, str], state: State) -> None:
        def write() -> None:
            with checkpoints.writing(step, *score) as path, quiet():
                write_state(path, state)
                anyio.run(self.trainer.write, path)
                self._write_tokenizers(path)

        await self.thread.call("checkpoint", write)

    async def save(self, directory: Path) -> None:

        def write() -> None:
            with whole(directory) as path, quiet():
                anyio.run(self.trainer.save, path)
                self._write_tokenizers(path)

        self.is_saving = True
        try:
            await self.thread.call("save", write)
        except OSError as error:
            raise ModelError(
                f"what was learned could not be saved in {directory}, and nothing half-written is left there: {error}"
            ) from error
        finally:
            self.is_saving = False

    def _write_tokenizers(self, directory: Path) -> None:
        for path in (directory / name for name in self.models if (directory / name).is_dir()):
            with writing(path):
                self.tokenizer.save(path)
