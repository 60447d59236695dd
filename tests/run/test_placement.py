"""``[placement]``: each model on its device, several training ranks, and what is refused before anything is loaded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from oppo.cli import DONE, FAILED, UNUSABLE
from oppo.config.load import load
from oppo.errors import ConfigError
from oppo.hf.devices import DeviceThread
from oppo.hf.loading import ModelRecipe, positions_of
from oppo.hf.memory import Hardware
from oppo.hf.train.actor_critic import ActorCritic
from oppo.placement import Place, Process, Ranks, Thread
from oppo.run.memory import Expected, expected, load_of, with_micro_batches
from oppo.run.places import devices_of, layout_of, with_types
from oppo.run.train import FINAL
from tests.hf import tiny
from tests.placement.instances import gone
from tests.workplace import furnish, killed_and_replaced, oppo, records, resume, start

BOTH = 'placement.trainer=["cpu", "cpu"]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("placement"))


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that there are three CUDA devices; nothing is moved to one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    return {
        f"{model}/{key}": tensor
        for model in ("actor", "critic")
        for key, tensor in load_file(folder / "runs" / name / FINAL / model / "model.safetensors").items()
    }


def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.square(one[name] - other[name]).sum()) for name in one)))


@pytest.mark.parametrize("shard", ["true", pytest.param("false", marks=pytest.mark.deep)])
def test_two_ranks_learn_what_one_process_learns_and_either_goes_on_with_the_other_s_checkpoint(
    folder: Path, shard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, ranked = (f"{name}-{shard}" for name in ("alone", "ranked"))
    still = ("run.steps=2", "run.checkpoint_every=1", "step.overcommit=0", "sampling.temperature=0")
    assert oppo(folder, "", *still, f"run.name={alone}") == DONE
    assert oppo(folder, "", *still, f"run.name={ranked}", BOTH, f"placement.shard={shard}") == DONE
    assert "starting 2 training ranks" in capsys.readouterr().err
    begun = {
        f"{model}/{key}": tensor
        for model, path in (("actor", "actor"), ("critic", "reward"))
        for key, tensor in load_file(folder / path / "model.safetensors").items()
    }
    moved = apart(weights(folder, alone), begun)
    assert moved > 0
    assert apart(weights(folder, ranked), weights(folder, alone)) < 0.01 * moved
    assert resume(folder, alone, "run.steps=3", BOTH, f"placement.shard={shard}") == DONE
    assert resume(folder, ranked, "run.steps=3", "placement.trainer=[]") == DONE
    assert apart(weights(folder, ranked), weights(folder, alone)) < 0.01 * moved


def test_a_rank_that_is_killed_ends_the_run_and_the_others_and_it_can_be_resumed(folder: Path) -> None:
    overrides = ("run.name=killed", "run.steps=100000", "run.scorers=thread", "run.checkpoint_every=1", BOTH)
    with start(folder, *overrides) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        os.kill(ranks[-1], signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == FAILED, said
    assert "was killed by SIGKILL" in said
    assert "go on from there (oppo resume)" in said
    assert gone(ranks)
    made = len(records(folder, "killed", "metrics.jsonl"))
    assert resume(folder, "killed", f"run.steps={made + 1}") == DONE


def test_what_a_killed_run_left_goes_with_the_next(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("run.name=struck", "run.steps=100000", "run.checkpoint_every=1", BOTH)
    with start(folder, *overrides, before=f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}") as process:
        for _ in range(2):
            process.stdout.readline()
        ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.kill()
        process.wait()
    while not gone(ranks):  # until the time limit of a test
        time.sleep(0.05)
    assert [each.name.startswith("oppo-ranks-") for each in tmp_path.iterdir()] == [True]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    steps = len(records(folder, "struck", "metrics.jsonl")) + 1
    assert resume(folder, "struck", f"run.steps={steps}") == DONE
    assert list(tmp_path.iterdir()) == []


REPLICAS = ("placement.policy_replicas=2", "run.scorers=thread")


def test_two_replicas_of_a_policy_make_the_run_of_one(folder: Path) -> None:
    still = ("run.steps=3", "step.overcommit=0", "sampling.temperature=0", "run.checkpoint_every=2")
    assert oppo(folder, "", *still, "run.name=one") == DONE
    assert oppo(folder, "", *still, "run.name=two", *REPLICAS) == DONE
    begun = {f"actor/{key}": tensor for key, tensor in load_file(folder / "actor" / "model.safetensors").items()}
    moved = apart(begun, weights(folder, "one"))
    assert moved > 0
    assert apart(begun | weights(folder, "two"), begun | weights(folder, "one")) < 0.01 * moved
    assert resume(folder, "two", "run.steps=4", "placement.policy_replicas=1") == DONE


def test_a_replica_that_is_killed_is_replaced_while_the_run_goes_on(folder: Path) -> None:
    with start(folder, "run.name=replaced", "run.steps=100000", *REPLICAS) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        said = killed_and_replaced(process, children[0], folder, "replaced")
    assert "member 0 (HfPolicy) of the pool is lost" in said
    assert gone(children)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (("run.deterministic=true",), ["run.deterministic = true"]),
        (("run.policy=process",), ["run.policy = 'process'"]),
        (("models.shared_trunk=true", "models.critic="), ["models.shared_trunk = true"]),
        (("models.engine=vllm", "placement.share=sleep"), ["placement.policy_replicas or placement.remote, since"]),
        (("models.engine=vllm", 'vllm.urls=["http://one:8000"]'), ["vllm.urls", "one engine each"]),
        (("placement.policy_replicas=0",), ["placement.policy_replicas", "got 0"]),
    ],
)
def test_replicas_are_refused_where_they_cannot_be(folder: Path, overrides: tuple[str, ...], names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(folder / "config.toml", ["placement.policy_replicas=2", *overrides])
    assert all(name in str(refused.value) for name in ["placement.policy_replicas", *names]), refused.value


def test_memory_is_counted_of_each_replica_of_a_policy(folder: Path) -> None:
    assumed = Hardware.assumed("4xH100-80GB")

    def counted(*overrides: str) -> dict[str, Expected]:
        settings = load(folder / "config.toml", overrides)
        needs = expected(settings, devices_of(settings, assumed), load_of(settings, 6), assumed)
        return {each.model: each for each in needs}

    one, two = counted(), counted("placement.policy_replicas=2", "placement.policy=cuda:2")
    assert [str(two[name].device) for name in ("policy 0", "policy 1")] == ["cuda:2", "cuda:3"]
    assert two["policy 0"].bytes.weights == one["policy"].bytes.weights
    assert two["policy 0"].bytes.keys_values <= 0.6 * one["policy"].bytes.keys_values, "of half of the rollouts"
    assert two["trainer"].bytes.weights == one["policy"].bytes.weights, "the policy's, which none of them shares"


@pytest.mark.usefixtures("three_gpus")
def test_each_model_has_the_device_and_the_place_that_the_settings_name(folder: Path) -> None:
    settings = load(
        folder / "config.toml",
        ["models.device=cuda", "placement.scorers=cuda:1", "placement.critic=cpu", "placement.trainer=cuda:2"],
    )
    devices = devices_of(settings)
    assert [str(each) for each in (devices.policy, *devices.trainer, devices.reference, devices.reward)] == [
        "cuda:0",
        "cuda:2",
        "cuda:1",
        "cuda:1",
    ]
    assert str(devices.critic) == "cpu"
    assert not settings.shares_weights
    places = layout_of(settings, devices)
    try:
        assert places.scoring["reward"] is places.scoring["reference"]
        assert isinstance(places.scoring["reward"], DeviceThread)
        assert isinstance(places.scoring["critic"], Process | Thread)
        assert {place.name for place in places} == {"actor", "scorers on cuda:1", "scorers on cpu", "trainer", "saver"}
        assert len(list[Place](places)) == 5
    finally:
        places.close()


@pytest.mark.usefixtures("three_gpus")
def test_ranks_on_gpus_train_copies_whose_whole_weights_are_kept_on_the_cpu(folder: Path) -> None:
    settings = load(folder / "config.toml", ["models.device=cuda", 'placement.trainer=["cuda:1", "cuda:2"]'])
    assert not settings.shares_weights
    places = layout_of(settings, devices_of(settings))
    try:
        assert isinstance(places.training, Ranks)
        assert places.training.count == 2
    finally:
        places.close()


def test_a_copy_on_another_device_has_all_parameters_there_and_leaves_the_original_alone() -> None:
    actor, critic = tiny.causal(seed=1), tiny.scalar(seed=3)
    actor.get_input_embeddings().requires_grad_(requires_grad=False)
    models = ActorCritic(actor, critic)
    moved = models.copied(torch.device("meta"))
    assert {each.device.type for each in (*moved.parameters(), *moved.buffers())} == {"meta"}
    assert {each.device.type for each in (*models.parameters(), *models.buffers())} == {"cpu"}
    assert [each.requires_grad for each in moved.parameters()] == [each.requires_grad for each in models.parameters()]
    near = models.copied()
    frozen = [(ours, theirs) for ours, theirs in zip(models.parameters(), near.parameters(), strict=True)]
    assert all((ours is theirs) != ours.requires_grad for ours, theirs in frozen)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("placement.policy=gpu",), "placement.policy: expected 'auto', 'cpu', 'cuda' or one of several as 'cuda:1'"),
        (("placement.reward=cuda:7",), "placement.reward: there is no 'cuda:7' here"),
        (("placement.scorers=cuda:7",), "placement.scorers: there is no 'cuda:7' here"),
        (('placement.trainer=["cuda:7", "cuda:8"]',), "placement.trainer: there is no 'cuda:7' here"),
        (('placement.trainer=["cuda:7", "cuda:7"]',), "names a device twice"),
        (('placement.trainer=["cuda:7", "cpu"]',), "devices of several kinds"),
        (('placement.trainer=["cpu", "tpu"]',), "expected 'auto', 'cpu', 'cuda'"),
        ((BOTH, "run.trainer=process"), "run.trainer = 'process' is one process, and placement.trainer has 2 ranks"),
        (("models.share_weights=true", "placement.trainer=cuda:7"), "models.share_weights = true trains the weights"),
        (("models.shared_trunk=true", "placement.critic=cuda:7"), "set placement.critic = 'auto'"),
        (("step.algorithm=rloo", "placement.critic=cpu"), "has no critic and cannot use placement.critic = 'cpu'"),
        (("run.deterministic=true", "placement.reward=cuda"), "run.deterministic needs placement.reward = 'cpu'"),
        (("placement.actor=cpu",), "placement.actor"),
    ],
)
@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="names devices that are not there")
def test_what_cannot_be_placed_is_refused_by_name(
    folder: Path, overrides: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "", "run.name=refused", *overrides) == UNUSABLE
    said = capsys.readouterr().err
    assert message in said
    assert "loading" not in said
    assert not (folder / "runs" / "refused").exists()


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("chosen", "capable", "dtype"),
    [
        ("models.device=cuda", True, "bfloat16"),
        ("models.device=cuda", False, "float32"),
        ("models.dtype=float32", True, "float32"),
        ("models.device=cpu", True, "float32"),
    ],
)
def test_the_type_of_the_weights_is_by_the_device_unless_it_is_chosen(
    folder: Path, chosen: str, capable: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capable)
    settings = load(folder / "config.toml", [chosen])
    assert with_types(settings, devices_of(settings)).models.dtype == dtype


@pytest.mark.parametrize(
    ("chosen", "sync"),
    [
        ((), "adapter"),
        (("models.lora_sync=merged",), "merged"),
        (("models.dtype=float32",), "merged"),
        (("models.quantization=nf4",), "merged"),
        (("models.engine=transformers",), "merged"),
        (('placement.remote=["policy"]', "placement.cluster=auto"), "adapter"),
        (('placement.remote=["policy"]', "placement.cluster=auto", "models.engine=transformers"), "merged"),
    ],
)
def test_adapters_are_sent_alone_over_16_bits_where_that_can_be(
    folder: Path, chosen: tuple[str, ...], sync: str
) -> None:
    assumed = Hardware.assumed("1xH100-80GB")
    settings = load(folder / "config.toml", ["models.engine=vllm", "models.lora_rank=2", *chosen])
    assert with_types(settings, devices_of(settings, assumed), assumed).models.lora_sync == sync


def micro_batch(folder: Path, chosen: Sequence[str], assumed: Hardware) -> int | None:
    settings = load(folder / "config.toml", chosen)
    devices = devices_of(settings, assumed)
    return with_micro_batches(settings, devices, load_of(settings, 64), assumed).trainer.micro_batch_tokens


def test_a_micro_batch_has_as_many_tokens_as_the_memory_of_its_device_holds(folder: Path) -> None:
    roomy = Hardware.assumed("1xH100-80GB")
    assert micro_batch(folder, [], roomy) == 32768
    assert micro_batch(folder, ["trainer.micro_batch_tokens=512"], roomy) == 512
    assert micro_batch(folder, ["models.device=cpu"], roomy) == 2048
    settings = load(folder / "config.toml", ["trainer.micro_batch_tokens=4096"])
    needs = expected(settings, devices_of(settings, roomy), load_of(settings, 64), roomy)
    least = sum(each.bytes.total for each in needs)
    once = sum(each.bytes.activations for each in needs if each.model == "trainer")
    sizes = [micro_batch(folder, [], replace(roomy, bytes=least + times * once)) for times in (0, 1, 3, 6, 7)]
    assert sizes == [4096, 8192, 16384, 16384, 32768]


def test_memory_is_counted_of_sequences_that_the_models_read(folder: Path) -> None:
    """Prompts have up to data.max_prompt_tokens, which with the response can be more than the models' positions."""
    roomy = Hardware.assumed("1xH100-80GB")
    settings = load(folder / "config.toml")
    longest = positions_of(ModelRecipe(path=settings.models.policy))
    devices, most = devices_of(settings, roomy), load_of(settings, settings.data.max_prompt_tokens)
    assert most.sequence > longest
    assert with_micro_batches(settings, devices, most, roomy).trainer.micro_batch_tokens == 32768
    fits = load_of(settings, longest - settings.sampling.max_new_tokens)
    assert expected(settings, devices, most, roomy) == expected(settings, devices, fits, roomy)


def test_the_type_of_the_weights_is_bfloat16_on_gpus_that_are_assumed(folder: Path) -> None:
    settings, assumed = load(folder / "config.toml"), Hardware.assumed("2xH100-80GB")
    assert with_types(settings, devices_of(settings, assumed), assumed).models.dtype == "bfloat16"
