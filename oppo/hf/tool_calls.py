"""Calls of tools: schemas, and how a chat template writes a call, found by rendering some.

Where a template writes arguments one by one between marks, the text of a value does not say its type. The schema of the
argument does, with how the template writes null, true, false and nested values. A text is read as the first of these
that fits: another value than a text, which the template or JSON writes so and the schema allows; the text itself, if
the schema allows it; a JSON value of a type in the schema; the text.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, Final, TypeAlias

from transformers.utils.chat_template_utils import get_json_schema

from oppo.errors import ConfigError, one_line, shortened, shown

ToolSchema: TypeAlias = Mapping[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``, as chat templates read it."""

LAST_VALUE: Final = "SAID0BY0THE0POLICY"  # the text of the last argument in a probe

_PROBE: Final = {"FIRST0KEY": "FIRST0VALUE", "SECOND0KEY": LAST_VALUE}
_NESTED: Final = [None, True, 0.5, {"k": "'\"\n"}]
_NAME: Final = r"[\w.\-]+"
_KEY: Final = r"[^\n]*?"
_ID: Final = "call{:05}"  # of nine letters and digits, as Mistral's templates ask for

_JSON: Final = json.JSONDecoder()
_JSON_WORDS: Final[Mapping[str, object]] = {"null": None, "true": True, "false": False}
_VARIADIC: Final = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, object]
    id: str = ""


def tool_schema(function: Callable[..., object]) -> ToolSchema:
    if isinstance(own := getattr(function, "schema", None), Mapping):
        return own
    words = f"tool {getattr(function, '__name__', repr(function))!r} cannot be shown to the policy"
    try:
        schema: ToolSchema = get_json_schema(function)
    except Exception as error:  # any kind: the library raises several
        raise ConfigError(
            f"{words}: {one_line(error)}; expected a type hint for each argument, "
            "and a docstring that describes the tool and, under 'Args:', each argument"
        ) from error
    if variadic := [each.name for each in signature(function).parameters.values() if each.kind in _VARIADIC]:
        raise ConfigError(f"{words}: {variadic[0]!r} takes any number of arguments; expected one with a name: a list")
    return schema


def parameters_by_tool(tools: Sequence[ToolSchema]) -> dict[str, ToolSchema]:
    functions = [tool.get("function", tool) for tool in tools]
    found = {str(each.get("name")): each.get("parameters") or {} for each in functions}
    for name, schema in found.items():
        properties = schema.get("properties") or {} if isinstance(schema, Mapping) else None
        parts = properties if isinstance(properties, Mapping) else {"parameters": schema}
        if wrong := [key for key, each in parts.items() if not isinstance(each, Mapping | bool)]:
            raise ConfigError(f"tool {name!r}: expected a JSON schema of {wrong[0]!r}, got {shown(parts[wrong[0]])}")
    return found


def call_id(given: object, at: int) -> str:
    return given if isinstance(given, str) and re.fullmatch(r"[a-zA-Z0-9]{9}", given) else _ID.format(at)


def call_of(name: object, arguments: object, number: object = "") -> ToolCall:
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of a tool is a text, got {shown(name)}")
    if not isinstance(arguments or {}, dict):
        raise ValueError(  # noqa: TRY004 - as of what is no JSON
            f"the arguments of a call are a JSON object, got {shown(arguments)}"
        )
    return ToolCall(name, arguments or {}, str(number or ""))  # type: ignore[arg-type] # checked


def quoted(text: str) -> str:
    return shortened(repr(text), 120)


_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = (
    {"string": str, "boolean": bool, "null": type(None), "integer": int, "array": list, "object": dict}
    | dict.fromkeys(("number", "float"), (int, float))
    | {each.__name__: each for each in (str, bool, int, list, dict)}
)
"""The names of types in JSON schemas, and the usual names in schemas written by hand."""


def _is_kind(value: object, name: object) -> bool:
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if isinstance(value, bool) and kind is not None:
        return kind is bool
    whole = kind is int and isinstance(value, float) and value.is_integer()
    return kind is None or whole or isinstance(value, kind)


def _equals(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) is isinstance(other, bool)


