"""Whole pipelines on the fake of vLLM's engine: turns, weights in flight, evaluations, an engine that sleeps."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from oppo.admission import Admission, Continuous, Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.group import grpo
from oppo.algorithms.ppo import ppo
from oppo.config.load import load_settings
from oppo.errors import ConfigError, ModelLost
from oppo.evaluation import Evaluate, Evaluated, Evaluation
from oppo.events import Batch, Prompt, RoutedExperts, StepReport
from oppo.hf.weights import SentWeights
from oppo.models import Sampling, SyncedModel, Trained, Weights, sync
from oppo.placement import PolicyPool, Process
from oppo.run.deployment import Deployment
from oppo.run.engines import require_engines
from oppo.run.memory import Expected, at_worst, crowded, expected
from oppo.simulate.profile import Hardware
from oppo.stages import GAE, Generate, Update
from oppo.testing import FakeCritic, FakeScorer, FakeTrainer, check_policy, fake_scalar, run_virtual
from oppo.vllm import VllmPolicy, VllmServer
from oppo.vllm.arguments import engine_arguments
from oppo.vllm.processes import ServerProcess
from oppo.vllm.sync import HostedFiles
from tests.kit.dialogues import ANSWER, Dialogue, Seconds, at_once, dialogue, turns_answered
from tests.kit.pipelines import Pipeline, Setting
from tests.kit.responses import read_chunk
from tests.kit.virtual import virtually
from tests.kit.workplace import furnish
from tests.vllm.bench import SAMPLING, WEIGHTS, Bench, varied
from tests.vllm.fakes import URL, FakeAsyncLLM, FakeSender, FakeServer, engine_of, experts_of, running
from tests.vllm.test_sync import adapted

TALKING = Sampling(max_new_tokens=60, stop=(2, 3), seed=5)


def talked(
    llm: FakeAsyncLLM, asked: Sequence[Prompt], seconds: Seconds = at_once, cuts: Sequence[int] = (), load: float = 0.0
) -> tuple[VllmPolicy, Dialogue]:
    policy = VllmPolicy(engine_of(llm, FakeSender()), sampling=TALKING, routed_experts=True)

    async def sync_weights() -> None:
        while load:
            await anyio.sleep(load)
            await policy.load(Weights(policy.version + 1, WEIGHTS))

    async def main() -> Dialogue:
        async with running(llm), anyio.create_task_group() as beside:
            beside.start_soon(sync_weights)
            talk = await dialogue(policy, asked, seconds, cuts)
            beside.cancel_scope.cancel()
        return talk

    return policy, run_virtual(main)


def test_an_answer_is_another_request_with_the_turn_as_its_prefix() -> None:
    llm = FakeAsyncLLM()
    asked = varied(3)
    _, talk = talked(llm, asked)
    assert not llm.requests
    for prompt, response in zip(asked, talk.responses(), strict=True):
        requests = sorted(
            (each for each in llm.done if each.prompt[0] == prompt.tokens[0]), key=lambda each: len(each.prompt)
        )
        assert len(requests) == 3
        assert len({request.params.seed for request in requests}) == 3, "no noise is used twice"
        assert len({request.salt for request in requests}) == 1
        written = prompt.tokens.tolist()
        for request in requests:
            assert request.prompt == written
            assert request.params.max_tokens == 60 - (len(written) - len(prompt.tokens))
            written = [*written, *request.tokens, *ANSWER.tolist()]
        assert [*prompt.tokens.tolist(), *response.tokens.tolist(), *ANSWER.tolist()] == written


def test_the_others_decode_while_a_tool_works() -> None:
    llm = FakeAsyncLLM(length=lambda prompt: 5)
    _, talk = talked(llm, varied(3), lambda k, turn: 1.0 if k == 0 else 0.0)
    assert [rollout for told in talk.told for rollout in told] == [1, 2, 0]


@given(
    st.integers(2, 4),
    st.lists(st.integers(1, 3), max_size=3),
    st.sampled_from([0.0, 0.004, 0.03, 0.2]),
    st.sampled_from([0.0, 0.0, 0.015, 0.1]),
    st.integers(0, 3),
)
def test_no_token_is_lost_or_doubled_whatever_is_cut_or_synced(
    count: int, cuts: list[int], seconds: float, load: float, overrun: int
) -> None:
    llm = FakeAsyncLLM(overrun=overrun)
    asked = varied(count)
    policy, talk = talked(llm, asked, lambda k, turn: seconds * (k % 2 + turn), sorted(cuts), load)
    assert sorted(rollout for told in talk.told for rollout in told) == list(range(count))
    for prompt, response, turns in zip(asked, talk.responses(), talk.heard, strict=True):
        assert turns_answered(response) == 2
        assert (np.diff(response.versions) >= 0).all()
        made = [each for each in llm.done if each.prompt[0] == prompt.tokens[0]]
        made.sort(key=lambda each: len(each.prompt))
        assert [turn.tolist() for turn in turns] == [request.tokens for request in made]
        sampled = [policy.number_of(version) for request in made for version in request.versions]
        assert response.versions[response.sampled].tolist() == sampled
        known = len(prompt.tokens) + int(np.flatnonzero(response.sampled)[-1])
        assert response.extra[RoutedExperts].known(prompt) == known
        assert np.array_equal(response.extra[RoutedExperts].positions(), np.arange(known) - len(prompt.tokens))
        expected = experts_of([*prompt.tokens.tolist(), *response.tokens.tolist()])[:known]
        assert np.array_equal(response.extra[RoutedExperts].ids, expected)
    assert not llm.requests


BATCH, EXTRA, STEPS = 4, 2, 8


class Sending(FakeTrainer):
    """Syncs a tensor."""

    async def sync_weights(self, *synced: SyncedModel) -> None:
        await sync(Weights(self.version, {"weight": torch.zeros(1)}), synced)


def played(
    lookahead: int, *, in_flight: bool, admission: Admission | None = None
) -> tuple[Sending, list[StepReport], FakeAsyncLLM]:
    llm = FakeAsyncLLM(length=lambda prompt: 6 + 9 * (prompt[0] % 4))
    policy = VllmPolicy(engine_of(llm, FakeSender()), sampling=Sampling(max_new_tokens=60, stop=(2, 3)))
    trainer = Sending(0.08)
    graph = ppo(
        policy=policy,
        reward=FakeScorer(fake_scalar),
        critic=FakeCritic(),
        trainer=trainer,
        admission=admission or Overcommit(BATCH, EXTRA),
        advantage=GAE(kl=0.0),
        chunks=Fixed(3),
    )
    if in_flight:
        graph = graph.replace(update=replace(graph.stage("update", Update), after=()))
    asked = [Prompt(n, n, np.array([10 + n, 4], np.int32)) for n in range(100)]

    async def main() -> list[StepReport]:
        reports = []
        async with running(llm), graph.open(asked, lookahead=lookahead) as run:
            reports += [report async for report in run.steps(STEPS)]
        return reports

    return trainer, run_virtual(main), llm


@pytest.mark.parametrize("lookahead", [1, 2])
def test_weights_are_adopted_in_flight_and_staleness_less(lookahead: int) -> None:
    trainer, reports, llm = played(lookahead, in_flight=True)
    at_the_cut, _, _ = played(lookahead, in_flight=False)
    for step, (batch, report) in enumerate(zip(trainer.batches, reports, strict=True)):
        assert len(batch) == BATCH
        staleness = step - batch.versions
        assert staleness.max() <= 2 + lookahead
        assert report.metrics["staleness/max"] == staleness.max()
    fresh = [len(set(response.versions.tolist())) for batch in trainer.batches for response in batch.responses]
    assert max(fresh) > 2, "a response is written by the weights of several updates"
    assert mean_staleness(trainer) < mean_staleness(at_the_cut)
    trained = [rollout for batch in trainer.batches for rollout in batch.rollouts]
    assert len(set(trained)) == len(trained) == BATCH * STEPS
    assert len(llm.updates) == STEPS


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_rollout_that_ends_is_replaced_at_once(lookahead: int) -> None:
    trainer, reports, llm = played(lookahead, in_flight=bool(lookahead), admission=Continuous(BATCH, EXTRA))
    waiting = played(lookahead, in_flight=bool(lookahead), admission=Overcommit(BATCH, 0))[2]
    assert max(llm.rows) == EXTRA
    assert llm.rows.count(EXTRA) > 0.8 * len(llm.rows), "the engine has all its rows but for the end of a step"
    assert waiting.rows.count(BATCH) < 0.5 * len(waiting.rows), "without, the engine is left with the longest"
    trained = [rollout for batch in trainer.batches for rollout in batch.rollouts]
    assert [len(batch) for batch in trainer.batches] == [BATCH] * STEPS
    assert len(set(trained)) == len(trained), "every prompt is trained once"
    assert any(report.deferred for report in reports)


def mean_staleness(trainer: FakeTrainer) -> float:
    return float(np.mean(np.concatenate([step - batch.versions for step, batch in enumerate(trainer.batches)])))


def numbered(count: int) -> list[Prompt]:
    return [Prompt(n, n, np.array([10 + n, 4], np.int32), group=n) for n in range(count)]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_run_on_vllm_is_evaluated_while_rollouts_are_deferred(lookahead: int) -> None:
    llm = FakeAsyncLLM()
    policy = VllmPolicy(engine_of(llm), sampling=SAMPLING)
    pipeline = Pipeline(Setting(batch=3, extra=2, lookahead=lookahead, update=0.3))
    evaluation = Evaluation(
        prompts=numbered(4),
        reward=FakeScorer(fake_scalar),
        greedy=policy.with_sampling(replace(SAMPLING, temperature=0.0)),
        sampled=policy.with_sampling(replace(SAMPLING, seed=9)),
        samples=2,
        batch=4,
    )
    graph = pipeline.graph()
    update = replace(graph.stage("update", Update), synced=[policy, pipeline.critic], held=["evaluate"])
    generate = replace(graph.stage("generate", Generate), policy=policy)
    graph = graph.replace(update=update, generate=generate).then("evaluate", Evaluate(evaluation, lambda step: True))

    async def main() -> list[StepReport]:
        async with (
            running(llm),
            graph.open(numbered(18), observers=[pipeline.tap], lookahead=lookahead) as run,
        ):
            return [report async for report in run.steps(6)]

    reports = run_virtual(main)
    assert sorted(rollout for report in reports for rollout in report.trained) == list(range(18))
    assert any(report.deferred for report in reports)
    found = [item for _, stage, item in pipeline.tap.items if stage == "evaluate" and isinstance(item, Evaluated)]
    assert [each.version for each in found] == [1, 2, 3, 4, 5, 6]
    for each in found:
        assert all((answer.finish.response.versions == each.version).all() for answer in each.answers)
    assert all(report.metrics["eval/sampled_score"] for report in reports)
    assert policy.version == 6


SLEEPS = 6


class Alone(FakeTrainer):
    """Trains while the engine has given its memory back, and syncs a tensor."""

    llm: FakeAsyncLLM
    sleeps: bool

    async def update(self, batch: Batch) -> Trained:
        assert bool(self.llm.asleep) is self.sleeps
        found = await super().update(batch)
        assert bool(self.llm.asleep) is self.sleeps
        return found

    async def sync_weights(self, *synced: SyncedModel) -> None:
        await sync(Weights(self.version, {"weight": torch.zeros(1)}), synced)
        assert self.llm.asleep == (["kv_cache"] if self.sleeps else []), "the KV cache comes with the next decoding"


def slept_or_not(*, sleeps: bool, overcommit: int) -> tuple[list[list[tuple[int, list[int], list[int]]]], FakeAsyncLLM]:
    llm = FakeAsyncLLM(length=lambda prompt: 6 + 9 * (prompt[0] % 4))
    engine = engine_of(llm)
    engine.sleeps = sleeps
    trainer = Alone(0.08)
    trainer.llm, trainer.sleeps = llm, sleeps
    graph = grpo(
        policy=VllmPolicy(engine, sampling=Sampling(max_new_tokens=60, stop=(2, 3))),
        reward=FakeScorer(fake_scalar),
        trainer=trainer,
        admission=Overcommit(4, overcommit),
        samples=2,
        chunks=Fixed(3),
    )

    async def main() -> None:
        async with running(llm), graph.open(varied(60)) as run:
            async for _ in run.steps(SLEEPS):
                pass

    run_virtual(main)
    return [
        [
            (each.prompt.rollout, each.tokens.tolist(), each.versions.tolist())
            for each in sorted(batch.responses, key=lambda each: each.prompt.rollout)
        ]
        for batch in trainer.batches
    ], llm


@pytest.mark.parametrize("overcommit", [0, 2])
def test_a_run_whose_engine_sleeps_is_the_run_of_one_that_does_not(overcommit: int) -> None:
    asleep, llm = slept_or_not(sleeps=True, overcommit=overcommit)
    awake, other = slept_or_not(sleeps=False, overcommit=overcommit)
    assert asleep == awake
    assert (llm.slept, other.slept) == (SLEEPS, 0)
    assert len(llm.updates) == SLEEPS


def test_deferred_rollouts_go_on_after_sleep_with_and_without_new_weights() -> None:
    bench, awake = Bench(), Bench()
    bench.engine.sleeps = True

    async def main(bench: Bench) -> None:
        decodes = await bench.policy.open(varied(4))
        await bench.step(decodes, cut_at=1)
        await bench.step([each for each in decodes if not each.ended], cut_at=1)
        await bench.policy.load(Weights(1))
        await bench.policy.load(Weights(2, WEIGHTS))
        await bench.policy.load(Weights(3, WEIGHTS))
        await bench.step([])
        assert bool(bench.llm.asleep) is bench.engine.sleeps, "though nothing was decoded"
        await bench.step([each for each in decodes if not each.ended])
        await bench.policy.open(varied(1))
        await decodes[0].aclose()

    bench.run(lambda: main(bench))
    awake.run(lambda: main(awake))
    assert [bench.tokens(n) for n in range(4)] == [awake.tokens(n) for n in range(4)]
    assert [bench.versions(n)[-1] for n in range(4)] == [awake.versions(n)[-1] for n in range(4)]
    assert bench.llm.slept == 3, "not again in a step that began with what had ended in the overrun of the one before"


@virtually
async def test_an_engine_that_dies_asleep_is_lost() -> None:
    bench = Bench()
    bench.engine.sleeps = True
    async with running(bench.llm):
        await bench.step(await bench.policy.open(varied(1)))
        bench.llm.die()
        with pytest.raises(ModelLost):
            await bench.policy.load(Weights(1, WEIGHTS))


def test_what_a_sleeping_engine_cannot_do_is_refused(tmp_path: Path) -> None:
    engine = engine_of(FakeAsyncLLM())
    engine.sleeps = True
    with pytest.raises(ConfigError, match=r"no KV cache that could be kept .* kv_on_sync = 'recompute'"):
        VllmPolicy(engine, sampling=SAMPLING, kv_on_sync="keep")
    with pytest.raises(ConfigError, match=r"vLLM does not sleep on a CPU.*leave placement\.share = 'sleep' out"):
        engine_arguments("model", {}, on_cpu=True, backend="oppo-file", sleeps=True)
    folder = furnish(tmp_path)
    for overrides, name in (
        ((), "models.engine = 'transformers'"),
        (("models.engine=vllm", "step.lookahead=1"), "step.lookahead = 1"),
        (("models.engine=vllm", "step.kv_on_sync=keep"), "step.kv_on_sync = 'keep'"),
        (("models.engine=vllm", 'vllm.urls=["http://one:8000"]'), "vllm.urls"),
    ):
        with pytest.raises(ConfigError, match=r"placement\.share = 'sleep' lets") as refused:
            load_settings(folder / "config.toml", ["placement.share=sleep", *overrides])
        assert name in str(refused.value)
    assumed = Hardware.assumed("2xH100-80GB")
    sleeping = ["models.engine=vllm", "placement.share=sleep"]
    require_engines(Deployment.of(load_settings(folder / "config.toml", sleeping), assumed))
    with pytest.raises(ConfigError, match=r"frees the GPUs of vLLM, 0, for the trainer, and that is on cuda:1"):
        require_engines(
            Deployment.of(load_settings(folder / "config.toml", [*sleeping, "placement.trainer=cuda:1"]), assumed)
        )
    with pytest.raises(ConfigError, match="vLLM does not sleep on a CPU"):
        require_engines(
            Deployment.of(load_settings(folder / "config.toml", [*sleeping, "placement.policy=cpu"]), assumed)
        )


def test_memory_that_engine_and_update_need_by_turns_is_counted_once(tmp_path: Path) -> None:
    folder, assumed = furnish(tmp_path), Hardware.assumed("1xH100-80GB")

    def counted(share: str) -> dict[str, Expected]:
        settings = load_settings(folder / "config.toml", ["models.engine=vllm", f"placement.share={share}"])
        return {each.model: each for each in expected(Deployment.of(settings, assumed), None)}

    beside, sleeping = counted("beside"), counted("sleep")
    there = [each for each in sleeping.values() if each.device.type == "cuda"]
    trainer, policy = sleeping["trainer"], sleeping["policy"]
    assert sleeping["policy, asleep"].bytes.weights == policy.bytes.weights
    assert policy.share is not None
    assert policy.share >= (beside["policy"].share or 0)
    by_turns = trainer.bytes.gradients + trainer.bytes.activations
    assert at_worst(there) == sum(each.bytes.total for each in there) - by_turns
    assert not crowded([*sleeping.values()], assumed)


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[FakeAsyncLLM]]:
    made = [FakeAsyncLLM() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for llm in made:
            await stack.enter_async_context(running(llm))
        yield made


def test_a_pool_of_engines_keeps_the_contract_of_a_policy() -> None:
    async def main() -> None:
        async with engines(2) as llms:
            started = [engine_of(llm) for llm in llms]

            async def make() -> PolicyPool:
                return PolicyPool([VllmPolicy(engine, sampling=SAMPLING) for engine in started])

            await check_policy(make, varied(5))

    run_virtual(main)


def test_engines_of_different_models_are_no_pool() -> None:
    async def main() -> None:
        async with engines(2) as llms:
            started = [engine_of(llm) for llm in llms]
            started[1].name = "another"
            with pytest.raises(ConfigError, match=r"models differ: member 0 has .*, member 1 has 'another'"):
                PolicyPool([VllmPolicy(engine, sampling=SAMPLING) for engine in started])

    run_virtual(main)


class Unstarted(ServerProcess):
    """What is written for a server, and no server."""

    def __init__(self) -> None:
        self.url, self._lifeline, self._process, self._adapts, self._written = URL, None, None, True, None
        self._kept = ExitStack()


def test_adapters_are_written_where_each_server_is_and_one_that_is_started_again_gets_the_newest() -> None:
    fakes = list[FakeServer]()

    async def main() -> None:
        async with engines(3) as llms, AsyncExitStack() as stack:

            async def member(index: int) -> VllmPolicy:
                place = stack.enter_context(Process(f"policy {index}"))
                hosted = place.host(Unstarted)
                stack.push_async_callback(hosted.call, "end", ServerProcess.end)

                async def load(weights: SentWeights, version: str) -> None:
                    await hosted.load(partial(ServerProcess.write, version=version), weights)

                _, path = await hosted.call("start", ServerProcess.whereabouts, writes=True)
                assert path is not None
                fakes.append(fake := FakeServer(llms[len(fakes)], loads=True))
                fake.config["lora_config"] = {"max_lora_rank": 8}
                server = VllmServer(URL, transport=fake, adapters=4, files=HostedFiles(path, load))
                assert fake.init["path"] == str(path), "its workers say whether they can read there"
                return VllmPolicy(server, sampling=SAMPLING)

            async with PolicyPool([await member(0), await member(1)], start=member) as pool:
                await pool.load(adapted(1))
                fakes[0].llm.die()
                await pool.load(adapted(2))
                with anyio.fail_after(30):
                    while len(pool.living) < 2:  # noqa: ASYNC110 - nothing announces it
                        await anyio.sleep(0.05)
                decodes, versions = await pool.open(varied(4)), set[int]()
                async with pool.decoding(decodes, lambda ended: False):
                    for decode in decodes:
                        while (piece := await read_chunk(decode, 4)).state == "live":
                            versions |= {*piece.versions.tolist()}
            assert versions == {2}
            files = [Path(fake.init["adapter"]) for fake in fakes]
            found = [max(float(each.max()) for each in load_file(file).values()) for file in files]
            assert found == [2.0, 3.0, 3.0]
            holders = {int(file.readlink().parts[2]) for file in files}
            assert len(holders - {os.getpid()}) == 3, "each in the process that holds its server"
            for fake, file in zip(fakes, files, strict=True):
                assert {body["model"] for body in fake.bodies} <= {file.parent.name}, "requests name what is loaded"
            left = [file.parents[1] for file in files]
        assert not any(each.exists() for each in left)

    anyio.run(main)
