"""Ways to give device memory up and get it back, each over the same live bytes."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.offload.cases import Case, Memory, fingerprint, make
from tidemill.contracts.footprint import Part
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.units import MIB

__all__ = ["ARMS", "Arm", "Settings", "Tidemill", "arms_on", "build", "cycles_of"]

Settings = tuple[Case, str, str]
"""The case, the model folder and the address at which ranks meet; only a real trainer needs the latter two."""


class Arm(Protocol):
    """One way. It is awake when it is made."""

    @property
    def bytes(self) -> int:
        """Live bytes."""
        ...

    def sleep(self, cycle: int) -> None:
        """Give the device memory up, and keep the contents."""
        ...

    def wake(self) -> None:
        """Get it back."""
        ...

    def kept(self) -> float:
        """Asleep: bytes that it knows to be on the device; nan when it cannot tell."""
        ...

    def change(self) -> None:
        """Make the contents other ones."""
        ...

    def fingerprint(self) -> list[int]:
        """Of all contents."""
        ...

    def close(self) -> None:
        """Unpin what is pinned."""
        ...


class OfMemory:
    """An arm over tensors that a case made."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.bytes = memory.bytes

    def change(self) -> None:
        """Add one to everything."""
        self.memory.change()

    def fingerprint(self) -> list[int]:
        """Of all tensors; something else when a view came loose."""
        return fingerprint(self.memory.tensors) if self.memory.views_are_views() else []

    def close(self) -> None:
        """Nothing is pinned."""


class Tidemill(OfMemory):
    """The saver that trainers have."""

    def __init__(self, settings: Settings) -> None:
        case, _, _ = settings
        super().__init__(make(case))
        self.saver = HostArenaSaver(device=case.device, page_bytes=64 * MIB, pin=case.device == "cuda")
        for number, tensor in enumerate(self.memory.tensors):
            self.saver.add(f"tensor/{number}", tensor, Part.WEIGHTS)
        for number, view in enumerate(self.memory.views):
            self.saver.add(f"view/{number}", view, Part.WEIGHTS)
        self.saver.freeze()

    def sleep(self, cycle: int) -> None:
        """Under the cycle's number: what is sealed already would not be copied."""
        self.saver.capture(cycle)
        self.saver.release(cycle)

    def wake(self) -> None:
        """All of it."""
        self.saver.restore()

    def kept(self) -> float:
        """By the ledger."""
        return float(self.saver.device_bytes(self.saver.resident_part()))

    def close(self) -> None:
        """Unpin the arena."""
        self.saver.close()


class PerTensor(OfMemory):
    """Each tensor to the host and back by itself; views are not made, they would not survive it."""

    def __init__(self, settings: Settings) -> None:
        case, _, _ = settings
        super().__init__(Memory(make(case).tensors))
        self.device = torch.device(case.device)
        self.hosts: list[torch.Tensor] = []

    def sleep(self, cycle: int) -> None:
        """On a CPU a copy is made where `.cpu()` would make none."""
        for tensor in self.memory.tensors:
            self.hosts.append(tensor.cpu() if self.device.type == "cuda" else tensor.clone())
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """In the same order."""
        for tensor, host in zip(self.memory.tensors, self.hosts, strict=True):
            tensor.data = host.to(self.device) if self.device.type == "cuda" else host.clone()
        self.hosts.clear()

    def kept(self) -> float:
        """What the tensors hold."""
        return float(sum(tensor.untyped_storage().nbytes() for tensor in self.memory.tensors))


class MemorySaver(OfMemory):
    """torch_memory_saver: addresses stay, the memory behind them goes. CUDA only."""

    def __init__(self, settings: Settings, *, retain: bool) -> None:
        from torch_memory_saver import torch_memory_saver as saver

        self.saver: Any = saver
        saver.hook_mode = "torch"
        if retain:
            saver.retain_cpu_backup = True
        case, _, _ = settings
        with saver.region(tag="case", enable_cpu_backup=True):
            memory = make(case)
        super().__init__(memory)

    def sleep(self, cycle: int) -> None:
        """Of this tag."""
        self.saver.pause("case")

    def wake(self) -> None:
        """Of this tag."""
        self.saver.resume("case")

    def kept(self) -> float:
        """It keeps no account."""
        return float("nan")


ARMS: dict[str, Callable[[Settings], Arm]] = {
    "tidemill": Tidemill,
    "tms-retained": lambda settings: MemorySaver(settings, retain=True),
    "tms-default": lambda settings: MemorySaver(settings, retain=False),
    "per-tensor-cpu": PerTensor,
}

# Cycles at most, of arms that take seconds each: enough for the third and the fourth.
_SLOW = {"tms-default": 4, "per-tensor-cpu": 4}


def arms_on(device: str) -> list[str]:
    """Names of the arms that can run there, in the order in which they take turns."""
    if device == "cpu":
        return ["tidemill", "per-tensor-cpu"]
    there = importlib.util.find_spec("torch_memory_saver") is not None
    return [name for name in ARMS if there or not name.startswith("tms-")]


def cycles_of(arm: str, cycles: int, device: str) -> int:
    """How often it sleeps."""
    return min(cycles, _SLOW.get(arm, cycles)) if device == "cuda" else cycles


def build(arm: str, settings: Settings) -> tuple[Arm, float]:
    """The arm, awake, and the seconds that it took to make it with its contents."""
    began = time.perf_counter()
    if arm == "tidemill" and settings[0].name == "fsdp":
        # Processes that need no model start sooner without its libraries.
        from benchmarks.offload.trainer_arm import Trainer

        return Trainer(settings), time.perf_counter() - began
    return ARMS[arm](settings), time.perf_counter() - began
