"""Writes ``docs/settings.md`` from the settings' own declarations: ``python -m docs.make_settings``."""  # noqa: INP001 - a script beside its page

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from oppo.algorithms import ALGORITHMS
from oppo.config.load import SEEDED
from oppo.config.scorers import REWARD_KINDS, ScorerSection
from oppo.config.settings import keys_of
from oppo.declared import MOST, SEEDS, Declared, OneOf, declared as declared_of
from oppo.run.simulation import profile_sections
from oppo.simulate.profile import ENGINES, GPUS, MODELS

PAGE = Path(__file__).with_name("settings.md")

NAMES: Mapping[str, tuple[str, str]] = {
    "run.name": ("run name", "run_name"),
    "run.directory": ("output directory", "output_dir"),
    "run.steps": ("updates, iterations", "`total_episodes` / `batch_size`"),
    "run.seed": ("random seed", "seed"),
    "run.deterministic": ("deterministic mode", ""),
    "run.cores": ("CPU threads", ""),
    "run.policy": ("placement of the rollout engine", ""),
    "run.scorers": ("placement of the scoring models", ""),
    "run.trainer": ("placement of the trainer", ""),
    "run.panel": ("progress display", "disable_tqdm"),
    "run.track": ("experiment tracker, logger", "report_to"),
    "run.metric_names": ("metric names, log keys", ""),
    "run.logged_samples": ("logged samples", "num_sample_generations"),
    "run.trace": ("timeline", ""),
    "run.watchdog_seconds": ("hang timeout", ""),
    "run.call_timeout": ("call timeout", ""),
    "run.scorer_restarts": ("restarts of a lost worker", ""),
    "run.max_empty": ("guard against training on nothing", ""),
    "run.max_nonfinite": ("NaN guard", ""),
    "run.checkpoint_every": ("checkpoint interval", "save_steps"),
    "run.keep_last": ("checkpoints kept", "save_total_limit"),
    "run.keep_best": ("best checkpoint", ""),
    "models.policy": ("actor, policy", "sft_model_path"),
    "models.reference": ("reference model", "ref_model"),
    "models.critic": ("critic, value model", "value_model"),
    "models.teacher": ("teacher model", "`teacher_model_name_or_path` of GKD"),
    "models.teacher_column": ("routing of prompts to teachers", ""),
    "models.shared_trunk": ("shared backbone, value head", ""),
    "models.share_weights": ("colocated weights, weight sync", ""),
    "models.engine": ("rollout engine, inference backend", ""),
    "models.dtype": ("precision of the weights", "dtype"),
    "models.device": ("device, GPU", ""),
    "models.attention": ("attention implementation", "attn_implementation"),
    "models.lora_rank": ("LoRA rank, r", "lora_r"),
    "models.lora_alpha": ("LoRA alpha", "lora_alpha"),
    "models.lora_experts": ("LoRA on experts, `target_parameters`", "lora_target_parameters"),
    "models.lora": ("LoRA target modules, rsLoRA, rank pattern", "`lora_target_modules`, `use_rslora`"),
    "models.adapter": ("pretrained adapter, `adapter_name_or_path`", "model_adapter_name"),
    "models.quantization": ("QLoRA, bitsandbytes, NF4", "load_in_4bit"),
    "models.lora_sync": ("LoRA weight sync, hot-swapped adapter", ""),
    "models.trust_remote_code": ("custom code", "trust_remote_code"),
    "models.allow_pickle": ("pickled weights, `pytorch_model.bin`", ""),
    "models.ignore_unused_weights": ("strict loading, unexpected keys", ""),
    "rewards.source": ("reward functions, reward model", "`reward_model_path`; `reward_funcs` of GRPO"),
    "rewards.name": ("reward component", ""),
    "rewards.weight": ("reward weights", "`reward_weights` of GRPO"),
    "rewards.on_drop": ("rewards that do not apply", ""),
    "rewards.on_failure": ("reward error policy", ""),
    "rewards.process": ("reward function in a subprocess", ""),
    "rewards.concurrency": ("concurrent reward calls", ""),
    "rewards.timeout": ("reward timeout", ""),
    "rewards.each": ("reward calls per response", ""),
    "rewards.keep_special_tokens": ("`skip_special_tokens`", ""),
    "rewards.engine": ("inference backend of the reward model", ""),
    "rewards.reading": ("streamed or whole-rollout reward model", ""),
    "rewards.form": ("chat template of the reward model, cross-encoder input", ""),
    "rewards.over_long": ("truncation of the reward model", ""),
    "rewards.label": ("label of a classifier", ""),
    "rewards.column": ("reference answer, ground truth", ""),
    "rewards.separators": ("step separator of a process reward model", "`step_separator` of `PRMConfig`"),
    "rewards.vllm": ("engine arguments of the reward model", ""),
    "rewards.url": ("reward server", ""),
    "rewards.api_key_env": ("API key", ""),
    "rewards.attempts": ("retries", ""),
    "rewards.model": ("judge model", "`model` of a judge"),
    "rewards.template": ("judge prompt", "`system_prompt` of a judge"),
    "rewards.system": ("judge system message", ""),
    "rewards.score": ("parsing of the judge's answer", ""),
    "rewards.temperature": ("judge temperature", ""),
    "rewards.max_tokens": ("judge answer length", ""),
    "scorers.vllm": ("engine arguments of a reference or teacher", ""),
    "scorers.url": ("teacher server, reference server", "`teacher_model_server_url` of Distillation"),
    "scorers.api_key_env": ("API key", ""),
    "scorers.timeout": ("request timeout", ""),
    "scorers.attempts": ("retries", ""),
    "scorers.engine": ("inference backend of a reference or teacher", ""),
    "teacher.weights": ("self-distillation, teacher regularisation", "`teacher_model_kind` of SDPO"),
    "teacher.rate": ("EMA rate, teacher update rate", "`teacher_update_rate` of SDPO"),
    "teacher.column": ("privileged context, hint, solution", "`privileged_context`"),
    "teacher.template": ("teacher prompt, reprompt template", "`reprompt_template` of SDPO"),
    "teacher.threshold": ("success threshold", "`success_reward_threshold` of SDPO"),
    "environment.source": ("environment, tool calls, multi-turn rollouts", ""),
    "environment.tools": ("tools, function calling", "`tools` of GRPO"),
    "environment.tools_column": ("per-sample tools", "verl: `extra_info.tool_selection`"),
    "environment.factory": ("environment classes, gyms", "`environment_factory` of GRPO"),
    "environment.on_failure": ("tool error policy", ""),
    "environment.max_turns": ("maximum tool turns", "`max_tool_calling_iterations` of GRPO"),
    "environment.compact": ("compaction, context summarisation", "verifiers: `summarize_at_tokens`"),
    "environment.summary_tokens": ("summary length", ""),
    "environment.summary_request": ("summary prompt", ""),
    "environment.max_segments": ("maximum summaries", ""),
    "environment.process": ("tool in a subprocess", ""),
    "environment.concurrency": ("concurrent tool calls", ""),
    "environment.timeout": ("tool timeout", ""),
    "environment.keep_special_tokens": ("`skip_special_tokens`, `split_special_tokens`", ""),
    "agents.program": ("agent, agent loop, harness", ""),
    "agents.roles": ("roles, self-play, frozen opponent", ""),
    "agents.on_failure": ("agent error policy", ""),
    "agents.timeout": ("agent timeout", ""),
    "agents.host": ("host of the server", ""),
    "agents.port": ("port of the server", ""),
    "agents.public_url": ("base URL of the server", ""),
    "placement.policy": ("rollout device", ""),
    "placement.trainer": ("data-parallel ranks, training devices", ""),
    "placement.scorers": ("scoring device", ""),
    "placement.reference": ("device of the reference model", ""),
    "placement.reward": ("device of the reward model", ""),
    "placement.critic": ("device of the value model", ""),
    "placement.teacher": ("device of the teacher model", ""),
    "placement.shard": ("FSDP, ZeRO-3", "`fsdp`"),
    "placement.cluster": ("Ray address", ""),
    "placement.remote": ("Ray actors, workers", ""),
    "placement.actor_cpus": ("`num_cpus` of a Ray actor", ""),
    "placement.spread": ("`STRICT_SPREAD` of a placement group", ""),
    "placement.policy_replicas": ("number of rollout engines, inference replicas", ""),
    "placement.share": ("colocated engine, sleep mode", "`vllm_enable_sleep_mode` of GRPO"),
    "data.prompts": ("prompt dataset", "train_dataset"),
    "data.column": ("prompt field", ""),
    "data.chat_template": ("chat template", "`chat_template_path`"),
    "data.chat_template_kwargs": ("template variables, `enable_thinking`", "`chat_template_kwargs` of GRPO"),
    "data.tools": ("tool schemas", ""),
    "data.max_prompt_tokens": ("maximum prompt length", ""),
    "data.over_long": ("truncation, filtering", ""),
    "data.epochs": ("passes over the data", "num_train_epochs"),
    "data.images": ("multimodal data", ""),
    "data.drop_last": ("batches that are not full", "dataloader_drop_last"),
    "data.seed": ("data seed", "seed"),
    "sampling.max_new_tokens": ("response length", "response_length"),
    "sampling.temperature": ("temperature", "temperature"),
    "sampling.top_k": ("top-k", ""),
    "sampling.top_p": ("nucleus, top-p", ""),
    "sampling.min_new_tokens": ("minimum response length", ""),
    "sampling.stop_strings": ("stop sequences", ""),
    "sampling.seed": ("generation seed", "seed"),
    "sampling.stop": ("stop tokens", "`stop_token`, `stop_token_id`"),
    "sampling.eos": ("EOS, `ignore_eos`", ""),
    "step.algorithm": ("algorithm, advantage estimator", ""),
    "step.batch": ("rollout batch size, B", "batch_size"),
    "step.overcommit": ("overcommit, Delta", ""),
    "step.max_deferrals": ("staleness bound", ""),
    "step.admission": ("overcommit controller", ""),
    "step.staleness_price": ("price of staleness", ""),
    "step.chunk": ("chunk size", ""),
    "step.kv_on_sync": ("KV cache after a weight update", ""),
    "step.lookahead": ("asynchronous training, one-step-off", ""),
    "step.loss": ("custom loss function", ""),
    "step.stream_updates": ("gradient accumulation during generation", ""),
    "step.weight_sync": ("in-flight weight updates, PipelineRL", ""),
    "algorithm.distill": ("on-policy distillation coefficient", ""),
    "algorithm.distill_top_k": ("top-k logits distillation", "`loss_top_k` of Distillation"),
    "algorithm.distill_beta": ("forward KL, reverse KL, generalised JSD; beta", "`beta` of GKD and Distillation"),
    "algorithm.mask_truncated": ("over-long filtering, truncation mask", "`mask_truncated_completions` of GRPO"),
    "algorithm.surrogate": ("policy loss: dual clip, CISPO, SAPO, DPPO", "`loss_type` of GRPO"),
    "algorithm.dual_clip": ("dual clip, c", ""),
    "algorithm.gates": ("SAPO temperatures, tau", "`sapo_temperature_pos`, `sapo_temperature_neg` of GRPO"),
    "algorithm.clip": ("clip range, epsilon", "cliprange"),
    "algorithm.clip_high": ("clip-higher, epsilon high", "`epsilon_high` of GRPO"),
    "algorithm.entropy_coefficient": ("entropy coefficient, c2", ""),
    "algorithm.aggregation": ("loss aggregation, length normalisation", "`loss_type` of GRPO"),
    "algorithm.ratio_base": ("decoupled PPO, proximal policy", ""),
    "algorithm.is_correction": ("importance sampling correction: TIS, sequence TIS, IcePop, sequence masking", ""),
    "algorithm.is_cap": ("truncation, c", ""),
    "algorithm.is_low": ("mask, lower bound", ""),
    "algorithm.is_high": ("mask, upper bound", ""),
    "algorithm.is_k3": ("rejection sampling by k3", ""),
    "algorithm.kl": ("KL coefficient, beta", "kl_coef"),
    "algorithm.kl_in": ("KL as reward or as loss", ""),
    "algorithm.kl_estimator": ("KL estimator", "kl_estimator"),
    "algorithm.kl_target": ("adaptive KL target", "`target` (until 0.11)"),
    "algorithm.kl_horizon": ("adaptive KL horizon", "`horizon` (until 0.11)"),
    "algorithm.score_norm": ("reward normalisation, running", "`use_score_scaling`, `use_score_norm` (until 0.11)"),
    "algorithm.score_clip": ("reward clip", "`score_clip` (until 0.11)"),
    "algorithm.reward_scale": ("reward scale", ""),
    "algorithm.missing_eos_penalty": ("missing-EOS penalty", "missing_eos_penalty"),
    "algorithm.nll": ("positive-example language-model loss, mu", ""),
    "algorithm.nll_above": ("threshold of a positive example", ""),
    "algorithm.samples": ("group size, G", "`num_generations` of GRPO"),
    "algorithm.gamma": ("discount, gamma", "gamma"),
    "algorithm.over": ("Turn-PPO, turn-level GAE", ""),
    "algorithm.whiten_rewards": ("reward whitening", "whiten_rewards"),
    "algorithm.lam": ("GAE lambda", "lam"),
    "algorithm.lam_value": ("decoupled GAE, lambda of the critic", ""),
    "algorithm.lam_alpha": ("length-adaptive GAE, alpha", ""),
    "algorithm.value_clip": ("value clip range", "cliprange_value"),
    "algorithm.value_coefficient": ("value coefficient, c1", "vf_coef"),
    "algorithm.bootstrap_truncated": ("partial-episode bootstrapping, bootstrapping at time limits", ""),
    "algorithm.credit": ("turn-level credit assignment, GiGPO", ""),
    "algorithm.scale_scores": ("reward scaling, MaxRL, GDPO", "`scale_rewards` of GRPO"),
    "algorithm.dynamic_sampling": ("dynamic sampling", ""),
    "algorithm.max_rounds": ("generation rounds of dynamic sampling", ""),
    "algorithm.long_buffer": ("soft over-long punishment, L_cache", ""),
    "algorithm.long_penalty": ("over-long penalty", ""),
    "algorithm.beta": ("beta", "`beta` of DPO"),
    "algorithm.decay": ("`role_baseline_ema_gamma` of SPIRAL", ""),
    "eval.prompts": ("evaluation set, held-out set", "eval_dataset"),
    "eval.every": ("evaluation interval", "`eval_steps`"),
    "eval.samples": ("avg@n, pass@k", ""),
    "eval.count": ("evaluation set size", ""),
    "eval.pass_score": ("success threshold", ""),
    "eval.batch": ("evaluation batch size", "`per_device_eval_batch_size`"),
    "eval.seed": ("evaluation seed", "seed"),
    "trainer.optimizer": ("Muon, AdamW", ""),
    "trainer.learning_rate": ("learning rate", "learning_rate"),
    "trainer.critic_learning_rate": ("critic learning rate", ""),
    "trainer.critic_warmup": ("critic warm-up", ""),
    "trainer.epochs": ("PPO epochs, K", "num_ppo_epochs"),
    "trainer.minibatches": ("minibatches", "num_mini_batches"),
    "trainer.max_grad_norm": ("gradient clipping", "max_grad_norm"),
    "trainer.weight_decay": ("weight decay", "weight_decay"),
    "trainer.router_aux_loss": ("MoE auxiliary loss", "router_aux_loss_coef"),
    "trainer.router_replay": ("rollout routing replay, R3", ""),
    "trainer.betas": ("Adam betas", "`adam_beta1`, `adam_beta2`"),
    "trainer.eps": ("Adam epsilon", "adam_epsilon"),
    "trainer.schedule": ("learning-rate schedule", "lr_scheduler_type"),
    "trainer.warmup_steps": ("learning-rate warm-up", "warmup_steps"),
    "trainer.gradient_checkpointing": ("activation checkpointing", "gradient_checkpointing"),
    "trainer.micro_batch_tokens": ("micro-batch size, in tokens", "`per_device_train_batch_size`, in rows"),
    "trainer.seed": ("training seed", "seed"),
}

