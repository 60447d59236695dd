"""Checks of a policy that goes on after a turn (:mod:`oppo.turns`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import numpy as np

from oppo.errors import as_itself
from oppo.events import IntArray, Prompt, Response
from oppo.models import Policy
from oppo.stages.contract import require_turns
from oppo.testing.trial import Make, Trial, require
from oppo.turns import TurnDecode


@dataclass
class Dialogue(Trial):
    """A trial in which the first turn of each response is answered, and the next one is its last.

    Attributes:
        answer: int32 [n], to each first turn.
        heard: the turns of each response so far.
    """

    decodes: Sequence[TurnDecode]
    answer: IntArray = field(default_factory=lambda: np.zeros(1, np.int32))
    turns: bool = True
    heard: list[list[list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heard = [[] for _ in self.prompts]

    async def talk(self, limit: int, *, cancel_first: bool = False) -> None:
        """Decode one step, read all of it and answer its turns."""
        self.has_cut = False
        live = self.live
        decoding = self.policy.decoding([self.decodes[k] for k in live], self.cut)
        with as_itself():
            async with decoding, anyio.create_task_group() as conversations:
                async with anyio.create_task_group() as readers:
                    for k in live:
                        readers.start_soon(self.read, k, limit)
                        conversations.start_soon(self.converse, k, cancel_first)
                conversations.cancel_scope.cancel()

    async def converse(self, k: int, cancel_first: bool) -> None:
        """Answer the turns of one response until it ends or is parked."""
        decode, heard = self.decodes[k], self.heard[k]
        while True:
            if cancel_first:
                with anyio.move_on_after(0):
                    await decode.turn()
            tokens = await decode.turn()
            if tokens is None or not (decode.finish() if heard else decode.proceed(self.answer)):
                return
            heard.append(tokens.tolist())
            if len(heard) == 2:
                return


async def check_turns(make: Make[Policy], prompts: Sequence[Prompt], plain: Trial) -> None:
    """Check that a policy keeps the contract of :class:`oppo.turns.MultiTurnPolicy`.

    Args:
        make: returns a fresh policy.
        prompts: whose tokens can be an answer.
        plain: the same prompts, decoded without turns.

    Raises:
        ProtocolError: what was expected and what came.
    """
    whole = await _dialogue(make, prompts)
    await whole.talk(limit=3)
    require(
        sorted(whole.reported) == sorted(prompt.rollout for prompt in prompts),
        "with turns, cut() was not called with every rollout that ended, but with turns that ended, or not at all",
    )
    require(
        any(whole.heard),
        "capabilities.turns is true, and no turn has ended: give a policy and prompts with responses that end at a "
        "stop token before they reach their length limit",
    )
    _check_answers(whole, plain)
    other = await _dialogue(make, prompts)
    await other.talk(limit=1_000_000, cancel_first=True)
    require(
        (other.tokens, other.heard) == (whole.tokens, whole.heard),
        "a cancelled turn(), or another limit of read(), gives other tokens",
    )
    await _check_cut(make, whole)
    await _check_waiting(make, whole)
    if whole.policy.capabilities.resumes != "refused":
        await _check_reopening(make, whole)


async def _dialogue(make: Make[Policy], prompts: Sequence[Prompt]) -> Dialogue:
    policy = await make()
    decodes = await require_turns(policy).open_turns(prompts)
    require(len(decodes) == len(prompts), f"open_turns() of {len(prompts)} prompts returned {len(decodes)} decodes")
    return Dialogue(policy, prompts, decodes, answer=prompts[0].tokens[:2])


def _check_answers(whole: Dialogue, plain: Trial) -> None:
    """Check that each answer stands after its turn, once, and that the turns are what was sampled."""
    for prompt, turns, transcript, alone in zip(
        whole.prompts, whole.heard, whole.transcripts, plain.tokens, strict=True
    ):
        rollout, tokens = f"rollout {prompt.rollout}", transcript.tokens
        given = [token for token, is_given in tokens if is_given]
        sampled = [token for token, is_given in tokens if not is_given]
        for first in turns[:1]:
            require(
                [token for token, _ in alone[: len(first)]] == first,
                f"{rollout}: its first turn has other tokens than the beginning of its response without turns",
            )
            no_room = transcript.state == "length" and len(tokens) == len(first)
            answer = [] if no_room else whole.answer.tolist()
            require(
                given == answer and tokens[len(first) :][: len(given)] == [(token, True) for token in answer],
                f"{rollout}: expected the answer {answer} as given tokens after its first turn, {first}; got {tokens}",
            )
        require(bool(turns) or not given, f"{rollout}: tokens were given though no turn has ended")
        for second in turns[1:]:
            require(
                sampled == [*turns[0], *second] and transcript.state in {"eos", "stop"},
                f"{rollout}: finish() did not end the response with its turn, but with {transcript.state!r}",
            )


async def _check_cut(make: Make[Policy], whole: Dialogue) -> None:
    trial = await _dialogue(make, whole.prompts)
    while trial.live:
        trial.cut_at = len(trial.reported) + 1
        before = len(trial.reported)
        await trial.talk(limit=4)
        require(len(trial.reported) > before, "a decoding with turns ended though nothing finished")
    require(
        (trial.tokens, trial.heard) == (whole.tokens, whole.heard),
        "conversations that were parked and resumed have other tokens than uncut ones",
    )


async def _check_waiting(make: Make[Policy], whole: Dialogue) -> None:
    """Check that a turn that is unanswered when decoding stops is still there when it goes on."""
    trial = await _dialogue(make, whole.prompts)
    k = next(k for k, heard in enumerate(whole.heard) if heard)
    rollout, decode = f"rollout {whole.prompts[k].rollout}", trial.decodes[k]
    async with trial.policy.decoding([decode], trial.cut):
        turn = await decode.turn()
    require(
        turn is not None and turn.tolist() == whole.heard[k][0],
        f"{rollout}: turn() returned {turn}, not the tokens of the turn, where it is decoded alone",
    )
    require(await decode.turn() is None, f"{rollout}: turn() returned something though decoding has stopped")
    require(
        not decode.proceed(trial.answer) and not decode.finish(),
        f"{rollout}: proceed() or finish() did something though decoding has stopped",
    )
    require(not trial.reported, f"cut() was called with {trial.reported} though no response has ended")
    async with trial.policy.decoding([decode], trial.cut), anyio.create_task_group() as tasks:
        tasks.start_soon(trial.read, k, 3)
        again = await decode.turn()
        require(
            again is not None and turn is not None and again.tolist() == turn.tolist(),
            f"{rollout}: its turn is {again} after decoding was stopped and went on, not {turn}",
        )
        require(decode.finish(), f"{rollout}: finish() was refused while it was decoded")
    require(trial.transcripts[k].ended, f"{rollout}: it went on after finish()")
    require(trial.reported == [whole.prompts[k].rollout], f"after finish(), cut() was called with {trial.reported}")


async def _check_reopening(make: Make[Policy], whole: Dialogue) -> None:
    """Check that a response that ends with a turn is opened at that turn."""
    k = next(k for k, heard in enumerate(whole.heard) if heard)
    prompt, first, half = whole.prompts[k], whole.heard[k][0], Response.empty(whole.prompts[k])
    for piece in whole.transcripts[k].pieces:
        if not piece.given and len(half) < len(first):
            half = half.then(piece.event(prompt.rollout, len(half)))
    policy = await make()
    (decode,) = await require_turns(policy).open_turns([half])
    async with policy.decoding([decode], lambda finished: False):
        turn = await decode.turn()
        require(
            turn is not None and turn.tolist() == first,
            f"rollout {prompt.rollout}: opened with a turn that has ended, turn() returned {turn}, not its tokens",
        )
