"""The owner of parameters and optimizer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Stateful
from tidemill.contracts.residency import Tenant
from tidemill.contracts.weights import WeightSource

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32

__all__ = ["RankTrainer", "Trainer"]


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


class RankTrainer(Trainer, Protocol):
    """One rank of a trainer: `ranks` equal objects that are called together, with the same arguments but for rows.

    A method that computes is a collective: every rank must enter it. `snapshot` and `load` speak of this rank's pieces
    (see `TensorBytes`); `named_weights` gathers whole tensors on every rank. Metrics are those of all ranks.

    `wake_up` and `sleep` move memory only and need no other rank, so that one rank's failure leaves none waiting. The
    driver calls `park` when all ranks sleep, and `revive` when all have memory again.
    """

    @property
    def minibatches(self) -> int:
        """Optimizer steps in one `step`: how many parts the driver deals to `update`."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids: those of a batch must be below it."""
        ...

    def update(self, minibatches: Sequence[Batch], loss: Loss) -> StepReport:
        """As `step`, of rows dealt already: this rank's share of each minibatch, which may be none."""
        ...

    def park(self) -> None:
        """Give back what process groups hold, which every rank does at the same time. Nothing when they are parked."""
        ...

    def revive(self) -> None:
        """Make the process groups again, with all ranks; returns when they can be used. Nothing when they are."""
        ...
