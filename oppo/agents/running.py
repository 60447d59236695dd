"""The agents of a run: one for each rollout, its session, and the server that they ask."""

from __future__ import annotations

import copy
import math
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, SupportsFloat

import anyio
from anyio.abc import TaskGroup

from oppo.agents.conversation import Conversation, Session
from oppo.agents.requests import ChatRequests, Request
from oppo.agents.server import AgentServer
from oppo.environments import EnvironmentFailure
from oppo.errors import ProtocolError, running_loop, shown
from oppo.events import Drop, Prompt
from oppo.log import logger
from oppo.observe import work_context
from oppo.user_code import CheckedFunction, Shared

if TYPE_CHECKING:
    from starlette.types import ASGIApp


@dataclass(frozen=True, slots=True)
class _Visit:
    row: Mapping[str, object]
    url: str
    key: str


@dataclass(frozen=True)
class CalledAgent(CheckedFunction[_Visit, str, float | Drop]):
    kind: ClassVar[str] = "agent"
    error: ClassVar[type[EnvironmentFailure]] = EnvironmentFailure

    def made(self, given: _Visit) -> object:
        return self.user.function(copy.deepcopy({**given.row}), given.url, given.key)

    def checked(self, result: object, where: str) -> float | Drop:
        if isinstance(result, Drop):
            return result
        if isinstance(result, bool) or not isinstance(result, SupportsFloat) or not math.isfinite(result):
            raise self.failure(f"must return a finite number, the reward, or a Drop; got {shown(result)}", where)
        return float(result)


class RunningAgents(Shared):
    # The agents that run, by the rollouts that they are for.
    def __init__(
        self,
        agent: CalledAgent,
        requests: ChatRequests,
        timeout: float | None,
        *,
        host: str,
        port: int,
        public_url: str,
    ) -> None:
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
        self._samples = defaultdict[bool, dict[str, list[float]]](dict)
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
        # Whether each request since the last call was refused, and was sent again; an evaluation's apart.
        return self._samples.pop(is_evaluated(), {})

    async def _open(self, stack: AsyncExitStack) -> None:
        listening = None if getattr(running_loop(), "virtual", False) else self._server.listening()
        self._tasks = await anyio.create_task_group().__aenter__()
        if listening is not None:
            self._server.serve(listening, self._tasks)
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
        # In place of the agent that the rollout may have.
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
            evaluated=is_evaluated(),
        )
        visit = _Visit(prompt.columns, self._server.url, f"oppo-{secrets.token_hex(16)}")
        self._sessions[key] = self._keys[visit.key] = session
        self._tasks.start_soon(self._run, visit, session, where, name=f"agent of {where}")
        return session

    async def _run(self, visit: _Visit, session: Session, where: str) -> None:
        with session.scope:
            try:
                outcome: float | Drop | EnvironmentFailure = await self._agent.run(visit, where)
            except EnvironmentFailure as failure:
                outcome = failure
            session.end(outcome)

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
        conversations, changed = float(len(session.conversations)), float(session.changes)
        self._noted(session.evaluated, {"agents/conversations": conversations, "agents/history_changed": changed})
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

    def _noted(self, evaluated: bool, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._samples[evaluated].setdefault(name, []).append(value)


def key_of(prompt: Prompt) -> tuple[int, int]:
    return prompt.admission, prompt.sample


def is_evaluated() -> bool:
    return work_context().role == "evaluate"
