"""The example of another library's PPO: its update, overlapped, trains the weights of the serial loop."""

from __future__ import annotations

import inspect
from importlib import import_module

import anyio
import torch

example = import_module("examples.08_torchrl")


def test_where_nothing_is_deferred_actor_and_critic_are_those_of_the_serial_loop() -> None:
    serial, overlapped, fresh = (example.tiny_models() for _ in range(3))
    anyio.run(example.serial, serial, 3)
    reports = anyio.run(example.overlapped, overlapped, 3)
    for model in ("actor", "critic"):
        states = [getattr(models, model).state_dict() for models in (serial, overlapped, fresh)]
        for name, tensor in states[0].items():
            assert torch.equal(tensor, states[1][name]), (model, name)
        assert any(not torch.equal(tensor, states[2][name]) for name, tensor in states[0].items()), model
    assert all(report.metrics["loss/value_avg"] > 0 for report in reports)


def test_with_responses_deferred_each_is_trained_once() -> None:
    reports = anyio.run(example.overlapped, example.tiny_models(), 4, 4)
    assert any(report.deferred for report in reports)
    trained = [rollout for report in reports for rollout in report.trained]
    assert len(set(trained)) == len(trained) == 32


def test_the_update_is_that_of_the_other_library_and_knows_nothing_of_this_one() -> None:
    update = inspect.getsource(example.PPO)
    assert "ClipPPOLoss" in update
    assert not any(name in update for name in ("Batch", "Response", "wrap"))
