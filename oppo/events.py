"""The values that travel on the edges of a PPO graph.

Over its life a rollout's events follow one grammar, in this order on every stream::

    Prompt  ((Chunk | ToolTokens)* Defer)*  (Chunk | ToolTokens)*  (Finish | Drop)

A ``Defer`` with ``restart`` voids everything before it: the rollout begins again with its ``Prompt``, or is deferred
until it does. ``start`` is contiguous, and versions never decrease. ``Finish`` means that
the response is complete and that the rollout belongs to the batch of the step that sends it. Values that are known
later have a type of their own, never an ``Optional`` field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Final, Generic, Literal, Self, TypeAlias, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from oppo.declared import require_metrics
from oppo.errors import ProtocolError, shown
from oppo.images import ImageRef
from oppo.limits import UNLIMITED, TurnLimit

T_co = TypeVar("T_co", covariant=True)

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
FinishReason: TypeAlias = Literal["eos", "stop", "length"]
ChunkState: TypeAlias = Literal["live", "eos", "stop", "length", "cut"]
"""The state of a rollout after some tokens.

``live``: there is more to read now. ``cut``: decoding stopped; read on in a later step. Otherwise why the response has
ended.
"""

LONGEST_REASON: Final = 4000
"""Characters of the reason of a ``Drop``."""

_NO_IDS: Final = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumn:
    """Values of some tokens, token after token, that only some policies give; carried wherever the tokens go.

    Attributes:
        ids: integers [S, ...]; a kind declares how many further ``dimensions``, and whether they are ``of_tokens``.
        counts: int32 [n]; the absolute value is how many of ``ids`` belong to each token. Empty: none to any.
        name: of the kind, in checkpoints.
    """

    ids: NDArray[Any] = field(default_factory=lambda: _NO_IDS)
    counts: IntArray = field(default_factory=lambda: _NO_IDS)
    name: ClassVar[str]
    dimensions: ClassVar[int] = 0
    of_tokens: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        COLUMN_KINDS[cls.name] = cls

    def __post_init__(self) -> None:
        listed = int(np.abs(self.counts).sum()) if len(self.counts) else 0
        if listed != len(self.ids):
            kind = type(self).__name__
            raise ValueError(f"{kind} of {len(self.counts)} tokens counts {listed} ids, but holds {len(self.ids)}")

    @classmethod
    def concatenate(cls, parts: Iterable[tuple[Self, int]]) -> Self:
        """Return the ids of all parts' tokens, end to end; each part comes with its number of tokens."""
        parts = list(parts)
        if all(part.empty for part, _ in parts):
            return cls()
        return cls(
            np.concatenate([part.ids for part, _ in parts if not part.empty]),
            np.concatenate([part.counts if len(part.counts) else np.zeros(n, np.int32) for part, n in parts]),
        )

    @property
    def empty(self) -> bool:
        return not len(self.ids)

    def slice(self, start: int, stop: int | None) -> Self:
        """Return the ids of tokens ``start .. stop``, as a view."""
        first, last = np.abs(self.counts[:start]).sum(), np.abs(self.counts[:stop]).sum()
        return type(self)(self.ids[first:last], self.counts[start:stop])

    def split(self) -> Sequence[Self]:
        bounds = [0, *np.cumsum(np.abs(self.counts)).tolist()]
        kind = type(self)
        return [kind(self.ids[first:last], self.counts[n : n + 1]) for n, (first, last) in enumerate(pairwise(bounds))]


COLUMN_KINDS: Final[dict[str, type[TokenColumn]]] = {}
"""The kinds of further columns, by name."""

C = TypeVar("C", bound=TokenColumn)


