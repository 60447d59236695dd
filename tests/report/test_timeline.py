from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

import pytest

from oppo.events import Defer
from oppo.observe import Span
from oppo.report.rundir import ROLES
from oppo.report.timed import TimedStep, Timekeeper
from oppo.report.timeline import LEFT, RIGHT, WIDTH, Schedule, timeline
from tests.report.synthetic import CHANNELS, finish, report

SVG = "{http://www.w3.org/2000/svg}"
ACROSS = WIDTH - LEFT - RIGHT


def step(index: int, start: float, *spans: tuple[str, float, float], cut: float | None, carried: int = 0) -> TimedStep:
    """Return a step of ten seconds; spans and cut count from its start."""
    made = [Span(track, "work", start + begin, start + end) for track, begin, end in spans]
    return TimedStep(index, start, start + 10, None if cut is None else start + cut, carried, made)


BUSY = (("policy", 0.0, 4.0), ("reward model", 2.0, 5.0), ("trainer", 6.0, 10.0))
SERIAL = Schedule("serial", [step(3, 100.0, *BUSY, cut=4.0), step(4, 110.0, *BUSY, cut=4.0)])
CARRYING = Schedule("carrying", [step(7, 0.0, *BUSY, cut=4.0, carried=2), step(8, 10.0, *BUSY, cut=5.0)])


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
    """Yield where vertical rules begin and end, from left to right."""
    for line in ET.fromstring(picture).iter(f"{SVG}line"):
        if (line.get("stroke-dasharray") is not None) == dashed:
            yield float(line.get("x1", "nan")), float(line.get("x2", "nan"))


def test_each_model_has_a_row_in_which_it_is_busy_when_it_was() -> None:
    drawn = bars(timeline([SERIAL], ROLES))
    assert [title for title, _, _ in drawn] == [
        f"{track}: {end - begin:.3f} s, from {begin + start:.3f} s on"
        for track, begin, end in BUSY
        for start in (0.0, 10.0)
    ]
    reward = drawn[2]
    assert reward[1:] == pytest.approx((ACROSS * 2 / 20, ACROSS * 3 / 20), abs=0.01)
    assert max(x + width for _, x, width in drawn) == pytest.approx(ACROSS, abs=0.01)


def test_schedules_share_one_scale_of_seconds() -> None:
    short = Schedule("short", [step(0, 0.0, *BUSY, cut=4.0)])
    drawn = bars(timeline([SERIAL, short], ROLES))
    assert drawn[-1][1] + drawn[-1][2] == pytest.approx(ACROSS / 2, abs=0.01)
    said = words(timeline([SERIAL, short], ROLES))
    assert {"serial: 2 steps in 20.00 s", "short: 1 step in 10.00 s", "step 3", "step 4", "step 0"} <= set(said)
    assert [each for each in said if each.replace(".", "").isdigit()] == [str(2 * k) for k in range(11)]
    assert "seconds" in said


def test_a_cut_is_a_dashed_line_and_what_it_carried_an_arrow_to_the_next_step() -> None:
    picture = timeline([CARRYING], ROLES)
    assert [x for x, _ in rules(picture, dashed=True)] == pytest.approx([ACROSS * 4 / 20, ACROSS * 15 / 20], abs=0.1)
    assert words(picture).count("cut") == 2
    assert [each for each in words(picture) if "carried" in each] == [
        "2 carried",
        "dashed: the cut; arrows: responses carried into the next step",
    ]
    (head,) = (path.get("d", "") for path in ET.fromstring(picture).iter(f"{SVG}path"))
    assert head.startswith(f"M{ACROSS / 2:.1f} ")
    assert (ACROSS * 4 / 20, ACROSS / 2 - 6) in [tuple(map(float, ends)) for ends in rules(picture, dashed=False)]


def test_work_that_reaches_beyond_the_steps_is_drawn_within_them() -> None:
    early = Schedule("early", [step(0, 0.0, ("policy", -3.0, 1.0), ("critic", 9.0, 14.0), cut=None)])
    drawn = bars(timeline([early], ROLES))
    assert [(x, width) for _, x, width in drawn] == [(0.0, ACROSS / 10), (ACROSS * 0.9, ACROSS / 10)]


@pytest.mark.parametrize("schedules", [[], [Schedule("none", [])], [Schedule("x", [step(0, 0.0, cut=1.0)])]])
def test_there_is_no_picture_of_no_work(schedules: Sequence[Schedule]) -> None:
    assert timeline(schedules, ROLES) == ""


def test_colours_of_text_and_rules_follow_the_page() -> None:
    root = ET.fromstring(timeline([CARRYING], ROLES))
    assert {each.get("fill") for each in root.iter(f"{SVG}text")} == {"currentColor"}
    assert {each.get("stroke") for each in root.iter(f"{SVG}line")} == {"currentColor"}


def test_the_latest_steps_are_kept_with_what_models_did_in_them() -> None:
    keeper = Timekeeper(kept=2)
    for number in range(3):
        keeper.model_span(Span("policy", "decode", number, number + 0.5))
        keeper.on_item(number, "generate", finish(number, 1), number + 0.25)
        keeper.on_item(number, "generate", Defer(9, number + 1), number + 0.5)
        keeper.on_item(number, "advantage", finish(number, 1), number + 0.75)
        keeper.on_span(Span("step", str(number), number, number + 1))
        keeper.on_step(number, report(number, (number,), 0.0), CHANNELS)
    assert [(each.index, each.start, each.end, each.cut, each.carried) for each in keeper.steps] == [
        (1, 1.0, 2.0, 1.5, 1),
        (2, 2.0, 3.0, 2.5, 1),
    ]
    assert [[span.start for span in each.spans] for each in keeper.steps] == [[1.0], [2.0]]
