from __future__ import annotations

import math
import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from oppo.algorithms import ALGORITHMS
from oppo.algorithms.group import DAPO, GRPO, GSPO, RLOO, DrGRPO
from oppo.algorithms.ppo import PPO
from oppo.config.load import load_settings, overridden, resolve
from oppo.config.scorers import FunctionRewardSection, ModelRewardSection, ScorerSection, VllmRewardSection
from oppo.config.sections import ROWS, sources
from oppo.config.settings import Settings, keys_of
from oppo.errors import ConfigError
from oppo.losses import ClippedLoss, PPOLoss, SequenceLoss
from oppo.returns import ImportanceCorrection, ScoreShaping
from oppo.stages import GAE
from oppo.training import TrainerSettings
from tests.config.test_refusals import entries

MINIMAL = '[models]\npolicy = "./actor"\n[[rewards]]\nsource = "reward.py:score"\n[data]\nprompts = "prompts.jsonl"\n'
AGENT = "agents.program=agent.py:run"
BY_AGENT = MINIMAL.replace('[[rewards]]\nsource = "reward.py:score"\n', "")


def loaded(folder: Path, text: str = "", *overrides: str, base: str = MINIMAL) -> Settings:
    path = folder / "config.toml"
    path.write_text(base + text)
    return load_settings(path, overrides)


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("models.policy=actr", "actor"),
        ("models.reference=actr", "actor"),
        ("models.critic=mine/critc", "critic"),
        ("models.adapter=actr", "actor"),
        ("rewards.0={source='mine/critc'}", "critic"),
        ("agents.roles.helper=actr", "actor"),
        ("agents.roles.helper=initail", "initial"),
        ("agents.roles.helper=polcy", "policy"),
    ],
)
def test_a_model_whose_name_is_like_that_of_a_folder_is_told_before_a_hub_is_asked(
    tmp_path: Path, messages: list[str], override: str, guess: str
) -> None:
    for folder in ("actor", "mine/critic"):
        (tmp_path / folder).mkdir(parents=True)
    if override.startswith("agents"):
        loaded(tmp_path, "", override, AGENT, "agents.roles.asked=policy", base=BY_AGENT)
    else:
        loaded(tmp_path, "", override)
    (message,) = [each for each in messages if "did you mean" in each]
    assert f"is no directory in {tmp_path} (did you mean '{guess}'?)" in message


def refused(folder: Path, text: str, *overrides: str, base: str = MINIMAL) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text, *overrides, base=base)
    return str(caught.value)


RESOLVED = """
run.steps=9 | models.policy={D}/actor | models.critic={D}/actor | rewards.0.source={D}/reward.py:score |
    reward_models=[] | data.prompts={D}/prompts.jsonl | run_directory={D}/runs/run | algorithm.responses=1
models.policy=org/actor rewards.0.source=here | models.policy=org/actor | rewards.0.source={D}/here
HUB | models.reference=org/actor | models.critic=org/reward
HUB step.algorithm=online_dpo | models.reference=org/actor
HUB step.algorithm=dapo | models.reference=
HUB step.algorithm=dapo algorithm.kl=0.1 | models.reference=org/actor
HUB algorithm.kl=0 | models.reference=
HUB algorithm.kl=0 models.reference=org/first | models.reference=org/first
models.shared_trunk=true | models.critic=
models.adapter=./old algorithm.kl=0.1 | models.adapter={D}/old | models.reference={D}/old | models.adapts=True
models.adapter=./old models.reference=./actor | models.reference={D}/actor
models.lora_sync=adapter models.engine=vllm models.adapter=./old | models.lora_sync=adapter
step.algorithm=grpo | models.critic= | algorithm.responses=8 | algorithm.kl_in=loss | algorithm.kl_estimator=k3 |
    algorithm.loss.kl=0.05
step.algorithm=grpo algorithm.kl_estimator=k2 | algorithm.kl_in=loss | algorithm.loss.kl_estimator=k2
step.algorithm=grpo algorithm.kl_in=reward algorithm.kl=0 | algorithm.kl_in=reward | algorithm.loss.kl=0.0
step.algorithm=rloo algorithm.samples=3 | algorithm.responses=3 | algorithm.kl_in=reward | algorithm.kl_estimator=k1 |
    algorithm.loss.kl=0.0
step.algorithm=rloo algorithm.clip=0.3 algorithm.entropy_coefficient=0.01 | algorithm.loss.clip=0.3 |
    algorithm.loss.entropy_coefficient=0.01 | algorithm.loss.aggregation=constant
step.algorithm=ppo | algorithm.kl_in=reward | algorithm.kl_estimator=k1 | algorithm.loss.kl=0.0
run.seed=7 sampling.seed=3 | data.seed=7 | sampling.seed=3 | trainer.seed=7
algorithm.kl_target=6.0 algorithm.kl_horizon=100 step.chunk=whole sampling.stop=[1,"x"] | sampling.stop=(1, 'x') |
    algorithm.kl_target=6.0 | step.chunk=whole
algorithm.kl=0.2 run.name=other sampling.stop=[3] run.deterministic=true | algorithm.kl=0.2 | run.name=other |
    sampling.stop=(3,) | run.deterministic=True
algorithm.kl_in=loss algorithm.kl=0.3 algorithm.kl_estimator=k3 algorithm.value_clip="none" | algorithm.loss.kl=0.3 |
    algorithm.loss.kl_estimator=k3 | algorithm.loss.value_clip=inf
"""
"""Overrides of a small file, and settings that follow."""


