from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from oppo.events import Defer
from oppo.observe import Role, Span
from oppo.report.charts import LEFT, RIGHT, TIMELINE_WIDTH, Excerpt, timeline
from oppo.report.records import work_of
from oppo.report.trace import Cores, TimedStep, Timekeeper
from tests.report.synthetic import CHANNELS, finish, report

ROLES: dict[str, Role] = {"policy": "decode", "reward model": "score", "critic": "score", "trainer": "update"}
SVG = "{http://www.w3.org/2000/svg}"
ACROSS = TIMELINE_WIDTH - LEFT - RIGHT


def step(index: int, start: float, *spans: tuple[str, float, float], cut: float | None, deferred: int = 0) -> TimedStep:
    """Return a step of ten seconds; spans and cut count from its start."""
    made = [Span(track, "work", start + begin, start + end, index, ROLES[track]) for track, begin, end in spans]
    return TimedStep(index, start, start + 10, None if cut is None else start + cut, deferred, made)


BUSY = (("policy", 0.0, 4.0), ("reward model", 2.0, 5.0), ("trainer", 6.0, 10.0))
SERIAL = Excerpt("serial", [step(3, 100.0, *BUSY, cut=4.0), step(4, 110.0, *BUSY, cut=4.0)])
CARRYING = Excerpt("carrying", [step(7, 0.0, *BUSY, cut=4.0, deferred=2), step(8, 10.0, *BUSY, cut=5.0)])


def bars(picture: str) -> list[tuple[str, float, float]]:
    """Return the rectangles of the rows: their titles, where they begin and how wide they are."""
    rects = ET.fromstring(picture).iter(f"{SVG}rect")
    return [
        (title.text or "", float(rect.get("x", "nan")), float(rect.get("width", "nan")))
        for rect in rects
        if (title := rect.find(f"{SVG}title")) is not None
    ]


def words(picture: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(picture).iter(f"{SVG}text")]


def rules(picture: str, *, dashed: bool) -> Iterator[tuple[float, float]]:
    for line in ET.fromstring(picture).iter(f"{SVG}line"):
        if (line.get("stroke-dasharray") is not None) == dashed:
            yield float(line.get("x1", "nan")), float(line.get("x2", "nan"))


def test_each_model_has_a_row_in_which_it_is_busy_when_it_was() -> None:
    drawn = bars(timeline([SERIAL]))
    assert [title for title, _, _ in drawn] == [
        f"{track}: {end - begin:.3f} s for step {number}, from {begin + start:.3f} s on"
        for track, begin, end in BUSY
        for number, start in ((4, 0.0), (5, 10.0))
    ]
    reward = drawn[2]
    assert reward[1:] == pytest.approx((ACROSS * 2 / 20, ACROSS * 3 / 20), abs=0.01)
    assert max(x + width for _, x, width in drawn) == pytest.approx(ACROSS, abs=0.01)


def test_schedules_share_one_scale_of_seconds() -> None:
    short = Excerpt("short", [step(0, 0.0, *BUSY, cut=4.0)])
    drawn = bars(timeline([SERIAL, short]))
    assert drawn[-1][1] + drawn[-1][2] == pytest.approx(ACROSS / 2, abs=0.01)
    said = words(timeline([SERIAL, short]))
    assert {"serial: 2 steps in 20.00 s", "short: 1 step in 10.00 s", "step 4", "step 5", "step 1"} <= set(said)
    assert [each for each in said if each.replace(".", "").isdigit()] == [str(2 * k) for k in range(11)]
    assert "seconds" in said


def test_a_cut_is_a_dashed_line_and_what_it_defers_an_arrow_to_the_next_step() -> None:
    picture = timeline([CARRYING])
    assert [x for x, _ in rules(picture, dashed=True)] == pytest.approx([ACROSS * 4 / 20, ACROSS * 15 / 20], abs=0.1)
    assert words(picture).count("cut") == 2
    assert [each for each in words(picture) if "deferred" in each or "carried" in each] == [
        "2 responses deferred",
        "dashed: the batch is complete (cut); arrows: responses deferred to the next step",
    ]
    (head,) = (path.get("d", "") for path in ET.fromstring(picture).iter(f"{SVG}path"))
    assert head.startswith(f"M{ACROSS / 2:.1f} ")
    assert (ACROSS * 4 / 20, ACROSS / 2 - 6) in [tuple(map(float, ends)) for ends in rules(picture, dashed=False)]


