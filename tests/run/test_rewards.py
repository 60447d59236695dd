"""``oppo train`` with rewards: models of every kind, functions, judges and scorers of a file, alone and together."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import torch

from oppo.cli import DONE, UNUSABLE, main
from oppo.config.load import load_settings
from oppo.errors import ConfigError
from oppo.run.checkpoint import settings_of
from oppo.run.deployment import Deployment
from oppo.run.memory import expected
from tests.config.test_refusals import entries
from tests.hf import tiny
from tests.hf.as_text.test_whole import classifier, sentence_encoder
from tests.hf.spot_tokenizers import TEMPLATE, spot
from tests.kit.workplace import furnish, oppo, records, tokenizer

JUDGES = """
import os
from oppo import Drop
from oppo.testing import FakeScorer

def short(prompts, completions):
    return [-len(each.split()) / 10 if len(each.split()) > 2 else None for each in completions]

def picky(prompts, completions, goal):
    return [Drop.because("no goal") if each % 3 == 0 else 1.0 for each in goal]

def apart(prompts, completions):
    return [float(os.getpid()) for _ in completions]

async def here(prompts, completions):
    return [float(os.getpid()) for _ in completions]

class Core:
    def score(self, lengths):
        return [float(each) for each in lengths]

class Longest(FakeScorer):
    def __init__(self, place):
        super().__init__(None)
        self.hosted = place.host(Core)

    async def finish(self, finished):
        return await self.hosted.call("score", Core.score, [len(each.response) for each in finished])
