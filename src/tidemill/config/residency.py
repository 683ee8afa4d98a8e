"""Who may hold the device's memory, and how much of it."""

from typing import Literal

from tidemill.config.base import Settings
from tidemill.config.kinds import Budget, Offload, Seconds, Size, Spare
from tidemill.units import MIB

__all__ = ["ResidencySettings"]


class ResidencySettings(Settings):
    """The byte budget that decides who sleeps. Trainer and engine stay awake together when both fit."""

    offload: Offload = "auto"
    """`auto` lets the budget decide, `always` shrinks it so that only what is in use is awake, `never` lifts it."""
    budget: Budget = "auto"
    """Bytes of one device that trainer and engine may hold together; `auto` is nine tenths of what it has free."""
    page: Size = 64 * MIB
    """Bytes of one page of the host memory that holds what sleeps; rounded up to 512."""
    spare: Spare = "auto"
    """Bytes of each rank's spare pages, for what changes while a save still reads it; `auto` is a tenth of what sleeps,
    two pages at least. With less than one page, or 0, there are none: a sleep waits for each page that a save reads."""
    park_groups: Literal["auto", "always", "never"] = "auto"
    """Whether process groups go in sleep, too; `auto`: on GPUs where the engine has no room beside them."""
    leaks: Literal["fail", "warn"] = "fail"
    """What happens at a sleep when tensors that nobody owns have grown by 64 MiB since the first two, and once more by
    as much; the first growth is always a warning."""
    deadline: Seconds = 300.0
    """Longest wait for a tenant to sleep or wake, for another thread to let go of it, and for a save that reads what
    sleep must write and makes no progress, before the run fails."""
