"""Settings from a configuration of TRL, verl or OpenRLHF: what ``oppo convert-config`` writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Final

from oppo.algorithms.distill import OF_THE_RATIO
from oppo.config.convert_draft import ESTIMATORS, REWARD, Draft, moved, plain_name
from oppo.config.convert_files import Kind, foreign_fields, literal, read, rows_of, said, templates
from oppo.config.load import at, overridden, rendered, resolve
from oppo.declared import table_in
from oppo.errors import ConfigError
from oppo.libraries import is_installed

POLICY: Final = "directory or hub name of the model to train"
OF_RANKS: Final = ("num_processes", "nproc_per_node", "nnodes")
SHOWN: Final = 4  # fields that a message names of those that have a reason in common; the file names all


@dataclass(frozen=True, slots=True)
class Converted:
    """Settings that a file of another trainer became; ``blank`` are to be filled in, ``lost`` has no setting here."""

    document: Mapping[str, Any]
    text: str
    blank: Mapping[str, str]
    lost: Mapping[str, Sequence[str]]
    own: Sequence[str]  # keys of [vllm] that are by --set alone

    def lines(self) -> Iterator[str]:
        for key, what in self.blank.items():
            yield f"fill in {key}: {what}"
        for reason, names in self.lost.items():
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield f"not carried over: {', '.join(names[:SHOWN])}{more}: {reason}"
        if self.own and "urls" not in table_in(self.document, "vllm") and not is_installed("vllm"):
            yield f"not checked: {', '.join(self.own)} of [vllm]: vLLM alone knows its arguments, and is not installed"

    def check(self, file: Path) -> None:
        try:
            resolve(self.document, file.absolute().parent)
            if arguments := table_in(self.document, "vllm"):
                from oppo.vllm.arguments import SETTINGS, ServerSettings, check_arguments  # noqa: PLC0415 - of torch

                if ServerSettings.of(arguments) is None:
                    check_arguments(arguments, of=SETTINGS, planned=not is_installed("vllm"))
        except ConfigError as error:
            raise ConfigError(
                f"{file} is written, and `oppo train` refuses it until this is changed: {error}"
            ) from error


def convert(path: Path, *, kind: Kind | None = None, overrides: Sequence[str] = ()) -> Converted:
    """Return the settings of a Python script, a YAML file, or a command with the arguments of another trainer."""
    found = read(path, kind)
    draft = Draft(found.kind, said(found.given))
    for what, remark in found.remarks:
        draft.lose(remark, what)
    {"verl": _of_verl, "openrlhf": _of_openrlhf}.get(found.kind, _of_trl)(draft)
    draft.settle()
    document = overridden(draft.document(), overrides)
    blank = {key: what for key, what in draft.blank.items() if at(document, key) == draft.values[key][0]}
    notes = {key: why for key, (value, why) in draft.values.items() if at(document, key) == value}
    text = rendered(document, notes, blank, draft.lost, f"{path.name}, of {draft.whose}")
    own = [name for name in table_in(document, "vllm") if f"vllm.{name}" not in draft.values]
    return Converted(document, text, blank, draft.lost, own)


def _of_trl(draft: Draft) -> None:
    draft.put("step.algorithm", draft.kind, note=f"{draft.kind.upper()}Config")
    if isinstance(more := draft.take("model_init_kwargs"), dict):
        draft.given |= more
    share = _share_of_sdpo(draft) if draft.kind == "sdpo" else 0.0
    draft.same(rows_of(draft.kind))
    if draft.kind == "ppo":
        if (token := draft.take("stop_token_id")) is not None:
            draft.put("sampling.stop", [token], "stop_token_id")
        ends, why = draft.take("stop_token") == "eos", "without stop_token a response has response_length tokens"
        draft.put("sampling.eos", ends, *(["stop_token"] if ends else []), note="" if ends else why)
    else:
        rate = draft.take("learning_rate", 5e-5 if draft.kind == "sdpo" else 1e-6)
        draft.put("trainer.learning_rate", rate, "learning_rate")
        if share < 1:
            (_loss_of_rloo if draft.kind == "rloo" else _loss_of_trl)(draft)
        _generation_of_trl(draft)
    each = _batch_of_trl(draft)
    if share:
        _loss_of_sdpo(draft, share, each)
        _teacher_of_sdpo(draft, each)
    _run_of_trl(draft, each)
    _models_of_trl(draft)
    _data_of_trl(draft, each)


def _loss_of_rloo(draft: Draft) -> None:
    draft.put("algorithm.aggregation", "response_sums", note="TRL's loss is of whole responses")
    if draft.take("normalize_advantages", default=False):
        draft.lose("advantages keep their scale", "normalize_advantages")


def _loss_of_trl(draft: Draft) -> None:
    name, level = draft.take("loss_type", "dapo"), draft.take("importance_sampling_level", "token")
    scale = draft.take("scale_rewards", "group")
    if level == "sequence" or name == "luspo":
        draft.put("step.algorithm", "gspo", "importance_sampling_level", "loss_type")
        high = draft.take("epsilon_high") or draft.take("epsilon", 0.2)
        draft.put("algorithm.clip_high", high, "epsilon_high", "epsilon")
    elif scale in {"none", False}:
        draft.put("step.algorithm", "dr_grpo", "scale_rewards")
    unbiased = draft.take("use_bias_correction_kl", default=True)
    if draft.number("beta", 0.0):
        draft.put("algorithm.kl_in", "loss", note="as in TRL")
        why = "TRL's default, use_bias_correction_kl: the gradient of the KL"
        draft.put("algorithm.kl_estimator", "k2" if unbiased else "k3", note=why if unbiased else "as in TRL")
    if scale == "batch":
        draft.put("algorithm.scale_scores", "batch", "scale_rewards")
    elif scale in {"none", False} and draft.algorithm == "gspo":
        draft.lose("gspo standardises scores within the group", "scale_rewards")
    if name in {"cispo", "sapo"}:
        draft.put("algorithm.surrogate", name, "loss_type")
        draft.values.pop("algorithm.clip")
        draft.values.pop("algorithm.clip_high", None)
    gates = [draft.number("sapo_temperature_pos", 1.0), draft.number("sapo_temperature_neg", 1.05)]
    if name == "sapo":
        draft.put("algorithm.gates", gates, "sapo_temperature_pos", "sapo_temperature_neg")
    elif name == "cispo":
        draft.put("algorithm.clip", 1.0, note="TRL has no lower bound")
        draft.put("algorithm.clip_high", draft.number("epsilon_high", 5.0) - 1, note="epsilon_high, the bound itself")


def _share_of_sdpo(draft: Draft) -> float:
    if not 0 <= (share := draft.number("distillation_weight", 1.0)) <= 1:
        raise ConfigError(f"distillation_weight: expected a share of the loss, 0 to 1, got {share}")
    draft.put("step.algorithm", "distill" if share == 1 else "grpo", "distillation_weight")
    if coefficient := draft.given.pop("beta", None):
        draft.unlike("beta", coefficient)
    return share


def _loss_of_sdpo(draft: Draft, share: float, each: int) -> None:
    mode, bound = draft.take("distillation_mode", "sampled_token"), draft.given.get("distillation_is_clip", 2.0)
    sampled = mode == "sampled_token"
    draft.put("algorithm.aggregation", "responses", note="the mean of TRL's distillation")
    if share < 1:
        draft.put("algorithm.distill", share / (1 - share), "distillation_weight")
        for key, name in (("trainer.max_grad_norm", "max_grad_norm"), ("trainer.eps", "adam_epsilon")):
            if isinstance(value := draft.value(key), int | float):
                draft.put(key, value / (1 - share), name, note=f"{name} / (1 - distillation_weight)")
        if (mean := draft.take("loss_type", "dapo")) != "grpo":
            draft.unlike("loss_type", mean)
    elif sampled:
        draft.put("algorithm.surrogate", "cispo", note="TRL's weight is the ratio, without gradient")
        draft.put("algorithm.clip", 1.0, note="TRL has no lower bound")
        if bound is not None:
            draft.put("algorithm.clip_high", draft.number("distillation_is_clip", 2.0) - 1, "distillation_is_clip")
    if not sampled:
        k = draft.whole("distillation_topk", 64, 1)
        draft.put("algorithm.distill_top_k", k, "distillation_topk", "distillation_mode")
        draft.put("algorithm.distill_beta", draft.number("distillation_alpha", 1.0), "distillation_alpha")
        for key in OF_THE_RATIO if share == 1 else ():
            draft.values.pop(f"algorithm.{key}", None)
        if mode != "topk_logits":
            draft.unlike("distillation_mode", mode)
        elif not draft.take("distillation_add_tail", default=False):
            draft.unlike("distillation_add_tail", value=False)
        if not draft.take("use_teacher_server", default=False):
            draft.unlike("distillation_topk", k)
    elif draft.algorithm == "gspo":
        draft.lose("gspo has one advantage of a response, the mean of its tokens'", f"distillation_mode = {mode}")
    if each > 1:
        draft.lose(f"the teacher reads once, before the {each} updates of a step; TRL's, in each", "distillation_mode")
        if not sampled or share < 1 or bound is None:
            draft.unlike("distillation_is_clip", bound)


def _teacher_of_sdpo(draft: Draft, each: int) -> None:
    rate, every = draft.number("teacher_update_rate", 0.05), draft.whole("teacher_sync_steps", 1, 1)
    moves = rate if each == every else round(1 - max(1 - rate, 0) ** (each / every), 9)
    draft.put("teacher.rate", moves, "teacher_update_rate", "teacher_sync_steps", note="teacher_update_rate, of a step")
    if draft.value("teacher.weights") == "average":
        if each != every:
            draft.unlike("teacher_sync_steps", every)
        if draft.take("use_peft", default=False):
            draft.unlike("teacher_model_kind", "ema")
    shown = draft.take("use_successful_as_teacher", default=True)
    fed = draft.take("include_environment_feedback", default=False)
    alone = draft.take("environment_feedback_only_without_solution", default=False)
    if not draft.take("dont_reprompt_on_self_success", default=True):
        draft.unlike("dont_reprompt_on_self_success", value=False)
    if fed or not shown:
        draft.unlike("include_environment_feedback" if fed else "use_successful_as_teacher", fed)
    solution = _filled(draft, "solution_template", successful_previous_attempt="{sibling}") if shown or not fed else ""
    feedback = _filled(draft, "feedback_template", feedback_raw="{privileged_context}") if fed else ""
    told = {"solution": solution, "feedback": "" if solution and alone else feedback}
    prompt = _filled(draft, "reprompt_template", prompt="{prompt}", **told)
    draft.put("teacher.template", prompt, *templates())
    for name, text in ((f"{part}_template", text) for part, text in told.items()):
        if draft.take(name, own := templates()[name]) != own and (not text or text not in prompt):
            draft.lose("no part of what the teacher is shown", name)
    if solution and "{sibling}" not in draft.value("teacher.template"):
        draft.lose("without {solution} a response is taught whether another one passed or not", "reprompt_template")


def _filled(draft: Draft, name: str, **given: str) -> str:
    template = str(draft.take(name, templates()[name]))
    try:
        return template.replace("{{", "{{{{").replace("}}", "}}}}").format(**given)
    except (AttributeError, LookupError, ValueError) as error:
        told = f"expected text with {', '.join(given)} in braces, and its own braces doubled, got {template!r}"
        raise ConfigError(f"{name}: {told}") from error


def _generation_of_trl(draft: Draft) -> None:
    more = draft.take("generation_kwargs")
    for theirs in ("min_new_tokens", "stop_strings") if isinstance(more, dict) else ():
        if theirs in more:
            draft.put(f"sampling.{theirs}", more.pop(theirs), note="generation_kwargs")
    if more:
        draft.unlike("generation_kwargs", more)
    if not draft.take("use_vllm", default=False):
        if idle := [name for name in draft.given if name.startswith("vllm_")]:
            draft.lose("use_vllm is off", *idle)
        return
    if draft.take("vllm_mode", "colocate") == "server":
        draft.put("models.engine", "vllm", "vllm_mode")
        host, port = draft.take("vllm_server_host", "127.0.0.1"), draft.take("vllm_server_port", 8000)
        url = draft.take("vllm_server_base_url", f"http://{host}:{port}")
        draft.put("vllm.urls", [url], "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
    else:
        draft.put("models.engine", "auto", "use_vllm", "vllm_mode")
        share = draft.take("vllm_gpu_memory_utilization", 0.3)
        draft.put("vllm.gpu_memory_utilization", share, "use_vllm", "vllm_gpu_memory_utilization")
        for name, ours in (("tensor_parallel_size", "tensor_parallel_size"), ("max_model_length", "max_model_len")):
            if (value := draft.take(f"vllm_{name}")) is not None:
                draft.put(f"vllm.{ours}", value, f"vllm_{name}")
    draft.put("algorithm.ratio_base", "proximal", note="TRL computes log-probs again where vLLM decodes")
    _correction_of_trl(draft, "vllm_importance_sampling")


CORRECTIONS: Final = {  # `vllm_importance_sampling_mode` as `algorithm.is_correction`
    "token_truncate": "truncated",
    "sequence_truncate": "truncated_sequence",
    "token_mask": "mask",
    "sequence_mask": "mask_product",
}


def _correction_of_trl(draft: Draft, prefix: str) -> None:
    mode, low = draft.take(f"{prefix}_mode", "sequence_mask"), draft.take(f"{prefix}_clip_min")
    named = f"{prefix}_cap" if f"{prefix}_cap" in draft.given else f"{prefix}_clip_max"
    high = draft.given.get(named, 3.0)
    if draft.kind in {"rloo", "sdpo"} or not draft.take(f"{prefix}_correction", default=True):
        draft.put("algorithm.is_correction", "none", f"{prefix}_correction", note=f"no {prefix}_correction")
    elif mode not in CORRECTIONS:
        draft.lose(f"algorithm.is_correction: expected one of {', '.join(CORRECTIONS)}", f"{prefix}_mode = {mode}")
    else:
        draft.bounded(CORRECTIONS[mode], low, high, (f"{prefix}_mode", f"{prefix}_clip_min", named))
        if high is None:
            draft.lose("a mask has two bounds (see algorithm.is_high)", f"{named} = None")
        if draft.algorithm == "gspo" and mode.startswith("token"):
            draft.lose("gspo weighs whole responses, by the geometric mean", f"{prefix}_mode = {mode}")


def _batch_of_trl(draft: Draft) -> int:
    """Put what a step trains and how many there are; return how often the optimizer steps in each."""
    rows, passes = draft.whole("per_device_train_batch_size", 8, 1), draft.whole("gradient_accumulation_steps", 1, 1)
    ranks = draft.whole("nproc_per_node", 1, 1) * draft.whole("nnodes", 1, 1)
    processes = draft.whole("num_processes", ranks, 1)
    if not set(OF_RANKS) & draft.given.keys():
        draft.lose("a batch is counted for one process: multiply step.batch by their number", "num_processes")
    if draft.kind == "ppo":
        return _batch_of_ppo(draft, rows * passes * processes, passes)
    names = ["per_device_train_batch_size", "generation_batch_size", "steps_per_generation", "num_generations"]
    samples = draft.whole("num_generations", 2 if draft.kind == "rloo" else 8, 1)
    size, several = draft.whole("generation_batch_size", 0), draft.whole("steps_per_generation", passes, 1)
    several = max(size // (rows * processes), 1) if size else several
    minibatches, repeats, rounds = several // passes, draft.whole("num_iterations", 1, 1), 1
    if several % passes and passes % (several * repeats) == 0:  # an update takes several rounds of generation
        minibatches, repeats, rounds = 1, 1, passes // (several * repeats)
        draft.put("trainer.epochs", 1, "num_iterations")
        if rounds > 1:
            draft.lose(f"an epoch whose rounds {rounds} does not divide ends with a smaller update in TRL", names[2])
    elif several % passes:
        minibatches = max(round(several / passes), 1)
        draft.lose(
            "an update of the optimizer that begins in one batch ends in the next: give a multiple of "
            "gradient_accumulation_steps",
            f"{names[2]} = {several}",
        )
    completions = rows * processes * several * rounds
    draft.put("step.batch", math.ceil(completions / samples), *names, "gradient_accumulation_steps", *OF_RANKS)
    if completions % samples:
        draft.lose(f"{completions} completions are no whole groups of {samples}: step.batch rounds up", "a batch")
    draft.put("data.drop_last", value=True, note="TRL leaves out what fills no batch")
    if minibatches > 1:
        draft.put("trainer.minibatches", minibatches, *names[1:3], "gradient_accumulation_steps")
    if draft.kind == "rloo" and minibatches * repeats > 1:
        draft.lose("the ratio that is clipped is of a token, and TRL's of the whole response", "epsilon")
    epochs, most = draft.number("num_train_epochs", 3.0), draft.whole("max_steps", -1)
    if most > 0:
        draft.put("run.steps", math.ceil(most / (minibatches * repeats)), "max_steps")
        if most % (minibatches * repeats):
            told = f"the optimizer steps {minibatches * repeats} times in each of run.steps, the last one too"
            draft.lose(told, f"max_steps = {most}")
    else:
        draft.epochs(epochs, "num_train_epochs")
    return minibatches * repeats


def _batch_of_ppo(draft: Draft, batch: int, passes: int) -> int:
    draft.put("step.batch", batch, "per_device_train_batch_size", "gradient_accumulation_steps", *OF_RANKS)
    minibatches = draft.whole("num_mini_batches", 1, 1)
    if (steps := max(minibatches // passes, 1)) != minibatches:
        told = "TRL's optimizer steps after gradient_accumulation_steps passes, however few make a minibatch"
        draft.lose(told, f"num_mini_batches = {minibatches}")
    draft.put("trainer.minibatches", steps, "num_mini_batches")
    if (most := draft.whole("max_steps", -1)) > 0:
        draft.lose("TRL's PPO does not read it", f"max_steps = {most}")
    if total := draft.whole("total_episodes", 0):
        draft.put("run.steps", math.ceil(total / batch), "total_episodes")
        draft.put("data.drop_last", value=True, note="TRL leaves out what fills no batch")
    else:
        draft.epochs(draft.number("num_train_epochs", 3.0), "num_train_epochs")
    return 1


def _run_of_trl(draft: Draft, each: int) -> None:
    if output := draft.take("output_dir"):
        path = PurePosixPath(str(output))
        draft.put("run.name", plain_name(path.name), "output_dir")
        if str(path.parent) != ".":
            draft.put("run.directory", str(path.parent), "output_dir")
    strategy, every = draft.take("save_strategy", "steps"), draft.take("save_steps", 500)
    if strategy in {"steps", "no"} and isinstance(every, int):
        draft.put(
            "run.checkpoint_every", 0 if strategy == "no" else max(every // each, 1), "save_strategy", "save_steps"
        )
    else:
        draft.lose("checkpoints are written by steps (see run.checkpoint_every)", "save_strategy, save_steps")
    draft.trackers("report_to")
    betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
    if betas != [0.9, 0.999]:
        draft.put("trainer.betas", betas, "adam_beta1", "adam_beta2")
    steps, ratio = draft.number("warmup_steps", 0), draft.number("warmup_ratio", 0.0)
    draft.warm_up(steps / each if steps >= 1 else 0, ratio or steps, "warmup_ratio" if ratio else "warmup_steps")


def _models_of_trl(draft: Draft) -> None:
    names = ("sft_model_path", "<policy>", "model_name_or_path")
    if named := [name for name in names if isinstance(draft.take(name), str)]:
        note = "the trainer's argument" if named[0] == "<policy>" else named[0]
        draft.put("models.policy", policy := draft.given[named[0]], named[0], note=note)
    else:
        draft.open("models.policy", policy := "policy", POLICY)
    for role in ("reference", "critic"):
        if isinstance(model := draft.take(f"<{role}>"), str) and model != policy:
            draft.put(f"models.{role}", model, note="the trainer's argument")
    weights, half, brain = draft.take("dtype"), draft.take("fp16", default=False), draft.take("bf16", default=True)
    weights = weights or draft.take("torch_dtype", "float32")
    dtype = "float16" if half else "bfloat16" if brain else str(weights).removeprefix("torch.")
    draft.put("models.dtype", dtype, "fp16", "bf16", "dtype", "torch_dtype")
    if (attention := draft.take("attn_implementation", "sdpa")) == "eager":
        draft.put("models.attention", "eager", "attn_implementation")
    elif attention != "sdpa":
        draft.lose("attention is SDPA (see models.attention)", f"attn_implementation = {attention}")
    rank, alpha = draft.take("lora_r", 16), draft.take("lora_alpha", 32)
    if draft.take("use_peft", default=False):
        draft.put("models.lora_rank", rank, "lora_r", "use_peft")
        draft.put("models.lora_alpha", alpha, "lora_alpha")
    if draft.take("tools"):
        draft.lose("functions that the policy calls (see environment.tools)", "tools")
    if factory := draft.take("environment_factory"):
        several = factory if isinstance(factory, dict) else {"": factory}
        files = {str(name): moved(each, "environments.py") for name, each in several.items()}
        told = f"move {', '.join(map(str, several.values()))} into a file, as it is"
        draft.open("environment.factory", files.get("", files), told, "environment_factory")
        if (most := draft.take("max_tool_calling_iterations")) is not None:
            draft.put("environment.max_turns", most, "max_tool_calling_iterations")
    named = ["reward_model_path", "<reward>", "reward_model_name_or_path", "reward_funcs"]
    given = [value if isinstance(value, list) else [value] for value in map(draft.given.get, named)]
    *models, functions = ([each for each in value if each is not None] for value in given)
    rewards = list(chain.from_iterable(models))[: 1 if draft.kind == "ppo" else None]
    draft.rewards(rewards, *named, functions=functions, weights=draft.take("reward_weights", []))
    if len(rewards) + len(functions) < 2 and draft.value("algorithm.scale_scores") == "each_reward":
        draft.put("algorithm.scale_scores", "group", "multi_objective_aggregation")


def _data_of_trl(draft: Draft, each: int) -> None:
    name, subset = draft.take("dataset_name"), draft.take("dataset_config")
    training, held_out = draft.take("dataset_train_split", "train"), draft.take("dataset_test_split", "test")
    named = {"path": name, "subset": subset} if name else {}
    names = ("dataset_name", "dataset_config")
    draft.source("data.prompts", draft.take("<data>", {**named, "split": training}), *names, "dataset_train_split")
    longest = draft.given.get("max_prompt_length", 512) if draft.kind == "sdpo" else draft.take("max_prompt_length")
    if longest is not None:  # elsewhere of an older TRL
        draft.put("data.max_prompt_tokens", longest, "max_prompt_length")
    draft.put(
        "data.over_long",
        "error" if longest is None else "truncate",
        note=f"TRL cuts {'no prompt' if longest is None else 'at max_prompt_length'}",
    )
    own, every = draft.take("<eval>", {**named, "split": held_out}), draft.take("eval_steps")
    if draft.take("eval_strategy", "no") != "no":
        draft.source("eval.prompts", own, *names, "dataset_test_split", "eval_strategy")
        if isinstance(every, int):
            draft.put("eval.every", max(every // each, 1), "eval_steps")


ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"

OVERLONG: Final = re.compile(r"(reward_model|reward)\.(reward_kwargs\.)?overlong_buffer(_cfg)?\.")
"""How a key of the penalty on long responses begins, in the versions of verl."""


def _of_verl(draft: Draft) -> None:
    draft.given = {OVERLONG.sub("reward_model.overlong_buffer.", name): each for name, each in draft.given.items()}
    algorithm = draft.estimator("algorithm.adv_estimator", ESTIMATORS)
    names = ("algorithm.norm_adv_by_std_in_grpo", "reward_model.overlong_buffer.enable")
    long = draft.take(names[1], default=False)
    if algorithm == "grpo":
        dynamic = draft.given.get("algorithm.filter_groups.enable") or long
        algorithm = "dapo" if dynamic else "grpo" if draft.take(names[0], default=True) else "dr_grpo"
    draft.put("step.algorithm", algorithm, "algorithm.adv_estimator", *names)
    draft.same(foreign_fields()["verl"])
    if algorithm not in {"ppo", "reinforce_pp"}:  # verl compares whole responses, and reads no discount
        draft.values.pop("algorithm.gamma", None)
    if not long:
        draft.put("algorithm.long_buffer", 0, names[1])
    draft.put("trainer.eps", 1e-8)
    draft.put("run.metric_names", "verl", note="verl's names")
    draft.put("data.drop_last", value=True, note="verl leaves out what fills no batch")
    draft.put("trainer.critic_warmup", max(draft.whole("trainer.critic_warmup", 0) - 1, 0), "trainer.critic_warmup")
    draft.trackers("trainer.logger")
    _loss_of_verl(draft)
    _kl_of_verl(draft)
    _batch_of_verl(draft)
    _models_of_verl(draft)
    _data_of_verl(draft)


def _loss_of_verl(draft: Draft) -> None:
    mode = draft.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    gates = [draft.take(f"{ACTOR}.tau_pos", 1.0), draft.take(f"{ACTOR}.tau_neg", 1.05)]
    both = draft.take(f"{ACTOR}.clip_ratio", 0.2)
    for key, name in (("clip", "clip_ratio_low"), ("clip_high", "clip_ratio_high")):
        if draft.given.get(f"{ACTOR}.{name}", 0.2) is None:
            draft.put(f"algorithm.{key}", both, f"{ACTOR}.clip_ratio")
    if mode == "gspo":
        draft.put("step.algorithm", "gspo", f"{ACTOR}.policy_loss.loss_mode")
    elif mode in {"cispo", "sapo", "dppo_tv"}:
        draft.put("algorithm.surrogate", mode, f"{ACTOR}.policy_loss.loss_mode")
    else:
        draft.put("algorithm.surrogate", "dual_clip", note="verl's vanilla loss")
        if mode != "vanilla":
            draft.lose("a loss of your own (see step.loss)", f"{ACTOR}.policy_loss.loss_mode = {mode}")
    if mode == "sapo":
        draft.put("algorithm.gates", gates, f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg")
        del draft.values["algorithm.clip"], draft.values["algorithm.clip_high"]
    draft.put("algorithm.value_coefficient", 1.0, note="verl's critic has a loss of its own")
    _correction_of_verl(draft, "algorithm.rollout_correction")


def _correction_of_verl(draft: Draft, place: str) -> None:
    # verl computes log-probs again before an update, unless it bypasses that
    bypass = draft.take(f"{place}.bypass_mode", default=False)
    draft.put("algorithm.ratio_base", "behaviour" if bypass else "proximal", note=f"verl's bypass_mode = {bypass}")
    weights, old = draft.take(f"{place}.rollout_is"), draft.number(f"{ACTOR}.tis_imp_ratio_cap", -1)
    bounds = str(draft.take(f"{place}.rollout_is_threshold", 2.0)).split("_")
    names = f"{place}.rollout_is", f"{place}.rollout_is_threshold", f"{ACTOR}.tis_imp_ratio_cap"
    if weights not in (None, "token", "sequence"):
        return draft.lose("weights are by token or by rollout (see algorithm.is_correction)", f"{names[0]} = {weights}")
    if old > 0:
        weights, bounds = "token", [str(old)]
    if draft.value("trainer.router_replay"):
        draft.put("algorithm.ratio_base", "behaviour", note="replayed experts leave log-probs as they are")
        if weights is not None:
            draft.lose("nothing is corrected where experts are replayed (see trainer.router_replay)", *names)
        weights = None
    if weights is None:
        return draft.put("algorithm.is_correction", "none", note="verl corrects nothing unless rollout_is is set")
    kinds = ("truncated", "truncated_sequence") if len(bounds) == 1 else ("mask", "mask_product")
    draft.put("algorithm.is_correction", kinds[weights == "sequence"], *names)
    for key, bound in zip(("is_cap",) if len(bounds) == 1 else ("is_low", "is_high"), bounds, strict=False):
        draft.put(f"algorithm.{key}", literal(bound), *names[1:])
    return None


def _kl_of_verl(draft: Draft) -> None:
    control = "algorithm.kl_ctrl"
    # scripts of 2024 gave the coefficient of the reward alone: there was no switch
    old = f"{control}.kl_coef" in draft.given and f"{ACTOR}.use_kl_loss" not in draft.given
    in_reward = draft.take("algorithm.use_kl_in_reward", old)
    in_loss = draft.take(f"{ACTOR}.use_kl_loss", default=False)
    reward, loss = f"{control}.kl_coef", f"{ACTOR}.kl_loss_coef"
    of_reward = draft.take(reward, 0.001), "algorithm.kl_penalty", "kl", reward
    of_loss = draft.take(loss, 0.001), f"{ACTOR}.kl_loss_type", "low_var_kl", loss
    if draft.take(f"{control}.type", "fixed") == "adaptive":
        draft.origins["algorithm.kl_target"].append(f"{control}.type")
    else:
        del draft.values["algorithm.kl_target"]
    if not (in_reward or in_loss):
        draft.put("algorithm.kl", 0.0, "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss")
        return
    if in_reward and in_loss:
        draft.lose("there is one KL penalty: that in the loss is left out", f"{ACTOR}.use_kl_loss")
    coefficient, kind, default, name = of_reward if in_reward else of_loss
    draft.put("algorithm.kl", coefficient, name)
    switch = "algorithm.use_kl_in_reward" if in_reward else f"{ACTOR}.use_kl_loss"
    draft.kl_place(switch, kind, default, in_reward=bool(in_reward))


def _batch_of_verl(draft: Draft) -> None:
    batch = draft.whole("data.train_batch_size", 1024)
    mini, size = draft.whole(f"{ACTOR}.ppo_mini_batch_size", 256), f"{ACTOR}.ppo_max_token_len_per_gpu"
    if mini > 0 and batch % mini == 0:
        draft.put("trainer.minibatches", batch // mini, "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    else:
        draft.lose(f"minibatches of one size divide the {batch} prompts of a batch", f"{ACTOR}.ppo_mini_batch_size")
    tokens = draft.take(size, 16_384)
    if draft.take(f"{ACTOR}.use_dynamic_bsz", default=False):
        draft.put("trainer.micro_batch_tokens", tokens, size, f"{ACTOR}.use_dynamic_bsz")
    draft.epochs(draft.number("trainer.total_epochs", 30), "trainer.total_epochs")
    steps, ratio = draft.number(f"{ACTOR}.optim.lr_warmup_steps", -1), f"{ACTOR}.optim.lr_warmup_steps_ratio"
    draft.warm_up(max(steps, 0), draft.number(ratio, 0.0), ratio if steps < 0 else f"{ACTOR}.optim.lr_warmup_steps")


def _models_of_verl(draft: Draft) -> None:
    if not isinstance(draft.value("models.policy"), str):
        draft.open("models.policy", "policy", POLICY)
    found: list[object] = []
    for place, last in (("reward_model", "model.path"), ("reward.reward_model", "model_path")):
        model = draft.take(f"{place}.{last}")
        if draft.take(f"{place}.enable", default=False) and model:
            found.append(model)
    names = [
        f"{place}.{name}" for place in ("reward_model", "reward.reward_model") for name in ("enable", "model.path")
    ]
    draft.rewards(found[:1], *names, "reward.reward_model.model_path")
    for place in ("custom_reward_function", "reward.custom_reward_function"):
        file, name = draft.take(f"{place}.path"), draft.take(f"{place}.name", "compute_score")
        if file and found:
            draft.lose("rewards are a list, whose weighted sum is the score: add it", f"{place}.path = {file}")
        elif file:
            told = "let it take prompts, completions and the columns that it names, and return a score for each"
            draft.open("rewards.0.source", f"{file}:{name}", told, f"{place}.path", f"{place}.name")
    if not found and draft.values["rewards.0.source"][0] == "rewards.py:score":
        draft.blank["rewards.0.source"] = f"verl chooses a checker by the column data_source; here it is {REWARD}"
    engine = draft.take(f"{ROLLOUT}.name", "vllm")
    if engine == "hf":
        draft.put("models.engine", "transformers", f"{ROLLOUT}.name")
    elif engine != "vllm":
        draft.lose("models.engine is vLLM or transformers", f"{ROLLOUT}.name = {engine}")
    if engine == "vllm":
        draft.put("models.engine", "auto", f"{ROLLOUT}.name")


def _data_of_verl(draft: Draft) -> None:
    draft.files("data.prompts", "data.train_files")
    every = draft.whole("trainer.test_freq", -1)
    if every > 0:
        draft.files("eval.prompts", "data.val_files")
        draft.put("eval.every", every, "trainer.test_freq")
    elif draft.take("data.val_files"):
        draft.lose("nothing is evaluated where trainer.test_freq is not above 0", "data.val_files")
    long, filtered = draft.take("data.truncation", "error"), draft.take("data.filter_overlong_prompts", default=False)
    if not filtered and long not in {"error", "left"}:
        draft.lose("a prompt that is cut keeps its end (see data.over_long)", f"data.truncation = {long}")
    chosen = "filter" if filtered else "error" if long == "error" else "truncate"
    draft.put("data.over_long", chosen, "data.filter_overlong_prompts", "data.truncation")


def _of_openrlhf(draft: Draft) -> None:
    estimators = ESTIMATORS | {"reinforce": "reinforce_pp", "reinforce_baseline": "grpo", "group_norm": "grpo"}
    estimators |= {"dr_grpo": "dr_grpo"}
    algorithm = draft.estimator("algo.advantage.estimator", estimators)
    dynamic, long = draft.take("algo.dynamic_filtering_enable", default=False), "reward.overlong_buffer_len"
    if algorithm == "grpo" and (dynamic or draft.given.get(long)):
        algorithm = "dapo"
    if (loss := draft.take("actor.policy_loss_type", "ppo")) == "gspo":
        algorithm = "gspo"
    elif loss != "ppo":
        draft.lose("a loss of your own (see step.loss)", f"actor.policy_loss_type = {loss}")
    names = ("algo.advantage.estimator", "actor.policy_loss_type")
    draft.put("step.algorithm", algorithm, *names, note="" if names[0] in draft.given else "the default estimator")
    draft.same(rows_of("openrlhf"))
    if algorithm == "dapo":
        draft.put("algorithm.dynamic_sampling", bool(dynamic), "algo.dynamic_filtering_enable")
        draft.values.setdefault("algorithm.long_buffer", (0, f"no {long}"))
    _loss_of_openrlhf(draft)
    _batch_of_openrlhf(draft)
    _models_of_openrlhf(draft)
    _data_of_openrlhf(draft)


def _loss_of_openrlhf(draft: Draft) -> None:
    if isinstance(both := draft.take("actor.eps_clip_low_high"), list):
        for key, bound in zip(("clip", "clip_high"), both, strict=False):
            draft.put(f"algorithm.{key}", bound, "actor.eps_clip_low_high")
    if draft.value("algorithm.dual_clip") is not None and draft.algorithm != "gspo":
        draft.put("algorithm.surrogate", "dual_clip", "actor.dual_clip")
    draft.put("algorithm.value_coefficient", 1.0, note="the critic has a loss of its own")
    coefficient = draft.number("algo.kl.init_coef", 0.01)
    in_loss = draft.take("algo.kl.use_loss", default=False)
    draft.put("algorithm.kl", coefficient, "algo.kl.init_coef")
    if coefficient:
        switch = "algo.kl.use_loss" if in_loss else "algo.kl.init_coef"
        draft.kl_place(switch, "algo.kl.estimator", "k1", in_reward=not in_loss)
    place = "algo.advantage.is_correction"
    level, mode = draft.take(f"{place}_level", "off"), draft.take(f"{place}_mode", "mask")
    gate, bounds = draft.take(f"{place}_gating", "ratio"), draft.take(f"{place}_threshold", [0.5, 5.0])
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (0.0, bounds)
    draft.put("algorithm.ratio_base", "proximal", note="OpenRLHF computes log-probs again where vLLM decodes")
    if level != "off" and gate != "ratio":
        draft.lose("a mask is by the ratio (see algorithm.is_correction)", f"{place}_gating = {gate}")
    elif level == "off":
        draft.put("algorithm.is_correction", "none", note="OpenRLHF corrects nothing unless a level is set")
    else:
        kind = "mask_sequence" if level != "token" else "truncated" if mode == "clip" else "mask"
        said = f"{place}_mode" if kind == "truncated" else f"{place}_level"
        draft.bounded(kind, low, high, (said, f"{place}_threshold", f"{place}_threshold"))


def _batch_of_openrlhf(draft: Draft) -> None:
    batch, samples = draft.whole("rollout.batch_size", 1024, 1), draft.whole("rollout.n_samples_per_prompt", 1, 1)
    mini, episodes = draft.whole("train.batch_size", 128, 1), draft.number("train.num_episodes", 1)
    if batch * samples % mini:
        draft.lose(f"minibatches of one size divide the {batch * samples} responses of a batch", "train.batch_size")
    else:
        draft.put("trainer.minibatches", batch * samples // mini, "rollout.batch_size", "train.batch_size")
    draft.epochs(episodes, "train.num_episodes")
    if episodes > 1:
        draft.lose("an episode that ends with a smaller batch is filled from the next one here", "train.num_episodes")
    draft.put("trainer.critic_warmup", draft.whole("critic.freezing_steps", -1, -1) + 1, "critic.freezing_steps")
    rate = str(draft.take("actor.lr_scheduler", "cosine_with_min_lr")).removesuffix("_with_min_lr")
    draft.put("trainer.schedule", rate, "actor.lr_scheduler")
    draft.warm_up(0, draft.number("actor.lr_warmup_ratio", 0.03), "actor.lr_warmup_ratio")
    least = draft.number("actor.min_lr_ratio", 0.1)
    if rate != draft.given.get("actor.lr_scheduler", "cosine_with_min_lr") and least:
        draft.lose("the learning rate falls to 0 (see trainer.schedule)", f"actor.min_lr_ratio = {least}")
    tokens = draft.take("train.max_tokens_per_gpu", 16_192)
    if draft.take("train.dynamic_batch_enable", default=False):
        draft.put("trainer.micro_batch_tokens", tokens, "train.max_tokens_per_gpu", "train.dynamic_batch_enable")


def _models_of_openrlhf(draft: Draft) -> None:
    if not isinstance(draft.value("models.policy"), str):
        draft.open("models.policy", "policy", POLICY)
    if draft.take("ds.attn_implementation") == "eager":
        draft.put("models.attention", "eager", "ds.attn_implementation")
    draft.lose(rows_of("openrlhf")["reward.clip_range"][1], "reward.clip_range")
    models, served = draft.take("reward.model_name_or_path"), draft.take("reward.remote_url")
    draft.rewards(str(models).split(",") if models else [], "reward.model_name_or_path")
    if isinstance(served, str):
        url = served.startswith("http")
        told = (
            f"an HttpReward for {served}" if url else "let it take prompts, completions and columns, and return scores"
        )
        file = "rewards.py:served" if url else f"{served}:reward_func"
        draft.open("rewards.0.source", file, told, "reward.remote_url")
    if draft.whole("vllm.num_engines", 0):
        draft.put("models.engine", "auto", "vllm.num_engines")
    names = ("logger.wandb.key", "logger.tensorboard_dir")
    trackers = dict(zip(("wandb", "tensorboard"), map(draft.take, names), strict=True))
    if any(trackers.values()):
        draft.put("run.track", [name for name, given in trackers.items() if given], *names, note="logger")
    path = PurePosixPath(str(draft.take("ckpt.output_dir", "./ckpt")))
    draft.values.setdefault("run.name", (plain_name(path.name), "ckpt.output_dir"))
    draft.put("run.directory", str(path.parent), "ckpt.output_dir")


def _data_of_openrlhf(draft: Draft) -> None:
    longest, both = draft.take("rollout.max_new_tokens"), draft.take("data.max_len", 2048)
    draft.put("sampling.max_new_tokens", longest or both, "rollout.max_new_tokens" if longest else "data.max_len")
    if not longest:
        draft.lose("of prompt and response together; each has a limit of its own here", f"data.max_len = {both}")
    draft.put("data.over_long", "error", note="a prompt that is cut is another one")
    given = draft.take("data.prompt_probs") or []
    shares = list(given) if isinstance(given, tuple | list) else [given]
    split = draft.take("data.prompt_split", "train")
    named = [each for each in str(draft.take("data.prompt_dataset") or "").split(",") if each]
    tables = [{"path": each} | ({"split": split} if split != "train" else {}) for each in named]
    if len(named) == len(shares) > 1:
        for table, share in zip(tables, shares, strict=True):
            table["weight"] = share
    if tables:
        names = ("data.prompt_dataset", "data.prompt_probs", "data.prompt_split")
        draft.put("data.prompts", tables if len(tables) > 1 or len(tables[0]) > 1 else named[0], *names)
    else:
        draft.files("data.prompts", "data.prompt_dataset")
    every, apart, split = draft.whole("eval.steps", -1), draft.take("eval.dataset"), draft.take("eval.split", "train")
    if every > 0 and apart:
        held_out = [{"path": apart, "split": split}] if split != "train" else apart
        draft.put("eval.prompts", held_out, "eval.dataset", "eval.split")
        draft.put("eval.every", every, "eval.steps")
