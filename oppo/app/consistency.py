"""Consistency of the sections of a settings file with one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from oppo.app.reward_settings import OF_MODELS
from oppo.app.sections import EvalSection, ModelsSection
from oppo.declared import changed, declared
from oppo.training import OF_THE_CRITIC
from oppo.user_code import is_of_a_file

if TYPE_CHECKING:
    from oppo.app.settings import Settings

OF_THE_CRITIC_MODEL: Final = frozenset({"critic", "shared_trunk"})
"""The keys of ``[models]`` for a critic."""


def require_consistent(settings: Settings) -> None:
    """Check the settings of each section against those of the others.

    Raises:
        ValueError: two contradict each other.
        ConfigError: an admission of one's own cannot be made of them.
    """
    settings.own_admission()  # which may refuse its settings
    if settings.run.exact:
        _require_exactness(settings)
    if settings.models.engine == "vllm":
        _require_possible_on_vllm(settings)
    elif settings.vllm:
        raise ValueError(
            f"[vllm] holds {', '.join(settings.vllm)}, which only vLLM reads, and models.engine = "
            f"{settings.models.engine!r}: set models.engine = 'vllm', or leave [vllm] out"
        )
    _require_models_that_read(settings.models)
    if settings.step.lookahead and settings.models.share_weights:
        raise ValueError(
            f"step.lookahead = {settings.step.lookahead} trains while the next step is decoded, and "
            "models.share_weights = true would change the weights meanwhile: leave share_weights out"
        )
    _require_possible_placement(settings)
    if settings.step.publish == "in-flight":
        _require_possible_in_flight(settings)
    if settings.step.stream_updates:
        _require_a_sum(settings)
    elsewhere = settings.run.trainer == "process" or len(settings.devices["trainer"]) > 1
    if elsewhere and is_of_a_file(kind := type(settings.trained_loss())):
        key = "run.trainer = 'process'" if settings.run.trainer == "process" else "placement.trainer, with ranks,"
        raise ValueError(
            f"{key} takes the loss to another process, which cannot import {kind.__name__} from a "
            "file: leave that out, or keep the class in an installed package"
        )
    if not settings.eval.prompts:
        _require_no_evaluation(settings)
    if not settings.algorithm.has_critic:
        _require_no_critic(settings)
    units, unit = _units(settings)
    if units % settings.trainer.minibatches:
        raise ValueError(
            f"trainer.minibatches = {settings.trainer.minibatches} does not divide the {units} {unit} of step.batch = "
            f"{settings.step.batch}: optimizer steps would be of several sizes; expected a divisor"
        )
    if getattr(settings.algorithm, "dynamic_sampling", False) and settings.step.admission == "tail-batched":
        raise ValueError(
            "step.admission = 'tail-batched' begins late responses anew in a later step, and "
            "algorithm.dynamic_sampling = true needs whole groups in this one: choose another admission, or set "
            "dynamic_sampling = false"
        )
    if settings.algorithm.responses > 1 and settings.sampling.temperature == 0:
        raise ValueError(
            f"step.algorithm = {settings.step.algorithm!r} compares the responses to a prompt with one another, and "
            "sampling.temperature = 0 makes them all the same: give one above 0"
        )


def _units(settings: Settings) -> tuple[int, str]:
    """Return what minibatches of a batch are made of: how many, and their name."""
    batch, responses = settings.step.batch, settings.algorithm.responses
    if responses > 1 and settings.trainer.minibatches > 1 and settings.trained_loss().unit == "group":
        return batch // responses, "groups"
    return batch, "responses"


def _require_models_that_read(models: ModelsSection) -> None:
    """Check that what says how a reward model reads is not said of a function."""
    for key, part in models.rewards.items():
        if isinstance(models.reward, str):
            given = [f"models.{name}" for name in changed(models, [f"reward_{name}" for name in OF_MODELS])]
        else:
            given = [f"models.{key}.{name}" for name in OF_MODELS if getattr(part, name) is not None]
        if part.is_function and given:
            raise ValueError(
                f"{', '.join(given)} says how a reward model reads, and the reward {part.source!r} is Python code: "
                "leave that out"
            )


def _require_a_sum(settings: Settings) -> None:
    """Check that the gradient of a batch is the sum of its groups', each known once the group is scored."""
    algorithm, trainer = settings.algorithm, settings.trainer
    faults = {
        "run.exact = true, and parts come in an order that depends on timing": settings.run.exact,
        "models.share_weights = true, and gradients are computed while responses are decoded": (
            settings.models.share_weights is True
        ),
        f"trainer.epochs = {trainer.epochs}": trainer.epochs > 1,
        f"trainer.minibatches = {trainer.minibatches}": trainer.minibatches > 1,
        f"step.algorithm = {settings.step.algorithm!r}, whose advantages are not those of a group alone": (
            algorithm.has_critic or algorithm.responses < 2
        ),
        "algorithm.score_norm = true": getattr(algorithm, "score_norm", False),
        "algorithm.kl_target": getattr(algorithm, "kl_target", None) is not None,
        "algorithm.dynamic_sampling = true": getattr(algorithm, "dynamic_sampling", False),
    }
    found = [words for words, is_so in faults.items() if is_so]
    loss = settings.trained_loss()
    if not found and getattr(loss, "divisor", None) is None:
        found = [f"a loss, {type(loss).__name__}, that divides by sizes of several kinds"]
    if found:
        raise ValueError(
            f"step.stream_updates = true trains a group before the batch is complete, which does not go with "
            f"{'; '.join(found)}: change that, or leave stream_updates out"
        )


