"""The settings of a teacher: whose weights it has, and the prompt behind which it reads a response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from oppo.config.sections import ModelsSection, PlacementSection, StepSection
from oppo.data.privileged import template_fields
from oppo.declared import changed, setting
from oppo.errors import in_toml
from oppo.scorers import SIBLING


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    """``[teacher]``: the weights of the teacher, and the prompt behind which it reads a response."""

    weights: Literal["model", "frozen", "live", "average"] = setting(
        "model",
        "whose log-probs the policy learns: `model`: those of `models.teacher`; or its own, behind another prompt: "
        "`frozen`: with the weights that it begins with; `live`: with its current ones; `average`: with an exponential "
        "moving average of them, adapters merged",
    )
    rate: Annotated[float, Field(gt=0, le=1)] = setting(
        0.05, "of `average`: after each update it is (1 - rate) times itself plus rate times the policy"
    )
    column: str = setting(
        "", "the column of the data with the prompt that the teacher reads, text or chat messages; empty: the policy's"
    )
    template: str = setting(
        "",
        "text that the teacher reads in place of the last message of the user, or of a prompt that is text; in it "
        "`{prompt}` is what it replaces, `{name}` a column of the data, and `{sibling}` the first other response of "
        "the group whose score is at least `threshold`; a response without one is not taught",
    )
    threshold: float | None = setting(None, "the least score of a `{sibling}`; absent: 1")

    def __post_init__(self) -> None:
        try:
            template_fields(self.template)
        except ValueError as error:
            raise ValueError(f"template: {error}") from error
        if self.column and self.template:
            raise ValueError("column holds the teacher's prompt, and template makes one: leave one of the two out")
        if self.threshold is not None and not self.of_siblings:
            raise ValueError(
                f"threshold = {self.threshold} chooses a sibling, and no {{{SIBLING}}} is in template: leave it out"
            )
        if self.weights != "average" and changed(self, {"rate"}):
            raise ValueError(f"rate = {self.rate} is of weights = 'average', not {self.weights!r}: leave it out")
        if self.weights == "live" and not self.privileged:
            raise ValueError(
                "weights = 'live' is the policy, which learns nothing of itself behind its own prompt: give column or "
                "template, or other weights"
            )

    @property
    def own(self) -> bool:
        return self.weights != "model"

    @property
    def privileged(self) -> bool:
        return bool(self.column or self.template)

    @property
    def of_siblings(self) -> bool:
        return SIBLING in template_fields(self.template)

    @property
    def note(self) -> str:
        if not self.of_siblings:
            return ""
        return (
            f"the teacher is shown a response that passed ({{{SIBLING}}} in teacher.template), so it reads a group "
            "when all of it is scored: its reading is not hidden behind decoding"
        )


def fault_of(
    teacher: TeacherSection,
    models: ModelsSection,
    placement: PlacementSection,
    step: StepSection,
    algorithm: Any,
    *,
    program: str,
    scored: bool,
) -> str:
    named, distills, weight = models.teacher, getattr(algorithm, "distills", None), getattr(algorithm, "distill", None)
    given = changed(teacher, {each.name for each in fields(teacher)})
    idle = ", ".join(f"{key} = {in_toml(value)}" for key, value in given.items())
    remedy = "choose step.algorithm = 'distill', or another" if weight is None else "set algorithm.distill above 0"
    has, chosen = bool(named or teacher.own), f"step.algorithm = {step.algorithm!r}"
    words: Mapping[str, object] = {
        f"{chosen} with algorithm.distill = {1.0 if weight is None else weight} learns the log-probs of a teacher, and "
        "models.teacher names none: give a causal language model with the policy's tokenizer, or make the policy its "
        "own teacher by teacher.weights": distills and not has,
        f"models.teacher = {named!r} is a teacher, and teacher.weights = {teacher.weights!r} makes the policy its own: "
        "leave one of the two out": named and teacher.own,
        f"models.teacher = {named!r} is a teacher, and {chosen} learns nothing of it: {remedy}, or leave "
        "models.teacher out": named and distills is False,
        f"[teacher] has {idle}, and {chosen} learns nothing of a teacher: {remedy}, or leave that out": (
            given and (distills is False or not has)
        ),
        f"placement.teacher = {placement.teacher!r} places a teacher, and models.teacher names none: leave that out": (
            placement.teacher and not has
        ),
        f"[teacher] gives the teacher another prompt, and the conversations of agents.program = {program!r} have "
        "prompts of their own: leave column and template out": teacher.privileged and program,
        f"{{{SIBLING}}} in teacher.template is another response to the prompt, and there is one alone: set "
        "algorithm.samples to 2 or more, or choose an algorithm with groups": (
            teacher.of_siblings and algorithm.responses < 2
        ),
        f"{{{SIBLING}}} in teacher.template is a response whose score passed, and there are no scores without "
        "[[rewards]]: give a reward, or another template": teacher.of_siblings and not scored,
        "step.weight_sync = 'in-flight' changes the policy while the teacher reads, and teacher.weights = 'live' makes "
        "them one model: leave one of the two out": teacher.weights == "live" and step.weight_sync == "in-flight",
    }
    return next((text for text, holds in words.items() if holds), "")
