"""The rollouts in flight: opened, continued from a checkpoint, finished, discarded and closed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias, cast

from oppo.errors import ConfigError, noted
from oppo.events import AnsweredTurn, Drop, Finish, Prompt, Response, RolloutEvent
from oppo.graph import Sender
from oppo.models import Decode, Policy, require_count, require_model
from oppo.stages.conversations import Conversations
from oppo.stages.ledger import InFlightRollout, RolloutSnapshot, Unit
from oppo.turns import Branching, MultiTurnPolicy, TurnDecode

LENGTHS: Final = 256  # ended rollouts whose mean length is the expected length of live ones

Groups: TypeAlias = Sequence[tuple[Prompt, ...]]  # the rollouts of some units, by their prompts


class OpenRollouts(dict[int, InFlightRollout]):
    """The rollouts in flight, by number: between their opening by the policy and their end."""

    def __init__(self, conversations: Conversations | None, branching: Branching | None) -> None:
        super().__init__()
        self._conversations = conversations
        self._branching = branching
        self._restored: dict[int, RolloutSnapshot] = {}
        self._lengths = deque[int](maxlen=LENGTHS)

    @property
    def live(self) -> list[InFlightRollout]:
        return [rollout for rollout in self.values() if rollout.reason is None]

    def room(self, policy: Policy, samples: int) -> float:
        # For how many new units the policy's KV cache has room, if they become as long as those that ended.
        free: int | None = getattr(policy, "free_kv_tokens", None)
        if free is None or not self._lengths:
            return math.inf
        expected = sum(self._lengths) / len(self._lengths)
        growing = sum(max(0.0, expected - len(each.prompt.tokens) - each.length) for each in self.live)
        return max(0.0, free - growing) / (expected * samples)

    async def open(self, policy: Policy, groups: Groups) -> list[InFlightRollout]:
        prompts = [prompt for group in groups for prompt in group]
        decodes = await self._decodes(policy, prompts)
        opened = [InFlightRollout(prompt, decode) for prompt, decode in zip(prompts, decodes, strict=True)]
        self.update((rollout.prompt.rollout, rollout) for rollout in opened)
        if self._branching is not None:
            for prompt in prompts:
                if not prompt.branch:
                    self._branching.expect(prompt)
        return opened

    async def _decodes(self, policy: Policy, rollouts: Sequence[Prompt | Response]) -> Sequence[Decode]:
        numbers = [(each if isinstance(each, Prompt) else each.prompt).rollout for each in rollouts]
        with noted(f"while opening rollouts {numbers}"):
            make = policy.open if self._conversations is None else require_turns(policy).open_turns
            decodes = await make(rollouts)
            require_count(decodes, len(rollouts), "open() of the policy")
            if self._conversations is not None:
                for rollout, decode in zip(rollouts, decodes, strict=True):
                    self._conversations.opened(rollout, cast("TurnDecode", decode))
        return decodes

    def snapshot(self, prompt: Prompt) -> RolloutSnapshot:
        if rollout := self.get(prompt.rollout):
            return RolloutSnapshot(rollout.response(), rollout.reason, rollout.dropped)
        return self._restored.get(prompt.rollout) or RolloutSnapshot(Response.empty(prompt), None)

    def restore(self, policy: Policy, snapshots: Iterable[RolloutSnapshot]) -> None:
        self._restored = {snapshot.response.prompt.rollout: snapshot for snapshot in snapshots}
        begun = [rollout for rollout, snapshot in self._restored.items() if len(snapshot.response)]
        if begun and policy.capabilities.resumes == "refused":
            raise ConfigError(
                f"rollouts {begun} are half-written, and {type(policy).__name__} cannot go on with responses: "
                "begin a new run, or choose an admission that defers nothing"
            )

    async def reopen(self, policy: Policy) -> None:
        restored, self._restored = list(self._restored.values()), {}
        decodes = await self._decodes(policy, [snapshot.response for snapshot in restored]) if restored else []
        for snapshot, decode in zip(restored, decodes, strict=True):
            prompt, reason, dropped = snapshot.response.prompt, snapshot.reason, snapshot.dropped
            rollout = InFlightRollout(prompt, decode, announced=True, reason=reason, dropped=dropped)
            for piece in snapshot.response.pieces():
                rollout.append(piece)
            self[prompt.rollout] = rollout
            if self._branching is not None and not dropped:
                self._branching.expect(prompt)
            self.note_end(rollout)

    def note_end(self, rollout: InFlightRollout) -> None:
        if self._branching is not None and rollout.reason is not None:
            ending = rollout.ending(self.answered(rollout.prompt.rollout))
            if isinstance(ending, Finish):
                self._branching.ended(ending)

    def answered(self, rollout: int) -> Sequence[AnsweredTurn]:
        return () if self._conversations is None else self._conversations.answered(rollout)

    def is_complete(self, unit: Unit) -> bool:
        return all(self[prompt.rollout].reason for prompt in unit.prompts)

    async def finish(self, unit: Unit, out: Sender[RolloutEvent], ended: list[int]) -> None:
        unit.sent = True
        # The last first: a scorer that finishes a first conversation then knows of the others. Segments end alike.
        last = dict[int, tuple[int, Finish | Drop]]()
        for prompt in sorted(unit.prompts, key=lambda prompt: -prompt.branch):
            number, rollout = prompt.rollout, self[prompt.rollout]
            ending = rollout.ending(self.answered(number))
            if self._branching is None:
                branch, of = last.setdefault(prompt.first, (prompt.branch, ending))
                ending = _alike(ending, of, branch + 1) if branch else ending
            self._lengths.append(len(rollout.prompt.tokens) + rollout.length)
            await self.close(rollout)
            ended.append(number)
            await out.send(ending)

    async def discard(self, unit: Unit) -> int:
        # Of a unit that begins anew; returns the tokens that are lost.
        rollouts = [self[prompt.rollout] for prompt in unit.prompts if prompt.rollout in self]
        for rollout in rollouts:
            await self.close(rollout)
        if self._conversations is not None:
            self._conversations.release(rollout.prompt.rollout for rollout in rollouts)
        return sum(rollout.length for rollout in rollouts)

    async def close(self, rollout: InFlightRollout) -> None:
        await rollout.aclose()  # in flight until then, so that a failure does not lose it
        if self._conversations is not None:
            self._conversations.forget(rollout.prompt)
        del self[rollout.prompt.rollout]


def _alike(ending: Finish | Drop, last: Finish | Drop, segments: int) -> Finish | Drop:
    if isinstance(last, Drop):
        return replace(last, rollout=ending.rollout)
    return ending if isinstance(ending, Drop) else replace(ending, reason=last.reason, segments=segments)


def require_turns(policy: Policy) -> MultiTurnPolicy:
    if not policy.capabilities.turns:
        raise ConfigError(
            f"an environment answers turns, and {type(policy).__name__} cannot go on after one: expected a policy with "
            "capabilities.turns, such as oppo.hf.HfPolicy"
        )
    require_model(policy, "MultiTurnPolicy", ("open_turns",))
    return cast("MultiTurnPolicy", policy)
