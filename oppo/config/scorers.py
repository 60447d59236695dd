"""``[scorers.NAME]``, what serves the reference or a teacher; and the keys of any model on vLLM that scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from oppo.algorithms.base import Algorithm
from oppo.config.sections import ModelsSection
from oppo.declared import Positive, PositiveCount, changed, setting

ScoringEngine: TypeAlias = Literal["transformers", "vllm"]
"""What serves a model that scores."""


@dataclass(frozen=True, kw_only=True)
class OnVllm:
    """The keys of a model that vLLM serves; without slots, so that a table with slots may inherit them."""

    vllm: dict[str, object] = field(
        default_factory=dict,
        metadata={
            "description": "arguments of its engine, by vLLM's names, as `{tensor_parallel_size = 2}`; those that the "
            "run sets itself are refused",
            "resume": "rounding",
        },
    )
    url: str = setting(
        "",
        "a server that serves the model (`vllm serve MODEL`; a reward model with `--runner pooling`); empty: the run "
        "starts an engine",
        resume="free",
    )
    api_key_env: str = setting(
        "", "the environment variable that holds the server's key; empty: it asks for none", resume="free"
    )
    timeout: Positive = setting(60.0, "seconds for a request to the server", resume="free")
    attempts: PositiveCount = setting(
        4, "for a request that failed in a way that may pass, the first included", resume="free"
    )

    def __post_init__(self) -> None:
        of_server = changed(self, {"api_key_env", "timeout", "attempts"})
        if self.url and self.vllm:
            raise ValueError(
                f"vllm.{next(iter(self.vllm))} is for an engine that the run starts, and url names a server: give it "
                "to the server's command, or leave one of the two out"
            )
        if of_server and not self.url:
            raise ValueError(
                f"{', '.join(of_server)} is for a server, and none is named: give its url, or leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSection(OnVllm):
    """``[scorers.NAME]``: what serves the reference, the teacher or one of several."""

    engine: ScoringEngine = setting(
        "transformers",
        "what serves the model; `vllm`: an engine of its own, or a server (`url`), for a model with the policy's "
        "tokenizer",
    )

    def __post_init__(self) -> None:
        OnVllm.__post_init__(self)
        if self.engine != "vllm" and (given := changed(self, {"vllm", "url"})):
            raise ValueError(f"{next(iter(given))} is for vLLM: set engine = 'vllm', or leave it out")


def check_teacher(teacher: object, placed: str, algorithm: Algorithm, name: str) -> None:
    """Check that there is a teacher where the algorithm of this name learns of one, and nowhere else."""
    needed, named = getattr(algorithm, "distills", None), f"step.algorithm = {name!r}"
    if needed and not teacher:
        raise ValueError(
            f"{named} with algorithm.distill = {getattr(algorithm, 'distill', 1.0)} learns the log-probs of a "
            "teacher, and models.teacher names none: give a causal language model with the policy's tokenizer"
        )
    if teacher and needed is False:
        has_weight = hasattr(algorithm, "distill")
        remedy = "set algorithm.distill above 0" if has_weight else "choose step.algorithm = 'distill', or another"
        raise ValueError(
            f"models.teacher = {teacher!r} is a teacher, and {named} learns nothing of it: {remedy}, or leave "
            "models.teacher out"
        )
    if not teacher and placed:
        raise ValueError(
            f"placement.teacher = {placed!r} places a teacher, and models.teacher names none: leave that out"
        )


def check_scorers(scorers: Mapping[str, ScorerSection], models: ModelsSection, *, refers: bool) -> None:
    """Check that each of ``[scorers]`` is a model of the run that vLLM can serve as it is.

    Args:
        refers: whether there is a reference.
    """
    known = [*(["reference"] if refers else []), *models.teachers]
    if unknown := [name for name in scorers if name not in known]:
        named = f"expected {' or '.join(known)}" if known else "this run has neither a reference nor a teacher"
        name, role = json.dumps(unknown[0]) if "." in unknown[0] else unknown[0], unknown[0].partition(".")[0]
        remedy = f"name one in models.{role}" if role in {"reference", "teacher"} else "correct its name"
        raise ValueError(f"[scorers.{name}] serves no model of this run: {named}; {remedy}, or leave the table out")
    if "reference" not in scorers or scorers["reference"].engine != "vllm":
        return
    reference = models.reference or models.adapter or models.policy
    if models.adapter and reference == models.adapter:
        raise ValueError(
            f"the reference is the adapter {reference!r} on the policy's base, and vLLM would be given a model: leave "
            "[scorers.reference] out, or name a whole model in models.reference"
        )
    if models.quantization != "none" and reference == models.policy:
        raise ValueError(
            f"the reference has the policy's weights in 4 bits (models.quantization = {models.quantization!r}), and "
            "vLLM would have them whole: leave [scorers.reference] out, or name another model in models.reference"
        )
