"""Writes ``docs/metrics.md`` from the declarations in ``oppo/report/metrics.py``: ``python -m docs.make_metrics``."""  # noqa: INP001 - a script beside its page

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oppo.report.metrics import METRICS

PAGE = Path(__file__).with_name("metrics.md")

PREFACE = """\
# Metrics

Every metric of a step, made from the declarations in `oppo/report/metrics.py`: change those, then run
`python -m docs.make_metrics`. The names are the same in `StepReport.metrics` of any run, in `metrics.jsonl`, in
[TensorBoard and Weights & Biases](runs.md#trackers). Those of the objective, the loss and the policy are TRL's for PPO
where it has them. A number that is not finite is `null` in `metrics.jsonl`, and left out by the trackers; a metric is
absent where there is nothing to measure. Metrics of a trainer or a loss of your own are added under their own names.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([PREFACE, *_sections()])


def _sections() -> Iterator[str]:
    for title, metrics in METRICS.items():
        yield f"## {title}\n\n| metric | unit | meaning |\n|---|---|---|"
        for each in metrics:
            yield f"| `{each.name}` | {each.unit} | {each.meaning} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
