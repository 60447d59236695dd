"""``oppo doctor``: what each model of a run will need, what does not fit, and one longest step as a trial."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.filesize import decimal
from transformers import LlamaConfig

from oppo.cli import DONE, UNUSABLE, main
from oppo.config.load import load
from oppo.hf.devices import CPU, Devices
from oppo.hf.memory import Bytes, Hardware
from oppo.run.deployment import Deployment
from oppo.run.memory import ALONE, Expected, advice, crowded, engine_share, expected, load_of
from oppo.vllm.arguments import placed, route_of
from tests.hf import tiny
from tests.kit.workplace import oppo, tokenizer

MIB = 1 << 20


@cache  # what is done under load takes a second
def needs(folder: Path, *overrides: str, at_rest: bool = False) -> dict[str, Bytes]:
    settings = load(folder / "config.toml", overrides)
    found = expected(Deployment.of(settings), None if at_rest else load_of(settings, 6))
    return {each.model: each.bytes for each in found}


def resting(folder: Path, *overrides: str) -> dict[str, Bytes]:
    return needs(folder, *overrides, at_rest=True)


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor count what is certain: what models do under load takes it a second each time."""

    def rested(count: Callable[..., object]) -> Callable[..., object]:
        return lambda deployment, load: count(deployment, None)

    monkeypatch.setattr("oppo.run.doctor.expected", rested(expected))
    monkeypatch.setattr("oppo.run.doctor.advice", rested(advice))


@pytest.fixture(params=["rest", pytest.param("work", marks=pytest.mark.deep)])
def counted(request: pytest.FixtureRequest) -> None:
    if request.param == "rest":
        request.getfixturevalue("at_rest")


def doctor(folder: Path, *arguments: str) -> int:
    return main(["doctor", str(folder / "config.toml"), *arguments])


def test_every_model_is_shown_with_its_device_and_what_it_needs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(folder, "--set", "step.overcommit=3") == DONE
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    assert "for 7 rollouts in flight" in said
    rows = {line.split()[0]: line.split()[1] for line in said.splitlines() if line}
    assert {name: rows[name] for name in ("policy", "reference", "reward", "critic", "trainer")} == dict.fromkeys(
        ("policy", "reference", "reward", "critic", "trainer"), "cpu"
    )
    assert "most of it activations of the trainer" in said
    assert not (folder / "runs").exists()


@pytest.mark.adapters
def test_weights_that_models_share_are_counted_once(folder: Path) -> None:
    plain, apart = resting(folder), resting(folder, "models.share_weights=false")
    assert plain["trainer"].weights == 0
    assert apart["trainer"].weights == plain["policy"].weights + plain["critic"].weights
    adapters = resting(folder, "models.lora_rank=2")
    assert (adapters["reference"].weights, plain["reference"].weights) == (0, plain["policy"].weights)
    assert adapters["trainer"].optimizer < plain["trainer"].optimizer
    trunk = resting(folder, "models.shared_trunk=true", "models.critic=")
    assert trunk["critic"].weights == 0
    assert trunk["trainer"].gradients < plain["trainer"].gradients
    assert resting(folder, "algorithm.is_correction=truncated")["proximal"].weights == 0
    assert "critic" not in resting(folder, "step.algorithm=rloo", "step.batch=4")


def test_each_rank_has_its_share_of_what_is_sharded(folder: Path) -> None:
    alone, both = needs(folder), 'placement.trainer=["cpu", "cpu"]'
    sharded, whole = needs(folder, both), resting(folder, both, "placement.shard=false")
    for rank in ("trainer, rank 0", "trainer, rank 1"):
        assert sharded[rank].optimizer == alone["trainer"].optimizer // 2
        assert sharded[rank].activations == alone["trainer"].activations
        assert whole[rank].optimizer == resting(folder)["trainer"].optimizer
    assert (whole["trainer, rank 0"].weights, whole["trainer, rank 1"].weights > 0) == (0, True)


