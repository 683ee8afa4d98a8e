"""How a run of the life cycle is set up."""

from dataclasses import dataclass
from pathlib import Path

from tests.residency.life_cycle_tenants import RankedTenant

from tidemill.checkpoint.manager import CheckpointManager
from tidemill.contracts.events import Emit
from tidemill.contracts.residency import Residency

__all__ = ["NEVER", "Settings"]

NEVER = 10**6
"""Of steps and operations: more than any run has."""


@dataclass(frozen=True)
class Settings:
    """Checkpoints that stay, saves behind the run's back or not, and much spare memory or hardly any."""

    keep_last: int
    background: bool
    many_spares: bool

    def manager(
        self, folder: Path, trainer: RankedTenant, residency: Residency, *, attempt: int, emit: Emit
    ) -> CheckpointManager:
        """Of checkpoints in `folder`, of every second step. A failed save does not stop the run."""
        return CheckpointManager(
            folder=folder,
            stateful=(trainer,),
            trainer=trainer,
            residency=residency,
            every=2,
            last_step=NEVER,
            mode="async" if self.background else "sync",
            keep_last=self.keep_last,
            keep_every=0,
            on_failure="continue",
            walk_back=True,
            accept=(),
            identity={},
            settings={},
            attempt=attempt,
            seed=1,
            grace=20.0,
            emit=emit,
        )