class TokenColumns:
    """Further columns of some tokens: ``columns[Support]`` is their support, empty if nobody gave it."""

    __slots__ = ("_columns",)

    def __init__(self, *columns: TokenColumn) -> None:
        self._columns = {type(column): column for column in columns if not column.empty}

    def __getitem__(self, kind: type[C]) -> C:
        column = self._columns.get(kind)
        return kind() if column is None else cast("C", column)

    def __iter__(self) -> Iterator[TokenColumn]:
        return iter(self._columns.values())

    @classmethod
    def concatenate(cls, parts: Iterable[tuple[TokenColumns, int]]) -> TokenColumns:
        parts = list(parts)
        kinds = dict.fromkeys(type(column) for part, _ in parts if part is not NO_COLUMNS for column in part)
        return cls(*(kind.concatenate((part[kind], n) for part, n in parts) for kind in kinds)) if kinds else NO_COLUMNS

    def slice(self, start: int, stop: int | None) -> TokenColumns:
        return TokenColumns(*(column.slice(start, stop) for column in self)) if self._columns else self

    def only(self, kinds: Sequence[type[TokenColumn]]) -> TokenColumns:
        return TokenColumns(*(self[kind] for kind in kinds)) if self._columns else self

    def split(self, count: int) -> Sequence[TokenColumns]:
        if not self._columns:
            return [self] * count
        return [TokenColumns(*one) for one in zip(*(column.split() for column in self), strict=True)]


NO_COLUMNS: Final = TokenColumns()
"""Shared, since the garbage collector visits the fields of every chunk, and most chunks have no further column."""


