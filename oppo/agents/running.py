"""The agents that run: their program, the sessions of their keys, and the players of frozen roles."""

from __future__ import annotations

import copy
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar
from zlib import crc32

import anyio
import numpy as np
from anyio.abc import TaskGroup

from oppo.agents.conversation import BRANCHES, Conversation, Earned, Session
from oppo.agents.players import Player
from oppo.agents.requests import ChatRequests, Refusal, Request
from oppo.agents.server import AgentServer
from oppo.environments.functions import EnvironmentFailure, is_finite
from oppo.errors import OppoError, ProtocolError, running_loop, shown
from oppo.events import Drop, Prompt
from oppo.log import logger
from oppo.models import Policy, Shared, entered
from oppo.observe import WorkContext, work_context
from oppo.rewards.function import ByTurn
from oppo.user_code import CheckedFunction

if TYPE_CHECKING:
    from starlette.types import ASGIApp


@dataclass(frozen=True, slots=True)
class _Visit:
    row: Mapping[str, object]
    url: str
    key: str


@dataclass(frozen=True)
class CalledAgent(CheckedFunction[_Visit, str, Earned]):
    kind: ClassVar[str] = "agent"
    error: ClassVar[type[EnvironmentFailure]] = EnvironmentFailure
    roles: Sequence[str] = ()

    def made(self, given: _Visit) -> object:
        return self.user.function(copy.deepcopy({**given.row}), given.url, given.key)

    def checked(self, result: object, where: str) -> Earned:
        if isinstance(result, Drop):
            return result
        if self.roles:
            return self._by_role(result, where)
        if isinstance(result, ByTurn):
            return result
        if not is_finite(result):
            words = f"must return a finite number, the reward, or a ByTurn or a Drop; got {shown(result)}"
            raise self.failure(words, where)
        return float(result)

    def _by_role(self, result: object, where: str) -> Mapping[str, float]:
        roles = ", ".join(map(repr, self.roles))
        if not isinstance(result, Mapping):
            raise self.failure(
                f"must return a mapping of the roles {roles} to rewards, or a Drop; got {result!r}", where
            )
        for role, reward in result.items():
            if role not in self.roles:
                raise self.failure(f"returned a reward for {role!r}, and the roles are {roles}", where)
            if not isinstance(reward, ByTurn) and not is_finite(reward):
                raise self.failure(f"must return a finite number or a ByTurn for {role!r}; got {shown(reward)}", where)
        return {role: reward if isinstance(reward, ByTurn) else float(reward) for role, reward in result.items()}


