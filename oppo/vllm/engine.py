"""The engine that a policy decodes on, in this process tree or over HTTP, and its requests for rollouts."""

from __future__ import annotations

from abc import abstractmethod
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from hashlib import blake2b
from operator import contains
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeAlias

import anyio
import numpy as np
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
from oppo.events import ChunkState, FinishReason, Response, RoutedExperts, Support, TokenColumns
from oppo.images import ImageRef
from oppo.models import Sampling
from oppo.placement.place import Closing
from oppo.rollout_buffer import DecodeEngine, RolloutBuffer, SampledToken
from oppo.turns import StopCriteria, turn_ended

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

GRACE: Final = 20.0  # seconds for which a cancellation waits while an engine takes weights
LOOK: Final = 0.1  # seconds between two looks at whether an engine is dead that owes an answer
SHOWN: Final = 3  # names that an error lists


@dataclass(slots=True)
class NewTokens:
    tokens: list[int]
    logprobs: list[Mapping[int, float]]  # of each token, by id, its own among them
    reason: str | None = None  # what ended the request
    starts: Sequence[tuple[str, int]] = ()  # versions behind its tokens so far, each with the index of the first
    steps: Sequence[NDArray[Any]] = ()  # experts of each of its decode steps so far, [positions, layers, top_k]
    routed: NDArray[Any] | None = None  # experts of the whole request, when it has ended

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs) or not all(map(contains, self.logprobs, self.tokens)):
            raise ValueError("a token has no log-prob")


class Collector(Protocol):
    def get_nowait(self) -> NewTokens | None:
        """Take the new tokens of a request, if any."""

    async def get(self) -> NewTokens:
        """Wait for something, and take it; safe to cancel."""


class WeightSender(Protocol):
    async def send(self, engine: Engine, tensors: Mapping[str, Tensor], version: str) -> None:
        """Have every worker serve ``tensors``, by their names in transformers; the engine is paused meanwhile."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    model: str
    shapes: Mapping[str, tuple[int, ...]]
    needed: tuple[frozenset[str], ...]  # names of parameters; of tied ones, one is enough
    outline: PreTrainedModel | None = None  # without weights, where a checkpoint has them in another form

    @classmethod
    def known(cls, model: str | Path, config: PretrainedConfig, trust_remote_code: bool) -> Self | None:
        try:
            return cls.of(Path(model).name, config, trust_remote_code=trust_remote_code)
        except (ModelRefused, ValueError):  # transformers cannot train it
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

    def check(self, tensors: Mapping[str, Tensor]) -> None:
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
        # vLLM reads the form of checkpoints: experts, one tensor here, are many there.
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - it takes seconds

        return dict(tensors) if self.outline is None else revert_weight_conversion(self.outline, dict(tensors))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")


class Engine(Closing):
    """The engine that a policy decodes on. Between two decodings it is paused; paused, it takes weights."""

    blind: str = "a server is given text only: use an engine of this process"  # why it is shown no images; or empty
    sleeps: bool = False  # while nothing is decoded, so that others have its GPUs' memory
    asleep: tuple[str, ...] = ()  # the parts without memory, in the order in which they wake
    adapts: bool = False  # the weights of an update are adapters alone
    adapter: str = ""  # the label of the newest
    defers: Literal["with the same tokens", "with other tokens"] = "with the same tokens"
    sender: WeightSender
    name: str
    vocabulary: int  # upper bound of token ids
    longest: int  # prompt and response together
    dtype: torch.dtype
    dtype_chosen: bool  # by its arguments, not by the model
    kv_tokens: int | None  # for which its KV cache has room, where it says so
    weights: ServedWeights | None  # None: of a model that transformers cannot train, or that pools

    def __init__(self) -> None:
        self.requests: set[str] = set()  # that policies have open
        self.closed = False
        self._loop: AbstractEventLoop | None = None
        with suppress(OppoError):  # vLLM takes the loop that runs now, or else the one of the first call
            self._loop = running_loop()

    @property
    @abstractmethod
    def advice(self) -> str:
        """The advice when the engine is lost."""

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
        return nullcontext()

    @abstractmethod
    async def submit(
        self, request: str, tokens: list[int], salt: str, params: Mapping[str, Any], images: Sequence[ImageRef] = ()
    ) -> Collector:
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
    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Initialise the weight transfer in the workers."""

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

    def _check_usable(self) -> None:
        if self.closed:
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
        """Give up the body, calls of the engine, when it dies. ``shield``: a cancellation waits for the body's end."""
        self._check_usable()
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


