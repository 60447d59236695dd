"""The batch of a step: finished rollouts joined with the results of all scorers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat, final

import numpy as np

from oppo.errors import ProtocolError, blaming, shown
from oppo.events import Batch, Defer, Drop, Finish, FloatArray, RolloutEvent, Scored, described
from oppo.graph import Receiver, Sender, join
from oppo.returns import NamedScores, TokenRewards, TopLogprobs
from oppo.scorers import Lesson, Untaught

LARGEST = float(np.finfo(np.float32).max)
NONFINITE = "nonfinite"  # prefix of the reason of a drop for a number that is not finite
UNSAMPLED = "nothing was sampled"  # reason of a drop for a response without a sampled token: none has earned the score


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRollout:
    """One finished rollout with the results of all scorers; arrays are float32 [n] for a response of n tokens.

    Attributes:
        reference: log-probs of the reference model; ``None`` without one.
        score: the reward model's scalar; :class:`~oppo.returns.TokenRewards` if it is known which tokens earned
            it.
        values: of the critic, of the state before each token, and float32 [n + 1] if it gives that of the state after
            the last one too; ``None`` without a critic.
        proximal: log-probs under the weights that are about to be updated; ``None`` unless they were computed.
        teacher: log-probs of a teacher; ``None`` without one.
        top: the same with the teacher's likeliest ids; ``None`` unless it gives them.
        taught: whether the teacher says something about it; otherwise both are NaN.
    """

    finish: Finish
    reference: FloatArray | None
    score: float
    values: FloatArray | None = None
    proximal: FloatArray | None = None
    teacher: FloatArray | None = None
    top: TopLogprobs | None = None
    taught: bool = True

    @property
    def rollout(self) -> int:
        """Identity of the rollout."""
        return self.finish.rollout

    @property
    def group(self) -> int:
        """The group of its prompt."""
        return self.finish.response.prompt.group

    @property
    def token_rewards(self) -> FloatArray | None:
        """The rewards that the score is the sum of; ``None`` for a plain number."""
        return self.score.rewards if isinstance(self.score, TokenRewards) else None

    def fault(self) -> Drop | None:
        """Return the ``Drop`` of a rollout that cannot be trained: nothing was sampled, or a number is not finite.

        The reason names the first result of a sampled token that is not a finite float32. Nothing reads the results of
        other tokens, but for rewards, which the sampled token before them gets.
        """
        sampled = np.flatnonzero(self.finish.response.sampled)
        if not len(sampled):
            return Drop(self.rollout, UNSAMPLED)
        results: Mapping[str, float | FloatArray | None] = {
            "score": self.score,
            "token reward": self.token_rewards,
            "reference log-prob": None if self.reference is None else self.reference[sampled],
            "value": None if self.values is None else self.values[sampled],
            "behaviour log-prob": self.finish.response.logprobs[sampled],
            "proximal log-prob": None if self.proximal is None else self.proximal[sampled],
            "teacher log-prob": None if self.teacher is None or not self.taught else self.teacher[sampled],
            "log-prob of the teacher's likeliest ids": (
                None if self.top is None or not self.taught else self.top.top[sampled]
            ),
        }
        known = {name: np.ravel(value) for name, value in results.items() if value is not None}
        if (np.abs(np.concatenate([*known.values()])) <= LARGEST).all():
            return None
        faulty = next(name for name, value in known.items() if not (np.abs(value) <= LARGEST).all())
        return Drop(self.rollout, f"{NONFINITE} {faulty}", nonfinite=True)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRollouts:
    """The outcome of every rollout of a step; false without a rollout.

    Attributes:
        rollouts: to train; any number of them, of any length.
        dropped: rollouts that are not trained.
        deferred: rollouts that go on in the next step.
    """

    rollouts: Sequence[ScoredRollout] = ()
    dropped: Sequence[Drop] = ()
    deferred: Sequence[Defer] = ()

    def __bool__(self) -> bool:
        return bool(self.rollouts or self.dropped or self.deferred)

    def without(self, drops: Sequence[Drop]) -> ScoredRollouts:
        """Return the outcome where some of the rollouts are dropped."""
        gone, dropped = {drop.rollout for drop in drops}, sorted([*self.dropped, *drops], key=lambda drop: drop.rollout)
        return replace(self, rollouts=[each for each in self.rollouts if each.rollout not in gone], dropped=dropped)

    @classmethod
    async def of(
        cls,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        *,
        each: Callable[[ScoredRollout], Awaitable[None]] | None = None,
        **per_token: Receiver[Scored[Lesson] | Drop] | None,
    ) -> ScoredRollouts:
        """Return the step's rollouts once all are scored; the trained and the dropped ones in admission order.

        Args:
            rollout: the events that determine which rollouts there are.
            score: of each.
            each: called with each rollout as soon as it is scored, in an order that depends on timing.
            per_token: ``reference``, ``values``, ``proximal`` and ``teacher``; ``None``: it is not connected.

        Raises:
            ProtocolError: a score is not one number, or another result is not one number for each response token.
        """
        deferred: list[Defer] = []

        def keep_deferred(event: RolloutEvent) -> None:
            if isinstance(event, Defer):
                deferred.append(event)

        connected = {name: receiver for name, receiver in per_token.items() if receiver is not None}
        # Any: the number of inputs is not static; scored_rollout() checks what they carry.
        lanes: AsyncIterator[tuple[Any, ...]] = join(
            rollout, score, *connected.values(), key=finished_rollout, aside=keep_deferred
        )
        outcomes: list[ScoredRollout | Drop] = []
        async for end, scored, *results in lanes:
            outcome = scored_rollout(end, scored, **dict(zip(connected, results, strict=True)))
            outcomes.append(outcome)
            if each is not None and isinstance(outcome, ScoredRollout):
                await each(outcome)
        outcomes.sort(key=lambda outcome: outcome.rollout)  # the order of the scores depends on timing
        return cls(
            [outcome for outcome in outcomes if isinstance(outcome, ScoredRollout)],
            [outcome for outcome in outcomes if isinstance(outcome, Drop)],
            deferred,
        )

    def batch(self) -> Batch:
        """Return the batch of these rollouts, in their order; rewards, advantages and returns are yet to be estimated.

        A per-token result that some rollout lacks is ``None`` in the batch.
        """
        responses = [each.finish.response for each in self.rollouts]
        lengths = [len(response) for response in responses]
        tops = [each.top for each in self.rollouts if each.top is not None]
        if len({each.ids.shape[1] for each in tops}) > 1:
            raise ProtocolError("teachers gave different numbers of likeliest ids: give all of them the same top_k")
        known = len(tops) == len(self.rollouts) > 0
        values = [(each.values, n) for each, n in zip(self.rollouts, lengths, strict=True)]
        return Batch(
            responses=tuple(responses),
            reasons=tuple(each.finish.reason for each in self.rollouts),
            scores=np.array([each.score for each in self.rollouts], np.float32),
            offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64))),
            tokens=np.concatenate([r.tokens for r in responses] or [np.zeros(0, np.int32)]),
            versions=np.concatenate([r.versions for r in responses] or [np.zeros(0, np.int32)]),
            sampled=np.concatenate([r.sampled for r in responses] or [np.zeros(0, np.bool_)]),
            logprobs=flat([response.logprobs for response in responses]),
            proximal=_flat_if_complete([each.proximal for each in self.rollouts]),
            reference=_flat_if_complete([each.reference for each in self.rollouts]),
            values=_flat_if_complete([None if row is None else row[:n] for row, n in values]),
            last_values=_flat_if_complete([None if row is None or len(row) == n else row[n:] for row, n in values]),
            dropped=tuple(self.dropped),
            deferred=tuple(self.deferred),
            token_rewards=self._token_rewards(),
            teacher=_flat_if_complete([each.teacher for each in self.rollouts]),
            teacher_ids=np.concatenate([each.ids for each in tops], dtype=np.int32) if known else None,
            teacher_top=np.concatenate([each.top for each in tops], dtype=np.float32) if known else None,
            named_scores=self._named_scores(),
            answered=tuple(each.finish.answered for each in self.rollouts),
        )

    def _named_scores(self) -> Mapping[str, tuple[float, FloatArray]]:
        scores = [each.score for each in self.rollouts]
        terms = [score.terms if isinstance(score, NamedScores | TokenRewards) else {} for score in scores]
        absent = math.nan, math.nan
        return {
            name: (
                next(row[name][0] for row in terms if name in row),
                np.array([row.get(name, absent)[1] for row in terms], np.float32),
            )
            for name in dict.fromkeys(name for row in terms for name in row)
        }

    def _token_rewards(self) -> FloatArray | None:
        rewards = [each.token_rewards for each in self.rollouts]
        if all(each is None for each in rewards):
            return None
        lengths = [len(each.finish.response) for each in self.rollouts]
        return flat([np.zeros(n, np.float32) if row is None else row for row, n in zip(rewards, lengths, strict=True)])


def scored_rollout(
    finish: Finish | Drop,
    score: Scored[float] | Drop,
    reference: Scored[FloatArray] | Drop | None = None,
    values: Scored[FloatArray] | Drop | None = None,
    proximal: Scored[FloatArray] | Drop | None = None,
    *,
    teacher: Scored[Lesson] | Drop | None = None,
) -> ScoredRollout | Drop:
    """Return a rollout with its results, or its first ``Drop``: of generation, a scorer, or a number not finite."""
    drops = [each for each in (finish, reference, score, values, proximal, teacher) if isinstance(each, Drop)]
    if drops or isinstance(finish, Drop) or isinstance(score, Drop) or isinstance(teacher, Drop):  # as types need it
        return drops[0]
    require_score(score.value, finish)
    lesson = None if teacher is None else _read(teacher.value, finish)
    scored = ScoredRollout(
        finish,
        _per_token(reference, finish, "reference log-prob"),
        score.value,
        _per_token(values, finish, "value", last=True),
        _per_token(proximal, finish, "proximal log-prob"),
        _per_token(teacher, finish, "teacher log-prob"),
        lesson if isinstance(lesson, TopLogprobs) else None,
        taught=teacher is None or not isinstance(teacher.value, Untaught),
    )
    return scored.fault() or scored


def require_score(score: object, finish: Finish) -> None:
    if isinstance(score, TokenRewards):
        require_per_token(score.rewards, finish, "token reward")
        return
    if isinstance(score, (float, int)):  # to ask a protocol is ten times as expensive
        return
    text = isinstance(score, str | bytes) or getattr(getattr(score, "dtype", None), "kind", "f") not in "fiub"
    if text or not isinstance(score, SupportsFloat) or len(getattr(score, "shape", ())):
        raise ProtocolError(f"rollout {finish.rollout}: expected a number as its score, got {described(score)}")


def require_per_token(values: object, finish: Finish, what: str, *, last: bool = False) -> None:
    n = len(finish.response)
    shapes = {(n,), (n + last,)}
    if not isinstance(values, np.ndarray) or values.shape not in shapes or values.dtype.kind not in "fiu":
        raise ProtocolError(
            f"rollout {finish.rollout}: expected {n} numbers as its {what}s, one for each response token, "
            f"got {described(values)}"
        )


def finished_rollout(item: object) -> int | None:
    """Return the rollout that an item ends or scores; ``None`` for an item that no other input matches."""
    return item.rollout if isinstance(item, (Scored, Finish, Drop)) else None


def flat(arrays: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.asarray(array, np.float32) for array in arrays] or [np.zeros(0, np.float32)])


def _flat_if_complete(arrays: Sequence[FloatArray | None]) -> FloatArray | None:
    known = [array for array in arrays if array is not None]
    return flat(known) if len(known) == len(arrays) else None


def _read(lesson: Lesson, finish: Finish) -> FloatArray | TopLogprobs:
    return lesson.of(len(finish.response)) if isinstance(lesson, Untaught) else lesson


def _per_token(
    scored: Scored[Lesson] | Drop | None, finish: Finish, what: str, *, last: bool = False
) -> FloatArray | None:
    if not isinstance(scored, Scored):
        return None  # the input is not connected; a scorer's own None is an error
    lesson = _read(scored.value, finish)
    values = lesson.tokens if isinstance(lesson, TopLogprobs) else lesson
    require_per_token(values, finish, what, last=last)
    return values


@dataclass(slots=True, eq=False)
class Ended:
    """The rollouts that ended in a step, or were deferred; recorded by the stage that generates."""

    ended: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)

    def fault_of(self, batch: Batch | None) -> str:
        trained, drops, deferred = ((), (), ()) if batch is None else (batch.rollouts, batch.dropped, batch.deferred)
        for what, have, came in (
            ("ended", (*trained, *(drop.rollout for drop in drops)), self.ended),
            ("were deferred", tuple(event.rollout for event in deferred), self.deferred),
        ):
            held, wanted = Counter(have), Counter(came)
            faults = {
                "leaves out": sorted(wanted - held),
                "repeats": sorted(rollout for rollout, count in held.items() if count > 1),
                "holds, of another step,": sorted(held.keys() - wanted.keys()),
            }
            if words := [f"{fault} rollouts {rollouts}" for fault, rollouts in faults.items() if rollouts]:
                return (
                    f"{', and '.join(words)}: expected each of the {len(came)} rollouts that {what} in this step, "
                    "once; a response that is not to be trained is a Drop in batch.dropped"
                )
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPart:
    """Rows of a step's batch that are complete before the batch is, which follows and holds them too."""

    batch: Batch


