"""The owner of parameters and optimizer."""

from typing import TYPE_CHECKING, Protocol

from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Stateful
from tidemill.contracts.residency import Tenant
from tidemill.contracts.weights import WeightSource

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32

__all__ = ["Trainer"]


class Trainer(Tenant, Stateful, WeightSource, Protocol):
    """Every method here but `snapshot` and `close` needs the lease.

    `snapshot` works while asleep too: it then hands out the host copy that sleep made, without touching the device.
    """

    def begin(self, phase: str) -> None:
        """Start a phase ("warm_up" or "rl"): fresh optimizer state and that phase's learning-rate schedule at 0.

        Does nothing when that phase is already under way, so that a resumed run may call it.
        """
        ...

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """All optimizer steps of one update. A non-finite gradient changes no weight: the step is skipped."""
        ...

    def log_probs(self, batch: Batch) -> "Float32[np.ndarray, ' N']":
        """Log-probability of each token given those before it in its row, nats, float32; 0 for a row's first token."""
        ...

    def close(self) -> None:
        """Give back what it holds, host memory too; it may be called twice, and nothing else may be afterwards.

        Snapshots that are still held stay readable. Needs no lease.
        """
        ...
