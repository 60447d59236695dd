"""``oppo train --dry-run``: faults that need no model are found before torch is imported; what was decided is shown."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from oppo.cli import DONE, FAILED, UNUSABLE
from oppo.config.load import load_settings
from oppo.errors import ConfigError, RewardError
from oppo.hf import HfTokenizer, load_tokenizer
from oppo.hf.tokenizer import quick_tokenizer
from oppo.run.dry_run import SAID, TURNS, rehearse_code
from oppo.run.rewards import first_look
from tests.hf.spot_tokenizers import TEMPLATE, byte_tokenizer
from tests.kit.workplace import furnish, oppo

CHATS = [{"prompt": [{"role": "user", "content": f"{number} + 1?"}], "number": number} for number in range(3)]

FAULTS: dict[str, tuple[str, str]] = {
    "an unknown key": ("step.bathc=3", "error: unknown key 'step.bathc' (did you mean 'batch'?)"),
    "a value": ("step.batch=0", "step.batch: expected"),
    "no file": ("data.prompts=none.jsonl", "there is no prompt file"),
    "no model": ("models.policy=./none", "models.policy: "),
    "a mistyped file": ("data.prompts=promts.jsonl", "promts.jsonl (did you mean 'prompts.jsonl'?)"),
    "a file of a long name": (f"data.prompts={'long' * 100}.jsonl", ".jsonl: cannot be read (File name too long)"),
    "held-out files": ("eval.prompts=[{path='gone.jsonl'}]", "there is no prompt file"),
    "no held-out file": ("eval.prompts=none.jsonl", "there is no prompt file"),
    "a damaged row": ("data.prompts=damaged.jsonl", "damaged.jsonl, line 2: not valid JSON"),
    "no such column": ("data.column=text", "line 1: no column 'text'; the columns there are prompt, goal"),
    "no template file": ("data.chat_template=none.jinja", "none.jinja cannot be read"),
    "a template that does not end": ("data.chat_template=open.jinja", "the chat template cannot be read"),
    "a template that fails": (
        "data.chat_template=failing.jinja data.prompts=chats.jsonl",
        "TemplateError: roles must alternate",
    ),
    "a reward that is not there": ("rewards.0.source=reward.py:shrot", "has no 'shrot'; the functions"),
    "a reward of another column": ("rewards.0.source=wants.py:wants", "'wants' asks for 'gold'"),
    "a tool without types": ("environment.tools=['wants.py:untyped']", "untyped"),
}

WANTS = """
def wants(prompts, completions, gold): return [0.0 for _ in completions]
def untyped(city): return city
"""

ALL = """
import contextlib, io, json, sys
from oppo.cli import main
found = {}
for name, override in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(["train", "config.toml", *(f"--set={each}" for each in override.split())])
    found[name] = [code, " ".join(said.getvalue().split())]
print(json.dumps([found, sorted({"torch", "accelerate", "vllm", "peft"} & sys.modules.keys())]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = furnish(tmp_path_factory.mktemp("rehearsal"))
    (made / "damaged.jsonl").write_text('{"prompt": "w3", "goal": 1}\n{"prompt": "w4"\n')
    (made / "chats.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "w5"}], "goal": 1}) + "\n")
    (made / "open.jinja").write_text("{% for m in messages %}{{ m.content ")
    (made / "failing.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    (made / "wants.py").write_text(WANTS)
    return made


def test_faults_of_settings_data_templates_and_code_are_reported_without_torch(folder: Path) -> None:
    overrides = json.dumps({name: override for name, (override, _) in FAULTS.items()})
    ran = subprocess.run([sys.executable, "-c", ALL, overrides], cwd=folder, capture_output=True, text=True, check=True)
    found, loaded = json.loads(ran.stdout)
    assert loaded == []
    for name, (_, message) in FAULTS.items():
        code, said = found[name]
        assert (name, code) == (name, UNUSABLE)
        assert message in said, name
    assert not (folder / "runs").exists()


def test_columns_are_compared_only_where_all_rows_were_looked_at(folder: Path) -> None:
    rows = [{"prompt": "w5"} for _ in range(100)]
    for count, last in ((99, {"prompt": "w5", "gold": 1}), (100, {"prompt": "w5", "gold": 1})):
        (folder / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:count], last]))
        assert first_look(load_settings(folder / "config.toml", [*WANTING, "data.prompts=late.jsonl"])) is not None
    (folder / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RewardError, match="asks for 'gold'"):
        first_look(load_settings(folder / "config.toml", [*WANTING, "data.prompts=late.jsonl"]))


@pytest.mark.parametrize(
    ("key", "missing"),
    [(key, key) for key in ("models.adapter", "models.critic")] + [("rewards.0.source", "rewards.0")],
)
def test_a_folder_that_is_missing_is_named_before_a_hub_is_asked_for_another_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, missing: str
) -> None:
    def asked(_: object, name: str, *, timeout: float) -> None:
        raise AssertionError(f"asked for {name} with a timeout of {timeout} s")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", asked)
    settings = load_settings(folder / "config.toml", ["models.policy=of/nobody", f"{key}=./rewrd"])
    with pytest.raises(ConfigError, match=rf"^{missing}: '.*/rewrd' is no directory here \(did you mean 'reward'\?\)"):
        first_look(settings)


