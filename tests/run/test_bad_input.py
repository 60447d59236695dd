"""Whatever is wrong, damaged or lying in what a run is given is a message: what was expected, what came, what to do."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from oppo.cli import DONE, UNTRAINED, UNUSABLE, main
from oppo.data import read_prompts
from oppo.hf.train.packing import MicroBatch
from oppo.liveness import StallLimits
from oppo.report.records import Lock
from tests.config.test_refusals import entries
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo, records, run, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good models, and with one of each kind of bad one."""
    folder = furnish(tmp_path_factory.mktemp("folder"))
    tiny.scalar("llama", labels=2).save_pretrained(folder / "two-labels")
    tokenizer().save_pretrained(folder / "two-labels")
    tiny.scalar("llama").save_pretrained(folder / "foreign")
    tokenizer(shifted=True).save_pretrained(folder / "foreign")
    small = tiny.causal("llama")
    small.resize_token_embeddings(64)
    small.save_pretrained(folder / "small")
    shutil.copytree(folder / "actor", folder / "pickled")
    torch.save(load_file(folder / "actor" / "model.safetensors"), folder / "pickled" / "pytorch_model.bin")
    (folder / "pickled" / "model.safetensors").unlink()
    with_code(folder / "actor", folder / "with-code")
    small.save_pretrained(folder / "narrow")
    tokenizer().save_pretrained(folder / "narrow")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    described = {"base_model_name_or_path": str(folder / "actor"), "peft_type": "LORA"}
    (folder / "pickled-adapter").mkdir()
    (folder / "pickled-adapter" / "adapter_config.json").write_text(json.dumps(described))
    (folder / "pickled-adapter" / "adapter_model.bin").write_bytes(b"")
    shutil.copytree(folder / "actor", folder / "int8")
    weights = load_file(folder / "actor" / "model.safetensors")
    weights = {name: (each * 100).to(torch.int8) for name, each in weights.items()}
    save_file(weights, folder / "int8" / "model.safetensors", metadata={"format": "pt"})
    (folder / "clash.jsonl").write_text('{"prompt": "w3 w4", "completions": 1}\n')
    (folder / "bare.jsonl").write_text('{"prompt": "w3 w4", "gaol": 1}\n')
    (folder / "file").write_text("")
    return folder


def with_code(model: Path, target: Path) -> None:
    """Copy a model and have it ask for code of its own, which would leave a mark."""
    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "novel", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (target / "config.json").write_text(json.dumps(config))
    (target / "code.py").write_text(f"from pathlib import Path\nPath({str(target / 'ran')!r}).touch()\n")


