"""The seam to models: small protocols that a backend implements and the stages consume.

Token ids and floats cross it, as numpy arrays; nothing here knows torch. Fakes for all of them, and the checks a
third-party backend should pass, are in :mod:`oppo.testing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from inspect import isroutine
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import anyio
import numpy as np
from annotated_types import Gt, Le
from numpy.typing import NDArray

from oppo.declared import Count, Filled, FromList, NonNegative, PositiveCount, Seed, require_metrics, setting, validated
from oppo.errors import ProtocolError, promised
from oppo.events import Batch, Chunk, Finish, Prompt, Response, ToolTokens, described
from oppo.scheduling import IN_ORDER, Priority

T_co = TypeVar("T_co", covariant=True)

Cut: TypeAlias = Callable[[Sequence[int]], bool]
"""``cut(finished)``: receives the rollouts that finished in one decode step, in admission order; true stops decoding.

The engine calls it between two decode steps, possibly from its own thread: exactly once for each decode step in which
rollouts finished, before a reader can see the last chunk of any of them, and never again after it answered true.
"""


Detokenize: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the text of token ids; a policy calls it where its model lives."""

COOLEST: Final = 1e-3
"""The lowest temperature but 0: logits divided by less leave the range in which float32 tells them apart."""

HOTTEST: Final = 1e3
"""The highest temperature: logits divided by more are all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
@validated()
class SamplingSettings:
    """How the policy draws tokens, as far as that needs no tokenizer; see :class:`Sampling`.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: PositiveCount = setting(128, "most tokens of a response, which then ends with reason `length`")
    temperature: NonNegative = setting(1.0, "divides the logits; 0 is greedy, with log-probs at temperature 1")
    top_k: Count = setting(0, "only the k most likely tokens are sampled, and log-probs are over them; 0 keeps all")
    top_p: Annotated[float, Gt(0), Le(1)] = setting(
        1.0,
        "only the most likely tokens that reach this probability are sampled, and log-probs are over them; their ids "
        "are stored (4 bytes each, for each token), which `top_k` bounds; 1 keeps all",
    )
    min_new_tokens: Count = setting(
        0, "no token of `stop` is sampled before a response has so many tokens, and log-probs are over the others"
    )
    stop_strings: Annotated[tuple[Filled, ...], FromList()] = setting(
        (), "texts that end a response with the token that completes them"
    )
    seed: Seed = setting(0, "keys the noise, together with the rollout and the position in it")

    def __post_init__(self) -> None:
        if self.temperature and not COOLEST <= self.temperature <= HOTTEST:
            raise ValueError(
                f"temperature must be 0, which is greedy, or {COOLEST:g} to {HOTTEST:g}; got {self.temperature}"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}); got {self.min_new_tokens}"
            )
        if not all(self.stop_strings):
            raise ValueError(f"a stop string must have at least one character; got {self.stop_strings}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingSettings):
    """How the policy draws tokens; the trainer and the reference apply the same temperature and truncation.

    If ``top_k``, ``top_p`` or ``min_new_tokens`` excludes ids, a token is one of the others, renormalised, and its
    log-prob, entropy and KL are taken over these. They travel with the token, as its :class:`~oppo.events.Support`, to
    the reference and the trainer. At that position the excluded ids are neither learnt from nor held to the reference.
    With ``top_p`` alone a token of an unsure policy with a large vocabulary has tens of thousands of ids, of 4 bytes
    each, which ``top_k`` bounds. For ``min_new_tokens`` alone the few excluded ids are listed instead.

    Attributes:
        stop: token ids that end a response (reason ``eos`` for the first, ``stop`` for the others); each is part of
            the response.
        vocabulary: the ids below it are sampled, and log-probs, entropies and KL are over these alone: a model's table
            may be padded with ids that the tokenizer does not have, and a reference's or a teacher's further than the
            policy's. 0: each model's whole table.
        barred: ids that are never sampled, such as those that stand for an image.
    """

    stop: tuple[int, ...] = ()
    vocabulary: Count = 0
    barred: tuple[int, ...] = ()

    @property
    def varies(self) -> bool:
        """Whether responses may differ in length: a token or a text can end one before ``max_new_tokens``."""
        return bool(self.stop or self.stop_strings) and self.min_new_tokens < self.max_new_tokens

    @property
    def ids(self) -> slice:
        """The ids that may be sampled, as an index of logits [..., V]."""
        return slice(self.vocabulary or None)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A snapshot of what is trained: the backend's tensors by ``state_dict`` name.

    Attributes:
        version: the number of updates behind it.
        actor: adapters included, if there are any; empty if the actor is not trained.
        critic: empty without one.
        merge: returns the actor's weights with the products of its adapters added, under the names of a model without
            adapters; ``None``: it has none.
        adapters: returns the matrices of its adapters by PEFT's names, scaled, so that their products are what they
            add; ``None``: it has none.
    """

    version: int
    actor: Mapping[str, object] = field(default_factory=dict)
    critic: Mapping[str, object] = field(default_factory=dict)
    merge: Callable[[], Mapping[str, object]] | None = None
    adapters: Callable[[], Mapping[str, object]] | None = None

    def standalone(self) -> Mapping[str, object]:
        """Return the actor's weights for an engine that knows no adapters; this may compute, in any thread."""
        return self.actor if self.merge is None else self.merge()


@runtime_checkable
class SyncedModel(Protocol):
    """A served model whose weights follow the trainer's.

    What else it can do is known by its members: :class:`ServesByReference`, :class:`CopiesWeights`,
    :class:`BorrowsWeights`. One that stands for another has that as ``stands_for``.
    """

    @property
    def version(self) -> int:
        """Version of the weights in use: the number of updates behind them."""

    async def load(self, weights: Weights) -> None:
        """Serve these weights from the next call on; on failure, go on serving the old ones."""


@runtime_checkable
class ServesByReference(Protocol):
    """A synced model that may serve the very tensors that are trained, so that an update changes its weights."""

    def serves(self, weights: Weights) -> bool:
        """Return whether a tensor of ``weights`` is one that it serves."""

    def tensors(self) -> frozenset[int]:
        """Return the addresses of the tensors that new weights change; another model may serve the very same."""


@runtime_checkable
class CopiesWeights(Protocol):
    """A synced model that can copy weights which it will serve later, when the trainer's own have changed."""

    async def copied(self, weights: Weights) -> Weights:
        """Return a copy of the weights that it serves of these, in memory of its own."""


@runtime_checkable
class BorrowsWeights(Protocol):
    """A synced model that may go on to read the trainer's own tensors when it has loaded them."""

    async def settled(self) -> None:
        """Wait until it reads none of the trainer's tensors; it reads none until the next load, so they may change."""

    async def starved(self) -> None:
        """Return once it serves nothing until the next load, so that waiting for its output would never end."""


class Decode(Protocol):
    """One rollout being decoded; between steps it keeps its unread tokens, and no task owns it."""

    async def read(self, limit: int) -> Chunk | ToolTokens:
        """Return the next ``limit`` tokens, or fewer up to a border of tool tokens, the end of a turn or the cut.

        Their ``state`` says whether there are more.

        Cancel-safe: a cancelled read takes nothing.
        """

    async def aclose(self) -> None:
        """Discard the rollout and free its memory; idempotent. A later :meth:`read` raises ``ProtocolError``."""


Loads: TypeAlias = Literal["refused", "when decoding ends", "between decode steps"]
"""When weights that are loaded during decoding take effect, the least capable first."""


Resumes: TypeAlias = Literal["refused", "with other tokens", "with the same tokens"]
"""How a response that is opened half-written goes on: not, with other draws, or as if written in one piece."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; a run that needs more is refused by name before the first step that would.

    Attributes:
        supports: where its sampling excludes ids, the ids that each token was sampled from are reported. Training needs
            them, since log-probs are over these ids.
        resumes: how responses go on that are opened half-written, as in a resumed run.
        adds_while_decoding: rollouts can join while others are decoded (:class:`Decoding`).
        loads_while_decoding: when weights that are loaded during decoding take effect.
        turns: a response can go on after a token that would end it; the policy is a
            :class:`~oppo.turns.MultiTurnPolicy`.
        adds_while_held: rollouts can join while an unanswered turn holds all others.
        varies_sampling: it can draw in several ways; the policy is a :class:`VariesSampling`.
        reports_progress: a watchdog can see that it works; the policy is a :class:`ReportsProgress`.
        defers: how responses go on that a cut has deferred, with the weights that they were begun with.
    """

    supports: bool = True
    resumes: Resumes = "with the same tokens"
    adds_while_decoding: bool = False
    loads_while_decoding: Loads = "refused"
    turns: bool = False
    adds_while_held: bool = False
    varies_sampling: bool = False
    reports_progress: bool = False
    defers: Literal["with the same tokens", "with other tokens"] = "with the same tokens"


class Decoding(Protocol):
    """Rollouts that are being decoded; an engine without the capability raises ``ProtocolError``."""

    async def add(self, decodes: Sequence[Decode]) -> None:
        """Decode these as well, from the next decode step on; those that come after the cut stay deferred."""

    def stop(self) -> None:
        """End decoding after the decode step in progress, as if ``cut`` had returned true; idempotent."""


@dataclass(frozen=True, slots=True)
class FixedDecoding:
    """A :class:`Decoding` of an engine without ``adds_while_decoding``: it raises ``ProtocolError``.

    Attributes:
        engine: its name, for the error.
    """

    engine: str

    def stop(self) -> None:
        """Do nothing: the engine has the cut only."""

    async def add(self, decodes: Sequence[Decode]) -> None:
        raise ProtocolError(
            f"{self.engine} decodes what it was given until that ends or is cut, so none of {len(decodes)} rollouts "
            "joins meanwhile: ask for its capabilities.adds_while_decoding first"
        )


class Policy(SyncedModel, Protocol):
    """The actor, with the engine that decodes; one that is an async context manager is open as long as the run."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the engine."""

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[Decode]:
        """Make a decode for each, without decoding yet.

        The decode of a response, from a resumed run, yields only the tokens after those it has.
        """

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        """Decode ``live``, and what joins, while the context is open, until each has ended or ``cut`` answers true.

        On exit, decoding has stopped between two decode steps and all its tasks and jobs are over. No token is made
        outside of the context, so weights may change there.
        """


class VariesSampling(Policy, Protocol):
    """A policy with the capability ``varies_sampling``: its engine can draw in several ways."""

    def with_sampling(self, sampling: Sampling) -> Policy:
        """Return a policy with the same engine and the same weights, after later syncs too, that draws so.

        One of the two decodes at a time. Rollouts of this one that are deferred meanwhile stay deferred.
        """


class ReportsProgress(Policy, Protocol):
    """A policy with the capability ``reports_progress``."""

    @property
    def progress(self) -> int:
        """A number that grows while a long call goes on; may be read from any thread."""


class Scorer(Protocol[T_co]):
    """A model that reads rollouts as they grow and returns a value of each complete one.

    A scorer that shares a place may also be a :class:`PrioritisedScorer`. What else it can do is in its attribute
    ``capabilities``, a :class:`~oppo.scorers.ScorerCapabilities`: its time slice, for example, or calls that overlap.
    One that is an async context manager is open as long as the run.
    """

    @property
    def version(self) -> int:
        """Version of the weights; constant for a frozen model."""

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        """Prefill events, in order and contiguous for each rollout; ``Prompt`` opens a session."""

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T_co]:
        """Return one value for each rollout, which was read to its end, and forget its session."""

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Drop sessions; unknown rollouts are fine."""


class PrioritisedScorer(Scorer[T_co], Protocol[T_co]):
    """A scorer whose three methods take the keyword ``priority``: all of them or none.

    The keyword is found in the signatures; the calls of other scorers are made in the order of arrival. A scorer that
    takes it must pass it to its place (:meth:`oppo.placement.Hosted.at`) with every call there: a call without it would
    wait for the end of the urgent calls to which it belongs.
    """

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        """Prefill events; a call that raises :class:`~oppo.scheduling.Preempted` has read nothing."""

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T_co]:
        """Return one value for each rollout, and forget its session."""

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Drop sessions; unknown rollouts are fine."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The outcome of an update.

    Attributes:
        metrics: by the names that ``docs/metrics.md`` lists first.
        nonfinite: rollouts in no optimizer step, because the loss or gradient of all their minibatches was not finite.
        skipped: rollouts of every minibatch whose optimizer step was skipped for that; those in another step are
            trained.

    Raises:
        ProtocolError: a metric is no number.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    nonfinite: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_metrics("Trained.metrics", self.metrics, error=ProtocolError)


@dataclass(frozen=True, slots=True)
class TrainerCapabilities:
    """What a trainer can do beside a :class:`Trainer`.

    Attributes:
        accumulates: it can take a batch in parts; it is a :class:`StreamingTrainer`.
        trains_by_reference: it may train the very tensors that a synced model serves, as a :class:`SyncsByReference`.
    """

    accumulates: bool = False
    trains_by_reference: bool = False

    @classmethod
    def of(cls, trainer: Trainer) -> TrainerCapabilities:
        """Return the ``capabilities`` of a trainer; one that has no such attribute has none of them."""
        found: TrainerCapabilities = getattr(trainer, "capabilities", cls())
        return found


class Trainer(Protocol):
    """Owns the weights that are trained.

    What else it can do, it says by an attribute ``capabilities``: a :class:`TrainerCapabilities`.
    """

    @property
    def version(self) -> int:
        """The number of updates made so far."""

    async def update(self, batch: Batch) -> Trained:
        """Train on one batch; this adds one to the version, even if every minibatch was skipped."""

    async def sync_weights(self, *synced: SyncedModel) -> None:
        """Give the current weights to each synced model; all of them have the new version afterwards.

        A failure is raised with a note of each synced model's version, and ends the run.
        """


class StreamingTrainer(Trainer, Protocol):
    """A trainer with the capability ``accumulates``: it takes a batch in parts, while the rest is being written.

    Its weights are its own: no served tensor is trained in place.
    """

    async def accumulate(self, part: Batch) -> None:
        """Add the gradient of some rows of the coming batch; weights and version do not change."""

    async def commit(self, batch: Batch) -> Trained:
        """Train on the batch, as :meth:`Trainer.update` does, with its accumulated gradient.

        A gradient of other rows than the batch's, or one that is not finite, is discarded, and the batch is trained
        whole. The next :meth:`Trainer.update` discards an accumulated gradient too.
        """


class ResumableTrainer(Trainer, Protocol):
    """A trainer that can be checkpointed, restored and watched."""

    @property
    def has_learned(self) -> bool:
        """Whether an update was made since the trainer was created or restored."""

    @property
    def progress(self) -> int:
        """A number that grows while an update goes on; may be read from any thread."""

    async def write(self, directory: Path) -> None:
        """Write all that :meth:`restore` needs, and what :meth:`save` writes.

        This and :meth:`save` may be awaited in an event loop of another thread.
        """

    async def save(self, directory: Path) -> None:
        """Write the trained models, as other programs load them."""

    async def restore(self, directory: Path) -> None:
        """Restore the state that ``directory`` holds; synced models get it with the next :meth:`sync_weights`."""


def model_behind(model: SyncedModel) -> SyncedModel:
    """Return the model to which a synced model passes weights on as its ``stands_for``; mostly itself."""
    behind: SyncedModel = getattr(model, "stands_for", model)
    return behind


def name_of(model: SyncedModel) -> str:
    """Return the name of a synced model's class, or of the one it stands for."""
    return type(model_behind(model)).__name__


