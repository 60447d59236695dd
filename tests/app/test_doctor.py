"""``oppo doctor``: what each model of a run will need, what does not fit, and one longest step as a trial."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oppo.app.config import load
from oppo.app.expected import Expected, crowded, expected, load_of
from oppo.app.layout import devices_of
from oppo.cli import DONE, UNUSABLE, main
from oppo.hf.device import CPU
from oppo.hf.memory.estimate import Bytes
from tests.workplace import furnish, oppo

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("doctor"))


def needs(folder: Path, *overrides: str, at_rest: bool = False) -> dict[str, Bytes]:
    settings = load(folder / "config.toml", overrides)
    found = expected(settings, devices_of(settings), None if at_rest else load_of(settings, 6))
    return {each.model: each.bytes for each in found}


def doctor(folder: Path, *arguments: str) -> int:
    return main(["doctor", str(folder / "config.toml"), *arguments])


def test_every_model_is_shown_with_its_device_and_what_it_needs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(folder, "--set", "step.extra=3") == DONE
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    assert "for 7 rollouts in flight" in said
    rows = {line.split()[0]: line.split()[1] for line in said.splitlines() if line}
    assert {name: rows[name] for name in ("policy", "reference", "reward", "critic", "trainer")} == dict.fromkeys(
        ("policy", "reference", "reward", "critic", "trainer"), "cpu"
    )
    assert "most of it activations of the trainer" in said
    assert not (folder / "runs").exists()


def test_weights_that_models_share_are_counted_once(folder: Path) -> None:
    plain, apart = needs(folder), needs(folder, "models.share_weights=false")
    assert plain["trainer"].weights == 0
    assert apart["trainer"].weights == plain["policy"].weights + plain["critic"].weights
    adapters = needs(folder, "models.lora_rank=2")
    assert (adapters["reference"].weights, plain["reference"].weights) == (0, plain["policy"].weights)
    assert adapters["trainer"].optimizer < plain["trainer"].optimizer
    trunk = needs(folder, "models.shared_trunk=true", "models.critic=")
    assert trunk["critic"].weights == 0
    assert trunk["trainer"].gradients < plain["trainer"].gradients
    assert needs(folder, "algorithm.is_correction=truncated")["proximal"].weights == 0
    assert "critic" not in needs(folder, "step.algorithm=rloo", "step.batch=4")


def test_each_rank_has_its_share_of_what_is_sharded(folder: Path) -> None:
    alone, both = needs(folder), 'placement.trainer=["cpu", "cpu"]'
    sharded, whole = needs(folder, both), needs(folder, both, "placement.shard=false")
    for rank in ("trainer, rank 0", "trainer, rank 1"):
        assert sharded[rank].optimizer == alone["trainer"].optimizer // 2
        assert sharded[rank].activations == alone["trainer"].activations
        assert whole[rank].optimizer == alone["trainer"].optimizer
    assert (whole["trainer, rank 0"].weights, whole["trainer, rank 1"].weights > 0) == (0, True)


def test_what_is_certain_is_less_than_what_is_expected(folder: Path) -> None:
    certain, worst = needs(folder, at_rest=True), needs(folder)
    assert certain.keys() == worst.keys()
    for name, each in certain.items():
        assert (each.weights, each.optimizer, each.gradients) == pytest.approx(
            (worst[name].weights, worst[name].optimizer, worst[name].gradients), rel=0.01
        )
        assert each.total < worst[name].total


def test_a_device_that_is_too_small_is_named_with_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.app.expected.free", lambda device: 5 * MIB if device.type == "cpu" else 9 * MIB)
    gpu = torch.device("cuda", 0)
    three = [Expected(name, device, Bytes(3 * MIB)) for name, device in (("a", CPU), ("b", CPU), ("c", gpu))]
    assert crowded(three) == ["cpu has 5.2 MB free, and its models need 6.3 MB (a 3.1 MB, b 3.1 MB)"]
    assert not crowded(three[1:])


def test_models_that_do_not_fit_are_refused_before_they_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oppo.app.expected.free", lambda device: 500_000)
    assert oppo(folder, "", "run.name=crowded") == UNUSABLE
    said = capsys.readouterr().err
    assert "cpu has 500.0 kB free, and its models need" in said
    assert "policy" in said
    assert "models.lora_rank = 16 would fit" in said or "models.dtype = 'bfloat16'" in said
    assert "[placement]" in said
    assert "loading" not in said
    assert doctor(folder) == UNUSABLE
    assert "too little memory: cpu has 500.0 kB free" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [(), ('placement.trainer=["cpu", "cpu"]', "step.lookahead=1")])
def test_a_trial_makes_one_longest_step_and_saves_nothing(
    folder: Path, extra: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [part for each in ("sampling.stop=[3]", *extra) for part in ("--set", each)]
    assert doctor(folder, *overrides, "--trial") == DONE
    said = capsys.readouterr()
    assert "making one step as long as the settings allow" in said.err
    assert "the longest step took" in said.out
    assert "of it with the models loaded" in said.out
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("models.policy=nowhere", "models.policy"),
        ("models.reward=actor", "models.reward"),
        ("data.prompts=none.jsonl", "there is no prompt file"),
        ("placement.reward=cuda:9", "placement.reward: there is no 'cuda:9' here"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    folder: Path, override: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = doctor(folder, "--set", override)
    said = capsys.readouterr()
    if override == "models.reward=actor":  # whether there is a head is known when weights are read
        assert code == DONE
        assert doctor(folder, "--set", override, "--trial") == UNUSABLE
        said = capsys.readouterr()
    else:
        assert code == UNUSABLE
    assert sentence in said.err
    assert "Traceback" not in said.err
