"""The seam to models: small protocols that a backend implements and the stages consume.

Token ids and floats cross it, as numpy arrays; nothing here knows torch. Fakes for all of them, and the checks a
third-party backend should pass, are in :mod:`oppo.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from oppo.errors import ProtocolError
from oppo.events import Batch, Chunk, Finish, FloatArray, Given, IntArray, Prompt, Response
from oppo.numeric import require_numbers, require_whole
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


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the policy draws tokens; the trainer and the reference apply the same temperature and truncation.

    Where ``top_k``, ``top_p`` or ``min_new_tokens`` leaves ids out, a token comes from those that stay, renormalised,
    and every log-prob, entropy and KL of it is one over these: they travel with the token, as its
    :class:`~oppo.support.Support`, to the reference and the trainer. What was left out is, at that position, neither
    learnt from nor held to the reference. In host memory an id costs 4 bytes: 80 for a token with ``top_k=20``; with
    ``top_p`` as many as its nucleus has, which is tens of thousands where the policy is unsure and the vocabulary large
    (``top_k`` beside it bounds that). For ``min_new_tokens`` alone the few ids left out are listed instead.

    Attributes:
        max_new_tokens: a response of this many tokens ends with reason ``length``.
        temperature: divides the logits; 0 is greedy decoding (``top_k`` and ``top_p`` then change nothing, and
            log-probs are those at 1).
        top_k: keep only the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        stop: token ids that end a response (reason ``eos`` for the first, ``stop`` for the others); each is part of
            the response.
        min_new_tokens: none of ``stop`` is drawn before a response has this many tokens.
        stop_strings: texts that end a response with the token that completes them (reason ``stop``).
        seed: keys the noise together with (admission, sample, position).
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        require_numbers(self)
        require_whole("seed of Sampling", self.seed, 0)
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must lie in 0 .. max_new_tokens ({self.max_new_tokens}), not {self.min_new_tokens}"
            )
        if not all(self.stop_strings):
            raise ValueError(f"a stop string must have at least one character; got {self.stop_strings}")


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
