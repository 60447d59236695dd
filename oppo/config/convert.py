"""Settings from a configuration of TRL or verl: what ``oppo convert-config`` writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, get_args

import tomli_w
from pydantic import TypeAdapter, ValidationError

from oppo.algorithms import ALGORITHMS
from oppo.config.foreign import Computed, Function, Kind, Rows, foreign_fields, read
from oppo.config.load import overridden, resolve
from oppo.config.sections import Tracker
from oppo.config.settings import Settings, keys_of
from oppo.declared import STRICT, expectation
from oppo.errors import ConfigError, did_you_mean

ENDLESS: Final = 1_000_000
"""``run.steps`` of a run that ends with its data."""

SHOWN: Final = 4
"""Fields that a message names of those that have a reason in common; the file names all."""

REWARD: Final = "a reward model's directory or hub name, or `file.py:name` of a function"


@dataclass(frozen=True, slots=True)
class Converted:
    """Settings that a file of TRL or verl became; ``blank`` are to be filled in, ``lost`` has no setting here."""

    document: Mapping[str, Any]
    text: str
    blank: Mapping[str, str]
    lost: Mapping[str, Sequence[str]]

    def lines(self) -> Iterator[str]:
        for key, what in self.blank.items():
            yield f"fill in {key}: {what}"
        for reason, names in self.lost.items():
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield f"not carried over: {', '.join(names[:SHOWN])}{more}: {reason}"

    def check(self, file: Path) -> None:
        try:
            resolve(self.document, file.absolute().parent)
        except ConfigError as error:
            raise ConfigError(
                f"{file} is written, and `oppo train` refuses it until this is changed: {error}"
            ) from error


def convert(path: Path, *, kind: Kind | None = None, overrides: Sequence[str] = ()) -> Converted:
    """Return the settings of a Python script, a YAML file, or a command with the arguments of TRL or verl."""
    found = read(path, kind)
    draft = Draft(found.kind, dict(found.given))
    for what, remark in found.remarks:
        draft.lose(remark, what)
    (_of_verl if found.kind == "verl" else _of_trl)(draft)
    draft.settle()
    document = overridden(draft.document(), overrides)
    blank = {key: what for key, what in draft.blank.items() if _at(document, key) == draft.values[key][0]}
    notes = {key: why for key, (value, why) in draft.values.items() if _at(document, key) == value}
    text = _rendered(document, notes, blank, draft.lost, f"{path.name}, of {draft.whose}")
    return Converted(document, text, blank, draft.lost)


@dataclass(slots=True)
class Draft:
    """Settings in the making, each with its origin; ``seen`` are the fields that were asked for."""

    kind: Kind
    given: dict[str, object]
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    blank: dict[str, str] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    @property
    def whose(self) -> str:
        return "verl" if self.kind == "verl" else "TRL"

    @property
    def algorithm(self) -> str:
        return str(self.values["step.algorithm"][0])

    def take(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        value = self.given.get(name)
        if isinstance(value, Computed):
            self.lose("computed when the program runs: give the setting by --set", f"{name} = {value}")
            return default
        if isinstance(default, str | bool) and isinstance(value, list | dict):
            self.lose(f"expected a value such as {default!r}", f"{name} = {value}")
            return default
        return default if value is None else value

    def whole(self, name: str, default: int, least: float = -math.inf) -> int:
        if (value := self.number(name, default)) < least:
            raise ConfigError(f"{name}: expected at least {least}, got {value}")
        return int(value)

    def number(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{name}: expected a number, got {value!r}")
        return value

    def put(self, key: str, value: object, *names: str, note: str = "") -> None:
        told = [name for name in names if self.given.get(name) is not None]
        self.values[key] = (value, note or ", ".join(told) or f"{self.whose}'s default")

    def open(self, key: str, value: object, what: str) -> None:
        # a value to be replaced, where the file names none
        self.put(key, value, note="fill in")
        self.blank[key] = what

    def lose(self, reason: str, *names: str) -> None:
        self.lost.setdefault(reason, []).extend(names)

    def same(self, rows: Rows) -> None:
        """Carry over every field that alone says what a setting is."""
        for name, (key, _, *more) in rows.items():
            if not more:
                continue
            how, value = more[0], self.take(name, more[1] if len(more) > 1 else None)
            if value in (None, "all-linear"):
                continue
            if isinstance(how, dict):
                if (spelt := str(value).lower() if isinstance(value, bool) else str(value)) not in how:
                    self.lose(f"{key}: expected one of {', '.join(how)}", f"{name} = {value}")
                    continue
                value = how[spelt]
            elif how == "at least 0":
                value = max(self.whole(name, more[1] if len(more) > 1 else 0), 0)
            self.put(key, {how: value} if how == "target_modules" else _name(value) if how == "name" else value, name)

    def settle(self) -> None:
        # leaves out what the algorithm or a setting does not take, and names every field that went nowhere
        algorithm = self.algorithm
        known, has_critic = keys_of(ALGORITHMS[algorithm]), ALGORITHMS[algorithm].has_critic
        for key, (value, why) in list(self.values.items()):
            section, _, name = key.partition(".")
            of_the_critic = not has_critic and "critic" in name
            if section in {"rewards", "vllm"}:
                continue
            if why.endswith("'s default") and name in known[section] and known[section][name].default == value:
                del self.values[key]
            elif name not in known[section] or of_the_critic:
                del self.values[key]
                if why in self.given and value not in (0, False, "none"):
                    self.lose(f"step.algorithm = {algorithm!r} does not read {key}", why)
            elif refusal := _refusal(known[section][name].kind, value):
                del self.values[key]
                self.lose(f"{key}: {refusal}", why)
        rows = foreign_fields()["verl"] if self.kind == "verl" else _rows_of_trl(self.kind)
        for name, value in self.given.items():
            if name not in self.seen and value not in (None, False, "", [], {}):
                self._unread(name, rows)

    def _unread(self, name: str, rows: Rows) -> None:
        place = name
        while place and place not in rows:
            place = place.rpartition(".")[0]
        if not place:
            guess = "" if self.kind == "verl" else did_you_mean(name, rows)
            return self.lose(f"no field that is known here{guess}", name)
        key, remark = rows[place][:2]
        return self.lose(" ".join(filter(None, (remark, key and f"(see {key})"))), name)

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, (value, _) in self.values.items():
            *place, last = key.split(".")
            table: Any = found
            for name in place:
                table = table.setdefault(name, {})
            table[last] = value
        return found | ({"rewards": list(found["rewards"].values())} if "rewards" in found else {})


def _refusal(kind: Any, value: object) -> str:
    try:
        TypeAdapter(kind, config=STRICT).validate_python(value)
    except ValidationError as error:
        return f"expected {expectation(error.errors(include_url=False)[-1])}, got {value!r}"
    return ""


def _name(text: object) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).lstrip("._-")[:128] or "run"


def _trackers(draft: Draft, name: str) -> None:
    given = draft.take(name) or []
    listed, known = [*map(str, given if isinstance(given, list) else [given])], get_args(Tracker)
    if chosen := [each for each in known if each in listed]:
        draft.put("run.track", chosen, name)
    if others := [f"{name} = {each}" for each in listed if each not in {*known, "console", "none"}]:
        draft.lose(f"run.track knows {', '.join(known)}", *others)


def _warm_up(draft: Draft, steps: float, ratio: float, name: str) -> None:
    total = draft.values["run.steps"][0]
    if ratio and not steps and total == ENDLESS:
        draft.lose("a share of steps whose number depends on the data: set trainer.warmup_steps", name)
    elif count := math.ceil(steps or ratio * total):
        draft.put("trainer.warmup_steps", count, name, note=name)
        if draft.values.get("trainer.schedule", ("constant",))[0] == "constant":
            draft.put("trainer.schedule", "constant_with_warmup", note=name)


def _until_the_data_ends(draft: Draft, epochs: float, name: str) -> None:
    draft.put("data.epochs", max(math.ceil(epochs), 1), name)
    draft.put("run.steps", ENDLESS, note="the run ends with its data")


def _rewards(draft: Draft, rewards: Sequence[object], weights: Sequence[object] = ()) -> None:
    for number, reward in enumerate(rewards):
        source, key = str(reward), f"rewards.{number}"
        code = isinstance(reward, Function | Computed) or ("/" not in source and not source.startswith((".", "~")))
        last = source.rpartition(".")[2] if code else PurePosixPath(source).name
        if code:
            told = f"move {source} into a file: it gets completions as text, and the columns that it names"
            draft.open(f"{key}.source", _moved(source, "rewards.py"), told)
        else:
            draft.put(f"{key}.source", source, note="the reward model")
        if len(rewards) > 1:
            draft.put(f"{key}.name", _name(last), note="its name in metrics")
        if number < len(weights):
            draft.put(f"{key}.weight", weights[number], "reward_weights")
    if not rewards and "environment.factory" not in draft.values:  # whose get_reward() is the reward
        draft.open("rewards.0.source", "rewards.py:score", REWARD)


def _moved(source: object, file: str) -> str:
    return f"{file}:" + (re.sub(r"\W+", "_", str(source).rpartition(".")[2]).strip("_") or "score")


def _rows_of_trl(kind: Kind) -> dict[str, Sequence[Any]]:
    tables = ("PPOConfig" if kind == "ppo" else "GRPOConfig", "TrainingArguments", "scripts")
    return {name: row for table in tables for name, row in foreign_fields()[table].items()}


def _of_trl(draft: Draft) -> None:
    draft.put("step.algorithm", draft.kind, note=f"{draft.kind.upper()}Config")
    if isinstance(more := draft.take("model_init_kwargs"), dict):
        draft.given |= more
    draft.same(_rows_of_trl(draft.kind))
    if draft.kind == "ppo":
        if (token := draft.take("stop_token_id")) is not None:
            draft.put("sampling.stop", [token], "stop_token_id")
        if draft.take("stop_token") != "eos":
            draft.put("sampling.eos", value=False, note="without stop_token a response has response_length tokens")
    else:
        draft.put("trainer.learning_rate", draft.take("learning_rate", 1e-6), "learning_rate")
        _loss_of_trl(draft)
        _engine_of_trl(draft)
    _run_of_trl(draft, _batch_of_trl(draft))
    _models_of_trl(draft)
    _data_of_trl(draft)


def _loss_of_trl(draft: Draft) -> None:
    name, level = draft.take("loss_type", "dapo"), draft.take("importance_sampling_level", "token")
    scale = draft.take("scale_rewards", "group")
    if level == "sequence" or name == "luspo":
        draft.put("step.algorithm", "gspo", "importance_sampling_level", "loss_type")
        high = draft.take("epsilon_high") or draft.take("epsilon", 0.2)
        draft.put("algorithm.clip_high", high, "epsilon_high", "epsilon")
    elif scale in {"none", False}:
        draft.put("step.algorithm", "dr_grpo", "scale_rewards")
        draft.put("algorithm.kl_in", "loss", note="as in TRL")
        draft.put("algorithm.kl_estimator", "k3", note="as in TRL")
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
    more = draft.take("generation_kwargs")
    for theirs in ("min_new_tokens", "stop_strings") if isinstance(more, dict) else ():
        if theirs in more:
            draft.put(f"sampling.{theirs}", more.pop(theirs), note="generation_kwargs")
    if more:
        draft.lose(foreign_fields()["GRPOConfig"]["generation_kwargs"][1], f"generation_kwargs = {more}")


def _engine_of_trl(draft: Draft) -> None:
    if not draft.take("use_vllm", default=False):
        if idle := [name for name in draft.given if name.startswith("vllm_")]:
            draft.lose("use_vllm is off", *idle)
            draft.seen.update(idle)
        return
    if draft.take("vllm_mode", "colocate") == "server":
        draft.put("models.engine", "vllm", "vllm_mode")
        host, port = draft.take("vllm_server_host", "127.0.0.1"), draft.take("vllm_server_port", 8000)
        url = draft.take("vllm_server_base_url", f"http://{host}:{port}")
        draft.put("vllm.urls", [url], "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
    else:
        draft.put("models.engine", "auto", "use_vllm")
        draft.put("vllm.gpu_memory_utilization", draft.take("vllm_gpu_memory_utilization", 0.3), "use_vllm")
        for name, ours in (("tensor_parallel_size", "tensor_parallel_size"), ("max_model_length", "max_model_len")):
            if (value := draft.take(f"vllm_{name}")) is not None:
                draft.put(f"vllm.{ours}", value, f"vllm_{name}")
    prefix = "vllm_importance_sampling"
    mode = draft.take(f"{prefix}_mode", "")
    if not draft.take(f"{prefix}_correction", default=True):
        mode = "none"
    if not mode:
        return  # importance weights of tokens are truncated where vLLM decodes, unless others are asked for
    chosen = {"token_truncate": "truncated", "token_mask": "mask", "none": "none"}.get(mode, "mask_sequence")
    draft.put("algorithm.is_correction", chosen, f"{prefix}_mode")
    if chosen in {"truncated", "mask"}:
        key = "algorithm.is_cap" if chosen == "truncated" else "algorithm.is_high"
        draft.put(key, draft.take(f"{prefix}_clip_max", 3.0), f"{prefix}_clip_max")


def _batch_of_trl(draft: Draft) -> int:
    rows, passes = draft.whole("per_device_train_batch_size", 8, 1), draft.whole("gradient_accumulation_steps", 1, 1)
    processes = draft.whole("num_processes", 1, 1)
    names = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    if "num_processes" not in draft.given:
        draft.lose("a batch is counted for one process: multiply step.batch by their number", "num_processes")
    epochs, most, each = draft.number("num_train_epochs", 3.0), draft.whole("max_steps", -1), 1
    if draft.kind == "ppo":
        draft.put("step.batch", batch := rows * passes * processes, *names, "num_processes")
        if total := draft.whole("total_episodes", 0):
            draft.put("run.steps", math.ceil(total / batch), "total_episodes")
    else:
        samples, several = draft.whole("num_generations", 8, 1), draft.whole("steps_per_generation", passes, 1)
        completions = draft.whole("generation_batch_size", rows * processes * several, 1)
        names += ["generation_batch_size", "steps_per_generation", "num_generations"]
        draft.put("step.batch", math.ceil(completions / samples), *names)
        if completions % samples:
            draft.lose(f"{completions} completions are no whole groups of {samples}: step.batch rounds up", "a batch")
        if (minibatches := completions // (rows * processes * passes)) > 1:
            draft.put("trainer.minibatches", minibatches, *names[1:-1])
        each = max(minibatches, 1) * draft.whole("num_iterations", 1, 1)
        if most > 0:
            draft.put("run.steps", math.ceil(most / each), "max_steps")
    if "run.steps" not in draft.values:
        _until_the_data_ends(draft, epochs, "num_train_epochs")
    return each


def _run_of_trl(draft: Draft, each: int) -> None:
    if output := draft.take("output_dir"):
        path = PurePosixPath(str(output))
        draft.put("run.name", _name(path.name), "output_dir")
        if str(path.parent) != ".":
            draft.put("run.directory", str(path.parent), "output_dir")
    strategy, every = draft.take("save_strategy", "steps"), draft.take("save_steps", 500)
    if strategy in {"steps", "no"} and isinstance(every, int):
        draft.put(
            "run.checkpoint_every", 0 if strategy == "no" else max(every // each, 1), "save_strategy", "save_steps"
        )
    else:
        draft.lose("checkpoints are written by steps (see run.checkpoint_every)", "save_strategy, save_steps")
    _trackers(draft, "report_to")
    betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
    if betas != [0.9, 0.999]:
        draft.put("trainer.betas", betas, "adam_beta1", "adam_beta2")
    steps, ratio = draft.number("warmup_steps", 0), draft.number("warmup_ratio", 0.0)
    _warm_up(draft, steps if steps >= 1 else 0, ratio or steps, "warmup_ratio" if ratio else "warmup_steps")


def _models_of_trl(draft: Draft) -> None:
    names = ("sft_model_path", "<policy>", "model_name_or_path")
    if named := [name for name in names if isinstance(draft.take(name), str)]:
        note = "the trainer's argument" if named[0] == "<policy>" else named[0]
        draft.put("models.policy", policy := draft.given[named[0]], note=note)
    else:
        draft.open("models.policy", policy := "policy", "directory or hub name of the model to train")
    for role in ("reference", "critic"):
        if isinstance(model := draft.take(f"<{role}>"), str) and model != policy:
            draft.put(f"models.{role}", model, note="the trainer's argument")
    dtype = draft.take("dtype") or draft.take("torch_dtype", "auto")
    if draft.take("fp16", default=False):
        dtype = "float16"
    elif not draft.take("bf16", default=True):
        dtype = "float32"
    if dtype != "auto":
        draft.put("models.dtype", str(dtype).removeprefix("torch."), "dtype", "torch_dtype", "fp16", "bf16")
    if (attention := draft.take("attn_implementation", "sdpa")) == "eager":
        draft.put("models.attention", "eager", "attn_implementation")
    elif attention != "sdpa":
        draft.lose("attention is SDPA (see models.attention)", f"attn_implementation = {attention}")
    rank, alpha = draft.take("lora_r", 16), draft.take("lora_alpha", 32)
    if draft.take("use_peft", default=False):
        draft.put("models.lora_rank", rank, "lora_r")
        draft.put("models.lora_alpha", alpha, "lora_alpha")
    if draft.take("tools"):
        draft.lose("functions that the policy calls (see environment.tools)", "tools")
    if factory := draft.take("environment_factory"):
        several = factory if isinstance(factory, dict) else {"": factory}
        moved = {str(name): _moved(each, "environments.py") for name, each in several.items()}
        told = f"move {', '.join(map(str, several.values()))} into a file, as it is"
        draft.open("environment.factory", moved.get("", moved), told)
        if (most := draft.take("max_tool_calling_iterations")) is not None:
            draft.put("environment.max_turns", most, "max_tool_calling_iterations")
    named = ["reward_model_path", "<reward>", "reward_model_name_or_path", "reward_funcs"]
    given = [value if isinstance(value, list) else [value] for value in map(draft.given.get, named)]
    draft.seen.update(named)
    rewards = [each for value in given for each in value if each is not None]
    _rewards(draft, rewards[:1] if draft.kind == "ppo" else rewards, draft.take("reward_weights", []))


def _data_of_trl(draft: Draft) -> None:
    name, subset = draft.take("dataset_name"), draft.take("dataset_config")
    training, held_out = draft.take("dataset_train_split", "train"), draft.take("dataset_test_split", "test")
    named = {"path": name, "subset": subset} if name else {}
    _source(draft, "data.prompts", draft.take("<data>", {**named, "split": training}))
    if (longest := draft.take("max_prompt_length")) is not None:  # of an older TRL
        draft.put("data.max_prompt_tokens", longest, "max_prompt_length")
        draft.put("data.over_long", "truncate", "max_prompt_length")
    own, every = draft.take("<eval>", {**named, "split": held_out}), draft.take("eval_steps")
    if draft.take("eval_strategy", "no") != "no":
        _source(draft, "eval.prompts", own)
        if isinstance(every, int):
            draft.put("eval.every", every, "eval_steps")


def _source(draft: Draft, key: str, source: Mapping[str, object]) -> None:
    if "path" not in source:
        draft.open(key, "prompts.jsonl", "a .jsonl, .csv or .parquet file with a column `prompt`, or a hub's dataset")
        return
    table = {name: value for name, value in source.items() if value and (name, value) != ("split", "train")}
    draft.put(key, table["path"] if len(table) == 1 else [table], "dataset_name", note="the dataset")


ESTIMATORS: Final = {"gae": "ppo", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp"}
KLS: Final = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def _of_verl(draft: Draft) -> None:
    name = draft.take("algorithm.adv_estimator", "gae")
    if name not in ESTIMATORS:
        raise ConfigError(
            f"algorithm.adv_estimator = {name!r}: expected one of {', '.join(ESTIMATORS)}; another one is an algorithm "
            "of your own (step.algorithm)"
        )
    algorithm, long = ESTIMATORS[name], draft.take("reward_model.overlong_buffer.enable", default=False)
    if algorithm == "grpo":
        dynamic = draft.given.get("algorithm.filter_groups.enable") or long
        scaled = draft.take("algorithm.norm_adv_by_std_in_grpo", default=True)
        algorithm = "dapo" if dynamic else "grpo" if scaled else "dr_grpo"
    draft.put("step.algorithm", algorithm, "algorithm.adv_estimator")
    draft.same(foreign_fields()["verl"])
    if not long:
        draft.put("algorithm.long_buffer", 0, "reward_model.overlong_buffer.enable")
    draft.put("trainer.eps", 1e-8)
    draft.put("run.metric_names", "verl", note="verl's names")
    _trackers(draft, "trainer.logger")
    _loss_of_verl(draft)
    _kl_of_verl(draft)
    _batch_of_verl(draft)
    _models_of_verl(draft)
    _data_of_verl(draft)


def _loss_of_verl(draft: Draft) -> None:
    mode = draft.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    gates, bound = [draft.take(f"{ACTOR}.tau_pos", 1.0), draft.take(f"{ACTOR}.tau_neg", 1.05)], draft.values
    if (both := draft.take(f"{ACTOR}.clip_ratio")) is not None:
        for key, name in (("clip", "clip_ratio_low"), ("clip_high", "clip_ratio_high")):
            if f"{ACTOR}.{name}" not in draft.given:
                draft.put(f"algorithm.{key}", both, f"{ACTOR}.clip_ratio")
    if mode == "gspo":
        draft.put("step.algorithm", "gspo", f"{ACTOR}.policy_loss.loss_mode")
    elif mode in {"cispo", "sapo", "dppo_tv"}:
        draft.put("algorithm.surrogate", mode, f"{ACTOR}.policy_loss.loss_mode")
    else:
        draft.put("algorithm.surrogate", "dual_clip", note="verl's vanilla loss")
        if mode != "vanilla":
            draft.lose("a loss of your own (see step.loss)", f"{ACTOR}.policy_loss.loss_mode = {mode}")
    if bound.get("algorithm.surrogate", ("",))[0] != "dual_clip":
        bound.pop("algorithm.dual_clip", None)
    if mode == "sapo":
        draft.put("algorithm.gates", gates, f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg")
        del bound["algorithm.clip"], bound["algorithm.clip_high"]
    draft.put("algorithm.value_coefficient", 1.0, note="verl's critic has a loss of its own")
    place = "algorithm.rollout_correction"
    weights, cap = draft.take(f"{place}.rollout_is"), draft.number(f"{ACTOR}.tis_imp_ratio_cap", -1)
    if (kind := {"token": "truncated", "sequence": "truncated_sequence"}.get(str(weights))) or cap > 0:
        draft.put("algorithm.is_correction", kind or "truncated", f"{place}.rollout_is", f"{ACTOR}.tis_imp_ratio_cap")
        cap = cap if cap > 0 else draft.number(f"{place}.rollout_is_threshold", 2.0)
        draft.put("algorithm.is_cap", cap, f"{place}.rollout_is_threshold", f"{ACTOR}.tis_imp_ratio_cap")
    elif weights:
        draft.lose(
            "weights are by token or by rollout (see algorithm.is_correction)", f"{place}.rollout_is = {weights}"
        )


def _kl_of_verl(draft: Draft) -> None:
    control = "algorithm.kl_ctrl"
    # scripts of 2024 gave the coefficient of the reward alone: there was no switch
    old = f"{control}.kl_coef" in draft.given and f"{ACTOR}.use_kl_loss" not in draft.given
    in_reward = draft.take("algorithm.use_kl_in_reward", old)
    in_loss = draft.take(f"{ACTOR}.use_kl_loss", default=False)
    reward, loss = f"{control}.kl_coef", f"{ACTOR}.kl_loss_coef"
    of_reward = draft.take(reward, 0.001), draft.take("algorithm.kl_penalty", "kl"), reward
    of_loss = draft.take(loss, 0.001), draft.take(f"{ACTOR}.kl_loss_type", "low_var_kl"), loss
    adapts = draft.take(f"{control}.type", "fixed") == "adaptive"
    target, horizon = draft.take(f"{control}.target_kl", 0.1), draft.take(f"{control}.horizon", 10_000)
    if not (in_reward or in_loss):
        draft.put("algorithm.kl", 0.0, "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss")
        return
    if in_reward and in_loss:
        draft.lose("there is one KL penalty: that in the loss is left out", f"{ACTOR}.use_kl_loss")
    place = "reward" if in_reward else "loss"
    if in_reward and draft.algorithm in {"grpo", "dapo", "gspo"}:
        draft.lose("where scores are standardised the KL is in the loss", "algorithm.use_kl_in_reward")
        place = "loss"
    coefficient, kind, name = of_reward if in_reward else of_loss
    estimator = KLS.get(str(kind).rstrip("+"), "k3")
    if place == "loss" and estimator == "k1":
        estimator = "k2"  # whose gradient is the KL's; that of k1 is zero in expectation
    draft.put("algorithm.kl", coefficient, name)
    draft.put("algorithm.kl_in", place, "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss")
    draft.put("algorithm.kl_estimator", estimator, note=f"verl's {kind}")
    if adapts and place == "reward":
        draft.put("algorithm.kl_target", target, f"{control}.target_kl")
        draft.put("algorithm.kl_horizon", horizon, f"{control}.horizon")


def _batch_of_verl(draft: Draft) -> None:
    batch, samples = draft.whole("data.train_batch_size", 1024), draft.whole(f"{ROLLOUT}.n", 1)
    mini, size = draft.whole(f"{ACTOR}.ppo_mini_batch_size", 256), f"{ACTOR}.ppo_max_token_len_per_gpu"
    draft.put("algorithm.samples", samples, f"{ROLLOUT}.n")
    if mini > 0 and batch % mini == 0:
        draft.put("trainer.minibatches", batch // mini, "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    else:
        draft.lose(f"minibatches of one size divide the {batch} prompts of a batch", f"{ACTOR}.ppo_mini_batch_size")
    tokens = draft.take(size, 16_384)
    if draft.take(f"{ACTOR}.use_dynamic_bsz", default=False):
        draft.put("trainer.micro_batch_tokens", tokens, size)
    epochs = draft.number("trainer.total_epochs", 30)
    if total := draft.whole("trainer.total_training_steps", 0):
        draft.put("run.steps", total, "trainer.total_training_steps")
    else:
        _until_the_data_ends(draft, epochs, "trainer.total_epochs")
    steps, ratio = draft.number(f"{ACTOR}.optim.lr_warmup_steps", -1), f"{ACTOR}.optim.lr_warmup_steps_ratio"
    _warm_up(draft, max(steps, 0), draft.number(ratio, 0.0), ratio if steps < 0 else f"{ACTOR}.optim.lr_warmup_steps")


def _models_of_verl(draft: Draft) -> None:
    if isinstance(policy := draft.take(f"{MODEL}.path"), str):
        draft.put("models.policy", policy, f"{MODEL}.path")
    else:
        draft.open("models.policy", "policy", "directory or hub name of the model to train")
    if isinstance(critic := draft.take("critic.model.path"), str):
        draft.put("models.critic", critic, "critic.model.path")
    alpha = draft.take(f"{MODEL}.lora_alpha", 16)
    if draft.take(f"{MODEL}.lora_rank", 0):
        draft.put("models.lora_alpha", alpha, f"{MODEL}.lora_alpha")
    found: list[object] = []
    for place, last in (("reward_model", "model.path"), ("reward.reward_model", "model_path")):
        model = draft.take(f"{place}.{last}")
        if draft.take(f"{place}.enable", default=False) and model:
            found.append(model)
    _rewards(draft, found[:1])
    for place in ("custom_reward_function", "reward.custom_reward_function"):
        file, name = draft.take(f"{place}.path"), draft.take(f"{place}.name", "compute_score")
        if file and found:
            draft.lose("rewards are a list, whose weighted sum is the score: add it", f"{place}.path = {file}")
        elif file:
            told = "let it take prompts, completions and the columns that it names, and return a score for each"
            draft.open("rewards.0.source", f"{file}:{name}", told)
    if not found and draft.values["rewards.0.source"][0] == "rewards.py:score":
        draft.blank["rewards.0.source"] = f"verl chooses a checker by the column data_source; here it is {REWARD}"
    engine = draft.take(f"{ROLLOUT}.name", "vllm")
    names = {"gpu_memory_utilization": "", "max_model_len": "", "tensor_parallel_size": "tensor_model_parallel_size"}
    given = {name: draft.take(f"{ROLLOUT}.{theirs or name}") for name, theirs in names.items()}
    if engine not in {"vllm", "hf"}:
        draft.lose("models.engine is vLLM or transformers", f"{ROLLOUT}.name = {engine}")
    if engine == "vllm":
        draft.put("models.engine", "auto", f"{ROLLOUT}.name")
        for name, value in given.items():
            if value is not None:
                draft.put(f"vllm.{name}", value, f"{ROLLOUT}.{names[name] or name}")


def _data_of_verl(draft: Draft) -> None:
    _files(draft, "data.prompts", "data.train_files")
    every = draft.whole("trainer.test_freq", -1)
    if every > 0:
        _files(draft, "eval.prompts", "data.val_files")
        draft.put("eval.every", every, "trainer.test_freq")
    elif draft.take("data.val_files"):
        draft.lose("nothing is evaluated where trainer.test_freq is not above 0", "data.val_files")
    long, filtered = draft.take("data.truncation", "error"), draft.take("data.filter_overlong_prompts", default=False)
    if not filtered and long not in {"error", "left"}:
        draft.lose("a prompt that is cut keeps its end (see data.over_long)", f"data.truncation = {long}")
    chosen = "filter" if filtered else "error" if long == "error" else "truncate"
    draft.put("data.over_long", chosen, "data.filter_overlong_prompts", "data.truncation")


def _files(draft: Draft, key: str, name: str) -> None:
    given = draft.take(name)
    files = [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)]
    if files:
        draft.put(key, files[0] if len(files) == 1 else files, name)
    else:
        draft.open(key, "prompts.jsonl", "a .jsonl, .csv or .parquet file, or a hub's dataset")


def _at(document: Mapping[str, Any], key: str) -> object:
    table: Any = document
    for name in key.split("."):
        if isinstance(table, list):
            table = table[int(name)] if int(name) < len(table) else {}
        else:
            table = table.get(name) if isinstance(table, dict) else None
    return table


def _rendered(
    document: Mapping[str, Any],
    notes: Mapping[str, str],
    blank: Mapping[str, str],
    lost: Mapping[str, Sequence[str]],
    origin: str,
) -> str:
    lines = [f"# Converted from {_printable(origin)}."]
    lines += ["", "# To fill in:", *(f"# - {key}: {what}" for key, what in blank.items())] if blank else []
    reasons = [_printable(f"# - {', '.join(names)}: {reason}") for reason, names in lost.items()]
    lines += ["", "# Not carried over:", *reasons] if lost else []
    for section in Settings.model_fields:
        given = document.get(section) or []
        for number, table in enumerate(given if isinstance(given, list) else [given]):
            place = f"{section}.{number}" if given is not table else section
            lines += ["", f"[[{section}]]" if given is not table else f"[{section}]"]
            told = {key: f"  # {notes[name]}" if (name := f"{place}.{key}") in notes else "" for key in table}
            lines += [f"{_key(key)} = {_toml(value)}{_printable(told[key])}" for key, value in table.items()]
    return "\n".join([*lines, ""])


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_toml(each)}' for key, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"k": value})[4:].strip()


def _key(key: object) -> str:
    return tomli_w.dumps({str(key): 0}).rpartition(" = ")[0]
