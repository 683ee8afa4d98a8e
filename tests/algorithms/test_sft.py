"""tidemill.algorithms.sft"""

import pytest

from tidemill.algorithms.sft import Sft
from tidemill.contracts.algorithm import Loss
from tidemill.testing.suites.algorithm import LossSuite


class TestSftLoss(LossSuite):
    @pytest.fixture
    def loss(self) -> Loss:
        return Sft().loss


def test_completions_are_learned_and_prompts_are_not() -> None:
    batch = Sft().batch([([5, 6], [7, 8]), ([9], [10])])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.offsets.tolist() == [0, 4, 6]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True]
    assert batch.temperature == 1.0


def test_nothing_was_sampled_so_there_are_no_log_probs_to_compare_with() -> None:
    batch = Sft().batch([([5], [6, 7])])
    assert not batch.logprobs.any()
    assert not batch.advantages.any()


def test_no_pairs_make_an_empty_batch() -> None:
    assert Sft().batch([]).rows == 0
