"""Agents that talk to the policy as to OpenAI's or Anthropic's server: the prompts, turns and rewards of its rollouts.

::

    agent  -> POST /v1/chat/completions -> its first request     -> the prompt of the rollout       AgentPrompts
    agent  <- the turn, as a message    <- Turn                  <- the policy                      Agents.answer
    agent  -> the messages behind it    -> tokens after the turn -> the policy
    agent  -> a number, at its end                               -> the reward of the response      Agents.reward

A frozen role is played by another model: what is said in it is no rollout, and a :class:`Player` answers.

An API key identifies an agent and its conversations. Its messages after a turn are tokenized by
:meth:`oppo.hf.chat.ChatFormat.answer`; earlier messages are not rendered again. A request that continues none of
its conversations begins another one, a branch: a further response of the rollout's unit, with the reward of its role.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import anyio
import numpy as np
from anyio.abc import TaskGroup

from oppo.agents.conversation import Conversation, Earned, Session
from oppo.agents.requests import ChatRequests, Refusal, Request
from oppo.agents.roles import CalledAgent, Player, Visit
from oppo.agents.server import PATHS, AgentServer
from oppo.declared import NAME, require_real
from oppo.environments.functions import EnvironmentFailure
from oppo.errors import ConfigError, DataError, OppoError, ProtocolError, running_loop, shown
from oppo.events import Chunk, Drop, Finish, IntArray, Prompt
from oppo.images import ImageRef
from oppo.libraries import require
from oppo.limits import UNLIMITED, TurnLimit
from oppo.log import logger
from oppo.models import Policy, SamplingSettings, Scorer, Shared, entered
from oppo.observe import WorkContext, work_context
from oppo.returns import TokenRewards
from oppo.rewards.function import ByTurn
from oppo.scorers import WholeScorer
from oppo.turns import Answer, Branching, Turn, turns_of
from oppo.user_code import UserFunction

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from oppo.hf.processor import ImagePrompts
    from oppo.hf.tokenizer import HfTokenizer

AgentFunction: TypeAlias = Callable[[dict[str, object], str, str], object]
"""``f(row, base_url, api_key)``: returns the reward of its conversation, or a ``ByTurn`` or a ``Drop``.

