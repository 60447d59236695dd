"""``oppo train`` with reward models of every kind, each found by what its directory holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from oppo.app.expected import expected, load_of
from oppo.app.layout import devices_of
from oppo.config.load import load
from tests.hf import tiny
from tests.hf.as_text.test_whole import classifier, sentence_encoder
from tests.hf.spot_tokenizers import TEMPLATE, spot
from tests.workplace import furnish, oppo, records, tokenizer


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
        ("chatty", ("models.reward_form=response", "run.scorers=process"), "while they grow, the response alone"),
        ("reward", ("models.reward_form=joined",), "is to read text: it reads rollouts as text while they grow"),
        ("bert", (), "(BertForSequenceClassification) scores whole responses as text, prompt and response as two segm"),
        ("several/bert", ("models.reward_label=good",), "scores whole responses as text"),
        ("chatty", ("models.reward_reading=whole",), "scores whole responses as text, prompt and response by its own"),
        ("encoder", ("models.reward_column=prompt",), "(BertModel) scores responses by their similarity to column"),
        (
            "steps",
            ("models.reward_separators=['3', '5']",),
            "rewards steps: it scores the last token of a response, and",
        ),
    ],
)
def test_a_reward_model_of_any_kind_is_found_by_its_directory_and_said(
    workplace: Path, capsys: pytest.CaptureFixture[str], name: str, overrides: tuple[str, ...], words: str
) -> None:
    label = f"kind-{len([*workplace.glob('runs/kind-*')])}"
    lines = run(workplace, label, f"models.reward={name}", *overrides)
    said = capsys.readouterr().err
    assert f"models.reward: {workplace / name} " in said
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
            workplace, f"exact-{place}", "models.reward=chatty", "run.exact=true", f"run.scorers={place}", "run.cores=2"
        )
        digests.append(weights_digest(load_causal(workplace / "runs" / f"exact-{place}" / "checkpoints/final/actor")))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("overrides", "sentences"),
    [
        ("models.reward=encoder", ["is a sentence encoder", "set models.reward_column"]),
        ("models.reward=bert models.reward_column=goal", ["is no sentence encoder", "leave it out"]),
        ("models.reward=bert models.reward_form=tokens", ["reads whole responses as text", "cannot be 'tokens'"]),
        ("models.reward=bert models.reward_form=chat", ["no chat template", "joined, pair or response"]),
        ("models.reward=several/bert", ["labels bad, good", "models.reward_label"]),
        ("models.reward=steps models.reward_separators=['nowhere']", ["no token of the policy's", "nowhere"]),
        (
            "models.reward=foreign-steps models.reward_separators=['3']",
            ["does not share the policy's tokenizer", "file.py:function"],
        ),
    ],
)
def test_what_does_not_fit_the_kind_is_refused_by_name(
    workplace: Path, capsys: pytest.CaptureFixture[str], overrides: str, sentences: list[str]
) -> None:
    assert oppo(workplace, "", "run.name=refused", *overrides.split(" ")) == 2
    said = capsys.readouterr().err
    assert "models.reward" in said
    assert all(sentence in said for sentence in sentences), said
    assert not (workplace / "runs" / "refused").exists()


def test_a_column_without_text_ends_the_run_with_its_rollout(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(workplace, "", "run.name=number", "models.reward=encoder", "models.reward_column=goal") == 1
    assert "expected the text to compare a response with, or a list of texts" in capsys.readouterr().err


EVERY_KIND = """models.reward={
    plain={source="reward"}, bridged={source="chatty", weight=0.5}, stepwise={source="steps", separators=["3", "5"]},
    judged={source="several/bert", label="good", over_long="truncate"}, alike={source="encoder", column="prompt"},
    short={source="rewards.py:short", weight=0.1}}"""

SHORT = """
def short(prompts, completions):
    return [-len(each) for each in completions]
