"""``python -m benchmarks.long_run``: a run of 2,000 steps that is killed every 200 and resumed goes on as it began.

PPO on tiny models with a tool that answers, deferral, lookahead, evaluations and checkpoints; scorers and trainer are
processes of their own. Every few steps it counts what its processes hold and what lies on the disk. Prints what
they were around step 100 and at the end, and writes ``long-run.json`` and ``long-run.svg`` into a folder.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from benchmarks import CHECKOUT
from benchmarks.harness import command, keep, markdown, on_this_machine
from benchmarks.ladder.directory import EOS, FILLERS, PAD, Countdown
from oppo import resume, train
from oppo.errors import ConfigError
from oppo.log import logger
from oppo.observe import Observer
from oppo.report.charts import Axes, picture, placed, text

STEPS, KILLS, WINDOW, EVERY = 2000, 200, 100, 10
"""Steps of the run, of each life, of a window that is compared (around step 100, and the last), of a measurement."""

RUN: Final = Path("runs", "long")
USAGE, BEGUN = "usage.jsonl", "begun.jsonl"
LANGUAGE: Final = Countdown(30)

CONFIG: Final = """\
run = { name = "long", directory = "runs", steps = STEPS, panel = "off", cores = 1, checkpoint_every = 20, \
scorers = "process", trainer = "process" }
models = { policy = "actor", device = "cpu" }
rewards = [{ name = "model", source = "reward" }, { name = "short", source = "code.py:short" }]
environment.source = "code.py:lookup"
data.prompts = "prompts.jsonl"
eval = { prompts = "held_out.jsonl", every = 50 }
sampling = { max_new_tokens = 16, stop = [35, 36, 37, 38, 39, 40, 41] }
step = { batch = 4, overcommit = 2, lookahead = 1, chunk = 4 }
trainer = { learning_rate = 1e-4, epochs = 1 }
"""

CODE: Final = """\
def short(completion_ids):
    return [1 / (1 + len(ids)) for ids in completion_ids]


async def lookup(turn):
    return "f3 f4" if turn.number == 0 else None
"""


def furnish(folder: Path, steps: int) -> Path:
    """Fill a folder with models, prompts, code and settings of a run, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=LANGUAGE.vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
        id2label={0: "score"},
    )
    torch.manual_seed(0)
    for name, kind in (("actor", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        kind(config).save_pretrained(folder / name)
        LANGUAGE.tokenizer(64).save_pretrained(folder / name)
    for name, rows in (("prompts", range(500)), ("held_out", range(500, 508))):
        said = (f"f{n % FILLERS} f{n // FILLERS} {1 + n % 30}" for n in rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in said))
    (folder / "code.py").write_text(CODE)
    (folder / "config.toml").write_text(CONFIG.replace("STEPS", str(steps)))
    return folder


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of a run hold after a step, and what its directory takes.

    Attributes:
        cpu: seconds of all its processes, since this life began.
        shared: bytes that they map to share them.
        checkpoints: bytes of the checkpoints; each holds the state of the run.
        records: bytes of all other files, which grow by what is recorded of each step.
    """

    step: int
    life: int
    cpu: float
    memory: int
    files: int
    threads: int
    processes: int
    shared: int
    checkpoints: int
    records: int
    entries: int


def usage(run: Path, step: int, life: int) -> Usage:
    """Return what this process and its children hold, and the sizes of a run directory."""
    this = psutil.Process()
    processes = [this, *this.children(recursive=True)]
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for path in run.rglob("*"):
        with suppress(OSError):  # a checkpoint is being replaced
            if path.is_file():
                sizes["checkpoints" in path.relative_to(run).parts].append(path.stat().st_size)
    shared: dict[str, int] = {}
    for each in processes:
        shared |= mapped(each.pid)
    return Usage(
        step,
        life,
        sum(sum(each.cpu_times()[:2]) for each in processes),
        sum(each.memory_info().rss for each in processes),
        sum(each.num_fds() for each in processes),
        sum(each.num_threads() for each in processes),
        len(processes),
        sum(shared.values()),
        sum(sizes[True]),
        sum(sizes[False]),
        len(sizes[False]),
    )


def mapped(pid: int) -> dict[str, int]:
    """Return the bytes of each shared memory that a process maps, by inode."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        if known := re.match(r"(\w+)-(\w+) .* (\d+) +(?:/memfd:|/dev/shm/)", line):
            start, end, inode = known.groups()
            found[inode] = found.get(inode, 0) + int(end, 16) - int(start, 16)
    return found


class Meter(Observer):
    """Notes the usage every few steps, and kills the run after one.

    Args:
        folder: of the run and of what is noted.
        every: steps between two measurements.
        kill: the number of the step after which the process dies by SIGKILL; 0: none.
    """

    def __init__(self, folder: Path, every: int, kill: int) -> None:
        self._folder, self._every, self._kill = folder, every, kill
        self._life = len(noted(folder / BEGUN))
        self._begun = False

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Note when the first rollout of this life begins."""
        del stage, item, at
        if not self._begun:
            self._begun = True
            seconds = time.time() - psutil.Process().create_time()
            spent = usage(self._folder / RUN, step, self._life).cpu
            note(self._folder / BEGUN, {"step": step, "cpu": spent, "seconds": seconds})

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Note the usage, and perhaps end the run."""
        del result, channels
        made = step + 1
        if made % self._every == 0:
            note(self._folder / USAGE, asdict(usage(self._folder / RUN, made, self._life)))
        if made == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)