One with roles returns these by role.
"""

AHEAD: Final = 16  # agents that are started before their prompts are asked for, so that they start side by side
FAILURES: Final = 100  # rows in a row that give no prompt, after which the run ends

_Said: TypeAlias = Callable[[], Awaitable[Sequence[Chunk]]]


class _Astray(EnvironmentFailure):
    """An agent did otherwise than it did before: its rollout is dropped."""


def key_of(prompt: Prompt) -> tuple[int, int]:
    return prompt.admission, prompt.sample


def evaluation() -> WorkContext | None:
    """The evaluation that the current task works for; ``None`` for training."""
    context = work_context()
    return context if context.role == "evaluate" else None


def is_evaluated() -> bool:
    return evaluation() is not None


class Agents(Shared, Branching):
    """A function that is an agent, as the prompts, the environment and the reward of rollouts.

    It runs once for each rollout. Its first request is the prompt, the policy's turns are its answers, and its result
    is the reward. Responses to one row begin with the same messages. A resumed run runs its agents anew, and answers
    them with the turns that the policy has written: one that then sends something else is dropped.

    Args:
        run: ``f(row, base_url, api_key)``, or its ``file.py:name``: returns the reward of its conversation with the
            server at this URL, or an :class:`oppo.rewards.ByTurn` of its first conversation's turns, with ``roles`` a
            mapping of these by role, or :meth:`oppo.Drop.because` of a reason. An async function runs on the event
            loop, and must not block it; a sync one in a thread of its own.
        tokenizer: the policy's, with its chat template.
        sampling: of the run: a request for another is refused.
        on_failure: of an agent that raises, hangs, or sends no request: ``fail`` ends the run, ``drop`` drops the
            rollout, or leaves the row out.
        timeout: seconds in which an agent sends a request or returns, after it was started or answered; ``None``: no
            limit.
        host: where the server listens; agents on other machines cannot reach the default.
        port: likewise; 0: any that is free.
        public_url: the URL of the API that agents get where another address than the host leads to this port.
        roles: names that requests give as their ``model``, each with who plays it: ``"policy"``, that of the run; or a
            policy of its own, whose tokens are given, never trained; ``None``: :meth:`seat` says whose. Empty: agents
            have no roles.

    Attributes:
        drops: whether failures drop rollouts.

    Raises:
        ConfigError: the extra ``agents`` is not installed, the tokenizer has no chat template that can be used, or a
            number is out of range.
        EnvironmentFailure: there is no such file or function.
    """

    def __init__(
        self,
        run: AgentFunction | str,
        tokenizer: HfTokenizer,
        sampling: SamplingSettings | None = None,
        *,
        on_failure: Literal["fail", "drop"] = "fail",
        timeout: float | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str = "",
        roles: Mapping[str, Policy | Literal["policy"] | None] | None = None,
    ) -> None:
        for module in ("starlette", "uvicorn"):
            require("agents", "an agent", module=module)
        if timeout is not None:
            require_real("timeout", timeout, 0, error=ConfigError)
        user = UserFunction.of(run, None, EnvironmentFailure)
        user.must_take("agent", "a row, a URL and a key", {}, "url", "key")
        self.name = user.name
        played = roles or {}
        if odd := [role for role in played if NAME.fullmatch(role) is None]:
            raise ConfigError(f"expected letters, digits, '.', '_' and '-' as the name of a role, got {odd[0]!r}")
        if played and "policy" not in played.values():
            raise ConfigError(f"the policy plays none of the roles {', '.join(map(repr, played))}: leave one to it")
        requests = ChatRequests(tokenizer, sampling or SamplingSettings(), list(played))
        try:
            _, chat = requests.format([])
        except Refusal as refusal:
            raise ConfigError(str(refusal)) from refusal
        self.ends = chat.ends
        self.drops = on_failure == "drop"
        frozen = {role: player for role, player in played.items() if not isinstance(player, str)}
        self.players = {role: None if player is None else Player(player) for role, player in frozen.items()}
        self.rehearsing = False  # all is answered there
        self.longest = math.inf
        self._agent = CalledAgent(user, list(played))
        self._requests = requests
        self._timeout = timeout
        self._tasks: TaskGroup | None = None
        self._waiting = 0
        self._sessions: dict[tuple[int, int], Session] = {}  # of the agents that run, by the rollouts that they are for
        self._keys: dict[str, Session] = {}
        self._expected = defaultdict[tuple[int, int], set[int]](set)
        self._begun = anyio.Event()
        self._single: dict[bool, str] = {}
        self._said = False
        self._played: set[str] | None = None  # roles; None before an agent has ended
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
        if self._played is not None and (idle := [role for role in self._agent.roles if role not in self._played]):
            logger.warning(
                f"no agent has played the role {idle[0]!r}, so nothing was sampled in it: expected requests with it as "
                "their model, or leave the role out"
            )
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
        secret = f"oppo-{secrets.token_hex(16)}"
        visit = prompt.columns, self._server.url, secret
        self._sessions[key] = self._keys[secret] = session
        self._tasks.start_soon(self._run, visit, session, where, name=f"agent of {where}")
        return session

    async def _run(self, visit: Visit, session: Session, where: str) -> None:
        with session.scope:
            try:
                outcome: Earned | OppoError = await self._agent.run(visit, where)
                if isinstance(outcome, Mapping):
                    self._check_spoken(session, outcome)
            except EnvironmentFailure as failure:
                outcome = failure
            session.end(outcome)

    def _check_spoken(self, session: Session, rewards: Mapping[str, float]) -> None:
        spoken = Counter(each.role for each in session.conversations.values() if each.begun)
        self._played = (self._played or set()).union(spoken)
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
        self._tasks.start_soon(player.play, prompt, session, talk, name=f"a turn of {talk.role!r}")

    def close(self, prompt: Prompt) -> None:
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

    @property
    def reward(self) -> Scorer[float | Drop]:
        return WholeScorer(self.earned, lambda: self.at_work, lambda: self._earned.pop(evaluation(), {}))

    def seat(self, role: str, policy: Policy) -> None:
        """Have a policy play a role, before the run begins: frozen, as it is."""
        self.players[role] = Player(policy)

    def see(self, images: ImagePrompts) -> None:
        """Have what begins a conversation show images, before the run begins."""
        self._requests.images = images
        _ = images.processor.inner  # which is loaded here, not while others wait

    async def asked(self, session: Session) -> Request:
        request = await self.heard(session, session.first)
        if request is None:
            raise session.failure(f"returned {shown(session.outcome)} without a request of the policy: {_WANTED}")
        return request

    async def branch(self, holds: Callable[[int], bool]) -> Prompt:
        while True:
            begun = self._begun
            for (admission, sample), session in self._sessions.items():
                if session.first.told and session.unopened and holds(admission):
                    talk = session.unopened.pop(0)
                    assert talk.request is not None  # noqa: S101 - its first
                    asked = talk.request
                    more: dict[str, Any] = {"columns": session.columns, "limit": asked.limit, "role": talk.role}
                    more["images"] = talk.images
                    return Prompt(0, admission, asked.tokens, sample, branch=talk.branch, **more)
            await begun.wait()

    def refuse(self, branch: Prompt) -> None:
        self._sessions[key_of(branch)].conversations[branch.branch].refuse(_FULL)
        self.close(branch)

    def expect(self, prompt: Prompt) -> None:
        """Run the agent of a rollout that is opened; a further conversation is taken for one that it has held."""
        if prompt.branch:
            self._expected[key_of(prompt)].add(prompt.branch)
        self._session(prompt, math.inf)

    def goes_on(self, prompt: Prompt) -> bool:
        session = self._sessions.get(key_of(prompt))
        return session is not None and session.outcome is None and not session.single

    async def settled(self, prompt: Prompt) -> None:
        self._waiting += 1
        try:
            await self._sessions[key_of(prompt)].ended()
        finally:
            self._waiting -= 1

    def ended(self, finish: Finish) -> None:
        assert self._tasks is not None  # noqa: S101 - responses end in a run only
        session = self._session(finish.response.prompt, math.inf)
        self._tasks.start_soon(self._told_end, session, finish, name=f"end of rollout {finish.rollout}")

    async def _told_end(self, session: Session, finish: Finish) -> None:
        with suppress(EnvironmentFailure):  # its reward says so
            await self._finished(session, finish)

    async def _having_told(
        self, session: Session, prompt: Prompt, number: int, said: _Said, *, cut: bool = False
    ) -> Conversation:
        # The conversation of a rollout, once its first ``number`` turns were sent; ``cut``: the last one was not whole.
        talk = await session.held(prompt.branch)
        if talk is None:
            raise _Astray(f"the agent of rollout {prompt.rollout} ended earlier than before the run was resumed")
        async with talk.telling:
            for at, turn in enumerate(await said() if talk.told < number else ()):
                if talk.told <= at < number:
                    await self._asked_in(session, talk, prompt)
                    last = at == number - 1
                    self._tell(session, talk, turn.tokens.tolist(), turn.logprobs.tolist(), cut=cut and last)
        return talk

    async def _asked_in(self, session: Session, talk: Conversation, prompt: Prompt) -> None:
        request = await self.heard(session, talk)
        if request is None:
            raise _Astray(f"the agent of rollout {prompt.rollout} ended earlier than before the run was resumed")
        if not talk.told and request.limit != prompt.limit:
            raise _Astray(
                f"the agent of rollout {prompt.rollout} began with another limit of its turn, {request.limit}, than "
                f"{prompt.limit}: expected the same of each response to a row, and after a resume"
            )
        if not talk.told and talk.role != prompt.role:
            raise _Astray(
                f"the agent of rollout {prompt.rollout} began in role {talk.role!r} in place of {prompt.role!r}: "
                "expected the same for each response to a row, and after a resume"
            )
        if not talk.told and _digests(talk.images) != _digests(prompt.images):
            raise _Astray(
                f"the agent of rollout {prompt.rollout} began with other images than those of its row: expected the "
                "same for each response to it, and after a resume"
            )
        if not talk.told and not np.array_equal(request.tokens, prompt.tokens):
            raise _Astray(
                f"the agent of rollout {prompt.rollout} began with {_difference(request.tokens, prompt.tokens)}: "
                "expected the same messages and tools for each response to a row, and after a resume"
            )

    def _tell(
        self,
        session: Session,
        talk: Conversation,
        turn: Sequence[int],
        logprobs: Sequence[float],
        *,
        cut: bool = False,
    ) -> None:
        talk.tell(turn, logprobs, cut=cut)
        session.notify()
        self._notify()

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        state: Any = turn.state or {"given": ""}
        session = self._session(turn.prompt, turn.number)
        try:
            talk = await self._having_told(session, turn.prompt, turn.number, turn.said)
            await self._asked_in(session, talk, turn.prompt)
            if state["given"] and talk.given != state["given"]:
                raise _Astray(
                    f"the agent of rollout {turn.prompt.rollout} said something else than before the run was resumed, "
                    "after the same turns"
                )
            if ending := talk.interruption(turn.tokens.tolist()):
                return Answer(np.array(ending, np.int32), turn.state, within=True)
            shows = talk.request is not None and talk.request.wanted.shows_logprobs
            logprobs = (await turn.said())[turn.number].logprobs.tolist() if shows else ()
            self._tell(session, talk, turn.tokens.tolist(), logprobs)
            request = await self.heard(session, talk)
        except EnvironmentFailure as failure:
            return self._dropped(session, turn.prompt, failure)
        if request is not None:
            return Answer(request.tokens, {"given": talk.given}, calls=request.answers, limit=request.limit)
        if not isinstance(session.outcome, Drop):
            return None
        self.close(turn.prompt)
        return replace(session.outcome, rollout=turn.prompt.rollout)

    def follow(self, prompt: Prompt, number: int, turn: Callable[[], Sequence[int]]) -> None:
        session = self._sessions.get(key_of(prompt))
        talk = None if session is None else session.conversations.get(prompt.branch)
        if talk is not None and talk.told == number and talk.streams:
            talk.follow(turn())

    def _dropped(self, session: Session, prompt: Prompt, failure: OppoError) -> Drop:
        if session.outcome is None:
            session.end(failure)
        self.close(prompt)
        if self.drops or isinstance(failure, _Astray):
            return Drop(prompt.rollout, str(failure))
        raise failure

    async def _finished(self, session: Session, finish: Finish) -> Conversation:
        # The conversation of a complete response, in which the agent was told the end of it.
        prompt, cut = finish.response.prompt, finish.reason == "length"
        turns = turns_of(finish.response, finish.answered)

        async def said() -> list[Chunk]:
            return turns

        talk = await self._having_told(session, prompt, len(turns), said, cut=cut)
        if cut:
            talk.refuse(_FULL)
        return talk

    async def earned(self, finish: Finish) -> float | Drop:
        prompt = finish.response.prompt
        session = self._session(prompt, math.inf)
        session.fill(_FULL)  # its unit is complete
        try:
            talk = await self._finished(session, finish)
            if await self.heard(session, talk) is not None:
                raise _Astray(
                    f"the agent of rollout {finish.rollout} goes on, and its response has ended: the policy ended it "
                    "without a turn, or the agent had returned by then before the run was resumed"
                )
        except EnvironmentFailure as failure:
            if finish.reason == "length" and session.outcome is failure and not isinstance(failure, _Astray):
                failure = _Astray(f"the response had no room for more, and {failure}")
            return self._dropped(session, prompt, failure)
        self.close(prompt)
        outcome = session.outcome
        assert isinstance(outcome, float | Mapping | Drop)  # noqa: S101 - a failure was raised
        if isinstance(outcome, Drop):
            return replace(outcome, rollout=finish.rollout)
        if isinstance(outcome, Mapping) and not prompt.branch:
            for role, reward in outcome.items():
                self._earned[evaluation()].setdefault(f"rewards/{role}/mean", []).append(float(reward))
        earned = outcome[prompt.role] if isinstance(outcome, Mapping) else outcome
        if isinstance(earned, ByTurn) and (not prompt.branch or prompt.role != session.first.role):
            try:
                return TokenRewards.by_turn(finish, earned.rewards)
            except ValueError as error:
                words = f"returned rewards that do not fit its first conversation: {error}"
                return self._dropped(session, prompt, session.failure(words))
        return float(earned)

    async def rehearse(self, prompt: Prompt, turn: Sequence[int], turns: int) -> Rehearsed:
        """Run the agent of a row outside of a run, with the same turn as each answer."""
        # It may hold several conversations, and the same turn answers frozen roles too.
        self.single, full, self.rehearsing = "", False, True
        async with self:
            session = self.start(prompt)
            try:
                while asking := await session.asking():
                    for talk in asking:
                        if talk.told < turns:
                            talk.tell(turn, [0.0] * len(turn))
                        else:
                            full = True
                            talk.refuse(_FULL)
                if not session.first.told:
                    await self.asked(session)
            except EnvironmentFailure:
                if not full:
                    raise
            finally:
                self.rehearsing = False
            told = sum(talk.told for talk in session.conversations.values())
            outcome = None if isinstance(session.outcome, OppoError) else session.outcome
            return Rehearsed(outcome, told, session.refused)

    def prompts(
        self,
        source: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        max_prompt_tokens: int = 512,
        over_long: Literal["filter", "error"] = "filter",
    ) -> AgentPrompts:
        """Return the first requests of agents as prompts, one for each of ``source``, whose columns they have.

        Args:
            source: its tokens are not read.
            max_prompt_tokens: a prompt of more tokens is left out, or an error.
            over_long: which of the two.
        """
        self.longest = max_prompt_tokens
        return AgentPrompts(self, source, max_prompt_tokens, over_long)


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """An agent that was tried out: its result, ``None`` where it went on, its answered requests, and a refusal."""

    outcome: Earned | None
    answered: int
    refused: str


_WANTED: Final = f"expected it to POST to {PATHS} of its base URL at least once, with its key"

_FULL: Final = Refusal(
    "the response has reached the run's sampling.max_new_tokens, so nothing follows: return a reward for what there is",
    code="context_length_exceeded",
)


def _digests(images: Iterable[ImageRef]) -> list[str]:
    return [image.sha256 for image in images]


def _difference(now: IntArray, before: IntArray) -> str:
    same = min(len(now), len(before))
    at = next((at for at in range(same) if now[at] != before[at]), same)
    return f"a prompt of {len(now)} tokens, which differs at token {at} from that of {len(before)} of its row"


class AgentPrompts(AsyncIterator[Prompt]):
    """Prompts that are the first requests of agents; see :meth:`Agents.prompts`."""

    def __init__(
        self,
        agents: Agents,
        source: Iterable[Prompt] | AsyncIterable[Prompt],
        max_prompt_tokens: int,
        over_long: Literal["filter", "error"],
    ) -> None:
        self.longest = max_prompt_tokens
        self._agents = agents
        self._source: Any = aiter(source) if isinstance(source, AsyncIterable) else iter(source)
        self._refuses = over_long == "error"
        self._begun = deque[tuple[Prompt, Session, Mapping[str, Any]]]()
        self._state: Mapping[str, Any] = self._position()

    @property
    def columns(self) -> Callable[[int], Mapping[str, object]] | None:
        found: Callable[[int], Mapping[str, object]] | None = getattr(self._source, "columns", None)
        return found

    def at(self, number: int) -> Prompt:
        """Return a row, before its agent has asked, of a source that has it."""
        found: Prompt = self._source.at(number)
        return found

    def _position(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._source.state_dict() if hasattr(self._source, "state_dict") else {}
        return found

    def state_dict(self) -> Mapping[str, Any]:
        """Return where the source is, without the agents that were started ahead."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)
        self._state = self._position()

    async def __anext__(self) -> Prompt:
        fault = ""
        for _ in range(FAILURES):
            await self._begin()
            if not self._begun:
                raise StopAsyncIteration
            prompt, session, self._state = self._begun.popleft()
            tokens, limit, fault = await self._first(prompt, session)
            if not fault:
                return replace(prompt, tokens=tokens, limit=limit, role=session.first.role, images=session.first.images)
            self._agents.close(prompt)
            logger.warning(f"{fault}: the row is left out")
        raise EnvironmentFailure(f"{FAILURES} rows in a row gave no prompt; the last: {fault}")

    async def _begin(self) -> None:
        # Rows of a program may come late, so that only the next one is waited for.
        comes = isinstance(self._source, AsyncIterator)
        while len(self._begun) < (1 if comes else AHEAD):
            prompt = await anext(self._source, None) if comes else next(self._source, None)
            if prompt is None:
                return
            self._begun.append((prompt, self._agents.start(prompt), self._position()))

    async def _first(self, prompt: Prompt, session: Session) -> tuple[IntArray, TurnLimit, str]:
        try:
            request = await self._agents.asked(session)
        except EnvironmentFailure as failure:
            if not self._agents.drops:
                raise
            return prompt.tokens, UNLIMITED, str(failure)
        tokens = request.tokens
        if len(tokens) <= self.longest:
            return tokens, request.limit, ""
        fault = f"the first request of rollout {prompt.admission} has {len(tokens)} tokens, more than {self.longest}"
        if self._refuses:
            raise DataError(f"{fault}: shorten its messages, or raise max_prompt_tokens")
        return tokens, UNLIMITED, fault
