"""The command line end to end, on tiny models made on the spot."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import tomllib
from pathlib import Path

import anyio
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaModel

from oppo.cli import main
from oppo.config.load import load_settings
from oppo.hf.devices import available_cores
from oppo.hf.weights import weights_digest
from oppo.report import story
from oppo.run.train import prepare, run as train
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo, records, start, tokenizer


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy, a reward model, a reward function and prompts."""
    folder = furnish(tmp_path_factory.mktemp("workplace"))
    tiny.scalar("llama", seed=2).save_pretrained(folder / "foreign")
    tokenizer(shifted=True).save_pretrained(folder / "foreign")
    return folder


def test_training_leaves_a_run_directory_and_loadable_models(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(workplace, "") == 0
    printed = capsys.readouterr()
    assert [line.split("  ")[0] for line in printed.out.splitlines()[:2]] == ["step 1/2", "step 2/2"]
    run = workplace / "runs" / "first"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(each["step"], each["version"], each["trained"]) for each in lines] == [(1, 1, 4), (2, 2, 4)]
    wanted = ("objective/kl", "policy/approxkl_avg", "loss/value_avg", "response_length/mean", "timing_s/update")
    assert all(name in lines[0] for name in (*wanted, "overlap/hidden_fraction", "staleness/mean"))
    trained = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    carried = next(entry["rollout"] for entry in trained if entry["event"] == "deferred")
    assert story(run / "journal.jsonl", carried)[0]["event"] == "admitted"
    assert tomllib.loads((run / "config.toml").read_text())["models"]["reference"] == str(workplace / "actor")
    events = json.loads((run / "trace.json").read_text())
    tracks = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert {"policy", "reference", "reward model", "critic", "trainer", "generate", "update"} <= tracks
    final = run / "checkpoints" / "final"
    actor = AutoModelForCausalLM.from_pretrained(final / "actor")
    AutoModelForSequenceClassification.from_pretrained(final / "critic")
    assert AutoTokenizer.from_pretrained(final / "actor").get_vocab() == tokenizer().get_vocab()
    assert weights_digest(actor) != weights_digest(tiny.causal("llama", seed=1))


