"""Looking at the policy between updates."""

from typing import Annotated

from pydantic import Field

from tidemill.config.base import Settings
from tidemill.config.kinds import Count, Interval, Label, NonNegative, OptionalPath

__all__ = ["EvalSettings"]


class EvalSettings(Settings):
    """Evaluation on held-out prompts. With `eval.data` set, the end of the run is evaluated too."""

    every: Interval = 0
    """Evaluate every so many steps; 0 evaluates only at the end."""
    before_training: bool = False
    """Evaluate before the first update, so that there is something to compare with."""
    data: OptionalPath = None
    """JSONL file of held-out prompts; without it nothing is evaluated."""
    temperature: NonNegative = 0.0
    """Temperature of the answers; 0 is greedy."""
    samples: Count = 1
    """Answers to each prompt."""
    limit: Annotated[int, Field(ge=0), Label("prompts, 0 for all")] = 0
    """Evaluate on the first so many prompts; 0 takes all."""
