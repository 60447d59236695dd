"""What is told of a run while it goes on: to a live panel, which others may not write beside, or to the terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest
import torch
from rich.console import Console

from oppo.config.load import load
from oppo.log import logger
from oppo.observe import Observer, Span
from oppo.run.train import prepare, run
from tests.workplace import furnish, records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("watching"))


class Talkative(Observer):
    """Logs something after the first step."""

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        pass

    def on_span(self, span: Span) -> None:
        pass

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        if step == 0:
            logger.info("the judge at https://me:canary@host is called again")


@pytest.mark.parametrize("panel", ["live", "lines"])
def test_a_message_is_shown_once_and_logged(folder: Path, panel: str, messages: list[str]) -> None:
    out = io.StringIO()
    settings = load(folder / "config.toml", [f"run.panel={panel}", f"run.name={panel}", "run.scorers=thread"])
    with prepare(settings) as session:
        anyio.run(run, session, Console(file=out, force_terminal=True, width=120), [Talkative()])
        logger.info("the run is over")
    assert messages[-1] == "the run is over"
    notices = [message for message in messages if "the judge" in message]
    shown = "the judge at https://***@host is called again" in out.getvalue()
    assert (len(notices), shown) == ((0, True) if panel == "live" else (1, False))
    assert "canary" not in out.getvalue()
    logged = [line["text"] for line in records(folder, panel, "log.jsonl") if line["event"] == "notice"]
    assert "the judge at https://***@host is called again" in logged