REFUSED = entries("""
data.tools=/dev/zero | data.tools: /dev/zero cannot be read: | zero is no plain file
models.engine=vllm vllm.urls=["http://[::1"] | vllm.urls: expected the URL of a vLLM server, such as
models.adapter=pickled-adapter | models.adapter: | models.allow_pickle is not for an adapter
models.critic=foreign | models.critic: | does not share the policy's tokenizer (token 'w3' is 3 here and absent there)
rewards.0.source=actor | a reward from an untrained head would be noise
sampling.max_new_tokens=600 | do not fit into the models' 512 positions
sampling.stop=["w3\\u0020w4"] | 'w3 w4' is 2 tokens of the policy's tokenizer, expected one
sampling.stop=[400] | 400 is no token id; they go up to 95
trainer.warmup_steps=1 | schedule 'constant' has no warm-up
data.column=question | line 1: no column 'question'; the columns there are prompt, goal
data.max_prompt_tokens=3 data.over_long=error |
    12 of 20 prompts of | prompts.jsonl are longer than 3 tokens, the first at | prompts.jsonl, line 3; filter or
eval.prompts=none.jsonl | there is no prompt file
eval.prompts=[{path="prompts.jsonl",weight=2}] | eval.prompts: held-out prompts are answered once each
models.policy= | models.policy:
models.policy=file | models.policy: | file' is no directory here
models.reference=small | models.reference: | knows the token ids below 64 | go up to 95
rewards.0.source=two-labels | rewards.0: | score.weight is [2, 32] | 'file.py:function'
rewards.0.source=foreign rewards.0.form=tokens |
    rewards.0: | does not share the policy's tokenizer | rewards.0.form cannot be 'tokens': leave
rewards.0.source=foreign rewards.0.form=pair | rewards.0: | no pair | rewards.0.reading = 'whole'
models.policy=narrow | models.policy: | tokenizer go up to 95 | narrow' reads those below 64
models.policy=adapter | models.policy: | an adapter of PEFT for the model 'org/base' | merge
models.adapter=adapter | models.adapter: | is for the model 'org/base' | models.policy = 'org/base'
models.adapter=actor | models.adapter: | adapter_config.json
models.adapter=adapter models.lora_rank=2 | [models]: adapter = | a rank, a scale and | lora_rank out
models.quantization=nf4 | [models]: quantization = 'nf4' freezes | set lora_rank or adapter, or leave
models.quantization=fp4 models.lora_rank=2 models.engine=vllm models.lora_sync=adapter |
    [models]: lora_sync = 'adapter' | quantization = 'fp4', a base that vLLM has whole
models.policy=int8 | models.policy: | int8/model.safetensors holds | as I8, without the quantization
models.policy=./acter | models.policy: | acter' is no directory here (did you mean 'actor'?)
models.lora_rank=1000000 | models.lora_rank = 1000000 is more than the rank of any layer | at most 32
data.prompts=promts.jsonl | there is no prompt file | (did you mean 'prompts.jsonl'?)
models.policy=pickled | models.policy: | as pickles (pytorch_model.bin) | models.allow_pickle = true
models.dtype=float16 | models.policy: float16 is not for a CPU | 'float32' or 'bfloat16'
models.policy=with-code | models.policy: | its own (code.py) | models.trust_remote_code = true
models.reference=with-code | models.reference: | models.trust_remote_code = true
run.directory=file | file: Not a directory; choose another run.directory
run.directory=/proc/1/fdinfo/x | the run directory /proc/1/fdinfo/x/refused cannot be
placement.reward=cuda:7 | placement.reward: there is no 'cuda:7' here
placement.scorers=cuda:7 | placement.scorers: there is no 'cuda:7' here
placement.trainer=["cuda:7","cuda:8"] | placement.trainer: there is no 'cuda:7' here
step.overcommit=0 step.admission=continuous | overcommit must be at least 1; as many as the batch when absent
rewards.0.source=reward.py:odd data.prompts=clash.jsonl | column 'completions' bears the name of an argument
rewards.0.source=reward.py:short data.prompts=bare.jsonl | asks for 'goal', which is no column
rewards.0.source=reward.py:short eval.prompts=bare.jsonl | asks for 'goal', which is no column
rewards.0.column=gole | rewards.0 compares responses with 'gole', which is no column of the data
run.track=["wandbb"] | tensorboard
step.algorithm=dapo algorithm.long_buffer=13 rewards.0.source=reward.py:short |
    algorithm.long_buffer = 13 is more than sampling.max_new_tokens = 12
environment.source=reward.py:nothing | has no 'nothing'; the functions and classes there are
environment.source=nothing.py:tool | there is no file
""")


