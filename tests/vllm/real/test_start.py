"""Engines that start or do not: what they say, where they say it, and that nothing is left of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from oppo.durable import temporary
from oppo.errors import ConfigError
from oppo.vllm import VllmEngine
from oppo.vllm.arguments import OWNED, SETTINGS, VALUES, check_arguments, known_arguments
from tests.vllm.real.conftest import engine_processes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files, with room for a socket's name after its own."""
    with temporary("test") as folder:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = engine_processes()
    yield
    gc.collect()
    assert engine_processes() <= before


def test_arguments_are_those_of_the_installed_version() -> None:
    check_arguments({"max_num_seqs": 4, "tensor_parallel_size": 1, "quantization": None})
    with pytest.raises(ConfigError, match=r"vllm\.max_num_seq: .* did you mean vllm\.max_num_seqs\?"):
        check_arguments({"max_num_seq": 4})
    assert known_arguments() >= OWNED.keys() | SETTINGS.keys() | VALUES.keys(), "nothing is refused that is no more"


@pytest.mark.parametrize("named", [True, False], ids=["a file of its own", "a temporary file"])
def test_an_engine_that_cannot_start_says_why_and_where_it_said_more(
    directory: Path, tmp_path: Path, short: Path, named: bool
) -> None:
    log = tmp_path / "failed.log" if named else None
    with pytest.raises(ConfigError, match=r"^vLLM could not be started with .*; everything that it wrote is") as error:
        VllmEngine.start(directory, arguments={"kv_cache_memory_bytes": 1}, log=log)
    (written,) = [log] if log else short.rglob("*.log")
    assert str(error.value).endswith(str(written))
    assert "No available memory" in str(error.value), "what its process said, not that it ended"
    assert "Traceback" in written.read_text()


def test_a_temporary_log_and_sockets_go_with_an_engine_that_ends_well(directory: Path, short: Path) -> None:
    with VllmEngine.start(directory, arguments={"max_num_seqs": 4}, cores=1) as engine:
        assert short in engine.log.parents
        assert "EngineCore" in engine.log.read_text()
        assert [path for path in engine.log.parent.iterdir() if path.is_socket()]
    assert not [path for path in short.iterdir() if not path.name.startswith("torchinductor")]


def test_an_argument_that_breaks_a_run_is_refused_in_a_program_too(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.stream_interval is set by oppo, since a token must arrive before"):
        VllmEngine.start(directory, arguments={"stream_interval": 8})
    with pytest.raises(ConfigError, match=r"vllm\.enable_chunked_prefill = true ends vLLM's engine on a CPU"):
        VllmEngine.start(directory, arguments={"enable_chunked_prefill": True})