def test_what_is_certain_is_less_than_what_is_expected(folder: Path) -> None:
    certain, worst = resting(folder), needs(folder)
    assert certain.keys() == worst.keys()
    for name, each in certain.items():
        assert (each.weights, each.optimizer, each.gradients) == pytest.approx(
            (worst[name].weights, worst[name].optimizer, worst[name].gradients), rel=0.01
        )
        assert each.total < worst[name].total


@pytest.mark.parametrize("name", ["jamba", "minimax"])
def test_a_policy_that_cannot_decode_is_refused_as_a_run_refuses_it(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.ONLY_WHOLE[name]().save_pretrained(folder / name)
    tokenizer().save_pretrained(folder / name)
    assert doctor(folder, "--set", f"models.policy={name}") == UNUSABLE
    said = " ".join(capsys.readouterr().err.split())
    assert "ForCausalLM" in said
    assert "models.engine = 'vllm'" in said


def test_a_device_that_is_too_small_is_named_with_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"cpu": (5 * MIB, 5 * MIB), "cuda": (9 * MIB, 9 * MIB)}
    monkeypatch.setattr("oppo.run.memory.memory_of", lambda device, assumed: memory[device.type])
    gpu = torch.device("cuda", 0)
    three = [Expected(name, device, Bytes(3 * MIB)) for name, device in (("a", CPU), ("b", CPU), ("c", gpu))]
    assert crowded(three) == ["cpu has 5.2 MB free, and its models need 6.3 MB (a 3.1 MB, b 3.1 MB)"]
    assert not crowded(three[1:])


@pytest.mark.usefixtures("at_rest")
def test_models_that_do_not_fit_are_refused_before_they_are_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oppo.hf.memory.free", lambda device: 500_000)
    assert oppo(folder, "", "run.name=crowded") == UNUSABLE
    said = capsys.readouterr().err
    assert "cpu has 500.0 kB free, and its models need" in said
    assert "policy" in said
    assert "models.lora_rank = 16 would fit" in said or "models.dtype = 'bfloat16'" in said
    assert "[placement]" in said
    assert "loading" not in said
    assert doctor(folder) == UNUSABLE
    assert "too little memory: cpu has 500.0 kB free" in capsys.readouterr().out


def test_the_states_of_a_policy_s_rollouts_are_counted_before_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hybrid = ("models.policy=falcon-h1", "rewards.0.source=reward.py:short", "models.critic=reward")
    tiny.STATEFUL["falcon-h1"]().save_pretrained(folder / "falcon-h1")
    tokenizer().save_pretrained(folder / "falcon-h1")
    few, many = (resting(folder, *hybrid, f"step.batch={batch}") for batch in (4, 256))
    assert resting(folder)["policy"].keys_values == 0
    states = [each["policy"].keys_values for each in (few, many)]
    assert states[1] / states[0] == pytest.approx((256 + 2) / (4 + 2), rel=0.1)
    assert states[0] <= needs(folder, *hybrid)["policy"].keys_values
    room = sum(each.total for each in few.values()) + states[0]
    monkeypatch.setattr("oppo.hf.memory.free", lambda device: room)
    assert oppo(folder, "", *hybrid, "step.batch=256", "run.name=crowded") == UNUSABLE
    said = capsys.readouterr().err
    assert f"free, and its models need {decimal(sum(each.total for each in many.values()))}" in said
    assert "loading" not in said


