"""``python -m benchmarks.vllm``: oppo's policy beside bare ``AsyncLLM``, and weight sync beside a copy.

It needs vLLM (docs/engines.md). Exit codes are those of ``oppo``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness import command, keep, require_writable
from benchmarks.ladder.workloads import chosen
from oppo.errors import ConfigError


def bench(
    *,
    sizes: str = "5m,135m",
    rounds: int = 5,
    json: Path | None = None,
    log: Path | None = None,
    cache: Path | None = None,
) -> None:
    """Compare decoding with bare AsyncLLM and LLM, and weight sync with a copy of as many bytes.

    Args:
        sizes: 5m, 135m, or both with a comma between them.
        rounds: rounds that count, after one that does not.
        json: write the results to this file.
        log: the file for what the engines write.
        cache: the folder of the models, which are made once.
    """
    from benchmarks.vllm import cases  # noqa: PLC0415 - `--help` should be quick

    names = chosen("size", sizes, cases.SIZES, tuple(cases.SIZES))
    require_writable({"--json": json})
    if rounds < 1:
        raise ConfigError(f"at least one round is needed, not {rounds}")
    compared = [cases.measure(cases.SIZES[name], rounds=rounds, cache=cache, log=log) for name in names]
    keep(json, cases.as_json(compared, rounds))
    print(cases.show(compared))


if __name__ == "__main__":
    sys.exit(command(bench))
