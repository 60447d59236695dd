"""What the README and the pages of ``docs/`` show is what happens, and what they name and link to is there."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

import oppo.algorithms
from docs.make_api import PAGE as REFERENCE, SOURCE, page as reference
from oppo import GAE, Graph, GroupRelative, Overcommit, Score, grpo, ppo
from oppo.admission.chunking import Fixed
from oppo.algorithms.base import Roles
from oppo.algorithms.group import RLOO
from oppo.config.load import load_settings
from oppo.data import PromptStream
from oppo.errors import ConfigError, GraphError
from oppo.events import Chunk, Finish, FloatArray, Prompt, Response
from oppo.hf import BridgedReward, ClassifierReward, ProcessRewardModel, SimilarityReward
from oppo.placement import Thread
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)
from oppo.turns import Turn
from oppo.user_code import load_function
from tests.hf import tiny
from tests.hf.as_text.test_whole import classifier, sentence_encoder
from tests.hf.spot_tokenizers import byte_tokenizer, spot
from tests.kit.forked import Program
from tests.kit.workplace import furnish, oppo as oppo_train, records, run as oppo_run, tokenizer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *sorted((ROOT / "benchmarks").rglob("*.md"))]
COMPOSE = ROOT / "docs" / "compose.md"
LINK = re.compile(r"\]\((?!https?://)([^)\s#]*)(?:#([^)\s]+))?\)")
SHOWN = re.compile(r"`((?:tests|oppo|examples|benchmarks|docs)/[\w./]+)`")


def fenced(page: Path, language: str) -> list[str]:
    """Return the blocks of a language, in the order of the page."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for label, block in blocks if label == language]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


def test_the_readme_stays_short() -> None:
    assert len(README.splitlines()) <= 180


