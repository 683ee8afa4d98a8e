"""One process for everything: the driver calls the workers directly."""

from pathlib import Path

import psutil
import torch

from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import Emit
from tidemill.contracts.residency import Residency
from tidemill.contracts.trainer import Trainer
from tidemill.contracts.weights import Samples, WeightSync
from tidemill.contracts.workers import BuildEngine, BuildTrainer, Place
from tidemill.errors import ConfigError
from tidemill.weights.direct import DirectWeightSync

__all__ = ["InlineCluster"]


class InlineCluster:
    """Implements `Cluster`: there is only here. `device` is `auto`, `cpu` or `cuda`."""

    shares_devices = True

    def __init__(
        self,
        *,
        device: str,
        emit: Emit,
        ranks: int = 1,
        replicas: int | str = "auto",
        max_batch: int = 0,
        seed: int = 0,
        threads: int = 0,
        transition_deadline: float = 0.0,
        log_folder: Path = Path(),
    ) -> None:
        """Every cluster is given all of these; this process has its seed, threads and output already.

        Raises ConfigError when a GPU is asked for and there is none, and for more processes than this one.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("cannot use run.device = cuda: PyTorch sees no GPU here; set run.device=cpu or auto")
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._emit = emit
        self._check_alone("trainer.ranks", ranks)
        self._check_alone("engine.replicas", replicas)

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self._device

    def trainer(self, build: BuildTrainer, *, ranks: int) -> Trainer:
        """Built at once, in this process. Raises ConfigError for more than one rank."""
        self._check_alone("trainer.ranks", ranks)
        return build(Place(device=self._device), self._emit)

    def engine(self, build: BuildEngine, *, replicas: int) -> RolloutEngine:
        """Built at once, in this process. Raises ConfigError for more than one replica."""
        self._check_alone("engine.replicas", replicas)
        return build(Place(device=self._device), self._emit)

    def weight_sync(self, residency: Residency, emit: Emit, *, samples: Samples) -> WeightSync:
        """Weights are copied straight into the engine."""
        return DirectWeightSync(residency=residency, emit=emit, samples=samples, words=self._device == "cuda")

    def park_groups(self, parks: bool) -> None:
        """One process has none."""

    def free_bytes(self) -> int:
        """Of the one device."""
        if self._device == "cuda":
            return int(torch.cuda.mem_get_info()[0])
        return int(psutil.virtual_memory().available)

    def close(self) -> None:
        """Nothing was started."""

    def _check_alone(self, path: str, count: int | str) -> None:
        if isinstance(count, int) and count > 1:
            raise ConfigError(
                f'cannot use {path} = {count} with cluster.use = "inline", one process; use cluster.use = "ray"'
            )
