"""Secrets out of text: whatever a run writes or says passes through :func:`redacted` first.

What counts as one: the value of an environment variable whose name says so, a password in a URL, a query parameter or
an ``Authorization`` header whose name says so, and tokens of well-known shapes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from html import escape

HIDDEN = "***"

SHORTEST = 6
"""Characters. A shorter value, like one that is a number, would garble whatever happens to hold it."""

_WORDS = r"token|secret|password|passwd|passphrase|credential|signature|api[_-]?key|access[_-]?key"
_NAME = re.compile(
    r"token(?:$|_)|secret|passwd|password|passphrase|credential|(?:^|_|api|access)key(?:$|_)|(?:^|_)(?:auth|pat)$",
    re.IGNORECASE,
)
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=://)[^\s/@'\"<>]+(?=@)"), HIDDEN),
    (re.compile(rf"([?&;](?:[\w-]*(?:{_WORDS})|key|sig|auth)=)[^&\s'\"<>#\\]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b((?:Bearer|Basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-)[\w-]{8,}"), HIDDEN),
)


def redactor(environment: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return a function that does what :func:`redacted` does, with the environment as it is now.

    Args:
        environment: variables whose values may be secrets; the process's own unless given.
    """
    values = _secrets(os.environ if environment is None else environment)

    def redact(text: str) -> str:
        for value in values:
            text = text.replace(value, HIDDEN)
        for shape, replacement in _SHAPES:
            text = shape.sub(replacement, text)
        return text

    return redact


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with every secret replaced by ``***``, be it plain, JSON or HTML.

    Example:
        >>> redacted("https://me:pw@host/x?token=abc&n=1", {})
        'https://***@host/x?token=***&n=1'
        >>> redacted("said hunter2!", {"DB_PASSWORD": "hunter2"})
        'said ***!'
    """
    return redactor(environment)(text)


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the values to hide, as they are spelt in text, JSON and HTML; the longest first."""
    values = [value for name, value in environment.items() if _NAME.search(name)]
    kept = {value for value in values if len(value) >= SHORTEST and not value.replace(".", "").isdecimal()}
    spelt = {form for value in kept for form in (value, json.dumps(value)[1:-1], escape(value))}
    return sorted(spelt, key=len, reverse=True)  # one may be the beginning of another