def note(path: Path, record: Mapping[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def noted(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def live(folder: Path, every: int, kill: int, settings: Sequence[str] = ()) -> None:
    """Begin the run of a folder, or go on with it, in this process."""
    os.chdir(folder)
    begun = (folder / RUN / "config.toml").exists()
    go_on = resume if begun else train
    go_on(RUN if begun else Path("config.toml"), settings, observers=[Meter(folder, every, kill)])


Start = Callable[[Path, int, int, Sequence[str]], int]
"""Lives in a process of its own, with the arguments of :func:`live`, and returns its exit code."""


def apart(folder: Path, every: int, kill: int, settings: Sequence[str]) -> int:
    """Live in a new interpreter."""
    program = "import sys, pathlib; from benchmarks.long_run import live; "
    program += "live(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])"
    arguments = [sys.executable, "-c", program, str(folder), str(every), str(kill), *settings]
    return subprocess.run(arguments, cwd=CHECKOUT, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def lives(folder: Path, steps: int, kills: int, every: int, start: Start = apart) -> Iterator[int]:
    """Live until the run is complete, and once more for a step beyond it; yield the step at which each life ends."""
    for kill in range(kills, steps, kills):
        code = start(folder, every, kill + 3, ())  # no checkpoint is due there, so steps are repeated
        if code != -signal.SIGKILL:
            raise ConfigError(f"expected a life killed after step {kill + 3}, and it ended with exit code {code}")
        yield kill
    for last in (steps, steps + 1):
        code = start(folder, every, 0, () if last == steps else (f"run.steps={last}",))
        if code != 0:
            raise ConfigError(f"expected a life that ends after step {last}, and it ended with exit code {code}")
        yield last


HELD: Final = {
    "memory": "resident bytes",
    "files": "open files",
    "threads": "threads",
    "processes": "processes",
    "shared": "shared bytes",
    "checkpoints": "bytes of checkpoints",
}


def compared(folder: Path, steps: int = STEPS, window: int = WINDOW) -> dict[str, tuple[float, float]]:
    """Return what the run took around step 100 and in its last window."""
    known = {each["step"]: Usage(**each) for each in noted(folder / USAGE)}
    ends = [(known[window // 2], known[window + window // 2]), (known[steps - window], known[steps])]

    def rates(of: str) -> tuple[float, float]:
        early, late = ((getattr(end, of) - getattr(start, of)) / window for start, end in ends)
        return early, late

    begun = noted(folder / BEGUN)
    return {
        "CPU seconds a step": rates("cpu"),
        "bytes of records a step": rates("records"),
        **{words: (getattr(ends[0][1], of), getattr(ends[1][1], of)) for of, words in HELD.items()},
        "CPU seconds until the first rollout": (begun[0]["cpu"], begun[-1]["cpu"]),
        "seconds until the first rollout": (begun[0]["seconds"], begun[-1]["seconds"]),
    }


def figure(known: Sequence[Usage]) -> str:
    """Return a panel for each quantity over the steps, as SVG."""
    panels = []
    for number, (of, words) in enumerate(HELD.items()):
        top = 1.2 * max(1, *(getattr(each, of) for each in known))
        axes = Axes(260, 110, max(each.step for each in known), 0, top)
        path = "L".join(axes.at(each.step, getattr(each, of)) for each in known)
        drawn = f'<path d="M{path}" fill="none" stroke="#2563eb" stroke-width="1.5"/>'
        panel = text(0, -8, words, bold=True) + axes.framed(drawn, label="step", end=f"{axes.right:g}")
        panels.append(placed(64 + number % 3 * 340, 30 + number // 3 * 180, panel))
    return picture(1030, 370, "".join(panels), size=11)


def make(*, out: Path, steps: int = STEPS, kills: int = KILLS) -> None:
    """Make the run, and write long-run.json and long-run.svg.

    Args:
        out: the folder of both files.
        steps: of the run, in hundreds, 300 or more.
        kills: steps of each life.
    """
    if steps < 3 * WINDOW or steps % WINDOW or kills <= 2 * WINDOW - WINDOW // 2 or not out.is_dir():
        raise ConfigError(f"expected a folder, 300 or more steps in hundreds, and kills every 151 or more; got {out}")
    with tempfile.TemporaryDirectory() as made:
        folder = furnish(Path(made), steps)
        for step in lives(folder, steps, kills, EVERY):
            logger.info(f"a life ended after step {step}")
        found, every = compared(folder, steps), noted(folder / USAGE)
    keep(out / "long-run.json", on_this_machine({"steps": steps, "kills": kills, "compared": found, "usage": every}))
    (out / "long-run.svg").write_text(figure([Usage(**each) for each in every]), encoding="utf-8")
    rows = [
        [words, f"{early:.4g}", f"{late:.4g}", f"{late / early - 1:+.1%}"] for words, (early, late) in found.items()
    ]
    print(markdown(["", "around step 100", f"at step {steps}", "change"], rows))


if __name__ == "__main__":
    sys.exit(command(make))
