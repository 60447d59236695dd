"""``python -m benchmarks.vllm``: oppo's policy beside bare ``AsyncLLM``, and publishing beside a copy.

It needs vLLM (docs/vllm.md). Exit codes are those of ``oppo``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from oppo.cli import DONE, call, note, program
from oppo.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    app = program("python -m benchmarks.vllm", "How fast oppo's policy is on vLLM.")
    app.default(bench)
    return call(app, arguments)


def bench(
    *,
    sizes: str = "5m,135m",
    rounds: Annotated[int, Parameter(help="that count, after one that does not")] = 5,
    json: Path | None = None,
    log: Path | None = None,
    cache: Path | None = None,
) -> int:
    """Compare decoding with bare AsyncLLM and LLM, and publishing with a copy of as many bytes.

    Args:
        sizes: 5m, 135m, or both with a comma between them.
        rounds: rounds that count, after one that does not.
        json: write the results to this file.
        log: the file for what the engines write.
        cache: the folder of the models, which are made once.
    """
    from benchmarks.vllm import cases  # noqa: PLC0415 - `--help` should be quick
    from benchmarks.vllm.models import SIZES  # noqa: PLC0415

    names = sizes.split(",")
    if unknown := [name for name in names if name not in SIZES]:
        raise ConfigError(f"there is no model {unknown[0]!r}; expected some of {', '.join(SIZES)}")
    if rounds < 1:
        raise ConfigError(f"at least one round is needed, not {rounds}")
    compared = [cases.measure(SIZES[name], rounds=rounds, cache=cache, log=log, tell=note) for name in names]
    if json is not None:
        json.write_text(dumps(cases.as_json(compared, rounds), indent=2) + "\n", encoding="utf-8")
    print(cases.show(compared))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
