"""What the wrapper relies on in vLLM's engine, as scripts: the fakes and the real engine pass the same ones."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio
import pytest

from oppo.vllm.scorers import ScoringLLM
from oppo.vllm.surface import AsyncEngine, Collector, Completion, Output

MADE = 200
"""Tokens of a long request: so many that an engine is still at it when a busy machine comes to pause it."""


def differences(real: type, protocol: type) -> list[str]:
    """Return how the methods and properties of a class differ from what a protocol says of them."""
    found = []
    for name, ours in vars(protocol).items():
        if name.startswith("_"):
            continue
        theirs = getattr(real, name, None)
        if theirs is None:
            found.append(f"{real.__name__} has no {name}")
        elif not isinstance(ours, property):
            found += [f"{real.__name__}.{name}: {each}" for each in _misfits(theirs, ours)]
    return found


def _misfits(theirs: Callable[..., object], ours: Callable[..., object]) -> list[str]:
    mine, real = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    found = [f"no parameter {name}" for name in mine if name not in real]
    for name, each in mine.items():
        if name in real and each.kind is inspect.Parameter.KEYWORD_ONLY and not accepts_keyword(real[name]):
            found.append(f"{name} cannot be a keyword")
    needed = [name for name, each in real.items() if each.default is each.empty and each.kind not in VARIADIC]
    found += [f"needs {name}" for name in needed if name not in mine]
    if inspect.iscoroutinefunction(ours) is not inspect.iscoroutinefunction(theirs):
        found.append("is awaited in one of them only")
    positional = [name for name, each in mine.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    if positional != [name for name in real if name in positional]:
        found.append(f"takes {', '.join(positional)} in another order")
    return found


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def accepts_keyword(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Engine:
    """An engine that generates, and what it takes.

    Attributes:
        params: makes its settings of a request of keywords.
        block: tokens of a block of its prefix cache.
        weights: the request with which it loads weights.
    """

    llm: AsyncEngine
    params: Callable[[Mapping[str, object]], object]
    block: int
    weights: Any

    async def add(self, name: str, prompt: Sequence[int], tokens: int, salt: str = "s", **settings: object) -> Reading:
        keywords = {
            "temperature": 1.0,
            "seed": 3,
            "max_tokens": tokens,
            "min_tokens": 0,
            "stop_token_ids": [],
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            **settings,
        }
        asked = {"prompt_token_ids": list(prompt), "cache_salt": salt}
        return Reading(await self.llm.add_request(name, asked, self.params(keywords)), [])

    async def pause(self) -> None:
        await self.llm.pause_generation(mode="keep", clear_cache=False)

    async def sync_weights(self, version: str) -> None:
        await self.llm.start_weight_update()
        await self.llm.update_weights(self.weights)
        await self.llm.finish_weight_update(weight_version=version)


@dataclass(frozen=True)
class Reading:
    """A request, and the outputs that were taken of it."""

    collector: Collector
    outputs: list[Output]

    @property
    def completions(self) -> list[Completion]:
        return [output.outputs[0] for output in self.outputs]

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.completions)

    @property
    def reason(self) -> str | None:
        return self.completions[-1].finish_reason if self.outputs else None

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        found = getattr(self.completions[-1], "weight_versions", None)
        return [(span.version, span.start, span.end) for span in found or ()]

    @property
    def cached(self) -> int:
        return max(int(getattr(output, "num_cached_tokens", 0) or 0) for output in self.outputs)

    def starts(self, llm: AsyncEngine) -> list[tuple[str, int]]:
        """Return the versions behind the tokens of a request that has not ended, each with its first token."""
        return list(llm.output_processor.request_states[self.collector.request_id].weight_version_starts)

    def drain(self) -> int:
        """Take what is there; return how many tokens that were."""
        output = self.collector.get_nowait()
        if output is None:
            return 0
        self.outputs.append(output)
        return len(output.outputs[0].token_ids)

    async def until(self, tokens: int) -> None:
        """Read so many tokens, or to the end; each read is cancelled once first, which may lose nothing."""
        while self.tokens < tokens and self.reason is None:
            with anyio.move_on_after(0):
                self.outputs.append(await self.collector.get())
                continue
            self.outputs.append(self.collector.get_nowait() or await self.collector.get())
            (completion,) = self.outputs[-1].outputs
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)
            for token, found in zip(completion.token_ids, completion.logprobs, strict=True):
                assert found[token].logprob <= 0


async def generating(engine: Engine) -> None:
    """Hold, decode, pause, sync, go on, end, abort, and share prefixes."""
    llm, prompt = engine.llm, list(range(10, 20))
    await engine.pause()
    await llm.update_weight_version("one")
    long, short = await engine.add("long", prompt, MADE), await engine.add("short", prompt[::-1], 4)
    await anyio.sleep(0.1)
    assert long.drain() == short.drain() == 0, "a paused engine holds new requests"

    await llm.resume_generation()
    await short.until(MADE)
    assert (short.tokens, short.reason, short.spans) == (4, "length", [("one", 0, 4)])
    await long.until(5)
    assert not long.reason
    assert long.starts(llm) == [("one", 0)]
    await engine.pause()
    long.drain()
    made = long.tokens
    assert made < MADE
    await anyio.sleep(0.1)
    assert long.drain() == 0, "a paused engine makes nothing"

    with pytest.raises(Exception, match="start_weight_update"):
        await llm.update_weights(engine.weights)
    await engine.sync_weights("two")
    await llm.start_weight_update()
    with pytest.raises(Exception, match="already"):
        await llm.start_weight_update()
    await llm.update_weights(engine.weights)
    await llm.finish_weight_update()
    assert not await llm.reset_prefix_cache(), "requests hold their keys and values"
    assert await llm.reset_prefix_cache(reset_running_requests=True)
    gone = await engine.add("gone", prompt, 2 * MADE)
    await llm.resume_generation()
    await gone.until(3)
    assert gone.starts(llm) == [("two", 0)]
    await long.until(MADE)
    assert (long.tokens, long.reason) == (MADE, "length")
    assert long.spans == [("one", 0, made), ("two", made, MADE)]

    await engine.pause()
    gone.drain()
    made = gone.tokens
    assert not gone.reason, "it ends before it can be aborted: give it more tokens"
    await llm.abort(["gone", "never heard of"])
    gone.outputs.append(await gone.collector.get())
    assert gone.completions[-1].finish_reason == "abort", "who waits for an aborted request is told"
    assert gone.tokens == made
    await llm.resume_generation()
    await anyio.sleep(0.1)
    assert gone.drain() == 0
    await llm.abort(["gone", "long"])
    await _ending(engine, prompt)
    await _sharing(engine)
    await engine.pause()
    assert not llm.errored


async def _ending(engine: Engine, prompt: Sequence[int]) -> None:
    """A stop token ends a request, and is part of it, but not before its least length."""
    stop = list(range(30, 500))
    ended = await engine.add("ended", prompt, MADE, stop_token_ids=stop, min_tokens=3)
    await ended.until(MADE)
    tokens = [int(token) for each in ended.completions for token in each.token_ids]
    assert ended.reason == "stop"
    assert len(tokens) >= 3
    assert tokens[-1] in stop
    assert not set(tokens[:2]) & set(stop)


async def _sharing(engine: Engine) -> None:
    """Whole blocks of a prompt are computed once for all requests with its salt."""
    prompt = [20 + k % 100 for k in range(2 * engine.block + 1)]
    cached = {}
    for name, salt in (("first", "a"), ("second", "a"), ("other", "b")):
        request = await engine.add(name, prompt, 2, salt)
        await request.until(2)
        cached[name] = request.cached
    assert cached == {"first": 0, "second": 2 * engine.block, "other": 0}


async def pooling(llm: ScoringLLM, params: object, block: int, wait: Callable[[], Awaitable[None]]) -> None:
    """Score growing prefixes, each of which finds the blocks of the one before in the cache; give one up."""
    tokens = [5 + k % 90 for k in range(3 * block + 2)]
    scores, cached = [], []
    for number, end in enumerate((block, 2 * block, 2 * block + 1, 3 * block + 2, 3 * block + 2)):
        asked = {"type": "token", "prompt_token_ids": tokens[:end]}
        collector = await llm.add_request(f"growing-{number}", asked, params)
        answer = collector.get_nowait() or await collector.get()
        scores.append(answer.outputs.data.tolist())
        cached.append(answer.num_cached_tokens)
    assert cached == [0, block, 2 * block, 2 * block, 3 * block]
    assert all(len(score) == 1 for score in scores)
    assert scores[-1] == pytest.approx(scores[-2], abs=1e-5)
    assert len({score[0] for score in scores[:-1]}) == 4
    await llm.add_request("closed", {"type": "token", "prompt_token_ids": tokens}, params)
    await llm.abort(["closed", "growing-0", "never heard of"])
    await wait()
    assert not llm.errored


READING: Final[Mapping[str, Any]] = {
    "max_tokens": 1,
    "temperature": 0,
    "prompt_logprobs": 2,
    "skip_reading_prefix_cache": False,
    "flat_logprobs": True,
    "detokenize": False,
}
"""Arguments of the ``SamplingParams`` with which prompts are read."""


async def reading(llm: ScoringLLM, params: object, block: int) -> None:
    """Read growing prompts, each of which finds the blocks of the one before: what is new has its log-probs."""
    tokens = [5 + k % 90 for k in range(3 * block + 2)]
    answers = []
    for number, (end, salt) in enumerate(
        ((block + 1, "a"), (2 * block + 1, "a"), (3 * block + 2, "a"), (3 * block + 2, "b"))
    ):
        asked = {"type": "token", "prompt_token_ids": tokens[:end], "cache_salt": salt}
        collector = await llm.add_request(f"reading-{number}", asked, params)
        answers.append(collector.get_nowait() or await collector.get())
    assert [each.num_cached_tokens for each in answers] == [0, block, 2 * block, 0]
    parts = [answer.prompt_logprobs for answer in answers]
    whole = parts[3]
    assert whole.token_ids[-3 * 3 * block :: 3] == tokens[2:]
    for part, end, new in zip(
        parts[:3], (block + 1, 2 * block + 1, 3 * block + 2), (block, block, block + 1), strict=True
    ):
        behind = len(tokens) - end
        since, until = len(whole.logprobs) - 3 * (new + behind), len(whole.logprobs) - 3 * behind
        assert part.token_ids[-3 * new :] == whole.token_ids[since:until]
        assert part.logprobs[-3 * new :] == pytest.approx(whole.logprobs[since:until], abs=1e-4)
