"""Settings files of earlier versions are those of today under other keys."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from oppo.config.load import OLD, RENAMED, converted, load, resolve
from oppo.config.rewards import FunctionRewardSection, ModelRewardSection
from oppo.config.sections import EnvironmentSection
from oppo.config.settings import Settings
from oppo.errors import ConfigError
from oppo.log import routed

EARLIER = Path(__file__).with_name("earlier")
EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = '[models]\npolicy = "actor"\n{}\n[data]\nprompts = "prompts.jsonl"\n'


def opened(file: Path) -> Settings:
    messages: list[str] = []
    with routed(messages.append):
        settings = load(file)
        assert load(file) == settings
    assert len(messages) == 1
    assert f"{file} has keys of an earlier version: " in messages[0]
    return settings


def written(folder: Path, models: str, more: str = "") -> Path:
    file = folder / "config.toml"
    file.write_text(MODELS.format(models) + more)
    return file


@pytest.mark.parametrize("example", ["smollm2", "reasoning_gym"])
def test_an_example_of_an_earlier_version_is_that_of_today(example: str, tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / example, tmp_path / example, ignore=shutil.ignore_patterns("*.json", "model"))
    today = load(folder / "config.toml")
    shutil.copy(EARLIER / f"{example}.toml", folder / "config.toml")
    assert opened(folder / "config.toml") == today


def test_a_stored_file_with_several_rewards_opens_as_it_did() -> None:
    settings = opened(EARLIER / "several.toml")
    assert settings.rewards == (
        FunctionRewardSection(
            name="short",
            source="/project/judges.py:short",
            weight=0.5,
            on_drop="skip",
            on_failure="drop",
            process="sync",
            timeout=60.0,
        ),
        FunctionRewardSection(
            name="here", source="/project/judges.py:here", on_drop="skip", process="sync", timeout=60.0
        ),
        ModelRewardSection(name="model", source="/project/reward", on_drop="skip", over_long="drop"),
    )
    assert settings.environment == EnvironmentSection(source="/project/tools.py:tool", on_failure="fail", timeout=30.0)
    assert resolve(settings.document(), Path("/elsewhere")) == settings


def test_a_stored_file_with_a_function_opens_as_it_did() -> None:
    settings = opened(EARLIER / "single.toml")
    assert settings.rewards == (FunctionRewardSection(source="/project/reward.py:short", timeout=50.0),)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_every_old_key_is_that_of_today(old: str, new: str, tmp_path: Path) -> None:
    (section, key), (home, name) = old.split("."), new.split(".")
    values = {"environment": '"a.py:b"', "environment_failure": '"drop"', "on_publish": '"keep"', "publish": '"cut"'}
    value = values.get(key, "true" if key.endswith(("process", "tokens", "exact")) else "4")
    reward = '[[rewards]]\nsource = "reward"\n'
    (tmp_path / "today.toml").write_text(MODELS.format("") + reward + f"[{home}]\n{name} = {value}\n")
    before = f"{key} = {value}" if section == "models" else ""
    file = written(tmp_path, before, reward + (f"[{section}]\n{key} = {value}\n" if section != "models" else ""))
    assert opened(file) == load(tmp_path / "today.toml")


def test_a_setting_under_both_keys_is_refused_with_both(tmp_path: Path) -> None:
    old = 'reward = "reward"\nreward_timeout = 3\nenvironment = "a.py:b"'
    file = written(tmp_path, old, '[[rewards]]\nsource = "reward"\n[environment]\nsource = "a.py:b"\n')
    with pytest.raises(ConfigError) as caught:
        load(file)
    pairs = ("models.reward", "models.reward_timeout", "models.environment")
    assert all(f"{old} and {OLD[old]}" in str(caught.value) for old in pairs)


def test_how_a_model_reads_is_refused_for_a_function_and_what_is_for_functions_is_not_for_a_model(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.0\.form"):
        load(written(tmp_path, 'reward = "reward.py:score"\nreward_form = "chat"'))
    assert opened(written(tmp_path, 'reward = "reward"\nreward_timeout = 3.0')).rewards == (
        ModelRewardSection(source=str(tmp_path / "reward") if (tmp_path / "reward").exists() else "reward"),
    )


def test_an_override_with_an_old_key_is_refused_with_that_of_today(tmp_path: Path) -> None:
    file = written(tmp_path, 'reward = "reward"')
    with pytest.raises(ConfigError) as caught:
        load(file, ["models.reward_timeout=3", "models.environment=a.py:b"])
    assert all(OLD[key] in str(caught.value) for key in ("models.reward_timeout", "models.environment"))
    assert load(file, ["rewards.0.source=reward.py:score"]).reward_models == []


@pytest.mark.parametrize("key", ["reward_label", "reward_column"])
def test_what_was_for_one_of_several_reward_models_is_refused_by_where_to_put_it(key: str) -> None:
    models = {"policy": "actor", "reward": {"one": {"source": "a"}, "two": {"source": "b"}}, key: "helpful"}
    with pytest.raises(ConfigError, match=rf"models\.{key} .* models\.reward\.NAME\.{key[7:]} to one of one, two"):
        converted({"models": models}, "old.toml")


@pytest.mark.parametrize("rewards", [{"source": "reward"}, "reward.py:short"])
def test_one_reward_that_is_no_list_is_told_how_a_list_of_them_is_written(rewards: object) -> None:
    document = {"models": {"policy": "actor"}, "rewards": rewards, "data": {"prompts": "prompts.jsonl"}}
    with pytest.raises(ConfigError, match=r"\[rewards\]: expected tables \[\[rewards\]\], each with a source"):
        resolve(document, Path())
