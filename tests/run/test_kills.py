"""A run of fakes is killed after every single line of its journal, and goes on from what was on the disk then.

In virtual time a run is the same each time it is made, so one that is not killed shows what each kill would leave.
It goes on on a slower machine: everything takes longer, and other things take long. Nothing of that may show in what is
trained, but where a controller measures time: there it may show after what is in the journal, and not before.

A signal ends a run less abruptly: the steps in flight end first, which the journal says."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from hypothesis import example, given

from oppo.admission import Admission, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.chunking import Fixed
from oppo.data import PromptStream
from oppo.errors import ConfigError, GraphError
from oppo.events import Batch
from oppo.models import Capabilities
from oppo.report import RunDirectory, observations
from oppo.report.records import DRAINED, JOURNAL, OBSERVED, Record, read, read_replay
from oppo.returns import AdaptiveKL, ScoreShaping
from oppo.run.checkpoint import read_state, write_state
from oppo.stages import GAE, Generate, GroupRelative, Update
from oppo.testing import FakePolicy, FakeTrainer, prompts, run_virtual
from tests.kit.pipelines import Pipeline, Setting, same_batches, settings
from tests.kit.virtual import virtually

FAST = Setting(
    lengths=(2, 3, 8, 1, 4, 2, 12, 3, 1, 2, 6),
    batch=3,
    chunks=Fixed(3),
    reference=0.001,
    reward=0.002,
    critic=0.001,
    per_call=0.003,
    update=0.02,
)
SLOW = replace(FAST, reference=0.004, reward=0.03, critic=0.0, per_call=0.001, update=0.9)

POLICIES: dict[str, Callable[[], Admission]] = {
    "synchronous": lambda: Overcommit(3),
    "overcommit": lambda: Overcommit(3, overcommit=2),
    "slope": lambda: SlopeAdaptive(3, most=3, window=1),
    "tail": lambda: TailAdaptive(3, price=0.0, most=3),
    "batched": lambda: TailBatched(3, 1.5),
}


@dataclass(frozen=True)
class Kill:
    """A moment at which a run may be killed: when the journal had so many lines, and this was the last checkpoint."""

    lines: int
    checkpoint: int


class Life:
    """A process that makes a run, or goes on with one, up to its end.

    Args:
        path: the run directory, with what earlier processes have left there.
        policy: of admission.
        every: steps between two checkpoints.
        start: steps that are over; ``None``: the run begins.
        past: the batches of these: what the weights of a fake trainer consist of.
        setting: of the run.
        replays: whether controllers are told what the journal says.
        signal: the step after which a signal asks the process to end.
        told: steps after which it drains besides.
    """

    def __init__(
        self,
        path: Path,
        policy: str,
        every: int,
        *,
        start: int | None = None,
        past: tuple[Batch, ...] = (),
        setting: Setting = FAST,
        replays: bool = True,
        lookahead: int = 0,
        signal: int | None = None,
        told: frozenset[int] = frozenset(),
    ) -> None:
        self.path, self.policy, self.every, self.start, self.lookahead = path, policy, every, start, lookahead
        self.signal, self.drained = signal, read_replay(path / JOURNAL).drains | told
        self.extras: list[float | None] = []
        self._inherited = 0  # lines of the journal with which it went on
        self._lines: dict[int, int] = {}  # of the journal, by the step of the checkpoint that was written then
        replay = observations(path / JOURNAL, start or 0) if replays else {}
        self.steps = 6 if policy == "tail" else 4
        self._pipeline = Pipeline(
            replace(setting, steps=self.steps, lookahead=lookahead, checkpoint_every=every),
            admission=POLICIES[policy](),
            replay=replay,
        )
        self._pipeline.trainer.batches.extend(past)
        if setting is SLOW:
            self._pipeline.policy.seconds = 0.04
        run_virtual(self._live)

    async def _live(self) -> None:
        pipeline, done = self._pipeline, self.start or 0
        source = pipeline.prompts()
        with RunDirectory(self.path, keep=0, trace=0, threaded=False, resumed_at=self.start).begin() as directory:
            self._inherited = len(self.journal)
            async with pipeline.graph().open(source, observers=[directory], lookahead=self.lookahead) as run:
                if done:
                    state = read_state(self._checkpoint(done))
                    run.load_state_dict(state["run"])
                    source.load_state_dict(state["prompts"])
                    pipeline.trainer.version = done
                    await pipeline.trainer.sync_weights(pipeline.policy, pipeline.critic)
                async for report in run.steps(self.steps - done, drain_after=self._drains_after):
                    self.extras.append(report.metrics.get("deferral/overcommit"))
                    if report.index == self.signal and run.alive:
                        directory.drained(run.alive[-1])
                        run.drain()
                    ends = self.signal is not None and report.index >= self.signal
                    if not run.alive and (ends or self._drains_after(report.index)):
                        folder = self._checkpoint(report.index + 1)
                        folder.mkdir(parents=True)
                        write_state(folder, {"run": run.state_dict(), "prompts": source.state_dict()})
                        self._lines[report.index + 1] = len(self.journal)
                    if ends and not run.alive:
                        return

    def _drains_after(self, index: int) -> bool:
        return self._pipeline.setting.is_checkpointed(index) or index in self.drained

    def _checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / str(step)

    @property
    def checkpoints(self) -> list[int]:
        """The steps of those that were written, and 0: without one it begins anew."""
        return [0, *self._lines]

    @property
    def end(self) -> Kill:
        """The moment after its last line."""
        return Kill(len(self.journal), self.checkpoints[-1])

    @property
    def batches(self) -> list[Batch]:
        return self._pipeline.trainer.batches

    @property
    def journal(self) -> list[Record]:
        return list(read(self.path / JOURNAL))

    def extras_from(self, step: int) -> list[float | None]:
        """Return Delta of each step from ``step`` on."""
        return self.extras[step - (self.start or 0) :]

    def kills(self) -> Iterator[Kill]:
        """Yield every moment up to the end: after each line, and again where a checkpoint was written."""
        for lines in range(self._inherited, len(self.journal)):
            yield Kill(lines, max([self.start or 0, *(step for step, at in self._lines.items() if at < lines)]))
            yield from (Kill(lines, step) for step, at in self._lines.items() if at == lines)

    def killed(self, kill: Kill, path: Path) -> Path:
        """Return a directory as a kill at that moment leaves it; the line that was being written is torn."""
        path.mkdir()
        lines = [*(self.path / JOURNAL).read_bytes().splitlines(keepends=True), b""]
        (path / JOURNAL).write_bytes(b"".join(lines[: kill.lines]) + lines[kill.lines][:20])
        if kill.checkpoint:
            shutil.copytree(self._checkpoint(kill.checkpoint), path / "checkpoints" / str(kill.checkpoint))
        return path

    def resumed(self, kill: Kill, path: Path, setting: Setting = SLOW, *, replays: bool = True) -> Life:
        """Return the run that goes on after a kill."""
        past = tuple(self.batches[: kill.checkpoint])
        return Life(
            self.killed(kill, path),
            self.policy,
            self.every,
            start=kill.checkpoint,
            past=past,
            setting=setting,
            replays=replays,
            lookahead=self.lookahead,
        )


def same_until(whole: Life, kill: Kill) -> int:
    """Return how many steps must come out as they did: all, or those decided from what the journal says."""
    if whole.policy != "tail":
        return whole.steps
    observed = sum(record["event"] == OBSERVED for record in whole.journal[: kill.lines])
    return min(whole.steps, observed + 1)


def goes_on(whole: Life, kill: Kill, after: Life) -> None:
    """Check that a run that was killed and resumed is what it would have been."""
    steps = same_until(whole, kill)
    assert same_batches(after.batches[:steps], whole.batches[:steps]), kill
    assert of_rollouts(after.journal, steps) == of_rollouts(whole.journal, steps), kill
    assert after.extras[: steps - kill.checkpoint] == whole.extras_from(kill.checkpoint)[: steps - kill.checkpoint], (
        kill
    )
    assert nothing_is_lost_or_doubled(after), kill


def of_rollouts(journal: list[Record], steps: int) -> Counter[tuple[object, ...]]:
    """Return what a journal says of rollouts in its first steps, but for the time."""
    told = [record for record in journal if "rollout" in record and int(str(record["step"])) < steps]
    return Counter(tuple(value for name, value in record.items() if name != "at") for record in told)


def nothing_is_lost_or_doubled(life: Life) -> bool:
    """Return whether each prompt taken was trained once, and the journal tells each thing once that happens once."""
    trained = sorted(rollout for batch in life.batches for rollout in batch.rollouts)
    often = {"deferred", "admitted"} if life.policy == "batched" else {"deferred"}  # which begins rollouts anew
    told = Counter((record["event"], record.get("rollout", record["step"])) for record in life.journal)
    once = {kind: sorted(int(str(of)) for event, of in told if event == kind) for kind, _ in told}
    return (
        trained == list(range(life.steps * FAST.batch)) == once["admitted"] == once["finished"] == once["trained"]
        and once[OBSERVED] == list(range(life.steps))
        and all(count == 1 for (event, _), count in told.items() if event not in often)
    )


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.deep), 3])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_killed_at_any_line_of_its_journal_goes_on_as_if_it_had_not_been(
    tmp_path: Path, policy: str, lookahead: int, every: int
) -> None:
    whole = Life(tmp_path / "whole", policy, every, lookahead=lookahead)
    assert nothing_is_lost_or_doubled(whole)
    assert any(record["event"] == "deferred" for record in whole.journal) or policy == "synchronous"
    stride = 3 if every > 1 else 1  # every third line of them, for `make test` to be quick
    for number, kill in enumerate([*whole.kills()][lookahead % stride :: stride]):
        goes_on(whole, kill, whole.resumed(kill, tmp_path / str(number)))


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("policy", ["overcommit", pytest.param("slope", marks=pytest.mark.deep)])
def test_a_run_that_a_signal_has_ended_goes_on_as_one_that_was_to_drain_there(
    tmp_path: Path, policy: str, lookahead: int
) -> None:
    """It is killed as well, after any line, and its newest checkpoints may be damaged."""
    undisturbed = Life(tmp_path / "undisturbed", policy, 4, lookahead=lookahead)
    told = Life(tmp_path / "told", policy, 4, lookahead=lookahead, told=frozenset({lookahead}))
    assert same_batches(told.batches, undisturbed.batches) == (lookahead == 0)
    stopped = Life(tmp_path / "stopped", policy, 4, lookahead=lookahead, signal=0)
    assert len(stopped.batches) == 1 + lookahead
    whole = stopped.resumed(stopped.end, tmp_path / "whole", FAST)
    assert same_batches(whole.batches, told.batches)
    drained = [line for line, record in enumerate(stopped.journal) if record["event"] == DRAINED]
    assert len(drained) == min(1, lookahead)
    for number, kill in enumerate(stopped.kills()):
        after = stopped.resumed(kill, tmp_path / f"stopped-{number}")
        assert same_batches(
            after.batches, told.batches if kill.lines > max(drained, default=0) else undisturbed.batches
        )
        assert nothing_is_lost_or_doubled(after)
    for number, kill in enumerate([*whole.kills(), replace(whole.end, checkpoint=0)]):
        after = whole.resumed(kill, tmp_path / f"whole-{number}")
        assert same_batches(after.batches, told.batches), kill
        assert nothing_is_lost_or_doubled(after)


def test_a_run_that_is_killed_twice_replays_what_was_seen_before_the_first_kill(tmp_path: Path) -> None:
    whole = Life(tmp_path / "whole", "tail", 3)
    kill = next(each for each in whole.kills() if same_until(whole, each) == whole.steps - 1)
    once = whole.resumed(kill, tmp_path / "once")
    for number, again in enumerate(once.kills()):
        twice = once.resumed(again, tmp_path / str(number), FAST)
        goes_on(once, again, twice)
        goes_on(whole, kill, twice)


def test_without_what_was_seen_a_slower_machine_decides_otherwise(tmp_path: Path) -> None:
    whole = Life(tmp_path / "whole", "tail", 3)
    kill = list(whole.kills())[-1]
    forgetful = whole.resumed(kill, tmp_path / "forgetful", replays=False)
    assert forgetful.extras != whole.extras_from(kill.checkpoint)


CARRIED = Setting(lengths=(5, 9, 3, 30, 21), extra=2, steps=4)


def interrupted(setting: Setting, directory: Path) -> list[Pipeline]:
    """Return a run as so many processes as it has checkpoints."""
    parts = []
    for first in range(0, setting.steps, setting.checkpoint_every):
        parts.append(part := Pipeline(setting))
        run_virtual(part.run_part, first, min(first + setting.checkpoint_every, setting.steps), directory)
    return parts


def batches(parts: list[Pipeline]) -> list[Batch]:
    return [batch for part in parts for batch in part.batches]


@pytest.mark.schedules
@given(settings(prompts=(1_000,)))
@example(CARRIED)
@example(replace(CARRIED, samples=2))
@example(replace(CARRIED, lengths=(1,), extra=4))
@example(replace(CARRIED, steps=6, lookahead=1, checkpoint_every=3))
@example(replace(CARRIED, steps=6, lookahead=2, checkpoint_every=2))
def test_a_run_interrupted_at_every_checkpoint_equals_an_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting
) -> None:
    setting = replace(setting, paces=())  # where the order of what finishes is the decode loop's alone
    directory, uninterrupted = tmp_path_factory.mktemp("state"), Pipeline(setting)
    run_virtual(uninterrupted.run_part, 0, setting.steps, directory)
    parts = interrupted(setting, directory)
    assert same_batches(batches(parts), uninterrupted.batches)
    reports = [report for part in parts for report in part.reports]
    assert [report.index for report in reports] == list(range(setting.steps))
    assert [report.deferred for report in reports] == [report.deferred for report in uninterrupted.reports]


@pytest.mark.schedules
@given(settings(prompts=(1_000,)))
@example(replace(CARRIED, batch=6, extra=6, steps=6, refill=True, checkpoint_every=2, lookahead=1))
def test_an_interruption_neither_loses_nor_doubles_a_prompt_or_a_token(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting
) -> None:
    trained = batches(interrupted(setting, tmp_path_factory.mktemp("state")))
    rollouts = sorted(rollout for batch in trained for rollout in batch.rollouts)
    assert rollouts == list(range(setting.steps * setting.batch * setting.samples))
    for response in (response for batch in trained for response in batch.responses):
        assert len(response) == setting.length(response.prompt)
        assert np.all(np.diff(response.versions) >= 0)


@pytest.mark.parametrize("kind", [GAE, partial(GroupRelative, "centred")], ids=["GAE", "GroupRelative"])
def test_controllers_of_kl_and_scores_go_on_where_they_were(kind: Callable[..., GAE | GroupRelative]) -> None:
    learned = kind(kl=AdaptiveKL(0.2, target=1.0, horizon=10), shaping=ScoreShaping(norm=True))
    learned.control = learned.control.after(5.0, 4)
    learned.shaping = learned.shaping.after(np.array([1, 2, 5], np.float32))
    fresh = kind(kl=AdaptiveKL(0.2, target=1.0, horizon=10), shaping=ScoreShaping(norm=True))
    fresh.load_state_dict(learned.state_dict())
    assert (fresh.control, fresh.shaping) == (learned.control, learned.shaping)


@virtually
async def test_a_state_of_other_stages_is_refused_by_name() -> None:
    pipeline = Pipeline(CARRIED)
    async with pipeline.graph().open(()) as run:
        state = run.state_dict()
        del state["stages"]["advantage"]
        with pytest.raises(GraphError, match=r"whose stages \['generate', 'update'\] keep state"):
            run.load_state_dict(state)


@virtually
async def test_a_state_comes_before_the_first_step() -> None:
    pipeline = Pipeline(CARRIED)
    async with pipeline.graph().open(pipeline.prompts()) as run:
        await run.step()
        with pytest.raises(GraphError, match="has made 1 steps: load a state before the first"):
            run.load_state_dict(run.state_dict())


@virtually
async def test_half_written_responses_are_refused_by_name_for_a_policy_that_cannot_go_on_with_them() -> None:
    pipeline = Pipeline(CARRIED)
    async with pipeline.graph().open(pipeline.prompts()) as run:
        await run.step()
        state = run.state_dict()
    other = Generate(FakePolicy(capabilities=Capabilities(resumes="refused")), pipeline.generate.admission)
    with pytest.raises(ConfigError, match=r"rollouts \[.*\] are half-written, and FakePolicy cannot go on"):
        other.load_state_dict(state["stages"]["generate"])


@virtually
async def test_a_state_that_was_loaded_is_the_state_until_the_first_step() -> None:
    pipeline = Pipeline(CARRIED)
    async with pipeline.graph().open(pipeline.prompts()) as run:
        await run.step()
        state = run.state_dict()["stages"]["generate"]
    other = Generate(FakePolicy(), pipeline.generate.admission)
    other.load_state_dict(state)
    tokens = [[each["tokens"].tolist() for each in unit["rollouts"]] for unit in state["units"]]
    assert any(map(any, tokens)), "something half-written is deferred"
    assert [[each["tokens"].tolist() for each in unit["rollouts"]] for unit in other.state_dict()["units"]] == tokens


@virtually
async def test_columns_of_any_type_stay_out_of_the_state_and_are_read_again(tmp_path: Path) -> None:
    data = PromptStream([replace(prompt, columns={"lock": Lock()}) for prompt in prompts(40)], epochs=1)
    pipeline = Pipeline(CARRIED)
    pipeline.generate.columns = data.columns
    async with pipeline.graph().open(data) as run:
        await run.step()
        write_state(tmp_path, run.state_dict()["stages"]["generate"])
    other = Generate(FakePolicy(), pipeline.generate.admission, columns=data.columns)
    other.load_state_dict(read_state(tmp_path))
    carried = [prompt for unit in other._ledger.deferred for prompt in unit.prompts]
    assert carried
    assert all(prompt.columns["lock"] is data.columns(prompt.admission)["lock"] for prompt in carried)


def test_updates_that_were_not_finite_go_on_being_counted() -> None:
    counting = Update(FakeTrainer(), max_nonfinite=3)
    counting.load_state_dict({**counting.state_dict(), "nonfinite": 2})
    assert counting.state_dict()["nonfinite"] == 2
