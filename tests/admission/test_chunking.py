"""The sizes of chunks: what the probe tries, what it keeps, and what it does not mistake for speed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from oppo.admission import Observation
from oppo.admission.chunking import Fixed, Tuned, WholeRollout


def sizes_of(chunks: Tuned, steps: int, seconds: Callable[[int, int], float], first: int = 0) -> list[int]:
    """Return the size in each step; a step takes ``seconds(size, tokens)``, and there are more tokens in each."""
    sizes = []
    for step in range(first, first + steps):
        sizes.append(chunks.size())
        tokens = 1_000 + 100 * step
        chunks.observe(Observation(step, seconds=seconds(sizes[-1], tokens), tokens=tokens))
    return sizes


def test_each_candidate_is_tried_in_turns_and_the_fastest_is_kept() -> None:
    sizes = sizes_of(Tuned(cap=800, every=20, trials=2), 24, lambda size, tokens: tokens * (1.0 if size == 50 else 1.1))
    assert sizes[:2] == [100, 100], "the middle one, until the first probe"
    assert sizes[2:8] == [50, 100, 200, 50, 100, 200]
    assert sizes[8:22] == [50] * 14
    assert sizes[22:] == [50, 100], "the next probe"


def sizes_in_flight(chunks: Tuned, steps: int, seconds: Callable[[int], float], lookahead: int) -> list[int]:
    """Return the size in each step; a step is observed before the one begins that is ``lookahead + 1`` steps later."""
    sizes: list[int] = []
    for step in range(steps):
        if (over := step - lookahead - 1) >= 0:
            took = seconds(sizes[over])
            chunks.observe(Observation(over, seconds=took, tokens=1_000, lookahead=lookahead, chunk=sizes[over]))
        sizes.append(chunks.size())
    return sizes


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
@pytest.mark.parametrize("fastest", [50, 100, 200])
@pytest.mark.parametrize("every", [6, 9, 20])
def test_with_steps_in_flight_seconds_count_for_the_size_that_took_them(
    lookahead: int, fastest: int, every: int
) -> None:
    chunks = Tuned(cap=800, every=every, trials=2)
    steps = 2 + 6 + 2 * lookahead + max(0, every - 6 - lookahead)
    sizes = sizes_in_flight(chunks, steps + 1, lambda size: 1.0 if size == fastest else 1.1, lookahead)
    tried = sizes[2 + lookahead : 8 + lookahead]
    assert tried == [50, 100, 200, 50, 100, 200]
    assert chunks.state_dict()["size"] == fastest
    kept = sizes[8 + 2 * lookahead : 2 + lookahead + every]
    assert set(kept) <= {fastest}


def test_growing_lengths_are_not_mistaken_for_a_slow_size() -> None:
    """Seconds grow with the tokens, whatever the size: by raw seconds the size that is tried first would win."""
    sizes = sizes_of(Tuned(cap=800, every=20, trials=1), 12, lambda size, tokens: tokens * (1.0 - size / 10_000))
    assert sizes[-1] == 200


def test_it_follows_what_is_fastest_now() -> None:
    chunks = Tuned(cap=800, every=20, trials=2)
    sizes_of(chunks, 20, lambda size, tokens: tokens * size)
    sizes = sizes_of(chunks, 20, lambda size, tokens: tokens / size, first=20)
    assert sizes[-1] == 200


def test_a_step_that_decoded_nothing_is_no_trial() -> None:
    chunks = Tuned(cap=800)
    sizes_of(chunks, 3, lambda size, tokens: tokens)
    before = chunks.state_dict()
    chunks.observe(Observation(3, seconds=9.0))
    assert chunks.state_dict() == before


def test_it_goes_on_from_its_state_in_the_middle_of_a_probe() -> None:
    def seconds(size: int, tokens: int) -> float:
        return tokens * (2.0 if size == 100 else 3.0)

    whole, first, second = (Tuned(cap=800, every=20) for _ in range(3))
    expected = sizes_of(whole, 30, seconds)
    sizes_of(first, 6, seconds)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert sizes_of(second, 24, seconds, first=6) == expected[6:]


def test_short_responses_leave_fewer_candidates() -> None:
    assert Tuned(cap=4).candidates == (1,)
    assert Tuned(cap=4, parts=(0.5, 0.5, 1.0)).candidates == (2, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cap": 0}, "cap and trials must be at least 1, not 0 and 3"),
        ({"cap": 9, "parts": ()}, r"parts must be some numbers above 0 and up to 1, not \(\)"),
        ({"cap": 90, "every": 8}, "a probe takes 3 steps for each of 3 candidates, so every must be at least 9, not 8"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tuned(**settings)  # type: ignore[arg-type]  # by keyword


def test_the_others_never_change() -> None:
    for chunks in (Fixed(7), WholeRollout()):
        before = chunks.size()
        chunks.observe(Observation(0, seconds=1.0, tokens=9))
        assert chunks.size() == before
