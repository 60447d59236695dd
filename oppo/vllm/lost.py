"""The end of an engine, as the error of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from oppo.errors import ModelLost, OppoError, one_line


@contextmanager
def engine_calls() -> Iterator[None]:
    """Turn whatever a call of the engine raises into :class:`~oppo.errors.ModelLost`, with what to do.

    Raises:
        ModelLost: the engine is dead, or refused the call.
    """
    try:
        yield
    except OppoError:
        raise
    except Exception as error:
        raise ModelLost(
            f"vLLM has failed, and its rollouts are lost with it ({one_line(error)}): go on from the newest checkpoint "
            "(oppo resume); vllm.log in the run directory has what it wrote"
        ) from error