def _require_exactness(settings: Settings) -> None:
    models = settings.models
    if models.engine == "vllm":
        raise ValueError(
            "run.exact makes every bit independent of timing, and vLLM chooses its batches by time: leave it out, or "
            "set models.engine = 'transformers'"
        )
    if settings.step.admission == "adaptive":
        raise ValueError(
            "run.exact makes every bit independent of timing, and step.admission = 'adaptive' decides by time: choose "
            "another admission"
        )
    if settings.step.admission == "continuous":
        raise ValueError(
            "run.exact makes every bit independent of timing, and with step.admission = 'continuous' rollouts join "
            "others when a place is free: choose another admission"
        )
    if settings.step.publish == "in-flight":
        raise ValueError(
            "run.exact makes every bit independent of timing, and step.publish = 'in-flight' publishes weights when "
            "they are ready: leave one of the two out"
        )
    if models.dtype != "float32":
        raise ValueError(f"run.exact needs models.dtype = 'float32', got {models.dtype!r}")
    for model, devices in settings.devices.items():
        for device in devices:
            if device.startswith("cuda"):
                key = settings.placement.key_of(model)
                raise ValueError(f"run.exact needs {key} = 'cpu' (or 'auto'), got {device!r}")


def _require_possible_placement(settings: Settings) -> None:
    models, devices = settings.models, settings.devices
    if models.share_weights and not settings.trains_where_it_serves:
        raise ValueError(
            f"models.share_weights = true trains the weights that are served, and placement.trainer = "
            f"{list(devices['trainer'])} is not where they are served: leave one of the two out"
        )
    if impossible := settings.elsewhere - settings.can_be_elsewhere:
        _refuse_elsewhere(settings, min(impossible))
    for model in sorted(settings.elsewhere):
        there = devices[model][1:] if model == "trainer" else devices[model]
        if numbered := [device for device in there if ":" in device]:
            raise ValueError(
                f"{settings.placement.key_of(model)} names {numbered[0]!r}, and an actor has the GPU that Ray gives "
                "it: expected 'cuda' or 'cpu'"
            )
    if models.shared_trunk and devices["critic"][0] != settings.actor_device:
        raise ValueError(
            f"models.shared_trunk = true makes the critic a head on the policy's trunk, which is on "
            f"{settings.actor_device!r}, and {settings.placement.key_of('critic')} = {devices['critic'][0]!r}: set "
            f"placement.critic = {settings.actor_device!r}"
        )
    ranks = devices["trainer"]
    if len({device.partition(":")[0] for device in ranks}) > 1:
        raise ValueError(
            f"placement.trainer = {list(ranks)} has devices of several kinds, and ranks exchange tensors of one: name "
            "GPUs only, or 'cpu' only"
        )
    if ranks[0] != "cpu" and len(set(ranks)) < len(ranks) and "trainer" not in settings.elsewhere:
        raise ValueError(
            f"placement.trainer = {list(ranks)} names a device twice: expected one of its own for each rank, or a "
            "cluster for all ranks but the first (--ray, placement.cluster)"
        )
    if settings.placement.cluster and not settings.elsewhere:
        raise ValueError(
            "placement.cluster is given, and no model of this run would be in it: the rewards are functions, there is "
            "no reference, critic or second rank; name the policy in placement.remote, or leave the cluster out"
        )
    if len(ranks) > 1 and settings.run.trainer == "process":
        raise ValueError(
            f"run.trainer = 'process' is one process, and placement.trainer has {len(ranks)} ranks, each a process: "
            "leave run.trainer out"
        )
    if not settings.algorithm.has_critic and settings.placement.critic:
        raise ValueError(
            f"step.algorithm = {settings.step.algorithm!r} has no critic and cannot use placement.critic = "
            f"{settings.placement.critic!r}: leave that out"
        )


