"""``docs/coming-from-trl.md``: every field of TRL's configurations has a row, and what a row names is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.make_fields import KINDS, page
from docs.make_settings import NAMES, tables
from oppo.config.convert_files import foreign_fields
from oppo.config.load import load_settings

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-trl.md").read_text(encoding="utf-8")
FIELDS = json.loads((Path(__file__).parents[1] / "golden" / "trl_fields.json").read_text(encoding="utf-8"))
del FIELDS["RLOOConfig"], FIELDS["SDPOConfig"]  # nearly all are of GRPOConfig: tests/config/test_fields.py
SETTINGS = {f"{section}.{key}" for section, keys in tables().items() for key in keys}
OF_VLLM = {"vllm.model_impl", "vllm.gpu_memory_utilization", "vllm.max_model_len", "vllm.tensor_parallel_size"}
OF_VLLM |= {"vllm.urls", "vllm.timeout"}
"""What ``[vllm]`` takes: arguments of vLLM's engine by their own names, or its servers."""


def rows(kind: str) -> list[tuple[str, str, str]]:
    """Return field, settings and remark of each row of the table of ``kind``."""
    _, _, after = PAGE.partition(f"\n## Every field of {kind}\n")
    section = after.partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [(line[0].strip("`"), line[1], line[2].strip() if len(line) > 2 else "") for line in lines]


def test_the_tables_are_those_of_the_converter() -> None:
    assert page() == PAGE, "run: python -m docs.make_fields"
    assert all(len(rows(kind)) > 10 for kind in KINDS)


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_has_a_row_and_no_row_is_of_anything_else(kind: str) -> None:
    assert [field for field, _, _ in rows(kind)] == FIELDS[kind]["fields"]
    assert len(FIELDS[kind]["fields"]) > 30
    version = FIELDS[kind].get("trl") or FIELDS[kind]["transformers"]
    assert version in PAGE.partition(f"\n## Every field of {kind}\n")[2][:200]


@pytest.mark.parametrize("kind", FIELDS)
def test_a_row_names_settings_that_are_there_or_says_why_there_is_none(kind: str) -> None:
    for field, settings, remark in rows(kind):
        named = re.findall(r"`([^`]+)`", settings)
        assert set(named) <= SETTINGS | OF_VLLM, field
        assert (settings == "-") == (not named), field
        assert named or remark, f"{field} has neither a setting nor a reason"
        mentioned = set(re.findall(rf"`((?:{'|'.join(tables())})\.\w+)`", remark))
        assert mentioned <= SETTINGS, field


def test_the_names_in_trl_of_the_settings_page_lead_back_to_the_same_setting() -> None:
    mapped = {field: settings for kind in FIELDS for field, settings, _ in rows(kind)}
    for setting, (_, theirs) in NAMES.items():
        for field in re.findall(r"\w+", theirs) if " " not in theirs else []:
            if field in mapped:
                assert f"`{setting}`" in mapped[field] or setting.endswith(".seed"), (setting, field)


def test_the_settings_that_stand_for_keys_of_verl_and_openrlhf_are_there() -> None:
    table = PAGE.partition("\n## From verl or OpenRLHF\n")[2].partition("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+\.\w+)`", row)
    }
    assert len(named) > 30
    assert named - {"file.py"} <= SETTINGS


def test_a_key_of_verl_goes_where_the_page_says() -> None:
    table = PAGE.partition("\n## From verl or OpenRLHF\n")[2].partition("\n## ")[0]
    checked = 0
    for row in re.findall(r"^\| (`.*) \|$", table, re.MULTILINE):
        ours, theirs = row.split(" | ")[:2]
        for short in re.findall(r"`(\w+(?:\.\w+)+)`", theirs):
            key = re.sub(r"^(actor|model)\.", r"actor_rollout_ref.\1.", short)
            goes, _, *_ = foreign_fields()["verl"][key]
            assert not goes or set(goes.split(", ")) & set(re.findall(r"`([\w.]+)`", ours)), key
            checked += 1
    assert checked > 30


def test_every_setting_of_the_converter_is_there() -> None:
    for rows_of in foreign_fields().values():
        for name, (settings, *_) in rows_of.items():
            assert {each for each in settings.split(", ") if each} <= SETTINGS | OF_VLLM, name


def test_the_file_of_the_page_is_one_that_is_read(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "config.toml").write_text(shown)
    settings = load_settings(tmp_path / "config.toml")
    assert (settings.run.steps * settings.step.batch, settings.trainer.schedule) == (6_400, "linear")
    assert (settings.models.reference, settings.models.critic) == ("policy", "reward")
