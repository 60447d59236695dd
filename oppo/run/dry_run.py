"""``oppo train --dry-run``: what was decided for a run, and its reading, answering and scoring tried out once.

An agent or an environment is called once, with a policy that says the same every time: before any model is loaded if
the policy's tokenizer can be read without torch and the first row is in a file. The rest is tried with the models.
Nothing is saved.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import anyio
import numpy as np
from rich.filesize import decimal

from oppo.agents import AgentPrompts, Agents
from oppo.atomic_files import nearby
from oppo.data import PromptStream
from oppo.declared import Declared
from oppo.environments import first_answer
from oppo.errors import OppoError, counted, noted
from oppo.evaluation import respond
from oppo.events import Drop, Finish, Prompt
from oppo.log import routed
from oppo.models import Sampling, VariesSampling
from oppo.redact import harmless
from oppo.run.rewards import AnyEnvironment, FirstLook
from oppo.run.train import PreparedRun
from oppo.scorers import capabilities_of
from oppo.stages import Generate

if TYPE_CHECKING:
    from oppo.hf.tokenizer import HfTokenizer

LONGEST: Final = 32  # tokens that are sampled at most
WIDTH: Final = 100  # characters of a line of text
SAID: Final = "I do not know."  # every turn of the policy before there is one
TURNS: Final = 4  # turns of a conversation before there is a policy, at most


async def rehearse_code(look: FirstLook) -> list[str]:
    environment, said = look.environment, look.tokenizer.encode_exactly(SAID)
    if environment is None or not look.prompts:
        return []
    with noted(f"while the policy was one that says {SAID!r}"):
        if not isinstance(environment, Agents):
            answer = await first_answer(environment, look.prompts[0], np.array(said, np.int32))
            shown = ["with nothing"] if answer is None else ["with", *_shown(look.tokenizer, answer.tolist())]
            return [harmless(line) for line in (f"the environment answers {SAID!r} {shown[0]}", *shown[1:])]
        tried = await environment.rehearse(look.prompts[0], [*said, *sorted(environment.ends)[:1]], TURNS)
    ended = "goes on" if tried.outcome is None else f"returns {tried.outcome}"
    refused = f"; a request of it was refused: {tried.refused}" if tried.refused else ""
    return [harmless(f"the agent {ended} after {counted(tried.answered, 'answer')} of {SAID!r}{refused}")]


def decided(session: PreparedRun) -> Iterator[str]:
    for name, text in _decisions(session):
        yield from textwrap.wrap(harmless(text), WIDTH, initial_indent=f"{name:<13} ", subsequent_indent=" " * 14)


def _decisions(session: PreparedRun) -> Iterator[tuple[str, str]]:
    from oppo.run.deployment import named_reward  # noqa: PLC0415 - torch takes seconds to import

    settings, assembly, steps = session.settings, session.assembly, session.steps
    step, run, trainer, evaluated = settings.step, settings.run, settings.trainer, settings.eval
    samples, updates = settings.algorithm.responses, trainer.epochs * trainer.minibatches
    responses = step.batch * samples
    yield "run", f"{counted(steps, 'step')}, written to {nearby(settings.run_directory)}"
    yield (
        "algorithm",
        f"{nearby(step.algorithm)}{_unlike_defaults(settings.keys['algorithm'], settings.tables()['algorithm'])}",
    )
    more = f", with up to {counted(step.most_overcommit, 'prompt')} more in flight" if step.most_overcommit else ""
    yield (
        "step",
        f"{counted(step.batch, 'prompt')} x {counted(samples, 'response')} = {counted(responses, 'response')}{more}",
    )
    passes = f"{counted(trainer.epochs, 'epoch')} x {counted(trainer.minibatches, 'minibatch', 'minibatches')}"
    rate = f"learning rate {trainer.learning_rate:g}, {trainer.schedule}"
    yield "update", f"once a step: {passes} = {counted(updates, 'optimizer step')}; {rate}"
    prompts = steps * step.batch
    if settings.data.epochs and isinstance(session.prompts, PromptStream):
        prompts = min(prompts, len(session.prompts))
    most = f"at most {prompts * samples * assembly.sampling.max_new_tokens:,} tokens"
    trained = counted(prompts, "prompt"), counted(prompts * samples, "response"), most
    yield "in all", ", ".join([*trained, counted(steps * updates, "optimizer step")])
    yield from assembly.described.items()
    for reward in settings.rewards:
        if (name := named_reward(reward)) not in assembly.described:
            yield name, nearby(reward.source)
    if weights := [f"{reward.weight:g} x {reward.name}" for reward in settings.rewards if reward.name is not None]:
        yield "score", " + ".join(weights)
    named = settings.environment
    if sources := [*filter(None, [named.source]), *named.tools, *named.factories.values()]:
        yield "environment", ", ".join(map(nearby, sources))
    if settings.agents.program:
        plays = [f"{player} plays {role}" for role, player in settings.agents.roles.items()]
        yield "agent", ", ".join([nearby(settings.agents.program), *map(nearby, plays)])
    every = f"before the first step, every {counted(evaluated.every, 'step')}, and after the last"
    yield "evaluation", f"of held-out prompts {every}" if evaluated.prompts else "none: eval.prompts names no prompts"
    last = f"every {counted(run.checkpoint_every, 'step')} and after the last; kept: the newest {run.keep_last}"
    yield "checkpoints", last if run.checkpoint_every else "none: run.checkpoint_every = 0"
    yield "memory", _memory(session)


def _unlike_defaults(settings: Mapping[str, Declared], chosen: Mapping[str, object]) -> str:
    found = [f"{key} = {chosen[key]!r}" for key, each in settings.items() if chosen[key] != each.default]
    return f", with {', '.join(found)}" if found else ""


def _memory(session: PreparedRun) -> str:
    from oppo.hf.devices import memory_of  # noqa: PLC0415 - likewise
    from oppo.run.deployment import Deployment  # noqa: PLC0415 - torch takes seconds to import
    from oppo.run.memory import at_worst, by_device, expected  # noqa: PLC0415 - likewise

    try:
        with routed():
            deployment = Deployment.of(session.settings)
            needs = by_device(expected(deployment, deployment.load(session.prompts.longest)))
    except OppoError as error:
        return f"could not be counted: {error}"
    found = []
    for device, models in needs.items():
        memory = memory_of(device)
        there = "" if memory is None else f" of {decimal(memory[0])} free"
        found.append(f"{decimal(at_worst(models))}{there} on {device}")
    return f"{'; '.join(found)}, at most, besides PyTorch's own: see `oppo doctor`"


async def rehearse(session: PreparedRun, called: Sequence[str] = ()) -> list[str]:
    prompts, tokenizer, sampling = session.prompts, session.assembly.tokenizer, session.assembly.sampling
    environment = session.graph.stage("generate", Generate).environment
    if not called and isinstance(prompts, AgentPrompts | PromptStream):
        called = await rehearse_code(FirstLook(tokenizer, cast("AnyEnvironment", environment), [prompts.at(0)]))
    if not isinstance(prompts, PromptStream):
        return [*called]
    with noted("while a response was tried out, before the run"):
        finished = await _answered(session, [prompts.at(0), prompts.at(1 % prompts.size)])
        scored = await _scored(session, finished)
    one = finished[0]
    lines = [
        "",
        f"prompts: {prompts.size}, the longest of {prompts.longest} tokens; the first is",
        *_shown(tokenizer, one.response.prompt.tokens.tolist()),
        *_ending(tokenizer, sampling),
        f"a response to it, of at most {LONGEST} tokens, which ended by {one.reason!r}, is",
        *_shown(tokenizer, one.response.tokens.tolist()),
    ]
    return [*(harmless(line) for line in [*lines, scored]), *called]


async def _answered(session: PreparedRun, prompts: Sequence[Prompt]) -> Sequence[Finish]:
    # A response to each prompt, of one turn.
    policy, sampling = session.graph.stage("generate", Generate).policy, session.assembly.sampling
    short = min(LONGEST, sampling.max_new_tokens)
    if policy.capabilities.varies_sampling:
        shorter = replace(sampling, max_new_tokens=short, min_new_tokens=min(short, sampling.min_new_tokens))
        policy = cast("VariesSampling", policy).with_sampling(shorter)
    numbered = [replace(prompt, rollout=at, admission=at) for at, prompt in enumerate(prompts)]
    return await respond(policy, numbered)


def _shown(tokenizer: HfTokenizer, tokens: list[int]) -> Iterator[str]:
    for line in tokenizer.decode_whole(tokens).splitlines():
        yield from textwrap.wrap(line, WIDTH, initial_indent="    ", subsequent_indent="    ") or [""]


def _ending(tokenizer: HfTokenizer, sampling: Sampling) -> Iterator[str]:
    ids = ", ".join(f"{number} {tokenizer.name_of(number)!r}" for number in sampling.stop)
    yield f"a response ends at {sampling.max_new_tokens} tokens, or with one of these: {ids or 'none'}"
    if sampling.stop_strings:
        yield f"or with the text {' or '.join(map(repr, sampling.stop_strings))}"


async def _scored(session: PreparedRun, finished: Sequence[Finish]) -> str:
    reward, start = session.assembly.roles.reward, anyio.current_time()
    await reward.extend([event for finish in finished for event in (finish.response.prompt, *finish.response.pieces())])
    one, other = await reward.finish(finished)
    seconds = anyio.current_time() - start
    measured = capabilities_of(reward).samples()
    parts = ", ".join(f"{name.removeprefix('rewards/')} {values[0]:g}" for name, values in measured.items() if values)
    first = f"drops it ({one.reason})" if isinstance(one, Drop) else f"scores it {one:g}"
    second = f"dropped ({other.reason})" if isinstance(other, Drop) else f"{other:g}"
    named = " with ".join(nearby(each.source) for each in session.settings.rewards) or "of the environment"
    return (
        f"the reward {named} {first}{f' ({parts})' if parts else ''}; a second response: {second}; in {seconds:.3f} s"
    )
