import pytest

from tidemill.errors import RewardError
from tidemill.rewards.exact import ExactMatch
from tidemill.testing.suites.reward import RewardSuite


class TestExactMatch(RewardSuite):
    @pytest.fixture
    def reward(self):
        return ExactMatch()

    @pytest.fixture
    def trajectories(self, answers):
        return answers("4", "5", " 4\n", label="4")


def values(scores):
    return [score.value for score in scores]


def test_only_the_label_itself_is_right(answers):
    assert values(ExactMatch().score(answers("4", " 4\n", "four", "", label="4"))) == [1.0, 1.0, 0.0, 0.0]


def test_white_space_counts_where_it_is_asked_for(answers):
    assert values(ExactMatch(strip=False).score(answers("4", " 4", label="4"))) == [1.0, 0.0]


def test_any_entry_of_a_list_of_labels_is_right(answers):
    assert values(ExactMatch().score(answers("4", "four", "5", label=[4, "four"]))) == [1.0, 1.0, 0.0]


def test_a_row_without_label_is_refused_by_name(answers):
    with pytest.raises(RewardError, match=r"cannot score 0:q0#0: row 'q0' has no label"):
        ExactMatch().score(answers("4"))
