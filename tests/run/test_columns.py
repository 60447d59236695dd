"""What the data's columns hold is the data's business: rollouts that have them are deferred a resume."""

from __future__ import annotations

import json
import shutil
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from oppo.cli import DONE
from tests.workplace import furnish, oppo, records, resume

CHECKED = """
from datetime import date
from decimal import Decimal

def score(prompts, completions, day, price, raw, pairs, tree):
    for each in zip(day, price, raw, pairs, tree):
        assert [type(value) for value in each] == [date, Decimal, bytes, list, dict], each
        assert type(each[3][0]) is tuple, each
        assert "$array" in each[4]
    return [0.1 for _ in completions]
"""


def test_columns_of_any_type_come_back_with_a_deferred_rollout_as_they_were(tmp_path: Path) -> None:
    folder = furnish(tmp_path)
    (folder / "checked.py").write_text(CHECKED)
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().split("\n") if line]
    n = len(prompts)
    table = {
        "prompt": prompts,
        "day": [date(2026, 1, 2)] * n,
        "price": [Decimal("1.50")] * n,
        "raw": [b"\xff\x00"] * n,
        "pairs": pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64())),
        "tree": [{"$array": 1}] * n,
    }
    parquet.write_table(pa.table(table), folder / "prompts.parquet")
    data = ("rewards.0.source=checked.py:score", "data.prompts=prompts.parquet", "run.checkpoint_every=1")
    assert oppo(folder, "", *data) == DONE
    assert records(folder, "first", "metrics.jsonl")[0]["deferred"], "something was deferred"
    shutil.rmtree(folder / "runs" / "first" / "checkpoints" / "step-000002")
    assert resume(folder, "first", "run.steps=4") == DONE
    assert len(records(folder, "first", "metrics.jsonl")) == 4
