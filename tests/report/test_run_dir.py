from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, strategies as st

from oppo.admission import Observation
from oppo.errors import ConfigError
from oppo.events import Defer
from oppo.observe import Span
from oppo.report import RunDirectory, observations, records, story
from oppo.report.metrics import summary
from oppo.report.records import JOURNAL, read_replay
from oppo.report.run_dir import RECORDS
from tests.report.synthetic import decode, play, play_second, report


def written(folder: Path, *, threaded: bool = True) -> Path:
    with RunDirectory(folder / "runs" / "x", config="a = 1\n", decode=decode, threaded=threaded) as directory:
        directory.model_span(Span("policy", "decode", 0.0, 1.0))
        directory.model_span(Span("reward model", "extend", 0.5, 1.5))
        play(directory)
    return directory.path


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_writing_in_a_thread_and_at_once_give_the_same_files(tmp_path: Path) -> None:
    threaded, inline = written(tmp_path / "a"), written(tmp_path / "b", threaded=False)
    for file in threaded.iterdir():
        assert file.read_bytes() == (inline / file.name).read_bytes(), file.name


def test_a_run_leaves_metrics_a_journal_samples_and_a_summary(tmp_path: Path) -> None:
    path = written(tmp_path)
    first, second = lines(path / "metrics.jsonl")
    assert (first["step"], first["score"], first["deferred"], first["trained"]) == (1, 0.5, 1, 1)
    assert (first["objective/kl"], second["objective/kl"]) == (0.0, 0.25)
    assert second["score"] is None, "NaN has no spelling in JSON"
    carried = [(entry["step"], entry["event"]) for entry in story(path / JOURNAL, 2)]
    assert carried == [(1, "admitted"), (1, "deferred"), (2, "finished"), (2, "trained")]
    assert [entry["event"] for entry in story(path / JOURNAL, 1)] == ["admitted", "finished", "dropped"]
    assert story(path / JOURNAL, 77) == []
    samples = lines(path / "samples.jsonl")
    told = [(each["step"], each["rollout"], each["score"]) for each in samples]
    assert told == [(1, 0, 0.5), (2, 1, -1.0), (2, 2, 2.0)]
    assert (samples[0]["prompt"], samples[0]["completion"], samples[0]["kl"]) == ("zero <b>two</b>", "one three", 1.0)
    found = json.loads((path / "summary.json").read_text())
    assert [found["steps"], *(found[name]["total"] for name in ("trained", "dropped", "deferred"))] == [2, 2, 1, 1]
    assert (found["seconds"]["total"], found["score"]["last"]) == (4.0, 0.5)


def test_texts_are_without_secrets_and_what_is_read_back_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_PASSWORD", "nonfinite")
    monkeypatch.setenv("APP_SECRET", "admitted")
    monkeypatch.setenv("AWS_SESSION", "rollout")
    path = written(tmp_path)
    assert lines(path / "samples.jsonl")[0]["prompt"] == "zero <b>two</b>"
    assert [(entry["event"], entry.get("reason")) for entry in story(path / "journal.jsonl", 1)] == [
        ("admitted", None),
        ("finished", "eos"),
        ("dropped", "***"),
    ]


def test_a_secret_in_what_would_be_written_as_it_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config holds a secret"):
        RunDirectory(tmp_path / "new", config='reference = "https://me:pw@host/model"')
    assert not (tmp_path / "new").exists()


def test_the_trace_has_a_track_for_each_worker_and_an_arrow_for_each_rollout(tmp_path: Path) -> None:
    events = json.loads((written(tmp_path) / "trace.json").read_text())
    tracks = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert tracks == {"generate", "policy", "reward model"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in slices} == {"run", "decode", "extend"}
    assert [event["args"] for event in slices if event["name"] == "run"] == [{"step": 1}, {"step": 2}]
    carried = [(event["ph"], event["ts"]) for event in events if event.get("id") == 2]
    assert carried == [("s", 0.25e6), ("t", 1.25e6), ("t", 2.5e6), ("f", 3e6)]


@pytest.mark.parametrize(("steps", "first", "last"), [(1, 0.0, 0.0), (3, 0.5, 1.5), (10, 2.0, 7.0), (40, 4.5, 34.5)])
def test_the_first_steps_of_a_short_run_are_not_the_last(steps: int, first: float, last: float) -> None:
    found = summary([{"score": float(step)} for step in range(steps)])
    assert (found["score"]["first"], found["score"]["last"]) == (first, last)


def test_a_run_without_a_step_leaves_readable_files(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "empty"):
        pass
    assert "No step was made." in (tmp_path / "empty" / "report.html").read_text()
    assert json.loads((tmp_path / "empty" / "trace.json").read_text())


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the run directory .* cannot be"):
        RunDirectory(tmp_path / "file" / "x")


