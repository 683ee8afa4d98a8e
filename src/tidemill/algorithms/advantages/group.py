"""Advantages of GRPO: each answer against the other answers to the same prompt. Computed in float64.

Source: Shao et al. 2024, arXiv:2402.03300, section 4.1; mean only: Liu et al. 2025, arXiv:2503.20783, section 3.2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EPSILON", "GroupAdvantages", "group_advantages"]

EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """`values` in the order of the rewards, None where there was no reward. `signal` is False when all are 0."""

    values: tuple[float | None, ...]
    signal: bool


def group_advantages(rewards: Sequence[float | None], *, normalize_std: bool) -> GroupAdvantages:
    """(reward - mean), divided by (sample standard deviation + 1e-6) if `normalize_std`.

    None (abstained or failed) is left out of mean and deviation and gets no advantage. Equal rewards, and fewer than
    two of them, give exactly 0.
    """
    valid = [float(reward) for reward in rewards if reward is not None]
    if len(valid) < 2 or all(reward == valid[0] for reward in valid):
        return GroupAdvantages(values=tuple(None if reward is None else 0.0 for reward in rewards), signal=False)
    found = iter(_advantages(valid, normalize_std))
    return GroupAdvantages(values=tuple(None if reward is None else next(found) for reward in rewards), signal=True)


def _advantages(rewards: Sequence[float], normalize_std: bool) -> list[float]:
    # Scaled by the largest reward first: squares of 1e200 are not finite.
    scale = max(map(abs, rewards))
    scaled = [reward / scale for reward in rewards]
    mean = math.fsum(scaled) / len(scaled)
    centred = [reward - mean for reward in scaled]
    if not normalize_std:
        return [value * scale for value in centred]
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (len(centred) - 1))
    return [value / (deviation + EPSILON / scale) for value in centred]
