"""The process that measures parts: it reads ``{"part", "facts"}``, and writes ``{"found", "over"}`` as it finds."""

from __future__ import annotations

import gc
import json
import sys

import torch

from benchmarks.gpu_day.parts import Day
from benchmarks.gpu_day.plan import PARTS
from benchmarks.ladder.worker import answers_only, say
from oppo.hf.devices import use_cores


def main() -> None:
    day, answers = Day(torch.device(sys.argv[1])), answers_only()
    day.say = lambda found: say(answers, {"found": dict(found), "over": False})
    if day.tries:
        use_cores(1)
    for line in sys.stdin:
        request = json.loads(line)
        day.facts = request["facts"]
        try:
            found = PARTS[request["part"]].work(day)
        except Exception as error:  # noqa: BLE001 - of any kind: the other parts may work, and minutes on a GPU are few
            found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        gc.collect()  # models of the part lie in cycles
        if not day.tries:
            torch.cuda.empty_cache()
        say(answers, {"found": dict(found), "over": True})


if __name__ == "__main__":
    main()
