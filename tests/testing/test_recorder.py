"""The recorder: what it answers in virtual time, that it finds every run of oppo valid, and what it finds wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import anyio
import numpy as np
import pytest
from hypothesis import given

from oppo import Generate, Graph, Overcommit, Score, ppo
from oppo.admission import TailBatched
from oppo.admission.chunking import Fixed
from oppo.errors import ConfigError, GraphError, ProtocolError
from oppo.events import Chunk, Defer, Drop, Finish, Prompt, Response, Scored, StepReport, ToolTokens
from oppo.graph import GraphBuilder, Receiver, Sender
from oppo.models import SyncedModel
from oppo.observe import Span
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    Fault,
    FaultyScorer,
    Raise,
    Recorder,
    check_trainer,
    fake_batch,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, settings


def recorded(setting: Setting, steps: int | None = None) -> Recorder:
    """Return what a recorder keeps of a run of fakes; it ends after so many steps."""
    pipeline, recorder = Pipeline(setting), Recorder()

    async def main() -> None:
        opened = pipeline.graph().open(prompts(setting.prompts), observers=[recorder], lookahead=setting.lookahead)
        async with opened as run:
            async for _ in run.steps(setting.steps if steps is None else steps):
                pass

    run_virtual(main)
    return recorder


def graph(batch: int = 2, extra: int = 0, reading: float = 0.25) -> Graph[StepReport]:
    """Responses of 2 or 8 tokens, a second each; the reward model reads a token in ``reading`` seconds."""
    return ppo(
        policy=FakePolicy(lambda prompt: 8 if prompt.admission % 3 == 1 else 2, 1.0),
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar, reading),
        critic=FakeCritic(),
        trainer=FakeTrainer(2.0),
        admission=Overcommit(batch, extra),
        chunks=Fixed(2),
    )


async def observed(of: Graph[StepReport], steps: int = 2, recorder: Recorder | None = None) -> Recorder:
    recorder = recorder or Recorder()
    async with of.open(prompts(40), observers=[recorder]) as run:
        async for _ in run.steps(steps):
            pass
    return recorder


def test_the_story_of_a_deferred_rollout() -> None:
    story = run_virtual(observed, graph(extra=1)).story(1)
    mine = [(each.step, each.event) for each in story if each.stage in {"generate", "advantage", "update"}]
    later = [(1, "chunk")] * 3 + [(1, "finished"), (1, "batched"), (1, "trained")]
    assert mine == [(0, "admitted"), (0, "chunk"), (0, "deferred"), *later]
    assert sorted(each.stage for each in story if each.event == "scored") == ["ref_logp", "reward", "value"]
    assert [each.at for each in story] == sorted(each.at for each in story)
    assert run_virtual(observed, graph()).story(99) == []


def test_overlap_is_exact() -> None:
    recorder = run_virtual(observed, graph(), 1)
    # Rollouts of 2 and 8 tokens with prompts of 3. The reward model reads all 16 tokens; the last 2 after decoding.
    assert recorder.busy("generate") == 8.0
    assert recorder.busy("reward") == 16 * 0.25
    assert recorder.overlap("generate", "reward") == recorder.overlap("reward", "generate") == 14 * 0.25
    assert recorder.overlap("generate", "update") == 0.0
    assert recorder.hidden_fraction() == 14 / 16
    assert math.isnan(run_virtual(observed, graph(reading=0.0)).hidden_fraction())
    for span in (Span("actor", "decode", 0.0, 4.0), Span("judge", "extend", 3.0, 5.0), Span("judge", "extend", 3.5, 4)):
        recorder.on_span(span)
    assert (recorder.overlap("actor", "judge"), recorder.busy("judge")) == (1.0, 2.0)


def test_a_stage_that_notes_no_work_works_while_it_runs() -> None:
    class Nap:
        async def run(self, numbers: Receiver[int], /, *, out: Sender[int]) -> None:
            await anyio.sleep(1.5)
            async for number in numbers:
                await out.send(number)
                return

    async def main() -> Recorder:
        g: GraphBuilder[int] = GraphBuilder("naps")
        recorder = Recorder()
        async with g.build(g.add("nap", Nap(), g.prompts)).open([1, 2], observers=[recorder]) as run:
            await run.step()
        return recorder

    recorder = run_virtual(main)
    assert recorder.busy("nap") == 1.5
    with pytest.raises(
        GraphError, match="nothing worked as 'nope' in this run; the stages and models are 'nap', 'step'"
    ):
        recorder.busy("nope")


@pytest.mark.schedules
@given(settings())
def test_every_run_is_valid_and_so_is_one_that_ends_early(setting: Setting) -> None:
    recorded(setting).validate()
    recorded(replace(setting, prompts=1_000), steps=1).validate()


def test_a_run_whose_rollouts_begin_again_is_valid() -> None:
    whole = graph()
    policy = whole.stage("generate", Generate).policy
    recorder = run_virtual(observed, whole.replace(generate=Generate(policy, TailBatched(batch=8))), 6)
    assert any(isinstance(sent.item, Defer) and sent.item.restart for sent in recorder.items)
    recorder.validate()


def test_a_run_that_an_error_ended_is_valid() -> None:
    broken = FaultyScorer("reward", FakeScorer(fake_scalar), (Fault("reward", "finish", Raise(ValueError), call=2),))

    recorder = Recorder()
    with pytest.raises(ValueError, match="as its script says"):
        run_virtual(observed, graph().replace(reward=Score(broken)), 3, recorder)
    assert len(recorder.reports) == 1
    recorder.validate()


ONE = Prompt(0, 0, np.array([1], np.int32))


def chunk(start: int, *versions: int) -> Chunk:
    n = len(versions)
    return Chunk(
        0, start, np.arange(start, start + n, dtype=np.int32), np.zeros(n, np.float32), np.array(versions, np.int32)
    )


def finish(*pieces: Chunk | ToolTokens) -> Finish:
    return Finish(0, Response.of(ONE, pieces), "eos")


def report(
    index: int = 0, trained: tuple[int, ...] = (), deferred: tuple[Defer, ...] = (), **other: object
) -> StepReport:
    made = StepReport(index, index + 1, trained, (), deferred, 0.0, 1.0, {})
    return replace(made, **other)  # type: ignore[arg-type]  # its fields, by name


def told(*items: object, reports: tuple[StepReport, ...] = ()) -> Recorder:
    """Return a recorder of events of rollout 0, each in the step of the last int before it."""
    recorder, step = Recorder(), 0
    for item in items:
        if isinstance(item, int):
            step = item
        else:
            recorder.on_item(step, "reward" if isinstance(item, Scored) else "generate", item, 0.0)
    for each in reports:
        recorder.on_step(each.index, each, {})
    return recorder


WHOLE = (ONE, chunk(0, 0, 0), chunk(2, 0), finish(chunk(0, 0, 0, 0)))
DEFERRED = Defer(0, 1)
PARKED = (ONE, chunk(0, 0), DEFERRED)
CARRIED = (report(0, (), (DEFERRED,)), report(1, (0,)))


@pytest.mark.parametrize(
    "recorder",
    [
        lambda: told(*WHOLE, Scored(0, 1.0, 0), reports=(report(trained=(0,)),)),
        lambda: told(*WHOLE[:2]),
        lambda: told(*PARKED, 1, chunk(1, 1), finish(chunk(0, 0, 1)), reports=CARRIED),
        lambda: told(ONE, chunk(0, 0), Defer(0, 1, restart=True), 1, ONE, chunk(0, 1), finish(chunk(0, 1))),
        lambda: told(3, chunk(7, 2), finish(chunk(0, *range(8))), reports=(report(3, (0,)),)),
        lambda: told(ONE, Drop(0, "empty"), reports=(report(dropped=(Drop(0, "empty"),)),)),
    ],
    ids=["whole", "cut short", "carried", "begun again", "resumed", "dropped"],
)  # fmt: skip
def test_what_follows_the_rules_is_valid(recorder: Callable[[], Recorder]) -> None:
    recorder().validate()


@pytest.mark.parametrize(
    ("recorder", "message"),
    [
        (lambda: told(chunk(0, 0)), "rollout 0, step 1: a Chunk came before its Prompt"),
        (lambda: told(ONE, ONE), "rollout 0, step 1: its Prompt came twice"),
        (lambda: told(ONE, chunk(1, 0)), "a Chunk begins at 1, and 0 tokens have come"),
        (lambda: told(ONE, chunk(0, 1, 0)), "versions decrease: [1, 0] after -1"),
        (lambda: told(ONE, chunk(0, 1), chunk(1, 0)), "versions decrease: [0] after 1"),
        (lambda: told(*WHOLE, chunk(3, 0)), "a Chunk came after its end"),
        (lambda: told(*WHOLE[:2], finish(chunk(0, 0))), "its response has 1 tokens, which are not the 2 of its chunks"),
        (
            lambda: told(ONE, ToolTokens(0, 0, np.zeros(1, np.int32)), finish(chunk(0, 0))),
            "its response and its chunks differ in which tokens were sampled",
        ),
        (lambda: told(*PARKED, 1, Defer(0, 3)), "rollout 0, step 2: it was deferred at age 3 after age 1"),
        (lambda: told(*WHOLE, Scored(0, 1.0, 0), Scored(0, 1.0, 0)), "rollout 0, step 1: 'reward' scored it twice"),
        (lambda: told(Scored(0, 1.0, 0)), "'reward' scored it before it was admitted"),
        (lambda: told(*WHOLE, reports=(report(),)), "step 1: rollout 0 ended, and was neither trained nor dropped"),
        (lambda: told(*WHOLE[:2], reports=(report(),)), "step 1: rollout 0 neither ended nor was deferred"),
        (lambda: told(*PARKED, reports=(report(),)), "step 1: the report defers [], and [0] were deferred"),
        (lambda: told(reports=(report(trained=(5,)),)), "step 1: rollout 5 was trained, and was never admitted"),
        (lambda: told(*WHOLE[:2], reports=(report(trained=(0,)),)), "rollout 0 was trained, and has not ended"),
        (
            lambda: told(*WHOLE, reports=(report(trained=(0,)), report(1, (0,)))),
            "step 2: rollout 0 was trained, and ended in step 1",
        ),
        (
            lambda: told(*WHOLE, reports=(report(trained=(0,), dropped=(Drop(0, "late"),)),)),
            "step 1: rollout 0 was dropped, after it was trained",
        ),
        (lambda: told(reports=(report(), report(2))), "step 3 was reported after step 1"),
        (lambda: told(reports=(report(), report(1, version=1))), "step 2: the version is 1 after 1"),
        (lambda: told(chunk(9, 0), *[ONE] * 9), "and 6 more"),
        (lambda: told(reports=(report(), report())), "these are two runs, and each needs a recorder of its own"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_said(recorder: Callable[[], Recorder], message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        recorder().validate()
    assert message in str(caught.value)


@pytest.mark.parametrize("critic", [True, False])
@pytest.mark.parametrize("reference", [True, False])
def test_a_batch_is_made_without_a_run(*, critic: bool, reference: bool) -> None:
    batch = fake_batch([3, 1, 4], critic=critic, reference=reference, version=2, vocabulary=7)
    assert batch.offsets.tolist() == [0, 3, 4, 8]
    assert (batch.values is not None, batch.returns is not None, batch.reference is not None) == (
        critic,
        critic,
        reference,
    )
    assert set(batch.versions.tolist()) == {2}
    assert 0 <= batch.tokens.min() <= batch.tokens.max() < 7
    assert (batch.logprobs <= 0).all()
    assert np.isfinite(known(batch.advantages)).all()
    assert known(batch.advantages).std() > 0
    assert fake_batch([3, 1, 4], vocabulary=7).tokens.tolist() == batch.tokens.tolist()
    assert fake_batch([3, 1, 4], vocabulary=7, seed=1).tokens.tolist() != batch.tokens.tolist()

    async def make() -> FakeTrainer:
        return FakeTrainer()

    synced: list[SyncedModel] = [FakePolicy(), FakeCritic()]
    run_virtual(check_trainer, make, batch, synced)


@pytest.mark.parametrize("wrong", [{"lengths": [2, 0]}, {"vocabulary": 0}, {"prompt_length": 1.5}])
def test_a_batch_of_other_numbers_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        fake_batch(**wrong)  # type: ignore[arg-type]  # that is the fault
