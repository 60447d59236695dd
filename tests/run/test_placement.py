"""``[placement]``: each model on its device, several training ranks, and what is refused before anything is loaded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from oppo.cli import DONE, FAILED, UNUSABLE, main
from oppo.config.load import load
from oppo.config.settings import Settings
from oppo.errors import ConfigError
from oppo.hf.devices import DeviceThread
from oppo.hf.loading import ModelRecipe, positions_of
from oppo.hf.memory import Hardware
from oppo.hf.train.actor_critic import ActorCritic
from oppo.placement import Place, Process, Ranks, Thread
from oppo.run.checkpoint import fingerprints, require_same
from oppo.run.deployment import Deployment, places_of
from oppo.run.engines import require_engines
from oppo.run.memory import Expected, by_device, crowded, expected, load_of, with_micro_batches
from oppo.run.train import FINAL
from tests.hf import tiny
from tests.kit.workplace import killed_and_replaced, oppo, records, resume, start
from tests.placement.instances import gone

BOTH = 'placement.trainer=["cpu", "cpu"]'


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that there are three CUDA devices; nothing is moved to one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)


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
        needs = expected(Deployment.of(settings, assumed), load_of(settings, 6))
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
    deployment = Deployment.of(settings)
    devices = deployment.devices
    assert [str(each) for each in (devices.policy, *devices.trainer, devices.reference, devices.reward)] == [
        "cuda:0",
        "cuda:2",
        "cuda:1",
        "cuda:1",
    ]
    assert str(devices.critic) == "cpu"
    assert not settings.shares_weights
    places = places_of(deployment)
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
    places = places_of(Deployment.of(settings))
    try:
        assert isinstance(places.training, Ranks)
        assert len(places.training.pids) == 2
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
        (("run.deterministic=true", "placement.reward=cuda"), "placement.reward = 'cuda': only 'cpu' or 'auto'"),
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
    assert Deployment.of(settings).models.dtype == dtype


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
    assert Deployment.of(settings, assumed).models.lora_sync == sync


def test_adapters_alone_go_to_an_engine_of_several_gpus_also_from_one_of_these(folder: Path) -> None:
    def check(*chosen: str) -> None:
        two_workers = ("models.engine=vllm", "models.lora_rank=2", "vllm.tensor_parallel_size=2")
        settings = load(folder / "config.toml", [*two_workers, *chosen])
        require_engines(Deployment.of(settings, Hardware.assumed("2xH100-80GB")))

    check()
    with pytest.raises(ConfigError, match="weights go from one GPU to several only if none of these is its own"):
        check("models.lora_sync=merged")


def micro_batch(folder: Path, chosen: Sequence[str], assumed: Hardware) -> int | None:
    settings = load(folder / "config.toml", chosen)
    return with_micro_batches(Deployment.of(settings, assumed), load_of(settings, 64)).trainer.micro_batch_tokens


def test_a_micro_batch_has_as_many_tokens_as_the_memory_of_its_device_holds(folder: Path) -> None:
    roomy = Hardware.assumed("1xH100-80GB")
    assert micro_batch(folder, [], roomy) == 32768
    assert micro_batch(folder, ["trainer.micro_batch_tokens=512"], roomy) == 512
    assert micro_batch(folder, ["models.device=cpu"], roomy) == 2048
    settings = load(folder / "config.toml", ["trainer.micro_batch_tokens=4096"])
    needs = expected(Deployment.of(settings, roomy), load_of(settings, 64))
    least = sum(each.bytes.total for each in needs)
    once = sum(each.bytes.activations for each in needs if each.model == "trainer")
    sizes = [micro_batch(folder, [], replace(roomy, bytes=least + times * once)) for times in (0, 1, 3, 6, 7)]
    assert sizes == [4096, 8192, 16384, 16384, 32768]


def test_memory_is_counted_of_sequences_that_the_models_read(folder: Path) -> None:
    """Prompts have up to data.max_prompt_tokens, which with the response can be more than the models' positions."""
    roomy = Hardware.assumed("1xH100-80GB")
    settings = load(folder / "config.toml")
    longest = positions_of(ModelRecipe(path=settings.models.policy))
    deployment, most = Deployment.of(settings, roomy), load_of(settings, settings.data.max_prompt_tokens)
    assert most.sequence > longest
    assert with_micro_batches(deployment, most).trainer.micro_batch_tokens == 32768
    fits = load_of(settings, longest - settings.sampling.max_new_tokens)
    assert expected(deployment, most) == expected(deployment, fits)


