"""Pools of transformers' engines: the contract, and whole runs in which one of them dies while it decodes."""

from __future__ import annotations

import copy
import os
import signal
import threading
from contextlib import ExitStack
from functools import partial
from typing import Literal

import numpy as np
import pytest
from transformers import PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.group import grpo
from oppo.errors import ConfigError
from oppo.events import Batch, Prompt
from oppo.hf.devices import use_cores
from oppo.hf.serve.decoder import Decoder
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.train.trainer import HfTrainer
from oppo.losses import ClippedLoss
from oppo.models import Policy, Sampling, Trained
from oppo.placement import Place, PolicyPool, Process, Thread
from oppo.testing import FakeScorer, check_policy, fake_scalar
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.stories import SAMPLING, assert_close, full_logprobs, prompts

ONE = partial(use_cores, 1)
DRAWN = Sampling(max_new_tokens=24, stop=(2, 3), seed=3)


async def test_a_pool_keeps_the_contract_of_a_policy() -> None:
    with ExitStack() as stack:
        threads = [stack.enter_context(Thread(f"actor {k}", setup=ONE)) for k in range(2)]

        async def make() -> PolicyPool:
            return PolicyPool([HfPolicy(tiny.causal(), sampling=SAMPLING, place=thread) for thread in threads])

        await check_policy(make, prompts(6))


def test_models_with_other_vocabularies_are_no_pool() -> None:
    with Thread("actor", setup=ONE) as thread:
        small, large = tiny.causal(), tiny.causal()
        large.resize_token_embeddings(tiny.VOCABULARY + 8)
        policies = [HfPolicy(model, sampling=SAMPLING, place=thread) for model in (small, large)]
        with pytest.raises(ConfigError, match=rf"vocabularies differ: member 0 has {tiny.VOCABULARY}, member 1 has"):
            PolicyPool(policies)


class Checking(HfTrainer):
    """Compares, before each update, log-probs with those of the weights that it would train."""

    actor: PreTrainedModel
    checked: int = 0

    async def update(self, batch: Batch) -> Trained:
        assert (batch.versions == self.version).all()
        for response, row in zip(batch.responses, batch.rows(), strict=True):
            expected = full_logprobs(self.actor, response.prompt, response.tokens.tolist())
            assert_close(batch.logprobs[row].tolist(), expected)
            self.checked += 1
        return await super().update(batch)


def fail_once(patch: pytest.MonkeyPatch, thread: str, at: int) -> None:
    """Let the decode steps of one thread fail, once."""
    draw, steps = Decoder._draw, 0

    def failing(*arguments: object, **named: object) -> object:
        nonlocal steps
        steps += thread in threading.current_thread().name
        if steps == at:
            steps += 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return draw(*arguments, **named)  # type: ignore[arg-type]  # passed on

    patch.setattr(Decoder, "_draw", failing)


@pytest.mark.parametrize("how", ["raises", "killed"])
async def test_a_run_goes_on_when_an_engine_dies_while_it_decodes(
    how: Literal["raises", "killed"], monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    actor = tiny.causal(seed=1)
    with ExitStack() as stack:
        places: list[Place] = [
            stack.enter_context(Process("first", setup=ONE) if how == "killed" else Thread("first", setup=ONE)),
            stack.enter_context(Thread("second", setup=ONE)),
        ]
        training = stack.enter_context(Thread("training", setup=ONE))

        def member(place: Place) -> HfPolicy:
            return HfPolicy(copy.deepcopy(actor), sampling=DRAWN, place=place)

        async def start(index: int) -> Policy:
            return member(stack.enter_context(Thread("again", setup=ONE)))

        pool = PolicyPool([member(place) for place in places], start=start)
        trainer = Checking(
            actor, sampling=DRAWN, place=training, loss=ClippedLoss(), settings=TrainerSettings(learning_rate=1e-3)
        )
        trainer.actor = actor
        graph = grpo(
            policy=pool,
            reward=FakeScorer(fake_scalar),
            trainer=trainer,
            admission=Overcommit(batch=4, overcommit=0),
            samples=2,
            chunks=Fixed(5),
        )
        if how == "raises":
            fail_once(monkeypatch, "first", at=30)
        asked = [Prompt(n, n, np.arange(10 + n, 14 + n, dtype=np.int32)) for n in range(20)]
        async with graph.open(asked) as run:
            async for step in run.steps(4):
                if step.index == 1 and isinstance(places[0], Process):
                    os.kill(places[0].pid, signal.SIGKILL)
        assert (trainer.version, pool.version, trainer.checked) == (4, 4, 4 * 8)
    assert [message.startswith("member 0 (HfPolicy) of the pool is lost") for message in messages[:1]] == [True]
    assert any("has been started again" in message for message in messages)
