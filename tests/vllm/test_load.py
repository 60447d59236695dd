"""Weights that are loaded into vLLM: when they are served, and what is known when something fails in between."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oppo.errors import ConfigError, ModelError, ModelLost, ProtocolError
from oppo.events import Prompt
from oppo.log import routed
from oppo.models import Weights
from oppo.vllm.engine import GRACE, ServedWeights
from oppo.vllm.sync import FILES, FileSender, WeightFiles, fingerprints
from tests.hf import tiny
from tests.vllm.bench import WEIGHTS, Bench, varied
from tests.vllm.fake_engine import FakeAsyncLLM, FakeSender


@pytest.mark.parametrize(("kv_on_sync", "recomputed"), [("keep", 0), ("recompute", 2)])
def test_deferred_rollouts_keep_their_kv_cache_or_compute_them_again(kv_on_sync: str, recomputed: int) -> None:
    bench = Bench(keywords={"kv_on_sync": kv_on_sync})

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        await bench.policy.load(Weights(1, WEIGHTS))
        await bench.policy.load(Weights(2))
        await bench.policy.load(Weights(3, WEIGHTS))
        await bench.step(await bench.policy.open([Prompt(9, 9, np.array([12], np.int32))]))

    bench.run(main)
    assert bench.llm.recomputed == recomputed
    assert len(bench.llm.updates) == 2, "an actor that was not trained is not sent"
    salts = {request.salt for request in bench.llm.done}
    assert len(salts) == 2, "no prefix of other weights is used"


def test_weights_that_cannot_be_sent_leave_the_engine_running_on_the_old_ones() -> None:
    bench = Bench(sender=FakeSender(fails=ModelError("no room")))
    errors: list[Exception] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))

        async def sync_weights() -> None:
            await anyio.sleep(0.02)
            try:
                await bench.policy.load(Weights(1, WEIGHTS))
            except ModelError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sync_weights)
            await bench.step(decodes)

    bench.run(main)
    assert [str(error) for error in errors] == ["no room"]
    assert set(bench.versions(0) + bench.versions(1)) == {0}
    assert bench.policy.version == 0


@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [True, False])
def test_adapters_that_rounding_would_take_away_are_refused_unless_the_dtype_was_chosen(
    served: torch.dtype, chosen: bool
) -> None:
    bench = Bench(FakeAsyncLLM(dtype=served))
    bench.engine.dtype_chosen = chosen
    base = torch.full((4,), 0.5, dtype=torch.bfloat16)
    whole = {"head.weight": base.float() + torch.tensor([1e-4, -1e-4, 1e-4, 0.25])}

    async def main() -> None:
        await bench.policy.load(Weights(1, {"head.base_layer.weight": base}, merge=lambda: whole))

    if served == torch.bfloat16 and not chosen:
        with pytest.raises(ModelError, match=r"bfloat16.*dtype = 'float32'"):
            bench.run(main, threads=True)
        return
    bench.run(main, threads=True)
    lost = bench.policy.sync_metrics["sync/rounding_loss"]
    assert lost == (0.0 if served == torch.float32 else pytest.approx(3**0.5 * 1e-4 / 0.25, rel=0.01))


@pytest.mark.parametrize(("served", "told"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_rounding_that_takes_more_than_a_hundredth_is_warned_of_once(served: torch.dtype, told: int) -> None:
    bench = Bench(FakeAsyncLLM(dtype=served))
    base = torch.full((4,), 0.5)
    state = {"head.base_layer.weight": base}
    said: list[str] = []

    async def main() -> None:
        await bench.policy.load(Weights(1, state, merge=lambda: {"head.weight": base + 0.25}))
        assert not said, "nothing is lost"
        for version in (2, 3):
            await bench.policy.load(Weights(version, state, merge=lambda: {"head.weight": base + 1e-4}))

    with routed(said.append):
        bench.run(main, threads=True)
    assert len(said) == told
    assert all("syncing version 2" in each and "bfloat16" in each and "100%" in each for each in said)
    assert bench.policy.sync_metrics["sync/rounding_loss"] == told


def test_versions_are_compared_with_those_that_the_engine_names() -> None:
    bench = Bench(FakeAsyncLLM(mislabelled=True))

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)))

    with pytest.raises(ProtocolError, match="vLLM says that weights another-9 made token"):
        bench.run(main)


def test_the_error_of_a_rollout_that_a_sync_drains_ends_its_decoding_and_not_the_sync_weights() -> None:
    bench = Bench(FakeAsyncLLM(overrun=2, logprob=lambda position: float("nan") if position > 3 else -1.0))

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        await bench.step(decodes, load=0.015)

    with pytest.raises(ModelError, match="which is not finite"):
        bench.run(main)
    assert bench.policy.version == 1


def test_the_error_of_a_rollout_that_came_late_is_raised_when_it_is_decoded_on() -> None:
    bench = Bench(FakeAsyncLLM(overrun=0, late=0.012, logprob=lambda position: float("nan") if position > 3 else -1.0))

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        with anyio.move_on_after(0.025):
            await bench.step(decodes)
        await bench.policy.load(Weights(1, WEIGHTS))
        assert bench.policy.version == 1
        await decodes[1].aclose()
        with pytest.raises(ModelError, match="which is not finite"):
            await bench.step(decodes[:1])

    bench.run(main)


@pytest.mark.parametrize(
    "failure", [ModelLost("vLLM took no weights within 600 s"), RuntimeError("a worker refused")], ids=["late", "other"]
)
def test_an_engine_whose_weights_are_unknown_decodes_nothing_any_more(failure: Exception) -> None:
    bench = Bench(sender=FakeSender(fails=failure))
    made: list[int] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))

        async def sync_weights() -> None:
            await anyio.sleep(0.015)
            with pytest.raises(ModelLost, match=str(failure)):
                await bench.policy.load(Weights(1, WEIGHTS))
            made.append(bench.policy.tokens)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sync_weights)
            with pytest.raises(ModelLost, match=str(failure)):
                await bench.step(decodes)
        await anyio.sleep(1)
        made.append(sum(len(request.tokens) for request in bench.llm.requests.values()))
        again = await bench.policy.open(varied(1))
        for _ in range(2):
            with pytest.raises(ModelLost, match=f"nothing is decoded any more: .*{failure}"):
                await bench.step(again)
            with pytest.raises(ModelLost, match=f"nothing is decoded any more: .*{failure}"):
                await bench.policy.load(Weights(2, WEIGHTS))
            again = await bench.policy.open(varied(1))
        for decode in decodes:
            await decode.aclose()

    bench.run(main)
    assert made[0] == made[1], "no token was made after the failure"
    assert bench.policy.version == 0


@pytest.mark.parametrize("decoding", [True, False])
def test_a_cancelled_sync_ends_first_and_takes_effect(decoding: bool) -> None:
    bench = Bench(sender=FakeSender(seconds=0.1))

    async def sync_weights() -> None:
        await anyio.sleep(0.015)
        with anyio.move_on_after(0.03) as scope:
            await bench.policy.load(Weights(1, WEIGHTS))
        assert scope.cancel_called
        assert bench.policy.version == 1

    async def main() -> None:
        decodes = await bench.policy.open(varied(2))
        if decoding:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sync_weights)
                await bench.step(decodes)
        else:
            await sync_weights()
            await bench.step(decodes)

    bench.run(main)
    assert bench.policy.version == 1
    assert bench.versions(0)[-1] == 1
    assert bench.llm.updates == [bench.policy._label(1)]


def test_a_cancelled_sync_that_does_not_end_leaves_the_engine_lost() -> None:
    bench = Bench(sender=FakeSender(seconds=10 * GRACE))

    async def main() -> None:
        start = anyio.current_time()
        with anyio.move_on_after(1.0):
            await bench.policy.load(Weights(1, WEIGHTS))
        assert anyio.current_time() == pytest.approx(start + 1.0 + GRACE)
        with pytest.raises(ModelLost, match=r"syncing version 1 was cancelled before .* unknown: .* fake.log"):
            await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)


def test_weights_of_another_model_are_refused_while_the_engine_decodes_on() -> None:
    bench = Bench()
    bench.engine.weights = ServedWeights("fake", {"weight": (1,)}, (frozenset({"weight"}),))

    async def main() -> None:
        async def sync_weights() -> None:
            await anyio.sleep(0.015)
            with pytest.raises(ModelError, match=r"not the weights of fake, which vLLM serves: 1 missing \(weight\)"):
                await bench.policy.load(Weights(1, {"bias": torch.zeros(1)}))
            await bench.policy.load(Weights(2, WEIGHTS))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sync_weights)
            await bench.step(await bench.policy.open(varied(2)))

    bench.run(main)
    assert bench.reported == [[0], [1]]
    assert set(bench.versions(0)) == {0, 2}
    assert len(bench.llm.updates) == 1


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_weights_of_a_mixture_are_sent_as_its_checkpoint_has_them(name: str, tmp_path: Path) -> None:
    model = tiny.mixture(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = ServedWeights.of(name, model.config).as_saved(model.state_dict())
    assert sent.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[each]) for each, tensor in sent.items())


def test_adapters_that_cannot_be_merged_leave_the_engine_decoding() -> None:
    bench = Bench()

    def merge() -> dict[str, object]:
        raise MemoryError("too large")

    async def main() -> None:
        async def sync_weights() -> None:
            await anyio.sleep(0.015)
            with pytest.raises(MemoryError):
                await bench.policy.load(Weights(1, WEIGHTS, merge=merge))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sync_weights)
            await bench.step(await bench.policy.open(varied(2)))

    bench.run(main, threads=True)
    assert bench.reported == [[0], [1]]
    assert set(bench.versions(0)) == {0}


def test_an_engine_that_keeps_the_kv_cache_of_other_weights_is_lost() -> None:
    class Keeping(FakeAsyncLLM):
        async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
            return False

    bench = Bench(Keeping())

    async def main() -> None:
        await bench.policy.load(Weights(1, WEIGHTS))

    with pytest.raises(ModelLost, match="kept the KV cache of the weights before version 1"):
        bench.run(main)


def test_an_engine_works_on_one_event_loop() -> None:
    bench = Bench()

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)
    with pytest.raises(ProtocolError, match="the engine of fake works on the event loop that used it first"):
        bench.run(main)


def test_a_closed_engine_is_named_and_its_rollouts_can_be_closed() -> None:
    bench = Bench()

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        bench.engine.close()
        bench.engine.close()
        for decode in decodes:
            await decode.aclose()
        with pytest.raises(ProtocolError, match="the engine of fake was closed"):
            await bench.step(await bench.policy.open(varied(1)))
        with pytest.raises(ProtocolError, match="the engine of fake was closed"):
            await bench.policy.load(Weights(1, WEIGHTS))

    bench.run(main)


def adapting(folder: Path, **given: FakeAsyncLLM) -> Bench:
    return Bench(sender=FileSender(WeightFiles(folder, adapters=True), adapts=True), adapts=True, **given)


def adapted(version: int) -> Weights:
    """Return weights with an adapter that differs in each version, and cannot be merged."""

    def merge() -> dict[str, object]:
        raise AssertionError("adapters alone are sent")

    path = "base_model.model.layers.0.q_proj"
    matrices = {f"{path}.lora_A.weight": torch.ones(2, 4), f"{path}.lora_B.weight": torch.full((4, 2), 1.0 + version)}
    return Weights(version, WEIGHTS, merge=merge, adapters=lambda: matrices)


def test_adapters_alone_are_sent_each_version_by_a_path_of_its_own(tmp_path: Path) -> None:
    bench = adapting(tmp_path)
    bench.engine.weights = ServedWeights("fake", {"other": (1,)}, (frozenset({"other"}),))
    seen: list[dict[str, torch.Tensor]] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        with pytest.raises(ProtocolError, match=r"fake was started for adapters and has none yet.*policy.load"):
            await bench.step(decodes)
        for version in (1, 2, 3):
            await bench.policy.load(adapted(version))
            seen.append(load_file(Path(bench.llm.adapters[-1].path) / FILES[True]))
            await bench.step(decodes, cut_at=1)
            decodes = [each for each in decodes if not each.ended]
        await bench.policy.load(Weights(4))

    bench.run(main, threads=True)
    labels = [bench.policy._label(version) for version in (1, 2, 3)]
    assert [(each.name, each.replaces) for each in bench.llm.adapters] == [(label, True) for label in labels]
    assert [float(each.popitem()[1].max()) for each in map(dict, seen)] == [2.0, 3.0, 4.0]
    assert [request.lora.name for request in bench.llm.done] == [labels[0]] * 3, "deferred requests stay as they are"
    assert not any(request.lora.replaces for request in bench.llm.done), "vLLM would load it in each decode step"
    assert bench.policy.version == 4
    assert bench.policy.sync_metrics["sync/rounding_loss"] == 0.0
    (folder,) = tmp_path.iterdir()
    assert {each.name for each in folder.iterdir()} == {*labels[1:]}, "older ones are gone"
    assert json.loads((folder / labels[2] / "adapter_config.json").read_text())["target_modules"] == ["q_proj"]
    checked = bench.llm.agreed[-1].init_info
    assert checked == {
        "adapter": str(folder / labels[2] / FILES[True]),
        "prints": fingerprints(seen[-1]),
    }


def test_an_adapter_is_synced_while_its_requests_decode_and_its_bytes_are_counted(tmp_path: Path) -> None:
    bench = adapting(tmp_path, llm=FakeAsyncLLM(length=lambda prompt: 15))

    async def main() -> None:
        await bench.policy.load(adapted(1))
        decodes = await bench.policy.open(varied(2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.step, decodes)
            await anyio.sleep(0.05)
            await bench.policy.load(adapted(2))

    bench.run(main, threads=True)
    for rollout in range(2):
        assert bench.versions(rollout) == sorted(bench.versions(rollout))
        assert set(bench.versions(rollout)) == {1, 2}
    assert bench.policy.sync_metrics["sync/bytes"] == 16 * 4


def test_an_engine_of_adapters_refuses_weights_without_and_goes_on_with_the_old_one(tmp_path: Path) -> None:
    bench = adapting(tmp_path)

    def in_the_way(name: str) -> None:
        (folder,) = tmp_path.iterdir()
        (folder / name).write_text("no directory")

    async def main() -> None:
        await bench.policy.load(adapted(1))
        with pytest.raises(ModelError, match=r"fake was started for adapters, and these weights have none"):
            await bench.policy.load(Weights(2, WEIGHTS))
        in_the_way(bench.policy._label(3))
        with pytest.raises(ModelError, match=r"could not be written to .* goes on serving the old ones"):
            await bench.policy.load(adapted(3))
        await bench.step(await bench.policy.open(varied(1)))

    bench.run(main, threads=True)
    assert set(bench.versions(0)) == {1}


def test_a_directory_for_adapters_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights on their way to vLLM cannot be written to .*nowhere"):
        WeightFiles(tmp_path / "nowhere")


def test_directories_for_adapters_that_killed_runs_left_go_and_those_in_use_stay(tmp_path: Path) -> None:
    first = WeightFiles(tmp_path)
    (used,) = tmp_path.iterdir()
    left = tmp_path / f"{used.name[:-8]}leftover"
    (left / "version").mkdir(parents=True)
    second = WeightFiles(tmp_path)
    assert len([*tmp_path.iterdir()]) == 2
    assert used.exists()
    assert not left.exists()
    del first, second
    gc.collect()
    assert not [*tmp_path.iterdir()]


def test_matrices_in_memory_go_with_their_process_however_it_ends_and_what_names_them_with_the_next() -> None:
    program = (
        "import os, signal, torch\nfrom oppo.vllm.sync import WeightFiles\nfolder = WeightFiles(adapters=True)\n"
        "print(folder.write({'a.lora_A.weight': torch.ones(2, 1)}, '1') / 'adapter_model.safetensors', flush=True)\n"
        "os.read(0, 1)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True) as killed:
        assert killed.stdout is not None
        file = Path(killed.stdout.readline().strip())
        assert load_file(file)["a.lora_A.weight"].tolist() == [[1.0], [1.0]], "another process reads them"
        killed.communicate("x")
    assert not file.exists()
    assert file.is_symlink()
    folder = WeightFiles(adapters=True)
    assert not file.is_symlink()
    path = folder.path
    del folder
    gc.collect()
    assert not path.exists()


def test_two_adapters_stay_and_a_lack_of_memory_leaves_the_one_that_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, matrices = WeightFiles(adapters=True), {"a.lora_A.weight": torch.ones(2, 1)}
    paths = [folder.write(matrices, str(version)) for version in range(3)]
    assert [load_file(each / FILES[True]).keys() for each in paths[1:]] == [matrices.keys()] * 2
    assert not paths[0].exists()

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(
        ModelError, match=r"could not be written to .*, and vLLM goes on serving the old ones .*no memory"
    ):
        folder.write(matrices, "3")
    assert {each.name for each in folder.path.iterdir()} == {"1", "2"}
