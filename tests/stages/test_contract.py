"""Models that break their word: each is named where it does, and nothing of it is trained."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import anyio
import numpy as np
import pytest

from oppo.admission import Observation, Overcommit
from oppo.errors import ProtocolError
from oppo.events import (
    Batch,
    Chunk,
    Drop,
    Finish,
    FloatArray,
    Prompt,
    Response,
    RolloutEvent,
    Scored,
    StepReport,
    merge_chunks,
    rollout_of,
)
from oppo.graph import Graph, GraphBuilder, Receiver, Sender
from oppo.models import Decode, Scorer, Trained, Weights
from oppo.stages import GAE, Score, Update
from oppo.stages.batch import ScoredRollouts
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    check_policy,
    fake_scalar,
    prompts,
    run_virtual,
)
from oppo.testing.fake_policy import FakeDecode
from tests.kit.faulty import Silent
from tests.kit.pipelines import Pipeline, Setting
from tests.kit.responses import rows_of
from tests.kit.virtual import virtually

SETTING = Setting(lengths=(5, 9, 3, 30), extra=2, steps=3)


def refused(pipeline: Pipeline, policy: FakePolicy | None = None) -> tuple[str, list[str]]:
    """Return the message, and the notes, with which a run is refused before anything is trained."""
    if policy is not None:
        pipeline.generate.policy = policy
    with pytest.raises(ProtocolError) as caught:
        run_virtual(pipeline.run)
    assert not pipeline.reports
    return str(caught.value), caught.value.__notes__


class Early(FakePolicy):
    """Stops decoding after two decode steps, before the cut."""

    async def add(self, decodes: Sequence[Decode]) -> None:
        await super().add(decodes)
        assert self._loops is not None
        self._loops.start_soon(self.stop_soon)

    async def stop_soon(self) -> None:
        await anyio.sleep(0.025)
        self.defer(list(self._live))


class Boasting(FakePolicy):
    """Says of the longest rollout that it has finished, as soon as any has."""

    def _end(self, ended: list[FakeDecode]) -> None:
        longest = max(self._live, key=lambda decode: decode.length)
        super()._end([*ended, longest] if ended and longest not in ended else ended)
        longest.wake()


class Forgetful(FakeTrainer):
    """Syncs no weights."""

    async def sync_weights(self, *synced: object) -> None:
        pass


class Counting(FakeTrainer):
    """Counts an update twice."""

    async def update(self, batch: Batch) -> Trained:
        await super().update(batch)
        return await super().update(batch)


class Careless(FakeTrainer):
    """Returns its metrics, and nothing around them."""

    async def update(self, batch: Batch) -> Trained:
        return dict((await super().update(batch)).metrics)  # type: ignore[return-value]  # that is the fault


class Mute(FakeScorer[float]):
    """Says nothing."""

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        await super().finish(finished)
        return None  # type: ignore[return-value]  # that is the fault


class Impatient(FakeScorer[float]):
    """Raises what awaiting a task raises that one has cancelled oneself."""

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        raise asyncio.CancelledError


class ByRollout(FakeScorer[float]):
    """Returns its scores by rollout, as a mapping."""

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        scores = await super().finish(finished)
        return {event.rollout: score for event, score in zip(finished, scores, strict=True)}  # type: ignore[return-value] # that is the fault


ASYNC: list[tuple[str, type, str]] = [
    ("policy", FakePolicy, "load"),
    ("trainer", FakeTrainer, "update"),
    ("trainer", FakeTrainer, "sync_weights"),
    ("reward", FakeScorer, "extend"),
    ("reward", FakeScorer, "finish"),
    ("critic", FakeCritic, "load"),
]


@pytest.mark.parametrize(("role", "kind", "method"), ASYNC)
def test_a_method_that_is_not_async_is_named(
    role: str, kind: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, method, lambda *args, **keywords: None)
    with pytest.raises(
        ProtocolError, match=rf"{method}\(\) of .* must be `async def`, .* it returned None \(NoneType\)"
    ):
        run_virtual(Pipeline(SETTING).run)


def in_words(finish: Finish, tokens: tuple[int, ...], version: int) -> Any:
    return np.array(["x"] * len(finish.response))


DECODING, SCORING = "while decoding rollout", "while scoring rollouts"
GENERATE, UPDATE = "in stage 'generate' of graph 'ppo', step 1", "in stage 'update' of graph 'ppo', step 1"


@pytest.mark.parametrize(
    ("role", "model", "words", "note"),
    [
        (
            "policy",
            Early(SETTING.length),
            "the policy stopped decoding rollouts [0, 1, 2, 3, 4, 5] before the step was cut",
            GENERATE,
        ),
        (
            "policy",
            Silent(SETTING.length),
            "the last chunk of rollout 2 came before the policy reported that it finished",
            f"{DECODING} 2",
        ),
        (
            "policy",
            Boasting(SETTING.length),
            "the policy reported that rollouts [1, 3] finished, but never gave their last chunk",
            GENERATE,
        ),
        (
            "policy",
            FakePolicy(lambda prompt: prompt.admission - 1),
            "rollout 0: read(4) of FakePolicy returned a chunk with no token that says 'eos'; only 'cut' may",
            f"{DECODING} 0",
        ),
        ("critic", FakeScorer(in_words), "expected 3 numbers as its values", "in stage 'advantage'"),
        (
            "trainer",
            Forgetful(),
            "version 1 was synced, but FakePolicy has version 0, FakeCritic has version 0: the synced models disagree",
            UPDATE,
        ),
        ("trainer", Counting(), "after an update of version 0 the trainer's is 2, not 1", UPDATE),
        (
            "trainer",
            Careless(),
            "update() of the trainer must return oppo.models.Trained(metrics, ...); got {'loss/fake'",
            UPDATE,
        ),
        ("reward", Mute(fake_scalar), "finish() of the scorer must return a list, one item for each of ", SCORING),
        ("reward", Mute(fake_scalar), "got None (NoneType)", SCORING),
        ("reward", Impatient(fake_scalar), "got CancelledError at ", "in stage 'reward' of graph 'ppo', step 1"),
        ("reward", Impatient(fake_scalar), "nothing had cancelled this call", SCORING),
        ("reward", ByRollout(fake_scalar), "finish() of the scorer must return a list, one item for each of ", SCORING),
    ],
)
def test_a_model_that_breaks_its_word_is_refused_where_it_does(role: str, model: object, words: str, note: str) -> None:
    pipeline = Pipeline(SETTING)
    setattr(pipeline.generate if role == "policy" else pipeline, role, model)
    message, notes = refused(pipeline)
    assert words in message
    assert any(each.startswith(note) for each in notes)
    assert not pipeline.batches or role == "trainer"


@pytest.mark.parametrize("score", [np.float32(0.5), np.array(0.5), 1, True])
def test_any_one_number_is_a_score(score: float) -> None:
    pipeline = Pipeline(SETTING, reward=FakeScorer(lambda finish, tokens, version: score))
    run_virtual(pipeline.run)
    assert {value for batch in pipeline.batches for value in batch.scores.tolist()} == {float(score)}


@virtually
async def test_a_failed_sync_says_who_has_which_version_and_nobody_goes_back() -> None:
    class Refusing(FakeCritic):
        async def load(self, weights: Weights) -> None:
            raise OSError("no room")

    trainer, policy = FakeTrainer(version=3), FakePolicy()
    with pytest.raises(OSError, match="no room") as caught:
        await trainer.sync_weights(policy, Refusing())
    assert caught.value.__notes__ == [
        "while syncing version 3: FakePolicy has version 3, Refusing has version 0; do not go on from here"
    ]


def test_a_group_that_is_being_closed_when_the_run_fails_leaves_no_decode_open() -> None:
    """Its first decode was being closed, or its Finish sent, when another stage failed: the second was forgotten."""

    class Remembering(FakePolicy):
        async def open(self, rollouts: Sequence[object]) -> Sequence[FakeDecode]:
            self.opened = await super().open(rollouts)  # type: ignore[arg-type]  # whatever it is given
            return self.opened

    class Broken(FakeCritic):
        async def extend(self, events: Sequence[object]) -> None:
            if self.calls == 2:
                raise OSError("gone")
            await super().extend(events)  # type: ignore[arg-type]  # whatever it is given

    pipeline = Pipeline(Setting(lengths=(1,), batch=1, samples=2, capacity=1))
    pipeline.critic = Broken()
    pipeline.generate.policy = policy = Remembering(lambda prompt: 1)
    with pytest.raises(OSError, match="gone"):
        run_virtual(pipeline.run)
    assert [decode.closed for decode in policy.opened] == [True, True]


@pytest.mark.parametrize("score", ["0.5", np.str_("0.5"), np.array(1j), b"1"])
def test_what_only_looks_like_a_number_is_no_score(score: object) -> None:
    pipeline = Pipeline(SETTING, reward=FakeScorer(lambda finish, tokens, version: cast("float", score)))
    message, _ = refused(pipeline)
    assert "expected a number as its score, got " in message


class Changing(FakePolicy):
    """Changes every chunk that is read."""

    def __init__(self, change: Callable[[Chunk], object]) -> None:
        super().__init__(SETTING.length)
        self.change = change

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        return [self.changing(decode) for decode in await super().open(rollouts)]

    def changing(self, decode: FakeDecode) -> FakeDecode:
        read = decode.read

        async def changed(limit: int) -> Chunk:
            chunk = await read(limit)
            assert isinstance(chunk, Chunk)
            return self.change(chunk)  # type: ignore[return-value] # that is the fault

        decode.read = changed  # type: ignore[method-assign]
        return decode


def more(chunk: Chunk) -> Chunk:
    return replace(
        chunk,
        tokens=np.tile(chunk.tokens, 3),
        logprobs=np.tile(chunk.logprobs, 3),
        versions=np.tile(chunk.versions, 3),
    )


WRONG_CHUNKS = [
    (lambda chunk: replace(chunk, state="done"), "'done'; expected one of live, eos, stop, length, cut"),
    (lambda chunk: replace(chunk, tokens=chunk.tokens.astype(np.int64)), "type int64; expected int32"),
    (lambda chunk: replace(chunk, logprobs=chunk.logprobs.tolist()), "expected float32"),
    (lambda chunk: replace(chunk, logprobs=-chunk.logprobs + 1), "expected at most 0, the log of a probability"),
    (lambda chunk: replace(chunk, versions=chunk.versions + 1), "versions never decrease, and the policy's is 0"),
    (
        lambda chunk: replace(chunk, extra=None),
        "a chunk whose further columns are None (NoneType); expected TokenColumns",
    ),
    (lambda chunk: replace(chunk, start=chunk.start + 1), "expected tokens from "),
    (more, "expected at most "),
    (lambda chunk: None, "None (NoneType); expected a Chunk or ToolTokens"),
]
"""What a backend may return in place of a chunk, and the words for it."""


@pytest.mark.parametrize(("change", "words"), WRONG_CHUNKS)
def test_a_chunk_that_breaks_the_contract_is_refused_by_a_run_and_by_its_check(
    change: Callable[[Chunk], object], words: str
) -> None:
    message, _ = refused(Pipeline(SETTING), Changing(change))
    assert "of Changing returned" in message
    assert words in message

    async def make() -> FakePolicy:
        return Changing(change)

    with pytest.raises(ProtocolError, match=re.escape(words)):
        run_virtual(check_policy, make, prompts(4))


class Relaying:
    """A batch stage of one's own that changes what an estimator sends."""

    def __init__(self, change: Callable[[Batch], object]) -> None:
        self.change = change

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        /,
        *,
        out: Sender[Batch],
        reference: Receiver[Scored[FloatArray] | Drop] | None = None,
        value: Receiver[Scored[FloatArray] | Drop] | None = None,
    ) -> None:
        scored = await ScoredRollouts.of(rollout, score, reference=reference, values=value)
        await out.send(self.change(GAE().batch_of(scored)))  # type: ignore[arg-type] # that may be the fault


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda batch: None, "'advantage' sent None (NoneType), and 'update' reads Batch | BatchPart"),
        (lambda batch: "junk", "'advantage' sent 'junk' (str), and 'update' reads Batch | BatchPart"),
        (lambda batch: replace(batch, advantages=batch.advantages.tolist()), "Batch.advantages must be a NumPy array"),
        (lambda batch: replace(batch, scores=batch.scores[1:]), "Batch.scores must be a NumPy array"),
        (lambda batch: replace(batch, metrics={"mine": "good"}), "Batch.metrics must map names to numbers; got 'mine'"),
        (lambda batch: replace(batch, metrics=["mine"]), "Batch.metrics must be a mapping from names to numbers"),
        (lambda batch: replace(batch, reasons=batch.reasons[1:]), "Batch.reasons must hold one of eos, stop, length"),
        (lambda batch: replace(batch, reasons=["bored"] * len(batch)), "Batch.reasons must hold one of eos, stop"),
        (lambda batch: replace(batch, responses=None), "Batch.responses must be a tuple of Response objects; got None"),
        (lambda batch: replace(batch, dropped=("bad",)), "Batch.dropped must be a tuple of Drop objects"),
        (lambda batch: replace(batch, deferred=None), "Batch.deferred must be a tuple of Defer objects; got None"),
    ],
)
def test_what_a_stage_of_ones_own_sends_is_checked_where_it_does(change: Callable[[Batch], object], words: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        run_virtual(Changed(change).run)
    assert words in str(caught.value)
    assert "in stage 'advantage' of graph 'ppo', step 1" in caught.value.__notes__


@dataclass
class Changed(Pipeline):
    """A pipeline with a batch stage of its own."""

    setting: Setting = SETTING
    change: Callable[[Batch], object] = lambda batch: batch

    def __init__(self, change: Callable[[Batch], object]) -> None:
        super().__init__(SETTING)
        self.change = change

    def graph(self) -> Graph[StepReport]:
        return super().graph().replace(advantage=Relaying(self.change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda batch: rows_of(batch, range(1, len(batch))), "leaves out rollouts [0]"),
        (lambda batch: rows_of(batch, [0, 0, *range(len(batch))]), "repeats rollouts [0]"),
        (lambda batch: replace(batch, dropped=(Drop(0, "no"),)), "repeats rollouts [0]"),
        (lambda batch: replace(batch, dropped=(Drop(77, "no"),)), "holds, of another step, rollouts [77]"),
        (lambda batch: replace(batch, deferred=()), "leaves out rollouts ["),
    ],
)
def test_each_rollout_that_ended_is_trained_or_dropped_once(change: Callable[[Batch], object], words: str) -> None:
    pipeline = Changed(change)
    with pytest.raises(ProtocolError) as caught:
        run_virtual(pipeline.run)
    assert "the batch of stage 'advantage'" in str(caught.value)
    assert words in str(caught.value)
    assert not pipeline.batches, "nothing was trained"


