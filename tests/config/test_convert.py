"""Configurations of TRL and verl: what each becomes, what is named as lost, and that a run takes it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

from oppo.cli import UNUSABLE, main
from oppo.config.convert import Converted, convert
from oppo.config.convert_files import Kind, foreign_fields, literal, ours
from oppo.config.load import at, resolve
from oppo.errors import ConfigError
from tests.config.test_refusals import entries
from tests.kit.workplace import furnish, rewritten

FOREIGN = Path(__file__).with_name("foreign")
FILES = ["trl_ppo.sh", "trl_grpo.py", "trl_grpo.yaml", "verl_ppo.sh", "verl_grpo.yaml"]
FILES += ["openrlhf_grpo.sh"]
HERE = {
    "trl_ppo.sh": ["run.track=[]"],
    "trl_grpo.py": ["data.prompts=prompts.jsonl", "data.chat_template_kwargs={}"],
    "verl_ppo.sh": ["run.track=[]"],
    "openrlhf_grpo.sh": ["run.track=[]", "models.lora_rank=2", "sampling.max_new_tokens=8", "algorithm.long_buffer=2"],
}
"""What a user would change for the folder of the tests."""


def lost(converted: Converted) -> set[str]:
    return {name.partition(" = ")[0] for names in converted.lost.values() for name in names}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("workplace"))
    (folder / "rewards.py").write_text(
        "def short(prompts, completions):\n    return [-len(c) / 10 for c in completions]\n"
    )
    return folder


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_is_accepted_by_a_dry_run(
    name: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = workplace / f"{name}.toml"
    given = [part for each in [*HERE.get(name, []), "run.cores=1"] for part in ("--set", each)]
    assert main(["convert-config", str(FOREIGN / name), str(written), *given]) == 0, capsys.readouterr().err
    document = tomllib.loads(written.read_text())
    assert document == convert(FOREIGN / name, overrides=given[1::2]).document
    assert main(["train", str(written), "--dry-run"]) == 0, capsys.readouterr().err
    assert "prompt" in capsys.readouterr().out


def test_a_command_of_ppo_keeps_its_numbers_and_those_that_trl_would_have_taken() -> None:
    converted = convert(FOREIGN / "trl_ppo.sh")
    found = converted.document
    assert (found["step"]["algorithm"], found["step"]["batch"], found["run"]["steps"]) == ("ppo", 16, 10)
    assert found["run"] | {"name": "tldr", "directory": "models/minimal"} == found["run"]
    assert found["models"] == {"policy": "./actor", "dtype": "bfloat16"}
    assert found["data"] == {"prompts": "prompts.jsonl", "over_long": "error", "drop_last": True}
    assert found["rewards"] == [{"source": "./reward"}]
    assert found["sampling"] == {"max_new_tokens": 53, "temperature": 0.7, "eos": True}
    assert found["trainer"] == {
        "schedule": "linear",
        "warmup_steps": 0.1,
        "eps": 1e-8,
        "gradient_checkpointing": 1,
        "learning_rate": 3e-6,
    }
    idle = {"dataset_test_split", "model_name_or_path"}
    assert lost(converted) == {"local_rollout_forward_batch_size", "report_to", *idle}
    assert "# sft_model_path" in converted.text
    assert "TRL's default" in converted.text


def test_without_a_stop_token_trl_writes_responses_of_one_length(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python ppo.py --sft_model_path ./a --response_length 9")
    assert convert(tmp_path / "run.sh").document["sampling"] == {"max_new_tokens": 9, "temperature": 0.7, "eos": False}


def test_a_call_in_a_script_is_read_with_the_values_of_its_names() -> None:
    converted = convert(FOREIGN / "trl_grpo.py")
    found = converted.document
    assert (found["step"], found["run"]["steps"]) == ({"algorithm": "dr_grpo", "batch": 8}, 20)
    assert found["trainer"]["minibatches"] == 2
    assert found["algorithm"] == {"samples": 4, "kl": 0.04, "kl_in": "loss", "kl_estimator": "k2"} | {
        key: value for key, value in found["algorithm"].items() if key == "aggregation"
    }
    adapters = {"lora_rank": 2, "lora_alpha": 4, "lora": {"target_modules": ["q_proj"]}}
    assert found["models"] == {"policy": "./actor", "dtype": "bfloat16", **adapters}
    assert found["rewards"] == [
        {"source": "rewards.py:short", "name": "short", "weight": 1.0},
        {"source": "./reward", "name": "reward", "weight": 0.5},
    ]
    assert converted.blank.keys() == {"rewards.0.source"}
    assert found["data"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert lost(converted) == {"`map` of the dataset", "num_processes", "max_grad_norm", "lora_dropout"}


PPO_SCRIPT = """
args = PPOConfig(sft_model_path="./sft", reward_model_path="./reward", output_dir="out")
policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path)
value = AutoModelForSequenceClassification.from_pretrained(args.reward_model_path, num_labels=1)
data = load_dataset("json", data_files={files})["train"]
trainer = PPOTrainer(args, model=policy, ref_model=policy, reward_model=value, value_model=value, train_dataset=data)
"""


@pytest.mark.parametrize("files", ['"rows.jsonl"', '["rows.jsonl"]', '{"train": "rows.jsonl", "test": "held.jsonl"}'])
def test_files_and_models_are_what_the_program_names_by_its_configuration(files: str, tmp_path: Path) -> None:
    (tmp_path / "ppo.py").write_text(PPO_SCRIPT.replace("{files}", files))
    converted = convert(tmp_path / "ppo.py")
    assert converted.document["data"]["prompts"] == "rows.jsonl"
    assert converted.document["models"]["policy"] == "./sft"
    assert converted.document["models"]["critic"] == "./reward"
    assert lost(converted) == {"num_processes"}


@pytest.mark.parametrize("name", ["reward", "reward.v2", "./reward", "owner/reward"])
def test_a_reward_model_is_no_function_whatever_its_directory_is_called(name: str, tmp_path: Path) -> None:
    script = PPO_SCRIPT.replace("{files}", '"rows.jsonl"').replace("./reward", name)
    shell = f"python -m openrlhf.cli.train_ppo_ray --pretrain sft --reward_pretrain {name} --prompt_data rows.jsonl\n"
    for file, text in (("ppo.py", script), ("ppo.sh", shell)):
        (tmp_path / file).write_text(text)
        converted = convert(tmp_path / file)
        assert converted.document["rewards"][0]["source"] == name
        assert "rewards.0.source" not in converted.blank


def test_a_value_that_a_setting_does_not_take_is_lost_with_what_it_takes() -> None:
    converted = convert(FOREIGN / "trl_grpo.yaml")
    assert converted.document["algorithm"]["surrogate"] == "sapo"
    assert converted.document["algorithm"]["gates"] == [1.0, 1.1]
    assert "schedule" not in converted.document["trainer"]
    (why,) = [each for each in converted.lines() if "lr_scheduler_type" in each]
    assert "cosine_with_restarts" in why
    assert "'linear'" in why


def test_rewards_that_trl_compares_one_by_one_are_compared_so(tmp_path: Path) -> None:
    script = tmp_path / "gdpo.yaml"
    script.write_text(
        "reward_funcs: [a.one, a.two]\nnum_generations: 4\nmulti_objective_aggregation: normalize_then_sum\n"
    )
    assert convert(script).document["algorithm"]["scale_scores"] == "each_reward"
    script.write_text(script.read_text().replace("normalize_then_sum", "sum_then_normalize"))
    assert convert(script).document["algorithm"]["scale_scores"] == "group"
    script.write_text(script.read_text().replace("sum_then_normalize", "neither"))
    assert "multi_objective_aggregation" in lost(convert(script))


def test_a_mask_and_a_distillation_of_verl_say_which_settings_are_theirs(tmp_path: Path) -> None:
    command = tmp_path / "verl.sh"
    correction, distillation = "algorithm.rollout_correction", "distillation.distillation_loss"
    given = {
        f"{correction}.bypass_mode": "False",
        f"{correction}.rollout_rs": "seq_mean_k3",
        f"{correction}.rollout_rs_threshold": "0.01",
        "distillation.enabled": "True",
        "distillation.teacher_models.teacher_model.model_path": "large",
        f"{distillation}.loss_mode": "forward_kl_topk",
        f"{distillation}.topk": "64",
    }
    command.write_text(f"python -m verl.trainer.main_ppo {' '.join(f'{key}={value}' for key, value in given.items())}")
    converted = convert(command)
    assert converted.document["algorithm"]["ratio_base"] == "proximal"
    reasons = {name.partition(" = ")[0]: why for why, names in converted.lost.items() for name in names}
    assert reasons.keys() >= given.keys() - {f"{correction}.bypass_mode"}
    assert "(see algorithm.is_k3, algorithm.is_correction)" in reasons[f"{correction}.rollout_rs"]
    assert "(see models.teacher)" in reasons["distillation.teacher_models.teacher_model.model_path"]
    assert "(see algorithm.distill_top_k)" in reasons[f"{distillation}.topk"]


SCRIPTS = entries("""
trl_grpo_vllm.sh | step.batch=8 algorithm.samples=8 trainer.minibatches=None trainer.epochs=1
    algorithm.is_correction=mask_product algorithm.is_low=0.0 algorithm.is_high=3.0 algorithm.ratio_base=proximal
    models.dtype=bfloat16 data.epochs=1 run.steps=None trainer.warmup_steps=0.03 algorithm.kl_estimator=k2
    run.checkpoint_every=50 | config_file log_completions push_to_hub
