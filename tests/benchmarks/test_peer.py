"""The peer: what it is asked and answers, which settings it is tried with, and which of them a comparison takes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

from benchmarks import CHECKOUT
from benchmarks.peer.service import InputEnded, Prompt, Service, Spec, batches, read_prompts, read_spec
from benchmarks.peer.sweep import (
    PEERS,
    Cell,
    CellTimes,
    Peer,
    Sweep,
    Swept,
    choose,
    command_line,
    fingerprint,
    sweep,
    swept,
)
from oppo.errors import ConfigError, ModelLost

SPEC = Spec(
    workload="counted", batch=4, epochs=2, minibatches=1, max_new_tokens=8, learning_rate=1e-7,
    critic_learning_rate=1e-7, temperature=1.0, eos=1, pad=0, seed=0, kl=0.05, gamma=1.0, lam=0.95, reward="model",
)  # fmt: skip
PROMPTS = tuple(Prompt((5, 6, 7 + n), n) for n in (3, 9, 5))

# Answers as the peer does, at once, and with seconds that depend on the cell
STAND_IN = f"""
import argparse, sys
from itertools import islice
from pathlib import Path
sys.path.insert(0, {str(CHECKOUT)!r})
from benchmarks.peer.service import InputEnded, Service, batches, read_prompts, read_spec
parser = argparse.ArgumentParser()
parser.add_argument("workload", type=Path)
for name in ("--rollout-batch", "--minibatches", "--threads"):
    parser.add_argument(name, type=int)
given = parser.parse_args()
spec = read_spec(given.workload)
service = Service(spec, sys.stdin, sys.stdout)
service.ready({{"versions": {{"stand-in": "1"}}, "threads": given.threads}})
try:
    service.wait()
    for prompts in batches(read_prompts(given.workload), spec.batch):
        for _ in range(spec.epochs * spec.minibatches):
            service.updated()
        # Two rows at a time, four passes and one thread are the fastest.
        seconds = 1 + abs(given.rollout_batch - 2) + abs(given.minibatches - 4) + given.threads
        service.done(seconds, [min(p.length, spec.max_new_tokens) for p in prompts], prompts)
except InputEnded:
    pass
