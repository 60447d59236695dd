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
from tests.kit.pairs import Row, covering, pairs_of
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
OWN = ("algorithm.distill=0.5", "models.teacher=")

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
        "adaptive": ("step.admission=adaptive", "step.overcommit=2"),
        "continuous": ("step.admission=continuous", "step.overcommit=2"),
    },
    "lookahead": {"0": (), "1": ("step.lookahead=1",), "2": ("step.lookahead=2",)},
    "kv": {"recompute": (), "keep": ("step.kv_on_sync=keep",)},
    "rewards": {
        "function": ('rewards=["code.py:total"]',),
        "two": ('rewards=[{name="a",source="reward",weight=0.5},{name="b",source="code.py:short"}]',),
        "model": ('rewards=["reward"]',),
        "whole": ('rewards=[{source="reward",reading="whole"}]',),
        "process": ('rewards=[{source="code.py:total",process=true}]',),
        "environment": ('rewards=[{name="a",source="environment"},{name="b",source="code.py:total"}]',),
        "none": (),
    },
    "dialogue": {
        "none": (),
        "function": ("environment.source=code.py:answer",),
        "tools": ('environment.tools=["code.py:add"]', "environment.max_turns=2", ROOM),
        "class": ("environment.factory=code.py:Game", "environment.max_turns=2", ROOM),
        "agent": ("agents.program=code.py:agent", ROOM),
        "branches": ("agents.program=code.py:chief", ROOM),
    },
    "credit": {
        "response": (),
        "turns": ("algorithm.credit=turns",),
        "state": ("algorithm.credit=state",),
        "over-turns": ("algorithm.over=turns",),
    },
    "adapters": {"no": (), "lora": ("models.lora_rank=4", "trainer.learning_rate=1e-2")},
    "policy": {
        "llama": (),
        "tied": ("models.policy=tied",),
        "mixture": ("models.policy=mixture",),
        "mixture-replayed": ("models.policy=mixture", "trainer.router_replay=true"),
        "hybrid": ("models.policy=hybrid",),
        "sliding": ("models.policy=sliding",),
        "vision": ("models.policy=vision",),
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
        "own-live": (*OWN, "teacher.weights=live", "teacher.template={prompt} {number}"),
        "own-average": (*OWN, "teacher.weights=average", "teacher.rate=0.3"),
        "own-frozen": (*OWN, "teacher.weights=frozen", "teacher.template={prompt} {sibling}", "teacher.threshold=0.3"),
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
    "optimizer": {"adamw": (), "muon": ("trainer.optimizer=muon",)},
    "sampling": {
        "default": (),
        "cool": ("sampling.temperature=0.5",),
        "top-k": ("sampling.top_k=20",),
        "top-p": ("sampling.top_p=0.9",),
        "longer": ("sampling.min_new_tokens=3",),
        "strings": ('sampling.stop_strings=["a", "0 "]',),
    },
    "data": {
        "one": (),
        "mixed": ('data.prompts=[{path="prompts.jsonl",weight=2},{path="held_out.jsonl",weight=1}]',),
        "images": ("data.prompts=shown_prompts.jsonl",),
    },
    "timing": {
        "deterministic": ("run.deterministic=true",),
        "free": (),
        "in-flight": ("step.weight_sync=in-flight",),
        "pool": ("placement.policy_replicas=2",),
        "streamed": ("step.stream_updates=true",),
    },
}
"""Values of each axis and what they set; the first is what a run has otherwise."""

EXPENSIVE = ("trainer", "decoding", "scorers", "rewards", "dialogue")
"""Axes with values that take further processes or long responses."""

GROUPED = "grpo|rloo|dr_grpo|dapo"
CRITICLESS = f"{GROUPED}|gspo|reinforce_pp|online_dpo|distill"
SCORED = f"ppo|{GROUPED}|gspo|reinforce_pp|online_dpo"
AGENTS = "agent|branches"
SIGHTLESS = "llama|tied|mixture|mixture-replayed|hybrid|sliding"
NO_AGENT = "none|function|tools|class"

