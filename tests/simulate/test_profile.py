"""Profiles of hardware that one does not have, and laws of lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from benchmarks.simulate.paper import work_bound
from oppo.errors import ConfigError
from oppo.run.simulation import load_profile, profile_of
from oppo.simulate.profile import BY_TORCH, GPUS, MODELS, Lognormal, Observed, Profile, Reached
from oppo.simulate.schedule import SimulatedRun, ladder

PROFILE: dict[str, dict[str, object]] = {
    "workload": {"batch": 64},
    "lengths": {"median": 400, "cap": 2048},
    "models": {"actor": "qwen2.5-7b", "critic": "qwen2.5-3b", "reward": "qwen2.5-7b"},
    "layout": {"gpu": "h100", "decode": 4, "train": 3, "score": 1, "forward": "train"},
}


def changed(**sections: dict[str, object] | None) -> dict[str, object]:
    """Return the profile with changed sections; ``None`` leaves a key or a section out."""
    found: dict[str, object] = dict(PROFILE)
    for name, keys in sections.items():
        merged = {**PROFILE.get(name, {}), **(keys or {})}
        found[name] = {key: value for key, value in merged.items() if value is not None}
        if keys is None:
            del found[name]
    return found


def profile(**sections: dict[str, object] | None) -> Profile:
    return profile_of(changed(**sections), Path())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"layout": {"gpu": "h20"}}, r"layout\.gpu: there is no GPU 'h20' \(did you mean 'h200'\?\); known are a100"),
        ({"layout": {"gpu": "H100"}}, r"no GPU 'H100' \(did you mean 'h100'\?\)"),
        ({"models": {"actor": "qwen-7b"}}, r"models\.actor: there is no model 'qwen-7b' \(did you mean 'qwen2\.5-7b'"),
        ({"models": {"reward": "zzz"}}, r"no model 'zzz'; known are .*, and others can be given as \[sizes\.NAME\]"),
        ({"lengths": {"median": -3}}, r"lengths\.median: expected more than 0, got -3"),
        ({"lengths": {"median": None}}, r"\[lengths\] needs either median, of a lognormal distribution, or file"),
        ({"lengths": {"file": "x"}}, r"\[lengths\] needs either median"),
        (
            {"lengths": {"median": None, "file": "x", "sigma": 0.5}},
            r"lengths\.sigma is of a lognormal distribution, and",
        ),
        ({"lengths": {"sigma": "wide"}}, r"lengths\.sigma: expected a number, got 'wide'"),
        ({"lengths": {"runaways": 1.5}}, r"lengths\.runaways: expected at most 1, got 1\.5"),
        ({"lengths": {"cap": 0}}, r"lengths\.cap: expected more than 0, got 0"),
        ({"lengths": None}, r"\[lengths\] is missing: a section with the keys cap, median"),
        ({"workload": {"batch": None}}, r"workload\.batch is missing: rollouts in a batch"),
        ({"workload": {"bacth": 3}}, r"unknown key 'workload\.bacth' \(did you mean 'batch'\?\)"),
        ({"workload": {"gpu": "h100"}}, r"unknown key 'workload\.gpu' \(it is a key of \[layout\]\)"),
        ({"hardware": {}}, r"unknown section 'hardware'; the sections of a configuration are workload, lengths"),
        ({"layout": {"train": 0}}, r"layout\.forward = 'train' needs devices: layout\.train is 0"),
        ({"layout": {"corunning": 3}}, r"layout\.corunning: expected at most 2, got 3"),
        ({"engine": {"training": 0.0}}, r"engine\.training: expected more than 0, got 0\.0"),
        ({"gpus": {"mine": {"flops": 1e12}}}, r"gpus\.mine\.bandwidth is missing"),
        ({"gpus": {"mine": {"flop": 1e12}}}, r"unknown key 'gpus\.mine\.flop' \(did you mean 'flops'\?\)"),
        ({"sizes": {"mine": 7}}, r"sizes\.mine.*: expected a section with the keys parameters, layers, width, cached"),
    ],
)
def test_a_wrong_profile_is_named_with_what_was_expected(
    sections: dict[str, dict[str, object] | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        profile(**sections)


def test_a_file_of_lengths_lies_beside_the_profile(tmp_path: Path) -> None:
    (tmp_path / "profile.toml").write_text(tomli_w.dumps(changed(lengths={"median": None, "file": "lengths.txt"})))
    (tmp_path / "lengths.txt").write_text("100\n4000\n")
    work = load_profile(tmp_path / "profile.toml", ["workload.samples=2"]).work()
    assert (work.samples, set(work.lengths(4, 2, 0).ravel().tolist())) == (2, {100, 2048})


def test_gpus_and_models_can_be_added() -> None:
    mine = profile(
        layout={"gpu": "mine"},
        models={"actor": "tiny", "critic": "tiny"},
        gpus={"mine": {"flops": 2e14, "bandwidth": 1e12, "memory": 24e9}},
        sizes={"tiny": {"parameters": 1e9, "layers": 10, "width": 1000, "cached": 100}},
    )
    system = mine.system()
    assert system.decoder.step == pytest.approx(2e9 / 0.8e12 + 10 * 1e-4)
    assert system.decoder.row == pytest.approx(2e9 / 1e14), "a vocabulary that is not told is drawn from for nothing"
    assert system.cache == 4 * 10 * 100
    assert system.decoder.context == pytest.approx(4000 / 0.365e12)


@pytest.mark.parametrize(("model", "speed"), [("qwen2.5-3b", 127.61), ("qwen2.5-7b", 84.28)])
def test_a_decode_step_takes_as_long_as_published_for_vllm_on_an_a100(model: str, speed: float) -> None:
    decoder = Reached().decoder(GPUS["a100-80gb"], MODELS[model], 1)
    assert 1 / decoder.seconds(1, 100) == pytest.approx(speed, rel=0.06)


def measured(day: int, part: str) -> dict[str, float]:
    folder = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h100"
    found: dict[str, float] = json.loads((folder / f"gpu-day-{day}.json").read_text())["parts"][part]
    return found


def test_what_an_h100_took_is_predicted_within_15_percent_from_its_data_sheet() -> None:
    """Of `benchmarks/results/gpu.md`: a decode step as a graph, a 7B reward model that reads, an update.

    Kernels of Triton came later: the update was operation by operation.
    """
    reached, gpu, actor = Reached(name="transformers", logits=BY_TORCH), GPUS["h100"], MODELS["qwen2.5-0.5b"]
    decode, rows = measured(3, "decode"), 64
    step = reached.decoder(gpu, actor, 1).seconds(rows, rows * (512 + 128))
    assert 1e3 * step == pytest.approx(decode["equal, ms"], rel=0.15)
    assert 1e3 * step == pytest.approx(decode["ragged, ms"], rel=0.15)
    shaped = replace(MODELS["qwen2.5-7b"], parameters=7.07e9, vocabulary=151_936, tied=True)  # it has no head
    scoring = reached.reader(gpu, shaped, reached.scoring, head=False).whole(np.full(64, 1024.0))
    assert scoring == pytest.approx(measured(1, "score")["seconds"], rel=0.15)
    updating = reached.update(gpu, actor, head=True)
    assert updating.whole(np.full(32, 1024.0)) == pytest.approx(measured(3, "update")["seconds"], rel=0.15)
    bare = replace(actor, vocabulary=0)
    head = 1 - reached.update(gpu, bare, head=False).token / updating.token
    assert head == pytest.approx(0.4, abs=0.1), "its head took 40% of the update"


def test_an_update_of_7b_reaches_the_utilisation_that_is_published_for_one_with_checkpointing() -> None:
    """KempnerForge's 52 to 58% of an H200's FLOP/s, all of its passes counted, is of fused kernels: an upper bound."""
    model, gpu = MODELS["qwen2.5-7b"], GPUS["h200"]
    seconds = Reached().update(gpu, model, head=True, checkpointing=True).whole(np.full(8, 4096.0))
    useful = 4 * model.passes(gpu.flops).whole(np.full(8, 4096.0))
    assert 0.44 < useful / seconds < 0.58


def test_the_vocabulary_is_part_of_the_parameters() -> None:
    for model in MODELS.values():
        assert 0.5 < model.body / model.parameters < 1
    with pytest.raises(ConfigError, match=r"no layers left beside the matrices of 151936 ids, 896 wide: expected more"):
        replace(MODELS["qwen2.5-0.5b"], parameters=1e8)


def test_checkpointing_is_a_fourth_pass_of_the_layers() -> None:
    engine, model = profile().engine, MODELS["qwen2.5-7b"]
    without, with_it = (
        engine.update(GPUS["h100"], model, head=False, checkpointing=each).token for each in (False, True)
    )
    assert with_it == pytest.approx(without * 4 / 3)


def test_devices_share_what_is_parallel_and_do_not_share_what_is_not() -> None:
    few, many = profile().system(), profile(layout={"train": 6, "decode": 8}).system()
    assert (few.decoder.replicas, many.decoder.replicas) == (4, 8)
    assert few.decoder.step == many.decoder.step
    assert few.updater.passes.token == pytest.approx(2 * many.updater.passes.token)
    assert few.readers["reference"].passes.token == pytest.approx(2 * many.readers["reference"].passes.token)
    assert few.readers["reward"] == many.readers["reward"]


def test_where_models_are_decides_what_meets() -> None:
    def devices(**layout: object) -> tuple[str, ...]:
        system = profile(layout={"train": 0, "score": 0, "forward": "decode", **layout}).system()
        names = (system.readers[name].device for name in ("reward", "reference", "critic"))
        return (system.decoder.device, system.updater.device, *names)

    assert devices() == ("actor",) * 5
    assert devices(score=1) == ("actor", "actor", "scorers", "actor", "actor")
    assert devices(train=2, forward="train") == ("actor", "trainer", "actor", "trainer", "trainer")
    assert devices(score=1, forward="score") == ("actor", "actor", "scorers", "scorers", "scorers")


@pytest.mark.parametrize(("corunning", "share"), [(1.0, 1.0), (1.25, 0.6), (2.0, 0.0)])
def test_kinds_of_work_on_a_device_slow_each_other_down(corunning: float, share: float) -> None:
    system = profile(layout={"corunning": corunning}).system()
    assert system.interference("decode", "score") == pytest.approx(share)


def test_a_teacher_reads_beside_the_reference_by_its_own_size() -> None:
    sections: dict[str, dict[str, object] | None] = {"workload": {"batch": 4}, "lengths": {"cap": 64, "median": 20}}
    found = profile(**sections, models={"teacher": "qwen2.5-7b", "actor": "qwen2.5-3b"})
    readers = found.system().readers
    assert readers["teacher"].place == readers["reference"].place
    assert readers["teacher"].passes.token > 1.5 * readers["reference"].passes.token
    assert "teacher" not in profile().system().readers
    schedule = ladder(4, overcommit=1, chunk=16, max_deferrals=2, staleness_price=1.0, kv_on_sync="recompute")["chunk"]
    run = SimulatedRun(found.system(), found.work(), schedule, steps=8, skipped=2)
    assert run.run().seconds > 0
    assert all(step.backlogs["teacher"].answered == 4 for step in run.ended)


def test_a_critic_a_reward_and_a_reference_may_be_missing() -> None:
    system = profile(models={"critic": None, "reward": None, "reference": False}).system()
    assert not system.readers
    both, alone = profile().system().updater.passes, system.updater.passes
    engine, gpu = profile().engine, GPUS["h100"]
    critic = engine.update(gpu, MODELS["qwen2.5-3b"], head=False)
    assert both.token - alone.token == pytest.approx(critic.token / 3), "a critic has no head"
    assert alone.token == pytest.approx(engine.update(gpu, MODELS["qwen2.5-7b"], head=True).token / 3)


def test_seconds_that_are_given_replace_those_of_the_roofline() -> None:
    engine: dict[str, object] = {
        "floor_seconds": 0.03,
        "step_seconds": 0.01,
        "row_seconds": 0.002,
        "context_seconds": 1e-6,
    }
    decoder = profile(engine=engine).system().decoder
    assert (decoder.floor, decoder.step, decoder.row, decoder.context) == (0.03, 0.01, 0.002, 1e-6)
    parts = decoder.parts(3.0, steps=100, rows=100, pauses=0.1)
    assert parts == pytest.approx(
        {"decode steps": 1.0, "rows": 0.2, "prefill and ends": 0.1, "floor and KV cache": 1.7}
    )


def test_the_work_bound_is_what_all_devices_together_need() -> None:
    """Every device but the reward model's shares the work; decode steps cost what their rows do."""
    found = profile(models={"reward": None}, layout={"score": 0})
    lengths = np.full((3, 64), 400)
    system, rows = found.system(), np.full(64, 656.0)
    decoding = 64 * 400 * (system.decoder.row + system.decoder.context * (256 + 200)) / 7
    forward = sum(reader.passes.whole(rows) for reader in system.readers.values()) * 3 / 7
    training = system.updater.passes.whole(rows) * 3 / 7
    assert work_bound(found, lengths) == pytest.approx(decoding + forward + training + 2.0 + 0.5)
    slow = profile(engine={"scoring": 0.001})
    assert work_bound(slow, lengths) == pytest.approx(slow.system().readers["reward"].passes.whole(rows))


