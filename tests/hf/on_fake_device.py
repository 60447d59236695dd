"""A process whose models are on a device that is not there: prints what each kind of work did there, as JSON.

Fake tensors have shapes, dtypes and devices. Here they are of a backend without kernels, whose operations follow a
device's rules and are counted; to register it changes the whole process. Results are zeros and true, so this says
nothing about numbers, streams, races and recomputation.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Qwen2Config

from oppo.events import Batch, Chunk, Prompt, Support, TokenColumns
from oppo.hf import head
from oppo.hf.kv.reader import Incremental
from oppo.hf.kv.states import StateKey, StateSlots
from oppo.hf.lora import add_lora, merged
from oppo.hf.memory import Load, ModuleT, longest_batch
from oppo.hf.meta_device import WithoutData
from oppo.hf.serve.decoder import Decoder, DecodeRow, PolicyCore, Signals
from oppo.hf.serve.sampling import Drawing, draw
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
from oppo.hf.train.ranks import Team
from oppo.hf.train.trainer import HfTrainerCore
from oppo.hf.weights import adopt, copies
from oppo.limits import UNLIMITED
from oppo.losses import ClippedLoss, PPOLoss
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.rollout_buffer import DecodeStep
from oppo.training import TrainerSettings
from tests.hf import child, seeing, tiny
from tests.kit.responses import rows_of

Make = Callable[[], PreTrainedModel]
Counts = dict[str, dict[str, object]]
causal = partial(tiny.causal, "qwen2", dtype=torch.bfloat16)
scalar = partial(tiny.scalar, "qwen2")
STOP = 5
VOCABULARY = 1 << 12


def bare(make: Make) -> PreTrainedModel:
    with torch.device("meta"):
        return make()


class TritonKernels(ModuleType):
    """In place of :mod:`oppo.hf.kernels`, whose launches are counted where it is interpreted."""

    @staticmethod
    def draw(logits: Tensor, *given: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        rows = len(logits)
        return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)


def decode(make: Make = causal, *, temperature: float = 1.0, kernels: ModuleType | None = None) -> Counts:
    """Rows of many lengths, one of which ends early; then all are read again with new weights."""
    model, found = bare(make), Counts()
    with watched() as watch:
        sampling = Sampling(max_new_tokens=64, stop=(STOP,), temperature=temperature)
        core = PolicyCore(
            Decoder(moved(model), sampling=sampling, deterministic=False, prefill_tokens=4096), recompute=True
        )
        if kernels is not None:
            core._decoder._drawing = Drawing(sampling, torch.device("gpu", 0), kernels)
        rows = [DecodeRow(k, Prompt(k, k, np.arange(8 + 40 * k, dtype=np.int32)), 6 if k else 3) for k in range(8)]
        given = dict.fromkeys((row.key for row in rows), ((), (UNLIMITED, 0)))
        names = ["prefill", "first step", "step", "after an end", "last"]
        watch.taken()

        def deliver(step: DecodeStep) -> None:
            if names:
                found[names.pop(0)] = watch.taken() | {"segments": _segments(core)}

        core.run(rows, given, lambda ended: False, Signals.of(len(rows)), deliver)
        core.load({name: each.clone() for name, each in model.state_dict().items()}, 1)
        names[:] = ["prefill of another version"]
        again = [DecodeRow(k, Prompt(k, k, np.arange(8, dtype=np.int32)), 2) for k in range(8, 10)]
        core.run(
            again,
            dict.fromkeys((row.key for row in again), ((), (UNLIMITED, 0))),
            lambda ended: False,
            Signals.of(len(again)),
            deliver,
        )
    return found


def shown(samples: int) -> Counts:
    """A group of samples of a prompt with an image is decoded, and read by a scorer."""
    model, found, prompt = bare(partial(seeing.seeing, "llava")), Counts(), seeing.showing("llava", ["a"])
    with watched() as watch, patch.object(Incremental, "_check_features"):  # which reads tokens, and these have none
        moved(model)
        core = PolicyCore(Decoder(model, sampling=Sampling(), deterministic=False, prefill_tokens=4096), recompute=True)
        rows = [DecodeRow(k, replace(prompt, rollout=k), 2) for k in range(samples)]
        given = dict.fromkeys((row.key for row in rows), ((), (UNLIMITED, 0)))
        watch.taken()
        core.run(rows, given, lambda ended: False, Signals.of(samples), lambda step: None)
        found["decode"] = watch.taken()
        worker = ReferenceWorker(model, False, Sampling())
        worker._prepare()
        watch.taken()
        worker.extend(ScorerInput([row.prompt for row in rows]))
        found["prompts"] = watch.taken()
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
        worker.extend(ScorerInput([_chunk(r, 0, 8) for r in range(rows)], extra=(Support,)))
        found["chunks"] = watch.taken()
        worker.extend(ScorerInput([_chunk(r, 8, 3) for r in range(rows // 2)], extra=(Support,)))
        watch.taken()
        worker.finish(dict.fromkeys(range(rows // 2), 11))
        found["finish"] = watch.taken()
    return found


def _chunk(rollout: int, start: int, count: int) -> Chunk:
    support = Support(np.tile(np.arange(4, dtype=np.int32), count), np.full(count, 4, np.int32))
    tokens = np.ones(count, np.int32)
    return Chunk(rollout, start, tokens, np.zeros(count, np.float32), np.zeros(count, np.int32), TokenColumns(support))


def resized(layers: int) -> Counts:
    """Windows and recurrent states of rows that come and go."""
    with watched() as watch:
        slots = StateSlots()
        slots.admit(range(4))
        with slots.reading(range(4), None):
            for layer in range(layers):
                slots.keep(StateKey(layer, "window", 0), torch.zeros(4, 8, 4, device="gpu:0"))
                slots.keep(StateKey(layer, "recurrent", 0), torch.zeros(4, 2, 8, 8, device="gpu:0"))
        watch.taken()
        slots.admit(range(4, 40))
        found = {"grown": watch.taken()}
        slots.dismiss(range(2, 40))
        assert slots.capacity == 2
        return found | {"shrunk": watch.taken()}


class Measured(torch.autograd.Function):
    """In place of what :mod:`oppo.hf.kernels` reads and writes: one operation each way."""

    @classmethod
    def once(cls, logits: Tensor, *given: object, **options: object) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = cls.apply(logits)  # type: ignore[no-untyped-call] # torch's
        return found

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits)
        return logits.sum(-1), logits.new_empty(len(logits))

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor, _: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return torch.mul(logits, of_rows[:, None])


def of_logits(kernels: object = None, tokens: int = 16) -> Counts:
    """An update, with logits of so many tokens at a time."""
    changed = {"LOGITS_BYTES": tokens * VOCABULARY * 4, "WIDE": {"gpu"}, "kernels_on": lambda device: kernels}
    for name, value in changed.items():
        setattr(head, name, value)
    return update(lambda: ActorCritic(bare(partial(sized, vocab_size=VOCABULARY)), head_apart=True))


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
    models = made()
    with watched() as watch:
        core = core_of(moved(models))
        batch = batch_for(core)
        core.optimisation  # noqa: B018 - made here
        watch.taken()
        core.update(batch)
        return {"update": watch.taken() | {"micro-batches": core.counts.micro_batches}}


def streamed() -> Counts:
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
        assert {each.device.type for each in gather_training(core.optimisation, Team()).values()} == {"cpu"}
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

WORKS: Mapping[str, Callable[[], Counts]] = {
    "decode": decode,
    "decode, greedy": partial(decode, temperature=0.0),
    "decode, six layers": partial(decode, partial(sized, num_hidden_layers=6)),
    "decode, large vocabulary": partial(decode, partial(sized, vocab_size=2**17)),
    "decode, drawn by Triton": partial(decode, partial(sized, vocab_size=2**17), kernels=TritonKernels("kernels")),
    "truncated sampling": truncated,
    "images, one sample": partial(shown, 1),
    "images, four samples": partial(shown, 4),
    **SCORED,
    **{f"{name}, 16 rows": partial(work, rows=16) for name, work in SCORED.items()},
    "PPO": partial(update, with_critic),
    "PPO, shared trunk": partial(update, with_trunk),
    "GRPO": partial(update, without_critic),
    "adapters": partial(update, with_adapters),
    "adapters, merged": merge,
    "streamed update": streamed,
    "weight sync": sync,
    "states of one layer": partial(resized, 1),
    "states of 24 layers": partial(resized, 24),
    "the harness": refused,
    "update of logits": of_logits,
    "update of logits, 8 at a time": partial(of_logits, tokens=8),
    "update of logits, an eighth at a time": partial(of_logits, tokens=1),
    "update of logits, by Triton": partial(of_logits, SimpleNamespace(measured=Measured.once)),
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


aten = torch.ops.aten
JOINS = frozenset({"cat", "stack"})
"""Operations in which fake tensors, unlike a device, take a tensor without dimensions from another device."""
COPIES = frozenset({"_to_copy", "copy_"})
NO_KERNEL = frozenset({"device", "detach_", "empty", "empty_like", "new_empty"})
"""Operations that launch nothing, beside views."""
READ_LITTLE = frozenset({"gather", "index", "nll_loss_forward", "nll_loss_backward"})
"""Operations that read few elements of their inputs."""
TENSORS_A_LAUNCH = 64  # tensors that one launch copies, of a list of dense ones
INDEXING = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})
"""Operations that take indices from the CPU, and send them to the device."""


class _Absent(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        """Return false, so that fake tensors never touch the device."""
        return False

    def device_count(self) -> int:
        """Return 0: its random numbers have no state to keep."""
        return 0


def register() -> None:
    backend_registration._setup_privateuseone_for_python_backend("gpu", backend_module=_Absent())
    for holder, name, value in (
        (FakeTensorMode, "avoid_device_init", property(lambda mode: True)),
        (FakeTensor, "numpy", _numpy),
        (FakeTensor, "data_ptr", lambda tensor: id(tensor.untyped_storage()) + tensor.storage_offset()),
        (FakeTensor, "tolist", lambda tensor: tensor.cpu().numpy().tolist()),
    ):
        setattr(holder, name, value)


def _numpy(tensor: FakeTensor) -> NDArray[np.generic]:
    if tensor.device.type != "cpu":
        raise TypeError(f"cannot convert a tensor on {tensor.device} to numpy at {_place()}")
    return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class Watch(WithoutData):
    """Counts what makes the host wait, by place, and refuses what a device refuses.

    Attributes:
        waits: results that were read back: each waits until the device has done all its work.
        uploads: tensors that were sent to a device.
        kernels: operations on a device that are a kernel at least.
        moved: bytes that kernels read and write at least, by the sizes of the tensors that have several dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        if name == "to":  # in inference mode it comes as a whole
            with self:
                return func.decompose(*args, **kwargs)  # type: ignore[attr-defined]  # an operator's
        inputs = _devices((args, kwargs))
        if name in JOINS and len(inputs) > 1:
            raise RuntimeError(f"{name} of tensors on {sorted(map(str, inputs))} at {_place()}")
        if _on_device(inputs) and _reads_back(func, args):
            self.waits[_place()] += 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = _devices(result)
        if name in COPIES:
            self._transferred(name, args, outputs)
        elif func in INDEXING and len(inputs) > 1:
            self.uploads[_place()] += 1
        if _on_device(inputs | outputs) and (launches := _launches(func, name, args)):
            self.kernels[_place()] += launches
            for each in tree_leaves((() if name in READ_LITTLE else (args, kwargs), result)):
                if isinstance(each, Tensor) and len(sizes := sorted(size for size in each.shape if size > 1)) > 1:
                    self.moved["x".join(map(str, sizes))] += each.nbytes
        return result

    def _transferred(self, name: str, args: Sequence[Any], outputs: set[torch.device]) -> None:
        source = args[1] if name == "copy_" else args[0]
        was, now = _on_device(_devices(source)), _on_device(outputs)
        if was and not now:
            self.waits[_place()] += 1
        elif now and not was:
            self.uploads[_place()] += 1

    def taken(self) -> dict[str, object]:
        names = ("waits", "uploads", "kernels", "moved")
        found = {name: dict(vars(self).get(name, {})) for name in names}
        self.waits, self.uploads, self.kernels, self.moved = (Counter[str]() for _ in names)
        return dict[str, object](found)


