"""A whole cluster of forked processes on this machine's CPU: runs of several ranks, quick to start, through settings.

`cluster.use = "tidemill.testing.spawned_cluster:SpawnedClusterSettings"`. All but the transport is what runs in
earnest; there are no GPUs, and the workers' output goes where the driver's does.
"""

import functools
import random
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import psutil
import torch
from pydantic import Field

from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.engine_service import EngineService
from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.trainer_service import TrainerService
from tidemill.cluster.weight_shipping import ShippedWeightSync
from tidemill.cluster.worker import MakeService
from tidemill.config.cluster import ClusterSettings
from tidemill.config.kinds import Seconds
from tidemill.contracts.events import Emit
from tidemill.contracts.residency import Residency
from tidemill.contracts.weights import Samples
from tidemill.contracts.workers import BuildEngine, BuildTrainer, Place
from tidemill.errors import ClusterError
from tidemill.testing.spawned import SpawnedGroup

__all__ = ["SpawnedCluster", "SpawnedClusterSettings"]


class SpawnedClusterSettings(ClusterSettings):
    """A forked process for each rank and each replica."""

    implementation: ClassVar[str] = "tidemill.testing.spawned_cluster:SpawnedCluster"

    restarts: Annotated[int, Field(ge=0)] = 0
    """How often an engine replica that died is started again."""
    deadline: Seconds = 300.0
    """Longest that a process may take for one call before the run fails."""


class SpawnedCluster:
    """Implements `Cluster`. `seed` and `threads` are every process's; 0 threads leaves PyTorch its own choice."""

    device = "cpu"
    shares_devices = True

    def __init__(
        self,
        *,
        device: str,
        ranks: int,
        replicas: int | str,
        max_batch: int,
        seed: int,
        threads: int,
        transition_deadline: float,
        log_folder: Path,
        emit: Emit,
        deadline: float,
        restarts: int = 0,
    ) -> None:
        """Raises ClusterError for a GPU: forked processes have none."""
        if device == "cuda":
            raise ClusterError("cannot use run.device = cuda: a cluster for tests has no GPUs; use cpu")
        self._max_batch = max_batch
        self._seed, self._threads = seed, threads
        self._deadlines = Deadlines(work=deadline, transition=transition_deadline)
        self._emit, self._restarts = emit, restarts
        self._groups: list[SpawnedGroup] = []

    def trainer(self, build: BuildTrainer, *, ranks: int) -> TrainerProxy:
        """See Cluster."""
        group = self._group("trainer", ranks, functools.partial(TrainerService, build), meet=ranks > 1)
        self._trainer = TrainerProxy(group, deadlines=self._deadlines)
        return self._trainer

    def park_groups(self, parks: bool) -> None:
        """See Cluster."""
        self._trainer.parks = parks

    def engine(self, build: BuildEngine, *, replicas: int) -> EngineProxy:
        """See Cluster."""
        group = self._group("engine", replicas, functools.partial(EngineService, build), meet=False)
        told = {"max_batch": self._max_batch, "restarts": self._restarts}
        return EngineProxy(group, deadlines=self._deadlines, emit=self._emit, **told)

    def _group(self, role: str, size: int, make: MakeService, *, meet: bool) -> SpawnedGroup:
        group = SpawnedGroup(role, size, emit=self._emit)
        self._groups.append(group)
        group.build(functools.partial(_prepared, make, self._seed, self._threads), meet=meet)
        return group

    @property
    def pids(self) -> dict[str, int]:
        """Process numbers by worker, for tests that kill."""
        return {name: pid for group in self._groups for name, pid in zip(group.names, group.pids, strict=True)}

    def weight_sync(self, residency: Residency, emit: Emit, *, samples: Samples) -> ShippedWeightSync:
        """See Cluster."""
        return ShippedWeightSync(residency=residency, emit=emit, samples=samples)

    def free_bytes(self) -> int:
        """Of the machine."""
        return int(psutil.virtual_memory().available)

    def close(self) -> None:
        """End all workers."""
        for group in self._groups:
            group.close()


def _prepared(make: MakeService, seed: int, threads: int, place: Place, emit: Emit) -> Any:
    """A service in a process that begins as the driver does."""
    if threads:
        torch.set_num_threads(threads)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return make(place, emit)