trl_rloo.sh | step.batch=32 algorithm.samples=4 trainer.minibatches=2 trainer.epochs=2 run.steps=100
    trainer.warmup_steps=10 run.checkpoint_every=25 models.dtype=float16 | unheard_of logging_steps epsilon
verl_grpo_math.sh | step.batch=1024 algorithm.samples=5 trainer.minibatches=4 trainer.epochs=1 data.epochs=15
    data.drop_last=True eval.every=5 models.policy=./actor algorithm.ratio_base=proximal algorithm.is_correction=none
    | trainer.n_gpus_per_node actor_rollout_ref.ref.fsdp_config.param_offload
verl_dapo.sh | step.algorithm=dapo step.batch=512 algorithm.samples=16 trainer.minibatches=16
    data.max_prompt_tokens=2048 sampling.max_new_tokens=20480 algorithm.long_buffer=4096
    trainer.micro_batch_tokens=22528 run.steps=200 data.epochs=1 eval.samples=4 algorithm.is_correction=truncated
    algorithm.is_cap=2.0 trainer.warmup_steps=10 | data.gen_batch_size reward_model.reward_manager trainer.resume_mode
openrlhf_ppo.sh | step.algorithm=ppo step.batch=1024 algorithm.samples=1 trainer.minibatches=8 trainer.epochs=1
    data.epochs=1 trainer.critic_learning_rate=9e-06 algorithm.kl=0.01 data.max_prompt_tokens=1024
    sampling.max_new_tokens=1024 trainer.warmup_steps=0.03 | reward.normalize_enable vllm.sync_backend
    data.max_samples actor.min_lr_ratio
