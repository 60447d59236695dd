"""An engine of vLLM: started, watched and ended by the process that uses it."""

from __future__ import annotations

import signal
import threading
from abc import abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import torch

from oppo.errors import ConfigError, ModelRefused, OppoError, ProtocolError, running_loop
from oppo.log import logger, with_route
from oppo.observe import now
from oppo.placement.place import Closing
from oppo.signals import SIGNALS
from oppo.vllm.arguments import (
    computes_on_cpu,
    engine_arguments,
    lora_arguments,
    require_arguments,
    route_of,
)
from oppo.vllm.plugin import register, transfer_of
from oppo.vllm.processes import (
    Children,
    EngineFiles,
    cores_of,
    environment,
    failure,
    guarded,
    last_line,
    logging_to,
)
from oppo.vllm.surface import answered
from oppo.vllm.sync import AdapterSender, DeviceSender, FileSender, ServedWeights, WeightSender

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from oppo.vllm.surface import AsyncEngine


TOLD_EVERY: Final = 10.0
"""Seconds between two messages about an engine that is starting."""

PATIENCE: Final = 10.0
"""Seconds that an engine's processes have to end."""

Part: TypeAlias = Literal["weights", "kv_cache"]
"""What a sleeping engine has no memory of a GPU for."""


class Engine(Closing):
    """What a policy decodes on: an engine of this process, or a server.

    Attributes:
        llm: vLLM's ``AsyncLLM``, or what stands for it.
        sender: gives it the weights of an update.
        adapters: the same, where it gives the adapters alone; ``None`` where it gives all weights.
        name: of its model.
        vocabulary: upper bound of token ids.
        longest: the longest sequence, prompt and response, in tokens.
        dtype: of the weights that it serves.
        dtype_chosen: its arguments say so; else the model does.
        kv_tokens: the tokens for which its KV cache has room; ``None`` where it does not say.
        requests: ids of the requests that policies have open.
        weights: those of its model; ``None`` for one that transformers cannot train, or that pools.
        sleeps: while nothing is decoded, so that others have its GPUs' memory.
        asleep: the parts that have no memory now, in the order in which they wake.
        defers: how requests go on after a pause, as :class:`oppo.models.Capabilities` has it.
        advice: what to do when it is lost.
    """

    sleeps: bool = False
    asleep: tuple[Part, ...] = ()
    defers: Literal["with the same tokens", "with other tokens"] = "with the same tokens"
    llm: AsyncEngine
    sender: WeightSender
    name: str
    vocabulary: int
    longest: int
    dtype: torch.dtype
    dtype_chosen: bool
    kv_tokens: int | None
    weights: ServedWeights | None

    @property
    def adapters(self) -> AdapterSender | None:
        return self.sender if isinstance(self.sender, AdapterSender) else None

    def __init__(self) -> None:
        self.requests: set[str] = set()
        self._closed = False
        self._loop: AbstractEventLoop | None = None
        with suppress(OppoError):  # vLLM takes the loop that runs now, or else the one of the first call
            self._loop = running_loop()

    @property
    @abstractmethod
    def advice(self) -> str:
        """What to do when it is lost."""

    @property
    def closed(self) -> bool:
        return self._closed

    @abstractmethod
    def params(self, keywords: Mapping[str, object]) -> object:
        """Return the settings of a request; outputs hold what is new."""

    def streaming(self) -> AbstractAsyncContextManager[None]:
        """Have outputs come for as long as the context is open."""
        return nullcontext()

    def check_options(self, *, keeps_kv: bool, routed_experts: bool) -> None:
        """Raise ``ConfigError`` unless a policy can be served so."""

    async def fall_asleep(self) -> None:
        """Free the memory of weights and KV cache; requests stay, and compute their KV cache again when it wakes."""
        async with answered(self, shield=True):
            await self._sleep()
        self.asleep = ("weights", "kv_cache")

    async def wake(self, *parts: Part) -> None:
        """Take the memory of parts again; with the last that is asleep the engine goes on, as if it were resumed."""
        for part in [each for each in self.asleep if each in parts]:
            async with answered(self, shield=True):
                await self._wake(part)
            self.asleep = tuple(each for each in self.asleep if each != part)

    async def _sleep(self) -> None:
        raise ProtocolError(f"{type(self).__name__} does not sleep")

    async def _wake(self, part: Part) -> None:
        raise ProtocolError(f"{type(self).__name__} does not sleep, so {part} does not wake")

    def require_usable(self) -> None:
        if self._closed:
            raise ProtocolError(f"the engine of {self.name} was closed, so nothing can use it: start another one")
        loop = running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise ProtocolError(
                f"the engine of {self.name} works on the event loop that used it first, and this is another one: make "
                "all its calls within one anyio.run, or start an engine for each"
            )