def allows(
    schema: object, value: object, whole: ToolSchema, *, exactly: bool = True, within: tuple[object, ...] = ()
) -> bool:
    """Whether a JSON schema, a part of ``whole``, allows a value, of which nothing inside is looked at."""
    # ``within``: the references that lead here. Not ``exactly``: a value of the type of one of ``enum`` is allowed.
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping) or (reference and reference in within):
        return schema is not False
    inner = partial(allows, value=value, whole=whole, exactly=exactly, within=(*within, reference))
    if value is None and schema.get("nullable") is True:
        return True
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_is_kind(value, kind) for kind in kinds):
            return False
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list):
        same = _equals if exactly else (lambda value, other: type(value) is type(other))
        if not any(same(value, each) for each in options):
            return False
    either = [_parts(schema, key) for key in ("anyOf", "oneOf")]
    every = [*_parts(schema, "allOf"), *([] if reference is None else [_referred(reference, whole)])]
    return all(any(map(inner, each)) for each in either if each) and all(map(inner, every))


def _parts(schema: ToolSchema, key: str) -> Sequence[object]:
    found = schema.get(key)
    return found if isinstance(found, list) else ()


def _referred(reference: object, whole: ToolSchema) -> object:
    found: object = whole
    for part in str(reference).removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _properties(schema: object, whole: ToolSchema, within: tuple[object, ...] = ()) -> Iterator[tuple[str, object]]:
    # The schemas of the arguments, wherever in a schema they are.
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(schema, Mapping) and not (reference and reference in within):
        yield from (schema.get("properties") or {}).items()
        parts = [each for key in ("allOf", "anyOf", "oneOf") for each in _parts(schema, key)]
        for each in (*parts, *([] if reference is None else [_referred(reference, whole)])):
            yield from _properties(each, whole, (*within, reference))


def _words(literal: str) -> str:
    # Matches a literal however much white space is before its words.
    return "".join(rf"\s*{re.escape(word)}" for word in literal.split())


def _matching(literal: str, text: str, at: int) -> re.Match[str] | None:
    return re.compile(rf"{_words(literal)}\s*").match(text, at)


def _one_of(known: Sequence[str], others: str) -> str:
    # Known names come first: they may have characters that others have not.
    return "|".join([*map(re.escape, sorted(known, key=len, reverse=True)), others])


Schemas: TypeAlias = Mapping[str, ToolSchema]  # the JSON schema of each tool's arguments


def _read_name(text: str, at: int, schemas: Schemas) -> str:
    found = re.compile(rf"(?:{_one_of([*schemas], _NAME)})(?![\w.\-])").match(text, at)
    if found is None:
        raise ValueError(f"expected the name of a tool, got {quoted(text[at : at + 80])}")
    return found[0]


@dataclass(frozen=True, slots=True)
class _Object:
    """A call that is a JSON object, with the tool's name and its arguments under these keys."""

    name: str
    arguments: str

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[ToolCall, int]:
        del schemas
        found, end = _JSON.raw_decode(text, at)
        if not isinstance(found, dict) or self.name not in found:
            raise ValueError(f"expected a JSON object with {self.name!r} and {self.arguments!r}, got {shown(found)}")
        return call_of(found[self.name], found.get(self.arguments), found.get("id")), end


@dataclass(frozen=True, slots=True)
class _Named:
    """A call that is a name, this text, and a JSON object of arguments."""

    between: str

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[ToolCall, int]:
        name = _read_name(text, at, schemas)
        begins = _matching(self.between, text, at + len(name))
        if begins is None:
            raise ValueError(f"expected {self.between!r} after {name!r}, got {quoted(text[at : at + 80])}")
        found, end = _JSON.raw_decode(text, begins.end())
        return call_of(name, found), end


