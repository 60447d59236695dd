"""TRL's SDPO beside the settings it becomes: its loss, its teacher's prompt, every field of its configuration."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings as profile, strategies as st

from oppo.config.convert import Converted, convert
from oppo.config.convert_files import rows_of
from oppo.config.load import resolve
from oppo.config.settings import Settings
from oppo.errors import ConfigError
from oppo.losses import Input, Inputs, Whole, top_logprobs
from oppo.returns import distillation_advantages
from tests.kit.workplace import rewritten

HERE: Final = ["models.policy=a", "data.prompts=prompts.jsonl", "rewards.0.source=length"]
OWN: Final = json.loads((Path(__file__).parents[1] / "golden" / "trl_fields.json").read_text())["SDPOConfig"]["fields"]

VALUES: Final[dict[str, list[Any]]] = {
    "beta": [0.0, 0.04],
    "epsilon": [0.2, 0.1],
    "epsilon_high": [None, 0.28],
    "importance_sampling_level": ["token", "sequence"],
    "scale_rewards": ["group", "batch", "none"],
    "loss_type": ["dapo", "grpo", "bnpo", "dr_grpo"],
    "reward_weights": [None, [1.0]],
    "distillation_weight": [1.0, 0.0, 0.25, 0.5, 0.9],
    "distillation_alpha": [1.0, 0.0, 0.5],
    "distillation_mode": ["sampled_token", "topk_logits", "full_logits"],
    "distillation_topk": [None, 1, 20],
    "distillation_is_clip": [2.0, 3.5, 1.0],
    "distillation_add_tail": [False, True],
    "teacher_model_kind": ["ema", "base", "live"],
    "teacher_update_rate": [0.05, 0.5, 0.9],
    "teacher_sync_steps": [1, 2, 10],
    "use_successful_as_teacher": [True, False],
    "success_reward_threshold": [1.0, 0.5],
    "dont_reprompt_on_self_success": [True, False],
    "max_reprompt_len": [10240, 512],
    "reprompt_template": [
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "{{json}} {prompt}: {solution}{feedback}}}}}",
        "{solution}",
    ],
    "solution_template": [
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        "{{{successful_previous_attempt}}}",
    ],
    "feedback_template": [
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        "{feedback_raw}!",
    ],
    "include_environment_feedback": [False, True],
    "environment_feedback_only_without_solution": [False, True],
    "remove_thinking_from_demonstration": [False, True],
    "use_teacher_server": [False, True],
    "diagnostics_warning_interval": [10, 5],
    "diagnostics_flat_tolerance": [1e-8, 1e-6],
    "num_generations": [8, 2],
    "num_iterations": [1, 2],
    "steps_per_generation": [None, 1, 4],
    "max_completion_length": [256, 64],
    "max_prompt_length": [512, 128, None],
    "temperature": [1.0, 0.7],
    "mask_truncated_completions": [False, True],
    "use_vllm": [False, True],
    "learning_rate": [5e-5, 1e-6],
    "max_grad_norm": [1.0, 0.5],
    "adam_epsilon": [1e-8, 1e-6],
}
"""Fields of SDPOConfig with valid values, TRL's default first."""

DERIVED: Final = {"epsilon_high": 0.2, "steps_per_generation": 1}
"""What TRL computes from other fields, which have their defaults, where these are absent."""


def of(given: dict[str, Any], folder: Path) -> tuple[Converted, set[str]]:
    file = rewritten(folder / "run.yaml", yaml.safe_dump({"num_processes": 1, **given}))
    made = convert(file, kind="sdpo", overrides=HERE)
    return made, {name.partition(" = ")[0] for name in chain(*made.lost.values())}


def settled(given: dict[str, Any], folder: Path) -> Settings:
    return resolve(of(given, folder)[0].document, folder)


