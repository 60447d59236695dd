"""The stage that puts an end to all overlap, in any graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oppo import GAE, Graph, GraphBuilder, Overcommit, StepReport, grpo, ppo, wrap
from oppo.admission.chunking import Fixed
from oppo.errors import GraphError
from oppo.events import Chunk, Defer, Finish, Prompt, Response, RolloutEvent
from oppo.graph import Receiver, Sender
from oppo.graph.channel import Channel
from oppo.stages import DynamicSampling
from oppo.stages.hold import Hold, held
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)
from tests.kit.pipelines import Tap, same_batches
from tests.stages.test_conversations import Weightless


class Kept:
    """Takes what is sent, and notes what could still be read when the first item came."""

    def __init__(self, source: Channel[RolloutEvent]) -> None:
        self.items: list[RolloutEvent] = []
        self.ended: list[bool] = []
        self._source = source

    async def send(self, item: RolloutEvent, /) -> None:
        self.items.append(item)
        self.ended.append(self._source.ended)


def chunk(rollout: int, start: int, *tokens: int) -> Chunk:
    n = len(tokens)
    return Chunk(rollout, start, np.array(tokens, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32))


def prompt(rollout: int) -> Prompt:
    return Prompt(rollout, rollout, np.array([1], np.int32))


async def test_events_are_kept_until_the_input_ends_and_chunks_of_a_rollout_are_one() -> None:
    source: Channel[RolloutEvent] = Channel("generate->held", 16)
    finish = Finish(0, Response.empty(prompt(0)), "eos")
    for event in (prompt(0), prompt(1), chunk(0, 0, 5, 6), chunk(1, 0, 7), chunk(0, 2, 8), finish, Defer(1, 1)):
        source.send_nowait(event)
    source.close()
    out = Kept(source)
    reading: Receiver[RolloutEvent] = source
    await Hold().run(reading, out=out)
    assert all(out.ended)
    assert [type(item).__name__ for item in out.items] == ["Prompt", "Prompt", "Chunk", "Chunk", "Finish", "Defer"]
    whole = out.items[2]
    assert isinstance(whole, Chunk)
    assert whole.tokens.tolist() == [5, 6, 8]


def models() -> dict[str, Any]:
    policy = FakePolicy(lambda prompt: 5 + 7 * prompt.rollout % 11, seconds=0.1)
    return {
        "policy": policy,
        "reference": FakeScorer(fake_per_token, per_token=0.01),
        "reward": FakeScorer(fake_scalar, per_token=0.01),
        "trainer": FakeTrainer(seconds=1.0),
        "chunks": Fixed(3),
    }


MAKERS: dict[str, Callable[[dict[str, Any]], Graph[StepReport]]] = {
    "ppo": lambda made: ppo(**made, critic=FakeCritic(per_token=0.01), admission=Overcommit(batch=4, overcommit=1)),
    "ppo without a critic": lambda made: ppo(
        **{**made, "reference": None}, advantage=GAE(kl=0.0), admission=Overcommit(batch=4, overcommit=1)
    ),
    "grpo": lambda made: grpo(**made, samples=4, admission=Overcommit(batch=2, overcommit=1)),
    "wrap": lambda made: wrap(
        lambda batch: {},
        Weightless(),
        **{name: each for name, each in made.items() if name != "trainer"},
        admission=Overcommit(batch=4, overcommit=1),
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_any_graph_is_scored_after_it_has_been_decoded_and_trains_the_same(name: str) -> None:
    def played(hold: bool) -> tuple[Tap, list[StepReport], dict[str, Any]]:
        made, tap = models(), Tap()
        graph = MAKERS[name](made)

        async def main() -> list[StepReport]:
            async with (held(graph) if hold else graph).open(prompts(40), observers=[tap]) as run:
                return [report async for report in run.steps(3)]

        return tap, run_virtual(main), made

    (streamed, reports, ours), (serial, held_reports, theirs) = played(hold=False), played(hold=True)
    assert [report.trained for report in reports] == [report.trained for report in held_reports]
    if name != "wrap":
        assert same_batches(ours["trainer"].batches, theirs["trainer"].batches)
    assert overlaps(streamed)
    assert not overlaps(serial)


def overlaps(tap: Tap) -> bool:
    """Return whether anything was scored while its step was decoded."""
    decoded = {span.step: span.end for span in tap.spans if span.role == "decode"}
    scoring = [span for span in tap.spans if span.role == "score"]
    assert scoring
    return any(span.start < decoded[span.step] for span in scoring)


def test_what_cannot_be_held_is_refused_by_name() -> None:
    selecting = grpo(**models(), samples=4, admission=Overcommit(batch=2), select=DynamicSampling())
    with pytest.raises(GraphError, match="graph 'grpo' cannot be held: its DynamicSampling asks for scores while"):
        held(selecting)
    with pytest.raises(GraphError, match="graph 'grpo' cannot be held: a stage is called 'held' already"):
        held(held(grpo(**models(), admission=Overcommit(batch=2))))
    g: GraphBuilder[StepReport] = GraphBuilder("empty")
    with pytest.raises(GraphError, match="expected one stage that is a Generate, got none"):
        held(g.build(g.add("only", Passing(), g.prompts)))


class Passing:
    async def run(self, reports: Receiver[StepReport], /, *, out: Sender[StepReport]) -> None:
        async for report in reports:
            await out.send(report)