"""For each key, what the field calls it and what TRL's PPO calls it (1.12 unless said; empty: it has no such thing)."""

DEMO: Mapping[str, str] = {
    "sampling.max_new_tokens": "the longest reviews of its language have about 230 tokens, and none should be cut off",
    "step.admission": "it defers as many as save time here; by default nothing is deferred, so a run is on-policy "
    "and does not depend on timing",
    "step.chunk": "its responses have 30 to 40 tokens, so that the default would hardly divide them",
    "trainer.learning_rate": "a model of 2 million parameters can learn faster, and must in so few steps",
    "trainer.critic_learning_rate": "a critic whose head begins at 0 has further to go than the policy",
    "trainer.epochs": "half of the passes over a batch, with two optimizer steps in each: as many as by default",
    "trainer.minibatches": "see `epochs`",
    "trainer.micro_batch_tokens": "short passes hold little padding, and keep two cores busy",
}
"""Where ``make demo`` is not at the default, and why."""

ABOUT: Mapping[str, str] = {
    "run": "What is run, for how long, and what is written about it.",
    "models": "The models that are trained or served, by directory or hub name, and how they are loaded.",
    "rewards": "The reward, or several with names, whose weighted sum is the score: [rewards.md](rewards.md). Each is "
    'a table of the list `[[rewards]]`, or its source alone (`rewards = ["math"]`); `--set rewards.0.weight=2` sets a '
    "key of the first. If its source is code or a checker, it has the keys of a `function`, if it is a URL those of a "
    '`judge`, else those of a `model`, or with `engine = "vllm"` of a `model on vLLM`.',
    "scorers": "What serves the reference (`[scorers.reference]`), the teacher (`[scorers.teacher]`) or one of several "
    '(`[scorers."teacher.math"]`): [engines.md](engines.md#reference-and-teacher-on-vllm).',
    "teacher": "The weights of the teacher, and the prompt behind which it reads responses: "
    "[algorithms.md](algorithms.md#a-teacher-behind-another-prompt).",
    "environment": "What answers a response that has ended at a stop, as a tool does: "
    "[rewards.md](rewards.md#tools-and-turns).",
    "agents": "An agent of a server with the APIs of OpenAI and Anthropic, in place of prompts and rewards: "
    "[rewards.md](rewards.md#an-existing-agent-in-fifteen-lines).",
    "placement": "The device of each model, if they are not all on `models.device`: [scale.md](scale.md).",
    "data": "The prompts and how they are served.",
    "sampling": "How the policy samples tokens.",
    "step": "The algorithm, and the [schedule](schedules.md) of a step.",
    "algorithm": "The settings of the algorithm that `step.algorithm` names; not all of them have every key.",
    "eval": "How the policy answers held-out prompts while it is trained: [runs.md](runs.md#held-out-score).",
    "trainer": "How actor and critic are optimised.",
}
"""What each section is about."""