openrlhf_reinforce.sh | step.algorithm=grpo algorithm.scale_scores=batch step.batch=128 algorithm.samples=8
    trainer.minibatches=1 data.epochs=20 algorithm.kl_in=loss algorithm.clip_high=0.27 algorithm.is_correction=mask
    algorithm.is_low=0.5 algorithm.is_high=5.0 rewards.0.source=reward_func.py:reward_func eval.samples=4 |
    train.full_determinism_off train.num_episodes data.label_key
openrlhf_grpo.sh | step.algorithm=dapo step.batch=128 algorithm.samples=8 trainer.minibatches=4 trainer.epochs=2
    run.seed=7 algorithm.kl=0 algorithm.long_buffer=256 | critic.freezing_steps train.micro_batch_size
""")
"""Launch scripts in the form of the trainers' own: what their settings count, and some of what is named as lost."""


@pytest.mark.parametrize(("name", "counted", "named"), SCRIPTS, ids=[name for name, *_ in SCRIPTS])
def test_a_launch_script_becomes_settings_that_count_what_it_says(
    name: str, counted: str, named: str, tmp_path: Path
) -> None:
    expected = dict(each.split("=") for each in counted.split())
    converted = convert(FOREIGN / name, overrides=["rewards.0.source=a.py:b"] if name.startswith("verl") else ())
    assert {key: str(at(converted.document, key)) for key in expected} == expected
    assert set(named.split()) <= lost(converted)
    settings = resolve(converted.document, tmp_path)
    assert settings.algorithm.responses == int(expected.get("algorithm.samples", 1))
    assert not any("1000000" in line for line in converted.text.splitlines())


