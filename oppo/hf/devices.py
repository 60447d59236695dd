"""Devices of models by name, cores of the CPU, the places of a run on them, and errors when their memory runs out.

The actor decodes on half of the cores; reward, reference and critic take turns on the rest, in a place
for each device; the update, which runs alone, has all of them. Each place is a thread or a process, or, for training
ranks, several processes. One more thread writes checkpoints and computes nothing. On a GPU each thread has a stream of
its own. The core counts are the same for every schedule and every choice of places, so that runs can be compared bit
for bit.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final, Literal, ParamSpec, Self, TypeAlias, TypeVar

import psutil
import torch

from oppo import observe
from oppo.errors import ConfigError, ModelError, one_line
from oppo.log import logger, with_route
from oppo.placement import Hosted, Hosting, Make, Place, Process, Ranks, Thread
from oppo.scheduling import DEFAULT_TIME_SLICE, GPU_TIME_SLICE, Priority
from oppo.simulate.profile import Hardware, gpu_named


def use_cores(count: int) -> None:
    # A thread new to torch adopts, with its first torch call, the count last set in any thread of the process. Reading
    # the count is such a first call, so the count set next stays.
    torch.get_num_threads()
    torch.set_num_threads(count)


def use_device(cores: int, device: torch.device) -> None:
    use_cores(cores)
    use_stream(device, first=True)


def available_cores() -> int:
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(bound, int(limit)) if limit.isdecimal() and int(limit) else bound


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")

CPU = torch.device("cpu")

# cuDNN's attention plans each pair of shapes anew, and the length of the keys changes with every decode step: a plan
# can take tenths of a second. A program that knows its shapes may turn it on again.
torch.backends.cuda.enable_cudnn_sdp(False)

# Products of float32 take TF32 on a GPU: several times as fast, and finer than bfloat16, which is the default there.
torch.backends.cuda.matmul.allow_tf32 = True


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products of float32 in float32, also on a GPU; in all threads."""
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def triton_kernels(
    name: str, device: torch.device, agrees: Callable[[ModuleType], bool], work: str
) -> ModuleType | None:
    # None: they do not run here, or give something else than a CPU.
    try:
        kernels = import_module(name)  # Triton is not installed everywhere
        if agrees(kernels):
            return kernels
        why = "they give something else than a CPU"
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way
        why = one_line(error)
    logger.info(f"{work} operation by operation on {device}: the kernels of Triton cannot be used ({why})")
    return None


def device_of(name: str, *, deterministic: bool = False, gpus: int | None = None) -> torch.device:
    """Return the available device of that name; ``auto``: the first CUDA device, if any and not ``deterministic``."""
    # gpus: CUDA devices of the machine that is planned for; None: of this one
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = here if gpus is None else gpus
    if name == "cpu" or (name == "auto" and (deterministic or not count)):
        return CPU
    number = torch.device("cuda" if name == "auto" else name).index or 0
    if number >= count:
        known = ", ".join(["cpu", *(f"cuda:{each}" for each in range(count))])
        if gpus is not None:
            raise ConfigError(f"there is no {name!r} on the machine that is assumed, which has {known}")
        build = "" if torch.version.cuda else f"; torch {torch.__version__} was built without CUDA"
        raise ConfigError(f"there is no {name!r} here: torch finds {known}{build}")
    return torch.device("cuda", number)


@cache
def peak_of(device: torch.device, dtype: torch.dtype, cores: int) -> float:
    """Return a device's peak in FLOP/s, by data sheet (TF32 in float32) or measured on a CPU; 0 for an unknown GPU."""
    if device.type == "cuda":
        gpu = gpu_named(torch.cuda.get_device_name(device))
        return 0.0 if gpu is None else gpu.flops / (2 if dtype == torch.float32 else 1)
    before, side, best, began = torch.get_num_threads(), 512 * math.isqrt(cores), math.inf, observe.now()
    matrix = torch.ones(side, side, dtype=dtype)
    use_cores(cores)
    try:
        while (start := observe.now()) < began + 0.1:
            matrix @ matrix
            best = min(best, observe.now() - start)
    finally:
        use_cores(before)
    return 2 * side**3 / best


def memory_gauges(devices: Iterable[torch.device]) -> Mapping[str, Callable[[], float]]:
    gpus = [device for device in devices if device.type == "cuda"]

    def gauge(read: Callable[[torch.device], int]) -> Callable[[], float]:
        return lambda: max(map(read, gpus)) / 2**30

    reads = {"memory/allocated": torch.cuda.max_memory_allocated, "memory/reserved": torch.cuda.max_memory_reserved}
    return {name: gauge(read) for name, read in reads.items()} if gpus else {}


