"""The assets, made small: whole, loadable, cached, made once, and rebuilt when torn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from oppo.cli import main
from oppo.demo import language
from oppo.demo.assets import COMPLETE, AssetRecipe, Assets, cache_directory, made_once, make_assets
from tests.kit.forked import Program


@pytest.fixture(scope="module")
def told() -> list[tuple[str, float]]:
    return []


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def assets(cache: Path, told: list[tuple[str, float]]) -> Assets:
    return make_assets(cache, small=True, progress=lambda words, done: told.append((words, done)))


def test_progress_rises_to_one_in_words(assets: Assets, told: list[tuple[str, float]]) -> None:
    fractions = [done for _, done in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert all(words for words, _ in told)


def test_the_models_load_and_have_the_shapes_the_facts_say(assets: Assets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.directory / "actor")
    actor = AutoModelForCausalLM.from_pretrained(assets.directory / "actor")
    assert actor.num_parameters() == assets.facts.parameters["actor"]
    assert actor.config.eos_token_id == tokenizer.eos_token_id
    inputs = tokenizer("Review of the old hotel in Lima: The bed was lovely.", return_tensors="pt")
    for name in ("reward", "critic"):
        directory = assets.directory / name
        assert AutoTokenizer.from_pretrained(directory).get_vocab() == tokenizer.get_vocab()
        model = AutoModelForSequenceClassification.from_pretrained(directory)
        assert model.num_parameters() == assets.facts.parameters[name]
        with torch.no_grad():
            score = model(**inputs).logits
        assert score.shape == (1, 1)
        assert (score.item() == 0) == (name == "critic")


def test_the_policy_and_the_reward_model_have_learned(assets: Assets) -> None:
    assert assets.facts.pair_accuracy > 0.55
    assert assets.facts.capped < 0.5, "an untaught policy ends nothing"


def test_prompt_files_hold_disjoint_prompts(assets: Assets) -> None:
    training, held_out = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (assets.directory / "prompts.jsonl", assets.directory / "held_out.jsonl")
    )
    assert (len(training), len(held_out)) == (64, 64)
    for column in ("prompt", "adjective", "noun", "place"):
        assert not {row[column] for row in training} & {row[column] for row in held_out}
    assert {row["topic"] for row in training + held_out} <= {topic.name for topic in language.TOPICS}


def test_a_second_call_finds_the_first_one_s_work(assets: Assets, cache: Path) -> None:
    before = (assets.directory / "facts.json").stat().st_mtime_ns
    told: list[float] = []
    again = make_assets(cache, small=True, progress=lambda _, done: told.append(done))
    assert again == assets
    assert told == [1.0]
    assert (assets.directory / "facts.json").stat().st_mtime_ns == before
    assert [path.name for path in cache.iterdir()] == [assets.directory.name]


@pytest.mark.deep
def test_a_torn_directory_is_made_again_with_the_same_weights(assets: Assets, tmp_path: Path) -> None:
    torn = tmp_path / assets.directory.name
    torn.mkdir()
    (torn / "facts.json").write_text("{", encoding="utf-8")
    again = make_assets(tmp_path, small=True)
    assert (again.directory / COMPLETE).exists()
    for name in ("actor", "reward", "critic"):
        ours, theirs = (a.directory / name / "model.safetensors" for a in (again, assets))
        assert ours.read_bytes() == theirs.read_bytes()


def test_the_digest_names_the_recipe() -> None:
    recipes = (AssetRecipe(), AssetRecipe(), AssetRecipe(seed=1), AssetRecipe.small(0))
    assert len({recipe.digest() for recipe in recipes}) == 3


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPPO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "oppo" / "demo"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "oppo" / "demo"
    monkeypatch.setenv("OPPO_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own" / "demo"


def build(aside: Path) -> None:
    (aside / "made").touch()


def fail(aside: Path) -> None:
    build(aside)
    raise ZeroDivisionError


def test_what_a_killed_process_has_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, threading\nfrom pathlib import Path\nfrom oppo.demo.assets import made_once\n"
        "made_once(Path(sys.argv[1]), lambda aside: (print(aside, flush=True), threading.Event().wait()))"
    )
    with Program(code, [str(tmp_path / "one")]) as program:
        left = Path(program.stdout.readline().strip()).parent
        made_once(tmp_path / "other", build)
        assert left.is_dir(), "its process lives"
        program.kill()
    assert left.is_dir()
    made_once(tmp_path / "third", build)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "third"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        made_once(tmp_path / "one", fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--seed", str(2**63)], "--seed must be less than 2**63, not 9223372036854775808"),
        (["--seed", "one"], 'Invalid value for --seed: unable to convert "one"'),
        (["--directory", "file"], "file: Not a directory; choose another run.directory"),
        (["--directory", "/proc/1/fdinfo/runs"], "the run directory /proc/1/fdinfo/runs/demo-1 cannot be used"),
    ],
)
def test_what_the_demo_cannot_be_asked_for_is_refused_before_anything_is_made(
    options: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    assert main(["demo", "--short", *options]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
