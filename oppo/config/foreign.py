"""What a configuration of TRL or verl says, by field: of a script, a YAML file or a command; nothing is executed.

``foreign.toml`` beside this module says where each field went.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import yaml

from oppo.durable import read_text
from oppo.errors import ConfigError, one_line, shortened

Kind: TypeAlias = Literal["ppo", "grpo", "verl"]
"""What a file configures: TRL's ``PPOTrainer`` or ``GRPOTrainer``, or verl's ``main_ppo``."""

Rows: TypeAlias = Mapping[str, Sequence[Any]]


@cache
def foreign_fields() -> Mapping[str, Rows]:
    return tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))


def ours(name: str) -> str:
    """Return what setting a field of TRL or verl is, in words, by its name or the end of a longer one; maybe empty."""
    last = name.rpartition(".")[2]
    verl = {key: row for key, row in foreign_fields()["verl"].items() if f".{key}".endswith(f".{last}")}
    exact = {key: row for key, row in verl.items() if "." in name and f".{key}".endswith(f".{name}")}
    alike = verl if len({row[0] for row in verl.values()}) == 1 else {}
    trl = [("TRL", last, table[last]) for kind, table in foreign_fields().items() if kind != "verl" and last in table]
    of_verl = [("verl", key, row) for key, row in (exact or alike).items()]
    for library, key, (settings, remark, *_) in of_verl if exact else [*trl, *of_verl]:
        return f" ({key} of {library} is {settings} here)" if settings else f" ({key} of {library}: {remark})"
    return ""


class Computed(str):
    """The text of an expression that only running the program would evaluate."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Arguments:
    values: Mapping[str, object]


class Function(str):
    """The name of a function or a class of the program."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A configuration that was read; models and data of a trainer are ``<policy>``, ``<reward>``, ``<data>``, ..."""

    kind: Kind
    given: Mapping[str, object]
    remarks: Sequence[tuple[str, str]] = ()


