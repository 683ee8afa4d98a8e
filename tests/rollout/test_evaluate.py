import pytest

from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import Evaluated, Notice, PhaseDone, RolloutDone
from tidemill.contracts.sample import Score, ScoreStatus
from tidemill.contracts.state import Cursor, RunState
from tidemill.environments.single_turn import SingleTurn
from tidemill.rollout.evaluate import Evaluator, NoEvaluation


def state(step):
    return RunState(step=step, attempt=0, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())


def evaluator(reward, prompts, events, **changes):
    values = {
        "prompts": prompts,
        "environment": SingleTurn(),
        "reward": reward,
        "sampling": Sampling(max_new_tokens=4, temperature=0.0),
        "samples": 1,
        "every": 2,
        "before_training": False,
        "emit": events.append,
    }
    return Evaluator(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({"every": 2}, [2, 4, 6]),
        ({"every": 2, "before_training": True}, [0, 2, 4, 6]),
        ({"every": 0}, []),
        ({"every": 0, "before_training": True}, [0]),
        ({"every": 3, "before_training": True, "first_step": 4}, [4, 6]),
        ({"every": 2, "first_step": 4}, [6]),
    ],
)
def test_it_is_due_as_the_schedule_says(changes, due, engine, reward, prompts):
    found = []
    for step in range(changes.get("first_step", 0), 7):
        events = []
        evaluator(reward, prompts, events, **changes).if_due(engine(), state(step))
        found += [step] if events else []
    assert found == due


def test_the_result_is_the_mean_reward_under_its_name(engine, reward, prompts):
    events = []
    evaluator(reward, prompts, events, metric="eval/exact_match").final(engine(), state(5))
    (result,) = [event for event in events if isinstance(event, Evaluated)]
    assert result.values["eval/exact_match"] == 6.0
    assert result.values["eval/failed"] == 0.0
    assert result.values["eval/tokens_mean"] == 3.0


def test_its_answers_are_told_and_its_time_is_one_phase(engine, reward, prompts):
    events = []
    evaluator(reward, prompts, events, samples=2).final(engine(), state(5))
    assert [event.name for event in events if isinstance(event, PhaseDone)] == ["evaluate"]
    (rollout,) = [event for event in events if isinstance(event, RolloutDone)]
    assert rollout.kind == "eval"
    assert [len(group.trajectories) for group in rollout.groups] == [2, 2, 2]


def test_an_evaluation_without_any_reward_has_no_result_and_says_so(engine, prompts):
    class Silent:
        def score(self, trajectories):
            return [Score(value=None, status=ScoreStatus.ABSTAINED) for _ in trajectories]

        def close(self):
            pass

    events = []
    evaluator(Silent(), prompts, events).final(engine(), state(5))
    (result,) = [event for event in events if isinstance(event, Evaluated)]
    assert "eval/reward" not in result.values
    assert any("no answer" in event.text for event in events if isinstance(event, Notice))


def test_nothing_is_evaluated_where_nothing_is_asked_for(engine):
    made = engine()
    NoEvaluation().if_due(made, state(0))
    NoEvaluation().final(made, state(5))
    assert made.samplings == []
