"""tidemill.algorithms.grpo"""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tidemill.algorithms.grpo import Grpo
from tidemill.contracts.algorithm import Algorithm
from tidemill.contracts.sample import Group, StopReason
from tidemill.errors import ConfigError, EnvironmentFailure
from tidemill.testing.suites.algorithm import AlgorithmSuite, make_group

DATA = Path(__file__).parents[1] / "data"
NOT_CANONICAL = json.loads((DATA / "tokens_not_canonical.json").read_text())["rows"]


def make_grpo(*, normalize_std: bool = True, temperature: float = 1.0) -> Grpo:
    return Grpo(clip_low=0.2, clip_high=0.28, normalize_std=normalize_std, temperature=temperature)


class TestGrpo(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self) -> Algorithm:
        return make_grpo()


def first_advantages(groups: list[Group], grpo: Grpo) -> list[float]:
    """The advantage of each row's first answer token."""
    batch = grpo.batch(groups)
    return [float(batch.advantages[start + 2]) for start in batch.offsets[:-1]]


def test_every_token_of_an_answer_has_the_advantage_of_its_group() -> None:
    batch = make_grpo().batch([make_group(0.0, 0.0, 1.0, 1.0)])
    for row, expected in enumerate([-0.866024, -0.866024, 0.866024, 0.866024]):
        answer = batch.advantages[batch.offsets[row] + 2 : batch.offsets[row + 1]]
        assert answer == pytest.approx([expected] * len(answer), abs=2e-6)


def test_groups_do_not_see_each_other() -> None:
    one, other = make_group(0.0, 1.0), make_group(100.0, 300.0, 100.0, prompt="b")
    together = first_advantages([one, other], make_grpo(normalize_std=False))
    assert together == first_advantages([one], make_grpo(normalize_std=False)) + first_advantages(
        [other], make_grpo(normalize_std=False)
    )


def test_groups_without_signal_and_rows_left_out_are_counted() -> None:
    groups = [
        make_group(0.0, 1.0),
        make_group(1.0, 1.0, prompt="b"),
        make_group(None, None, prompt="c"),
        make_group(1.0, None, prompt="d"),
    ]
    metrics = make_grpo().batch(groups).metrics
    assert metrics["rollout/groups_without_signal"] == 3.0
    assert metrics["rollout/rows_left_out"] == 3.0
    assert metrics["advantage/max"] == -metrics["advantage/min"] == pytest.approx(0.707106, abs=2e-6)
    assert metrics["advantage/abs_mean"] == pytest.approx(2 * 0.707106 / 5, abs=2e-6)


def test_a_group_that_teaches_nothing_keeps_its_tokens_at_advantage_zero() -> None:
    batch = make_grpo().batch([make_group(1.0, 1.0)])
    assert batch.loss_mask.sum() == 3
    assert not batch.advantages.any()


@pytest.mark.parametrize("reason", [StopReason.FAILED, StopReason.ABORTED])
def test_a_failed_or_aborted_answer_is_left_out_even_with_a_reward(reason: StopReason) -> None:
    group = make_group(1.0, 0.0, 1.0)
    failed = replace(group.trajectories[1], stop_reason=reason)
    group = replace(group, trajectories=(group.trajectories[0], failed, group.trajectories[2]))
    batch = make_grpo().batch([group])
    assert not batch.loss_mask[batch.offsets[1] : batch.offsets[2]].any()
    assert not batch.advantages.any()
    assert batch.metrics["rollout/rows_left_out"] == 1.0


def test_an_answer_whose_log_probs_are_not_numbers_is_left_out() -> None:
    group = make_group(1.0, 0.0)
    broken = replace(group.trajectories[1], logprobs=(float("nan"), -1.0))
    batch = make_grpo().batch([replace(group, trajectories=(group.trajectories[0], broken))])
    assert batch.metrics["rollout/rows_left_out"] == 1.0
    assert np.isfinite(batch.logprobs).all()


def test_text_that_the_environment_inserted_is_not_trained_on() -> None:
    group = make_group(1.0, 0.0, 0.5)
    spoken = replace(group.trajectories[2], loss_mask=(True, False, True), logprobs=(-1.0, 0.0, -1.0))
    batch = make_grpo().batch([replace(group, trajectories=(*group.trajectories[:2], spoken))])
    assert batch.loss_mask[batch.offsets[2] :].tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("case", NOT_CANONICAL, ids=lambda case: case["name"])
def test_ids_that_no_tokenizer_would_produce_are_trained_on_as_sampled(case: dict) -> None:
    ids = tuple(case["sampled_ids"])
    group = make_group(1.0, 0.0)
    odd = replace(group.trajectories[0], token_ids=ids, logprobs=(-1.0,) * len(ids), loss_mask=(True,) * len(ids))
    batch = make_grpo().batch([replace(group, trajectories=(odd, group.trajectories[1]))])
    assert batch.token_ids[: batch.offsets[1]].tolist() == [5, 6, *ids]
    assert batch.loss_mask[2 : batch.offsets[1]].all()


def test_the_temperature_goes_with_the_batch() -> None:
    assert make_grpo(temperature=0.7).batch([make_group(0.0, 1.0)]).temperature == 0.7


def test_greedy_answers_are_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature is 0"):
        make_grpo(temperature=0.0)


@pytest.mark.parametrize("field", ["routed_experts", "multimodal"])
def test_inputs_that_would_be_dropped_on_the_way_to_the_trainer_are_refused(field: str) -> None:
    group = make_group(1.0, 0.0)
    odd = replace(group.trajectories[0], **{field: [1]})
    with pytest.raises(EnvironmentFailure, match="0:a#0"):
        make_grpo().batch([replace(group, trajectories=(odd, group.trajectories[1]))])


def test_bundle_and_loss_cross_process_borders() -> None:
    grpo = make_grpo()
    assert pickle.loads(pickle.dumps(grpo)) == grpo
    assert pickle.loads(pickle.dumps(grpo.loss)) == grpo.loss
    assert (grpo.loss.low, grpo.loss.high) == (0.2, 0.28)
