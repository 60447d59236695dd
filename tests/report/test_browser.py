"""The page in a browser, as people open it: curves, zoom, search, texts that run nothing, a run that goes on.

They need Chromium on the path and the packages of the extra ``browser``: ``make test-browser``.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from oppo.report.page import LIBRARY, Follower, write_report
from oppo.report.run_reader import recorded

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip

HOSTILE: Final = (
    "</script><script>window.hurt=1</script>",
    "<img src=x onerror=window.hurt=1>",
    "\u2028window.hurt=1\u2029",
    "'\"><svg onload=window.hurt=1>",
    "</textarea><iframe srcdoc='<script>parent.hurt=1</script>'>",
    "javascript:window.hurt=1",
    "${window.hurt=1}",
    "]]><!--<script>",
)
METRICS = (
    "score", "objective/kl", "loss/policy_avg", "loss/value_avg", "val/explained_variance", "policy/entropy_avg",
    "policy/clipfrac_avg", "val/clipfrac_avg", "policy/approxkl_avg", "train/grad_norm", "lr", "response_length/mean",
    "response_length/max", "timing_s/decode", "timing_s/score_exposed", "timing_s/update", "throughput/tokens_per_s",
    "rewards/kind/mean", "rewards/safe/mean", "staleness/mean", "staleness/max", "mismatch/kl", "mismatch/ess",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(
            f"none of {', '.join(NAMES)} is on the path: install Chromium, on Debian by `apt-get install chromium`"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, headless=True, args=[*QUIET])
        yield launched
        launched.close()


@pytest.fixture(autouse=True)
def _with_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.report.page.LIBRARY", LIBRARY)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A window that asks nothing of any other machine; a message on its console, or an error, fails the test."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    faults: list[str] = []
    window = context.new_page()
    window.on("console", lambda message: faults.append(message.text))
    window.on("pageerror", lambda error: faults.append(str(error)))
    window.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(("file:", "blob:", "data:", "http://127.0.0.1:"))
            else faults.append(request.url)
        ),
    )
    yield window
    hurt = window.evaluate("window.hurt")
    context.close()
    assert hurt is None
    assert faults == []


def made(folder: Path, steps: int, samples: int, *, says: tuple[str, ...] = ("fine",)) -> Path:
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {name: 2 + math.sin(step / 50 + place) for place, name in enumerate(METRICS)}
            file.write(
                json.dumps({"step": step, "seconds": 9.0, "trained": 8, "deferred": step % 3, "dropped": 0, **values})
                + "\n"
            )
    with (folder / "samples.jsonl").open("w") as file:
        for number in range(samples):
            said = says[number % len(says)]
            parts = [{"by": "policy", "text": said}, {"by": "tool", "text": f"tool {number}"}]
            at = 1 + number * steps // samples
            sample = {
                "step": at,
                "score": number / 9,
                "kl": 0.5,
                "tokens": 1,
                "reason": said,
                "prompt": f"prompt {number} {said}",
                "completion": said,
            }
            file.write(json.dumps({**sample, "parts": parts, "extra": {said: said}}, ensure_ascii=False) + "\n")
    (folder / "config.toml").write_text('[run]\nname = "x"\n')
    return folder


def opened(page: Page, run: Path) -> None:
    page.goto(write_report([recorded(run)]).as_uri())
    page.wait_for_selector(".js-plotly-plot .scatterlayer")


def until(page: Page, condition: str) -> None:
    """Wait for an expression to be true, which Playwright's own function evaluates as the page's policy forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"not within 10 s: {condition}")


def ranges(page: Page) -> list[list[float]]:
    found: list[list[float]] = page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map((each) => each._fullLayout.xaxis.range)"
    )
    return found


def test_a_run_of_2000_steps_and_500_samples_opens_and_draws_what_is_in_view(page: Page, tmp_path: Path) -> None:
    written = write_report([recorded(made(tmp_path / "long", 2_000, 500))])
    began = time.perf_counter()
    page.goto(written.as_uri())
    page.wait_for_selector(".js-plotly-plot .scatterlayer")
    seconds = time.perf_counter() - began
    sys.stdout.write(
        f"\n2,000 steps and 500 samples, {written.stat().st_size / 1e6:.1f} MB, were drawn after {seconds:.2f} s\n"
    )
    charts, drawn = page.locator(".plot").count(), page.locator(".js-plotly-plot").count()
    assert charts == 18
    assert 3 <= drawn <= 9
    assert page.locator(".sample").count() == 500
    page.locator(".plot").last.scroll_into_view_if_needed()
    until(page, "document.querySelectorAll('.plot')[17].classList.contains('js-plotly-plot')")


def test_hover_shows_values_and_a_zoom_moves_every_x_axis(page: Page, tmp_path: Path) -> None:
    opened(page, made(tmp_path / "run", 100, 4))
    first = page.locator(".plot .nsewdrag").first
    box = first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector(".plot .hoverlayer .legend")
    shown = page.locator(".plot .hoverlayer").first.text_content() or ""
    hovered = re.fullmatch(r"step (\d+)(?:score : )?([\d.]+)", shown)
    assert hovered is not None, shown
    assert float(hovered[2]) == pytest.approx(2 + math.sin(int(hovered[1]) / 50), rel=1e-3)
    before = ranges(page)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    until(page, "view.range !== null")
    found = ranges(page)
    assert len({tuple(each) for each in before}) == 1 == len({tuple(each) for each in found})
    assert found[0] != before[0]
    assert found[0] == pytest.approx([50, 75], abs=5)
    page.locator(".plot").last.scroll_into_view_if_needed()
    page.wait_for_selector(".curves > :last-child .js-plotly-plot")
    assert {tuple(each) for each in ranges(page)[-1:]} == {tuple(found[0])}, "one that is drawn later too"
    page.evaluate("window.scrollTo(0, 0)")
    page.locator("#whole").click()
    assert page.evaluate("view.range") is None


