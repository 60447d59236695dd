"""The settings files of tiny models, run short: what each is for happens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import cast

import pytest
from safetensors.torch import load_file

from examples.tiny import make_models
from oppo import Batch
from oppo.errors import OppoError
from oppo.events import IntArray, ToolTokens
from oppo.observe import Observer
from oppo.run.train import train
from tests.kit.forked import Program
from tests.kit.workplace import read_lines


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "tiny"
    shutil.copytree(Path(make_models.__file__).parent, folder, ignore=shutil.ignore_patterns("made"))
    make_models.main(folder / "made")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "tiny", ignore=shutil.ignore_patterns("runs"))


class Batches(Observer):
    """Keeps the batches that are trained."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        if isinstance(item, Batch):
            self.batches.append(item)


def run(file: Path, *settings: str, seen: Sequence[Observer] = ()) -> Path:
    few = [f"run.directory={file.parent / 'runs'}", "run.panel=off", "run.cores=1", "run.checkpoint_every=0"]
    return train(file, [*few, *settings], observers=seen).path


def apart(file: Path, *settings: str) -> None:
    """Run in a process of its own, with which the clients of its agents end."""
    few = [f"run.directory={file.parent / 'runs'}", "run.panel=off", "run.checkpoint_every=0", *settings]
    arguments = ["train", str(file), *(f"--set={each}" for each in few)]
    with Program("import sys\nfrom oppo.cli import main\nsys.exit(main())", arguments) as process:
        _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said


def scores(path: Path) -> list[float]:
    return [step["reward"] for step in read_lines(path / "metrics.jsonl")]


def test_a_model_learns_answers_that_only_its_teacher_is_shown(folder: Path) -> None:
    learned = [step["objective/scores"] for step in read_lines(run(folder / "self_teacher.toml") / "metrics.jsonl")]
    assert mean(learned[:2]) < 0.3
    assert mean(learned[-5:]) > 0.8


def test_two_players_train_and_meet_the_model_as_it_was(folder: Path) -> None:
    apart(folder / "two_players.toml", "run.steps=3", "step.batch=8", "eval.every=3", "eval.samples=2")
    path = folder / "runs" / "two-players"
    for step in read_lines(path / "metrics.jsonl"):
        assert step["rewards/first/mean"] == -step["rewards/second/mean"]
        assert step["agents/conversations"] == 2
        assert "rewards/initial/mean" not in step
        assert -1 < step["objective/baseline/first"] < 1
    for evaluated in read_lines(path / "eval.jsonl"):
        assert evaluated["eval/agents/conversations"] == 1
        assert evaluated["eval/score"] == -evaluated["eval/rewards/initial/mean"]


def test_credit_by_turn_learns_sooner_than_by_response(folder: Path) -> None:
    turns = scores(run(folder / "turns.toml", "run.steps=10"))
    by_response = ["algorithm.credit=response", "algorithm.gamma=1.0", "run.name=by-response"]
    assert sum(turns[4:]) > 1.5 * sum(scores(run(folder / "turns.toml", "run.steps=10", *by_response))[4:])


@pytest.fixture(scope="module")
def tools(made: Path) -> tuple[Path, Batch]:
    """Return the run of a step with compaction, tools by row and Muon, and its batch."""
    trained = Batches()
    path = run(made / "tools.toml", "run.steps=1", "step.batch=4", "trainer.minibatches=1", seen=[trained])
    (batch,) = trained.batches
    return path, batch


def test_a_summary_is_trained_and_begins_the_next_segment(tools: tuple[Path, Batch]) -> None:
    _, batch = tools
    tokenizer = make_models.make_tokenizer(make_models.WORDS, make_models.MARKS)

    def decode(tokens: IntArray) -> str:
        return str(tokenizer.decode(tokens.tolist()))

    segments = {response.prompt.rollout: response for response in batch.responses}
    summaries = 0
    for rollout, second in segments.items():
        if not second.prompt.branch:
            continue
        first = segments[rollout % 2**32]
        asked = decode(first.prompt.tokens).removesuffix("?")
        (tool,) = cast("list[str]", first.prompt.columns["tools"])
        assert asked.startswith(tool)
        tool_says = [decode(piece.tokens) for piece in first.pieces() if isinstance(piece, ToolTokens)]
        said = decode(first.tokens).partition("?summary?")[2]
        assert tool_says[0].endswith("?summary?")
        if (summary := said.removesuffix(".")).isdigit():
            assert first.sampled[-len(summary) :].all()
            assert decode(second.prompt.tokens) == f"{asked}summary{summary}?"
            summaries += 1
    assert summaries > len(segments) / 4


def test_muon_trains_the_matrices_of_layers_and_adamw_the_rest(made: Path, tools: tuple[Path, Batch]) -> None:
    path, _ = tools
    before, after = (
        load_file(at / "model.safetensors") for at in (made / "made" / "reader", path / "checkpoints/final/actor")
    )
    for name, weights in before.items():
        moved = (after[name] - weights).abs()
        moved = moved[moved > 0]
        as_far = (moved > 0.8 * moved.max()).float().mean()  # AdamW's first update moves all as far, by its rate
        assert (as_far < 0.1) == (weights.ndim == 2 and ".layers." in name), name


@pytest.mark.timeout(600)
def test_an_agent_trains_the_same_over_three_apis_within_its_limits(folder: Path) -> None:
    rows, told = read_lines(folder / "made" / "agent.jsonl"), list[tuple[object, bytes]]()
    for api in ("chat completions", "responses", "messages"):
        (folder / "own.jsonl").write_text("\n".join(json.dumps(row) for row in rows if row["api"] == api))
        apart(folder / "agent.toml", "run.steps=1", "run.deterministic=true", "step.batch=4", "data.prompts=own.jsonl")
        path = folder / "runs" / "agent"
        samples = read_lines(path / "samples.jsonl")
        told.append((samples, (path / "checkpoints" / "final" / "actor" / "model.safetensors").read_bytes()))
        shutil.rmtree(path)
    assert told[0] == told[1] == told[2]
    parts = [part for sample in samples for part in sample.get("parts", ())]
    assert {"by": "tool", "text": ""} in parts  # the mark that ends its thinking, which no policy said
    tokenizer = make_models.make_tokenizer(make_models.WORDS, make_models.MARKS)
    assert max(len(tokenizer.encode(part["text"])) for part in parts if part["by"] == "policy") <= 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["environment.summary_token=3"], "did you mean 'summary_tokens'"),
        (["environment.summary_tokens=12"], "lower environment.compact or environment.summary_tokens"),
        (["environment.tools_column=tool"], "did you mean 'tools'"),
    ],
)
def test_what_is_set_wrongly_is_refused_by_its_name(folder: Path, settings: list[str], words: str) -> None:
    with pytest.raises(OppoError, match=words):
        run(folder / "tools.toml", *settings)
