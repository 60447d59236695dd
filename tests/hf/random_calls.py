"""Random tools and calls of them: every kind of JSON schema, with texts that read like something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from oppo.hf.tool_calls import ToolSchema

Allows: TypeAlias = Callable[[object], bool]  # whether a schema allows a value

Kind: TypeAlias = tuple[dict[str, Any], Callable[[], object], Allows]
"""A schema, what draws a value of it, and what else it allows."""

TEXTS = (
    *("7", "-2.0", "1e5", "007", "NaN", "true", "True", "null", "None", "NULL"),
    *("", " padded ", "a b", "x\ny", "\n", '{"k": 1}', "[1]", "['a']", "<b>", "naïve 🙂", "<|im_end|>", "<s>"),
)
SIMPLE: dict[str, tuple[object, ...]] = {
    "string": TEXTS,
    "integer": (0, -3, 2**70),
    "number": (0.5, 1e-9, -2.0, 3, 1e300),
    "boolean": (True, False),
    "null": (None,),
}
TREE = {"type": "object", "properties": {"child": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}}}
TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def of_types(*names: str) -> Allows:
    """Return whether a value that is no text is of one of these types."""

    def allowed(value: object) -> bool:
        if isinstance(value, bool):
            return "boolean" in names
        whole = isinstance(value, float) and value.is_integer() and "integer" in names
        return whole or any(isinstance(value, TYPES[name]) for name in names if name != "string")

    return allowed


def of_values(values: list[object]) -> Allows:
    return lambda value: any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in values)


def kind(rng: Random, depth: int = 0) -> Kind:
    names = rng.sample([*SIMPLE], rng.randrange(1, 4))
    draw = lambda: rng.choice(SIMPLE[rng.choice(names)])  # noqa: E731 - it is one of several
    if depth == 2:
        return {"type": names[0]}, lambda: rng.choice(SIMPLE[names[0]]), of_types(names[0])
    item, draw_item, _ = kind(rng, depth + 1)
    values = [rng.choice(SIMPLE[rng.choice([*SIMPLE])]) for _ in range(rng.randrange(1, 4))]
    each = [{"type": name} for name in names]
    made: list[Kind] = [
        ({"type": names[0]}, lambda: rng.choice(SIMPLE[names[0]]), of_types(names[0])),
        ({"type": names}, draw, of_types(*names)),
        ({"anyOf": each}, draw, of_types(*names)),
        ({"oneOf": [{"anyOf": each}]}, draw, of_types(*names)),
        ({"allOf": [{"type": names}]}, draw, of_types(*names)),
        ({"type": "string", "nullable": True}, lambda: rng.choice([*TEXTS, None]), of_types("null")),
        ({"enum": values}, lambda: rng.choice(values), of_values(values)),
        ({"const": values[0]}, lambda: values[0], of_values(values[:1])),
        ({"$ref": "#/$defs/Name"}, lambda: rng.choice(TEXTS), of_types()),
        ({"$ref": "#/$defs/Tree"}, lambda: {"child": {"child": None}}, of_types("object")),
        ({}, draw, lambda value: True),
        ({"type": "array", "items": item}, lambda: [draw_item() for _ in range(rng.randrange(3))], of_types("array")),
        ({"type": "object", "properties": {"<s>in": item}}, lambda: {"<s>in": draw_item()}, of_types("object")),
        ({"type": ["string", "array"]}, lambda: rng.choice([*TEXTS, ["a", None]]), of_types("array")),
    ]
    return rng.choice(made)


@dataclass(frozen=True)
class Case:
    """A tool, a call of it, and what its schema allows besides texts."""

    name: str
    tool: ToolSchema
    arguments: dict[str, object]
    allows: dict[str, Allows]

    @property
    def call(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": "123456789", "type": "function", "function": function}

    def differences(self, read: object) -> dict[str, object]:
        """Return the arguments that were read otherwise, though nothing else that is allowed is written so."""
        found = read if isinstance(read, dict) else {}
        both = {key: (self.arguments.get(key, "absent"), found.get(key, "absent")) for key in {*self.arguments, *found}}
        return {
            key: (given, value)
            for key, (given, value) in both.items()
            if not (same(given, value) or (isinstance(given, str) and key in found and self.may_be(key, given, value)))
        }

    def may_be(self, key: str, text: str, value: object) -> bool:
        """Return whether a text is how another value, which the schema allows, is written."""
        written = [each for name, each in WORDS.items() if text == name]
        with suppress(ValueError):
            parsed = json.loads(text)
            written += [parsed] if isinstance(parsed, list | dict) or json.dumps(parsed) == text else []
        return any(same(value, each) for each in written) and self.allows[key](value)


WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}


def same(one: object, other: object) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def case(rng: Random, name: str) -> Case:
    kinds = {f"p{at}": kind(rng) for at in range(rng.randrange(4))}
    if rng.random() < 0.2:
        kinds["<|im_end|>key"] = kind(rng)
    properties = {key: schema for key, (schema, _, _) in kinds.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "$defs": {"Name": {"type": "string"}, "Tree": TREE},
    }
    return Case(
        name,
        {"type": "function", "function": {"name": name, "description": "Act.", "parameters": parameters}},
        {key: draw() for key, (_, draw, _) in kinds.items() if rng.random() < 0.85},
        {key: allows for key, (_, _, allows) in kinds.items()},
    )