def _launches(func: Any, name: str, args: Sequence[Any]) -> int:
    if func.is_view or name in NO_KERNEL:
        return 0
    if not name.startswith("_foreach"):
        return 1
    together = all(each.is_contiguous() for each in tree_leaves(args) if isinstance(each, Tensor))
    return -(-len(args[0]) // TENSORS_A_LAUNCH) if together else len(args[0])


def _devices(values: object) -> set[torch.device]:
    return {each.device for each in tree_leaves(values) if isinstance(each, Tensor)}


def _on_device(devices: set[torch.device]) -> bool:
    return any(each.type == "gpu" for each in devices)


def _reads_back(func: Callable[..., object], args: Sequence[Any]) -> bool:
    """Return whether the host needs a result: a number, or how many elements of a mask are true."""
    if func in {aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default}:
        return True
    return func in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])


def _place() -> str:
    """Return the innermost line of the package on the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if "/oppo/" in file and not file.endswith("live_bytes.py"):
            return f"oppo/{file.rpartition('/oppo/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


def _stripped(module: ModuleT) -> ModuleT:
    stripped = dict[int, Tensor]()

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in stripped:
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            stripped[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
        return stripped[id(tensor)]

    for part in module.modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            setattr(part, name, like(tensor))
    return module


def moved(module: ModuleT, device: str = "gpu:0") -> ModuleT:
    """Return a module made on the ``meta`` device, on a device; called in the context of :func:`watched`."""
    with torch.device(device):
        return _stripped(module)


@contextmanager
def watched() -> Iterator[Watch]:
    """Let tensors that are created inside be fake, and count what is done with them."""
    with FakeTensorMode(allow_non_fake_inputs=True), Watch() as watch:
        yield watch