def _refuse_elsewhere(settings: Settings, model: str) -> NoReturn:
    why = {
        "policy": _why_the_policy_is_here(settings),
        "reference": f"step.algorithm = {settings.step.algorithm!r} refers to none, and models.reference names none",
        "reward": "models.reward names no model",
        "critic": "models.shared_trunk = true makes it a head on the policy's trunk"
        if settings.models.shared_trunk
        else f"step.algorithm = {settings.step.algorithm!r} has none",
        "trainer": "its first rank is here, and placement.trainer names no other",
    }
    raise ValueError(f"placement.remote has {model!r}, and {why[model]}: leave it out")


def _why_the_policy_is_here(settings: Settings) -> str:
    if settings.models.engine != "transformers":
        return f"models.engine = {settings.models.engine!r} serves it in processes of its own"
    if settings.models.shared_trunk:
        return "models.shared_trunk = true makes the critic a head on its trunk"
    return f"run.policy = {settings.run.policy!r} serves it on this machine"


def _require_possible_in_flight(settings: Settings) -> None:
    if not settings.step.lookahead:
        raise ValueError(
            "step.publish = 'in-flight' publishes weights while the next step is decoded, and with step.lookahead = 0 "
            "nothing is decoded then: set step.lookahead to 1 or more, or leave publish out"
        )
    if settings.models.shared_trunk:
        raise ValueError(
            "step.publish = 'in-flight' changes the policy while the critic reads, and models.shared_trunk = true "
            "makes them one model: leave one of the two out"
        )


def _require_possible_on_vllm(settings: Settings) -> None:
    if settings.run.policy == "process":
        raise ValueError(
            "run.policy = 'process' places an actor of transformers, and vLLM has processes of its own: leave it out, "
            "or set models.engine = 'transformers'"
        )
    if settings.sampling.top_p < 1 and not settings.sampling.top_k:
        raise ValueError(
            f"sampling.top_p = {settings.sampling.top_p} draws from the most likely tokens, and vLLM does not say "
            "which those were, though log-probs are among them: bound them by sampling.top_k too, or set "
            "models.engine = 'transformers'"
        )


def _require_no_evaluation(settings: Settings) -> None:
    if given := changed(settings.eval, declared(EvalSection).keys() - {"prompts", "seed"}):
        raise ValueError(
            f"[eval] has {', '.join(given)}, and nothing is evaluated without held-out prompts: give eval.prompts, or "
            "leave that out"
        )


def _require_no_critic(settings: Settings) -> None:
    given = {f"models.{key}": value for key, value in changed(settings.models, OF_THE_CRITIC_MODEL).items()}
    given |= {f"trainer.{key}": value for key, value in changed(settings.trainer, OF_THE_CRITIC).items()}
    if given:
        raise ValueError(
            f"step.algorithm = {settings.step.algorithm!r} has no critic and cannot use "
            f"{', '.join(f'{name} = {value!r}' for name, value in given.items())}: leave that out"
        )