"""


def test_every_kind_is_one_of_several_rewards(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "rewards.py").write_text(SHORT)
    lines = run(workplace, "every-kind", EVERY_KIND.replace("\n", " "))
    said = capsys.readouterr().err
    for sentence in (
        f"models.reward.bridged: {workplace / 'chatty'} ",
        f"models.reward.stepwise: {workplace / 'steps'} rewards steps",
        f"models.reward.judged: {workplace / 'several/bert'} (BertForSequenceClassification) scores whole responses",
        f"models.reward.alike: {workplace / 'encoder'} (BertModel) scores responses by their similarity",
    ):
        assert sentence in said
    weights = {"plain": 1, "bridged": 0.5, "stepwise": 1, "judged": 1, "alike": 1, "short": 0.1}
    for line in lines:
        step = {name: value for name, value in line.items() if isinstance(value, int | float)}
        assert all(step[f"reward/{name}_share"] == 1 for name in weights)
        expected = sum(weight * step[f"reward/{name}_mean"] for name, weight in weights.items())
        assert step["objective/scores"] == pytest.approx(expected, abs=1e-4)
        assert "bridge/tail_tokens" in step


def test_a_critic_starts_from_the_first_reward_model_that_can_be_one(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(workplace, "critic", 'models.reward={judged={source="bert"}, plain={source="reward"}}')
    said = capsys.readouterr().err
    assert f"so it cannot be a critic, which starts from {workplace / 'reward'} instead" in said
    assert f"loading the critic {workplace / 'reward'}" in said


@pytest.mark.parametrize(
    ("overrides", "sentences"),
    [
        ("models.reward={a={source='encoder'}}", ["models.reward.a: ", "set models.reward.a.column"]),
        ("models.reward={a={source='bert',column='goal'}}", ["models.reward.a: ", "models.reward.a.column = 'goal'"]),
        ("models.reward={a={source='bert',form='tokens'}}", ["models.reward.a.form cannot be 'tokens'"]),
        ("models.reward={a={source='several/bert'}}", ["labels bad, good", "see models.reward.a.label"]),
        ("models.reward={a={source='chatty',form='pair'}}", ["no pair", "set models.reward.a.reading = 'whole'"]),
        ("models.reward={a={source='steps',separators=['no']}}", ["models.reward.a.separators: no token of the"]),
        ("models.reward={a={source='steps',separators=[3]}}", ["models.reward.a.separators: expected item 0"]),
        (
            "models.reward={a={source='reward',reading='never'}}",
            ["models.reward.a.reading: expected 'auto'"],
        ),
        (
            "models.reward={a={source='rewards.py:short',form='chat',label='good'}}",
            ["models.reward.a.form, models.reward.a.label says how a reward model reads", "is Python code"],
        ),
        (
            "models.reward=rewards.py:short models.reward_column=goal",
            ["models.reward_column says how a reward model reads", "is Python code"],
        ),
        ("models.reward=reasoning-gym models.reward_form=chat", ["'reasoning-gym' is Python code: leave that out"]),
    ],
)
def test_one_of_several_that_does_not_fit_is_refused_by_its_name(
    workplace: Path, capsys: pytest.CaptureFixture[str], overrides: str, sentences: list[str]
) -> None:
    (workplace / "rewards.py").write_text(SHORT)
    assert oppo(workplace, "", "run.name=refused", *overrides.split(" ")) == 2
    said = capsys.readouterr().err
    assert all(sentence in said for sentence in sentences), said
    assert not (workplace / "runs" / "refused").exists()


def test_what_is_set_for_all_rewards_is_for_those_that_it_fits(workplace: Path) -> None:
    parts = 'models.reward={plain={source="reward"}, alike={source="encoder"}, judged={source="several/bert"}}'
    lines = run(workplace, "for-all", parts, "models.reward_column=prompt", "models.reward_label=good")
    assert {"reward/plain_mean", "reward/alike_mean", "reward/judged_mean"} <= lines[0].keys()


def test_the_doctor_knows_what_reward_models_of_every_kind_need(workplace: Path) -> None:
    (workplace / "rewards.py").write_text(SHORT)
    settings = load(workplace / "config.toml", [EVERY_KIND.replace("\n", " ")])
    worst = {each.model: each.bytes for each in expected(settings, devices_of(settings), load_of(settings, 6))}
    names = ["plain", "bridged", "stepwise", "judged", "alike"]
    assert [name for name in worst if name.startswith("reward.")] == [f"reward.{name}" for name in names]
    assert all(worst[f"reward.{name}"].weights > 0 for name in names)
    assert all(worst[f"reward.{name}"].keys_values > 0 for name in names[:3])


def test_the_doctor_knows_what_the_critic_starts_from(workplace: Path) -> None:
    parts = 'models.reward={judged={source="bert"}, plain={source="reward"}}'
    settings, alone = load(workplace / "config.toml", [parts]), load(workplace / "config.toml")
    found = [expected(each, devices_of(each), None) for each in (settings, alone)]
    critics = [each.bytes.weights for needs in found for each in needs if each.model == "critic"]
    assert critics[0] == critics[1] > 0
