"""Running out of memory names the model, what it was at and what lowers its need; other errors stay what they are."""

from __future__ import annotations

import pytest
import torch

from oppo.errors import ConfigError, ModelError, ModelLost
from oppo.hf.devices import ModelPlace, attributed, ran_out
from oppo.placement import Thread


class Model:
    def too_much(self) -> torch.Tensor:
        return torch.empty(1 << 50, dtype=torch.uint8)

    def number(self, text: str) -> int:
        return int(text)


async def test_the_allocators_own_error_is_attributed_to_the_model_in_its_place() -> None:
    with Thread("scorers") as thread:
        critic = ModelPlace(thread, "critic", "lower step.batch").host(Model())
        with pytest.raises(
            ModelError, match=r"the critic ran out of memory while it did 'extend': lower step.batch \("
        ) as caught:
            await critic.call("extend", Model.too_much)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert await critic.call("extend", Model.number, "7") == 7, "the thread goes on"


async def test_other_errors_pass_as_they_are() -> None:
    with Thread("scorers") as thread:
        critic = ModelPlace(thread, "critic", "lower step.batch").host(Model())
        with pytest.raises(ValueError, match="invalid literal"):
            await critic.call("extend", Model.number, "x")
        thread.close()
        with pytest.raises(ModelLost):
            await critic.call("extend", Model.number, "7")


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (KeyError("out of memory"), False),
        (None, False),
    ],
)
def test_what_says_that_memory_ran_out_is_recognised(error: BaseException | None, is_so: bool) -> None:
    assert ran_out(error) is is_so


def test_a_cause_counts_too() -> None:
    outer = ConfigError("no model could be loaded")
    outer.__cause__ = MemoryError()
    expected = pytest.raises(ModelError, match="the reward ran out of memory while it was loaded: take a smaller one")
    with expected, attributed("reward", "it was loaded", "take a smaller one"):
        raise outer