class BatchStage(ABC):
    """Joins the results of the scorers, and sends the batch that it makes of them.

    ``reference=``, ``value=``, ``proximal=`` and ``teacher=`` are inputs by name: log-probs of a reference, the values
    of a critic, log-probs under the weights that are about to be updated, which corrections for stale tokens need, and
    log-probs of a teacher, with its likeliest ids if it gives them. The batch holds the results of the inputs
    that are connected.
    """

    @property
    def refers(self) -> bool:
        """Whether log-probs of a reference are needed."""
        return False

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        /,
        *,
        out: Sender[Batch],
        reference: Receiver[Scored[FloatArray] | Drop] | None = None,
        value: Receiver[Scored[FloatArray] | Drop] | None = None,
        proximal: Receiver[Scored[FloatArray] | Drop] | None = None,
        teacher: Receiver[Scored[Lesson] | Drop] | None = None,
    ) -> None:
        """Send the step's batch once every finished rollout is scored; send nothing without a rollout."""
        scored = await ScoredRollouts.of(
            rollout, score, reference=reference, values=value, proximal=proximal, teacher=teacher
        )
        if scored:
            await out.send(self.batch_of(scored))

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Report a KL penalty whose reference is not connected."""
        del stages
        fault = "has a KL penalty, which needs a reference: connect reference=stream, or set kl to 0"
        return [fault] if self.refers and "reference" not in named else []

    @final
    def batch(self, rollouts: Sequence[ScoredRollout]) -> Batch:
        """Return the training batch of a step in which these rollouts alone ended; see :meth:`batch_of`."""
        return self.batch_of(ScoredRollouts(rollouts))

    def batch_of(self, scored: ScoredRollouts) -> Batch:
        """Return the training batch of a step's rollouts, in their order, without the unfit ones.

        Raises:
            ProtocolError: an estimate does not have one number for each token, or no batch was estimated.
        """
        plain = scored.batch()
        if drops := self.unfit(plain):
            plain = scored.without(drops).batch()
        name = f"{type(self).__name__}.estimated()"
        with blaming(name):
            batch: object = self.estimated(plain)
        if not isinstance(batch, Batch):
            raise ProtocolError(f"{name} must return a Batch; got {shown(batch)}")
        return batch

    def unfit(self, batch: Batch) -> Sequence[Drop]:
        """Return the drops of those rollouts of a batch without estimates that must not reach the others."""
        del batch
        return []

    @abstractmethod
    def estimated(self, batch: Batch) -> Batch:
        """Return a batch of scored rollouts, any number of them, with this stage's estimates and metrics."""


@dataclass(eq=False)
class Gather(BatchStage):
    """Joins the results of the scorers into a batch without rewards, advantages and returns.

    It has the named inputs of :class:`BatchStage`. A rollout that is dropped, or has a result that is not finite,
    is left out.
    """

    def estimated(self, batch: Batch) -> Batch:
        """Return the batch with the mean of its scores."""
        scores = batch.scores[batch.firsts]
        return replace(batch, metrics={"objective/scores": float(scores.mean())} if len(batch) else {})
