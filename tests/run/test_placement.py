"""``[placement]`` and ``oppo doctor``: each model on its device, what it needs there, and what is refused early."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.filesize import decimal
from safetensors.numpy import load_file
from transformers import LlamaConfig

from oppo.cli import DONE, FAILED, UNUSABLE, main
from oppo.config.load import load_settings
from oppo.config.settings import Settings
from oppo.errors import ConfigError
from oppo.hf.devices import CPU, Devices, DeviceThread
from oppo.hf.loading import ModelRecipe, positions_of
from oppo.hf.memory import Bytes
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.packing import most_gpu_tokens
from oppo.placement import Place, Process, Ranks, Thread
from oppo.run.checkpoint import fingerprints, require_same
from oppo.run.deployment import Deployment, places_of
from oppo.run.engines import require_engines
from oppo.run.memory import (
    ALONE,
    BESIDE,
    Expected,
    Known,
    by_device,
    crowded,
    engine_share,
    expected,
    planned,
    with_micro_batches,
)
from oppo.run.memory_fit import advice
from oppo.run.train import FINAL
from oppo.simulate.profile import Hardware
from oppo.vllm.arguments import placed, route_of
from tests.hf import tiny
from tests.kit.workplace import killed_and_replaced, oppo, records, resume, start, tokenizer
from tests.placement.instances import gone

BOTH = 'placement.trainer=["cpu", "cpu"]'


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that there are three CUDA devices; nothing is moved to one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)


def learned(folder: Path, *files: str) -> np.ndarray:
    tensors = [load_file(folder / file / "model.safetensors") for file in files]
    return np.concatenate([each[key].ravel() for each in tensors for key in sorted(each)])


def final(folder: Path, name: str, *models: str) -> np.ndarray:
    return learned(folder / "runs" / name / FINAL, *models)


@pytest.mark.parametrize("shard", ["true", pytest.param("false", marks=pytest.mark.deep)])
def test_two_ranks_learn_what_one_process_learns_and_either_goes_on_with_the_other_s_checkpoint(
    folder: Path, shard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, ranked = (f"{name}-{shard}" for name in ("alone", "ranked"))
    still = ("run.steps=1", "run.checkpoint_every=1", "step.overcommit=0", "sampling.temperature=0")
    assert oppo(folder, "", *still, f"run.name={alone}") == DONE
    assert oppo(folder, "", *still, f"run.name={ranked}", BOTH, f"placement.shard={shard}") == DONE
    assert "starting 2 training ranks" in capsys.readouterr().err
    assert resume(folder, alone, "run.steps=2", BOTH, f"placement.shard={shard}") == DONE
    assert resume(folder, ranked, "run.steps=2", "placement.trainer=[]") == DONE
    one, other = (final(folder, name, "actor", "critic") for name in (alone, ranked))
    moved = np.linalg.norm(one - learned(folder, "actor", "reward"))
    assert 0 <= np.linalg.norm(other - one) < 0.01 * moved


def test_a_rank_that_is_killed_ends_the_run_and_the_others_and_it_can_be_resumed(folder: Path) -> None:
    overrides = ("run.name=killed", "run.steps=100000", "run.scorers=thread", "run.checkpoint_every=1", BOTH)
    with start(folder, *overrides) as process:
        ranks = process.children()
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
        ranks = process.children()
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
    still = ("run.steps=2", "step.overcommit=0", "sampling.temperature=0", "run.checkpoint_every=2")
    assert oppo(folder, "", *still, "run.name=one") == DONE
    assert oppo(folder, "", *still, "run.name=two", *REPLICAS) == DONE
    one, two = (final(folder, name, "actor") for name in ("one", "two"))
    assert 0 <= np.linalg.norm(two - one) < 0.01 * np.linalg.norm(one - learned(folder, "actor"))
    assert resume(folder, "two", "run.steps=3", "placement.policy_replicas=1") == DONE


def test_a_replica_that_is_killed_is_replaced_while_the_run_goes_on(folder: Path) -> None:
    with start(folder, "run.name=replaced", "run.steps=100000", *REPLICAS) as process:
        replicas = process.children()
        said = killed_and_replaced(process, replicas[0], folder, "replaced")
    assert "member 0 (HfPolicy) of the pool is lost" in said
    assert gone(replicas)


def test_memory_is_counted_of_each_replica_of_a_policy(folder: Path) -> None:
    assumed = Hardware.assumed("4xH100-80GB")

    def counted(*overrides: str) -> dict[str, Expected]:
        settings = load_settings(folder / "config.toml", overrides)
        deployment = Deployment.of(settings, assumed)
        needs = expected(deployment, deployment.load(6))
        return {each.model: each for each in needs}

    one, two = counted(), counted("placement.policy_replicas=2", "placement.policy=cuda:2")
    assert [str(two[name].device) for name in ("policy 0", "policy 1")] == ["cuda:2", "cuda:3"]
    assert two["policy 0"].bytes.weights == one["policy"].bytes.weights
    assert two["policy 0"].bytes.keys_values <= 0.6 * one["policy"].bytes.keys_values, "of half of the rollouts"
    assert two["trainer"].bytes.weights == one["policy"].bytes.weights, "the policy's, which none of them shares"


@pytest.mark.usefixtures("three_gpus")
def test_each_model_has_the_device_and_the_place_that_the_settings_name(folder: Path) -> None:
    settings = load_settings(
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
    settings = load_settings(folder / "config.toml", ["models.device=cuda", 'placement.trainer=["cuda:1", "cuda:2"]'])
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


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("chosen", "capable", "dtype"),
    [
        ("models.device=cuda", True, "bfloat16"),
        ("models.device=cuda", False, "float32"),
        ("models.dtype=float32", True, "float32"),
    ],
)
def test_the_type_of_the_weights_is_by_the_device_unless_it_is_chosen(
    folder: Path, chosen: str, capable: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capable)
    settings = load_settings(folder / "config.toml", [chosen])
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
    settings = load_settings(folder / "config.toml", ["models.engine=vllm", "models.lora_rank=2", *chosen])
    assert Deployment.of(settings, assumed).models.lora_sync == sync


def test_adapters_alone_go_to_an_engine_of_several_gpus_also_from_one_of_these(folder: Path) -> None:
    def check(*chosen: str) -> None:
        two_workers = ("models.engine=vllm", "models.lora_rank=2", "vllm.tensor_parallel_size=2")
        settings = load_settings(folder / "config.toml", [*two_workers, *chosen])
        require_engines(Deployment.of(settings, Hardware.assumed("2xH100-80GB")))

    check()
    with pytest.raises(ConfigError, match="weights go from one GPU to several only if none of these is its own"):
        check("models.lora_sync=merged")


def test_a_deployment_has_one_list_of_the_models_of_a_run(folder: Path) -> None:
    chosen = (
        *("models.device=cpu", "models.lora_rank=2", "models.quantization=nf4", "algorithm.ratio_base=proximal"),
        *('models.teacher={a="actor", b="reward"}', "models.teacher_column=goal", "algorithm.distill=0.5"),
        'rewards=[{name="short", source="reward.py:short"}, {name="taste", source="reward"}]',
        *("algorithm.is_correction=truncated", "placement.scorers=cuda:1", "placement.reward=cuda:2"),
        *('scorers."teacher.b".engine=vllm', "run.scorers=process"),
    )
    assumed = Hardware.assumed("4xH100-80GB")
    deployment = Deployment.of(load_settings(folder / "config.toml", chosen), assumed)
    roles = deployment.roles
    here, one, two = torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 2)
    assert {name: (role.key, Path(role.source).name, role.device) for name, role in roles.items()} == {
        "policy": ("models.policy", "actor", here),
        "reference": ("models.reference", "actor", one),
        "reward.taste": ("rewards.1", "reward", two),
        "critic": ("models.critic", "reward", one),
        "teacher.a": ("models.teacher.a", "actor", one),
        "teacher.b": ("models.teacher.b", "reward", one),
        "proximal": ("models.policy", "actor", here),
    }
    assert {name for name, role in roles.items() if role.apart} == roles.keys() - {"policy", "proximal"}
    assert {name for name, role in roles.items() if role.quantization != "none"} == {"policy", "reference"}
    assert [(role.name, role.engine_key) for role, _ in deployment.on_vllm("reward", "teacher")] == [
        ("teacher.b", "scorers.teacher.b")
    ]
    assert deployment.scored == ["reference", "reward", "critic", "teacher", "proximal"]


def micro_batch(folder: Path, chosen: Sequence[str], assumed: Hardware) -> int | None:
    settings = load_settings(folder / "config.toml", chosen)
    return with_micro_batches(
        deployment := Deployment.of(settings, assumed), deployment.load(64)
    ).trainer.micro_batch_tokens


def test_a_micro_batch_has_as_many_tokens_as_the_memory_of_its_device_holds(folder: Path) -> None:
    roomy = Hardware.assumed("1xH100-80GB")
    assert micro_batch(folder, [], roomy) == 131072
    assert micro_batch(folder, ["trainer.micro_batch_tokens=512"], roomy) == 512
    assert micro_batch(folder, ["models.device=cpu"], roomy) == 2048
    known: Known = {}

    def in_memory(size: int, *chosen: str) -> tuple[int, list[Expected]]:
        settings = load_settings(folder / "config.toml", ["step.batch=4096", *chosen])
        deployment = Deployment.of(settings, replace(roomy, bytes=size))
        return planned(deployment, deployment.load(64), known)

    for tokens in (4096 << times for times in range(1, 6)):
        _, needs = in_memory(roomy.bytes, f"trainer.micro_batch_tokens={tokens}")
        trained = sum(each.bytes.activations for each in needs if each.model == "trainer")
        enough = sum(each.bytes.total for each in needs) + int((BESIDE - 1) * trained)
        assert in_memory(enough) == (tokens, needs)
        assert in_memory(enough - trained // 100)[0] == tokens // 2


def test_micro_batches_take_no_room_of_an_engine_which_is_given_what_was_counted(folder: Path) -> None:
    known, settings = Known(), load_settings(folder / "config.toml", ["models.engine=vllm", "step.batch=4096"])

    def in_memory(size: int, tokens: int | None = None) -> tuple[int, list[Expected]]:
        deployment = Deployment.of(settings, replace(Hardware.assumed("1xH100-80GB"), bytes=size))
        if tokens:
            deployment = replace(deployment, trainer=replace(deployment.trainer, micro_batch_tokens=tokens))
        return planned(deployment, deployment.load(64), known)

    for size in (3 << 30, 6 << 30, 12 << 30, 80 << 30):
        tokens, needs = in_memory(size)
        policy, before = (
            next(need for need in found if need.model == "policy") for found in (needs, in_memory(size, 4096)[1])
        )
        others = sum(need.bytes.total for need in needs if need.model != "policy")
        assert policy.share is not None
        refused = crowded(needs, replace(Hardware.assumed("1xH100-80GB"), bytes=size))
        assert bool(refused) is (policy.share * size < policy.bytes.total - 1), "it is given as much as was counted"
        assert tokens == 4096 or before.bytes.total + others <= size


@pytest.mark.parametrize(("billions", "tokens"), [(0.1, 131072), (0.5, 65536), (1.5, 32768), (70, 32768)])
def test_a_small_model_s_micro_batches_may_be_larger(billions: float, tokens: int) -> None:
    assert most_gpu_tokens(int(billions * 1e9)) == tokens


def test_memory_is_counted_of_sequences_that_the_models_read(folder: Path) -> None:
    """Prompts have up to data.max_prompt_tokens, which with the response can be more than the models' positions."""
    roomy = Hardware.assumed("1xH100-80GB")
    settings = load_settings(folder / "config.toml")
    longest = positions_of(ModelRecipe(path=settings.models.policy))
    deployment = Deployment.of(settings, roomy)
    most = deployment.load(settings.data.max_prompt_tokens)
    assert most.sequence > longest
    assert with_micro_batches(deployment, most).trainer.micro_batch_tokens == 131072
    fits = deployment.load(longest - settings.sampling.max_new_tokens)
    assert expected(deployment, most) == expected(deployment, fits)


