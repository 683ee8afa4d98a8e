"""tidemill.algorithms.losses.cross_entropy"""

import pickle

import pytest
import torch

from tidemill.algorithms.losses.cross_entropy import CrossEntropyLoss
from tidemill.contracts.algorithm import Loss
from tidemill.testing.suites.algorithm import LossSuite, loss_inputs


class TestCrossEntropyLoss(LossSuite):
    @pytest.fixture
    def loss(self) -> Loss:
        return CrossEntropyLoss()


def test_the_loss_is_the_mean_negative_log_prob_of_masked_tokens() -> None:
    inputs = loss_inputs()
    output = CrossEntropyLoss()(inputs)
    expected = -inputs.logprobs.detach()[inputs.mask].mean()
    torch.testing.assert_close(output.numerator.detach() / output.count, expected)


def test_it_crosses_process_borders() -> None:
    assert pickle.loads(pickle.dumps(CrossEntropyLoss())) == CrossEntropyLoss()
