"""What the wrapper relies on in vLLM's engine, as scripts: the fake and the real engine pass the same ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from oppo.vllm import VllmEngine
from oppo.vllm.engine import Collector, Engine, NewTokens
from oppo.vllm.scorers import QUESTION, READING

MADE = 200
"""Tokens of a long request: so many that an engine is still at it when a busy machine comes to pause it."""

PLAIN: Mapping[str, Any] = {
    "temperature": 1.0,
    "seed": 3,
    "min_tokens": 0,
    "stop_token_ids": [],
    "ignore_eos": True,
    "logprobs": 0,
    "detokenize": False,
}


@dataclass(frozen=True)
class Reading:
    """A request, and what was read of it."""

    collector: Collector
    news: list[NewTokens] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [int(token) for new in self.news for token in new.tokens]

    @property
    def reason(self) -> str | None:
        return self.news[-1].reason if self.news else None

    @property
    def starts(self) -> list[tuple[str, int]]:
        return list(self.news[-1].starts)

    def drain(self) -> int:
        """Take what is there; return how many tokens that were."""
        if (new := self.collector.get_nowait()) is None:
            return 0
        self.news.append(new)
        return len(new.tokens)

    async def until(self, tokens: int) -> None:
        """Read so many tokens, or to the end; each read is cancelled once first, which may lose nothing."""
        while len(self.tokens) < tokens and self.reason is None:
            with anyio.move_on_after(0):
                self.news.append(await self.collector.get())
                continue
            self.news.append(await self.collector.get())
            for token, found in zip(self.news[-1].tokens, self.news[-1].logprobs, strict=True):
                assert found[token] <= 0


async def begun(engine: Engine, name: str, prompt: Sequence[int], tokens: int, **settings: object) -> Reading:
    return Reading(await engine.submit(name, list(prompt), "s", {**PLAIN, "max_tokens": tokens, **settings}))


async def generating(engine: Engine, weights: dict[str, Any]) -> None:
    """Hold, decode, pause, sync ``weights``, go on, end and abort."""
    prompt = list(range(10, 20))
    await engine.pause()
    await engine.name_version("one")
    long, short = await begun(engine, "long", prompt, MADE), await begun(engine, "short", prompt[::-1], 4)
    await anyio.sleep(0.1)
    assert long.drain() == short.drain() == 0, "a paused engine holds new requests"

    await engine.resume()
    await short.until(MADE)
    assert (len(short.tokens), short.reason, short.starts) == (4, "length", [("one", 0)])
    await long.until(5)
    assert not long.reason
    assert long.starts == [("one", 0)]
    await engine.pause()
    long.drain()
    made = len(long.tokens)
    assert made < MADE
    await anyio.sleep(0.1)
    assert long.drain() == 0, "a paused engine makes nothing"

    with pytest.raises(Exception, match="start_weight_update"):
        await engine.update(weights)
    await engine.start_update()
    await engine.update(weights)
    await engine.finish_update("two")
    await engine.start_update()
    with pytest.raises(Exception, match="already"):
        await engine.start_update()
    await engine.update(weights)
    await engine.finish_update()
    assert await engine.recompute()
    gone = await begun(engine, "gone", prompt, 4 * MADE)
    await engine.resume()
    await gone.until(3)
    assert gone.starts == [("two", 0)]
    await long.until(MADE)
    assert (len(long.tokens), long.reason) == (MADE, "length")
    assert long.starts == [("one", 0), ("two", made)]

    await engine.pause()
    gone.drain()
    made = len(gone.tokens)
    assert not gone.reason, "it ends before it can be aborted: give it more tokens"
    await engine.discard(["gone", "never heard of"])
    gone.news.append(await gone.collector.get())
    assert gone.news[-1].reason == "abort", "who waits for an aborted request is told"
    assert len(gone.tokens) == made
    await engine.resume()
    await anyio.sleep(0.1)
    assert gone.drain() == 0
    await engine.discard(["gone", "long"])

    stop = list(range(30, 500))
    ended = await begun(engine, "ended", prompt, MADE, stop_token_ids=stop, min_tokens=3)
    await ended.until(MADE)
    assert ended.reason == "stop"
    assert len(ended.tokens) >= 3, "a stop token ends a request, and is part of it, but not before its least length"
    assert ended.tokens[-1] in stop
    assert not set(ended.tokens[:2]) & set(stop)
    await engine.pause()
    assert not engine.errored


async def pooling(engine: VllmEngine, block: int, wait: Callable[[], Awaitable[None]]) -> None:
    """Score growing prefixes, each of which finds the blocks of the one before in the cache; give one up."""
    tokens, params = [5 + k % 90 for k in range(3 * block + 2)], engine.pooling(QUESTION)
    answers = [
        (await engine.answers([{"prompt_token_ids": tokens[:end]}], params))[0]
        for end in (block, 2 * block, 2 * block + 1, 3 * block + 2, 3 * block + 2)
    ]
    assert [each.num_cached_tokens for each in answers] == [0, block, 2 * block, 2 * block, 3 * block]
    scores = [each.outputs.data.tolist() for each in answers]
    assert all(len(score) == 1 for score in scores)
    assert scores[-1] == pytest.approx(scores[-2], abs=1e-5)
    assert len({score[0] for score in scores[:-1]}) == 4
    with anyio.move_on_after(0):
        await engine.answers([{"prompt_token_ids": tokens}], params)
    await wait()
    assert not engine.errored


async def reading(engine: VllmEngine, block: int) -> None:
    """Read growing prompts, each of which finds the blocks of the one before: what is new has its log-probs."""
    tokens, params = [5 + k % 90 for k in range(3 * block + 2)], engine.sampling({**READING, "prompt_logprobs": 2})
    ends = (block + 1, 2 * block + 1, 3 * block + 2)
    answers = [
        (await engine.answers([{"prompt_token_ids": tokens[:end], "cache_salt": salt}], params))[0]
        for end, salt in zip((*ends, len(tokens)), "aaab", strict=True)
    ]
    assert [each.num_cached_tokens for each in answers] == [0, block, 2 * block, 0]
    *parts, whole = [answer.prompt_logprobs for answer in answers]
    assert whole.token_ids[-3 * 3 * block :: 3] == tokens[2:]
    for part, end, new in zip(parts, ends, (block, block, block + 1), strict=True):
        behind = len(tokens) - end
        since, until = len(whole.logprobs) - 3 * (new + behind), len(whole.logprobs) - 3 * behind
        assert part.token_ids[-3 * new :] == whole.token_ids[since:until]
        assert part.logprobs[-3 * new :] == pytest.approx(whole.logprobs[since:until], abs=1e-4)