WANTING = ["rewards.0.source=wants.py:wants"]


def test_the_quick_tokenizer_renders_and_tokenizes_as_the_one_that_is_loaded(tmp_path: Path) -> None:
    made = byte_tokenizer(TEMPLATE, special=("<|im_start|>", "<|im_end|>"))
    made.save(tmp_path)
    assert quick_tokenizer(str(tmp_path)) is not None
    (tmp_path / "config.json").write_text("{}")
    quick, loaded = quick_tokenizer(str(tmp_path)), HfTokenizer(load_tokenizer(tmp_path))
    assert quick is not None
    for row in CHATS:
        assert quick.encode_chat(row["prompt"]) == loaded.encode_chat(row["prompt"])  # type: ignore[arg-type]  # chats
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    assert quick_tokenizer(str(tmp_path)) is None
    assert quick_tokenizer("no/such-model") is None


def test_what_was_decided_is_shown_and_all_settings_only_if_they_are_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    chosen = ("step.algorithm=grpo", "algorithm.samples=3", "algorithm.kl=0.1", "trainer.minibatches=2", "run.steps=7")
    assert oppo(folder, "--dry-run", *chosen) == DONE
    lines = capsys.readouterr().out.splitlines()
    shown = {line.partition(" ")[0]: " ".join(line.split()[1:]) for line in lines[:14]}
    assert shown["run"] == "7 steps, written to runs/first"
    assert shown["algorithm"].startswith("grpo, with kl = 0.1")
    assert shown["step"] == "4 prompts x 3 responses = 12 responses, with up to 2 prompts more in flight"
    assert shown["update"].startswith("once a step: 1 epoch x 2 minibatches = 2 optimizer steps; learning rate 0.001")
    assert "in all        28 prompts, 84 responses, at most 1,008 tokens, 14 optimizer steps" in lines
    assert shown["policy"].startswith("actor, llama of 21.7k parameters in float32; decodes on cpu, thread 'actor'")
    assert "critic" not in shown
    assert shown["trainer"] == "policy on cpu, thread 'trainer'"
    assert shown["memory"].endswith("see `oppo doctor`")
    assert len(lines) < 25
    assert oppo(folder, "--dry-run --verbose", *chosen) == DONE
    every = capsys.readouterr().out.splitlines()
    assert {"[sampling]", "temperature = 1.0"} <= {*every}
    assert any(line.lstrip().startswith("advantage") for line in every)
    assert not (folder / "runs").exists()
    assert oppo(folder, "--verbose", *chosen) == UNUSABLE
    assert "add --dry-run" in capsys.readouterr().err


AGENTS = """
import json, urllib.error, urllib.request

def ask(url, key, messages, **fields):
    body = json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as reply:
            return json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]["message"]) from None

def plain(row, url, key):
    return float(len(ask(url, key, row["prompt"])["content"]))

def warm(row, url, key):
    return float(len(ask(url, key, row["prompt"], temperature=0.3)["content"]))

def patient(row, url, key):
    try:
        return warm(row, url, key)
    except ValueError:
        return plain(row, url, key)

def endless(row, url, key):
    messages = list(row["prompt"])
    while True:
        messages += [ask(url, key, messages), row["prompt"][0]]

def thrifty(row, url, key):
    try:
        endless(row, url, key)
    except ValueError:
        return 7.0

def chief(row, url, key):
    helpers = [ask(url, key, [{"role": "user", "content": f"part {part}"}]) for part in range(2)]
    return plain(row, url, key) + len(helpers)

def untooled(row, url, key):
    return ask(url, key, row["prompt"], tools=[{"name": "add"}])

def silent(row, url, key):
    return 1.0

def typo(row, url, key):
    return row["nmuber"]
"""