@pytest.mark.parametrize(
    "extra",
    [
        ("step.lookahead=1",),
        pytest.param(('placement.trainer=["cpu", "cpu"]', "step.lookahead=1"), marks=pytest.mark.deep),
    ],
    ids=["alone", "ranks"],
)
def test_a_trial_makes_one_longest_step_and_saves_nothing(
    folder: Path, extra: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [part for each in ("sampling.stop=[3]", *extra) for part in ("--set", each)]
    assert doctor(folder, *overrides, "--trial") == DONE
    said = capsys.readouterr()
    assert "making one step as long as the settings allow" in said.err
    assert "the longest step took" in said.out
    assert "of it with the models loaded" in said.out
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.policy=nowhere", "models.policy"),
        ("rewards.0.source=actor", "rewards.0"),
        ("data.prompts=none.jsonl", "there is no prompt file"),
        ("placement.reward=cuda:9", "placement.reward: there is no 'cuda:9' here"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    folder: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = doctor(folder, "--set", override)
    said = capsys.readouterr()
    if override == "rewards.0.source=actor":  # whether there is a head is known when weights are read
        assert code == DONE
        assert doctor(folder, "--set", override, "--trial") == UNUSABLE
        said = capsys.readouterr()
    else:
        assert code == UNUSABLE
    assert message in said.err
    assert "Traceback" not in said.err


PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
PLANS = re.findall(
    r"```toml\n# oppo doctor config.toml (--assume \S+.*?)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)
LARGE = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def large(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configurations of a policy and a reward model of 7 billion parameters, without weights."""
    place = tmp_path_factory.mktemp("large")
    shape = {**LARGE, "num_hidden_layers": 28, "vocab_size": 152_064, "max_position_embeddings": 4096}
    for name, heads in (("actor", {}), ("reward", {"num_labels": 1})):
        tokenizer().save_pretrained(place / name)
        config = LlamaConfig.from_dict({**shape, **heads, "tie_word_embeddings": False})
        config.architectures = ["LlamaForSequenceClassification" if heads else "LlamaForCausalLM"]
        config.save_pretrained(place / name)
    (place / "prompts.jsonl").write_text((folder / "prompts.jsonl").read_text())
    return place


def plan(folder: Path, text: str, assume: str, *overrides: str) -> int:
    head = 'models.policy = "actor"\nrewards = [{ source = "reward" }]\n'
    head += 'data.prompts = "prompts.jsonl"\nstep.chunk = "whole"\n'
    (folder / "config.toml").write_text(head + text)
    chosen = [part for each in overrides for part in ("--set", each)]
    return main(["doctor", str(folder / "config.toml"), *assume.split(), *chosen])


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(("assume", "text"), PLANS)
def test_the_plans_of_the_page_fit_the_machines_that_it_names(
    large: Path, assume: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(large, text, assume, "sampling.max_new_tokens=512") == DONE, capsys.readouterr()
    said = capsys.readouterr()
    assert "for 256 rollouts in flight" in said.out, "a group of eight for each prompt"
    assert "counting the memory of the trainer" in said.err
    assert ("policy, worker 1" in said.out) is ("vllm" in text)
    assert "assumed" in said.out
    assert "free;" not in said.out, "nothing of this machine"


@pytest.mark.usefixtures("counted")
def test_the_example_of_two_machines_fits_the_first(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (PAGE.parents[1] / "examples" / "two_machines" / "config.toml").read_text(encoding="utf-8")
    (large / "config.toml").write_text(text.replace("/shared/", f"{large}/"))
    (assume,) = re.findall(r"oppo doctor config.toml (--assume \S+)", text)
    assert doctor(large, *assume.split(), "--set", "step.chunk=whole") == DONE, capsys.readouterr()
    said = capsys.readouterr().out
    assert "for 72 rollouts in flight" in said
    assert "trainer, rank 5" in said
    assert "policy" not in said, "it is on the other machine"


def test_there_is_a_plan_for_eight_gpus_and_for_two_machines() -> None:
    assert [assume.split()[1] for assume, _ in PLANS] == ["8xH100-80GB", "2x8xH100-80GB"]


@pytest.mark.parametrize(
    ("assume", "overrides", "names"),
    [
        ("--assume 8xA100", (), ["--assume", "8xH100-80GB"]),
        ("--assume 1xH100-80GB", ("placement.policy=cuda:1",), ["placement.policy", "'cuda:1'", "assumed"]),
        (
            "--assume 1xH100-80GB",
            ("vllm.tensor_parallel_size=2", "models.engine=vllm"),
            ["2 workers", "placement.policy"],
        ),
        ("--assume 1xH100-80GB", ("vllm.model=x", "models.engine=vllm"), ["vllm.model"]),
        ("--assume 1xH100-80GB --trial", (), ["--trial", "--assume"]),
        ("--assume 1xH100-80GB", ('placement.trainer=["cuda", "cuda"]',), ["names a device twice", "--ray"]),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(
    folder: Path, assume: str, overrides: tuple[str, ...], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [part for each in overrides for part in ("--set", each)]
    assert doctor(folder, *assume.split(), *chosen) == UNUSABLE
    said = capsys.readouterr().err
    assert all(name in said for name in names), said


def cluster_faults(folder: Path, assume: str, *overrides: str) -> list[str]:
    settings, assumed = load(folder / "config.toml", ["placement.cluster=auto", *overrides]), Hardware.assumed(assume)
    needs = expected(Deployment.of(settings, assumed), None)
    return crowded(needs, assumed, spread=settings.placement.spread)


def test_a_cluster_that_has_too_few_gpus_is_named_with_its_actors(folder: Path) -> None:
    (fault,) = cluster_faults(folder, "2x2xH100-80GB", "placement.scorers=cuda")
    assert "3 models are actors with a GPU each (reference, reward, critic)" in fault
    assert not cluster_faults(folder, "2x3xH100-80GB", "placement.scorers=cuda")


@pytest.mark.usefixtures("at_rest")
def test_a_cluster_that_has_too_few_machines_to_spread_ranks_over_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = ('placement.trainer=["cuda", "cuda", "cuda"]', 'placement.remote=["trainer"]')
    spread = (*ranks, "placement.spread=true")
    assert not cluster_faults(folder, "2x4xH100-80GB", *ranks)
    assert not cluster_faults(folder, "3x4xH100-80GB", *spread)
    (fault,) = cluster_faults(folder, "2x4xH100-80GB", *spread)
    assert "placement.spread puts 2 training ranks" in fault
    overrides = [part for each in ("placement.cluster=auto", *spread) for part in ("--set", each)]
    assert doctor(folder, "--assume", "2x4xH100-80GB", *overrides) == UNUSABLE
    assert fault in capsys.readouterr().out


def engine(folder: Path, *overrides: str) -> dict[str, Expected]:
    settings = load(folder / "config.toml", ["models.engine=vllm", *overrides])
    deployment = Deployment.of(settings, Hardware.assumed("4xH100-80GB"))
    return {each.model: each for each in expected(deployment, None)}


def test_an_engine_is_counted_with_its_share_and_has_what_others_leave(folder: Path) -> None:
    beside, apart = engine(folder), engine(folder, "placement.policy=cuda:3")
    taken = sum(each.bytes.total for name, each in beside.items() if name != "policy")
    assert apart["policy"].share == ALONE
    assert beside["policy"].share is not None
    assert beside["policy"].share < ALONE or taken < 5e9
    for found in (beside, apart):
        assert found["policy"].bytes.total == pytest.approx(80e9 * (found["policy"].share or 0), rel=0.01)
    assert not crowded([*beside.values()], Hardware.assumed("1xH100-80GB"))
    chosen = engine(folder, "vllm.gpu_memory_utilization=0.3")["policy"]
    assert (chosen.share, chosen.bytes.total) == (0.3, 24_000_000_000)
    cache = engine(folder, "vllm.kv_cache_memory_bytes=5000000")["policy"]
    assert (cache.share, cache.bytes.keys_values) == (None, 5_000_000)
    large = [Expected("trainer", torch.device("cuda", 0), Bytes(60 * 10**9))]
    settings = load(folder / "config.toml", ["models.engine=vllm"])
    alone = Deployment.of(settings, Hardware.assumed("1xH100-80GB"))
    assert engine_share(alone, large) == pytest.approx(0.16, abs=0.01)


def test_adapters_are_counted_in_float32_where_vllm_serves_them(folder: Path) -> None:
    half = engine(folder, "models.dtype=bfloat16")["policy"].bytes.weights
    merged = engine(folder, "models.dtype=bfloat16", "models.lora_rank=1", "models.lora_sync=merged")[
        "policy"
    ].bytes.weights
    assert merged > 2 * half


def test_weights_begin_where_they_lie_and_the_actor_is_not_on_the_gpu_of_an_engine(folder: Path) -> None:
    assumed = Hardware.assumed("8xH100-80GB")

    def found(*overrides: str) -> Devices:
        return Deployment.of(load(folder / "config.toml", ["models.engine=vllm", *overrides]), assumed).devices

    alone = found("placement.trainer=cuda:5")
    assert [str(each) for each in (alone.policy, alone.actor, alone.weights)] == ["cuda:0", "cuda:5", "cuda:5"]
    ranks = found('placement.trainer=["cuda:5", "cuda:6"]', "placement.reference=cuda:3")
    assert [str(each) for each in (ranks.policy, ranks.actor, ranks.weights)] == ["cuda:0", "cuda:3", "cpu"]
    assert route_of({}, ranks.weights, on_cpu=False, gpus=8).backend == "file"
    assert route_of({}, alone.weights, on_cpu=False, gpus=8).backend == "nccl"
    assert placed({"tensor_parallel_size": 2}, torch.device("cuda", 4))["device_ids"] == [4, 5]


def test_the_engine_of_a_reward_is_counted_on_its_gpus_and_a_server_is_not(folder: Path) -> None:
    on_vllm = ("rewards.0.engine=vllm", "placement.reward=cuda:1")
    found = engine(folder, *on_vllm, "rewards.0.vllm.tensor_parallel_size=2")
    workers = [found[f"reward, worker {number}"] for number in range(2)]
    assert [str(each.device) for each in workers] == ["cuda:1", "cuda:2"]
    assert all(each.bytes.total == pytest.approx(ALONE * 80e9, rel=0.01) for each in workers)
    assert found["policy"].share == ALONE, "it is on another GPU"
    shared = engine(folder, "rewards.0.engine=vllm", "rewards.0.vllm.gpu_memory_utilization=0.3")
    assert shared["reward"].bytes.total == pytest.approx(24e9, rel=0.01)
    assert shared["policy"].share == pytest.approx((80 - 1.1 * 24) / 80, abs=0.05), "what that one leaves"
    assert not crowded([*shared.values()], Hardware.assumed("1xH100-80GB"))
    (fault,) = crowded([*engine(folder, "rewards.0.engine=vllm").values()], Hardware.assumed("1xH100-80GB"))
    assert "of which its models leave an engine none" in fault
    assert "reward 73" in fault
    small = engine(folder, "rewards.0.engine=vllm", "rewards.0.vllm.kv_cache_memory_bytes=5000000")
    assert small["reward"].bytes.keys_values == 5_000_000
    assert "reward" not in engine(folder, "rewards.0.engine=vllm", "rewards.0.url=http://host:8000")


def test_the_engine_of_a_reference_is_counted_in_its_place_and_a_server_is_not(folder: Path) -> None:
    on_vllm = ("scorers.reference.engine=vllm", "placement.reference=cuda:1")
    found = engine(folder, *on_vllm, "scorers.reference.vllm.tensor_parallel_size=2")
    workers = [found[f"reference, worker {number}"] for number in range(2)]
    assert [str(each.device) for each in workers] == ["cuda:1", "cuda:2"]
    assert "reference" not in found
    assert "reference" in engine(folder)
    assert "reference" not in engine(folder, *on_vllm, "scorers.reference.url=http://host:8000")