def test_an_evaluation_is_drawn_in_a_colour_of_its_own_that_the_legend_names() -> None:
    evaluated = Span("policy", "decode", 8.0, 10.0, 0, "evaluate")
    plain = step(0, 0.0, *BUSY, cut=4.0)
    both = Excerpt("evaluated", [replace(plain, spans=[*plain.spans, evaluated])])
    root = ET.fromstring(timeline([both]))
    key = {"decode", "score", "update", "evaluate"}
    assert key & set(words(timeline([both]))) == key
    assert key & set(words(timeline([Excerpt("plain", [plain])]))) == key - {"evaluate"}
    assert not [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill-opacity")]
    assert words(timeline([both]))[-1] == "dashed: the batch is complete (cut)"
    assert work_of(both.work)["policy"] == {"work": [1, 4.0]}, "an evaluation is no work of the step"


def test_work_that_reaches_beyond_the_steps_is_drawn_within_them() -> None:
    early = Excerpt("early", [step(0, 0.0, ("policy", -3.0, 1.0), ("critic", 9.0, 14.0), cut=None)])
    drawn = bars(timeline([early]))
    assert [(x, width) for _, x, width in drawn] == [(0.0, ACROSS / 10), (ACROSS * 0.9, ACROSS / 10)]


@pytest.mark.parametrize("schedules", [[], [Excerpt("none", [])], [Excerpt("x", [step(0, 0.0, cut=1.0)])]])
def test_there_is_no_picture_of_no_work(schedules: Sequence[Excerpt]) -> None:
    assert timeline(schedules) == ""


def test_the_latest_steps_are_kept_with_what_models_did_in_them() -> None:
    keeper = Timekeeper(kept=2)
    for number in range(3):
        keeper.model_span(Span("policy", "decode", number, number + 0.5, number, "decode"))
        keeper.on_item(number, "generate", finish(number, 1), number + 0.25)
        keeper.on_item(number, "generate", Defer(9, number + 1), number + 0.5)
        keeper.on_item(number, "advantage", finish(number, 1), number + 0.75)
        keeper.on_span(Span("step", str(number), number, number + 1, number, kind="step"))
        keeper.on_step(number, report(number, (number,), 0.0), CHANNELS)
    assert [(each.index, each.start, each.end, each.cut, each.deferred) for each in keeper.steps] == [
        (1, 1.0, 2.0, 1.5, 1),
        (2, 2.0, 3.0, 2.5, 1),
    ]
    assert [[span.start for span in each.spans] for each in keeper.steps] == [[1.0], [2.0]]


def two_in_flight() -> Timekeeper:
    """Return what a timekeeper keeps of two steps, of which the second is decoded while the first is trained."""
    keeper = Timekeeper(kept=2)
    cuts = [(0, Defer(9, 1), 10.0), (1, finish(8, 1), 14.0), (1, Defer(9, 2), 18.0), (1, Defer(7, 1), 18.0)]
    for number, event, at in cuts:
        keeper.on_item(number, "generate", event, at)
    for work in (
        Span("policy", "decode", 0.0, 10.0, 0, "decode"),
        Span("policy", "decode", 10.0, 18.0, 1, "decode"),
        Span("trainer", "update", 11.0, 20.0, 0, "update"),
        Span("saver", "save", 11.0, 20.0),
    ):
        keeper.model_span(work)
    keeper.on_span(Span("step", "0", 0.0, 20.0, 0, kind="step"))
    keeper.on_step(0, report(0, (8,), 0.0), CHANNELS)
    keeper.model_span(Span("policy", "decode", 20.0, 27.0, 2, "decode"))
    keeper.model_span(Span("trainer", "update", 20.0, 28.0, 1, "update"))
    keeper.on_item(2, "generate", finish(6, 1), 27.0)
    keeper.on_span(Span("step", "1", 0.0, 28.0, 1, kind="step"))
    keeper.on_step(1, report(1, (7,), 0.0), CHANNELS)
    return keeper


def test_steps_in_flight_are_kept_apart() -> None:
    first, second = two_in_flight().steps
    assert [(each.index, each.cut, each.deferred) for each in (first, second)] == [(0, 10.0, 1), (1, 18.0, 2)]
    assert [(span.label, span.end) for span in first.spans] == [("decode", 10.0), ("update", 20.0)]
    assert [(span.label, span.end) for span in second.spans] == [("decode", 18.0), ("update", 28.0)]
    assert [(span.step, span.end) for span in first.beside] == [(1, 18.0)]
    assert [(span.step, span.end) for span in second.beside] == [(0, 10.0), (0, 20.0), (2, 27.0)]


def test_a_picture_of_steps_in_flight_shows_work_for_others_faintly_and_arrows_forwards() -> None:
    picture = timeline([Excerpt("latest", tuple(two_in_flight().steps))])
    work = [each for each in bars(picture) if "policy" in each[0]]
    assert [title for title, _, _ in work] == [
        "policy: 10.000 s for step 1, from 0.000 s on",
        "policy: 8.000 s for step 2, from 10.000 s on",
        "policy: 7.000 s for step 3, from 20.000 s on",
    ]
    rects = ET.fromstring(picture).iter(f"{SVG}rect")
    assert [rect.find(f"{SVG}title") is not None for rect in rects if rect.get("fill-opacity")] == [True]
    assert "faint: work for other steps" in words(picture)[-1]
    shafts = [ends for ends in rules(picture, dashed=False) if ends[0] != ends[1]]
    starts = [start for start, end in shafts if start > 0]
    assert starts == pytest.approx([ACROSS * 10 / 28, ACROSS * 18 / 28], abs=0.1)
    assert all(start < end for start, end in shafts)


@pytest.mark.parametrize(
    ("own", "busy", "others"),
    [(1.0, 1.0, 0.0), (0.5, 2.0, 0.75), (0.0, 2.0, 1.0), (2.0, 1.9, 0.0)],
    ids=["alone", "beside others", "waiting", "as clocks differ"],
)
def test_what_other_processes_took_is_what_the_cores_did_without_this_program_and_its_children(
    own: float, busy: float, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter([(5.0, 9.0, 90.0), (5.0 + own, 9.0 + busy, 92.0)])
    monkeypatch.setattr(Cores, "_taken", lambda cores: next(taken))
    cores = Cores()
    assert not cores.measure(least=1e9)
    assert cores.others == 0.0
    assert cores.measure()
    assert cores.others == pytest.approx(others)


def test_the_time_of_this_program_and_of_its_children_is_its_own() -> None:
    before = Cores()._taken()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    after = Cores()._taken()
    assert all(new >= old >= 0 for new, old in zip(after, before, strict=True))
    assert after[0] > before[0], "the child has ended, and its time is ours"
