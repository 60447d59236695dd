"""The ruler sees the last bit, and a word of a record; it does not see times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.ruler import Made


def written(
    run: Path,
    weight: float = 1.0,
    at: float = 0.0,
    reason: str = "stop",
    score: float = 0.5,
    *,
    names: Mapping[str, float] | None = None,
) -> Made:
    final = run / "checkpoints" / "final" / "actor"
    final.mkdir(parents=True)
    save_file({"weight": torch.tensor([weight, 2.0])}, final / "model.safetensors")
    for name, record in (
        ("samples", {"step": 1, "rollout": 0, "completion": "a b"}),
        ("journal", {"step": 1, "at": at, "event": "finished", "reason": reason}),
        ("metrics", {"step": 1, "seconds": at, "timing_s/step": at, "objective/scores": score, **(names or {})}),
    ):
        (run / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    return Made.read(run)


def test_times_make_no_difference(tmp_path: Path) -> None:
    assert written(tmp_path / "a").differs(written(tmp_path / "b", at=3.0)) == ""


def test_metrics_are_compared_by_their_names_of_today_and_new_ones_make_no_difference(tmp_path: Path) -> None:
    before = written(tmp_path / "a", names={"deferral/carried": 2, "timing_s/publish": 3, "train/padding_fraction": 0})
    after = written(tmp_path / "b", names={"deferral/deferred": 2, "response_length/min": 3, "train/padding": 0})
    assert before.differs(after) == ""
    assert after.differs(before).startswith('metrics: {"response_length/min": 3} is now {}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": 1.0 + 2**-23}, "tensor actor/model.safetensors:weight by up to 1.19e-07"),
        ({"reason": "length"}, 'journal: {"reason": "stop"} is now {"reason": "length"}'),
        ({"score": 0.25}, 'metrics: {"objective/scores": 0.5} is now {"objective/scores": 0.25}'),
    ],
)
def test_what_differs_is_named(tmp_path: Path, change: dict[str, float], message: str) -> None:
    changed = written(tmp_path / "b", **change)  # type: ignore[arg-type]  # a string where it is a reason
    assert written(tmp_path / "a").differs(changed).startswith(message)


def test_a_run_that_has_not_ended_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has not ended"):
        Made.read(tmp_path)