@pytest.mark.parametrize("steps", [1, 3, 60])
def test_a_page_fits_a_phone_and_each_chart_has_a_name_and_whole_steps(page: Page, tmp_path: Path, steps: int) -> None:
    runs = [recorded(made(tmp_path / f"a_run_of_a_long_name_{each}", steps, 3)) for each in "ab"]
    page.set_viewport_size({"width": 360, "height": 800})
    for written in (write_report(runs[:1]), write_report(runs)):
        page.goto(written.as_uri())
        page.locator(".plot").first.scroll_into_view_if_needed()
        page.wait_for_selector(".js-plotly-plot .scatterlayer")
        wide = "[...document.querySelectorAll('body *')].filter((each) => each.getBoundingClientRect().right > 360.5"
        wide += " && !each.closest('svg, figure, .scroll, pre')).map((each) => each.outerHTML.slice(0, 300))"
        assert page.evaluate(wide) == []
        assert page.get_by_role("img", name="Score", exact=True).count() == 1
        ticks = page.locator(".js-plotly-plot").first.locator(".xtick").all_text_contents()
        assert len({*ticks}) == len(ticks) > 0


def test_lines_are_smoothed_and_drawn_on_a_log_scale(page: Page, tmp_path: Path) -> None:
    opened(page, made(tmp_path / "run", 100, 4))
    drawn = (
        "(([one]) => [one.data.length, one._fullLayout.yaxis.type, Math.max(...one.data.at(-1).y)])"
        "(document.querySelectorAll('.js-plotly-plot'))"
    )
    lines, scale, highest = page.evaluate(drawn)
    assert (lines, scale) == (1, "linear")
    page.locator("#smoothing").fill("95")
    page.locator("#log").check()
    lines, scale, smoothed = page.evaluate(drawn)
    assert (lines, scale) == (2, "log"), "what was measured stays, faintly"
    assert 2 < smoothed < highest


def test_the_search_finds_samples_and_orders_them(page: Page, tmp_path: Path) -> None:
    opened(page, made(tmp_path / "run", 50, 60, says=("an apple", "a pear")))
    page.locator("#find").fill("Prompt 5")
    assert page.locator("#found").inner_text() == "11 of 60", "5, 50, 51, ..., 59"
    assert page.locator(".sample:visible").count() == 11
    page.locator("#order").select_option("best")
    first = "[...document.querySelectorAll('.sample')].find((each) => each.offsetParent)"
    until(page, f"{first}.innerText.startsWith('score 6.556')")
    page.locator("#find").fill("")
    assert page.locator(".sample:visible").count() == 60
    assert page.locator(".sample .tool").first.text_content() == "tool 59"
    page.locator(".sample").last.scroll_into_view_if_needed()
    until(page, "document.getElementById('view').getBoundingClientRect().bottom < 0")


def test_texts_of_models_run_nothing(page: Page, tmp_path: Path) -> None:
    run = made(tmp_path / "<img src=x onerror=hurt=1>", 5, 16, says=HOSTILE)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    named = [{**json.loads(line), **{f"{text}": 1.0 for text in HOSTILE}} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in named))
    (run / "config.toml").write_text("".join(f"# {text}\n" for text in HOSTILE if "\u2028" not in text))
    note = {"event": "begin", "machine": HOSTILE[0], "libraries": {HOSTILE[1]: HOSTILE[3]}}
    (run / "log.jsonl").write_text(json.dumps(note) + "\n")
    opened(page, run)
    said = page.locator(".sample .said > div:last-child").all_text_contents()
    for text in HOSTILE[:2]:
        assert any(each.startswith(text) for each in said), "it is shown as it is"
    for plot in page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
        plot.hover()
    page.wait_for_timeout(300)
    assert page.locator("iframe, img, svg[onload]").count() == 0
    write_report([recorded(run), recorded(made(tmp_path / "other", 5, 2))])
    page.goto((tmp_path / "comparison.html").as_uri())
    page.wait_for_selector(".js-plotly-plot .scatterlayer")
    page.locator(".plot").first.hover()


def test_a_page_of_a_run_that_goes_on_follows_it_and_stays_zoomed(page: Page, tmp_path: Path) -> None:
    run = made(tmp_path / "run", 20, 4)
    with Follower([run]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            page.goto(server.address)
            page.wait_for_selector(".js-plotly-plot .scatterlayer")
            assert "20 steps" in page.locator("#lead").inner_text()
            page.evaluate("view.range = [5, 15]; refresh()")
            page.locator("#find").fill("prompt 1")
            made(tmp_path / "later", 30, 8)
            for name in ("samples.jsonl", "metrics.jsonl"):
                (tmp_path / "later" / name).replace(run / name)
            until(page, "document.getElementById('lead').textContent.includes('30 steps')")
            page.evaluate("window.scrollTo(0, 0)")
            until(page, "document.querySelector('.js-plotly-plot').data[0].x.at(-1) === 30")
            assert ranges(page)[0] == [5, 15]
            assert page.locator("#found").inner_text() == "1 of 8"
        finally:
            server.shutdown()


def test_without_the_library_there_are_pictures_and_the_search(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oppo.report.page.LIBRARY", "a_package_that_is_not_installed")
    written = write_report([recorded(made(tmp_path / "run", 50, 9))])
    assert written.stat().st_size < 300_000
    page.goto(written.as_uri())
    assert page.locator(".curves svg").count() == 18
    assert not page.locator("#view").is_visible()
    page.locator("#find").fill("prompt 3")
    assert page.locator("#found").inner_text() == "1 of 9"
