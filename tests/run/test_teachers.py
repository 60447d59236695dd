"""A teacher behind another prompt in ``oppo train``: the page's settings, the example, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from statistics import mean

import pytest
import tomli_w

from oppo.config.load import load_settings
from oppo.errors import ConfigError
from oppo.run.train import prepare, train
from tests.docs.test_readme import ROOT, fenced
from tests.kit.assets import furnish
from tests.kit.workplace import read_lines
from tests.run.matrix import BASE

PAGE = ROOT / "docs" / "algorithms.md"
LONG, OF = r"makes a prompt of \d+ tokens of prompt 1 of data.prompts, and with", r"of .*max_new_tokens = 16 that"
GROUPS = ["algorithm.samples=2", 'rewards=["code.py:total"]']
DISTILL = ["step.algorithm=distill", "teacher.weights=frozen"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    (tmp_path / "config.toml").write_text(BASE)
    return tmp_path


def test_the_page_s_settings_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, sibling = (tomllib.loads(text) for text in fenced(PAGE, "toml") if "[teacher]" in text)
    first["teacher"]["template"] = first["teacher"]["template"].replace("{solution}", "{number}")
    sibling["teacher"]["threshold"], sibling["algorithm"]["samples"] = 0.5, 2
    for name, shown in {"first": first, "sibling": {**first, **sibling, "rewards": ["code.py:total"]}}.items():
        own = {**tomllib.loads(BASE), "step": {"batch": 4, "algorithm": "distill"}}
        given = {key: value for key, value in shown.items() if key not in {"models", "data", "step"}}
        (folder / "page.toml").write_text(tomli_w.dumps({**own, **given, "run": {**own["run"], "name": name}}))
        train(folder / "page.toml", [f"run.directory={folder / 'runs'}"])
        taught = [step["teacher/taught"] for step in read_lines(folder / "runs" / name / "metrics.jsonl")]
        assert taught == [1.0] * 3 if name == "first" else 0 < mean(taught) < 1
        assert ("is not hidden behind decoding" in capsys.readouterr().err) == (name == "sibling")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["teacher.column=hint"], r"teacher.column names 'hint', which is no column of data.prompts.* number, prompt"),
        (["teacher.template={prompt}{nubmer}"], r"teacher.template names 'nubmer', .* .did you mean 'number'"),
        (
            [f"teacher.template={'a' * 2020}" + "{prompt}"],
            f"teacher.template {LONG} a response {OF} is more than the 2048",
        ),
        (
            [*GROUPS, f"teacher.template={'a' * 2000}" + "{sibling}"],
            f"{LONG} a sibling and a response {OF} is more than",
        ),
    ],
)
def test_what_the_teacher_cannot_read_is_refused_before_the_first_step(
    settings: list[str], message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(load_settings(folder / "config.toml", [*DISTILL, *settings]), dry_run=True)
