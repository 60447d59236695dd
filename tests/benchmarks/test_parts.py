"""Benchmarks of parts, run once: what they count, not how long it takes; and what all of them share."""

from __future__ import annotations

import gc
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, cycle
from pathlib import Path
from typing import cast

import anyio
import pytest
import torch

from benchmarks import decoding, engine, learning
from benchmarks.harness import END, Spread, command, placed, require_writable, turns
from benchmarks.ladder.workloads import SMOKE
from benchmarks.vllm.compare import Recorded, compare_decoding, compare_syncing, length_of
from oppo.errors import ConfigError, DataError
from oppo.events import Prompt, Response
from oppo.models import Weights
from oppo.testing import FakePolicy
from oppo.testing.fake_policy import FakeDecode
from tests.hf import tiny
from tests.kit.virtual import virtually


def test_everyone_has_a_turn_in_each_round_and_none_always_follows_the_same_neighbour() -> None:
    order = list(turns("abc", 4))
    assert [number for number, _ in order] == [number for number in range(5) for _ in "abc"]
    rounds = ["".join(each for number, each in order if number == k) for k in range(5)]
    assert rounds == ["cba", "abc", "cba", "abc", "cba"]


def test_a_ratio_is_of_pairs_of_rounds_so_that_a_slow_minute_cancels() -> None:
    found = Spread.of_ratios([3.0, 30.0, 4.0], [2.0, 20.0, 2.0])
    assert (found, str(found)) == (Spread(1.5, 1.5, 2.0), "1.50 (1.50 - 2.00)")


def test_a_part_takes_the_place_of_the_older_one_between_its_own_marks() -> None:
    page = f"# oppo\n\n<!-- one -->\nold\n{END}\n\nmore\n\n<!-- two -->\n{END}\n"
    once = placed(page, "<!-- one -->\n", "new\n")
    assert once == page.replace("old", "new")
    assert placed(once, "<!-- two -->\n", "other\n") == once.replace("two -->\n", "two -->\nother\n")
    for lacking in ("# oppo\n", "<!-- one -->\n"):
        with pytest.raises(ValueError, match="no place"):
            placed(lacking, "<!-- one -->\n", "new\n")


