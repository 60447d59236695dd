"""The built wheel in a throw-away project: pytest finds the plugin, and its test needs nothing of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROJECT = """
import oppo, oppo.report, pytest
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, prompts

def test_the_package_is_the_one_that_was_built():
    assert oppo.__file__.startswith({environment!r})

def test_the_page_of_a_run_has_its_parts(tmp_path):
    with oppo.report.RunDirectory(tmp_path / "run"):
        pass
    assert "<style>" in (tmp_path / "run" / "report.html").read_text()

@pytest.mark.virtual
async def test_of_a_pipeline(recorder, hidden_fraction, story):
    reward = FakeScorer(fake_scalar, per_token=0.001)
    models = {{"policy": FakePolicy(), "reward": reward, "trainer": FakeTrainer(9.0)}}
    graph = oppo.grpo(**models, admission=oppo.Overcommit(2), chunks=oppo.admission.chunking.Fixed(2))
    async with graph.open(prompts(9), observers=[recorder]) as run:
        assert [report.seconds > 9.0 async for report in run.steps(2)] == [True, True]
    assert 0 < hidden_fraction() < 1
    assert story(0)[-1].event == "trained"
"""


@pytest.mark.deep
def test_the_wheel_alone_is_enough_for_a_project_that_tests_its_pipeline(tmp_path: Path) -> None:
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("oppo-*.whl")
    environment, project = tmp_path / "environment", tmp_path / "project"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    run("-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel))
    # A path in such a file is searched, but its own such files are not read: dependencies are found, this tree is not.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    project.mkdir()
    (project / "test_pipeline.py").write_text(PROJECT.format(environment=str(environment)))
    said = run("-m", "pytest", "-q", "--strict-markers", python=python, folder=project)
    assert "3 passed" in said


def run(*arguments: str, python: str | Path = sys.executable, folder: Path | None = None) -> str:
    """Run a Python of an environment without this tree on its path; return what it said."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [python, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
