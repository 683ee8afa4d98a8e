"""tidemill.algorithms.reduce"""

import pytest
import torch

from tidemill.algorithms.reduce import divide, masked_sum, token_mean


def test_a_mean_is_a_sum_and_a_count() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]])
    numerator, count = token_mean(values, mask)
    assert (float(numerator), count) == (3.0, 2.0)
    assert divide(float(numerator), count) == 1.5


def test_nothing_counted_gives_zero() -> None:
    numerator, count = token_mean(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool))
    assert divide(float(numerator), count) == 0.0


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_what_is_not_selected_reaches_neither_sum_nor_gradient(garbage: float) -> None:
    values = torch.tensor([[1.0, garbage]], requires_grad=True)
    total = masked_sum(values, torch.tensor([[True, False]]))
    total.backward()
    assert float(total.detach()) == 1.0
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_unequal_parts_average_to_the_mean_of_the_whole_and_not_to_the_mean_of_means() -> None:
    values, mask = torch.tensor([[1.0, 0.0, 0.0], [4.0, 5.0, 6.0]]), torch.tensor([[True, False, False], [True] * 3])
    parts = [token_mean(values[row : row + 1], mask[row : row + 1]) for row in range(2)]
    assert divide(float(parts[0][0] + parts[1][0]), parts[0][1] + parts[1][1]) == 4.0
