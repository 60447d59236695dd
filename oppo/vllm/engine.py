"""The engine that a policy decodes on, in this process tree or over HTTP: its facts, its calls and its death."""

from __future__ import annotations

from abc import abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

import anyio
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.errors import (
    ConfigError,
    ModelError,
    ModelLost,
    ModelRefused,
    OppoError,
    ProtocolError,
    as_itself,
    one_line,
    running_loop,
)
from oppo.placement.place import Closing

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

GRACE: Final = 20.0
"""Seconds for which a cancellation waits while an engine takes weights."""

LOOK: Final = 0.1
"""Seconds between two looks at whether an engine is dead that owes an answer."""


class Logprob(Protocol):
    @property
    def logprob(self) -> float:
        """Natural logarithm of the probability."""


@dataclass(slots=True)
class NewTokens:
    """What is new of a request.

    Attributes:
        logprobs: of each token: log-probs by id, its own among them.
        reason: what ended the request; ``None`` while it goes on.
        starts: versions behind the request's tokens so far, each with the index of its first token.
        steps: experts of each decode step of the request so far, [positions, layers, top_k].
        routed: experts of the whole request, when it has ended.
    """

    tokens: list[int]
    logprobs: list[Mapping[int, Logprob]]
    reason: str | None = None
    starts: Sequence[tuple[str, int]] = ()
    steps: Sequence[NDArray[Any]] = ()
    routed: NDArray[Any] | None = None


class Collector(Protocol):
    def get_nowait(self) -> NewTokens | None:
        """Take what is new of a request, if anything."""

    async def get(self) -> NewTokens:
        """Wait for something, and take it; safe to cancel."""


class WeightSender(Protocol):
    async def send(self, engine: Engine, tensors: Mapping[str, Tensor], version: str) -> None:
        """Have every worker serve ``tensors``, by their names in transformers; the engine is paused meanwhile."""


