"""tidemill.algorithms.losses.clip"""

import math
import pickle
from dataclasses import replace

import pytest
import torch

from tidemill.algorithms.losses.clip import ClipLoss, clip, k3
from tidemill.contracts.algorithm import Loss, LossInputs
from tidemill.testing.suites.algorithm import LossSuite, loss_inputs


class TestClipLoss(LossSuite):
    @pytest.fixture
    def loss(self) -> Loss:
        return ClipLoss(low=0.2, high=0.3)


def naive(inputs: LossInputs, low: float, high: float) -> float:
    total, logprobs = 0.0, inputs.logprobs.detach()
    for row in range(inputs.mask.shape[0]):
        for token in range(inputs.mask.shape[1]):
            if not inputs.mask[row, token]:
                continue
            ratio = math.exp(float(logprobs[row, token]) - float(inputs.old_logprobs[row, token]))
            advantage = float(inputs.advantages[row, token])
            total -= min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return total


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_equals_the_formula_token_by_token(seed: int) -> None:
    inputs = loss_inputs(rows=5, tokens=9, seed=seed)
    output = ClipLoss(low=0.2, high=0.3)(inputs)
    assert float(output.numerator.detach()) == pytest.approx(naive(inputs, 0.2, 0.3), rel=1e-5)
    assert output.count == int(inputs.mask.sum())


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [(1.0, 1.0, True), (1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False), (1.25, 1.0, True)],
)
def test_only_moves_beyond_the_bounds_in_the_wanted_direction_are_clipped(
    ratio: float, advantage: float, learns: bool
) -> None:
    value = torch.tensor([[ratio]], requires_grad=True)
    clip(value, torch.tensor([[advantage]]), low=0.2, high=0.3).sum().backward()
    assert value.grad is not None
    assert bool(value.grad.item()) is learns


def test_clipped_tokens_are_counted() -> None:
    inputs = loss_inputs(rows=1, tokens=3)
    inputs = replace(
        inputs,
        logprobs=torch.tensor([[-1.0, -1.0, -1.0]]),
        old_logprobs=torch.tensor([[-2.0, -1.0, -0.2]]),
        advantages=torch.tensor([[1.0, 1.0, -1.0]]),
        mask=torch.tensor([[True, True, True]]),
    )
    sums = ClipLoss(low=0.2, high=0.2)(inputs).sums
    assert float(sums["policy/clip_fraction"]) == 2.0
    assert float(sums["policy/ratio"]) == pytest.approx(math.exp(1) + 1 + math.exp(-0.8), rel=1e-6)


def test_equal_policies_have_ratio_one_and_divergence_zero() -> None:
    inputs = loss_inputs()
    sums = ClipLoss(low=0.2, high=0.2)(replace(inputs, old_logprobs=inputs.logprobs.detach())).sums
    assert float(sums["policy/ratio"]) == float(inputs.mask.sum())
    assert float(sums["policy/kl"]) == 0.0
    assert float(sums["policy/clip_fraction"]) == 0.0


def test_the_divergence_estimate_averages_to_the_divergence() -> None:
    old, new = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    estimate = (old * k3((new / old).log())).sum()
    exact = (old * (old / new).log()).sum()
    assert float(estimate) == pytest.approx(float(exact), rel=1e-5)
    assert (k3(torch.linspace(-3, 3, 50)) >= 0).all()


def test_losses_cross_process_borders() -> None:
    loss = ClipLoss(low=0.1, high=0.2)
    assert pickle.loads(pickle.dumps(loss)) == loss
