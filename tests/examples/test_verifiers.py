"""A taskset of verifiers, of the package itself: ``make test-gym``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from oppo.environments import TaskAgent, verifiers
from oppo.errors import ConfigError
from oppo.libraries import is_installed
from oppo.vllm.sync import free_port
from tests.kit.turns import talker

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "verifiers"
TEMPLATE = ROOT / "tests" / "hf" / "templates" / "qwen3.jinja"

TOOLED = """
import os

import verifiers.v1 as vf
from sums import SumTask, SumsConfig, SumsTaskset


URL = f"http://127.0.0.1:{os.environ['MCP_PORT']}/mcp"


class Tools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, left: int, right: int) -> int:
        \"\"\"Add two numbers.\"\"\"
        return left + right


class TooledTask(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig(url=URL))]


class Shared(Tools):
    TOOL_PREFIX = "shared"


class TooledTaskset(vf.Taskset[TooledTask, SumsConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Shared(vf.ToolsetConfig(url=URL))]

    def load(self):
        for task in SumsTaskset(self.config).load():
            yield TooledTask(task.data.model_copy(update={"system_prompt": "Add."}), task.config)


__all__ = ["TooledTaskset"]

if __name__ == "__main__":
    Tools.run()
"""
CALLS = """
from oppo.hf.tool_calls import ToolCall
from oppo.hf.chat import ChatFormat, ParsedTurn


def parse(chat, tokens):  # a random policy calls nothing
    said = "a " * (1 + sum(tokens) % 5)
    if not tokens or sum(tokens) % 3 == 0:
        return ParsedTurn(said)
    calls = ("sums_add", {"left": 2, "right": 3}), ("shared_add", {"left": 4, "right": 5}), ("none", {})
    return ParsedTurn(said, tool_calls=tuple(ToolCall(*call) for call in calls))


ChatFormat.parse = parse
"""


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    return talker(tmp_path) / "actor"


def oppo(actor: Path, *arguments: str | Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE), str(actor.parent)])}
    command = [sys.executable, "-m", "oppo", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def train(actor: Path, *settings: str) -> list[dict[str, object]]:
    """Run the example for two steps; return its samples."""
    runs = actor.parent / "runs"
    given = {
        "models.policy": actor, "data.chat_template": TEMPLATE, "data.max_prompt_tokens": 1500, "run.directory": runs,
        "run.steps": 2, "run.panel": "lines", "sampling.max_new_tokens": 24,
        "sampling.stop": json.dumps(["<|im_end|>"]), "step.batch": 2, "step.overcommit": 1, "algorithm.samples": 2,
        "trainer.learning_rate": 1e-3, "agents.on_failure": "fail",
    }  # fmt: skip
    changes = [*(f"{key}={value}" for key, value in given.items()), *settings]
    oppo(actor, "train", EXAMPLE / "config.toml", *(word for each in changes for word in ("--set", each)))
    assert len((runs / "sums" / "metrics.jsonl").read_text().splitlines()) == 2
    before, after = (
        load_file(folder / "model.safetensors") for folder in (actor, runs / "sums/checkpoints/final/actor")
    )
    assert any((before[name] != after[name]).any() for name in before)
    return samples_of(runs / "sums")


def samples_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.mark.gym
def test_a_taskset_trains_with_the_rewards_that_it_says(actor: Path) -> None:
    source = '{path="verifiers:sums.py:SumsTaskset", config={num_tasks=%d}}'
    assert len(train(actor, f"data.prompts=[{source % 9}]", f"eval.prompts=[{source % 2}]")) >= 8
    run = actor.parent / "runs" / "sums"
    oppo(actor, "resume", run, "--set", "run.steps=3")
    assert "eval/" in (run / "metrics.jsonl").read_text()
    samples = samples_of(run)
    assert len(samples) >= 12
    for sample in samples:
        asked = re.fullmatch(r"user\nWhat is (\d+) \+ (\d+)\?\nassistant\n", str(sample["prompt"]))
        assert asked is not None
        reply = str(sample["completion"])
        right = str(int(asked[1]) + int(asked[2])) in reply
        assert sample["score"] == pytest.approx(right + 0.1 / max(1, len(reply.split())))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tooled.py").write_text(TOOLED)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    monkeypatch.setenv("MCP_PORT", str(free_port()))
    environment = {**os.environ, "VF_CONFIG": "{}"}
    with subprocess.Popen([sys.executable, tmp_path / "tooled.py"], env=environment) as server:
        yield
        server.terminate()


@pytest.mark.gym
@pytest.mark.usefixtures("tools")
def test_a_policy_calls_the_tools_of_a_task_of_an_installed_taskset(actor: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CALLS)
    ends = json.dumps(["<|im_end|>", *range(10, 100, 10)])
    samples = train(actor, "data.prompts=verifiers:tooled", "sampling.max_new_tokens=400", f"sampling.stop={ends}")
    assert all(str(sample["prompt"]).startswith("system\nAdd.\n\n# Tools") for sample in samples)
    told = " ".join(str(sample["completion"]) for sample in samples)
    assert "<tool_response>\n5\n</tool_response>\n<tool_response>\n9\n</tool_response>" in told
    assert "error: no tool 'none'" in told


FAULTY = """
import itertools

import verifiers.v1 as vf


class Task(vf.Task[vf.TaskData]):
    @vf.reward()
    async def right(self, trace: vf.Trace) -> float:
        return 1.0


class Boxed(Task):
    NEEDS_CONTAINER = True


class Unrewarded(vf.Task[vf.TaskData]):
    pass


class Tools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, left: int, right: int) -> int:
        return left + right


