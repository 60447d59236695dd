"""vLLM's ``AsyncLLM`` and its processes: started, watched and ended by the process that uses it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import uuid4

import anyio.to_thread
import torch

from oppo.errors import ConfigError, ModelError, one_line, shortened
from oppo.images import ImageRef
from oppo.liveness.signals import SIGNALS
from oppo.log import logger, with_route
from oppo.observe import now
from oppo.vllm.arguments import check_arguments, computes_on_cpu, engine_arguments, lora_arguments, route_of
from oppo.vllm.engine import Collector, Engine, NewTokens, ServedWeights, WeightSender
from oppo.vllm.images import Pictures
from oppo.vllm.plugin import register, transfer_of
from oppo.vllm.processes import Children, EngineFiles, cores_of, last_line, logging_to, starting
from oppo.vllm.sync import DeviceSender, FileSender

if TYPE_CHECKING:
    from vllm.config import VllmConfig


TOLD_EVERY: Final = 10.0  # seconds between two messages about an engine that is starting
PATIENCE: Final = 10.0  # seconds that an engine's processes have to end


class Collected:
    """vLLM's ``RequestOutputCollector``, read as :class:`~oppo.vllm.engine.NewTokens`."""

    def __init__(self, llm: Any, collector: Any) -> None:
        self._llm, self._collector = llm, collector

    def get_nowait(self) -> NewTokens | None:
        output = self._collector.get_nowait()
        return None if output is None else self._new(output)

    async def get(self) -> NewTokens:
        return self._new(await self._collector.get())

    def _new(self, output: Any) -> NewTokens:
        try:
            (completion,) = output.outputs
            listed = completion.logprobs or ()
            logprobs: list[Mapping[int, float]] = [
                {token: float(each.logprob) for token, each in found.items()} for found in listed
            ]
            new = NewTokens(list(map(int, completion.token_ids)), logprobs, completion.finish_reason)
            new.routed = getattr(completion, "routed_experts", None)
            # The tokens so far of a request that goes on; one that has ended names all its versions.
            if state := self._llm.output_processor.request_states.get(self._collector.request_id):
                new.starts, new.steps = state.weight_version_starts, getattr(state, "routed_experts_chunks", ())
            if spans := getattr(completion, "weight_versions", None):
                new.starts = [(span.version, span.start) for span in spans]
        except (AttributeError, TypeError, ValueError) as error:
            came = shortened(repr(output), 120)
            raise TypeError(f"expected one completion with the log-prob of each token, and got {came}") from error
        return new


