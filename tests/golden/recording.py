"""What the scripts that record golden values have in common."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.golden import fixed


def listed(x: Any) -> Any:
    return x.detach().tolist() if isinstance(x, torch.Tensor) else np.asarray(x).tolist()


def source(function: Callable[..., object], first: str, last: str) -> str:
    """Return the lines of a function from the one that starts with ``first`` to the one with ``last``."""
    lines = inspect.getsource(function).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i, line in enumerate(lines) if i >= start and line.strip().startswith(last))
    return textwrap.dedent("\n".join(lines[start : end + 1]))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(fixed.EOS)} | {"<eos>": fixed.EOS, "<pad>": fixed.PAD}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", padding_side="left")
