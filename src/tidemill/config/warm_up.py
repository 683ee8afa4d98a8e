"""The supervised phase before the first rollout."""

from typing import Annotated

from pydantic import Field

from tidemill.config.base import Settings
from tidemill.config.kinds import Count, Label, OptionalPath
from tidemill.config.optimizer import ScheduleSettings, WarmUpOptimizerSettings

__all__ = ["WarmUpSettings"]


class WarmUpSettings(Settings):
    """Supervised steps. They count in `steps`; the reinforcement phase starts with a fresh optimizer."""

    steps: Annotated[int, Field(ge=0), Label("steps, 0 for none")] = 0
    """Supervised steps at the start of the run, out of `steps`; 0 for none."""
    data: OptionalPath = None
    """JSONL file of demonstrations; needed when `warm_up.steps` is above 0."""
    batch: Count = 64
    """Demonstrations in one step."""
    optimizer: WarmUpOptimizerSettings = WarmUpOptimizerSettings()
    """The optimizer of the supervised phase."""
    schedule: ScheduleSettings = ScheduleSettings()
    """The learning rate over the steps of the supervised phase."""
