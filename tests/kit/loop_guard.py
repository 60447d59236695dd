"""A guard for tests: a model's forward pass on the event loop's thread, which would stop everything else, raises.

It holds in every test, for the oracles in the tests too (:func:`tests.hf.tiny.apart` takes one off the loop). Fakes
that work inline under virtual time are no modules, and stay as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def forwards_off_the_loop() -> Iterator[None]:
    """Raise out of any forward pass of a module in a thread that runs an event loop."""

    def check(module: nn.Module, inputs: object) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise AssertionError(f"the forward pass of {type(module).__name__} runs on the event loop's thread")

    hook = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()
