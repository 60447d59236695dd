"""A loop that exists already, overlapped: the same weights, scoring during decoding, responses deferred."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import anyio
import pytest
import torch

from oppo import Chunk, Finish, Overcommit, Prompt, wrap
from oppo.errors import ModelError
from oppo.events import Batch, Scored
from oppo.stages.batch import ScoredRollouts
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, fake_per_token, fake_scalar, prompts, run_virtual
from oppo.training import FunctionTrainer
from tests.kit.pipelines import Tap

example = import_module("examples.06_existing_loop")


def test_the_weights_are_those_of_the_serial_loop_where_nothing_is_deferred() -> None:
    torch.set_num_threads(1)
    serial, overlapped = example.tiny_models(), example.tiny_models()
    anyio.run(example.serial, *serial, 4)
    anyio.run(example.overlapped, *overlapped, 4)
    for name, tensor in serial[0].state_dict().items():
        assert torch.equal(tensor, overlapped[0].state_dict()[name]), name
    fresh = example.tiny_models()[0].state_dict()
    assert any(not torch.equal(tensor, fresh[name]) for name, tensor in serial[0].state_dict().items())


def test_responses_are_deferred_and_each_is_trained_once() -> None:
    torch.set_num_threads(1)
    reports = anyio.run(example.overlapped, *example.tiny_models(), 4, 4)
    assert any(report.deferred for report in reports)
    trained = [rollout for report in reports for rollout in report.trained]
    assert len(set(trained)) == len(trained) == 32
    assert all("loss/policy_avg" in report.metrics for report in reports)


def test_overlapping_it_takes_at_most_fifteen_lines() -> None:
    source = inspect.getsource(example.overlapped).splitlines()
    body = [line for line in source if line.strip() and '"""' not in line]
    assert len(body) <= 15 + 3, "three lines of it are the signature"


class Weighted:
    """A module of one weight."""

    def __init__(self) -> None:
        self.weight = 0.0

    def state_dict(self) -> Mapping[str, object]:
        return {"weight": self.weight}


def played(step: Any, **scorers: Any) -> tuple[Tap, FakePolicy, Weighted]:
    tap, module = Tap(), Weighted()
    policy = FakePolicy(lambda prompt: 5 + 4 * prompt.rollout % 30, 0.01)
    reward = FakeScorer(fake_scalar, 0.001)
    graph = wrap(step, module, policy=policy, reward=reward, admission=Overcommit(4, 2), **scorers)

    async def main() -> None:
        async with graph.open(prompts(100), observers=[tap]) as run:
            async for _ in run.steps(3):
                pass

    run_virtual(main)
    return tap, policy, module


def test_the_step_is_given_what_was_scored_while_it_was_written() -> None:
    batches = list[Batch]()
    tap, policy, _ = played(batches.append, reference=FakeScorer(fake_per_token), critic=FakeCritic())
    assert policy.version == 3
    for batch in batches:
        assert len(batch) == 4
        assert batch.reference is not None
        assert batch.values is not None
        assert (batch.rewards, batch.advantages, batch.returns) == (None, None, None)
    order = [(stage, type(item)) for _, stage, item in tap.items]
    assert order.index(("reward", Scored)) < max(at for at, each in enumerate(order) if each == ("generate", Chunk))
    assert {type(item) for _, stage, item in tap.items if stage == "generate"} >= {Prompt, Chunk, Finish}


def test_a_critic_that_is_trained_too_follows() -> None:
    critic = FakeCritic()
    played(lambda batch: None, critic=critic, critic_module=Weighted())
    assert critic.version == 3


@pytest.mark.parametrize("said", [3, {"loss": "low"}, ["loss"]])
def test_what_is_no_metrics_is_refused(said: object) -> None:
    with pytest.raises(
        ModelError, match="a training step returns metrics, a mapping from names to numbers, or nothing"
    ):
        played(lambda batch: said)


def test_what_the_step_raises_ends_the_run_as_itself() -> None:
    def broken(batch: Batch) -> None:
        raise ZeroDivisionError("no rows")

    with pytest.raises(ZeroDivisionError, match="no rows") as caught:
        played(broken)
    assert any("in stage 'update' of graph 'wrapped'" in note for note in caught.value.__notes__)


def test_an_empty_batch_is_passed_over() -> None:
    trainer = FunctionTrainer(lambda batch: pytest.fail("it is empty"), Weighted())
    assert run_virtual(trainer.update, ScoredRollouts().batch()).metrics == {}
    assert trainer.version == 1
