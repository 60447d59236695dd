"""The settings of a training run: a TOML file in, checked and resolved, and the same file out with every default.

An error names section and key, what was expected and what came, and lists all faults of a file. Paths, also by
``--set``, are relative to the folder of the file and come out absolute, so the resolved file can be moved.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import tomli_w
from pydantic import ValidationError

from oppo.algorithms import ALGORITHMS
from oppo.algorithms.distill import Distill
from oppo.algorithms.ppo import PPO
from oppo.atomic_files import read_text
from oppo.config.convert_files import flattened, ours
from oppo.config.environment import INITIAL, POLICY
from oppo.config.extensions import NAMED, algorithm_of
from oppo.config.scorers import REWARD_KINDS, SOURCE, ScorerSection, is_name, reward_kind_of
from oppo.config.sections import StepSection, placed, resolved, within
from oppo.config.settings import Settings, keys_of
from oppo.declared import MOST, SEEDS, Declared, declared, expectation, table_in
from oppo.errors import ConfigError, did_you_mean, in_toml, shortened
from oppo.libraries import is_installed
from oppo.log import logger
from oppo.redact import HIDDEN, holds_secret, names_secret, redacted
from oppo.user_code import SPEC

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of a TOML file, checked, with every default, and with paths resolved.

    Args:
        path: the file; paths in it and in ``overrides`` are relative to its folder.
        overrides: ``section.key=value`` each, the value as in TOML.

    Raises:
        ConfigError: the file cannot be read, or settings are wrong: all of them are named.

    Example:
        >>> load_settings("config.toml", ["run.steps=20"]).run.steps  # doctest: +SKIP
        20
    """
    return resolve(overridden(parsed(Path(path)), overrides), Path(path).absolute().parent)


def parsed(path: Path) -> dict[str, object]:
    try:
        if path.is_dir():
            raise ConfigError(
                f"{path} is a directory, and settings are a file, such as {path / 'config.toml'}; a run's directory is "
                "what `oppo resume`, `oppo report` and `oppo simulate --from` take"
            )
        return tomllib.loads(read_text(path, linked=True))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOML, UTF-8, a number too long, a NUL in the path
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def resolve(document: Mapping[str, object], folder: Path) -> Settings:
    """Return the settings of a parsed file that lies in ``folder``."""
    document = _with_engine(_with_tables(_with_files(document, folder)))
    try:
        settings = Settings.of(with_correction(counted(seeded(document))))
    except ValidationError as error:
        raise ConfigError(SettingsFaults.of(document).describe(error)) from error
    models = settings.models
    rewards = tuple(
        each if is_name(each.source) else replace(each, source=_model(each.source, folder)) for each in settings.rewards
    )
    settings = settings.model_copy(update={"rewards": rewards})
    policy, adapter = _model(models.policy, folder), _model(models.adapter, folder)
    own_critic = next(iter(settings.reward_models), policy)
    if models.shared_trunk or not settings.algorithm.has_critic:
        own_critic = ""
    found = settings.model_copy(
        update={
            "run": replace(settings.run, directory=resolved(settings.run.directory, folder)),
            "models": replace(
                models,
                policy=policy,
                reference=_model(models.reference, folder) or ((adapter or policy) if settings.has_reference else ""),
                adapter=adapter,
                teacher={name: _model(path, folder) for name, path in models.teacher.items()}
                if isinstance(models.teacher, dict)
                else _model(models.teacher, folder),
                critic=_model(models.critic, folder) or own_critic,
            ),
            "environment": settings.environment.within(folder),
            "agents": replace(
                settings.agents.within(folder),
                roles={
                    role: player if player in PLAYERS else _model(player, folder, PLAYERS)
                    for role, player in settings.agents.roles.items()
                },
            ),
            "data": settings.data.within(folder),
            "eval": replace(settings.eval, prompts=within(settings.eval.prompts, folder)),
        }
    )
    for name, section in found.tables().items():  # which a run writes into a file
        for key, text in _texts(name, section):
            if text and (names_secret(key.rpartition(".")[2]) or holds_secret(text)):
                shown = HIDDEN if redacted(text) == text else redacted(text)
                raise ConfigError(
                    f"{key} holds a secret, got {shown}: a run keeps its settings in a file, so give it in the "
                    "environment, or by a login, and leave it out here"
                )
    return found