def numbered(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def synchronised(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use_stream(device: torch.device, *, first: bool = False) -> None:
    """Let the calling thread work on the device in a stream of its own; with ``first``, of higher priority."""
    if device.type == "cuda":
        torch.cuda.set_device(numbered(device))
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1 if first else 0))


class DeviceThread(Thread):
    """A thread for models on one device: on a GPU it has a stream of its own, so that threads overlap there.

    Models that are hosted, and the results of calls, are complete for every other thread: hosting waits for what made
    the model, and a call ends, with its span, when the device has done its work. On a CPU it is a :class:`Thread`.

    Args:
        name, setup: see :class:`~oppo.placement.Thread`.
        device: of the models, such as ``"cuda:1"``; ``"cuda"`` is the current device.
        lends: after each call the GPU gets back the memory that is free: other streams cannot take what one has cached.
        first: its kernels start before those that wait in other streams.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | str,
        *,
        setup: Callable[[], None] | None = None,
        lends: bool = False,
        first: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._lends = lends

        def set_up() -> None:
            if setup is not None:
                setup()
            use_stream(self.device, first=first)

        super().__init__(name, setup=set_up)

    def host(self, make: Make[T], *, track: str = "") -> Hosted[T]:
        hosted = super().host(make, track=track)
        synchronised(self.device)
        return hosted

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        def synchronous(*args: P.args, **kwargs: P.kwargs) -> R:
            result = work(*args, **kwargs)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
                if self._lends:
                    torch.cuda.empty_cache()
            return result

        return await super().call_at(priority, track, label, synchronous, *args, **kwargs)


Home: TypeAlias = Literal["thread", "process"]
Scorers: TypeAlias = Literal["auto"] | Home

SCORED: Final = ("reference", "reward", "critic", "teacher", "proximal")

OF_ONE: Final = ("policy", "reference", "reward", "critic", "teacher")  # the models that have one device each


@dataclass(frozen=True, slots=True)
class Devices:
    # actor: of the policy as transformers loads it here. trainer: of each rank. remote: models on other machines; of
    # the trainer all ranks but the first. apart: models that are loaded where they are served: remote models, models
    # of a process on a GPU, whose memory is not shared, and a policy with replicas, which have a GPU each, beginning
    # with `policy`, or the CPU.

    policy: torch.device
    actor: torch.device
    trainer: tuple[torch.device, ...]
    reference: torch.device
    reward: torch.device
    critic: torch.device
    teacher: torch.device
    remote: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    replicas: int = 1

    @classmethod
    def found(
        cls,
        names: Mapping[str, Sequence[str]],
        key_of: Callable[[str], str],
        *,
        deterministic: bool = False,
        remote: frozenset[str] = frozenset(),
        scorers: Scorers = "auto",
        replicas: int = 1,
        gpus: int | None = None,
    ) -> Devices:
        # `key_of` names the setting of a model's device, for errors; `auto` of a remote model is as it is here.
        def found(model: str, number: int, name: str) -> torch.device:
            if model in remote and (number or model != "trainer") and name != "auto":
                return torch.device(name)
            try:
                return device_of(name, deterministic=deterministic, gpus=gpus)
            except ConfigError as error:
                raise ConfigError(f"{key_of(model)}: {error}") from error

        each = {
            model: tuple(found(model, number, name) for number, name in enumerate(named))
            for model, named in names.items()
        }
        one = {model: devices[0] for model, devices in each.items()}
        apart = [model for model in OF_ONE[1:] if scorers == "process" and one[model].type == "cuda"]
        found_here = cls(
            trainer=each["trainer"],
            remote=remote,
            apart=remote.union(apart, ["policy"] if replicas > 1 else []),
            replicas=replicas,
            **{name: one[name] for name in ("actor", *OF_ONE)},
        )
        for device in found_here.policies if "policy" not in remote else ():
            try:
                device_of(str(device), gpus=gpus)
            except ConfigError as error:
                raise ConfigError(
                    f"placement.policy_replicas = {replicas} gives each replica a GPU, from {one['policy']} on, and "
                    f"{error}: lower it, or set {key_of('policy')} to an earlier GPU"
                ) from error
        return found_here

    @property
    def policies(self) -> list[torch.device]:
        first = self.policy
        if first.index is None or "policy" in self.remote:
            return [first] * self.replicas
        return [torch.device(first.type, first.index + number) for number in range(self.replicas)]

    @property
    def weights(self) -> torch.device:
        """Where the whole trained weights are; several ranks gather theirs on the CPU."""
        return self.trainer[0] if len(self.trainer) == 1 else CPU

    @property
    def proximal(self) -> torch.device:
        return self.actor

    def scoring(self, models: Sequence[str] = SCORED) -> dict[str, torch.device]:
        return {model: getattr(self, model) for model in models}

    def speed(self, model: str, dtype: torch.dtype, cores: int, gpus: int) -> float:
        scoring = {device: cores - cores // 2 for name, device in self.scoring().items() if name not in self.remote}
        on = {
            "policy": [(self.policy, acting_share(cores))] * gpus,
            "trainer": [(device, max(1, cores // len(self.trainer))) for device in self.trainer],
        }.get(model, [*scoring.items()])
        peaks = [0.0 if model in self.remote else peak_of(device, dtype, share) for device, share in on]
        return sum(peaks) if all(peaks) else 0.0

    def here(self, scored: Sequence[str]) -> dict[str, torch.device]:
        """The devices of scorers on this machine; the CPU for functions beside a remote model."""
        on = self.scoring(scored)
        return {model: CPU if model in self.remote else device for model, device in on.items()}

    def distinct(self) -> list[torch.device]:
        scoring = self.scoring([model for model in SCORED if model not in self.remote])
        return list(dict.fromkeys([self.actor, *self.ranks_here, *scoring.values()]))

    @property
    def ranks_here(self) -> tuple[torch.device, ...]:
        return self.trainer[:1] if "trainer" in self.remote else self.trainer


@dataclass(frozen=True, slots=True, eq=False)
class RemotePlaces:
    """Places on other machines: of policy replicas by number, of scorers by model, and of the other training ranks."""

    acting: Callable[[int], Place] | None = None
    scoring: Mapping[str, Place] = field(default_factory=dict)
    training: Place | None = None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLayout:
    start: Callable[[int], Place]
    acting: MutableSequence[Place]
    scoring: Mapping[str, Place]
    training: Place
    saving: Thread
    remote: RemotePlaces

    @classmethod
    def of(
        cls,
        cores: int,
        devices: Devices,
        scorers: Scorers,
        *,
        scored: Sequence[str] = SCORED,
        policy: Home = "thread",
        trainer: Home = "thread",
        restarts: int = 3,
        remote: RemotePlaces | None = None,
    ) -> DeviceLayout:
        # Scorers on ``auto`` are in a process where there are two cores: they and the actor spend much of their time in
        # Python, which threads of one interpreter cannot do in parallel. Dead processes of scorers are replaced, at
        # most `restarts` in an hour; the actor's and the trainer's are not.
        remote, replicas = remote or RemotePlaces(), devices.replicas
        _require_cpu("policy", policy, [] if "policy" in devices.apart else [devices.actor])
        _require_cpu("trainer", trainer, devices.trainer)

        def sliced(made: Place, device: torch.device) -> Place:
            made.time_slice = DEFAULT_TIME_SLICE if device.type == "cpu" else GPU_TIME_SLICE
            return made

        def place(name: str, home: Home, share: int, device: torch.device, restarts: int = 0) -> Place:
            setup = partial(use_cores, share)
            if home == "thread":
                lends = name == "trainer" and device in (devices.actor, *devices.scoring().values())
                first = name == "actor"
                return sliced(DeviceThread(name, device, setup=setup, lends=lends, first=first), device)
            logger.info(f"starting the process of the {name}")
            return sliced(Process(name, setup=setup, restarts=restarts), device)

        def replica(number: int) -> Place:
            if replicas == 1:
                return place("actor", policy, acting_share(cores), devices.actor)
            logger.info(f"starting the process of the policy's replica {number}")
            device = devices.policies[number]
            setup = partial(use_device, max(1, acting_share(cores) // replicas), device)
            return sliced(Process(f"policy {number}", setup=setup), device)

        def home(model: str, device: torch.device) -> Home:
            if device.type == "cuda":  # a model that reads the actor's own weights is on the actor's device
                return "process" if scorers == "process" and model != "proximal" else "thread"
            return ("process" if cores > 1 else "thread") if scorers == "auto" else scorers

        on = {model: (device, home(model, device)) for model, device in devices.here(scored).items()}
        places = {}
        for device, kind in dict.fromkeys(on.values()):
            models = [model for model, each in on.items() if each == (device, kind)]
            among = "proximal" if models == ["proximal"] else "scorers"
            name = among if len(models) == len(on) else f"{among} on {device}"
            places[device, kind] = place(name, kind, cores - cores // 2, device, restarts)
        ranks = remote.training or _ranks(len(devices.trainer), cores)
        start = remote.acting or replica
        return cls(
            start,
            [start(number) for number in range(replicas)],
            {model: places[each] for model, each in on.items()},
            ranks or place("trainer", trainer, cores, devices.trainer[0]),
            Thread("saver"),
            remote,
        )

    def __iter__(self) -> Iterator[Place]:
        scoring = (*self.scoring.values(), *self.remote.scoring.values())
        yield from dict.fromkeys([*self.acting, *scoring, self.training, self.saving])

    def replaced(self, number: int) -> Place:
        lost = self.acting[number]
        if isinstance(lost, Process):
            lost.abort()
        place = self.acting[number] = self.start(number)
        place.listener = lost.listener
        lost.close()
        return place

    def place_of(self, model: str) -> Place:
        return self.remote.scoring.get(model) or self.scoring[model]

    def wait_until_ready(self) -> None:
        # So that the errors of processes come before the run begins.
        with ThreadPoolExecutor() as threads:  # they load their models side by side
            waits = [threads.submit(with_route(place.wait_until_ready)) for place in self._processes()]
            try:
                for wait in waits:
                    wait.result()
            except BaseException:
                self.abort()
                raise

    def abort(self) -> None:
        # Safe to call from any thread. The trainer's are killed only during a call: saving needs them.
        for place in self._processes():
            if place is not self.training or place.at_work:
                place.abort()

    def _processes(self) -> list[Process]:
        return [place for place in self if isinstance(place, Process)]

    def close(self) -> None:
        # After each place's call in progress; the saver first, since saving needs the trainer.
        for place in reversed(list(self)):
            place.close()
        self.remote.close()


def _ranks(count: int, cores: int) -> Place | None:
    if count == 1:
        return None
    logger.info(f"starting {count} training ranks")
    return Ranks("trainer", count, setup=partial(use_cores, max(1, cores // count)))


def _require_cpu(setting: str, home: Home, devices: Iterable[torch.device]) -> None:
    for device in devices:
        if home == "process" and device.type != "cpu":
            raise ConfigError(
                f"run.{setting} = 'process' shares weights with a process, which is for a CPU, and the models are on "
                f"{device}: expected run.{setting} = 'thread'"
            )


def acting_share(cores: int) -> int:
    return max(1, cores // 2)


_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


def require_sharable_memory(reader: str, remedy: str) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", "").split(","):
            raise ConfigError(
                f"{name} has expandable_segments:True, and {reader} reads weights by CUDA IPC, which needs memory of "
                f"cudaMalloc: leave that out, or {remedy}"
            )


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is an allocator's; allocators have no error type in common."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError | OSError) and any(sign in str(error).lower() for sign in _SIGNS):
            return True
        error = error.__cause__
    return False


@contextmanager
def attributed(model: str, doing: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # any kind: the cause decides
        if not ran_out(error):
            raise
        first_line = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(f"the {model} ran out of memory while {doing}: {remedy} ({first_line})") from error


@dataclass(frozen=True, slots=True, eq=False)
class ModelPlace:
    """A place that hosts one model, whose out-of-memory errors name it and a ``remedy``; several may share one."""

    place: Hosting
    model: str
    remedy: str

    def host(self, make: Make[T], *, track: str = "") -> Hosted[T]:
        with self.attributed("was given a home"):
            hosted = self.place.host(make, track=track or self.model)
        return hosted.guarded(lambda label: self.attributed(f"did {label!r}"))

    def attributed(self, doing: str) -> AbstractContextManager[None]:
        return attributed(self.model, f"it {doing}", self.remedy)


_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The memory limit of a container, where there is one."""


