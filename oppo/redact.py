"""Redaction of secrets from text for people: the terminal, the log, error messages, samples, reports of a hang.

Secrets are the values of environment variables with telling names, passwords in URLs or after their names, query
parameters, ``Authorization`` headers, and tokens of well-known shapes. Files that are read back are never redacted, so
settings that hold a secret are refused (:func:`holds_secret`). A short value may be an ordinary word, and a name may
look like a token: these are hidden only where they stand alone, not within a path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from html import escape
from typing import TextIO
from urllib.parse import quote

from oppo.errors import ConfigError

HIDDEN = "***"

SHORTEST = 6  # characters of the shortest secret: hiding shorter values, or numbers, would garble unrelated text
_MARGIN = 4096  # characters of the longest secret that an excerpt may cut
SHOWN = 100_000  # characters of the longest text that a terminal is given
LONG = 16  # characters from which a value is hidden everywhere; a shorter one may be a word in a path

_NAME = re.compile(
    r"(?<!bos_)(?<!eos_)(?<!pad_)(?<!sep_)(?<!unk_)(?<!stop_)tokens?(?:$|_)|secret|passwd|password|passphrase|credential"
    r"|(?:^|_|api|access)keys?(?:$|_)|^aws_session"
    r"|(?:^|_)(?:auth|authorization|bearer|cookies?|jwt|pat)$|_pwd$|(?:^|_|ssh|pg)pass$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<=\D)_?\d{1,9}$")  # the end of a name that is one of several, as of `OPENAI_API_KEY2`
_WORDS = r"sshpass|(?<=_)pwd|secret|password|passwd|passphrase|credential|api[_-]?key|access[_-]?key"
_TOKENS = (
    r"(?<![\w-])(?:(?:\w{1,20}[_-])?(?:access|auth|refresh|id|api|bearer|session|hf)[_-]?)?token"
    r"|(?<!-)--[\w-]{0,40}?token"
)
_PREFIXES = r"hf_|sk-|gh[opusr]_|github_pat_|glpat-|npm_|xox[abeprs]-|[rs]k_(?:live|test|prod)_"
_BEFORE, _AFTER = r"(?<![\w/\\-])", r"(?![\w/\\-]|\.\w)"

_CERTAIN: tuple[tuple[str, str], ...] = (
    (r"(?<=://)[^\s/@'\"<>]+(?=@)", HIDDEN),
    (rf"(?i)([?&;][\w-]{{0,40}}?(?:{_WORDS}|token|signature|key|sig|auth)=)[^&\s'\"<>#\\]+", rf"\1{HIDDEN}"),
    (rf"\b(?:{_PREFIXES})[\w-]{{0,40}}?(?=[a-zA-Z]*\d)[a-zA-Z0-9]{{16,}}[\w-]*", HIDDEN),
    (r"\b(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b", HIDDEN),
    (r"(?<![\w-])(?=[\w-]*eyJ)[\w-]{8,}+\.eyJ[\w-]{5,}+\.[\w-]*", HIDDEN),
    (r"(-----BEGIN[ A-Z0-9]{0,40}PRIVATE KEY-----)[\s\S]*?(?=-----END|\Z)", rf"\1{HIDDEN}"),
)
"""Patterns that are hidden everywhere, and their replacements. The shapes of tokens follow the rules of the scanner
gitleaks (github.com/gitleaks/gitleaks, config/gitleaks.toml: ``aws-access-token``, ``jwt``, ``stripe-access-token``,
``private-key`` and others). Texts are of models, so the time for one grows with its length and not with the square:
what repeats is bounded, or begins at the border of a word."""

_PROBABLE: tuple[tuple[str, str], ...] = (
    (r"(?i)(\bAuthorization['\"]?\s?[:=]\s?['\"]?(?:\w+\s+)?)[\w.~+/=-]{4,}", rf"\1{HIDDEN}"),
    (r"\b(Bearer|Basic) [\w.~+/=-]{16,}", rf"\1 {HIDDEN}"),
    (rf"(?i)((?<!-)--[\w-]{{0,40}}?(?:{_WORDS}|token)=)(?!\\?['\"])[^\s'\"\\]+", rf"\1{HIDDEN}"),
    (rf"(?i)((?:{_WORDS})=)(?!\\?['\"])[^\s'\"<>&,;)\\]+", rf"\1{HIDDEN}"),
    (rf"(?i)((?:{_WORDS}|{_TOKENS})['\"]?\s?[:=]\s?(['\"]))(?:\\.|(?!\2|\\).)+", rf"\1{HIDDEN}"),
    (rf"(?i)((?:{_WORDS}|{_TOKENS})\\['\"]\s?[:=]\s?\\(['\"]))(?:(?!\\\2).)+", rf"\1{HIDDEN}"),
    (rf"{_BEFORE}(?:{_PREFIXES})[\w-]{{8,}}{_AFTER}", HIDDEN),
)
"""Patterns that are hidden in text for people only: values after telling names, and words that begin like tokens."""


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with every secret replaced by ``***``; not for a file that is read back.

    Args:
        environment: variables whose values may be secrets; ``None``: the process's.

    Example:
        >>> redacted("https://me:pw@host/x?token=abc&n=1", {})
        'https://***@host/x?token=***&n=1'
        >>> redacted("said hunter2! in runs/hunter2/demo", {"DB_PASSWORD": "hunter2"})
        'said ***! in runs/hunter2/demo'
    """
    long, short = _secrets(environment)
    if short:
        text = re.sub(f"{_BEFORE}(?:{'|'.join(map(re.escape, short))}){_AFTER}", HIDDEN, text)
    return _without(text, long, (*_CERTAIN, *_PROBABLE))


