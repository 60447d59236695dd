"""The arguments of vLLM's engine: what is refused, and that the page about them says so; vLLM itself is not needed."""

from __future__ import annotations

import re
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType

import pytest

from oppo.errors import ConfigError
from oppo.vllm.arguments import (
    OF_REWARDS,
    OWNED,
    SETTINGS,
    VALUES,
    engine_arguments,
    require_arguments,
    require_routed_experts,
)

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        *OWNED,
        *SETTINGS,
        *VALUES,
        "dtype",
        "load_format",
        "max_num_seqs",
        "enable_prefix_caching",
        "quantization",
    ]
    module = ModuleType("vllm.engine.arg_utils")
    module.__dict__["AsyncEngineArgs"] = make_dataclass("AsyncEngineArgs", names)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    monkeypatch.setattr("oppo.libraries.find_spec", lambda name: object())


def refused(**arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        require_arguments(arguments, of=SETTINGS)
    return str(caught.value)


def test_what_users_choose_passes() -> None:
    require_arguments(
        {
            "dtype": "bfloat16",
            "enable_prefix_caching": False,
            "load_format": "safetensors",
            "max_num_seqs": 4,
            "quantization": None,
            "distributed_executor_backend": "mp",
        },
        of=SETTINGS,
    )


@pytest.mark.parametrize("name", OWNED)
def test_what_oppo_needs_is_refused_with_the_reason(name: str) -> None:
    assert refused(**{name: "x"}) == f"vllm.{name} is set by oppo, since {OWNED[name]}: leave it out"


@pytest.mark.parametrize("name", SETTINGS)
def test_what_other_settings_say_is_refused_in_a_file_and_not_in_a_program(name: str) -> None:
    assert refused(**{name: "x"}) == f"vllm.{name} is set by oppo, since {SETTINGS[name]}: leave it out"
    require_arguments({name: "x"})


@pytest.mark.parametrize("name", OF_REWARDS)
def test_what_a_reward_says_elsewhere_is_refused_in_its_table(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_arguments({name: "x"}, of=OF_REWARDS)
    assert str(caught.value) == f"vllm.{name} is set by oppo, since {OF_REWARDS[name]}: leave it out"


def test_values_that_cannot_work_are_refused() -> None:
    assert refused(distributed_executor_backend="ray").startswith(
        "vllm.distributed_executor_backend = 'ray' is refused, since the engine's processes are on this machine"
    )
    assert refused(distributed_executor_backend=["ray"]).endswith("expected 'mp' or 'uni', or leave it out")
    assert "would begin with random weights" in refused(load_format="dummy")
    with pytest.raises(ConfigError, match=r"vllm\.enable_chunked_prefill = true ends vLLM's engine on a CPU"):
        engine_arguments("model", {"enable_chunked_prefill": True}, on_cpu=True, backend="oppo-file")
    with pytest.raises(ConfigError, match=r"no routed experts on a CPU.*trainer\.router_replay = false"):
        engine_arguments("model", {"enable_return_routed_experts": True}, on_cpu=True, backend="oppo-file")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("enable_prefix_caching", False, "false"),
        ("pipeline_parallel_size", 2, "2"),
        ("decode_context_parallel_size", 2, "2"),
        ("prefill_context_parallel_size", 2, "2"),
    ],
)
def test_experts_are_not_replayed_where_vllm_gives_none(name: str, value: int, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.router_replay = true .*vllm\.{name} = {shown}:"):
        require_routed_experts({name: value}, on_cpu=False)
    with pytest.raises(ConfigError, match=rf"vllm\.{name} = {shown}"):
        engine_arguments("model", {"enable_return_routed_experts": True, name: value}, on_cpu=False, backend="nccl")
    require_routed_experts({name: 1}, on_cpu=False)


def test_an_unknown_name_is_refused_with_the_nearest_that_may_be_chosen() -> None:
    assert refused(max_num_seq=3).endswith("has no such argument; did you mean vllm.max_num_seqs?")
    assert "did you mean" not in refused(modell="x"), "of one that is refused nothing is suggested"
    assert refused(max_num_seq=3, model="x").count("\n") == 1


def test_the_page_lists_all_that_is_refused_and_nothing_else() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("| refused |") :].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted([*OWNED, *SETTINGS])
