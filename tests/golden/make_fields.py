"""Writes ``trl_fields.json``: the fields of TRL's configurations, which ``docs/coming-from-trl.md`` maps to settings.

PPOConfig is of TRL 1.12.0 (the last release with ``trl.experimental.ppo``), GRPOConfig of TRL 1.16.0, both with
transformers 5.23.0; neither is a dependency of this package. In an environment with the one version and then in one
with the other::

    python -m tests.golden.make_fields

Fields that a configuration has from transformers' ``TrainingArguments`` are listed once, under that name.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from transformers import TrainingArguments

PATH = Path(__file__).with_name("trl_fields.json")
KINDS = {"PPOConfig": ("trl.experimental.ppo", "1.12.0"), "GRPOConfig": ("trl", "1.16.0")}


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


if __name__ == "__main__":
    main()