CLASHES: tuple[tuple[Mapping[str, str], str], ...] = (
    ({"timing": "deterministic", "admission": "adaptive|continuous"}, "step.admission"),
    ({"timing": "in-flight", "lookahead": "0"}, "step.lookahead"),
    ({"timing": "in-flight", "value": "shared-trunk", "lookahead": "1|2"}, "models.shared_trunk"),
    ({"timing": "in-flight", "teacher": "own-live", "lookahead": "1|2"}, "teacher.weights"),
    ({"timing": "pool", "decoding": "process"}, "placement.policy_replicas"),
    ({"timing": "streamed", "algorithm": "ppo|reinforce_pp|distill"}, "step.stream_updates"),
    ({"timing": "streamed", "update": "minibatches"}, "step.stream_updates"),
    ({"timing": "streamed", "shaping": "norm"}, "step.stream_updates"),
    ({"timing": "streamed", "kl": "adaptive"}, "step.stream_updates"),
    ({"timing": "streamed", "algorithm": "dapo"}, "algorithm.dynamic_sampling"),
    (
        {"timing": "streamed", "shaping": "entropy", "aggregation": "default|responses|constant|response_sums"},
        "step.stream_updates",
    ),
    ({"timing": "pool", "value": "shared-trunk"}, "placement.policy_replicas"),
    ({"value": "shared-trunk", "algorithm": CRITICLESS}, "no critic"),
    ({"update": "warmup", "algorithm": CRITICLESS}, "no critic"),
    ({"algorithm": "gspo", "surrogate": "dual_clip|cispo|sapo|dppo_tv"}, "algorithm.surrogate"),
    ({"algorithm": "online_dpo", "surrogate": "dual_clip|cispo|sapo|dppo_tv"}, "algorithm.surrogate"),
    ({"algorithm": "online_dpo", "correction": "truncated|mask|sequence|mask_sequence"}, "algorithm.is_correction"),
    ({"algorithm": "online_dpo", "aggregation": "tokens|responses|constant|response_sums"}, "algorithm.aggregation"),
    ({"algorithm": "online_dpo", "teacher": "mixed|top-k|own-live|own-average|own-frozen"}, "algorithm.distill"),
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
    ({"policy": "mixture-replayed", "correction": "truncated|mask|sequence|mask_sequence"}, "trainer.router_replay"),
    ({"adapters": "lora", "optimizer": "muon"}, "trainer.optimizer"),
    ({"dialogue": AGENTS, "rewards": "function|two|model|whole|process|environment"}, "returns the reward"),
    ({"dialogue": "none|tools", "rewards": "environment"}, "what an environment says"),
    ({"dialogue": "none|function|tools", "rewards": "none", "algorithm": SCORED}, "rewards"),
    ({"dialogue": NO_AGENT, "rewards": "none", "algorithm": "distill", "evaluation": "yes|best"}, "about scores"),
    ({"dialogue": AGENTS, "teacher": "own-live|own-frozen"}, "prompts of their own"),
    ({"teacher": "own-frozen", "algorithm": "ppo|reinforce_pp|distill"}, "another response"),
    ({"credit": "turns|state", "algorithm": "ppo|gspo|reinforce_pp|online_dpo|distill"}, "algorithm.credit"),
    ({"credit": "over-turns", "algorithm": f"{GROUPED}|gspo|online_dpo|distill"}, "algorithm.over"),
    ({"credit": "turns|state", "dialogue": "none", "algorithm": GROUPED}, "nothing answers a turn"),
    ({"credit": "over-turns", "dialogue": "none", "algorithm": "ppo|reinforce_pp"}, "nothing answers a turn"),
    ({"credit": "state", "dialogue": "tools|agent|branches", "algorithm": GROUPED}, "says of none in which state"),
)
"""Values, by ``|``, that do not go together, and a word of the error that refuses them."""

IN_A_RUN: tuple[tuple[Mapping[str, str], str], ...] = (
    ({"dialogue": "branches", "algorithm": "online_dpo"}, "agents that hold one conversation"),
    ({"dialogue": "branches", "admission": "tail-batched"}, "a key has one conversation, since TailBatched"),
    ({"dialogue": "branches", "timing": "deterministic"}, "decodes no rollouts that come later"),
    ({"data": "images", "policy": SIGHTLESS}, "reads text only: prompts with images need a tower"),
    ({"data": "images", "rewards": "whole"}, "and prompts show images: name a function"),
    ({"data": "images", "teacher": "own-live|own-frozen"}, "is text: leave [teacher] out"),
)
"""Likewise, refused as the run begins: neither whether an agent holds several conversations, nor what prompts show, is
in the settings."""


def context(values: Row) -> Row:
    """Return a row that holds the values and otherwise what they need for their own clash to be the one refused."""
    row = {axis: next(iter(options)) for axis, options in AXES.items()}
    row |= {"timing": "free"} | ({"algorithm": "rloo"} if values.get("timing") == "streamed" else {})
    row |= {"rewards": "none"} if values.get("dialogue") in AGENTS.split("|") else {}
    row |= {"policy": "vision", "algorithm": "grpo"} if values.get("data") == "images" else {}
    return {**row, **values}


PLACES = ("rewards", "trainer", "decoding", "scorers")
"""Axes that say by ``process`` where something works."""


def fits(row: Row) -> bool:
    """Return whether the values go together, which may be those of some axes only."""
    clashes = (others for each in row.items() for others in _clashes().get(each, ()))
    return not any(all(row.get(axis) in values for axis, values in others) for others in clashes)