def test_a_disk_that_fails_is_not_hidden(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "x", decode=decode, threaded=False)
    with Path("/dev/full").open("w") as full:
        os.dup2(full.fileno(), directory._files["journal.jsonl"].fileno())
    with pytest.raises(OSError, match="No space left on device"):
        play(directory)
    with pytest.raises(OSError, match="No space left on device"):
        directory.close()


def test_a_disk_that_fails_at_the_end_does_not_hide_what_ended_the_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "x", threaded=False)
    with Path("/dev/full").open("w") as full:
        os.dup2(full.fileno(), directory._files["trace.json"].fileno())
    with pytest.raises(ValueError, match="the first error") as caught, directory:
        raise ValueError("the first error")
    (note,) = caught.value.__notes__
    assert note.startswith("and then, while completing the run directory ")
    assert note.endswith(", OSError: [Errno 28] No space left on device")
    assert not list((tmp_path / "x").glob("*.partial"))


def test_a_resumed_run_leaves_the_records_of_one_that_was_never_killed(tmp_path: Path) -> None:
    whole, path = written(tmp_path / "a", threaded=False), written(tmp_path / "b", threaded=False)
    for name in RECORDS:
        with (path / name).open("a") as file:
            file.write('{"step": 3, "event": "a step that the kill ca')
    with RunDirectory(path, config="a = 1\n", decode=decode, threaded=False, resumed_at=1).begin() as directory:
        assert [each["step"] for each in lines(path / "metrics.jsonl")] == [1]
        play_second(directory)
    for name in (*RECORDS, "summary.json", "trace.json"):
        assert (path / name).read_bytes() == (whole / name).read_bytes(), name
    assert (path / "trace-000001.json").exists()


def test_what_was_observed_outlives_the_steps_that_are_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with RunDirectory(path, threaded=False) as directory:
        for step in range(3):
            directory.on_item(step, "generate", Observation(step, seconds=0.1 + step, score=0.5), float(step))
    for resumed_at in (2, 1):
        with RunDirectory(path, threaded=False, resumed_at=resumed_at).begin() as directory:
            directory.on_item(resumed_at, "generate", Defer(7, 1), 5.0)
    told = [(line["step"], line["event"]) for line in lines(path / JOURNAL)]
    assert told == [(1, "observed"), (2, "observed"), (3, "observed"), (2, "deferred")]
    assert observations(path / JOURNAL, 1) == {
        step: Observation(step, seconds=0.1 + step, score=0.5) for step in (1, 2)
    }
    assert observations(tmp_path / "nowhere") == {}


def test_drains_outlive_the_steps_that_are_taken_back_and_end_the_course_of_what_was_observed_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x"

    def observed(directory: RunDirectory, *steps: int, seconds: float) -> None:
        for step in steps:
            directory.on_item(step, "generate", Observation(step, seconds=seconds, score=0.5), float(step))

    def told() -> dict[int, float]:
        return {step: seen.seconds for step, seen in observations(path / JOURNAL).items()}

    with RunDirectory(path, threaded=False) as directory:
        observed(directory, 0, 1, 2, 3, 4, seconds=1.0)
    with RunDirectory(path, threaded=False, resumed_at=1).begin() as directory:
        directory.drained(2)  # repeating the steps, it was ended after this one
    assert told() == {0: 1.0, 1: 1.0, 2: 1.0}, "steps 3 and 4 were those of a run that did not drain"
    with RunDirectory(path, threaded=False, resumed_at=3).begin() as directory:
        observed(directory, 3, 4, seconds=2.0)
    for resumed_at in (2, 1):
        with RunDirectory(path, threaded=False, resumed_at=resumed_at).begin():
            pass
        assert read_replay(path / JOURNAL).drains == {2}
        assert told() == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    assert read_replay(tmp_path / "nowhere").drains == frozenset()


EVENTS = st.lists(st.sampled_from(["observed", "deferred", "drained"]), max_size=3)
STEPS = st.lists(EVENTS, max_size=3)


def made(directory: RunDirectory, first: int, steps: list[list[str]]) -> None:
    for step, events in enumerate(steps, first):
        for event in events:
            if event == "drained":
                directory.drained(step)
            else:
                seen = Observation(step, seconds=0.5, score=1.0) if event == "observed" else Defer(step, 1)
                directory.on_item(step, "generate", seen, float(step))
        directory.on_step(step, report(step, (step,), 0.5), {})