SHOWN = 3
"""Names that an error lists."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Names and shapes of a model's weights.

    Attributes:
        needed: names of parameters; of those that are tied to one another, one is enough.
        outline: transformers' model of the same config, without weights, if a checkpoint has them in another form.
    """

    model: str
    shapes: Mapping[str, tuple[int, ...]]
    needed: tuple[frozenset[str], ...]
    outline: PreTrainedModel | None = None

    @classmethod
    def known(cls, model: str | Path, config: PretrainedConfig, trust_remote_code: bool) -> Self | None:
        """Return them where transformers can train the model."""
        try:
            return cls.of(Path(model).name, config, trust_remote_code=trust_remote_code)
        except (ModelRefused, ValueError):
            return None

    @classmethod
    def of(cls, model: str, config: PretrainedConfig, *, trust_remote_code: bool = False) -> Self:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - it takes seconds
        from transformers.core_model_loading import Transpose, revert_weight_conversion  # noqa: PLC0415 - likewise

        from oppo.hf.model_files import CAUSAL  # noqa: PLC0415 - likewise

        with torch.device("meta"):
            made = CAUSAL.made(config, trust_remote_code=trust_remote_code)
        conversions = get_model_conversion_mapping(made, add_legacy=False)
        if any(isinstance(each, Transpose) for one in conversions for each in getattr(one, "operations", ())):
            raise ConfigError(
                f"checkpoints of {type(made).__name__} ({model}) have matrices transposed, and vLLM has not been seen "
                "to take those in a weight sync: set models.engine = 'transformers'"
            )
        tied: dict[int, set[str]] = {}
        for name, parameter in made.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), set()).add(name)
        state = made.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        outline = None if revert_weight_conversion(made, state).keys() == state.keys() else made
        return cls(model, shapes, tuple(frozenset(names) for names in tied.values()), outline)

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        missing = [min(names) for names in self.needed if not names & tensors.keys()]
        unknown = [name for name in tensors if name not in self.shapes]
        other = [
            f"{name} {list(tensors[name].shape)}, not {list(shape)}"
            for name, shape in self.shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ]
        faults = {"missing": missing, "unknown": unknown, "of another shape": other}
        said = [f"{len(names)} {what} ({_some(names)})" for what, names in faults.items() if names]
        if said:
            raise ModelError(
                f"these are not the weights of {self.model}, which vLLM serves: {', '.join(said)}; it goes on with "
                "those that it has: sync the model that the engine was started with, or start it with the model "
                "that is trained"
            )

    def as_saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights in the form of checkpoints, which vLLM reads: experts, one tensor here, are many there."""
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - it takes seconds

        return dict(tensors) if self.outline is None else revert_weight_conversion(self.outline, dict(tensors))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")


class Engine(Closing):
    """What a policy decodes on. Between two decodings it is paused; paused, it takes weights.

    Attributes:
        adapts: the weights of an update are adapters alone; ``adapter``: the label of the newest.
        vocabulary: upper bound of token ids; ``longest``: of prompt and response together.
        dtype_chosen: its arguments say so; else the model does.
        kv_tokens: the tokens for which its KV cache has room; ``None`` where it does not say.
        requests: ids of the requests that policies have open.
        weights: names and shapes; ``None`` for a model that transformers cannot train, or that pools.
        sleeps: while nothing is decoded, so that others have its GPUs' memory.
        asleep: the parts that have no memory now, in the order in which they wake.
    """

    sleeps: bool = False
    asleep: tuple[str, ...] = ()
    adapts: bool = False
    adapter: str = ""
    defers: Literal["with the same tokens", "with other tokens"] = "with the same tokens"
    sender: WeightSender
    name: str
    vocabulary: int
    longest: int
    dtype: torch.dtype
    dtype_chosen: bool
    kv_tokens: int | None
    weights: ServedWeights | None

    def __init__(self) -> None:
        self.requests: set[str] = set()
        self._closed = False
        self._loop: AbstractEventLoop | None = None
        with suppress(OppoError):  # vLLM takes the loop that runs now, or else the one of the first call
            self._loop = running_loop()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    @abstractmethod
    def advice(self) -> str:
        """What to do when it is lost."""

    @property
    @abstractmethod
    def errored(self) -> bool:
        """Whether it is dead."""

    def check_options(self, *, keeps_kv: bool, routed_experts: bool) -> None:
        """Raise ``ConfigError`` unless a policy can be served so."""

    @abstractmethod
    def abort(self) -> None:
        """Give it up; safe to call from any thread."""

    def streaming(self) -> AbstractAsyncContextManager[None]:
        """Have tokens come for as long as the context is open."""
        return nullcontext()

    @abstractmethod
    async def submit(self, request: str, tokens: list[int], salt: str, params: Mapping[str, Any]) -> Collector:
        """Begin a request; a paused engine holds it. ``salt`` keeps it from the KV cache of other weights."""

    @abstractmethod
    async def discard(self, requests: Sequence[str]) -> None:
        """End requests; those that are over are ignored."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop between two decode steps; requests stay."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on."""

    @abstractmethod
    async def recompute(self) -> bool:
        """Forget the KV cache, and return whether it has; requests compute theirs again."""

    @abstractmethod
    async def agree(self, info: dict[str, Any]) -> None:
        """Agree with the workers on how weights travel."""

    @abstractmethod
    async def start_update(self) -> None:
        """Begin an update of the weights."""

    @abstractmethod
    async def update(self, info: dict[str, Any]) -> None:
        """Load weights."""

    @abstractmethod
    async def finish_update(self, version: str | None = None) -> None:
        """End the update; later tokens are of this version."""

    @abstractmethod
    async def name_version(self, version: str) -> None:
        """Name the version of the weights that are served."""

    @abstractmethod
    async def load_adapter(self, version: str, path: str) -> None:
        """Load an adapter in the place of the last one, for requests in progress too."""

    async def fall_asleep(self) -> None:
        """Free the memory of weights and KV cache; requests stay, and compute their KV cache again when it wakes."""

    async def wake(self, *parts: str) -> None:
        """Take the memory of parts again; with the last that is asleep the engine goes on, as if it were resumed."""

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

    @contextmanager
    def as_lost(self) -> Iterator[None]:
        """Turn whatever a call of vLLM raises into ``ModelLost``, with what to do."""
        try:
            yield
        except OppoError:
            raise
        except Exception as error:
            raise ModelLost(
                f"vLLM has failed, and its rollouts are lost with it ({one_line(error)}): {self.advice}"
            ) from error

    @asynccontextmanager
    async def answered(self, *, shield: bool = False) -> AsyncIterator[None]:
        """Give up the body, calls of the engine, when the engine dies: it would never answer them.

        ``shield``: a cancellation from outside waits for the end of the body.
        """
        self.require_usable()
        died = False

        async def watch() -> None:
            nonlocal died
            while not self.errored:  # noqa: ASYNC110 - nothing announces it
                await anyio.sleep(LOOK)
            died = True
            calls.cancel_scope.cancel()

        with self.as_lost(), as_itself(), anyio.CancelScope(shield=shield):
            async with anyio.create_task_group() as calls:
                calls.start_soon(watch, name="watch for the engine's death")
                yield
                calls.cancel_scope.cancel()
        if died:
            raise ModelLost(f"vLLM has died, and its rollouts are lost with it: {self.advice}")


@asynccontextmanager
async def cancelled_after(seconds: float) -> AsyncIterator[None]:
    """Give the body so many more seconds when it is cancelled from outside."""

    async def outside() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            body.deadline = min(body.deadline, anyio.current_time() + seconds)

    with as_itself():
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope(shield=True) as body:
                tasks.start_soon(outside, name="watch for a cancellation")
                yield
            tasks.cancel_scope.cancel()