def test_the_program_of_the_readme_trains(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?anyio\.run\(main\)\n)```", README, re.DOTALL)
    tiny.causal("llama", seed=1).save_pretrained(tmp_path / "policy")
    tiny.scalar("llama", seed=2).save_pretrained(tmp_path / "reward")
    for name in ("policy", "reward"):
        tokenizer().save_pretrained(tmp_path / name)
    lines = [json.dumps({"prompt": f"w{5 + n} w{9 + n}"}) for n in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    with Program(program, folder=tmp_path) as ran:
        out, said = ran.communicate(timeout=120)
    assert ran.returncode == 0, said
    assert [line.split(":")[0] for line in out.splitlines()] == ["0", "1", "2"]


PUBLIC: dict[str, object] = {name: getattr(oppo, name) for name in oppo.__all__}


def test_the_recipe_of_the_readme_is_the_recipe_and_a_stage_keeps_its_other_options() -> None:
    (recipe,) = re.findall(r"```python\n(g = GraphBuilder.*?)```", README, re.DOTALL)
    (swap,) = re.findall(r"```python\n(graph = graph\.replace.*?)```", README, re.DOTALL)
    policy, reward, critic, trainer = FakePolicy(), FakeScorer(fake_scalar), FakeCritic(), FakeTrainer()
    reference = FakeScorer(fake_per_token)
    models = {"policy": policy, "reference": reference, "reward": reward, "critic": critic, "trainer": trainer}
    names: dict[str, object] = PUBLIC | models | {"replace": replace}
    exec(recipe, names)
    graph = names["graph"]
    assert isinstance(graph, Graph)
    whole = ppo(
        policy=policy,
        reference=reference,
        reward=reward,
        critic=critic,
        trainer=trainer,
        admission=Overcommit(batch=4, overcommit=1),
        advantage=GAE(kl=0.2),
    )
    assert graph.mermaid() == whole.mermaid()
    names["graph"] = whole
    exec(swap, names)
    swapped = names["graph"]
    assert isinstance(swapped, Graph)
    gae = swapped.stage("advantage", GAE)
    assert (gae.lam, gae.kl, gae.gamma) == (1.0, 0.2, 1.0)

    async def main() -> int:
        async with graph.open(prompts(20)) as run:
            return len([step async for step in run.steps(2)])

    assert run_virtual(main) == 2
    with pytest.raises(GraphError, match="stage 'advantage' is GAE, not Score"):
        whole.stage("advantage", Score)
    with pytest.raises(GraphError, match="'gae' cannot be given: the stages are 'generate'"):
        whole.stage("gae", GAE)


def test_the_loop_of_the_readme_is_overlapped() -> None:
    (shown,) = re.findall(r"```python\n(# train_step.*?)```", README, re.DOTALL)
    seen: list[int] = []

    def train_step(tokens: list[object], scores: FloatArray) -> dict[str, float]:
        seen.append(len(tokens))
        return {"loss/policy_avg": float(scores.mean())}

    policy, reward = FakePolicy(length=lambda prompt: 5 + prompt.admission), FakeScorer(fake_scalar)
    actor = torch.nn.Linear(1, 1)
    names: dict[str, object] = {"train_step": train_step, "actor": actor, "policy": policy, "reward": reward}
    exec(shown, names | {"oppo": oppo}, names)
    graph = names["graph"]
    assert isinstance(graph, Graph)

    async def main() -> list[int]:
        async with graph.open(prompts(30)) as run:
            return [len(step.deferred) async for step in run.steps(2)]

    assert run_virtual(main) == [2, 0]
    assert seen == [8, 8]


def test_the_recipe_without_a_critic_is_the_recipe() -> None:
    (recipe,) = fenced(ROOT / "docs" / "algorithms.md", "python")
    policy, reward, reference, trainer = (
        FakePolicy(),
        FakeScorer(fake_scalar),
        FakeScorer(fake_per_token),
        FakeTrainer(),
    )
    models = {"policy": policy, "reference": reference, "reward": reward, "trainer": trainer}
    names: dict[str, object] = PUBLIC | models | {"admission": Overcommit(batch=2, overcommit=1), "chunks": Fixed(8)}
    exec(recipe, names)
    graph = names["graph"]
    assert isinstance(graph, Graph)
    whole = grpo(policy=policy, reward=reward, reference=reference, trainer=trainer, admission=Overcommit(batch=2))
    assert graph.mermaid().splitlines() == whole.mermaid().splitlines()

    async def main() -> list[int]:
        async with graph.open(prompts(20)) as run:
            return [len(step.trained) async for step in run.steps(2)]

    assert run_virtual(main) == [16, 16]


def test_the_settings_of_the_readme_are_settings(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "config.toml").write_text(text)
    assert load_settings(tmp_path / "config.toml").step.overcommit == 2


def test_the_settings_of_the_page_on_rewards_are_settings(tmp_path: Path) -> None:
    base, data = '[models]\npolicy = "actor"\n', '[data]\nprompts = "prompts.jsonl"\n'
    found, answering = [], list[object]()
    for text in fenced(ROOT / "docs" / "rewards.md", "toml"):
        is_whole = "[[rewards]]" in text or "[agents]" in text
        reward = "" if is_whole else '[[rewards]]\nsource = "reward.py:named"\nname = "named"\n'
        (tmp_path / "config.toml").write_text(base + data * ("[data]" not in text) + text + reward)
        settings = load_settings(tmp_path / "config.toml")
        found.append([each.name for each in settings.rewards])
        chosen = settings.environment
        answering.append(chosen.tools or chosen.factory or chosen.source)
    named = ["named"]
    assert found == [["helpful", "short", "judge", "close"], [None], named, named, named, [None], named, [], []]
    called, games = (f"{tmp_path / 'tools.py'}:add",), f"{tmp_path / 'games.py'}:Guessing"
    played = f"{tmp_path / 'game.py'}:play"
    assert answering == ["", "", called, called, games, played, "openenv:http://localhost:8000", "", ""]


def test_the_reward_on_vllm_of_the_page_on_engines_is_settings(tmp_path: Path) -> None:
    base = '[models]\npolicy = "actor"\n[data]\nprompts = "prompts.jsonl"\n'
    (text,) = [text for text in fenced(ROOT / "docs" / "engines.md", "toml") if "[[rewards]]" in text]
    (tmp_path / "config.toml").write_text(base + text)
    (reward,) = load_settings(tmp_path / "config.toml").reward_engines.values()
    assert reward.vllm == {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_on_a_page_is_labelled_so_that_it_is_run(page: Path) -> None:
    for block in fenced(page, ""):
        with pytest.raises(SyntaxError):
            ast.parse(block)


def test_python_m_oppo_is_oppo_and_its_help_says_where_the_settings_are() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "oppo", "train", "--help"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert "docs/settings.md" in ran.stdout


@pytest.mark.parametrize(
    "page", ["docs/compose.md", "docs/engines.md", "docs/rewards.md", "docs/runs.md", "docs/testing.md"]
)
def test_the_blocks_that_stand_alone_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begins = ("import ", "from ", "def ")
    blocks = [block for block in fenced(ROOT / page, "python") if block.startswith(begins)]
    assert blocks
    for block in blocks:
        exec(block, {})


def test_the_tools_of_the_page_are_shown_and_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    policy = byte_tokenizer(
        (ROOT / "tests" / "hf" / "templates" / "qwen3.jinja").read_text(),
        special=("<|im_end|>", "<|im_start|>", "</think>", "<think>"),
    )
    policy.save(tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "2 + 3?"}], "gold": "5"}\n')
    names: dict[str, Any] = {}
    for block in fenced(ROOT / "docs" / "rewards.md", "python"):
        if block.startswith(("def add", "# where a graph is composed", "class Guessing")):
            source = tmp_path / f"{len(names)}.py"
            source.write_text(block)
            exec(compile(block, source, "exec"), names)
    call = '<tool_call>\n{"name": "add", "arguments": {"left": 2, "right": 3}}\n</tool_call><|im_end|>'
    (prompt,) = names["prompts"]
    said = policy.decode_whole(prompt.tokens.tolist())
    assert "Guess. It is below 17.<|im_end|>" in said
    assert '"name": "guess"' in said
    finish = Finish(0, Response.empty(prompt), "eos")
    assert run_virtual(names["game"].reward.finish, [finish]) == [0.0]
    prompt = names["sums"][0]
    assert '"name": "add"' in policy.decode_whole(prompt.tokens.tolist())
    answer = run_virtual(names["tools"].answer, Turn(prompt, 0, np.array(policy.encode_whole(call), np.int32)))
    assert "<tool_response>\n5\n</tool_response>" in policy.decode_whole(answer.tokens.tolist())

    async def solved() -> tuple[Prompt, object, object]:
        async with names["agents"] as agents:
            prompt = await anext(names["tasks"])
            said = np.array(policy.encode_whole("It is 5.<|im_end|>"), np.int32)
            chunk = Chunk(0, 0, said, np.zeros(len(said), np.float32), np.zeros(len(said), np.int32))
            answer = await agents.answer(Turn(prompt, 0, said))
            return prompt, answer, await agents.reward.finish([Finish(0, Response.of(prompt, [chunk]), "eos")])

    async def both() -> None:
        async with names["shared"]:
            prompt, *result = await solved()
            assert result == [None, [1.0]]
            names["agents"] = names["assistants"]
            names["tasks"] = names["agents"].prompts(PromptStream(names["sums"]), max_prompt_tokens=2000)
            assert (await solved())[1:] == (None, [1.0])
            assert "2 + 3?" in policy.decode_whole(prompt.tokens.tolist())
            names["agents"] = names["thinkers"]
            names["tasks"] = names["agents"].prompts(PromptStream(names["sums"]), max_prompt_tokens=2000)
            async with names["claude"]:
                prompt, *result = await solved()
            assert (result, prompt.limit.thinking) == ([None, [1.0]], 200)

    anyio.run(both)


