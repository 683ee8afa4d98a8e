import pytest

from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import Notice, PhaseDone, Progress, RolloutDone
from tidemill.contracts.sample import ScoreStatus
from tidemill.environments.single_turn import SingleTurn
from tidemill.errors import EnvironmentFailure, RewardError
from tidemill.rollout.collect import RolloutCollector

SAMPLING = Sampling(max_new_tokens=8)


def collector(reward, events, samples=8, kind="train"):
    return RolloutCollector(
        environment=SingleTurn(), reward=reward, sampling=SAMPLING, samples=samples, emit=events.append, kind=kind
    )


def test_prompts_become_scored_groups_in_order(engine, reward, prompts):
    events = []
    made = engine()
    groups = collector(reward, events, samples=2).collect(made, prompts)
    assert [group.prompt for group in groups] == prompts
    assert [[one.id for one in group.trajectories] for group in groups] == [
        [f"0:q{n}#0", f"0:q{n}#1"] for n in range(3)
    ]
    assert all(one.reward == float(len(one.text)) for group in groups for one in group.trajectories)
    assert made.samplings == [SAMPLING]


def test_what_happens_is_told_in_order(engine, reward, prompts):
    events = []
    groups = collector(reward, events, samples=2, kind="eval").collect(engine(), prompts)
    assert events[0] == Progress(what="evaluation", done=0, total=6)
    assert events[1] == Progress(what="evaluation", done=6, total=6)
    assert [(event.name, event.owner) for event in events[2:4]] == [("generate", "scripted"), ("reward", "")]
    assert all(isinstance(event, PhaseDone) for event in events[2:4])
    assert events[4:] == [RolloutDone(kind="eval", groups=groups)]


@pytest.mark.parametrize("failures", [1, 7])
def test_a_group_goes_on_without_the_answers_that_failed(failures, engine, reward, prompts):
    events = []
    failing = {f"0:q1#{sample}" for sample in range(failures)}
    groups = collector(reward, events).collect(engine(failing), prompts)
    statuses = [one.score.status for one in groups[1].trajectories]
    assert statuses == [ScoreStatus.FAILED] * failures + [ScoreStatus.SCORED] * (8 - failures)
    assert failing.isdisjoint(reward.given)
    assert "0:q1#0 could not be generated: failed" in groups[1].trajectories[0].score.reason
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices == [f"{failures} of 24 answers failed"]


def test_a_step_in_which_every_answer_failed_stops_the_run(engine, reward, prompts):
    failing = {f"{prompt.key}#{sample}" for prompt in prompts for sample in range(8)}
    with pytest.raises(
        EnvironmentFailure,
        match=r"all 24 answers .*\(24 failed\): the first is 0:q0#0, with the text '0:q0#0'; see that what environment",
    ):
        collector(reward, []).collect(engine(failing), prompts)


def test_an_error_of_the_reward_reaches_the_loop_and_its_time_is_told(engine, reward, prompts):
    class Broken:
        def score(self, trajectories):
            raise RewardError("no")

        def close(self):
            pass

    events = []
    with pytest.raises(RewardError):
        collector(Broken(), events).collect(engine(), prompts)
    assert [event.name for event in events if isinstance(event, PhaseDone)] == ["generate", "reward"]


def test_scores_that_do_not_match_are_refused(engine, prompts):
    class Short:
        def score(self, trajectories):
            return []

        def close(self):
            pass

    with pytest.raises(RewardError, match="gave 0 for 24 answers"):
        collector(Short(), []).collect(engine(), prompts)
