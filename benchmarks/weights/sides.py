"""A trainer that only has weights, and an engine that only takes them: what a hand-over is measured between."""

import math
import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.shapes import parameter_shapes
from tidemill.cluster.engine_service import EngineService
from tidemill.cluster.trainer_service import TrainerService
from tidemill.contracts.events import Emit
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample
from tidemill.contracts.workers import Place
from tidemill.errors import WeightSyncError
from tidemill.testing.fakes.device import FakeTenant
from tidemill.weights.checksum import sampled_checksums
from tidemill.weights.elements import stored_name, torch_dtype
from tidemill.weights.grouped_copies import GroupedCopies
from tidemill.weights.parcel import aligned

__all__ = [
    "Case",
    "ProbedReceiver",
    "ProbedSource",
    "Receiver",
    "Source",
    "make_receiver",
    "make_source",
]

_SMALL_TENSORS = 10_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's shape by name, or `small`: 10,000 tensors of 64 to 131,072 elements, log-uniform; 8 to 512 on a CPU.

    `source` and `target` are the dtypes of trainer and engine.
    """

    name: str
    device: str
    source: str
    target: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every weight, by name."""
        if self.name == "small":
            dice = random.Random(0)
            low, high = (6, 17) if self.device == "cuda" else (3, 9)
            return {f"weight.{n}": (int(2 ** dice.uniform(low, high)),) for n in range(_SMALL_TENSORS)}
        return {f"weight.{n}": shape for n, shape in enumerate(parameter_shapes(self.name))}

    def elements(self) -> int:
        """Of all weights."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def nbytes(self) -> int:
        """Bytes of all weights in the engine's dtype: what has to arrive."""
        return self.elements() * torch_dtype(self.target).itemsize


class Source(FakeTenant):
    """Weights of one rank, each in memory of its own; a phase's name is a number that is added to all of them."""

    vocabulary, minibatches = 100, 1
    update = None  # nobody calls it here

    def __init__(self, case: Case) -> None:
        dtype = torch_dtype(case.source)
        torch.manual_seed(0)
        self.weights = {
            name: torch.empty(shape, dtype=dtype, device=case.device).normal_() for name, shape in case.shapes().items()
        }
        size = sum(weight.nbytes for weight in self.weights.values())
        super().__init__("trainer", {Part.WEIGHTS: size}, keeps=Part.ALL)
        self.awake = Part.ALL

    def weight_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {name: (stored_name(weight.dtype), tuple(weight.shape)) for name, weight in self.weights.items()}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.gate.check(Part.WEIGHTS, "named_weights")
        return iter(self.weights.items())

    def begin(self, phase: str) -> None:
        torch._foreach_add_(list(self.weights.values()), float(phase))

    def park(self) -> None:
        pass

    def revive(self) -> None:
        pass


class Receiver(FakeTenant):
    """Weights as views of one slab, as an engine's are; strict in names, shapes and versions."""

    def __init__(self, case: Case) -> None:
        self.dtype = case.target
        dtype, places, end = torch_dtype(case.target), {}, 0
        for name, shape in case.shapes().items():
            places[name] = (end, shape)
            end = aligned(end + math.prod(shape) * dtype.itemsize)
        self.slab = torch.zeros(end, dtype=torch.uint8, device=case.device)
        self.views = {
            name: self.slab[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (start, shape) in places.items()
        }
        super().__init__("engine", {Part.WEIGHTS: end}, keeps=Part.NONE)
        self.awake = Part.ALL
        self.arrived: set[str] = set()
        self.version: PolicyVersion | None = None

    def begin_update(self) -> None:
        self.arrived.clear()
        self.version = None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with GroupedCopies() as copies:
            for name, tensor in tensors:
                view = self.views[name]
                if name in self.arrived or tensor.shape != view.shape:
                    raise WeightSyncError(f"{name} came twice, or in another shape")
                copies.add(view, tensor)
                self.arrived.add(name)

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        return sampled_checksums(self.views, sample)

    def publish(self, version: PolicyVersion) -> None:
        if len(self.arrived) != len(self.views):
            raise WeightSyncError(f"{len(self.views) - len(self.arrived)} weights did not come")
        self.version = version


def make_source(case: Case, place: Place, emit: Emit) -> Any:
    """As a worker builds it."""
    return Source(case)


def make_receiver(case: Case, place: Place, emit: Emit) -> Any:
    """As a worker builds it."""
    return Receiver(case)


class ProbedSource(TrainerService):
    """Sees how much of the GPU is free, all the time between two questions."""

    _ended: threading.Event | None = None

    def watch(self) -> int:
        """Begin; bytes free now."""
        torch.cuda.empty_cache()
        ended = self._ended = threading.Event()
        self._least = torch.cuda.mem_get_info()[0]

        def look() -> None:
            while not ended.wait(0.0005):
                self._least = min(self._least, torch.cuda.mem_get_info()[0])

        self._looking = threading.Thread(target=look)
        self._looking.start()
        return int(self._least)

    def watched(self) -> int:
        """End; the least that was free."""
        assert self._ended is not None
        self._ended.set()
        self._looking.join()
        return int(self._least)


class ProbedReceiver(EngineService):
    """As `EngineService`: it has nothing to tell besides."""