"""


def workload(directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    said = {key.name: getattr(SPEC, key.name) for key in fields(Spec) if key.name != "samples"}
    said |= {"measured": 1, "recipe": {"models": {"taught": 9}, "chunk": 32}} | changes
    (directory / "spec.json").write_text(json.dumps(said))
    rows = [json.dumps({"tokens": list(prompt.tokens), "length": prompt.length}) for prompt in PROMPTS]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return directory


def checkout(directory: Path, peer: Peer, program: str) -> Path:
    python = directory / f".venv-{peer.name}/bin/python"
    for path in (directory / peer.program, python):
        path.parent.mkdir(parents=True)
    (directory / peer.program).write_text(program)
    python.symlink_to(sys.executable)
    return directory


def served(requests: str, lengths: Sequence[int], updates: int) -> list[dict[str, object]]:
    answers = io.StringIO()
    ticks = iter(range(1000))
    service = Service(SPEC, io.StringIO(requests), answers, now=lambda: float(next(ticks)))
    service.ready({"threads": 1})
    with suppress(InputEnded):
        service.wait()
        while True:
            for _ in range(updates):
                service.updated()
            service.done(service.lap(), lengths, PROMPTS)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_service_answers_each_request_with_as_many_steps() -> None:
    ready, first, second = served('{"run": 1}\n{"run": 2}\n', [3, 8, 5], updates=2)
    assert ready == {"ready": {"threads": 1}}
    told = {"seconds": 1.0, "tokens": 16, "announced": 16, "as_announced": 1.0, "samples": 3, "capped": 1}
    assert first["steps"] == [{**told, "mean_length": 16 / 3}]
    assert "error" not in first
    assert len(cast("list[object]", second["steps"])) == 2
    for lengths, updates, named in (([3, 8, 6], 2, "17 response tokens"), ([3, 8, 5], 1, "took 1 optimizer steps")):
        _, answer = served('{"run": 1}\n', lengths, updates)
        assert named in str(answer["error"])


def test_prompts_are_taken_in_order_and_again_from_the_first() -> None:
    taken = list(islice(batches(PROMPTS, 2), 3))
    assert [prompt.length for batch in taken for prompt in batch] == [3, 9, 5, 3, 9, 5]


def test_a_workload_that_the_peer_cannot_run_is_refused(tmp_path: Path) -> None:
    assert (read_spec(workload(tmp_path)), read_prompts(tmp_path)) == (SPEC, PROMPTS)
    with pytest.raises(ValueError, match="oracle"):
        read_spec(workload(tmp_path, reward="oracle"))
    (tmp_path / "spec.json").write_text('{"workload": "counted"}')
    with pytest.raises(ValueError, match="batch"):
        read_spec(tmp_path)


def test_a_sweep_finds_the_fastest_cell_of_a_program(tmp_path: Path) -> None:
    files = workload(tmp_path / "files")
    peer = PEERS["trl"]
    root = checkout(tmp_path / "checkout", peer, STAND_IN)
    found = swept(files, 2, checkout=root)
    assert found.best == Cell(rollout_batch=2, minibatches=4, threads=1)
    assert found.versions == {"stand-in": "1"}
    assert min(each.seconds for each in found.cells) == 4.0
    (root / peer.program).write_text("raise SystemExit('out of memory')")
    with pytest.raises(ModelLost, match="out of memory"):
        swept(files, 2, checkout=root)
    peer.interpreter(root).unlink()
    with pytest.raises(ConfigError, match="make bench-peer PEER=trl"):
        command_line(peer, files, found.best, checkout=root)


def test_a_sweep_of_grpo_rolls_out_whole_groups_and_tries_options_at_the_best_cell() -> None:
    spec, peer = replace(SPEC, batch=24, epochs=1, samples=4), PEERS["trl-grpo"]

    def measure(cell: Cell) -> tuple[dict[str, str], tuple[float]]:
        rows = cell.rows(spec)
        assert cell.rollout_batch % spec.samples == 0 == cell.rollout_batch % rows
        # Rollouts of twelve, passes of three, two threads and one option are the fastest.
        seconds = abs(cell.rollout_batch - 12) + abs(rows - 3) + 2 / cell.threads
        return {"stand-in": "1"}, (seconds + (1.0 if cell.options != peer.options[1] else 0.5),)

    versions, cells = sweep(peer, spec, 2, measure)
    assert versions == {"stand-in": "1"}
    best = Cell(rollout_batch=12, minibatches=8, threads=2, options=peer.options[1])
    assert min(cells, key=lambda each: each.seconds).cell == best
    assert {each.cell.rollout_batch for each in cells} == {24, 12, 4}
    assert [each.cell for each in cells if each.cell.options] == [replace(best, options=each) for each in peer.options]
    assert len({each.cell for each in cells}) == len(cells)
    assert [*best.arguments()][-2:] == list(peer.options[1])


def sweep_of(directory: Path) -> Sweep:
    cells = (CellTimes(Cell(4, 1, 1), (2.0, 3.0)), CellTimes(Cell(2, 2, 2), (2.0, 2.5)))
    return Sweep({"counted": Swept(fingerprint(directory), "a machine", 2, {"trl": "1"}, cells, Cell(2, 2, 2))})


def test_a_choice_says_when_it_is_not_what_was_swept(tmp_path: Path) -> None:
    found = sweep_of(workload(tmp_path))
    best = choose(found, tmp_path, cores=2)
    assert best.cell == Cell(2, 2, 2)
    assert "since" not in best.origin
    fewer = choose(found, tmp_path, cores=1)
    assert fewer.cell.threads == 1
    assert "with 1 threads instead of 2" in fewer.origin
    assert "has changed since" in choose(found, workload(tmp_path, batch=8), cores=2).origin
    untried = choose(Sweep(), tmp_path, cores=2)
    assert untried.cell == Cell(8, 1, 2)
    assert "was never swept" in untried.origin
    group = choose(Sweep(), workload(tmp_path, batch=8, samples=4), cores=2)
    assert group.cell == Cell(4, 2, 2), "GRPO pads nothing then"


def test_a_workload_is_another_when_the_work_of_a_peer_is(tmp_path: Path) -> None:
    before = fingerprint(workload(tmp_path))
    assert fingerprint(workload(tmp_path, measured=2)) == before
    assert fingerprint(workload(tmp_path, recipe={"models": {"taught": 9}, "chunk": 64})) == before
    assert fingerprint(workload(tmp_path, recipe={"models": {"taught": 7}, "chunk": 32})) != before
    assert fingerprint(workload(tmp_path, epochs=4)) != before


@pytest.mark.parametrize(
    ("peer", "asked", "options"),
    [
        ("", "", "--peer trl-grpo --workload grpo --layout shared --modes serial,chunk,fixed,adaptive"),
        ("PEER=trl", "--modes=chunk --layout split", "--peer trl --workload paper --modes=chunk --layout split"),
        ("PEER=trl", "--workload capped --modes=chunk", "--peer trl --layout shared --workload capped --modes=chunk"),
    ],
)
def test_the_command_of_the_makefile_is_told_each_option_once(peer: str, asked: str, options: str) -> None:
    dry = ["make", "--dry-run", "--no-print-directory", "bench-peer", *filter(None, [peer]), f"BENCH={asked}"]
    commands = subprocess.run(dry, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in commands.splitlines() if "-m benchmarks" in line]
    assert line.split()[1:] == ["-m", "benchmarks", *options.split()]
