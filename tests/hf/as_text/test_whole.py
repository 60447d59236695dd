"""Rewards by models that read a response whole: the classifier's own logit, and the similarity of its embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    FNetConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    T5Config,
)

from oppo.errors import ConfigError, ModelError, ModelRefused, RewardError
from oppo.events import Drop, Finish, Prompt, Response
from oppo.hf import ClassifierReward, HfTokenizer, SimilarityReward, load_encoder as load_here
from oppo.hf.as_text.rendering import Form, OverLong
from oppo.placement import Process, Thread
from oppo.testing import check_scorer
from tests.hf import tiny
from tests.hf.child import ONE
from tests.hf.spot_tokenizers import CORPUS, TEMPLATE, spot
from tests.kit.known import close
from tests.kit.responses import chunk, stream

POLICY = spot("byte-level")
load_encoder = tiny.apart(load_here)
SIZES: Mapping[str, object] = {
    "vocab_size": 420,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
DISTIL: Mapping[str, object] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 128,
}
T5: Mapping[str, object] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5_IDS: Mapping[str, object] = {"eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "bert": lambda: tiny.build(BertConfig, SIZES),
    "roberta": lambda: tiny.build(RobertaConfig, {**SIZES, "pad_token_id": 1}, type_vocab_size=1),
    "electra": lambda: tiny.build(ElectraConfig, SIZES, embedding_size=16),
    "distilbert": lambda: tiny.build(DistilBertConfig, DISTIL, vocab_size=420),
    "deberta": lambda: tiny.build(DebertaV2Config, SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "modernbert": lambda: tiny.build(ModernBertConfig, SIZES, cls_token_id=2, sep_token_id=3, local_attention=16),
    "fnet": lambda: tiny.build(FNetConfig, {name: SIZES[name] for name in SIZES if name != "num_attention_heads"}),
    "t5": lambda: tiny.build(T5Config, T5, T5_IDS, vocab_size=420),
    "llama": tiny.CONFIGS["llama"],
}
"""Bidirectional models, one that cannot be padded, an encoder-decoder, and a causal one."""


def classifier(
    folder: Path, name: str = "bert", *, make: str = "word-piece", labels: Sequence[str] = ("score",)
) -> Path:
    config = CONFIGS[name]()
    config.vocab_size = 420
    config.id2label, config.label2id = dict(enumerate(labels)), {label: at for at, label in enumerate(labels)}
    model = _made(AutoModelForSequenceClassification, config)
    model.save_pretrained(folder / name)
    make = {"roberta": "byte-level", "t5": "unigram", "llama": "unigram"}.get(name, make)
    tokenizer = spot(make).inner
    tokenizer.save_pretrained(folder / name)
    return folder / name


def sentence_encoder(
    folder: Path, pooling: Mapping[str, object], modules: Sequence[str] = ("Transformer", "Pooling")
) -> Path:
    _made(AutoModel, CONFIGS["bert"]()).save_pretrained(folder)
    spot("word-piece").inner.save_pretrained(folder)
    parts = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{name}" if at else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for at, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(parts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def _made(auto: type[AutoModel | AutoModelForSequenceClassification], config: PreTrainedConfig) -> PreTrainedModel:
    config.initializer_range = 0.2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cast("PreTrainedModel", auto.from_config(config))  # type: ignore[no-untyped-call]  # transformers leaves it unannotated


def rollouts(count: int = 5, **columns: Sequence[object]) -> list[Response]:
    made = []
    for number in range(count):
        of_row = {name: values[number % len(values)] for name, values in columns.items()}
        prompt = Prompt(
            number, number, np.array(POLICY.encode("say"), np.int32), columns={"prompt": "say it", **of_row}
        )
        text = " ".join((CORPUS[0] * 2).split(" ")[: 3 + 4 * number])
        made.append(Response.empty(prompt).then(chunk(number, 0, np.array(POLICY.encode_exactly(text), np.int32))))
    return made


def said(response: Response) -> str:
    return POLICY.decode(response.tokens.tolist())


@tiny.apart
@torch.no_grad()
def logits(model: PreTrainedModel, tokenizer: HfTokenizer, *parts: str) -> list[float]:
    features = tokenizer.inner(*parts, return_tensors="pt")
    taken = {
        name: value for name, value in features.items() if name != "token_type_ids" or model.config.model_type == "bert"
    }
    return [float(value) for value in model.eval()(**taken).logits[0]]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", sorted(CONFIGS))
async def test_the_score_is_the_librarys_own_call_on_the_whole_text(
    name: str, deterministic: bool, thread: Thread, tmp_path: Path, messages: list[str]
) -> None:
    encoder = load_encoder(classifier(tmp_path, name))
    assert encoder.beside is (name != "fnet")
    assert any("one by one: padding would change its outputs" in note for note in messages) is (name == "fnet")
    made = rollouts()
    form: Form = "pair" if name in {"bert", "roberta", "deberta"} else "joined"
    scorer = ClassifierReward(encoder, POLICY, place=thread, form=form, deterministic=deterministic)
    values = await stream(scorer, made, seed=1)
    for response in made:
        parts = ("say it", said(response)) if form == "pair" else ("say it" + said(response),)
        assert close(values[response.prompt.rollout], logits(encoder.model, encoder.tokenizer, *parts)[0])


async def test_of_several_labels_the_one_that_is_named_scores(thread: Thread, tmp_path: Path) -> None:
    encoder = load_encoder(classifier(tmp_path, labels=("NEGATIVE", "NEUTRAL", "POSITIVE")))
    made = rollouts(2)
    for label, at in (("POSITIVE", 2), (0, 0), ("1", 1)):
        scorer = ClassifierReward(encoder, POLICY, place=thread, form="response", label=label)
        values = await stream(scorer, made, seed=0)
        assert close(values[1], logits(encoder.model, encoder.tokenizer, said(made[1]))[at])
    for wrong in (None, "GOOD", 3):
        with pytest.raises(ConfigError, match=r"labels NEGATIVE, NEUTRAL, POSITIVE: expected one of them as the label"):
            ClassifierReward(encoder, POLICY, place=thread, label=wrong)


async def test_a_chat_template_of_its_own_renders_prompt_and_response(thread: Thread, tmp_path: Path) -> None:
    path = classifier(tmp_path, "llama")
    spot("byte-level", TEMPLATE).inner.save_pretrained(path)
    encoder, made = load_encoder(path), rollouts(3)
    values = await stream(ClassifierReward(encoder, POLICY, place=thread, form="chat"), made, seed=0)
    for response in made:
        messages = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": said(response)}]
        text = str(encoder.tokenizer.inner.apply_chat_template(messages, tokenize=False))
        assert close(values[response.prompt.rollout], logits(encoder.model, encoder.tokenizer, text)[0])


async def test_texts_of_similar_length_are_read_together(thread: Thread, tmp_path: Path) -> None:
    encoder, shapes = load_encoder(classifier(tmp_path)), list[tuple[int, ...]]()
    encoder.model.register_forward_pre_hook(lambda *given: shapes.append(given[2]["input_ids"].shape), with_kwargs=True)
    scorer, made = ClassifierReward(encoder, POLICY, place=thread, form="response"), [*rollouts(5)] * 8
    finished = [
        Finish(n, Response.empty(Prompt(n, n, each.prompt.tokens)).then(chunk(n, 0, each.tokens)), "eos")
        for n, each in enumerate(made)
    ]
    await scorer.extend([part for each in finished for part in (each.response.prompt, each.response.chunk())])
    await scorer.finish(finished)
    assert 1 < len(shapes) < 12
    used = sum(len(encoder.tokenizer.encode(said(each))) for each in made)
    assert sum(rows * columns for rows, columns in shapes) < 1.5 * used


async def test_exact_scores_do_not_depend_on_which_rollouts_end_together_nor_on_the_place(
    thread: Thread, tmp_path: Path
) -> None:
    encoder, made = load_encoder(classifier(tmp_path)), rollouts()

    async def seen(place: Thread | Process, seed: int) -> list[object]:
        values = await stream(ClassifierReward(encoder, POLICY, place=place, deterministic=True), made, seed)
        return [values[each.prompt.rollout] for each in made]

    first = await seen(thread, 0)
    assert all([await seen(thread, seed) == first for seed in range(1, 6)])
    with Process("scorers", setup=ONE) as process:
        assert await seen(process, 7) == first


@pytest.mark.parametrize("kind", ["classifier", "similarity"])
async def test_both_keep_the_contract_of_a_scorer(kind: str, thread: Thread, tmp_path: Path) -> None:
    made = rollouts(3, answer=["the lazy dog"])
    path = classifier(tmp_path) if kind == "classifier" else sentence_encoder(tmp_path / "s", {"pooling_mode": "mean"})
    encoder = load_encoder(path)

    async def make() -> ClassifierReward | SimilarityReward:
        if kind == "classifier":
            return ClassifierReward(encoder, POLICY, place=thread)
        return SimilarityReward(encoder, POLICY, column="answer", place=thread)

    await check_scorer(make, [Finish(each.prompt.rollout, each, "eos") for each in made], close)


@pytest.mark.parametrize("over_long", ["error", "drop", "truncate"])
@pytest.mark.parametrize("name", ["bert", "roberta"])
async def test_a_text_longer_than_the_model_reads_ends_as_chosen(
    name: str, over_long: OverLong, thread: Thread, tmp_path: Path
) -> None:
    encoder = load_encoder(classifier(tmp_path, name))
    assert encoder.limit == {"bert": 128, "roberta": 126}[name]
    made = rollouts(6)
    long = Response.empty(made[0].prompt).then(chunk(0, 0, np.concatenate([made[5].tokens] * 7)))
    scorer = ClassifierReward(encoder, POLICY, place=thread, over_long=over_long)
    finished = [Finish(0, long, "length"), Finish(1, made[1], "eos")]
    await scorer.extend([long.prompt, made[1].prompt, long.chunk(), made[1].chunk()])
    if over_long == "error":
        with pytest.raises(
            ModelError, match=rf"rollout 0 has \d+ tokens as text, more than the {encoder.limit} .*over_long"
        ):
            await scorer.finish(finished)
        return
    first, second = await scorer.finish(finished)
    assert close(second, logits(encoder.model, encoder.tokenizer, "say it", said(made[1]))[0])
    if over_long == "drop":
        assert isinstance(first, Drop)
        assert f"more than the {encoder.limit} " in first.reason
    else:
        cut = encoder.tokenizer.inner(
            "say it", said(long), truncation=True, max_length=encoder.limit, return_tensors="pt"
        )
        with torch.no_grad():
            assert close(first, tiny.apart(encoder.model)(**cut).logits.detach()[0, 0])


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, "last"),
    ],
)
async def test_a_response_scores_its_cosine_similarity_to_the_text_of_its_row(
    config: Mapping[str, object], pooling: str, thread: Thread, tmp_path: Path
) -> None:
    encoder = load_encoder(sentence_encoder(tmp_path / "encoder", config, ("Transformer", "Pooling", "Normalize")))
    assert (encoder.pooling, encoder.limit) == (pooling, 64)

    @tiny.apart
    @torch.no_grad()
    def embedded(text: str) -> torch.Tensor:
        states = encoder.model(**encoder.tokenizer.inner(text, return_tensors="pt")).last_hidden_state[0]
        vector = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0), "last": states[-1]}[pooling]
        unit: torch.Tensor = vector / vector.norm()
        return unit

    made = rollouts(4, answer=["the lazy dog", ["hello, world!", "the quick brown fox"]])
    values = await stream(SimilarityReward(encoder, POLICY, column="answer", place=thread), made, seed=2)
    for response in made:
        answers = response.prompt.columns["answer"]
        texts = answers if isinstance(answers, list) else [answers]
        own = embedded(said(response))
        assert close(values[response.prompt.rollout], max(float(own @ embedded(str(text))) for text in texts))
    same = Response.empty(Prompt(9, 9, made[0].prompt.tokens, columns={"answer": said(made[2])})).then(
        chunk(9, 0, made[2].tokens)
    )
    assert close((await stream(SimilarityReward(encoder, POLICY, column="answer", place=thread), [same], 0))[9], 1.0)


@pytest.mark.parametrize("value", [None, 3, [], ["a", 1]])
async def test_a_row_without_a_text_to_compare_with_is_named(value: object, thread: Thread, tmp_path: Path) -> None:
    encoder = load_encoder(sentence_encoder(tmp_path / "encoder", {"pooling_mode": "mean"}))
    scorer, (response,) = SimilarityReward(encoder, POLICY, column="answer", place=thread), rollouts(1, answer=[value])
    await scorer.extend([response.prompt, response.chunk()])
    with pytest.raises(RewardError, match=r"rollout 0: expected the text to compare .* column 'answer'; got"):
        await scorer.finish([Finish(0, response, "eos")])


def test_what_is_no_encoder_or_of_unknown_parts_is_refused_by_name(thread: Thread, tmp_path: Path) -> None:
    dense = sentence_encoder(tmp_path / "dense", {"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"))
    with pytest.raises(ModelRefused, match="modules Transformer, Pooling, Dense: expected Transformer, Pooling and"):
        load_encoder(dense)
    with pytest.raises(ModelRefused, match="pools by weightedmean: expected one of"):
        load_encoder(sentence_encoder(tmp_path / "odd", {"pooling_mode": "weightedmean"}))
    broken = sentence_encoder(tmp_path / "broken", {"pooling_mode": "mean"})
    (broken / "modules.json").write_text("{}")
    assert load_encoder(classifier(tmp_path)).pooling is None
    with pytest.raises((ConfigError, ModelRefused)):
        load_encoder(broken)
    outside = sentence_encoder(tmp_path / "outside", {"pooling_mode": "mean"})
    (outside / "modules.json").write_text((outside / "modules.json").read_text().replace("1_Pooling", "../1_Pooling"))
    with pytest.raises(ConfigError, match="names a module outside of its directory"):
        load_encoder(outside)
    with pytest.raises(ConfigError, match="classifies, and gives no vector to compare"):
        SimilarityReward(load_encoder(tmp_path / "bert"), POLICY, column="answer", place=thread)
    with pytest.raises(ConfigError, match="has no classification head"):
        ClassifierReward(load_encoder(sentence_encoder(tmp_path / "s", {"pooling_mode": "cls"})), POLICY, place=thread)


def test_without_a_word_on_pooling_it_is_the_mean_and_that_is_said(tmp_path: Path, messages: list[str]) -> None:
    path = sentence_encoder(tmp_path / "encoder", {"pooling_mode": "cls"})
    (path / "modules.json").unlink()
    assert load_encoder(path).pooling == "mean"
    assert messages == [
        f"{path} has no modules.json, which would say how a text becomes one vector: it is the mean of its states"
    ]


def test_a_classifier_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    path = classifier(tmp_path)
    config = json.loads((path / "config.json").read_text())
    _made(AutoModel, CONFIGS["bert"]()).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"has no classifier\.bias.* a reward from an untrained head would be noise"):
        load_encoder(path)
