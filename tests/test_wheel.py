"""The built wheel, alone and with each extra alone, in an environment that has what oppo always needs, nothing else.

``make test-wheel`` makes that environment, of which each extra gets a copy, and runs this.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from datasets import Dataset

from tests.kit.assets import furnish

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[1]
BASE = ROOT / ".venv-wheel"

CONFIG = """
run = { name = "r", steps = 1, panel = "off", cores = 1, watchdog_seconds = 240, call_timeout = 240 }
models = { policy = "llama", device = "cpu" }
data.prompts = "rows.jsonl"
sampling = { max_new_tokens = 48, stop = ["<|im_end|>"] }
step.batch = 4
trainer = { learning_rate = 1e-3, epochs = 1 }
"""

CODE = """
import asyncio, json, urllib.request


def short(completion_ids):
    return [1 / (1 + len(ids)) for ids in completion_ids]


async def agent(row, base_url, api_key):
    def ask():
        body = json.dumps({"model": "policy", "messages": row["prompt"]}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
            return json.load(answer)["usage"]["completion_tokens"]

    return 1 / (1 + await asyncio.to_thread(ask))
"""

PROJECT = """
import sys

import oppo, oppo.report, pytest
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, prompts

def test_the_package_is_the_one_that_was_built():
    assert oppo.__file__.startswith(sys.prefix)

def test_the_page_of_a_run_has_its_parts(tmp_path):
    with oppo.report.RunDirectory(tmp_path / "run"):
        pass
    assert "<style>" in (tmp_path / "run" / "report.html").read_text()

@pytest.mark.virtual
async def test_of_a_pipeline(recorder, hidden_fraction, story):
    reward = FakeScorer(fake_scalar, per_token=0.001)
    models = {"policy": FakePolicy(), "reward": reward, "trainer": FakeTrainer(9.0)}
    graph = oppo.grpo(**models, admission=oppo.Overcommit(2), chunks=oppo.admission.chunking.Fixed(2))
    async with graph.open(prompts(9), observers=[recorder]) as run:
        assert [report.seconds > 9.0 async for report in run.steps(2)] == [True, True]
    assert 0 < hidden_fraction() < 1
    assert story(0)[-1].event == "trained"
"""

TASKS = """
import json
from oppo.rewards.tasks import task_rows

print(*map(json.dumps, task_rows("chain_sum", size=8)), sep="\\n")
"""

SHORT = 'rewards=["code.py:short"]'


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "agents": ("agents.program=code.py:agent",),
    "datasets": (SHORT, "data.prompts=saved"),
    "http": ('rewards=[{source="URL/v1",model="grader",template="{response}",score="number"}]',),
    "lora": (SHORT, "models.lora_rank=4"),
    "math": ('rewards=["math"]',),
    "mlflow": (SHORT, 'run.track=["mlflow"]'),
    "quantization": (SHORT, "models.lora_rank=4", "models.quantization=nf4"),
    "ray": ('rewards=["reward"]', "placement.cluster=auto", "placement.scorers=cpu"),
    "reasoning-gym": ('rewards=["reasoning-gym"]', "data.prompts=tasks.jsonl"),
    "tensorboard": (SHORT, 'run.track=["tensorboard"]'),
    "trackio": (SHORT, 'run.track=["trackio"]'),
    "vision": (SHORT, "models.policy=vision", "data.prompts=shown_prompts.jsonl"),
    "wandb": (SHORT, 'run.track=["wandb"]'),
}
"""What a run sets that needs an extra."""

BESIDE = {"quantization": ("lora",)}
"""Further extras that it needs."""

SERVED: Mapping[str, tuple[str, ...]] = {
    "openenv": (SHORT, "environment.factory=openenv:URL"),
    "verifiers": ("agents.program=verifiers", "data.prompts=verifiers:gsm8k"),
}
"""Settings that need more than an extra and this machine to run; `make test-gym` has both."""

NOT_OF_A_RUN = {"browser", "dev", "docs", "examples", "report", "test", "trackers", "vllm"}


class Grader(BaseHTTPRequestHandler):
    """A chat API that answers with a grade."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": "0.5"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that the base class has
        pass


@pytest.fixture(autouse=True, scope="module")
def _no_authorities() -> None:
    """Packages come from an index, by TLS."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Grader) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("wheel"))
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": str(n + 1)} for n in range(8)]
    for name in ("rows", "tasks"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).save_to_disk(folder / "saved")
    (folder / "code.py").write_text(CODE)
    (folder / "config.toml").write_text(CONFIG)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """Yield a copy of the environment, whose files are the same on disk until they are replaced."""
    copy = tmp_path / "environment"
    shutil.copytree(BASE, copy, symlinks=True, copy_function=os.link)
    yield copy
    shutil.rmtree(copy)


def install(environment: Path, *extras: str) -> None:
    (wheel,) = (BASE / "dist").glob("oppo-*.whl")
    uv(environment, "--constraints", BASE / "torch.txt", f"oppo[{','.join(extras)}] @ {wheel.as_uri()}")


def uv(environment: Path, *wanted: str | Path) -> None:
    program([BASE / "bin" / "uv", "pip", "install", "--quiet", "--python", environment / "bin" / "python", *wanted])


def train(environment: Path, folder: Path, name: str, settings: tuple[str, ...], url: str = "") -> tuple[int, str]:
    """Run ``oppo train`` of an environment; return its exit code and what it said."""
    overrides = [f"run.name={name}", *(each.replace("URL", url) for each in settings)]
    command = ["-m", "oppo", "train", "config.toml", *(word for each in overrides for word in ("--set", each))]
    return python(environment, *command, folder=folder)


def python(environment: Path, *arguments: str | Path, folder: Path | None = None) -> tuple[int, str]:
    mlflow = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    changed = {"PYTHONWARNINGS": "ignore", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "file:mlruns", **mlflow}
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [environment / "bin" / "python", *arguments],
        cwd=folder,
        env={**known, **changed, "PATH": f"{environment / 'bin'}{os.pathsep}{known['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


def program(command: list[str | Path]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_extra_of_a_run_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {*EXTRAS, *SERVED, *NOT_OF_A_RUN} == set(project["optional-dependencies"])


@pytest.mark.parametrize("extra", [*EXTRAS, *SERVED])
def test_what_needs_an_extra_says_how_to_install_it(extra: str, folder: Path, url: str) -> None:
    code, said = train(BASE, folder, f"no-{extra}", {**EXTRAS, **SERVED}[extra], url)
    assert code == 2, said
    assert any(f"pip install 'oppo[{each}]'" in said for each in (extra, *BESIDE.get(extra, ()))), said
    assert not (folder / "runs" / f"no-{extra}" / "summary.json").exists()


@contextmanager
def cluster(environment: Path) -> Iterator[str]:
    """Start a cluster of Ray beside any other and yield its address; its processes end with the one that is started."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = ["--head", "--block", "--num-cpus=4", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    command: list[str | Path] = [
        environment / "bin" / "python",
        environment / "bin" / "ray",
        "start",
        *asked,
        f"--port={port}",
    ]
    log = environment / "ray.log"  # a pipe that nobody reads any more would fill and block it
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as process:
        try:
            while "Ray runtime started" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_alone_is_enough_for_a_run(extra: str, environment: Path, folder: Path, url: str) -> None:
    install(environment, extra, *BESIDE.get(extra, ()))
    if extra == "reasoning-gym":
        code, said = python(environment, "-c", TASKS)
        assert code == 0, said
        (folder / "tasks.jsonl").write_text(said)
    with cluster(environment) if extra == "ray" else nullcontext() as address:
        here = [] if address is None else [f"placement.cluster={address}"]
        code, said = train(environment, folder, extra, (*EXTRAS[extra], *here), url)
    assert code == 0, said
    assert json.loads((folder / "runs" / extra / "summary.json").read_text())["complete"]