def test_the_reward_models_of_the_page_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    classifier(tmp_path).rename(tmp_path / "cross-encoder")
    sentence_encoder(tmp_path / "sentence-encoder", {"pooling_mode": "mean"})
    tiny.steps().save_pretrained(tmp_path / "process-reward-model")
    config = tiny.CONFIGS["llama"]()
    config.vocab_size, config.num_labels = 420, 1
    tiny.scalar_of(config).save_pretrained(tmp_path / "reward-model")
    spot("byte-level").inner.save_pretrained(tmp_path / "reward-model")
    blocks = [block for block in fenced(ROOT / "docs" / "rewards.md", "python") if "oppo.hf.load_" in block]
    with Thread("scorers") as scorers:
        kinds = (BridgedReward, ClassifierReward, SimilarityReward, ProcessRewardModel)
        for block, kind in zip(blocks, kinds, strict=True):
            names: dict[str, object] = {"oppo": oppo, "tokenizer": spot("byte-level"), "scorers": scorers}
            exec(block, names)
            assert isinstance(names["reward"], kind)


@pytest.fixture
def algorithm(tmp_path: Path) -> Iterator[Path]:
    """Give the folder with the algorithm that the page on composing writes, importable by its name."""
    (file,) = [block for block in fenced(COMPOSE, "python") if block.startswith('"""REINFORCE++')]
    (tmp_path / "reinforce.py").write_text(file)
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))
    sys.modules.pop("reinforce", None)


