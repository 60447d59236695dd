"""Writes ``docs/metrics.md`` from the declarations in ``oppo/report/metrics.toml``: ``python -m docs.make_metrics``."""  # noqa: INP001 - a script beside its page

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oppo.report.metrics import METRICS

PAGE = Path(__file__).with_name("metrics.md")

PREFACE = """\
# Metrics

Every metric of a step, made from the declarations in `oppo/report/metrics.toml`: change those, then run
`python -m docs.make_metrics`.

Dashboards may know a metric by another name. `run.metric_names` chooses the names in `metrics.jsonl`, in
[TensorBoard and Weights & Biases](runs.md#trackers) and for the observers of `oppo.train`:

| `run.metric_names` | algorithm | names |
|---|---|---|
| `trl` (default) | `ppo`, `reinforce_pp`, `rae`, `online_dpo`, `distill` | The first column, TRL's of PPO, if any |
| `trl` | `grpo`, `rloo`, `dr_grpo`, `dapo`, `gspo` | The second column, TRL's names of GRPO, else the first |
| `verl` | any | The third column, else the first |

A *conversation* is a prompt with its response, a row of the batch. A *rollout* is one sample of a prompt of the data:
one conversation, or all those of its agent. A *unit* is trained as one: a rollout, or a group of them. Scores, KL and
weights are of rollouts, so that an agent counts once, however many conversations it holds. Each metric says what it is
over.

A name is given only to a number that means the same; where it differs in detail, its meaning says how. The trackers of
transformers put `train/` before TRL's names. verl's `perf/time_per_step` is `timing_s/step`, and its
`training/global_step` the step of a tracker. TRL's `num_tokens` and verl's `perf/throughput`, tokens a second and GPU,
are not measured.

Graphs of a program report the first column in `StepReport.metrics`; `oppo.report.metrics.Renamed` tells observers
others. The report, `oppo simulate` and `oppo resume` read runs under any of these names;
`oppo.report.metrics.metrics_of` reads them into a program.

A number that is not finite is `null` in `metrics.jsonl`, and left out by the trackers; a metric is absent where there
is nothing to measure. Metrics of a trainer or a loss of your own are added under their own names.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([PREFACE, *_sections()])


def _sections() -> Iterator[str]:
    for title, metrics in METRICS.items():
        yield f"## {title}\n\n| metric | TRL's GRPO | verl | unit | meaning |\n|---|---|---|---|---|"
        for each in metrics:
            others = (f"`{name}`" if name else "" for name in (each.trl, each.verl))
            yield f"| `{each.name}` | {' | '.join(others)} | {each.unit} | {each.meaning} |"
        yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