def test_the_page_of_a_run_has_curves_to_hover_with_its_extra_and_pictures_without(
    environment: Path, folder: Path
) -> None:
    code, said = train(BASE, folder, "page", (SHORT,))
    assert code == 0, said
    page = folder / "runs" / "page" / "report.html"
    assert "plotly.js v" not in page.read_text()
    install(environment, "report")
    code, said = python(environment, "-m", "oppo", "report", page.parent)
    assert code == 0, said
    assert "plotly.js v" in page.read_text()


def test_the_wheel_is_enough_for_a_project_that_tests_its_pipeline(environment: Path, tmp_path: Path) -> None:
    uv(environment, "pytest>=8.4", "pytest-asyncio>=1.4")
    (tmp_path / "test_pipeline.py").write_text(PROJECT)
    code, said = python(environment, "-m", "pytest", "-q", "--strict-markers", "test_pipeline.py", folder=tmp_path)
    assert code == 0, said
    assert "3 passed" in said


def test_the_demo_needs_no_extra(tmp_path: Path) -> None:
    code, said = python(BASE, "-m", "oppo", "demo", "--short", folder=tmp_path)
    assert code == 0, said
    assert "does not measure what overlap gains" in said


@pytest.mark.parametrize("platform", ["aarch64-apple-darwin", "aarch64-manylinux_2_28", "x86_64-manylinux_2_28"])
def test_the_wheel_resolves_to_wheels_on_other_platforms(platform: str, tmp_path: Path) -> None:
    (wheel,) = (BASE / "dist").glob("oppo-*.whl")
    without = {"reasoning-gym"} | ({"quantization"} if "apple" in platform else set())  # a compiler; macOS 14
    extras = ",".join({*EXTRAS, "openenv", "report"} - without)
    (tmp_path / "wanted.txt").write_text(f"oppo[{extras}] @ {wheel.as_uri()}\n")
    asked = ["--only-binary", ":all:", "--python-version", "3.12", "--python-platform", platform]
    resolved = program([BASE / "bin" / "uv", "pip", "compile", "--quiet", *asked, tmp_path / "wanted.txt"])
    assert "\ntorch==2." in resolved
