"""Docstrings as Markdown, for the site: what reST they use (roles, literal blocks, tables) is rewritten."""  # noqa: INP001 - read by the site's generator

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
LITERAL = re.compile(r"(?<=\S)::$", re.MULTILINE)
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
ALONE = re.compile(r"^ *::\n", re.MULTILINE)
TABLE = re.compile(r"^=[= ]+\n(?:.+\n)*=[= ]+$", re.MULTILINE)


class Markdown(Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Take an object that has been loaded."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return a docstring with its reST as Markdown."""
    text = TABLE.sub(lambda table: f"```text\n{table[0]}\n```", text)
    return LITERAL.sub(":", ALONE.sub("", EXAMPLE.sub("Examples:", ROLE.sub(r"`\1`", text))))