@pytest.mark.parametrize("command", ["", "--dry-run"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.name=used", "is already used (it holds precious)"),
        ("run.name=precious", "precious: Not a directory; choose another run.directory"),
        ("run.directory=runs/used/precious/runs", "precious: Not a directory; choose another run.directory"),
        ("run.directory=/proc", "cannot be used: /proc: "),
        ("run.name=full", "full: File too large; choose another run.directory"),
    ],
)
def test_a_directory_that_a_run_cannot_have_is_refused_before_anything_is_loaded_also_by_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, override: str, message: str
) -> None:
    furnish(tmp_path)
    for folder in ("used", "full"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
    (tmp_path / "runs" / "used" / "precious").write_text("")
    (tmp_path / "runs" / "precious").write_text("")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if override == "run.name=full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        assert oppo(tmp_path, command, override) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert message in said
    assert "loading" not in said


@pytest.mark.parametrize(
    ("epochs", "then"), [(0, "a step trains a prompt several"), (1, "the one step of an epoch is")]
)
def test_fewer_prompts_than_a_batch_are_counted_and_said(
    workplace: Path, capsys: pytest.CaptureFixture[str], epochs: int, then: str
) -> None:
    assert oppo(workplace, "--dry-run", "run.name=few", "step.batch=32", f"data.epochs={epochs}") == 0
    assert f"data.prompts has 20 prompts, fewer than step.batch = 32, so {then}" in capsys.readouterr().err


def test_a_run_whose_data_ends_before_its_steps_says_so_before_and_after(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("run.name=short", "run.steps=9", "data.epochs=1", "step.batch=8", "trainer.schedule=linear")
    assert oppo(workplace, "--dry-run", *short) == 0
    said = capsys.readouterr().err
    assert "the data lasts for 3 of 9 steps" in said
    assert "fewer than step.batch" not in said
    assert "learning-rate schedule end after these" in said
    assert "set run.steps = 3, or raise data.epochs from 1" in said
    assert oppo(workplace, "", *short) == 0
    printed = capsys.readouterr()
    assert "the data lasts for 3 of 9 steps" in printed.err
    assert "done after 3 of 9 steps, with the end of the data: " in printed.out
    assert [record["trained"] for record in records(workplace, "short", "metrics.jsonl")] == [8, 8, 4]
    rates = [record["lr"] for record in records(workplace, "short", "metrics.jsonl")]
    assert rates == pytest.approx([rates[0], rates[0] * 2 / 3, rates[0] / 3]), "the next update would have had 0"
    assert {"event": "data ended", "steps": 3, "wanted": 9}.items() <= records(workplace, "short", "log.jsonl")[
        -2
    ].items()


def test_a_reward_that_is_no_number_ends_the_run_and_saves_it(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(workplace, "", "rewards.0.source=reward.py:tiring", "run.name=tiring") == 1
    said = capsys.readouterr().err
    assert "reward function 'tiring' must return a finite number" in said
    assert "in stage 'reward' of graph 'ppo', step 2" in said
    final = workplace / "runs" / "tiring" / "checkpoints" / "final" / "actor"
    learned = weights_digest(AutoModelForCausalLM.from_pretrained(final))
    assert learned != weights_digest(tiny.causal("llama", seed=1))
    assert (workplace / "runs" / "tiring" / "report.html").exists()


def test_ctrl_c_during_the_last_step_ends_a_run_that_is_done(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(workplace, "", "rewards.0.source=reward.py:pressing", "run.name=pressed", "run.steps=1") == 0
    assert "interrupted" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scorers", "trainer"),
    [
        ("thread", "thread"),
        pytest.param("process", "thread", marks=pytest.mark.deep),
        pytest.param("thread", "process", marks=pytest.mark.deep),
    ],
)
def test_ctrl_c_saves_what_was_learned(workplace: Path, scorers: str, trainer: str) -> None:
    name = f"stopped-{scorers}-{trainer}"
    places = (f"run.scorers={scorers}", f"run.trainer={trainer}")
    with start(workplace, f"run.name={name}", "run.steps=100000", *places) as process:
        assert process.stdout.readline().startswith("step 1/100000")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == (scorers, trainer).count("process")
        for pid in (*map(int, children), process.pid):  # as the terminal does
            os.kill(pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
    run = workplace / "runs" / name
    assert process.returncode == 130, said
    assert f"interrupted; what was learned is in {run / 'checkpoints' / 'final'}" in said
    assert "Traceback" not in said
    actor = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "final" / "actor")
    assert weights_digest(actor) != weights_digest(tiny.causal("llama", seed=1))
    assert (run / "report.html").exists()


def test_each_model_works_in_one_thread_for_life_with_its_own_share_of_the_cores(workplace: Path) -> None:
    seen: dict[int, set[tuple[str, int]]] = {}

    def note(module: nn.Module, inputs: object) -> None:
        if isinstance(module, LlamaModel):
            seen.setdefault(id(module), set()).add((threading.current_thread().name, torch.get_num_threads()))

    settings = load_settings(workplace / "config.toml", ["run.name=threads", "run.cores=3", "run.scorers=thread"])
    with prepare(settings) as session:
        hook = register_module_forward_pre_hook(note)
        try:
            anyio.run(train, session, Console(quiet=True))
        finally:
            hook.remove()
    trained, scored = ("oppo-trainer_0", 3), ("oppo-scorers_0", 2)
    frozen = {scored}
    assert sorted(map(sorted, seen.values())) == sorted(
        map(sorted, [{("oppo-actor_0", 1), trained}, {scored, trained}, frozen, frozen])
    )


def test_more_cores_than_there_are_is_said(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oppo(workplace, "--dry-run", "run.name=wide", "run.cores=1000", "run.scorers=thread") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"run.cores = 1000 is more than the {available_cores()} that this process may use" in said


@pytest.mark.parametrize("arguments", ["--help", "--version", "train --help"])
def test_help_and_version_need_nothing(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 0
    assert capsys.readouterr().out


def test_a_mistyped_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "trian" in capsys.readouterr().err
