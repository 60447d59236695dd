"""``oppo report --live``: a server that answers this machine alone, with what has changed."""

from __future__ import annotations

import http.client
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from oppo.report import RunDirectory
from oppo.report.page import Follower
from tests.report.synthetic import decode, play


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDirectory(tmp_path / "x", config="[run]\n", decode=decode) as directory:
        play(directory)
    return directory.path


@pytest.fixture
def server(run: Path) -> Iterator[Follower]:
    with Follower([run]) as following:
        threading.Thread(target=following.serve_forever, daemon=True).start()
        yield following
        following.shutdown()


def answer(server: Follower, path: str, host: str = "") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    found = connection.getresponse()
    return found.status, found.getheader("ETag") or "", found.read().decode()


def test_the_page_comes_whole_and_then_only_its_parts_when_a_file_has_changed(server: Follower, run: Path) -> None:
    status, tag, whole = answer(server, "/")
    assert (status, whole.count("<script>")) == (200, 1)
    assert f'data-live="{tag}"' in whole
    assert answer(server, f"/update?{tag}")[0] == 204
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "score": 0.25}\n')
    status, later, parts = answer(server, f"/update?{tag}")
    assert (status, parts.count("<script>")) == (200, 0)
    assert later != tag
    assert "3 steps" in parts
    assert "2 steps" in whole
    shutil.rmtree(run)
    assert answer(server, f"/update?{later}")[0] == 503, "the page keeps its last figures"


@pytest.mark.parametrize("host", ["example.com", "example.com:80", "127.0.0.1", "[::1]:80"])
def test_another_name_that_leads_here_is_not_answered(server: Follower, host: str) -> None:
    assert answer(server, "/", host)[0] == 404
    assert answer(server, "/", f"localhost:{server.server_port}")[0] == 200
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/config.toml", "/../x/config.toml", "/update/"])
def test_no_file_is_served(server: Follower, path: str) -> None:
    status, _, said = answer(server, path)
    assert (status, said) == (404, "")


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_it_as_it_should(run: Path, by: signal.Signals, code: int) -> None:
    program = [sys.executable, "-m", "oppo", "report", str(run), "--live"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline().startswith("following at http://127.0.0.1:")
        started.send_signal(by)
        assert started.wait(60) == code
        assert "Traceback" not in (started.stderr.read() if started.stderr else "")
