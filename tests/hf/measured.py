"""A process with one model at the most that is asked of it: prints its peak, and the estimate, in bytes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from oppo.events import Chunk, Prompt
from oppo.hf.lora import add_lora
from oppo.hf.memory import Bytes, Load, ServedPolicy, Trained, longest_batch, served_critic, served_reference
from oppo.hf.serve.decoder import Decoder, DecodeRow, PolicyCore, Signals
from oppo.hf.serve.scorers import ReferenceWorker, RewardWorker, ScorerInput
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.trainer import HfTrainerCore
from oppo.limits import UNLIMITED
from oppo.losses import ClippedLoss, PPOLoss
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.rollout_buffer import DecodeStep
from oppo.training import TrainerSettings

LOAD = Load(rollouts=12, prompt=128, response=128, chunk=64)
SMALL = Load(rollouts=4, prompt=8, response=8, chunk=8)
SAMPLING = Sampling(max_new_tokens=128)
PREFILL = 2048


def config(*, small: bool) -> LlamaConfig:
    made = LlamaConfig(
        vocab_size=8000,
        hidden_size=32 if small else 512,
        intermediate_size=64 if small else 1376,
        num_hidden_layers=1 if small else 8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        pad_token_id=0,
    )
    made.num_labels = 1
    return made


def causal(*, small: bool) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM(config(small=small))
    return model


def scalar(*, small: bool) -> LlamaForSequenceClassification:
    model: LlamaForSequenceClassification = LlamaForSequenceClassification(config(small=small))
    return model


def trained(role: str, *, small: bool) -> ActorCritic:
    actor = causal(small=small)
    if role == "adapters":
        add_lora(actor, 8, 16)
    return ActorCritic(actor, None if role == "grpo" else scalar(small=small))


def settings(role: str) -> TrainerSettings:
    return TrainerSettings(epochs=1, gradient_checkpointing=int(role == "checkpointing"), micro_batch_tokens=2048)


def prompts(load: Load) -> list[Prompt]:
    random = np.random.default_rng(0)
    return [Prompt(k, k, random.integers(1, 8000, load.prompt).astype(np.int32)) for k in range(load.rollouts)]


def decode(load: Load, *, small: bool) -> None:
    decoder = Decoder(causal(small=small), sampling=SAMPLING, deterministic=False, prefill_tokens=PREFILL)
    core, steps = PolicyCore(decoder, recompute=True), list[DecodeStep]()
    rows = [DecodeRow(each.rollout, each, load.response) for each in prompts(load)]
    everyone = dict.fromkeys((row.key for row in rows), ((), (UNLIMITED, 0)))
    signals = Signals.of(len(rows))

    def stop_before_the_end(step: DecodeStep) -> None:
        steps.append(step)
        if len(steps) == load.response - 2:
            signals.stop()

    core.run(rows, everyone, lambda ended: False, signals, stop_before_the_end)
    core.load({}, 1)
    core.run([], everyone, lambda ended: False, Signals.of(len(rows)), steps.append)


def score(worker: ReferenceWorker | RewardWorker, load: Load) -> None:
    worker.extend(ScorerInput(prompts(load)))
    random = np.random.default_rng(1)
    for start in range(0, load.response, load.chunk):
        tokens = random.integers(1, 8000, load.chunk).astype(np.int32)
        nothing = np.zeros(load.chunk, np.float32), np.zeros(load.chunk, np.int32)
        worker.extend(ScorerInput([Chunk(each, start, tokens, *nothing) for each in range(load.rollouts)]))
    worker.finish(dict.fromkeys(range(load.rollouts), load.response))


def update(role: str, load: Load, *, small: bool) -> None:
    """Make two updates: the second has the optimizer's state from its beginning."""
    loss = ClippedLoss() if role == "grpo" else PPOLoss()
    core = HfTrainerCore(trained(role, small=small), SAMPLING, settings(role), loss, TrainerCounts.new())
    for _ in range(2):
        core.update(longest_batch(load.rollouts, load, critic=role != "grpo"))


def work(role: str, load: Load, *, small: bool) -> None:
    if role == "policy":
        decode(load, small=small)
    elif role == "reference":
        score(ReferenceWorker(causal(small=small), False, Sampling()), load)
    elif role == "reward":
        score(RewardWorker(scalar(small=small), False), load)
    else:
        update(role, load, small=small)


def estimate(role: str, load: Load) -> Bytes:
    if role == "policy":
        return ServedPolicy(partial(causal, small=False)).under(load, SAMPLING, prefill_tokens=PREFILL)
    if role == "reference":
        return served_reference(partial(causal, small=False)).under(load)
    if role == "reward":
        return served_critic(partial(scalar, small=False)).under(load)
    loss = ClippedLoss() if role == "grpo" else PPOLoss()
    return Trained(partial(trained, role, small=False)).under(load, SAMPLING, settings(role), loss)


def in_memory() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def peak_of(job: Callable[[], None]) -> int:
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, in_memory())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        job()
    finally:
        done.set()
        watcher.join()
    return peak


def main(role: str) -> None:
    torch.set_num_threads(1)
    work(role, SMALL, small=True)  # what libraries allocate once
    before = in_memory()
    measured = peak_of(partial(work, role, LOAD, small=False)) - before
    sys.stdout.write(f"{measured} {estimate(role, LOAD).total}\n")


if __name__ == "__main__":
    main(sys.argv[1])
