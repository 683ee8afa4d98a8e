"""PPO's clipped objective.

Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025, arXiv:2503.14476, section 3.1; the
estimate of the divergence: Schulman 2020, "Approximating KL divergence", k3.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tidemill.algorithms.reduce import masked_sum, token_mean
from tidemill.contracts.algorithm import LossInputs, LossOutput

__all__ = ["LOG_RATIO_LIMIT", "ClipLoss", "clip", "k3", "log_ratio"]

LOG_RATIO_LIMIT = 20.0


def log_ratio(new: Float[Tensor, "B T"], old: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """`new - old` in nats, 0 where `mask` is False, held within +-20 so that its exponential and gradient are finite.

    A token beyond the limit gets no gradient. Selection, not multiplication: NaN times 0 is NaN.
    """
    difference = torch.where(mask, new, 0.0) - torch.where(mask, old, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k3(logarithm: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Estimate of KL(old || new) in nats from tokens of old: r - 1 - log r, never negative. Takes log r."""
    return torch.expm1(logarithm) - logarithm


def clip(
    ratio: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], *, low: float, high: float
) -> Float[Tensor, "B T"]:
    """Loss of each token: the worse of the plain and the clipped objective, negated. The caller masks and reduces."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)


@dataclass(frozen=True, kw_only=True)
class ClipLoss:
    """Mean over tokens of the clipped objective, with ratios taken to the log-probs before the step's first update."""

    low: float
    high: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Sums: fraction of tokens clipped, ratio, k3 estimate of KL(old || new)."""
        mask = inputs.mask
        logarithm = log_ratio(inputs.logprobs, inputs.old_logprobs, mask)
        advantages = torch.where(mask, inputs.advantages, 0.0)
        ratio = logarithm.exp()
        numerator, count = token_mean(clip(ratio, advantages, low=self.low, high=self.high), mask)
        with torch.no_grad():
            above = (ratio > 1.0 + self.high) & (advantages > 0)
            below = (ratio < 1.0 - self.low) & (advantages < 0)
            sums = {
                "policy/clip_fraction": masked_sum((above | below).float(), mask),
                "policy/ratio": masked_sum(ratio.detach(), mask),
                "policy/kl": masked_sum(k3(logarithm.detach()), mask),
            }
        return LossOutput(numerator=numerator, count=count, sums=sums)
