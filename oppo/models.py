"""The seam to models: small protocols that a backend implements and the stages consume.

Token ids and floats cross it, as numpy arrays; nothing here knows torch. Fakes for all of them, and the checks a
third-party backend should pass, are in :mod:`oppo.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from annotated_types import Gt, Le

from oppo.declared import Count, Filled, FromList, NonNegative, PositiveCount, Seed, require_declared, setting
from oppo.errors import ProtocolError
from oppo.events import Batch, Chunk, Finish, FloatArray, Given, IntArray, Prompt, Response
from oppo.scheduling import IN_ORDER, Priority, TimeSlice
from oppo.support import Support

T_co = TypeVar("T_co", covariant=True)

PieceState: TypeAlias = Literal["live", "eos", "stop", "length", "cut"]
Cut: TypeAlias = Callable[[Sequence[int]], bool]
"""``cut(finished)``: told the rollouts that finished in one decode step, in admission order; true stops decoding.

The engine that decodes calls it, between two decode steps, possibly from its own thread: before any reader can see the
last piece of those rollouts, exactly once for each decode step in which something finished, and never after it has
answered true.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How the policy draws tokens, as far as that can be said without its tokenizer; see :class:`Sampling`.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: PositiveCount = setting(128, "a response of so many tokens ends, with reason `length`")
    temperature: NonNegative = setting(1.0, "divides the logits; 0 is greedy, and log-probs are then those at 1")
    top_k: Count = setting(0, "only the k most likely tokens are drawn, and log-probs are among them; 0 keeps all")
    top_p: Annotated[float, Gt(0), Le(1)] = setting(
        1.0,
        "only the most likely tokens that reach this probability are drawn, and log-probs are among them; their ids "
        "are stored (4 bytes each, for each token), which `top_k` bounds; 1 keeps all",
    )
    min_new_tokens: Count = setting(
        0, "no token of `stop` is drawn before a response is so long, and log-probs are among the others"
    )
    stop_strings: Annotated[tuple[Filled, ...], FromList()] = setting(
        (), "texts that end a response with the token that completes them"
    )
    seed: Seed = setting(0, "keys the noise, together with the rollout and the position in it")

    def __post_init__(self) -> None:
        require_declared(self)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens ({self.max_new_tokens}); got {self.min_new_tokens}"
            )
        if not all(self.stop_strings):
            raise ValueError(f"a stop string must have at least one character; got {self.stop_strings}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingSettings):
    """How the policy draws tokens; the trainer and the reference apply the same temperature and truncation.

    Where ``top_k``, ``top_p`` or ``min_new_tokens`` leaves ids out, a token comes from those that stay, renormalised,
    and every log-prob, entropy and KL of it is one over these: they travel with the token, as its
    :class:`~oppo.support.Support`, to the reference and the trainer. What was left out is, at that position, neither
    learnt from nor held to the reference. In host memory an id costs 4 bytes: 80 for a token with ``top_k=20``; with
    ``top_p`` as many as its nucleus has, which is tens of thousands where the policy is unsure and the vocabulary large
    (``top_k`` beside it bounds that). For ``min_new_tokens`` alone the few ids left out are listed instead.

    Attributes:
        stop: token ids that end a response (reason ``eos`` for the first, ``stop`` for the others); each is part of
            the response.

    Raises:
        ValueError: a value is out of range.
    """

    stop: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens read from a decode: int32 [n], float32 [n], int32 [n], and what comes after them.

    Attributes:
        logprobs: natural logarithms, under the policy that sampled the tokens, over their support.
        support: of the n tokens: the ids that each was drawn from.
        state: ``live``: there is more to read now. ``cut``: decoding stopped; read on in a later step. ``eos``,
            ``stop``, ``length``: this was the last piece. Only a ``cut`` piece may hold no token.
        given: nobody sampled them: they are a tool's answer, read by the scorers and never trained. Log-probs and
            support then say nothing.
    """

    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    state: PieceState
    support: Support = field(default_factory=Support)
    given: bool = False

    def event(self, rollout: int, start: int) -> Chunk | Given:
        """Return its tokens as those of ``rollout`` from ``start`` on, as what they are."""
        return Given(rollout, start, self.tokens) if self.given else self.chunk(rollout, start)

    def chunk(self, rollout: int, start: int) -> Chunk:
        """Return its tokens as those of ``rollout`` from ``start`` on."""
        return Chunk(rollout, start, self.tokens, self.logprobs, self.versions, self.support)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A snapshot of what is trained, under ``state_dict`` names; the values are the backend's tensors.

    Where there is no critic it has no weights.
    """

    version: int
    actor: Mapping[str, object] = field(default_factory=dict)
    critic: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class Follower(Protocol):
    """A served model whose weights follow the trainer's."""

    @property
    def version(self) -> int:
        """Version of the weights in use: the number of updates they have seen."""

    async def load(self, weights: Weights) -> None:
        """Serve these weights from the next call on; on failure, go on serving the old ones."""


class Decode(Protocol):
    """One rollout being decoded. Between steps nobody owns it; its tokens wait in it."""

    async def read(self, limit: int) -> Piece:
        """Return the next tokens: ``limit`` of them, or fewer where given ones begin or end, at the end or at the cut.

        Cancel-safe: a cancelled read has taken nothing.
        """

    async def aclose(self) -> None:
        """Give up the rollout and its memory; idempotent."""


Loads: TypeAlias = Literal["refused", "between decode steps", "when decoding ends"]
"""When weights take effect that are loaded while something is decoded."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; what it cannot is refused by name before the first step that would need it.

    Attributes:
        supports: it says of each token from which ids it was drawn, where sampling is truncated.
        resumes: responses that are opened half-written go on as if they had been written in one piece.
        adds_while_decoding: rollouts can join and leave while others are decoded (:class:`Decoding`).
        loads_while_decoding: when weights take effect that come meanwhile.
    """

    supports: bool = True
    resumes: bool = True
    adds_while_decoding: bool = False
    loads_while_decoding: Loads = "refused"


class Decoding(Protocol):
    """Rollouts that are being decoded; an engine that cannot do what is asked raises ``ProtocolError``."""

    async def add(self, decodes: Sequence[Decode]) -> None:
        """Decode these as well, from the next decode step on."""

    async def park(self, decodes: Sequence[Decode]) -> None:
        """Decode these no further: what is unread of them ends with a piece whose state is ``cut``."""


@dataclass(frozen=True, slots=True)
class FixedDecoding:
    """A :class:`Decoding` that nothing joins or leaves.

    Attributes:
        engine: its name, for the error.
    """

    engine: str

    async def add(self, decodes: Sequence[Decode]) -> None:
        """Refuse.

        Raises:
            ProtocolError: always.
        """
        raise self._refusal("joins", len(decodes))

    async def park(self, decodes: Sequence[Decode]) -> None:
        """Refuse.

        Raises:
            ProtocolError: always.
        """
        raise self._refusal("leaves", len(decodes))

    def _refusal(self, does: str, count: int) -> ProtocolError:
        return ProtocolError(
            f"{self.engine} decodes what it was given until that ends or is cut, so none of {count} rollouts {does} "
            "meanwhile: ask for its capabilities.adds_while_decoding first"
        )


class Policy(Follower, Protocol):
    """The actor, as the engine that decodes with it."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[Decode]:
        """Make a decode for each; nothing is decoded yet.

        A response, of a run that is resumed, goes on after its tokens, which are not read from the decode again.
        """

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        """Decode ``live`` while the context is open, until each has ended or ``cut`` answers true.

        On leaving, decoding has stopped between two decode steps and every task and job of it is over; outside of it
        no token is made, so weights may change.
        """


class Scorer(Protocol[T_co]):
    """A model that reads rollouts as they grow and says something of each when it is complete.

    One that shares a place with others may also be a :class:`PrioritisedScorer`, and one that knows how long its calls
    should last a :class:`TimeSliced`.
    """

    @property
    def version(self) -> int:
        """Version of the weights; constant for a frozen model."""

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Read more of some rollouts, the events of each in order and contiguous; ``Prompt`` opens a session."""

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T_co]:
        """Return one value for each rollout, all of which has been read, and forget its session."""

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Drop sessions; unknown rollouts are fine."""


class PrioritisedScorer(Scorer[T_co], Protocol[T_co]):
    """A scorer whose three methods take the keyword ``priority``: all of them or none.

    The keyword is found in the signatures; a scorer without it makes its calls in the order of arrival. One that takes
    it hands it to its place (:meth:`oppo.placement.Hosted.at`) with every call there: a call without it would wait for
    the end of the urgent calls that it is one of.
    """

    async def extend(self, events: Sequence[Prompt | Chunk | Given], *, priority: Priority = IN_ORDER) -> None:
        """Read more of some rollouts; one that raises :class:`~oppo.scheduling.Preempted` has read nothing of them."""

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T_co]:
        """Return one value for each rollout, and forget its session."""

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Drop sessions; unknown rollouts are fine."""


