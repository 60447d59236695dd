"""The page of a run without a browser: its pictures, its texts, and what it says where something is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from oppo.cli import DONE, UNUSABLE, main
from oppo.observe import Span
from oppo.report import RunDirectory
from oppo.report.charts import COLOURS, Excerpt
from oppo.report.metrics import CHARTS, METRICS, Chart, Metrics, metric, records_of
from oppo.report.page import STYLE, cut_off, drawn, page, write_report
from oppo.report.records import Record
from oppo.report.run_reader import Recorded, differing, note_times, parameters, recorded
from oppo.report.trace import TimedStep
from tests.hf import tiny
from tests.report.synthetic import decode, play, play_first, play_second

WORK = [Span("trainer", "update", 0.0, 1.0, 0, "update")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RunDirectory(tmp_path / "runs" / "x", config="[run]\nsteps = 2\n", decode=decode) as directory:
        play(directory)
    return directory.path


def html_of(path: Path) -> str:
    return (path / "report.html").read_text()


def run_of(folder: Path, records: Sequence[Metrics] = (), samples: Sequence[Record] = ()) -> Recorded:
    return Recorded(folder, records, (), samples, (), "", {}, {}, "complete", ())


def test_the_page_is_self_contained_and_escapes_what_models_say(path: Path) -> None:
    html = html_of(path)
    assert html.count("<svg") == 6, "score, KL, lengths, phases, deferred and dropped, each as a picture"
    assert not re.search(r"<(link|img)|<script src|url\(|@import|https?://(?!www\.w3\.org)", html)
    assert "&lt;b&gt;two&lt;/b&gt;" in html
    assert "<b>two</b>" not in html


def test_the_page_opens_with_the_latest_two_steps_as_they_were(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run", decode=decode) as directory:
        for play_one, number in ((play_first, 0), (play_second, 1)):
            directory.model_span(Span("policy", "decode", 2.0 * number, 2.0 * number + 1, number, "decode"))
            directory.on_span(Span("step", str(number), 2.0 * number, 2.0 * number + 2, number, kind="step"))
            play_one(directory)
    html = html_of(directory.path)
    assert html.index("latest: 2 steps in 4.00 s") < html.index("Does it learn?")
    assert "policy: 1.000 s for step 2, from 2.000 s on" in html
    assert "1 response deferred" in html
    assert html.count("<svg") == 7
    assert main(["report", str(directory.path)]) == DONE
    assert html_of(directory.path) == html, "all of it is in the files"


PPO: dict[str, object] = {"missing_eos_penalty": 0.0, "mask_truncated": False, "bootstrap_truncated": False}


def capped(shares: Sequence[float], algorithm: dict[str, object], name: str = "ppo") -> Recorded:
    records: list[Metrics] = [{"step": step, "response_length/capped": share} for step, share in enumerate(shares)]
    return replace(run_of(Path("x"), records), settings={"step": {"algorithm": name}, "algorithm": algorithm})


def test_the_page_says_that_ever_more_responses_are_cut(tmp_path: Path) -> None:
    run = replace(capped([0.1] * 10 + [0.9] * 10, PPO), path=tmp_path)
    assert "grew from 10% to 90%" in page([run])


SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=60)


@given(shares=SHARES, constant=st.floats(0, 1))
def test_a_share_of_cut_responses_that_stays_or_falls_is_no_matter(shares: list[float], constant: float) -> None:
    for calm in (sorted(shares, reverse=True), [constant] * 60):
        assert not cut_off(capped(calm, PPO))


@given(shares=st.lists(st.floats(0, 1), min_size=20, max_size=60), first=st.floats(0, 0.5))
def test_a_share_of_cut_responses_that_grows_to_most_of_a_batch_is_told_with_what_helps(
    shares: list[float], first: float
) -> None:
    grown = [first] * 10 + shares + [first + 0.35 if first > 0.2 else 0.6] * 10
    assert "algorithm.missing_eos_penalty or algorithm.mask_truncated" in cut_off(capped(grown, PPO))
    assert cut_off(capped(grown, {"mask_truncated": False}, "distill"))
    for key, value in (("missing_eos_penalty", 0.5), ("mask_truncated", True), ("bootstrap_truncated", True)):
        assert not cut_off(capped(grown, {**PPO, key: value}))
    assert not cut_off(capped(grown, {**PPO}, "dapo")), "which punishes long responses"
    assert cut_off(capped(grown, {**PPO, "long_buffer": 0}, "dapo"))


def test_a_page_can_be_written_again_with_other_steps_and_the_same_records(path: Path) -> None:
    before = html_of(path)
    write_report([recorded(path)])
    assert html_of(path) == before
    note_times(path, [Excerpt("another", [TimedStep(0, 0.0, 2.0, None, 0, WORK)], others=0.4)])
    write_report([recorded(path)])
    assert "another: 1 step in 2.00 s; other processes took 40% of the cores" in html_of(path)
    curves = before.partition('class="curves">')[2].partition("<h2>Samples")[0]
    assert curves.partition("Models, machine and files")[0] in html_of(path)


@given(gap=st.floats(0.0, 0.009), count=st.integers(1, 400), start=st.floats(-1e6, 1e6))
def test_work_that_a_picture_cannot_show_apart_is_one_and_lasts_as_long(gap: float, count: int, start: float) -> None:
    spans = [
        Span("policy", "decode", start + k * 0.01, start + (k + 1) * 0.01 - gap, 0, "decode") for k in range(count)
    ]
    before = Excerpt(
        "x", [TimedStep(0, start, start + 4.0, start + 1, 2, spans), TimedStep(1, start + 4, start + 8, None, 0, ())]
    )
    after = before.as_shown()
    assert (after.seconds, after.shown, after.steps[0].cut) == (before.seconds, before.shown, before.steps[0].cut)
    shown, most = sum(each.end - each.start for each in after.work), 0.5 * 8 / 950
    assert sum(each.end - each.start for each in spans) - 1e-6 <= shown <= 0.01 * count + 1e-6
    assert len(after.work) == (count if gap > most * 1.01 else len(after.work)) <= count


@pytest.mark.parametrize(("steps", "shown"), [(9, range(9)), (1_000, {0, 8, 992, 997, 998, 999})])
def test_the_page_shows_samples_of_the_first_step_of_the_last_three_and_some_between(
    path: Path, steps: int, shown: set[int] | range
) -> None:
    (line,) = (path / "samples.jsonl").read_text().splitlines()[:1]
    told = [
        json.dumps({**json.loads(line), "step": 1 + k // 4, "completion": f"said in {k // 4}."}) + "\n"
        for k in range(4 * steps)
    ]
    (path / "samples.jsonl").write_text("".join(told))
    records = [json.dumps({"step": step + 1, "score": 1.0}) + "\n" for step in range(steps)]
    (path / "metrics.jsonl").write_text("".join(records))
    write_report([recorded(path)])
    found = [int(step) for step in re.findall(r"said in (\d+)\.", html_of(path))]
    assert {*found} >= {*shown}
    assert len(found) <= 520


@pytest.mark.parametrize(("scoring", "hidden"), [(0.004, None), (0.4, 0.75)])
def test_scoring_of_milliseconds_is_not_said_to_be_hidden(tmp_path: Path, scoring: float, hidden: float | None) -> None:
    times = {"timing_s/score": scoring, "timing_s/score_exposed": scoring / 4, "overlap/hidden_fraction": 0.75}
    records: list[Metrics] = [{"step": step, "seconds": 2.0, **times} for step in range(3)]
    html = page([run_of(tmp_path, records)])
    assert ("Scoring hidden behind" in html) == ("75%" in html) == (hidden is not None)


def test_a_utilisation_above_the_peak_is_not_drawn_and_said_so(tmp_path: Path) -> None:
    records: list[Metrics] = [
        {"step": 0, "seconds": 2.0, "perf/mfu/decode": 0.1, "perf/mfu/update": share} for share in (0.9, 1.3)
    ]
    for found, names in ((records[:1], ["decode", "update"]), (records, ["decode"])):
        run = run_of(tmp_path, found)
        (lines,) = (each for chart, each in drawn([run]) if chart.title == "Model FLOPs utilisation")
        assert [line.label for line in lines] == names
        assert ("not drawn for update: it was faster than the peak" in page([run])) == (len(names) == 1)


def test_the_page_spells_out_the_control_characters_of_texts(tmp_path: Path) -> None:
    sample: Record = {
        "step": 0,
        "score": 1.0,
        "kl": -0.001,
        "prompt": "a\x1b[31m\x07\n\tb",
        "completion": "\x9b\u202e\x00c",
    }
    html = page([run_of(tmp_path, samples=[sample])])
    assert "a\\x1b[31m\\x07\n\tb" in html
    assert "KL 0.00 nats" in html
    assert "\\x9b\\u202e\\x00c" in html
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", html)


def test_every_chart_draws_a_declared_metric_and_no_two_the_same_section_twice() -> None:
    for chart in CHARTS:
        assert bool(chart.lines) != bool(chart.stack)
        for name in (*chart.lines.values(), *chart.stack.values(), *filter(None, [chart.of])):
            assert metric(name) is not None, name
    sections = [chart.section for chart in CHARTS]
    assert [*dict.fromkeys(sections)] == [each for k, each in enumerate(sections) if k == 0 or sections[k - 1] != each]


def test_each_metric_that_a_dashboard_is_opened_for_has_a_curve() -> None:
    names = {name for chart in CHARTS for name in (*chart.lines.values(), *chart.stack.values())}
    assert names >= {
        "loss/policy_avg", "loss/value_avg", "val/explained_variance", "policy/entropy_avg", "policy/clipfrac_avg",
        "policy/approxkl_avg", "objective/kl", "train/grad_norm", "lr", "response_length/mean", "eval/score",
        "rewards/{name}/mean", "objective/teacher_kl", "agents/conversations", "num_turns/mean",
    }  # fmt: skip


def test_rewards_have_a_line_each_and_metrics_of_a_trainer_of_ones_own_a_chart_each(tmp_path: Path) -> None:
    record: Metrics = {
        "step": 0,
        "rewards/kind/mean": 1.0,
        "rewards/kind/share": 1.0,
        "rewards/safe/mean": 2.0,
        "mine/a": 3,
    }
    found = {
        chart.title: [(each.label, each.y) for each in lines] for chart, lines in drawn([run_of(tmp_path, [record])])
    }
    assert found["Rewards by name"] == [("kind", [1.0]), ("safe", [2.0])]
    assert found["mine/a"] == [("mine/a", [3])]
    assert "rewards/kind/share" not in found, "it is declared"


@pytest.mark.parametrize(("score", "shown"), [(0.0, False), (0.5, True)])
def test_a_distillation_shows_its_distance_to_the_teacher_and_a_score_only_with_a_reward(
    tmp_path: Path, score: float, shown: bool
) -> None:
    run = run_of(tmp_path, [{"step": 0, "score": score, "objective/teacher_kl": 2.5}])
    assert [chart.title for chart, _ in drawn([run])] == [*(["Score"] if shown else []), "KL to the teacher"]
    html = page([run])
    assert "<b>2.50 nats a rollout</b>" in html
    assert ("Score of rollouts" in html) == shown
    assert "Score of rollouts" in page([run_of(tmp_path, [{"step": 0, "score": 0.0}])]), "of a reward never given"


def test_a_held_out_metric_is_drawn_where_its_chart_is_and_not_as_one_of_ones_own(tmp_path: Path) -> None:
    held: list[Record] = [
        {"step": step, "eval/score": 1.0, "eval/score_ci95": 0.5, "eval/rewards/a/mean": 2.0} for step in (-1, 3)
    ]
    run = replace(run_of(tmp_path, [{"step": 0, "score": 0.5}]), evaluations=held)
    found = {chart.title: lines for chart, lines in drawn([run])}
    (score,) = found["Held-out score"]
    assert (score.x, score.y, score.error) == ([0, 4], [1.0, 1.0], [0.5, 0.5]), "the first is before the first step"
    assert [line.label for line in found["Rewards by name"]] == ["a, held-out"]
    assert not [title for title in found if "/" in title]


VALUE = st.one_of(st.none(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False))
NAMES = st.sampled_from(
    [
        each.name.format(name="x", versions="0", k=1, channel="a", role="r") if "{" in each.name else each.name
        for each in chain(*METRICS.values())
    ]
)


@given(records=st.lists(st.dictionaries(st.one_of(NAMES, st.text(max_size=9)), VALUE, max_size=30), max_size=4))
def test_any_record_of_numbers_gives_a_page(
    tmp_path_factory: pytest.TempPathFactory, records: Sequence[Record]
) -> None:
    told = records_of({**each, "step": step} for step, each in enumerate(records))
    run = run_of(tmp_path_factory.getbasetemp(), told)
    html = page([run, run])
    assert "NaN" not in html.partition('id="data"')[2]
    assert ("No step was made." in html) == (not [*drawn([run])])


def test_runs_are_compared_by_the_settings_that_differ_and_their_figures(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "runs" / "y"
    config = '[run]\nname = "y"\nsteps = 2\n[[rewards]]\nsource = "<i>"\n'
    with RunDirectory(other, config=config, decode=decode) as directory:
        play(directory)
    assert differing([recorded(path), recorded(other)]) == {"rewards.1.source": [None, "<i>"]}
    assert main(["report", str(path), str(other)]) == DONE
    assert capsys.readouterr().out == f"written: {tmp_path / 'runs' / 'comparison.html'}\n"
    html = (tmp_path / "runs" / "comparison.html").read_text()
    assert html.index("Settings that differ") < html.index("rewards.1.source") < html.index("Does it learn?")
    assert "&lt;i&gt;" in html
    assert "<i>" not in html
    score = html.partition('aria-label="Score"')[2].partition("</svg>")[0]
    assert score.count("<path") == 2
    assert all(
        f">{name}</text>" in score and f'stroke="{colour}"' in score
        for name, colour in zip("xy", COLOURS, strict=False)
    )
    assert 'href="y/metrics.jsonl"' in html


@pytest.mark.parametrize("steps", [1, 3, 700])
def test_runs_of_other_lengths_are_compared_line_by_line(tmp_path: Path, steps: int) -> None:
    times = {"timing_s/decode": 1.0, "timing_s/update": 2.0, "seconds": 4.0}
    first, second = (run_of(tmp_path, [{"step": step, **times} for step in range(count)]) for count in (2, steps))
    second = replace(second, path=tmp_path / "second")
    second.path.mkdir()
    for runs, count in (([first], 3), ([first, second], 6)):
        picture = page(runs).partition('aria-label="Step time by phase"')[2].partition("</svg>")[0]
        assert picture.count("<path") == count, "decode, update and what is left"
        assert ("second: update</text>" in picture) == (count == 6)


def test_models_are_shown_with_their_parameters_as_their_files_have_them(tmp_path: Path) -> None:
    model = tiny.causal()
    model.save_pretrained(tmp_path / "actor")
    stored = {each.data_ptr(): each.numel() for each in model.parameters()}
    assert parameters(str(tmp_path / "actor")) == sum(stored.values())
    assert parameters(str(tmp_path / "nowhere")) is parameters("owner/none") is parameters("not a name") is None
    (tmp_path / "actor" / "model.safetensors").write_bytes(b"no tensors")
    assert parameters(str(tmp_path / "actor")) is None


def damaged(name: str, text: bytes | None) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        if text is not None:
            (path / name).write_bytes(text)

    return damage


def to_folder(path: Path) -> None:
    (path / "samples.jsonl").unlink()
    (path / "samples.jsonl").mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damaged("metrics.jsonl", None), "metrics.jsonl is missing"),
        (damaged("metrics.jsonl", b""), ""),
        (damaged("metrics.jsonl", b'{"step": 1}\n{"step": 2, "s'), "metrics.jsonl: line 2 left out as damaged"),
        (damaged("metrics.jsonl", b"\xff\xfe\x00" * 99), "metrics.jsonl: line 1 left out as damaged"),
        (damaged("samples.jsonl", b'{"step": 1}\n{"score": "<"}\n'), "samples.jsonl: lines 1, 2 left out as damaged"),
        (to_folder, "samples.jsonl cannot be read"),
        (damaged("config.toml", None), "config.toml is missing"),
        (damaged("config.toml", b"[run\n"), "config.toml cannot be read: TOMLDecodeError"),
        (damaged("config.toml", b'run = 3\nrewards = "x"\nmodels = [1]\n'), ""),
        (damaged("timeline.json", b"[{}]"), "timeline.json cannot be read: ValueError: it holds no steps in time"),
        (damaged("timeline.json", b'[{"name": "x", "steps": []}]'), "its steps take no time"),
        (damaged("log.jsonl", b'{"event": "begin", "libraries": 3}\n4'), "log.jsonl: line 2 left out as damaged"),
        (damaged("eval.jsonl", b'{"step": 0, "eval/score": 1.0, "samples": [3, {"prompt": 3}]}\n'), ""),
        (damaged("summary.json", b"{"), ""),
    ],
)  # fmt: skip
def test_of_a_damaged_run_a_page_shows_what_can_be_read_and_says_what_cannot(
    path: Path, damage: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(path)
    assert main(["report", str(path)]) == DONE
    told = capsys.readouterr().err
    assert said in told
    assert (told == "") == (not said)
    html = html_of(path)
    assert ("What could not be read" in html) == bool(said)
    assert said in html
    if "metrics" not in said:
        assert "&lt;b&gt;two" in html or "samples" in said
        assert 'aria-label="Score"' in html or "metrics" in said or (path / "metrics.jsonl").stat().st_size == 0


def test_what_is_no_run_is_refused_with_what_would_be_one(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = "holds none of the files of a run (metrics.jsonl, config.toml, log.jsonl, ...): expected the directory of "
    for wrong, said in (
        ([path.parent], f"{none}a run, one of its runs: {path}"),
        ([path / "none"], "does not exist: expected the directory of a run, such as runs/first"),
        ([path, path / "config.toml"], "is no directory"),
        ([], "oppo report needs the directory of a run"),
    ):  # fmt: skip
        assert main(["report", *map(str, wrong)]) == UNUSABLE
        assert said in capsys.readouterr().err.replace("\n", "")


def test_how_a_run_ended_is_shown(path: Path) -> None:
    log = path / "log.jsonl"
    for events, state in (
        (["begin", "failed"], "failed"),
        (["begin", "interrupted"], "interrupted"),
        (["begin", "failed", "begin", "end"], "complete"),
        (["begin", "failed", "begin"], "ended early"),
    ):
        log.write_text("".join(json.dumps({"event": each}) + "\n" for each in events))
        assert recorded(path).state == state
    with RunDirectory(path.parent / "going") as directory:
        assert recorded(directory.path).state == "running"
        assert recorded(directory.path, over=True).state == "ended early"
        directory.conclude()
    assert recorded(directory.path).state == "complete"


def test_a_run_that_failed_says_why_and_any_other_does_not(path: Path) -> None:
    log, why = path / "log.jsonl", {"exc_type": "RewardFailure", "exc_value": "it said <no>\nand\x1b[31m"}
    behind = {"exc_type": "ValueError", "exc_value": "behind it"}
    failed = {"event": "failed", "exception": [why, behind], "notes": ["in stage 'score'", "go on with <resume>"]}
    log.write_text(json.dumps(failed) + "\n")
    run = recorded(path)
    for html in (page([run]), page([run, replace(run, reason="")])):
        assert "RewardFailure: it said &lt;no&gt;" in html
        assert "in stage &#x27;score&#x27; / go on with &lt;resume&gt;" in html
        assert "behind it" not in html
        assert "\x1b" not in html
    log.write_text("".join(json.dumps(each) + "\n" for each in (failed, {"event": "begin"}, {"event": "end"})))
    assert recorded(path).reason == ""
    unknown: list[object] = [None, 3, [], [3], {}]
    for told in unknown:
        log.write_text(json.dumps({"event": "failed", "exception": told, "notes": told}) + "\n")
        assert (recorded(path).state, recorded(path).reason) == ("failed", "")


def test_a_page_begins_with_what_was_trained_where(tmp_path: Path) -> None:
    model = tmp_path / "my-actor"
    tiny.causal().save_pretrained(model)
    begun = {"machine": "Linux x86_64", "cores": 2, "memory": "24 GiB", "gpus": ["8 x NVIDIA H100"]}
    settings = {"models": {"policy": str(model)}, "step": {"algorithm": "ppo"}}
    run = replace(run_of(tmp_path, [{"step": 0}]), settings=settings, begun=begun)
    lead = page([run]).partition('id="lead">')[2].partition("</p>")[0]
    assert lead.startswith(
        f"ppo · policy my-actor of {parameters(str(model)):,} parameters · Linux x86_64, 2 cores, 24"
    )
    assert "8 x NVIDIA H100 · 1 step in" in lead
    hub = replace(run, settings={"models": {"policy": "owner/name"}})
    assert "policy owner/name · " in page([hub])
    assert lead in page([run, hub])


def test_what_bounds_a_step_has_one_share_of_one_whole(tmp_path: Path) -> None:
    bound = {f"bottleneck/{name}": 0.0 for name in ("tail", "cap", "score", "scoring", "capped", "finished")}
    bound |= {"bottleneck/decode": 0.49, "bottleneck/train": 0.51}
    bound |= {f"bottleneck/limit{name}": 1.9 for name in ("", "_stream", "_defer", "_lookahead")}
    html = page([run_of(tmp_path, [{"step": step, "seconds": 1.0, **bound} for step in range(9)])])
    shown = html.partition("<body")[2].partition('id="view"')[0]
    assert {*re.findall(r"\d+%", shown)} == {"51%"}
    assert "<b>the update, 51%</b>" in shown
    assert "the update takes 51% of the step." in shown


def test_what_is_as_without_deferral_in_every_step_is_not_drawn(tmp_path: Path) -> None:
    still: Metrics = {"deferred": 0, "staleness/max": 0, "mismatch/kl": 0.0, "mismatch/kl_current": 1e-13}
    records: list[Metrics] = [{"step": step, **still, "mismatch/ess": 1 - 1e-9, "score": 0.0} for step in range(3)]
    assert [chart.title for chart, _ in drawn([run_of(tmp_path, records)])] == ["Score"]
    for name in ("deferred", "staleness/max", "mismatch/kl", "mismatch/kl_current", "mismatch/ess"):
        run = run_of(tmp_path, [*records[:2], {**records[2], name: 2}])
        assert name in {line.name for _, lines in drawn([run]) for line in lines}


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2, of ``#rgb`` or ``#rrggbb``."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
    parts = (int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_stands_out_from_what_is_behind_it_in_both_themes() -> None:
    light, dark = (dict(re.findall(r"--(\w+):(#\w+)", each)) for each in re.findall(r":root\{(.*?)\}", STYLE))
    for theme in (light, light | dark):
        for behind in ("paper", "card", "wash"):
            for text in ("ink", "dim", "mark", "good", "bad"):
                low, high = sorted((luminance(theme[behind]), luminance(theme[text])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (theme[behind], theme[text])


def test_names_that_no_file_can_hold_are_spelt_out(tmp_path: Path) -> None:
    folder = tmp_path / "a\udcffb"
    folder.mkdir()
    records: list[Metrics] = [{"step": 0, "mine/\ud800": 1.0, "mine/\x00": 1.0, "mine/<b>": 1.0}]
    html = page([run_of(folder, records, [{"step": 0, "score": 1.0, "prompt": "\ud800", "completion": "x"}])])
    assert "a\\udcffb" in html
    assert "mine/&lt;b&gt;" in html
    assert html.encode()


def test_two_runs_of_one_name_are_told_apart(path: Path, tmp_path: Path) -> None:
    first, second = replace(recorded(path)), replace(recorded(path), path=tmp_path / "b" / "x")
    assert "&lt;" not in page([first]).partition("</header>")[0]
    second.path.mkdir(parents=True)
    assert str(second.path) in page([first, second])


def test_a_label_holds_the_part_of_the_name_that_varies() -> None:
    chart = Chart("x", "y", {"pass@$": "eval/pass_at_{k}"})
    assert chart.names(["eval/pass_at_4", "eval/passed"]) == {"pass@4": "eval/pass_at_4"}