def test_a_second_batch_of_a_step_is_refused_by_its_sender_and_not_trained() -> None:
    class Twice:
        async def run(self, batches: Receiver[Batch], /, *, out: Sender[Batch]) -> None:
            async for batch in batches:
                await out.send(batch)
                await out.send(batch)

    pipeline = Pipeline(SETTING)
    graph = pipeline.graph()
    graph = graph.rebuild(twice=(Twice(), "advantage"), update=(graph.stage("update", Update), "twice"))

    async def main() -> None:
        async with graph.open(prompts(40)) as run:
            await run.step()

    with pytest.raises(ProtocolError, match="stage 'twice' sent a second batch, and a step trains one"):
        run_virtual(main)
    assert pipeline.trainer.version == 1


def test_a_step_whose_rollouts_are_in_no_batch_is_refused() -> None:
    class Swallowing:
        async def run(self, rollout: Receiver[Any], score: Receiver[Any], /, *, out: Sender[Batch]) -> None:
            del out
            async for _ in rollout:
                pass
            async for _ in score:
                pass

    class NoBatch(Pipeline):
        def graph(self) -> Graph[StepReport]:
            g: GraphBuilder[Prompt] = GraphBuilder("ppo", capacity=1000, merge=merge_chunks, key=rollout_of)
            rollout = g.add("generate", self.generate, g.prompts)
            score = g.add("reward", Score(cast("Scorer[float | Drop]", self.reward)), rollout)
            batch = g.add("advantage", Swallowing(), rollout, score)
            return g.build(g.add("update", Update(self.trainer, synced=[self.policy]), batch))

    with pytest.raises(ProtocolError, match=r"stage 'advantage' sent no batch, which leaves out rollouts \["):
        run_virtual(NoBatch(SETTING).run)


