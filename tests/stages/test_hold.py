"""The stage that puts an end to all overlap."""

from __future__ import annotations

import numpy as np
import pytest

from oppo.events import Chunk, Defer, Finish, Prompt, Response, RolloutEvent
from oppo.graph import Receiver
from oppo.graph.channel import Channel
from oppo.stages.hold import Hold, held
from tests.pipelines import Pipeline, Setting


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


@pytest.mark.parametrize("proximal", [False, True])
def test_every_reader_of_rollouts_waits_and_the_other_wires_stay(proximal: bool) -> None:
    before = Pipeline(Setting(), proximal=proximal).graph()
    after = held(before)
    assert after.nodes["held"].reads == ("generate",)
    assert after.nodes.keys() - {"held"} == before.nodes.keys()
    assert after.nodes["advantage"].named == before.nodes["advantage"].named
    for name, node in before.nodes.items():
        waits = tuple("held" if read == "generate" else read for read in node.reads)
        assert after.nodes[name].reads == waits
        assert after.nodes[name].stage is node.stage
