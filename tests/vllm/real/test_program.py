"""``oppo train`` on the real engine: it trains, it ends when it is told to, and no process of it is left."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import pytest

from tests.kit.workplace import records
from tests.vllm.real.conftest import blocks_of, left_behind, require_swept
from tests.vllm.real.program import Program, furnish

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ENGINE = "VLLM::EngineCore"
"""The name of the engine's process; the kernel keeps 15 characters."""

SLOW_SYNC = """
from pathlib import Path
import anyio
from oppo.vllm import VllmEngine
start = VllmEngine.start
def slow(*arguments, **keywords):
    engine = start(*arguments, **keywords)
    finish = engine.llm.finish_weight_update
    async def late(*arguments, **keywords):
        print('weight sync', flush=True)
        while not Path('go on').exists():
            await anyio.sleep(0.05)
        await finish(*arguments, **keywords)
        print('synced', flush=True)
    engine.llm.finish_weight_update = late
    return engine
VllmEngine.start = slow
"""
"""Ends no update before there is a file, and says what it does."""

LONG = ("run.steps=1000", "sampling.max_new_tokens=300", "sampling.min_new_tokens=290")
"""A run that decodes most of the time."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("place"))


def train(place: Path, name: str, *overrides: str, before: str = "") -> Program:
    chosen = (f"run.name={name}", "models.engine=vllm", *overrides)
    arguments = ["train", "config.toml", *(part for each in chosen for part in ("--set", each))]
    return Program(arguments, place, before=before)


def test_a_run_trains_with_stragglers_and_its_engine_keeps_to_its_log(place: Path) -> None:
    before = left_behind()
    with train(place, "first", "run.steps=3") as program:
        program.until("step 1/")
        blocks = blocks_of(program.pids)
        assert program.wait() == 0, program.said
        assert program.leaves_nothing()
    assert blocks, "the engine talks to its processes by shared memory"
    require_swept(before)
    assert not any(block.exists() for block in blocks)
    lines = records(place, "first", "metrics.jsonl")
    assert [line["trained"] for line in lines] == [4, 4, 4]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert abs(line["mismatch/kl_current"]) < 1e-6, "the engine's log-probs are the trainer's"
        assert line["timing_s/decode"] > 0
    assert any(record["event"] == "deferred" for record in records(place, "first", "journal.jsonl"))
    assert "EngineCore" in (place / "runs" / "first" / "vllm.log").read_text()
    assert "INFO" not in program.said
    assert "WARNING" not in program.said


def test_an_argument_that_vllm_does_not_know_is_refused_before_anything_is_loaded(place: Path) -> None:
    with train(place, "wrong", "vllm.max_num_seq=3") as program:
        assert program.wait() == 2
    assert "max_num_seqs" in program.said, "the nearest name"
    assert "loading" not in program.said
    assert not (place / "runs" / "wrong").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["Ctrl-C", "SIGKILL"])
def test_a_signal_while_the_engine_starts_ends_all_of_it(place: Path, number: signal.Signals, code: int) -> None:
    with train(place, f"starting-{number.name}") as program:
        program.until("starting vLLM")
        deadline = time.monotonic() + 60
        while not program.spawned and time.monotonic() < deadline:  # its process has not said its name yet
            time.sleep(0.05)
        if number is signal.SIGINT:
            program.interrupt()
        else:
            program.signal(number)
        assert program.wait() == code, program.said
        assert program.leaves_nothing(60)
    assert code < 0 or "interrupted" in program.said


def test_ctrl_c_while_it_decodes_ends_after_the_step_and_the_run_goes_on_later(place: Path) -> None:
    with train(place, "decoding", *LONG) as program:
        program.until("step 1/")
        program.interrupt()
        assert program.wait() == 130, program.said
        assert program.leaves_nothing()
    assert "ending after this step" in program.said
    made = len(records(place, "decoding", "metrics.jsonl"))
    assert made >= 2
    with Program(["resume", "runs/decoding", "--set", f"run.steps={made + 1}"], place) as program:
        assert program.wait() == 0, program.said
        assert program.leaves_nothing()
    assert len(records(place, "decoding", "metrics.jsonl")) == made + 1


def test_sigterm_and_then_ctrl_c_while_it_decodes_end_it_at_once(place: Path) -> None:
    with train(place, "twice", *LONG, "step.batch=64") as program:
        program.until("step 1/")
        program.signal(signal.SIGTERM)
        program.until("ending after this step")
        program.interrupt()
        assert program.wait() == 128 + signal.SIGTERM, program.said
        assert program.leaves_nothing()
    assert "Traceback" not in program.said


def test_ctrl_c_twice_while_weights_are_synced_ends_it_when_the_engine_has_them(place: Path) -> None:
    with train(place, "sent", "run.steps=1000", before=SLOW_SYNC) as program:
        program.until("weight sync")
        program.interrupt()
        program.until("ending after this step")
        program.interrupt()
        (place / "go on").touch()
        assert program.wait() == 130, program.said
        assert program.leaves_nothing()
    assert program.said.count("weight sync") == program.said.count("synced") == 1
    assert "Traceback" not in program.said


def test_a_killed_run_takes_its_engine_with_it(place: Path) -> None:
    before = left_behind()
    with train(place, "gone", *LONG) as program:
        program.until("step 1/")
        assert len(program.pids) > 1
        blocks = blocks_of(program.pids)
        program.signal(signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL
        assert program.leaves_nothing()
    require_swept(before)
    assert blocks
    assert not any(block.exists() for block in blocks)


def test_a_killed_engine_is_a_lost_model_and_the_run_goes_on_from_its_checkpoint(place: Path) -> None:
    with train(place, "killed", "run.steps=1000", "run.checkpoint_every=1") as program:
        program.until("step 2/")
        (engine,) = [pid for pid, name in program.pids.items() if name == ENGINE[:15]]
        os.kill(engine, signal.SIGKILL)
        assert program.wait(30) == 1, program.said
        assert program.leaves_nothing()
    log = records(place, "killed", "log.jsonl")
    assert log[-1]["exception"][0]["exc_type"] == "ModelLost"
    assert "oppo resume" in program.said
    made = len(records(place, "killed", "metrics.jsonl"))
    with Program(["resume", "runs/killed", "--set", f"run.steps={made + 1}"], place) as program:
        assert program.wait() == 0, program.said
        assert program.leaves_nothing()
    lines = records(place, "killed", "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))


def test_replicas_are_servers_of_the_run_which_outlives_one_of_them(place: Path) -> None:
    with train(place, "two", *LONG[1:], "run.steps=4", "placement.policy_replicas=2") as program:
        program.until("step 1/")
        engines = [pid for pid, name in program.pids.items() if name == ENGINE[:15]]
        assert len(engines) == 2
        os.kill(engines[0], signal.SIGKILL)
        assert program.wait() == 0, program.said
        assert program.leaves_nothing()
    assert "of the pool is lost" in program.said
    assert [line["trained"] for line in records(place, "two", "metrics.jsonl")] == [4, 4, 4, 4]
    assert "EngineCore" in (place / "runs" / "two" / "vllm.log").read_text()