class Numbers:
    async def run(self, reports: Receiver[StepReport], /, *, out: Sender[int]) -> None:
        async for report in reports:
            await out.send(report.index)


def test_a_graph_whose_result_is_no_report_is_refused() -> None:
    class Counted(Pipeline):
        def graph(self) -> Graph[StepReport]:
            return cast("Graph[StepReport]", super().graph().then("count", Numbers()))

    with pytest.raises(ProtocolError, match=r"must be a StepReport, as Update sends; got 0 \(int\)") as caught:
        run_virtual(Counted(SETTING).run)
    assert "in observe() of stage 'generate' of graph 'ppo', step 1" in caught.value.__notes__


class OwnError(BaseException):
    """Derived from BaseException, like those of test frameworks."""


def test_a_base_exception_of_a_stage_ends_the_run_with_an_error_that_names_it() -> None:
    def fail(batch: Batch) -> object:
        raise OwnError("no more")

    with pytest.raises(ProtocolError, match=rf"OwnError: no more at {re.escape(__file__)}:\d+ in fail") as caught:
        run_virtual(Changed(fail).run)
    assert "in stage 'advantage' of graph 'ppo', step 1" in caught.value.__notes__


@pytest.mark.parametrize("error", [KeyError("gold"), OwnError("no more")])
def test_what_an_admission_raises_names_it_and_its_line(error: BaseException) -> None:
    class Clumsy(Overcommit):
        def observe(self, seen: Observation) -> None:
            raise error

    pipeline = Pipeline(SETTING, admission=Clumsy(2))
    with pytest.raises((KeyError, ProtocolError)) as caught:
        run_virtual(pipeline.run)
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert told.count("Clumsy.observe()") == 1
    assert f" at {__file__}:" in told
    assert "in observe() of stage 'generate' of graph 'ppo', step 1" in told
