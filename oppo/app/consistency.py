"""What the sections of a settings file require of one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oppo.app.sections import EvalSection
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
    if settings.step.lookahead and settings.models.share_weights:
        raise ValueError(
            f"step.lookahead = {settings.step.lookahead} trains while the next step is decoded, and "
            "models.share_weights = true would change the weights meanwhile: leave share_weights out"
        )
    if settings.step.publish == "in-flight":
        _require_possible_in_flight(settings)
    if settings.run.trainer == "process" and is_of_a_file(kind := type(settings.trained_loss())):
        raise ValueError(
            f"run.trainer = 'process' takes the loss to another process, which cannot import {kind.__name__} from a "
            "file: leave run.trainer out, or keep the class in an installed package"
        )
    if not settings.eval.prompts:
        _require_no_evaluation(settings)
    if not settings.algorithm.has_critic:
        _require_no_critic(settings)
    if settings.algorithm.responses > 1 and settings.sampling.temperature == 0:
        raise ValueError(
            f"step.algorithm = {settings.step.algorithm!r} compares the responses to a prompt with one another, and "
            "sampling.temperature = 0 makes them all the same: give one above 0"
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
    if models.device.startswith("cuda"):
        raise ValueError(f"run.exact needs models.device = 'cpu' (or 'auto'), got {models.device!r}")


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
