"""``python -m benchmarks.gpu_day``: parts in order, each within its limit, and the results so far after each.

All parts run in one process, which is ended where one exceeds its limit or fails; the rest goes on in another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from benchmarks.gpu_day.parts import Found
from benchmarks.gpu_day.plan import DEFAULT, PARTS, compared, planned, printed
from benchmarks.harness import command, keep, require_writable
from benchmarks.ladder.contestant import Contestant
from benchmarks.peer.sweep import PEERS
from oppo import observe
from oppo.errors import ConfigError, ModelLost


def gpu_day(
    *,
    device: str = "cuda:0",
    minutes: float = 12,
    parts: str = "",
    out: Path | None = None,
    plan: str = "",
    show: Path | None = None,
) -> int:
    """Measure what a GPU is for, or say beforehand what that takes, or show what it took.

    Args:
        device: of the models; cpu: tiny ones, to try the command.
        minutes: for all parts.
        parts: which ones, with commas between them; unless given all but vllm and nccl, which are for machines that
            have what they need, and without the peer where it has no environment.
        out: the results so far, as JSON, after each round and part; the prediction, with --plan.
        plan: a GPU such as H100: predict the parts' seconds and figures instead.
        show: results: print them beside prediction and goal instead.
    """
    require_writable({"--out": out})
    chosen = [name.strip() for name in parts.split(",")] if parts else list(DEFAULT)
    if unknown := [name for name in chosen if name not in PARTS]:
        raise ConfigError(f"--parts: expected some of {', '.join(PARTS)}, got {unknown[0]!r}")
    if plan:
        prediction = planned(plan)
        keep(out, prediction)
        print(printed(prediction, chosen))
        return 0
    if show is not None:
        print(compared(json.loads(show.read_text(encoding="utf-8"))))
        return 0
    absent = dict[str, str]()
    try:
        if "peer" in chosen:
            PEERS["trl-grpo"].interpreter()
    except ConfigError as error:
        if parts:
            raise
        absent["peer"] = str(error)
    with TemporaryDirectory() as logs:
        measuring = Measuring(device, out or Path("gpu-day.json"), Path(logs) / "log", absent)
        try:
            return measuring.all(chosen, 60 * minutes)
        finally:
            measuring.end()


@dataclass(eq=False)
class Measuring:
    """Parts in a process of their own, and what they have found so far."""

    device: str
    out: Path
    log: Path
    absent: Mapping[str, str]  # why parts do not run
    found: dict[str, dict[str, object]] = field(default_factory=dict)
    child: Contestant | None = None

    def all(self, names: Sequence[str], seconds: float) -> int:
        began = observe.now()
        for name in dict.fromkeys(["facts", *names]):
            left = began + seconds - observe.now()
            self.found[name] = {}
            if name in self.absent:
                self.found[name]["not run"] = self.absent[name]
            elif left > 0:
                self.part(name, min(PARTS[name].limit, left))
            else:
                self.found[name]["cut"] = f"not begun: {seconds / 60:.3g} minutes were over"
            keep(self.out, {"parts": self.found})
            print(f"{observe.now() - began:.0f} s\n{compared({'parts': self.found}, name)}\n", flush=True)
            if name == "facts" and (fault := self.found[name].get("failed") or self.found[name].get("cut")):
                raise ConfigError(f"--device {self.device}: {fault}; cpu tries the command")
        return int(any({"failed", "cut"} & found.keys() for found in self.found.values()))

    def part(self, name: str, limit: float) -> None:
        if self.child is None:
            self.child = Contestant(
                "parts", (sys.executable, "-m", "benchmarks.gpu_day.child", self.device), log=self.log
            )
        found, until, over = self.found[name], observe.now() + limit, False
        try:
            self.child.say({"part": name, "facts": self.found["facts"]})
            while not over:
                answer = self.child.answer(f"measure {name}", until - observe.now())
                found |= cast("Found", answer["found"])
                over = bool(answer["over"])
                keep(self.out, {"parts": self.found})
        except ModelLost as error:
            cut = observe.now() >= until
            found["cut" if cut else "failed"] = f"at its limit of {limit:.0f} s" if cut else str(error)
        if {"failed", "cut"} & found.keys():
            self.end()

    def end(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.close()
            self.child = None


if __name__ == "__main__":
    sys.exit(command(gpu_day))
