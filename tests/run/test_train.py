"""``oppo train``: settings and the parts of a run, models of any kind, its trainer in any place, steps in flight."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from pathlib import Path

import anyio
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from oppo.admission import Admission, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.chunking import ChunkSize, Fixed, Tuned, WholeRollout
from oppo.cli import DONE, main
from oppo.config.load import load_settings
from oppo.config.sections import StepSection
from oppo.events import Chunk, Scored
from oppo.hf.loading import load_scalar
from oppo.hf.lora import add_lora
from oppo.run.checkpoint import CHECKPOINTS
from oppo.run.graph import admission_of, chunks_of
from oppo.run.train import FINAL, prepare, run
from oppo.testing import Recorder
from tests.hf import tiny
from tests.kit.workplace import oppo, records, require_bounded_staleness, resume, tokenizer, weights
from tests.report.synthetic import all_nested


@pytest.mark.parametrize(
    ("step", "admission"),
    [
        (StepSection(batch=16), Overcommit(16)),
        (StepSection(batch=16, overcommit=3, max_deferrals=1), Overcommit(16, 3, 1)),
        (StepSection(batch=16, admission="adaptive"), TailAdaptive(16, most=4)),
        (
            StepSection(batch=16, admission="adaptive", overcommit=6, staleness_price=0.5, max_deferrals=3),
            TailAdaptive(16, price=0.5, max_deferrals=3, most=6),
        ),
        (StepSection(batch=16, admission="slope"), SlopeAdaptive(16, most=4)),
        (
            StepSection(batch=16, admission="slope-algorithm1", overcommit=8),
            SlopeAdaptive(16, rule="algorithm1", most=8),
        ),
        (StepSection(batch=16, admission="tail-batched"), TailBatched(16)),
    ],
)
def test_settings_name_the_admission_policy(step: StepSection, admission: Admission) -> None:
    assert admission_of(step) == admission


@pytest.mark.parametrize(
    ("step", "chunks"),
    [
        (StepSection(chunk=16), Fixed(16)),
        (StepSection(chunk="whole"), WholeRollout()),
        (StepSection(chunk="tuned"), Tuned(cap=512)),
    ],
)
def test_settings_name_the_chunk_size(step: StepSection, chunks: ChunkSize) -> None:
    assert chunks_of(step, cap=512) == chunks


ADAPTER = (
    *("models.lora_rank=4", "models.critic=reward", "rewards.0.source=reward.py:short"),
    *("trainer.learning_rate=1e-2", "trainer.epochs=2", "algorithm.kl_in=loss", "algorithm.kl_estimator=k2"),
)
OPTIONS = (
    *("run.steps=3", "sampling.max_new_tokens=16", "sampling.min_new_tokens=3", "sampling.temperature=0.7"),
    *("sampling.top_k=40", 'sampling.stop_strings=["w7", "w30 w"]', "trainer.minibatches=2"),
    *("algorithm.value_clip=none", "algorithm.entropy_coefficient=0.01", "algorithm.score_norm=true"),
    *("algorithm.score_clip=2.0", "algorithm.reward_scale=0.5", "algorithm.missing_eos_penalty=1.0"),
    *("algorithm.whiten_rewards=true", "trainer.critic_warmup=1"),
    "trainer.gradient_checkpointing=2",
)


@pytest.mark.adapters
def test_all_options_of_the_trainer_together_make_a_run(folder: Path) -> None:
    assert oppo(folder, "", *ADAPTER, *OPTIONS, "run.name=options") == DONE
    lines = records(folder, "options", "metrics.jsonl")
    assert [line["train/grad_norm"] > 0 for line in lines] == [False, True, True], "the critic's warm-up"
    for line in lines:
        assert (line["trained"], line["objective/kl_coef"], line["val/clipfrac_avg"]) == (4, 0, 0)
        assert math.isfinite(line["objective/shaped_scores"])
    assert lines[0]["policy/kl_avg"] == pytest.approx(0, abs=1e-9), "a fresh adapter changes nothing"
    assert lines[2]["policy/kl_avg"] > 0
    for sample in records(folder, "options", "samples.jsonl"):
        assert sample["tokens"] > 3 or sample["reason"] == "length"
        assert "w7" not in " ".join(sample["completion"].split()[3:-1])
    final = folder / "runs" / "options" / FINAL / "actor"
    assert all("lora_" in name for name in load_file(final / "adapter_model.safetensors"))
    AutoModelForCausalLM.from_pretrained(final)


@pytest.mark.adapters
def test_an_adapter_is_trained_on_and_compared_with_itself(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "actor")
    add_lora(base, 2, 4)
    begun = {name: each for name, each in base.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for each in begun.values():
            each.add_(0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(0)))
    base.save_pretrained(folder / "begun")
    chosen = ("models.lora_rank=0", "models.adapter=begun")
    assert oppo(folder, "", *ADAPTER, *chosen, "run.name=adapted") == DONE
    lines = records(folder, "adapted", "metrics.jsonl")
    assert lines[0]["objective/kl"] == pytest.approx(0, abs=1e-5), "the reference is the policy as it begins"
    assert lines[1]["objective/kl"] != pytest.approx(0, abs=1e-5)
    final = AutoModelForCausalLM.from_pretrained(folder / "runs" / "adapted" / FINAL / "actor")
    learned = {name: each for name, each in final.named_parameters() if name in begun}
    assert learned.keys() == begun.keys()
    change = [float((learned[name] - each).detach().abs().max()) for name, each in begun.items()]
    assert 0 < max(change) < 0.15, "a new one would be further from it"


def metrics(folder: Path, name: str) -> list[dict[str, object]]:
    lines = records(folder, name, "metrics.jsonl")
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert [line["trained"] for line in lines] == [4, 4]
    return lines


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=pytest.mark.adapters)], ids=["weights", "adapters"])
def test_actor_and_critic_train_on_one_trunk(folder: Path, lora: int) -> None:
    name = f"trunk-{lora}"
    overrides = ("models.shared_trunk=true", f"models.lora_rank={lora}", "trainer.critic_warmup=1", "run.panel=off")
    assert oppo(folder, "", f"run.name={name}", *overrides) == 0
    warming, learning = metrics(folder, name)
    assert warming["train/grad_norm"] == 0
    assert isinstance(learning["train/grad_norm"], float)
    assert learning["train/grad_norm"] > 0
    run = folder / "runs" / name
    again = load_settings(run / "config.toml")
    assert again.models.shared_trunk
    assert again.models.critic == "", "the resolved file means the same"
    final = run / "checkpoints" / "final"
    actor = AutoModelForCausalLM.from_pretrained(final / "actor")
    critic = AutoModelForSequenceClassification.from_pretrained(final / "critic")
    ids = torch.arange(3, 23).reshape(2, 10)
    with torch.no_grad():
        theirs = [model.base_model(ids, use_cache=False).last_hidden_state for model in (actor, critic)]
    torch.testing.assert_close(*theirs, rtol=1e-5, atol=1e-5)
    assert critic.get_parameter("score.weight").any(), "the head began with zeros"


def test_bfloat16_models_are_served_and_trained(folder: Path) -> None:
    overrides = ("models.dtype=bfloat16", "models.shared_trunk=true", "run.panel=off", "trainer.learning_rate=1e-2")
    assert oppo(folder, "", "run.name=half", *overrides) == 0
    metrics(folder, "half")
    written = load_file(folder / "runs" / "half" / "checkpoints" / "final" / "actor" / "model.safetensors")
    before = load_file(folder / "actor" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert any(not torch.equal(tensor, before[name].bfloat16()) for name, tensor in written.items())


def test_a_policy_that_cannot_attend_in_parts_is_trained_and_what_serving_it_costs_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.of(tiny.WHOLE["diffllama"]()).save_pretrained(folder / "whole")
    tokenizer().save_pretrained(folder / "whole")
    overrides = (f"models.policy={folder / 'whole'}", "rewards.0.source=reward.py:short", "models.critic=reward")
    assert oppo(folder, "", "run.name=padded", "run.panel=lines", *overrides) == 0
    metrics(folder, "padded")
    assert f"{folder / 'whole'} is served with attention 'padded': each row" in capsys.readouterr().err
    assert oppo(folder, "", "run.name=refused", "models.attention=segmented", *overrides) == 2
    refusal = capsys.readouterr().err
    assert "models.policy: DiffLlamaForCausalLM" in refusal
    assert "with attention 'segmented': " in refusal


def test_a_policy_of_which_transformers_has_no_classifier_begins_a_critic_which_a_resumed_run_goes_on_with(
    folder: Path,
) -> None:
    tiny.of(tiny.STATEFUL["lfm2"](), seed=4).save_pretrained(folder / "lfm2")
    tokenizer().save_pretrained(folder / "lfm2")
    models = ("models.policy=lfm2", "models.critic=lfm2", "run.panel=off", "run.checkpoint_every=1")
    assert oppo(folder, "", "run.name=headed", *models, "run.steps=1") == 0
    assert resume(folder, "headed", "run.steps=2") == 0
    metrics(folder, "headed")
    critic = folder / "runs" / "headed" / "checkpoints" / "final" / "critic"
    assert load_scalar(critic).get_parameter("score.weight").any(), "the head began with zeros"
    scored = (f'rewards=[{{source="{critic}"}}]', "models.shared_trunk=true", "run.name=scored-by-it")
    assert oppo(folder, "", *models[::2], *scored) == 0


def test_models_that_read_whole_responses_score_and_train_but_do_not_decode(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.of(tiny.ONLY_WHOLE["jamba"](), seed=4).save_pretrained(folder / "jamba")
    config = tiny.ONLY_WHOLE["minimax"]()
    config.num_labels = 1
    tiny.scalar_of(config, seed=5).save_pretrained(folder / "minimax")
    for name in ("jamba", "minimax"):
        tokenizer().save_pretrained(folder / name)
    models = ("models.reference=jamba", 'rewards=[{source="minimax"}]', "models.critic=minimax", "run.panel=off")
    assert oppo(folder, "", "run.name=scored", *models) == 0
    metrics(folder, "scored")
    log = "".join(capsys.readouterr())
    assert "jamba reads whole responses" in log
    assert oppo(folder, "", "run.name=undecoded", "models.policy=jamba", "run.panel=off") == 2
    refused = " ".join("".join(capsys.readouterr()).split())
    assert "models.policy: JambaForCausalLM" in refused
    assert "models.engine = 'vllm'" in refused


def test_a_process_and_a_thread_go_on_with_each_other_s_checkpoints_to_the_same_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = ("run.deterministic=true", "run.checkpoint_every=1", "run.scorers=thread", "step.overcommit=0")
    here = ("run.trainer=thread", "models.share_weights=true")
    there = ("run.trainer=process", "models.share_weights=false")
    assert oppo(folder, "", *exact, *here, "run.name=stayed", "run.steps=3") == DONE
    assert oppo(folder, "", *exact, *there, "run.name=moved", "run.steps=1") == DONE
    assert resume(folder, "moved", "run.steps=2", *here) == DONE
    assert resume(folder, "moved", "run.steps=3", *there) == DONE
    for name in ("stayed", "moved"):
        events = json.loads((folder / "runs" / name / "trace.json").read_text())
        assert {"trainer", "saver"} <= {e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert weights(folder, "moved") == weights(folder, "stayed")
    assert capsys.readouterr().err.count("starting the process of the trainer") == 2


EXACT = ("run.deterministic=true", "run.panel=off", "step.batch=4", "step.overcommit=2")
AHEAD = ("step.lookahead=1", "run.checkpoint_every=3")


def train(folder: Path, name: str, *overrides: str) -> dict[str, bytes]:
    assert oppo(folder, "", *EXACT, f"run.name={name}", *overrides) == DONE
    return weights(folder, name)


def test_the_work_of_models_is_traced_for_the_step_that_it_was_done_for(folder: Path) -> None:
    train(folder, "traced", *AHEAD, "run.steps=4", "run.scorers=process", "step.chunk=3")
    staleness = [line["staleness/max"] for line in records(folder, "traced", "metrics.jsonl")]
    assert (staleness[0], staleness[1] >= 1) == (0, True), "step 1 is decoded with the first weights"
    events = json.loads((folder / "runs" / "traced" / "trace.json").read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert all_nested(slices)
    steps: dict[tuple[str, str], set[int]] = {}
    for event in slices:
        steps.setdefault((tracks[event["tid"]], event["name"]), set()).add(event.get("args", {}).get("step"))
    for work in (("policy", "decode"), ("reward model", "finish"), ("critic", "finish"), ("trainer", "update")):
        assert steps[work] == set(range(1, 5)), work
    decoded, trained = (
        {event["args"]["step"]: event["ts"] for event in slices if (tracks[event["tid"]], event["name"]) == work}
        for work in (("policy", "decode"), ("trainer", "update"))
    )
    assert all(decoded[step] < trained[step] for step in range(1, 5))
    page = (folder / "runs" / "traced" / "report.html").read_text()
    assert "faint: work for other steps" in page
    assert re.search(r"trainer: \d\.\d+ s for step 4, from", page)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_step_of_an_exact_run_uses_the_versions_that_follow_from_its_index(folder: Path, lookahead: int) -> None:
    corrected = ("algorithm.ratio_base=proximal", "algorithm.is_correction=truncated")
    ahead = (f"run.name=versions-{lookahead}", f"step.lookahead={lookahead}", "run.steps=5", "run.checkpoint_every=0")
    recorder = Recorder()
    with prepare(load_settings(folder / "config.toml", [*EXACT, *corrected, *ahead])) as session:
        anyio.run(run, session, Console(quiet=True), [recorder])
    used: dict[str, set[tuple[int, int]]] = {"generate": set(), "value": set(), "proximal": set()}
    for sent in recorder.items:
        if isinstance(sent.item, Chunk):
            used[sent.stage].update((sent.step, int(version)) for version in sent.item.versions)
        elif isinstance(sent.item, Scored) and sent.stage in used:
            used[sent.stage].add((sent.step, sent.item.version))
    behind = {(step, max(0, step - lookahead)) for step in range(5)}
    assert used == {"generate": behind, "value": behind, "proximal": {(step, step) for step in range(5)}}
    require_bounded_staleness(folder / "runs" / f"versions-{lookahead}")


def test_a_run_that_a_signal_has_ended_is_the_same_from_any_of_its_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps in flight end first, and the journal keeps that: who goes further back drains there too."""
    late = (*EXACT, *AHEAD, "run.steps=8", "rewards.0.source=reward.py:late")
    whole, run = train(folder, "undisturbed", *late), folder / "runs" / "stopped"
    monkeypatch.setenv("ENDED_AT", "14")  # while step 3 is scored, and step 4 in flight
    assert oppo(folder, "", *late, "run.name=stopped", "run.panel=lines") == 128 + signal.SIGTERM
    monkeypatch.delenv("ENDED_AT")
    assert "SIGTERM: ending after the 2 steps in flight, then saving" in capsys.readouterr().out
    drained = [line["step"] for line in records(folder, "stopped", "journal.jsonl") if line["event"] == "drained"]
    assert drained == [5]
    shutil.copytree(run, folder / "backup")
    assert resume(folder, "stopped") == DONE
    once = weights(folder, "stopped")
    assert once != whole
    shutil.rmtree(run)
    shutil.move(folder / "backup", run)
    (run / CHECKPOINTS / "step-000005" / "trainer.safetensors").write_bytes(b"")
    assert resume(folder, "stopped") == DONE
    assert "step-000005 is damaged" in capsys.readouterr().err
    assert weights(folder, "stopped") == once


