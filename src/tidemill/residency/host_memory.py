"""Host memory that is there from the first moment, and that copies to and from a device run fast on."""

import contextlib
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tidemill.errors import ResidencyError
from tidemill.planning.machine import available_bytes
from tidemill.units import MIB, format_bytes

__all__ = ["FreeBytes", "MapMemory", "map_pinned", "map_plain", "refuse_pageable"]

MapMemory = Callable[[int], tuple[mmap.mmap, Callable[[], object]]]
FreeBytes = Callable[[], int | None]
"""Bytes of host memory that this process can still get; None where nobody knows."""

_TOUCH_BYTES = 128 * MIB
_THREADS = 16


def map_plain(size: int, *, free_bytes: FreeBytes = available_bytes) -> tuple[mmap.mmap, Callable[[], object]]:
    """`size` bytes of anonymous memory, every page of which was touched, so that nobody else counts on it.

    Raises ResidencyError when the system does not promise them, or has them no more.
    """
    memory = _promised(size)
    _touch(memory, free_bytes)
    return memory, lambda: None


def _promised(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ResidencyError(f"cannot map {format_bytes(size)} of host memory ({error}); free some") from error


def _touch(memory: mmap.mmap, free_bytes: FreeBytes) -> None:
    """Have the system provide every page, by several threads. Raises ResidencyError, and gives all back, when it ends.

    That is asked before each block: other ranks of this host may take their pages at the same moment, and a system or a
    cgroup without memory does not refuse any, it kills.
    """
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    starts, lock = iter(range(0, len(memory), _TOUCH_BYTES)), threading.Lock()

    def touch(_: int) -> None:
        with lock:
            start = next(starts)
            _check_room(len(memory) - start, len(memory), free_bytes())
        whole[start : start + _TOUCH_BYTES : mmap.PAGESIZE].zero_()

    try:
        with ThreadPoolExecutor(max_workers=_THREADS) as pool:
            list(pool.map(touch, range(0, len(memory), _TOUCH_BYTES)))
    except ResidencyError:
        memory.madvise(mmap.MADV_DONTNEED)
        raise


def _check_room(missing: int, size: int, there: int | None) -> None:
    if there is not None and missing > there:
        raise ResidencyError(
            f"cannot get {format_bytes(size)} of host memory for what sleeps: {format_bytes(missing)} are missing, "
            f"{format_bytes(there)} are there, and others on this host take memory too, perhaps ranks of this run; "
            "free host memory, raise its limit, lower residency.spare, or use more ranks on other hosts"
        )


def refuse_pageable(text: str) -> None:
    """Raises ResidencyError."""
    raise ResidencyError(text)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def map_pinned(
    size: int,
    *,
    free_bytes: FreeBytes = available_bytes,
    warn: Callable[[str], None] = refuse_pageable,
    runtime: Callable[[], Any] = _cuda_runtime,
) -> tuple[mmap.mmap, Callable[[], object]]:
    """As `map_plain`, in huge pages, and registered with CUDA in one call.

    In this order: registering pages that exist runs ten times as fast as allocating pinned memory. Memory that cannot
    be registered is pageable, which `warn` is told of; by default that is a ResidencyError.
    """
    memory = _promised(size)
    with contextlib.suppress(OSError):  # a system without huge pages has small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    _touch(memory, free_bytes)
    address, cuda = torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), runtime()
    code = int(cuda.cudaHostRegister(address, size, 0))
    if code == 0:
        # `memory` is named so that it outlives its registration.
        return memory, lambda: (cuda.cudaHostUnregister(address), memory)
    _forget_error()
    warn(
        f"cannot pin {format_bytes(size)} of host memory: cudaHostRegister returned {code}; sleep and wake go on with "
        "pageable memory, at a third to a sixth of the bus (17.8 and 9.1 GB/s were measured where pinned memory gives "
        "55): raise the limit of locked memory (ulimit -l), or free host memory"
    )
    return memory, lambda: None


def _forget_error() -> None:
    """The runtime keeps its last error for whoever asks next: torch, after its next kernel, which would then fail."""
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
