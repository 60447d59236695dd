"""The versions of what a benchmark of vLLM is made with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version


def versions() -> Mapping[str, str]:
    """Return the versions of torch, transformers and vLLM, whatever distribution vLLM came in."""
    (vllm, *_) = packages_distributions().get("vllm", ["vllm"])
    found = {}
    for name in ("torch", "transformers", vllm):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