"""


def lines(workplace: Path, name: str) -> list[dict[str, float]]:
    steps = records(workplace, name, "metrics.jsonl")
    return [{k: float(v) for k, v in each.items() if isinstance(v, int | float)} for each in steps]


class Grader(BaseHTTPRequestHandler):
    """Answers as a chat model that counts the letters of what it is asked, and has no answer to multiples of three.

    Attributes:
        questions: and the keys that came with them.
    """

    questions: ClassVar[list[tuple[str, str]]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        self.questions.append((asked, self.headers["Authorization"]))
        content = f"grade: {len(asked)}" if len(asked) % 3 else "I cannot say."
        body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def service() -> Iterator[str]:
    Grader.questions.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Grader) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_judge_grades_each_response_and_one_without_a_grade_is_dropped(
    workplace: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    judge = f'source="{service}", model="grader", template="{{prompt}}|{{response}}", api_key_env="JUDGE_KEY"'
    parts = (f'rewards=[{{{judge}, on_failure="drop"}}]', "run.name=judged", "run.steps=2", "run.panel=off")
    assert oppo(workplace, "", *parts) == DONE
    assert {key for _, key in Grader.questions} == {"Bearer k"}
    assert all("|" in asked for asked, _ in Grader.questions)
    for step in lines(workplace, "judged"):
        assert step["objective/scores"] > 1
    without = {asked for asked, _ in Grader.questions if len(asked) % 3 == 0}
    assert sum(step["deferral/dropped"] for step in lines(workplace, "judged")) == len(without) > 0


@pytest.mark.parametrize("choice", ["drop", "skip"])
def test_a_part_drops_a_rollout_or_leaves_it_to_the_others(workplace: Path, choice: str) -> None:
    parts = (
        'rewards=[{name="picky", source="judges.py:picky"}, {name="model", source="reward"}]',
        f"rewards.0.on_drop={choice}",
        f"run.name={choice}",
        "run.panel=off",
    )
    assert oppo(workplace, "", *parts) == DONE
    journal = records(workplace, choice, "journal.jsonl")
    reasons = {line["reason"] for line in journal if line["event"] == "dropped"}
    assert reasons == ({"picky: no goal"} if choice == "drop" else set())
    shares = [step["rewards/picky/share"] for step in lines(workplace, choice)]
    assert (statistics.mean(shares) < 1) is (choice == "skip")


def test_a_part_has_settings_of_its_own(workplace: Path) -> None:
    import os

    parts = (
        'rewards=[{name="apart", source="judges.py:apart"}, {name="here", source="judges.py:here"}]',
        'rewards.2={name="asked", source="judges.py:apart"}',
        "rewards.0.process=true",
        'rewards.1.process="sync"',
        "run.name=apart",
        "run.panel=off",
    )
    assert oppo(workplace, "", *parts) == DONE
    for step in lines(workplace, "apart"):
        assert step["rewards/here/mean"] == step["rewards/asked/mean"] == os.getpid()
        assert step["rewards/apart/mean"] != os.getpid()


def test_a_scorer_of_a_file_works_in_the_place_of_the_scorers(workplace: Path) -> None:
    parts = 'rewards=[{name="longest", source="judges.py:Longest"}, {name="model", source="reward"}]'
    assert oppo(workplace, "", parts, "run.scorers=process", "run.name=placed") == DONE
    trace = json.loads((workplace / "runs" / "placed" / "trace.json").read_text())
    assert "reward" in {each["args"]["name"] for each in trace if each["name"] == "thread_name"}


def test_what_may_change_when_a_run_is_resumed_may_change_for_one_of_several_rewards(workplace: Path) -> None:
    several = (
        'rewards=[{name="picky", source="judges.py:picky"}, {name="model", source="reward"}]',
        "rewards.0.on_drop=skip",
    )
    assert oppo(workplace, "", *several, "run.name=resumed", "run.checkpoint_every=1", "run.panel=off") == DONE
    run = workplace / "runs" / "resumed"
    longer = ["--set", "run.steps=3", "--set", "rewards.0.timeout=60"]
    assert main(["resume", str(run), *longer]) == DONE
    for changed in (
        "rewards.0.weight=3",
        "rewards.2={name='new', source='reward'}",
        "rewards.0.source=judges.py:short",
    ):
        with pytest.raises(ConfigError, match=r"rewards\S* cannot change when a run is resumed"):
            settings_of(run, [changed])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = furnish(tmp_path_factory.mktemp("workplace"))
    config = tiny.CONFIGS["llama"]()
    config.vocab_size, config.num_labels = 420, 1
    for name, template in (("other", ""), ("chatty", TEMPLATE)):
        tiny.scalar_of(config).save_pretrained(folder / name)
        spot("byte-level", template).inner.save_pretrained(folder / name)
    tiny.steps().save_pretrained(folder / "steps")
    tokenizer().save_pretrained(folder / "steps")
    tiny.steps().save_pretrained(folder / "foreign-steps")
    tokenizer(shifted=True).save_pretrained(folder / "foreign-steps")
    (folder / "judges.py").write_text(JUDGES)
    classifier(folder)
    classifier(folder / "several", labels=("bad", "good"))
    sentence_encoder(folder / "encoder", {"pooling_mode": "mean"})
    return folder


def run(workplace: Path, name: str, *overrides: str) -> list[dict[str, object]]:
    """Train two steps; return the metrics, all of which are finite."""
    assert oppo(workplace, "", f"run.name={name}", *overrides) == 0
    lines = records(workplace, name, "metrics.jsonl")
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert [line["trained"] for line in lines] == [4, 4]
    return lines


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("other", (), "while they grow, the prompt and then the response"),
        ("chatty", ("rewards.0.form=response", "run.scorers=process"), "while they grow, the response alone"),
        ("reward", ("rewards.0.form=joined",), "is to read text: it reads rollouts as text while they grow"),
        ("several/bert", ("rewards.0.label=good",), "scores whole responses as text, prompt and response as two segm"),
        ("chatty", ("rewards.0.reading=whole",), "scores whole responses as text, prompt and response by its own"),
        ("encoder", ("rewards.0.column=prompt",), "(BertModel) scores responses by their similarity to column"),
        ("steps", ("rewards.0.separators=['3', '5']",), "rewards steps: it scores the last token of a response, and"),
    ],
)
def test_a_reward_model_of_any_kind_is_found_by_its_directory_and_said(
    workplace: Path, capsys: pytest.CaptureFixture[str], name: str, overrides: tuple[str, ...], words: str
) -> None:
    label = f"kind-{len([*workplace.glob('runs/kind-*')])}"
    lines = run(workplace, label, f"rewards.0.source={name}", *overrides)
    said = capsys.readouterr().err
    assert f"rewards.0: {workplace / name} " in said
    assert words in said
    assert ("bridge/tail_tokens" in lines[0]) is ("while they grow" in words)
    begins_anew = "which starts from the policy instead" in said
    assert begins_anew is (name != "reward" or bool(overrides))


@pytest.mark.parametrize(
    ("closing", "overrides", "warned"),
    [
        ("</s> w5", (), True),
        ("", (), True),
        ("</s>", (), False),
        ("{{ raise_exception('no') }}", (), False),
        ("</s> w5", ("rewards.0.form=tokens",), False),
        ("</s> w5", ("rewards.0.form=chat",), False),
    ],
)
def test_where_a_template_ends_otherwise_than_a_response_a_line_says_which_form_reads_it(
    workplace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    closing: str,
    overrides: tuple[str, ...],
    *,
    warned: bool,
) -> None:
    """As TRL's RewardTrainer trains on conversations: with what follows the end of a turn."""
    tiny.scalar("llama", seed=2).save_pretrained(tmp_path)
    reader = tokenizer()
    reader.chat_template = "{% for message in messages %}{{ message.content }}" + closing + "{% endfor %}"
    reader.save_pretrained(tmp_path)
    assert oppo(workplace, "--dry-run", f"rewards.0.source={tmp_path}", *overrides) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert ("set rewards.0.form = 'chat'" in said) is warned
    assert (f"where its chat template writes {closing!r}" in said) is warned


