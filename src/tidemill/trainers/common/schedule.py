"""Learning rates as a pure function of settings and update number: nothing to save, nothing to forget on resume."""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["PhaseSettings", "ScheduleKind", "learning_rate"]

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class PhaseSettings:
    """Optimizer and schedule of one phase ("warm_up", "rl"). `total_steps` and `warm_up_steps` count updates of it."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    schedule: ScheduleKind
    warm_up_steps: int
    min_ratio: float
    total_steps: int


def learning_rate(settings: PhaseSettings, update: int) -> float:
    """Rate of update number `update`, counted from 0 within the phase.

    It rises in `warm_up_steps` equal steps to `lr`, first lr / warm_up_steps, then falls towards min_ratio * lr, which
    it has at `total_steps` and after. A run resumed with another total follows the new curve from its next update on.
    """
    if update < settings.warm_up_steps:
        return settings.lr * (update + 1) / settings.warm_up_steps
    length = max(settings.total_steps - settings.warm_up_steps, 1)
    progress = min((update - settings.warm_up_steps) / length, 1.0)
    match settings.schedule:
        case "constant":
            remaining = 1.0
        case "linear":
            remaining = 1.0 - progress
        case "cosine":
            remaining = (1.0 + math.cos(math.pi * progress)) / 2.0
    return settings.lr * (settings.min_ratio + (1.0 - settings.min_ratio) * remaining)