def test_lognormal_lengths_have_the_median_the_cap_and_the_runaways_that_are_asked_for() -> None:
    drawn = Lognormal(median=(200, 400), sigma=0.5, cap=1500, runaways=0.05)(20_000, 2, seed=3)
    assert drawn.shape == (20_000, 2)
    first, last = drawn[:4000], drawn[-4000:]
    assert np.median(first) == pytest.approx(220 * np.exp(0.5 * 0.06), rel=0.1)
    assert np.median(last) / np.median(first) == pytest.approx(380 / 220, rel=0.1)
    assert drawn.max() == 1500
    assert np.mean(drawn == 1500) == pytest.approx(0.05, abs=0.01)
    assert drawn.min() >= 1


def test_observed_lengths_come_as_often_as_they_were_observed_and_groups_stay_together() -> None:
    law = Observed(((1, 10), (2, 20), (3, 30)))
    drawn = law(9, 2, seed=0)
    assert sorted(drawn[:, 0].tolist()) == [1] * 3 + [2] * 3 + [3] * 3
    assert (drawn[:, 1] == 10 * drawn[:, 0]).all()
    assert (law(9, 2, seed=1) != drawn).any()
    assert (law(9, 2, seed=0) == drawn).all()
    assert set(law(5, 3, seed=0).ravel().tolist()) <= {1, 2, 3, 10, 20, 30}


