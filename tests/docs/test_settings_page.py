"""``docs/settings.md`` is what the settings declare, and says something of every key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.make_settings import DEMO, NAMES, PAGE, page, tables
from oppo.config.load import resolve
from oppo.declared import declared
from oppo.demo.assets import Assets, Facts
from oppo.demo.run import FULL, SHORT, DemoPlan, settings_of
from oppo.run.simulation import profile_sections


def keys() -> list[str]:
    return [f"{name}.{key}" for name, keys in tables().items() for key in keys]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m docs.make_settings"


def test_every_key_has_its_names_and_nothing_else_has() -> None:
    assert list(NAMES) == keys()


def test_every_key_says_what_it_does() -> None:
    settings, _, profile = page().partition("## Profiles")
    for part, columns, named in (
        (settings, 6, [key.partition(".")[2] for key in keys()]),
        (profile, 4, [key for kind in profile_sections().values() for key in declared(kind)]),
    ):
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if re.match(r"\| `\w", line)]
        assert [row[0] for row in rows] == [f"`{key}`" for key in named]
        assert all(len(row) == columns and all(cell.strip() for cell in row) for row in rows)


@pytest.mark.parametrize("plan", [FULL, SHORT], ids=["full", "short"])
def test_the_demo_is_at_the_defaults_but_where_the_page_says_why(plan: DemoPlan) -> None:
    facts = Facts({}, 0, 0, {}, 0)
    ours = settings_of(plan, Assets(Path("/made"), facts), Path("/runs/demo-1"), seed=0)
    models = {key: getattr(ours.models, key) for key in ("policy", "critic")}
    rewards = [{"source": each.source} for each in ours.rewards]
    plain = resolve({"models": models, "rewards": rewards, "data": {"prompts": ours.data.prompts}}, Path("/")).tables()
    named = {"run.name", "run.directory", "run.steps"}
    differing = {
        f"{name}.{key}" for name, keys in ours.tables().items() for key, value in keys.items()
        if value != plain[name][key]
    }  # fmt: skip
    assert differing - named == set(DEMO)
