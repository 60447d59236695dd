"""What converted settings count, beside what their trainers do: ``tests/golden/make_counts`` ran those."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from oppo.config.convert import convert
from oppo.config.convert_files import Kind
from oppo.config.load import load_settings, resolve
from oppo.config.settings import Settings
from oppo.run.checkpoint import Provenance
from oppo.run.prompts import supplied
from tests.kit.workplace import rewritten, tokenizer

GOLDEN: Final = json.loads((Path(__file__).parents[1] / "golden" / "counts.json").read_text(encoding="utf-8"))
HERE: Final = ["models.policy=a", "data.prompts=prompts.jsonl", "rewards.0.source=length", "data.column=prompt"]


def converted(kind: Kind, given: Mapping[str, Any], folder: Path) -> tuple[Settings, set[str]]:
    """Return the settings of a configuration, and the names of what was not carried over."""
    if kind in {"verl", "openrlhf"}:
        flags = [f"{name}={value}" if kind == "verl" else f"--{name} {value}" for name, value in given.items()]
        module = "verl.trainer.main_ppo" if kind == "verl" else "openrlhf.cli.train_ppo_ray"
        (folder / "run.sh").write_text(f"python3 -m {module} \\\n  " + " \\\n  ".join(flags) + "\n")
        found = convert(folder / "run.sh", kind=kind, overrides=HERE)
    else:
        file = rewritten(folder / "run.yaml", yaml.safe_dump({**given, "num_processes": 1}))
        found = convert(file, kind=kind, overrides=HERE)
    return resolve(found.document, folder), {each.partition(" = ")[0] for each in chain(*found.lost.values())}


def counted(settings: Settings, prompts: int, folder: Path) -> list[int]:
    """Return the responses of each step of the run over a file of so many prompts."""
    rows = "".join(json.dumps({"prompt": f"w{i % 50}"}) + "\n" for i in range(prompts))
    rewritten(folder / "prompts.jsonl", rows)
    supply = supplied(settings, tokenizer(), Provenance.of(settings))
    left = len(supply.stream) if settings.data.epochs else supply.steps * settings.step.batch  # type: ignore[arg-type]
    batches = [min(settings.step.batch, left - done) for done in range(0, left, settings.step.batch)]
    assert supply.steps <= len(batches)
    return [size * settings.algorithm.responses for size in batches[: supply.steps]]


def steps_of(settings: Settings, steps: int) -> list[int]:
    """Return how often the optimizer of the actor steps in each step of the run."""
    trainer = settings.trainer
    return [0 if step < trainer.critic_warmup else trainer.epochs * trainer.minibatches for step in range(steps)]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "sdpo"])
def test_a_run_of_groups_counts_what_trl_does(kind: Kind, tmp_path: Path) -> None:
    exact = 0
    for case in GOLDEN[kind]["cases"]:
        settings, lost = converted(kind, case["given"], tmp_path)
        if "steps_per_generation" in lost:
            continue  # named: an update ends within a batch, or an epoch within an update
        made = counted(settings, case["prompts"], tmp_path)
        assert set(made) == {
            case["responses"] * max(1, settings.step.batch * settings.algorithm.responses // case["responses"])
        }
        assert sum(made) == case["rounds"] * case["responses"], case
        steps = sum(steps_of(settings, len(made)))
        assert steps == case["optimizer_steps"] or ("max_steps" in lost and steps > case["optimizer_steps"]), case
        exact += "max_steps" not in lost
    assert exact >= 25


@pytest.mark.gym
@pytest.mark.parametrize("kind", ["grpo", "rloo", "sdpo"])
def test_trl_still_counts_what_was_recorded(kind: str) -> None:
    from tests.golden.make_counts import counted as run

    made = run(kind, wanted=6)
    assert (made["version"], made["cases"]) == (GOLDEN[kind]["version"], GOLDEN[kind]["cases"][:6])


def test_a_run_of_ppo_counts_what_trl_does(tmp_path: Path) -> None:
    exact = 0
    for case in GOLDEN["ppo"]["cases"]:
        settings, lost = converted("ppo", case["given"], tmp_path)
        made, batch = counted(settings, case["prompts"], tmp_path), case["responses"]
        assert len(made) == case["rounds"]
        assert set(made[:-1]) <= {batch}
        assert made[-1] == batch or "total_episodes" not in case["given"], "the last step of an epoch may be smaller"
        passes = case["given"]["gradient_accumulation_steps"], case["given"]["num_mini_batches"]
        if max(passes) % min(passes):
            assert "num_mini_batches" in lost
            continue
        # accelerate's accumulation ends early with the dataset, in whose last batch TRL steps after each pass
        inner = [n for n in range(len(made)) if (n + 1) % (case["prompts"] // batch)]
        ours = steps_of(settings, len(made))
        assert [ours[n] for n in inner] == [case["optimizer_steps"][n] for n in inner], case
        exact += 1
    assert exact >= 30


def test_a_run_of_verl_counts_what_verl_does(tmp_path: Path) -> None:
    for case in GOLDEN["verl"]["cases"]:
        settings, _ = converted("verl", case["given"], tmp_path)
        made = counted(settings, case["prompts"], tmp_path)
        assert made == [case["responses"]] * case["rounds"], case
        assert steps_of(settings, len(made)) == case["optimizer_steps"], case


def test_a_run_of_openrlhf_counts_what_openrlhf_does(tmp_path: Path) -> None:
    exact = 0
    for case in GOLDEN["openrlhf"]["cases"]:
        settings, lost = converted("openrlhf", case["given"], tmp_path)
        prompts = min(case["prompts"], case["given"].get("data.max_samples", case["prompts"]))
        made, theirs = counted(settings, prompts, tmp_path), case["responses"]
        whole = settings.step.batch * settings.algorithm.responses
        assert ("train.num_episodes" in lost) == (case["given"]["train.num_episodes"] > 1)
        assert ("data.max_samples" in lost) == ("data.max_samples" in case["given"])
        assert sum(made) == sum(theirs), case
        if prompts % settings.step.batch == 0 or "train.num_episodes" not in lost:
            assert made == theirs, case
            inner = [n for n, size in enumerate(theirs) if size == whole]
            ours = steps_of(settings, len(made))
            assert [ours[n] for n in inner] == [case["optimizer_steps"][n] for n in inner], case
            exact += 1
    assert exact >= 15


@pytest.mark.parametrize("kind", GOLDEN)
def test_what_is_printed_is_read_and_printed_again_the_same(kind: Kind, tmp_path: Path) -> None:
    for case in GOLDEN[kind]["cases"][:8]:
        name = max(case["given"])
        known, misspelt = case["given"], f"{name}x"
        _, plain = converted(kind, known, tmp_path)
        found = convert(next(tmp_path.glob("run.*")), kind=kind, overrides=HERE)
        (tmp_path / "config.toml").write_text(found.text)
        first = load_settings(tmp_path / "config.toml").toml()
        (tmp_path / "again.toml").write_text(first)
        assert load_settings(tmp_path / "again.toml").toml() == first
        _, lost = converted(kind, {**known, misspelt: 1}, tmp_path)
        assert misspelt in lost - plain, "a key that is misspelt is named"