class Tooled(Task):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())]


class Config(vf.TasksetConfig):
    data: dict = {"prompt": "Hello?"}


class Tasks(vf.Taskset[Task, Config]):
    def load(self):
        yield self.task_type()(vf.TaskData(**self.config.data))


class Empty(vf.Taskset[Task, Config]):
    def load(self):
        return []


class Endless(vf.Taskset[Task, Config]):
    INFINITE = True

    def load(self):
        return (Task(vf.TaskData(prompt="Hello?")) for _ in itertools.count())


class Failing(vf.Taskset[Task, Config]):
    def load(self):
        raise OSError("no disk")


class BoxedTasks(Tasks, vf.Taskset[Boxed, Config]):
    pass


class UnrewardedTasks(Tasks, vf.Taskset[Unrewarded, Config]):
    pass


class TooledTasks(Tasks, vf.Taskset[Tooled, Config]):
    pass


class Arena(vf.SingleAgentEnv):
    pass


function = max
__all__ = ["Tasks", "Arena"]
"""


@pytest.mark.gym
@pytest.mark.parametrize(
    ("taskset", "config", "words"),
    [
        ("nowhere", {}, "install it, or name the class of a file, as verifiers:sums.py:SumsTaskset"),
        ("nowhere.py:Tasks", {}, "there is no file nowhere.py"),
        ("function", {}, "is no vf.Taskset but"),
        ("Nothing", {}, "has no 'Nothing'; the functions and classes there are"),
        ("Tasks", {"size": 3}, "the fields of its config are"),
        ("Tasks", {"data": {"prompt": "Look.", "image": "ubuntu"}}, "needs the image 'ubuntu', and no container"),
        ("Tasks", {"data": {"prompt": "Look.", "network_allow": []}}, "limits the network"),
        ("Tasks", {"data": {"prompt": "Look.", "skills": ["/skills"]}}, "has skills"),
        ("Tasks", {"data": {}}, "has no prompt: a user opens the conversation"),
        ("Empty", {}, "has no task"),
        ("Endless", {}, "has tasks without end"),
        ("Failing", {}, "cannot be loaded: OSError: no disk"),
        ("BoxedTasks", {}, "has tasks that need a container"),
        ("UnrewardedTasks", {}, "have no @vf.reward"),
        ("TooledTasks", {}, "has tools, Tools, that verifiers starts as a module"),
        ("faulty_tasks", {}, "brings an environment, Arena, that runs its tasks"),
    ],
)
def test_a_taskset_that_cannot_be_trained_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taskset: str, config: dict[str, object], words: str
) -> None:
    (tmp_path / "faulty_tasks.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty_tasks", raising=False)
    named = taskset if taskset[0].islower() and taskset != "function" else f"{tmp_path}/faulty_tasks.py:{taskset}"
    with pytest.raises(ConfigError, match=re.escape(words)):
        verifiers(named, **config)


@pytest.mark.gym
def test_the_tasks_of_a_taskset_are_rows_with_what_they_hold() -> None:
    named = f"{EXAMPLE}/sums.py:SumsTaskset"
    first, second = verifiers(named, num_tasks=2)
    assert first == {
        "taskset": named,
        "config": {"num_tasks": 2},
        "task": {"idx": 0, "prompt": "What is 49 + 97?", "answer": "146"},
    }
    assert second["task"] == {"idx": 1, "prompt": "What is 53 + 5?", "answer": "58"}


@pytest.mark.skipif(is_installed("verifiers"), reason="it is about its absence")
def test_without_verifiers_a_taskset_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=re.escape("pip install 'oppo[verifiers]'")):
        verifiers("sums")


async def test_an_agent_of_tasks_is_given_no_other_rows() -> None:
    with pytest.raises(
        ValueError, match=r"expected a row of oppo.environments.verifiers\(\), got one without 'taskset'"
    ):
        await TaskAgent()({"prompt": "Hello?"}, "http://127.0.0.1:1/v1", "key")
