"""``oppo push``: a run's card, and one commit of card and policy, by the hub's own client to a hub on loopback."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForCausalLM

from oppo.cli import DONE, UNUSABLE, main
from oppo.config.load import load_settings
from oppo.errors import ConfigError
from oppo.run.push import CARD, card, push
from tests.kit.workplace import furnish, oppo


class Hub(BaseHTTPRequestHandler):
    """What the hub's client asks for; keeps what was committed."""

    asked: list[tuple[str, Any]]
    refuses = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        lines = [json.loads(line) for line in body.splitlines()]
        self.asked.append((self.path, lines))
        host = f"http://{self.headers['Host']}"
        answer: dict[str, object] = {"url": f"{host}/me/tuned", "name": "me/tuned"}
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in lines[0]["files"]
            ]
            answer = {"files": files}
        elif "/commit/" in self.path:
            answer = {"success": True, "commitOid": "0" * 40, "commitUrl": f"{host}/me/tuned/commit/0"}
        text = json.dumps({"error": "no"} if self.refuses else answer).encode()
        self.send_response(401 if self.refuses else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_request(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HfApi]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    Hub.asked, Hub.refuses = [], False
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield HfApi(endpoint=f"http://127.0.0.1:{server.server_port}", token="hf_test")
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("push"))
    assert oppo(folder, "", "run.panel=off", "algorithm.gamma=0.5") == DONE
    return folder / "runs" / "first"


def test_a_dry_run_writes_a_card_that_names_no_folder_of_this_machine(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(run), "me/tuned", "--dry-run"]) == DONE
    assert capsys.readouterr().out == f"written: {run / CARD}\n"
    text = (run / CARD).read_text()
    assert str(run.parent.parent) not in text
    for part in (
        "# tuned",
        "actor, trained with",
        "Prompts: prompts.jsonl",
        "Rewards: reward",
        "algorithm.gamma = 0.5",
    ):
        assert part in text
    assert "| Updates | 2 |" in text
    assert "torch 2." in text
    assert "2509.25762" in text
    data: Any = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.base_model) == ("transformers", "text-generation", None)
    assert {"oppo", "rlhf", "ppo"} <= set(data.tags or [])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rewards=[]", "agents.program=agent.py:run"], "Prompts: prompts.jsonl. Agent: agent.py:run.\n"),
        (
            ["rewards=[]", "step.algorithm=distill", "models.teacher=org/large"],
            "Prompts: prompts.jsonl. Teacher: org/large.\n",
        ),
    ],
)
def test_a_card_says_what_was_learnt_from_without_rewards(run: Path, overrides: list[str], said: str) -> None:
    settings = load_settings(run.parent.parent / "config.toml", overrides)
    assert said in str(card(run, settings, "me/tuned"))


def test_card_and_policy_are_one_commit(run: Path, hub: HfApi, tmp_path: Path) -> None:
    assert push(run, "me/tuned", private=True, api=hub) == f"{hub.endpoint}/me/tuned"
    paths = [path for path, _ in Hub.asked if path != "/api/validate-yaml"]
    assert paths == ["/api/repos/create", "/api/models/me/tuned/preupload/main", "/api/models/me/tuned/commit/main"]
    assert Hub.asked[0][1][0]["name"] == "tuned"
    assert Hub.asked[0][1][0]["visibility" if "visibility" in Hub.asked[0][1][0] else "private"] in {True, "private"}
    head, *files = Hub.asked[-1][1]
    assert head["value"]["summary"] == "first, trained with oppo"
    for each in files:
        (tmp_path / each["value"]["path"]).write_bytes(base64.b64decode(each["value"]["content"]))
    assert (tmp_path / "README.md").read_text() == (run / CARD).read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_hub_that_refuses_or_is_not_there_loses_nothing(run: Path, hub: HfApi) -> None:
    Hub.refuses = True
    with pytest.raises(ConfigError, match=r"did not take me/tuned .*hf auth login.*can be run again"):
        push(run, "me/tuned", api=hub)
    nobody = HfApi(endpoint="http://127.0.0.1:9", token="hf_test")
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9 did not take me/tuned .*network"):
        push(run, "me/tuned", api=nobody)
    assert (run / CARD).exists()
    assert (run / "checkpoints" / "final" / "actor" / "config.json").exists()


@pytest.mark.parametrize("repo", ["tuned", "me/tuned/more", "me/..", ""])
def test_what_is_no_repository_is_refused(run: Path, repo: str) -> None:
    with pytest.raises(ConfigError, match="expected a repository owner/name, got"):
        push(run, repo)


def test_a_run_without_a_policy_and_a_folder_without_a_run_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text((run / "config.toml").read_text())
    with pytest.raises(ConfigError, match="has no trained policy in"):
        push(tmp_path, "me/tuned")
    assert main(["push", str(tmp_path / "nothing"), "me/tuned"]) == UNUSABLE
    assert "config.toml" in capsys.readouterr().err
