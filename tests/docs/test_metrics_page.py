"""``docs/metrics.md`` is what is declared; declared is all that the code names, and all that real runs measure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from docs.make_metrics import PAGE, page
from oppo.admission.bottleneck import LIMITS, NUMBERS, PARTS, PREFIX
from oppo.cli import DONE
from oppo.evaluation.evaluate import PREFIX as HELD_OUT
from oppo.report.metrics import METRICS, MFU, in_own_names, metric, renamed
from oppo.testing import run_virtual
from tests.kit.pipelines import Pipeline, Setting
from tests.kit.workplace import furnish, oppo, records

PACKAGE = Path(__file__).parents[2] / "oppo"
NAME = re.compile(r"[a-z_]+(/[\w{}]+)+")
NAMES = [each.name for section in METRICS.values() for each in section]
FOLDERS = {name.split("/")[0] for name in NAMES if "/" in name}
HEAD = {"step", "version", "score", "seconds", "trained", "deferred", "dropped"}

REWARDS = """
def long(prompts, completions):
    return [float(len(each)) for each in completions]

def same(prompts, completions):
    return [1.0 for _ in completions]

both = {"long": (0.7, long), "same": (0.3, same)}
"""


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m docs.make_metrics"


def test_each_is_declared_once_and_says_something() -> None:
    for chosen in ("trl", "verl"):
        names = [getattr(each, chosen) or each.name for each in chain(*METRICS.values())]
        assert len(names) == len(set(names))
    for section in METRICS.values():
        assert all(each.unit and each.meaning.endswith(".") for each in section)


STATISTIC = re.compile(
    r"\b(mean|standard deviation|variance|(small|larg|low|high|short|long|few)est|most)\b", re.IGNORECASE
)
OVER = re.compile(
    r"\b(token|conversation|rollout|group|minibatch|prompt|pair|turn|call|request|layer|step)", re.IGNORECASE
)


def test_each_statistic_of_what_is_trained_says_what_it_is_over() -> None:
    of_machines = {*METRICS["Time and overlap"], *METRICS["Devices"]}
    statistics = [
        each
        for each in chain(*METRICS.values())
        if each not in of_machines and (STATISTIC.search(each.meaning) or each.unit == "share, 0 to 1")
    ]
    assert len(statistics) > 60
    assert [each.name for each in statistics if not OVER.search(each.meaning)] == []


def test_a_name_is_found_with_its_variable_parts_and_no_other_is() -> None:
    known = [
        metric("queue/generate->ref_logp/merged"),
        metric("policy/clipfrac_staleness_2plus"),
        metric("rewards/helpful/mean"),
    ]
    assert [each.name for each in known if each] == [
        "queue/{channel}/merged",
        "policy/clipfrac_staleness_{versions}",
        "rewards/{name}/mean",
    ]
    assert metric("queue/generate->ref_logp") is None
    assert metric("objective/kl_coefficient") is None


@pytest.mark.parametrize("kind", ["trl", "verl"])
def test_every_other_name_is_read_back_as_the_metric_it_is(kind: str) -> None:
    for each in chain(*METRICS.values()):
        if other := getattr(each, kind):
            assert metric(other) is None, f"{other} is a metric of another meaning too"
            filled, name = (re.sub(r"\{\w+\}", "a-1", text) for text in (other, each.name))
            assert in_own_names({filled: 1.0}) == {name: 1.0}


def test_a_metric_of_ones_own_keeps_its_name_and_takes_no_others_away() -> None:
    own = {"kl": 1.0, "policy/kl_avg": 2.0, "lr": 3.0}
    assert renamed(own, "trl") == {"kl": 1.0, "policy/kl_avg": 2.0, "learning_rate": 3.0}
    assert in_own_names(renamed(own, "trl")) == own


def named() -> Iterator[str]:
    """Yield the names that the code of the package spells, with braces where it fills something in."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == PACKAGE / "report" / "metrics.py" or path.parent.name in {"simulate", "testing"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_what_the_code_names_is_declared_and_what_is_declared_the_code_names() -> None:
    spelt = {name for name in named() if NAME.fullmatch(name) and name.split("/")[0] in FOLDERS and name[-1] != "_"}
    spelt |= {*(PREFIX + name for name in (*PARTS, *NUMBERS)), *LIMITS.values()}
    spelt |= {
        HELD_OUT + name
        for name in spelt
        if name.startswith(("rewards/", "turns/", "tools/", "num_turns/", "agents/", "compaction/"))
    }
    filled = {"queue/{}/{}": ["queue/a/peak", "queue/a/merged"], "perf/mfu/{}": [*MFU.values()]}
    every = [each for name in spelt for each in filled.get(name, [name])]
    assert len(every) > 60
    assert [name for name in every if metric(name) is None] == []
    found = {each.name for name in every if (each := metric(name))}
    assert set(NAMES) - found == HEAD | {"lr", "episode"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("metrics"))
    (folder / "several.py").write_text(REWARDS)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.ratio_base=proximal", "algorithm.is_correction=truncated", "step.lookahead=1"],
        ["step.algorithm=dapo", "rewards.0.source=several.py:both", "algorithm.max_rounds=99", "step.chunk=tuned"],
        ["step.algorithm=grpo", "algorithm.kl_in=loss", "step.admission=adaptive", "algorithm.samples=2"],
        ["step.algorithm=online_dpo", "step.admission=slope"],
    ],
    ids=lambda settings: settings[0],
)
def test_the_metrics_of_a_real_run_are_all_on_the_page(folder: Path, settings: list[str]) -> None:
    name = re.sub(r"\W", "-", settings[0])
    assert oppo(folder, "", f"run.name={name}", "run.steps=2", *settings) == DONE
    for line in records(folder, name, "metrics.jsonl"):
        assert len(line) > 50
        assert [each for each in line if metric(each) is None] == []


def test_the_metrics_of_a_run_of_fakes_are_too() -> None:
    pipeline = Pipeline(Setting(extra=2, reward=0.01))
    run_virtual(pipeline.run)
    measured = {name for report in pipeline.reports for name in report.metrics}
    assert {name for name in measured if metric(name) is None} == {"loss/fake"}