@runtime_checkable
class TimeSliced(Protocol):
    """A scorer that says how long a call should last that nobody waits for."""

    @property
    def time_slice(self) -> TimeSlice:
        """Asked once, before the first step; other scorers have :data:`~oppo.scheduling.DEFAULT_TIME_SLICE`."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What an update did.

    Attributes:
        metrics: under the names of ``metrics.jsonl``.
        nonfinite: rollouts that took part in no optimizer step, because loss or gradient was not finite wherever they
            were.
        skipped: rollouts of every minibatch whose optimizer step was skipped for that; those of them that took part in
            another one are trained.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    nonfinite: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()


class Trainer(Protocol):
    """Owns the weights that are trained."""

    @property
    def version(self) -> int:
        """The number of updates made so far."""

    async def update(self, batch: Batch) -> Trained:
        """Train on one batch; the version then is one more, even if every minibatch was skipped."""

    async def publish(self, *followers: Follower) -> None:
        """Give the current weights to each follower; all of them have the new version afterwards.

        A failure surfaces, with a note that says which follower has which version, and ends the run.
        """


class ResumableTrainer(Trainer, Protocol):
    """A trainer with which a run can be resumed: what checkpoints, and whoever watches a run, need of it besides."""

    @property
    def has_learned(self) -> bool:
        """Whether an update was made since the trainer was made, or restored."""

    @property
    def progress(self) -> int:
        """A number that grows while an update goes on; may be read from any thread."""

    async def write(self, directory: Path) -> None:
        """Write all that :meth:`restore` needs, and what :meth:`save` writes.

        This and :meth:`save` may be awaited in an event loop of another thread.
        """

    async def save(self, directory: Path) -> None:
        """Write what is trained, as others load it."""

    async def restore(self, directory: Path) -> None:
        """Go on where the trainer that wrote ``directory`` was; followers know when :meth:`publish` tells them."""


RewardFunction: TypeAlias = Callable[..., object]
"""``f(prompts, completions, **columns) -> sequence of float``, sync or async; lists are aligned."""
