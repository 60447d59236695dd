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

from oppo.vllm.sync import free_port
from tests.hf import tiny
from tests.hf.spot_tokenizers import byte_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "verifiers"
TEMPLATE = ROOT / "tests" / "hf" / "templates" / "qwen3.jinja"

TOOLED = """
import os

import verifiers.v1 as vf
from sums import SumTask, SumsConfig, SumsTaskset


class Tools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, left: int, right: int) -> int:
        \"\"\"Add two numbers.\"\"\"
        return left + right


class TooledTask(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig(url=f"http://127.0.0.1:{os.environ['MCP_PORT']}/mcp"))]


class TooledTaskset(vf.Taskset[TooledTask, SumsConfig]):
    def load(self):
        for task in SumsTaskset(self.config).load():
            yield TooledTask(task.data.model_copy(update={"system_prompt": "Add."}), task.config)


__all__ = ["TooledTaskset"]

if __name__ == "__main__":
    Tools.run()
"""
CALLS = """

from oppo.hf.chat import ChatFormat, ParsedTurn, ToolCall


def parse(chat, tokens):  # a random policy calls nothing
    said = "a " * (1 + sum(tokens) % 5)
    if not tokens or sum(tokens) % 3 == 0:
        return ParsedTurn(said)
    return ParsedTurn(said, tool_calls=(ToolCall("sums_add", {"left": 2, "right": 3}), ToolCall("none", {})))


ChatFormat.parse = parse
"""


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    config = tiny.CONFIGS["llama"]()
    config.vocab_size, config.max_position_embeddings = 270, 2048
    tiny.of(config, seed=1).save_pretrained(tmp_path / "actor")
    byte_tokenizer(special=("<|im_start|>", "<|im_end|>", "</tool_call>")).save(tmp_path / "actor")
    return tmp_path / "actor"


def train(actor: Path, program: list[str], *settings: str) -> list[dict[str, object]]:
    """Run the example for two steps; return its samples."""
    runs = actor.parent / "runs"
    given = {
        "models.policy": actor,
        "data.chat_template": TEMPLATE,
        "data.max_prompt_tokens": 1500,
        "run.directory": runs,
        "run.steps": 2,
        "run.panel": "lines",
        "sampling.max_new_tokens": 24,
        "sampling.stop": json.dumps(["<|im_end|>"]),
        "step.batch": 2,
        "step.overcommit": 1,
        "algorithm.samples": 2,
        "trainer.learning_rate": 1e-3,
        "agents.on_failure": "fail",
    }
    arguments = [*program, *(f"{key}={value}" for key, value in given.items()), *settings]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE), str(actor.parent)])}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len((runs / "sums" / "metrics.jsonl").read_text().splitlines()) == 2
    before, after = (
        load_file(folder / "model.safetensors") for folder in (actor, runs / "sums/checkpoints/final/actor")
    )
    assert any((before[name] != after[name]).any() for name in before)
    return [json.loads(line) for line in (runs / "sums" / "samples.jsonl").read_text().splitlines()]


def test_the_page_shows_the_agent_of_the_example() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n# examples/verifiers/agent.py\n(.*?)```", page, re.DOTALL)
    assert shown in (EXAMPLE / "agent.py").read_text(encoding="utf-8")


@pytest.mark.gym
def test_a_taskset_trains_with_the_rewards_that_it_says(actor: Path) -> None:
    samples = train(actor, [str(EXAMPLE / "agent.py")])
    assert len(samples) >= 8
    for sample in samples:
        asked = re.fullmatch(r"user\nWhat is (\d+) \+ (\d+)\?\nassistant\n", str(sample["prompt"]))
        assert asked is not None
        reply = str(sample["completion"])
        right = str(int(asked[1]) + int(asked[2])) in reply
        assert sample["score"] == pytest.approx(right + 0.1 / max(1, len(reply.split())))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server of the tools, one for all rollouts."""
    (tmp_path / "tooled.py").write_text(TOOLED)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    monkeypatch.setenv("MCP_PORT", str(free_port()))
    environment = {**os.environ, "VF_CONFIG": "{}"}
    with subprocess.Popen([sys.executable, tmp_path / "tooled.py"], env=environment) as server:
        yield
        server.terminate()


@pytest.mark.gym
@pytest.mark.usefixtures("tools")
def test_a_policy_calls_the_tools_of_a_task(actor: Path, tmp_path: Path) -> None:
    program = (EXAMPLE / "agent.py").read_text().replace('"sums"', '"tooled"').replace("\nTASKS", CALLS + "\nTASKS")
    (tmp_path / "agent.py").write_text(program)
    (tmp_path / "config.toml").write_text((EXAMPLE / "config.toml").read_text())
    ends = json.dumps(["<|im_end|>", *range(10, 100, 10)])
    samples = train(actor, [str(tmp_path / "agent.py")], "sampling.max_new_tokens=400", f"sampling.stop={ends}")
    assert all(str(sample["prompt"]).startswith("system\nAdd.\n\n# Tools") for sample in samples)
    told = " ".join(str(sample["completion"]) for sample in samples)
    assert "<tool_response>\n5\n</tool_response>" in told
    assert "error: no tool 'none'" in told