TITLES: Mapping[str, tuple[str, Sequence[str]]] = {
    "rewards": ("[[rewards]]", [*REWARD_KINDS]),
    "scorers": ("[scorers.NAME]", [""]),
}
"""Sections that are no single table, and the kinds of their tables."""

WORDS: Mapping[object, str] = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}
UNTOLD = (MOST, SEEDS.stop)  # bounds that nobody meets
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

PREFACE = """\
# Settings

What does each key mean, and what does TRL call it?

Every key of the file that `oppo train` reads, made from the dataclasses that check it: change those, then run
`python -m docs.make_settings`. A key without a default must be given. *Known as* is the field's common name, *in TRL*
the name in TRL's `PPOConfig`, `PPOTrainer` or `ModelConfig`.
"""

VLLM = """## `[vllm]`

Arguments of vLLM's engine with `models.engine = "vllm"`, by the names that vLLM gives them (`AsyncEngineArgs`):
`gpu_memory_utilization`, `tensor_parallel_size`, `max_num_seqs` and others. They are checked against the installed vLLM
before anything is loaded. Those that the run sets itself are refused: [engines.md](engines.md#in-a-settings-file).

With `urls`, servers that others start decode instead, and there are four keys: `urls`, `api_key_env` (the environment
variable that holds their key), `weights_directory` (which both machines have) and `timeout` (60 seconds a call):
[engines.md](engines.md#servers-by-their-urls).
"""

