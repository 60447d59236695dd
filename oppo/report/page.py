"""``report.html``: one self-contained page about a run; texts of models and data are escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import cast

from oppo.admission.bottleneck import PARTS, PREFIX, Bottleneck, together
from oppo.redact import printable
from oppo.report.charts import lines, stacked
from oppo.report.metrics import MEMORY, MFU, by_version, hidden_fraction, summary
from oppo.report.records import Record

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2430;--paper:#fff;--line:#e5e7eb}
@media (prefers-color-scheme:dark){:root{--ink:#e5e7eb;--paper:#14161b;--line:#333a45}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1180px;margin:2rem auto}
body{padding:0 1rem}figure{margin:0 0 1rem;overflow-x:auto}figure svg{min-width:720px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:1rem;align-items:start}
svg{width:100%;box-sizing:border-box;border:1px solid var(--line);border-radius:8px;color:var(--ink)}
table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid var(--line);padding:.35rem .5rem;text-align:left}
span.tool{background:var(--line);border-radius:3px}
td.text{white-space:pre-wrap;overflow-wrap:anywhere}td.number,th.number{text-align:right;white-space:nowrap}
"""


_WINDOW = 8  # steps in the latest bottleneck
_MFU = "Model FLOPs utilisation (share)"


def page(
    name: str,
    records: Sequence[Mapping[str, float | None]],
    samples: Sequence[Record],
    timeline: str = "",
    evaluations: Sequence[Record] = (),
) -> str:
    charts = "".join(
        [
            *_held_out(evaluations),
            lines("Score", {"score": _column(records, "score")}),
            lines("KL to the reference", {"KL (nats a rollout)": _column(records, "objective/kl")}, within=(0,)),
            lines(
                "Response length (tokens)",
                {"mean": _column(records, "response_length/mean"), "longest": _column(records, "response_length/max")},
                within=(0,),
            ),
            stacked("Step time by phase (s)", _phases(records)),
            stacked("Step time by bottleneck (share)", {part: _column(records, PREFIX + part) for part in PARTS}),
            *_deferred(records),
            *_hidden(records),
            *_utilisation(records),
            lines("GPU memory (GiB)", {label: _column(records, name) for label, name in MEMORY.items()}, within=(0,)),
        ]
    )
    charts = charts or "<p>No step was made.</p>"
    opening = f"<h2>When each model worked</h2><figure>{timeline}</figure>" if timeline else ""
    facts = "".join(
        f'<tr><th>{escape(key)}</th><td class="number">{escape(_number(value))}</td></tr>'
        for key, value in summary(records).items()
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{escape(name)}</h1>{opening}"
        f'<div class="charts">{charts}</div>{_bottleneck(records)}<h2>Summary</h2><table>{facts}</table>'
        f"<h2>Samples</h2>{_samples(samples)}</body></html>\n"
    )


def _deferred(records: Sequence[Mapping[str, float | None]]) -> Iterator[str]:
    deferred = _column(records, "deferred")
    if any(deferred):
        yield lines("Rollouts deferred to the next step", {"deferred": deferred}, within=(0,))


def _hidden(records: Sequence[Mapping[str, float | None]]) -> Iterator[str]:
    if hidden_fraction(records) is not None:
        shares = _column(records, "overlap/hidden_fraction")
        yield lines("Scoring hidden behind decoding and training (share)", {"share": shares}, within=(0, 1))


def _utilisation(records: Sequence[Mapping[str, float | None]]) -> Iterator[str]:
    found = {kind: _column(records, name) for kind, name in MFU.items()}
    wrong = [kind for kind, shares in found.items() if any((share or 0.0) > 1 for share in shares)]
    yield lines(_MFU, {kind: shares for kind, shares in found.items() if kind not in wrong}, within=(0,))
    if wrong:
        # The peak of a CPU is measured when a run begins, beside any other load of the machine.
        yield f"<p>{_MFU}: not drawn for {' and '.join(wrong)}, which were faster than the peak that was measured.</p>"
    elif records and not any(share is not None for shares in found.values() for share in shares):
        yield f"<p>{_MFU}: not drawn, since the peak of the device is not known.</p>"


def _held_out(evaluations: Sequence[Record]) -> Iterator[str]:
    scores = {"most likely response": "eval/score", "drawn responses": "eval/sampled_score"}
    passed = {
        name: name for each in evaluations[-1:] for name in each if name.startswith(("eval/passed", "eval/pass_at_"))
    }
    for title, names, within in (("Held-out score", scores, ()), ("Held-out prompts passed (share)", passed, (0, 1))):
        known = {label: by_version(evaluations, name) for label, name in names.items()}
        yield lines(title, known, gaps=False, within=within)


def _phases(records: Sequence[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    update = _column(records, "timing_s/update")
    if not any(value is not None for value in _column(records, "timing_s/decode")):
        rollouts = _column(records, "timing_s/rollouts")
        return {"rollouts": rollouts, "update": update, "weight sync": _column(records, "timing_s/weight_sync")}
    decode, exposed = _column(records, "timing_s/decode"), _column(records, "timing_s/score_exposed")
    known = list(zip(decode, exposed, update, strict=True))
    total = _column(records, "seconds")
    other: list[float | None] = [
        max(0.0, (whole or 0.0) - sum(part or 0.0 for part in parts)) for whole, parts in zip(total, known, strict=True)
    ]
    return {"decode": decode, "exposed scoring": exposed, "update": update, "other": other}


def _bottleneck(records: Sequence[Mapping[str, float | None]]) -> str:
    found = [found for each in records if (found := Bottleneck.of_metrics(each, each.get("seconds") or 0.0))]
    latest = found[-_WINDOW:]
    recent = together(latest)
    if recent is None:
        return ""
    counts = Counter(each.largest for each in found).most_common()
    steps = ", ".join(f"{part}-bound: {count / len(found):.0%} of the steps" for part, count in counts)
    return (
        f"<h2>Bottleneck</h2><p>{escape(steps)}.</p>"
        f"<p>The last {len(latest)} steps together are {recent.largest}-bound: {escape(recent.message)}.</p>"
    )


def _samples(samples: Sequence[Record]) -> str:
    head = '<tr><th class="number">step</th><th class="number">score</th><th>prompt</th><th>completion</th></tr>'
    return f"<table>{head}{''.join(map(_row, samples))}</table>"


def _row(sample: Record) -> str:
    figures = (str(cast("int", sample["step"]) + 1), _number(sample["score"]))
    parts = cast("list[Record]", sample.get("parts")) or [{"by": "policy", "text": sample["completion"]}]
    said = "".join(_part(str(each["text"]), each["by"]) for each in parts)
    numbers = "".join(f'<td class="number">{escape(each)}</td>' for each in figures)
    return f'<tr>{numbers}<td class="text">{_part(str(sample["prompt"]))}</td><td class="text">{said}</td></tr>'


def _part(text: str, by: object = "policy") -> str:
    shown = escape(printable(text, kept="\n\t"))
    return shown if by == "policy" else f'<span class="tool" title="not the policy\'s">{shown}</span>'


def _column(records: Sequence[Mapping[str, float | None]], name: str) -> list[float | None]:
    return [each.get(name) for each in records]


def _number(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
