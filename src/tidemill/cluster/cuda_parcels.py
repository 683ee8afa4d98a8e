"""Weights handed to another process on the same GPU: a buffer that is copied from where it lies.

Only these buffers are shared, never a weight: a handle must not outlive the memory behind it, and a tenant's memory
goes with its sleep. A parcel's receiver copies, waits for the copy and lets go before it answers, so that an answer
means that the buffer may be written again. Two buffers are used in turn: one is filled while the other is read.

The buffers come from the CUDA driver, not from PyTorch's allocator: that one counts readers by itself, keeps a buffer
that was read more than once for ever, and has memory (expandable segments) that cannot be shared at all.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tidemill.compat import cuda_driver
from tidemill.errors import WeightSyncError
from tidemill.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SharedBuffer", "SharedStaging", "opened"]

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag there is


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


@dataclass(frozen=True, kw_only=True)
class SharedBuffer:
    """What another process opens a buffer by; `used` bytes of it are written."""

    used: int
    handle: bytes


class SharedStaging:
    """A ring of two buffers of `size` bytes on the device of the first weight."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._slots: list[_Slot] = []
        self._turn = 1

    def buffer(self, device: torch.device) -> "Tensor":
        """The buffer whose turn it is. Its last reader must have let go."""
        self._turn = 1 - self._turn
        if self._turn == len(self._slots):
            self._slots.append(_Slot(self._size, device))
        return self._slots[self._turn].flat

    def payload(self, used: int) -> object:
        """The way to the first `used` bytes; everything queued on the device is done first."""
        if not used:
            return SharedBuffer(used=0, handle=b"")
        slot = self._slots[self._turn]
        torch.cuda.synchronize(slot.flat.device)
        return SharedBuffer(used=used, handle=slot.handle)

    def close(self) -> None:
        """Free both. Readers have let go by now, or their processes are gone."""
        while self._slots:
            self._slots.pop().free()


class _Slot:
    """One buffer: `flat` is all of it, uint8; nobody may hold a view of it when it is freed."""

    def __init__(self, size: int, device: torch.device) -> None:
        # Makes PyTorch's context the thread's own, which the driver's calls refer to.
        torch.cuda.synchronize(device)
        self._address = _allocated(size, device)
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._address))
        self.handle = bytes(handle.reserved)
        self.flat = cuda_driver.tensor_at(self, self._address, size, device)

    def free(self) -> None:
        device = self.flat.device
        del self.flat
        torch.cuda.synchronize(device)
        _call("cuMemFree_v2", ctypes.c_uint64(self._address))


@contextlib.contextmanager
def opened(shared: SharedBuffer) -> "Iterator[Tensor]":
    """The written bytes as they lie on the other process's side, on this process's GPU, flat uint8, for the block.

    Nothing of it may be kept: at the block's end its copies are waited for, and the memory is let go.
    """
    if not shared.used:
        yield torch.empty(0, dtype=torch.uint8, device="cuda")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize(device)
    address = ctypes.c_uint64()
    handle = _Handle((ctypes.c_ubyte * 64).from_buffer_copy(shared.handle))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    try:
        yield cuda_driver.tensor_at(shared, address.value, shared.used, device)
    finally:
        torch.cuda.synchronize(device)
        _call("cuIpcCloseMemHandle", address)


def _allocated(size: int, device: torch.device) -> int:
    address = ctypes.c_uint64()
    try:
        cuda_driver.allocate("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    except MemoryError as error:
        raise WeightSyncError(
            f"cannot hand weights to the engine: {format_bytes(size)} of {device} are needed to pass them through, and "
            "are not free; lower residency.budget, which leaves no room for it"
        ) from error
    return int(address.value)


def _call(name: str, *arguments: Any) -> None:
    """Call the CUDA driver. Raises WeightSyncError when it refuses."""
    try:
        cuda_driver.call(name, *arguments)
    except cuda_driver.CudaDriverError as error:
        raise WeightSyncError(f"cannot hand weights over on the GPU: {error}") from error
