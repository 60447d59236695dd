"""A driver that works until it is interrupted: ``python -m tests.placement.ray.program ADDRESS``."""

from __future__ import annotations

import sys

import anyio

from oppo.placement import Hosted
from oppo.placement.ray import Cluster, RayPlace, RayRanks
from tests.placement.instances import Total
from tests.placement.ray.test_ranks import Where


async def work(total: Hosted[Total]) -> None:
    while True:
        await total.call("add", Total.add, 1)


def main() -> None:
    with Cluster(sys.argv[1]) as cluster, RayPlace("total", cluster) as place, RayRanks("where", cluster, 2) as ranks:
        total: Hosted[Total] = place.host(Total)
        ranks.host(Where)
        for each in (place, ranks):
            each.wait_until_ready()
        print("ready", flush=True)  # noqa: T201 - to its parent
        anyio.run(work, total)


if __name__ == "__main__":
    main()