@given(
    chosen=st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()}),
    data=st.data(),
)
def test_every_field_is_kept_named_or_as_it_was(
    chosen: dict[str, Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sdpo")
    made, lost = of(chosen, folder)
    assert lost <= {*rows_of("sdpo"), *chosen}
    if chosen:
        name = data.draw(st.sampled_from(sorted(chosen)))
        without, _ = of({key: each for key, each in chosen.items() if key != name}, folder)
        kept = without.document != made.document
        as_it_was = chosen[name] in (VALUES[name][0], DERIVED.get(name, VALUES[name][0])) or chosen[name] is True
        assert kept or name in lost or as_it_was, name


@pytest.mark.gym
def test_the_values_begin_with_trl_s_defaults_and_all_fields_have_a_row(tmp_path: Path) -> None:
    from trl.experimental.sdpo import SDPOConfig

    made = SDPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert {name: getattr(made, name) for name in VALUES} == {
        name: DERIVED.get(name, values[0]) for name, values in VALUES.items()
    }
    assert set(OWN) <= rows_of("sdpo").keys()


@pytest.mark.parametrize(
    ("given", "template"),
    [
        ({}, "{prompt}\nCorrect solution:\n\n{sibling}\n\n\n\nCorrectly solve the original question.\n"),
        ({"reprompt_template": "{{a}} {prompt}{solution}"}, "{{a}} {prompt}\nCorrect solution:\n\n{sibling}\n\n"),
        (
            {"solution_template": "{{{successful_previous_attempt}}}", "reprompt_template": "{solution}"},
            "{{{sibling}}}",
        ),
    ],
)
def test_the_teacher_reads_what_trl_shows_it(given: dict[str, Any], template: str, tmp_path: Path) -> None:
    teacher = settled(given, tmp_path).teacher
    assert (teacher.template, teacher.weights, teacher.threshold) == (template, "average", 1.0)


def test_a_template_without_a_sibling_or_with_another_field_is_named(tmp_path: Path) -> None:
    made, lost = of({"reprompt_template": "{prompt}!", "success_reward_threshold": 0.5}, tmp_path)
    assert made.document["teacher"] == {"weights": "average", "rate": 0.05, "template": "{prompt}!"}
    assert {"reprompt_template", "success_reward_threshold"} <= lost
    with pytest.raises(ConfigError, match="reprompt_template: expected text with prompt, solution"):
        of({"reprompt_template": "{promt}"}, tmp_path)


@pytest.mark.gym
@profile(max_examples=60)
@given(
    words=st.lists(st.sampled_from(["{{", "}}", "{prompt}", "{solution}", "{feedback}", "text ", "\n"]), max_size=8),
    inner=st.lists(st.sampled_from(["{{", "}}", "{successful_previous_attempt}", "so: "]), max_size=5),
)
def test_a_template_of_trl_and_the_one_it_becomes_make_the_same_text(
    words: list[str], inner: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from trl.experimental.sdpo.sdpo_trainer import SuccessfulRolloutTeacherContextBuilder as Builder

    given = {"reprompt_template": "{prompt}{solution}" + "".join(words), "solution_template": "".join(inner)}
    document = of(given, tmp_path_factory.mktemp("sdpo"))[0].document
    solution = given["solution_template"].format(successful_previous_attempt="A {b}")
    builder: Any = Builder(SimpleNamespace(args=SimpleNamespace(**given)))
    theirs = builder._build_reprompt_text("Q {p}", solution, "")
    assert document["teacher"]["template"].format(prompt="Q {p}", sibling="A {b}") == theirs


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 0.05),
        ({"steps_per_generation": 2}, 1 - 0.95**2),
        ({"num_iterations": 3, "teacher_update_rate": 0.5}, 1 - 0.5**3),
        ({"teacher_sync_steps": 4}, 1 - 0.95**0.25),
        ({"steps_per_generation": 2, "teacher_sync_steps": 2}, 0.05),
    ],
)
def test_the_average_moves_in_a_step_as_far_as_in_trl_s_optimizer_steps(
    given: dict[str, Any], rate: float, tmp_path: Path
) -> None:
    made, lost = of(given, tmp_path)
    assert made.document["teacher"]["rate"] == pytest.approx(rate, abs=1e-8)
    assert ("teacher_sync_steps" in lost) == (rate != 0.05)


