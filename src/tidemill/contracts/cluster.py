"""Where workers live."""

from typing import Protocol

from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import Emit
from tidemill.contracts.residency import Residency
from tidemill.contracts.trainer import Trainer
from tidemill.contracts.weights import Samples, WeightSync
from tidemill.contracts.workers import BuildEngine, BuildTrainer

__all__ = ["Cluster"]


class Cluster(Protocol):
    """Places workers; what comes back is used as if it were the worker itself."""

    def trainer(self, build: BuildTrainer, *, ranks: int) -> Trainer:
        """A trainer of `ranks` ranks, each built where it shall live. Raises ClusterError when there is no room."""
        ...

    def engine(self, build: BuildEngine, *, replicas: int) -> RolloutEngine:
        """An engine of `replicas` replicas that hold the same weights. Call it before `trainer`, which comes awake."""
        ...

    def weight_sync(self, residency: Residency, emit: Emit, *, samples: Samples) -> WeightSync:
        """What hands weights from a trainer of this cluster to an engine of it, and compares those of `samples`."""
        ...

    def park_groups(self, parks: bool) -> None:
        """Whether the trainer gives its process groups back in sleep; it does until it is told otherwise."""
        ...

    @property
    def device(self) -> str:
        """`cpu` or `cuda`: what workers compute on."""
        ...

    @property
    def shares_devices(self) -> bool:
        """Whether trainer and engine use the same devices, and so must fit into one budget."""
        ...

    def free_bytes(self) -> int:
        """Bytes free on the fullest device that a worker placed so far uses: the least over all workers."""
        ...

    def close(self) -> None:
        """End what the cluster started. May be called twice."""
        ...
