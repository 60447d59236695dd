"""Every field of the trainers that we convert from sets something, or is named with the reason why it does not."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Final

import pytest
import yaml

from oppo.config.convert import Converted, convert
from oppo.config.foreign import Kind, rows_of
from oppo.errors import ConfigError

FOLDER: Final = Path(__file__).parents[1] / "golden"
OF_TRL: Final = json.loads((FOLDER / "trl_fields.json").read_text(encoding="utf-8"))
OF_RAY: Final = json.loads((FOLDER / "ray_fields.json").read_text(encoding="utf-8"))
VALUES: Final = (True, 7, "./text")
NEEDED: Final = {"data.train_files": "a.jsonl", "data.prompt_dataset": "a.jsonl", "num_processes": 1}


def fields_of(kind: Kind) -> list[str]:
    """Return the names of all fields of a configuration, as its own code has them."""
    if kind == "openrlhf":
        return list(OF_RAY["openrlhf"])
    if kind == "verl":
        return [name for name in OF_RAY["verl"] if not name.endswith("_target_")]
    return [*OF_TRL[f"{kind.upper()}Config"]["fields"], *OF_TRL["TrainingArguments"]["fields"]]


def of(kind: Kind, given: dict[str, object], folder: Path) -> Converted:
    needed = {name: value for name, value in NEEDED.items() if ("." in name) == (kind in {"verl", "openrlhf"})}
    (folder / "c.yaml").write_text(yaml.safe_dump({**needed, **given}))
    return convert(folder / "c.yaml", kind=kind)


@pytest.mark.parametrize(
    ("kind", "set_something"), [("ppo", 33), ("grpo", 35), ("rloo", 34), ("sdpo", 35), ("verl", 45), ("openrlhf", 40)]
)
def test_no_field_of_theirs_falls_silently(kind: Kind, set_something: int, tmp_path: Path) -> None:
    plain, ends, silent = of(kind, {}, tmp_path), Counter[str](), list[str]()
    for field in fields_of(kind):
        found = set[str]()
        for value in VALUES:
            try:
                made = of(kind, {field: value}, tmp_path)
            except ConfigError as error:
                silent += [] if field in str(error) else [f"{field}: {error}"]
                found.add("refused")
                continue
            lost = {name.partition(" = ")[0] for name in chain(*made.lost.values())}
            if field not in lost and made.text == plain.text:
                silent.append(f"{field} = {value}")
            found.add("named" if field in lost else "sets")
        ends["sets" if "sets" in found else "named" if "named" in found else "refused"] += 1
    assert not silent, "these set nothing, and nothing says so"
    assert ends["sets"] >= set_something, ends
    assert ends["refused"] <= 3, ends


@pytest.mark.parametrize("kind", ["ppo", "grpo", "rloo", "sdpo", "openrlhf"])
def test_every_field_has_a_row_of_its_own_or_of_its_section(kind: Kind) -> None:
    rows = rows_of(kind)
    for field in fields_of(kind):
        assert any(field == row or field.startswith(f"{row}.") for row in rows), field
