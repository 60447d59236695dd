"""A process whose models are on a device that is not there: prints what each kind of work did there, as JSON."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config

from oppo.events import Batch, Chunk, Prompt, Support
from oppo.hf.lora import add_lora, merged
from oppo.hf.memory import Load, longest_batch
from oppo.hf.serve.decoder import Decoder, DecodeRow, PolicyCore, Signals
from oppo.hf.serve.sampling import draw
from oppo.hf.serve.scorers import (
    ProcessRewardWorker,
    ReferenceWorker,
    RewardWorker,
    ScorerInput,
    ScorerWorker,
    ValueWorker,
)
from oppo.hf.train.actor_critic import ActorCritic, value_model_on
from oppo.hf.train.optim import gather_training
from oppo.hf.train.ranks import Alone
from oppo.hf.train.trainer import HfTrainerCore
from oppo.hf.weights import adopt, copies
from oppo.losses import ClippedLoss, PPOLoss
from oppo.models import Sampling, Weights
from oppo.placement.trainer import TrainerCounts
from oppo.rollout_buffer import DecodeStep
from oppo.training import TrainerSettings
from tests.hf import child, tiny
from tests.hf.fake_device import moved, register, watched
from tests.hf.train.test_streamed_update import rows_of

Make = Callable[[], PreTrainedModel]
Counts = dict[str, dict[str, object]]

causal = partial(tiny.causal, "qwen2", dtype=torch.bfloat16)
scalar = partial(tiny.scalar, "qwen2")
STOP = 5


def bare(make: Make) -> PreTrainedModel:
    with torch.device("meta"):
        return make()


def decode(make: Make = causal, *, temperature: float = 1.0) -> Counts:
    """Rows of many lengths, one of which ends early; then all are read again with new weights."""
    model, found = bare(make), Counts()
    with watched() as watch:
        sampling = Sampling(max_new_tokens=64, stop=(STOP,), temperature=temperature)
        core = PolicyCore(
            Decoder(moved(model), sampling=sampling, deterministic=False, prefill_tokens=4096), recompute=True
        )
        rows = [DecodeRow(k, Prompt(k, k, np.arange(8 + 40 * k, dtype=np.int32)), 6 if k else 3) for k in range(8)]
        given: dict[int, list[int]] = {row.key: [] for row in rows}
        names = ["prefill", "first step", "step", "after an end", "last"]
        watch.taken()

        def deliver(step: DecodeStep) -> None:
            if names:
                found[names.pop(0)] = watch.taken() | {"segments": _segments(core)}

        core.run(rows, given, lambda ended: False, Signals.of(len(rows)), deliver)
        core.load(Weights(1, actor={name: each.clone() for name, each in model.state_dict().items()}))
        names[:] = ["prefill of another version"]
        again = [DecodeRow(k, Prompt(k, k, np.arange(8, dtype=np.int32)), 2) for k in range(8, 10)]
        core.run(again, {row.key: [] for row in again}, lambda ended: False, Signals.of(len(again)), deliver)
    return found


def _segments(core: PolicyCore) -> int:
    batch = core._decoder.reader._decode_batch
    return len(batch.views) if batch else 0


def truncated() -> Counts:
    """Drawing where ids are left out: by ``top_k``, ``top_p`` and ends that come too early."""
    with watched() as watch:
        logits = torch.zeros(4, 96, device="gpu:0")
        for sampling in (Sampling(top_k=8), Sampling(top_p=0.9), Sampling(top_k=8, top_p=0.5), Sampling(stop=(STOP,))):
            draw(logits, logits, sampling, range(4) if sampling.stop else ()).read_back()
        return {"all": watch.taken()}


def scored(make: Make, worker_of: Callable[[PreTrainedModel], ScorerWorker[Any]], rows: int = 4) -> Counts:
    """Rollouts that grow, half of which come to an end."""
    model, found = bare(make), Counts()
    with watched() as watch:
        worker = worker_of(moved(model))
        worker._prepare()
        watch.taken()
        worker.extend(ScorerInput([Prompt(r, r, np.ones(5 + r, np.int32)) for r in range(rows)]))
        found["prompts"] = watch.taken()
        worker.extend(ScorerInput([_chunk(r, 0, 8) for r in range(rows)], supports=True))
        found["chunks"] = watch.taken()
        worker.extend(ScorerInput([_chunk(r, 8, 3) for r in range(rows // 2)], supports=True))
        watch.taken()
        worker.finish(dict.fromkeys(range(rows // 2), 11))
        found["finish"] = watch.taken()
    return found


def _chunk(rollout: int, start: int, count: int) -> Chunk:
    support = Support(np.tile(np.arange(4, dtype=np.int32), count), np.full(count, 4, np.int32))
    tokens = np.ones(count, np.int32)
    return Chunk(rollout, start, tokens, np.zeros(count, np.float32), np.zeros(count, np.int32), support)


def with_critic() -> ActorCritic:
    return ActorCritic(bare(causal), bare(scalar))


def without_critic() -> ActorCritic:
    return ActorCritic(bare(causal))


def with_trunk() -> ActorCritic:
    actor = bare(causal)
    with torch.device("meta"):
        return ActorCritic(actor, value_model_on(actor))


def with_adapters() -> ActorCritic:
    actor = bare(causal)
    with torch.device("meta"):
        add_lora(actor, 4, 8)
    return ActorCritic(actor)


def core_of(models: ActorCritic) -> HfTrainerCore:
    settings = TrainerSettings(epochs=1, micro_batch_tokens=64)
    loss = ClippedLoss() if models.critic is None else PPOLoss()
    return HfTrainerCore(models, Sampling(max_new_tokens=16), settings, loss, TrainerCounts.new())


def batch_for(core: HfTrainerCore) -> Batch:
    return longest_batch(6, Load(6, 8, 16, 8), critic=core.critic is not None)


def update(made: Callable[[], ActorCritic]) -> Counts:
    """An update of several micro-batches."""
    models = made()
    with watched() as watch:
        core = core_of(moved(models))
        batch = batch_for(core)
        core.optimisation  # noqa: B018 - made here
        watch.taken()
        core.update(batch)
        return {"update": watch.taken() | {"micro-batches": core.counts.micro_batches}}


def streamed() -> Counts:
    """An update whose first rows come early."""
    models, found = without_critic(), Counts()
    with watched() as watch:
        core = core_of(moved(models))
        batch = batch_for(core)
        core.optimisation  # noqa: B018 - made here
        watch.taken()
        core.accumulate(rows_of(batch, range(4)))
        found["accumulate"] = watch.taken() | {"micro-batches": core.counts.micro_batches}
        core.commit(batch)
        found["commit"] = watch.taken()
    assert core.counts.micro_batches == 3, "the rest was added to what was accumulated"
    return found


def merge() -> Counts:
    """Adapters added to the weights that another engine samples from."""
    models = with_adapters()
    with watched() as watch:
        merged(moved(models).actor)
        return {"all": watch.taken()}


def sync(make: Make = causal) -> Counts:
    """A trainer whose weights go to a policy on a second device; copies of them; a checkpoint."""
    model, found = bare(make), Counts()
    with watched() as watch:
        served = moved(model, "gpu:1")
        trained = ActorCritic(served).copied(torch.device("gpu", 0))
        left = {str(each.device) for each in (*trained.parameters(), *trained.buffers())}
        assert left == {"gpu:0"}, left
        core = core_of(trained)
        core.update(batch_for(core))
        watch.taken()
        assert adopt(served, core.weights().actor) == len(served.state_dict())
        found["sync"] = watch.taken()
        copies(core.weights().actor)
        found["copies"] = watch.taken()
        assert {each.device.type for each in gather_training(core.optimisation, Alone()).values()} == {"cpu"}
    return found


def refused() -> Counts:
    """What a device refuses, and what makes the host wait: each entry is how the harness took it."""

    def joined() -> None:
        torch.stack([torch.zeros(()), torch.zeros((), device="gpu:0")])

    def added() -> None:
        torch.zeros(3) + torch.zeros(3, device="gpu:0")

    def between() -> None:
        torch.zeros(3, device="gpu:1") + torch.zeros(3, device="gpu:0")

    def to_numpy() -> None:
        torch.zeros(3, device="gpu:0").numpy()

    def waits() -> None:
        on = torch.zeros(3, device="gpu:0")
        float(on.sum()), on.cpu(), on.tolist(), on[on > 0], on.nonzero()

    def uploads() -> None:
        on = torch.zeros(3, device="gpu:0")
        torch.tensor([1], device="gpu:0"), torch.zeros(3).to("gpu:0"), on[[0, 1]], on[torch.tensor([0])]

    found = Counts()
    with watched() as watch:
        for work in (joined, added, between, to_numpy, waits, uploads):
            try:
                work()
            except (RuntimeError, TypeError) as error:
                watch.taken()
                found[work.__name__] = {"refused": str(error)}
            else:
                found[work.__name__] = watch.taken()
    return found


def sized(**sizes: int) -> PreTrainedModel:
    return tiny.of(tiny.build(Qwen2Config, tiny.GROUPED, **sizes), dtype=torch.bfloat16)


SCORED: Mapping[str, Callable[..., Counts]] = {
    "reference": partial(scored, causal, lambda model: ReferenceWorker(model, False, Sampling())),
    "reward": partial(scored, scalar, lambda model: RewardWorker(model, False)),
    "process reward": partial(
        scored, partial(tiny.steps, "qwen2"), lambda model: ProcessRewardWorker(model, False, (STOP,), 1, 0.0)
    ),
    "critic": partial(scored, scalar, lambda model: ValueWorker(model, False)),
}

gemma = partial(tiny.causal, "gemma2", dtype=torch.bfloat16)
WORKS: Mapping[str, Callable[[], Counts]] = {
    "decode": decode,
    "decode, greedy": partial(decode, temperature=0.0),
    "decode, gpt2": partial(decode, partial(tiny.causal, "gpt2")),
    "decode, six layers": partial(decode, partial(sized, num_hidden_layers=6)),
    "decode, large vocabulary": partial(decode, partial(sized, vocab_size=2**17)),
    "truncated sampling": truncated,
    **SCORED,
    **{f"{name}, 16 rows": partial(work, rows=16) for name, work in SCORED.items()},
    "PPO": partial(update, with_critic),
    "PPO, shared trunk": partial(update, with_trunk),
    "GRPO": partial(update, without_critic),
    "adapters": partial(update, with_adapters),
    "adapters, merged": merge,
    "streamed update": streamed,
    "weight sync": sync,
    "weight sync, gemma2": partial(sync, gemma),
    "the harness": refused,
}
"""By name; each returns what it did, by phase."""


def main() -> None:
    child.set_up()
    register()
    found = dict[str, dict[str, object]]()
    for name, work in WORKS.items():
        try:
            found[name] = {"phases": work()}
        except Exception:  # noqa: BLE001 - reported by the test of this name
            found[name] = {"error": traceback.format_exc()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
