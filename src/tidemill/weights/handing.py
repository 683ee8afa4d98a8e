"""What every hand-over of weights does around itself: the engine's lease, the time it took, and one kind of failure."""

import contextlib
from collections.abc import Iterator

from tidemill.contracts.events import Emit, phase
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Residency
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import WeightReceiver
from tidemill.errors import WeightSyncError

__all__ = ["handing_over"]


@contextlib.contextmanager
def handing_over(engine: WeightReceiver, version: PolicyVersion, *, residency: Residency, emit: Emit) -> Iterator[None]:
    """Within, the engine's weights are awake. Raises WeightSyncError, with its cause, for whatever is raised there."""
    try:
        with residency.awake(engine, Part.WEIGHTS), phase(emit, "update_weights", engine.name):
            yield
    except WeightSyncError:
        raise
    except Exception as cause:
        raise WeightSyncError(
            f"cannot bring {engine.name} to version {version}: {type(cause).__name__}: {cause}; it refuses to "
            "generate until a whole sync succeeds"
        ) from cause