@pytest.mark.parametrize(
    ("given", "expected", "named"),
    [
        ({}, ("mask_product", None, 0.0, 3.0), set()),
        ({"mode": "token_truncate"}, ("truncated", 3.0, None, None), set()),
        ({"mode": "token_truncate", "cap": 2.5}, ("truncated", 2.5, None, None), set()),
        ({"mode": "token_mask", "clip_min": 0.25, "clip_max": 4.0}, ("mask", None, 0.25, 4.0), set()),
        ({"mode": "sequence_truncate", "clip_max": 2.0}, ("truncated_sequence", 2.0, None, None), set()),
        ({"mode": "sequence_truncate", "clip_min": 0.5}, ("truncated_sequence", 3.0, None, None), {"clip_min"}),
        ({"mode": "sequence_mask", "clip_max": None}, ("mask_product", None, 0.0, None), {"clip_max"}),
        ({"correction": False}, ("none", None, None, None), set()),
        ({"mode": "other"}, (None, None, None, None), {"mode"}),
    ],
)
def test_the_correction_of_trl_for_vllm_is_kept_or_named(
    given: dict[str, object], expected: tuple[object, ...], named: set[str], tmp_path: Path
) -> None:
    prefix = "vllm_importance_sampling"
    fields = {"use_vllm": True, "model_name_or_path": "a"} | {f"{prefix}_{key}": value for key, value in given.items()}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(fields))
    converted = convert(tmp_path / "c.yaml", kind="grpo", overrides=["data.prompts=a.jsonl"])
    names = ("is_correction", "is_cap", "is_low", "is_high")
    assert tuple(converted.document["algorithm"].get(name) for name in names) == expected
    assert {name.removeprefix(f"{prefix}_") for name in lost(converted)} - {"num_processes"} == named
    assert converted.document["algorithm"]["ratio_base"] == "proximal"
    resolve(converted.document, tmp_path)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, "bfloat16"),
        ({"bf16": True, "dtype": "float32"}, "bfloat16"),
        ({"fp16": True}, "float16"),
        ({"bf16": False}, "float32"),
        ({"bf16": False, "dtype": "auto"}, "auto"),
        ({"bf16": False, "dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
@pytest.mark.parametrize("kind", ["ppo", "grpo", "rloo"])
def test_weights_have_the_type_in_which_trl_computes(
    kind: Kind, given: dict[str, object], dtype: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"learning_rate": 1e-6, **given}))
    assert convert(tmp_path / "c.yaml", kind=kind).document["models"]["dtype"] == dtype


@pytest.mark.parametrize(
    ("threshold", "level", "expected"),
    [
        ("2.5", "token", {"is_correction": "truncated", "is_cap": 2.5}),
        ("3", "sequence", {"is_correction": "truncated_sequence", "is_cap": 3}),
        ("0.5_5.0", "token", {"is_correction": "mask", "is_low": 0.5, "is_high": 5.0}),
        ("0.5_5.0", "sequence", {"is_correction": "mask_product", "is_low": 0.5, "is_high": 5.0}),
    ],
)
def test_a_correction_of_verl_has_one_bound_or_two(
    threshold: str, level: str, expected: dict[str, object], tmp_path: Path
) -> None:
    place = "algorithm.rollout_correction"
    (tmp_path / "c.sh").write_text(f"verl {place}.rollout_is={level} {place}.rollout_is_threshold={threshold}")
    found = convert(tmp_path / "c.sh").document["algorithm"]
    assert found.items() >= expected.items()


