"""tidemill.trainers.common.microbatches"""

import numpy as np
import pytest

from tidemill.trainers.common.microbatches import micro_batches


def cut(lengths: list[int], tokens: int, rows: list[int] | None = None) -> list[list[int]]:
    chosen = np.array(range(len(lengths)) if rows is None else rows, dtype=np.int64)
    return [part.tolist() for part in micro_batches(chosen, lengths, tokens=tokens)]


def test_rows_are_sorted_by_length_and_cut_where_the_rectangle_would_exceed_the_budget() -> None:
    assert cut([5, 1, 3, 3, 2], tokens=6) == [[1, 4], [2, 3], [0]]


def test_equal_lengths_keep_their_order() -> None:
    assert cut([4, 4, 4, 4], tokens=8, rows=[2, 0, 3, 1]) == [[2, 0], [3, 1]]


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    assert cut([1, 50, 60, 2], tokens=10) == [[0, 3], [1], [2]]


def test_no_rows_make_no_micro_batches() -> None:
    assert cut([], tokens=8) == []
    assert cut([3, 3], tokens=8, rows=[]) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens", [1, 7, 40, 10_000])
def test_every_row_is_in_exactly_one_micro_batch_that_fits(seed: int, tokens: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 41, 50).tolist()
    parts = cut(lengths, tokens)
    assert sorted(row for part in parts for row in part) == list(range(50))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[row] for row in part) <= tokens
