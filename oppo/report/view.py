"""``oppo report --live``: a server of a page that follows runs going on."""

from __future__ import annotations

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from oppo.errors import OppoError
from oppo.report.page import page
from oppo.report.recorded import LOG, TIMELINE, recorded
from oppo.report.records import EVALUATIONS, METRICS, SAMPLES, SUMMARY


class Follower(ThreadingHTTPServer):
    """Serves a page of runs as they are when it is asked for, to programs of this machine alone.

    Args:
        port: 0 chooses a free one.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], port: int = 0) -> None:
        self._runs = runs
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/"

    def tag(self) -> str:
        """Return a text that changes with the files of the runs."""
        names = (METRICS, SAMPLES, EVALUATIONS, TIMELINE, LOG, SUMMARY)
        files = [run / name for run in self._runs for name in names]
        return "-".join(f"{file.stat().st_mtime_ns:x}" if file.exists() else "" for file in files)

    def page(self, tag: str, *, scripts: bool) -> str:
        """Return the page as of ``tag``."""
        return page([recorded(run) for run in self._runs], live=tag, scripts=scripts)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out browsers that do not wait for an answer."""


class _Handler(BaseHTTPRequestHandler):
    server: Follower

    def do_GET(self) -> None:
        path, _, known = self.path.partition("?")
        tag, port = self.server.tag(), self.server.server_port
        if self.headers.get("Host") not in {f"127.0.0.1:{port}", f"localhost:{port}"} or path not in {"/", "/update"}:
            self._answer(404)  # a page of another site, whose name was made to lead here, among them
        elif known == tag:
            self._answer(204)
        else:
            try:
                self._answer(200, self.server.page(tag, scripts=path == "/"), tag)
            except (OppoError, OSError):  # the directory is being moved or removed
                self._answer(503)

    def _answer(self, status: int, html: str = "", tag: str = "") -> None:
        body = html.encode()
        self.send_response(status)
        for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Cache-Control", "no-store"), ("ETag", tag)):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Print nothing."""