ACTOR = "actor_rollout_ref.actor"


@given(
    both=st.none() | st.floats(0.05, 0.9),
    low=st.sampled_from(["absent", "null"]) | st.floats(0.05, 0.9),
    high=st.sampled_from(["absent", "null"]) | st.floats(0.05, 0.9),
)
def test_a_bound_of_verl_goes_before_the_ratio_that_is_read_in_place_of_none(
    both: float | None, low: float | str, high: float | str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As in verl's losses: ``clip_ratio_low if clip_ratio_low is not None else clip_ratio``, of 0.2 by default."""
    chosen = {"clip_ratio": "absent" if both is None else both, "clip_ratio_low": low, "clip_ratio_high": high}
    script = tmp_path_factory.mktemp("verl") / "run.sh"
    script.write_text(
        "python -m verl.trainer.main_ppo data.train_batch_size=1024 "
        + " ".join(f"{ACTOR}.{name}={value}" for name, value in chosen.items() if value != "absent")
    )
    theirs = {name: 0.2 if value == "absent" else None if value == "null" else value for name, value in chosen.items()}
    expected = [theirs[name] if theirs[name] is not None else theirs["clip_ratio"] for name in list(chosen)[1:]]
    converted = convert(script, overrides=["models.policy=a", "data.prompts=a.jsonl"])
    algorithm = resolve(converted.document, script.parent).algorithm
    clip, clip_high = (getattr(algorithm, name) for name in ("clip", "clip_high"))
    assert [clip, clip if clip_high is None else clip_high] == expected
    assert (f"{ACTOR}.clip_ratio" in lost(converted)) == (both is not None and "null" not in (low, high))


@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        ("verl", {f"{ACTOR}.router_replay.mode": "R3"}, set()),
        ("verl", {f"{ACTOR}.router_replay.mode": "R3", f"{ACTOR}.tis_imp_ratio_cap": 2.0}, {"tis_imp_ratio_cap"}),
        ("verl", {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio_c": 10.0}, {"clip_ratio_c"}),
        ("grpo", {"lora_target_modules": ["q_proj"]}, {"lora_target_modules"}),
        ("grpo", {"reward_funcs": "a.b", "multi_objective_aggregation": "normalize_then_sum"}, set()),
        ("openrlhf", {"algo.kl.target": 0.1, "algo.kl.use_loss": True}, {"target"}),
        ("openrlhf", {"algo.kl.target": 0.1, "algo.kl.init_coef": 0}, {"target"}),
        ("openrlhf", {"actor.dual_clip": 3.0, "actor.policy_loss_type": "gspo"}, {"dual_clip"}),
        ("openrlhf", {"data.max_samples": 9}, {"clip_range"}),
    ],
)
def test_a_field_without_effect_beside_the_others_is_named_and_the_settings_are_taken(
    kind: Kind, given: dict[str, object], named: set[str], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(given))
    converted = convert(tmp_path / "c.yaml", kind=kind, overrides=["models.policy=a", "data.prompts=a.jsonl"])
    assert named <= {name.rpartition(".")[2] for name in lost(converted)}
    resolve(converted.document, tmp_path)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("$((1024 * 2))", 2048), ("$(( (A + 4) * 2 ))", 24), ("$(($A/3))", 2), ("$((A-1))", 7), ("$((A**2))", None)],
)
def test_the_shell_s_arithmetic_is_computed_or_named(expression: str, value: int | None, tmp_path: Path) -> None:
    (tmp_path / "c.sh").write_text(
        f"A=8\nn={expression}\npython -m verl.trainer.main_ppo data.max_response_length=$n\n"
    )
    converted = convert(tmp_path / "c.sh")
    assert converted.document["sampling"]["max_new_tokens"] == (value or 512)
    assert ("data.max_response_length" in lost(converted)) == (value is None)


