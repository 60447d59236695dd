"""What overlap gains: the arithmetic, the table, and a measurement of tiny models."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from oppo.config.load import load_settings
from oppo.demo.schedules import Effort, Gains, Standing, TimedRound, deepened, excerpt, measure
from oppo.hf.loading import load_scalar
from oppo.log import routed
from oppo.observe import Role, Span
from oppo.report.trace import TimedStep
from tests.hf import tiny
from tests.kit.workplace import furnish

ROLES: dict[str, Role] = {
    "policy": "decode", "reference": "score", "reward model": "score", "critic": "score", "trainer": "update",
}  # fmt: skip
EFFORT = Effort(batch=12, extra=3, steps=2, rounds=3, deeper=4)


def made(seconds: float, *spans: tuple[str, float, float], tokens: int = 100) -> TimedRound:
    work = [Span(track, "work", start, end, 0, ROLES.get(track)) for track, start, end in spans]
    middle = seconds / 2
    return TimedRound(tokens, [TimedStep(0, 0.0, middle, None, 0, work), TimedStep(1, middle, seconds, None, 0, [])])


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([("policy", 0, 10), ("reward model", 0, 10)], 0.0),
        ([("policy", 0, 4), ("critic", 4, 8), ("trainer", 8, 10)], 0.4),
        ([("policy", 0, 4), ("reference", 2, 6), ("reward model", 4, 6), ("trainer", 8, 10)], 0.4),
        ([("trainer", 0, 10), ("reward model", 5, 10)], 0.0),
        ([("somebody", 0, 10)], 1.0),
    ],
)
def test_a_half_of_the_cores_is_idle_when_it_neither_does_its_own_work_nor_updates(
    spans: Sequence[tuple[str, float, float]], idle: float
) -> None:
    assert made(10.0, *spans).idle == pytest.approx(idle)


def test_a_schedule_is_compared_with_the_serial_one_by_the_median_round_of_each_which_is_the_one_shown() -> None:
    serial = [made(30.0), made(10.0), made(20.0)]
    own = [made(5.0), made(48.0, tokens=300), made(60.0)]
    standing = Standing.of("streamed", own, serial)
    assert standing == Standing("streamed", seconds=24.0, speedup=20 * 3 / 48, idle=1.0)
    shown = [excerpt("serial", serial), excerpt("streamed", own)]
    assert [each.name for each in shown] == ["serial (the median of 3 rounds)", "streamed (the median of 3 rounds)"]
    assert [each.seconds for each in shown] == [20.0, 48.0]


def test_the_table_says_what_was_measured() -> None:
    gains = Gains.of(EFFORT, {"serial": [made(10.0)] * 3, "streamed": [made(8.0)] * 3})
    out = io.StringIO()
    Console(file=out, width=80).print(gains.table())
    said = " ".join(out.getvalue().split())
    assert "the same 2 steps of 12 responses in each schedule" in said
    assert (
        "The median of 3 interleaved rounds of each. The models made above, but the reward model 4 times as deep"
        in said
    )
    assert "│ serial │ 5.00 │ 1.00 │ 100% │" in said
    assert "│ streamed │ 4.00 │ 1.25 │ 100% │" in said
    assert gains.facts()["schedules"] == [
        {"schedule": "serial", "seconds": 5.0, "speedup": 1.0, "idle": 1.0},
        {"schedule": "streamed", "seconds": 4.0, "speedup": 1.25, "idle": 1.0},
    ]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("workplace"))


def test_a_deeper_reward_model_gives_the_same_scores(workplace: Path) -> None:
    deep, ids = deepened(load_scalar(workplace / "reward"), 3), torch.arange(3, 23).reshape(2, 10)
    assert deep.config.num_hidden_layers == 6
    with torch.no_grad():
        theirs = [model(ids, use_cache=False).logits for model in (load_scalar(workplace / "reward"), deep)]
    assert torch.equal(*theirs)


def test_what_is_no_llama_is_not_deepened() -> None:
    with pytest.raises(TypeError, match="only a Llama with a scalar head"):
        deepened(tiny.of(tiny.WHOLE["diffllama"]()), 2)


def test_every_schedule_makes_the_same_steps(workplace: Path) -> None:
    settings, loops = load_settings(workplace / "config.toml", []), list[object]()
    effort = Effort(batch=4, extra=2, steps=3, rounds=2, deeper=2)
    with routed(lambda _: loops.append(asyncio.get_running_loop())):
        rounds = measure(settings, effort)
    assert len(loops) == 3, "a sentence for each round"
    assert len(set(loops)) == 1, "an engine works on one event loop"
    assert [name.split()[0].strip(":,") for name in rounds] == ["serial", "streamed", "streamed"]
    assert {each.tokens for made in rounds.values() for each in made} == {rounds[next(iter(rounds))][0].tokens}
    assert all([step.index for step in each.steps] == [0, 1, 2] for made in rounds.values() for each in made)
    carried = [[sum(step.deferred for step in each.steps) for each in made] for made in rounds.values()]
    assert carried[:2] == [[0, 0], [0, 0]]
    assert all(carried[2])
    serial, streamed, _ = rounds.values()
    assert all(spans_after_cut(step) for each in serial for step in each.steps)
    assert not all(spans_after_cut(step) for each in streamed for step in each.steps)
    assert [step.index for step in excerpt("serial", serial).steps] == [0, 1, 2], "a whole round"
    assert not [each for each in (workplace / "runs").glob("*") if each.is_dir()], "nothing is written"


def spans_after_cut(step: TimedStep) -> bool:
    """Return whether whole responses were scored, once nothing was decoded any more."""
    assert step.cut is not None
    decoded = max(span.end for span in step.spans if span.track == "policy" and span.label == "decode")
    return all(span.start >= decoded for span in step.spans if span.label == "extend")