@pytest.mark.usefixtures("algorithm")
def test_the_algorithm_that_the_page_adds_passes_the_test_that_it_shows() -> None:
    (shown,) = [block for block in fenced(COMPOSE, "python") if block.startswith("# tests/")]
    names: dict[str, object] = {}
    exec(shown, names)
    (test,) = [each for name, each in names.items() if name.startswith("test_")]
    assert callable(test)
    test()


def test_the_algorithm_that_the_page_adds_trains_by_its_file(algorithm: Path) -> None:
    furnish(algorithm)
    code, _, said = oppo_run(algorithm, "step.algorithm=reinforce.py:Reinforce", "algorithm.kl=0.1")
    assert code == 0, said
    steps = records(algorithm, "first", "metrics.jsonl")
    assert [(step["trained"], step["objective/kl_coef"]) for step in steps] == [(4, 0.1), (4, 0.1)]
    assert all(step["loss/policy_avg"] for step in steps)


def test_the_variant_that_the_page_adds_trains_and_bounds_its_advantages(tmp_path: Path) -> None:
    """By its own settings, which the page shows; another bound is another run, and no bound is RLOO's."""
    (file,) = [block for block in fenced(COMPOSE, "python") if "class BoundedAdvantages" in block]
    (settings,) = fenced(COMPOSE, "toml")
    furnish(tmp_path)
    (tmp_path / "bounded.py").write_text(file)
    shown = tomllib.loads(settings)
    given = [f"step.algorithm={shown['step']['algorithm']}", "algorithm.samples=2", "step.batch=2"]
    kinds = {
        "shown": [*given, f"algorithm.bound={shown['algorithm']['bound']}"],
        "tight": [*given, "algorithm.bound=1e-6"],
        "loose": [*given, "algorithm.bound=1e6"],
        "rloo": ["step.algorithm=rloo", *given[1:]],
    }
    losses = {}
    for name, chosen in kinds.items():
        assert oppo_train(tmp_path, "", "run.deterministic=true", f"run.name={name}", *chosen) == 0
        losses[name] = [step["loss/policy_avg"] for step in records(tmp_path, name, "metrics.jsonl")]
    assert losses["loose"] == losses["rloo"]
    assert losses["tight"] != losses["rloo"]
    assert max(map(abs, losses["tight"])) < 1e-4 < max(map(abs, losses["rloo"]))


class Silent:
    async def answer(self, turn: Turn) -> None:
        """End the response."""


