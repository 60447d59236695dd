"""Tests in the background of a shell, which has SIGINT ignored there, and passes that on to all children."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
import tests.conftest
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
child = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_tests_and_their_children_begin_with_the_default_handler_of_ctrl_c() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
