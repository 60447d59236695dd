"""``oppo train`` with several rewards: models and functions, each with settings of its own, and scorers of a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import torch

from oppo.cli import DONE, UNUSABLE, main
from oppo.config.load import load
from oppo.errors import ConfigError
from oppo.rewards import Rewards
from oppo.run.checkpoint import settings_of
from oppo.run.deployment import Deployment
from oppo.run.models import assemble, policy_tokenizer
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo, records, tokenizer

JUDGES = """
import os
from oppo import Drop
from oppo.testing import FakeScorer

def short(prompts, completions):
    return [-len(each.split()) / 10 if len(each.split()) > 2 else None for each in completions]

def picky(prompts, completions, goal):
    return [Drop.because("no goal") if each % 3 == 0 else 1.0 for each in goal]

def apart(prompts, completions):
    return [float(os.getpid()) for _ in completions]

async def here(prompts, completions):
    return [float(os.getpid()) for _ in completions]

class Core:
    def score(self, lengths):
        return [float(each) for each in lengths]

class Longest(FakeScorer):
    def __init__(self, place):
        super().__init__(None)
        self.hosted = place.host(Core)

    async def finish(self, finished):
        return await self.hosted.call("score", Core.score, [len(each.response) for each in finished])
"""

BOTH = ('rewards=[{name="first", source="reward"}, {name="second", source="other", weight=0.5}]', "run.panel=off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = furnish(tmp_path_factory.mktemp("rewards"))
    tiny.scalar("llama", seed=5).save_pretrained(folder / "other")
    tokenizer().save_pretrained(folder / "other")
    (folder / "judges.py").write_text(JUDGES)
    return folder


def lines(folder: Path, name: str) -> list[dict[str, float]]:
    return [{k: float(v) for k, v in each.items() if isinstance(v, int | float)} for each in metrics(folder, name)]


def metrics(folder: Path, name: str) -> list[dict[str, object]]:
    return records(folder, name, "metrics.jsonl")


def test_models_and_functions_are_one_score(folder: Path) -> None:
    parts = (
        'rewards=[{name="model", source="reward", weight=2}, {name="short", source="judges.py:short", weight=0.5}]',
        "run.panel=off",
        "run.name=mixed",
    )
    assert oppo(folder, "", *parts) == DONE
    for step in lines(folder, "mixed"):
        assert 0 < step["rewards/short/share"] <= 1
        assert step["rewards/model/share"] == 1
        assert step["rewards/short/mean"] < 0
        expected = 2 * step["rewards/model/mean"] + 0.5 * step["rewards/short/mean"] * step["rewards/short/share"]
        assert step["objective/scores"] == pytest.approx(expected, abs=1e-4)


def test_each_model_has_a_place_and_a_track_like_the_only_one(folder: Path) -> None:
    settings = load(folder / "config.toml", [*BOTH, "run.scorers=thread"])
    assembly = assemble(Deployment.of(settings), policy_tokenizer(settings))
    try:
        assert isinstance(assembly.reward, Rewards)
        assert assembly.reward.names == ("first", "second")
        assert settings.models.critic == str(folder / "reward")
    finally:
        assembly.close()
    assert oppo(folder, "", *BOTH, "run.name=two") == DONE
    trace = json.loads((folder / "runs" / "two" / "trace.json").read_text())
    tracks = {each["args"]["name"] for each in trace if each["name"] == "thread_name"}
    assert {"reward model 'first'", "reward model 'second'"} <= tracks


def judge(keys: str) -> str:
    return f'[{{source="http://127.0.0.1:1/v1", model="grader", {keys}}}]'


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ('[{name="first", source="reward"}, {name="second", source="nowhere/at-all", weight=0.5}]', "rewards.1: "),
        (judge('template="{answer}"'), "rewards.0 asks a judge about 'answer', which is no column of the data"),
        (judge('template="{"'), "rewards.0: a judge's template has a brace that is no field"),
        (judge('template="x", api_key_env="NOT_SET"'), "rewards.0: the key is to be in the environment variable"),
        (judge('template="x", score="best"'), "rewards.0.score: expected 'number', 'regex:PATTERN', 'json:FIELD'"),
        (
            judge('template="x", process=true'),
            "unknown key 'rewards.0.process' (it is a key of a reward whose source is a function)",
        ),
        (
            '[{name="a", source="judges.py:here", process=true}]',
            "'here' is async, and a process of its own is",
        ),
        ("['math']", "asks for 'answer', which is no column of the data"),
        ("['gsm8k']", "asks for 'answer', which is no column of the data"),
        ("['code']", "asks for 'tests', which is no column of the data"),
    ],
)
def test_a_reward_that_cannot_be_had_is_named_by_its_key(
    folder: Path, rewards: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "--dry-run", f"rewards={rewards}") == UNUSABLE
    assert said in capsys.readouterr().err


class Grader(BaseHTTPRequestHandler):
    """Answers as a chat model that counts the letters of what it is asked, and has no answer to multiples of three.

    Attributes:
        questions: and the keys that came with them.
    """

    questions: ClassVar[list[tuple[str, str]]] = []

    def do_POST(self) -> None:
        """Grade a response."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        self.questions.append((asked, self.headers["Authorization"]))
        content = f"grade: {len(asked)}" if len(asked) % 3 else "I cannot say."
        body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[str]:
    """Return the URL of a judge."""
    Grader.questions.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Grader) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_judge_grades_each_response_and_one_without_a_grade_is_dropped(
    folder: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    judge = f'source="{service}", model="grader", template="{{prompt}}|{{response}}", api_key_env="JUDGE_KEY"'
    parts = (f'rewards=[{{{judge}, on_failure="drop"}}]', "run.name=judged", "run.steps=2", "run.panel=off")
    assert oppo(folder, "", *parts) == DONE
    assert {key for _, key in Grader.questions} == {"Bearer k"}
    assert all("|" in asked for asked, _ in Grader.questions)
    for step in lines(folder, "judged"):
        assert step["objective/scores"] > 1
    without = {asked for asked, _ in Grader.questions if len(asked) % 3 == 0}
    assert sum(step["deferral/dropped"] for step in lines(folder, "judged")) == len(without) > 0


@pytest.mark.parametrize("choice", ["drop", "skip"])
def test_a_part_drops_a_rollout_or_leaves_it_to_the_others(folder: Path, choice: str) -> None:
    parts = (
        'rewards=[{name="picky", source="judges.py:picky"}, {name="model", source="reward"}]',
        f"rewards.0.on_drop={choice}",
        f"run.name={choice}",
        "run.panel=off",
    )
    assert oppo(folder, "", *parts) == DONE
    journal = records(folder, choice, "journal.jsonl")
    reasons = {line["reason"] for line in journal if line["event"] == "dropped"}
    assert reasons == ({"picky: no goal"} if choice == "drop" else set())
    shares = [step["rewards/picky/share"] for step in lines(folder, choice)]
    assert (statistics.mean(shares) < 1) is (choice == "skip")


def test_a_part_has_settings_of_its_own(folder: Path) -> None:
    import os

    parts = (
        'rewards=[{name="apart", source="judges.py:apart"}, {name="here", source="judges.py:here"}]',
        'rewards.2={name="asked", source="judges.py:apart"}',
        "rewards.0.process=true",
        'rewards.1.process="sync"',
        "run.name=apart",
        "run.panel=off",
    )
    assert oppo(folder, "", *parts) == DONE
    for step in lines(folder, "apart"):
        assert step["rewards/here/mean"] == step["rewards/asked/mean"] == os.getpid()
        assert step["rewards/apart/mean"] != os.getpid()


@pytest.mark.parametrize("scorers", ["thread", "process"])
def test_a_scorer_of_a_file_works_in_the_place_of_the_scorers(folder: Path, scorers: str) -> None:
    made = (
        "rewards.0.source=judges.py:Longest",
        f"run.scorers={scorers}",
        f"run.name=placed-{scorers}",
        "run.panel=off",
    )
    assert oppo(folder, "", *made) == DONE
    trace = json.loads((folder / "runs" / f"placed-{scorers}" / "trace.json").read_text())
    assert "reward" in {each["args"]["name"] for each in trace if each["name"] == "thread_name"}


def test_what_may_change_when_a_run_is_resumed_may_change_for_one_of_several_rewards(folder: Path) -> None:
    several = (
        'rewards=[{name="picky", source="judges.py:picky"}, {name="model", source="reward"}]',
        "rewards.0.on_drop=skip",
    )
    assert oppo(folder, "", *several, "run.name=resumed", "run.checkpoint_every=1", "run.panel=off") == DONE
    run = folder / "runs" / "resumed"
    longer = ["--set", "run.steps=3", "--set", "rewards.0.timeout=60"]
    assert main(["resume", str(run), *longer]) == DONE
    for changed in (
        "rewards.0.weight=3",
        "rewards.2={name='new', source='reward'}",
        "rewards.0.source=judges.py:short",
    ):
        with pytest.raises(ConfigError, match=r"rewards\S* cannot change when a run is resumed"):
            settings_of(run, [changed])
