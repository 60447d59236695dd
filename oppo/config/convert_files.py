"""Configurations of TRL, verl and OpenRLHF: read by field from a script, a YAML file or a command.

Nothing of them is executed. ``convert_fields.toml`` beside this module says where each field went.
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
from typing import Any, Final, Literal, TypeAlias, cast

import yaml

from oppo.atomic_files import read_text
from oppo.errors import ConfigError, one_line, shortened

Kind: TypeAlias = Literal["ppo", "grpo", "rloo", "sdpo", "verl", "openrlhf"]
"""What a file configures: a trainer of TRL, verl's ``main_ppo``, or OpenRLHF's ``train_ppo_ray``."""

WHOSE: Final = {"verl": "verl", "openrlhf": "OpenRLHF"}  # the libraries whose fields are named by section

Rows: TypeAlias = Mapping[str, Sequence[Any]]


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("convert_fields.toml").read_text(encoding="utf-8"))


def foreign_fields() -> Mapping[str, Rows]:
    return {name: table for name, table in _tables().items() if name not in {"earlier", "off", "templates"}}


def said(given: Mapping[str, object]) -> dict[str, object]:
    """Return the fields without those whose value switches off what is off where they are absent."""
    off = _tables()["off"]
    return {name: each for name, each in given.items() if name not in off or each is True or each != off[name]}


def templates() -> Mapping[str, str]:
    return cast("Mapping[str, str]", _tables()["templates"])


def rows_of(kind: Kind) -> Rows:
    tables = {"ppo": ["PPOConfig"], "grpo": ["GRPOConfig"]}
    tables |= {kind: ["GRPOConfig", f"{kind.upper()}Config"] for kind in ("rloo", "sdpo")}
    chosen = [*tables[kind], "TrainingArguments", "scripts"] if kind in tables else [WHOSE[kind]]
    return {name: row for table in chosen for name, row in foreign_fields()[table].items()}


def ours(name: str) -> str:
    """Return the hint which setting a field of another trainer is here, by its name or last part; empty if unknown."""
    last = name.rpartition(".")[2]
    found = [
        ("TRL", last, table[last])
        for key, table in foreign_fields().items()
        if last in table and key not in WHOSE.values()
    ]
    for library in WHOSE.values():
        rows = {key: row for key, row in foreign_fields()[library].items() if f".{key}".endswith(f".{last}")}
        exact = {
            key: row for key, row in rows.items() if name == key or ("." in name and f".{key}".endswith(f".{name}"))
        }
        if exact or len({row[0] for row in rows.values()}) == 1:
            of_library = [(library, key, row) for key, row in (exact or rows).items()]
            found = [*of_library, *found] if exact else [*found, *of_library]
    for library, key, (settings, remark, *_) in found:
        return f" ({key} of {library} is {settings} here)" if settings else f" ({key} of {library}: {remark})"
    return ""


class Computed(str):
    """The text of an expression that only running the program would evaluate."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Arguments:
    values: Mapping[str, object]


class Function(str):
    __slots__ = ()


class Checkpoint(str):
    """The path of a model, where a name alone could be a function's."""

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
    openrlhf = kind == "openrlhf" or (kind is None and bool(re.search(r"\bopenrlhf\.cli\.train_ppo", text)))
    given = _of_yaml(path, text) if path.suffix in {".yaml", ".yml"} else _of_command(path, text, openrlhf=openrlhf)
    if not given:
        raise ConfigError(
            f"{path} configures nothing: expected fields of TRL (`--learning_rate 1e-6`), of verl "
            "(`actor_rollout_ref.model.path=...`), or of OpenRLHF (`--rollout.batch_size 128`)"
        )
    return Found("openrlhf" if openrlhf else kind or _kind_of(path, text, given), given)


