"""Noise made ahead is the noise of each place."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from oppo.hf.serve.sampling import AHEAD, Noise, gumbel

CPU = torch.device("cpu")
SEED = 7


def wanted(rows: list[tuple[int, int]], positions: list[int], vocabulary: int) -> Tensor:
    admission, sample = torch.tensor(rows).unbind(1)
    return gumbel(SEED, admission, sample, torch.tensor(positions), vocabulary)


@pytest.mark.parametrize("vocabulary", [17, 640, 70_000])
def test_rows_that_draw_together_join_and_leave_get_the_noise_of_their_places_to_the_last_bit(vocabulary: int) -> None:
    dice, noise = random.Random(3), Noise(SEED)
    drawn = {(k, k % 2): dice.randrange(5) for k in range(6)}
    live = list(drawn)[:4]
    for step in range(2 * AHEAD):
        positions = [drawn[row] for row in live]
        assert torch.equal(noise(live, positions, vocabulary, CPU), wanted(live, positions, vocabulary))
        for row in live:
            drawn[row] += 1
        if step == 9:
            live = sorted([*live[1:], (4, 0), (5, 1)])
        if step % 6 == 5 and len(live) > 1:
            live.pop(dice.randrange(len(live)))


def test_another_vocabulary_is_not_given_what_was_made_for_the_first() -> None:
    noise = Noise(SEED)
    noise([(1, 0)], [0], 50, CPU)
    assert torch.equal(noise([(1, 0)], [1], 60, CPU), wanted([(1, 0)], [1], 60))


def test_a_row_that_goes_back_is_given_its_place_again() -> None:
    noise = Noise(SEED)
    for position in (3, 4, 3, 2, 40):
        assert torch.equal(noise([(1, 0)], [position], 50, CPU), wanted([(1, 0)], [position], 50))
