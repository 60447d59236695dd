"""The journeys in ``docs/architecture.md`` are found by following a value through functions and what holds it."""

from __future__ import annotations

import numpy as np

from docs.make_journeys import PAGE, Journey, Tracer, written
from oppo.events import Prompt
from oppo.returns import whiten
from oppo.stages.ledger import require_prompt


def test_a_value_is_followed_into_functions_whose_arguments_hold_it() -> None:
    tracer = Tracer(lambda value: isinstance(value, np.ndarray) and value.dtype == np.int32)
    with tracer.tracing():
        whiten(np.ones(3, np.float32), np.ones(3, np.bool_))
        assert not tracer.modules
        require_prompt(Prompt(0, 0, np.array([1], np.int32)))
    assert list(tracer.modules) == ["oppo/stages/ledger.py"]
    assert list(tracer.containers) == ["Prompt"]


def test_a_page_is_read_as_it_was_written() -> None:
    found = Journey("a title", ["oppo/events.py", "oppo/models.py"], ["Chunk"])
    page = f"<!-- made by docs/make_journeys.py -->\n{found.text()}<!-- until here -->"
    assert written(page) == [{"oppo/events.py", "oppo/models.py"}]
    assert len(written(PAGE.read_text(encoding="utf-8"))) == 3
