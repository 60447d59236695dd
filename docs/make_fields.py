"""Writes the tables of ``docs/coming-from-trl.md``, from the rows that ``oppo convert-config`` reads."""  # noqa: INP001 - a script beside its page

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Final

from oppo.config.convert_files import foreign_fields

PAGE: Final = Path(__file__).with_name("coming-from-trl.md")

KINDS: Final = ("PPOConfig", "GRPOConfig", "SDPOConfig", "TrainingArguments", "TRL's scripts")


def page() -> str:
    """Return the page with tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    for kind in KINDS:
        pattern = re.compile(rf"(\n## Every field of {kind}\n.*?\n\|---\|---\|---\|\n)(?:\|[^\n]*\n)*", re.DOTALL)
        text = pattern.sub(partial(_filled, kind), text, count=1)
    return text


def _filled(kind: str, table: re.Match[str]) -> str:
    return table[1] + rows(kind)


def rows(kind: str) -> str:
    """Return the lines of a table."""
    found = foreign_fields()["scripts" if kind == "TRL's scripts" else kind]
    return "".join(f"| `{name}` | {_settings(key)} | {remark} |\n" for name, (key, remark, *_) in found.items())


def _settings(key: str) -> str:
    return ", ".join(f"`{each}`" for each in key.split(", ")) if key else "-"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
