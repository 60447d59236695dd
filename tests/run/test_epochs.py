"""A run that ends with its epochs, killed at any moment and resumed, ends as one that was never killed."""

from __future__ import annotations

import math
import random
import signal
from pathlib import Path
from typing import Final

import pytest

from oppo.training import TrainerSettings
from tests.kit.assets import furnish
from tests.kit.workplace import read_lines
from tests.run.matrix import AXES, BASE, RUN, STEPS, digests, lived, overrides, trained_twice

ROW: Final = {axis: next(iter(values)) for axis, values in AXES.items()}
PROMPTS, BATCH, EPOCHS, SHARE = 10, 4, 2, 0.3
ENDS_BY_DATA: Final = BASE.replace(f"steps = {STEPS}, ", "")
SETTINGS: Final = (
    *overrides(ROW),
    f"data.epochs={EPOCHS}",
    f"step.batch={BATCH}",
    "trainer.schedule=linear",
    f"trainer.warmup_steps={SHARE}",
)
SCHEDULES: Final = {
    "synchronous": ("step.overcommit=0",),
    "lookahead": ("step.overcommit=0", "step.lookahead=1"),
    "deferral": ("step.overcommit=2",),
    "lookahead-deferral": ("step.overcommit=2", "step.lookahead=2"),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("epochs"))
    prompts = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(prompts[:PROMPTS]))
    assert len(prompts) >= PROMPTS
    return folder


def copied(workplace: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(ENDS_BY_DATA)
    for path in workplace.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_ends_with_its_epochs_ends_alike_after_a_kill(
    schedule: str, drop_last: bool, workplace: Path, tmp_path: Path
) -> None:
    settings = [*SETTINGS, *SCHEDULES[schedule], f"data.drop_last={str(drop_last).lower()}"]
    uncut = copied(workplace, tmp_path / "uncut")
    life = lived(uncut, ROW, "config.toml", settings)
    assert life.code == 0, life.said
    expected, rates = digests(uncut / RUN), [each["lr"] for each in read_lines(uncut / RUN / "metrics.jsonl")]
    total = math.ceil(EPOCHS * (PROMPTS // BATCH * BATCH if drop_last else PROMPTS) / BATCH)
    factor = TrainerSettings(schedule="linear", warmup_steps=SHARE, total_steps=total).learning_rate_factor
    assert rates == pytest.approx([1e-3 * factor(step) for step in range(total)])

    place = copied(workplace, tmp_path / "killed")
    moment = random.Random(f"{schedule} {drop_last}").randint(life.items // 3, life.items * 4 // 5)
    life = lived(place, ROW, "config.toml", settings, moment)
    assert life.code == -signal.SIGKILL, life.said
    made = len(read_lines(place / RUN / "metrics.jsonl"))
    assert 0 < made < total, "the kill is in the middle"
    life = lived(place, ROW, str(RUN))
    assert life.code == 0, life.said
    assert digests(place / RUN) == expected
    assert [each["lr"] for each in read_lines(place / RUN / "metrics.jsonl")] == rates
    assert not trained_twice(place / RUN)