class VllmEngine(Engine):
    """vLLM's ``AsyncLLM`` and its processes; a context manager that ends them.

    The processes take no signal from the terminal, write to a log, and end with this process however that ends.
    ``config`` is vLLM's own.

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
        adapts: bool = False,
        pictures: Pictures | None = None,
    ) -> None:
        super().__init__()
        self._pictures = pictures
        self.blind = "" if pictures else "vLLM was started for text: start it for images (images=True)"
        self.sleeps = sleeps
        self.llm: Any = llm
        self.sender, self.adapts = sender, adapts
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
        self._lora: object = None
        self._names = (f"score-{uuid4().hex[:8]}-{number}" for number in count())

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
        images: bool = False,
    ) -> Self:
        """Start an engine and wait until it is ready; blocks, so call it before the event loop or in the main thread.

        Its processes import the main module, so a program needs ``if __name__ == "__main__":``.

        Args:
            model: a directory or hub name, as transformers loads it.
            arguments: of vLLM's engine, by the names of its ``AsyncEngineArgs``.
            trainer: the device of the weights that will be synced; for an engine on a CPU it does not matter.
            adapters: rank of the adapters that will be synced alone; 0: all weights are synced.
            cores: CPU cores that it computes on: the first of this process, or a slice; ``None``: as vLLM chooses.
            log: the file for everything that it writes; ``None``: a temporary one, which stays if the engine fails.
            sleeps: while nothing is decoded, so that the trainer has its GPUs' memory.
            images: prompts may show images, as the processor of ``model`` in transformers reads them.

        Raises:
            ConfigError: vLLM is not installed, an argument is unknown or refused, weights cannot go from the trainer to
                the engine, or it could not be started.
        """
        if images and adapters:
            raise ConfigError(
                "adapters that are synced alone have not been seen to be exact beside images in prompts: set "
                "models.lora_sync = 'merged' (in a program: adapters=0)"
            )
        pictures = Pictures(model) if images else None
        check_arguments(arguments or {})
        on_cpu = computes_on_cpu()
        began = now()
        logger.info(f"starting vLLM with {Path(model).name}")
        children = Children()
        with ExitStack() as stack:
            files = stack.enter_context(EngineFiles(log))
            stack.callback(children.join, 0.0)
            stack.enter_context(logging_to(files.log))
            start = starting(model, files, cores_of(cores), on_cpu=on_cpu)
            with _progress_logged(began, files.log), start, heeded():
                llm, sender = _async_llm(
                    str(model), arguments or {}, trainer, on_cpu=on_cpu, adapters=adapters, sleeps=sleeps, images=images
                )
                if pictures is not None:
                    pictures.begin(llm)
            children.keep()
            served = llm.vllm_config.model_config
            trains = served.runner_type == "generate"
            logger.info(f"vLLM is ready after {now() - began:.0f} s")
            return cls(
                llm,
                sender,
                children,
                stack.pop_all(),
                files=files,
                weights=ServedWeights.known(served.model, served.hf_config, served.trust_remote_code)
                if trains
                else None,
                dtype_chosen="dtype" in (arguments or {}),
                sleeps=sleeps,
                adapts=adapters > 0,
                pictures=pictures,
            )

    def check_options(self, *, keeps_kv: bool, routed_experts: bool) -> None:
        del routed_experts
        if self.sleeps and keeps_kv:
            raise ConfigError(
                "an engine that sleeps has no KV cache that could be kept over a weight sync: set kv_on_sync = "
                "'recompute', or start it with sleeps=False"
            )

    @property
    def errored(self) -> bool:
        return bool(self.llm.errored)

    async def submit(
        self, request: str, tokens: list[int], salt: str, params: Mapping[str, Any], images: Sequence[ImageRef] = ()
    ) -> Collector:
        prompt: dict[str, object] = {"prompt_token_ids": tokens, "cache_salt": salt}
        if images and self._pictures is not None:
            prompt |= await anyio.to_thread.run_sync(self._pictures.shown, images)
        named = {"lora_request": self._lora} if self.adapts else {}
        try:
            collector = await self.llm.add_request(request, prompt, self.sampling(params, new=True), **named)
        except Exception as error:
            if not images or self.errored:
                raise
            paths = ", ".join(image.path for image in images)
            raise ModelError(f"vLLM cannot be shown {paths}: {one_line(error)}") from error
        return Collected(self.llm, collector)

    async def discard(self, requests: Sequence[str]) -> None:
        await self.llm.abort(requests)

    async def answers(self, prompts: Sequence[Mapping[str, object]], params: object) -> list[Any]:
        """Return vLLM's output for each prompt; requests whose caller was cancelled are discarded."""
        names = list(islice(self._names, len(prompts)))
        try:
            async with self.answered():
                collectors = [
                    await self.llm.add_request(name, {"type": "token", **prompt}, params)
                    for name, prompt in zip(names, prompts, strict=True)
                ]
                return [await collector.get() for collector in collectors]
        except BaseException:
            if not self.closed and not self.errored:
                async with self.answered(shield=True):
                    await self.discard(names)
            raise

    async def call_workers(self, method: str, *given: object) -> None:
        async with self.answered():
            await self.llm.collective_rpc(method, args=given)

    async def pause(self) -> None:
        await self.llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        await self.llm.resume_generation()

    async def recompute(self) -> bool:
        return bool(await self.llm.reset_prefix_cache(reset_running_requests=True))

    async def init_transfer(self, info: dict[str, Any]) -> None:
        await self.llm.init_weight_transfer_engine(SimpleNamespace(init_info=info))

    async def start_update(self) -> None:
        await self.llm.start_weight_update()

    async def update(self, info: dict[str, Any]) -> None:
        await self.llm.update_weights(SimpleNamespace(update_info=info))

    async def finish_update(self, version: str | None = None) -> None:
        await self.llm.finish_weight_update(weight_version=version)

    async def name_version(self, version: str) -> None:
        await self.llm.update_weight_version(version)

    async def load_adapter(self, version: str, path: str) -> None:
        await self.llm.add_lora(self.lora(version, path, replaces=True))
        self.adapter, self._lora = version, self.lora(version, path, replaces=False)

    @staticmethod
    def lora(name: str, path: str, *, replaces: bool) -> object:
        """Return vLLM's request for an adapter; requests in progress go on with one of the same number."""
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - takes seconds to import

        return LoRARequest(name, 1, path, load_inplace=replaces)

    async def fall_asleep(self) -> None:
        async with self.answered(shield=True):
            await self.llm.sleep(level=1, mode="keep")
        self.asleep = ("weights", "kv_cache")

    async def wake(self, *parts: str) -> None:
        for part in [each for each in self.asleep if each in parts]:
            async with self.answered(shield=True):
                await self.llm.wake_up(tags=[part])
            self.asleep = tuple(each for each in self.asleep if each != part)

    @staticmethod
    def sampling(keywords: Mapping[str, Any], *, new: bool = False) -> object:
        """Return vLLM's ``SamplingParams``; with ``new`` outputs hold the new tokens only."""
        from vllm import SamplingParams  # noqa: PLC0415 - takes seconds to import
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        kind = {"output_kind": RequestOutputKind.DELTA} if new else {}
        return SamplingParams(**keywords, **kind)

    @staticmethod
    def pooling(keywords: Mapping[str, Any]) -> object:
        from vllm import PoolingParams  # noqa: PLC0415 - takes seconds to import

        return PoolingParams(**keywords)

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
        return (
            "start another engine, or go on from the newest checkpoint (oppo resume); "
            f"what the engine wrote is in {self.log}"
        )

    def close(self) -> None:
        """End the engine and all its processes; idempotent."""
        if self.closed:
            return
        self.closed = True
        with self._stack:
            if not self.pids:  # it has died
                self._files.keep()
            self.llm.shutdown(timeout=PATIENCE)
            self.llm.shutdown = _nothing  # called again when it is collected, maybe while the interpreter ends


def _nothing(timeout: float | None = None) -> None:
    del timeout


def _async_llm(
    model: str,
    given: Mapping[str, object],
    trainer: torch.device | str,
    *,
    on_cpu: bool,
    adapters: int,
    sleeps: bool,
    images: bool,
) -> tuple[Any, WeightSender]:
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - takes seconds to import
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    register()
    sender: WeightSender
    if adapters:
        given, backend, sender = {**given, **lora_arguments(adapters)}, "file", FileSender(adapts=True)
    else:
        route = route_of(given, torch.device(trainer), on_cpu=on_cpu)
        backend, sender = route.backend, FileSender() if route.backend == "file" else DeviceSender(route)
    transfer = transfer_of(backend)
    arguments = engine_arguments(model, given, on_cpu=on_cpu, backend=transfer, sleeps=sleeps, images=images)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), sender


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


@contextmanager
def heeded() -> Iterator[None]:
    """Let a signal end the body, and only then call its handler of Python; off the main thread there are none."""
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
        number, frame = heard.args
        handlers[number](number, frame)
        raise KeyboardInterrupt from None
