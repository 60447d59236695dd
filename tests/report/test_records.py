"""Records are taken back to a checkpoint line by line, whatever their text holds and however the last line was torn."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from oppo.report.records import gaps, read, rewind


def records(count: int, text: str = "") -> list[dict[str, object]]:
    return [{"step": step, "text": text} for step in range(count)]


def spelled(records: list[dict[str, object]], first: int = 1) -> str:
    """Return the lines of records: of the first step with this number."""
    counted = [{**each, "step": int(str(each["step"])) + first} for each in records]
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in counted)


@pytest.mark.parametrize("text", ["", "a\u2028b", "a\u2029b", "a\u0085b", "a\x0bb", "a\rb\nc"])
def test_the_first_steps_stay_whatever_their_text_holds(tmp_path: Path, text: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(spelled(records(5, text)), encoding="utf-8")
    rewind(file, 3)
    assert list(read(file)) == records(3, text)
    assert file.read_text(encoding="utf-8") == spelled(records(3, text))


@pytest.mark.parametrize("kept", range(1, 7))
def test_a_line_that_was_torn_is_dropped_wherever_it_was_torn(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_bytes(spelled(records(2)).encode() + '{"\N{GRINNING FACE}'.encode()[:kept])
    rewind(file, 9)
    assert list(read(file)) == records(2)
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    rewind(tmp_path / "journal.jsonl", 3)
    assert (tmp_path / "journal.jsonl").read_text() == ""


def test_observations_of_later_steps_stay_behind_the_first_steps(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    told = [{**each, "event": event} for each in records(4) for event in ("admitted", "observed")]
    file.write_text(spelled(told), encoding="utf-8")
    rewind(file, 2)
    assert list(read(file)) == [*told[:4], told[5], told[7]]


DAMAGED = (
    b'{"step": 1, "te\xff"}\n',
    b"{}\n",
    b"3\n",
    b'{"step": "1"}\n',
    b"[" * 9000 + b"\n",
    b"\n",
    b'{"step": 1, "a": NaN}\n',
)


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_kept_aside_and_what_follows_it_stays(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    before, after = spelled(records(2)).encode(), spelled(records(4)[3:]).encode()
    file.write_bytes(before + line + after)
    assert rewind(file, 9) == [f"{file}: left out as damaged: line 3; see metrics.jsonl.damaged"]
    assert file.read_bytes() == before + after
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == line
    assert gaps(file, 4) == [f"{file}: no record of step 3, nor of what was trained then"]


def test_a_tail_that_is_lost_is_told(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(spelled(records(3)), encoding="utf-8")
    assert gaps(file, 3) == []
    assert gaps(file, 40) == [f"{file}: no record of steps 4, 5, 6, 7, 8 and 32 more, nor of what was trained then"]


def test_a_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    file.write_text(spelled(records(4_000, "a" * 1_000)), encoding="utf-8")
    tracemalloc.start()
    rewind(file, 3_999)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 400_000 < file.stat().st_size / 10
    assert sum(1 for _ in read(file)) == 3_999


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
def test_files_that_count_from_the_index_are_read_and_rewritten(name: str, tmp_path: Path) -> None:
    """Those of earlier versions, in which the first step is 0 and an evaluation before it -1."""
    file = tmp_path / name
    told = [{"step": step, "text": ""} for step in range(-1 if name == "eval.jsonl" else 0, 5)]
    file.write_text(spelled(told, first=0), encoding="utf-8")
    assert list(read(file)) == told
    rewind(file, 3)
    kept = [each for each in told if int(str(each["step"])) < 3]
    for _ in range(2):
        assert file.read_text(encoding="utf-8") == spelled(kept)
        assert list(read(file)) == kept
        rewind(file, 3)
