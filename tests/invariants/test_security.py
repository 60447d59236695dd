"""What a run writes holds no secret, what it reads can run no code, and what models say commands nothing."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oppo.cli import main
from oppo.config.load import load_settings
from oppo.hf.loading import load_causal
from oppo.hf.weights import weights_digest
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo, records, tokenizer_of

ROOT = Path(__file__).parents[2]

CANARIES = {
    "JUDGE_PASSWORD": "canary-in-password",
    "HF_TOKEN": "hf_canaryInTokenCanary",
    "WANDB_API_KEY": "canary-in-api-key",
    "AWS_SECRET_ACCESS_KEY": "canary/in+secret",
}

PAYLOADS = (
    "<script>alert(1)</script>",
    "\x1b[31mred",
    "\x1b]0;owned\x07",
    "[bold]markup[/nonsense]",
    "\u202eevil",
    "&lt;",
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(autouse=True)
def _one_thread_here() -> None:
    torch.set_num_threads(1)


def leaks(folder: Path, *said: str) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file() and b"canary" in path.read_bytes().lower()]
    return [*map(str, files), *(text for text in said if "canary" in text.lower())]


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("canaries")
@pytest.mark.parametrize(("policy", "code"), [("fail", 1), ("drop", 3)])
def test_no_secret_reaches_the_run_directory_or_the_terminal(
    workplace: Path, policy: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = ("rewards.0.source=reward.py:leaky", f"rewards.0.on_failure={policy}", f"run.name=leaky-{policy}")
    assert oppo(workplace, "", *overrides) == code
    printed = capfd.readouterr()
    directory = workplace / "runs" / f"leaky-{policy}"
    assert "401 for https://***@judge.example/?api_key=***" in (directory / "log.jsonl").read_text()
    assert (directory / "report.html").exists()
    assert leaks(directory, printed.out, printed.err) == []


@pytest.mark.usefixtures("canaries")
def test_a_secret_in_the_settings_is_refused_and_not_shown(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    secret = CANARIES["JUDGE_PASSWORD"]
    shutil.copytree(workplace / "actor", workplace / secret)
    settings = ("run.name=shown", f"models.policy={secret}", f"models.reference={secret}", "rewards.0.source=reward")
    assert oppo(workplace, "--dry-run", *settings) == 2
    assert oppo(workplace, "", *settings) == 2
    assert oppo(workplace, "", "run.name=other", "models.reference=https://me:canary-in-url@host/model") == 2
    printed = capfd.readouterr()
    assert "https://***@host/model" in printed.err
    assert f"models.policy holds a secret, got {workplace}/***: a run keeps its settings in a file, so " in printed.err
    assert leaks(workplace / "runs", printed.out, printed.err) == []


def test_a_password_that_is_an_ordinary_word_changes_nothing_that_is_read_back(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DB_PASSWORD", "rollout")
    monkeypatch.setenv("APP_SECRET", "event-1")
    overrides = ("run.directory=rollout", "run.name=event-1", "run.steps=1", "run.checkpoint_every=1", "run.panel=off")
    assert oppo(workplace, "", *overrides) == 0
    directory = workplace / "rollout" / "event-1"
    assert load_settings(directory / "config.toml").run_directory == directory
    assert {"rollout", "event"} <= json.loads((directory / "journal.jsonl").read_text().splitlines()[0]).keys()
    assert main(["resume", str(directory), "--set", "run.steps=2"]) == 0
    assert str(directory / "report.html") in capfd.readouterr().out


class Payload:
    """Pickles into something that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_poisoned_pickle_is_never_opened(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark, poisoned = workplace / "mark", workplace / "poisoned"
    shutil.copytree(workplace / "actor", poisoned)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth"):
        torch.save(Payload(mark), poisoned / name)
    overrides = ("models.policy=poisoned", "models.reference=actor")
    assert oppo(workplace, "", "run.name=poisoned", "run.steps=1", "run.panel=off", *overrides) == 0
    assert not mark.exists()
    (poisoned / "model.safetensors").unlink()
    assert oppo(workplace, "", "run.name=poisoned-only", *overrides) == 2
    assert "only as pickles" in capsys.readouterr().err
    assert oppo(workplace, "", "run.name=poisoned-only", *overrides, "models.allow_pickle=true") == 2
    assert "hold more than tensors, and nothing else is built from them" in capsys.readouterr().err
    assert not mark.exists()
    torch.load(poisoned / "pytorch_model.bin", weights_only=False)
    assert mark.exists(), "a payload that does nothing would prove nothing"


def test_tensors_in_pickles_are_read_where_that_is_asked_for(workplace: Path) -> None:
    pickled = workplace / "pickled"
    shutil.copytree(workplace / "actor", pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    overrides = ("models.policy=pickled", "models.allow_pickle=true", "run.steps=1", "run.panel=off")
    assert oppo(workplace, "", "run.name=pickled", *overrides) == 0
    read = load_causal(pickled, allow_pickle=True)
    assert weights_digest(read) == weights_digest(load_causal(workplace / "actor"))


def test_a_run_writes_safetensors_and_text_only(workplace: Path) -> None:
    assert oppo(workplace, "", "run.name=written", "run.steps=1", "run.panel=off") == 0
    suffixes = {path.suffix for path in (workplace / "runs" / "written").rglob("*") if path.is_file()}
    assert suffixes <= {".toml", ".json", ".jsonl", ".html", ".safetensors", ".jinja", ""}
    assert {path.name for path in (workplace / "runs" / "written").rglob("*") if not path.suffix} >= {"COMPLETE"}


def test_nothing_in_the_package_unpickles_or_imports_by_name() -> None:
    faults = []
    for path in sorted((ROOT / "oppo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
            faults += [f"{path.relative_to(ROOT)}: {name}" for name in names if FORBIDDEN.search(name)]
    allowed = (
        "oppo/user_code.py: importlib",  # the one place that runs a file, which the user has named
        "oppo/libraries.py: importlib.util",  # asks whether an extra is installed
        "oppo/placement/process.py: subprocess",  # the one place that starts a worker, which is this package's
        "oppo/vllm/processes.py: subprocess",  # ends vLLM's processes if this one is killed
        "oppo/rewards/tasks.py: subprocess",  # runs the code of responses within limits, if the user asks for that
        "oppo/hf/weights.py: pickle",  # PickleBuffer alone: bytes of weights that cross to another process
        "oppo/placement/child.py: pickle",  # over the socket to that process, never from a file
    )
    assert [fault for fault in faults if not fault.startswith(allowed)] == []


FORBIDDEN = re.compile(
    r"^(?:c?pickle|dill|joblib|cloudpickle|marshal|shelve)\b|^torch\.(?:load|save)$|^np\.load$|__import__"
    r"|^importlib\.(?!metadata|resources)|^runpy|^subprocess|^os\.system|yaml\.load"
)


def test_reading_a_run_again_imports_and_runs_nothing_of_it(workplace: Path) -> None:
    overrides = ("rewards.0.source=reward.py:short", "run.steps=1", "run.panel=off")
    assert oppo(workplace, "", "run.name=again", *overrides) == 0
    directory = workplace / "runs" / "again"
    program = (
        "import sys\nfrom pathlib import Path\nfrom oppo import load_settings\nfrom oppo.report import story\n"
        f"directory = Path({str(directory)!r})\n"
        "settings = load_settings(directory / 'config.toml')\n"
        "assert settings.rewards[0].source.endswith('reward.py:short')\n"
        "assert story(directory / 'journal.jsonl', 0)\n"
        "assert not {'torch', 'transformers', 'pickle5'} & set(sys.modules)\n"
        "assert not [name for name in sys.modules if name.startswith('oppo_user')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace whose models say nothing but payloads."""
    folder = furnish(tmp_path_factory.mktemp("hostile"))
    names = ["<pad>", "<s>", "</s>", *(f"{PAYLOADS[i % len(PAYLOADS)]}{i}" for i in range(3, tiny.VOCABULARY))]
    for model in ("actor", "reward"):
        tokenizer_of(names).save_pretrained(folder / model)
    rows = [{"prompt": f"{names[3 + i]} {names[9 + i]}"} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("panel", ["live", "lines"])
def test_what_models_say_commands_neither_the_terminal_nor_the_page(
    hostile: Path, panel: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert oppo(hostile, "", f"run.name={panel}", f"run.panel={panel}") == 0
    printed = capsys.readouterr()
    samples = records(hostile, panel, "samples.jsonl")
    assert any("\x1b[31mred" in str(each["completion"]) for each in samples), "the payload was said"
    for text in (printed.out, printed.err):
        assert "\x1b[31mred" not in text
        assert "\x1b]0;" not in text
        assert "\x07" not in text
        assert "\u202e" not in text
    page = (hostile / "runs" / panel / "report.html").read_text().partition('<script type="application/json"')[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "&amp;lt;" in page
    if panel == "live":
        assert re.search(r"\\x1b|\\u202e|<script>|\[bold\]", printed.out), "the panel shows a response, escaped"


def test_what_a_reward_function_says_commands_nothing_either(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(workplace, "", "run.name=rude", "rewards.0.source=reward.py:rude") == 1
    said = capsys.readouterr().err
    assert r"\x1b]0;owned\x07\x1b[31m[bold]<script>alert(1)</script>" in said
    assert "\x1b" not in said
    assert "\x1b" not in (workplace / "runs" / "rude" / "log.jsonl").read_text()


def test_a_fault_of_the_program_itself_leaks_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no way to https://me:canary@host\x1b[31m")

    monkeypatch.setattr("oppo.config.load.load_settings", fail)
    assert main(["train", str(workplace / "config.toml")]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert r"RuntimeError: no way to https://***@host\x1b[31m" in said
    assert "canary" not in said.replace('me:canary@host\\x1b[31m")', "")
