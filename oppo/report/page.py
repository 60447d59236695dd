"""``report.html``: one self-contained page about a run, or about several that it compares.

With the extra ``report`` it holds plotly.js, whose charts are drawn when they come into view; without it, pictures.
Texts of models and data are escaped, and a content security policy lets no script run but the page's own.
:class:`Follower` serves it while runs go on, for ``oppo report --live``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain, groupby, starmap
from pathlib import Path
from string import Template
from typing import Any, Final, cast
from urllib.parse import quote

from oppo.admission.bottleneck import Bottleneck, together
from oppo.atomic_files import put
from oppo.errors import OppoError, counted
from oppo.redact import printable
from oppo.report.charts import COLOURS, Line, lines, timeline
from oppo.report.metrics import CHARTS, MFU, Chart, column, hidden_fraction, metric, summary
from oppo.report.records import EVALUATIONS, LOCK, METRICS, REPORT, SAMPLES, SUMMARY, Record
from oppo.report.run_reader import LOG, TIMELINE, Recorded, differing, held_out, parameters, recorded

STYLE, SCRIPT, _PAGE = (Path(__file__).with_suffix(f".{kind}").read_text("utf-8") for kind in ("css", "js", "html"))
PAGE: Final = Template(_PAGE)

_WINDOW: Final = 8  # steps in the latest bottleneck
_ENDS_OF_RUN: Final = 10  # steps at the beginning and at the end of a run, whose means are compared
_RISE: Final = 0.3  # of a share of responses, beyond that of chance in small batches
_MOST: Final = 2_000  # blocks of steps that a line resolves
_OWN: Final = 40  # charts of metrics that a trainer or a reward adds
_LONGEST: Final = 8_000  # characters of a text


COMPARISON: Final = "comparison.html"
LIBRARY: Final = "plotly"  # the package that brings plotly.js


@cache
def script_of(package: str) -> str:
    try:
        file = Path(str(distribution(package).locate_file(f"{package}/package_data/plotly.min.js")))
    except PackageNotFoundError:
        return ""
    return file.read_text("utf-8").replace("</script", "<\\/script")


def page(runs: Sequence[Recorded], *, folder: Path | None = None, live: str = "", scripts: bool = True) -> str:
    names, charts, library = named(runs), list(drawn(runs)), script_of(LIBRARY)
    several = [(run, name if len(runs) > 1 else "") for run, name in zip(runs, names, strict=True)]
    known = {"runs": names, "charts": [_data(*each) for each in charts] if library else []}
    held = [each for each in (library, SCRIPT) if each and scripts]
    digests = (b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in held)
    return PAGE.substitute(
        hashes=" ".join(f"'sha256-{each}'" for each in digests) or "'none'",
        title=escape(" and ".join(names)),
        style=STYLE,
        live=escape(live),
        head=_head(runs, names),
        times=_times(runs, names) + "".join(chain.from_iterable(starmap(_notes, several))),
        curves=_curves(charts, names, drawing=bool(library)) or "<p>No step was made.</p>",
        about="".join(_about(run, name, folder) for run, name in several),
        samples="".join(chain.from_iterable(starmap(_samples, several))) or "<p>No sample was kept.</p>",
        data=json.dumps(known, separators=(",", ":")).replace("<", "\\u003c"),  # so that no text ends its element
        scripts="".join(f"<script>{script}</script>" for script in held),
    )


def write_report(runs: Sequence[Recorded]) -> Path:
    first = runs[0].path.absolute()
    target = first / REPORT if len(runs) == 1 else first.parent / COMPARISON
    put(target, [page(runs, folder=target.parent)])
    return target


def named(runs: Sequence[Recorded]) -> list[str]:
    counts = Counter(run.name for run in runs)
    return [run.name if counts[run.name] == 1 else printable(str(run.path)) for run in runs]


def drawn(runs: Sequence[Recorded]) -> Iterator[tuple[Chart, list[Line]]]:
    columns = [_columns(run) for run in runs]
    own = dict.fromkeys(
        name for each in columns for name in each if not (metric(name) or metric(name.removeprefix("eval/")))
    )
    added = [Chart(name, "Metrics of your own", {name: name}) for name in [*own][:_OWN]]
    for chart in (*CHARTS, *added):
        found = [
            line
            for k, (run, known) in enumerate(zip(runs, columns, strict=True))
            for line in _lines(chart, run, known, k)
        ]
        if found:
            yield chart, found


def _columns(run: Recorded) -> Mapping[str, None]:
    names = (name for each in run.records for name in each if not name.startswith("eval/"))
    held = (name for each in run.evaluations for name in each if name.startswith("eval/"))
    return dict.fromkeys(name for name in chain(names, held) if name.isprintable())


def _lines(chart: Chart, run: Recorded, known: Mapping[str, None], number: int) -> Iterator[Line]:
    found = {label: _line(run, label, name, number) for label, name in chart.names(known).items()}
    if chart.of and found:
        whole = _line(run, "other", chart.of, number)
        rest = [
            max(0.0, (value or 0.0) - sum(part or 0.0 for part in parts))
            for value, *parts in zip(whole.y, *(each.y for each in found.values()), strict=True)
        ]
        found["other"] = Line("other", chart.of, whole.x, rest, run=number)
    if "overlap/hidden_fraction" in chart.lines.values() and hidden_fraction(run.records) is None:
        return  # scoring of milliseconds
    for each in found.values():
        wrong = each.name in MFU.values() and max(column(run.records, each.name), default=0.0) > 1
        distilled = each.name == "score" and "objective/teacher_kl" in known
        idle = 0.0 if distilled else _IDLE.get(each.name)
        told = any(value is not None and (idle is None or abs(value - idle) > _ROUNDING) for value in each.y)
        if told and not wrong:
            yield each


_ROUNDING: Final = 1e-6
# What is not drawn if it is so in every step
_IDLE: Final = {"mismatch/ess": 1.0} | dict.fromkeys(
    ("deferred", "dropped", "staleness/max", "staleness/mean", "mismatch/kl", "mismatch/kl_current"), 0.0
)


def _line(run: Recorded, label: str, name: str, number: int) -> Line:
    records = cast("Sequence[Record]", run.records)
    if name.startswith("eval/"):
        records = [each for each in run.evaluations if name in each]
    x, interval = [cast("int", each["step"]) + 1 for each in records], f"{name}_ci95"
    y, error = ([cast("float | None", each.get(key)) for each in records] for key in (name, interval))
    return Line(label, name, x, y, error if any(interval in each for each in records) else (), number)


def _data(chart: Chart, found: Sequence[Line]) -> dict[str, object]:
    shown = (each.thinned(_MOST, means=bool(chart.stack)) for each in found)
    told = [{**asdict(each), "y": [*map(_short, each.y)], "error": [*map(_short, each.error)]} for each in shown]
    return {"stack": bool(chart.stack), "within": chart.within, "lines": told}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _curves(charts: Sequence[tuple[Chart, Sequence[Line]]], runs: Sequence[str], *, drawing: bool) -> str:
    said = ""
    for section, group in groupby(enumerate(charts), key=lambda each: each[1][0].section):
        figures = "".join(_figure(number, *each, runs, drawing=drawing) for number, each in group)
        said += f'<h2>{escape(section)}</h2><div class="charts">{figures}</div>'
    return said


def _figure(number: int, chart: Chart, found: Sequence[Line], runs: Sequence[str], *, drawing: bool) -> str:
    names = dict.fromkeys(each.name for each in found)
    meaning = "\n".join(f"{name}: {known.meaning}" for name in names if (known := metric(name)))
    unit = f"{chart.unit}: " if chart.unit else ""
    if len(runs) > 1:
        parts = [(runs[each.run], each.label if len(names) > 1 else "") for each in found]
        found = [replace(each, label=": ".join(filter(None, part))) for each, part in zip(found, parts, strict=True)]
    place = f'<div class="plot" data-chart="{number}" role="img" aria-label="{escape(chart.title)}"></div>'
    shown = place if drawing else lines(chart.title, found, within=chart.within)
    heading = f"<h3>{escape(chart.title)}<small>{escape(unit + ', '.join(names))}</small></h3>"
    return f'<figure title="{escape(meaning)}"><figcaption>{heading}</figcaption>{shown}</figure>'


def _head(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    if len(runs) == 1:
        head = f'<h1>{escape(runs[0].name)}</h1>{_state(runs[0])}<p id="lead">{escape(printable(_lead(runs[0])))}</p>'
        head += f'<p class="failed">{escape(runs[0].reason)}</p>' if runs[0].reason else ""
        return f"<header>{head}</header>{_problems(runs, names)}{_tiles(runs[0])}"
    rows = "".join(
        f"<tr><th>{_swatch(k)}{escape(name)}</th><td>{_state(run)}</td>"
        f'<td>{escape(printable(_lead(run)))} <span class="failed">{escape(run.reason)}</span></td></tr>'
        for k, (run, name) in enumerate(zip(runs, names, strict=True))
    )
    head = f'<header><h1>{len(runs)} runs</h1><p id="lead"></p></header>'
    return f'{head}{_problems(runs, names)}<table class="runs">{rows}</table>{_compared(runs, names)}'


def _swatch(number: int) -> str:
    return f'<span class="swatch run{number % len(COLOURS)}"></span>'


def _state(run: Recorded) -> str:
    return f'<span class="state {run.state.split()[0]}">{escape(run.state)}</span>'


def _lead(run: Recorded) -> str:
    made, wanted = len(run.records), run.setting("run", "steps")
    of = f" of {wanted:,}" if isinstance(wanted, int) and wanted != made and run.state != "complete" else ""
    seconds = math.fsum(value for each in run.records if (value := each.get("seconds")))
    policy = run.models().get("policy", "")
    named = f"policy {Path(policy).name if Path(policy).is_absolute() else policy}" if policy else ""
    facts = [
        str(run.setting("step", "algorithm") or ""),
        " of ".join(filter(None, (named, policy and _size(policy)))),
        _machine(run),
        f"{made:,}{of} steps in {_duration(seconds)}" if of else f"{counted(made, 'step')} in {_duration(seconds)}",
        f"began {str(run.begun.get('timestamp', ''))[:16].replace('T', ' ')} UTC" if run.begun else "",
    ]
    return " · ".join(filter(None, facts))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def _problems(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    found = [
        f"{name}: {each}" if len(runs) > 1 else each
        for run, name in zip(runs, names, strict=True)
        for each in run.problems
    ]
    items = "".join(f"<li>{escape(printable(each))}</li>" for each in found)
    return f'<div class="problems"><b>What could not be read</b><ul>{items}</ul></div>' if found else ""


def _figures(run: Recorded) -> dict[str, tuple[str, str]]:
    # By label: the figure as a person writes it, and the metric that it is
    figures = summary(run.records, run.evaluations)

    def span(name: str, digits: int = 2, unit: str = "") -> str:
        first, last = (figures.get(name, {}).get(when) for when in ("first", "last"))
        ends = dict.fromkeys(_number(each, f".{digits}f") for each in (first, last) if each is not None)
        return " → ".join(ends) + unit if ends else ""

    def one(name: str, statistic: str, form: str, unit: str = "") -> str:
        value = figures.get(name, {}).get(statistic)
        return "" if value is None else f"{value:{form}}{unit}"

    if "objective/teacher_kl" in figures and not any(figures.get("score", {}).values()):
        figures.pop("score", None)  # of a distillation without rewards
    interval = one("eval/score_ci95", "last", ".2f")
    bound = _recent(run)
    rest = ", ".join(f"{name} {one(name, 'total', ',')}" for name in ("deferred", "dropped"))
    shown = {
        "Held-out score": (
            span("eval/score") + (f" ±\N{NO-BREAK SPACE}{interval}" if interval else ""),
            "eval/score, first → last" + (", 95% interval" if interval else ""),
        ),
        "Score of rollouts": (span("score"), "score, first → last steps"),
        "KL to the reference": (one("objective/kl", "last", "z.2f", _NATS), "objective/kl, last steps"),
        "KL to the teacher": (one("objective/teacher_kl", "last", "z.2f", _NATS), "objective/teacher_kl, last steps"),
        "Held-out response": (span("eval/response_length", 0, " tokens"), "eval/response_length, first → last"),
        "Time of a step": (one("seconds", "median", ".3g", " s"), "seconds, median"),
        "Tokens a second": (one("throughput/tokens_per_s", "median", ",.0f"), "throughput/tokens_per_s, median"),
        "Scoring hidden": (one("overlap/hidden_fraction", "mean", ".0%"), "overlap/hidden_fraction"),
        "Bottleneck": (
            f"{_PARTS[bound.largest]}, {bound.shares[bound.largest]:.0%}" if bound else "",
            f"bottleneck/{bound.largest}, last steps" if bound else "",
        ),
        "Rollouts trained": (one("trained", "total", ","), rest),
    }
    return {label: figure for label, figure in shown.items() if figure[0]}


_NATS: Final = " nats a rollout"
_PARTS: Final = {
    "decode": "decoding",
    "tail": "the long tail",
    "cap": "the length cap",
    "score": "scoring",
    "train": "the update",
}


def _recent(run: Recorded) -> Bottleneck | None:
    bounds = (Bottleneck.of_metrics(each, each.get("seconds") or 0.0) for each in run.records[-_WINDOW:])
    return together([*filter(None, bounds)])


def _tiles(run: Recorded) -> str:
    tiles = (
        f'<div class="tile"><small>{label}</small><b>{escape(value)}</b><small>{escape(name)}</small></div>'
        for label, (value, name) in _figures(run).items()
    )
    return f'<div class="tiles">{"".join(tiles)}</div>' if run.records else ""


def _compared(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    settings = {
        key: [json.dumps(each) if each is not None else "\N{EN DASH}" for each in values]
        for key, values in differing(runs).items()
    }
    figures = [_figures(run) for run in runs]
    labels = dict.fromkeys(label for each in figures for label in each)
    rows = {label: [each.get(label, ("\N{EN DASH}",))[0] for each in figures] for label in labels}
    heads = "".join(f"<th>{_swatch(k)}{escape(name)}</th>" for k, name in enumerate(names))
    head = f"<tr><th></th>{heads}</tr>"
    tables = f"<h2>Settings that differ</h2>{_rows(settings, head)}<h2>Results</h2>{_rows(rows, head)}"
    return f'<div class="compared">{tables}</div>'


def _times(runs: Sequence[Recorded], names: Sequence[str]) -> str:
    several = len(runs) > 1
    picture = timeline(
        [
            replace(each, name=f"{name}: {each.name}") if several else each
            for run, name in zip(runs, names, strict=True)
            for each in run.excerpts
        ]
    )
    return f'<h2>When each model worked</h2><figure class="timeline">{picture}</figure>' if picture else ""


def cut_off(run: Recorded) -> str:
    shares = column(run.records, "response_length/capped")
    first, last = (math.fsum(each) / _ENDS_OF_RUN for each in (shares[:_ENDS_OF_RUN], shares[-_ENDS_OF_RUN:]))
    named = {key: run.setting("algorithm", key) for key in ("missing_eos_penalty", "mask_truncated")}
    helps = [f"algorithm.{key}" for key, value in named.items() if value is not None]
    heeded = [*named.values(), run.setting("algorithm", "bootstrap_truncated")]
    heeded.append(run.setting("step", "algorithm") == "dapo" and run.setting("algorithm", "long_buffer") != 0)
    if len(shares) < 2 * _ENDS_OF_RUN or last < 0.5 or last - first < _RISE or any(heeded) or not helps:
        return ""
    return (
        f"The share of responses that end at the length cap grew from {first:.0%} to {last:.0%}, and they are trained "
        f"as others are: {' or '.join(helps)} keeps the policy from learning that."
    )


def _notes(run: Recorded, name: str) -> Iterator[str]:
    of = f" of {escape(name)}" if name else ""
    if (recent := _recent(run)) is not None:
        yield f"<p><b>Bottleneck{of}:</b> {escape(recent.meaning)}. <b>Advice:</b> {escape(recent.advice)}.</p>"
    if told := cut_off(run):
        yield f"<p><b>Length cap{of}:</b> {escape(told)}</p>"
    # The peak of a CPU is measured when a run begins, beside any other load of the machine.
    wrong = " and ".join(kind for kind, name in MFU.items() if max(column(run.records, name), default=0) > 1)
    if wrong:
        yield f"<p>Utilisation{of} is not drawn for {wrong}: it was faster than the peak that was measured.</p>"


def _samples(run: Recorded, name: str) -> Iterator[str]:
    yield from (_sample(each, name) for each in (*held_out(run.evaluations), *run.samples))


def _sample(sample: Record, name: str) -> str:
    at, score = cast("int", sample["step"]) + 1, cast("float | None", sample.get("score"))
    of = f"held-out, after step {at}" if at else "held-out, before training"
    count, kl, extra = (sample.get(key) for key in ("tokens", "kl", "extra"))
    told = [
        name,
        of if sample.get("held_out") else f"step {at}",
        counted(count, "token") if isinstance(count, int) else "",
        f"KL {_number(kl, '.2f')} nats" if isinstance(kl, float) else "",
        _ENDS.get(str(sample.get("reason")), str(sample.get("reason") or "")),
        json.dumps(extra, ensure_ascii=False) if extra else "",
    ]
    parts = cast("list[Record]", sample.get("parts")) or [{"by": "policy", "text": sample["completion"]}]
    said = "".join(_part(str(each["text"]), each["by"]) for each in parts)
    head = "".join(f"<span>{escape(printable(each))}</span>" for each in told if each)
    return (
        f'<article class="sample" data-at="{at}" data-score="{"" if score is None else score}">'
        f"<h3><b>score {_number(score, '.3f')}</b>{head}</h3>"
        f'<div class="said"><div>{_part(str(sample["prompt"]))}</div><div>{said}</div></div></article>'
    )


_ENDS: Final = {"length": "cut off at the length cap", "eos": "ended by itself", "stop": "ended by a stop sequence"}


def _part(text: str, by: object = "policy") -> str:
    cut = f" … ({len(text) - _LONGEST:,} more characters in samples.jsonl)" if len(text) > _LONGEST else ""
    shown = escape(printable(text[:_LONGEST], kept="\n\t")) + cut
    return shown if by == "policy" else f'<span class="tool" title="not the policy\'s">{shown}</span>'


def _about(run: Recorded, name: str, folder: Path | None) -> str:
    libraries = run.begun.get("libraries")
    known = {"python": run.begun.get("python")} | (libraries if isinstance(libraries, dict) else {})
    versions = ", ".join(f"{key} {it}" for key, it in known.items() if it)
    rows = {role: (model, _size(model)) for role, model in run.models().items()}
    rows |= {"machine": (_machine(run), ""), "versions": (versions, "")}
    rows = {name: texts for name, texts in rows.items() if any(texts)}
    of = f" of {escape(name)}" if name else ""
    return (
        f"<h2>Models, machine and files{of}</h2>{_rows(rows)}<p>{_files(run.path, folder)}</p>"
        f"<details><summary>Settings{of}</summary><pre>{escape(printable(run.config, kept=chr(10)))}</pre></details>"
    )


def _machine(run: Recorded) -> str:
    cores, gpus = run.begun.get("cores"), run.begun.get("gpus")
    facts = [
        run.begun.get("machine"),
        counted(cores, "core") if isinstance(cores, int) else "",
        run.begun.get("memory"),
        *(gpus if isinstance(gpus, list) else []),
    ]
    return ", ".join(str(each) for each in facts if each)


def _rows(rows: Mapping[str, Sequence[str]], head: str = "") -> str:
    cells = {key: "".join(f"<td>{escape(printable(each))}</td>" for each in values) for key, values in rows.items()}
    body = "".join(f"<tr><th>{escape(printable(key))}</th>{said}</tr>" for key, said in cells.items())
    return f'<div class="scroll"><table>{head}{body}</table></div>' if rows else "<p>None.</p>"


def _size(model: str) -> str:
    count = parameters(model)
    if count is None:
        return ""
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit} parameters"
    return counted(count, "parameter")


def _files(run: Path, folder: Path | None) -> str:
    found = sorted(each.name for each in run.iterdir() if not each.name.startswith(".") and each.name not in _LEFT_OUT)
    if folder is None:
        return ", ".join(f"<code>{escape(printable(name))}</code>" for name in found)
    to = Path(os.path.relpath(run, folder))
    return ", ".join(f'<a href="{quote(str(to / name))}">{escape(printable(name))}</a>' for name in found)


_LEFT_OUT: Final = frozenset({LOCK, REPORT})


def _number(value: float | None, form: str = ".4g") -> str:
    return "\N{EN DASH}" if value is None else f"{value:z{form}}".replace("-", "\N{MINUS SIGN}", 1)


class Follower(ThreadingHTTPServer):
    """Serves a page of runs as they are when it is asked for, to programs of this machine alone.

    Args:
        port: 0 chooses a free one.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], port: int = 0) -> None:
        self._runs = runs
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def tag(self) -> str:
        names = (METRICS, SAMPLES, EVALUATIONS, TIMELINE, LOG, SUMMARY)
        files = [run / name for run in self._runs for name in names]
        return "-".join(f"{file.stat().st_mtime_ns:x}" if file.exists() else "" for file in files)

    def page(self, tag: str, *, scripts: bool) -> str:
        return page([recorded(run) for run in self._runs], live=tag, scripts=scripts)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out browsers that do not wait for an answer."""


class _Handler(BaseHTTPRequestHandler):
    server: Follower

    def do_GET(self) -> None:
        path, _, known = self.path.partition("?")
        tag, port = self.server.tag(), self.server.server_port
        if self.headers.get("Host") not in {f"127.0.0.1:{port}", f"localhost:{port}"} or path not in {"/", "/update"}:
            self._answer(404)  # a page of another site, whose name was made to lead here, among them
        elif known == tag:
            self._answer(204)
        else:
            try:
                self._answer(200, self.server.page(tag, scripts=path == "/"), tag)
            except (OppoError, OSError):  # the directory is being moved or removed
                self._answer(503)

    def _answer(self, status: int, html: str = "", tag: str = "") -> None:
        body = html.encode()
        self.send_response(status)
        for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Cache-Control", "no-store"), ("ETag", tag)):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Print nothing."""