@pytest.mark.parametrize("command", ["", "--dry-run"])
@pytest.mark.parametrize(("chosen", "words"), [(chosen, words) for chosen, *words in REFUSED])
def test_what_cannot_be_used_is_refused_before_anything_is_written_also_by_a_dry_run(
    folder: Path, command: str, chosen: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert oppo(folder, command, "run.name=refused", *chosen.split(" ")) == UNUSABLE
    said = capsys.readouterr().err
    assert "error: " in said
    assert "Traceback" not in said
    assert [each for each in words if each not in said] == []
    assert "loading" not in said or not any(each in chosen for each in ("column", "placement", "bare", "clash"))
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("sampling.min_new_tokens=12", True),
        ("sampling.eos=false", True),
        ("sampling.min_new_tokens=12 step.overcommit=0", False),
    ],
)
def test_deferring_where_all_responses_are_equally_long_is_said_to_gain_nothing(
    folder: Path, overrides: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "--dry-run", "run.name=equal", *overrides.split(" ")) == DONE
    assert ("beyond the batch gain nothing" in "".join(capsys.readouterr())) is said


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("filter", "12 of 20 prompts of {file} are longer than 3 tokens: left out"),
        ("truncate", "12 of 20 prompts of {file} are longer than 3 tokens: their beginnings are cut off"),
    ],
)
def test_over_long_prompts_are_counted(
    folder: Path, how: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("run.name=long", "data.max_prompt_tokens=3", f"data.over_long={how}")
    assert oppo(folder, "--dry-run", *chosen) == DONE
    assert message.format(file=folder / "prompts.jsonl") in capsys.readouterr().err


def test_a_second_run_in_the_same_directory_is_told_who_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "runs" / "shared").mkdir(parents=True)
    first = Lock(folder / "runs" / "shared")
    assert oppo(folder, "", "run.name=shared") == UNUSABLE
    said = capsys.readouterr().err
    assert f"{folder / 'runs' / 'shared'} is being written by another run (process " in said
    first.release()
    assert list((folder / "runs" / "shared").iterdir()) == [], "the second has touched nothing"