def test_looking_whether_results_can_be_written_leaves_no_file_and_harms_none(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("kept")
    require_writable({"--json": old, "--plot": new, "--log": None})
    assert (old.read_text(), new.exists(), new.parent.is_dir()) == ("kept", False, True)
    for taken in (old / "results.json", tmp_path):
        with pytest.raises(ConfigError, match=f"--json: {taken}"):
            require_writable({"--json": taken})


@tiny.apart
def test_our_decoder_and_generate_are_timed_in_turns() -> None:
    # generate, ours; ours, generate; ...: with a second between two of them
    clock = accumulate(cycle([1.0, 4.0, 1.0, 2.0, 1.0, 2.0, 1.0, 4.0])).__next__
    before = torch.get_num_threads()
    lengths, prompts = [9, 3, 20], [4, 17, 8]
    found = decoding.compare_decoding(tiny.causal(), lengths=lengths, prompts=prompts, rounds=3, clock=clock)
    assert torch.get_num_threads() == before
    assert (found.batch, found.tokens) == (3, 32)
    assert (found.ours, found.generate, found.ratio) == ((16.0,) * 3, (8.0,) * 3, Spread(2.0, 2.0, 2.0))
    cases = decoding.measure(1, {"tiny": SMOKE.models.actor}, {"3 ragged": [5, 2, 9], "1": [6]})
    written = cast("list[dict[str, object]]", decoding.as_json(cases, 1)["cases"])
    assert [case["batch"] for case in written] == ["3 ragged", "1"]
    assert decoding.show(cases).count("tiny") == 2


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_the_engine_costs_time_by_the_given_clock_for_each_live_rollout() -> None:
    ticks = count()  # read at the start and at the end only: one second passes
    line = engine.live((4, 5), 2, clock=lambda: float(next(ticks)))
    assert "4 live rollouts, 125.00 ms for each in a step, 0% of it gc; 5 live rollouts, 100.00 ms" in line


def of_record(page: str) -> str:
    return page.partition(learning.BEGIN)[2].partition(END)[0]


def test_the_page_of_learning_is_made_of_the_results_of_record() -> None:
    results = json.loads((learning.RESULTS / "learning.json").read_text(encoding="utf-8"))
    assert of_record((learning.RESULTS / "learning.md").read_text(encoding="utf-8")) == learning.content(results)
    for arms in learning.Found.of(results).outcomes.values():
        assert {len(each) for each in arms.values()} == {len(arms["0"])}
        assert sum(each.after - each.before for each in arms["0"]) > 0


def test_a_run_of_learning_writes_results_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = learning.Task("tool", "sums", 2, 1e-2, learning.beginning, lambda _: learning.checked(), tool=True)
    monkeypatch.setattr(learning, "tasks", lambda: [shown])
    monkeypatch.setattr(learning, "HELD_OUT", 8)
    (tmp_path / "learning.md").write_text(f"# Learning\n\n{learning.BEGIN}{END}\n")
    assert command(learning.make, ["--seeds", "1", "--steps", "3", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "learning.json").read_text())
    assert of_record((tmp_path / "learning.md").read_text()) == learning.content(results)
    staleness = [each[0].staleness for each in learning.Found.of(results).outcomes["tool"].values()]
    assert staleness == pytest.approx([0, 2 / 3, 1])
    slow = replace(shown, name="slow", arms=learning.DEFERRALS, slow=True)
    monkeypatch.setattr(learning, "tasks", lambda: [shown, slow])
    assert command(learning.make, ["--seeds", "1", "--steps", "3", "--only", "slow", "--out", str(tmp_path)]) == 0
    found = learning.Found.of(json.loads((tmp_path / "learning.json").read_text())).outcomes
    assert [each[0].staleness for each in found["tool"].values()] == staleness
    assert found["slow"]["0"][0].staleness == 0
    assert all(found["slow"][arm][0].staleness > 0 for arm in list(learning.DEFERRALS)[1:])
    assert command(learning.make, ["--seeds", "0", "--out", str(tmp_path)]) == 2


@dataclass(frozen=True)
class Output:
    token_ids: list[int]

    @property
    def outputs(self) -> list[Output]:
        return [self]


@dataclass(eq=False)
class FakeLLM:
    """Makes a token of each request in 0.05 s; keeps the requests that it was given in each way."""

    paused: bool = True
    added: list[tuple[object, object]] = field(default_factory=list)
    generated: list[tuple[object, object]] = field(default_factory=list)

    async def add_request(self, request_id: str, prompt: object, params: object) -> str:
        self.added.append((prompt, params))
        return request_id

    async def generate(self, prompt: object, sampling_params: object, request_id: str) -> AsyncIterator[Output]:
        assert not self.paused
        self.generated.append((prompt, sampling_params))
        for token in range(cast("int", sampling_params)):
            await anyio.sleep(0.05)
            yield Output([token])

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False


class Asking(FakePolicy):
    """Asks the engine for each rollout that it opens, and decodes by itself; syncing weights takes 3 s."""

    engine: Recorded

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        for each in rollouts:
            assert isinstance(each, Prompt)
            await self.engine.add_request("ours", each.tokens.tolist(), length_of(each))
        return await super().open(rollouts)

    async def load(self, weights: Weights) -> None:
        await anyio.sleep(3)
        await super().load(weights)


@virtually
async def test_vllm_alone_makes_the_same_requests_in_turns_and_copies_as_many_bytes() -> None:
    llm = FakeLLM()
    policy = Asking(length_of, seconds=0.1)
    policy.engine = Recorded(llm)
    arguments = {"lengths": (9, 3, 20), "vocabulary": 640, "clock": anyio.current_time}
    found = await compare_decoding(policy, policy.engine, rounds=3, **arguments)  # type: ignore[arg-type]
    assert (found.batch, found.tokens) == (3, 32)
    assert found.ours == pytest.approx((16.0,) * 3)
    assert found.bare == pytest.approx((32.0,) * 3)
    synced = await compare_syncing(policy, {"a": torch.zeros(5), "b": torch.zeros(6)}, clock=anyio.current_time)
    assert (synced.bytes, synced.syncing, synced.copying, policy.version) == (44, (3.0,) * 5, (0.0,) * 5, 6)
    policy.length = lambda prompt: length_of(prompt) + 1
    with pytest.raises(DataError, match=r"32.*35"):
        await compare_decoding(policy, policy.engine, **arguments)  # type: ignore[arg-type]
    steps = [llm.added[at : at + 3] for at in range(0, 12, 3)]
    assert llm.generated[:12] == [*steps[0], *steps[0], *steps[2], *steps[2]], "the requests of the last step each time"
    assert llm.paused
