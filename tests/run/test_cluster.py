"""``[placement]`` with a cluster: which models are remote, what is refused, and what is counted here."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from oppo.cli import UNUSABLE, main
from oppo.config.load import load
from oppo.config.settings import Settings
from oppo.errors import ConfigError
from oppo.hf.memory import Hardware
from oppo.run.checkpoint import fingerprints, require_same
from oppo.run.memory import by_device, crowded, expected
from oppo.run.places import devices_of
from tests.workplace import furnish

CLUSTER = "placement.cluster=auto"
BOTH = 'placement.trainer=["cpu", "cpu"]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("cluster"))


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
    devices = devices_of(here)
    assert {str(device) for device in devices.scoring(["reference", "reward", "critic"]).values()} == {"cuda"}
    assert [str(device) for device in devices.distinct()] == ["cpu"]
    with pytest.raises(ConfigError, match=r"placement\.policy: there is no 'cuda'"):
        devices_of(settings(folder, CLUSTER, "placement.policy=cuda"))


def test_a_reward_function_beside_a_model_of_another_machine_has_the_cpu(folder: Path) -> None:
    devices = devices_of(settings(folder, CLUSTER, "placement.scorers=cuda", "models.device=cpu"))
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
    needs = {each.model: each for each in expected(there, devices_of(there), None)}
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
    needs = expected(there, devices_of(there), None)
    assert [each.where for each in needs if each.remote] == ["cuda in the cluster"] * 3
    (fault,) = crowded(needs, Hardware.assumed("2x2xH100-80GB"))
    assert "3 models are actors with a GPU each (policy 0, policy 1, policy 2)" in fault


def test_a_remote_policy_decodes_there_and_is_trained_here(folder: Path) -> None:
    there = settings(folder, CLUSTER, 'placement.remote=["policy"]', "placement.policy=cuda", "models.device=cpu")
    assert there.shares_weights, "the critic, which is served here, is the one that is trained"
    devices = devices_of(there)
    assert (str(devices.policy), str(devices.actor), str(devices.proximal)) == ("cuda", "cpu", "cpu")
    assert [str(device) for device in devices.distinct()] == ["cpu"]
    needs = {each.model: each for each in expected(there, devices, None)}
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
    needs = {each.model: each for each in expected(there, devices_of(there), None)}
    assert (needs["proximal"].bytes.weights == 0) is shared


def test_a_cluster_that_is_not_there_is_an_error_before_anything_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")
    assert main(["train", str(folder / "config.toml"), "--ray", "127.0.0.1:1"]) == UNUSABLE
    said = capsys.readouterr().err
    assert "there is no Ray cluster at '127.0.0.1:1'" in said
    assert "ray start --head" in said
    assert "loading the" not in said
    assert not (folder / "runs").exists()
