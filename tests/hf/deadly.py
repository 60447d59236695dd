"""What makes a scorer's process die in the middle of its work, once for each kind of work; importable by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from oppo.hf.kv.prefill import IncrementalPrefill, ReadState

AT = {"extend": 7, "finish": 2}
"""At which call of its kind, in one process, it dies."""


def deadly(folder: Path) -> None:
    """Let this process die when it has done half of a call, unless ``folder`` says that one has died so before."""
    torch.set_num_threads(1)
    advance, calls = IncrementalPrefill._advance, dict.fromkeys(AT, 0)

    def dying(reader: IncrementalPrefill, sessions: Sequence[ReadState], *, final: bool) -> None:
        kind = "finish" if final else "extend"
        calls[kind] += 1
        mark = folder / kind
        if calls[kind] >= AT[kind] and not mark.exists():
            advance(reader, sessions[: (len(sessions) + 1) // 2], final=final)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        advance(reader, sessions, final=final)

    pytest.MonkeyPatch().setattr(IncrementalPrefill, "_advance", dying)
