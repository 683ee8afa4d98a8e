import time

import pytest

from tidemill.contracts.sample import ScoreStatus
from tidemill.errors import ConfigError, RewardError
from tidemill.rewards.regex import RegexMatch
from tidemill.testing.suites.reward import RewardSuite


@pytest.fixture
def regex():
    made = []

    def make(pattern, **changes):
        values = {"timeout": 5, "memory": 1 << 28, "workers": 1, "failure_budget": 1.0, "emit": lambda event: None}
        made.append(RegexMatch(pattern=pattern, **{**values, **changes}))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


class TestRegexMatch(RewardSuite):
    @pytest.fixture
    def reward(self, regex):
        return regex(r"(\d+)")

    @pytest.fixture
    def trajectories(self, answers):
        return answers("it is 4", "it is 5", label="4")


def test_what_the_pattern_finds_last_is_compared_with_the_label(regex, answers):
    scores = regex(r"-?\d+").score(answers("first 3, then 4", "4 and 5", "none", label=4))
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]


def test_the_first_group_is_compared_where_there_is_one(regex, answers):
    scores = regex(r"answer: *(\w+)?").score(answers("answer: four .", "four", "answer: ", label=["four"]))
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]


def test_without_a_label_being_found_is_enough(regex, answers):
    scores = regex(r"<b>.*</b>").score(answers("<b>x</b>", "x"))
    assert [score.value for score in scores] == [1.0, 0.0]


def test_a_pattern_that_takes_for_ever_costs_the_answers_it_hangs_on(regex, answers):
    reward = regex(r"(a+)+$", timeout=0.3)
    begun = time.monotonic()
    scores = reward.score(answers("aaa", "a" * 40 + "b", "aa", label="aaa"))
    assert [score.status for score in scores] == [ScoreStatus.SCORED, ScoreStatus.FAILED, ScoreStatus.SCORED]
    assert "reward regex failed for 0:q0#1: it took longer than 0.3 s" in scores[1].reason
    assert time.monotonic() - begun < 6


def test_the_budget_holds_for_patterns_too(regex, answers):
    with pytest.raises(RewardError, match="regex"):
        regex(r"(a+)+$", timeout=0.2, failure_budget=0.0).score(answers("a" * 40 + "b", label="a"))


def test_a_pattern_that_does_not_compile_is_refused(regex):
    with pytest.raises(ConfigError, match="is not a regular expression"):
        regex("(")
