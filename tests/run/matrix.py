"""Whole runs of pairs of settings: every two features meet in one of about a hundred runs of tiny models.

A run trains to its end. A deterministic one is run again with whole responses in place of chunks and with threads in
place of processes, and once more, killed at some moment and resumed: both end with the same weights, samples and
journal. As a program, this writes the digests of all runs to a file, so that two commits can be compared::

    python -m tests.run.matrix --digests FILE [--rows 3,14]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import safe_open

from oppo.errors import OppoError
from oppo.hf.chat import ChatFormat, ParsedTurn
from oppo.hf.tool_calls import ToolCall
from oppo.observe import Observer
from oppo.run.train import resume, train
from tests.kit.assets import furnish
from tests.kit.forked import Program, preload
from tests.kit.pairs import Row, covering
from tests.kit.workplace import read_lines

STEPS = 3
RUN = Path("runs", "r")

preload("tests.kit.imported")

BASE = """
run = { name = "r", directory = "runs", steps = 3, panel = "off", cores = 1, trace = 0, checkpoint_every = 1, \
keep_last = 9, watchdog_seconds = 120, call_timeout = 120, scorers = "thread", logged_samples = 99 }
models = { policy = "llama", device = "cpu" }
data.prompts = "prompts.jsonl"
sampling = { max_new_tokens = 16, \
stop = ["<|im_end|>", 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 170, 180, 190, 200, 210] }
step = { batch = 4, chunk = 3 }
trainer = { learning_rate = 1e-3, epochs = 1, micro_batch_tokens = 96 }
"""

GROUPS = "algorithm.samples=2"
ROOM = "sampling.max_new_tokens=96"

AXES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "algorithm": {
        "ppo": (),
        "grpo": ("step.algorithm=grpo", GROUPS),
        "rloo": ("step.algorithm=rloo", GROUPS),
        "dr_grpo": ("step.algorithm=dr_grpo", GROUPS),
        "dapo": ("step.algorithm=dapo", GROUPS, "algorithm.max_rounds=50"),
        "gspo": ("step.algorithm=gspo", GROUPS),
        "reinforce_pp": ("step.algorithm=reinforce_pp",),
        "online_dpo": ("step.algorithm=online_dpo",),
        "distill": ("step.algorithm=distill", "models.teacher=teacher"),
    },
    "admission": {
        "synchronous": (),
        "overcommit": ("step.overcommit=2",),
        "slope": ("step.admission=slope", "step.overcommit=2"),
        "tail-batched": ("step.admission=tail-batched",),
    },
    "lookahead": {"0": (), "1": ("step.lookahead=1",), "2": ("step.lookahead=2",)},
    "kv": {"recompute": (), "keep": ("step.kv_on_sync=keep",)},
    "rewards": {
        "function": ('rewards=["code.py:total"]',),
        "two": ('rewards=[{name="a",source="reward",weight=0.5},{name="b",source="code.py:short"}]',),
        "model": ('rewards=["reward"]',),
        "whole": ('rewards=[{source="reward",reading="whole"}]',),
        "process": ('rewards=[{source="code.py:total",process=true}]',),
    },
    "dialogue": {
        "none": (),
        "function": ("environment.source=code.py:answer",),
        "tools": ('environment.tools=["code.py:add"]', "environment.max_turns=2", ROOM),
        "class": ("environment.factory=code.py:Game", "environment.max_turns=2", ROOM),
        "agent": ("agents.program=code.py:agent", ROOM),
        "branches": ("agents.program=code.py:chief", ROOM),
    },
    "adapters": {"no": (), "lora": ("models.lora_rank=4", "trainer.learning_rate=1e-2")},
    "policy": {
        "llama": (),
        "tied": ("models.policy=tied",),
        "mixture": ("models.policy=mixture",),
        "mixture-replayed": ("models.policy=mixture", "trainer.router_replay=true"),
        "hybrid": ("models.policy=hybrid",),
        "sliding": ("models.policy=sliding",),
    },
    "value": {"own": (), "shared-trunk": ("models.shared_trunk=true",)},
    "weights": {"default": (), "copied": ("models.share_weights=false",)},
    "trainer": {
        "thread": (),
        "process": ("run.trainer=process",),
        "ranks": ('placement.trainer=["cpu","cpu"]',),
    },
    "decoding": {"thread": (), "process": ("run.policy=process",)},
    "scorers": {"thread": (), "process": ("run.scorers=process",)},
    "correction": {
        "none": (),
        "truncated": ("algorithm.is_correction=truncated", "algorithm.ratio_base=proximal"),
        "mask": ("algorithm.is_correction=mask",),
        "sequence": ("algorithm.is_correction=truncated_sequence", "algorithm.ratio_base=proximal"),
        "mask_sequence": ("algorithm.is_correction=mask_sequence",),
    },
    "surrogate": {
        "default": (),
        "dual_clip": ("algorithm.surrogate=dual_clip",),
        "cispo": ("algorithm.surrogate=cispo",),
        "sapo": ("algorithm.surrogate=sapo",),
        "dppo_tv": ("algorithm.surrogate=dppo_tv",),
    },
    "aggregation": {
        "default": (),
        "tokens": ("algorithm.aggregation=tokens",),
        "responses": ("algorithm.aggregation=responses",),
        "constant": ("algorithm.aggregation=constant",),
        "response_sums": ("algorithm.aggregation=response_sums",),
    },
    "evaluation": {
        "no": (),
        "yes": ("eval.prompts=held_out.jsonl", "eval.every=1", "eval.samples=2", "eval.pass_score=0.5"),
        "best": ("eval.prompts=held_out.jsonl", "eval.every=2", "run.keep_best=true"),
    },
    "teacher": {
        "no": (),
        "mixed": ("algorithm.distill=0.5", "models.teacher=teacher"),
        "top-k": ("algorithm.distill=0.5", "algorithm.distill_top_k=4", "models.teacher=teacher"),
    },
    "kl": {
        "default": (),
        "none": ("algorithm.kl=0",),
        "adaptive": ("algorithm.kl=0.1", "algorithm.kl_target=0.1", "algorithm.kl_horizon=100"),
        "loss": ("algorithm.kl=0.1", "algorithm.kl_in=loss", "algorithm.kl_estimator=k3"),
    },
    "shaping": {
        "none": (),
        "eos": ("algorithm.missing_eos_penalty=0.5",),
        "norm": ("algorithm.score_norm=true",),
        "nll": ("algorithm.nll=0.1", "algorithm.nll_above=0.3"),
        "entropy": ("algorithm.entropy_coefficient=0.01",),
        "truncated": ("algorithm.mask_truncated=true",),
    },
    "update": {
        "one": (),
        "minibatches": ("trainer.epochs=2", "trainer.minibatches=2"),
        "warmup": ("trainer.critic_warmup=1",),
        "checkpointing": ("trainer.gradient_checkpointing=1",),
        "cosine": ("trainer.schedule=cosine", "trainer.warmup_steps=1"),
    },
    "sampling": {
        "default": (),
        "cool": ("sampling.temperature=0.5",),
        "top-k": ("sampling.top_k=20",),
        "top-p": ("sampling.top_p=0.9",),
        "longer": ("sampling.min_new_tokens=3",),
        "strings": ('sampling.stop_strings=["a", "0 "]',),
    },
    "data": {"one": (), "mixed": ('data.prompts=[{path="prompts.jsonl",weight=2},{path="held_out.jsonl",weight=1}]',)},
    "timing": {
        "deterministic": ("run.deterministic=true",),
        "free": (),
        "adaptive": ("step.admission=adaptive", "step.overcommit=2"),
        "continuous": ("step.admission=continuous", "step.overcommit=2"),
        "in-flight": ("step.weight_sync=in-flight",),
        "pool": ("placement.policy_replicas=2",),
        "streamed": ("step.stream_updates=true",),
    },
}
"""Values of each axis and what they set; the first is what a run has otherwise."""

EXPENSIVE = ("trainer", "decoding", "scorers", "rewards", "dialogue")
"""Axes with values that take further processes or long responses."""

CLASHES: tuple[tuple[Mapping[str, str], str], ...] = (
    ({"timing": "adaptive|continuous", "admission": "overcommit|slope|tail-batched"}, ""),  # which is one setting
    ({"timing": "deterministic", "dialogue": "branches"}, ""),  # which an agent does that may, whatever settings say
    ({"timing": "in-flight", "lookahead": "0"}, "step.lookahead"),
    ({"timing": "in-flight", "value": "shared-trunk", "lookahead": "1|2"}, "models.shared_trunk"),
    ({"timing": "pool", "decoding": "process"}, "placement.policy_replicas"),
    ({"timing": "streamed", "algorithm": "ppo|reinforce_pp|distill"}, "step.stream_updates"),
    ({"timing": "streamed", "update": "minibatches"}, "step.stream_updates"),
    ({"timing": "streamed", "shaping": "norm"}, "step.stream_updates"),
    ({"timing": "streamed", "kl": "adaptive"}, "step.stream_updates"),
    (
        {"value": "shared-trunk", "algorithm": "grpo|rloo|dr_grpo|dapo|gspo|reinforce_pp|online_dpo|distill"},
        "no critic",
    ),
    ({"update": "warmup", "algorithm": "grpo|rloo|dr_grpo|dapo|gspo|reinforce_pp|online_dpo|distill"}, "no critic"),
    ({"algorithm": "gspo", "surrogate": "dual_clip|cispo|sapo|dppo_tv"}, "algorithm.surrogate"),
    ({"algorithm": "online_dpo", "surrogate": "dual_clip|cispo|sapo|dppo_tv"}, "algorithm.surrogate"),
    ({"algorithm": "online_dpo", "correction": "truncated|mask|sequence|mask_sequence"}, "algorithm.is_correction"),
    ({"algorithm": "online_dpo", "aggregation": "tokens|responses|constant|response_sums"}, "algorithm.aggregation"),
    ({"algorithm": "online_dpo", "teacher": "mixed|top-k"}, "algorithm.distill"),
    ({"algorithm": "online_dpo|distill", "kl": "none|adaptive|loss"}, "algorithm.kl"),
    ({"algorithm": "online_dpo|distill", "shaping": "eos"}, "algorithm.missing_eos_penalty"),
    ({"algorithm": "online_dpo|distill", "shaping": "norm"}, "algorithm.score_norm"),
    ({"algorithm": "online_dpo|distill", "shaping": "nll"}, "algorithm.nll"),
    ({"algorithm": "online_dpo", "shaping": "entropy"}, "algorithm.entropy_coefficient"),
    ({"algorithm": "grpo|dapo|gspo", "kl": "adaptive"}, "kl_target"),
    ({"algorithm": "dapo", "admission": "tail-batched"}, "algorithm.dynamic_sampling"),
    (
        {"algorithm": "distill", "teacher": "top-k", "correction": "truncated|mask|sequence|mask_sequence"},
        "is_correction",
    ),
    ({"algorithm": "distill", "teacher": "top-k", "surrogate": "dual_clip|cispo|sapo|dppo_tv"}, "surrogate"),
    ({"timing": "pool", "value": "shared-trunk"}, "placement.policy_replicas"),
    ({"timing": "streamed", "algorithm": "dapo"}, "algorithm.dynamic_sampling"),
    (
        {"timing": "streamed", "shaping": "entropy", "aggregation": "default|responses|constant|response_sums"},
        "step.stream_updates",
    ),
    ({"policy": "mixture-replayed", "correction": "truncated|mask|sequence|mask_sequence"}, "trainer.router_replay"),
)
"""Values, by ``|``, that do not go together, and a word of the error that refuses them."""


PLACES = ("rewards", "trainer", "decoding", "scorers")
"""Axes that say by ``process`` where something works."""


def fits(row: Row) -> bool:
    """Return whether the values go together, which may be those of some axes only."""
    return not any(all(row.get(axis) in values for axis, values in clash) for clash in _clashes())


@cache
def _clashes() -> list[list[tuple[str, list[str]]]]:
    return [[(axis, values.split("|")) for axis, values in clash.items()] for clash, _ in CLASHES]


@cache
def rows() -> list[Row]:
    """Return the rows of the matrix: deterministic ones cover all pairs, others those of what depends on timing."""
    fixed = {**AXES, "timing": ["deterministic"]}
    first, _ = covering(fixed, fits, expensive=EXPENSIVE)
    loose = {**AXES, "timing": [value for value in AXES["timing"] if value != "deterministic"]}
    second, _ = covering(
        loose, fits, expensive=EXPENSIVE, wanted=lambda pair: "timing" in pair or pair.get("dialogue") == "branches"
    )
    return [*first, *(_alone(row) for row in second)]


def _alone(row: Row) -> Row:
    # Settings do not refuse branches, but tail batching and online DPO do. No clash: that would choose all rows anew.
    if row["dialogue"] != "branches":
        return row
    changed = {"admission": "overcommit"} if row["admission"] == "tail-batched" else {}
    return {**row, **changed, **({"dialogue": "agent"} if row["algorithm"] == "online_dpo" else {})}


BY_TURN = {"function": "algorithm.credit=turns", "class": "algorithm.credit=state", "agent": "algorithm.credit=turns"}

CREDIT: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("grpo", "rloo", "dr_grpo", "dapo"), BY_TURN),
    **dict.fromkeys(("ppo", "reinforce_pp"), dict.fromkeys(BY_TURN, "algorithm.over=turns")),
}
"""Credit by turn, of algorithms and dialogues; no axis, so that rows stay as they are."""

OF_THE_TURNS = {
    "function": 'rewards=[{name="turns",source="environment"},{name="total",source="code.py:total"}]',
    "process": 'rewards=[{name="turns",source="environment"},{name="total",source="code.py:total",process=true}]',
}


RAE = "step.algorithm=rae"


def in_roles(row: Row) -> list[str]:
    """Return what makes agents of some rows play two roles, of which the second is frozen where one may be held."""
    if row["dialogue"] == "agent" and row["sampling"] in ("default", "cool", "top-k"):
        second = "teacher" if row["lookahead"] == "1" else "initial"
    elif row["dialogue"] == "branches" and row["lookahead"] != "0":
        second = "policy"
    else:
        return []
    rae = [RAE] * (row["algorithm"] == "reinforce_pp")
    return ["agents.program=code.py:duel", f'agents.roles={{one="policy",two="{second}"}}', *rae]


def own_teacher(row: Row) -> list[str]:
    """Return what makes the policy its own teacher, behind another prompt, in most rows that have one; no axis."""
    if row["teacher"] == "no" or row["dialogue"] in ("agent", "branches") or row["data"] == "mixed":
        return []
    grouped = row["algorithm"] in ("grpo", "rloo", "dr_grpo", "dapo", "gspo")
    weights = {"0": "live", "1": "average", "2": "frozen" if grouped else "average"}[row["lookahead"]]
    hint = "{prompt} {sibling}" if grouped and row["kl"] != "default" else "{prompt} {number}"
    more = ["teacher.threshold=0.3"] * ("sibling" in hint) + ["teacher.rate=0.3"] * (weights == "average")
    return ["models.teacher=", f"teacher.weights={weights}", f"teacher.template={hint}", *more]


def overrides(row: Row) -> list[str]:
    """Return what a row sets, ``section.key=value`` each."""
    dialogue, given = row["dialogue"], dict(row)
    roles = in_roles(row)
    credit = None if RAE in roles else CREDIT.get(row["algorithm"], {}).get(dialogue)
    more = [] if credit is None else [credit]
    if dialogue in ("agent", "branches"):
        del given["rewards"]
    elif dialogue in ("function", "class") and row["rewards"] in OF_THE_TURNS:
        more.append(OF_THE_TURNS[given.pop("rewards")])
    muon = ["trainer.optimizer=muon"] * (row["update"] == "cosine" and row["adapters"] == "no")
    chosen = [each for axis, value in given.items() for each in AXES[axis][value]]
    return [*chosen, *more, *roles, *own_teacher(row), *muon]


class Killer(Observer):
    """Kills the process at an item, or counts them."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.items = at, 0

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        self.items += 1
        if self.items == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def _call_tools(chat: ChatFormat, tokens: list[int]) -> ParsedTurn:
    left = (*tokens, 0)[0]  # a random policy calls nothing
    return ParsedTurn("", tool_calls=(ToolCall("add", {"left": left}),))


