"""The models of a run, each loaded for its role and checked against the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from oppo.atomic_files import nearby
from oppo.config.environment import INITIAL
from oppo.config.scorers import ModelRewardSection
from oppo.config.sections import ModelsSection
from oppo.errors import ConfigError, ModelRefused
from oppo.events import Drop
from oppo.hf.as_text.rendering import Form, Rendering
from oppo.hf.as_text.streamed import Bridge, BridgedReward
from oppo.hf.as_text.whole import ClassifierReward, Encoder, SimilarityReward, load_encoder
from oppo.hf.devices import attributed
from oppo.hf.loading import (
    LOADERS,
    Loadable,
    LoadOptions,
    ModelKind,
    ModelRecipe,
    load_causal,
    load_scalar,
    load_tokenizer,
    require_supported,
    vocabulary_of,
)
from oppo.hf.model_files import ADAPTER, RewardKind, holds_tokenizer, located, read_object, require_adapter, reward_kind
from oppo.hf.model_parts import require_pieces
from oppo.hf.processor import ImagePrompts, Processor
from oppo.hf.servable import probe_images
from oppo.hf.serve.scorers import ProcessRewardModel, RewardModel
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.vision import pixels_of
from oppo.images import ImageFiles
from oppo.log import logger
from oppo.models import Scorer
from oppo.placement import Hosting
from oppo.run.deployment import Deployment, Role

_LOADING = "choose models.dtype = 'bfloat16', or a smaller model"

_AS_FUNCTION = (
    "A reward of another kind is served as a function: set its source to 'file.py:function', which is given "
    "prompts and completions as text (oppo.rewards.FunctionReward)."
)


def adapter_of(models: ModelsSection) -> Path:
    try:
        directory = located(models.adapter, weights=True)
        base = str(read_object(directory / ADAPTER).get("base_model_name_or_path"))
        same = _same_model(base, models.policy)
        if same:
            require_adapter(directory, allow_pickle=None)
    except ConfigError as error:
        raise ConfigError(f"models.adapter: {error}") from error
    if not same:
        raise ConfigError(
            f"models.adapter: {models.adapter} is for the model {base!r}, and models.policy is {models.policy!r}: set "
            f"models.policy = {base!r}, or name an adapter for the policy; if both are the same model, say so by "
            f"base_model_name_or_path in {directory / ADAPTER}"
        )
    return directory


def _same_model(*names: str) -> bool:
    one, other = (Path(name).expanduser() for name in names)
    if one.is_dir() and other.is_dir():
        return one.resolve() == other.resolve()
    # a model of a hub may have a copy here
    return names[0] == names[1] or ((one.is_dir() or other.is_dir()) and one.name == other.name)


class RoleLoader:
    def __init__(self, deployment: Deployment, tokenizer: HfTokenizer) -> None:
        self._deployment, self._models, self._devices = deployment, deployment.models, deployment.devices
        self._tokenizer = tokenizer

    def policy(self) -> PreTrainedModel:
        role = self._deployment.roles["policy"]
        with self.attributed(role):
            actor = self._loaded(role, load_causal)
            if not self._deployment.has_engine:
                require_pieces(actor)
            if self._tokenizer.size > (known := vocabulary_of(actor)):
                raise ConfigError(
                    f"the ids of its tokenizer go up to {self._tokenizer.size - 1}, but the model at {role.source!r} "
                    f"reads those below {known}: take the tokenizer that belongs to the model, or save the model after "
                    "resize_token_embeddings()"
                )
        return actor

    def reference(self) -> Loadable:
        role = self._deployment.roles["reference"]
        with self.attributed(role):
            return self._checked(role, self._served(role, "causal"))

    def _teacher(self, role: Role) -> tuple[Loadable, HfTokenizer | None]:
        with self.attributed(role):
            model = self._served(role, "causal")
            if (difference := self._difference(role.source, model)) is None:
                return model, None
            if isinstance(model, ModelRecipe):
                raise self.not_here(role)
            logger.info(f"{role.source} {difference}: it reads rollouts as text while they grow")
            return model, self.tokenizer(role.source)

    def teachers(
        self, actor: PreTrainedModel, start: Loadable | None
    ) -> dict[Role, tuple[Loadable, HfTokenizer | None]]:
        # start: the policy as it begins, if that is in memory anyway
        deployment, roles = self._deployment, self._deployment.roles_of("teacher")
        kind, adapter = deployment.settings.teacher.weights, self._models.adapter
        if kind == "live":
            return dict.fromkeys(roles, (actor if deployment.teacher_shares else self._live_teacher(), None))
        if deployment.teacher_shares and start is not None:
            return dict.fromkeys(roles, (start, None))
        if kind == "frozen" and adapter:
            return {role: (replace(self.recipe(role, "causal"), adapter=adapter), None) for role in roles}
        return {role: self._teacher(role) for role in roles}

    def _live_teacher(self) -> ModelRecipe:
        recipe = self.actor_recipe(self._devices.teacher)
        return recipe if "teacher" in self._devices.remote else replace(recipe, device=str(self._devices.teacher))

    def player(self, name: str, player: str) -> tuple[Role, Loadable]:
        """Return the model that plays a frozen role, which is loaded where it decodes."""
        policy = replace(
            self._deployment.roles["policy"], name=f"role {name!r}", key=f"agents.roles.{name}", remote=False
        )
        role = replace(policy, source=policy.source if player == INITIAL else player, device=self._devices.actor)
        with self.attributed(role):
            recipe = self.recipe(replace(role, apart=True), "causal")
            model = replace(recipe, adapter=self._models.adapter) if player == INITIAL else recipe
            return role, self._checked(role, model)

    def critic(self, source: str) -> tuple[PreTrainedModel, Loadable]:
        role = replace(self._deployment.roles["critic"], source=source)
        with self.attributed(role):
            model = self._loaded(role, partial(load_scalar, new_head=True))
            self.check_tokens(role, model)
        return model, self.recipe(role, "scalar") if role.apart else model

    def reward_kind(self, path: str) -> RewardKind:
        return reward_kind(self._located(path), trusted=self._models.trust_remote_code)

    def scalar_reward(self, role: Role) -> tuple[Loadable, str | None]:
        model = self._served(role, "scalar")
        return model, self._difference(role.source, model)

    def process_reward(self, role: Role) -> Loadable:
        return self._checked(role, self._served(role, "process"))

    def encoder(self, role: Role) -> Encoder:
        if role.apart:
            raise self.not_here(role)
        logger.info(f"loading the {role.name} {nearby(role.source)}")
        return load_encoder(role.source, **self._options(role))

    def tokenizer(self, path: str) -> HfTokenizer:
        return HfTokenizer(load_tokenizer(path, trust_remote_code=self._models.trust_remote_code))

    def recipe(self, role: Role, kind: ModelKind, device: torch.device | None = None) -> ModelRecipe:
        models, device = self._models, device or role.device
        return ModelRecipe(
            path=role.source,
            kind=kind,
            dtype=models.dtype,
            device=str(device) if role.apart and not role.remote else device.type,
            attention=models.attention,
            trust_remote_code=models.trust_remote_code,
            allow_pickle=models.allow_pickle,
            ignore_unused=models.ignore_unused_weights,
            quantization=role.quantization,
            new_head=role.name == "critic",
        )

    def actor_recipe(self, device: torch.device) -> ModelRecipe:
        models = self._models
        return replace(
            self.recipe(self._deployment.roles["policy"], "causal", device),
            lora_rank=models.lora_rank,
            lora_alpha=models.lora_alpha,
            lora_seed=self._deployment.trainer.seed,
            lora_experts=models.lora_experts,
            lora=models.lora,
            adapter=models.adapter,
        )

    def not_here(self, role: Role) -> ConfigError:
        if not role.remote:
            return ConfigError(
                f"{role.source} reads text, and on a GPU run.scorers = 'process' serves models that read the policy's "
                "tokens: expected run.scorers = 'thread' or 'auto'"
            )
        return ConfigError(
            f"{role.source} reads text, and an actor of a cluster serves models that read the policy's tokens: name in "
            f"placement.remote the models that are actors, without {role.model!r}"
        )

    def _served(self, role: Role, kind: ModelKind) -> Loadable:
        if not role.apart:
            return self._loaded(role, LOADERS[kind])
        recipe = self.recipe(role, kind)
        recipe.config()  # an error of a path comes now
        return recipe

    def _loaded(self, role: Role, load: Callable[..., PreTrainedModel]) -> PreTrainedModel:
        logger.info(f"loading the {role.name} {nearby(role.source)}")
        model = load(role.source, quantization=role.quantization, **self._options(role))
        require_supported(model.dtype, model.device)
        return model

    def _checked(self, role: Role, model: Loadable) -> Loadable:
        self.check_tokens(role, model)
        return model

    def check_tokens(self, role: Role, model: Loadable) -> None:
        if (difference := self._difference(role.source, model)) is not None:
            raise ConfigError(f"{role.source} {difference}: expected a model with the policy's tokenizer")

    @contextmanager
    def attributed(self, role: Role, key: str = "") -> Iterator[None]:
        try:
            with attributed(role.name, "it was loaded", _LOADING):
                yield
        except (ConfigError, ModelRefused) as error:
            advice = [_AS_FUNCTION] if role.model == "reward" else []
            raise type(error)("\n".join([f"{key or role.key}: {error}", *advice])) from error

    def _options(self, role: Role) -> LoadOptions:
        models, devices = self._models, self._devices
        here = devices.trainer[0] if role.apart else role.device
        return {
            "dtype": models.dtype,
            "device": devices.actor if role.name == "policy" else here,
            "trust_remote_code": models.trust_remote_code,
            "allow_pickle": models.allow_pickle,
            "ignore_unused": models.ignore_unused_weights,
            "attention": models.attention,
        }

    def _located(self, path: str) -> Path:
        return located(path, weights=False, trust_remote_code=self._models.trust_remote_code)

    def has_own_tokenizer(self, path: str) -> bool:
        return path != self._models.policy and holds_tokenizer(self._located(path))

    def _difference(self, path: str, model: Loadable) -> str | None:
        policy = self._models.policy
        if self.has_own_tokenizer(path) and (difference := self._tokenizer.differs(self.tokenizer(path))) is not None:
            return f"does not share the policy's tokenizer ({difference})"
        ours, theirs = self._tokenizer.size, vocabulary_of(model)
        if theirs < ours:
            return f"knows the token ids below {theirs}, but those of the policy {policy} go up to {ours - 1}"
        return None


def critic_source(models: ModelsSection, rewards: Sequence[str], fit: Sequence[str]) -> str:
    # its own model, unless that is a reward model that is unfit to be a critic
    if models.critic in fit or models.critic not in rewards:
        return models.critic
    return next(iter(fit), models.policy)


FORMS: dict[Form, str] = {
    "chat": "prompt and response by its own chat template",
    "joined": "the prompt and then the response",
    "pair": "prompt and response as two segments",
    "response": "the response alone",
}


def kind_of(key: str, reward: ModelRewardSection, kind: RewardKind) -> RewardKind:
    # its settings may change what its architecture says
    if kind == "scalar" and (reward.reading == "whole" or reward.label):
        kind = "classifier"
    if kind != "similarity" and reward.column:
        raise ConfigError(
            f"{reward.source} is no sentence encoder, which would compare a response with the column that {key}.column "
            f"= {reward.column!r} names: leave it out"
        )
    return kind


@dataclass(frozen=True, slots=True, eq=False)
class ServedRewardModel:
    """A reward model that is served; ``model`` is ``None`` if it reads text."""

    source: str
    scorer: Scorer[float | Drop]
    model: Loadable | None = None
    may_be_critic: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RewardModels:
    tokenizer: HfTokenizer
    load: RoleLoader
    prompt_column: str
    deterministic: bool

    def serve(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        with self.load.attributed(role):
            match kind_of(role.key, reward, self.load.reward_kind(role.source)):
                case "scalar":
                    return self._scalar(role, reward, place)
                case "process":
                    return self._process(role, reward, place)
                case "classifier":
                    return self._classifier(role, reward, place)
                case "similarity":
                    return self._similarity(role, reward, place)

    def _scalar(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        key, source, given = role.key, role.source, reward.form
        model, difference = self.load.scalar_reward(role)
        if given in {"auto", "tokens"} and difference is None:
            if given == "auto":
                self._warn_of_template(role)
            scorer = RewardModel(model, place=place, deterministic=self.deterministic)
            return ServedRewardModel(source, scorer, model, may_be_critic=True)
        reader = self.load.tokenizer(source)
        form: Form = "chat" if reader.has_chat_template else "joined"
        refused = f"{key}.form cannot be {given!r}"
        if given == "tokens":
            raise ConfigError(f"{source} {difference}, so {refused}: leave that out")
        if given == "pair":
            remedy = f"set {key}.reading = 'whole'"
            raise ConfigError(f"{source} reads one text as it grows, and no pair, so {refused}: {remedy}")
        if given != "auto":
            form = given
        if isinstance(model, ModelRecipe):
            raise self.load.not_here(role)
        bridge = Bridge(self.tokenizer, reader, form, self.prompt_column, reward.over_long)
        why = difference or "is to read text"
        self._say(role, f"{why}: it reads rollouts as text while they grow, {FORMS[form]}")
        return ServedRewardModel(source, BridgedReward(model, bridge, place=place, deterministic=self.deterministic))

    def _process(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        try:
            ends = self.tokenizer.ending_with(reward.separators)
        except ConfigError as error:
            raise ConfigError(f"{role.key}.separators: {error}") from error
        model = self.load.process_reward(role)
        words = f"rewards steps: it scores the last token of a response, and the {len(ends)} tokens that end one"
        self._say(role, words)
        scorer = ProcessRewardModel(model, place=place, separators=ends, deterministic=self.deterministic)
        return ServedRewardModel(role.source, scorer, model)

    def _classifier(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        key = role.key
        if reward.form == "tokens":
            raise ConfigError(f"{role.source} reads whole responses as text, so {key}.form cannot be 'tokens'")
        encoder = self.load.encoder(role)
        form: Form = "chat" if encoder.tokenizer.has_chat_template else "pair"
        if reward.form != "auto":
            form = reward.form
        try:
            scorer = ClassifierReward(
                encoder,
                self.tokenizer,
                place=place,
                form=form,
                label=reward.label or None,
                over_long=reward.over_long,
                prompt_column=self.prompt_column,
                deterministic=self.deterministic,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}; see {key}.label and {key}.form") from error
        self._say(role, f"({type(encoder.model).__name__}) scores whole responses as text, {FORMS[form]}")
        return ServedRewardModel(role.source, scorer)

    def _similarity(self, role: Role, reward: ModelRewardSection, place: Hosting) -> ServedRewardModel:
        if not reward.column:
            raise ConfigError(
                f"{role.source} is a sentence encoder, whose reward is the similarity of a response to a text of its "
                f"row: set {role.key}.column to the column of that text"
            )
        encoder = self.load.encoder(role)
        words = f"scores responses by their similarity to column {reward.column!r}"
        self._say(role, f"({type(encoder.model).__name__}) {words}")
        scorer = SimilarityReward(
            encoder,
            self.tokenizer,
            column=reward.column,
            place=place,
            over_long=reward.over_long,
            deterministic=self.deterministic,
        )
        return ServedRewardModel(role.source, scorer)

    def _warn_of_template(self, role: Role) -> None:
        # What was trained on whole texts of a chat template has learned to score their last token.
        if not self.load.has_own_tokenizer(role.source):
            return
        reader = self.load.tokenizer(role.source)
        with suppress(ConfigError):  # it may refuse these messages
            closing = Rendering("chat", reader).closing()
            if len(reader.encode_whole(closing)) != 1:
                logger.warning(
                    f"{role.key}: {role.source} scores the token that ends a response, where its chat template writes "
                    f"{closing!r}: if it was trained on texts of the template, as by TRL's RewardTrainer on "
                    f"conversations, set {role.key}.form = 'chat', which reads them; 'tokens' if it was not"
                )

    def _say(self, role: Role, words: str) -> None:
        logger.info(f"{role.key}: {role.source} {words}")


def reader_of_images(deployment: Deployment, directory: Path) -> Callable[[Path], ImagePrompts] | str:
    """Return what reads prompts with images, given the folder of relative paths; or why none are read."""
    settings = deployment.settings
    if settings.on_server or settings.starts_servers:
        return "a server of vLLM is given text only here: have one engine of this machine decode"
    if settings.environment.compact is not None:
        return "behind a summary a prompt is text: leave environment.compact out"
    if settings.teacher.privileged:
        return "the prompt of teacher.column or teacher.template is text: leave [teacher] out"
    if len(settings.devices["trainer"]) > 1 and settings.placement.shard:
        return "a shard of a model has no whole tower: set placement.shard = false"
    processor = Processor(settings.models.policy)
    return lambda folder: ImagePrompts(processor, ImageFiles(directory, folder))


def check_sight(
    deployment: Deployment,
    models: Mapping[str, Sequence[Loadable | None]],
    rewards: Mapping[str, ServedRewardModel],
    *,
    reads_text: bool,
) -> None:
    for key, reward in rewards.items():
        if reward.model is None:
            raise ConfigError(
                f"{key}: {nearby(reward.source)} reads text or is on vLLM, and prompts show images: name a function or "
                "a reward model that reads images and the policy's tokens"
            )
    if on_vllm := [role.engine_key for role, _ in deployment.on_vllm("reference", "teacher")]:
        raise ConfigError(
            f"{on_vllm[0]} is on vLLM, which is given text only here, and prompts show images: leave it out"
        )
    if reads_text:
        raise ConfigError("a teacher with another tokenizer reads text, and prompts show images: name another teacher")
    (policy,) = models["policy"]
    expected = _digest_of_pixels(policy)
    for role, model in [(role, model) for role, loaded in models.items() for model in loaded if model is not None]:
        try:
            if _digest_of_pixels(model) != expected:
                raise ConfigError(
                    f"models.{role}: its image processor makes other pixels than the policy's: take a model with the "
                    "same one"
                )
            if not isinstance(model, ModelRecipe):
                probe_images(model)
        except ModelRefused as error:
            raise ModelRefused(f"models.{role}: {error}; prompts show images") from error


def _digest_of_pixels(model: Loadable | None) -> str:
    if isinstance(model, ModelRecipe):
        return Processor(model.path).digest
    return "" if model is None else pixels_of(model).digest