class RequestRoutes:
    # A request's routed experts, a row for each position that it reads; tokens have the first ``known`` rows.
    def __init__(self, known: int) -> None:
        self.known = known
        self.restart()

    def restart(self) -> None:
        self._rows: list[NDArray[Any]] = []
        self._steps = self._received = 0

    def receive(self, steps: Sequence[NDArray[Any]], whole: NDArray[Any] | None) -> None:
        # The routed experts of the steps of a request that goes on, or of the whole request when it ends.
        new = list(steps[self._steps :]) if whole is None else [whole[self._received :]]
        self._steps = len(steps)
        self._received += sum(map(len, new))
        self._rows += new

    def before(self, position: int) -> RoutedExperts:
        count = position - self.known
        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, 0, 0), np.uint8)
        if len(rows) < count:
            raise ProtocolError(
                f"vLLM gave the routed experts of {len(rows)} positions for a token that it read {count} for"
            )
        self._rows, self.known = [rows[count:]], position
        return RoutedExperts(rows[:count], np.array([count], np.int32))


class Request:
    """A rollout on the engine: one request, and another one after each turn and each time it is resumed."""

    def __init__(
        self,
        engine: DecodeEngine[Request],
        key: int,
        response: Response,
        limit: int,
        *,
        sampling: Sampling,
        stopping: StopCriteria,
        turns: bool,
        routed_experts: bool = False,
    ) -> None:
        ended = turn_ended(response, stopping, limit) if turns else None
        self.rollout = RolloutBuffer(engine, key, self, response, limit, turns=turns, ended=ended)
        self.prompt = response.prompt
        self.sampling = sampling
        self.id = ""  # in the engine; empty when there is none
        self.collector: Collector | None = None
        self.error: Exception | None = None  # which ends its decoding
        self.routes = RequestRoutes(response.extra[RoutedExperts].known(response.prompt)) if routed_experts else None
        self._stopping = stopping
        self._tokens = response.tokens.tolist()
        self._made = 0  # tokens of the request
        self._last: list[SampledToken] = []
        self._reason: FinishReason | None = None

    @property
    def written(self) -> int:
        return len(self._tokens)  # some may not be read yet

    @property
    def finished(self) -> bool:
        return self._reason is not None or self.rollout.ending or self.rollout.ended

    @property
    def idle(self) -> bool:
        return self.finished or self.rollout.unanswered

    @property
    def withheld(self) -> bool:
        return self.finished and not self.rollout.ended  # the end has not been reported

    def params(self, vocabulary: int) -> dict[str, object]:
        # vLLM adds at least -100 to a logit: ids that are never sampled become so improbable that, in float32, no
        # log-prob of another id tells.
        sampling, start, truncated = self.sampling, self.written, truncates(self.sampling)
        padding = [*sampling.barred, *range(sampling.vocabulary or vocabulary, vocabulary)]
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k if truncated else 0,
            "top_p": sampling.top_p if truncated else 1.0,
            "seed": digest_of(f"{sampling.seed} {self.prompt.admission} {self.prompt.stream} {start}"),
            "max_tokens": self.rollout.limit - start,
            "min_tokens": max(0, sampling.min_new_tokens - start) if sampling.stop else 0,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": True,
            "logprobs": sampling.top_k if truncated else 0,
            "detokenize": False,
            **({"logit_bias": dict.fromkeys(padding, -100.0)} if padding else {}),
            **({} if self.routes is None else {"routed_experts_prompt_start": self.routes.known}),
        }

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt.tokens.tolist(), *self._tokens]

    def submitted(self, collector: Collector) -> None:
        self.collector, self._made = collector, 0
        if self.routes is not None:
            self.routes.restart()

    def answered(self) -> None:
        self.collector = None  # tokens that the engine made after a turn are not part of the response
        self._tokens += self.rollout.pop_answer()

    def take(self, new: NewTokens, version_at: Callable[[int], int]) -> bool:
        """Take new tokens, also after a deferral, and return whether the engine has ended the request.

        The new tokens of a response that ends are held back until :meth:`release`. ``version_at`` returns the version
        of the weights that sampled the token at an index of the request.
        """
        if self.routes is not None:
            self.routes.receive(new.steps, new.routed)
        fresh: list[SampledToken] = []
        for token, found in zip(new.tokens, new.logprobs, strict=True):
            position = len(self.prompt.tokens) + self.written
            experts = RoutedExperts() if self.routes is None else self.routes.before(position)
            extra = TokenColumns(_support(found, token, self.sampling, self.written), experts)
            fresh.append((token, _checked(token, found[token]), version_at(self._made), extra))
            self._tokens.append(token)
            self._made += 1
            limit, start = self.rollout.bounds
            self._reason = self._stopping.reason(self._tokens, self.rollout.limit) or (
                "stop" if self.rollout.turns and limit.reached(self._tokens, self.written - start) else None
            )
            if self.finished:
                break
        turn = self._reason if self.rollout.turns and self._reason != "length" else None
        over = new.reason is not None
        if over and not self.finished:
            raise ProtocolError(
                f"vLLM ended rollout {self.prompt.rollout} with reason {new.reason!r} after "
                f"{self.written} of {self.rollout.limit} tokens, and none of them ends a response"
            )
        if turn is not None:
            self._reason = None
        elif self.finished:
            self._last = fresh
            return over
        going: ChunkState = "live" if self.rollout.live else "cut"
        for at, made in enumerate(fresh, 1):
            self.rollout.put(made, turn if turn and at == len(fresh) else going)
        return over

    def release(self) -> None:
        if self.rollout.ending:
            self.rollout.end()
            return
        last, self._last = self._last, []
        for at, made in enumerate(last, 1):
            self.rollout.put(made, self._reason if self._reason and at == len(last) else "live")


