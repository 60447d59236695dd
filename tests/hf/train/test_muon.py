"""Muon beside torch's own, which matrices it trains, and how large its updates are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from oppo.errors import ConfigError
from oppo.hf.lora import add_lora
from oppo.hf.memory import Load, Trained, at_rest
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.optim import LIKE_ADAMW, Muon, MuonAndAdamW, Optimisation, matrices
from oppo.hf.train.ranks import whole
from oppo.losses import ClippedLoss
from oppo.models import Sampling
from oppo.training import TrainerSettings
from tests.hf import tiny

MUON = TrainerSettings(optimizer="muon", learning_rate=1e-2, weight_decay=0.1)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    file = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@settings(deadline=None, max_examples=20)
@given(st.tuples(st.integers(1, 12), st.integers(1, 12)), st.floats(0, 0.5), st.integers(1, 4), st.integers(0, 99))
def test_both_are_torch_s_own_also_of_a_shard(
    mesh: DeviceMesh, shape: tuple[int, int], decay: float, steps: int, seed: int
) -> None:
    torch.manual_seed(seed)
    begun, vector = torch.randn(shape), torch.randn(5)
    gradients = [(torch.randn(shape), torch.randn(5)) for _ in range(steps)]
    at: dict[str, Any] = {"lr": 0.1, "weight_decay": decay}
    ours, theirs, biases = nn.Parameter(begun.clone()), nn.Parameter(begun.clone()), nn.Parameter(vector.clone())
    both = MuonAndAdamW([{"params": [ours], **at}], [{"params": [biases], **at}], eps=1e-5)
    other = nn.Parameter(vector.clone())
    alone = [torch.optim.Muon([theirs], adjust_lr_fn=LIKE_ADAMW, **at), torch.optim.AdamW([other], eps=1e-5, **at)]
    shard = nn.Parameter(distribute_tensor(begun.clone(), mesh, [Shard(0)]))
    sharded = Muon([shard], adjust_lr_fn=LIKE_ADAMW, **at)
    for matrix, row in gradients:
        ours.grad, theirs.grad, biases.grad, other.grad = matrix.clone(), matrix.clone(), row.clone(), row.clone()
        shard.grad = distribute_tensor(matrix.clone(), mesh, [Shard(0)])
        for each in (both, *alone, sharded):
            each.step()
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(biases, other)
    assert torch.equal(whole(shard), theirs.detach())
    assert list(both.state[ours]) == ["momentum_buffer"]
    assert torch.equal(whole(sharded.state[shard]["momentum_buffer"]), both.state[ours]["momentum_buffer"])


@pytest.mark.parametrize(("shape", "original"), [((1024, 512), 1.41421), ((512, 1024), 1.0)])
def test_an_update_is_as_large_as_adamw_s(shape: tuple[int, int], original: float) -> None:
    torch.manual_seed(0)
    gradient, steps = torch.randn(shape), []
    for how in (LIKE_ADAMW, "original"):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = gradient.clone()
        Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn=how).step()
        steps.append(weight.detach().double())
    assert float(steps[0].norm() / steps[1].norm()) == pytest.approx(6.4 / original, rel=1e-5)
    assert float(steps[0].square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_it_trains_the_matrices_of_layers_and_nothing_else() -> None:
    for name in ("llama", "gpt2"):
        actor, critic = tiny.causal(name), tiny.scalar(name)
        optimisation = Optimisation(ActorCritic(actor, critic), MUON)
        for each in optimisation.named_weights().values():
            each.grad = torch.ones_like(each)
        optimisation.step()
        states = {name: [*optimisation.optimizer.state[each]] for name, each in optimisation.named_weights().items()}
        by_muon = {name for name, kinds in states.items() if kinds == ["momentum_buffer"]}
        assert len(by_muon) > 10
        assert all("layers." in name or ".h." in name for name in by_muon)
        inner = {name for name, each in optimisation.named_weights().items() if each.ndim == 2} - by_muon
        assert all(
            "embed" in name or "head" in name or "score" in name or "wte" in name or "wpe" in name for name in inner
        )


def test_adapters_alone_are_refused() -> None:
    actor = tiny.causal()
    add_lora(actor, 4, 8, seed=0)
    assert not [*matrices([actor])]
    with pytest.raises(
        ConfigError, match=r"of matrices of layers, and none is trained: adapters, embeddings and heads"
    ):
        Optimisation(ActorCritic(actor), MUON)


def test_its_state_is_counted_as_one_number_of_each_weight() -> None:
    def make() -> nn.ModuleDict:
        return nn.ModuleDict({"actor": tiny.causal()})

    def adapt(models: nn.ModuleDict) -> ActorCritic:
        return ActorCritic(cast("PreTrainedModel", models["actor"]))

    load, counted = Load(4, 8, 8, 8), {}
    for name in ("adamw", "muon"):
        chosen = TrainerSettings(optimizer=name)
        counted[name] = (
            Trained(make, adapt=adapt).under(load, Sampling(max_new_tokens=8), chosen, ClippedLoss()).optimizer
        )
    saved = sum(each.nbytes for each in matrices([tiny.causal()]))
    assert counted == {name: at_rest(make, adapt, name).optimizer for name in counted}
    assert counted["adamw"] - counted["muon"] == saved > 0
    optimisation = Optimisation(ActorCritic(tiny.causal()), MUON)
    for weight in optimisation.named_weights().values():
        weight.grad = torch.ones_like(weight)
    optimisation.optimizer.step()
    states = chain.from_iterable(each.values() for each in optimisation.optimizer.state.values())
    assert counted["muon"] == sum(each.nbytes for each in states if each.dim())
