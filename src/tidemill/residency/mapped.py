"""Device memory whose address outlives it: physical memory is mapped behind a reserved range, and taken away in sleep.

What knows addresses, as a captured CUDA graph or a kernel's table of pointers does, works after a wake as before. The
memory is the driver's own. What is freed goes back together, at `give_back` or when the device is full: many ranges at
once take the driver half the time, and what is asked for again meanwhile costs nothing.

Not for sharing: a handle given to another process, or a registration with a network card, would outlive the memory.
Source: CUDA driver API, virtual memory management.
"""

import ctypes
import functools
import sys
import threading

import torch

from tidemill.compat.cuda_driver import CudaDriverError, allocate, call, tensor_at
from tidemill.units import GIB, format_bytes

__all__ = ["MappedMemory", "can_map", "give_back"]

_VIRTUAL_MEMORY_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0
# Of addresses, reserved at once: neighbours can be unmapped together. Addresses are not memory.
_BLOCK = 512 * GIB


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


@functools.cache
def can_map(device: torch.device) -> bool:
    """Whether memory of this device can be mapped; never on a CPU."""
    if device.type != "cuda":
        return False
    torch.cuda.synchronize(device)
    answer, number = ctypes.c_int(), ctypes.c_int(_number(device))
    call("cuDeviceGetAttribute", ctypes.byref(answer), ctypes.c_int(_VIRTUAL_MEMORY_SUPPORTED), number)
    return bool(answer.value)


class MappedMemory:
    """`size` bytes on a CUDA device, given at once; raises MemoryError when the device has no room.

    `flat` is all of it, uint8, the same object at the same address for ever. Touched while it is not resident, it
    fails as every bad address does on a GPU: the process can use the device no more.
    """

    counted = False

    def __init__(self, size: int, device: torch.device) -> None:
        self._range = _Range(size, _of(device))
        self._range.allocate()
        self.flat = tensor_at(self._range, self._range.address, size, device)

    @property
    def resident(self) -> bool:
        """Whether the bytes are on the device."""
        return self._range.resident

    def check_can_free(self) -> None:
        """Nothing outside PyTorch holds such memory."""

    def free(self) -> None:
        """Let the bytes go, with the next `give_back`; work that uses them must be done. Nothing when they are gone."""
        self._range.free()

    def allocate(self) -> None:
        """Get bytes again, of any contents. Raises MemoryError when the device has no room."""
        self._range.allocate()


def give_back(device: torch.device) -> None:
    """Give to the device what was freed on it."""
    if (known := _devices.get(_number(device))) is not None:
        known.give_back()


class _Device:
    """Addresses and memory of one device."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self.device = device
        self.lock = threading.RLock()
        self.freed: set[_Range] = set()
        where = _Location(_ON_DEVICE, _number(device))
        self._properties = _Properties(type=_PINNED, location=where)
        self._access = _Access(location=where, flags=_READ_WRITE)
        step, properties = ctypes.c_size_t(), ctypes.byref(self._properties)
        call("cuMemGetAllocationGranularity", ctypes.byref(step), properties, ctypes.c_int(_MINIMUM))
        self._step = step.value
        self._unused: dict[int, list[int]] = {}
        self._next = self._end = 0

    def rounded(self, size: int) -> int:
        """Up to what can be mapped."""
        return -(-size // self._step) * self._step

    def addresses(self, size: int) -> int:
        """The first of so many, behind those given last where they are new."""
        with self.lock:
            if self._unused.get(size):
                return self._unused[size].pop()
            if self._next + size > self._end:
                block, start, none = max(_BLOCK, size), ctypes.c_uint64(), ctypes.c_uint64(0)
                call("cuMemAddressReserve", ctypes.byref(start), ctypes.c_size_t(block), ctypes.c_size_t(0), none, none)
                self._next, self._end = start.value, start.value + block
            self._next += size
            return self._next - size

    def take_addresses(self, address: int, size: int) -> None:
        """They are used no more."""
        with self.lock:
            self._unused.setdefault(size, []).append(address)

    def memory(self, size: int) -> ctypes.c_uint64:
        """A handle of new memory. Raises MemoryError when even with all that was freed there is not enough."""
        handle = ctypes.c_uint64()
        wanted = (ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._properties), ctypes.c_uint64(0))
        try:
            try:
                call("cuMemCreate", *wanted)
            except CudaDriverError:
                self.give_back()
                allocate("cuMemCreate", *wanted)
        except MemoryError as error:
            free = torch.cuda.mem_get_info(self.device)[0]
            raise MemoryError(
                f"{format_bytes(size)} do not fit on {self.device}, where {format_bytes(free)} are free"
            ) from error
        return handle

    def map(self, address: int, size: int, handle: ctypes.c_uint64) -> None:
        """Lay the memory behind the addresses."""
        where, count = ctypes.c_uint64(address), ctypes.c_size_t(size)
        call("cuMemMap", where, count, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        try:
            call("cuMemSetAccess", where, count, ctypes.byref(self._access), ctypes.c_size_t(1))
        except CudaDriverError:
            call("cuMemUnmap", where, count)
            raise

    def give_back(self) -> None:
        """Unmap what was freed, neighbours together, then let the memory go."""
        with self.lock:
            freed, self.freed = sorted(self.freed, key=lambda each: each.address), set()
            if not freed:
                return
            torch.cuda.synchronize(self.device)
            start, end = freed[0].address, freed[0].address
            for each in freed:
                if each.address != end:
                    call("cuMemUnmap", ctypes.c_uint64(start), ctypes.c_size_t(end - start))
                    start = each.address
                end = each.address + each.size
            call("cuMemUnmap", ctypes.c_uint64(start), ctypes.c_size_t(end - start))
            for each in freed:
                each.drop()


class _Range:
    """Addresses, and the memory behind them when there is some: resident, or freed and not given back yet."""

    def __init__(self, size: int, device: _Device) -> None:
        self._handle: ctypes.c_uint64 | None = None
        self.resident = False
        self._on = device
        self.size = device.rounded(size)
        self.address = device.addresses(self.size)

    def allocate(self) -> None:
        with self._on.lock:
            if self._handle is None:
                handle = self._on.memory(self.size)
                try:
                    self._on.map(self.address, self.size, handle)
                except CudaDriverError:
                    call("cuMemRelease", handle)
                    raise
                self._handle = handle
            self._on.freed.discard(self)
            self.resident = True

    def free(self) -> None:
        with self._on.lock:
            if self.resident:
                self.resident = False
                self._on.freed.add(self)

    def drop(self) -> None:
        """The memory, which is unmapped."""
        if self._handle is not None:
            call("cuMemRelease", self._handle)
            self._handle = None

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # the process's end frees everything, and the driver may be gone by now
        if self._handle is not None:
            torch.cuda.synchronize(self._on.device)
            call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
            self.drop()
        self._on.take_addresses(self.address, self.size)


_devices: dict[int, _Device] = {}


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _of(device: torch.device) -> _Device:
    number = _number(device)
    if number not in _devices:
        _devices[number] = _Device(torch.device("cuda", number))
    return _devices[number]