def excerpt(text: str, limit: int) -> str:
    # Only these, and as many more as a secret may have, are searched: a text may have millions.
    kept = redacted(text[: limit + _MARGIN])[:limit].encode("utf-8", "backslashreplace").decode("utf-8")
    return kept if len(text) <= limit else f"{kept}... ({len(text)} characters)"


def printable(text: str, kept: str = "") -> str:
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii") for c in text)


def on_one_line(text: str) -> str:
    return printable(text.replace("\n", " / ").replace("\t", " "))


def harmless(text: str) -> str:
    return "\n".join(map(on_one_line, excerpt(text, SHOWN).splitlines()))


class HarmlessStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(excerpt(text, SHOWN), "\n\r\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def redacted_values(value: object, redact: Callable[[str], str] = redacted) -> object:
    match value:
        case str():
            return redact(value)
        case Mapping():
            return {key: redacted_values(each, redact) for key, each in value.items()}
        case list() | tuple():
            return [redacted_values(each, redact) for each in value]
        case _:
            return value


def holds_secret(text: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether ``text`` certainly holds a secret: a word that is also a password does not count.

    Example:
        >>> holds_secret("https://me:pw@host/model", {}), holds_secret("hf_models/secret=1", {})
        (True, False)
    """
    long, _ = _secrets(environment)
    return _without(text, long, _CERTAIN) != text


def _without(text: str, values: list[str], shapes: Iterable[tuple[str, str]]) -> str:
    for value in values:
        text = text.replace(value, HIDDEN)
    for shape, replacement in shapes:
        text = re.sub(shape, replacement, text)
    return text


def _secrets(environment: Mapping[str, str] | None) -> tuple[list[str], list[str]]:
    variables = os.environ if environment is None else environment
    values = {value for name, value in variables.items() if names_secret(name) and _is_secret(value)}
    spelt = {
        form for value in values for form in (value, json.dumps(value)[1:-1], escape(value), quote(value, safe=""))
    }
    ordered = sorted(spelt, key=len, reverse=True)  # one may be a prefix of another
    return [value for value in ordered if len(value) >= LONG], [value for value in ordered if len(value) < LONG]


@lru_cache(1024)
def names_secret(name: str) -> bool:
    """Whether a variable or a setting of this name holds a secret; ``_env`` names where one is.

    Example:
        >>> names_secret("OPENAI_API_KEY2"), names_secret("tokenizer"), names_secret("api_key_env")
        (True, False, False)
    """
    return _NAME.search(_NUMBER.sub("", name)) is not None and not name.endswith("_env")


def key_of(variable: str) -> str:
    """Return the key in the environment variable that a setting ``api_key_env`` names; empty where it names none.

    Raises:
        ConfigError: the variable is not set. What was given is not shown, since it may be the key.
    """
    if not variable:
        return ""
    if key := os.environ.get(variable):
        return key
    raise ConfigError(
        "api_key_env: expected the name of an environment variable that holds the server's key, and none of this name "
        "is set: set it, or leave api_key_env out"
    )


def _is_secret(value: str) -> bool:
    garbles = len(value) < SHORTEST or value.replace(".", "").isdecimal()
    return not garbles and not (value.startswith("/") and os.path.lexists(value))
