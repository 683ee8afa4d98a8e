"""tidemill.algorithms.advantages.group"""

import json
import math
import statistics
from pathlib import Path

import pytest

from tidemill.algorithms.advantages.group import group_advantages

DATA = Path(__file__).parents[1] / "data"
EXPECTED = [json.loads(line) for line in (DATA / "rewards_expected_advantages.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: case["group"])
def test_advantages_are_the_listed_ones(case: dict) -> None:
    normalized = group_advantages(case["rewards"], normalize_std=True)
    centred = group_advantages(case["rewards"], normalize_std=False)
    assert normalized.values == pytest.approx(case["adv_std_sample_eps_1e-6"], abs=2e-6)
    assert centred.values == pytest.approx(case["adv_mean_only"], abs=1e-9)


def test_advantages_equal_those_of_the_formula_written_out() -> None:
    rewards = [0.3, -2.0, 5.5, 0.3, 1.0]
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
    assert group_advantages(rewards, normalize_std=True).values == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6, -3.3])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, normalize_std: bool) -> None:
    found = group_advantages([reward] * 3, normalize_std=normalize_std)
    assert found.values == (0.0, 0.0, 0.0)
    assert not found.signal


def test_an_abstained_reward_is_left_out_of_mean_and_deviation() -> None:
    found = group_advantages([1.0, None, 0.0, 1.0], normalize_std=True)
    alone = group_advantages([1.0, 0.0, 1.0], normalize_std=True)
    assert found.values[1] is None
    assert tuple(value for value in found.values if value is not None) == alone.values


def test_all_rewards_missing_teach_nothing() -> None:
    found = group_advantages([None] * 4, normalize_std=True)
    assert found.values == (None,) * 4
    assert not found.signal


def test_one_reward_left_has_advantage_zero() -> None:
    found = group_advantages([None, None, None, 1.0], normalize_std=True)
    assert found.values == (None, None, None, 0.0)
    assert not found.signal


@pytest.mark.parametrize("size", [1e30, 1e200, 1e300])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_huge_rewards_give_finite_advantages(size: float, normalize_std: bool) -> None:
    found = group_advantages([size, -size, 0.0, 0.0], normalize_std=normalize_std)
    assert all(value is not None and math.isfinite(value) for value in found.values)


def test_scaling_all_rewards_scales_nothing_when_normalized() -> None:
    small = group_advantages([0.0, 0.0, 1.0], normalize_std=True).values
    large = group_advantages([0.0, 0.0, 1e9], normalize_std=True).values
    assert large == pytest.approx(small, rel=1e-5)


def test_no_answers_give_no_advantages() -> None:
    assert group_advantages([], normalize_std=True).values == ()