def test_a_disk_that_is_full_leaves_nothing_half_written(folder: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    for name, every in (("full", 0), ("full-early", 1)):
        overrides = (f"run.name={name}", "run.steps=1", "run.trace=0", f"run.checkpoint_every={every}")
        code, _, said = run(folder, *overrides, before=limit)
        assert code == 1, said
        directory = folder / "runs" / name
        final = directory / "checkpoints" / "final"
        unsaved = f"what was learned could not be saved in {final}, and nothing half-written is left there: "
        if every:
            assert f"error: the checkpoint {final.with_name('step-000001')} could not be written, and nothing" in said
            assert f"and then, while saving {final}, ModelError: {unsaved}" in said
        else:
            assert f"error: {unsaved}" in said
        assert f"{final / 'actor'}: Error while serializing: I/O error: File too large" in said
        assert "Traceback" not in said
        assert [path for path in directory.rglob("*") if "partial" in path.name or "safetensors" in path.name] == []
        assert not final.exists()
        assert len(records(folder, name, "metrics.jsonl")) == 1
        assert records(folder, name, "log.jsonl")[-1]["event"] == "failed"


def test_running_out_of_memory_names_the_model_and_the_setting_that_helps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_much(*_: object, packed: bool) -> MicroBatch:
        del packed
        torch.empty(1 << 50, dtype=torch.uint8)
        raise AssertionError("there is no machine with a pebibyte")

    monkeypatch.setattr("oppo.hf.train.trainer.pack", too_much)
    assert oppo(folder, "", "run.name=memory") == 1
    said = capsys.readouterr().err
    assert "error: the trainer ran out of memory while it did 'update': lower trainer.micro_batch_tokens (" in said
    assert "in stage 'update' of graph 'ppo', step 1" in said
    assert "Traceback" not in said


LIMITED = """
import resource
import oppo.run.train

loading = oppo.run.train.prepare

def prepare(*arguments, **options):
    session = loading(*arguments, **options)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    return session

oppo.run.train.prepare = prepare
"""
"""Leaves a process ``ROOM`` more bytes of address space than it has when everything is loaded."""

WIDE = 1 << 17
"""Of a layer that takes half a mebibyte for each token it reads."""


def wide(folder: Path, role: str) -> None:
    """Add such a model to a folder, and prompts that are long for it."""
    config = tiny.build(LlamaConfig, tiny.GROUPED, intermediate_size=WIDE, num_hidden_layers=1, num_labels=1)
    (tiny.of if role == "actor" else tiny.scalar_of)(config, seed=1).save_pretrained(folder / "wide")
    tokenizer().save_pretrained(folder / "wide")
    rows = [{"prompt": " ".join(f"w{3 + (7 * i + k) % 90}" for k in range(480))} for i in range(8)]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited, and its use told, on Linux")
@pytest.mark.parametrize(
    ("role", "overrides", "message"),
    [
        (
            "reward",
            "rewards.0.source=wide models.critic=reward data.prompts=long.jsonl",
            "error: the reward model ran out of memory while it did 'extend': lower step.batch, step.overcommit or",
        ),
        pytest.param(
            "actor",
            "models.policy=wide models.reference=actor rewards.0.source=reward.py:short models.critic=reward "
            "sampling.max_new_tokens=160 sampling.min_new_tokens=160",
            "error: the trainer ran out of memory while it did 'update': lower trainer.micro_batch_tokens (",
            marks=pytest.mark.deep,
        ),
    ],
    ids=["serving", "training"],
)
def test_a_process_that_may_have_no_more_memory_says_which_model_wanted_it(
    tmp_path: Path, role: str, overrides: str, message: str
) -> None:
    furnish(tmp_path)
    wide(tmp_path, role)
    limit = LIMITED.replace("ROOM", str(200 << 20))  # the least that is asked for at once is 240 MiB
    code, _, said = run(tmp_path, *overrides.split(), before=limit, MALLOC_ARENA_MAX="1")
    assert code == 1, said
    assert message in said
    assert "Traceback" not in said
    assert records(tmp_path, "first", "log.jsonl")[-1]["event"] == "failed"


def test_a_prompt_file_that_changes_meanwhile_changes_nothing_and_is_noted(folder: Path) -> None:
    moving = folder / "moving.jsonl"
    shutil.copy(folder / "prompts.jsonl", moving)
    (folder / "meddler.py").write_text(
        "def meddle(prompts, completions):\n"
        f"    open({str(moving)!r}, 'w').close()\n"
        "    return [0.0 for _ in prompts]\n"
    )
    overrides = ("data.prompts=moving.jsonl", "rewards.0.source=meddler.py:meddle", "run.panel=off")
    assert oppo(folder, "", "run.name=moving", *overrides) == 0
    assert sum(each["event"] == "trained" for each in records(folder, "moving", "journal.jsonl")) == 8
    noted = [each for each in records(folder, "moving", "log.jsonl") if each["event"] == "file changed"]
    assert [each["level"] for each in noted] == ["warning"]


def test_a_prompt_file_that_changes_while_it_is_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    growing = folder / "growing.jsonl"
    shutil.copy(folder / "prompts.jsonl", growing)

    def read(path: Path, *arguments: object, **options: object) -> object:
        with path.open("a") as file:
            file.write('{"prompt": "w5"}\n')
        return read_prompts(path, *arguments, **options)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr("oppo.run.prompts.read_prompts", read)
    assert oppo(folder, "", "run.name=growing", "data.prompts=growing.jsonl") == 2
    assert "growing.jsonl changed while it was read: start again" in capsys.readouterr().err


def test_a_reward_that_blocks_is_named_on_the_terminal_and_in_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = folder / "runs" / "blocked" / "log.jsonl"
    (folder / "blocking.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def block(prompts, completions):\n"
        f"    while 'stalled' not in Path({str(log)!r}).read_text():\n        time.sleep(0.01)\n"
        "    return [0.0 for _ in completions]\n"
    )
    monkeypatch.setattr("oppo.run.observers.StallLimits", partial(StallLimits, notice=0.2))
    assert oppo(folder, "", "run.name=blocked", "run.steps=1", "rewards.0.source=blocking.py:block") == 0
    stalls = [each for each in records(folder, "blocked", "log.jsonl") if each["event"] == "stalled"]
    assert {"advantage": "waits for reward", "reward": "at work"}.items() <= stalls[-1]["steps"]["1"].items()
    assert "advantage waits for reward; " in capsys.readouterr().out


def test_a_reward_that_never_returns_ends_the_run_with_a_report(folder: Path) -> None:
    overrides = ("rewards.0.source=reward.py:stuck", "run.name=stuck", "run.watchdog_seconds=4", "run.call_timeout=4")
    code, _, said = run(folder, *overrides)
    assert code == 1, said
    directory = folder / "runs" / "stuck"
    assert "advantage waits for reward; " in said
    assert str(directory / "hang-report.json") in said
    assert "Traceback" not in said
    report = json.loads((directory / "hang-report.json").read_text())
    assert [(step["step"], step["at_work"]) for step in report["steps"]] == [(1, ["reward"])]
    assert any("in stuck" in line for thread in report["threads"] for line in thread["stack"])
    assert not (directory / "checkpoints").exists(), "nothing was learned"
    assert records(folder, "stuck", "log.jsonl")[-1]["event"] == "failed"


@pytest.mark.deep
def test_a_model_that_never_returns_ends_the_process_with_a_report(folder: Path) -> None:
    hang = (
        "import functools, threading\n"
        "import oppo.hf.train.trainer, oppo.run.observers\n"
        "oppo.hf.train.trainer.pack = lambda *_, **__: threading.Event().wait()\n"
        "oppo.run.observers.StallLimits = functools.partial(oppo.run.observers.StallLimits, grace=1)\n"
    )
    code, _, said = run(folder, "run.name=model-stuck", "run.watchdog_seconds=4", "run.call_timeout=4", before=hang)
    assert code == 1, said
    assert "update is at work; in a call: trainer: update (see " in said
    report = json.loads((folder / "runs" / "model-stuck" / "hang-report.json").read_text())
    assert [(step["step"], step["at_work"]) for step in report["steps"]] == [(1, ["update"])]
    assert any(thread["name"] == "oppo-trainer_0" for thread in report["threads"])


def test_a_reward_that_fails_for_some_is_trained_on_the_others(folder: Path) -> None:
    overrides = ("rewards.0.source=reward.py:picky", "rewards.0.on_failure=drop", "run.panel=off")
    assert oppo(folder, "", "run.name=picky", *overrides) == DONE
    for record in records(folder, "picky", "metrics.jsonl"):
        assert record["trained"] + record["dropped"] == 4
        assert record["loop/worst_gap_s"] >= 0
    dropped = [each for each in records(folder, "picky", "journal.jsonl") if each["event"] == "dropped"]
    assert dropped
    assert all("it returned nan" in str(each["reason"]) for each in dropped)


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        ("run.max_empty=2 run.steps=9", 2, "error: no rollout was trained in 2 steps in a row (8 x reward function "),
        (
            "run.max_empty=0",
            2,
            "error: no rollout was trained in the 2 steps of the run: 8 x reward function 'broken' ",
        ),
    ],
)
def test_a_run_that_trains_nothing_ends_with_the_reasons_and_a_code_of_its_own(
    folder: Path, settings: str, steps: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"nothing-{steps}-{len(settings)}"
    overrides = ("rewards.0.source=reward.py:broken", "rewards.0.on_failure=drop", "run.panel=off", *settings.split())
    assert oppo(folder, "", f"run.name={name}", *overrides) == UNTRAINED
    made = records(folder, name, "metrics.jsonl")
    assert [(each["trained"], each["dropped"], each["version"]) for each in made] == [(0, 4, 1), (0, 4, 2)]
    assert message in capsys.readouterr().err
    assert json.loads((folder / "runs" / name / "summary.json").read_text())["complete"] is False
    assert records(folder, name, "log.jsonl")[-1]["event"] == "failed"


async def test_a_forward_pass_on_the_loop_is_caught_by_the_guard() -> None:
    with pytest.raises(AssertionError, match="Linear runs on the event loop's thread"):
        torch.nn.Linear(1, 1)(torch.zeros(1))


WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
UP = "model.layers.0.mlp.up_proj.weight"
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "1" * 5_000

Damage: TypeAlias = Callable[[Path], object]


def refused(code: int, capsys: pytest.CaptureFixture[str], *messages: str) -> None:
    """Check that a command ended with these words, and as it does where something cannot be used."""
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    for message in messages:
        assert message in said


def says(file: str, text: str | bytes) -> Damage:
    return lambda model: (model / file).write_bytes(text if isinstance(text, bytes) else text.encode())


def sets(**changes: object) -> Damage:
    def damage(model: Path) -> None:
        described = json.loads((model / CONFIG).read_text()) | changes
        (model / CONFIG).write_text(json.dumps({key: value for key, value in described.items() if value is not ...}))

    return damage


def holds(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    def damage(model: Path) -> None:
        weights = {name: tensor.clone() for name, tensor in load_file(model / WEIGHTS).items()}
        save_file(change(weights), model / WEIGHTS, metadata={"format": "pt"})

    return damage


def put(number: float) -> Damage:
    def change(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights[UP][3, 5] = number
        return weights

    return holds(change)


def keeps(part: slice) -> Damage:
    """Let a part of the file of weights be all that there is."""
    return lambda model: (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[part])


def indexes(entry: object, **others: object) -> Damage:
    """Let an index say that all weights are in ``entry``; they are in ``a.safetensors`` and ``a.bin``, and outside."""

    def damage(model: Path) -> None:
        weights = load_file(model / WEIGHTS)
        (model / WEIGHTS).rename(model / "a.safetensors")
        torch.save(weights, model / "a.bin")
        shutil.copy(model / "a.safetensors", model.parent / "outside.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, entry)} | others
        (model / INDEX).write_text(json.dumps(index))

    return damage


def becomes_a_pipe(file: str) -> Damage:
    """Let a file be a pipe, from which nothing ever comes."""

    def damage(model: Path) -> None:
        (model / file).unlink()
        os.mkfifo(model / file)

    return damage


def lacks(*files: str) -> Damage:
    def damage(model: Path) -> None:
        for file in files:
            (model / file).unlink()

    return damage


NOT_WHOLE = f"{WEIGHTS} is no safetensors file, or not the whole of one"
NO_MODEL = "no model can be made of {model}/config.json and the weights beside it ("
NO_TOKENIZER = "no tokenizer could be loaded: the directory '{model}' holds "

MODELS: dict[str, tuple[Damage, str]] = {
    "weights, empty": (says(WEIGHTS, ""), NOT_WHOLE),
    "weights, garbage": (says(WEIGHTS, b"garbage" * 99), NOT_WHOLE),
    "weights, cut short": (keeps(slice(0, -100)), NOT_WHOLE),
    "weights, with a head of an exbibyte": (says(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"), NOT_WHOLE),
    "weights, still in git-lfs": (says(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), "`git lfs pull`"),
    "weights, a pipe": (becomes_a_pipe(WEIGHTS), "looked for config.json and *.safetensors"),
    "weights, none": (holds(lambda _: {}), "has no model.embed_tokens.weight, "),
    "one weight missing": (
        holds(lambda weights: {name: tensor for name, tensor in weights.items() if name != UP}),
        f"has no {UP}: it is incomplete",
    ),
    "one weight too many": (
        holds(lambda weights: weights | {"model.fourth.weight": torch.zeros(2, 2)}),
        "has model.fourth.weight, which LlamaForCausalLM does not use",
    ),
    "NaN": (put(float("nan")), f"{UP} of the checkpoint at '{{model}}' holds NaN or infinite numbers"),
    "config, garbage": (says(CONFIG, "garbage"), "{model}/config.json is not valid JSON: "),
    "config, a list": (says(CONFIG, "[1]"), "{model}/config.json: expected a JSON object, got list"),
    "config, not UTF-8": (says(CONFIG, b"\xff\xfe"), "{model}/config.json is not valid JSON: 'utf-8' codec"),
    "config, a long number": (says(CONFIG, f'{{"hidden_size": {DIGITS}}}'), "config.json is not valid JSON: Exceeds"),
    "config, none": (lacks(CONFIG), "looked for config.json and *.safetensors"),
    "size, negative": (sets(hidden_size=-32), NO_MODEL + "RuntimeError: Trying to create tensor with negative dim"),
    "size, another": (sets(hidden_size=...), "does not fit LlamaForCausalLM: lm_head.weight is [96, 32], not [96, 40"),
    "size, enormous": (sets(hidden_size=10**9), "lm_head.weight is [96, 32], not [96, 1000000000]"),
    "layers, a hundred thousand": (sets(num_hidden_layers=10**5), "describes 100000 layers, but there are 21 tensors"),
    "layers, one too few": (
        sets(num_hidden_layers=1),
        "and 6 more, which LlamaForCausalLM does not use: expected the weights of the model that config.json describes",
    ),
    "an unknown activation": (sets(hidden_act="nonsense"), NO_MODEL + "KeyError: 'nonsense')"),
    "an unknown rope": (sets(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}), "KeyError: 'nonsense')"),
    "an unknown architecture": (sets(model_type="nonsense"), NO_MODEL),
    "bitsandbytes": (sets(quantization_config={"quant_method": "bitsandbytes"}), "are quantised (bitsandbytes)"),
    "tokenizer, an empty object": (says("tokenizer.json", "{}"), NO_TOKENIZER),
    "tokenizer, garbage": (says("tokenizer.json", "garbage"), "{model}/tokenizer.json is not valid JSON"),
    "tokenizer, none": (lacks("tokenizer.json", "tokenizer_config.json"), NO_TOKENIZER),
    "tokenizer, a pipe": (becomes_a_pipe("tokenizer.json"), NO_TOKENIZER),
    "template, not UTF-8": (says("chat_template.jinja", b"\xff\xfe"), NO_TOKENIZER),
    "generation config, garbage": (says("generation_config.json", "garbage"), "generation_config.json is not valid"),
    "generation config, ends by text": (
        says("generation_config.json", '{"eos_token_id": ["</s>"]}'),
        "{model}/generation_config.json: expected token ids under eos_token_id, got ['</s>']",
    ),
    "index, a pickle": (indexes("a.bin"), "{model} holds its weights only as pickles (a.bin)"),
    "index, another directory": (indexes("../outside.safetensors"), "'../outside.safetensors', which is outside of"),
    "index, a file that is not there": (indexes("b.safetensors"), "{model}/b.safetensors is not there"),
    "index, numbers": (indexes(5), f"{{model}}/{INDEX}: expected a weight_map"),
    "index, no metadata": (indexes("a.safetensors", metadata=None), f"{{model}}/{INDEX}: expected metadata"),
    "config, a pickle by name": (
        lambda model: [(model / "a.bin").write_bytes(b""), sets(transformers_weights="a.bin")(model)],
        "{model} holds its weights only as pickles (a.bin)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_not_what_it_says_is_refused_by_name(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = MODELS[name]
    model = folder / "models" / name
    shutil.copytree(folder / "actor", model)
    damage(model)
    code = oppo(folder, "--dry-run", f"models.policy={model}")
    refused(code, capsys, "error: models.policy: ", message.replace("{model}", str(model)))


def test_weights_in_shards_of_the_directory_are_read(folder: Path) -> None:
    model = folder / "sharded"
    shutil.copytree(folder / "actor", model)
    indexes("a.safetensors")(model)
    assert oppo(folder, "--dry-run", f"models.policy={model}") == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.policy=models/of/mine", "'models/of/mine' is no directory here, nor could it be the name"),
        ("models.policy=actr/model", "'actr/model' is no directory here, and as a hub name it could not be had ("),
        ("models.policy=a\0b", r"'a\x00b' is no directory here, nor could it be"),
        ("models.policy=~nobody-of-that-name/x", "'~nobody-of-that-name/x' is no path that can be followed"),
        ("models.policy=loop", "loop"),
        ("models.policy=pipe.jsonl", "pipe.jsonl' is no directory here"),
        ("rewards.0.source=a\0b.py:f", r"'a\x00b.py' is no path that can be followed"),
        ("rewards.0.source=pipe.py:f", "there is no file "),
        ("data.prompts=pipe.jsonl", "pipe.jsonl, but a directory, pipe or device"),
        ("data.prompts=pipe.parquet", "pipe.parquet, but a directory, pipe or device"),
        ("data.prompts=zero.jsonl", "/dev/zero, but a directory, pipe or device"),
        ("data.prompts=actor", "or a file that ends in .jsonl, .csv, .parquet"),
        ("data.prompts=directory.jsonl", "expected one that Dataset.save_to_disk wrote"),
        ("data.prompts=loop", "loop"),
        (f"data.prompts={'a' * 5_000}.jsonl", "File name too long"),
        ("run.directory=loop", "loop"),
        ("run.directory=pipe.jsonl", "pipe.jsonl: Not a directory; choose another run.directory"),
        (f"run.steps={DIGITS}", "run.steps: expected a whole number"),
        (f"run.steps={DEEP}", "run.steps: expected a whole number"),
    ],
    ids=lambda text: text[:40].replace("\0", "NUL"),
)
def test_a_name_that_leads_nowhere_is_refused_by_name(
    folder: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for pipe in ("pipe.jsonl", "pipe.parquet", "pipe.py"):
        if not (folder / pipe).exists():
            os.mkfifo(folder / pipe)
    for link, target in (("loop", "loop"), ("zero.jsonl", "/dev/zero")):
        if not os.path.lexists(folder / link):
            (folder / link).symlink_to(target)
    (folder / "directory.jsonl").mkdir(exist_ok=True)
    refused(oppo(folder, "", "run.name=nowhere", override), capsys, message)
    assert not (folder / "runs" / "nowhere").exists()


CHAT = '{"prompt": [{"role": "user", "content": "w3"}]}'


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (r'{"prompt": "\ud800 w3"}', "", r"column 'prompt': the policy's tokenizer cannot read '\ud800 w3' (str): "),
        (f'{{"prompt": "w3", "goal": {DIGITS}}}', "", "not valid JSON: Exceeds the limit"),
        (f'{{"prompt": "w3", "goal": {DEEP}}}', "", "not valid JSON: maximum recursion depth exceeded"),
        (CHAT, "{{ raise_exception('roles must alternate') }}", "'w3'}] (list): TemplateError: roles must alternate"),
        (CHAT, "{% for %}", "TemplateSyntaxError: "),
    ],
    ids=["a lone surrogate", "a long number", "deep", "raises", "syntax"],
)
def test_a_row_that_cannot_be_read_is_named_with_its_line(
    folder: Path, row: str, template: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder / "talking"
    shutil.copytree(folder / "actor", model, dirs_exist_ok=True)
    (model / "chat_template.jinja").write_text(template)
    (folder / "rows.jsonl").write_text(f'{{"prompt": "w3"}}\n{row}\n')
    code = oppo(folder, "--dry-run", f"models.policy={model}", "data.prompts=rows.jsonl")
    refused(code, capsys, f"error: {folder / 'rows.jsonl'}, line 2", message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "cannot read the configuration {file}: config.toml is no plain file"),
        (Path.mkdir, "{file} is a directory, and settings are a file, such as {file}/config.toml; "),
        (str, "cannot read the configuration {file}: "),
        (lambda file: file.write_text("[run\n"), "{file} is not valid TOML: "),
        (
            lambda file: file.symlink_to("/dev/zero"),
            "cannot read the configuration {file}: config.toml is no plain file",
        ),
        (lambda file: file.symlink_to(file), "cannot read the configuration {file}: "),
        (lambda file: file.write_bytes(b"a = '\xff'"), "{file} is not valid TOML: 'utf-8' codec can't decode"),
        (lambda file: file.write_text(f"a = {DEEP}"), "{file} is not valid TOML: "),
        (lambda file: file.write_text(f"[run]\nsteps = {DIGITS}"), "{file} is not valid TOML: Exceeds the limit"),
    ],
    ids=["pipe", "directory", "absent", "syntax", "device", "loop", "not UTF-8", "deep", "a long number"],
)
def test_settings_that_cannot_be_read_are_refused_by_file(
    tmp_path: Path, make: Damage, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    make(file)
    refused(main(["train", str(file)]), capsys, "error: ", message.format(file=file))


def test_a_nul_in_the_name_of_the_settings_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    refused(main(["train", "a\0b.toml"]), capsys, r"error: a\x00b.toml is not valid TOML: ")
