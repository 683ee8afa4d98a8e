import math
import statistics

import pytest

from tidemill.algorithms.grpo import Grpo
from tidemill.contracts.sample import Group, StopReason
from tidemill.rollout.metrics import rollout_metrics


def group(*members):
    return Group(prompt=members[0].prompt, trajectories=members)


def test_means_are_over_the_answers_that_have_a_reward(trajectory):
    metrics = rollout_metrics([group(trajectory(1.0), trajectory(0.0), trajectory(None), trajectory("failed"))])
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == 0.5
    assert (metrics["reward/scored"], metrics["reward/abstained"], metrics["reward/failed"]) == (0.5, 0.25, 0.25)


def test_no_reward_at_all_is_not_shown_as_zero(trajectory):
    metrics = rollout_metrics([group(trajectory(None), trajectory("failed"))])
    assert "reward/mean" not in metrics


def test_lengths_and_ends_are_of_all_answers(trajectory):
    cut = trajectory(1.0, stop_reason=StopReason.LENGTH, token_ids=(1,) * 6, logprobs=(0.0,) * 6, loss_mask=(True,) * 6)
    metrics = rollout_metrics([group(trajectory(1.0), cut)])
    assert (metrics["rollout/tokens"], metrics["rollout/tokens_mean"], metrics["rollout/tokens_max"]) == (8, 4, 6)
    assert (metrics["rollout/truncated"], metrics["rollout/finished"]) == (0.5, 0.5)


def test_what_teaches_something_is_left_to_the_algorithm(trajectory):
    """Which would otherwise be told twice under one name, by two rules."""
    found = rollout_metrics([group(trajectory(1.0), trajectory(0.0))])
    ours = Grpo(clip_low=0.2, clip_high=0.2, normalize_std=True, temperature=1.0)
    assert not found.keys() & ours.batch([group(trajectory(1.0), trajectory(0.0, sample=1))]).metrics.keys()


def test_parts_are_averaged_under_their_names_and_hide_none_of_ours(trajectory):
    members = [trajectory(1.0, parts={"format": 1.0, "mean": 9.0}), trajectory(0.0, parts={"format": 0.0})]
    metrics = rollout_metrics([group(*members)])
    assert metrics["reward/format"] == 0.5
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/mean_part"] == 9.0


def test_it_equals_the_naive_formulas(trajectory):
    values = [0.1, 0.7, -3.5, 2.25, 0.1]
    metrics = rollout_metrics([group(*map(trajectory, values))])
    assert metrics["reward/mean"] == pytest.approx(statistics.fmean(values))
    assert metrics["reward/std"] == pytest.approx(statistics.pstdev(values))


@pytest.mark.parametrize(
    "values", [[], [1e30, -1e30, 0.0, 0.0], [1.7e308, 1.7e308, -1.7e308], [5e-324, 0.0], ["failed"], [None]]
)
def test_every_number_is_finite_whatever_comes(values, trajectory):
    metrics = rollout_metrics([group(*map(trajectory, values))] if values else [])
    assert all(math.isfinite(value) for value in metrics.values())