def test_a_file_of_lengths_is_numbers_or_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text('12\n{"event": "finished", "tokens": 900}\n\n{"event": "deferred"}\n7\n')
    assert Observed.read(file, cap=256).groups == ((12,), (256,), (7,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12\nlong\n", r"line 2 of .*: expected a length, a whole number of 1 or more, got 'long'"),
        ("0\n", "line 1 of .*got '0'"),
        ("1.5\n", "line 1 of .*got '1.5'"),
        ('{"tokens": "12"}\n', "line 1 of"),
        ("\n", "holds no lengths: expected a number of tokens on each line"),
        ('{"event": "deferred"}\n', "holds no lengths"),
    ],
)
def test_nonsense_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Observed.read(file, cap=256)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the lengths in .*gone"):
        Observed.read(tmp_path / "gone", cap=256)


def test_an_update_over_frozen_weights_takes_a_pass_less_of_its_matrices() -> None:
    gpu, model, engine = GPUS["h100"], MODELS["qwen2.5-7b"], Reached(activations=0.0, logits=0.0)
    for checkpointing in (False, True):
        whole, frozen = (
            engine.update(gpu, model, head=True, checkpointing=checkpointing, frozen=each) for each in (False, True)
        )
        layers, head = 2 * model.body, 2 * model.head
        assert whole.token * gpu.flops * engine.training == pytest.approx((3 + checkpointing) * layers + 4 * head)
        assert frozen.token * gpu.flops * engine.training == pytest.approx((2 + checkpointing) * layers + 3 * head)
        assert frozen.pair == whole.pair, "attention has no weights"
