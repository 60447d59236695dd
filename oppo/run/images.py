"""Images in the prompts of a run: what reads them, and whether every model of the run does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from oppo.durable import nearby
from oppo.errors import ConfigError, ModelRefused
from oppo.hf.loading import Loadable, ModelRecipe
from oppo.hf.processor import ImagePrompts, Processor
from oppo.hf.servable import probe_images
from oppo.hf.sight import pixels_of
from oppo.images import ImageFiles
from oppo.run.deployment import Deployment
from oppo.run.loading import ServedRewardModel


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
    """Check that every model of a run, by role, is shown images exactly, and the same pixels as the policy."""
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
    expected = _digest(policy)
    for role, model in [(role, model) for role, loaded in models.items() for model in loaded if model is not None]:
        try:
            if _digest(model) != expected:
                raise ConfigError(
                    f"models.{role}: its image processor makes other pixels than the policy's: take a model with the "
                    "same one"
                )
            if not isinstance(model, ModelRecipe):
                probe_images(model)
        except ModelRefused as error:
            raise ModelRefused(f"models.{role}: {error}; prompts show images") from error


def _digest(model: Loadable | None) -> str:
    if isinstance(model, ModelRecipe):
        return Processor(model.path).digest
    return "" if model is None else pixels_of(model).digest