def test_the_type_of_the_weights_is_bfloat16_on_gpus_that_are_assumed(folder: Path) -> None:
    settings, assumed = load(folder / "config.toml"), Hardware.assumed("2xH100-80GB")
    assert Deployment.of(settings, assumed).models.dtype == "bfloat16"


CLUSTER = "placement.cluster=auto"


def settings(folder: Path, *overrides: str) -> Settings:
    return load(folder / "config.toml", overrides)


@pytest.mark.parametrize(
    ("overrides", "remote"),
    [
        ((), {"reference", "reward", "critic"}),
        ((BOTH,), {"reference", "reward", "critic", "trainer"}),
        (('placement.remote=["reward"]',), {"reward"}),
        (('placement.remote=["reference"]',), {"reference"}),
        (("rewards.0.source=reward.py:short", "models.critic=actor"), {"reference", "critic"}),
        (("models.shared_trunk=true", "models.critic="), {"reference", "reward"}),
        (("step.algorithm=rloo", "step.batch=4"), {"reference", "reward"}),
        (('placement.remote=["policy"]',), {"policy"}),
        (('placement.remote=["policy", "critic"]',), {"policy", "critic"}),
    ],
)
def test_every_model_that_can_be_remote_is_unless_some_are_named(
    folder: Path, overrides: tuple[str, ...], remote: set[str]
) -> None:
    assert settings(folder, CLUSTER, *overrides).remote == remote
    assert not settings(folder, *overrides).remote


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (('placement.remote=["trainer"]',), "'trainer', and its first rank is here"),
        (('placement.remote=["reward"]', "rewards.0.source=reward.py:short", "models.critic=actor"), "names no model"),
        (('placement.remote=["critic"]', "models.shared_trunk=true", "models.critic="), "a head on the policy's trunk"),
        (('placement.remote=["critic"]', "step.algorithm=rloo"), "step.algorithm = 'rloo' has none"),
        (
            ('placement.remote=["reference"]', "algorithm.kl=0", "step.algorithm=rloo", "step.batch=4"),
            "refers to none, and models.reference names none",
        ),
        (("placement.reward=cuda:1",), "an actor has the GPU that Ray gives it"),
        (('placement.trainer=["cpu", "cuda"]',), "devices of several kinds"),
        (('placement.remote=["policy"]', "models.shared_trunk=true", "models.critic="), "a head on its trunk"),
        (('placement.remote=["policy"]', "run.policy=process"), "run.policy = 'process' serves it on this machine"),
        (
            ('placement.remote=["policy"]', "models.engine=vllm", 'vllm.urls=["http://one:8000"]'),
            "vllm.urls names the servers of it, which others start",
        ),
        (('placement.remote=["policy"]', "placement.policy=cuda:1"), "an actor has the GPU that Ray gives it"),
        (("placement.actor_cpus=0",), "placement.actor_cpus"),
        (
            ("step.algorithm=rloo", "step.batch=4", "algorithm.kl=0", "rewards.0.source=reward.py:short"),
            "no model of this run would be in it",
        ),
    ],
)
def test_what_cannot_be_remote_is_refused_by_name(folder: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        settings(folder, CLUSTER, *overrides)


def test_the_devices_of_other_machines_are_not_looked_for_here(folder: Path) -> None:
    here = settings(folder, CLUSTER, "placement.scorers=cuda", 'placement.trainer=["cpu", "cpu"]')
    devices = Deployment.of(here).devices
    assert {str(device) for device in devices.scoring(["reference", "reward", "critic"]).values()} == {"cuda"}
    assert [str(device) for device in devices.distinct()] == ["cpu"]
    with pytest.raises(ConfigError, match=r"placement\.policy: there is no 'cuda'"):
        Deployment.of(settings(folder, CLUSTER, "placement.policy=cuda"))


def test_a_reward_function_beside_a_model_of_another_machine_has_the_cpu(folder: Path) -> None:
    devices = Deployment.of(settings(folder, CLUSTER, "placement.scorers=cuda", "models.device=cpu")).devices
    assert {model: str(device) for model, device in devices.here(["reward"]).items()} == {"reward": "cpu"}


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        (('placement.trainer=["cuda", "cuda"]', "models.device=cuda"), False),
        (('placement.trainer=["cuda:0", "cuda:1"]', 'placement.remote=["policy", "critic"]'), False),
        ((BOTH, "models.device=cpu"), True),
    ],
)
def test_ranks_on_gpus_share_no_weights_with_what_serves(
    folder: Path, overrides: tuple[str, ...], shares: bool
) -> None:
    assert settings(folder, CLUSTER, *overrides).shares_weights is shares


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        ("one:6379", "other:6379", False),
        ("one:6379", "", True),
        ("", "one:6379", True),
    ],
)
def test_an_exact_run_goes_on_with_another_cluster_and_not_without(
    folder: Path, before: str, after: str, refused: bool
) -> None:
    begun = fingerprints(settings(folder, f"placement.cluster={before}", "run.deterministic=true"))
    with pytest.raises(ConfigError, match=r"placement\.cluster cannot change") if refused else nullcontext():
        require_same(
            begun, settings(folder, f"placement.cluster={after}", "placement.spread=true", "run.deterministic=true")
        )