OWN = """## `[admission]` and `[loss]`

The settings of an admission or a loss of your own, which `step.admission` or `step.loss` names by its file: its
parameters, with the types and defaults that it declares ([compose.md](compose.md#parts-of-your-own-by-their-file)).
"""

PROFILE = """## Profiles

The keys of the file that [`oppo simulate profile.toml`](schedules.md#predict-it-oppo-simulate) reads, which describes
hardware that one does not have. `decode = 4` is four replicas: each device has a whole copy of the actor, with rows and
decode steps of its own. An actor on several devices (tensor parallelism) is described as one device that is as much
faster, in `[gpus.NAME]`. Known are:

"""

POSTFACE = """## Where the demo differs

`make demo` names its models and prompts, and leaves every other key at its default but these:

| key | why |
|---|---|
"""


def tables() -> dict[str, dict[str, dict[str, Declared]]]:
    """Return every key of every section, as the algorithms or kinds of rewards that have it declare it, by name."""
    every: dict[str, dict[str, dict[str, Declared]]] = {}
    for algorithm, kind in ALGORITHMS.items():
        for section, keys in keys_of(kind).items():
            for key, declared in keys.items():
                every.setdefault(section, {}).setdefault(key, {})[algorithm] = declared
            rewards = every.setdefault("rewards", {}) if section == "models" else {}
            for name, reward in REWARD_KINDS.items() if section == "models" else ():
                for key, declared in declared_of(reward).items():
                    rewards.setdefault(key, {})[name] = declared
            if section == "models":
                every["scorers"] = {key: {"": declared} for key, declared in declared_of(ScorerSection).items()}
    return every