@dataclass(frozen=True, slots=True)
class _Values:
    spelt: Mapping[str, object]  # null, true and false, as it writes them and as JSON does
    python: bool  # it writes lists and objects as Python does

    def read(self, text: str, schema: object, whole: ToolSchema) -> object:
        parsed = [*self._parsed(text)]
        exact = [self.spelt[text]] if text in self.spelt else []
        exact += [each for each in parsed if isinstance(each, list | dict) or _number(each) == text]
        if found := [each for each in (*exact, text) if allows(schema, each, whole)]:
            return found[0]
        return next((each for each in (*exact, *parsed) if allows(schema, each, whole, exactly=False)), text)

    def _parsed(self, text: str) -> Iterator[object]:
        with suppress(ValueError, RecursionError):
            value: object = json.loads(text, parse_constant=_refuse)
            yield from [] if isinstance(value, float) and math.isinf(value) else [value]
        with suppress(ValueError, RecursionError, SyntaxError, MemoryError, TypeError):
            yield from [ast.literal_eval(text)] if self.python else []
        yield from [value for name, value in {**_JSON_WORDS, "none": None}.items() if name == text.strip().lower()]


def _number(value: object) -> str:
    return json.dumps(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


@dataclass(frozen=True, slots=True)
class _Marked:
    """A call that is a name and its arguments one by one, between marks."""

    first: str  # before the first key
    value: str  # between a key and its value
    following: str  # between a value and the next key
    last: str  # after the last value
    values: _Values = _Values(_JSON_WORDS, python=False)

    def read(self, text: str, at: int, schemas: Schemas) -> tuple[ToolCall, int]:
        name = _read_name(text, at, schemas)
        whole = schemas.get(name, {})
        known = dict[str, list[object]]()
        for key, schema in _properties(whole, whole):
            known.setdefault(key, []).append(schema)
        marks = {re.sub(r"^(\s+)", "", each).split()[0]: each for each in (self.following, self.last)}
        spaces = "|".join(
            rf"(?:{re.escape(each[: each.index(mark)])})?{re.escape(mark)}" for mark, each in marks.items()
        )
        mark = self.value.rstrip()
        value = rf"{_words(mark)}(?:{re.escape(self.value[len(mark) :])})?(?P<value>(?s:.*?))(?={spaces})"
        argument = re.compile(f"(?P<key>{_one_of([*known], _KEY)}){value}")
        at, found = at + len(name), dict[str, object]()
        begins = _matching(self.first, text, at)
        while begins is not None:
            part = argument.match(text, begins.end())
            if part is None:
                raise ValueError(
                    f"expected an argument of {name!r}, {self.value!r}, its value and {self.last!r}, got "
                    f"{quoted(text[begins.end() : begins.end() + 80])}"
                )
            key, at = part["key"].strip(), part.end()
            schema = {"anyOf": known[key]} if key in known else whole.get("additionalProperties", True)
            found[key] = self.values.read(part["value"], schema, whole)
            begins = _matching(self.following, text, at)
        return ToolCall(name, found), at


@dataclass(frozen=True, slots=True)
class CallSyntax:
    head: str  # before the first call
    form: _Object | _Named | _Marked
    between: str  # between two calls; empty if a message has one at most
    tails: tuple[str, ...]  # behind the last call; a call without arguments may have another

    @classmethod
    def of(cls, write: Callable[[Sequence[ToolCall]], str]) -> CallSyntax | None:
        one = write(probes(1))
        try:
            two = write(probes(2))
        except ConfigError:  # there is one call in a message at most
            two = ""
        if (unit := _unit(one, 0)) is None:
            return None
        (start, stop), form = unit
        between, tails = "", [one[stop:]]
        if two:
            first, second = _unit(two, 0), _unit(two, 1)
            if first is None or second is None:
                return None
            between = two[first[0][1] : second[0][0]]
        if isinstance(form, _Marked):
            tails.append(write([ToolCall("PROBE0NAME0", {}, _ID.format(0))]).partition("PROBE0NAME0")[2])
            form = replace(form, values=_values(write, form))
        if not one[:start].strip() and not isinstance(form, _Object):
            return None  # a name that nothing stands before might be any word
        return cls(one[:start], form, between, tuple(tails))

    def ends_with(self, end: str) -> bool:
        return any(tail.rstrip().endswith(end) for tail in self.tails)

    def before(self, text: str) -> str:
        """Return the text before what is a call, or may become one."""
        mark = (self.head.split() or [""])[0]
        if not mark:
            return "" if text.lstrip()[:1] in ("", "{") else text
        return settled(text.partition(mark)[0], [mark] if mark not in text else [])

    def read(self, text: str, schemas: Schemas) -> tuple[str, tuple[ToolCall, ...], str]:
        """Return the text outside of calls, the calls up to one that cannot be read, and what is wrong with it."""
        head = re.compile(rf"{_words(self.head)}\s*")
        if isinstance(self.form, _Object) and not self.head.strip():
            head = re.compile(rf"\A\s*(?=\{{\s*\"{re.escape(self.form.name)}\")")
        content, calls, at = "", list[ToolCall](), 0
        while (begins := head.search(text, at)) is not None:
            content, at, more = content + text[at : begins.start()], begins.end(), True
            try:
                while more:
                    call, at = self.form.read(text, at, schemas)
                    at, more = self._end(text, at)
                    calls.append(call)
            except (ValueError, RecursionError) as error:
                return content, tuple(calls), f"{one_line(error)}, in {quoted(text[begins.start() :])}"
        return content + text[at:], tuple(calls), ""

    def _end(self, text: str, at: int) -> tuple[int, bool]:
        between = self.between and _matching(self.between, text, at)
        if between:
            return between.end(), True
        for tail in self.tails:
            if ends := _matching(tail, text, at):
                return ends.end(), False
        raise ValueError(f"expected {self.tails[0]!r} after a call, got {quoted(text[at : at + 80])}")


def settled(text: str, marks: Sequence[str]) -> str:
    """Return a text without its end if that may become one of these marks, or is one."""
    held = [n for mark in marks for n in range(1, len(mark) + 1) if text.endswith(mark[:n])]
    return text[: len(text) - max(held, default=0)]


def probes(count: int) -> list[ToolCall]:
    return [ToolCall(f"PROBE0NAME{at}", dict(_PROBE), _ID.format(at)) for at in range(count)]


def _values(write: Callable[[Sequence[ToolCall]], str], form: _Marked) -> _Values:
    def written(value: object) -> str | None:
        with suppress(ConfigError):
            call = ToolCall("PROBE0NAME0", {**_PROBE, "SECOND0KEY": value}, _ID.format(0))
            _, _, behind = write([call]).partition("SECOND0KEY")
            if behind.startswith(form.value) and behind.endswith(form.last):
                return behind[len(form.value) : -len(form.last)]
        return None

    spelt = {text: value for value in (None, True, False) if (text := written(value)) is not None}
    return _Values({**_JSON_WORDS, **spelt}, python=written(_NESTED) == repr(_NESTED))


def _unit(text: str, number: int) -> tuple[tuple[int, int], _Object | _Named | _Marked] | None:
    # Where a call of _PROBE stands in what a template wrote, and its form.
    name = f"PROBE0NAME{number}"
    at = text.find(name)
    for start in (found.start() for found in reversed(list(re.finditer(r"\{", text[: max(at, 0)])))):
        with suppress(ValueError):
            value, end = _JSON.raw_decode(text, start)
            keys = {_key_of(value, name), _key_of(value, _PROBE), _key_of(value, json.dumps(_PROBE))} - {""}
            if len(keys) == 2:
                own = _key_of(value, name)
                return (start, end), _Object(own, (keys - {own}).pop())
    brace = text.find("{", at)
    with suppress(ValueError):
        value, end = _JSON.raw_decode(text, max(brace, 0))
        if value == _PROBE:
            return (at, end), _Named(text[at + len(name) : brace])
    texts = [name, *(each for pair in _PROBE.items() for each in pair)]
    places = [at, *(text.find(each, at) for each in texts[1:])]
    if min(places) < 0 or places != sorted(places):
        return None
    ends = [place + len(each) for place, each in zip(places, texts, strict=True)]
    first, value, following, again = (text[end:place] for end, place in zip(ends, places[1:], strict=False))
    last = text[ends[-1] :]
    quotes = {*value, *following}.intersection("\"'")  # of one language or another
    if quotes or value != again or not all(each.strip() for each in (first, value, following, last)):
        return None
    return (at, ends[-1]), _Marked(first, value, following, last)


def _key_of(found: object, value: object) -> str:
    return next((key for key, each in found.items() if each == value), "") if isinstance(found, dict) else ""