def _with_files(document: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    step = table_in(document, "step")
    named = {name: placed(spec, folder) for name in NAMED if isinstance(spec := step.get(name), str)}
    return {**document, "step": {**step, **named}} if named else document


def _with_tables(document: Mapping[str, object]) -> Mapping[str, object]:
    rewards = document.get("rewards")
    if not isinstance(rewards, list | tuple):
        return document
    return {**document, "rewards": [{"source": each} if isinstance(each, str) else each for each in rewards]}


def _with_engine(document: Mapping[str, object]) -> Mapping[str, object]:
    models = document.get("models")
    if not isinstance(models, Mapping) or models.get("engine") != "auto":
        return document
    on_vllm = {**document, "models": {**models, "engine": "vllm"}}
    if not (refusal := _why_not_vllm(on_vllm)):
        logger.info("models.engine = 'auto': vLLM decodes")
        return on_vllm
    logger.info(f"models.engine = 'auto': transformers decodes, since {refusal}")
    rest = {name: section for name, section in document.items() if name != "vllm"}
    return {**rest, "models": {**models, "engine": "transformers"}}


def _why_not_vllm(document: Mapping[str, object]) -> str:
    from oppo.hf.devices import device_of  # noqa: PLC0415 - takes seconds to import

    if not is_installed("vllm"):
        return "vLLM is not installed"
    try:
        device = Settings.of(with_correction(seeded(document))).devices["policy"][0]
    except ValidationError as error:
        return SettingsFaults.of(document).describe(error)
    return "the policy is on a CPU" if device_of(device).type == "cpu" else ""


PLAYERS = (POLICY, INITIAL)


def _model(text: str, folder: Path, known: Sequence[str] = ()) -> str:
    # a hub's name stays as it is; what exists in the folder, or is spelt as a path, becomes absolute
    if not text:
        return text
    if SPEC.match(text):
        return placed(text, folder)
    if text.startswith((".", "/", "~")) or os.path.lexists(folder / text):
        return resolved(text, folder)
    beside = list[str]()
    with suppress(OSError, ValueError):
        beside += [each.name for each in (folder / text).parent.iterdir() if each.is_dir()]
    if guess := did_you_mean(text, known) or did_you_mean(Path(text).name, beside):
        logger.once(f"{text!r} is no directory in {folder}{guess}: taking it for the name of a model at a hub")
    return text


SEEDED = ("data", "sampling", "trainer", "eval")  # the sections with a seed of their own; the default is the run's
BY_DATA = MOST - 1  # `run.steps` of a file that has `data.epochs` alone, until the prompts are counted

CORRECTION = "truncated"
"""``algorithm.is_correction`` where vLLM decodes and the file names none.

vLLM and the trainer compute the same log-probs with other kernels. Importance weights correct for the difference, and
for stale tokens with it.
"""


def overridden(document: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return a parsed file with ``section.key=value`` overrides; ``rewards.0.key=value`` is for an item of a list."""
    if isinstance(overrides, str | Mapping):
        raise ConfigError(f"overrides are a list, such as ['step.batch=16', ...]; got {type(overrides).__name__}")
    changed: dict[str, object] = copy.deepcopy(dict(document))
    parsed = [_parsed(override) for override in overrides]
    if any(place == ["run", "seed"] for place, _ in parsed):
        _drop_equal_seeds(changed)
    for place, value in parsed:
        _put(changed, place, value)
    return changed


def _put(document: dict[str, object], place: Sequence[str], value: object) -> None:
    table, whole = cast("object", document), ".".join(place)
    for depth, name in enumerate(place):
        is_last, where = depth == len(place) - 1, ".".join(place[:depth])
        item = value if is_last else [] if place[depth + 1] == "0" else {}
        if isinstance(table, list):
            if not name.isdecimal() or int(name) > len(table):
                last = f", and from it to {len(table)}" if table else ""
                raise ConfigError(f"--set {whole}: {where!r} is a list, whose items are numbered from 0{last}")
            if int(name) == len(table):
                table.append(item)
            elif is_last:
                table[int(name)] = value
            elif isinstance(table[int(name)], str) and where == "rewards":
                table[int(name)] = {"source": table[int(name)]}
            table = table[int(name)]
        elif isinstance(table, dict):
            if is_last:
                table[name] = value
            table = table.setdefault(name, item)
        else:
            what = "section" if depth == 1 else "table"
            came = in_toml(HIDDEN if VARIABLE.search(f"{where} ") else table)
            raise ConfigError(f"--set {whole}: {where!r} is not a {what} of this file but the value {came}")


def seeded(document: Mapping[str, object]) -> dict[str, object]:
    filled: dict[str, object] = dict(document)
    if (seed := _seed(document.get("run"))) is None:
        return filled
    for name in SEEDED:
        section = document.get(name, {})
        if isinstance(section, Mapping):
            filled[name] = {"seed": seed, **section}
    if "data" not in document:
        del filled["data"]
    return filled


def counted(document: Mapping[str, object]) -> dict[str, object]:
    run, data = (document.get(name, {}) for name in ("run", "data"))
    if isinstance(run, Mapping) and isinstance(data, Mapping) and data.get("epochs") and "steps" not in run:
        return {**document, "run": {**run, "steps": BY_DATA}}
    return dict(document)


def with_correction(document: Mapping[str, object]) -> dict[str, object]:
    filled = dict(document)
    models, algorithm = (filled.get(name, {}) for name in ("models", "algorithm"))
    if not isinstance(models, Mapping) or models.get("engine") != "vllm" or not isinstance(algorithm, Mapping):
        return filled
    kind = algorithm_of(table_in(document, "step"))
    if kind is Distill and "distill_top_k" in algorithm:  # no ratio, which it would correct
        return filled
    if kind is not None and "is_correction" in declared(kind):
        filled["algorithm"] = {"is_correction": CORRECTION, **algorithm}
    return filled


def _drop_equal_seeds(document: Mapping[str, object]) -> None:
    # so that they follow the new one of the run
    seed = _seed(document.get("run"))
    for section in map(document.get, SEEDED):
        if seed is not None and isinstance(section, dict) and _seed(section) == seed:
            del section["seed"]


def _seed(section: object) -> int | None:
    seed = section.get("seed") if isinstance(section, Mapping) else None
    return seed if type(seed) is int and seed in SEEDS else None


def _parsed(override: str) -> tuple[list[str], object]:
    for equals in re.finditer("=", override):  # a quoted name may have one
        names, value = _names(override[: equals.start()]), _value(override[equals.end() :].strip())
        if len(names) > 1 or (names and isinstance(value, list)):
            return names, value
    key = override.partition("=")[0]
    came = f"{key}={HIDDEN}" if "_env" in key or VARIABLE.search(override) else override
    raise ConfigError(f"--set expects section.key=value, such as step.batch=16; got {came!r}")


def _names(key: str) -> list[str]:
    try:
        table: object = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return []
    names = list[str]()
    while isinstance(table, dict) and len(table) == 1:
        (name, table), *_ = table.items()
        names.append(name)
    return names if table == 0 else []


def _value(text: str) -> object:
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text


SHOWN = 200  # characters of a wrong value in its message

VARIABLE = re.compile(r"_env['\"]?(\s*=|:?\s)")
"""The end of a setting that names an environment variable: the key itself may have been pasted there."""


def _shown(detail: ErrorDetails) -> str:
    came = in_toml(detail["input"])
    places = [f"{part} " for part in detail["loc"]]
    return HIDDEN if any(map(VARIABLE.search, [*places, came])) else shortened(came, SHOWN)


@dataclass(frozen=True, slots=True)
class Faults:
    """The words for faults of a file; ``named``: sections whose keys are names of sections, as in ``[gpus.NAME]``."""

    keys: Mapping[str, Mapping[str, Declared]]
    sections: Sequence[str]
    named: Collection[str] = ()

    def describe(self, error: ValidationError) -> str:
        grouped: dict[tuple[str, ...], list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            grouped.setdefault(self._place(detail["loc"]), []).append(detail)
        lines = [self._sentence(place, details) for place, details in grouped.items()]
        if len(lines) == 1:
            return lines[0]
        return "\n".join([f"{len(lines)} settings are wrong:", *(f"  {line}" for line in lines)])

    def _place(self, loc: Sequence[int | str]) -> tuple[str, ...]:
        parts = [str(part) for part in loc]
        if len(parts) > 1 and parts[0] in self.named:
            parts[:2] = [f"{parts[0]}.{parts[1]}"]
        return tuple(parts[:2])

    def _declared(self, section: str) -> Mapping[str, Declared]:
        return self.keys.get(section) or self.keys.get(section.partition(".")[0], {})

    def _sentence(self, place: tuple[str, ...], details: Sequence[ErrorDetails]) -> str:
        detail = details[0]
        if not place:  # a fault between sections, which its message names
            return detail["msg"].removeprefix("Value error, ")
        where = f"[{'.'.join(place)}]" if len(place) % 2 else ".".join(place)
        if detail["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
            table, _, name = place[0].partition(".")
            quoted = f', and of a name with a dot [{table}."{name}.{place[-1]}"] is the table'
            return self._unknown(place, detail["input"]) + quoted * (
                table in self.named and isinstance(detail["input"], Mapping)
            )
        lengths = [
            part + 1 for each in details if each["type"] == "missing" and isinstance(part := each["loc"][-1], int)
        ]
        if lengths or detail["type"] == "too_long":
            length = max(lengths) if lengths else detail["ctx"]["max_length"]
            return f"{where}: expected a list of {length}, got {_shown(detail)}"
        if detail["type"] == "missing":
            return f"{where} is missing: {self._wanted(place)}"
        if detail["type"] == "value_error":
            return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
        if detail["type"] in {"model_type", "dataclass_type"} or (detail["type"] == "tuple_type" and len(place) == 1):
            return f"{where}: expected {self._wanted(place)}, got {_shown(detail)}"
        if detail["loc"][-1:] == ("[key]",):
            home = ".".join(place[:2])
            return f"{home}: expected names of {expectation(detail)}, got {_shown(detail)}"
        text = isinstance(detail["input"], str) and not detail["input"].startswith("[")
        item = next((f"item {part} to be " for part in detail["loc"][2:] if isinstance(part, int)), "")
        expected = " or ".join(dict.fromkeys(expectation(each) for each in details))
        choices = detail.get("ctx", {}).get("expected", "").replace("'", "").replace(" or ", ", ").split(", ")
        guess = did_you_mean(str(detail["input"]), choices) if detail["type"] == "literal_error" else ""
        guess = f": write [{_shown(detail)}]" if detail["type"] == "tuple_type" and text else guess
        return f"{where}: expected {item}{expected}, got {_shown(detail)}{guess}"

    def _wanted(self, place: tuple[str, ...]) -> str:
        keys = self._declared(place[0])
        return f"a section with the keys {', '.join(keys)}" if len(place) == 1 else keys[place[1]].description

    def _unknown(self, place: tuple[str, ...], given: object) -> str:
        kind, home, known = "key", f"[{place[0]}]", list(self._declared(place[0]))
        if len(place) == 1:
            kind, home, known = "section", "a configuration", list(self.sections)
        near, foreign = did_you_mean(place[-1], known), self._foreign(place, given)
        guess = self._home_of(place) or (near or foreign if kind == "section" else foreign or near)
        return f"unknown {kind} {'.'.join(place)!r}{guess}; the {kind}s of {home} are {', '.join(known) or '(none)'}"

    def _foreign(self, place: tuple[str, ...], given: object) -> str:
        del place, given
        return ""

    def _home_of(self, place: tuple[str, ...]) -> str:
        homes = [f"[{name}]" for name, keys in self.keys.items() if len(place) == 2 and place[1] in keys]
        return f" (it is a key of {', '.join(homes)})" if homes else ""


@dataclass(frozen=True, slots=True)
class SettingsFaults(Faults):
    """The words for faults of a run's settings."""

    algorithm: str = ""

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Self:
        step = table_in(document, "step")
        algorithm = algorithm_of(step)
        named = step.get("algorithm") if algorithm is not None else None
        keys = keys_of(algorithm or PPO, step)
        rewards = document.get("rewards")
        for number, table in enumerate(rewards if isinstance(rewards, list | tuple) else []):
            keys[f"rewards.{number}"] = {**declared(REWARD_KINDS[reward_kind_of(table)])}
        keys["scorers"] = {**declared(ScorerSection)}
        chosen = str(named or StepSection().algorithm)
        return cls(keys, list(Settings.model_fields), named=("scorers",), algorithm=chosen)

    def _place(self, loc: Sequence[int | str]) -> tuple[str, ...]:
        if loc[:1] == ("rewards",) and len(loc) > 1:
            return (f"rewards.{loc[1]}", *map(str, loc[3:4]))  # after the number, the kind of reward
        return super(SettingsFaults, self)._place(loc)

    def _wanted(self, place: tuple[str, ...]) -> str:
        if place == ("rewards",):
            return f"tables [[rewards]], each with a source: {SOURCE}"
        return super(SettingsFaults, self)._wanted(place)

    def _foreign(self, place: tuple[str, ...], given: object) -> str:
        name = ".".join(place)
        inside = dict(flattened(f"{name}.", given)) if isinstance(given, Mapping) else {}
        return "".join(dict.fromkeys(map(ours, inside or [name])))

    def _home_of(self, place: tuple[str, ...]) -> str:
        if len(place) != 2:
            return ""
        if place[0].startswith("rewards."):
            kinds = [name for name, kind in REWARD_KINDS.items() if place[1] in declared(kind)]
            return f" (it is a key of a reward whose source is a {kinds[0]})" if kinds else ""
        others = ", ".join(repr(name) for name, kind in ALGORITHMS.items() if place[1] in declared(kind))
        if place[0] == "algorithm" and others:
            return f" (it is a key of [algorithm] for {others}, not for {self.algorithm!r})"
        homes = super(SettingsFaults, self)._home_of(place)
        if homes or not others:
            return homes
        return f" (it is a key of [algorithm] for {others}, not for {self.algorithm!r})"


def _texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts(f"{key}.{name}", each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(key, each)


def rendered(
    document: Mapping[str, Any],
    notes: Mapping[str, str],
    blank: Mapping[str, str],
    lost: Mapping[str, Sequence[str]],
    origin: str,
) -> str:
    lines = [f"# Converted from {_printable(origin)}."]
    lines += ["", "# To fill in:", *(f"# - {key}: {what}" for key, what in blank.items())] if blank else []
    reasons = [_printable(f"# - {', '.join(names)}: {reason}") for reason, names in lost.items()]
    lines += ["", "# Not carried over:", *reasons] if lost else []
    for section in Settings.model_fields:
        given = document.get(section) or []
        for number, table in enumerate(given if isinstance(given, list) else [given]):
            place = f"{section}.{number}" if given is not table else section
            lines += ["", f"[[{section}]]" if given is not table else f"[{section}]"]
            told = {key: f"  # {notes[name]}" if (name := f"{place}.{key}") in notes else "" for key in table}
            lines += [f"{_key(key)} = {_toml(value)}{_printable(told[key])}" for key, value in table.items()]
    return "\n".join([*lines, ""])


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_toml(each)}' for key, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"k": value})[4:].strip()


def _key(key: object) -> str:
    return tomli_w.dumps({str(key): 0}).rpartition(" = ")[0]


def at(document: Mapping[str, Any], key: str) -> object:
    table: Any = document
    for name in key.split("."):
        if isinstance(table, list):
            table = table[int(name)] if int(name) < len(table) else {}
        else:
            table = table.get(name) if isinstance(table, dict) else None
    return table