@cache
def _clashes() -> Mapping[tuple[str, str], list[list[tuple[str, list[str]]]]]:
    # By each of the values that a clash names first: the others.
    found: dict[tuple[str, str], list[list[tuple[str, list[str]]]]] = {}
    for clash, _ in (*CLASHES, *IN_A_RUN):
        (axis, values), *others = [(axis, values.split("|")) for axis, values in clash.items()]
        for value in values:
            found.setdefault((axis, value), []).append(others)
    return found


@cache
def rows() -> list[Row]:
    """Return the rows of the matrix: deterministic ones cover all pairs, others those of what depends on timing."""

    def usual(row: Row) -> bool:  # a class that is the only reward is left to the last rows
        return fits(row) and not (row.get("dialogue") == "class" and row.get("rewards") == "none" and _scored(row))

    fixed = {**AXES, "timing": ["deterministic"]}
    first, _ = covering(fixed, lambda row: usual(row) and not by_timing(row), expensive=EXPENSIVE)
    second, _ = covering(
        AXES,
        usual,
        expensive=EXPENSIVE,
        wanted=lambda pair: pair.get("timing", "deterministic") != "deterministic" or by_timing(pair),
    )
    met = {frozenset(pair) for row in (*first, *second) for pair in pairs_of(row)}
    last, _ = covering(AXES, fits, expensive=EXPENSIVE, wanted=lambda pair: frozenset(pair.items()) not in met)
    return [*first, *second, *last]


def _scored(row: Row) -> bool:
    return row.get("algorithm") in SCORED.split("|")


def by_timing(row: Row) -> bool:
    """Return whether the order of what happens depends on timing, whatever else a row sets."""
    return row.get("dialogue") == "branches" or row.get("admission") in {"adaptive", "continuous"}


def in_roles(row: Row) -> list[str]:
    """Return what makes agents of some rows play two roles, of which the second is frozen where one may be held."""
    if row["teacher"].startswith("own"):
        return []
    if row["dialogue"] == "agent" and row["sampling"] in ("default", "cool", "top-k"):
        second = "teacher" if row["lookahead"] == "1" else "initial"
    elif row["dialogue"] == "branches" and row["lookahead"] != "0":
        second = "policy"
    else:
        return []
    rae = ["step.algorithm=rae"] * (row["algorithm"] == "reinforce_pp" and row["credit"] == "response")
    return ["agents.program=code.py:duel", f'agents.roles={{one="policy",two="{second}"}}', *rae]


def overrides(row: Row) -> list[str]:
    """Return what a row sets, ``section.key=value`` each."""
    chosen = [each for axis, value in row.items() for each in AXES[axis][value]]
    if row["data"] == "images":
        needed = {
            "placement.shard=false": row["trainer"] == "ranks",
            "data.images=true": row["dialogue"] in AGENTS.split("|"),
        }
        seen = chosen if row["rewards"] == "whole" else map(_seeing, chosen)  # which none can read by images
        chosen = [*seen, *(each for each, is_needed in needed.items() if is_needed)]
    roles = in_roles(row)
    room = [f"sampling.max_new_tokens={HALVING['roles' if roles else row['dialogue']]}"] * cuts(row)
    return [*chosen, *roles, *(COMPACT if compacts(row) else ()), *room]


SEEING = {
    '"reward"': '"seeing-reward"',
    "models.teacher=teacher": "models.teacher=seeing-teacher",
    "held_out": "shown_held_out",
}
"""What reads images, or shows some, in place of what does not."""


def _seeing(setting: str) -> str:
    for name, seeing in SEEING.items():
        setting = setting.replace(name, seeing)
    return setting


COMPACT = (
    "environment.compact=40",
    "environment.summary_tokens=6",
    "environment.max_segments=3",
    "environment.summary_request=Sum.",
)


def compacts(row: Row) -> bool:
    """Return whether tools of a row go on behind summaries, as they may; no axis."""
    unlike = {
        "admission": ("tail-batched",),
        "algorithm": ("online_dpo",),
        "credit": ("turns", "state"),
        "teacher": ("own-live", "own-frozen"),
        "data": ("images",),
    }
    return row["dialogue"] == "tools" and not any(row[axis] in values for axis, values in unlike.items())


HALVING = {"none": 9, "function": 26, "tools": 96, "class": 96, "agent": 36, "branches": 9, "roles": 40}
"""Tokens of a dialogue, at which about half of its responses are truncated."""


def cuts(row: Row) -> bool:
    """Return whether some responses must be truncated and others end, since a setting tells them apart."""
    return row["shaping"] in ("truncated", "eos")


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
        truncated = [line["reason"] == "length" for line in read_lines(place / RUN / "samples.jsonl")]
        tell = not cuts(self.row) or 0 < sum(truncated) < len(truncated)
        self._require(tell, f"{sum(truncated)} of {len(truncated)} responses are truncated, and some must be", life)
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
