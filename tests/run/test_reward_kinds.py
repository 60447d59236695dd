"""``oppo train`` with reward models of every kind, each found by what its directory holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from oppo.config.load import load
from oppo.run.deployment import Deployment
from oppo.run.memory import expected, load_of
from tests.hf import tiny
from tests.hf.as_text.test_whole import classifier, sentence_encoder
from tests.hf.spot_tokenizers import TEMPLATE, spot
from tests.kit.workplace import furnish, oppo, records, tokenizer


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
        ("chatty", (), "while they grow, prompt and response by its own chat template"),
        ("chatty", ("rewards.0.form=response", "run.scorers=process"), "while they grow, the response alone"),
        ("reward", ("rewards.0.form=joined",), "is to read text: it reads rollouts as text while they grow"),
        ("bert", (), "(BertForSequenceClassification) scores whole responses as text, prompt and response as two segm"),
        ("several/bert", ("rewards.0.label=good",), "scores whole responses as text"),
        ("chatty", ("rewards.0.reading=whole",), "scores whole responses as text, prompt and response by its own"),
        ("encoder", ("rewards.0.column=prompt",), "(BertModel) scores responses by their similarity to column"),
        (
            "steps",
            ("rewards.0.separators=['3', '5']",),
            "rewards steps: it scores the last token of a response, and",
        ),
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


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        ("rewards.0.source=encoder", ["is a sentence encoder", "set rewards.0.column"]),
        ("rewards.0.source=bert rewards.0.column=goal", ["is no sentence encoder", "leave it out"]),
        ("rewards.0.source=bert rewards.0.form=tokens", ["reads whole responses as text", "cannot be 'tokens'"]),
        ("rewards.0.source=bert rewards.0.form=chat", ["no chat template", "joined, pair or response"]),
        ("rewards.0.source=several/bert", ["labels bad, good", "rewards.0.label"]),
        ("rewards.0.source=steps rewards.0.separators=['nowhere']", ["no token of the policy's", "nowhere"]),
        (
            "rewards.0.source=foreign-steps rewards.0.separators=['3']",
            ["does not share the policy's tokenizer", "file.py:function"],
        ),
    ],
)
def test_what_does_not_fit_the_kind_is_refused_by_name(
    workplace: Path, capsys: pytest.CaptureFixture[str], overrides: str, messages: list[str]
) -> None:
    assert oppo(workplace, "", "run.name=refused", *overrides.split(" ")) == 2
    said = capsys.readouterr().err
    assert "rewards.0" in said
    assert all(message in said for message in messages), said
    assert not (workplace / "runs" / "refused").exists()


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
    {name="short", source="rewards.py:short", weight=0.1}]"""

SHORT = """
def short(prompts, completions):
    return [-len(each) for each in completions]
"""


def test_every_kind_is_one_of_several_rewards(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "rewards.py").write_text(SHORT)
    lines = run(workplace, "every-kind", EVERY_KIND.replace("\n", " "))
    said = capsys.readouterr().err
    for message in (
        f"rewards.1: {workplace / 'chatty'} ",
        f"rewards.2: {workplace / 'steps'} rewards steps",
        f"rewards.3: {workplace / 'several/bert'} (BertForSequenceClassification) scores whole responses",
        f"rewards.4: {workplace / 'encoder'} (BertModel) scores responses by their similarity",
    ):
        assert message in said
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


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        ("rewards=[{name='a',source='encoder'}]", ["rewards.0: ", "set rewards.0.column"]),
        ("rewards=[{name='a',source='bert',column='goal'}]", ["rewards.0: ", "rewards.0.column = 'goal'"]),
        ("rewards=[{name='a',source='bert',form='tokens'}]", ["rewards.0.form cannot be 'tokens'"]),
        ("rewards=[{name='a',source='several/bert'}]", ["labels bad, good", "see rewards.0.label"]),
        ("rewards=[{name='a',source='chatty',form='pair'}]", ["no pair", "set rewards.0.reading = 'whole'"]),
        ("rewards=[{name='a',source='steps',separators=['no']}]", ["rewards.0.separators: no token of the"]),
        ("rewards=[{name='a',source='steps',separators=[3]}]", ["rewards.0.separators: expected item 0"]),
        (
            "rewards=[{name='a',source='reward',reading='never'}]",
            ["rewards.0.reading: expected 'auto'"],
        ),
        (
            "rewards=[{name='a',source='rewards.py:short',form='chat',label='good'}]",
            ["unknown key 'rewards.0.form' (it is a key of a reward whose source is a model)", "'rewards.0.label'"],
        ),
        (
            "rewards.0.source=rewards.py:short rewards.0.column=goal",
            ["unknown key 'rewards.0.column' (it is a key of a reward whose source is a model)"],
        ),
        ("rewards.0.source=reasoning-gym rewards.0.form=chat", ["unknown key 'rewards.0.form'"]),
    ],
)
def test_one_of_several_that_does_not_fit_is_refused_by_its_name(
    workplace: Path, capsys: pytest.CaptureFixture[str], overrides: str, messages: list[str]
) -> None:
    (workplace / "rewards.py").write_text(SHORT)
    assert oppo(workplace, "", "run.name=refused", *overrides.split(" ")) == 2
    said = capsys.readouterr().err
    assert all(message in said for message in messages), said
    assert not (workplace / "runs" / "refused").exists()


def test_the_doctor_knows_what_reward_models_of_every_kind_need(workplace: Path) -> None:
    (workplace / "rewards.py").write_text(SHORT)
    settings = load(workplace / "config.toml", [EVERY_KIND.replace("\n", " ")])
    worst = {each.model: each.bytes for each in expected(Deployment.of(settings), load_of(settings, 6))}
    names = ["plain", "bridged", "stepwise", "judged", "alike"]
    assert [name for name in worst if name.startswith("reward.")] == [f"reward.{name}" for name in names]
    assert all(worst[f"reward.{name}"].weights > 0 for name in names)
    assert all(worst[f"reward.{name}"].keys_values > 0 for name in names[:3])


def test_the_doctor_knows_what_the_critic_starts_from(workplace: Path) -> None:
    parts = 'rewards=[{name="judged", source="bert"}, {name="plain", source="reward"}]'
    settings, alone = load(workplace / "config.toml", [parts]), load(workplace / "config.toml")
    found = [expected(Deployment.of(each), None) for each in (settings, alone)]
    critics = [each.bytes.weights for needs in found for each in needs if each.model == "critic"]
    assert critics[0] == critics[1] > 0
