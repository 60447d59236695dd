"""``oppo train`` on an engine that lives elsewhere, as far as the application goes: a stand-in takes vLLM's place.

It decodes with transformers, on weights of its own that only a weight sync reaches, as vLLM would."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
import torch

from oppo.algorithms.base import ClippedAlgorithm
from oppo.cli import main
from oppo.config.load import load_settings, resolve
from oppo.config.settings import Settings
from oppo.errors import ConfigError, ModelError
from oppo.hf.loading import load_causal
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ProximalLogprobs, RecomputedLogprobs
from oppo.log import logger
from oppo.models import Sampling, Weights
from oppo.observe import Reporter
from oppo.placement import Thread
from oppo.run.checkpoint import fingerprints, require_same
from oppo.run.train import PreparedRun, prepare
from oppo.vllm.arguments import OF_LOGPROBS, OF_REWARDS, SETTINGS
from oppo.vllm.scorers import LogprobServer, RewardServer
from tests.hf import tiny
from tests.kit.responses import VOCABULARY
from tests.kit.workplace import oppo, records, tokenizer
from tests.vllm.fakes import FakeAsyncLLM, FakeServer, engine_of


@dataclass
class StandIn:
    """In the place of ``VllmEngine``."""

    directory: Path
    arguments: Mapping[str, object]
    trainer: torch.device
    cores: int | None
    log: Path | None
    thread: Thread = field(default_factory=lambda: Thread("engine"))
    longest: int = 500
    closed: bool = False
    loads: list[int] = field(default_factory=list)

    started: ClassVar[list[StandIn]] = []

    @classmethod
    def start(
        cls,
        model: str | Path,
        *,
        arguments: Mapping[str, object],
        trainer: torch.device,
        cores: int | None = None,
        adapters: int = 0,
        log: Path | None = None,
        sleeps: bool = False,
        images: bool = False,
    ) -> Self:
        assert not sleeps
        assert not images
        assert not adapters
        logger.info("starting vLLM")
        engine = cls(Path(model), arguments, trainer, cores, log)
        StandIn.started.append(engine)
        if log is not None:
            log.write_text("started\n")
        return engine

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True
        self.thread.close()


class StandInPolicy(HfPolicy):
    """In the place of ``VllmPolicy``."""

    def __init__(self, engine: StandIn, *, sampling: Sampling, kv_on_sync: Any, decode: Any, **given: Any) -> None:
        if sampling.top_k == 7:
            raise ConfigError("seven is refused")
        self._engine = engine
        self.reporter = Reporter("policy")
        model = load_causal(engine.directory)
        super().__init__(model, sampling=sampling, place=engine.thread, kv_on_sync=kv_on_sync, decode=decode, **given)

    async def load(self, weights: Weights) -> None:
        with self.reporter.reported("load"):
            await super().load(replace(weights, actor=weights.standalone()))
        self._engine.loads.append(weights.version)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandIn]]:
    def require(arguments: Mapping[str, object], *, of: Mapping[str, str], planned: bool) -> None:
        assert of == SETTINGS
        assert not planned
        if "max_num_seq" in arguments:
            raise ConfigError("unknown argument 'max_num_seq' (did you mean 'max_num_seqs'?)")

    StandIn.started.clear()
    monkeypatch.setattr("oppo.run.engines.VllmEngine", StandIn)
    monkeypatch.setattr("oppo.run.engines.VllmPolicy", StandInPolicy)
    monkeypatch.setattr("oppo.run.engines.check_arguments", require)
    monkeypatch.setattr("oppo.run.engines.computes_on_cpu", lambda: True)
    yield StandIn.started
    assert all(engine.closed for engine in StandIn.started)


def on_vllm(folder: Path, name: str, *overrides: str, command: str = "") -> int:
    return oppo(folder, command, f"run.name={name}", "models.engine=vllm", "run.panel=off", *overrides)


def test_a_run_serves_synced_copies_corrects_every_token_and_is_resumed_with_its_checkpoints_weights(
    folder: Path, stand_in: list[StandIn]
) -> None:
    held_out = ("eval.prompts=prompts.jsonl", "eval.count=3", "eval.every=1", "eval.samples=2")
    assert on_vllm(folder, "run", "run.steps=3", "vllm.max_num_seqs=8", *held_out) == 0
    lines = records(folder, "run", "metrics.jsonl")
    assert [line["trained"] for line in lines] == [4, 4, 4]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert abs(line["mismatch/kl_current"]) < 1e-9, "decoded with the weights that were trained"
    (engine,) = stand_in
    assert engine.loads == [1, 2, 3]
    assert engine.directory == folder / "actor"
    assert engine.trainer == torch.device("cpu")
    assert engine.cores == 1
    assert engine.log == folder / "runs" / "run" / "vllm.log"
    assert engine.log.read_text() == "started\n", "what the engine has said stays when the run begins"
    assert engine.arguments == {
        "dtype": "float32",
        "trust_remote_code": False,
        "max_model_len": 512,
        "max_num_seqs": 8,
    }, "as long as the model reads, which is less than the longest prompt and response"
    again = load_settings(folder / "runs" / "run" / "config.toml")
    assert (again.models.engine, again.vllm) == ("vllm", {"max_num_seqs": 8})
    assert [line["version"] for line in records(folder, "run", "eval.jsonl")] == [0, 1, 2, 3]
    assert main(["resume", str(folder / "runs" / "run"), "--set", "run.steps=5", "--set", "vllm.max_num_seqs=3"]) == 0
    assert stand_in[1].loads == [3, 4, 5], "first those of the checkpoint"
    lines = records(folder, "run", "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(abs(line["mismatch/kl_current"]) < 1e-9 for line in lines)


def test_a_dry_run_starts_the_engine_for_prompt_and_response_and_leaves_nothing(
    folder: Path, stand_in: list[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_vllm(folder, "dry", "vllm.seed=3", "data.max_prompt_tokens=20", command="--dry-run --verbose") == 0
    said = capsys.readouterr()
    assert "starting vLLM" in said.err
    assert "[vllm]\nseed = 3" in said.out
    assert stand_in[0].log is None
    assert stand_in[0].arguments["max_model_len"] == 32
    assert not (folder / "runs" / "dry").exists()
    assert on_vllm(folder, "given", "vllm.max_model_len=99", command="--dry-run") == 0
    assert stand_in[1].arguments["max_model_len"] == 99


@pytest.mark.adapters
def test_an_engine_begins_with_what_a_quantised_base_computes_with(folder: Path, stand_in: list[StandIn]) -> None:
    assert on_vllm(folder, "bits", "models.lora_rank=2", "models.quantization=nf4", "vllm.dtype=float32") == 0
    assert stand_in[0].loads[:2] == [0, 1]
    assert all(abs(line["mismatch/kl_current"]) < 1e-6 for line in records(folder, "bits", "metrics.jsonl"))


URLS = ("http://localhost:8001", "http://localhost:8002")
REPLICAS, SERVERS = "placement.policy_replicas=2", f"vllm.urls={json.dumps(URLS)}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("vllm.max_num_seq=3",), "unknown argument 'max_num_seq' (did you mean 'max_num_seqs'?)"),
        (("placement.share=sleep",), "vLLM does not sleep on a CPU"),
        ((REPLICAS, "step.kv_on_sync=keep"), "set step.kv_on_sync = 'recompute'"),
        ((REPLICAS, "vllm.tensor_parallel_size=2"), "[vllm] has 2 workers"),
        ((SERVERS, "vllm.max_num_seqs=3"), "vllm.max_num_seqs is for an engine that the run starts"),
        ((SERVERS, "vllm.weight_directory=/x"), "vllm.weight_directory (did you mean 'weights_directory'?)"),
        ((SERVERS, "step.kv_on_sync=keep"), "set step.kv_on_sync = 'recompute'"),
        (
            (SERVERS, "vllm.api_key_env=no-such-canary"),
            "vllm.api_key_env: expected the name of an environment variable",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    folder: Path, stand_in: list[StandIn], capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], message: str
) -> None:
    assert on_vllm(folder, "refused", *overrides) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "loading" not in said.err
    assert "canary" not in said.err + said.out
    assert not stand_in
    assert not (folder / "runs" / "refused").exists()


def test_a_policy_that_is_refused_takes_its_engine_with_it(
    folder: Path, stand_in: list[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_vllm(folder, "seven", "sampling.top_k=7") == 2
    assert "seven is refused" in capsys.readouterr().err
    assert stand_in[0].closed
    assert on_vllm(folder, "seven") == 0, "its log is no reason against another run of that name"


def test_its_tokens_are_scored_again_only_where_another_engine_made_them_and_its_work_is_told_like_a_place_s(
    folder: Path,
) -> None:
    def prepared(*overrides: str) -> PreparedRun:
        return prepare(load_settings(folder / "config.toml", overrides), dry_run=True)

    with prepared("models.engine=vllm") as session:
        assembly = session.assembly
        assert type(assembly.roles.proximal) is RecomputedLogprobs
        spans: list[object] = []
        assembly.listen(spans.append)
        (worker,) = assembly.serving.workers
        assert isinstance(worker, Reporter)
        with worker.reported("decode"):
            assert assembly.at_work() == ("policy: decode",)
        assert not assembly.at_work()
        assert len(spans) == 1
    with prepared("models.engine=vllm", "algorithm.is_correction=none") as session:
        assert session.assembly.roles.proximal is None
    with prepared("algorithm.is_correction=truncated") as session:
        assert type(session.assembly.roles.proximal) is ProximalLogprobs


def test_an_engine_is_ended_also_if_a_place_cannot_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = prepare(load_settings(folder / "config.toml", ["models.engine=vllm"]), dry_run=True)
    close = session.assembly.places.training.close

    def broken() -> None:
        close()
        raise ModelError("the trainer does not end")

    monkeypatch.setattr(session.assembly.places.training, "close", broken)
    with pytest.raises(ModelError, match="does not end"):
        session.close()
    session.assembly.places.scoring["reward"].close()
    session.assembly.places.acting[0].close()


@dataclass
class StandInServer(StandIn):
    """In the place of ``VllmServer``."""

    url: str = ""
    given: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def connect(cls, url: str, **given: Any) -> StandInServer:
        server = cls(Path(given["model"]), {}, given["trainer"], None, None, url=url, given=given)
        StandIn.started.append(server)
        return server


def test_servers_are_connected_to_by_their_urls_and_several_are_a_pool(
    folder: Path, stand_in: list[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oppo.run.engines.VllmServer", StandInServer.connect)
    monkeypatch.setenv("KEY_OF_THE_TEST", "canary-0123456789")
    chosen = (SERVERS, "vllm.api_key_env=KEY_OF_THE_TEST", "vllm.weights_directory=/shared")
    assert on_vllm(folder, "servers", "run.steps=2", *chosen) == 0
    assert [line["trained"] for line in records(folder, "servers", "metrics.jsonl")] == [4, 4]
    said = capsys.readouterr().err
    servers = [each for each in stand_in if isinstance(each, StandInServer)]
    for server, url in zip(sorted(servers, key=lambda each: each.url), URLS, strict=True):
        assert server.loads == [0, 1, 2], "it may have those of an earlier run"
        assert server.url == url
        assert server.given["api_key"] == "canary-0123456789"
        assert server.given["weights_directory"] == "/shared"
        assert f"the vLLM server at {url} rounds the weights to torch.bfloat16" in said
    text = (folder / "runs" / "servers" / "config.toml").read_text()
    assert "KEY_OF_THE_TEST" in text
    assert "canary" not in text


class StandInProcess:
    """In the place of ``ServerProcess``, in the process of a place."""

    def __init__(self, model: Path, **given: Any) -> None:
        self.given = {"model": str(model), **given}

    def whereabouts(self, *, writes: bool) -> tuple[str, Path | None]:
        assert not writes
        return f"http://127.0.0.1:{os.getpid()}/{json.dumps(self.given, default=str)}", None

    def end(self) -> None:
        Path(self.given["log"]).with_name(f"ended-{os.getpid()}").touch()


def test_replicas_are_servers_that_the_run_starts_in_processes_of_its_own(
    folder: Path, stand_in: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oppo.run.engines.VllmServer", StandInServer.connect)
    monkeypatch.setattr("oppo.run.engines.ServerProcess", StandInProcess)
    chosen = ("run.steps=2", "vllm.max_num_seqs=8", "placement.policy_replicas=2")
    assert on_vllm(folder, "replicas", *chosen) == 0
    assert [line["trained"] for line in records(folder, "replicas", "metrics.jsonl")] == [4, 4]
    servers = [server for server in stand_in if isinstance(server, StandInServer)]
    places = {server.url.split("/")[2] for server in servers}
    assert len(places) == len(servers) == 2
    for server in servers:
        assert server.loads == [0, 1, 2]
        given = json.loads(server.url.split("/", 3)[3])
        assert given["key"] == server.given["api_key"]
        assert len(given["key"]) > 30
        assert given["given"]["max_num_seqs"] == 8
        assert (given["cores"], given["backend"], given["adapters"]) == (1, "file", 0)
        assert given["log"] == str(folder / "runs" / "replicas" / "vllm.log")
    assert len([*(folder / "runs" / "replicas").glob("ended-*")]) == 2


LONGEST = 160


@dataclass
class ScoringStandIn(StandIn):
    """In the place of the ``VllmEngine`` of a reward model, or of a reference or a teacher."""

    facts: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        pools = self.arguments.get("runner") == "pooling"
        room: dict[str, Any] = {"longest": LONGEST, "runner": "pooling"} if pools else {"longest": LONGEST + 1}
        facts = {"model": str(self.directory), "vocabulary": VOCABULARY, **room, **self.facts}
        self.llm = FakeAsyncLLM(facts=facts)
        self.engine = engine_of(self.llm)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.fixture
def scoring(stand_in: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    def require(arguments: Mapping[str, object], **given: object) -> None:
        assert given["of"] in (SETTINGS, OF_REWARDS, OF_LOGPROBS)
        assert given["planned"] is False
        if "max_num_seq" in arguments:
            raise ConfigError("unknown argument 'max_num_seq'")

    def start(model: str | Path, *, arguments: Mapping[str, object], **given: Any) -> StandIn:
        kind = ScoringStandIn if {"runner", "worker_extension_cls"} & arguments.keys() else StandIn
        return kind.start(model, arguments=arguments, **given)

    monkeypatch.setattr("oppo.run.engines.VllmEngine", SimpleNamespace(start=start))
    monkeypatch.setattr("oppo.run.engines.check_arguments", require)
    return stand_in


REWARD_ON_VLLM = ("rewards.0.engine=vllm", "run.panel=off")
READ_ON_VLLM = ("scorers.reference.engine=vllm", "run.panel=off", "run.cores=2")


def test_reward_model_and_reference_have_an_engine_each_which_ends_with_the_run(
    folder: Path, scoring: list[StandIn]
) -> None:
    sized = ("models.engine=vllm", "rewards.0.vllm.block_size=8", "scorers.reference.vllm.block_size=8")
    assert oppo(folder, "", *REWARD_ON_VLLM, *READ_ON_VLLM, *sized, "run.name=scored") == 0
    steps = records(folder, "scored", "metrics.jsonl")
    assert [step["trained"] for step in steps] == [4, 4]
    assert all(math.isfinite(step["objective/kl"]) and step["objective/kl"] for step in steps)
    common = {"dtype": "float32", "trust_remote_code": False, "max_model_len": 512, "block_size": 8}
    own = {
        "reward": {"runner": "pooling", "convert": "classify"},
        "actor": {"worker_extension_cls": "oppo.vllm.plugin.LogitsOfPrompts"},
    }
    engines = {engine.directory.name: engine for engine in scoring if isinstance(engine, ScoringStandIn)}
    assert (set(engines), len(scoring)) == (set(own), 3)
    for name, engine in engines.items():
        assert (engine.directory, str(engine.trainer)) == (folder / name, "cpu")
        assert repr(engine.cores) == "slice(1, 2, None)"
        assert engine.log == folder / "runs" / "scored" / "vllm.log"
        assert engine.arguments == common | own[name]
        assert len(engine.llm.sequences) > 8, "prefixes were read while responses were written"
        assert not engine.llm.asking
    saved = load_settings(folder / "runs" / "scored" / "config.toml")
    assert saved.reward_engines["rewards.0"].vllm == saved.on_vllm["reference"].vllm == {"block_size": 8}


def test_its_calls_are_seen_and_it_is_killed_where_a_run_hangs(folder: Path, scoring: list[StandIn]) -> None:
    with prepare(load_settings(folder / "config.toml", REWARD_ON_VLLM), dry_run=True) as session:
        (scorer,) = session.assembly.scoring
        with scorer.reporter.reported("extend"):
            assert session.assembly.at_work() == ("reward model: extend",)
        session.assembly.abort()
        assert scoring[0].closed
    assert session.assembly.positions == LONGEST


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*REWARD_ON_VLLM, "rewards.0.vllm.max_num_seq=3"), "rewards.0: unknown argument 'max_num_seq'"),
        (
            (*REWARD_ON_VLLM, "rewards.0.url=http://localhost:1", "rewards.0.api_key_env=canary"),
            "rewards.0: api_key_env: expected the name of an environment variable",
        ),
        ((*REWARD_ON_VLLM, "rewards.0.source=several"), "several is no causal model with one label"),
        ((*REWARD_ON_VLLM, "rewards.0.source=foreign-reward"), "rewards.0: "),
        ((*READ_ON_VLLM, "scorers.reference.vllm.max_num_seq=3"), "scorers.reference: unknown argument 'max_num_seq'"),
        ((*READ_ON_VLLM, "sampling.top_k=5"), "scorers.reference: sampling.top_k = 5 leaves ids out"),
        (
            (*READ_ON_VLLM, "scorers.reference.url=http://localhost:1", "sampling.temperature=0.7"),
            "scorers.reference: sampling.temperature = 0.7 divides the logits",
        ),
        ((*READ_ON_VLLM, "models.reference=foreign"), "models.reference: "),
    ],
)
def test_a_scorer_that_vllm_cannot_serve_is_refused_before_an_engine_starts(
    folder: Path, scoring: list[StandIn], capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], message: str
) -> None:
    several = tiny.CONFIGS["llama"]()
    several.num_labels = 2
    tiny.scalar_of(several).save_pretrained(folder / "several")
    tokenizer().save_pretrained(folder / "several")
    for name, model in (("foreign-reward", tiny.scalar("llama")), ("foreign", tiny.causal("llama"))):
        model.save_pretrained(folder / name)
        tokenizer(shifted=True).save_pretrained(folder / name)
    assert oppo(folder, "", "run.name=refused", *overrides) == 2
    said = capsys.readouterr().err
    assert message in said, said
    assert not scoring
    assert not (folder / "runs" / "refused").exists()


def test_an_engine_whose_model_it_cannot_score_with_is_ended(
    folder: Path, scoring: list[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ScoringStandIn, "facts", {"pooling": "MEAN"})
    assert oppo(folder, "", "run.name=mean", *REWARD_ON_VLLM) == 2
    assert "rewards.0: reward pools MEAN with a prefix cache" in capsys.readouterr().err
    assert scoring[0].closed


def test_a_reward_model_is_asked_by_its_url(
    folder: Path, scoring: list[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer(FakeAsyncLLM(facts={"vocabulary": VOCABULARY}), key="canary-of-the-reward")

    class Served(RewardServer):
        __init__ = partialmethod(RewardServer.__init__, transport=fake)

    monkeypatch.setattr("oppo.run.engines.RewardServer", Served)
    monkeypatch.setenv("KEY_OF_THE_REWARD", "canary-of-the-reward")
    chosen = ("rewards.0.url=http://localhost:8009", "rewards.0.api_key_env=KEY_OF_THE_REWARD", "run.name=by-url")
    assert oppo(folder, "", *REWARD_ON_VLLM, *chosen) == 0
    assert [line["trained"] for line in records(folder, "by-url", "metrics.jsonl")] == [4, 4]
    assert not scoring
    assert len(fake.bodies) > 2
    assert "calls its model 'fake', and it is to be" in capsys.readouterr().err
    assert "canary" not in (folder / "runs" / "by-url" / "config.toml").read_text()


def test_several_teachers_are_on_vllm_on_a_server_and_on_transformers(
    folder: Path, scoring: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeServer(FakeAsyncLLM(facts={"vocabulary": VOCABULARY}))

    class Served(LogprobServer):
        __init__ = partialmethod(LogprobServer.__init__, transport=fake)

    monkeypatch.setattr("oppo.run.engines.LogprobServer", Served)
    rows = [{"prompt": f"w{3 + n} w{40 + n}", "domain": "abc"[n % 3]} for n in range(12)]
    (folder / "domains.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = (
        "step.algorithm=distill",
        "models.teacher={a = 'actor', b = 'actor', c = 'actor'}",
        "models.teacher_column=domain",
        "data.prompts=domains.jsonl",
        "rewards=[]",
    )
    tables = (
        '[scorers."teacher.a"]\nengine = "vllm"\nvllm = {block_size = 8}\n'
        '[scorers."teacher.b"]\nengine = "vllm"\nurl = "http://localhost:8009"\n'
    )
    (folder / "taught.toml").write_text(f"{(folder / 'config.toml').read_text()}\n{tables}")
    overrides = [part for each in (*chosen, "run.panel=off", "run.name=taught") for part in ("--set", each)]
    assert main(["train", str(folder / "taught.toml"), *overrides]) == 0
    assert all(math.isfinite(step["objective/teacher_kl"]) for step in records(folder, "taught", "metrics.jsonl"))
    (engine,) = scoring
    assert isinstance(engine, ScoringStandIn)
    assert engine.llm.sequences
    assert len(fake.bodies) > 1


MINIMAL = 'models.policy = "actor"\nrewards = [{ source = "reward.py:score" }]\ndata.prompts = "prompts.jsonl"\n'
ON_VLLM = 'models.engine = "vllm"\n'


def loaded(folder: Path, text: str = "", *overrides: str) -> Settings:
    path = folder / "config.toml"
    path.write_text(MINIMAL + text)
    return load_settings(path, overrides)


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text, *overrides)
    return str(caught.value)


def correction(settings: Settings) -> str:
    assert isinstance(settings.algorithm, ClippedAlgorithm)
    return settings.algorithm.is_correction


def test_arguments_of_vllm_are_kept_as_they_are_and_written_again(tmp_path: Path) -> None:
    text = (
        f"{ON_VLLM}[vllm]\nmax_num_seqs = 8\nenforce_eager = true\ncompilation_config = {{ mode = 0, sizes = [1] }}\n"
    )
    settings = loaded(tmp_path, text, "vllm.max_num_seqs=16", "vllm.quantization=fp8")
    assert settings.vllm == {
        "max_num_seqs": 16,
        "enforce_eager": True,
        "compilation_config": {"mode": 0, "sizes": [1]},
        "quantization": "fp8",
    }
    assert resolve(tomllib.loads(settings.toml()), Path("/elsewhere")) == settings
    assert settings.changed({"vllm": {"max_num_seqs": 2}}).vllm == {**settings.vllm, "max_num_seqs": 2}
    assert "vllm.quantization" in fingerprints(settings)


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_tokens_of_vllm_are_weighted_unless_the_file_says_how(tmp_path: Path, algorithm: str) -> None:
    chosen = f"step.algorithm={algorithm}"
    assert correction(loaded(tmp_path, "", chosen)) == "none"
    settings = loaded(tmp_path, ON_VLLM, chosen)
    assert correction(settings) == "truncated"
    assert settings.algorithm.corrects
    assert correction(loaded(tmp_path, ON_VLLM, chosen, "algorithm.is_correction=mask")) == "mask"
    assert correction(loaded(tmp_path, ON_VLLM, chosen, "algorithm.is_correction=none")) == "none"


@pytest.mark.parametrize(
    ("installed", "gpu", "chosen", "why"),
    [
        (True, True, "run.name=it", ""),
        (False, True, "run.name=it", "since vLLM is not installed"),
        (True, False, "run.name=it", "since the policy is on a CPU"),
        (True, True, "models.device=cpu", "since the policy is on a CPU"),
        (True, True, "sampling.top_p=0.9", "since sampling.top_p = 0.9 draws from the most likely"),
    ],
)
def test_vllm_decodes_by_itself_on_a_gpu_where_it_is_installed_and_can(
    request: pytest.FixtureRequest, installed: bool, gpu: bool, chosen: str, why: str
) -> None:
    patch, folder, messages = (request.getfixturevalue(each) for each in ("monkeypatch", "tmp_path", "messages"))
    patch.setattr("oppo.config.load.is_installed", lambda module: installed)
    patch.setattr("torch.cuda.is_available", lambda: gpu)
    patch.setattr("torch.cuda.device_count", lambda: 1)
    settings = loaded(folder, "[vllm]\nmax_num_seqs = 8\n", "models.engine=auto", chosen)
    assert settings.models.engine == ("transformers" if why else "vllm")
    assert correction(settings) == ("none" if why else "truncated")
    assert dict(settings.vllm) == ({} if why else {"max_num_seqs": 8})
    assert f"models.engine = 'auto': {'transformers' if why else 'vLLM'} decodes" in messages[-1]
    assert why in messages[-1]


@pytest.mark.parametrize(
    ("key", "secret"), [("hub", ["https://me:canary@hub.example"]), ("api_key", "canary"), ("token2", "canary")]
)
def test_a_secret_is_known_by_its_form_or_by_the_name_of_its_setting(tmp_path: Path, key: str, secret: object) -> None:
    table = f"{{ {key} = {json.dumps(secret)} }}"
    for overrides in (table, f"[{table}]"):
        said = refused(tmp_path, f"{ON_VLLM}[vllm]\noverrides = {overrides}\n")
        assert re.match(rf"vllm\.overrides\.{key} holds a secret, got .*\*\*\*", said)
        assert "canary" not in said
    loaded(tmp_path, f"{ON_VLLM}[vllm]\nmax_num_batched_tokens = 64\noverrides = {{ {key} = false, b = '' }}\n")


def test_a_run_goes_on_with_other_arguments_and_never_with_another_engine(tmp_path: Path) -> None:
    before = fingerprints(loaded(tmp_path, f"{ON_VLLM}[vllm]\nmax_num_seqs = 8\n"))
    for text in (ON_VLLM, f"{ON_VLLM}[vllm]\nmax_num_seqs = 4\nblock_size = 32\n"):
        require_same(before, loaded(tmp_path, text))
    with pytest.raises(ConfigError, match=r"models\.engine cannot change when a run is resumed"):
        require_same(before, loaded(tmp_path, "algorithm.is_correction = 'truncated'\n"))
    with pytest.raises(ConfigError, match=r"step\.batch cannot change.* docs/runs.md says what may change"):
        require_same(before, loaded(tmp_path, ON_VLLM, "step.batch=3"))