WORDS: Final = 9


def theirs(given: dict[str, Any], student: torch.Tensor, case: SimpleNamespace, folder: Path) -> torch.Tensor:
    """Return the loss of TRL's own trainer, whose models give these logits, float [R, T, V]."""
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
    from trl.experimental.sdpo.sdpo_trainer import DistillationLogits

    server: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server"} if given.get("use_teacher_server") else {}
    args = SDPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", **server, **given)
    made: Any = object.__new__(SDPOTrainer)
    made.args, made.model, made.teacher_model = args, SimpleNamespace(training=True), None
    made.accelerator = SimpleNamespace(gather=lambda each: each)
    made._metrics, made.current_gradient_accumulation_steps = {"train": defaultdict(list)}, 1
    made.importance_sampling_level, made.loss_type = args.importance_sampling_level, args.loss_type
    made.epsilon_low, made.epsilon_high = args.epsilon, args.epsilon_high
    made.max_completion_length, made.temperature = args.max_completion_length, args.temperature
    made.use_teacher_server, made._last_loaded_step = args.use_teacher_server, 0
    made.state = SimpleNamespace(global_step=0)
    loss_mask = case.mask * case.taught[:, None]
    logits = DistillationLogits(case.tokens, case.mask, loss_mask, student / args.temperature, case.teacher)
    made._compute_teacher_student_logits = lambda *_: logits
    made._forward_logits = lambda **_: student / args.temperature
    top = case.teacher.log_softmax(-1).topk(args.distillation_topk or 1)
    made._get_teacher_token_logprobs_from_server = lambda *_: {
        "actual_logprobs": case.teacher.log_softmax(-1).gather(-1, case.tokens[..., None])[..., 0],
        "topk_logprobs": top.values,
        "topk_token_ids": top.indices,
    }
    none = torch.zeros((len(case.tokens), 0), dtype=torch.long)
    inputs = {"prompt_ids": none, "prompt_mask": none, "completion_ids": case.tokens, "completion_mask": case.mask}
    inputs |= {"advantages": case.advantages, "self_distillation_mask": case.taught}
    inputs |= {} if case.old is None else {"old_per_token_logps": case.old}
    loss: torch.Tensor = made.compute_loss(made.model, inputs)
    return loss


def ours(settings: Settings, student: torch.Tensor, case: SimpleNamespace) -> torch.Tensor:
    """Return the loss of the settings on the same tokens, without padding."""
    algorithm: Any = settings.algorithm
    kept = case.mask.bool().flatten()
    rows = torch.arange(len(case.tokens)).repeat_interleave(case.tokens.shape[1])[kept]
    taught = case.taught.bool()[rows]
    flat = student.flatten(0, 1)[kept] / settings.sampling.temperature
    teacher = case.teacher.flatten(0, 1)[kept]
    sampled = case.tokens.flatten()[kept][:, None]
    logprobs = flat.log_softmax(-1).gather(-1, sampled)[:, 0]
    of_teacher = teacher.log_softmax(-1).gather(-1, sampled)[:, 0]
    lesson = distillation_advantages(logprobs.detach().numpy(), of_teacher.numpy(), algorithm.distill_advantage)
    advantages = torch.from_numpy(np.where(taught, lesson, 0.0)).float()
    if settings.step.algorithm != "distill":
        advantages = advantages + case.advantages[rows]
    old = logprobs.detach() if case.old is None else case.old.flatten()[kept]
    inputs: dict[Input, torch.Tensor] = {"logprobs": logprobs, "behaviour": old, "proximal": old}
    inputs |= {"advantages": advantages, "entropies": torch.zeros_like(old)}
    if algorithm.distill_top_k is not None:
        ids = teacher.topk(min(algorithm.distill_top_k, WORDS - 1)).indices
        lessons = top_logprobs(teacher, ids).masked_fill(~taught[:, None], math.nan)
        inputs |= {"top_logprobs": top_logprobs(flat, ids), "teacher_top": lessons}
    count = float(len(case.tokens))
    whole = Whole(float(kept.sum()), count, count, settings.sampling.max_new_tokens)
    flattened = Inputs(torch.ones_like(taught), rows, torch.arange(len(case.tokens)), whole, inputs)
    loss: torch.Tensor = algorithm.loss()(flattened).loss
    return loss