def test_memory_of_other_machines_is_shown_and_not_counted_here(folder: Path) -> None:
    there = settings(folder, CLUSTER, BOTH, "models.device=cpu")
    needs = {each.model: each for each in expected(Deployment.of(there), None)}
    assert {name for name, each in needs.items() if each.remote} == {
        "reference",
        "reward",
        "critic",
        "trainer, rank 1",
    }
    assert needs["critic"].where == "cpu in the cluster"
    assert needs["trainer, whole weights"].bytes.weights == needs["critic"].bytes.weights, "the actor's are shared"
    (counted,) = by_device(needs.values()).values()
    assert [each.model for each in counted] == ["policy", "trainer, whole weights", "trainer, rank 0"]


def test_each_replica_of_a_remote_policy_is_an_actor_with_a_gpu(folder: Path) -> None:
    there = settings(
        folder,
        CLUSTER,
        'placement.remote=["policy"]',
        "placement.policy=cuda",
        "models.device=cpu",
        "placement.policy_replicas=3",
    )
    needs = expected(Deployment.of(there), None)
    assert [each.where for each in needs if each.remote] == ["cuda in the cluster"] * 3
    (fault,) = crowded(needs, Hardware.assumed("2x2xH100-80GB"))
    assert "3 models are actors with a GPU each (policy 0, policy 1, policy 2)" in fault


def test_a_remote_policy_decodes_there_and_is_trained_here(folder: Path) -> None:
    there = settings(folder, CLUSTER, 'placement.remote=["policy"]', "placement.policy=cuda", "models.device=cpu")
    assert there.shares_weights, "the critic, which is served here, is the one that is trained"
    deployment = Deployment.of(there)
    devices = deployment.devices
    assert (str(devices.policy), str(devices.actor), str(devices.proximal)) == ("cuda", "cpu", "cpu")
    assert [str(device) for device in devices.distinct()] == ["cpu"]
    needs = {each.model: each for each in expected(deployment, None)}
    assert {name for name, each in needs.items() if each.remote} == {"policy"}
    assert needs["policy"].where == "cuda in the cluster"
    assert needs["trainer"].bytes.weights == needs["policy"].bytes.weights, "the critic's are shared"


@pytest.mark.parametrize(
    ("overrides", "shared"), [((), True), (("step.lookahead=1",), False), (("models.share_weights=false",), False)]
)
def test_proximal_log_probs_are_of_the_weights_that_are_trained_if_those_may_be_read(
    folder: Path, overrides: tuple[str, ...], shared: bool
) -> None:
    corrected = ("algorithm.is_correction=truncated", "models.device=cpu")
    there = settings(folder, CLUSTER, 'placement.remote=["policy"]', *corrected, *overrides)
    needs = {each.model: each for each in expected(Deployment.of(there), None)}
    assert (needs["proximal"].bytes.weights == 0) is shared


def test_a_cluster_that_is_not_there_is_an_error_before_anything_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    assert main(["train", str(folder / "config.toml"), "--set", "run.name=lost", "--ray", "127.0.0.1:1"]) == UNUSABLE
    said = capsys.readouterr().err
    assert "there is no Ray cluster at '127.0.0.1:1'" in said
    assert "ray start --head" in said
    assert "loading the" not in said
    assert not (folder / "runs" / "lost").exists()
