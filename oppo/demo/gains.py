"""The speedup by overlap: measured rounds, their medians, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from oppo.observe import Role, busy, seconds
from oppo.report.trace import TimedStep


@dataclass(frozen=True, slots=True)
class Effort:
    """The size of a measurement.

    Attributes:
        batch: responses a step.
        extra: most stragglers that the last schedule carries over.
        steps: of each schedule in a round, which ends with nothing carried over.
        rounds: in each, every schedule makes the same steps.
        deeper: factor by which the reward model is deeper than the demo's.
    """

    batch: int
    extra: int
    steps: int
    rounds: int
    deeper: int


@dataclass(frozen=True, slots=True)
class TimedRound:
    """The steps of one schedule in one round, and the tokens they trained."""

    tokens: int
    steps: Sequence[TimedStep]

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return self.steps[-1].end - self.steps[0].start

    @property
    def pace(self) -> float:
        """Seconds of a trained token."""
        return self.seconds / self.tokens

    @property
    def idle(self) -> float:
        """The mean idle fraction of the two halves of the cores: one decodes, the other scores, both update."""
        acting, scoring = self._busy("decode", "update"), self._busy("score", "update")
        return 1 - (acting + scoring) / (2 * self.seconds)

    def _busy(self, *roles: Role) -> float:
        return seconds(busy((span for step in self.steps for span in step.spans), *roles))


@dataclass(frozen=True, slots=True)
class Standing:
    """One schedule against the serial one, each by its median round.

    Attributes:
        seconds: of a step.
        speedup: of a trained token over the serial schedule.
        idle: see :attr:`TimedRound.idle`.
    """

    schedule: str
    seconds: float
    speedup: float
    idle: float

    @classmethod
    def of(cls, schedule: str, rounds: Sequence[TimedRound], serial: Sequence[TimedRound]) -> Standing:
        """Return the standing of a schedule: its median round beside the serial one's."""
        own, base = median_round(rounds), median_round(serial)
        return cls(schedule, seconds=own.seconds / len(own.steps), speedup=base.pace / own.pace, idle=own.idle)


def median_round(rounds: Sequence[TimedRound]) -> TimedRound:
    """Return the round of the median seconds a token; of two in the middle the faster one."""
    return sorted(rounds, key=lambda each: each.pace)[(len(rounds) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Gains:
    """The standing of every schedule, the serial one first."""

    effort: Effort
    standings: Sequence[Standing]

    @classmethod
    def of(cls, effort: Effort, rounds: Mapping[str, Sequence[TimedRound]]) -> Gains:
        """Return the gains from the rounds of each schedule by name, the serial one first."""
        serial = next(iter(rounds.values()))
        return cls(effort, [Standing.of(name, made, serial) for name, made in rounds.items()])

    def table(self) -> Table:
        """Return a table; its caption describes the measurement."""
        effort = self.effort
        rounds = "One round" if effort.rounds == 1 else f"The median of {effort.rounds} interleaved rounds of each"
        shown = Table(
            title=f"What overlap gains: the same {effort.steps} steps of {effort.batch} responses in each schedule",
            caption=f"{rounds}. The models made above, but the reward model {effort.deeper} times as deep, the critic "
            "on the actor's trunk, one epoch a step. In every schedule half of the cores decode and half score, and "
            "the update has all. Idle: the share of time in which such a half has nothing to do, the mean of both.",
            title_justify="left",
            caption_justify="left",
        )
        shown.add_column("schedule")
        for name in ("seconds a step", "times as fast", "idle"):
            shown.add_column(name, justify="right")
        for each in self.standings:
            shown.add_row(each.schedule, f"{each.seconds:.2f}", f"{each.speedup:.2f}", f"{each.idle:.0%}")
        return shown

    def facts(self) -> dict[str, object]:
        """Return the entries of ``summary.json``."""
        return {"schedules": [asdict(each) for each in self.standings], "measured": asdict(self.effort)}