def at(found: Any, place: str) -> Any:
    for name in place.split("."):
        found = found[int(name)] if name.isdecimal() else getattr(found, name)
        found = found() if name == "loss" else found
    return found


@pytest.mark.parametrize(("chosen", "resolved"), [(chosen, rest) for chosen, *rest in entries(RESOLVED)])
def test_what_follows_from_settings_comes_out_of_the_resolved_file_anywhere(
    chosen: str, resolved: list[str], tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    chosen = chosen.replace("HUB", "models.policy=org/actor rewards.0.source=org/reward")
    settings = loaded(tmp_path, "", *chosen.split())
    for place, value in (each.replace("{D}", str(tmp_path)).split("=", 1) for each in resolved):
        assert str(at(settings, place)) == value, place
    assert resolve(tomllib.loads(settings.toml()), Path("/elsewhere")) == settings


DATA = '[data]\nprompts = "prompts.jsonl"\n'

SEVERAL = """
[models]
policy = "actor"
[[rewards]]
name = "short"
source = "reward.py:score"
timeout = 3
[[rewards]]
name = "helpful"
source = "org/reward"
weight = 0.7
[data]
prompts = "prompts.jsonl"
"""


def test_several_rewards_are_a_list_and_come_out_as_they_went_in(tmp_path: Path) -> None:
    settings = loaded(tmp_path, base=SEVERAL)
    assert settings.rewards == (
        FunctionRewardSection(name="short", source=f"{tmp_path / 'reward.py'}:score", timeout=3),
        ModelRewardSection(name="helpful", source="org/reward", weight=0.7),
    )
    assert (settings.reward_models, settings.models.critic) == (["org/reward"], "org/reward")
    assert settings.files["rewards.0.source"] == tmp_path / "reward.py"
    (tmp_path / "again.toml").write_text(settings.toml())
    assert load_settings(tmp_path / "again.toml") == settings
    assert settings.changed({}) == settings


ON_VLLM = """
[models]
policy = "actor"
[[rewards]]
name = "own"
source = "org/reward"
engine = "vllm"
[rewards.vllm]
tensor_parallel_size = 2
[[rewards]]
name = "served"
source = "org/other"
engine = "vllm"
url = "http://host:8000"
timeout = 5
[data]
prompts = "prompts.jsonl"
"""


def test_a_reward_model_on_vllm_has_an_engine_or_a_server(tmp_path: Path) -> None:
    settings = loaded(tmp_path, base=ON_VLLM)
    own, served = settings.rewards
    assert own == VllmRewardSection(name="own", source="org/reward", vllm={"tensor_parallel_size": 2})
    assert served == VllmRewardSection(name="served", source="org/other", url="http://host:8000", timeout=5)
    assert list(settings.reward_engines) == ["rewards.0"]
    assert (settings.reward_models, settings.models.critic) == (["org/reward", "org/other"], "org/reward")
    assert loaded(tmp_path, base=settings.toml()) == settings
    with_more = loaded(tmp_path, "", "rewards.0.vllm.block_size=32", base=ON_VLLM).rewards[0]
    assert getattr(with_more, "vllm", None) == {"tensor_parallel_size": 2, "block_size": 32}


SCORERS = """[models]
policy = "org/actor"
reference = "org/sft"
teacher = "org/large"
[step]
algorithm = "distill"
[scorers.reference]
engine = "vllm"
[scorers.reference.vllm]
tensor_parallel_size = 2
[scorers.teacher]
engine = "vllm"
url = "http://host:8000"
timeout = 5
[data]
prompts = "prompts.jsonl"
"""


def test_reference_and_teacher_on_vllm_have_an_engine_or_a_server(tmp_path: Path) -> None:
    settings = loaded(tmp_path, base=SCORERS)
    assert settings.on_vllm == {
        "reference": ScorerSection(engine="vllm", vllm={"tensor_parallel_size": 2}),
        "teacher": ScorerSection(engine="vllm", url="http://host:8000", timeout=5),
    }
    assert loaded(tmp_path, base=settings.toml()) == settings
    assert not loaded(tmp_path, "", "scorers.reference={}", "scorers.teacher={}", base=SCORERS).on_vllm


def test_a_setting_of_a_reward_is_overridden_by_its_number(tmp_path: Path) -> None:
    said = ("rewards.1.weight=2", "rewards.2.source=reward.py:other", "rewards.2.name=new")
    rewards = loaded(tmp_path, "", *said, base=SEVERAL).rewards
    assert [each.name for each in rewards] == ["short", "helpful", "new"]
    assert (rewards[1].weight, rewards[2].source) == (2, f"{tmp_path / 'reward.py'}:other")
    short = overridden({"rewards": ["org/reward"]}, ["rewards.0.weight=2"])
    assert short == {"rewards": [{"source": "org/reward", "weight": 2}]}
    assert "'rewards' is a list, whose items are numbered" in refused(tmp_path, "", "rewards.2.weight=2")
    assert "'rewards' is a list, whose items are numbered" in refused(tmp_path, "", "rewards.short.weight=2")
    assert "'rewards.0.source' is not a table of this file" in refused(tmp_path, "", "rewards.0.source.path=a")


def test_an_override_may_be_the_whole_list_of_rewards(tmp_path: Path) -> None:
    chosen = "rewards=[{source='reward.py:other', timeout=4}]"
    source = f"{tmp_path / 'reward.py'}:other"
    assert loaded(tmp_path, "", chosen).rewards == (FunctionRewardSection(source=source, timeout=4),)
    assert loaded(tmp_path, "", "rewards.0.source=reward.py:other", base=SEVERAL.partition("[[")[0] + DATA).rewards


def seeds(settings: Settings) -> tuple[int, int, int, int]:
    return settings.run.seed, settings.data.seed, settings.sampling.seed, settings.trainer.seed


def test_another_seed_for_a_resolved_file_reaches_every_section_that_had_the_runs(tmp_path: Path) -> None:
    resolved = loaded(tmp_path, "[run]\nseed = 7\n[sampling]\nseed = 3\n").toml()
    assert seeds(loaded(tmp_path, "", "run.seed=1", base=resolved)) == (1, 1, 3, 1)
    assert seeds(loaded(tmp_path, "", "data.seed=7", "run.seed=1", base=resolved)) == (1, 7, 3, 1)
    assert seeds(loaded(tmp_path, "", "run.name=again", base=resolved)) == (7, 7, 3, 7)
    of_the_default = loaded(tmp_path).toml()
    assert seeds(loaded(tmp_path, "", "run.seed=1", "trainer.seed=0", base=of_the_default)) == (1, 1, 1, 0)
    assert seeds(loaded(tmp_path, "[sampling]\nseed = 0\n", "run.seed=1")) == (1, 1, 0, 1), "it alone names its own"


def test_an_agent_needs_no_rewards_and_its_file_is_one_of_the_run(tmp_path: Path) -> None:
    found = loaded(tmp_path, "", AGENT, base=BY_AGENT)
    assert found.rewards == ()
    assert found.agents.program == f"{tmp_path}/agent.py:run"
    assert found.files["agents.program"] == tmp_path / "agent.py"
    assert resolve(found.document(), Path("/")) == found
    assert "[rewards] is missing" in refused(tmp_path, "", base=BY_AGENT)


def test_tasksets_are_prompts_whose_files_are_code_of_the_run(tmp_path: Path) -> None:
    prompts = 'data.prompts=[{path="verifiers:sums.py:Sums",config={num_tasks=8}},"verifiers:gsm8k"]'
    tasks = (prompts, "agents.program=verifiers")
    found = loaded(tmp_path, "", *tasks, "eval.prompts=verifiers:owner/gsm8k", base=BY_AGENT)
    one, other = sources(found.data.prompts)
    file = f"{tmp_path}/sums.py"
    assert (one.path, one.taskset, one.config) == (f"verifiers:{file}:Sums", f"{file}:Sums", {"num_tasks": 8})
    assert (other.taskset, found.eval.prompts) == ("gsm8k", "verifiers:owner/gsm8k")
    assert found.files == {"agents.program of data.prompts[0]": Path(file)}
    assert resolve(found.document(), Path("/")) == found
    of_program = loaded(tmp_path, "", "agents.program=verifiers", f"data.prompts={ROWS}", base=BY_AGENT)
    assert of_program.data.prompts == ROWS  # of oppo.environments.verifiers


@pytest.mark.parametrize("run", ["seed = true", "seed = 7"])
def test_a_seed_that_is_none_is_told_wherever_it_stands(tmp_path: Path, run: str) -> None:
    said = refused(tmp_path, f"[run]\n{run}\n[sampling]\nseed = 7\n", "run.seed=many")
    assert said == "run.seed: expected a whole number, got 'many'"


def test_a_name_with_a_dot_is_quoted() -> None:
    file = {"scorers": {"teacher.math": {"engine": "vllm"}}}
    assert overridden({}, ['scorers."teacher.math".engine=vllm']) == file
    assert overridden({}, ["scorers . 'teacher.math' . engine = vllm"]) == file
    assert overridden({}, ['data.columns."a=b"=c=d']) == {"data": {"columns": {"a=b": "c=d"}}}
    assert overridden(file, ['scorers."teacher.math".url=http://x'])["scorers"] == {
        "teacher.math": {"engine": "vllm", "url": "http://x"}
    }


@pytest.mark.parametrize(
    "value", [True, -3, 2**70, 1.5, 1e30, math.nan, math.inf, "", "\0", [], [[]], {"a": 1}, date.min]
)
def test_a_value_of_any_kind_is_taken_or_is_an_error_in_the_words_of_the_file(value: object) -> None:
    for section, keys in keys_of(PPO).items():
        for key in keys:
            document: dict[str, Any] = {
                "models": {"policy": "a"},
                "rewards": [{"source": "b"}],
                "data": {"prompts": "p"},
            }
            document[section] = document.get(section, {}) | {key: value}
            try:
                resolve(document, Path("/"))
            except ConfigError as error:
                said = str(error)
                assert f"{section}.{key}" in said or key in said.removeprefix(f"[{section}]: ") or value == "\0"
                assert len(said.splitlines()) == 1
                words = said.replace("environment.factory", "").lower()
                assert not re.search("input|should|valid|factory|undefined|constrain|tuple|character|literal", words)


@pytest.mark.parametrize("section", ["run", "sampling", "step", "algorithm", "trainer"])
def test_two_faults_of_a_section_are_two_errors(section: str, tmp_path: Path) -> None:
    key = {"run": "steps", "sampling": "top_k", "step": "batch", "algorithm": "kl_horizon", "trainer": "epochs"}[
        section
    ]
    said = refused(tmp_path, f"[{section}]\n{key} = 'four'\nnovel = 1\n").splitlines()
    assert said[:2] == ["2 settings are wrong:", f"  {section}.{key}: expected a whole number, got 'four'"]
    assert len(said) == 3


def test_a_wrong_value_is_shown_in_part_where_it_is_long(tmp_path: Path) -> None:
    said = refused(tmp_path, f"[run]\nsteps = '{'4' * 5000}'\n")
    assert said.startswith("run.steps: expected a whole number, got '444")
    assert said.endswith("4... (5002 characters)")


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_one_fault_though_all_sections_follow_it(tmp_path: Path, seed: int) -> None:
    assert refused(tmp_path, f"[run]\nseed = {seed}\n").startswith("run.seed: expected ")


def test_every_fault_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    said = refused(tmp_path, "", base="run = 3\n[models]\npolicy = 1\n")
    assert said.splitlines()[0] == "4 settings are wrong:"
    assert "[run]: expected a section with the keys name, directory" in said
    assert "models.policy: expected a string, got 1" in said
    assert "[rewards] is missing: tables [[rewards]], each with a source: directory or hub name" in said
    assert "[data] is missing: a section with the keys prompts, column" in said


def test_the_defaults_of_an_algorithm_are_those_of_its_parts() -> None:
    assert PPO().loss() == PPOLoss()
    assert vars(PPO().advantage()) == vars(GAE())
    assert PPO().correction == ImportanceCorrection()
    for algorithm in (RLOO(), DrGRPO()):
        assert algorithm.loss() == ClippedLoss(aggregation="constant")
        assert algorithm.shaping == ScoreShaping()
    assert GRPO(kl_in="reward", kl=0).loss() == ClippedLoss(aggregation="responses")
    assert GRPO().loss() == ClippedLoss(kl=0.05, kl_estimator="k3", aggregation="responses")
    assert DAPO().loss() == ClippedLoss(clip_high=0.28, kl_estimator="k3")
    assert GSPO().loss() == SequenceLoss(kl_estimator="k3")


def test_a_schedule_spans_the_run(tmp_path: Path) -> None:
    text = '[run]\nsteps = 40\n[trainer]\nschedule = "linear"\nwarmup_steps = 4\n'
    settings = loaded(tmp_path, text)
    assert settings.trainer == TrainerSettings(schedule="linear", warmup_steps=4, total_steps=40)
    assert "total_steps" not in settings.toml()
    assert "[trainer]: total_steps is run.steps: leave it out" in refused(tmp_path, f"{text}total_steps = 9\n")


def test_how_stale_tokens_are_learnt_from_reaches_the_loss(tmp_path: Path) -> None:
    text = '[algorithm]\nratio_base = "proximal"\nis_correction = "mask_sequence"\nis_high = 1.5\n'
    algorithm = loaded(tmp_path, text).algorithm
    chosen = ImportanceCorrection(ratio_base="proximal", weight="mask", level="sequence", high=1.5)
    assert algorithm.loss() == PPOLoss(correction=chosen)
    assert chosen.band == (0.9, 1.5)
    assert algorithm.corrects
    assert not loaded(tmp_path).algorithm.corrects
    assert "algorithm.is_low" in refused(tmp_path, "[algorithm]\nis_low = 1.2\n")
    idle = "[algorithm]\nis_cap = 3.0\nis_high = 4.0\n"
    assert "is_correction = 'none' does not read is_cap and is_high: leave that out" in refused(tmp_path, idle)
    assert "'mask' does not read is_cap" in refused(tmp_path, f'{idle}is_correction = "mask"\n')
    of_rollouts = loaded(tmp_path, '[algorithm]\nis_correction = "truncated_sequence"\nis_cap = 3.0\nis_k3 = 0.01\n')
    assert isinstance(of_rollouts.algorithm, PPO)
    assert of_rollouts.algorithm.correction == ImportanceCorrection(
        weight="truncated", level="product", cap=3.0, k3=0.01
    )
    gspo = loaded(tmp_path, '[step]\nalgorithm = "gspo"\n[algorithm]\nis_correction = "truncated_sequence"\n')
    assert gspo.trained_loss().unit == "row"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings_are_checked_without_loading_torch(name: str, tmp_path: Path) -> None:
    minimal = MINIMAL.replace("[models]\n", '[models]\nteacher = "org/teacher"\n') if name == "distill" else MINIMAL
    (tmp_path / "config.toml").write_text(f'{minimal}[step]\nalgorithm = "{name}"\n')
    check = "import sys, oppo; oppo.load_settings(sys.argv[1]).toml()"
    probe = f"{check}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe, str(tmp_path / "config.toml")], check=True)