def live(config: str, settings: list[str], kill: int, *, call_tools: bool = False) -> int:
    """Train in this process, in the working directory; return an exit code, and say how many items there were.

    Args:
        config: a file of settings, or a run that is resumed.
        settings: overrides of it.
        kill: the item at which the process dies, by SIGKILL; -1: none.
        call_tools: each turn of the policy is a call, whatever it says.
    """
    killer = Killer(kill)
    if call_tools:
        ChatFormat.parse = _call_tools  # type: ignore[method-assign, assignment]
    try:
        begin = resume if Path(config).is_dir() else train
        begin(config, settings, observers=[killer])
    except OppoError as error:
        sys.stdout.write(f"refused: {type(error).__name__}: {error}\n")
        return 2
    sys.stdout.write(f"items {killer.items}\n")
    return 0


_LIVE = """
import json, sys
from tests.run.matrix import live
config, settings, kill, call_tools = json.loads(sys.argv[1])
sys.exit(live(config, settings, kill, call_tools=call_tools))
"""


@dataclass(frozen=True)
class Life:
    """What a process did: its exit code, and what it said."""

    code: int
    said: str

    @property
    def refusal(self) -> str:
        """The error of the settings, without its traceback; empty for none."""
        lines = [line for line in self.said.splitlines() if line.startswith("refused: ")]
        return self.said[self.said.index(lines[0]) :].strip() if self.code == 2 and lines else ""

    @property
    def items(self) -> int:
        return next(int(line.split()[1]) for line in self.said.splitlines() if line.startswith("items "))