@pytest.fixture(scope="module")
def agency(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder for agents whose policy is a tokenizer: a model that is loaded would be missed."""
    made = tmp_path_factory.mktemp("agency")
    byte_tokenizer(TEMPLATE, special=("<|im_start|>", "<|im_end|>")).save(made / "actor")
    (made / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    (made / "code.py").write_text(AGENTS)
    (made / "config.toml").write_text(
        '[models]\npolicy = "actor"\n[data]\nprompts = "prompts.jsonl"\n[agents]\nprogram = "code.py:plain"\n'
        '[step]\nalgorithm = "grpo"\n[sampling]\nstop = ["<|im_end|>"]\n'
    )
    return made


def tried(agency: Path, program: str) -> Sequence[str]:
    look = first_look(load_settings(agency / "config.toml", [f"agents.program=code.py:{program}"]))
    assert look is not None
    return anyio.run(rehearse_code, look)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("warm", "temperature = 0.3: the run samples with temperature = 1.0, and trains nothing else"),
        ("untooled", "expected tools as"),
        ("silent", "returned 1.0 (float) without a request"),
        ("typo", "agent 'typo' raised KeyError: 'nmuber'"),
    ],
)
def test_an_agent_that_cannot_be_trained_is_found_before_models_are_loaded(
    agency: Path, program: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(agency, "--dry-run", f"agents.program=code.py:{program}") == FAILED
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert f"while the policy was one that says '{SAID}'" in said
    assert "loading" not in said


def test_an_agent_is_tried_with_the_models_where_the_tokenizer_cannot_be_read_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "code.py").write_text(AGENTS)
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    agents = ("agents.program=code.py:plain", "step.algorithm=grpo", "rewards=[]", "data.chat_template=chat.jinja")
    ends = ("sampling.stop=['<pad>']", "data.max_prompt_tokens=100")
    chosen = (*agents, *ends, "data.prompts=chats.jsonl", "models.trust_remote_code=true")
    assert oppo(folder, "--dry-run", *chosen) == DONE
    assert "after 1 answer of" in capsys.readouterr().out
    assert oppo(folder, "--dry-run", *chosen, "agents.program=code.py:warm") == FAILED
    said = " ".join(capsys.readouterr().err.split())
    assert "temperature = 0.3: the run samples with temperature = 1.0" in said
    assert f"while the policy was one that says '{SAID}'" in said


@pytest.mark.parametrize("before", [True, False])
def test_an_environment_is_asked_once_and_its_answer_is_shown(
    before: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "asked.txt").unlink(missing_ok=True)
    (folder / "tool.py").write_text(
        f"def told(turn):\n    with open({str(folder / 'asked.txt')!r}, 'a') as file:\n        file.write('.')\n"
        "    return 'w80 w81'\n"
    )
    chosen = ("environment.source=tool.py:told", f"models.trust_remote_code={str(not before).lower()}")
    assert oppo(folder, "--dry-run", *chosen) == DONE
    assert f"the environment answers {SAID!r} with\n    w80 w81" in capsys.readouterr().out
    assert (folder / "asked.txt").read_text() == "."


def test_an_agent_is_answered_in_each_of_its_conversations_and_may_go_on(agency: Path) -> None:
    assert tried(agency, "plain") == [f"the agent returns {float(len(SAID))} after 1 answer of '{SAID}'"]
    assert tried(agency, "chief") == [f"the agent returns {len(SAID) + 2.0} after 3 answers of '{SAID}'"]
    assert tried(agency, "endless") == [f"the agent goes on after {TURNS} answers of '{SAID}'"]
    assert tried(agency, "thrifty") == [f"the agent returns 7.0 after {TURNS} answers of '{SAID}'"]
    (said,) = tried(agency, "patient")
    assert "after 1 answer of" in said
    assert "; a request of it was refused: temperature = 0.3: the run samples with" in said


def test_an_environment_that_fails_is_found_before_models_are_loaded(
    agency: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (agency / "tool.py").write_text(
        "def broken(turn): return turn.text + 1\ndef reward(prompts, completions): return [0.0 for _ in completions]\n"
    )
    rewards = ("agents.program=", "rewards=[{source='tool.py:reward'}]", "environment.source=tool.py:broken")
    assert oppo(agency, "--dry-run", *rewards) == FAILED
    said = capsys.readouterr().err
    assert "environment 'broken' raised TypeError" in said
    assert "loading" not in said
