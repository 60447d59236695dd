"""Responses for scorers, and a scorer that reads them in random pieces and company."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from oppo.events import (
    Batch,
    Chunk,
    Drop,
    Finish,
    FloatArray,
    IntArray,
    Prompt,
    Response,
    RolloutEvent,
    Scored,
    ToolTokens,
)
from oppo.graph.channel import Channel
from oppo.models import Decode, Scorer
from oppo.stages import GAE, GroupRelative
from oppo.testing import run_virtual

VOCABULARY: Final = 96
PADDING: Final = 0
EOS: Final = 2


def ids(dice: random.Random, count: int) -> IntArray:
    return np.array([dice.randrange(3, VOCABULARY) for _ in range(count)], np.int32)


def chunk(rollout: int, start: int, tokens: IntArray) -> Chunk:
    return Chunk(rollout, start, tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32))


def ended(
    rollout: int,
    tokens: Sequence[int],
    columns: Mapping[str, object] | None = None,
    *,
    asked: Sequence[int] = (1, 2),
    version: int = 0,
) -> Finish:
    """Return a finished response of these tokens to a prompt with these columns."""
    prompt = Prompt(rollout, rollout, np.array(asked, np.int32), columns=columns or {})
    said = replace(chunk(rollout, 0, np.array(tokens, np.int32)), versions=np.full(len(tokens), version, np.int32))
    return Finish(rollout, Response.empty(prompt).then(said), "eos")


def responses(count: int = 5, seed: int = 0) -> list[Response]:
    dice = random.Random(seed)
    made = []
    for rollout in range(count):
        prompt = Prompt(rollout, rollout, ids(dice, dice.randint(1, 45)))
        made.append(Response.empty(prompt).then(chunk(rollout, 0, ids(dice, dice.randint(1, 90)))))
    return made


async def read_chunk(decode: Decode, limit: int) -> Chunk:
    """Return what is read of a decode whose next tokens are sampled."""
    chunk = await decode.read(limit)
    assert isinstance(chunk, Chunk)
    return chunk


async def stream(scorer: Scorer[object], made: Sequence[Response], seed: int) -> dict[int, object]:
    """Stream the responses in random pieces and company, some tokens as ``ToolTokens``; finish in random groups."""
    dice = random.Random(seed)
    sent: dict[int, int] = {}
    values: dict[int, object] = {}
    waiting = {response.prompt.rollout: response for response in made}
    while waiting:
        events: list[Prompt | Chunk | ToolTokens] = []
        for rollout in dice.sample(sorted(waiting), dice.randint(1, len(waiting))):
            response = waiting[rollout]
            if rollout not in sent:
                events.append(response.prompt)
                sent[rollout] = 0
                if dice.random() < 0.5:
                    continue
            tokens = response.tokens[sent[rollout] : sent[rollout] + dice.choice([1, 3, 16, 32, 70])]
            if len(tokens):
                given = dice.random() < 0.2
                start = sent[rollout]
                events.append(ToolTokens(rollout, start, tokens) if given else chunk(rollout, start, tokens))
                sent[rollout] += len(tokens)
        await scorer.extend(events)
        ended = [rollout for rollout in waiting if sent.get(rollout) == len(waiting[rollout].tokens)]
        dice.shuffle(ended)
        if ended:
            got = await scorer.finish([Finish(rollout, waiting[rollout], "eos") for rollout in ended])
            values.update(zip(ended, got, strict=True))
            for rollout in ended:
                del waiting[rollout]
    return values


def answered(rollout: int, prompt: list[int], answer: list[int]) -> Response:
    opened = Response.empty(Prompt(rollout, rollout, np.array(prompt, np.int32)))
    return opened.then(chunk(rollout, 0, np.array(answer, np.int32)))


def finishes(made: Sequence[Response]) -> list[Finish]:
    return [Finish(each.prompt.rollout, each, "eos") for each in made]


def endings() -> list[Response]:
    """Sequences that end, begin or consist of tokens that may stand for padding."""
    return [
        answered(0, [5, 6, 7], [8, 9, EOS]),
        answered(1, [EOS], [EOS, EOS]),
        answered(2, [5, 6, 7, 8], [9, 10, 11]),
        answered(3, [PADDING, PADDING, 5, 6], [7, 8, EOS]),
        answered(4, [EOS, EOS, EOS, 5, 6], [7, EOS, 8]),
        answered(5, [5, 6], [7, EOS, PADDING, PADDING]),
        answered(6, [PADDING], [PADDING, PADDING]),
        answered(7, [5, 6, 7], [EOS, EOS, EOS]),
    ]


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some rows of a batch, any number of times."""
    spans = batch.rows()
    tokens = np.concatenate([np.arange(spans[row].start, spans[row].stop) for row in rows])

    def of(column: FloatArray | None) -> FloatArray | None:
        return None if column is None else column[tokens]

    return replace(
        batch,
        responses=tuple(batch.responses[row] for row in rows),
        reasons=tuple(batch.reasons[row] for row in rows),
        scores=batch.scores[list(rows)],
        offsets=np.concatenate(([0], np.cumsum([spans[row].stop - spans[row].start for row in rows]))),
        tokens=batch.tokens[tokens],
        versions=batch.versions[tokens],
        sampled=batch.sampled[tokens],
        logprobs=batch.logprobs[tokens],
        proximal=of(batch.proximal),
        reference=of(batch.reference),
        values=of(batch.values),
        rewards=of(batch.rewards),
        advantages=of(batch.advantages),
        returns=of(batch.returns),
        teacher_ids=None if batch.teacher_ids is None else batch.teacher_ids[tokens],
        teacher_top=of(batch.teacher_top),
    )


Said = Scored[float] | Drop
PerToken = Scored[FloatArray] | Drop


def sent(
    stage: GAE | GroupRelative, events: list[RolloutEvent], scores: list[Said], **logprobs: list[PerToken]
) -> list[Batch]:
    """Return what the stage sends when it is given all of this at once."""
    batches: list[Batch] = []

    class Out:
        async def send(self, item: Batch, /) -> None:
            batches.append(item)

    async def main() -> None:
        rollouts, reward = Channel[RolloutEvent]("generate->advantage", 9), Channel[Said]("reward->advantage", 9)
        more = {name: Channel[PerToken](f"{name}->advantage", 9) for name in logprobs}
        for event in events:
            rollouts.send_nowait(event)
        for score in scores:
            reward.send_nowait(score)
        for name, items in logprobs.items():
            for item in items:
                more[name].send_nowait(item)
        rollouts.close()
        reward.close()
        for lane in more.values():
            lane.close()
        await stage.run(rollouts, reward, out=Out(), **more)

    run_virtual(main)
    return batches
