"""``docs/settings.md`` is what the settings' models say, and says something of every key."""

from __future__ import annotations

from docs.make_settings import NAMES, PAGE, page
from oppo.config import Section, Settings


def keys() -> list[str]:
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    return [
        f"{name}.{key}"
        for name, model in sections.items()
        if isinstance(model, type) and issubclass(model, Section)
        for key in model.model_fields
    ]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m docs.make_settings"


def test_every_key_has_its_names_and_nothing_else_has() -> None:
    assert list(NAMES) == keys()


def test_every_key_says_what_it_does() -> None:
    rows = [line.split(" | ") for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(keys())
    assert all(len(row) == 6 and all(cell.strip() for cell in row) for row in rows)