def read(path: Path, kind: Kind | None = None) -> Found:
    try:
        text = read_text(path, linked=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".py":
        return _of_script(path, text)
    given = _of_yaml(path, text) if path.suffix in {".yaml", ".yml"} else _of_command(path, text)
    if not given:
        raise ConfigError(
            f"{path} configures nothing: expected fields of TRL (`--learning_rate 1e-6`), or of verl "
            "(`actor_rollout_ref.model.path=...`)"
        )
    return Found(kind or _kind_of(path, text, given), given)


def _kind_of(path: Path, text: str, given: Mapping[str, object]) -> Kind:
    if any("." in name for name in given):
        return "verl"
    fields = {name: foreign_fields()[name].keys() for name in ("PPOConfig", "GRPOConfig")}
    both = fields["PPOConfig"] & fields["GRPOConfig"]
    ppo, grpo = (len((fields[name] - both) & given.keys()) for name in fields)
    if not ppo and not grpo and not {"reward_funcs", "reward_model_name_or_path"} & given.keys():
        ppo, grpo = bool(re.search(r"\bppo", text)), bool(re.search(r"\bgrpo", text))
    elif not ppo and not grpo:
        grpo = 1
    if bool(ppo) == bool(grpo):
        raise ConfigError(
            f"{path} has no field of PPOConfig or of GRPOConfig alone: say which with --kind ppo or --kind grpo"
        )
    return "ppo" if ppo else "grpo"


def _of_yaml(path: Path, text: str) -> dict[str, object]:
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no fields but {shortened(repr(document), 80)}: expected `field: value`")
    roots = {name.partition(".")[0] for name in foreign_fields()["verl"]}
    given = {str(name): value for name, value in document.items()}
    if not roots & {name.partition(".")[0] for name in given}:
        return {name: _value(each) if isinstance(each, str) else each for name, each in given.items()}
    flat = dict(flattened("", given))
    return {name: _interpolated(value, flat) for name, value in flat.items() if not name.endswith("_target_")}


def flattened(prefix: str, table: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from flattened(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", _value(value) if isinstance(value, str) else value


REFERENCE: Final = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")


def _interpolated(value: object, flat: Mapping[str, object], depth: int = 8) -> object:
    """Return a value with what its ``${section.key}`` and ``${oc.select:section.key,default}`` stand for."""
    if not isinstance(value, str) or "${" not in value or not depth:
        return Computed(value) if isinstance(value, str) and "${" in value else None if value == "???" else value

    def named(found: re.Match[str]) -> object:
        known = flat.get(found[1])
        return _value(found[2] or found[0]) if known is None else known

    if whole := REFERENCE.fullmatch(value):
        return _interpolated(named(whole), flat, depth - 1)
    return _interpolated(REFERENCE.sub(lambda found: str(named(found)), value), flat, depth - 1)


VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")


def _of_command(path: Path, text: str) -> dict[str, object]:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{path} is no shell script that can be read: {error}") from error
    shell = {"HOME": "~"}

    def filled(word: str) -> str:
        return VARIABLE.sub(
            lambda found: shell.get(found[1] or found[3], found[2] if found[2] is not None else found[0]), word
        )

    given: dict[str, object] = {}
    known = {name for table, rows in foreign_fields().items() if table != "verl" for name in rows} | {
        "warmup_ratio",
        "torch_dtype",
    }
    option, others = "", dict[str, object]()
    for word in (filled(each).strip("()") for each in words):
        if of_verl := re.fullmatch(r"\+{0,2}(\w+(?:\.\w+)+)=(.*)", word, re.DOTALL):
            given[of_verl[1]], option = _read(of_verl[2]), ""
        elif word.startswith("--"):
            option, equals, value = word[2:].replace("-", "_").partition("=")
            (given if option in known else others)[option] = _read(value) if equals else True
            option = option if option in known else ""
        elif word.endswith(".py"):
            option = ""  # of the launcher before it
        elif assigned := re.fullmatch(r"(\w+)=(.*)", word, re.DOTALL):
            shell[assigned[1]] = assigned[2]
        elif option:
            before = given[option]
            given[option] = (
                _read(word) if before is True else [*(before if isinstance(before, list) else [before]), _read(word)]
            )
        if word in {"&&", ";", "|", "wait"}:
            option = ""
    return given if any("." in name for name in given) else given and {**others, **given}


def _read(text: str) -> object:
    if "$" in text:
        return Computed(text)
    return _value(text)


def _value(text: str) -> object:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        bare = re.fullmatch(r"\[(.*)\]", text, re.DOTALL)
        return [_value(each.strip()) for each in bare[1].split(",")] if bare else text


def _of_script(path: Path, text: str) -> Found:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no Python that can be read: {one_line(error)}") from error
    calls: dict[str, list[ast.Call]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _last_name(node.func)):
            calls[name].append(node)
    kinds: dict[str, Kind] = {"PPO": "ppo", "GRPO": "grpo"}
    present = [name for name in kinds if calls[f"{name}Config"] or calls[f"{name}Trainer"]]
    if len(present) != 1 or len(calls[f"{present[0]}Config"]) > 1:
        found = ", ".join(f"{name} at line {each.lineno}" for name in present for each in calls[f"{name}Config"])
        raise ConfigError(f"{path}: expected one call of PPOConfig or GRPOConfig, got {found or 'none'}")
    config, trainer = (calls[f"{present[0]}{role}"] for role in ("Config", "Trainer"))
    if not config and (calls["HfArgumentParser"] or calls["TrlParser"]):
        raise ConfigError(
            f"{path} takes its settings from a command line: write the command that starts it into a file, such as "
            "run.sh, and convert that"
        )
    script = Script.of(tree)
    given = {each.arg: script.value(each.value) for call in config for each in call.keywords if each.arg}
    remarks = [
        ("fields that are added by `**`", "known when the program runs")
        for call in config
        for each in call.keywords
        if not each.arg
    ]
    for call in trainer[:1]:
        given |= script.trainer(call)
    return Found(kinds[present[0]], given, [*remarks, *script.remarks])


MAPPED: Final = (
    "where it makes the prompts, write the result to a file, by its `to_json`, and name that; tokens are made here"
)
"""What becomes of a dataset that is changed by the program."""

FORMATS: Final = frozenset({"json", "csv", "parquet"})
"""The first argument of ``load_dataset`` for files of one's own."""


def _of_files(files: object, found: Mapping[str, str]) -> dict[str, str] | None:
    # The one file of a split, where it is known.
    if isinstance(files, dict):
        files = files.get(found.get("split", "train"), next(iter(files.values()), None))
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    return {"path": files} if isinstance(files, str) and not isinstance(files, Computed) else None


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


LORA: Final = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
}


@dataclass(slots=True)
class Script:
    """What can be told of a program's values without running it."""

    known: dict[str, object] = field(default_factory=dict)
    remarks: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, tree: ast.Module) -> Script:
        script = cls()
        for node in sorted(ast.walk(tree), key=lambda each: getattr(each, "lineno", 0)):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                script.known[node.targets[0].id] = script.value(node.value)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                script.known[node.name] = Function(node.name)
            elif isinstance(node, ast.ImportFrom):
                names = [alias.asname or alias.name for alias in node.names]
                script.known |= {name: Function(name) for name in names}
        return script

    def value(self, node: ast.expr) -> object:
        """Return a literal, a model's path, or the source of a dataset."""
        if isinstance(node, ast.Name) and node.id in self.known:
            return self.known[node.id]
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(each) for each in node.elts]
        if isinstance(node, ast.Dict) and (named := self._functions(node)):
            return named
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Subscript) and isinstance(source := self.value(node.value), dict):
            split = self.value(node.slice)
            return {**source, "split": split} if isinstance(split, str) else source
        if isinstance(node, ast.Attribute) and isinstance(source := self.value(node.value), Arguments):
            return source.values.get(node.attr, Computed(ast.unparse(node)))
        try:
            return ast.literal_eval(node)
        except ValueError:
            return Computed(shortened(ast.unparse(node), 80))

    def _functions(self, node: ast.Dict) -> dict[object, object]:
        found = {self.value(key): self.value(each) for key, each in zip(node.keys, node.values, strict=True) if key}
        return found if all(isinstance(each, Function) for each in found.values()) else {}

    def _called(self, node: ast.Call) -> object:
        name, given = _last_name(node.func), {each.arg: each.value for each in node.keywords}
        first = self.value(node.args[0]) if node.args else None
        if name == "from_pretrained" and isinstance(first, str):
            return first
        if name == "load_dataset":
            names = dict(zip(("path", "subset"), node.args, strict=False)) | {
                {"name": "subset"}.get(key, key): each
                for key, each in given.items()
                if key in {"path", "name", "split"}
            }
            found = {key: value for key, each in names.items() if isinstance(value := self.value(each), str)}
            files = self.value(given["data_files"]) if "data_files" in given else None
            return found if found.get("path") not in FORMATS else _of_files(files, found) or found
        if name == "LoraConfig":
            return {key: self.value(each) for key, each in given.items() if key}
        if name in {"PPOConfig", "GRPOConfig"}:
            return Arguments({key: self.value(each) for key, each in given.items() if key})
        if isinstance(node.func, ast.Attribute) and isinstance(source := self.value(node.func.value), dict):
            self.remarks.append((f"`{name}` of the dataset", MAPPED))
            return source
        return Computed(shortened(ast.unparse(node), 80))

    def trainer(self, call: ast.Call) -> dict[str, object]:
        """Return what the trainer's own arguments say, under the names of TRL's scripts."""
        given = {each.arg: self.value(each.value) for each in call.keywords if each.arg and each.arg != "args"}
        own = ("reward_funcs", "tools", "environment_factory")
        found: dict[str, object] = {name: given[name] for name in own if name in given}
        models = {"model": "policy", "ref_model": "reference", "reward_model": "reward", "value_model": "critic"}
        found |= {f"<{role}>": given[name] for name, role in models.items() if isinstance(given.get(name), str)}
        data = {"train_dataset": "data", "eval_dataset": "eval"}
        found |= {f"<{role}>": given[name] for name, role in data.items() if isinstance(given.get(name), dict)}
        if isinstance(lora := given.get("peft_config"), dict):
            found |= {"use_peft": True} | {name: lora[key] for key, name in LORA.items() if key in lora}
        return found
