"""From values a token to one number: the only place that averages.

A mean is a numerator and a count. Both are summed over micro-batches, and divided once: so the result depends on
neither the size nor the number of micro-batches.
"""

from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["divide", "masked_sum", "token_mean"]

Number = TypeVar("Number", float, Tensor)


def masked_sum(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Sum where `mask` is True. By selection: NaN and infinity elsewhere reach neither the sum nor its gradient."""
    return torch.where(mask, values, 0.0).sum()


def token_mean(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> tuple[Float[Tensor, ""], float]:
    """Numerator and count of the mean over all tokens where `mask` is True; 0 and 0 when there is none."""
    return masked_sum(values, mask), float(mask.sum().item())


def divide(numerator: Number, count: float) -> Number:
    """The mean; the numerator itself, which is then 0, when nothing was counted."""
    return numerator / max(count, 1.0)