def _kind_of(path: Path, text: str, given: Mapping[str, object]) -> Kind:
    if any("." in name for name in given):
        return "verl"
    fields = {name: foreign_fields()[name].keys() for name in ("PPOConfig", "GRPOConfig")}
    both = fields["PPOConfig"] & fields["GRPOConfig"]
    ppo, grpo = (len((fields[name] - both) & given.keys()) for name in fields)
    taught = foreign_fields()["SDPOConfig"].keys() - fields["GRPOConfig"] - {"max_prompt_length"}
    if not ppo and (re.search(r"\bsdpo\w*\.py\b", text) or taught & given.keys()):
        return "sdpo"
    if not ppo and (re.search(r"\brloo", text) or {"normalize_advantages", "reward_clip_range"} & given.keys()):
        return "rloo"
    if not ppo and not grpo and not {"reward_funcs", "reward_model_name_or_path"} & given.keys():
        ppo, grpo = bool(re.search(r"\bppo", text)), bool(re.search(r"\bgrpo", text))
    elif not ppo and not grpo:
        grpo = 1
    if bool(ppo) == bool(grpo):
        raise ConfigError(
            f"{path} has no field of PPOConfig or of GRPOConfig alone: say which with --kind ppo, --kind grpo, "
            "--kind rloo or --kind sdpo"
        )
    return "ppo" if ppo else "grpo"


def _of_yaml(path: Path, text: str) -> dict[str, object]:
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(document, dict):
        found = "nothing" if document is None else f"no fields but {shortened(repr(document), 80)}"
        raise ConfigError(f"{path} holds {found}: expected `field: value`")
    roots = {name.partition(".")[0] for name in foreign_fields()["verl"]}
    given = {str(name): value for name, value in document.items()}
    if not roots & {name.partition(".")[0] for name in given}:
        return {name: literal(each) if isinstance(each, str) else each for name, each in given.items()}
    flat = dict(flattened("", given))
    return {name: _interpolated(value, flat) for name, value in flat.items() if not name.endswith("_target_")}