def page() -> str:
    """Return the page."""
    sections = [line for name, keys in tables().items() for line in _section(name, keys)]
    demo = POSTFACE + "".join(_because(key, why) for key, why in DEMO.items())
    return "\n".join([PREFACE, *sections, OWN, VLLM, demo, *_profiles()])


def _profiles() -> Iterator[str]:
    """Yield the lines of the part on profiles."""
    yield PROFILE.rstrip()
    for what, names in (("GPUs", GPUS), ("models", MODELS), ("engines", ENGINES)):
        yield f"- {what}: {', '.join(f'`{name}`' for name in names)}"
    for name, kind in profile_sections().items():
        title = f"{name}.NAME" if name in {"gpus", "sizes"} else name
        yield f"\n### `[{title}]` of a profile\n\n| key | values | default | what it is |\n|---|---|---|---|"
        for key, declared in declared_of(kind).items():
            cells = (_values(declared.kind), _default({"": declared}), _first_up(declared.description))
            yield f"| {' | '.join((f'`{key}`', *cells))} |"
    yield ""


def _section(name: str, keys: Mapping[str, Mapping[str, Declared]]) -> Iterator[str]:
    """Yield the lines of one table of the file."""
    title, kinds = TITLES.get(name, (f"[{name}]", [*ALGORITHMS]))
    yield f"## `{title}`\n\n{ABOUT[name]}\n"
    yield "| key | values | default | what it does | known as | in TRL |\n|---|---|---|---|---|---|"
    for key, by_algorithm in keys.items():
        if f"{name}.{key}" not in NAMES:
            raise SystemExit(f"{name}.{key} is new: add to NAMES what it is called elsewhere, and by TRL")
        known, trl = NAMES[f"{name}.{key}"]
        declared = next(iter(by_algorithm.values()))
        told = declared.description
        if key == "seed" and name in SEEDED:
            told += "; absent: the seed of the run"
        if len(by_algorithm) < len(kinds):
            told += f" ({', '.join(f'`{algorithm}`' for algorithm in by_algorithm)} only)"
        theirs = f"`{trl}`" if trl.isidentifier() else trl or "-"
        cells = (f"`{key}`", _values(declared.kind), _default(by_algorithm), _first_up(told), known, theirs)
        yield f"| {' | '.join(cells)} |"
    yield ""


