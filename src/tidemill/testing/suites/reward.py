"""What every reward must do. Subclass `RewardSuite` and give it a reward and trajectories that it can score."""

import math
from collections.abc import Sequence

import pytest

from tidemill.contracts.environment import Reward
from tidemill.contracts.sample import ScoreStatus, Trajectory

__all__ = ["RewardSuite"]


class RewardSuite:
    """Override the fixtures `reward`, which the suite closes, and `trajectories`, at least two."""

    @pytest.fixture
    def reward(self) -> Reward:
        """The reward to try."""
        raise NotImplementedError("override the fixture `reward`")

    @pytest.fixture
    def trajectories(self) -> Sequence[Trajectory]:
        """At least two that it can score."""
        raise NotImplementedError("override the fixture `trajectories`")

    def test_each_trajectory_has_one_score_in_order(self, reward: Reward, trajectories: Sequence[Trajectory]) -> None:
        scores = reward.score(trajectories)
        backwards = reward.score(list(reversed(trajectories)))
        assert len(scores) == len(trajectories)
        assert [score.value for score in reversed(backwards)] == [score.value for score in scores]
        reward.close()

    def test_a_value_is_finite_if_and_only_if_it_is_scored(
        self, reward: Reward, trajectories: Sequence[Trajectory]
    ) -> None:
        for score in reward.score(trajectories):
            scored = score.status is ScoreStatus.SCORED
            assert scored == (score.value is not None and math.isfinite(score.value))
            assert score.reason or score.status is not ScoreStatus.FAILED
        reward.close()

    def test_nothing_to_score_gives_no_scores(self, reward: Reward) -> None:
        assert reward.score([]) == []
        reward.close()

    def test_closing_twice_does_no_harm(self, reward: Reward) -> None:
        reward.close()
        reward.close()
