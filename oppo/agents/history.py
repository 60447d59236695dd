"""How the history that a request shows differs from what was said."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from oppo.errors import shown

CONTEXT: Final = 40
"""Characters before the first difference of two texts that are shown."""


def digest_of(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    # Clients add fields, and leave reasoning out.
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    kept = {name: message.get(name) for name in ("role", "tool_call_id", "tool_calls")}
    return {**kept, "content": content}


def essence(message: Mapping[str, Any]) -> str:
    """Return a digest of an assistant's message whatever its calls' ids; empty if it says nothing."""
    said = [message["content"].strip(), [each["function"] for each in message.get("tool_calls", ())]]
    return digest_of(said) if message["role"] == "assistant" and any(said) else ""


def first_difference(then: Any, now: Any, at: str) -> str:
    pairs: dict[str, tuple[Any, Any]] = {}
    if isinstance(then, dict) and isinstance(now, dict):
        pairs = {f"{at}.{key}": (then.get(key), now.get(key)) for key in {**then, **now}}
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = {f"{at}[{number}]": pair for number, pair in enumerate(zip(then, now, strict=True))}
    for place, (old, new) in pairs.items():
        if old != new:
            return first_difference(old, new, place)
    if isinstance(then, str) and isinstance(now, str):
        same = next((at for at, (old, new) in enumerate(zip(then, now, strict=False)) if old != new), len(now))
        then, now = (f"...{each[same - CONTEXT :]}" if same > CONTEXT else each for each in (then, now))
    return f"{at} was {shown(then)}, and now is {shown(now)}"