def _because(key: str, why: str) -> str:
    section, _, name = key.partition(".")
    return f"| `[{section}] {name}` | {_first_up(why)} |\n"


def _default(by_algorithm: Mapping[str, Declared]) -> str:
    usual = next(iter(by_algorithm.values())).default
    own = {name: each.default for name, each in by_algorithm.items() if each.default != usual}
    if usual is MISSING:
        return "**required**"
    return ", ".join([_spelt(usual), *(f"{_spelt(value)} for `{name}`" for name, value in own.items())])


def _spelt(value: object) -> str:
    """Return a value as it is written in the file."""
    match value:
        case None:
            return "absent"
        case bool():
            return f"`{str(value).lower()}`"
        case tuple():
            return f"`{list(value)}`"
        case str():
            return f'`"{value}"`'
        case _:
            return f"`{value}`"


def _values(kind: object) -> str:
    """Return what may be given: ``number > 0``, ``"a"`` or ``"b"``."""
    return " or ".join(_kinds(kind))


def _kinds(annotation: object) -> list[str]:
    """Return the kinds of values of a type, in the words of the file; nothing for what stands for an absent key."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *rules = arguments
        known = [rule for rule in rules if isinstance(rule, OneOf)]
        named = [f'`"{choice}"`' for rule in known for choice in rule.choices if choice]
        named += [f"`{form}`" for rule in known if rule.form.startswith("file.py") for form in rule.form.split(" or ")]
        every = [rule for each in rules for rule in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return named or [" ".join([" or ".join(_kinds(inner)), *_limits(every)])]
    if origin is Literal:
        return [f'`"{choice}"`' for choice in arguments]
    if origin in (Union, types.UnionType):
        return [kind for argument in arguments for kind in _kinds(argument)]
    if origin is tuple:
        return [f"list of {' or '.join(_kinds(arguments[0]))}"]
    return (
        ["table"] if origin is dict or is_dataclass(annotation) else [WORDS[annotation]] if annotation in WORDS else []
    )


def _limits(rules: Iterable[object]) -> list[str]:
    """Return the bounds that a value keeps: ``> 0``."""
    found = [(sign, getattr(rule, name, None)) for rule in rules for name, sign in BOUNDS.items()]
    limits = [f"{sign} {limit}" for sign, limit in found if limit is not None and limit not in UNTOLD]
    return [", ".join(limits)] if limits else []


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