def free(device: torch.device) -> int:
    """Return the bytes of a device that are free now; of a CPU, those that a process can get without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available: int = psutil.virtual_memory().available
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # "max": no limit
            available = min(available, int(limit.read_text()))
    return available


def memory_of(device: torch.device, assumed: Hardware | None = None) -> tuple[int, int] | None:
    """Return the free and all bytes of a device; ``None`` for the CPU of a machine that is assumed."""
    if assumed is not None:
        return None if device.type == "cpu" else (assumed.bytes, assumed.bytes)
    there = free(device)
    return there, torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else there


_INTERVAL: Final = 0.02  # seconds between two readings of the system's figures


class Peak:
    """Measures memory from its beginning to its end; a context manager.

    On a CPU the system says how much this process and its children have, shared memory counted once; on a GPU, PyTorch
    what this process has allocated.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="oppo-memory", daemon=True)
        self._most = 0

    def __enter__(self) -> Self:
        for number in _gpus():
            torch.cuda.reset_peak_memory_stats(number)
        self._most = self._used()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def by_device(self) -> dict[torch.device, int]:
        on_gpus = {torch.device("cuda", each): torch.cuda.max_memory_allocated(each) for each in _gpus()}
        return {CPU: max(self._most, self._used()), **{device: most for device, most in on_gpus.items() if most}}

    def _watch(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._most = max(self._most, self._used())

    def _used(self) -> int:
        used = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended
                used += getattr(process.memory_full_info(), "pss", process.memory_info().rss)
        return used


def _gpus() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
