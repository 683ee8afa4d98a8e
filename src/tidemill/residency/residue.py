"""What this process holds on a GPU besides its tenants, by holder: the part of a device that no sleep gives back.

Asked of the driver (NVML), which counts what no library of this process does: context, communicators, loaded kernels.
Where the driver tells nothing of single processes, only what PyTorch knows is told.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tidemill.residency.leaks import uncounted_bytes

__all__ = ["GROUPS", "NoResidue", "Residue", "residue_of"]

CONTEXT, GROUPS, CACHE, OTHER = "context", "process_groups", "cache", "libraries"


class Residue:
    """Of one device; made before the process takes memory there, a model's or a library's: the first is the context."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._device = device
        self._held: dict[str, int] = {}
        self._process = _Process(device)
        self._held[CONTEXT] = max(0, self._process.bytes() - torch.cuda.memory_reserved(device))

    @contextmanager
    def holding(self, holder: str) -> Iterator[None]:
        """What the block takes from the device, besides tensors, is `holder`'s; what it gives back is so no more."""
        before = self._outside()
        try:
            yield
        finally:
            grown = self._held.get(holder, 0) + self._outside() - before
            self._held[holder] = max(0, grown)

    def left(self) -> Mapping[str, int]:
        """Bytes by holder."""
        cache = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        known = {**self._held, CACHE: cache}
        if not self._process.known:
            return {CACHE: cache}
        rest = self._outside() - uncounted_bytes(self._device) - sum(self._held.values())
        return {**known, OTHER: max(0, rest)}

    def _outside(self) -> int:
        """Bytes of this process that are no tensor's."""
        return self._process.bytes() - torch.cuda.memory_reserved(self._device)


class _Process:
    """This process as the driver sees it."""

    def __init__(self, device: torch.device) -> None:
        self._handle = _nvml_handle(device)
        self.known = self._find() is not None

    def bytes(self) -> int:
        """Device memory that it holds, all in all; 0 when the driver does not say."""
        return self._find() or 0

    def _find(self) -> int | None:
        if self._handle is None:
            return None
        nvml, handle = self._handle
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid():
                return process.usedGpuMemory  # type: ignore[no-any-return]
        return None  # another name space of processes, in a container


def _nvml_handle(device: torch.device) -> tuple[Any, Any] | None:
    """The NVML library and its handle of `device`; None where there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None


class NoResidue:
    """Of a CPU, where memory that is given back is simply free."""

    @contextmanager
    def holding(self, holder: str) -> Iterator[None]:
        """Nothing is taken."""
        yield

    def left(self) -> Mapping[str, int]:
        """Nothing is left."""
        return {}


_known: dict[torch.device, Residue | NoResidue] = {}


def residue_of(device: torch.device) -> Residue | NoResidue:
    """The one of this process for `device`."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _known:
        _known[device] = Residue(device) if device.type == "cuda" else NoResidue()
    return _known[device]
