"""The machines of these tests: none outlives the tests, however these end."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.placement.ray.machines import SECONDS, Machines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROGRAM = """
import os, sys
from tests.placement.ray.machines import machines
with machines(1) as cluster:
    print(cluster.mark, flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_machines_and_their_files_end_with_tests_that_are_killed(by: signal.Signals) -> None:
    folders = set(Path(tempfile.gettempdir()).glob("oppo-ray-*"))
    command = [sys.executable, "-c", PROGRAM, str(int(by))]
    killed = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert killed.returncode == -by
    assert not Machines("", killed.stdout.strip(), None).settled(set())  # type: ignore[arg-type]  # it has none any more
    deadline = time.monotonic() + SECONDS
    while left := set(Path(tempfile.gettempdir()).glob("oppo-ray-*")) - folders:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
