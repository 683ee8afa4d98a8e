import pytest

from tidemill.contracts.events import CheckpointEvent
from tidemill.recorders.sentences import checkpoint_line, evaluation_line, number, step_line


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (0.714, "0.714"),
        (0.0123, "0.012"),
        (0.00031, "0.00031"),
        (5e-5, "5e-05"),
        (-1.2345, "-1.23"),
        (999.7, "1k"),
        (1234.0, "1.23k"),
        (3.4e6, "3.4M"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers_are_short(value: float, words: str) -> None:
    assert number(value) == words


def test_a_reward_of_nothing_is_shown_and_so_are_groups_that_teach_nothing() -> None:
    values = {"reward/scored": 1.0, "reward/mean": 0.0, "policy/grad_norm": 0.0, "rollout/groups_without_signal": 8.0}
    assert step_line("step 1/3", values, "") == "step 1/3  reward 0  grad norm 0  groups without signal 8"


def test_a_step_is_a_line_that_a_person_understands() -> None:
    values = {"reward/mean": 0.71, "policy/kl": 0.0003, "batch/tokens": 132, "time/step": 0.11}
    values |= {"reward/scored": 1.0, "rollout/tokens_mean": 9.0, "policy/loss": 1e-9}
    line = step_line("step 120/400", values, "checkpoint 100 durable")
    assert (
        line == "step 120/400  reward 0.71  answer tokens 9  kl 0.0003  tokens 1.2k/s  0.11 s  checkpoint 100 durable"
    )
    assert step_line("step 1/2", {}, "") == "step 1/2"


def test_an_evaluation_says_what_it_was_before() -> None:
    line = evaluation_line(150, {"eval/exact_match": 0.84}, {"eval/exact_match": 0.61})
    assert line == "eval at step 150: exact match 0.84 (was 0.61)"
    side = {"eval/failed": 0.0, "eval/truncated": 0.25, "eval/tokens_mean": 9.0}
    assert (
        evaluation_line(2, {"eval/reward": 0.5, **side}, side)
        == "eval at step 2: reward 0.5, truncated 0.25 (was 0.25)"
    )
    assert evaluation_line(0, {"eval/exact_match": 0.5}, {}) == "eval at step 0: exact match 0.5"


def test_a_checkpoint_says_its_size_or_what_went_wrong() -> None:
    good = CheckpointEvent(time=0.0, status="durable", step=100, path="p", bytes=5 << 20, seconds=0.2)
    bad = CheckpointEvent(time=0.0, status="failed", step=100, path="p", reason="no space left")
    assert checkpoint_line(good) == "checkpoint 100 durable (5.0 MiB in 200 ms)"
    assert checkpoint_line(bad) == "checkpoint 100 failed: no space left"
