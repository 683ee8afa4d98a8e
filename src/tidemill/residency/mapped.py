"""Device memory whose address outlives it: physical memory is mapped behind a reserved range, and taken away in sleep.

What knows addresses, as a captured CUDA graph or a kernel's table of pointers does, works after a wake as before. The
memory is the driver's own and goes back at once, without emptying PyTorch's cache and without waiting for other work.

Not for sharing: a handle given to another process, or a registration with a network card, would outlive the memory.
Source: CUDA driver API, virtual memory management.
"""

import ctypes
import sys

import torch

from tidemill.compat.cuda_driver import CudaDriverError, allocate, call, tensor_at
from tidemill.units import format_bytes

__all__ = ["MappedMemory", "can_map"]

_VIRTUAL_MEMORY_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def can_map(device: torch.device) -> bool:
    """Whether memory of this device can be mapped; never on a CPU."""
    if device.type != "cuda":
        return False
    torch.cuda.synchronize(device)
    answer, number = ctypes.c_int(), ctypes.c_int(torch.cuda.current_device() if device.index is None else device.index)
    call("cuDeviceGetAttribute", ctypes.byref(answer), ctypes.c_int(_VIRTUAL_MEMORY_SUPPORTED), number)
    return bool(answer.value)


class MappedMemory:
    """`size` bytes on a CUDA device, given at once; raises MemoryError when the device has no room.

    `flat` is all of it, uint8, the same object at the same address for ever. Touched while it is not resident, it
    fails as every bad address does on a GPU: the process can use the device no more.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._device = device
        self._range = _Range(size, device)
        self._range.map()
        self.flat = tensor_at(self._range, self._range.address, size, device)

    @property
    def resident(self) -> bool:
        """Whether the bytes are on the device."""
        return self._range.mapped

    def check_can_free(self) -> None:
        """Nothing outside PyTorch holds such memory."""

    def free(self) -> None:
        """Give the bytes back; work that uses them must be done. Nothing when they are gone."""
        if self._range.mapped:
            self._range.unmap()

    def allocate(self) -> None:
        """Get bytes again, of any contents. Raises MemoryError when the device has no room."""
        if not self._range.mapped:
            self._range.map()


class _Range:
    """A reserved range of addresses and what is mapped behind it; both go with the object."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        where = _Location(_ON_DEVICE, torch.cuda.current_device() if device.index is None else device.index)
        self._properties = _Properties(type=_PINNED, location=where)
        self._access = _Access(location=where, flags=_READ_WRITE)
        step, properties = ctypes.c_size_t(), ctypes.byref(self._properties)
        call("cuMemGetAllocationGranularity", ctypes.byref(step), properties, ctypes.c_int(_MINIMUM))
        self._size = -(-size // step.value) * step.value
        reserved = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        call("cuMemAddressReserve", ctypes.byref(reserved), ctypes.c_size_t(self._size), ctypes.c_size_t(0), none, none)
        self.address = reserved.value
        self.mapped = False

    def map(self) -> None:
        handle = ctypes.c_uint64()
        size, properties = ctypes.c_size_t(self._size), ctypes.byref(self._properties)
        try:
            allocate("cuMemCreate", ctypes.byref(handle), size, properties, ctypes.c_uint64(0))
        except MemoryError as error:
            free = torch.cuda.mem_get_info(self._device)[0]
            raise MemoryError(
                f"{format_bytes(self._size)} do not fit on {self._device}, where {format_bytes(free)} are free"
            ) from error
        try:
            self._map(handle)
        finally:
            call("cuMemRelease", handle)  # what is mapped stays until it is unmapped

    def _map(self, handle: ctypes.c_uint64) -> None:
        address, size = ctypes.c_uint64(self.address), ctypes.c_size_t(self._size)
        call("cuMemMap", address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        try:
            call("cuMemSetAccess", address, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        except CudaDriverError:
            call("cuMemUnmap", address, size)
            raise
        self.mapped = True

    def unmap(self) -> None:
        call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self._size))
        self.mapped = False

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # the process's end frees everything, and the driver may be gone by now
        torch.cuda.synchronize(self._device)
        if self.mapped:
            self.unmap()
        call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self._size))
