"""``docs/architecture.md`` names modules and classes that are there; its journeys follow a value as they say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np

from docs.make_journeys import BEGIN, END, LOSS, PAGE, SCORING, Journey, Tracer, tracing, written
from oppo.events import Prompt
from oppo.graph.channel import Channel
from oppo.returns import whiten
from oppo.stages.ledger import require_prompt

ROOT = PAGE.parents[1]
TEXT = PAGE.read_text(encoding="utf-8")
MADE = TEXT.partition(BEGIN)[2].partition(END)[0]
TOKEN, BESIDE, SETTING, WEIGHTS = written(TEXT)


def classes(module: str) -> set[str]:
    nodes = ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def test_a_value_is_followed_into_functions_and_objects_that_hold_it() -> None:
    tracer = Tracer(lambda value: isinstance(value, np.ndarray) and value.dtype == np.int32)
    prompt = Prompt(0, 0, np.array([1], np.int32))
    with tracing(tracer):
        whiten(np.ones(3, np.float32), np.ones(3, np.bool_))
        assert not tracer.modules
        require_prompt(prompt)
        Channel[Prompt]("prompts", 1).send_nowait(prompt)
    assert list(tracer.modules) == ["oppo/stages/ledger.py", "oppo/graph/channel.py"]
    assert list(tracer.containers) == ["Prompt", "Channel"]


def test_what_a_branch_calls_is_beside_the_way_which_ends_where_it_should() -> None:
    module = "oppo/stages/ledger.py"
    branch = Tracer(lambda value: isinstance(value, Prompt), branch=[module])
    ended = Tracer(lambda value: isinstance(value, Prompt), lambda *at: at == (module, "require_prompt"))
    prompt = Prompt(0, 0, np.array([1], np.int32))
    with tracing(branch, ended):
        require_prompt(prompt)
        Channel[Prompt]("prompts", 1).send_nowait(prompt)
    assert (list(branch.beside)[:1], list(branch.modules)) == ([module], ["oppo/graph/channel.py"])
    assert "oppo/graph/channel.py" not in ended.modules


def test_a_page_is_read_as_it_was_written() -> None:
    found = Journey("a title", ["oppo/events.py", "oppo/models.py"], ["Chunk"])
    assert written(f"{BEGIN}\n{found.text()}{END}") == [{"oppo/events.py", "oppo/models.py"}]


def test_every_module_that_is_named_is_there() -> None:
    named = re.findall(r"`(oppo/[\w/]+(?:\.py)?)/?`", TEXT)
    assert len(named) > 100
    assert [each for each in named if not (ROOT / each).exists()] == []
    rows = [line for line in TEXT.splitlines() if line.startswith("| `oppo/")]
    files = [(Path(each), row) for row in rows for each in re.findall(r"`(\w+\.py)`", row)]
    folders = {row: [".", *re.findall(r"`(oppo/[\w/]+?)/`", row)] for row in rows}
    assert [str(file) for file, row in files if not any((ROOT / each / file).is_file() for each in folders[row])] == []


def test_the_token_passes_the_classes_that_are_named_and_ends_in_the_loss() -> None:
    there = set().union(*map(classes, TOKEN | BESIDE), classes("oppo/events.py"))
    (held,) = re.findall(r"It is held by (.*?)\.\n", MADE, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", held))
    assert named >= {"RolloutBuffer", "Chunk", "Channel", "Batch", "MicroBatch", "Inputs"}
    assert named - there == set()
    assert {LOSS[0], "oppo/hf/train/packing.py", "oppo/losses/terms.py"} <= TOKEN
    assert set(SCORING) <= BESIDE
    assert not TOKEN & BESIDE


def test_the_setting_and_the_weights_end_where_they_are_used() -> None:
    assert {"oppo/config/load.py", "oppo/run/models.py", "oppo/hf/train/optim.py"} <= SETTING
    assert {"oppo/hf/train/trainer.py", "oppo/vllm/async_llm.py"} <= WEIGHTS