def lived(folder: Path, row: Row, config: str, settings: Iterable[str] = (), kill: int = -1) -> Life:
    """Train a row in a process of its own in ``folder``."""
    arguments = [config, list(settings), kill, row["dialogue"] in ("tools", "class")]
    with Program(_LIVE, [json.dumps(arguments)], folder=folder, forks=True) as process:
        out, error = process.communicate(timeout=600)
        return Life(process.wait(), out + error)


def digests(run: Path) -> dict[str, str]:
    """Return the digests of a run's weights, samples, evaluations and journal."""
    return {
        "weights": _digest(_weights(run)),
        "samples": _digest(_records(run, "samples.jsonl")),
        "evaluations": _digest(_records(run, "eval.jsonl")),
        "journal": _digest(_records(run, "journal.jsonl")),
    }


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:12]


def _weights(run: Path) -> Iterator[bytes]:
    for path in sorted((run / "checkpoints" / "final").glob("*/*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                yield f"{path.parent.name} {name} {tensor.dtype} {tuple(tensor.shape)}".encode()
                yield tensor.contiguous().numpy().tobytes()


def _records(run: Path, name: str) -> list[bytes]:
    """Return the lines of a file without what they say of the clock, in an order of their own."""
    lines = read_lines(run / name) if (run / name).exists() else []
    # an agent ends, and its last request is refused, before this evaluation is measured or before the next one is
    timed = "at", "seconds", *(f"agents/{name}" for name in ("refused", "repeated", "conversations", "history_changed"))
    kept = [
        {key: value for key, value in line.items() if not key.endswith(timed)}
        for line in lines
        if line.get("event") != "observed"
    ]
    return sorted(json.dumps(line, sort_keys=True).encode() for line in kept)


def trained_twice(run: Path) -> list[int]:
    """Return the rollouts that the journal ends more than once."""
    ended = [line["rollout"] for line in read_lines(run / "journal.jsonl") if line["event"] in ("trained", "dropped")]
    return sorted({rollout for rollout in ended if ended.count(rollout) > 1})


@dataclass(frozen=True)
class Outcome:
    """What a row came to: its digests where it is deterministic, and what is wrong; empty for nothing."""

    digests: Mapping[str, str]
    fault: str


def tried(row: Row, workplace: Path, folder: Path, seed: object = 0, *, only_uncut: bool = False) -> Outcome:
    """Train a row in all ways.

    Args:
        row: of :func:`rows`.
        workplace: as :func:`tests.kit.assets.furnish` fills one.
        folder: of the runs, which are deleted unless something is wrong.
        seed: of the moment of the kill.
        only_uncut: train once, undisturbed.
    """
    deterministic = row["timing"] == "deterministic"
    trial = _Trial(row, overrides(row), workplace, folder, comparable=deterministic and row["kv"] == "recompute")
    try:
        items, expected = trial.uncut()
        if not deterministic:
            expected = {}
        if not only_uncut:
            if deterministic:
                trial.whole(expected)
            trial.killed(random.Random(f"{seed} {sorted(row.items())}").randint(1, items), expected)
    except AssertionError as error:
        return Outcome({}, str(error))
    shutil.rmtree(folder)
    return Outcome(expected, "")


@dataclass(frozen=True)
class _Trial:
    row: Row
    settings: list[str]
    workplace: Path
    folder: Path
    comparable: bool

    def uncut(self) -> tuple[int, Mapping[str, str]]:
        place = _copied(self.workplace, self.folder / "uncut")
        life = lived(place, self.row, "config.toml", self.settings)
        self._require(life.code == 0, life.refusal or f"exit code {life.code}", life)
        steps, twice = len(read_lines(place / RUN / "metrics.jsonl")), trained_twice(place / RUN)
        self._require(steps == STEPS and not twice, f"{steps} steps in place of {STEPS}, trained twice: {twice}", life)
        return life.items, digests(place / RUN)

    def whole(self, expected: Mapping[str, str]) -> None:
        place = _copied(self.workplace, self.folder / "whole")
        usual = {axis: next(iter(values)) for axis, values in AXES.items()}
        threads = {axis: usual[axis] for axis in PLACES if self.row[axis] == "process"}
        life = lived(place, self.row, "config.toml", [*overrides({**self.row, **threads}), "step.chunk=whole"])
        self._require_equal(life, place, expected, "whole responses in threads")

    def killed(self, moment: int, expected: Mapping[str, str]) -> None:
        place = _copied(self.workplace, self.folder / "killed")
        life = lived(place, self.row, "config.toml", self.settings, moment)
        if life.code == 0 and not self.comparable:
            return  # it had fewer items this time
        name = f"killed at item {moment}"
        self._require(life.code == -signal.SIGKILL, f"{name}: exit code {life.code}", life)
        begun = (place / RUN).exists()
        life = lived(place, self.row, str(RUN)) if begun else lived(place, self.row, "config.toml", self.settings)
        self._require_equal(life, place, expected if self.comparable else None, f"{name} and resumed")
        twice = trained_twice(place / RUN)
        self._require(not twice, f"{name}, trained twice: {twice}", life)

    def _require_equal(self, life: Life, place: Path, expected: Mapping[str, str] | None, name: str) -> None:
        self._require(life.code == 0, f"{name}: {life.refusal or f'exit code {life.code}'}", life)
        others = digests(place / RUN) if expected is not None else {}
        differing = [part for part, digest in others.items() if expected is not None and digest != expected[part]]
        self._require(not differing, f"{name}: other {', '.join(differing)}", life)

    def _require(self, holds: bool, fault: str, life: Life) -> None:
        if not holds:
            raise AssertionError(f"{fault}\n  in {self.folder}, settings {self.settings}\n{life.said[-3000:]}")


def _copied(workplace: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(BASE)
    for path in workplace.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Add the digests of the matrix's runs to a file, one line of JSON a row."
    )
    parser.add_argument("--digests", type=Path, required=True)
    parser.add_argument("--rows", default="", help="numbers, by commas; default: all")
    chosen = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})
    numbers = [int(each) for each in chosen.rows.split(",")] if chosen.rows else range(len(rows()))
    there = {line["row"] for line in read_lines(chosen.digests)} if chosen.digests.exists() else set()
    with tempfile.TemporaryDirectory() as made, chosen.digests.open("a", encoding="utf-8") as file:
        workplace = furnish(Path(made, "workplace"))
        for number in (each for each in numbers if each not in there):
            row = rows()[number]
            outcome = tried(row, workplace, Path(made, str(number)), only_uncut=True)
            values: dict[str, Any] = {axis: value for axis, value in row.items() if value != next(iter(AXES[axis]))}
            file.write(json.dumps({"row": number, "values": values, **outcome.digests, "fault": outcome.fault}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