def test_how_often_a_checkpoint_is_written_is_part_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, "fixed", *AHEAD, "run.steps=3", "trainer.schedule=constant")
    again = ["resume", str(folder / "runs" / "fixed"), "--set", "run.steps=6", "--set", "run.checkpoint_every=2"]
    assert main(again) != DONE
    assert "run.checkpoint_every cannot change when a run is resumed" in capsys.readouterr().err


FOUR_BITS = ("models.lora_rank=4", "models.quantization=nf4", "trainer.epochs=1", "run.panel=off", "run.steps=3")


@pytest.mark.adapters
@pytest.mark.parametrize(
    "chosen",
    [
        ("trainer.gradient_checkpointing=1",),
        ("run.trainer=process", "run.scorers=process"),
        ('placement.trainer=["cpu", "cpu"]',),
    ],
    ids=["threads", "processes", "ranks"],
)
def test_adapters_over_a_quantised_base_are_trained(
    folder: Path, chosen: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    assert oppo(folder, "", *FOUR_BITS, *chosen, f"run.name={name}") == DONE
    first, *_, last = records(folder, name, "metrics.jsonl")
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5), "the reference is quantised too"
    assert abs(last["objective/kl"]) > 1e-5


@pytest.mark.adapters
def test_a_resumed_run_and_one_from_its_adapter_go_on_where_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learned(name: str) -> dict[str, torch.Tensor]:
        return load_file(folder / "runs" / name / "checkpoints" / "final" / "actor" / "adapter_model.safetensors")

    chosen = (*FOUR_BITS, "run.deterministic=true", "run.checkpoint_every=1", "rewards.0.source=reward.py:late")
    assert oppo(folder, "", *chosen, "run.name=whole") == DONE
    with monkeypatch.context() as patched:
        patched.setenv("ENDED_AT", "6")
        assert oppo(folder, "", *chosen, "run.name=cut") != DONE
    assert resume(folder, "cut") == DONE
    whole, resumed = learned("whole"), learned("cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole | resumed)
    adapter = "models.adapter=runs/whole/checkpoints/final/actor"
    assert oppo(folder, "", *FOUR_BITS[1:], adapter, "run.steps=1", "run.name=on") == DONE
    assert records(folder, "on", "metrics.jsonl")[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
