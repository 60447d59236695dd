"""Records: written, rewound to a checkpoint line by line, and of one run at a time, which the lock says."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import pytest

from oppo.admission import Observation
from oppo.atomic_files import put
from oppo.errors import ConfigError
from oppo.report import RunDirectory, RunLog
from oppo.report.records import LOCK, Lock, Writer, gaps, is_locked, read, require_unused, rewind, taken
from tests.kit.workplace import read_lines
from tests.report.synthetic import play


def records(count: int, text: str = "") -> list[dict[str, object]]:
    held = {"event": "admitted", "score": None, "prompt": "", "completion": text}
    return [{"step": step, **held} for step in range(count)]


def spelled(records: list[dict[str, object]]) -> str:
    counted = [{**each, "step": int(str(each["step"])) + 1} for each in records]
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in counted)


@pytest.mark.parametrize("text", ["", "a\u2028b", "a\u2029b", "a\u0085b", "a\x0bb", "a\rb\nc"])
def test_the_first_steps_stay_whatever_their_text_holds(tmp_path: Path, text: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(spelled(records(5, text)), encoding="utf-8")
    rewind(file, 3)
    assert list(read(file)) == records(3, text)
    assert file.read_text(encoding="utf-8") == spelled(records(3, text))


def test_a_line_that_is_torn_is_dropped_and_told_wherever_it_is_torn(tmp_path: Path) -> None:
    file, text = tmp_path / "samples.jsonl", "\N{GRINNING FACE}"
    whole, torn = (spelled(records(count, text)).encode() for count in (2, 3))
    for size in range(len(whole) + 1, len(torn) - 1):
        file.write_bytes(torn[:size])
        assert list(read(file)) == records(2, text)
        assert [each["step"] for each in read_lines(file)] == [1, 2]
        assert rewind(file, 9) == [f"{file}: left out as damaged: line 3; see samples.jsonl.damaged"]
        assert file.read_bytes() == whole
        assert rewind(file, 9) == []


def test_observations_of_later_steps_stay_behind_the_first_steps(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    seen = Observation(0).as_json()
    told = [{**each, "event": event, "seen": seen} for each in records(4) for event in ("admitted", "observed")]
    file.write_text(spelled(told), encoding="utf-8")
    rewind(file, 2)
    assert list(read(file)) == [*told[:4], told[5], told[7]]


DAMAGED = (
    b'{"step": 1, "te\xff"}\n', b"{}\n", b"3\n", b'{"step": "1"}\n', b"[" * 9000 + b"\n", b"\n",
    b'{"step": 1, "a": NaN}\n', b'{"step": 1, "a": 1e999}\n', b'{"step": 1, "a": 1%s}\n' % (b"0" * 400),
    b'{"step": -2}\n', b'{"step": 99999999999}\n',
)  # fmt: skip


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_kept_aside_and_what_follows_it_stays(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    before, after = spelled(records(2)).encode(), spelled(records(4)[3:]).encode()
    file.write_bytes(before + line + after)
    assert rewind(file, 9) == [f"{file}: left out as damaged: line 3; see metrics.jsonl.damaged"]
    assert file.read_bytes() == before + after
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == line
    assert gaps(file, 4) == [f"{file}: no record of step 3, nor of what was trained then"]


FOREIGN: list[tuple[str, dict[str, object]]] = [
    ("samples.jsonl", {"text": "of another program"}),
    ("samples.jsonl", {"score": "high", "prompt": "", "completion": ""}),
    ("samples.jsonl", {"score": 1.0, "prompt": "", "completion": "", "parts": ["said"]}),
    ("journal.jsonl", {"rollout": 3}),
    ("journal.jsonl", {"event": "admitted", "rollout": "3"}),
    ("journal.jsonl", {"event": "observed", "seen": {}}),
    ("journal.jsonl", {"event": "observed", "seen": {**Observation(0).as_json(), "finished": ["a"]}}),
    ("journal.jsonl", {"event": "observed", "seen": {**Observation(0).as_json(), "seconds": None}}),
    ("eval.jsonl", {"eval/score": "high"}),
]


@pytest.mark.parametrize(("name", "foreign"), FOREIGN)
def test_a_line_that_is_no_record_of_its_file_is_left_out_and_told(
    tmp_path: Path, name: str, foreign: dict[str, object]
) -> None:
    file = tmp_path / name
    file.write_text(spelled([*records(2), {"step": 2, **foreign}]), encoding="utf-8")
    assert list(read(file)) == records(2)
    assert rewind(file, 9) == [f"{file}: left out as damaged: line 3; see {name}.damaged"]


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


@pytest.mark.parametrize("threaded", [True, False])
def test_jobs_are_done_in_order_and_all_before_close_returns(threaded: bool) -> None:
    done: list[int] = []
    writer = Writer(threaded=threaded, capacity=2)
    for number in range(50):
        writer.submit(lambda number=number: done.append(number))  # type: ignore[misc]  # binds the loop variable
        if number == 40:
            writer.flush()
            assert len(done) == 41
    writer.close()
    writer.close()
    assert done == list(range(50))


def test_a_failure_is_raised_and_nothing_is_written_after_it() -> None:
    done: list[int] = []

    def fail() -> None:
        go_on.wait()
        raise OSError("disk full")

    go_on = threading.Event()
    writer = Writer()
    writer.submit(fail)
    writer.submit(lambda: done.append(1))
    go_on.set()
    for end in (writer.flush, writer.flush, writer.close):
        with pytest.raises(OSError, match="disk full"):
            end()
    with pytest.raises(OSError, match="disk full"):
        writer.submit(lambda: done.append(2))
    assert done == []


def test_a_directory_that_is_being_written_is_refused_by_the_process_that_does(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "x") as directory:
        play(directory)
        with pytest.raises(ConfigError, match=rf"being written by another run \(process {os.getpid()}\)"):
            RunDirectory(tmp_path / "x")
        with pytest.raises(ConfigError, match="being written by another run"):
            require_unused(tmp_path / "x")
    assert not (tmp_path / "x" / LOCK).exists()
    with pytest.raises(ConfigError, match="is already used"):
        require_unused(tmp_path / "x")


def test_a_lock_on_a_file_that_its_owner_has_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One opened the file, its owner removed and released it, a third made another: both thought they had it."""
    locking, owner = fcntl.flock, [Lock(tmp_path)]

    def flock(file: int, how: int) -> None:
        if owner:
            owner.pop().release()
        locking(file, how)

    monkeypatch.setattr("oppo.report.records.fcntl.flock", flock)
    mine = Lock(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(ConfigError, match="being written by another run"):
        Lock(tmp_path)
    mine.release()
    assert not (tmp_path / LOCK).exists()


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom pathlib import Path\nfrom oppo.report.records import Lock\n"
        f"lock = Lock(Path({str(tmp_path)!r}))\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert (tmp_path / LOCK).exists()
    assert not is_locked(tmp_path)
    require_unused(tmp_path)
    Lock(tmp_path).release()


WRITERS: dict[str, Callable[[Path], object]] = {
    LOCK: Lock,
    ".x.partial": lambda folder: put(folder / "x", ["text"]),
    "log.jsonl": lambda folder: RunLog(folder / "log.jsonl", "run"),
    "metrics.jsonl": RunDirectory,
    "x.damaged": lambda folder: rewind(folder / "x", 1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_link_in_a_run_directory_leads_to_is_left_alone(name: str, tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("precious\n")
    folder.mkdir()
    (folder / name).symlink_to(target)
    if name == "x.damaged":
        (folder / "x").write_text("damaged\n")
    with suppress(OSError, ConfigError), ExitStack() as stack:
        held = WRITERS[name](folder)
        if isinstance(held, Lock):
            stack.callback(held.release)
        elif isinstance(held, AbstractContextManager):
            stack.enter_context(held)
    assert target.read_text() == "precious\n"


def test_a_lock_that_is_a_link_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be"):
        RunDirectory(tmp_path)
    assert not (tmp_path / "target").exists()
    assert "process unknown" in taken(tmp_path)


@pytest.mark.parametrize("look", [is_locked, RunDirectory])
def test_a_lock_that_is_a_pipe_is_refused_and_nobody_waits_for_its_writer(
    look: Callable[[Path], object], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises((OSError, ConfigError), match=f"{LOCK} is no plain file"):
        look(tmp_path)
