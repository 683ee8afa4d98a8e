from dataclasses import replace

import pytest

from tidemill.contracts.events import RolloutDone
from tidemill.contracts.sample import Group
from tidemill.errors import DataError
from tidemill.rollout.dump import RolloutDump
from tidemill.rollout.replay import ReplayRollout


@pytest.fixture
def steps(tmp_path, trajectory):
    """Ten steps of two groups each, dumped; the groups by step."""
    made = []
    for step in range(10):
        rows = [[trajectory(float(step), row=f"s{step}-{n}", sample=i) for i in range(2)] for n in range(2)]
        made.append([Group(prompt=row[0].prompt, trajectories=tuple(row)) for row in rows])
        RolloutDump(tmp_path).write(step, made[-1])
    return made


def prompts_of(groups):
    return [group.prompt for group in groups]


def test_each_step_is_given_its_groups_again(tmp_path, steps, engine):
    events = []
    replay = ReplayRollout(tmp_path, emit=events.append)
    for groups in steps:
        assert replay.collect(engine(), prompts_of(groups)) == groups
    assert [event for event in events if isinstance(event, RolloutDone)][3].groups == steps[3]


def test_prompts_are_matched_by_key_in_whatever_order_and_batch(tmp_path, steps, engine):
    every = [group for groups in reversed(steps) for group in groups]
    replay = ReplayRollout(tmp_path)
    assert replay.collect(engine(), prompts_of(every)) == every
    assert replay.collect(engine(), prompts_of(every[:3])) == every[:3]


def test_a_resume_in_the_middle_finds_its_step(tmp_path, steps, engine):
    assert ReplayRollout(tmp_path).collect(engine(), prompts_of(steps[7])) == steps[7]


def test_a_prompt_that_was_not_dumped_is_named(tmp_path, steps, engine):
    unknown = replace(steps[0][0].prompt, key="5:new")
    with pytest.raises(DataError, match=r"prompt 5:new: it is not among the 20 prompts dumped"):
        ReplayRollout(tmp_path).collect(engine(), [unknown])


def test_a_prompt_of_other_tokens_is_refused(tmp_path, steps, engine):
    changed = replace(steps[0][0].prompt, token_ids=(9,))
    with pytest.raises(DataError, match="its tokens differ"):
        ReplayRollout(tmp_path).collect(engine(), [changed])


def test_an_empty_folder_is_refused_at_once(tmp_path):
    with pytest.raises(DataError, match="holds no step"):
        ReplayRollout(tmp_path)