def test_the_stage_of_the_variant_that_the_page_adds_keeps_every_setting(tmp_path: Path) -> None:
    (file,) = [block for block in fenced(COMPOSE, "python") if "class BoundedAdvantages" in block]
    (tmp_path / "bounded.py").write_text(file)
    bounded = load_function(f"{tmp_path / 'bounded.py'}:Bounded", ConfigError)
    assert isinstance(bounded, type)
    assert issubclass(bounded, RLOO)
    roles = Roles(
        policy=FakePolicy(),
        reward=FakeScorer(fake_scalar),
        trainer=FakeTrainer(),
        admission=Overcommit(batch=2),
        reference=FakeScorer(fake_per_token),
        teacher=FakeScorer(fake_per_token),
        environment=Silent(),
    )
    objective: dict[str, Any] = {"kl": 0.1, "kl_estimator": "k2", "reward_scale": 2.0, "mask_truncated": True}
    given = {**objective, "distill": 0.5, "credit": "turns", "gamma": 0.9}
    stages = [each(**given).graph(roles).stage("advantage", GroupRelative) for each in (RLOO, bounded)]
    was, found = map(vars, stages)
    assert [name for name, value in vars(GroupRelative()).items() if was[name] == value] == []  # none is its default
    assert found == {**was, "bound": 2.0}


def test_the_loss_that_the_page_adds_trains_by_its_scale(tmp_path: Path) -> None:
    """The ratio is 1 in the first update, and its gradient that of the clipped loss with the same mean."""
    (file,) = [block for block in fenced(COMPOSE, "python") if "class RatioLoss" in block]
    furnish(tmp_path)
    (tmp_path / "ratio.py").write_text(file)
    given = ["run.deterministic=true", "algorithm.samples=2", "step.batch=2"]
    kinds = {
        "clipped": ["step.algorithm=rloo", "algorithm.aggregation=tokens"],
        "ratio": ["step.algorithm=ratio.py:Unclipped"],
        "doubled": ["step.algorithm=ratio.py:Unclipped", "algorithm.scale=2.0"],
    }
    first = {}
    for name, chosen in kinds.items():
        assert oppo_train(tmp_path, "", f"run.name={name}", *given, *chosen) == 0
        first[name], _ = records(tmp_path, name, "metrics.jsonl")
    assert first["ratio"]["policy/ratio_avg"] == pytest.approx(1.0, abs=0.05)
    assert first["ratio"]["train/grad_norm"] == pytest.approx(first["clipped"]["train/grad_norm"], rel=0.05)
    assert first["doubled"]["train/grad_norm"] == pytest.approx(2 * first["ratio"]["train/grad_norm"], rel=0.05)


def test_the_parts_that_the_page_shows_train_by_their_files(tmp_path: Path) -> None:
    furnish(tmp_path)
    blocks = fenced(COMPOSE, "python")
    (recipe,) = [block for block in blocks if "def discounted" in block]
    (admission,) = [block for block in blocks if "class DeferTails" in block]
    (tmp_path / "recipes.py").write_text(recipe)
    (tmp_path / "defer.py").write_text(admission)
    chosen = ("step.algorithm=recipes.py:discounted", "algorithm.gamma=0.9", "step.admission=defer.py:DeferTails")
    assert oppo_train(tmp_path, "", *chosen) == 0
    assert [step["trained"] for step in records(tmp_path, "first", "metrics.jsonl")] == [4, 4]
    assert "gamma = 0.9" in (tmp_path / "runs" / "first" / "config.toml").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_and_links_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace(SOURCE, f"{ROOT}/")
    assert [name for name in sorted(set(SHOWN.findall(text))) if not (ROOT / name).exists()] == []
    links = [(page.parent / to if to else page, anchor) for to, anchor in LINK.findall(text)]
    assert [to for to, _ in links if not to.exists()] == []
    assert [(to.name, anchor) for to, anchor in links if anchor and anchor not in anchors(to)] == []


def test_every_guarantee_has_a_test() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    page = re.sub(r"\n## Pairs of features\n.*?(?=\n## )", "", page, flags=re.DOTALL)
    # Rows of others' reports name tests.
    rows = [line for line in page.splitlines() if "| `" in line and "::" not in line]
    assert len(rows) > 30
    for row in rows:
        behind = row.rsplit(" | ", 1)[1]
        named = SHOWN.findall(behind)
        assert named or "`make test-lowest`" in behind, row
        assert all(Path(name).name.startswith(("test_", "conftest")) for name in named), row