@given(
    lives=st.lists(st.tuples(STEPS.filter(len), STEPS), min_size=1, max_size=3),
    damage=st.none() | st.tuples(st.sampled_from(["metrics.jsonl", JOURNAL, "work.jsonl"]), st.integers(0, 999)),
)
def test_records_that_a_checkpoint_knows_are_gone_on_with_as_if_they_were_read_again(
    lives: list[tuple[list[list[str]], list[list[str]]]], damage: tuple[str, int] | None
) -> None:
    def lived(path: Path, *, knows: bool) -> tuple[object, ...]:
        flushed: Mapping[str, object] | None = None
        done, parsed, parse = 0, list[bytes](), records._record
        for number, (steps, later) in enumerate(lives):
            resumed_at = done if number else None
            with RunDirectory(path, threaded=False, resumed_at=resumed_at, flushed=flushed).begin() as directory:
                made(directory, done, steps)
                state = json.loads(json.dumps(directory.flush()))
                flushed = state if knows else None
                done += len(steps)
                made(directory, done, later)
        if damage is not None:
            data = bytearray((path / damage[0]).read_bytes()) or bytearray(1)
            data[damage[1] % len(data)] ^= 1
            (path / damage[0]).write_bytes(data)

        def noting(line: bytes, name: str) -> records.Record | None:
            parsed.append(line)
            return parse(line, name)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(records, "_record", noting)
            directory = RunDirectory(path, threaded=False, resumed_at=done, flushed=flushed).begin()
        with directory:
            kept = [(path / name).read_bytes() for name in RECORDS if name != JOURNAL]
            told = [each.replace(str(path), "") for each in directory.faults]
        assert damage or not knows or all(json.loads(line)["step"] > done for line in parsed)
        return directory.trained, told, kept, read_replay(path / JOURNAL, done)

    with TemporaryDirectory() as folder:
        assert lived(Path(folder, "known"), knows=True) == lived(Path(folder, "read"), knows=False)


def steps_of(path: Path) -> list[str]:
    events = json.loads((path / "trace.json").read_text())
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {"step"}
    return [event["name"] for event in events if event["ph"] == "X"]


@pytest.mark.parametrize(
    ("trace", "count", "shown"),
    [
        (2, 1, [0]),
        (2, 4, [0, 1, 2, 3]),
        (2, 9, [0, 1, 7, 8]),
        (2, 40, [0, 1, 38, 39]),
        (None, 50, range(50)),
        (0, 9, None),
    ],
)
def test_a_trace_shows_the_first_and_the_last_steps_all_or_none(
    tmp_path: Path, trace: int | None, count: int, shown: Sequence[int] | None
) -> None:
    longest = 0
    with RunDirectory(tmp_path / "x", trace=trace, threaded=False) as directory:
        for step in range(count):
            directory.on_span(Span("step", str(step), step, step + 1, step, kind="step"))
            directory.on_step(step, None, {})
            if trace:
                longest = max(longest, (directory.path / "trace.json").read_text().count('"ph":"X"'))
    assert longest <= 2 + 2 * 2
    if shown is None:
        assert not (directory.path / "trace.json").exists()
    else:
        assert steps_of(directory.path) == [str(step) for step in shown]


def test_records_are_not_held_in_memory(tmp_path: Path) -> None:
    held = []
    with RunDirectory(tmp_path / "x", trace=0, threaded=False, keep=0) as directory:
        for _ in range(3):
            for _ in range(100):
                play(directory)
            gc.collect()
            held.append(len(gc.get_objects()))
    assert held[2] - held[1] < 100, "objects for two hundred steps"
    assert json.loads((directory.path / "summary.json").read_text())["steps"] == 600


def test_a_run_that_made_no_step_leaves_its_name_to_the_next(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "x", config="first\n") as directory:
        directory.on_item(0, "generate", Defer(0, 1), 0.0)
        (directory.path / "log.jsonl").write_text("what went wrong\n")
    with RunDirectory(tmp_path / "x", config="second\n") as directory:
        play(directory)
    assert (directory.path / "config.toml").read_text() == "second\n"
    assert (directory.path / "log.jsonl").read_text() == "what went wrong\n"
    assert lines(directory.path / JOURNAL)[0]["event"] == "admitted"
    with pytest.raises(ConfigError, match="is already used"):
        RunDirectory(tmp_path / "x")


def test_a_metric_that_is_no_number_is_left_out_of_the_summary_and_the_page(tmp_path: Path) -> None:
    path = written(tmp_path, threaded=False)
    first, *rest = lines(path / "metrics.jsonl")
    told = [{**first, "score": "many", "trained": [1], "kl": {}}, *rest]
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
    with RunDirectory(path, decode=decode, threaded=False, resumed_at=2).begin() as directory:
        assert directory.trained == sum(int(str(each["trained"])) for each in rest)
    assert (path / "report.html").exists()
