"""Which weights are compared by checksum when a version is handed over: every one, some in turn, or none."""

from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample

__all__ = ["WeightsInTurn", "every_weight", "no_weight"]


def every_weight(version: PolicyVersion) -> Sample:
    """All of them, each time."""
    return EVERY_WEIGHT


def no_weight(version: PolicyVersion) -> Sample:
    """None; that names, shapes and parcels are those that were sent is still looked at."""
    return Sample(of=0)


class WeightsInTurn:
    """Others at each step, every one of them once within `within` hand-overs of consecutive steps."""

    def __init__(self, *, within: int) -> None:
        self._within = within

    def __call__(self, version: PolicyVersion) -> Sample:
        """A function of the step alone."""
        return Sample(part=version.step % self._within, of=self._within)
