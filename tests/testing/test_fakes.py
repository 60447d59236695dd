"""What the fakes cost."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from oppo.events import Prompt
from oppo.models import Decode
from oppo.testing import FakePolicy, prompts, run_virtual
from oppo.testing.virtual_time import VirtualTimeLoop


@pytest.mark.parametrize("pace", [None, lambda prompt: 1.0], ids=["together", "apart"])
def test_a_decode_step_takes_as_many_passes_of_the_loop_for_many_rollouts_as_for_few(
    pace: Callable[[Prompt], float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(count: int) -> int:
        made = 0

        class Counting(VirtualTimeLoop):
            def _run_once(self) -> None:
                nonlocal made
                made += 1
                super()._run_once()  # type: ignore[misc]  # asyncio's own, in no stub

        monkeypatch.setattr("oppo.testing.virtual_time.VirtualTimeLoop", Counting)
        run_virtual(_decode, FakePolicy(lambda prompt: 20, pace=pace), count)
        return made

    assert passes(200) <= passes(20) + 5


async def _decode(policy: FakePolicy, count: int) -> None:
    async def read(decode: Decode) -> None:
        while (await decode.read(3)).state == "live":
            pass

    decodes = await policy.open(prompts(count))
    async with policy.decoding(decodes, lambda ended: False), anyio.create_task_group() as readers:
        for decode in decodes:
            readers.start_soon(read, decode)
