"""``oppo train`` on an engine that lives elsewhere, as far as the application goes: a stand-in takes vLLM's place.

It decodes with transformers, on weights of its own that only a weight sync reaches, as vLLM would.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
import torch

from oppo.cli import main
from oppo.config.load import load
from oppo.errors import ConfigError, ModelError
from oppo.hf.loading import load_causal
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ProximalLogprobs, RecomputedLogprobs
from oppo.log import logger
from oppo.models import Sampling, Weights
from oppo.observe import Reporter
from oppo.placement import Thread
from oppo.run.train import prepare
from oppo.vllm.arguments import OF_LOGPROBS, OF_REWARDS, SETTINGS
from oppo.vllm.logprobs import LogprobServer
from oppo.vllm.reward import RewardServer
from tests.hf import tiny
from tests.responses import VOCABULARY
from tests.vllm.fake_engine import FakeAsyncLLM, engine_of
from tests.vllm.fake_server import FakeServer
from tests.workplace import furnish, oppo, records, tokenizer


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
    ) -> Self:
        assert not sleeps
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


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandIn]]:
    def require(arguments: Mapping[str, object], *, of: Mapping[str, str], planned: bool) -> None:
        assert of == SETTINGS
        assert not planned
        if "max_num_seq" in arguments:
            raise ConfigError("unknown argument 'max_num_seq' (did you mean 'max_num_seqs'?)")

    StandIn.started.clear()
    monkeypatch.setattr("oppo.vllm.VllmEngine", StandIn)
    monkeypatch.setattr("oppo.vllm.VllmPolicy", StandInPolicy)
    monkeypatch.setattr("oppo.vllm.arguments.require_arguments", require)
    monkeypatch.setattr("oppo.vllm.arguments.computes_on_cpu", lambda: True)
    yield StandIn.started
    assert all(engine.closed for engine in StandIn.started)


def on_vllm(workplace: Path, name: str, *overrides: str, command: str = "") -> int:
    return oppo(workplace, command, f"run.name={name}", "models.engine=vllm", "run.panel=off", *overrides)


def test_a_run_serves_synced_copies_and_corrects_every_token(workplace: Path, stand_in: list[StandIn]) -> None:
    assert on_vllm(workplace, "run", "run.steps=3", "vllm.max_num_seqs=8") == 0
    lines = records(workplace, "run", "metrics.jsonl")
    assert [line["trained"] for line in lines] == [4, 4, 4]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
        assert abs(line["mismatch/kl_current"]) < 1e-9, "decoded with the weights that were trained"
    (engine,) = stand_in
    assert engine.loads == [1, 2, 3]
    assert engine.directory == workplace / "actor"
    assert engine.trainer == torch.device("cpu")
    assert engine.cores == 1
    assert engine.log == workplace / "runs" / "run" / "vllm.log"
    assert engine.log.read_text() == "started\n", "what the engine has said stays when the run begins"
    assert engine.arguments == {
        "dtype": "float32",
        "trust_remote_code": False,
        "max_model_len": 512,
        "max_num_seqs": 8,
    }, "as long as the model reads, which is less than the longest prompt and response"
    again = load(workplace / "runs" / "run" / "config.toml")
    assert (again.models.engine, again.vllm) == ("vllm", {"max_num_seqs": 8})


def test_a_run_is_evaluated_with_the_weights_that_are_synced(workplace: Path, stand_in: list[StandIn]) -> None:
    chosen = ("eval.prompts=prompts.jsonl", "eval.count=3", "eval.every=1", "eval.samples=2", "run.steps=2")
    assert on_vllm(workplace, "evaluated", *chosen) == 0
    assert [each["version"] for each in records(workplace, "evaluated", "eval.jsonl")] == [0, 1, 2]
    assert stand_in[0].loads == [1, 2]


def test_a_sequence_is_no_longer_than_prompt_and_response(workplace: Path, stand_in: list[StandIn]) -> None:
    assert on_vllm(workplace, "short", "data.max_prompt_tokens=20", command="--dry-run") == 0
    assert stand_in[0].arguments["max_model_len"] == 32
    assert on_vllm(workplace, "given", "vllm.max_model_len=99", command="--dry-run") == 0
    assert stand_in[1].arguments["max_model_len"] == 99


def test_a_dry_run_starts_the_engine_and_leaves_nothing(
    workplace: Path, stand_in: list[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_vllm(workplace, "dry", "vllm.seed=3", command="--dry-run") == 0
    said = capsys.readouterr()
    assert "starting vLLM" in said.err
    assert "[vllm]\nseed = 3" in said.out
    assert stand_in[0].log is None
    assert not (workplace / "runs" / "dry").exists()


def test_a_run_is_resumed_on_its_checkpoints_weights(workplace: Path, stand_in: list[StandIn]) -> None:
    assert on_vllm(workplace, "again", "run.steps=2") == 0
    arguments = ["resume", str(workplace / "runs" / "again"), "--set", "run.steps=4", "--set", "vllm.max_num_seqs=3"]
    assert main(arguments) == 0
    assert stand_in[1].loads == [2, 3, 4], "first those of the checkpoint"
    lines = records(workplace, "again", "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(abs(line["mismatch/kl_current"]) < 1e-9 for line in lines)


@pytest.mark.adapters
def test_an_engine_begins_with_what_a_quantised_base_computes_with(workplace: Path, stand_in: list[StandIn]) -> None:
    assert on_vllm(workplace, "bits", "models.lora_rank=2", "models.quantization=nf4", "vllm.dtype=float32") == 0
    assert stand_in[0].loads[:2] == [0, 1]
    assert all(abs(line["mismatch/kl_current"]) < 1e-6 for line in records(workplace, "bits", "metrics.jsonl"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("vllm.max_num_seq=3", "unknown argument 'max_num_seq' (did you mean 'max_num_seqs'?)"),
        ("run.deterministic=true", "run.deterministic makes every bit independent of timing"),
        ("sampling.top_p=0.5", "vLLM does not say which those were"),
        ("placement.share=sleep", "vLLM does not sleep on a CPU"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    workplace: Path, stand_in: list[StandIn], capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert on_vllm(workplace, "refused", override) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "loading" not in said
    assert not stand_in
    assert not (workplace / "runs" / "refused").exists()


def test_a_policy_that_is_refused_takes_its_engine_with_it(
    workplace: Path, stand_in: list[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_vllm(workplace, "seven", "sampling.top_k=7") == 2
    assert "seven is refused" in capsys.readouterr().err
    assert stand_in[0].closed
    assert on_vllm(workplace, "seven") == 0, "its log is no reason against another run of that name"


def test_its_tokens_are_scored_again_only_where_another_engine_made_them(workplace: Path) -> None:
    def proximal(*overrides: str) -> object:
        settings = load(workplace / "config.toml", overrides)
        with prepare(settings, dry_run=True) as session:
            return type(session.assembly.proximal)

    assert proximal("models.engine=vllm") is RecomputedLogprobs
    assert proximal("models.engine=vllm", "algorithm.is_correction=none") is type(None)
    assert proximal("algorithm.is_correction=truncated") is ProximalLogprobs


def test_its_work_is_told_like_that_of_a_place(workplace: Path) -> None:
    with prepare(load(workplace / "config.toml", ["models.engine=vllm"]), dry_run=True) as session:
        assembly = session.assembly
        spans: list[object] = []
        assembly.listen(spans.append)
        (worker,) = assembly.serving.workers
        assert isinstance(worker, Reporter)
        with worker.reported("decode"):
            assert assembly.at_work() == ("policy: decode",)
        assert not assembly.at_work()
        assert len(spans) == 1


def test_an_engine_is_ended_also_if_a_place_cannot_be(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = prepare(load(workplace / "config.toml", ["models.engine=vllm"]), dry_run=True)
    close = session.assembly.places.training.close

    def broken() -> None:
        close()
        raise ModelError("the trainer does not end")

    monkeypatch.setattr(session.assembly.places.training, "close", broken)
    with pytest.raises(ModelError, match="does not end"):
        session.assembly.close()
    session.assembly.places.scoring["reward"].close()
    session.assembly.places.acting[0].close()


URLS = ("http://localhost:8001", "http://localhost:8002")


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


@pytest.mark.parametrize("count", [1, 2])
def test_servers_are_connected_to_by_their_urls_and_several_are_a_pool(
    workplace: Path,
    stand_in: list[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    count: int,
) -> None:
    monkeypatch.setattr("oppo.vllm.VllmServer", StandInServer.connect)
    monkeypatch.setenv("KEY_OF_THE_TEST", "canary-0123456789")
    name, urls = f"servers-{count}", json.dumps(URLS[:count])
    chosen = (f"vllm.urls={urls}", "vllm.api_key_env=KEY_OF_THE_TEST", "vllm.weights_directory=/shared")
    assert on_vllm(workplace, name, "run.steps=2", *chosen) == 0
    assert [line["trained"] for line in records(workplace, name, "metrics.jsonl")] == [4, 4]
    said = capsys.readouterr().err
    assert len(stand_in) == count
    servers = [each for each in stand_in if isinstance(each, StandInServer)]
    for server, url in zip(sorted(servers, key=lambda each: each.url), URLS[:count], strict=True):
        assert server.loads == [0, 1, 2], "it may have those of an earlier run"
        assert server.url == url
        assert server.given["api_key"] == "canary-0123456789"
        assert server.given["weights_directory"] == "/shared"
        assert f"the vLLM server at {url} rounds the weights to torch.bfloat16" in said
    text = (workplace / "runs" / name / "config.toml").read_text()
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
    workplace: Path, stand_in: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oppo.vllm.VllmServer", StandInServer.connect)
    monkeypatch.setattr("oppo.vllm.processes.ServerProcess", StandInProcess)
    chosen = ("run.steps=2", "vllm.max_num_seqs=8", "placement.policy_replicas=2")
    assert on_vllm(workplace, "replicas", *chosen) == 0
    assert [line["trained"] for line in records(workplace, "replicas", "metrics.jsonl")] == [4, 4]
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
        assert given["log"] == str(workplace / "runs" / "replicas" / "vllm.log")
    assert len([*(workplace / "runs" / "replicas").glob("ended-*")]) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("step.kv_on_sync=keep",), "set step.kv_on_sync = 'recompute'"),
        (("vllm.tensor_parallel_size=2",), "[vllm] has 2 workers"),
    ],
)
def test_what_a_replica_on_vllm_cannot_do_is_refused_before_anything_is_loaded(
    workplace: Path,
    stand_in: list[StandIn],
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    assert on_vllm(workplace, "refused", "placement.policy_replicas=2", *overrides) == 2
    assert message in capsys.readouterr().err
    assert not stand_in


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("vllm.max_num_seqs=3", "vllm.max_num_seqs is for an engine that the run starts"),
        ("vllm.weight_directory=/x", "vllm.weight_directory (did you mean 'weights_directory'?)"),
        ("step.kv_on_sync=keep", "set step.kv_on_sync = 'recompute'"),
        ("vllm.api_key_env=no-such-canary", "vllm.api_key_env: expected the name of an environment variable"),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_anything_is_loaded(
    workplace: Path, stand_in: list[StandIn], capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert on_vllm(workplace, "refused", f"vllm.urls={json.dumps(URLS)}", override) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "canary" not in said.err + said.out
    assert not stand_in


LONGEST = 160


@dataclass
class ScoringStandIn(StandIn):
    """In the place of the ``VllmEngine`` of a reward model, or of a reference or a teacher."""

    facts: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        pools = self.arguments.get("runner") == "pooling"
        room = {"longest": LONGEST, "runner": "pooling"} if pools else {"longest": LONGEST + 1}
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

    for module in ("oppo.vllm", "oppo.run.on_vllm"):
        monkeypatch.setattr(f"{module}.VllmEngine", SimpleNamespace(start=start))
    monkeypatch.setattr("oppo.vllm.arguments.require_arguments", require)
    return stand_in


REWARD_ON_VLLM = ("rewards.0.engine=vllm", "run.panel=off")


@pytest.mark.parametrize("policy", ["transformers", "vllm"])
def test_a_reward_model_has_an_engine_of_its_own_which_ends_with_the_run(
    workplace: Path, scoring: list[StandIn], policy: str
) -> None:
    name = f"scored-beside-{policy}"
    chosen = (f"run.name={name}", f"models.engine={policy}", "rewards.0.vllm.block_size=8", "run.cores=2")
    assert oppo(workplace, "", *REWARD_ON_VLLM, *chosen) == 0
    assert [line["trained"] for line in records(workplace, name, "metrics.jsonl")] == [4, 4]
    engine = scoring[0]
    assert isinstance(engine, ScoringStandIn)
    assert len(scoring) == 1 + (policy == "vllm")
    assert (engine.directory, str(engine.trainer)) == (workplace / "reward", "cpu")
    assert repr(engine.cores) == "slice(1, 2, None)"
    assert engine.log == workplace / "runs" / name / "vllm.log"
    assert engine.arguments == {
        "runner": "pooling",
        "convert": "classify",
        "dtype": "float32",
        "trust_remote_code": False,
        "max_model_len": 512,
        "block_size": 8,
    }
    assert len(engine.llm.sequences) > 8, "prefixes were read while responses were written"
    assert not engine.llm.asking
    saved = load(workplace / "runs" / name / "config.toml").reward_engines["rewards.0"]
    assert saved.vllm == {"block_size": 8}


def test_its_calls_are_seen_and_it_is_killed_where_a_run_hangs(workplace: Path, scoring: list[StandIn]) -> None:
    with prepare(load(workplace / "config.toml", REWARD_ON_VLLM), dry_run=True) as session:
        (scorer,) = session.assembly.scoring
        with scorer.reporter.reported("extend"):
            assert session.assembly.at_work() == ("reward model: extend",)
        session.assembly.abort()
        assert scoring[0].closed
    assert session.assembly.positions == LONGEST


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rewards.0.vllm.max_num_seq=3",), "rewards.0: unknown argument 'max_num_seq'"),
        (("rewards.0.url=http://localhost:1", "rewards.0.api_key_env=NOT_SET"), "rewards.0: the key is to be in the"),
        (("rewards.0.source=several",), "several is no causal model with one label"),
        (("rewards.0.source=foreign",), "rewards.0: "),
    ],
)
def test_a_reward_that_vllm_cannot_serve_is_refused_before_an_engine_starts(
    workplace: Path,
    scoring: list[StandIn],
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    several = tiny.CONFIGS["llama"]()
    several.num_labels = 2
    tiny.scalar_of(several).save_pretrained(workplace / "several")
    tokenizer().save_pretrained(workplace / "several")
    tiny.scalar("llama").save_pretrained(workplace / "foreign")
    tokenizer(shifted=True).save_pretrained(workplace / "foreign")
    assert oppo(workplace, "", "run.name=refused", *REWARD_ON_VLLM, *overrides) == 2
    said = capsys.readouterr().err
    assert message in said, said
    assert not scoring
    assert not (workplace / "runs" / "refused").exists(), (said, [*(workplace / "runs" / "refused").iterdir()])


def test_an_engine_whose_model_it_cannot_score_with_is_ended(
    workplace: Path, scoring: list[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ScoringStandIn, "facts", {"pooling": "MEAN"})
    assert oppo(workplace, "", "run.name=mean", *REWARD_ON_VLLM) == 2
    assert "rewards.0: reward pools MEAN with a prefix cache" in capsys.readouterr().err
    assert scoring[0].closed


def test_a_reward_model_is_asked_by_its_url(
    workplace: Path, scoring: list[StandIn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer(FakeAsyncLLM(facts={"vocabulary": VOCABULARY}), key="canary-of-the-reward")

    class Served(RewardServer):
        __init__ = partialmethod(RewardServer.__init__, transport=fake)

    monkeypatch.setattr("oppo.run.on_vllm.RewardServer", Served)
    monkeypatch.setenv("KEY_OF_THE_REWARD", "canary-of-the-reward")
    chosen = ("rewards.0.url=http://localhost:8009", "rewards.0.api_key_env=KEY_OF_THE_REWARD", "run.name=by-url")
    assert oppo(workplace, "", *REWARD_ON_VLLM, *chosen) == 0
    assert [line["trained"] for line in records(workplace, "by-url", "metrics.jsonl")] == [4, 4]
    assert not scoring
    assert len(fake.bodies) > 2
    assert "calls its model 'fake', and it is to be" in capsys.readouterr().err
    assert "canary" not in (workplace / "runs" / "by-url" / "config.toml").read_text()


READ_ON_VLLM = ("scorers.reference.engine=vllm", "run.panel=off", "run.cores=2")


def test_the_reference_has_an_engine_of_its_own_which_ends_with_the_run(
    workplace: Path, scoring: list[StandIn]
) -> None:
    assert oppo(workplace, "", *READ_ON_VLLM, "run.name=referred", "scorers.reference.vllm.block_size=8") == 0
    steps = records(workplace, "referred", "metrics.jsonl")
    assert all(math.isfinite(step["objective/kl"]) and step["objective/kl"] for step in steps)
    (engine,) = scoring
    assert isinstance(engine, ScoringStandIn)
    assert engine.closed
    assert (engine.directory, repr(engine.cores)) == (workplace / "actor", "slice(1, 2, None)")
    assert engine.arguments == {
        "worker_extension_cls": "oppo.vllm.logprobs.LogitsOfPrompts",
        "dtype": "float32",
        "trust_remote_code": False,
        "max_model_len": 512,
        "block_size": 8,
    }
    assert len(engine.llm.sequences) > 8, "prefixes were read while responses were written"
    saved = load(workplace / "runs" / "referred" / "config.toml")
    assert saved.on_vllm["reference"].vllm == {"block_size": 8}


def test_several_teachers_are_on_vllm_on_a_server_and_on_transformers(
    workplace: Path, scoring: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeServer(FakeAsyncLLM(facts={"vocabulary": VOCABULARY}))

    class Served(LogprobServer):
        __init__ = partialmethod(LogprobServer.__init__, transport=fake)

    monkeypatch.setattr("oppo.run.on_vllm.LogprobServer", Served)
    rows = [{"prompt": f"w{3 + n} w{40 + n}", "domain": "abc"[n % 3]} for n in range(12)]
    (workplace / "domains.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    (workplace / "taught.toml").write_text(f"{(workplace / 'config.toml').read_text()}\n{tables}")
    overrides = [part for each in (*chosen, "run.panel=off", "run.name=taught") for part in ("--set", each)]
    assert main(["train", str(workplace / "taught.toml"), *overrides]) == 0
    assert all(math.isfinite(step["objective/teacher_kl"]) for step in records(workplace, "taught", "metrics.jsonl"))
    (engine,) = scoring
    assert isinstance(engine, ScoringStandIn)
    assert engine.llm.sequences
    assert len(fake.bodies) > 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("scorers.reference.vllm.max_num_seq=3",), "scorers.reference: unknown argument 'max_num_seq'"),
        (("sampling.top_k=5",), "scorers.reference: sampling.top_k = 5 leaves ids out"),
        (
            ("scorers.reference.url=http://localhost:1", "sampling.temperature=0.7"),
            "scorers.reference: sampling.temperature = 0.7 divides the logits",
        ),
        (("models.reference=foreign",), "models.reference: "),
    ],
)
def test_a_reference_that_vllm_cannot_serve_is_refused_before_an_engine_starts(
    workplace: Path,
    scoring: list[StandIn],
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    tiny.causal("llama").save_pretrained(workplace / "foreign")
    tokenizer(shifted=True).save_pretrained(workplace / "foreign")
    assert oppo(workplace, "", "run.name=refused", *READ_ON_VLLM, *overrides) == 2
    said = capsys.readouterr().err
    assert message in said, said
    assert not scoring