class VllmEngine(Engine):
    """vLLM's ``AsyncLLM`` and its processes; a context manager that ends them.

    The processes take no signal from the terminal, write to a log, and end with this process however that ends.

    Attributes:
        config: vLLM's own.

    Example:
        >>> with VllmEngine.start("models/actor", arguments={"max_num_seqs": 64}) as engine:  # doctest: +SKIP
        ...     policy = VllmPolicy(engine, sampling=Sampling(max_new_tokens=128))
    """

    def __init__(
        self,
        llm: Any,
        sender: WeightSender,
        children: Children,
        stack: ExitStack,
        *,
        files: EngineFiles,
        weights: ServedWeights | None = None,
        dtype_chosen: bool = True,
        sleeps: bool = False,
    ) -> None:
        super().__init__()
        self.sleeps = sleeps
        self.llm: Any = llm
        self.sender = sender
        self.config: VllmConfig = llm.vllm_config
        self.name = Path(str(self.config.model_config.model)).name
        self.vocabulary = int(self.config.model_config.get_vocab_size())
        self.longest = int(self.config.model_config.max_model_len)
        self.dtype: torch.dtype = self.config.model_config.dtype
        self.dtype_chosen = dtype_chosen
        self.kv_tokens = getattr(self.config.cache_config, "kv_cache_size_tokens", None)
        self.weights = weights
        self._children = children
        self._stack = stack
        self._files = files

    @classmethod
    def start(
        cls,
        model: str | Path,
        *,
        arguments: Mapping[str, object] | None = None,
        trainer: torch.device | str = "cuda",
        cores: int | slice | None = None,
        adapters: int = 0,
        log: Path | None = None,
        sleeps: bool = False,
    ) -> Self:
        """Start an engine and wait until it is ready; blocks, so call it before the event loop or in the main thread.

        Its processes import the main module, so a program needs ``if __name__ == "__main__":``.

        Args:
            model: a directory or hub name, as transformers loads it.
            arguments: of vLLM's engine, by the names of its ``AsyncEngineArgs``.
            trainer: the device of the weights that will be synced; for an engine on a CPU it does not matter.
            adapters: rank of the adapters that will be synced, without the weights that they are added to; 0: all
                weights are synced.
            cores: CPU cores that it computes on, the first ones of this process, or a slice of its cores; ``None``: as
                vLLM chooses.
            log: the file for everything that it writes; ``None``: a temporary one, which stays if the engine fails.
            sleeps: while nothing is decoded, so that the trainer has its GPUs' memory.

        Raises:
            ConfigError: vLLM is not installed, an argument is unknown or refused, weights cannot go from the trainer to
                the engine, or it could not be started.
        """
        require_arguments(arguments or {})
        on_cpu = computes_on_cpu()
        began = now()
        logger.info(f"starting vLLM with {Path(model).name}")
        children = Children()
        with ExitStack() as stack:
            files = stack.enter_context(EngineFiles(log))
            stack.callback(children.join, 0.0)
            stack.enter_context(logging_to(files.log))
            chosen = environment(files, cores_of(cores), on_cpu=on_cpu)
            with _progress_logged(began, files.log), guarded(), chosen:
                try:
                    with heeded():
                        llm, sender = _async_llm(
                            str(model), arguments or {}, trainer, on_cpu=on_cpu, adapters=adapters, sleeps=sleeps
                        )
                except (KeyboardInterrupt, SystemExit, ConfigError):
                    raise
                except BaseException as error:
                    files.keep()
                    raise ConfigError(failure(model, error, files.log)) from error
            children.keep()
            logger.info(f"vLLM is ready after {now() - began:.0f} s")
            return cls(
                llm,
                sender,
                children,
                stack.pop_all(),
                files=files,
                weights=served_by(llm.vllm_config),
                dtype_chosen="dtype" in (arguments or {}),
                sleeps=sleeps,
            )

    def check_options(self, *, keeps_kv: bool, routed_experts: bool) -> None:
        del routed_experts
        if self.sleeps and keeps_kv:
            raise ConfigError(
                "an engine that sleeps has no KV cache that could be kept over a weight sync: set kv_on_sync = "
                "'recompute', or start it with sleeps=False"
            )

    async def _sleep(self) -> None:
        await self.llm.sleep(level=1, mode="keep")

    async def _wake(self, part: Part) -> None:
        await self.llm.wake_up(tags=[part])

    def params(self, keywords: Mapping[str, object]) -> object:
        """Return vLLM's ``SamplingParams``."""
        from vllm import SamplingParams  # noqa: PLC0415 - takes seconds to import
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        return SamplingParams(**keywords, output_kind=RequestOutputKind.DELTA)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that this one has started for the engine and that live."""
        return self._children.pids

    def abort(self) -> None:
        """Kill the engine; safe to call from any thread."""
        self._children.kill()

    @property
    def log(self) -> Path:
        return self._files.log

    @property
    def advice(self) -> str:
        """What to do when it is lost."""
        return (
            "start another engine, or go on from the newest checkpoint (oppo resume); "
            f"what the engine wrote is in {self.log}"
        )

    def close(self) -> None:
        """End the engine and all its processes; idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._stack:
            if not self.pids:  # it has died
                self._files.keep()
            self.llm.shutdown(timeout=PATIENCE)
            self.llm.shutdown = _nothing  # called again when it is collected, maybe while the interpreter ends


