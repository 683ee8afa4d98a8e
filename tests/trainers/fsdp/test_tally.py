"""tidemill.trainers.fsdp.tally"""

import pytest
import torch

from tidemill.contracts.algorithm import LossOutput
from tidemill.trainers.fsdp.tally import Tally


def test_means_are_over_all_tokens_and_not_over_micro_batches() -> None:
    tally = Tally()
    for value, tokens in ((1.0, 1), (5.0, 3)):
        sums = {"policy/ratio": torch.tensor(value * tokens)}
        output = LossOutput(numerator=torch.tensor(value * tokens), count=tokens, sums=sums)
        tally.add_loss(output, torch.full((tokens,), -value))
    assert tally.metrics() == {"policy/ratio": 4.0, "policy/nll": 4.0, "policy/loss": 4.0}


def test_nothing_trained_on_gives_no_numbers() -> None:
    assert Tally().metrics() == {}


def test_an_engine_that_is_far_off_gives_finite_numbers() -> None:
    tally = Tally()
    tally.add_loss(LossOutput(numerator=torch.tensor(0.0), count=2.0, sums={}), torch.tensor([-1.0, -1.0]))
    tally.add_mismatch(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1001.0]))
    metrics = tally.metrics()
    assert metrics["mismatch/logprob_abs_max"] == 1000.0
    assert metrics["mismatch/logprob_abs_mean"] == 500.0
    assert metrics["mismatch/kl_k3"] == pytest.approx(4.85e8 / 2, rel=0.01)
