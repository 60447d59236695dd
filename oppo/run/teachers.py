"""The teachers of a run: the models that teach, the policy among them, and the prompts behind which they read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from oppo.config.sections import DataSection, ModelsSection
from oppo.config.teacher import TeacherSection
from oppo.data import PromptStream
from oppo.data.privileged import PrivilegedPrompt
from oppo.environments import EnvironmentClass, Environments
from oppo.errors import ConfigError
from oppo.events import Drop
from oppo.hf.as_text.rendering import Form
from oppo.hf.as_text.streamed import Bridge, BridgedTeacher
from oppo.hf.devices import DeviceLayout, ModelPlace
from oppo.hf.loading import Loadable
from oppo.hf.lora import merged
from oppo.hf.serve.scorers import ReferenceLogprobs, TeacherLogprobs
from oppo.hf.serve.self_teacher import AveragedTeacher, SelfTeacher
from oppo.hf.tokenizer import HfTokenizer
from oppo.log import logger
from oppo.models import Sampling, Scorer
from oppo.run.deployment import Deployment, Role
from oppo.run.engines import SERVING, ScorersOnVllm
from oppo.run.loading import RoleLoader
from oppo.scorers import SIBLING, BehindPrompt, ByColumn, Lesson, Untaught


def check_columns(models: ModelsSection, prompts: PrivilegedPrompt | None, known: Sequence[Collection[str]]) -> None:
    column = models.teacher_column
    if column and known and column not in known[0]:
        raise ConfigError(
            f"models.teacher_column = {column!r} is no column of data.prompts; the columns there are "
            f"{', '.join(sorted(known[0]))}"
        )
    if prompts is not None and known:
        prompts.check_columns(known[0])


def privileged(
    section: TeacherSection, data: DataSection, environment: object, tokenizer: HfTokenizer
) -> PrivilegedPrompt | None:
    if not section.privileged:
        return None

    def of_row(row: Mapping[str, object]) -> HfTokenizer:
        one = environment.of(row) if isinstance(environment, Environments) else environment
        return one.chat.tokenizer if isinstance(one, EnvironmentClass) else tokenizer

    return PrivilegedPrompt(
        tokenizer=of_row,
        decode=tokenizer.decode,
        column=section.column,
        template=section.template,
        prompt_column=data.column,
    )


def loaded_teachers(
    deployment: Deployment, load: RoleLoader, *, current: Loadable, start: Loadable | None
) -> dict[Role, tuple[Loadable, HfTokenizer | None]]:
    # current: the policy as it is trained; start: as it begins, if that is in memory anyway
    kind, roles = deployment.settings.teacher.weights, deployment.roles_of("teacher")
    if kind == "live":
        return dict.fromkeys(roles, (current, None))
    if deployment.teacher_shares and start is not None:
        return dict.fromkeys(roles, (start, None))
    if kind == "frozen" and deployment.models.adapter:
        return {role: (replace(load.recipe(role, "causal"), adapter=deployment.models.adapter), None) for role in roles}
    return {role: load.teacher(role) for role in roles}


def served_teacher(
    deployment: Deployment,
    sampling: Sampling,
    places: DeviceLayout,
    models: Mapping[Role, tuple[Loadable, HfTokenizer | None]],
    tokenizer: HfTokenizer,
    *,
    environment: object,
    on_vllm: ScorersOnVllm,
    actor: PreTrainedModel,
) -> Scorer[Lesson | Drop] | None:
    settings, section = deployment.settings, deployment.settings.teacher
    top_k = getattr(settings.algorithm, "distill_top_k", None)
    known = dict[str, Scorer[Lesson | Drop]]()
    for role, (model, reader) in models.items():
        place, name = ModelPlace(places.place_of("teacher"), role.name, SERVING), role.name.partition(".")[2]
        options: dict[str, Any] = {
            "sampling": sampling,
            "place": place,
            "deterministic": settings.run.deterministic,
        }
        if reader is not None:
            _check_reader(role, top_k, answered=environment is not None)
            form: Form = "chat" if reader.has_chat_template else "joined"
            bridge = Bridge(tokenizer, reader, form, settings.data.column, "drop")
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
    for role, on in deployment.on_vllm("teacher"):
        known[role.name.partition(".")[2]] = on_vllm.logprobs(role, on, sampling, top_k=top_k or 0)
    column = settings.models.teacher_column
    teacher = ByColumn(column, known) if column else known.get("")
    prompts = privileged(section, settings.data, environment, tokenizer)
    if teacher is None or prompts is None:
        return teacher
    if section.note:
        logger.info(section.note)
    return BehindPrompt(teacher, prompts, Untaught(top_k))


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


def check_teacher_room(teacher: object, prompts: object, max_new_tokens: int, positions: int) -> None:
    if not isinstance(teacher, BehindPrompt) or not isinstance(prompts, PromptStream):
        return
    make = cast("PrivilegedPrompt", teacher.prompt)
    key = "teacher.column" if make.column else "teacher.template"
    sibling = np.zeros(0, np.int32) if make.of_siblings else None
    room = max_new_tokens * (2 if make.of_siblings else 1)
    for number, prompt in enumerate(prompts.prompts, 1):
        read = make(replace(prompt, columns={**prompt.columns, SIBLING: sibling}) if make.of_siblings else prompt)
        if read is not None and len(read.tokens) + room > positions:
            held = "a sibling and a response" if make.of_siblings else "a response"
            raise ConfigError(
                f"{key} makes a prompt of {len(read.tokens)} tokens of prompt {number} of data.prompts, and "
                f"with {held} of sampling.max_new_tokens = {max_new_tokens} that is more than the {positions} that the "
                "teacher reads: shorten what it is made of, or lower sampling.max_new_tokens"
            )
