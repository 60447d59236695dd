"""Small systems and workloads, and run directories of simulated runs."""

from __future__ import annotations

from pathlib import Path

from oppo.models import Passes
from oppo.report import RunDirectory
from oppo.simulate.calibrate import DEVICE, Contention
from oppo.simulate.profile import Decoder, Lognormal, Reader, System, Updater, Workload
from oppo.simulate.schedule import Schedule
from tests.kit.graph_run import GraphRun

WORKLOAD = Workload(batch=16, lengths=Lognormal(median=(40, 40), sigma=0.9, cap=300), cap=300, prompt=20)


def machine(contention: Contention) -> System:
    """Return what one machine costs, on which everything meets; the actor reads as the reference does."""
    return System(
        decoder=Decoder(step=4e-3, row=1.5e-4, context=6e-7, ending=3e-3, prefill=Passes(token=1e-4), device=DEVICE),
        readers={
            "reward": Reader(passes=Passes(token=5e-4), call=4e-3, device=DEVICE),
            "reference": Reader(passes=Passes(token=1e-4), call=3e-3, device=DEVICE),
            "critic": Reader(passes=Passes(token=5e-5), call=2e-3, device=DEVICE),
        },
        updater=Updater(passes=Passes(token=4e-4), fixed=0.05, weight_sync=0.01, device=DEVICE),
        interference=contention,
    )


def recorded(system: System, schedule: Schedule, folder: Path, *, steps: int = 18, finished: bool = True) -> Path:
    directory = folder / schedule.name.replace(" ", "-")
    with RunDirectory(directory, threaded=False) as records:
        simulated = GraphRun(
            system, WORKLOAD, schedule, steps, steps // 5, seed=7, observers=[records], listener=records.model_span
        )
        simulated.run()
        if finished:
            records.conclude()
    return directory