CLUSTER = "placement.cluster=auto"


def settings(folder: Path, *overrides: str) -> Settings:
    return load_settings(folder / "config.toml", overrides)


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
    ("before", "after", "refused"), [("one:6379", "other:6379", False), ("one:6379", "", True), ("", "one:6379", True)]
)
def test_an_exact_run_goes_on_with_another_cluster_and_not_without(
    folder: Path, before: str, after: str, refused: bool
) -> None:
    begun = fingerprints(settings(folder, f"placement.cluster={before}", "run.deterministic=true"))
    with pytest.raises(ConfigError, match=r"placement\.cluster cannot change") if refused else nullcontext():
        require_same(
            begun, settings(folder, f"placement.cluster={after}", "placement.spread=true", "run.deterministic=true")
        )


def test_an_exact_run_does_not_go_on_with_another_engine_of_a_reward(folder: Path) -> None:
    for deterministic, refused in (("true", True), ("false", False)):
        chosen = settings(folder, f"run.deterministic={deterministic}")
        with pytest.raises(ConfigError, match=r"rewards\.0\.engine cannot change") if refused else nullcontext():
            require_same(fingerprints(chosen) | {"rewards.0.engine": "another"}, chosen)


def test_memory_of_other_machines_is_shown_and_not_counted_here(folder: Path) -> None:
    there = settings(folder, CLUSTER, BOTH, "models.device=cpu")
    needs = {each.model: each for each in expected(Deployment.of(there), None)}
    assert {name for name, each in needs.items() if each.remote} == {"reference", "reward", "critic", "trainer, rank 1"}
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


