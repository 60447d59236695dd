"""Writes ``docs/api/index.md``, the reference as tables that read anywhere: ``python -m docs.make_api``."""  # noqa: INP001 - a script beside its page

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).with_name("api")
PAGE = FOLDER / "index.md"
SOURCE = "https://github.com/oppo-rlhf/oppo/blob/main/"

PREFACE = """\
# API

What is public, with the first sentence of its docstring and a link to its source, where the rest stands: arguments
with shapes and units, errors, examples. The site that `make docs` builds shows all of that. This page is made from the
docstrings by `python -m docs.make_api`.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([PREFACE, *_sections()])


def _sections() -> Iterator[str]:
    shown = set[int]()
    for file in sorted(FOLDER.glob("*.md")):
        for name in re.findall(r"^::: ([\w.]+)$", file.read_text(encoding="utf-8"), re.MULTILINE):
            rows = [*_rows(name, shown)]
            if rows:
                yield "\n".join([f"## {name}\n\n| name | |\n|---|---|", *rows, ""])


def _rows(name: str, shown: set[int]) -> Iterator[str]:
    module = import_module(name)
    for each in getattr(module, "__all__", sorted(vars(module))):
        found = getattr(module, each)
        is_own = hasattr(module, "__all__") or getattr(found, "__module__", "") == name
        if not (inspect.isclass(found) or inspect.isfunction(found)) or each.startswith("_") or not is_own:
            continue
        if id(found) not in shown:
            shown.add(id(found))
            file = Path(import_module(found.__module__).__file__ or "").relative_to(FOLDER.parents[1])
            yield f"| [`{each}`]({SOURCE}{file.as_posix()}) | {_said(found)} |"


def _said(found: object) -> str:
    first = " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[\w)`][.!?])\s", re.sub(r":[a-z]+:`~?([^`]+)`", r"`\1`", first))[0]
    return sentence.replace("|", "\\|").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
