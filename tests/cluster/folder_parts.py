"""Trainer ranks and engine replicas over a model folder, as workers build them; and their processes, used again."""

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tidemill import faults
from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.engine_service import EngineService
from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.trainer_service import TrainerService
from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import Emit, Event
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.weights import EVERY_WEIGHT, Sample
from tidemill.contracts.workers import Place
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import ResidencyError
from tidemill.testing.fakes.device import FakeTenant
from tidemill.testing.spawned import SpawnedGroup

DEADLINES = Deadlines(work=60.0, transition=30.0, control=20.0)


class FolderTrainer(FakeTenant):
    """A rank that has all weights of a folder, and whose phases are numbers that it adds to them."""

    vocabulary = 100
    minibatches = 1
    update = None  # nobody calls it here

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__("trainer", {Part.WEIGHTS: 100, Part.OPTIMIZER: 200}, keeps=Part.ALL)
        self.weights = load_file(folder / "model.safetensors", device=device)

    def weight_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {name: ("F32", tuple(weight.shape)) for name, weight in self.weights.items()}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.gate.check(Part.WEIGHTS, "named_weights")
        yield from self.weights.items()

    def begin(self, phase: str) -> None:
        for weight in self.weights.values():
            weight += float(phase)

    def park(self) -> None:
        pass

    def revive(self) -> None:
        pass


class TouchyEngine(TransformersEngine):
    """Passes fault points as it loads, looks and answers; and has a worn-out cell in one of its weights.

    A weight is worn out in the replica named in the file `worn` of its model folder.
    """

    def __init__(self, *, folder: Path, rank: int, device: str, dtype: Any, max_batch: int, emit: Emit) -> None:
        super().__init__(model=folder, device=device, dtype=dtype, max_batch=max_batch, emit=emit)
        self.worn = folder / f"worn-{rank}"

    def wake_up(self, part: Part) -> Moved:
        faults.point("engine.wake_up")
        if (self.worn.parent / self.worn.name.replace("worn", "full")).exists() and Part.KV_CACHE in part:
            raise ResidencyError("no room for the cache")
        return super().wake_up(part)

    def load_weights(self, tensors: Any) -> None:
        faults.point("engine.load_weights")
        super().load_weights(tensors)

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        if self.worn.exists():
            self._weights.views()[self.worn.read_text()].view(torch.uint8).view(-1)[5] ^= 16
        return super().weight_checksums(sample)

    def publish(self, version: Any) -> None:
        faults.point("engine.publish")
        super().publish(version)

    def generate(self, requests: Any, sampling: Any) -> Any:
        faults.point("engine.generate")
        return super().generate(requests, sampling)


def build_trainer(folder: Path, device: str, place: Place, emit: Emit) -> FolderTrainer:
    return FolderTrainer(folder, device)


def build_engine(folder: Path, device: str, dtype: Any, max_batch: int, place: Place, emit: Emit) -> RolloutEngine:
    random.seed(place.rank)
    torch.set_num_threads(1)
    return TouchyEngine(folder=folder, rank=place.rank, device=device, dtype=dtype, max_batch=max_batch, emit=emit)


class ProbedTrainer(TrainerService):
    """Tells the bytes that PyTorch has on the GPU."""

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()


class ProbedEngine(EngineService):
    """As `ProbedTrainer`."""

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()


class Workers:
    """Makes proxies over `size` processes of a role, which outlive a test unless a fault was armed or they died."""

    def __init__(self, role: str, size: int) -> None:
        self.role, self.size = role, size
        self.events: list[Event] = []
        self.used: list[SpawnedGroup] = []
        self.unused: list[SpawnedGroup] = []

    def engine(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_batch: int = 4,
        faults: str = "",
        deadlines: Deadlines = DEADLINES,
        restarts: int = 0,
    ) -> EngineProxy:
        group = self._group(faults)
        build = functools.partial(build_engine, folder, device, dtype, max_batch)
        group.build(functools.partial(ProbedEngine, build), meet=False)
        told = {"max_batch": max_batch, "restarts": restarts}
        return EngineProxy(group, deadlines=deadlines, emit=self.events.append, **told)

    def trainer(
        self, folder: Path, *, device: str = "cpu", faults: str = "", deadlines: Deadlines = DEADLINES
    ) -> TrainerProxy:
        group = self._group(faults)
        group.build(functools.partial(ProbedTrainer, functools.partial(build_trainer, folder, device)), meet=False)
        return TrainerProxy(group, deadlines=deadlines)

    def _group(self, faults: str) -> SpawnedGroup:
        known = self.unused and not faults
        group = self.unused.pop() if known else SpawnedGroup(self.role, self.size, fault_text=faults)
        (self.used if not faults else self.broken).append(group)
        return group

    @functools.cached_property
    def broken(self) -> list[SpawnedGroup]:
        return []

    def reuse(self) -> None:
        for group in self.used:
            try:
                group.call("stand", deadline=5.0)
                self.unused.append(group)
            except Exception:
                group.close()
        self.used.clear()
        self.events.clear()

    def end(self) -> None:
        for group in self.used + self.unused + self.broken:
            group.close()


def pool() -> Iterator[Callable[[str, int], Workers]]:
    """By role and number: makers whose processes end with the pool."""
    made: dict[tuple[str, int], Workers] = {}
    yield lambda role, size: made.setdefault((role, size), Workers(role, size))
    for workers in made.values():
        workers.end()