@dataclass(frozen=True, slots=True, eq=False)
class Support(TokenColumn):
    """The ids from which some tokens were sampled; ragged, 4 bytes for each id and token, empty without truncation.

    ``top_k``, ``top_p`` and ``min_new_tokens`` truncate the distribution of a token. Its log-prob, with these or other
    weights or under another model, must then be normalised over the ids that were kept; normalised over the whole
    vocabulary, importance ratios are biased ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    Attributes:
        ids: int32 [S], token after token.
        counts: int32 [n], the number of ids that belong to each token. Above 0: the ids that it was sampled from. Below
            0: the ids that were excluded, so that excluding a few needs no list of the others. 0: none was excluded.
            Empty, the default: no id was excluded for any number of tokens.

    Example:
        >>> one = Support(np.array([4, 7, 9], np.int32), np.array([3], np.int32))
        >>> one.holds(np.array([7], np.int32)).tolist()
        [True]
    """

    name: ClassVar[str] = "support"
    of_tokens: ClassVar[bool] = True

    def holds(self, tokens: IntArray) -> BoolArray:
        """Return whether each of its tokens could have been sampled: bool [n]."""
        if self.empty:
            return np.ones(len(tokens), np.bool_)
        owner = np.repeat(np.arange(len(tokens)), np.abs(self.counts))
        listed = np.zeros(len(tokens), np.bool_)
        listed[owner[self.ids == tokens[owner]]] = True
        held: BoolArray = listed == (self.counts > 0)
        return held


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts(TokenColumn):
    """The experts that the routers of a mixture of experts chose while some tokens were made; ragged, often empty.

    A token has the experts of the positions that the engine read for it: the first token of the prompt, each other
    of the token before it, and after a tool's answer of the answer too. A position that has none is routed
    anew when it is trained.

    Attributes:
        ids: uint8 or wider [S, layers, top_k], position after position. Layers are those with a router, or all.
        counts: int32 [n], the number of positions that belong to each token, the last of which predicts it. Empty, the
            default: nothing is known of any number of tokens.

    Example:
        >>> prompt_of_3 = RoutedExperts(np.zeros((4, 1, 2), np.uint8), np.array([3, 1], np.int32))
        >>> prompt_of_3.positions().tolist()
        [-3, -2, -1, 0]
    """

    name: ClassVar[str] = "routed_experts"
    dimensions: ClassVar[int] = 2

    def positions(self) -> NDArray[np.int64]:
        """Return where each of ``ids`` was chosen, int64 [S]: from 0 on in the response, below 0 in the prompt."""
        after = np.cumsum(self.counts) - np.arange(len(self.counts))
        return np.arange(len(self.ids)) - np.repeat(after, self.counts)

    def known(self, prompt: Prompt) -> int:
        """Return the number of first positions, the prompt's included, that these reach."""
        return 0 if self.empty else len(prompt.tokens) + int(self.positions()[-1]) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One sample to be generated for one prompt: opens a rollout.

    A source of prompts sets ``admission``, ``tokens`` and ``columns``. The other fields identify the sample;
    :meth:`samples` overwrites them when :class:`oppo.Generate` takes the prompt.

    Attributes:
        rollout: identity of the rollout, unique in a run: ``admission * count + sample``, of ``count`` samples; a
            branch's is ``branch * 2**32`` higher.
        admission: number of the prompt, unique in a run, its ordinal in a :class:`oppo.PromptStream`; keys the sampling
            noise.
        tokens: int32 [P], the prompt as the policy reads it; at least one token.
        sample: index of this sample of its prompt.
        group: the ``admission`` of the prompt, shared by the rollouts that are compared with one another.
        columns: the other columns of the prompt's row, for reward functions.
        branch: 0, but for a further conversation of the same sample, as of a subagent: then a number below 2**20.
        limit: of the first turn.
        role: of its conversation, where agents have several: responses of one role are compared with one another.
        images: that it shows, in the order of their tokens.

    Example:
        >>> Prompt(rollout=7, admission=7, tokens=np.array([1, 2], np.int32)).tokens.tolist()
        [1, 2]
    """

    rollout: int
    admission: int
    tokens: IntArray
    sample: int = 0
    group: int = 0
    columns: Mapping[str, object] = field(default_factory=dict)
    branch: int = 0
    limit: TurnLimit = UNLIMITED
    role: str = ""
    images: tuple[ImageRef, ...] = ()

    def samples(self, count: int) -> tuple[Prompt, ...]:
        """Return ``count`` rollouts to be generated for this prompt, as one group."""
        return tuple(replace(self, sample=k).numbered(count) for k in range(count))

    def numbered(self, count: int) -> Prompt:
        """Return it as a rollout of its group, which has ``count`` samples."""
        rollout = self.admission * count + self.sample + (self.branch << 32)
        return replace(self, rollout=rollout, group=self.admission)

    @property
    def first(self) -> int:
        """The rollout of the first conversation of its sample: its own, but of a branch."""
        return self.rollout - (self.branch << 32)

    @property
    def trajectory(self) -> tuple[int, str]:
        """What has one reward: the conversations of a sample's agent, in one role."""
        return self.first, self.role

    @property
    def stream(self) -> int:
        """Which noise of its admission it is sampled with: ``sample``, or for a branch a number beyond all samples."""
        return self.sample + (self.branch << 32)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens ``start .. start + len(tokens)`` of a response, as the policy sampled them.

    Attributes:
        tokens: int32 [n].
        logprobs: float32 [n], natural logarithm, of each token under the policy that sampled it, over its support.
        versions: int32 [n], the version of the weights that made each token.
        extra: further columns of the n tokens: :class:`Support`, :class:`RoutedExperts`.
        state: of the rollout after them, as a policy reports it to the reader of its decode. Only a ``cut`` chunk may
            hold no token, or one that ends a response with turns (:class:`oppo.turns.TurnDecode`).
    """

    rollout: int
    start: int
    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    extra: TokenColumns = NO_COLUMNS
    state: ChunkState = "live"

    def merge(self, *later: Chunk) -> Chunk:
        """Return this chunk and contiguous later ones as one.

        Raises:
            ValueError: one of ``later`` is of another rollout or does not begin where the one before it ends.
        """
        chunks = (self, *later)
        for chunk, following in pairwise(chunks):
            if following.rollout != chunk.rollout or following.start != chunk.start + len(chunk.tokens):
                raise ValueError(
                    f"chunk of rollout {following.rollout} at {following.start} does not follow the chunk of rollout "
                    f"{chunk.rollout} at {chunk.start} with {len(chunk.tokens)} tokens"
                )
        return Chunk(
            self.rollout,
            self.start,
            np.concatenate([chunk.tokens for chunk in chunks]),
            np.concatenate([chunk.logprobs for chunk in chunks]),
            np.concatenate([chunk.versions for chunk in chunks]),
            TokenColumns.concatenate([(chunk.extra, len(chunk.tokens)) for chunk in chunks]),
            chunks[-1].state,
        )

    def part(self, start: int, stop: int | None = None) -> Chunk:
        s, state = slice(start, stop), self.state if stop is None else "live"
        columns = self.tokens[s], self.logprobs[s], self.versions[s], self.extra.slice(start, stop)
        return Chunk(self.rollout, self.start + start, *columns, state)


@dataclass(frozen=True, slots=True, eq=False)
class ToolTokens:
    """Tokens of a response that were not sampled (a tool's answer): streamed to scorers, never trained.

    Attributes:
        state: as of a :class:`Chunk`.
    """

    rollout: int
    start: int
    tokens: IntArray
    state: ChunkState = "live"

    def part(self, start: int, stop: int | None = None) -> ToolTokens:
        state = self.state if stop is None else "live"
        return ToolTokens(self.rollout, self.start + start, self.tokens[start:stop], state)


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """Everything generated for a prompt so far.

    Attributes:
        tokens: int32 [n].
        logprobs: float32 [n]; 0 where ``sampled`` is false.
        versions: int32 [n].
        sampled: bool [n], false for tool tokens: the loss mask.
        extra: further columns of the n tokens, as of a :class:`Chunk`.
    """

    prompt: Prompt
    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    sampled: BoolArray
    extra: TokenColumns = NO_COLUMNS

    @classmethod
    def empty(cls, prompt: Prompt) -> Response:
        ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return cls(prompt, ints, floats, ints, np.zeros(0, np.bool_))

    @classmethod
    def of(cls, prompt: Prompt, pieces: Iterable[Chunk | ToolTokens]) -> Response:
        chunks, sampled = list[Chunk](), list[bool]()
        for piece in pieces:
            sampled.append(isinstance(piece, Chunk))
            if isinstance(piece, Chunk):
                chunks.append(piece)
            else:
                n, version = len(piece.tokens), next((one.versions[-1] for one in chunks[::-1] if len(one.tokens)), 0)
                zeros, versions = np.zeros(n, np.float32), np.full(n, version, np.int32)
                chunks.append(Chunk(piece.rollout, piece.start, piece.tokens, zeros, versions))
        if not chunks:
            return cls.empty(prompt)
        whole, mask = chunks[0].merge(*chunks[1:]), np.repeat(sampled, [len(chunk.tokens) for chunk in chunks])
        return cls(prompt, whole.tokens, whole.logprobs, whole.versions, mask, whole.extra)

    def then(self, piece: Chunk | ToolTokens) -> Response:
        return Response.of(self.prompt, [*self.pieces(), piece])

    def chunk(self, start: int = 0, stop: int | None = None) -> Chunk:
        """Return tokens ``start .. stop``, by default all, as one chunk, sampled or not."""
        s, extra = slice(start, stop), self.extra.slice(start, stop)
        return Chunk(self.prompt.rollout, start, self.tokens[s], self.logprobs[s], self.versions[s], extra)

    def pieces(self) -> list[Chunk | ToolTokens]:
        """Return the response in the fewest pieces: a ``Chunk`` or ``ToolTokens`` for each run of equal ``sampled``."""
        edges = [0, *(np.flatnonzero(np.diff(self.sampled)) + 1).tolist(), len(self)] if len(self) else []
        return [
            self.chunk(start, stop)
            if self.sampled[start]
            else ToolTokens(self.prompt.rollout, start, self.tokens[start:stop])
            for start, stop in pairwise(edges)
        ]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A turn that an environment answered, ``end`` tokens into the response, with what its ``Answer`` says of it."""

    end: int
    reward: float | None = None
    key: str = ""
    said: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """The response is complete and belongs to this step's batch.

    It carries the whole response: a stage that lost its state (an older session, a resumed run) restores it from that.

    Attributes:
        answered: its turns, in order; the one that ended it only with a reward or a key, or an answer without room.
    """

    rollout: int
    response: Response
    reason: FinishReason
    answered: Sequence[AnsweredTurn] = ()
    segments: int = 1  # of its rollout, where compaction made several; all have the reason of the last one


@dataclass(frozen=True, slots=True)
class Defer:
    """The step was cut; the rollout is deferred, work intact, and goes on in a later step.

    Attributes:
        age: steps since admission, as of the next step: 1 after the first deferral.
        restart: the tokens so far are discarded, and the rollout begins again in a later step.
    """

    rollout: int
    age: int
    restart: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """The rollout ends here and will not be trained.

    Attributes:
        reason: why, for the record; at most 4000 characters are kept, escaped for UTF-8.
        nonfinite: whether the reason is a number that is not finite.

    Raises:
        TypeError: the reason is no text.
    """

    rollout: int
    reason: str
    nonfinite: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise TypeError(f"the reason of a Drop is a text; got {shown(self.reason)}")
        written = self.reason[:LONGEST_REASON].encode("utf-8", "backslashreplace").decode("utf-8")
        object.__setattr__(self, "reason", written[:LONGEST_REASON])

    @classmethod
    def because(cls, reason: str) -> Drop:
        """Return a drop by a function that does not know the rollout's number; its caller fills it in.

        Example:
            >>> def score(prompts, completions):
            ...     return [len(each) if each else Drop.because("nothing was written") for each in completions]
        """
        return cls(-1, reason)


@dataclass(frozen=True, slots=True, eq=False)
class Scored(Generic[T_co]):
    """A scorer's value of a finished rollout: a scalar, or one value per response token.

    Attributes:
        version: of the scorer's weights.
    """

    rollout: int
    value: T_co
    version: int


RolloutEvent: TypeAlias = Prompt | Chunk | ToolTokens | Defer | Finish | Drop

_OF_A_ROLLOUT: Final = (Chunk, Prompt, Finish, ToolTokens, Defer, Drop, Scored)


def described(value: object) -> str:
    """Describe a value on a line of bounded length: arrays by shape and type."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}"
    return shown(value)


def rollout_of(event: object) -> int | None:
    """Return the rollout an event belongs to; events of one rollout keep their order on every channel."""
    return event.rollout if isinstance(event, _OF_A_ROLLOUT) else None


def merge_chunks(queued: RolloutEvent, new: RolloutEvent) -> RolloutEvent | None:
    """Return one chunk for two contiguous ones of the same rollout; ``None`` for anything else."""
    if isinstance(queued, Chunk) and isinstance(new, Chunk) and queued.rollout == new.rollout:
        return queued.merge(new)
    return None


_PER_TOKEN: Final[Mapping[str, str]] = {
    **dict.fromkeys(("tokens", "versions"), "iu"),
    "sampled": "b",
    **dict.fromkeys(("logprobs", "proximal", "reference", "teacher", "values"), "fiu"),
    **dict.fromkeys(("rewards", "advantages", "returns", "token_rewards"), "fiu"),
}
"""The columns of a batch that have an item for each token, and the kinds of their types."""

_TOP: Final[Mapping[str, str]] = {"teacher_ids": "iu", "teacher_top": "fiu"}
"""The columns that have a row for each token, likewise."""

_ITEMS: Final[Mapping[str, type]] = {"responses": Response, "dropped": Drop, "deferred": Defer}

_REQUIRED: Final = frozenset({"scores", "tokens", "versions", "sampled", "logprobs"})


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's rollouts with everything the trainer needs, ragged, in admission order.

    Row ``r`` owns positions ``offsets[r] : offsets[r + 1]`` of every per-token array; N rows, T response tokens.

    Attributes:
        responses: N responses, in admission order.
        reasons: N finish reasons.
        scores: float32 [N], the reward model's scalars, or the sums of its rewards at tokens.
        offsets: int64 [N + 1].
        tokens, versions: int32 [T].
        sampled: bool [T], the loss mask: the tokens that the policy sampled, but none of a response that is left out of
            the loss.
        logprobs: float32 [T], behaviour log-probs, each over the token's support.
        proximal: float32 [T], log-probs under the weights that are about to be updated, equal to the behaviour's for
            tokens that those weights made; ``None`` unless they were computed.
        reference: float32 [T], reference log-probs, over the same supports; ``None`` without a reference.
        teacher: float32 [T], log-probs of the teacher of a distillation, likewise, NaN in rows of which it says
            nothing; ``None`` without a teacher.
        teacher_ids: int32 [T, k], the teacher's likeliest ids at each token, the likeliest first; ``None`` unless it
            gives them.
        teacher_top: float32 [T, k + 1], their log-probs, and one of all other ids together; over the whole vocabulary.
        values: float32 [T], the critic's value of the state *before* each token; ``None`` without a critic.
        last_values: float32 [N], its value of the state after the last token; ``None`` unless it gives that too.
        rewards: float32 [T], per token, after the KL penalty; ``None`` unless they were estimated.
        advantages: float32 [T]; ``None`` unless they were estimated.
        returns: float32 [T], the critic's targets; ``None`` without a critic.
        metrics: of the estimator (KL, entropy of the sampled tokens, means).
        dropped: the rollouts of this step that are not trained.
        deferred: the rollouts deferred to the next step.
        token_rewards: float32 [T], the part of the scores that the scorer placed at tokens, before it is shaped; 0 for
            a response whose score is a plain number, and ``None`` if all are.
        named_scores: of several rewards, by name: the weight, and float32 [N], NaN for a response to which the reward
            does not apply.
        answered: of each of N rows, :attr:`Finish.answered`; empty: there is none.

    Raises:
        ProtocolError: a column is no array of numbers with one for each row or token, offsets are no borders of the
            responses, a metric is no number, or an item is of another type.
    """

    responses: tuple[Response, ...]
    reasons: tuple[FinishReason, ...]
    scores: FloatArray
    offsets: NDArray[np.int64]
    tokens: IntArray
    versions: IntArray
    sampled: BoolArray
    logprobs: FloatArray
    proximal: FloatArray | None = None
    reference: FloatArray | None = None
    values: FloatArray | None = None
    rewards: FloatArray | None = None
    advantages: FloatArray | None = None
    returns: FloatArray | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    dropped: tuple[Drop, ...] = ()
    deferred: tuple[Defer, ...] = ()
    token_rewards: FloatArray | None = None
    last_values: FloatArray | None = None
    teacher: FloatArray | None = None
    teacher_ids: IntArray | None = None
    teacher_top: FloatArray | None = None
    named_scores: Mapping[str, tuple[float, FloatArray]] = field(default_factory=dict)
    answered: tuple[Sequence[AnsweredTurn], ...] = ()

    def __post_init__(self) -> None:
        for name, kind in _ITEMS.items():
            items: object = getattr(self, name)
            if not isinstance(items, Sequence) or not all(isinstance(item, kind) for item in items):
                raise ProtocolError(f"Batch.{name} must be a tuple of {kind.__name__} objects; got {described(items)}")
        borders = np.cumsum([0, *(len(response.tokens) for response in self.responses)])
        rows, tokens = len(self.responses), int(borders[-1])
        if not np.array_equal(self.offsets, borders):
            raise ProtocolError(
                f"Batch.offsets must be an array of {rows + 1} numbers, the borders of the responses: 0, then each "
                f"response's length added up to {tokens}; got {described(self.offsets)}"
            )
        if len(self.reasons) != rows or not all(reason in get_args(FinishReason) for reason in self.reasons):
            raise ProtocolError(
                f"Batch.reasons must hold one of {', '.join(get_args(FinishReason))} for each of {rows} rows; got "
                f"{described(self.reasons)}"
            )
        for name in ("scores", "last_values"):
            self._require(name, "fiu", rows, "row")
        for name, kinds in _PER_TOKEN.items():
            self._require(name, kinds, tokens, "token")
        for name, kinds in _TOP.items():
            self._require(name, kinds, tokens, "token", wide=True)
        require_metrics("Batch.metrics", self.metrics, error=ProtocolError)

    def _require(self, name: str, kinds: str, length: int, each: str, *, wide: bool = False) -> None:
        column: object = getattr(self, name)
        if column is None and name not in _REQUIRED:
            return
        shaped = isinstance(column, np.ndarray) and column.shape[:1] == (length,) and column.ndim == 1 + wide
        if not isinstance(column, np.ndarray) or not shaped or column.dtype.kind not in kinds:
            advice = ": np.repeat(per_row, np.diff(batch.offsets)) gives every token the number of its row"
            what = "row" if wide else "number"
            raise ProtocolError(
                f"Batch.{name} must be a NumPy array with a {what} for each {each}, {length} in {len(self.responses)} "
                f"rows; got {described(column)}{advice if each == 'token' and not wide else ''}"
            )

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def rollouts(self) -> tuple[int, ...]:
        return tuple(response.prompt.rollout for response in self.responses)

    @property
    def estimates(self) -> Mapping[str, FloatArray]:
        """Rewards, advantages and returns, as far as they were estimated, by name."""
        columns = {"rewards": self.rewards, "advantages": self.advantages, "returns": self.returns}
        return {name: column for name, column in columns.items() if column is not None}

    def column(self, kind: type[C], rows: Iterable[int]) -> C:
        """Return this further column of the tokens of ``rows``, end to end; each call joins those of the responses."""
        return kind.concatenate((self.responses[r].extra[kind], len(self.responses[r])) for r in rows)

    def rows(self) -> Sequence[slice]:
        """Return the slice of the per-token arrays that belongs to each row, a tool's tokens included."""
        return [slice(int(a), int(b)) for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]

    def conversations(self) -> Sequence[NDArray[np.int64]]:
        """Return the rows of each trajectory: one, or the conversations of an agent in a role, the first one first."""
        rows = dict[tuple[int, str], list[int]]()
        for row, response in enumerate(self.responses):
            rows.setdefault(response.prompt.trajectory, []).append(row)
        if len(rows) == len(self):
            return list(np.arange(len(self)).reshape(-1, 1))
        return [np.array(each, np.int64) for each in rows.values()]

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The first row of each trajectory: what it has once, such as a score, is taken there."""
        return np.array([rows[0] for rows in self.conversations()], np.int64)

    def sampled_rows(self) -> Sequence[NDArray[np.int64]]:
        """Return the positions in the per-token arrays of each row's sampled tokens, int64 [n]: the policy's actions.

        What discounts, sums or counts over a conversation runs over these: a tool's tokens between two of them are a
        part of the state that the second one sees.
        """
        positions = np.flatnonzero(self.sampled)
        borders = np.searchsorted(positions, self.offsets).tolist()
        return [positions[first:last] for first, last in pairwise(borders)]


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """The outcome of one step.

    Attributes:
        index: ordinal of the step, from 0.
        version: version of the weights after the step.
        trained: the rollouts that were trained, in admission order.
        dropped: the rollouts that ended without being trained.
        deferred: the rollouts deferred to the next step.
        score: mean of the reward model's scalars over the trained rollouts, and those of their batch that were left out
            of the loss; NaN when there are none.
        seconds: from the step's start, or the last weight sync before if that is later, to its last weight sync.
        metrics: by the names that ``docs/metrics.md`` lists first.
    """

    index: int
    version: int
    trained: tuple[int, ...]
    dropped: tuple[Drop, ...]
    deferred: tuple[Defer, ...]
    score: float
    seconds: float
    metrics: Mapping[str, float]
