"""``oppo train --ray``: the same run with models on other machines, and nothing left of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from oppo.cli import DONE, FAILED, INTERRUPTED, UNUSABLE
from oppo.run.train import FINAL
from tests.kit.workplace import furnish, killed_and_replaced, oppo, records, resume, start
from tests.placement.ray.machines import MARK, Machines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

BOTH = 'placement.trainer=["cpu", "cpu"]'
SPREAD = "placement.spread=true"
EXACT = (
    "run.deterministic=true",
    "models.dtype=float32",
    "run.scorers=thread",
    "run.cores=1",
    "run.checkpoint_every=1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("train"))


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    final = folder / "runs" / name / FINAL
    return {
        f"{model}/{key}": tensor
        for model in ("actor", "critic")
        for key, tensor in load_file(final / model / "model.safetensors").items()
    }


def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.square(one[name] - other[name]).sum()) for name in one)))


@pytest.mark.parametrize("options", [(), ("models.critic=actor",), ("models.lora_rank=2",), ("step.lookahead=1",)])
def test_scorers_on_other_machines_change_no_bit(two: Machines, folder: Path, options: tuple[str, ...]) -> None:
    """Also with a critic whose head is new, which the other machine is sent, and a reference without the adapters."""
    name = (*options, "plain")[0].partition("=")[0]
    assert oppo(folder, "", *EXACT, *options, f"run.name=here-{name}") == DONE
    assert oppo(folder, f"--ray {two.address}", *EXACT, *options, f"run.name=there-{name}") == DONE
    require_equal_runs(folder, f"here-{name}", f"there-{name}")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("models.lora_rank=2",),
        ("step.lookahead=1",),
        ("algorithm.is_correction=truncated",),
        ("eval.prompts=prompts.jsonl", "eval.samples=2", "eval.every=1"),
        ('placement.remote=["policy", "reference", "reward", "critic"]',),
        ("step.kv_on_sync=keep",),
        ("sampling.top_k=20", "sampling.min_new_tokens=5"),
        ("step.algorithm=grpo", "algorithm.samples=2", 'sampling.stop_strings=["w7 w", "w11", "w40"]'),
    ],
)
def test_a_policy_on_another_machine_changes_no_bit(
    two: Machines, folder: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name = (*options, "plain")[0].partition("=")[0]
    here = [option for option in options if not option.startswith("placement")]
    assert oppo(folder, "", *EXACT, *here, f"run.name=policy-here-{name}") == DONE
    there = ('placement.remote=["policy"]', *options, f"run.name=policy-there-{name}")
    assert oppo(folder, f"--ray {two.address}", *EXACT, *there) == DONE
    assert "starting the actor of the policy in the cluster" in capsys.readouterr().err
    require_equal_runs(folder, f"policy-here-{name}", f"policy-there-{name}")
    if name == "eval.prompts":
        evaluated = [records(folder, f"policy-{place}-{name}", "eval.jsonl") for place in ("here", "there")]
        for ours, theirs in zip(*evaluated, strict=True):
            assert {**ours, "eval/seconds": 0} == {**theirs, "eval/seconds": 0}


def test_a_run_whose_policy_was_here_goes_on_with_one_on_another_machine(two: Machines, folder: Path) -> None:
    for name in ("stayed", "moved"):
        still = ("step.overcommit=0", "sampling.temperature=0", "run.checkpoint_every=1", "run.steps=1")
        assert oppo(folder, "", *still, f"run.name={name}") == DONE
    begun = weights(folder, "stayed")
    assert resume(folder, "stayed", "run.steps=3") == DONE
    there = (f"placement.cluster={two.address}", 'placement.remote=["policy"]')
    assert resume(folder, "moved", "run.steps=3", *there) == DONE
    moved = apart(weights(folder, "stayed"), begun)
    assert moved > 0
    assert apart(weights(folder, "moved"), weights(folder, "stayed")) < 0.01 * moved


def test_weights_reach_a_policy_on_another_machine_while_it_decodes(two: Machines, folder: Path) -> None:
    flying = ("step.lookahead=1", "step.weight_sync=in-flight", "run.steps=4", "run.name=flying")
    assert oppo(folder, f"--ray {two.address}", *flying, 'placement.remote=["policy"]') == DONE
    assert len(records(folder, "flying", "metrics.jsonl")) == 4


def test_a_policy_that_is_killed_ends_the_run_which_can_be_resumed(two: Machines, folder: Path) -> None:
    before = two.pids()
    overrides = (f"placement.cluster={two.address}", 'placement.remote=["policy"]', "run.checkpoint_every=1")
    with start(folder, *overrides, "run.name=killed", "run.steps=100000", **{MARK: two.mark}) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        (policy,) = [pid for pid in two.pids() - before if b"ray::Servant" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(policy, signal.SIGKILL)
        _, said = process.communicate(timeout=120)
    assert process.returncode == FAILED, said
    assert "the process of 'policy'" in said
    assert "go on with `oppo resume" in said
    assert not two.settled(before)
    made = len(records(folder, "killed", "metrics.jsonl"))
    assert resume(folder, "killed", f"run.steps={made + 1}") == DONE


def test_a_replica_of_the_policy_that_is_killed_is_replaced_while_the_run_goes_on(two: Machines, folder: Path) -> None:
    before = two.pids()
    overrides = (f"placement.cluster={two.address}", 'placement.remote=["policy"]', "placement.policy_replicas=2")
    with start(folder, *overrides, "run.name=replaced", "run.steps=100000", **{MARK: two.mark}) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        policies = [pid for pid in two.pids() - before if b"ray::Servant" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(policies) == 2
        said = killed_and_replaced(process, policies[0], folder, "replaced")
    assert process.returncode == INTERRUPTED, said
    assert not two.settled(before)


def require_equal_runs(folder: Path, one: str, other: str) -> None:
    """Check that two runs have the same scores and have trained the same weights, to the bit."""
    scores = [[line["score"] for line in records(folder, name, "metrics.jsonl")] for name in (one, other)]
    assert scores[0] == scores[1]
    finals = [folder / "runs" / name / FINAL for name in (one, other)]
    for file in finals[0].glob("*/*.safetensors"):
        ours, theirs = (load_file(final / file.relative_to(finals[0])) for final in finals)
        assert all(np.array_equal(ours[key], theirs[key]) for key in ours), file


def test_two_ranks_on_two_machines_learn_what_one_learns_and_either_goes_on_with_the_other_s_checkpoint(
    two: Machines, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = ("run.steps=2", "run.checkpoint_every=1", "step.overcommit=0", "sampling.temperature=0")
    assert oppo(folder, "", *still, "run.name=alone") == DONE
    assert oppo(folder, f"--ray {two.address}", *still, "run.name=ranked", BOTH, SPREAD) == DONE
    assert "starting 2 training ranks, 1 of them in the cluster" in capsys.readouterr().err
    begun = {
        f"{model}/{key}": tensor
        for model, path in (("actor", "actor"), ("critic", "reward"))
        for key, tensor in load_file(folder / path / "model.safetensors").items()
    }
    moved = apart(weights(folder, "alone"), begun)
    assert moved > 0
    assert apart(weights(folder, "ranked"), weights(folder, "alone")) < 0.01 * moved
    cluster = f"placement.cluster={two.address}"
    assert resume(folder, "alone", "run.steps=3", cluster, BOTH, SPREAD) == DONE
    assert resume(folder, "ranked", "run.steps=3", "placement.trainer=[]", "placement.cluster=") == DONE
    assert apart(weights(folder, "ranked"), weights(folder, "alone")) < 0.01 * moved


def test_nothing_is_left_of_a_run_that_is_interrupted(two: Machines, folder: Path) -> None:
    before = two.pids()
    overrides = ("run.name=interrupted", "run.steps=100000", BOTH, SPREAD, f"placement.cluster={two.address}")
    with start(folder, *overrides, **{MARK: two.mark}) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        assert len(two.pids() - before) == 5, "two ranks and three scorers"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, said
    assert "go on with" in said
    assert not two.settled(before)


def test_a_reward_model_that_reads_text_is_refused_by_name(
    two: Machines, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("rewards.0.form=joined", "models.critic=actor", "run.name=text")
    assert oppo(folder, f"--ray {two.address}", *options) == UNUSABLE
    assert "name in placement.remote the models that are actors, without 'reward'" in " ".join(
        capsys.readouterr().err.split()
    )