def test_overrides_of_verl_are_read_with_their_variables() -> None:
    converted = convert(FOREIGN / "verl_ppo.sh")
    found = converted.document
    assert found["models"] == {"policy": "./actor", "critic": "./reward", "engine": "auto"}
    assert (found["data"]["prompts"], found["eval"]["every"]) == ("prompts.jsonl", 5)
    assert found["algorithm"] == found["algorithm"] | {
        "kl": 0.001,
        "kl_in": "reward",
        "lam": 1.0,
        "value_clip": 0.5,
        "surrogate": "dual_clip",
    }
    assert found["trainer"] == found["trainer"] | {"minibatches": 2, "epochs": 1, "critic_learning_rate": 1e-5}
    assert found["run"]["name"] == "actor-of-0.5B"
    assert found["vllm"] == {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.6}
    assert (found["trainer"]["warmup_steps"], "steps" in found["run"], found["data"]["epochs"]) == (0.1, False, 15)
    assert found["step"]["batch"] == 8
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload"
    assert lost(converted) >= {"trainer.n_gpus_per_node", "trainer.project_name", offload}
    assert any("placement.trainer" in reason for reason in converted.lost)


def test_a_limit_of_prompts_in_an_older_script_of_trl_cuts_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer(args=GRPOConfig(max_prompt_length=256))\n")
    assert convert(script).document["data"].items() >= {"max_prompt_tokens": 256, "over_long": "truncate"}.items()


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "grpo"])
def test_a_batch_of_verl_counts_prompts_and_their_responses_apart(estimator: str, tmp_path: Path) -> None:
    chosen = {"algorithm.adv_estimator": estimator, "data.train_batch_size": 64, "algorithm.gamma": 0.99}
    chosen |= {"actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 16}
    script = tmp_path / "train.sh"
    script.write_text("python3 -m verl.trainer.main_ppo " + " ".join(f"{key}={value}" for key, value in chosen.items()))
    found = convert(script).document
    assert (found["step"]["batch"], found["algorithm"]["samples"], found["trainer"]["minibatches"]) == (64, 4, 4)
    assert found["algorithm"].get("gamma") == (None if estimator == "grpo" else 0.99), "which verl's grpo does not read"


def test_a_resolved_configuration_of_verl_is_read_with_its_references() -> None:
    found = convert(FOREIGN / "verl_grpo.yaml").document
    assert found["run"] == found["run"] | {"steps": 3, "directory": "checkpoints/grpo", "checkpoint_every": 0}
    assert found["algorithm"] == found["algorithm"] | {
        "samples": 4,
        "clip_high": 0.28,
        "aggregation": "constant",
        "kl": 0.01,
        "kl_in": "loss",
        "kl_estimator": "k3",
    }
    assert found["rewards"] == [{"source": "rewards.py:short"}]
    assert found["models"]["engine"] == "transformers"
    assert found["data"]["over_long"] == "truncate"


@pytest.mark.parametrize(
    ("given", "written", "told"),
    [
        ("Guessing", "environments.py:Guessing", "move Guessing into a file, as it is"),
        (
            '{"guess": Guessing, "sum": sums}',
            {"guess": "environments.py:Guessing", "sum": "environments.py:sums"},
            "move Guessing, sums into a file, as it is",
        ),
    ],
)
def test_a_factory_of_environments_is_named_as_a_file_will_have_it(
    tmp_path: Path, given: str, written: object, told: str
) -> None:
    (tmp_path / "run.py").write_text(
        "from games import sums\nclass Guessing: ...\n"
        f"GRPOTrainer(args=GRPOConfig(max_tool_calling_iterations=5), model='a', environment_factory={given})"
    )
    converted = convert(tmp_path / "run.py", overrides=["data.prompts=mine.jsonl"])
    assert converted.document["environment"] == {"factory": written, "max_turns": 5}
    assert converted.blank == {"environment.factory": told}
    assert "rewards" not in converted.document
    assert resolve(converted.document, tmp_path).environment.max_turns == 5
    (tmp_path / "run.py").write_text("GRPOTrainer(args=GRPOConfig(), environment_factory=partial(Guessing, 3))")
    assert "environment_factory" in lost(convert(tmp_path / "run.py"))


@pytest.mark.parametrize(
    ("given", "sources"),
    [
        ("'rm'", ["rm"]),
        ("['rm', './other']", ["rm", "./other"]),
        ("[exact, 'rm']", ["rewards.py:exact", "rm"]),
        ("loaded", ["rm"]),
        ("[made()]", ["rewards.py:made"]),
    ],
)
def test_a_text_among_the_rewards_of_a_program_is_a_model(tmp_path: Path, given: str, sources: list[str]) -> None:
    (tmp_path / "run.py").write_text(
        "from mine import exact\nloaded = AutoModelForSequenceClassification.from_pretrained('rm')\n"
        f"GRPOTrainer(args=GRPOConfig(), model='a', reward_funcs={given})"
    )
    converted = convert(tmp_path / "run.py", overrides=["data.prompts=mine.jsonl"])
    assert [reward["source"] for reward in converted.document["rewards"]] == sources
    assert len(converted.blank) == sum(source.startswith("rewards.py") for source in sources)


def test_a_file_that_names_no_model_says_what_to_fill_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.py").write_text("GRPOTrainer(args=GRPOConfig(num_generations=4), model=model, reward_funcs=f)")
    assert main(["convert-config", str(tmp_path / "run.py"), str(tmp_path / "config.toml")]) == 0
    told = capsys.readouterr().err
    assert all(f"fill in {key}" in told for key in ("models.policy", "data.prompts", "rewards.0.source"))
    assert "# - models.policy:" in (tmp_path / "config.toml").read_text()
    converted = convert(tmp_path / "run.py", overrides=["models.policy=mine", "data.prompts=mine.jsonl"])
    assert converted.blank.keys() == {"rewards.0.source"}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.py", "parser = HfArgumentParser((PPOConfig,))\nPPOTrainer(args=args)", "command line"),
        ("a.py", "PPOConfig()\nPPOConfig()", "at line 2"),
        ("a.py", "x = 1", "none"),
        ("a.py", "x = (", "no Python"),
        ("a.yaml", "- 1", "holds no fields but .1.: expected `field: value`"),
        ("a.yaml", "", "holds nothing: expected `field: value`"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "learning_rate: 1", "--kind"),
        ("a.sh", "echo 'unclosed", "shell script"),
        ("a.sh", "echo nothing", "configures nothing"),
        ("a.sh", "python -m verl algorithm.adv_estimator=remax", "'remax'"),
        ("a.sh", "trl grpo --num_generations many", "num_generations: expected a number, got 'many'"),
    ],
)
def test_what_cannot_be_converted_says_what_was_expected(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=told):
        convert(tmp_path / name)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("mine")
    arguments = ["convert-config", str(FOREIGN / "trl_ppo.sh"), str(tmp_path / "config.toml")]
    assert main(arguments) == UNUSABLE
    assert "there already" in capsys.readouterr().err
    assert (tmp_path / "config.toml").read_text() == "mine"
    assert main([*arguments[:2], str(tmp_path / "gone" / "config.toml")]) == UNUSABLE
    assert "CONFIG names a file to write in a directory that is there, and " in capsys.readouterr().err


