"""The end of a turn that agents are not shown begins where vLLM's detokenizer truncates; `make test-vllm` runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from vllm.v1.engine.detokenizer import check_stop_strings

from oppo.agents.requests import ChatRequests
from oppo.models import SamplingSettings

pytestmark = pytest.mark.vllm


class Spelled:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._texts[each] for each in tokens)


TEXTS = st.text("ab\n:", min_size=1, max_size=3)


@given(st.lists(TEXTS, min_size=1, max_size=3), st.text("ab\n:", max_size=12), TEXTS)
def test_the_end_of_a_turn_begins_where_vllm_truncates_it(stops: list[str], before: str, last: str) -> None:
    tokenizer: Any = Spelled([before, last])
    found = check_stop_strings(before + last, len(last), stops, include_in_output=False)
    end = ChatRequests(tokenizer, SamplingSettings(stop_strings=tuple(stops))).stopped(tokenizer, [0, 1])
    assert end == ("" if found is None else (before + last)[found[1] :])
