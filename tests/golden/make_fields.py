"""Writes ``trl_fields.json`` and ``ray_fields.json``: the fields of other trainers, which ``convert_fields.toml`` maps.

PPOConfig is of TRL 1.12.0 (the last release with ``trl.experimental.ppo``), the others of TRL 1.16.0, all with
transformers 5.23.0; keys are of verl 0.9.1, with their defaults, and flags of OpenRLHF 0.11.2, whose files are read.
None is a dependency of this package. In an environment with the one version of TRL and then in one with the other, and
with wheels of verl and OpenRLHF unpacked on ``PYTHONPATH`` (without their own ``tests``)::

    python -m tests.golden.make_fields

Fields that a configuration has from transformers' ``TrainingArguments`` are listed once, under that name.
"""

from __future__ import annotations

import ast
import json
import os
from dataclasses import fields
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from transformers import TrainingArguments

from tests.golden.make_counts import defaults_of_verl, installed as file_of

PATH = Path(__file__).with_name("trl_fields.json")
OF_RAY = Path(__file__).with_name("ray_fields.json")
KINDS = {"PPOConfig": ("trl.experimental.ppo", "1.12.0")}
KINDS |= dict.fromkeys(("GRPOConfig", "RLOOConfig"), ("trl", "1.16.0"))
KINDS |= {"SDPOConfig": ("trl.experimental.sdpo", "1.16.0")}


def main() -> None:
    installed = metadata.version("trl")
    found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}
    inherited = [each.name for each in fields(TrainingArguments)]
    found["TrainingArguments"] = {"transformers": metadata.version("transformers"), "fields": inherited}
    for name, (module, version) in KINDS.items():
        if version == installed:
            declared = [each.name for each in fields(getattr(import_module(module), name))]
            own = [field for field in declared if field not in inherited]
            found[name] = {"trl": installed, "fields": own, "inherited": len(declared) - len(own)}
    PATH.write_text(json.dumps(found, indent=1) + "\n")
    if find_spec("verl") and find_spec("openrlhf"):
        of_ray = {"verl": defaults_of_verl(), "openrlhf": flags()}
        versions = {name: metadata.version(name) for name in of_ray}
        OF_RAY.write_text(json.dumps({"versions": versions, **of_ray}, default=str) + "\n")


def flags() -> list[str]:
    """Return OpenRLHF's flags, as its file adds them to a parser; ``{prefix}`` is actor and critic."""
    text = file_of("openrlhf.cli.train_ppo_ray", ".py").read_text(encoding="utf-8")
    calls = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call) and each.args]
    added = [each.args[0] for each in calls if ast.unparse(each.func).endswith("add_argument")]
    names = [eval(ast.unparse(name), {"prefix": prefix}) for name in added for prefix in ("actor", "critic")]
    return [name.removeprefix("--") for name in dict.fromkeys(names)]


if __name__ == "__main__":
    main()