MIB = 1 << 20


@cache  # what is done under load takes a second
def needs(folder: Path, *overrides: str, at_rest: bool = False) -> dict[str, Bytes]:
    settings = load_settings(folder / "config.toml", overrides)
    deployment = Deployment.of(settings)
    found = expected(deployment, None if at_rest else deployment.load(6))
    return {each.model: each.bytes for each in found}


def resting(folder: Path, *overrides: str) -> dict[str, Bytes]:
    return needs(folder, *overrides, at_rest=True)


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor count what is certain: what models do under load takes it a second each time."""

    def rested(count: Callable[..., object]) -> Callable[..., object]:
        return lambda deployment, load, known: count(deployment, None, known)

    monkeypatch.setattr("oppo.run.doctor.expected", rested(expected))
    monkeypatch.setattr("oppo.run.doctor.advice", rested(advice))


def chosen(*overrides: str) -> list[str]:
    return [part for each in overrides for part in ("--set", each)]


def doctor(folder: Path, *arguments: str) -> int:
    return main(["doctor", str(folder / "config.toml"), *arguments])


def test_every_model_is_shown_with_its_device_and_what_it_needs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [*folder.glob("runs/*")]
    assert doctor(folder, "--set", "step.overcommit=3") == DONE
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    assert "for 7 rollouts in flight" in said
    rows = {line.split()[0]: line.split()[1] for line in said.splitlines() if line}
    assert {name: rows[name] for name in ("policy", "reference", "reward", "critic", "trainer")} == dict.fromkeys(
        ("policy", "reference", "reward", "critic", "trainer"), "cpu"
    )
    assert "the largest part is activations of the policy" in said, "its table of quantiles, 4 MiB"
    assert [*folder.glob("runs/*")] == before


@pytest.mark.adapters
def test_weights_that_models_share_are_counted_once(folder: Path) -> None:
    plain, apart = resting(folder), resting(folder, "models.share_weights=false")
    assert plain["trainer"].weights == 0
    assert apart["trainer"].weights == plain["policy"].weights + plain["critic"].weights
    adapters = resting(folder, "models.lora_rank=2")
    assert (adapters["reference"].weights, plain["reference"].weights) == (0, plain["policy"].weights)
    assert adapters["trainer"].optimizer < plain["trainer"].optimizer
    trunk = resting(folder, "models.shared_trunk=true", "models.critic=")
    assert trunk["critic"].weights == 0
    assert trunk["trainer"].gradients < plain["trainer"].gradients
    assert resting(folder, "algorithm.is_correction=truncated")["proximal"].weights == 0
    assert "critic" not in resting(folder, "step.algorithm=rloo", "step.batch=4")


def test_each_rank_has_its_share_of_what_is_sharded(folder: Path) -> None:
    alone, both = needs(folder), 'placement.trainer=["cpu", "cpu"]'
    sharded, whole = needs(folder, both), resting(folder, both, "placement.shard=false")
    for rank in ("trainer, rank 0", "trainer, rank 1"):
        assert sharded[rank].optimizer == alone["trainer"].optimizer // 2
        assert sharded[rank].activations == alone["trainer"].activations
        assert whole[rank].optimizer == resting(folder)["trainer"].optimizer
    assert (whole["trainer, rank 0"].weights, whole["trainer, rank 1"].weights > 0) == (0, True)


def test_what_is_certain_is_less_than_what_is_expected(folder: Path) -> None:
    certain, worst = resting(folder), needs(folder)
    assert certain.keys() == worst.keys()
    for name, each in certain.items():
        assert (each.weights, each.optimizer, each.gradients) == pytest.approx(
            (worst[name].weights, worst[name].optimizer, worst[name].gradients), rel=0.01
        )
        assert each.total < worst[name].total


def test_a_device_that_is_too_small_is_named_with_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"cpu": (5 * MIB, 5 * MIB), "cuda": (9 * MIB, 9 * MIB)}
    monkeypatch.setattr("oppo.run.memory.memory_of", lambda device, assumed: memory[device.type])
    gpu = torch.device("cuda", 0)
    three = [Expected(name, device, Bytes(3 * MIB)) for name, device in (("a", CPU), ("b", CPU), ("c", gpu))]
    assert crowded(three) == ["cpu has 5.2 MB free, and its models need 6.3 MB (a 3.1 MB, b 3.1 MB)"]
    assert not crowded(three[1:])


@pytest.mark.usefixtures("at_rest")
def test_models_that_do_not_fit_are_refused_before_they_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oppo.hf.devices.free", lambda device: 500_000)
    assert oppo(folder, "", "run.name=crowded") == UNUSABLE
    said = capsys.readouterr().err
    assert "cpu has 500.0 kB free, and its models need" in said
    assert "policy" in said
    assert "models.lora_rank = 16 would fit" in said or "models.dtype = 'bfloat16'" in said
    assert "[placement]" in said
    assert "loading" not in said
    assert doctor(folder) == UNUSABLE
    assert "too little memory: cpu has 500.0 kB free" in capsys.readouterr().out


def test_the_states_of_a_policy_s_rollouts_are_counted_before_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hybrid = ("models.policy=falcon-h1", "rewards.0.source=reward.py:short", "models.critic=reward")
    tiny.STATEFUL["falcon-h1"]().save_pretrained(folder / "falcon-h1")
    tokenizer().save_pretrained(folder / "falcon-h1")
    few, many = (resting(folder, *hybrid, f"step.batch={batch}") for batch in (4, 256))
    assert resting(folder)["policy"].keys_values == 0
    states = [each["policy"].keys_values for each in (few, many)]
    assert states[1] / states[0] == pytest.approx((256 + 2) / (4 + 2), rel=0.1)
    assert states[0] <= needs(folder, *hybrid)["policy"].keys_values
    room = sum(each.total for each in few.values()) + states[0]
    monkeypatch.setattr("oppo.hf.devices.free", lambda device: room)
    assert oppo(folder, "", *hybrid, "step.batch=256", "run.name=crowded") == UNUSABLE
    said = capsys.readouterr().err
    assert f"free, and its models need {decimal(sum(each.total for each in many.values()))}" in said
    assert "loading" not in said


def test_a_trial_makes_one_longest_step_and_saves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [*folder.glob("runs/*")]
    assert doctor(folder, "--trial", *chosen("sampling.stop=[3]", "step.lookahead=1")) == DONE
    said = capsys.readouterr()
    assert "making one step as long as the settings allow" in said.err
    assert "the longest step took" in said.out
    assert "of it with the models loaded" in said.out
    assert [*folder.glob("runs/*")] == before


PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
PLANS = re.findall(
    r"```toml\n# oppo doctor config.toml (--assume \S+.*?)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)
LARGE = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def large(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configurations of a policy and a reward model of 7 billion parameters, without weights."""
    place = tmp_path_factory.mktemp("large")
    shape = {**LARGE, "num_hidden_layers": 28, "vocab_size": 152_064, "max_position_embeddings": 4096}
    for name, heads in (("actor", {}), ("reward", {"num_labels": 1})):
        tokenizer().save_pretrained(place / name)
        config = LlamaConfig.from_dict({**shape, **heads, "tie_word_embeddings": False})
        config.architectures = ["LlamaForSequenceClassification" if heads else "LlamaForCausalLM"]
        config.save_pretrained(place / name)
    (place / "prompts.jsonl").write_text((folder / "prompts.jsonl").read_text())
    return place