class RunningAgents(Shared):
    # The agents that run, by the rollouts that they are for.
    def __init__(
        self,
        agent: CalledAgent,
        requests: ChatRequests,
        timeout: float | None,
        frozen: Mapping[str, Policy | None],
        *,
        host: str,
        port: int,
        public_url: str,
    ) -> None:
        self.players = {role: None if policy is None else Player(policy) for role, policy in frozen.items()}
        self.rehearsing = False  # all is answered there
        self.longest = math.inf
        self._agent = agent
        self._requests = requests
        self._timeout = timeout
        self._tasks: TaskGroup | None = None
        self._waiting = 0
        self._sessions: dict[tuple[int, int], Session] = {}
        self._keys: dict[str, Session] = {}
        self._expected = defaultdict[tuple[int, int], set[int]](set)
        self._begun = anyio.Event()
        self._single: dict[bool, str] = {}
        self._said = False
        self._samples = defaultdict[WorkContext | None, dict[str, list[float]]](dict)
        self._earned = defaultdict[WorkContext | None, dict[str, list[float]]](dict)
        self._server = AgentServer(
            host, port, public_url, sessions=lambda: self._keys, asked=self._notify, noted=self._noted
        )

    @property
    def at_work(self) -> str:
        return self._agent.title if self._waiting else ""

    @property
    def single(self) -> str:
        """Why agents hold one conversation only: by the graph that is open, training's or an evaluation's."""
        return self._single.get(is_evaluated(), "no graph decodes others")

    @single.setter
    def single(self, why: str) -> None:
        self._single[is_evaluated()] = why

    def samples(self) -> Mapping[str, Sequence[float]]:
        # Whether each request since the last call was refused, and was sent again; an evaluation's apart. What comes
        # after an evaluation was measured counts for none.
        asking = evaluation()
        found = self._samples.pop(asking, {})
        if asking is not None:
            for late in self._samples.keys() - {None}:
                del self._samples[late]
        return found

    async def _open(self, stack: AsyncExitStack) -> None:
        listening = None if getattr(running_loop(), "virtual", False) else self._server.listening()
        players = [each for each in self.players.values() if each is not None]
        await stack.enter_async_context(await entered([each.policy for each in players]))
        self._tasks = await anyio.create_task_group().__aenter__()
        if listening is not None:
            self._server.serve(listening, self._tasks)
        for each in players:
            self._tasks.start_soon(each.serve, name="a player")
        stack.push_async_callback(self._close)

    async def _close(self) -> None:
        if self._tasks is None:
            return
        tasks, self._tasks = self._tasks, None
        for key in list(self._sessions):
            self._end(key)
        self._server.stop()
        tasks.cancel_scope.cancel()
        await tasks.__aexit__(None, None, None)

    @property
    def app(self) -> ASGIApp:
        return self._server.app

    def start(self, prompt: Prompt) -> Session:
        # Replaces the agent of the rollout, if there is one.
        if self._tasks is None:
            raise ProtocolError("agents run in a run only: open the graph first")
        key = key_of(prompt)
        self._end(key)
        where = f"rollout {prompt.admission}.{prompt.sample}"
        session = Session(
            where,
            prompt.columns,
            self._requests,
            partial(self._agent.failure, where=where),
            self._timeout,
            single=self.single,
            expected=self._expected[key],
            longest=self.longest,
            evaluation=evaluation(),
            frozen=self.players,
            play=partial(self._plays, prompt),
        )
        visit = _Visit(prompt.columns, self._server.url, f"oppo-{secrets.token_hex(16)}")
        self._sessions[key] = self._keys[visit.key] = session
        self._tasks.start_soon(self._run, visit, session, where, name=f"agent of {where}")
        return session

    async def _run(self, visit: _Visit, session: Session, where: str) -> None:
        with session.scope:
            try:
                outcome: Earned | OppoError = await self._agent.run(visit, where)
                if isinstance(outcome, Mapping):
                    self._require_spoken(session, outcome)
            except EnvironmentFailure as failure:
                outcome = failure
            session.end(outcome)

    def _require_spoken(self, session: Session, rewards: Mapping[str, float]) -> None:
        spoken = Counter(each.role for each in session.conversations.values() if each.begun)
        if silent := sorted(rewards.keys() - spoken):
            raise session.failure(f"returned a reward for {silent[0]!r}, which has no conversation: leave it out")
        if unpaid := sorted(spoken.keys() - rewards - self.players.keys()):
            raise session.failure(f"returned no reward for {unpaid[0]!r}, which has a conversation: give it one")
        for role, reward in rewards.items():
            if isinstance(reward, ByTurn) and role != session.first.role and spoken[role] > 1:
                raise session.failure(
                    f"returned rewards by turn for {role!r}, which has {spoken[role]} conversations: give it a number"
                )

    def _plays(self, prompt: Prompt, session: Session, talk: Conversation) -> None:
        if self.rehearsing or self._tasks is None:
            return
        if (player := self.players[talk.role]) is None:
            raise Refusal(f"no policy plays role {talk.role!r}: give Agents one, or seat() it")
        self._tasks.start_soon(self._play, player, prompt, session, talk, name=f"a turn of {talk.role!r}")

    async def _play(self, player: Player, prompt: Prompt, session: Session, talk: Conversation) -> None:
        assert talk.request is not None  # noqa: S101 - it has just come
        tokens, limit = np.array(talk.prompt, np.int32), talk.request.limit
        same = crc32(tokens.tobytes(), crc32(talk.role.encode()))
        session.drawn[same] += 1
        # The responses to a row begin alike, so what is drawn before them is the same for all.
        branch, sample = (same + session.drawn[same]) % BRANCHES, prompt.sample if session.first.begun else 0
        asked = replace(prompt, tokens=tokens, sample=sample, branch=branch, limit=limit, role=talk.role)
        try:
            turn = await player.turn(asked)
        except Refusal as refusal:
            talk.refuse(refusal)
        except OppoError as error:
            session.scope.cancel()
            session.end(error)
        else:
            if talk.request is not None:  # its agent has not ended meanwhile
                talk.tell(turn.tokens.tolist(), turn.logprobs.tolist(), cut=turn.state == "length")
                session.notify()

    def close(self, prompt: Prompt) -> None:
        """End a response; with the last one of its agent, end that, if there is one."""
        session = self._sessions.get(key_of(prompt))
        if session is not None:
            session.open.discard(prompt.branch)
            if not session.open:
                self._end(key_of(prompt))

    def _end(self, key: tuple[int, int]) -> None:
        if (session := self._sessions.pop(key, None)) is not None:
            self._keys = {name: each for name, each in self._keys.items() if each is not session}
            self._expected.pop(key, None)
            self._note_conversations(session)
            session.close()
            session.scope.cancel()

    def _note_conversations(self, session: Session) -> None:
        if not session.first.told:  # it was begun ahead
            return
        conversations, changed = float(session.trained), float(session.changes)
        self._noted(session.evaluation, {"agents/conversations": conversations, "agents/history_changed": changed})
        if session.changes and not self._said:
            self._said = True
            logger.warning(
                f"the agent of {session.rollout} began another conversation, or was refused, since its history had "
                f"changed: {session.change}; send messages back as they came and as they were sent, so that one "
                "conversation stays one response (agents/history_changed counts such requests; this is said once)"
            )

    def _session(self, prompt: Prompt, told: float) -> Session:
        session = self._sessions.get(key_of(prompt))
        anew = session is not None and not prompt.branch and session.first.told > told
        return self.start(replace(prompt, branch=0)) if session is None or anew else session

    async def heard(self, session: Session, talk: Conversation) -> Request | None:
        self._waiting += 1
        try:
            return await session.heard(talk)
        finally:
            self._waiting -= 1

    def _notify(self) -> None:
        self._begun.set()
        self._begun = anyio.Event()

    def _noted(self, of: WorkContext | None, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._samples[of].setdefault(name, []).append(value)


def key_of(prompt: Prompt) -> tuple[int, int]:
    return prompt.admission, prompt.sample


def evaluation() -> WorkContext | None:
    """The evaluation that the current task works for; ``None`` for training."""
    context = work_context()
    return context if context.role == "evaluate" else None


def is_evaluated() -> bool:
    return evaluation() is not None