def test_settings_that_contradict_each_other_are_written_and_named(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("trl grpo --num_generations 4 --temperature 0 --model_name_or_path ./a")
    converted = convert(tmp_path / "run.sh")
    with pytest.raises(ConfigError, match="is written, and `oppo train` refuses it until"):
        converted.check(tmp_path / "config.toml")


@pytest.mark.parametrize("engine", ["auto", "vllm"])
@pytest.mark.parametrize(
    ("given", "installed", "told"),
    [
        ("vllm.gpu_memory_utilisation=0.3", True, "did you mean vllm.gpu_memory_utilization"),
        ("vllm.model=a", True, "vllm.model is set by oppo"),
        ("vllm.model=a", False, "vllm.model is set by oppo"),
        ("vllm.urls=['http://here:1', 'http://here:1']", False, "vllm.urls names a server twice"),
        ("vllm.gpu=3", False, "not checked: gpu of [vllm]"),
        ("vllm.max_num_seqs=3", True, ""),
        ("run.gpu=3", False, "unknown key 'run.gpu'"),
    ],
)
def test_a_key_that_is_set_is_checked_whatever_is_left_to_fill_in(
    request: pytest.FixtureRequest, given: str, installed: bool, told: str, engine: str
) -> None:
    patch, folder, capsys = (request.getfixturevalue(each) for each in ("monkeypatch", "tmp_path", "capsys"))
    for module in ("config.load", "config.convert"):
        patch.setattr(f"oppo.{module}.is_installed", lambda name: installed)
    patch.setattr("oppo.vllm.arguments.require", lambda *asked, **options: None)
    patch.setattr(
        "oppo.vllm.arguments.known_arguments", lambda: frozenset({"gpu_memory_utilization", "max_num_seqs", "model"})
    )
    (folder / "run.py").write_text("GRPOTrainer(args=GRPOConfig(num_generations=4), model=model, reward_funcs=f)")
    assert "not checked" not in "".join(convert(FOREIGN / "trl_grpo_vllm.sh").lines())
    files = [str(folder / name) for name in ("run.py", "config.toml")]
    code = main(["convert-config", *files, "--set", given, "--set", f"models.engine={engine}"])
    said = capsys.readouterr().err
    assert "fill in models.policy" in said
    assert told in said
    assert ("not checked" in said) == (not installed and given.startswith("vllm.") and "urls" not in given)
    assert code == (0 if not told or told.startswith("not checked") else UNUSABLE)


def test_no_text_of_theirs_becomes_a_line_of_ours(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("trl grpo --num_generations 4 --run_name 'a\nb' --model_name_or_path 'x\n[run]'")
    text = convert(tmp_path / "run.sh").text
    assert tomllib.loads(text)["models"]["policy"] == "x\n[run]"


@pytest.mark.parametrize("kind", ["PPOConfig", "GRPOConfig", "SDPOConfig"])
def test_every_default_of_theirs_is_one_that_a_setting_takes(kind: str, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(f"{kind}()")
    converted = convert(tmp_path / "run.py", overrides=["models.policy=a", "data.prompts=a.jsonl"])
    resolve(converted.document, tmp_path)
    assert lost(converted) == {"num_processes"}


def test_a_value_that_is_taken_as_it_is_goes_to_one_setting() -> None:
    for rows in foreign_fields().values():
        for name, (key, remark, *more) in rows.items():
            assert key or remark, name
            assert not more or key.count(".") == 1, name


@pytest.mark.parametrize(
    ("kind", "tables"),
    [
        ("ppo", ("PPOConfig", "TrainingArguments", "scripts")),
        ("grpo", ("GRPOConfig", "TrainingArguments", "scripts")),
        ("rloo", ("GRPOConfig", "RLOOConfig", "TrainingArguments", "scripts")),
        ("sdpo", ("SDPOConfig",)),
        ("verl", ("verl",)),
        ("openrlhf", ("OpenRLHF",)),
    ],
)
def test_whatever_a_field_holds_is_converted_lost_or_refused(kind: Kind, tables: Sequence[str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    began = {"verl": "trainer.total_epochs: 1", "openrlhf": "train.num_episodes: 1"}.get(kind, "learning_rate: 1e-6")
    for name in (name for table in tables for name in foreign_fields()[table]):
        for value in ("[a]", "text", "0", ".nan"):
            rewritten(file, f"{began}\n{name}: {value}\n")
            with suppress(ConfigError):
                assert tomllib.loads(convert(file, kind=kind).text)


@pytest.mark.parametrize("kind", foreign_fields())
def test_every_field_that_is_converted_is_known_by_its_name_where_it_is_given_here(kind: str) -> None:
    tables = foreign_fields().values()
    for field in foreign_fields()[kind]:
        found = ours(field)
        assert any(field in table and (table[field][0] or table[field][1]) in found for table in tables), field


@given(text=st.text("{}[]()'\",:1a", max_size=8))
def test_any_text_is_a_value_or_stays_a_text(text: str) -> None:
    if not {*"[]'\""} & {*text} and isinstance(found := literal(text), str):
        assert found == text
    literal(text)
