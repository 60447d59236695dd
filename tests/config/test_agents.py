"""``[agents]``: what an agent replaces is refused beside it, and its settings are refused without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo.config.load import resolve
from oppo.config.sections import ROWS, sources
from oppo.config.settings import Settings
from oppo.errors import ConfigError

TASKS = {"agents": {"program": "verifiers"}}
REWARDED = {"rewards": [{"source": "a.py:b"}]}


def settings(**tables: Any) -> Settings:
    base = {"models": {"policy": "actor"}, "data": {"prompts": "rows.jsonl"}, "agents": {"program": "agent.py:run"}}
    return resolve({name: each for name, each in {**base, **tables}.items() if each is not None}, Path("/project"))


def test_an_agent_needs_no_rewards_and_its_file_is_one_of_the_run() -> None:
    found = settings()
    assert found.rewards == ()
    assert found.agents.program == "/project/agent.py:run"
    assert found.files["agents.program"] == Path("/project/agent.py")
    assert resolve(found.document(), Path("/")) == found


def test_tasksets_are_prompts_whose_files_are_code_of_the_run() -> None:
    source = {"path": "verifiers:sums.py:Sums", "config": {"num_tasks": 8}}
    held_out = {"prompts": "verifiers:owner/gsm8k"}
    found = settings(**TASKS, data={"prompts": [source, {"path": "verifiers:gsm8k"}]}, eval=held_out)
    one, other = sources(found.data.prompts)
    assert (one.path, one.taskset, one.config) == (
        "verifiers:/project/sums.py:Sums", "/project/sums.py:Sums", {"num_tasks": 8}
    )  # fmt: skip
    assert (other.taskset, found.eval.prompts) == ("gsm8k", "verifiers:owner/gsm8k")
    assert found.files == {"agents.program of data.prompts[0]": Path("/project/sums.py")}
    assert resolve(found.document(), Path("/")) == found
    assert settings(**TASKS, data={"prompts": ROWS}).data.prompts == ROWS  # of oppo.environments.verifiers


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"rewards": [{"source": "a.py:b"}]}, "has an agent that returns the reward: leave [[rewards]] out"),
        ({"environment": {"source": "a.py:b"}}, "shows tools of its own: leave environment.source out"),
        ({"environment": {"tools": ["a.py:b"]}}, "leave environment.tools out"),
        ({"data": {"prompts": "rows.jsonl", "tools": "tools.json"}}, "leave data.tools out"),
        ({"data": {"prompts": "rows.jsonl", "over_long": "truncate"}}, "would cut off what an agent has said first"),
        ({"data": {"prompts": "rows.jsonl", "column": "task"}}, "no column holds the prompt: leave column out"),
        (
            {"eval": {"prompts": [{"path": "a.jsonl", "column": "task"}]}},
            "no column holds the prompt: leave column out",
        ),
        ({"agents": {"program": "agent"}}, "agents.program"),
        ({"data": {"prompts": "verifiers:sums"}}, "set agents.program = 'verifiers'"),
        (
            {"data": {"prompts": "verifiers:sums"}, "agents": None, "rewards": [{"source": "a.py:b"}]},
            "set agents.program = 'verifiers'",
        ),
        ({"agents": {"program": "verifiers"}}, "rows.jsonl' is none: name one as 'verifiers:NAME'"),
        ({"eval": {"prompts": "verifiers:sums"}}, "eval.prompts = 'verifiers:sums' is a taskset"),
        ({"data": {"prompts": [{"path": "a.jsonl", "config": {"n": 1}}]}}, "has a config, and only a taskset has one"),
        (
            TASKS | {"data": {"prompts": [{"path": "verifiers:sums", "split": "test"}]}},
            "has a split, and a taskset has",
        ),
        (TASKS | {"data": {"prompts": [{"path": "verifiers:sums", "column": "q"}]}}, "has a column, and a taskset has"),
        (TASKS | REWARDED | {"data": {"prompts": "verifiers:sums"}}, "leave [[rewards]] out"),
        ({"agents": {"program": "agent.py:run", "port": 70_000}}, "agents.port"),
        ({"agents": {"program": "agent.py:run", "public_url": "machine:8000"}}, "a URL such as http://machine:8000/v1"),
        ({"agents": {"program": "agent.py:run", "public_url": "http://machine/v1"}}, "agents.port = 0 is any"),
        ({"agents": {"timeout": 5.0}, "rewards": [{"source": "a.py:b"}]}, "agents.timeout is of an agent, and"),
        ({"agents": None}, "rewards"),
    ],
)
def test_what_has_no_effect_beside_an_agent_or_without_one_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(**tables)
    assert words in str(refused.value)