def test_every_page_is_on_the_site_and_in_the_table_of_contents() -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in DOCS}
    assert len([page for page in pages if not page.startswith("api/")]) <= 15
    assert pages == set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
    shown = {to for to, _ in LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))}
    assert {page for page in pages if not page.startswith("api/")} - {"index.md"} == shown - {"api/index.md"}


def test_the_tables_of_the_reference_are_up_to_date() -> None:
    page = reference()
    assert REFERENCE.read_text(encoding="utf-8") == page, "run: python -m docs.make_api"
    assert re.findall(r"^\| \[`(\w+)`\].*\| (?:|Helper class .*)\|$", page, re.MULTILINE) == []  # without a docstring


def test_everything_public_is_in_the_reference() -> None:
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    modules = (name for text in pages for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    assert all(hasattr(oppo, name) for name in oppo.__all__)  # which loads them
    loaded = [sys.modules[name] for name in modules if name in sys.modules]
    shown = {id(getattr(module, name)) for module in loaded for name in getattr(module, "__all__", vars(module))}
    assert not [name for name in oppo.__all__ if id(getattr(oppo, name)) not in shown]


ON_VLLM, JUDGE, SIMILARITY = "04_vllm.py", "05_judge.py", "10_similarity.py"
"""Of the first a test has vLLM, of the second an extra, and of the third, which needs weights, others."""


@pytest.mark.parametrize(
    "example", sorted({path.name for path in (ROOT / "examples").glob("[0-9]*.py")} - {ON_VLLM, JUDGE, SIMILARITY})
)
def test_the_examples_run(example: str) -> None:
    with Program(f"import runpy\nrunpy.run_path({str(ROOT / 'examples' / example)!r}, run_name='__main__')") as ran:
        out, said = ran.communicate(timeout=120)
    assert ran.returncode == 0, said
    assert "step 2" in out


def test_where_there_is_no_vllm_its_example_says_what_to_install() -> None:
    missing = "import runpy, sys\nsys.modules['vllm'] = None\n"
    with Program(f"{missing}runpy.run_path({str(ROOT / 'examples' / ON_VLLM)!r}, run_name='__main__')") as ran:
        _, said = ran.communicate(timeout=120)
    assert ran.returncode == 1
    assert "pip install" in said.strip().splitlines()[-1]
    assert "Traceback" not in said


def test_links_of_the_readme_lead_somewhere_here_and_on_a_package_index() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    source = metadata["project"]["urls"]["Source"]
    shown = README
    for each in metadata["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(each["pattern"], each["replacement"], shown)
    here, there = ([*re.finditer(r"\]\(([^)\s\",]+)\)", text)] for text in (README, shown))
    assert [link for link in here if not link[1].startswith(("http", "#"))]
    assert [link[1] for link in there if not link[1].startswith(("http", "#"))] == []
    assert all(link[1].startswith((source, "https://arxiv.org/")) for link in there)
    assert re.findall(r"```python.*?```", shown, re.DOTALL) == re.findall(r"```python.*?```", README, re.DOTALL)


GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
ELSEWHERE = GUARANTEES.partition("\n## Issue elsewhere, test here\n")[2].partition("\n## ")[0]


@cache
def functions(file: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", GUARANTEES)
    assert [f"{file}::{name}" for file, name in named if name not in functions(file)] == []


def test_every_report_has_a_test_and_is_named_once() -> None:
    rows = [line for line in ELSEWHERE.splitlines() if line.startswith("| [")]
    reports = [re.findall(r"https://github\.com/([\w./-]+/(?:issues|pull)/\d+)", row) for row in rows]
    assert [row for row, found in zip(rows, reports, strict=True) if len(found) != 1 or "::test_" not in row] == []
    assert len({found[0] for found in reports}) == len(rows) >= 25