def _nothing(timeout: float | None = None) -> None:
    del timeout


def _async_llm(
    model: str, given: Mapping[str, object], trainer: torch.device | str, *, on_cpu: bool, adapters: int, sleeps: bool
) -> tuple[Any, WeightSender]:
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - takes seconds to import
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    register()
    sender: WeightSender
    if adapters:
        given, backend, sender = {**given, **lora_arguments(adapters)}, "file", AdapterSender(_adapter)
    else:
        route = route_of(given, torch.device(trainer), on_cpu=on_cpu)
        backend, sender = route.backend, FileSender() if route.backend == "file" else DeviceSender(route)
    arguments = engine_arguments(model, given, on_cpu=on_cpu, backend=transfer_of(backend), sleeps=sleeps)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), sender


def _adapter(name: str, path: str, replaces: bool) -> object:
    # Requests in progress go on with an adapter of the same number.
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - takes seconds to import

    return LoRARequest(name, 1, path, load_inplace=replaces)


def served_by(config: VllmConfig) -> ServedWeights | None:
    model = config.model_config
    if model.runner_type != "generate":
        return None
    try:
        return ServedWeights.of(Path(model.model).name, model.hf_config, trust_remote_code=model.trust_remote_code)
    except (ModelRefused, ValueError):
        return None


@contextmanager
def _progress_logged(began: float, log: Path) -> Iterator[None]:
    over = threading.Event()

    def work() -> None:
        while not over.wait(TOLD_EVERY):
            last = last_line(log)
            logger.info(f"starting vLLM: {now() - began:.0f} s{f', {last}' if last else ''}")

    thread = threading.Thread(target=with_route(work), name="vLLM's start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Heard(BaseException):
    """A signal came; no ``KeyboardInterrupt``, so that nothing takes it for one."""

    def __init__(self, number: int, frame: FrameType | None) -> None:
        super().__init__(number)
        self.number = number
        self.frame = frame


@contextmanager
def heeded() -> Iterator[None]:
    """Let a signal end the body, and only then call its handler.

    Handlers of Python are replaced meanwhile; off the main thread there are none.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS if on_main_thread}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}

    def hear(number: int, frame: FrameType | None) -> None:
        raise _Heard(number, frame)

    for number in handlers:
        signal.signal(number, hear)
    try:
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    except _Heard as heard:
        handlers[signal.Signals(heard.number)](heard.number, heard.frame)
        raise KeyboardInterrupt from None
