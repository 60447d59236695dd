"""Who plays in an agent: its program, and models of frozen roles, whose tokens are given, never trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias
from zlib import crc32

import anyio
import numpy as np

from oppo.agents.conversation import BRANCHES, Conversation, Earned, Session
from oppo.agents.requests import Refusal
from oppo.environments.functions import EnvironmentFailure, is_finite
from oppo.errors import ModelError, OppoError, ProtocolError, one_line, shown
from oppo.events import Chunk, Drop, Prompt, Response
from oppo.models import Decode, Decoding, Policy
from oppo.rewards.function import ByTurn
from oppo.user_code import CheckedFunction

Visit: TypeAlias = tuple[Mapping[str, object], str, str]  # a row, and the URL and the key by which its agent asks


@dataclass(frozen=True)
class CalledAgent(CheckedFunction[Visit, str, Earned]):
    kind: ClassVar[str] = "agent"
    error: ClassVar[type[EnvironmentFailure]] = EnvironmentFailure
    roles: Sequence[str] = ()

    def made(self, given: Visit) -> object:
        row, url, key = given
        return self.user.function(copy.deepcopy({**row}), url, key)

    def checked(self, result: object, where: str) -> Earned:
        if isinstance(result, Drop):
            return result
        if not self.roles:
            return self._reward(result, "a finite number, the reward, or a ByTurn or a Drop", where)
        roles = ", ".join(map(repr, self.roles))
        if not isinstance(result, Mapping):
            words = f"must return a mapping of the roles {roles} to rewards, or a Drop; got {shown(result)}"
            raise self.failure(words, where)
        if other := [role for role in result if role not in self.roles]:
            raise self.failure(f"returned a reward for {other[0]!r}, and the roles are {roles}", where)
        words = "a finite number or a ByTurn for {!r}"
        return {role: self._reward(reward, words.format(role), where) for role, reward in result.items()}

    def _reward(self, result: object, expected: str, where: str) -> float:
        if isinstance(result, ByTurn):
            return result
        if not is_finite(result):
            raise self.failure(f"must return {expected}; got {shown(result)}", where)
        return float(result)


class Player:
    # An engine that lets rollouts join decodes answers side by side, another one each alone.
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._joins = policy.capabilities.adds_while_decoding
        self._engine: Decoding | None = None
        self._failure: Exception | None = None
        self._live = 0
        self._alone = anyio.Lock()
        self._news = anyio.Event()

    async def serve(self) -> None:
        # As long as something is asked for: an engine keeps what it has decoded.
        while self._joins and self._failure is None:
            await self._until(lambda: self._live > 0)
            try:
                async with self.policy.decoding([], lambda _: False) as engine:
                    self._engine = engine
                    self._notify()
                    await self._until(lambda: not self._live)
                    self._engine = None  # those that come while it closes wait for the next
            except Exception as error:  # noqa: BLE001 - those that ask raise it
                self._failure = error
            finally:
                self._engine = None
                self._notify()

    async def play(self, prompt: Prompt, session: Session, talk: Conversation) -> None:
        assert talk.request is not None  # noqa: S101 - it has just come
        tokens, limit = np.array(talk.prompt, np.int32), talk.request.limit
        same = crc32(tokens.tobytes(), crc32(talk.role.encode()))
        session.drawn[same] += 1
        # The responses to a row begin alike, so what is drawn before them is the same for all.
        branch, sample = (same + session.drawn[same]) % BRANCHES, prompt.sample if session.first.begun else 0
        asked = replace(
            prompt, tokens=tokens, sample=sample, branch=branch, limit=limit, role=talk.role, images=talk.images
        )
        try:
            turn = await self.turn(asked)
        except Refusal as refusal:
            talk.refuse(refusal)
        except OppoError as error:
            session.scope.cancel()
            session.end(error)
        else:
            if talk.request is not None:  # its agent has not ended meanwhile
                talk.tell(turn.tokens.tolist(), turn.logprobs.tolist(), cut=turn.state == "length")
                session.notify()

    async def turn(self, prompt: Prompt) -> Chunk:
        if prompt.images:
            raise Refusal(f"role {prompt.role!r} is frozen, and what plays it is shown text only: leave images out")
        if prompt.limit.thinking:
            raise Refusal(f"role {prompt.role!r} is frozen, and no budget ends its thinking: leave the budget out")
        try:
            (decode,) = await self.policy.open([prompt])
        except ModelError as error:
            words = f"the model of role {prompt.role!r} cannot answer: {one_line(error)}"
            raise Refusal(words, code="context_length_exceeded") from error
        self._live += 1
        self._notify()
        try:
            if not self._joins:
                async with self._alone, self.policy.decoding([decode], lambda _: False):
                    return await _read(decode, prompt)
            await self._until(lambda: self._engine is not None or self._failure is not None)
            if self._engine is None:
                raise ModelError(f"the model of role {prompt.role!r} has failed") from self._failure
            await self._engine.add([decode])
            return await _read(decode, prompt)
        finally:
            self._live -= 1
            self._notify()
            with anyio.CancelScope(shield=True):
                await decode.aclose()

    def _notify(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def _until(self, there: Callable[[], bool]) -> None:
        while not there():
            await self._news.wait()


async def _read(decode: Decode, prompt: Prompt) -> Chunk:
    found, most = Response.empty(prompt), prompt.limit.tokens
    while not most or len(found) < most:
        piece = await decode.read(max(1, most - len(found)) if most else 64)
        found = found.then(piece)
        if piece.state == "cut":
            raise ProtocolError(f"the model of role {prompt.role!r} stopped within a turn")
        if piece.state != "live":
            return Chunk(prompt.rollout, 0, found.tokens, found.logprobs, found.versions, state=piece.state)
    return found.chunk()