VllmDecode: TypeAlias = RolloutBuffer[Request]
"""One rollout of a :class:`oppo.vllm.VllmPolicy`."""


def reports_supports(sampling: Sampling) -> bool:
    # Under top_p vLLM can tell if top_k bounds the ids: it reports the log-probs of so many, and minus infinity of
    # those that top_p excludes.
    return not truncates(sampling) or sampling.top_k > 0


def truncates(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def digest_of(key: str) -> int:
    """Return a seed of 63 bits; a request that continues a response has another, so that no noise is used twice."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def _checked(token: int, logprob: float) -> float:
    if not np.isfinite(logprob):
        raise ModelError(
            f"vLLM gave token {token} the log-prob {logprob}, which is not finite: the weights have diverged or "
            "overflow their dtype"
        )
    return min(0.0, logprob)


def _support(found: Mapping[int, float], token: int, sampling: Sampling, position: int) -> Support:
    if truncates(sampling) and sampling.top_k:
        ids = sorted({token, *(each for each, logprob in found.items() if np.isfinite(logprob))})
        return Support(np.array(ids, np.int32), np.array([len(ids)], np.int32))
    early = sampling.stop if position < sampling.min_new_tokens else ()
    if left_out := (*sampling.barred, *early):
        return Support(np.array(left_out, np.int32), np.array([-len(left_out)], np.int32))
    return Support()
