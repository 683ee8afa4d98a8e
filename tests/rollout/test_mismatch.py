"""tidemill.rollout.mismatch"""

import math
from dataclasses import replace

import numpy as np
import pytest

from tidemill.contracts.batch import Batch
from tidemill.rollout.mismatch import APART, compare

TRAINER = np.array([0.0, -1.0, -2.0, -0.5, 0.0, -3.0], np.float32)


def batch_of(engine: list[float]) -> Batch:
    """Two rows of three tokens, of which the first is the prompt."""
    mask = np.array([False, True, True, False, True, True])
    return Batch(
        token_ids=np.arange(6),
        offsets=np.array([0, 3, 6]),
        loss_mask=mask,
        logprobs=np.array(engine, np.float32) * mask,
        advantages=np.zeros(6, np.float32),
        metrics={},
    )


def test_numbers_are_those_of_the_naive_twin() -> None:
    engine = [0.0, -1.0, -2.3, 0.0, -0.05, -2.0]
    pairs = [(-1.0, -1.0), (-2.0, -2.3), (0.0, -0.05), (-3.0, -2.0)]
    found = compare(batch_of(engine), TRAINER)
    apart = [trainer - sampled for trainer, sampled in pairs]
    numbers = found.metrics()
    assert found.tokens == 4
    assert numbers["mismatch/logprob_abs_mean"] == pytest.approx(sum(map(abs, apart)) / 4) == found.mean
    assert numbers["mismatch/logprob_abs_p99"] == numbers["mismatch/logprob_abs_max"] == pytest.approx(1.0)
    assert numbers["mismatch/apart"] == sum(abs(one) > APART for one in apart) / 4 == 0.5
    assert numbers["mismatch/ratio"] == pytest.approx(sum(map(math.exp, apart)) / 4)
    assert numbers["mismatch/kl_k3"] == pytest.approx(sum(math.exp(one) - 1 - one for one in apart) / 4)


def test_the_99th_percentile_leaves_one_token_of_a_hundred_out() -> None:
    count = 1000
    batch = Batch(
        token_ids=np.zeros(count, np.int64),
        offsets=np.array([0, count]),
        loss_mask=np.ones(count, np.bool_),
        logprobs=np.full(count, -1.0, np.float32),
        advantages=np.zeros(count, np.float32),
        metrics={},
    )
    trainer = batch.logprobs - np.linspace(0, 1, count).astype(np.float32)
    numbers = compare(batch, trainer).metrics()
    assert numbers["mismatch/logprob_abs_p99"] == pytest.approx(0.99, abs=2e-3)
    assert numbers["mismatch/logprob_abs_max"] == 1.0


def test_the_worst_tokens_come_first_and_what_is_no_number_before_them() -> None:
    engine = [0.0, -1.0, -2.3, 0.0, float("nan"), -2.0]
    found = compare(batch_of(engine), TRAINER)
    assert found.positions[found.worst(3)].tolist() == [4, 5, 2]
    assert found.positions[found.worst(9)].tolist() == [4, 5, 2, 1]


def test_numbers_that_are_none_reach_no_metric() -> None:
    found = compare(batch_of([0.0, -1.0, -2.0, 0.0, float("nan"), -2.0]), TRAINER)
    assert math.isnan(found.mean)
    assert np.isfinite(list(found.metrics().values())).all()


def test_an_engine_that_is_far_off_gives_finite_numbers() -> None:
    numbers = compare(batch_of([0.0, -1001.0, -1.0, 0.0, -1.0, -1.0]), TRAINER).metrics()
    assert numbers["mismatch/logprob_abs_max"] == 1000.0
    assert numbers["mismatch/kl_k3"] == pytest.approx(math.exp(20) / 4, rel=0.01)


@pytest.mark.parametrize("field", ["logprobs", "loss_mask"])
def test_demonstrations_and_empty_batches_have_nothing_to_compare(field: str) -> None:
    batch = batch_of([0.0, -1.0, -2.0, 0.0, -1.0, -2.0])
    found = compare(replace(batch, **{field: np.zeros_like(vars(batch)[field])}), TRAINER)
    assert (found.tokens, dict(found.metrics()), found.worst(3).tolist()) == (0, {}, [])
    assert math.isnan(found.mean)