def test_a_run_is_the_same_bit_for_bit_when_a_bridged_model_reads_in_a_process(workplace: Path) -> None:
    from oppo.hf.loading import load_causal
    from oppo.hf.weights import weights_digest

    digests = []
    for place in ("thread", "process"):
        run(
            workplace,
            f"exact-{place}",
            "rewards.0.source=chatty",
            "run.deterministic=true",
            f"run.scorers={place}",
            "run.cores=2",
        )
        digests.append(weights_digest(load_causal(workplace / "runs" / f"exact-{place}" / "checkpoints/final/actor")))
    assert digests[0] == digests[1]


def test_a_column_without_text_ends_the_run_with_its_rollout(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(workplace, "", "run.name=number", "rewards.0.source=encoder", "rewards.0.column=goal") == 1
    assert "expected the text to compare a response with, or a list of texts" in capsys.readouterr().err


EVERY_KIND = """rewards=[
    {name="plain", source="reward"},
    {name="bridged", source="chatty", weight=0.5},
    {name="stepwise", source="steps", separators=["3", "5"]},
    {name="judged", source="several/bert", label="good", over_long="truncate"},
    {name="alike", source="encoder", column="prompt"},
    {name="short", source="reward.py:short", weight=0.1}]"""


def test_every_kind_is_one_of_several_rewards(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(workplace, "every-kind", EVERY_KIND.replace("\n", " "))
    said = capsys.readouterr().err
    for message in (
        f"rewards.1: {workplace / 'chatty'} ",
        f"rewards.2: {workplace / 'steps'} rewards steps",
        f"rewards.3: {workplace / 'several/bert'} (BertForSequenceClassification) scores whole responses",
        f"rewards.4: {workplace / 'encoder'} (BertModel) scores responses by their similarity",
    ):
        assert message in said
    trace = json.loads((workplace / "runs" / "every-kind" / "trace.json").read_text())
    assert "reward model 'plain'" in {each["args"]["name"] for each in trace if each["name"] == "thread_name"}
    weights = {"plain": 1, "bridged": 0.5, "stepwise": 1, "judged": 1, "alike": 1, "short": 0.1}
    for line in lines:
        step = {name: value for name, value in line.items() if isinstance(value, int | float)}
        assert all(step[f"rewards/{name}/share"] == 1 for name in weights)
        expected = sum(weight * step[f"rewards/{name}/mean"] for name, weight in weights.items())
        assert step["objective/scores"] == pytest.approx(expected, abs=1e-4)
        assert "bridge/tail_tokens" in step


def test_a_critic_starts_from_the_first_reward_model_that_can_be_one(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(workplace, "critic", 'rewards=[{name="judged", source="bert"}, {name="plain", source="reward"}]')
    said = capsys.readouterr().err
    assert f"so it cannot be a critic, which starts from {workplace / 'reward'} instead" in said
    assert f"loading the critic {workplace / 'reward'}" in said


def test_the_doctor_knows_what_reward_models_of_every_kind_need(workplace: Path) -> None:
    settings = load_settings(workplace / "config.toml", [EVERY_KIND.replace("\n", " ")])
    deployment = Deployment.of(settings)
    worst = {each.model: each.bytes for each in expected(deployment, deployment.load(6))}
    names = ["plain", "bridged", "stepwise", "judged", "alike"]
    assert [name for name in worst if name.startswith("reward.")] == [f"reward.{name}" for name in names]
    assert all(worst[f"reward.{name}"].weights > 0 for name in names)
    assert all(worst[f"reward.{name}"].keys_values > 0 for name in names[:3])


def test_the_doctor_knows_what_the_critic_starts_from(workplace: Path) -> None:
    parts = 'rewards=[{name="judged", source="bert"}, {name="plain", source="reward"}]'
    settings, alone = load_settings(workplace / "config.toml", [parts]), load_settings(workplace / "config.toml")
    found = [expected(Deployment.of(each), None) for each in (settings, alone)]
    critics = [each.bytes.weights for needs in found for each in needs if each.model == "critic"]
    assert critics[0] == critics[1] > 0


REFUSED = entries("""
rewards.0.source=encoder | rewards.0 | is a sentence encoder | set rewards.0.column
rewards.0.source=bert rewards.0.column=goal | rewards.0.column = 'goal' | is no sentence encoder | leave it out
rewards.0.source=bert rewards.0.form=tokens | reads whole responses as text | rewards.0.form cannot be 'tokens'
rewards.0.source=bert rewards.0.form=chat | rewards.0 | no chat template | joined, pair or response
rewards.0.source=several/bert | labels bad, good | see rewards.0.label
rewards.0.source=steps rewards.0.separators=['nowhere'] | rewards.0.separators: no token of the policy's | nowhere
rewards.0.source=foreign-steps rewards.0.separators=['3'] | does not share the policy's tokenizer | file.py:function
rewards=[{name='a',source='chatty'},{name='b',source='chatty',form='pair'}] | no pair | set rewards.1.reading = 'whole'
rewards.0.source=steps rewards.0.separators=[3] | rewards.0.separators: expected item 0
rewards.0.reading=never | rewards.0.reading: expected 'auto'
rewards.0.source=reasoning-gym rewards.0.form=chat | unknown key 'rewards.0.form'
rewards=[{name='first',source='reward'},{name='second',source='nowhere/at-all',weight=0.5}] | rewards.1:
JUDGE rewards.0.template="{answer}" | rewards.0 asks a judge about 'answer', which is no column of the data
JUDGE rewards.0.template="{" | rewards.0: a judge's template has a brace that is no field
JUDGE rewards.0.template=x rewards.0.api_key_env=canary | rewards.0: api_key_env: expected the name of an environment
JUDGE rewards.0.template=x rewards.0.score=best | rewards.0.score: expected 'number', 'regex:PATTERN', 'json:FIELD'
JUDGE rewards.0.template=x rewards.0.process=true |
    unknown key 'rewards.0.process' (it is a key of a reward whose source is a function)
rewards=[{name="a",source="judges.py:here",process=true}] | 'here' is async, and a process of its own is
rewards=['math'] | asks for 'answer', which is no column of the data
rewards=['gsm8k'] | asks for 'answer', which is no column of the data
rewards=['code'] | asks for 'tests', which is no column of the data
""")


@pytest.mark.parametrize(("chosen", "words"), [(chosen, words) for chosen, *words in REFUSED])
def test_a_reward_that_cannot_be_had_is_refused_by_its_key(
    workplace: Path, capsys: pytest.CaptureFixture[str], chosen: str, words: list[str]
) -> None:
    judge = 'rewards=[{source="http://127.0.0.1:1/v1",model="grader"}]'
    settings = chosen.replace("JUDGE", judge).split(" ")
    assert oppo(workplace, "--dry-run", "run.name=refused", *settings) == UNUSABLE
    said = capsys.readouterr().err
    assert [each for each in words if each not in said] == []
    assert "canary" not in said
    assert not (workplace / "runs" / "refused").exists()
