from dataclasses import replace

import pytest

from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import RolloutDone
from tidemill.contracts.sample import Group
from tidemill.errors import DataError
from tidemill.rollout.dump import RolloutDump
from tidemill.rollout.replay import ReplayRollout

SAMPLING = Sampling(max_new_tokens=4, temperature=0.6)


@pytest.fixture
def steps(tmp_path, trajectory):
    """Ten steps of two groups each, dumped; the groups by step."""
    made = []
    for step in range(10):
        rows = [[trajectory(float(step), row=f"s{step}-{n}", sample=i) for i in range(2)] for n in range(2)]
        made.append([Group(prompt=row[0].prompt, trajectories=tuple(row)) for row in rows])
        RolloutDump(tmp_path, sampling=SAMPLING, otherwise="stop").write(step, made[-1])
    return made


def replay_of(folder, **changes):
    return ReplayRollout(folder, **{"sampling": SAMPLING, "samples": 2, **changes})


def prompts_of(groups):
    return [group.prompt for group in groups]


def test_each_step_is_given_its_groups_again(tmp_path, steps, engine):
    events = []
    replay = replay_of(tmp_path, emit=events.append)
    for groups in steps:
        assert replay.collect(engine(), prompts_of(groups)) == groups
    assert [event for event in events if isinstance(event, RolloutDone)][3].groups == steps[3]


def test_prompts_are_matched_by_key_in_whatever_order_and_batch(tmp_path, steps, engine):
    every = [group for groups in reversed(steps) for group in groups]
    replay = replay_of(tmp_path)
    assert replay.collect(engine(), prompts_of(every)) == every
    assert replay.collect(engine(), prompts_of(every[:3])) == every[:3]


def test_a_resume_in_the_middle_finds_its_step(tmp_path, steps, engine):
    assert replay_of(tmp_path).collect(engine(), prompts_of(steps[7])) == steps[7]


def test_a_prompt_that_was_not_dumped_is_named(tmp_path, steps, engine):
    unknown = replace(steps[0][0].prompt, key="5:new")
    with pytest.raises(DataError, match=r"prompt 5:new: it is not among the 20 prompts dumped"):
        replay_of(tmp_path).collect(engine(), [unknown])


def test_a_prompt_of_other_tokens_is_refused(tmp_path, steps, engine):
    changed = replace(steps[0][0].prompt, token_ids=(9,))
    with pytest.raises(DataError, match="its tokens differ"):
        replay_of(tmp_path).collect(engine(), [changed])


def test_an_empty_folder_is_refused_at_once(tmp_path):
    with pytest.raises(DataError, match="holds no step"):
        replay_of(tmp_path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"temperature": 1.0}, r"temperature = 0.6, and this run has rollout.sampling.temperature = 1.*set it to 0.6"),
        ({"top_p": 0.5}, r"top_p = 1, and this run has rollout.sampling.top_p = 0.5"),
        ({"top_k": 3}, r"top_k = 0, and this run has rollout.sampling.top_k = 3"),
    ],
)
def test_answers_of_another_distribution_are_refused_at_once(changed, words, tmp_path, steps):
    with pytest.raises(DataError, match=words):
        replay_of(tmp_path, sampling=replace(SAMPLING, **changed))


def test_a_later_step_of_another_distribution_is_refused_too(tmp_path, steps, engine):
    other = replace(SAMPLING, temperature=1.0)
    RolloutDump(tmp_path, sampling=other, otherwise="stop").write(5, steps[5])
    replay = replay_of(tmp_path)
    assert replay.collect(engine(), prompts_of(steps[4])) == steps[4]
    with pytest.raises(DataError, match=r"step-00000005.jsonl: its answers were sampled with temperature = 1"):
        replay.collect(engine(), prompts_of(steps[5]))


def test_what_does_not_change_the_distribution_may_differ(tmp_path, steps, engine):
    other = replace(SAMPLING, max_new_tokens=9, stop=("x",), seed=7)
    assert replay_of(tmp_path, sampling=other).collect(engine(), prompts_of(steps[0])) == steps[0]


def test_groups_of_another_size_are_refused_with_the_size_to_set(tmp_path, steps, engine):
    with pytest.raises(DataError, match=r"2 answers .* this run takes 3; set rollout.samples = 2"):
        replay_of(tmp_path, samples=3).collect(engine(), prompts_of(steps[0]))
