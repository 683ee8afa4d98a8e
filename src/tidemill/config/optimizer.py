"""How weights move: the optimizer and the learning rate over the steps of a phase."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tidemill.config.base import Settings
from tidemill.config.kinds import Fraction, Label, NonNegative, Positive, as_tuple

__all__ = ["OptimizerSettings", "ScheduleSettings", "WarmUpOptimizerSettings"]

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """AdamW, with master weights and moments in float32."""

    lr: NonNegative = 1e-6
    """Learning rate after the schedule's warm-up. 0 changes no weight."""
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(as_tuple), Label("two numbers from 0 to below 1")] = (0.9, 0.95)
    """Decay of the first and of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""


class WarmUpOptimizerSettings(OptimizerSettings):
    """The optimizer of the supervised phase."""

    lr: NonNegative = 1e-5
    """Learning rate of the supervised phase after the schedule's warm-up. 0 changes no weight."""


class ScheduleSettings(Settings):
    """The learning rate's factor at each step of a phase."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the rise: no change, or a fall to `min_ratio` at the phase's last step, straight or as a cosine."""
    warm_up_steps: Annotated[int, Field(ge=0), Label("steps")] = 0
    """Steps over which the rate rises from near 0 to `lr`; 0 starts at `lr`."""
    min_ratio: Fraction = 0.0
    """Where a linear or cosine schedule ends, as a part of `lr`."""