def plan(folder: Path, text: str, assume: str, *overrides: str) -> int:
    head = 'models.policy = "actor"\nrewards = [{ source = "reward" }]\n'
    head += 'data.prompts = "prompts.jsonl"\nstep.chunk = "whole"\n'
    (folder / "config.toml").write_text(head + text)
    return doctor(folder, *assume.split(), *chosen(*overrides))


@pytest.mark.usefixtures("at_rest")
@pytest.mark.parametrize(("assume", "text"), PLANS)
def test_the_plans_of_the_page_fit_the_machines_that_it_names(
    large: Path, assume: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(large, text, assume, "sampling.max_new_tokens=512") == DONE, capsys.readouterr()
    said = capsys.readouterr()
    assert "for 256 rollouts in flight" in said.out, "a group of eight for each prompt"
    assert "counting the memory of the reference" in said.err
    assert ("policy, worker 1" in said.out) is ("vllm" in text)
    assert "assumed" in said.out
    assert "free;" not in said.out, "nothing of this machine"


@pytest.mark.usefixtures("at_rest")
def test_the_example_of_two_machines_fits_the_first(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (PAGE.parents[1] / "examples" / "two_machines" / "config.toml").read_text(encoding="utf-8")
    (large / "config.toml").write_text(text.replace("/shared/", f"{large}/"))
    (assume,) = re.findall(r"oppo doctor config.toml (--assume \S+)", text)
    assert doctor(large, *assume.split(), "--set", "step.chunk=whole") == DONE, capsys.readouterr()
    said = capsys.readouterr().out
    assert "for 72 rollouts in flight" in said
    assert "trainer, rank 5" in said
    assert "\npolicy" not in said, "it is on the other machine"


@pytest.mark.parametrize(
    ("assume", "overrides", "names"),
    [
        ("", ("models.policy=nowhere",), ["models.policy"]),
        ("", ("data.prompts=none.jsonl",), ["there is no prompt file"]),
        ("--trial", ("rewards.0.source=actor",), ["rewards.0"]),
        ("--assume 8xA100", (), ["--assume", "8xH100-80GB"]),
        ("--assume 1xH100-80GB", ("placement.policy=cuda:1",), ["placement.policy", "'cuda:1'", "assumed"]),
        (
            "--assume 1xH100-80GB",
            ("vllm.tensor_parallel_size=2", "models.engine=vllm"),
            ["2 workers", "placement.policy"],
        ),
        ("--assume 1xH100-80GB", ("vllm.model=x", "models.engine=vllm"), ["vllm.model"]),
        ("--assume 1xH100-80GB --trial", (), ["--trial", "--assume"]),
        ("--assume 1xH100-80GB", ('placement.trainer=["cuda", "cuda"]',), ["names a device twice", "--ray"]),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(
    folder: Path, assume: str, overrides: tuple[str, ...], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(folder, *assume.split(), *chosen(*overrides)) == UNUSABLE
    said = capsys.readouterr().err
    assert all(name in said for name in names), said


def cluster_faults(folder: Path, assume: str, *overrides: str) -> list[str]:
    settings, assumed = (
        load_settings(folder / "config.toml", ["placement.cluster=auto", *overrides]),
        Hardware.assumed(assume),
    )
    needs = expected(Deployment.of(settings, assumed), None)
    return crowded(needs, assumed, spread=settings.placement.spread)


def test_a_cluster_that_has_too_few_gpus_is_named_with_its_actors(folder: Path) -> None:
    (fault,) = cluster_faults(folder, "2x2xH100-80GB", "placement.scorers=cuda")
    assert "3 models are actors with a GPU each (reference, reward, critic)" in fault
    assert not cluster_faults(folder, "2x3xH100-80GB", "placement.scorers=cuda")


@pytest.mark.usefixtures("at_rest")
def test_a_cluster_that_has_too_few_machines_to_spread_ranks_over_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = ('placement.trainer=["cuda", "cuda", "cuda"]', 'placement.remote=["trainer"]')
    spread = (*ranks, "placement.spread=true")
    assert not cluster_faults(folder, "2x4xH100-80GB", *ranks)
    assert not cluster_faults(folder, "3x4xH100-80GB", *spread)
    (fault,) = cluster_faults(folder, "2x4xH100-80GB", *spread)
    assert "placement.spread puts 2 training ranks" in fault
    assert doctor(folder, "--assume", "2x4xH100-80GB", *chosen("placement.cluster=auto", *spread)) == UNUSABLE
    assert fault in capsys.readouterr().out


def engine(folder: Path, *overrides: str) -> dict[str, Expected]:
    settings = load_settings(folder / "config.toml", ["models.engine=vllm", *overrides])
    deployment = Deployment.of(settings, Hardware.assumed("4xH100-80GB"))
    return {each.model: each for each in expected(deployment, None)}


def test_an_engine_is_counted_with_its_share_and_has_what_others_leave(folder: Path) -> None:
    beside, apart = engine(folder), engine(folder, "placement.policy=cuda:3")
    taken = sum(each.bytes.total for name, each in beside.items() if name != "policy")
    assert apart["policy"].share == ALONE
    assert beside["policy"].share is not None
    assert beside["policy"].share < ALONE or taken < 5e9
    for found in (beside, apart):
        assert found["policy"].bytes.total == pytest.approx(80e9 * (found["policy"].share or 0), rel=0.01)
    assert not crowded([*beside.values()], Hardware.assumed("1xH100-80GB"))
    own = engine(folder, "vllm.gpu_memory_utilization=0.3")["policy"]
    assert (own.share, own.bytes.total) == (0.3, 24_000_000_000)
    cache = engine(folder, "vllm.kv_cache_memory_bytes=5000000")["policy"]
    assert (cache.share, cache.bytes.keys_values) == (None, 5_000_000)
    large = [Expected("trainer", torch.device("cuda", 0), Bytes(60 * 10**9))]
    settings = load_settings(folder / "config.toml", ["models.engine=vllm"])
    alone = Deployment.of(settings, Hardware.assumed("1xH100-80GB"))
    assert engine_share(alone, large) == pytest.approx(0.16, abs=0.01)


def test_adapters_are_counted_in_float32_where_vllm_serves_them(folder: Path) -> None:
    half = engine(folder, "models.dtype=bfloat16")["policy"].bytes.weights
    merged = engine(folder, "models.dtype=bfloat16", "models.lora_rank=1", "models.lora_sync=merged")[
        "policy"
    ].bytes.weights
    assert merged > 2 * half


def test_weights_begin_where_they_lie_and_the_actor_is_not_on_the_gpu_of_an_engine(folder: Path) -> None:
    assumed = Hardware.assumed("8xH100-80GB")

    def found(*overrides: str) -> Devices:
        return Deployment.of(load_settings(folder / "config.toml", ["models.engine=vllm", *overrides]), assumed).devices

    alone = found("placement.trainer=cuda:5")
    assert [str(each) for each in (alone.policy, alone.actor, alone.weights)] == ["cuda:0", "cuda:5", "cuda:5"]
    ranks = found('placement.trainer=["cuda:5", "cuda:6"]', "placement.reference=cuda:3")
    assert [str(each) for each in (ranks.policy, ranks.actor, ranks.weights)] == ["cuda:0", "cuda:3", "cpu"]
    assert route_of({}, ranks.weights, on_cpu=False, gpus=8).backend == "file"
    assert route_of({}, alone.weights, on_cpu=False, gpus=8).backend == "nccl"
    assert placed({"tensor_parallel_size": 2}, torch.device("cuda", 4))["device_ids"] == [4, 5]


@pytest.mark.parametrize(("model", "key"), [("reward", "rewards.0"), ("reference", "scorers.reference")])
def test_the_engine_of_a_scorer_is_counted_on_its_gpus_and_a_server_is_not(folder: Path, model: str, key: str) -> None:
    on_vllm = (f"{key}.engine=vllm", f"placement.{model}=cuda:1")
    found = engine(folder, *on_vllm, f"{key}.vllm.tensor_parallel_size=2")
    workers = [found[f"{model}, worker {number}"] for number in range(2)]
    assert [str(each.device) for each in workers] == ["cuda:1", "cuda:2"]
    assert all(each.bytes.total == pytest.approx(ALONE * 80e9, rel=0.01) for each in workers)
    assert found["policy"].share == ALONE, "it is on another GPU"
    assert model not in found
    assert model in engine(folder)
    assert model not in engine(folder, *on_vllm, f"{key}.url=http://host:8000")


def test_the_engine_of_a_reward_leaves_the_policy_s_what_it_was_not_given(folder: Path) -> None:
    shared = engine(folder, "rewards.0.engine=vllm", "rewards.0.vllm.gpu_memory_utilization=0.3")
    assert shared["reward"].bytes.total == pytest.approx(24e9, rel=0.01)
    assert shared["policy"].share == pytest.approx((80 - 1.1 * 24) / 80, abs=0.05), "what that one leaves"
    assert not crowded([*shared.values()], Hardware.assumed("1xH100-80GB"))
    (fault,) = crowded([*engine(folder, "rewards.0.engine=vllm").values()], Hardware.assumed("1xH100-80GB"))
    assert "of which an engine has 0 bytes where its weights and the smallest cache are" in fault
    assert "reward 73" in fault
    small = engine(folder, "rewards.0.engine=vllm", "rewards.0.vllm.kv_cache_memory_bytes=5000000")
    assert small["reward"].bytes.keys_values == 5_000_000
