"""Waiting for calls under way, whatever carries them."""

import time
from collections.abc import Sequence

from tidemill.contracts.workers import Pending

__all__ = ["wait_for_one"]

# Seconds between two looks: short at first, for calls that take no longer, and never so long that it shows.
_FIRST, _LONGEST = 1e-4, 5e-3


def wait_for_one(pending: Sequence[Pending], seconds: float) -> None:
    """Return when one is done, or after `seconds`."""
    ends = time.monotonic() + seconds
    pause = _FIRST
    while not any(one.done() for one in pending) and time.monotonic() < ends:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
