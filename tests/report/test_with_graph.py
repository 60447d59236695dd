"""Observers beside a whole graph of fakes, in virtual time."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.report import Panel, RunDirectory, story
from oppo.rewards import FunctionReward
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_per_token, prompts
from oppo.testing.virtual_time import run_virtual
from tests.report.synthetic import all_nested

LENGTHS = (3, 5, 40, 8, 2, 13)


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


async def train(path: Path, out: io.StringIO, lookahead: int = 0) -> None:
    graph = ppo(
        policy=FakePolicy(lambda prompt: LENGTHS[prompt.rollout % len(LENGTHS)], 0.5),
        reference=FakeScorer(fake_per_token, 0.25, 0.0),
        reward=FunctionReward(lambda prompts, completions: [len(c) for c in completions], decode, name="length"),
        critic=FakeCritic(per_token=0.125),
        trainer=FakeTrainer(4.0),
        admission=Overcommit(batch=4, overcommit=2),
        chunks=Fixed(4),
    )
    panel = Panel(Console(file=out), 5, live=False)
    with RunDirectory(path, decode=decode, threaded=False) as directory:
        async with graph.open(prompts(100), observers=[directory, panel], lookahead=lookahead) as run:
            async for _ in run.steps(5):
                pass


def test_the_journal_accounts_for_every_rollout_and_a_run_can_be_repeated(tmp_path: Path) -> None:
    out = io.StringIO()
    for name in ("a", "b"):
        run_virtual(train, tmp_path / name, out)
    for file in ("metrics.jsonl", "journal.jsonl", "samples.jsonl", "trace.json", "summary.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    journal = tmp_path / "a" / "journal.jsonl"
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    events = Counter(entry["event"] for entry in entries)
    assert events["admitted"] == events["finished"] == events["trained"] == 20
    assert events["deferred"] > 0
    assert [entry["step"] for entry in entries if entry["event"] == "observed"] == [1, 2, 3, 4, 5]
    for rollout in {entry["rollout"] for entry in entries if "rollout" in entry}:
        told = [entry["event"] for entry in story(journal, rollout)]
        assert (told[0], told[-2:]) == ("admitted", ["finished", "trained"])
        assert set(told[1:-2]) <= {"deferred"}
    assert len(out.getvalue().splitlines()) == 10


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_slices_of_a_track_are_disjoint_or_nested_and_say_of_which_step_they_are(
    tmp_path: Path, lookahead: int
) -> None:
    run_virtual(train, tmp_path / "run", io.StringIO(), lookahead)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())
    slices = [event for event in events if event["ph"] == "X"]
    assert all_nested(slices)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    whole = [(event["args"]["step"], names[event["tid"]]) for event in slices if names[event["tid"]].startswith("step")]
    assert whole == [(k + 1, ("step", "step (2)", "step (3)")[k % (lookahead + 1)]) for k in range(5)]
    executions = [(names[event["tid"]], event["args"]["step"]) for event in slices if event["name"] == "run"]
    assert Counter(executions) == Counter(product(set(names.values()) - {name for _, name in whole}, range(1, 6)))
