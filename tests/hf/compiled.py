"""Kernels of Triton, compiled for GPUs that need not be there, or interpreted with their launches counted."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.kit.forked import Program

_COMPILE = """
import importlib, json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

module, names, kinds, constants, options = json.loads(sys.argv[1])
found = {}
for name in names:
    kernel = getattr(importlib.import_module(module), name)
    for capability in (80, 90):
        for logits in ("*fp32", "*bf16"):
            every = kinds | {"logits": logits} | dict.fromkeys(constants, "constexpr")
            signature = {name: every.get(name, "*fp32") for name in kernel.arg_names}
            constexprs = {(at,): constants[name] for at, name in enumerate(kernel.arg_names) if name in constants}
            source = ASTSource(kernel, signature=signature, constexprs=constexprs)
            made = compile(source, GPUTarget("cuda", capability, 32), options)
            fused = made.asm["ptx"].count("fma.")
            found[f"{name} {capability} {logits}"] = bool(made.asm["cubin"]), fused
print(json.dumps(found))
"""


def compiled(
    patch: pytest.MonkeyPatch,
    module: str,
    *kernels: str,
    kinds: Mapping[str, str],
    constants: Mapping[str, object],
    options: Mapping[str, object],
) -> dict[str, tuple[bool, int]]:
    """Return, of each kernel, capability and dtype, whether it compiles, and its fused operations."""
    patch.delenv("TRITON_INTERPRET")
    with Program(_COMPILE, [json.dumps((module, kernels, kinds, constants, options))]) as program:
        out, said = program.communicate()
    assert program.returncode == 0, said
    found: dict[str, tuple[bool, int]] = json.loads(out)
    assert len(found) == 4 * len(kernels)
    return found


def launches(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the grids that are launched from here on, which grows."""
    launched, interpreter = list[tuple[int, ...]](), importlib.import_module("triton.runtime.interpreter")
    execute = interpreter.GridExecutor.__call__

    def launch(run: Any, *given: object, **named: object) -> None:
        launched.append(run.grid)
        execute(run, *given, **named)

    patch.setattr(interpreter.GridExecutor, "__call__", launch)
    return launched