def drawn(seed: int, *, stale: bool) -> tuple[torch.Tensor, SimpleNamespace]:
    torch.manual_seed(seed)
    student = torch.randn(4, 5, WORDS, requires_grad=True)
    lengths = torch.randint(1, 6, (4, 1))
    tokens = torch.randint(WORDS, (4, 5))
    now = student.detach().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    case = SimpleNamespace(
        tokens=tokens,
        mask=(torch.arange(5) < lengths).long(),
        taught=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        teacher=torch.randn(4, 5, WORDS),
        advantages=torch.randn(4),
        old=now + torch.randn(4, 5) if stale else None,
    )
    return student, case


TAILED: Final = {"distillation_mode": "topk_logits", "distillation_add_tail": True}
SERVED: Final = {**TAILED, "use_teacher_server": True, "teacher_model_kind": "live", "distillation_topk": 3}
COMPARED: Final[list[dict[str, Any]]] = [
    *({**SERVED, "distillation_alpha": alpha} for alpha in (0.0, 0.25, 0.5, 1.0)),
    *(
        {**TAILED, "distillation_topk": WORDS - 1, "distillation_alpha": alpha, "distillation_weight": weight}
        | {"loss_type": "grpo"}
        for alpha in (0.0, 0.5, 1.0)
        for weight in (1.0, 0.25)
    ),
    *({"distillation_mode": "full_logits", "distillation_alpha": alpha} for alpha in (0.0, 0.5, 1.0)),
    {},
    {"distillation_weight": 0.6, "loss_type": "grpo"},
    *({"distillation_weight": 0.0, "loss_type": kind} for kind in ("grpo", "dapo", "bnpo", "dr_grpo")),
    {"distillation_weight": 0.0, "importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.1},
    {**TAILED, "distillation_topk": WORDS - 1, "distillation_weight": 0.5, "loss_type": "grpo"}
    | {"importance_sampling_level": "sequence"},
]
"""With a local teacher TRL's ids are the policy's: all but one of them are the same ids."""


@pytest.mark.gym
@pytest.mark.parametrize("given", COMPARED)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_trl_s(given: dict[str, Any], seed: int, tmp_path: Path) -> None:
    found = settled(given, tmp_path)
    student, case = drawn(seed, stale=False)
    share = given.get("distillation_weight", 1.0)
    scale = 1.0 if share == 1 else 1 - share  # by which the optimizer's eps and the norm of gradients are divided
    assert found.trainer.eps == pytest.approx(1e-8 / scale)
    assert found.trainer.max_grad_norm == pytest.approx(1 / scale)
    one = theirs(given, student, case, tmp_path)
    (of_theirs,) = torch.autograd.grad(one, student)
    other = scale * ours(found, student, case)
    (of_ours,) = torch.autograd.grad(other, student)
    assert of_theirs.abs().max() > 1e-4
    torch.testing.assert_close(of_ours, of_theirs, rtol=0, atol=1e-6)
    if found.algorithm.distill_top_k is not None or not share:  # type: ignore[attr-defined]  # as a number, too
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)


@pytest.mark.gym
@pytest.mark.parametrize("bound", [1.5, 2.0, 4.0])
def test_a_ratio_weighs_a_sampled_token_up_to_trl_s_bound(bound: float, tmp_path: Path) -> None:
    """At the policy's own log-ratio to the teacher: TRL takes it anew in each update, and here it is an advantage."""
    given = {"distillation_is_clip": bound}
    student, case = drawn(5, stale=True)
    (of_theirs,) = torch.autograd.grad(theirs(given, student, case, tmp_path), student)
    (of_ours,) = torch.autograd.grad(ours(settled(given, tmp_path), student, case), student)
    torch.testing.assert_close(of_ours, of_theirs, rtol=0, atol=1e-5)
