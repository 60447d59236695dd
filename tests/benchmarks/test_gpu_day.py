"""The command for a borrowed GPU, tried on a CPU with tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.gpu_day import PARTS, gpu_day
from oppo.errors import ConfigError


def test_each_part_stands_beside_its_prediction_and_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "day.json"
    assert gpu_day(device="cpu", parts="decode,launches,agree,score,update", out=out) == 0
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == ["facts", "decode", "launches", "agree", "score", "update"]
    assert parts["facts"]["flops"] > 0
    assert all(parts["decode"][f"{rows}, {what}"] > 0 for rows in ("equal", "ragged") for what in ("ms", "predicted"))
    assert parts["launches"]["to the device"] == 0
    assert 0 <= parts["agree"]["mismatch/kl_current"] < 1e-9
    assert parts["agree"]["policy/clipfrac_avg"] == 0
    for name in ("score", "update"):
        assert 0 < parts[name]["mfu"] < 2
        assert parts[name]["predicted"] > 0
    assert parts["update"]["predicted bytes"] > 0
    assert "tokens a second" in capsys.readouterr().out


def test_a_part_that_fails_or_comes_too_late_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "day.json"
    monkeypatch.setitem(cast("dict[str, object]", PARTS), "decode", lambda day: 1 / 0)
    assert gpu_day(device="cpu", parts="decode,score", out=out) == 1
    parts = json.loads(out.read_text())["parts"]
    assert parts["decode"] == {"failed": "ZeroDivisionError: division by zero"}
    assert "mfu" in parts["score"]
    assert gpu_day(device="cpu", parts="score", minutes=1e-9, out=out) == 0
    assert json.loads(out.read_text())["parts"]["score"] == {"left out": "1e-09 minutes were over"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": "decode,scoring"}, "--parts: expected some of facts, tests, .*, got 'scoring'"),
        ({"actor": "70b"}, "--actor: expected one of 0.5b, 1.5b, got '70b'"),
    ],
)
def test_what_it_does_not_have_is_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_day(device="cpu", out=tmp_path / "day.json", **options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
def test_without_a_gpu_it_says_how_to_try_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no 'cuda:0' here; cpu tries the command"):
        gpu_day(out=tmp_path / "day.json")
