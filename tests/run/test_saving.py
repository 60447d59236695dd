"""What was learned is saved whatever happens meanwhile: who waits for it may go, the disk may be full."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import oppo.hf.train.trainer
from oppo.cli import INTERRUPTED
from oppo.config.load import load
from oppo.hf.lora import merged
from oppo.run.train import FINAL, prepare
from tests.workplace import furnish, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("saving"))


def test_what_was_learned_is_saved_as_a_whole_though_who_waits_for_it_is_cancelled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held(model: PreTrainedModel) -> dict[str, Tensor]:
        begun.set()
        assert go_on.wait(60)
        return merged(model)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            saving = tasks.create_task(session.assembly.saving.save(final))
            assert await asyncio.to_thread(begun.wait, 60)
            saving.cancel()
            go_on.set()
        assert saving.cancelled()

    monkeypatch.setattr(oppo.hf.train.trainer, "merged", held)
    final = folder / "elsewhere" / "final"
    (final / "old").mkdir(parents=True)
    with prepare(load(folder / "config.toml", ["run.scorers=thread", "run.name=cancelled"])) as session:
        asyncio.run(main())
    assert [each.name for each in final.parent.iterdir()] == ["final"]
    assert sorted(each.name for each in final.iterdir()) == ["actor", "critic"]
    AutoModelForCausalLM.from_pretrained(final / "actor")
    AutoTokenizer.from_pretrained(final / "actor")


SLOW = """
import pathlib, time
import oppo.hf.train.trainer
merging = oppo.hf.train.trainer.merged
def merged(model):
    pathlib.Path({mark!r}).touch()
    time.sleep(2)
    return merging(model)
oppo.hf.train.trainer.merged = merged
"""
"""Has a process take its time over saving, and leave a mark when it begins to."""


def test_ctrl_c_while_what_was_learned_is_saved_loses_nothing_of_it(folder: Path) -> None:
    mark = folder / "saving"
    with start(folder, "run.name=late", "run.steps=1", before=SLOW.format(mark=str(mark))) as process:
        while not mark.exists() and process.poll() is None:
            threading.Event().wait(0.05)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            threading.Event().wait(0.2)
        _, said = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, said
    final = folder / "runs" / "late" / FINAL
    assert f"interrupted; what was learned is in {final}" in said
    assert not [each for each in final.parent.iterdir() if each.name.startswith(".")]
    AutoModelForCausalLM.from_pretrained(final / "actor")