def flattened(prefix: str, table: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from flattened(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", literal(value) if isinstance(value, str) else value


REFERENCE: Final = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}")


def _interpolated(value: object, flat: Mapping[str, object], depth: int = 8) -> object:
    """Return a value with what its ``${section.key}`` and ``${oc.select:section.key,default}`` stand for."""
    if not isinstance(value, str) or "${" not in value or not depth:
        return Computed(value) if isinstance(value, str) and "${" in value else None if value == "???" else value

    def named(found: re.Match[str]) -> object:
        known = flat.get(found[1])
        return literal(found[2] or found[0]) if known is None else known

    if whole := REFERENCE.fullmatch(value):
        return _interpolated(named(whole), flat, depth - 1)
    return _interpolated(REFERENCE.sub(lambda found: str(named(found)), value), flat, depth - 1)


VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
ARITHMETIC: Final = re.compile(r"\$\(\(([\w\s$%*/+()-]*?)\)\)(?!\))")


def _whole(node: ast.AST) -> int:
    """Return the value of the shell's whole-number arithmetic; another expression raises ``ValueError``."""
    makes = {ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__, ast.Div: int.__floordiv__}
    if isinstance(node, ast.BinOp) and type(node.op) in makes:
        return makes[type(node.op)](_whole(node.left), _whole(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError


def _of_command(path: Path, text: str, *, openrlhf: bool = False) -> dict[str, object]:
    try:
        joined = ARITHMETIC.sub(lambda found: re.sub(r"\s", "", found[0]), text.replace("\\\n", " "))
        words = shlex.split(joined, comments=True)
    except ValueError as error:
        raise ConfigError(f"{path} is no shell script that can be read: {error}") from error
    shell = {"HOME": "~"}

    def computed(found: re.Match[str]) -> str:
        expression = re.sub(r"\$?\b([A-Za-z_]\w*)", lambda name: shell.get(name[1], name[0]), found[1])
        try:
            return str(_whole(ast.parse(expression, mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):
            return found[0]

    def filled(word: str) -> str:
        return VARIABLE.sub(
            lambda found: shell.get(found[1] or found[3], found[2] if found[2] is not None else found[0]),
            ARITHMETIC.sub(computed, word),
        )

    given: dict[str, object] = {}
    kinds: tuple[Kind, ...] = ("openrlhf",) if openrlhf else ("ppo", "rloo", "sdpo")
    tables = [rows_of(kind) for kind in kinds]
    known = {name for rows in tables for name in rows} | {"warmup_ratio", "torch_dtype"}
    option, others = "", dict[str, object]()
    for word in (filled(each).strip("()") for each in words):
        if of_verl := re.fullmatch(r"\+{0,2}(\w+(?:\.\w+)+)=(.*)", word, re.DOTALL):
            given[of_verl[1]], option = _read(of_verl[2]), ""
        elif word.startswith("--") and word != "--":
            option, equals, value = word[2:].partition("=")
            option = option.replace("-", "_")
            option = _today(option) if openrlhf else option
            (given if option in known else others)[option] = _read(value) if equals else True
            option = option if option in known else ""
        elif word.startswith("openrlhf.") if openrlhf else word.endswith(".py"):
            option, others = "", {} if openrlhf else others  # of the launcher before it
        elif assigned := re.fullmatch(r"(\w+)=(.*)", word, re.DOTALL):
            shell[assigned[1]] = assigned[2]
        elif option:
            before = given[option]
            given[option] = (
                _read(word) if before is True else [*(before if isinstance(before, list) else [before]), _read(word)]
            )
        if word in {"&&", ";", "|", "wait"}:
            option = ""
    return given if not openrlhf and any("." in name for name in given) else given and {**others, **given}


def _today(name: str) -> str:
    """Return the name in OpenRLHF 0.11 of a flag: `n_samples_per_prompt` is `rollout.n_samples_per_prompt`."""
    rows, earlier = foreign_fields()["OpenRLHF"], _tables()["earlier"]
    section, _, rest = name.partition("_")
    alike = [row for row in rows if f"_{row.replace('.', '_')}".endswith(f"_{name}")]
    if name in rows or name in earlier or len(alike) == 1:
        return str(earlier.get(name) or (name if name in rows else alike[0]))
    return f"{section}.{rest}" if section in rows and rest else name


def _read(text: str) -> object:
    if "$" in text:
        return Computed(text)
    return literal(text)


def literal(text: str) -> object:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        bare = re.fullmatch(r"\[(.*)\]", text, re.DOTALL)
        return [literal(each.strip()) for each in bare[1].split(",")] if bare else text


SCRIPTED: Final[Mapping[str, Kind]] = {"PPO": "ppo", "GRPO": "grpo", "RLOO": "rloo", "SDPO": "sdpo"}
"""The trainers of TRL whose configurations a script calls, by how the names of both begin."""


def _of_script(path: Path, text: str) -> Found:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no Python that can be read: {one_line(error)}") from error
    calls: dict[str, list[ast.Call]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _last_name(node.func)):
            calls[name].append(node)
    present = [name for name in SCRIPTED if calls[f"{name}Config"] or calls[f"{name}Trainer"]]
    if len(present) != 1 or len(calls[f"{present[0]}Config"]) > 1:
        found = ", ".join(f"{name} at line {each.lineno}" for name in present for each in calls[f"{name}Config"])
        raise ConfigError(f"{path}: expected one call of {'Config, '.join(SCRIPTED)}Config; got {found or 'none'}")
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
    return Found(SCRIPTED[present[0]], given, [*remarks, *script.remarks])


MAPPED: Final = (
    "where it makes the prompts, write the result to a file, by its `to_json`, and name that; tokens are made here"
)
"""The remark about a dataset that the program transforms."""

FORMATS: Final = frozenset({"json", "csv", "parquet"})  # the first argument of `load_dataset` for local files


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
        if name.endswith("Config") and name.removesuffix("Config") in SCRIPTED:
            return Arguments({key: self.value(each) for key, each in given.items() if key})
        if isinstance(node.func, ast.Attribute) and isinstance(source := self.value(node.func.value), dict):
            self.remarks.append((f"`{name}` of the dataset", MAPPED))
            return source
        return Computed(shortened(ast.unparse(node), 80))

    def trainer(self, call: ast.Call) -> dict[str, object]:
        """Return the arguments of the trainer, under the names of TRL's scripts."""
        given = {each.arg: self.value(each.value) for each in call.keywords if each.arg and each.arg != "args"}
        own = ("reward_funcs", "tools", "environment_factory")
        found: dict[str, object] = {name: given[name] for name in own if name in given}
        if rewards := found.get("reward_funcs"):
            several = rewards if isinstance(rewards, list) else [rewards]
            found["reward_funcs"] = [Checkpoint(each) if type(each) is str else each for each in several]
        models = {"model": "policy", "ref_model": "reference", "reward_model": "reward", "value_model": "critic"}
        found |= {f"<{role}>": given[name] for name, role in models.items() if isinstance(given.get(name), str)}
        data = {"train_dataset": "data", "eval_dataset": "eval"}
        found |= {f"<{role}>": given[name] for name, role in data.items() if isinstance(given.get(name), dict)}
        if isinstance(lora := given.get("peft_config"), dict):
            found |= {"use_peft": True} | {name: lora[key] for key, name in LORA.items() if key in lora}
        return found