def share_tensors(one: SyncedModel, other: SyncedModel) -> bool:
    """Return whether two models serve a tensor together, so that they get new weights together."""
    return (
        isinstance(one, ServesByReference)
        and isinstance(other, ServesByReference)
        and bool(one.tensors() & other.tensors())
    )


class SyncsByReference(ABC):
    """The part of a trainer that gives its weights by reference."""

    @property
    def capabilities(self) -> TrainerCapabilities:
        """It may train the very tensors that a synced model serves."""
        return TrainerCapabilities(trains_by_reference=True)

    @abstractmethod
    def weights(self) -> Weights:
        """Return the current weights by reference; never called during an update."""

    async def sync_weights(self, *synced: SyncedModel) -> None:
        """Give the current weights to each synced model with :func:`sync`; never half cancelled."""
        with anyio.CancelScope(shield=True):
            await sync(self.weights(), synced)
        await anyio.lowlevel.checkpoint_if_cancelled()

    def shares_weights(self, model: SyncedModel) -> bool:
        """Return whether an update changes what ``model`` serves before it is synced."""
        return isinstance(model, ServesByReference) and model.serves(self.weights())


async def sync(weights: Weights, synced: Sequence[SyncedModel]) -> None:
    """Give ``weights`` to each synced model, one after the other.

    A failure is final: the old weights no longer exist, and a model may share the storage of the new ones. A note says
    the version of each; the run ends, and resumes from a checkpoint.
    """
    for model in synced:
        try:
            await promised(model.load(weights), f"load() of {name_of(model)}")
        except Exception as error:
            held = ", ".join(f"{name_of(one)} has version {one.version}" for one in synced)
            error.add_note(f"while syncing version {weights.version}: {held}; do not go on from here")
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The costs of passes, in seconds: for each token, and each pair of one and another before it (attention)."""

    token: float = 0.0
    pair: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(token=self.token + other.token, pair=self.pair + other.pair)

    def reading(self, start: float, stop: float) -> float:
        return self.seconds(stop - start, (stop**2 - start**2) / 2)

    def seconds(self, tokens: float, pairs: float) -> float:
        return self.token * tokens + self.pair * pairs

    def whole(self, rows: NDArray[np.float64], *, padded: bool = False) -> float:
        """Return the seconds for whole rows, of which ``rows`` has the tokens, padded to the longest or not."""
        if padded:
            rows = np.full_like(rows, rows.max(initial=0))
        return float((self.token * rows + self.pair * rows**2 / 2).sum())


RewardFunction: TypeAlias = Callable[..., object]
"""``f(prompts, completions, **columns) -> sequence of float``, sync or async; lists are aligned."""


async def entered(models: Iterable[object]) -> AsyncExitStack:
    """Enter the models that are async context managers; return the stack that leaves them."""
    async with AsyncExitStack() as stack:
        for each in models:
            if isinstance(each, AbstractAsyncContextManager):
                await stack.enter_async_context(each)
        return stack.pop_all()


class Shared(ABC):
    """A context manager that several users enter: the first opens it, the last to leave closes it."""

    _users = 0
    _entered: AsyncExitStack

    @cached_property
    def _opening(self) -> anyio.Lock:
        return anyio.Lock()

    async def __aenter__(self) -> Self:
        async with self._opening:
            if not self._users:
                async with AsyncExitStack() as stack:
                    await self._open(stack)
                    self._entered = stack.pop_all()
            self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            await self._entered.__aexit__(kind, error, tb)

    @abstractmethod
    async def _open(self, stack: AsyncExitStack) -> None: ...


def require_model(model: object, kind: str, members: Sequence[str]) -> None:
    """Raise ``ProtocolError`` if ``model`` lacks one of the members of the protocol ``kind`` that the stages use."""
    lacking = [name for name in members if not hasattr(model, name)]
    if not lacking:
        return
    name = getattr(model, "__name__", None)
    got = type(model).__name__ + (f" {name!r}" if isinstance(name, str) else "")
    wrap = "; a reward function goes into FunctionReward(function, decode)" if isroutine(model) else ""
    raise ProtocolError(
        f"expected the protocol {kind}, an object with {', '.join(members)}; got {got}, which has no "
        f"{', '.join(lacking)}{wrap}"
    )


def require_count(results: object, rollouts: int, what: str) -> None:
    """Raise ``ProtocolError`` unless ``results`` is a sequence with one item for each rollout."""
    listed = isinstance(results, np.ndarray | Sequence) and not isinstance(results, str | bytes)
    if not isinstance(results, Sized) or not listed:
        raise ProtocolError(
            f"{what} must return a list, one item for each of {rollouts} rollouts; got {described(results)}"
        )
    if len(results) != rollouts:
        raise ProtocolError(f"{what} was asked for {rollouts} rollouts and answered for {len(results)}")
