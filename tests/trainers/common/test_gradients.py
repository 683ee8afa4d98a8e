"""tidemill.trainers.common.gradients"""

import math

import pytest
import torch

from tidemill.errors import TrainerError
from tidemill.trainers.common import gradients


def finish(parts: list[torch.Tensor], *, count: float, max_norm: float) -> float:
    """By one rank, which has all of it."""
    return gradients.finish(parts, norm=float(gradients.norm_of(parts)), count=count, max_norm=max_norm)


def test_the_norm_is_that_of_all_gradients_as_one_vector() -> None:
    parts = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    whole = torch.cat([part.flatten() for part in parts]).double()
    assert float(gradients.norm_of(parts)) == pytest.approx(float(whole.norm()), rel=1e-12)


def test_a_large_gradient_is_scaled_down_to_the_bound_and_a_small_one_only_divided() -> None:
    large, small = [torch.tensor([30.0, 40.0])], [torch.tensor([0.3, 0.4])]
    assert finish(large, count=10.0, max_norm=1.0) == pytest.approx(5.0)
    assert finish(small, count=10.0, max_norm=1.0) == pytest.approx(0.05)
    torch.testing.assert_close(large[0], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(small[0], torch.tensor([0.03, 0.04]))


def test_an_infinite_bound_never_clips() -> None:
    values = [torch.tensor([3e20, 4e20])]
    assert finish(values, count=1.0, max_norm=math.inf) == pytest.approx(5e20)
    torch.testing.assert_close(values[0], torch.tensor([3e20, 4e20]))


def test_a_zero_gradient_stays_zero() -> None:
    values = [torch.zeros(3)]
    assert finish(values, count=4.0, max_norm=1.0) == 0.0
    assert values[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_shows_in_the_norm_and_nothing_is_scaled(garbage: float) -> None:
    values = [torch.ones(2), torch.tensor([1.0, garbage])]
    assert not math.isfinite(finish(values, count=2.0, max_norm=1.0))
    assert values[0].tolist() == [1.0, 1.0]


def test_large_but_finite_elements_are_not_taken_for_infinite() -> None:
    assert math.isfinite(float(gradients.norm_of([torch.full((4,), 3e38)])))


def test_a_parameter_without_gradient_is_named_in_numbers() -> None:
    parameters = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    parameters[0].sum().backward()
    with pytest.raises(TrainerError, match="1 of 2 parameters got no gradient"):
        gradients.taken(parameters)
    gradients.drop(parameters)
    assert parameters[0].grad is None


def test_a_part_of_the_gradient_is_scaled_by_the_norm_of_all() -> None:
    whole, part = [torch.tensor([30.0, 40.0])], [torch.tensor([30.0]), torch.zeros(0)]
    assert gradients.finish(part, norm=float(gradients.norm_of(whole)), count=10.0, max_norm=1.0) == 5.0
    torch.testing.assert_close(part[0], torch.tensor([0.6]))
    assert float(gradients.norm_of([torch.zeros(0, 3)])) == 0.0
