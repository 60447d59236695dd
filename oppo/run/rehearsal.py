"""``oppo train --dry-run``: what a run reads, samples and scores, tried out before it begins; nothing is saved."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

import anyio

from oppo.data import PromptStream
from oppo.environments import first_answer
from oppo.errors import noted
from oppo.evaluation import Answering, respond
from oppo.events import Drop, Finish, IntArray, Prompt
from oppo.models import Sampling, VariesSampling
from oppo.redact import harmless
from oppo.run.train import PreparedRun
from oppo.scorers import capabilities_of
from oppo.stages import Generate

if TYPE_CHECKING:
    from oppo.hf.tokenizer import HfTokenizer


LONGEST: Final = 32
"""Tokens that are sampled at most."""

WIDTH: Final = 100
"""Characters of a line of text."""


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """Two responses: the first, the scores of both, the environment's answer to a turn that did not end by itself."""

    finish: Finish
    scores: Sequence[float | Drop]
    seconds: float
    parts: Mapping[str, float]
    answer: IntArray | None


async def rehearse(session: PreparedRun) -> list[str]:
    tokenizer = session.assembly.tokenizer
    prompts = session.prompts
    if not isinstance(prompts, PromptStream):
        return []
    with noted("while a response was tried out, before the run"):
        tried = await _try(session, [prompts.at(0), prompts.at(1 % prompts.size)])
    lines = [
        f"prompts: {prompts.size}, the longest of {prompts.longest} tokens; the first is",
        *_shown(tokenizer, tried.finish.response.prompt.tokens.tolist()),
        *_ending(tokenizer, session.assembly.sampling),
        f"a response to it, cut off at {LONGEST} tokens at the latest, is ({tried.finish.reason})",
        *_shown(tokenizer, tried.finish.response.tokens.tolist()),
        *(
            ["the environment answers that with", *_shown(tokenizer, tried.answer.tolist())]
            if tried.answer is not None
            else []
        ),
        _scored([reward.source for reward in session.settings.rewards], tried),
    ]
    return [harmless(line) for line in lines]


async def _try(session: PreparedRun, prompts: Sequence[Prompt]) -> Tried:
    assembly, generate = session.assembly, session.graph.stage("generate", Generate)
    policy, sampling = generate.policy, assembly.sampling
    short = min(LONGEST, sampling.max_new_tokens)
    drawing = policy
    if policy.capabilities.varies_sampling:
        fewest = min(short, sampling.min_new_tokens)
        drawing = cast("VariesSampling", policy).with_sampling(
            replace(sampling, max_new_tokens=short, min_new_tokens=fewest)
        )
    numbered = [replace(prompt, rollout=at, admission=at) for at, prompt in enumerate(prompts)]
    finished = await respond(drawing, numbered, Answering(environment=generate.environment))
    environment = generate.environment
    asked = any(finish.reason != "length" or not finish.response.sampled.all() for finish in finished)
    answer = None if environment is None or asked else await first_answer(environment, finished[0].response)
    start = anyio.current_time()
    await assembly.reward.extend(
        [event for finish in finished for event in (finish.response.prompt, *finish.response.pieces())]
    )
    scores = await assembly.reward.finish(finished)
    seconds = anyio.current_time() - start
    measured = capabilities_of(assembly.reward).samples()
    return Tried(finished[0], scores, seconds, {name: values[0] for name, values in measured.items() if values}, answer)


def _shown(tokenizer: HfTokenizer, tokens: list[int]) -> Iterator[str]:
    for line in tokenizer.decode_whole(tokens).splitlines():
        yield from textwrap.wrap(line, WIDTH, initial_indent="    ", subsequent_indent="    ") or [""]


def _ending(tokenizer: HfTokenizer, sampling: Sampling) -> Iterator[str]:
    ids = ", ".join(f"{number} {tokenizer.name_of(number)!r}" for number in sampling.stop)
    yield f"a response ends at {sampling.max_new_tokens} tokens, or with one of these: {ids or 'none'}"
    if sampling.stop_strings:
        yield f"or with the text {' or '.join(map(repr, sampling.stop_strings))}"


def _scored(rewards: Sequence[str], tried: Tried) -> str:
    parts = ", ".join(f"{name.removeprefix('rewards/')} {value:g}" for name, value in tried.parts.items())
    said = [f"drops it ({one.reason})" if isinstance(one, Drop) else f"says {float(one):g}" for one in tried.scores]
    first, second = said
    return (
        f"the reward {' with '.join(rewards) or 'of the environment'} {first}"
        + f" ({parts})" * bool(parts)
        + f", and of a second response it {second}, after {tried.seconds:.3f} s"
    )
